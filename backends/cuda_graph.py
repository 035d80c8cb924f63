"""Backend 'cudagraph': records a training step as a CUDA graph and replays it.

    run_step = CudaGraphRunner(step)
    run_step(inputs, labels, weight=1.0)        # records each batch shape once, then replays it

A replay launches all kernels of the step at once, without the host's time for each. The graph reads
and writes the memory that was in use when it was recorded: weights, optimizer state, sums, and
learning rates, which must be tensors. Call `invalidate` after any of these has been reallocated.

Source: Nguyen et al., "Accelerating PyTorch with CUDA Graphs", pytorch.org, 2021.
"""

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

RECORDED_OPTIMIZERS = ("sgd", "adamw", "ngd", "lamb", "lars")
"""Those whose step neither reads a number on the host nor counts or decides there."""
WARM_UP_CALLS = 3
"""Calls of a batch shape before it is recorded, in which kernels are chosen and compiled, and the
optimizer allocates its state."""
MAX_GRAPHS = 32
"""Graphs kept; further shapes run without one. Texts of at most 128 tokens have 16 lengths, as they
are padded to a multiple of 8, in whole batches and in the last, smaller one."""


class CudaGraphRunner:
    """Calls `body(*tensors, weight)` through one CUDA graph for each shape of its tensors.

    Args:
        body: a function that returns nothing and does not synchronise with the host.
        fall_back: called with a line where the body cannot be recorded, which then runs without a
            graph for good; None raises.
    """

    def __init__(
        self, body: Callable[..., None], fall_back: Callable[[str], None] | None = None
    ) -> None:
        self.body, self.fall_back, self.is_off = body, fall_back, False
        self.num_calls: dict[Hashable, int] = {}
        self.recorded: dict[Hashable, tuple[tuple[Tensor, ...], torch.cuda.CUDAGraph]] = {}

    def __call__(self, *tensors: Tensor, weight: float = 1.0) -> None:
        """Run the body on these tensors, by replaying its graph where there is one.

        Args:
            tensors: on the GPU; they are copied to where the graph reads them.
            weight: a constant of the graph; each value has graphs of its own.
        """
        key = (weight, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))
        if key not in self.recorded:
            self.num_calls[key] = self.num_calls.get(key, 0) + 1
            if self.num_calls[key] > WARM_UP_CALLS and len(self.recorded) < MAX_GRAPHS:
                self._record(key, tensors, weight)
            if key not in self.recorded:
                with side_stream(tensors[0].device):
                    self.body(*tensors, weight)
                return
        inputs, recorded = self.recorded[key]
        for graph_input, tensor in zip(inputs, tensors):
            graph_input.copy_(tensor)
        recorded.replay()

    def _record(self, key: Hashable, tensors: tuple[Tensor, ...], weight: float) -> None:
        """Record the body for tensors like these, unless that has failed before."""
        if self.is_off:
            return
        inputs = tuple(tensor.clone(memory_format=torch.preserve_format) for tensor in tensors)
        try:
            self.recorded[key] = inputs, record_cuda_graph(self.body, inputs, weight=weight)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.fall_back is None:
                raise
            self.is_off = True
            why = str(error).strip().partition("\n")[0]
            self.fall_back(f"steps run without a CUDA graph, which could not be recorded ({why})")

    def invalidate(self) -> None:
        """Discard all graphs, because memory that they use has been reallocated."""
        self.num_calls.clear()
        self.recorded.clear()


def record_cuda_graph(
    body: Callable[..., None], tensors: tuple[Tensor, ...], *, weight: float
) -> torch.cuda.CUDAGraph:
    """Record `body(*tensors, weight)` as a CUDA graph, without computing anything.

    Each replay uses the tensors' current values, and the same weight. Random numbers come from the
    device's generator, whose state each replay advances.
    """
    graph = torch.cuda.CUDAGraph()
    gc.collect()  # a tensor that is freed while a graph is recorded would spoil it
    torch.cuda.synchronize()
    stream = _stream(tensors[0].device)
    # Thread by thread, so that the thread that pins the memory of the next batch does no harm.
    with torch.cuda.graph(
        graph, pool=_memory_pool(), stream=stream, capture_error_mode="thread_local"
    ):
        body(*tensors, weight)
    return graph


def make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let a graph record the steps of an optimizer, to be called again after its state is loaded.

    Learning rates become tensors on the device: one on the CPU, as a checkpoint has it, would be
    read while recording, and never again. torch's Adam must be told, and would then warn at the
    steps before the recorded one.
    """
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
        if "capturable" in group:
            group["capturable"] = True
    warnings.filterwarnings("ignore", ".*capturable=True.*", UserWarning)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work on the stream that graphs are recorded on, if the device is a GPU.

    Autograd remembers the stream of the first steps, and graphs cannot be recorded with work on the
    default stream.
    """
    if device.type != "cuda":
        yield
        return
    stream, current = _stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _memory_pool() -> Any:
    # Graphs may share it: they replay one at a time, and leave nothing in it that is used later.
    return torch.cuda.graph_pool_handle()
