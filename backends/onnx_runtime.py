"""Backend 'ort': training passes through ONNX Runtime's ORTModule, of the legacy stack.

    if reason := unavailable_reason():        # why it cannot be used, and how to install it
        raise InputError(reason)
    apply(model)                              # in place; parameters, names and state_dict stay

ORTModule exports the model at its first training pass and runs forward and backward pass as its own
graph, in fp32 on CPUs. It differs from torch in two ways: dropout is drawn from its own generator,
whose state no checkpoint contains, and running variances are divided by n, not n - 1. Evaluation
runs in torch. Source: onnxruntime.ai, "ORTModule".
"""

import contextlib
import copy
import os
import sys
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from errors import InputError, first_line, last_line

INSTALL_HINT = "bash setup_venv.sh requirements-legacy.txt makes .venv-legacy, which has it"
ORT_GRAD_FN = "_ORTModuleFunctionBackward"
"""Type of the `grad_fn` of an output that ORTModule computed, and not torch in its place."""


def silence_onnxruntime_notice() -> None:
    """Ignore onnxruntime-training's warning that it was not built for CUDA.

    The warning comes when onnxruntime is imported, which torch 2.3 does by itself together with
    torch.onnx, which torchvision imports.
    """
    warnings.filterwarnings("ignore", message=".*cudart_version")


def unavailable_reason() -> str:
    """Return why ORTModule cannot be used and how to install it, or '' where it can be used."""
    try:
        _import_ortmodule()
    except Exception as error:  # which type it is depends on versions and machine
        return f"ORTModule does not load ({first_line(error)}): {INSTALL_HINT}"
    return ""


def apply(model: nn.Module) -> None:
    """Let training passes of `model` go through ORTModule, in place.

    Its weights become contiguous, as ONNX has no channels_last.
    """
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    model.forward = OrtForward(model)  # type: ignore[method-assign,assignment]


class OrtForward:
    """Replaces the `forward` of a model: ORTModule in training, the model's own in evaluation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.eager = model.forward
        # A shallow copy shares parameters, buffers and submodules, and keeps the model's own
        # forward, which ORTModule exports, while the model's is replaced by this object.
        self.graph = _import_ortmodule()(copy.copy(model).train())
        self.batch_norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.exported_arities: set[int] = set()  # numbers of inputs for which a graph exists

    def __call__(self, *inputs: Tensor) -> Tensor:
        if not self.model.training or not torch.is_grad_enabled():
            return self.eager(*inputs)
        if len(inputs) not in self.exported_arities:
            self.export(inputs)
        for norm in self.batch_norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1  # ONNX's batch-norm does not count batches
        return self.graph(*inputs)

    def export(self, inputs: tuple[Tensor, ...]) -> None:
        """Let ORTModule export the model in a first pass, and undo what that does to buffers."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        try:
            with _no_output():
                output = self.graph(*inputs)
        except Exception as error:  # types of ORTModule and of torch's exporter
            reason = f"the model cannot be exported ({last_line(error)})"
            raise InputError(f"backend ort: {reason}") from None
        if type(output.grad_fn).__name__ != ORT_GRAD_FN:
            raise InputError(
                f"backend ort: the model ran in torch ({type(output.grad_fn).__name__}), "
                "not in ONNX Runtime"
            )
        for buffer, value in zip(self.model.buffers(), buffers):
            buffer.copy_(value)
        self.exported_arities.add(len(inputs))


def _import_ortmodule() -> type[nn.Module]:
    """Import the class ORTModule, and raise where its C++ extensions have not been built.

    Importing it replaces torch.manual_seed by a function that also seeds ONNX Runtime.
    """
    # ORTModule would otherwise run the model in torch, without notice, where it cannot itself.
    os.environ["ORTMODULE_FALLBACK_POLICY"] = "FALLBACK_DISABLE"
    with _no_output():
        from onnxruntime.training.ortmodule import ORTModule

        ORTModule(nn.Flatten())
    return ORTModule


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Discard warnings and console output of the block, from Python and from C++."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with warnings.catch_warnings(), open(os.devnull, "w", encoding="utf-8") as null:
        warnings.simplefilter("ignore")
        try:
            for descriptor in (1, 2):
                os.dup2(null.fileno(), descriptor)
            with contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
                yield
        finally:
            for descriptor, original in zip((1, 2), saved):
                os.dup2(original, descriptor)
                os.close(original)
