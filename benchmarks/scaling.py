"""How training throughput scales with the number of processes, measured and predicted.

python -m benchmarks.scaling --quick                          # ResNet-20; at most five minutes
python -m benchmarks.scaling --json scaling.json              # also ResNet-110 and four processes

T = S N e: T is samples/s of N processes, S those of one while the others wait, e the efficiency.
Every process has its own batch (weak scaling) and one thread, and trains as the scripts do. The
share of communication is the part of a step that disappears when nothing is sent. In turn run: rank
0 alone, all ranks without sending, all ranks with sending, and all-reduces of several sizes. The
networks are those of slow_network.py.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.precision import choose_precision
from benchmarks import bench, slow_network, trainers
from benchmarks.slow_network import NETWORKS
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from errors import exit_code
from models import image_models
from optimizers.param_groups import decay_groups
from slamb import LAMB, SLAMB

# Relative error of a predicted step of processes with a core each: the model leaves out how they
# slow each other down.
MAX_ERROR = 0.15

# Samples per process, for a step of about a tenth and a third of a second.
BATCHES = {"resnet20": 64, "resnet110": 32}
# Also measured with four processes; if they share two cores, e is limited by the cores.
FOUR_PROCESSES = "resnet20"
MANY = 2, 8, 64, 256, 1024  # numbers of processes to predict for
BANDWIDTHS = 1e8, 1e9, 1e10, 1e11  # bit/s
LOCAL_STEPS = 50  # SLAMB's default
ALONE, SILENT, SENDING = "alone", "silent", "sending"
METHODS = {  # compression of DDP's gradients; empty for SLAMB
    "DDP + LAMB": "none",
    "DDP bf16 hook + LAMB": "bf16",
    "SLAMB block k=0.1 bf16": "",
}
PROBES = 4, 2**16, 2**19, 2**22  # bytes of the all-reduces that latency is fitted to
PROBE_TIMES = 5  # all-reduces of each size in a turn; one of the largest
WARM_UP = 4  # steps
NEVER = 10**9  # steps; beyond the end of any measurement

Sends = Sequence[tuple[float, float, bool]]
"""Every all-reduce of a step: (seconds from the start, bytes, whether the step runs on)."""


# -------------------------------------------------------------------- one rank


class SkippedWork:
    """The handle of an all-reduce that was skipped: complete at once."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a completed future with the unchanged values."""
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([self.values])
        return done


class AllReduceRecorder:
    """Replaces dist.all_reduce and records when in a step it is called, and with how many bytes.

    While `silent`, nothing is sent.
    """

    def __init__(self) -> None:
        self.inner: Callable[..., Any] = dist.all_reduce
        self.silent, self.start = False, 0.0
        # Of the current step: seconds from its start, bytes, whether the call is asynchronous.
        self.sends: list[tuple[float, int, bool]] = []
        dist.all_reduce = self  # type: ignore[assignment]

    def start_step(self) -> None:
        """Start the clock and the records of a step."""
        self.start, self.sends = time.perf_counter(), []

    def __call__(self, values: Tensor, *rest: Any, async_op: bool = False, **named: Any) -> Any:
        self.sends.append((time.perf_counter() - self.start, values.nbytes, async_op))
        if self.silent:
            return SkippedWork(values) if async_op else None
        return self.inner(values, *rest, async_op=async_op, **named)


class Training:
    """Training steps on one batch, as the scripts take them."""

    def __init__(self, arch: str, batch: int, world: World, optimizer: str, compress: str) -> None:
        torch.manual_seed(0)
        model = image_models.create_model(arch, classes=10, channels=3, image_size=32)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        groups = decay_groups(model, 0.01)
        made: torch.optim.Optimizer
        if optimizer == "slamb":
            made = SLAMB(groups, 1e-3, local_steps=NEVER, dense_steps=0, compress_ratio=0.1)
        else:
            made = LAMB(groups, 1e-3)
        self.trainer = trainers.step_trainer(
            model,
            made,
            world,
            precision=choose_precision("auto", world.device),
            comm_hook=AllReduceHook(world, compress or "none"),
        )
        self.trainer.wrap_model()
        torch.manual_seed(1 + world.rank)
        self.inputs = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(10, (batch,))

    def __call__(self) -> None:
        self.trainer.train_step(self.inputs, self.labels)


class Turns:
    """Measures one turn at a time, of a number of steps on which all ranks agree."""

    def __init__(self, world: World, recorder: AllReduceRecorder, seconds: float) -> None:
        self.world, self.recorder, self.seconds = world, recorder, seconds
        self.steps: dict[Training, int] = {}
        self.sends: dict[str, list[list[tuple[float, int, bool]]]] = {}

    def warm_up(self, training: Training, alone: bool) -> None:
        """Take the first steps, and choose the number of steps of a turn."""
        took = torch.zeros(())
        if not alone or self.world.is_main:
            for _ in range(WARM_UP):
                training()
            took.fill_(bench.clock(training))
        dist.broadcast(took, 0)
        self.steps[training] = max(2, round(self.seconds / took.item()))

    def together(self, training: Training, name: str, silent: bool) -> float:
        """Return the mean seconds of a step of all ranks."""
        dist.barrier()
        self.recorder.silent, start = silent, time.perf_counter()
        for _ in range(self.steps[training]):
            self.recorder.start_step()
            training()
            if silent:
                self.sends.setdefault(name, []).append(self.recorder.sends)
        taken = time.perf_counter() - start
        self.recorder.silent = False
        return taken / self.steps[training]

    def alone(self, training: Training) -> float:
        """Return the mean seconds of a step of rank 0 while the others wait."""
        dist.barrier()
        steps, taken = self.steps[training], 0.0
        if self.world.is_main:
            start = time.perf_counter()
            for _ in range(steps):
                training()
            taken = time.perf_counter() - start
        dist.barrier()
        return taken / steps

    def probe(self, size: int) -> float:
        """Return the mean seconds of an all-reduce of `size` bytes."""
        values, times = torch.zeros(max(1, size // 4)), 1 if size == PROBES[-1] else PROBE_TIMES
        dist.barrier()
        return bench.clock(lambda: [self.recorder.inner(values) for _ in range(times)]) / times


def measure_rank(
    world: World, *, arch: str, batch: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure everything in turn as one rank and return the values of each round."""
    turns = Turns(world, AllReduceRecorder(), seconds)
    plain = Training(arch, batch, World(device=world.device), "lamb", "")
    turns.warm_up(plain, alone=True)
    sides: dict[str, Callable[[], float]] = {ALONE: partial(turns.alone, plain)}
    if world.size > 1:
        for size in PROBES:
            sides[f"probe {size}"] = partial(turns.probe, size)
        for name, compress in METHODS.items():
            training = Training(arch, batch, world, "lamb" if compress else "slamb", compress)
            turns.warm_up(training, alone=False)
            for state in (SILENT, SENDING):
                turn = partial(turns.together, training, name, silent=state == SILENT)
                sides[f"{name} {state}"] = turn
    taken = bench.take_turns(sides, rounds)
    weights = sum(p.numel() for p in plain.trainer.model.parameters())
    return {"weights": weights, "batch": batch, "seconds": taken, "sends": turns.sends}


# -------------------------------------------------------------------- the model


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
    """Predict the seconds of a step that takes `silent` seconds when nothing is sent."""
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
    """What `measure_rank` has measured on a network; seconds are medians over the rounds."""

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

    def predicted(self, name: str, network: Network, ranks: int = 0) -> float:
        """Predict the seconds of a method's step, on another number of ranks if one is given."""
        sends = median_step(self.facts["sends"][name])
        return step_seconds(self.seconds(f"{name} {SILENT}"), sends, network, ranks or self.ranks)


def measure(arch: str, network: str, ranks: int, quick: bool) -> Measurement:
    """Measure an architecture on a network.

    Raises:
        slow_network.Unavailable: this machine cannot set up such a network.
    """
    sizes = {"rounds": 5, "seconds": 0.7} if quick else {"rounds": 9, "seconds": 1.0}
    with slow_network.places(NETWORKS[network], ranks) as places:
        sizes["batch"] = BATCHES[arch]
        return Measurement(
            ranks, slow_network.run(places, "scaling.measure_rank", arch=arch, **sizes)
        )


def show(
    arch: str, network: str, measurement: Measurement, fitted: Network
) -> tuple[list[bench.Row], float]:
    """Print a table; return rows whose ratio is e, and the largest error of the predicted steps."""
    ranks, seconds = measurement.ranks, measurement.facts["seconds"]
    batch = measurement.facts["batch"]
    bandwidth = 8 / fitted.seconds_per_byte if fitted.seconds_per_byte else float("inf")
    fit = f"{bandwidth / 1e6:.0f} Mbit/s and {1e6 * fitted.latency:.0f} us fitted"
    single = batch / measurement.seconds(ALONE)
    print(f"\n{arch}, {network} ({fit}), N = {ranks}, S = {single:.1f} samples/s")
    lines = [["", "T", "e", "spread", "sent", "ms", "model", "error"]]
    rows, largest_error = [], 0.0
    for name in METHODS:
        taken = measurement.seconds(f"{name} {SENDING}")
        predicted = measurement.predicted(name, fitted)
        sent = 1 - measurement.seconds(f"{name} {SILENT}") / taken
        error = predicted / taken - 1
        largest_error = max(largest_error, abs(error))
        title = f"{arch} {network} N={ranks} {name}"
        row = bench.Row.of_seconds(title, seconds[f"{name} {SENDING}"], seconds[ALONE])
        rates = [f"{ranks * batch / taken:.1f}", f"{row.ratio:.2f}", bench.spread(row.ratios)]
        times = [f"{1e3 * taken:.1f}", f"{1e3 * predicted:.1f}", f"{100 * error:+.1f}%"]
        lines.append([name, *rates, f"{100 * sent:.0f}%", *times])
        rows.append(row)
    print(bench.aligned(lines), flush=True)
    return rows, largest_error


def predict(
    arch: str, measurement: Measurement, latency: float
) -> dict[str, dict[str, list[float]]]:
    """Print the efficiency for many processes; return it by network and method."""
    predicted: dict[str, dict[str, list[float]]] = {}
    title = f"{arch}, predicted e, latency {1e6 * latency:.0f} us"
    lines = [[title, *(f"N={ranks}" for ranks in MANY)]]
    for bandwidth in BANDWIDTHS:
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
            values = [f"{each:.3f}" for each in efficiencies]
            lines.append([f"{bandwidth / 1e9:g} Gbit/s  {name}", *values])
    print("\n" + bench.aligned(lines))
    return predicted


ASSUMPTIONS = """
assumed: every process computes as fast as one of two on this machine and none is late; each has a
link of its own with full bandwidth in both directions; all-reduce is a ring, whose latency grows
with N (that of trees and hierarchies grows with log N); all batches have the same size; SLAMB also
sends its weights once in 50 steps
e: efficiency, T / (S N), median of the rounds; sent: share of a step that disappears when nothing
is sent; error: relative error of the model"""


def main() -> int:
    args = bench.parser(__doc__).parse_args()
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
        latency = base.get("1 Gbit/s", base["loopback"]).network().latency
        measured[f"{arch} predicted"] = predict(arch, base["loopback"], latency)
    print(ASSUMPTIONS)
    bars = []
    if errors:
        bars = [bench.Bar("largest error of the model", max(errors), MAX_ERROR, at_most=True)]
    return bench.finish(args, bars, rows=rows, machine=machine, many=MANY, measured=measured)


if __name__ == "__main__":
    sys.exit(exit_code(main))
