"""What SLAMB's sparse communication costs and saves, beside LAMB with DistributedDataParallel and its communication hooks.

python -m benchmarks.communication --quick                   # at most five minutes on two cores
python -m benchmarks.communication --json communication.json # more rounds, ResNet-20 and ResNet-50 on the networks too

Compute: a step of each optimizer in one process on one thread, with fixed gradients. SLAMB does its sparse steps as one of two
ranks, with the collective left out.
Networks: two gloo ranks (--ranks), one thread each, take a step without forward and backward (two_ranks.py), on the loopback
device and between network namespaces at 1 Gbit/s and 100 Mbit/s (slow_network.py; Linux and root). Bytes are what rank 0's
network device has sent, the headers of its packets (up to 32 KiB on a slow network, 64 KiB on loopback) included; payload is what a
rank gave to all_reduce. SLAMB's mean of the weights, once in 50 steps, is measured apart: 'with weights' are a step and a fiftieth
of it. Where there is a backward pass, DDP hides behind it what it sends, which SLAMB does not.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import timm.optim.lamb
import torch
from torch import Tensor, nn

from backends.device import keep_freed_memory
from benchmarks import bench, slow_network
from benchmarks.naive_slamb import NaiveSLAMB
from benchmarks.stepping import Side
from benchmarks.two_ranks import MEAN_OF_WEIGHTS
from models import resnet
from optimizers.lamb import LAMB
from slamb import SLAMB

# Bars, all for ResNet-110 at k = 0.1.
BLOCK, RANDOM = (
    1.4,
    2.6,
)  # x foreach Adam's step: rows of 64 are gathered as fast as read, single elements are not
NAIVE_BLOCK, NAIVE_RANDOM = 10, 7  # x our step: no masks, no loop over tensors
SENT = {
    "fp32": 1.05,
    "bf16": 0.53,
}  # MB a step: a tenth of the large tensors, all of the small ones, and headers
OF_DDP, OF_BF16 = (
    0.25,
    0.45,
)  # of the step at 100 Mbit/s with bf16 on the wire: the bytes are 0.08 and 0.15, the rest is compute
LOOPBACK = 1.0  # of DDP's step: where bytes are nearly free, the cost of choosing them must pay too

ARCHS = {"ResNet-20": "resnet20", "ResNet-110": "resnet110", "ResNet-50": "resnet50"}
JUDGED = "ResNet-110"
NETWORKS = {"loopback": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
ADAM, NAIVE = "Adam (foreach)", "naive SLAMB"
DDP, DDP_BF16 = "DDP + LAMB", "DDP bf16 hook + LAMB"
LOCAL_STEPS = 50  # SLAMB's default
NEVER = 10**9  # steps

# -------------------------------------------------------------------- compute


def without_network(optimizer: Any) -> Any:
    """SLAMB as one of two ranks that always agree."""
    optimizer.averager.size = optimizer.averager.nodes = 2
    optimizer.averager.reduce = lambda values, group: values.mul_(2)
    return optimizer


def naive(model: nn.Module) -> NaiveSLAMB:
    optimizer = NaiveSLAMB(model.parameters(), ranks=2, local_steps=NEVER)
    optimizer.reduce = lambda values: None  # type: ignore[method-assign]
    return optimizer


def slamb(model: nn.Module, selection: str) -> Any:
    return without_network(
        SLAMB(model.parameters(), selection=selection, dense_steps=0, local_steps=NEVER)
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    ADAM: lambda m: torch.optim.Adam(m.parameters(), foreach=True),
    "Adam (fused)": lambda m: torch.optim.Adam(m.parameters(), fused=True),
    "LAMB (ours)": lambda m: LAMB(m.parameters()),
    "LAMB (timm)": lambda m: timm.optim.lamb.Lamb(m.parameters()),
    "SLAMB block": lambda m: slamb(m, "block"),
    "SLAMB random": lambda m: slamb(m, "random"),
    NAIVE: naive,
}


def measure_compute(name: str, rounds: int, leave_out: str = "") -> dict[str, bench.Row]:
    """Print a model's table; its rows are foreach Adam's rate over the optimizer's, so that the ratio is of times."""
    torch.manual_seed(0)
    model = resnet.create_model(ARCHS[name], classes=10, channels=3, image_size=32)
    gradients: list[list[Tensor | None]] = [
        [0.01 * torch.randn_like(p) for p in model.parameters()] for _ in range(3)
    ]
    sides: dict[str, Side] = {}
    for optimizer, make in OPTIMIZERS.items():
        if optimizer != leave_out:
            mine = copy.deepcopy(model)
            sides[optimizer] = Side(mine, make(mine), gradients)
            sides[optimizer].warm_up()
    seconds = bench.take_turns(sides, rounds, {NAIVE})
    rates = {optimizer: [1 / taken for taken in each] for optimizer, each in seconds.items()}
    rows = {
        optimizer: bench.Row(f"{name} {optimizer}", rates[ADAM], rate)
        for optimizer, rate in rates.items()
    }
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"\n{f'{name}, {weights:.2f} M weights':<28} {'ms a step':>10} {'x Adam':>8} {'spread':>14} {'operators':>10}"
    )
    for optimizer, row in rows.items():
        spread, taken = (
            f"{min(row.ratios):.2f}..{max(row.ratios):.2f}",
            1000 / statistics.median(row.peer),
        )
        print(
            f"{optimizer:<28} {taken:>10.2f} {row.ratio:>8.2f} {spread:>14} {sides[optimizer].operators.all:>10}"
        )
    return rows


def compute_bars(rows: dict[str, bench.Row]) -> list[bench.Bar]:
    """From the judged model's rows."""
    block, random, slow = (rows[name] for name in ("SLAMB block", "SLAMB random", NAIVE))

    def over(row: bench.Row) -> float:
        return statistics.median(mine / naive for mine, naive in zip(row.peer, slow.peer))

    return [
        bench.Bar("block of Adam", block.ratio, BLOCK, at_most=True),
        bench.Bar("random of Adam", random.ratio, RANDOM, at_most=True),
        bench.Bar("naive of block", over(block), NAIVE_BLOCK),
        bench.Bar("naive of random", over(random), NAIVE_RANDOM),
    ]


# -------------------------------------------------------------------- networks


def amortised(found: dict[str, Any], name: str, key: str) -> list[float]:
    """Seconds or bytes of a method's step in each round, with SLAMB's share of its mean of the weights."""
    own = found["methods"][name][key]
    if name == MEAN_OF_WEIGHTS or "SLAMB" not in name:
        return own
    return [
        step + mean / LOCAL_STEPS for step, mean in zip(own, found["methods"][MEAN_OF_WEIGHTS][key])
    ]


def measure_network(
    name: str, network: str, ranks: int, quick: bool
) -> tuple[dict[str, Any], dict[str, bench.Row]]:
    """Print a model's table on a network; its rows are the rate of DDP over the method's, so that the ratio is of times.

    Raises:
        slow_network.Unavailable: there is no such network here.
    """
    rate = NETWORKS[network]
    rounds, seconds = ("3", "0.3") if quick else ("5", "0.5")
    with slow_network.joined(rate, ranks) if rate else slow_network.loopback(ranks) as places:
        found = slow_network.run(
            places, ["-m", "benchmarks.two_ranks", ARCHS[name], rounds, seconds]
        )
    steps = {method: amortised(found, method, "seconds") for method in found["methods"]}
    rates = {method: [1 / taken for taken in each] for method, each in steps.items()}
    rows = {
        method: bench.Row(f"{name} {network} {method}", rates[DDP], rate)
        for method, rate in rates.items()
    }
    title = f"{name}, {ranks} x {network} ({found['rate'] / 1e6:.0f} Mbit/s)"
    times = f"{'ms a step':>10} {'with weights':>13} {'x DDP':>7} {'spread':>12}"
    columns = f"{times} {'kB sent':>9} {'with weights':>13} {'payload':>9}"
    print(f"\n{title:<40} {columns}")
    for method, row in rows.items():
        facts, spread = found["methods"][method], f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        taken, whole = (
            1000 * statistics.median(each) for each in (facts["seconds"], steps[method])
        )
        sent, all_sent = (
            statistics.median(each) / 1e3
            for each in (facts["sent_bytes"], amortised(found, method, "sent_bytes"))
        )
        times, sizes = (
            f"{taken:>10.1f} {whole:>13.1f} {row.ratio:>7.2f} {spread:>12}",
            f"{sent:>9.1f} {all_sent:>13.1f}",
        )
        print(f"{method:<40} {times} {sizes} {facts['payload_bytes'] / 1e3:>9.1f}")
    return found, rows


def network_bars(
    network: str, found: dict[str, Any], rows: dict[str, bench.Row]
) -> list[bench.Bar]:
    """From the judged model on one of the networks."""
    name = "SLAMB block k=0.1 {}".format
    if network == "loopback":
        return [
            bench.Bar(
                f"loopback step of DDP, {wire}", rows[name(wire)].ratio, LOOPBACK, at_most=True
            )
            for wire in SENT
        ]
    if network != "100 Mbit/s":
        return []
    of_bf16 = statistics.median(
        peer / ours for ours, peer in zip(rows[name("bf16")].peer, rows[DDP_BF16].peer)
    )
    sent = {
        wire: statistics.median(found["methods"][name(wire)]["sent_bytes"]) / 1e6 for wire in SENT
    }
    return [
        *(
            bench.Bar(f"MB sent, {wire}", sent[wire], wanted, at_most=True)
            for wire, wanted in SENT.items()
        ),
        bench.Bar("100 Mbit/s step of DDP", rows[name("bf16")].ratio, OF_DDP, at_most=True),
        bench.Bar("100 Mbit/s step of DDP bf16 hook", of_bf16, OF_BF16, at_most=True),
    ]


def main() -> int:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(2, 3, 4),
        default=2,
        help="on the networks; the bars are for two (default 2)",
    )
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    machine = bench.machine(torch.device("cpu"), ("torch", "timm"))
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    networks: dict[str, Any] = {}
    for name in ARCHS:
        judged = name == JUDGED
        rounds = (15 if args.quick else 41) if name != "ResNet-50" else (5 if args.quick else 15)
        compute = measure_compute(name, rounds, leave_out="" if judged or not args.quick else NAIVE)
        rows += compute.values()
        bars += compute_bars(compute) if judged else []
    for network in NETWORKS:
        for name in [JUDGED] if args.quick else ARCHS:
            try:
                found, timed = measure_network(name, network, args.ranks, args.quick)
            except slow_network.Unavailable as reason:
                print(f"\n{network} left out: {reason}")
                break
            networks[f"{name} {network}"] = found
            rows += timed.values()
            bars += (
                network_bars(network, found, timed) if name == JUDGED and args.ranks == 2 else []
            )
    seconds = time.perf_counter() - started
    print(
        "\nx Adam, x DDP: median over the rounds of the ratio of times; spread: smallest and largest"
    )
    print(
        f"with weights: a step, and 1/{LOCAL_STEPS} of SLAMB's mean of the weights; sent: by rank 0's device, with headers"
    )
    print(f"{seconds:.0f} s")
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        took=seconds,
        quick=args.quick,
        ranks=args.ranks,
        networks=networks,
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(main())
