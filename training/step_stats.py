"""What the training steps add up, and what they measure beside the loss.

sums = StepSums(device)                          # on the device, read once in a while
timer = ComputeTimer(device)                     # seconds without waiting for other ranks
meter = NoiseMeter(parameters, world)            # what the gradient noise scale is estimated from
hook.observers += [meter.add_bucket, timer.gradients_ready]
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from backends.execution import compile_seconds
from distributed.world import World
from training.progress import Progress


class StepTotals(NamedTuple):
    """The sums over the steps of an epoch as numbers on the host."""

    loss: float  # of this and the next three: sums over the samples
    num_correct: float
    mix_weight: float
    samples: float
    small_square: float  # of the gradient of few samples, its squared norm
    inverse_small: float  # 1 / the number of the few samples
    big_square: float  # of the averaged gradient of all samples of the step, its squared norm
    inverse_big: float  # 1 / the number of all samples of the step
    skipped: float  # steps of this epoch that were not finite
    skipped_in_a_row: float  # steps up to the last one that were not finite


COUNTERS = 2  # the last fields, which count steps: alike on all ranks but where these train apart


class StepSums:
    """`StepTotals` as one float64 tensor on the device, which is read once in a while.

    Each field is an attribute too, a view () of the tensor.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...
        def __setattr__(self, name: str, value: Tensor) -> None: ...

    def __init__(self, device: torch.device) -> None:
        self.values = torch.zeros(len(StepTotals._fields), dtype=torch.float64, device=device)
        for name, view in zip(StepTotals._fields, self.values.unbind()):
            setattr(self, name, view)

    def add_step(self, step: StepSums, skip: Tensor) -> None:
        """Add the sums of a step; of one that is skipped or not finite, only count it."""
        of_step, counted = step.values[:-COUNTERS], self.values[:-COUNTERS]
        counted += torch.where(skip | ~torch.isfinite(step.loss), 0, of_step)
        self.skipped += skip
        self.skipped_in_a_row.copy_((self.skipped_in_a_row + 1) * skip)

    def start_epoch(self) -> None:
        """Set everything to zero but the steps skipped in a row."""
        self.values[:-1] = 0

    def totals(self, world: World) -> StepTotals:
        """Sums over all ranks, and the mean of the counters; two all-reduces."""
        values = self.values.clone()
        world.sum(values[:-COUNTERS])
        world.sum(values[-COUNTERS:]).div_(world.size)
        return StepTotals(*values.tolist())

    def read(self) -> StepTotals:
        """This rank's sums on the host, which waits for a GPU to have done its steps."""
        return StepTotals(*self.values.tolist())

    def load_merged(self, values: Sequence[Tensor], world: World) -> None:
        """Go on from the sums of another number of ranks: rank 0 takes them all."""
        self.values.copy_(torch.stack(list(values)).mean(0))
        self.values[:-COUNTERS] = sum(each[:-COUNTERS] for each in values) if world.is_main else 0


class ComputeTimer:
    """Seconds in which this rank computes, without waiting for the others.

    A span begins when averaged gradients are back and ends with this rank's next own ones. On a GPU
    it is the stream's time, by events that are read at the end: nothing waits for them before.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.begin = self.last = self._now()
        self.seconds = 0.0
        self.spans: list[tuple[Any, Any]] = []  # pairs of events

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin a span; what came before it, such as evaluating or saving, does not count."""
        self.begin = self.last = self._now()

    def gradients_ready(self, bucket: dist.GradBucket | None = None) -> None:
        self.last = self._now()

    def stop(self) -> None:
        """End a span at the last gradients and begin the next; averaged gradients are back."""
        if self.on_gpu:
            self.spans.append((self.begin, self.last))
        else:
            self.seconds += self.last - self.begin
        self.start()

    def elapsed(self) -> float:
        """The seconds since they were last set to zero."""
        for begin, end in self.spans:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1000
        self.spans = []
        return self.seconds

    def go_on(self, seconds: float) -> None:
        """Go on from what `elapsed` returned in another process."""
        self.seconds, self.spans = seconds, []

    def take_seconds(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.elapsed(), 0.0
        return seconds


class TrainClock:
    """Adds the seconds of training and of compiling to a run's progress, but none of saving."""

    def __init__(self, progress: Progress, compute_timer: ComputeTimer | None) -> None:
        self.progress, self.compute_timer = progress, compute_timer
        self.start()

    def start(self) -> None:
        """Leave out what came before."""
        if self.compute_timer is not None:
            self.compute_timer.start()
        self.started, self.compiled = time.perf_counter(), compile_seconds()

    def add_elapsed(self) -> None:
        """Add the time since the last call."""
        now, compiled = time.perf_counter(), compile_seconds()
        self.progress.train_seconds += now - self.started - (compiled - self.compiled)
        self.progress.seconds += now - self.started
        self.progress.compile_seconds += compiled - self.compiled
        self.started, self.compiled = now, compiled

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Add the time of the block as that of an evaluation."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.progress.seconds += seconds
        self.progress.eval_seconds += seconds


class NoiseMeter:
    """Measures in each step what the gradient noise scale is estimated from, without an extra pass.

    That is the squared norm of the averaged gradient, and that of a gradient of few samples: of the
    first micro-batch; or, where that is the whole step, of this rank before gradients are averaged.
    Of the latter `squares` has a number for each parameter, to be summed in their order, since
    DistributedDataParallel lays its buckets out anew after its first step, and a resumed run is to
    come to the same sum.
    """

    def __init__(self, parameters: Sequence[Tensor], world: World) -> None:
        self.world = world
        self.places = {parameter: place for place, parameter in enumerate(parameters)}
        self.squares = torch.zeros(len(self.places), device=world.device)
        self.indices: dict[tuple[int, ...], Tensor] = {}  # on the device, by the places in a bucket

    def add_bucket(self, bucket: dist.GradBucket) -> None:
        """Take the norms of a bucket of this rank's gradients before they are averaged."""
        places = tuple(self.places[parameter] for parameter in bucket.parameters())
        if places not in self.indices:
            self.indices[places] = torch.tensor(places, device=self.squares.device)
        norms = torch.stack(torch._foreach_norm(bucket.gradients()))
        self.squares.index_copy_(0, self.indices[places], norms.square().to(self.squares.dtype))

    def means(self, totals: StepTotals, steps: int) -> dict[str, float] | None:
        """The arguments of `NoiseScale.observe`, per-step means; None if no step was measured."""
        count = (steps - int(totals.skipped)) * self.world.size
        if count <= 0 or not totals.inverse_small:
            return None
        names = ("small_square", "inverse_small", "big_square", "inverse_big")
        return {name: getattr(totals, name) / count for name in names}


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """(), the squared Euclidean norm of all gradients together."""
    return torch.stack(torch._foreach_norm(gradients)).square().sum()
