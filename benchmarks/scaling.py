"""How training throughput scales with the number of processes, measured and predicted.

python -m benchmarks.scaling --quick                          # ResNet-20; at most five minutes
python -m benchmarks.scaling --json scaling.json              # also ResNet-110 and four processes
python -m benchmarks.scaling --bandwidth 25e9 --latency 5e-6  # predict for another network too

T = S N e: T is samples/s of N processes, S those of one while the others wait, e the efficiency.
Every process has its own batch (weak scaling) and one thread, and trains as the scripts do
(scaling_ranks.py). The share of communication is the part of a step that disappears when nothing
is sent. The networks are those of communication.py.

The model of the prediction: an all-reduce of B bytes is a ring and takes
2 (N - 1) latency + 2 (N - 1) / N x B / bandwidth. A step without sending is timed, together with
the moment at which each all-reduce starts. All-reduces during the backward pass run in parallel to
it, one after the other, and the step waits for the last; for others it waits at once. Latency and
bandwidth are fitted to all-reduces of four sizes between two processes, so no step that sends is
part of the fit.
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
from benchmarks.scaling_ranks import ALONE, METHODS, SENDING, SILENT
from errors import exit_code

# Relative error of a predicted step of processes with a core each: the model leaves out how they
# slow each other down.
MAX_ERROR = 0.15

# Samples per process, for a step of about a tenth and a third of a second.
BATCHES = {"resnet20": 64, "resnet110": 32}
NETWORKS = {"loopback": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
# Also measured with four processes; if they share two cores, e is limited by the cores.
FOUR_PROCESSES = "resnet20"
MANY = 2, 8, 64, 256, 1024  # numbers of processes to predict for
BANDWIDTHS = 1e8, 1e9, 1e10, 1e11  # bit/s
LOCAL_STEPS = 50  # SLAMB's default

Sends = Sequence[tuple[float, float, bool]]
"""Every all-reduce of a step: (seconds from the start, bytes, whether the step runs on)."""


@dataclass(frozen=True)
class Network:
    """A network: seconds per message, and seconds per byte."""

    latency: float
    seconds_per_byte: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes."""
        return 2 * (ranks - 1) * (self.latency + size / ranks * self.seconds_per_byte)

    @classmethod
    def fit(cls, seconds: dict[int, float], ranks: int) -> Network:
        """Fit to measured seconds by size: least squares of relative errors, none negative."""
        taken = torch.tensor(list(seconds.values()), dtype=torch.float64)
        sizes = torch.tensor(list(seconds), dtype=torch.float64)
        terms = 2 * (ranks - 1) * torch.stack([torch.ones_like(sizes), sizes / ranks], 1)
        fit = torch.linalg.lstsq(terms / taken[:, None], torch.ones_like(taken)[:, None])
        latency, seconds_per_byte = fit.solution.flatten().clamp(min=0).tolist()
        return cls(latency, seconds_per_byte)


def step_seconds(silent: float, sends: Sends, network: Network, ranks: int) -> float:
    """Predict the seconds of a step.

    Args:
        silent: seconds of the step when nothing is sent.
        sends: the all-reduces of the step.
        network: what they are sent over.
        ranks: number of processes.
    """
    network_free_at = 0.0  # seconds from the start of the step
    delay = 0.0  # of the step, behind the silent one
    parallel = [number for number, (_, _, is_parallel) in enumerate(sends) if is_parallel]
    last_parallel = max(parallel, default=-1)
    for number, (at, size, is_parallel) in enumerate(sends):
        network_free_at = max(network_free_at, at + delay) + network.all_reduce(size, ranks)
        if not is_parallel or number == last_parallel:
            delay = max(delay, network_free_at - at)
    return silent + delay


def median_step(steps: Sequence[Sends]) -> Sends:
    """Return the step with the median start of each all-reduce; all steps have the same ones."""
    return [
        (statistics.median(at for at, _, _ in each), each[0][1], each[0][2]) for each in zip(*steps)
    ]


@dataclass(frozen=True)
class Measurement:
    """What scaling_ranks.py has measured on a network; seconds are medians over the rounds."""

    ranks: int
    facts: dict[str, Any]

    def seconds(self, name: str) -> float:
        """Return the seconds of a step or of a probe."""
        return statistics.median(self.facts["seconds"][name])

    def network(self) -> Network:
        """Fit the network to the probes."""
        probes = [name for name in self.facts["seconds"] if name.startswith("probe")]
        return Network.fit(
            {int(name.split()[1]): self.seconds(name) for name in probes}, self.ranks
        )

    def efficiency(self, name: str) -> list[float]:
        """Return the efficiency e of a method in each round."""
        seconds = self.facts["seconds"]
        pairs = zip(seconds[ALONE], seconds[f"{name} {SENDING}"])
        return [alone / together for alone, together in pairs]

    def predicted(self, name: str, network: Network, ranks: int = 0) -> float:
        """Predict the seconds of a method's step, on another number of ranks if one is given."""
        sends = median_step(self.facts["sends"][name])
        return step_seconds(self.seconds(f"{name} {SILENT}"), sends, network, ranks or self.ranks)


def measure(arch: str, network: str, ranks: int, quick: bool) -> Measurement:
    """Measure an architecture on a network.

    Raises:
        slow_network.Unavailable: this machine cannot set up such a network.
    """
    rounds, seconds = ("5", "0.7") if quick else ("9", "1.0")
    rate = NETWORKS[network]
    with slow_network.joined(rate, ranks) if rate else slow_network.loopback(ranks) as places:
        command = ["-m", "benchmarks.scaling_ranks", arch, str(BATCHES[arch]), rounds, seconds]
        return Measurement(ranks, slow_network.run(places, command))


def show(
    arch: str, network: str, measurement: Measurement, fitted: Network
) -> tuple[list[bench.Row], float]:
    """Print a table; return rows whose ratio is e, and the largest error of the predicted steps.

    Args:
        arch: architecture of the model.
        network: name of the network.
        measurement: what was measured.
        fitted: the network as fitted, which predicts the steps.
    """
    ranks, batch, seconds = (
        measurement.ranks,
        measurement.facts["batch"],
        measurement.facts["seconds"],
    )
    bandwidth = 8 / fitted.seconds_per_byte if fitted.seconds_per_byte else float("inf")
    fit = f"{bandwidth / 1e6:.0f} Mbit/s and {1e6 * fitted.latency:.0f} us fitted"
    single = batch / measurement.seconds(ALONE)
    print(f"\n{arch}, {network} ({fit}), N = {ranks}, S = {single:.1f} samples/s")
    columns = f"{'T':>8} {'e':>6} {'spread':>12} {'sent':>6} {'ms':>8} {'model':>8} {'error':>7}"
    print(f"{'':<28} {columns}")
    rows, largest_error = [], 0.0
    for name in METHODS:
        taken = measurement.seconds(f"{name} {SENDING}")
        predicted = measurement.predicted(name, fitted)
        efficiencies = measurement.efficiency(name)
        sent = 1 - measurement.seconds(f"{name} {SILENT}") / taken
        error = predicted / taken - 1
        largest_error = max(largest_error, abs(error))
        spread = f"{min(efficiencies):.2f}..{max(efficiencies):.2f}"
        rates = (
            f"{ranks * batch / taken:>8.1f} {statistics.median(efficiencies):>6.2f} {spread:>12}"
        )
        times = f"{1e3 * taken:>8.1f} {1e3 * predicted:>8.1f} {100 * error:>+6.1f}%"
        print(f"{name:<28} {rates} {100 * sent:>5.0f}% {times}")
        rows.append(
            bench.Row(
                f"{arch} {network} N={ranks} {name}",
                ours=[1 / each for each in seconds[f"{name} {SENDING}"]],
                peer=[1 / each for each in seconds[ALONE]],
            )
        )
    return rows, largest_error


def predict(
    arch: str, measurement: Measurement, bandwidths: Sequence[float], latency: float
) -> dict[str, dict[str, list[float]]]:
    """Print the efficiency for many processes; return it by network and method."""
    predicted: dict[str, dict[str, list[float]]] = {}
    columns = " ".join(f"{f'N={n}':>7}" for n in MANY)
    print(f"\n{arch}, predicted e, latency {1e6 * latency:.0f} us{'':<18} {columns}")
    for bandwidth in bandwidths:
        network = Network(latency, 8 / bandwidth)
        for name in METHODS:
            efficiencies = []
            for ranks in MANY:
                seconds = measurement.predicted(name, network, ranks)
                if "SLAMB" in name:  # it also averages the weights
                    weights = 4 * measurement.facts["weights"]
                    seconds += network.all_reduce(weights, ranks) / LOCAL_STEPS
                efficiencies.append(measurement.seconds(ALONE) / seconds)
            predicted.setdefault(f"{bandwidth / 1e6:g} Mbit/s", {})[name] = efficiencies
            values = " ".join(f"{each:>7.3f}" for each in efficiencies)
            print(f"{f'{bandwidth / 1e9:g} Gbit/s':<14} {name:<34} {values}")
    return predicted


ASSUMPTIONS = """
assumed: every process computes as fast as one of two on this machine and none is late; each has a
link of its own with full bandwidth in both directions; all-reduce is a ring, whose latency grows
with N (that of trees and hierarchies grows with log N); all batches have the same size; SLAMB also
sends its weights once in 50 steps
e: efficiency, T / (S N), median of the rounds; sent: share of a step that disappears when nothing
is sent; error: relative error of the model"""


def main() -> int:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="+",
        default=list(BANDWIDTHS),
        help="bandwidths to predict for, in bit/s",
    )
    parser.add_argument(
        "--latency",
        type=float,
        help="latency to predict for, in seconds (default: as fitted at 1 Gbit/s)",
    )
    args = parser.parse_args()
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine)
    rows: list[bench.Row] = []
    errors: list[float] = []
    measured: dict[str, Any] = {}
    for arch in ["resnet20"] if args.quick else BATCHES:
        base: dict[str, Measurement] = {}
        for network in NETWORKS:
            for ranks in (2,) if args.quick or arch != FOUR_PROCESSES else (2, 4):
                try:
                    measurement = measure(arch, network, ranks, args.quick)
                except slow_network.Unavailable as reason:
                    print(f"\n{network} left out: {reason}")
                    break
                base.setdefault(network, measurement)
                fitted = base[network].network()
                more_rows, error = show(arch, network, measurement, fitted)
                rows += more_rows
                sends = measurement.facts["sends"].items()
                measured[f"{arch} {network} N={ranks}"] = {
                    **measurement.facts,
                    "sends": {name: median_step(steps) for name, steps in sends},
                }
                if NETWORKS[network] and ranks <= (os.cpu_count() or 1):
                    errors.append(error)
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
        [bench.Bar("largest error of the model", max(errors), MAX_ERROR, at_most=True)]
        if errors
        else []
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
    sys.exit(exit_code(main))
