"""How training throughput grows with the number of processes, and a model of it that is checked before it predicts.

python -m benchmarks.scaling --quick                                # ResNet-20; at most five minutes on two cores
python -m benchmarks.scaling --json scaling.json                    # also ResNet-110, and four processes
python -m benchmarks.scaling --bandwidth 25e9 --latency 5e-6        # predict for another network, bit/s and seconds too

T = S N e: samples/s of N processes, S those of one while the others wait, e the efficiency. Every process has its own batch (weak
scaling), one thread, and trains as the scripts do (scaling_ranks.py). The communication share is the part of a step that goes when
nothing is sent. Networks as in communication.py.

The model. An all-reduce of B bytes takes 2 (N - 1) latency + 2 (N - 1) / N x B / bandwidth: a ring. A step without sending
is timed, and when in it each all-reduce begins. Those within the backward pass go on beside it, one after the other, and the
last of them is waited for; the others are waited for at once. Latency and bandwidth are fitted to all-reduces of four sizes
between two processes. So no step that sends is part of the fit.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import bench, slow_network
from benchmarks.scaling_ranks import ALONE, EARNEST, METHODS, SILENT

OFF = 0.15  # of a step between processes that have a core each: what the fit leaves out is how they disturb each other

BATCHES = {
    "resnet20": 64,
    "resnet110": 32,
}  # samples a process: a step of about a tenth and a third of a second
NETWORKS = {"loopback": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
FOUR = "resnet20"  # measured with four processes too; where they share two cores their e is the machine's
MANY = 2, 8, 64, 256, 1024  # workers to predict for
BANDWIDTHS = 1e8, 1e9, 1e10, 1e11  # bit/s
LOCAL_STEPS = 50  # SLAMB's default

Sends = Sequence[tuple[float, float, bool]]
"""Of a step: (seconds from its start, bytes, whether it goes on beside the step) of every all-reduce."""


@dataclass(frozen=True)
class Network:
    """Seconds a message and seconds a byte."""

    latency: float
    a_byte: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes."""
        return 2 * (ranks - 1) * (self.latency + size / ranks * self.a_byte)

    @classmethod
    def fitted(cls, seconds: dict[int, float], ranks: int) -> Network:
        """Least squares of relative errors over sizes; neither is negative."""
        taken = torch.tensor(list(seconds.values()), dtype=torch.float64)
        sizes = torch.tensor(list(seconds), dtype=torch.float64)
        terms = 2 * (ranks - 1) * torch.stack([torch.ones_like(sizes), sizes / ranks], 1)
        found = torch.linalg.lstsq(
            terms / taken[:, None], torch.ones_like(taken)[:, None]
        ).solution.flatten()
        return cls(*found.clamp(min=0).tolist())


def step_seconds(silent: float, sends: Sends, network: Network, ranks: int) -> float:
    """Seconds of a step that takes `silent` where nothing is sent."""
    free = late = (
        0.0  # when the network has done all it was given; by how much the step lags behind the silent one
    )
    last = max((number for number, (_, _, beside) in enumerate(sends) if beside), default=-1)
    for number, (at, size, beside) in enumerate(sends):
        free = max(free, at + late) + network.all_reduce(size, ranks)
        if not beside or number == last:
            late = max(late, free - at)
    return silent + late


def typical(steps: Sequence[Sends]) -> Sends:
    """The median step: all have the same sends."""
    return [
        (statistics.median(at for at, _, _ in each), each[0][1], each[0][2]) for each in zip(*steps)
    ]


@dataclass(frozen=True)
class Found:
    """What scaling_ranks.py measured with so many ranks on a network; medians over the rounds."""

    ranks: int
    facts: dict[str, Any]

    def seconds(self, name: str) -> float:
        """Of a step, or of a probe."""
        return statistics.median(self.facts["seconds"][name])

    def network(self) -> Network:
        """Fitted to the probes."""
        probes = [name for name in self.facts["seconds"] if name.startswith("probe")]
        return Network.fitted(
            {int(name.split()[1]): self.seconds(name) for name in probes}, self.ranks
        )

    def efficiency(self, name: str) -> list[float]:
        """e of a method, round by round."""
        return [
            one / all_
            for one, all_ in zip(
                self.facts["seconds"][ALONE], self.facts["seconds"][f"{name} {EARNEST}"]
            )
        ]

    def predicted(self, name: str, network: Network, ranks: int = 0) -> float:
        """Seconds of a method's step, on as many ranks or others."""
        sends = typical(self.facts["sends"][name])
        return step_seconds(self.seconds(f"{name} {SILENT}"), sends, network, ranks or self.ranks)


def measure(arch: str, network: str, ranks: int, quick: bool) -> Found:
    """Run the processes.

    Raises:
        slow_network.Unavailable: there is no such network here.
    """
    rounds, seconds = ("5", "0.7") if quick else ("9", "1.0")
    rate = NETWORKS[network]
    with slow_network.joined(rate, ranks) if rate else slow_network.loopback(ranks) as places:
        command = ["-m", "benchmarks.scaling_ranks", arch, str(BATCHES[arch]), rounds, seconds]
        return Found(ranks, slow_network.run(places, command))


def show(arch: str, network: str, found: Found, fitted: Network) -> tuple[list[bench.Row], float]:
    """Print a table; its rows are e round by round, and the largest relative error of the predicted steps."""
    batch, rows, worst = found.facts["batch"], [], 0.0
    speed = f"{8e-6 / fitted.a_byte if fitted.a_byte else float('inf'):.0f} Mbit/s and {1e6 * fitted.latency:.0f} us fitted"
    title = f"{arch}, {network} ({speed}), N = {found.ranks}, S = {batch / found.seconds(ALONE):.1f} samples/s"
    print(
        f"\n{title}\n{'':<28} {'T':>8} {'e':>6} {'spread':>12} {'sent':>6} {'ms':>8} {'model':>8} {'off':>7}"
    )
    for name in METHODS:
        taken, predicted, each = (
            found.seconds(f"{name} {EARNEST}"),
            found.predicted(name, fitted),
            found.efficiency(name),
        )
        share, off = 1 - found.seconds(f"{name} {SILENT}") / taken, predicted / taken - 1
        spread, worst = f"{min(each):.2f}..{max(each):.2f}", max(worst, abs(off))
        rate, e = found.ranks * batch / taken, statistics.median(each)
        times = f"{1e3 * taken:>8.1f} {1e3 * predicted:>8.1f} {100 * off:>+6.1f}%"
        print(f"{name:<28} {rate:>8.1f} {e:>6.2f} {spread:>12} {100 * share:>5.0f}% {times}")
        seconds = found.facts["seconds"]
        rows.append(
            bench.Row(
                f"{arch} {network} N={found.ranks} {name}",
                *([1 / t for t in seconds[key]] for key in (f"{name} {EARNEST}", ALONE)),
            )
        )
    return rows, worst


def predict(
    arch: str, found: Found, bandwidths: Sequence[float], latency: float
) -> dict[str, dict[str, list[float]]]:
    """Print e for many workers; returns it by network and method."""
    predicted: dict[str, dict[str, list[float]]] = {}
    print(
        f"\n{arch}, predicted e, latency {1e6 * latency:.0f} us{'':<18} "
        + " ".join(f"{f'N={n}':>7}" for n in MANY)
    )
    for bandwidth in bandwidths:
        network = Network(latency, 8 / bandwidth)
        for name in METHODS:
            e = []
            for ranks in MANY:
                mean = (
                    network.all_reduce(4 * found.facts["weights"], ranks) / LOCAL_STEPS
                    if "SLAMB" in name
                    else 0.0
                )
                e.append(found.seconds(ALONE) / (found.predicted(name, network, ranks) + mean))
            predicted.setdefault(f"{bandwidth / 1e6:g} Mbit/s", {})[name] = e
            print(
                f"{f'{bandwidth / 1e9:g} Gbit/s':<14} {name:<34} "
                + " ".join(f"{each:>7.3f}" for each in e)
            )
    return predicted


ASSUMPTIONS = """
assumed: every worker computes as fast as one of two on this machine and none is late; each has a link of its own at full
bandwidth both ways; a ring, whose latency grows with N (trees and hierarchies would take it as log N); a batch of the same
size for each worker; SLAMB also sends its weights once in 50 steps
e: efficiency, T / (S N), median of the rounds; sent: the share of a step that goes where nothing is sent; off: the model's error"""


def main() -> int:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="+",
        default=list(BANDWIDTHS),
        help="of the predictions, bit/s",
    )
    parser.add_argument(
        "--latency",
        type=float,
        help="of a message in the predictions, seconds (default: as at 1 Gbit/s here)",
    )
    args = parser.parse_args()
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine)
    rows: list[bench.Row] = []
    errors: list[float] = []
    measured: dict[str, Any] = {}
    for arch in ["resnet20"] if args.quick else BATCHES:
        base: dict[str, Found] = {}
        for network in NETWORKS:
            for ranks in (2,) if args.quick or arch != FOUR else (2, 4):
                try:
                    found = measure(arch, network, ranks, args.quick)
                except slow_network.Unavailable as reason:
                    print(f"\n{network} left out: {reason}")
                    break
                base.setdefault(network, found)
                more, worst = show(arch, network, found, base[network].network())
                rows += more
                measured[f"{arch} {network} N={ranks}"] = found.facts | {
                    "sends": {k: typical(v) for k, v in found.facts["sends"].items()}
                }
                if NETWORKS[network] and ranks <= (os.cpu_count() or 1):
                    errors.append(worst)
        latency = (
            args.latency
            if args.latency is not None
            else base.get("1 Gbit/s", base["loopback"]).network().latency
        )
        measured[f"{arch} predicted"] = predict(arch, base["loopback"], args.bandwidth, latency)
    print(ASSUMPTIONS)
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    bars = (
        [bench.Bar("largest error of the model", max(errors), OFF, at_most=True)] if errors else []
    )
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        took=seconds,
        quick=args.quick,
        many=MANY,
        measured=measured,
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(main())
