"""What a step tells besides its loss: how long this rank computed, and how noisy the gradient is; both for batching.py.

hook.watchers += [stopwatch.handed_over]        # called with each bucket of gradients, before it is sent
stopwatch.start(); ...; stopwatch.stop()
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ComputeTimer:
    """Seconds that this rank computes: from the end of one wait for the others to its last gradients of the next step.

    On a GPU it is the stream's time, by events that are read at `take`: nothing waits for them before.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.begin = self.last = self.now()
        self.seconds = 0.0
        self.spans: list[tuple[Any, Any]] = []  # of events

    def now(self) -> Any:
        """A point in time."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """What came before does not count: measuring, saving."""
        self.begin = self.last = self.now()

    def handed_over(self, bucket: Any = None) -> None:
        """Gradients are there to be sent."""
        self.last = self.now()

    def stop(self) -> None:
        """All gradients have come back."""
        if self.cuda:
            self.spans.append((self.begin, self.last))
        else:
            self.seconds += self.last - self.begin
        self.start()

    def so_far(self) -> float:
        """The seconds since they were last taken."""
        for begin, end in self.spans:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1000
        self.spans = []
        return self.seconds

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.so_far(), 0.0
        return seconds


class LocalGradNorm:
    """The squared norm of this rank's own gradient, taken from the buckets that are about to be averaged.

    A number for each parameter, summed in their order: DistributedDataParallel lays its buckets out anew after its first step, and
    a resumed run is to come to the same sum.
    """

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        self.places = {parameter: place for place, parameter in enumerate(parameters)}
        self.squares = torch.zeros(len(self.places), device=device)
        self.indices: dict[tuple[int, ...], Tensor] = {}  # by the places in a bucket

    def add(self, bucket: Any) -> None:
        """A bucket's part."""
        here = tuple(self.places[parameter] for parameter in bucket.parameters())
        if here not in self.indices:
            self.indices[here] = torch.tensor(here, device=self.squares.device)
        norms = torch.stack(torch._foreach_norm(bucket.gradients()))
        self.squares.index_copy_(0, self.indices[here], norms.square().to(self.squares.dtype))

    def read(self) -> Tensor:
        """Of the buckets of the last backward pass."""
        return self.squares.sum()


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """Of all of them together."""
    return torch.stack(torch._foreach_norm(gradients)).square().sum()
