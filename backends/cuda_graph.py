"""`--backend cudagraph`: a whole training step recorded once for each shape of batch, and replayed without a word from the host.

    replay = Replay(step.body)
    replay(inputs, labels, weight)        # the first calls of a shape run as they are, one is recorded, all others replay

What the step reads and writes must lie where it was when it was recorded: weights, moments, sums, learning rates as tensors.
`forget` after anything has moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

WARM_UP = 3  # calls of a shape before it is recorded: kernels are chosen and compiled, moments come into being
MOST = 32  # graphs kept; other shapes run as they are. Texts in lengths of a multiple of 4 up to 128 have 32


class Recorded(Protocol):
    """A step on fixed tensors."""

    def replay(self) -> None: ...


Record = Callable[[Callable[..., None], tuple[Tensor, ...], float], Recorded]
"""(body, tensors, weight) -> the recorded call; recording computes nothing."""


class CudaGraphRunner:
    """Calls `body(*tensors, weight)`, which returns nothing, through recordings.

    Args:
        body: without host synchronisation.
        record: how; `record_cuda`, or a stand-in where there is no GPU.
    """

    def __init__(self, body: Callable[..., None], record: Record | None = None) -> None:
        self.body, self.record = body, record or record_cuda
        self.calls: dict[Any, int] = {}
        self.recorded: dict[Any, tuple[tuple[Tensor, ...], Recorded]] = {}

    def __call__(self, *tensors: Tensor, weight: float = 1.0) -> None:
        key = (weight, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
        if key not in self.recorded:
            self.calls[key] = self.calls.get(key, 0) + 1
            if self.calls[key] <= WARM_UP or len(self.recorded) == MOST:
                self.body(*tensors, weight)
                return
            places = tuple(tensor.clone(memory_format=torch.preserve_format) for tensor in tensors)
            self.recorded[key] = places, self.record(self.body, places, weight)
        places, recorded = self.recorded[key]
        for place, tensor in zip(places, tensors):
            place.copy_(tensor)
        recorded.replay()

    def forget(self) -> None:
        """Record everything anew: what the step works on has moved."""
        self.calls.clear()
        self.recorded.clear()


@functools.cache
def memory_pool() -> Any:
    """One for all graphs: they replay one at a time, and nothing that a step makes in it outlives the step."""
    return torch.cuda.graph_pool_handle()


def record_cuda(body: Callable[..., None], tensors: tuple[Tensor, ...], weight: float) -> Recorded:
    """A CUDA graph; random numbers come from the device's generator, whose state each replay moves on."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=memory_pool()):
        body(*tensors, weight)
    return graph
