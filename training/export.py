"""TODO."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from errors import InputError
from models import fusion

LARGEST_BATCH = 4096  # of an exported model


EXPORT_TOLERANCE = (
    1e-4  # largest difference of a probability between the exported and the original model
)


def export(
    model: nn.Module, example: Tensor, path: Path, dynamic: dict[int, tuple[str, int]]
) -> float:
    """Write the model to `path` (.onnx or .pt2), batch-norm folded into its convolutions; run the file on `example`, and compare.

    Args:
        model: any; it is folded in place.
        example: inputs, at least 2 in every dynamic dimension.
        path: ends in .onnx or .pt2.
        dynamic: dimensions of the input that may change: {dimension: (name, largest)}.
    Returns:
        The largest difference of a probability.
    Raises:
        InputError: another ending, a package is missing, or the outputs differ.
    """
    model = model.cpu().float().eval()
    wanted = model(example).softmax(1).detach()
    model = fusion.fold_batch_norm(model)
    shapes = (
        {axis: torch.export.Dim(name, min=1, max=most) for axis, (name, most) in dynamic.items()},
    )
    if path.suffix == ".pt2":
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=shapes), path)
        given = torch.export.load(path).module()(example)
    elif path.suffix == ".onnx":
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
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        given = torch.from_numpy(
            session.run(None, {session.get_inputs()[0].name: example.numpy()})[0]
        )
    else:
        raise InputError(f"--export {path}: the name must end in .onnx or .pt2")
    difference = (given.softmax(1) - wanted).abs().max().item()
    if not difference <= EXPORT_TOLERANCE:
        raise InputError(
            f"--export {path}: its probabilities differ from the model's by {difference:.2g}; do not use the file"
        )
    return difference
