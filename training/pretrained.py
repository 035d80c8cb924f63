"""Weights from elsewhere to begin with: fine-tuning.

weights = read_weights(Path("runs/my-run/best.pt"))   # or .safetensors, or a plain state_dict
line = load_pretrained(model, weights, "my run")       # the classifier may have other classes
freeze_all_but_classifier(model)
groups = decay_layers(model, groups, 0.75)            # smaller rates for layers near the input
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, first_line

NESTED = ("state_dict", "model")  # where other projects' checkpoints keep their weights
MAX_NAMES = 3  # in the message of weights that do not fit


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file, on the CPU.

    Args:
        path: a run folder or checkpoint of this project, of which the averaged weights are taken
            where there are any; a .safetensors file; or a file that torch.save wrote, with a
            state_dict or with one under 'state_dict' or 'model'.
    Raises:
        InputError: there is no such file, or it holds no weights.
    """
    path = _find_file(path)
    state = _read_safetensors(path)[0] if path.suffix == ".safetensors" else _read_torch(path)
    if state.get("average"):
        state = state["average"]["weights"]
    for name in NESTED:
        if isinstance(state.get(name), Mapping):
            state = state[name]
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"--weights {path}: holds no weights by their names")
    return {name.removeprefix("module."): value for name, value in state.items()}


def read_tokenizer(path: Path) -> str:
    """The tokenizer that the weights of a text classifier were trained with, as JSON.

    Args:
        path: a run folder or checkpoint of this project, or a .safetensors file that it exported.
    Raises:
        InputError: there is no such file, or it holds no tokenizer.
    """
    path = _find_file(path)
    if path.suffix == ".safetensors":
        tokenizer = json.loads(_read_safetensors(path)[1].get("tokenizer", '""'))
    else:
        tokenizer = _read_torch(path).get("tokenizer", "")
    if not isinstance(tokenizer, str) or not tokenizer:
        raise InputError(
            f"--weights {path}: holds no tokenizer; give a run of transformer_test.py, its "
            "checkpoint, or a .safetensors file that it exported"
        )
    return tokenizer


def _find_file(path: Path) -> Path:
    if path.is_dir():
        path = path / "last.pt"
    if not path.is_file():
        raise InputError(f"--weights {path}: no such file")
    return path


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The weights and the metadata of a file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InputError(
            "--weights of .safetensors needs a package: pip install safetensors"
        ) from None
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"--weights {path}: cannot be read ({first_line(error)})") from None


def _read_torch(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for damaged files
        raise InputError(f"--weights {path}: cannot be read ({first_line(error)})") from None
    if not isinstance(state, Mapping):
        raise InputError(f"--weights {path}: holds no weights by their names")
    return dict(state)


def classifier_names(model: nn.Module) -> list[str]:
    """The names of the parameters of the linear layer that a model defines last."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise InputError("--weights, --freeze: this model has no linear layer as its classifier")
    return [name for name, _ in model.named_parameters() if name.startswith(f"{linear[-1]}.")]


def load_pretrained(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    source: str,
    *,
    flags: str = "--arch, --image_size",
    kept: Sequence[str] = (),
) -> str:
    """Load weights into a model; its classifier stays as it is where it has another shape.

    Args:
        model: whose weights are replaced in place; it may take grey images where the weights are
            for colours, or the other way round.
        weights: by the model's names, on any device.
        source: where they are from, for messages.
        flags: which say what the model is, for messages.
        kept: names of what stays the model's own, whether or not there is a weight of that name.
    Returns:
        A line that says what was loaded, and whether the classifier begins anew.
    Raises:
        InputError: other weights than the classifier's are missing, unknown or of another shape.
    """
    classifier = classifier_names(model)
    own = {name: value for name, value in model.state_dict().items() if name not in kept}
    weights = {
        name: fit_channels(value, own.get(name))
        for name, value in weights.items()
        if name not in kept
    }
    shapes = {name: value.shape for name, value in weights.items()}
    wrong = [name for name, value in own.items() if shapes.get(name) != value.shape]
    anew = [name for name in wrong if name in classifier]
    wrong = [name for name in wrong if name not in classifier]
    unknown = [name for name in weights if name not in own]
    if wrong or unknown:
        names = [*wrong, *unknown]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        raise InputError(
            f"--weights {source}: not of this model ({flags}): {', '.join(names[:MAX_NAMES])}{more}"
        )
    anew = classifier if anew else []
    model.load_state_dict(
        {name: value for name, value in weights.items() if name not in anew}, strict=False
    )
    line = f"weights of {source}: {len(own) - len(anew)} of {len(own)} tensors"
    if not anew:
        return line
    shape = " x ".join(map(str, own[anew[0]].shape))
    return f"{line}; the classifier {anew[0].rpartition('.')[0]} ({shape}) begins anew"


def fit_channels(weight: Tensor, own: Tensor | None) -> Tensor:
    """A first convolution's weight for grey images as one for colours, or the other way round.

    On grey images, whose three channels are equal, both compute the same.

    Args:
        weight: what was read.
        own: the model's weight of that name, if there is one.
    """
    if own is None or weight.ndim != 4 or own.ndim != 4:
        return weight
    given, wanted = weight.shape[1], own.shape[1]
    if (given, wanted) == (1, 3) and weight.shape[2:] == own.shape[2:]:
        return weight.expand(-1, 3, -1, -1) / 3
    if (given, wanted) == (3, 1) and weight.shape[2:] == own.shape[2:]:
        return weight.sum(1, keepdim=True)
    return weight


def freeze_all_but_classifier(model: nn.Module) -> None:
    """Train the classifier alone; BatchNorm's running statistics still follow the data."""
    classifier = classifier_names(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in classifier)


def decay_layers(
    model: nn.Module, groups: Sequence[dict[str, Any]], decay: float
) -> list[dict[str, Any]]:
    """Split parameter groups by layers, and give each an `lr_scale`.

    The layers are the parts of the model that its parameters' names begin with, to two levels, in
    the order of the parameters: conv1, bn1, layer1.0, layer1.1, ..., fc. The last has the scale 1,
    and each before it `decay` times that of the next, as in BEiT (arXiv:2106.08254, appendix).

    Args:
        model: whose parameters are in the groups.
        groups: of its parameters.
        decay: in (0, 1].
    """
    layers: dict[str, int] = {}
    layer_of: dict[Tensor, int] = {}
    for name, parameter in model.named_parameters():
        *modules, _ = name.split(".")
        layer_of[parameter] = layers.setdefault(".".join(modules[:2]), len(layers))
    split = []
    for group in groups:
        numbers = sorted({layer_of[p] for p in group["params"]})
        for number in numbers:
            parameters = [p for p in group["params"] if layer_of[p] == number]
            scale = math.pow(decay, len(layers) - 1 - number)
            split.append({**group, "params": parameters, "lr_scale": scale})
    return split
