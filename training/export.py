"""Exported models: a file that runs without this project, checked against the model it came from.

export(model, example_inputs, Path("model.onnx"), dynamic={0: ("batch", LARGEST_BATCH)})
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError
from models import fusion

SUFFIXES = (".onnx", ".pt2")
LARGEST_BATCH = 4096  # of an exported model
TOLERANCE = 1e-4  # largest difference of a probability between the exported and the original model


def export(
    model: nn.Module, example: Tensor, path: Path, *, dynamic: Mapping[int, tuple[str, int]]
) -> float:
    """Write a model to a file, run the file on `example`, and compare.

    Args:
        model: any; batch-norm is folded into its convolutions in place.
        example: inputs, at least 2 in every dynamic dimension.
        path: ends in .onnx or .pt2.
        dynamic: dimensions of the input that may change: {dimension: (name, largest size)}.
    Returns:
        The largest difference of a probability.
    Raises:
        InputError: another ending, a package is missing, or the outputs differ.
    """
    model = model.cpu().float().eval()
    expected = model(example).softmax(1).detach()
    model = fusion.fold_batch_norm(model)
    sizes = {
        axis: torch.export.Dim(name, min=1, max=largest)
        for axis, (name, largest) in dynamic.items()
    }
    if path.suffix == ".pt2":
        program = torch.export.export(model, (example,), dynamic_shapes=(sizes,))
        torch.export.save(program, path)
        given = torch.export.load(path).module()(example)
    elif path.suffix == ".onnx":
        given = _export_onnx(model, example, path, sizes)
    else:
        raise InputError(f"--export {path}: the name must end in .onnx or .pt2")
    difference = (given.softmax(1) - expected).abs().max().item()
    if not difference <= TOLERANCE:
        raise InputError(
            f"--export {path}: its probabilities differ from the model's by {difference:.2g}; "
            "do not use the file"
        )
    return difference


def _export_onnx(model: nn.Module, example: Tensor, path: Path, sizes: Mapping[int, Any]) -> Tensor:
    """Write an ONNX file; returns the logits that ONNX Runtime computes with it."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ImportError:
        raise InputError(
            "--export to .onnx needs packages: pip install onnx onnxscript onnxruntime"
        ) from None
    torch.onnx.export(
        model,
        (example,),
        path,
        dynamo=True,
        dynamic_shapes=(sizes,),
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: example.numpy()}
    return torch.from_numpy(session.run(None, inputs)[0])
