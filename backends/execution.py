"""TODO."""

from __future__ import annotations

import warnings

from torch import nn

from backends import onnx_runtime
from errors import InputError

BACKENDS = ("eager", "compile", "cudagraph", "ort")
warnings.filterwarnings(
    "ignore", message=".*cudart_version"
)  # onnxruntime-training, which old torch imports by itself


def apply_backend(name: str, model: nn.Module) -> nn.Module:
    """`model`, compiled or through ONNX Runtime in place: parameters and state_dict stay what they are.

    Raises:
        InputError: the backend is not here.
    """
    if name == "cudagraph" and next(model.parameters()).device.type != "cuda":
        raise InputError("--backend cudagraph needs a GPU; use --backend eager or compile")
    if name in (
        "compile",
        "cudagraph",
    ):  # the whole step is recorded around the compiled model: see graphs.py
        model.compile()  # in place: no `_orig_mod.` prefix in the state_dict
    if name == "ort":
        if reason := onnx_runtime.unavailable_reason():
            raise InputError(f"--backend ort: {reason}; --backend compile is torch's own")
        onnx_runtime.apply(model)
    return model
