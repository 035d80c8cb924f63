"""`--backend ort`: training passes through ONNX Runtime's ORTModule, of the stack in requirements-legacy.txt.

    ort_backend.lacks()              # '' where it can be used, else why not and how to get it
    ort_backend.apply(model)         # in place; parameters, names and state_dict stay

ORTModule exports the model at its first training pass and runs forward and backward in its own graph, in fp32 on CPUs. It draws
dropout from a generator of its own, which no checkpoint holds, and divides running variances by n where torch does by n - 1.
Evaluation stays torch's.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from errors import InputError

INSTALL = "bash setup_venv.sh requirements-legacy.txt makes .venv-legacy, which has it"
PROOF = "_ORTModuleFunctionBackward"  # what the gradient of an output goes through, unless ORTModule fell back to torch


def unavailable_reason() -> str:
    """Why ORTModule cannot be used here, and how to get it; '' where it can."""
    if (
        importlib.util.find_spec("onnxruntime") is None
        or importlib.util.find_spec("onnxruntime.training") is None
    ):
        return f"onnxruntime-training is not installed: {INSTALL}"
    try:
        load()
    except Exception as error:  # whatever its import runs into, by version and machine
        return f"ORTModule does not load ({(str(error).strip() or type(error).__name__).splitlines()[0][:120]}): {INSTALL}"
    return ""


def load() -> type[nn.Module]:
    """The class ORTModule. Importing it replaces torch.manual_seed by one that seeds ONNX Runtime as well."""
    os.environ["ORTMODULE_FALLBACK_POLICY"] = (
        "FALLBACK_DISABLE"  # an error instead of torch's own pass without a word
    )
    with silence():
        from onnxruntime.training.ortmodule import ORTModule

        ORTModule(nn.Flatten())  # raises where the C++ extensions were not built
    return ORTModule


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without the banners of the export, which come from Python and C++."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        try:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            for number, old in zip((1, 2), kept):
                os.dup2(old, number)
                os.close(old)


def apply(model: nn.Module) -> None:
    """Let training passes of `model` go through ORTModule. Its weights become contiguous: ONNX knows no channels_last."""
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    model.forward = Forward(model)  # type: ignore[method-assign,assignment]


class Forward:
    """Stands in for `model.forward`."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.eager = model, model.forward
        twin = copy.copy(
            model
        )  # shares parameters, buffers and parts with the model, whose forward leads here
        self.graph = load()(twin.train())
        self.norms = [
            module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]
        if any(norm.momentum is None for norm in self.norms):
            raise InputError(
                "--backend ort: ONNX's batch-norm has no cumulative average (momentum=None)"
            )
        self.exported: set[int] = set()  # numbers of inputs

    def __call__(self, *inputs: Tensor) -> Tensor:
        """As `model.forward`."""
        if not self.model.training or not torch.is_grad_enabled():
            return self.eager(*inputs)
        if len(inputs) not in self.exported:
            self.export(inputs)
        for norm in self.norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked += 1  # ONNX's batch-norm does not count
        return self.graph(*inputs)

    def export(self, inputs: tuple[Tensor, ...]) -> None:
        """A first pass, which exports; running statistics, which that moves once too often, are put back.

        Raises:
            InputError: it cannot be exported, or ran in torch after all.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        try:
            with silence():
                output = self.graph(*inputs)
        except Exception as error:  # ORTModule's own types, and those of torch's exporter
            line = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise InputError(
                f"--backend ort: the model cannot be exported ({line[:160]})"
            ) from None
        if type(output.grad_fn).__name__ != PROOF:
            raise InputError(
                f"--backend ort: the model ran in torch ({type(output.grad_fn).__name__}), not in ONNX Runtime"
            )
        for buffer, value in zip(self.model.buffers(), before):
            buffer.copy_(value)
        self.exported.add(len(inputs))
