"""Exported models: a file that runs without this project, checked against the model it came from.

export(model, example_inputs, Path("model.onnx"), dynamic={0: ("batch", LARGEST_BATCH)},
       metadata={"classes": ["cat", "dog"], "mean": [0.5], ...})

The file also says what its numbers mean: in .pt2 in the extra file metadata.json, in .onnx and
.safetensors in the file's own metadata, which are strings of JSON, one for each name.
"""

import io
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from errors import InputError, in_one_line, needing, writing

SUFFIXES = (".onnx", ".pt2", ".safetensors")
PT2_METADATA = "metadata.json"  # the name of the extra file
LARGEST_BATCH = 4096  # of an exported model
TOLERANCE = 1e-4  # largest difference of a probability between the exported and the original model


class Calibrated(nn.Module):
    """A model whose logits are divided by a temperature, as their softmax or sigmoid needs it."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs) / self.temperature


def export(
    model: nn.Module,
    example: Tensor,
    path: Path,
    *,
    dynamic: Mapping[int, tuple[str, int]],
    metadata: Mapping[str, Any],
    probabilities: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(1),
) -> None:
    """Write a model to a file, run the file on `example`, compare, and print how far they differ.

    Args:
        model: any; it is put on the CPU and into evaluation mode in place.
        example: inputs, at least 2 in every dynamic dimension.
        path: ends in one of `SUFFIXES`; .safetensors holds the weights alone.
        dynamic: dimensions of the input that may change: {dimension: (name, largest size)}.
        metadata: plain values that the file shall hold.
        probabilities: of the classes, by the logits.
    Raises:
        InputError: a package is missing, the outputs differ, or the file cannot be written.
    """
    texts = {name: json.dumps(value) for name, value in metadata.items()}
    sizes = {
        axis: torch.export.Dim(name, min=1, max=largest)
        for axis, (name, largest) in dynamic.items()
    }
    advice = f"; try another of {', '.join(SUFFIXES)}"
    with (
        # of many types, as for a model of more than 2 GiB
        in_one_line(f"{path}: the model cannot be exported", advice),
        writing(str(path), "file"),
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
    ):
        model = model.cpu().float().eval()
        expected = probabilities(model(example)).detach()
        file = Path(folder) / path.name
        if path.suffix == ".pt2":
            given = _export_pt2(model, example, file, sizes, metadata)
        elif path.suffix == ".onnx":
            given = _export_onnx(model, example, file, sizes, texts)
        else:
            given = _export_weights(model, example, file, texts)
        difference = (probabilities(given) - expected).abs().max().item()
        if not difference <= TOLERANCE:
            raise InputError(
                f"{path}: not written, as its probabilities would differ from the "
                f"model's by {difference:.2g}"
            )
        file.replace(path)
    print(f"{path}: same probabilities as the model, to {difference:.1g}")


def _export_pt2(
    model: nn.Module,
    example: Tensor,
    path: Path,
    sizes: Mapping[int, Any],
    metadata: Mapping[str, Any],
) -> Tensor:
    """Write a program of torch.export; returns the logits that it computes when it is read."""
    program = torch.export.export(model, (example,), dynamic_shapes=(sizes,))
    content = io.BytesIO()  # torch's own writer ends the process on a full disk
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No complete tensor found")  # of weights on a GPU
        torch.export.save(program, content, extra_files={PT2_METADATA: json.dumps(metadata)})
    path.write_bytes(content.getvalue())
    return torch.export.load(path).module()(example)


def _export_onnx(
    model: nn.Module, example: Tensor, path: Path, sizes: Mapping[int, Any], texts: dict[str, str]
) -> Tensor:
    """Write an ONNX file; returns the logits that ONNX Runtime computes with it."""
    with needing(str(path), "onnx onnxscript onnxruntime"):
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch's exporter needs it
    torch.onnx.export(
        model,
        (example,),
        path,
        dynamo=True,
        dynamic_shapes=(sizes,),
        external_data=False,
        input_names=["input"],
        output_names=["logits"],
        verbose=False,
    )
    program = onnx.load(path)
    onnx.helper.set_model_props(program, texts)
    onnx.save(program, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: example.numpy()}
    return torch.from_numpy(session.run(None, inputs)[0])


def _export_weights(model: nn.Module, example: Tensor, path: Path, texts: dict[str, str]) -> Tensor:
    """Write the weights; returns the logits of the model with those that are in the file."""
    with needing(str(path), "safetensors"):
        from safetensors import torch as safetensors
    weights = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    path.write_bytes(safetensors.save(weights, metadata=texts))  # save_file lets no other user read
    # Some buffers are no part of the state_dict.
    stored = {**dict(model.named_buffers()), **safetensors.load_file(path)}
    return functional_call(model, stored, example, strict=True, tie_weights=False).detach()
