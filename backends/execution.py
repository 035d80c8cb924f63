"""How the model's code is executed: eagerly, compiled, as a CUDA graph, or by ONNX Runtime.

model = apply_backend("compile", model)       # parameters and state_dict stay what they are
with without_compilation(len(rows) < batch_size):
    output = model(inputs)                    # a rare shape that is not worth compiling for
compile_seconds()                             # that this process has spent on compiling so far
"""

import contextlib
import sys

import torch
from torch import nn

from backends import onnx_runtime
from errors import InputError

BACKENDS = ("auto", "eager", "compile", "cudagraph", "ort")


def apply_backend(
    name: str, model: nn.Module, *, few_shapes: bool = False, may_fail: bool = False
) -> nn.Module:
    """Prepare a model for a backend, in place.

    For 'cudagraph' the model is compiled here; the training step around it is recorded by
    `backends.cuda_graph.CudaGraphRunner`.

    Args:
        name: one of `BACKENDS` but 'auto'.
        model: on its device; its parameters and the keys of its state_dict stay the same.
        few_shapes: compile the model for each shape of its inputs. Otherwise torch compiles it for
            the first one, and at the second one for all others, with slower kernels.
        may_fail: a part of the model that cannot be compiled runs eagerly.
    Returns:
        The same model.
    Raises:
        InputError: the backend is not available.
    """
    if name == "cudagraph" and next(model.parameters()).device.type != "cuda":
        raise InputError("cudagraph needs a GPU; use eager or compile")
    if name in ("compile", "cudagraph"):
        if may_fail:
            import torch._dynamo

            torch._dynamo.config.suppress_errors = True
        # In place: the state_dict gets no `_orig_mod.` prefix.
        model.compile(dynamic=False if few_shapes else None)
    if name == "ort":
        if reason := onnx_runtime.unavailable_reason():
            raise InputError(f"ort: {reason}; compile is torch's own")
        onnx_runtime.apply(model)
    return model


def compile_seconds() -> float:
    """Return the seconds that this process has spent on compiling models so far.

    That is torch's own account of tracing and of making kernels, of the backward pass as well;
    torch 2.3 has none.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")  # it is loaded where a model is compiled
    spent: dict[str, float] = getattr(dynamo, "calculate_time_spent", dict)()
    return spent.get("entire_frame_compile", 0.0) + spent.get("entire_backward_compile", 0.0)


def without_compilation(condition: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled models run eagerly, if the condition holds.

    The last batch of an epoch may be smaller than the others. Compiling the model anew for its
    shape takes longer than the epoch does, and torch would then use the slower kernels for any
    shape in all later steps. For an evaluation it takes longer than the evaluation.
    """
    set_stance = getattr(torch.compiler, "set_stance", None)  # new in torch 2.6
    if not condition or not set_stance or "torch._dynamo" not in sys.modules:  # nothing is compiled
        return contextlib.nullcontext()
    return set_stance("force_eager")
