"""What SLAMB's sparse communication costs and saves, compared with LAMB and DDP's comm hooks.

python -m benchmarks.communication --quick                   # at most five minutes on two cores
python -m benchmarks.communication --json communication.json # more rounds, more models

Compute: a step of each optimizer in one process on one thread, with fixed gradients. SLAMB takes
its sparse steps as one of two ranks, without the collective.

Networks: two gloo ranks (--ranks), one thread each, take a step without forward and backward
(two_ranks.py), on the loopback device and between network namespaces at 1 Gbit/s and 100 Mbit/s
(slow_network.py; Linux and root). Bytes are those that rank 0's network device has sent, including
the headers of its packets (up to 32 KiB on a slow network, 64 KiB on loopback); payload are those
that a rank gave to all_reduce and all_gather_into_tensor. SLAMB averages the weights once in 50
steps; this is measured separately, and 'with weights' is a step and a fiftieth of it. In training,
DDP overlaps its communication with the backward pass, which SLAMB and the hooks that round do not.
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
from benchmarks.stepping import Side
from benchmarks.two_ranks import MEAN_OF_WEIGHTS
from errors import exit_code
from models import image_models
from optimizers.lamb import LAMB
from slamb import SLAMB

# Bars, all for ResNet-110 at k = 0.1 but for one.
# Times of foreach Adam's step: rows of 64 are gathered as fast as read, single elements are not.
BLOCK, RANDOM = 1.1, 2.6
# The same for ResNet-50, whose tensors fit no cache: one pass over memory for moments and updates.
BLOCK_RESNET50 = 1.5
# MB sent per step: a tenth of the large tensors, all of the small ones, and headers.
SENT = {"fp32": 0.735, "bf16": 0.37}
# Share of DDP's step at 100 Mbit/s, DDP in fp32 and in bf16, SLAMB sending bf16: the shares of the
# bytes are 0.08 and 0.15, the rest is compute.
OF_DDP, OF_BF16 = 0.25, 0.45
# Share of DDP's step on loopback: selecting must pay off even where bytes cost nearly nothing.
LOOPBACK = 1.0

ARCHS = {"ResNet-20": "resnet20", "ResNet-110": "resnet110", "ResNet-50": "resnet50"}
JUDGED = "ResNet-110"
NETWORKS = {"loopback": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
ADAM = "Adam (foreach)"
DDP, DDP_BF16 = "DDP + LAMB", "DDP bf16 hook + LAMB"
LOCAL_STEPS = 50  # SLAMB's default
NEVER = 10**9  # steps; beyond the end of any measurement

# -------------------------------------------------------------------- compute


def without_network(optimizer: Any) -> Any:
    """Make SLAMB one of two ranks with equal values, whose all_reduce needs no network."""
    optimizer.averager.size = optimizer.averager.nodes = 2
    optimizer.averager.all_reduce = lambda values, group: values.mul_(2)
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
}


def measure_compute(name: str, rounds: int, *, deadline: float) -> dict[str, bench.Row]:
    """Print a model's table and return its rows; `deadline` is that of `bench.take_turns`.

    A row's ratio is foreach Adam's rate over the optimizer's: the optimizer's time in units of
    Adam's.
    """
    torch.manual_seed(0)
    model = image_models.create_model(ARCHS[name], classes=10, channels=3, image_size=32)
    gradients: list[list[Tensor | None]] = [
        [0.01 * torch.randn_like(p) for p in model.parameters()] for _ in range(3)
    ]
    sides: dict[str, Side] = {}
    for optimizer, make in OPTIMIZERS.items():
        mine = copy.deepcopy(model)
        sides[optimizer] = Side(mine, make(mine), gradients)
        sides[optimizer].warm_up()
    seconds = bench.take_turns(sides, rounds, deadline=deadline)
    rates = {optimizer: [1 / taken for taken in each] for optimizer, each in seconds.items()}
    rows = {
        optimizer: bench.Row(f"{name} {optimizer}", rates[ADAM], rate)
        for optimizer, rate in rates.items()
    }
    weights = sum(p.numel() for p in model.parameters()) / 1e6
    title = f"{name}, {weights:.2f} M weights, {len(rows[ADAM].ours)} rounds"
    columns = f"{'ms/step':>10} {'x Adam':>8} {'spread':>14} {'operators':>10}"
    print(f"\n{title}\n{'':<28} {columns}")
    for optimizer, row in rows.items():
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        milliseconds = 1000 / statistics.median(row.peer)
        operators = sides[optimizer].operators.all
        times = f"{milliseconds:>10.2f} {row.ratio:>8.2f} {spread:>14}"
        print(f"{optimizer:<28} {times} {operators:>10}")
    return rows


def compute_bars(name: str, rows: dict[str, bench.Row]) -> list[bench.Bar]:
    """Return the bars of an optimizer step, from the rows of a model."""
    if name == "ResNet-50":
        ratio = rows["SLAMB block"].ratio
        return [bench.Bar("block of Adam, ResNet-50", ratio, BLOCK_RESNET50, at_most=True)]
    if name != JUDGED:
        return []
    return [
        bench.Bar("block of Adam", rows["SLAMB block"].ratio, BLOCK, at_most=True),
        bench.Bar("random of Adam", rows["SLAMB random"].ratio, RANDOM, at_most=True),
    ]


# -------------------------------------------------------------------- networks


def amortised(results: dict[str, Any], name: str, key: str) -> list[float]:
    """Return seconds or bytes of a step in each round, with a share of SLAMB's weight average."""
    values = results["methods"][name][key]
    if name == MEAN_OF_WEIGHTS or "SLAMB" not in name:
        return values
    means = results["methods"][MEAN_OF_WEIGHTS][key]
    return [value + mean / LOCAL_STEPS for value, mean in zip(values, means)]


def measure_network(
    name: str, network: str, ranks: int, quick: bool
) -> tuple[dict[str, Any], dict[str, bench.Row]]:
    """Print a model's table on a network and return its results and rows.

    A row's ratio is DDP's rate over the method's: the method's time in units of DDP's.

    Raises:
        slow_network.Unavailable: this machine cannot set up such a network.
    """
    rate = NETWORKS[network]
    rounds, seconds = ("3", "0.3") if quick else ("5", "0.5")
    with slow_network.joined(rate, ranks) if rate else slow_network.loopback(ranks) as places:
        results = slow_network.run(
            places, ["-m", "benchmarks.two_ranks", ARCHS[name], rounds, seconds]
        )
    steps = {method: amortised(results, method, "seconds") for method in results["methods"]}
    rates = {method: [1 / taken for taken in each] for method, each in steps.items()}
    rows = {
        method: bench.Row(f"{name} {network} {method}", rates[DDP], rate)
        for method, rate in rates.items()
    }
    title = f"{name}, {ranks} x {network} ({results['rate'] / 1e6:.0f} Mbit/s)"
    times = f"{'ms/step':>10} {'with weights':>13} {'x DDP':>7} {'spread':>12}"
    columns = f"{times} {'kB sent':>9} {'with weights':>13} {'payload':>9}"
    print(f"\n{title:<40} {columns}")
    for method, row in rows.items():
        facts = results["methods"][method]
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        milliseconds = 1000 * statistics.median(facts["seconds"])
        with_weights = 1000 * statistics.median(steps[method])
        sent = statistics.median(facts["sent_bytes"]) / 1e3
        sent_with_weights = statistics.median(amortised(results, method, "sent_bytes")) / 1e3
        times = f"{milliseconds:>10.1f} {with_weights:>13.1f} {row.ratio:>7.2f} {spread:>12}"
        sizes = f"{sent:>9.1f} {sent_with_weights:>13.1f} {facts['payload_bytes'] / 1e3:>9.1f}"
        print(f"{method:<40} {times} {sizes}")
    return results, rows


def network_bars(
    network: str, results: dict[str, Any], rows: dict[str, bench.Row]
) -> list[bench.Bar]:
    """Return the bars of one network, from the results of ResNet-110."""
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
        wire: statistics.median(results["methods"][name(wire)]["sent_bytes"]) / 1e6 for wire in SENT
    }
    return [
        *(
            bench.Bar(f"MB sent, {wire}", sent[wire], target, at_most=True)
            for wire, target in SENT.items()
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
        help="ranks on the networks; the bars are for two (default %(default)s)",
    )
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    machine = bench.machine(torch.device("cpu"), ("torch", "timm"))
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    networks: dict[str, Any] = {}
    # The networks' measurements, of a fixed number of short turns, take more than half of the time.
    budget = bench.Budget(args.quick, 2 * len(ARCHS) + 1)
    for name in ARCHS:
        deadline = budget.next_deadline()
        rounds = (15 if args.quick else 41) if name != "ResNet-50" else (5 if args.quick else 15)
        compute = measure_compute(name, rounds, deadline=deadline)
        rows += compute.values()
        bars += compute_bars(name, compute)
    for network in NETWORKS:
        for name in [JUDGED] if args.quick else ARCHS:
            try:
                results, timed = measure_network(name, network, args.ranks, args.quick)
            except slow_network.Unavailable as reason:
                print(f"\n{network} left out: {reason}")
                break
            networks[f"{name} {network}"] = results
            rows += timed.values()
            if name == JUDGED and args.ranks == 2:
                bars += network_bars(network, results, timed)
    seconds = time.perf_counter() - started
    print("\nx Adam, x DDP: median over the rounds of the ratio of times, spread: min..max")
    print(f"with weights: a step and 1/{LOCAL_STEPS} of SLAMB's average of the weights")
    print("sent: by rank 0's network device, headers included")
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
    sys.exit(exit_code(main))
