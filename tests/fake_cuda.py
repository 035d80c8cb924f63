"""A GPU that is not there: tensors on 'cuda' have a shape and a device, but no values.

with FakeGpu() as gpu:
    parameter = torch.zeros(3, device="cuda")
    parameter.mul_(2)                # computes nothing, and checks the devices
    parameter.sum().item()           # HostWaits, since the host would wait for the GPU

with Recording() as step:            # operations on real tensors of the CPU
    optimizer.step()
step.replay()                        # the same operations anew, as of a CUDA graph

Tensors on the CPU are real. torch's FakeTensorMode raises where devices are mixed, where a shape
depends on data, and where the host reads a number; `FakeGpu` adds the other ways to wait for a GPU.
Autograd needs a real device: there is no graph, and a stand-in makes the gradients of the backward
pass, for the parameters of the models that `FakeGpu.model` has put on the GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distributed.world import World

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
SOLVERS = {  # torch reads whether they have converged, or leaves them to a library that waits
    aten.linalg_inv_ex.default,
    aten._linalg_solve_ex.default,
    aten.linalg_lu_factor_ex.default,
    aten._linalg_check_errors.default,
    aten._linalg_eigh.default,
    aten._linalg_svd.default,
    aten.linalg_eig.default,
}
# torch has no fake of these,
IN_PLACE = {aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adamw_.tensor_lr}
SAMPLES = {aten._sample_dirichlet.default, aten._standard_gamma.default}  # nor of these


def unavailable_reason() -> str:
    """Why there can be no fake GPU, or ''.

    Indexing asks for the current GPU, which torch 2.10 has a stand-in for, in builds for CUDA.
    """
    try:
        with FakeTensorMode():
            torch.empty(2, device=CUDA)[:1]
    except RuntimeError:
        return f"torch {torch.__version__} needs a GPU for fake tensors on one"
    return ""


class HostWaits(AssertionError):
    """The host would wait for the GPU."""


class FakeGpu:
    """A context in which 'cuda' is a fake GPU; it raises where the host would wait for the GPU."""

    def __init__(self) -> None:
        self.waits: Counter[str] | None = None  # within `waiting`
        self.parameters: list[Tensor] = []  # that get gradients
        self.contexts = contextlib.ExitStack()

    def __enter__(self) -> FakeGpu:
        enter = self.contexts.enter_context
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(torch.no_grad())
        for target, name, stand_in in self._stand_ins():
            enter(mock.patch.object(target, name, stand_in))
        enter(_Dispatch(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self.contexts.close()

    # ---------------------------------------------------------------- operations on tensors

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives, on the host or on the GPU."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = torch.device(kwargs.get("device") or "cpu")
        if target.type == "cpu" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():  # the host is real
                return func(*args, **kwargs)
        if func in READS:
            if any(tensor.is_cuda for tensor in tensors):
                self.note_wait(str(func))
            dtype = tensors[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if self._waits(func, args, kwargs):
            self.note_wait(str(func))
        if func.namespace == "c10d":  # not every torch has fakes of collectives
            return _collective(func, args, kwargs)
        if func in IN_PLACE | SAMPLES:
            assert all(tensor.is_cuda for tensor in tensors), f"{func} of tensors on the CPU"
            return torch.empty_like(args[0]) if func in SAMPLES else None
        if func is aten._fused_adamw_.default:
            _check_fused_adamw(args, kwargs)
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host waits for a GPU in an operation that reads no number."""
        if func in COPIES:
            source, target, non_blocking = args[0], kwargs.get("device"), kwargs.get("non_blocking")
            if func is aten.copy_.default:
                target, source, *rest = args
                target, non_blocking = target.device, non_blocking or any(rest)
            moves = target is not None and torch.device(target).type != source.device.type
            return moves and not non_blocking
        if func in INDEXED:  # indices on the host are copied first
            return args[0].is_cuda and any(i is not None and not i.is_cuda for i in args[1])
        if func is aten.segment_reduce.default:  # it checks its lengths, unless told not to
            return not kwargs.get("unsafe")
        return func in SOLVERS

    def note_wait(self, what: str) -> None:
        """Count a wait, or raise."""
        place = _calling_function()
        if self.waits is None:
            raise HostWaits(f"{what} in {place}: the host would wait for the GPU")
        self.waits[place] += 1

    # ---------------------------------------------------------------- models and gradients

    def model(self, model: nn.Module) -> nn.Module:
        """Put a model of the CPU on the GPU, in place, parameters and buffers alike."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(on_gpu(parameter))
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = on_gpu(buffer)
        self.parameters += model.parameters()
        return model

    def set_gradients(self) -> None:
        """Give each parameter a gradient, or add one; what a backward pass does."""
        for parameter in self.parameters:
            gradient = torch.empty_like(parameter)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    # ---------------------------------------------------------------- what torch.cuda would do

    @contextlib.contextmanager
    def waiting(self) -> Iterator[Counter[str]]:
        """Count the waits of a block, by the function of this project that made the host wait.

        They do not raise, and a number that is read is 1.
        """
        before, self.waits = self.waits, Counter()
        try:
            yield self.waits
        finally:
            self.waits = before

    def _stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        """(object, attribute, its replacement) for what asks for a real GPU."""
        gpu = self

        def tolist(tensor: FakeTensor) -> Any:
            if tensor.is_cuda:
                gpu.note_wait("tolist")
            with unset_fake_temporarily():
                return torch.ones(tensor.shape).tolist()

        def gradients(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
            leaves = tree_leaves(inputs)
            return tuple(torch.empty_like(each, requires_grad=False) for each in leaves)

        class Event(mock.MagicMock):
            """An event of a stream: only waiting for it counts."""

            def elapsed_time(self, end: Any) -> float:
                return 1.0

            def synchronize(self) -> None:
                gpu.note_wait("Event.synchronize")

        yield FakeTensor, "tolist", tolist
        yield Tensor, "backward", lambda loss: gpu.set_gradients()
        yield torch.autograd, "grad", gradients
        yield torch, "enable_grad", contextlib.nullcontext
        yield torch.cuda, "Event", Event
        yield torch.cuda, "synchronize", lambda *device: gpu.note_wait("synchronize")
        yield torch.cuda, "get_rng_state", lambda device: torch.zeros(16, dtype=torch.uint8)
        yield torch.cuda, "set_rng_state", lambda state, device: None
        yield torch.random, "fork_rng", lambda *_, **__: contextlib.nullcontext()
        yield torch.cuda.amp.common, "amp_definitely_not_available", lambda: False


class _Dispatch(TorchDispatchMode):
    """Hands every operation to a `FakeGpu`, in inference mode as well."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            with self:  # torch has not taken the operation apart yet
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.gpu.run(func, args, kwargs)


class Recording(TorchDispatchMode):
    """Takes the place of a CUDA graph on the CPU: the operations of a block, to be done again.

    As in a graph, an operation reads and writes the memory that it had in the block, and its Python
    numbers stay what they were: what the host decides and counts is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise HostWaits(f"{func} in {_calling_function()}: a graph cannot contain it")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Do what was recorded, on what the tensors contain now."""
        with torch.no_grad():
            for func, args, kwargs, recorded in self.calls:
                for old, new in zip(tree_leaves(recorded), tree_leaves(func(*args, **kwargs))):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def _calling_function() -> str:
    """The innermost function of this project outside the tests, as module.function."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        inside = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if inside and not path.is_relative_to(ROOT / "tests"):
            return f"{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "test"


def _check_fused_adamw(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What the kernel of GPUs takes for granted and torch's fake of it does not check."""
    *lists, _, steps = args[:6]
    for w, g, m, v in zip(*lists):
        for each in (g, m, v):
            assert each.is_cuda, "aten._fused_adamw_: a tensor on the CPU"
            same = (each.dtype, each.shape, each.stride()) == (w.dtype, w.shape, w.stride())
            assert same, "aten._fused_adamw_: tensors of another dtype or layout than the weights"
    found_inf = kwargs.get("found_inf")
    for each in [*steps, *([] if found_inf is None else [found_inf])]:
        assert each.is_cuda, "aten._fused_adamw_: numbers on the CPU"
        assert each.dtype == torch.float32, "aten._fused_adamw_: numbers that are not in fp32"


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective of the fake process group, which neither reads nor writes its tensors."""

    def on_host(fake: FakeTensor) -> Tensor:
        return torch.empty(fake.shape, dtype=fake.dtype)

    with unset_fake_temporarily():
        result = func(*tree_map_only(FakeTensor, on_host, args), **kwargs)
    return (args[0], result[1]) if isinstance(result, tuple) else result


def on_gpu(tensor: Tensor) -> Tensor:
    """A fake tensor on the GPU of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[World]:
    """Rank 0 of a process group whose collectives send nothing; its GPU is `CUDA`."""
    if size == 1:
        yield World(device=CUDA)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield World(rank=0, size=size, device=CUDA, control=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
