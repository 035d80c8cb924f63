"""Weights from elsewhere to begin with: fine-tuning.

saved = read_saved_model(Path("runs/my-run/best.pt"))  # or .safetensors, or a plain state_dict
line = load_pretrained(model, saved, "my run", classes=["cat", "dog"])
freeze_all_but(model, classifier_names(model))
"""

import argparse
import contextlib
import json
import re
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, in_one_line, needing
from input_pipeline.own_data import list_names, normal_form
from models.lora import merged
from optimizers.param_groups import classifier_prefixes

# Where other projects keep the weights, an average of them first, as timm loads it.
NESTED = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
COMPILED = "_orig_mod."  # in names of a model, or a part of one, that torch.compile has wrapped
PICKLED_OBJECT = re.compile(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)")  # in torch's error
AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # classifiers that torchvision has in training alone
PREPROCESSING = ("mean", "std", "size", "interpolation")  # what weights expect of images
KINDS = "give a run folder, a .pt file, or a .safetensors file"


@dataclass(frozen=True)
class SavedModel:
    """Weights, and what is known of the model that they are of."""

    weights: Mapping[str, Tensor]  # by their names, on the CPU
    classes: Sequence[str] = ()  # in the order of its outputs; empty where they are not known
    tokenizer: str = ""  # of a text classifier, as JSON
    encoder: Mapping[str, Any] = field(default_factory=dict)  # arguments of hugging_face.Encoder
    flags: Mapping[str, Any] = field(default_factory=dict)  # with which it was made, if known
    preprocessing: Mapping[str, Any] = field(default_factory=dict)  # `PREPROCESSING`, if known


def read_saved_model(path: Path) -> SavedModel:
    """Read the weights in a file.

    Args:
        path: a run folder or checkpoint of this project, of which the averaged weights are taken
            where there are any; a .safetensors file; or a file that torch.save wrote, with a
            state_dict, or with one under a name of `NESTED` or as its only one.
    Raises:
        InputError: there is no such file, or it holds no weights.
    """
    if path.is_dir():
        path = path / "last.pt"
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    is_safetensors = path.suffix.lower() == ".safetensors"
    state, about = _read_safetensors(path) if is_safetensors else _read_torch(path)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    weights = merged(tensors)
    if not weights:
        raise InputError(f"{path}: holds no weights by their names; {KINDS}")
    kinds = {"classes": list, "tokenizer": str, "encoder": dict, "flags": dict}
    known = {name: about[name] for name in kinds if isinstance(about.get(name), kinds[name])}
    if all(isinstance(about.get(name), list) and about[name] for name in ("mean", "std")):
        known["preprocessing"] = {name: about[name] for name in PREPROCESSING if name in about}
    return SavedModel(weights, **known)


def _read_safetensors(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The weights, and the metadata, whose values are JSON where this project wrote them."""
    with needing(str(path), "safetensors"):
        from safetensors import SafetensorError, safe_open
    broken = in_one_line(f"{path}: cannot be read", "", (SafetensorError,))
    with broken, safe_open(path, "pt") as file:
        names = file.keys()
        weights = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata() or {}
    about = {}
    for name, text in metadata.items():
        with contextlib.suppress(ValueError):  # another project's
            about[name] = json.loads(text)
    return weights, about


def _read_torch(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The weights, and all that the file holds."""
    try:
        allow = getattr(torch.serialization, "safe_globals", contextlib.nullcontext)  # torch 2.5
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():
            raise ValueError("a part does not match its checksum")
        with allow([argparse.Namespace]):  # the flags in timm's files
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds for damaged files
        if found := PICKLED_OBJECT.search(str(error)):
            raise InputError(
                f"{path}: holds objects of Python beside its weights ({found[1]}), which "
                "are not loaded since they could run any code; save the state_dict alone"
            ) from None
        raise InputError(f"{path}: is no readable file of weights; {KINDS}") from None
    if not isinstance(state, Mapping):
        return {}, {}
    average = state.get("average")
    if isinstance(average, Mapping) and average.get("weights") and average.get("steps"):
        return average["weights"], state
    # A state_dict maps names such as conv1.weight to tensors; the state of an optimizer does not.
    nested = {
        str(name): value
        for name, value in state.items()
        if isinstance(value, Mapping)
        and any(isinstance(v, Tensor) and "." in str(k) for k, v in value.items())
    }
    usual = [name for name in NESTED if name in nested]
    if len(nested) > 1 and not usual:
        raise InputError(
            f"{path}: holds the weights of several models ({', '.join(nested)}); save "
            "the state_dict of one alone"
        )
    return (nested[[*usual, *nested][0]], state) if nested else (state, {})


def match_names(
    weights: Mapping[str, Tensor], own: Collection[str], *, source: str
) -> dict[str, Tensor]:
    """Give the weights of a file the names that they have in a model.

    DDP, Lightning, torch.compile and others put words in front of each name, such as 'module.' or
    'model.'. What else the file holds, such as weights of a loss, is left out where there are such
    words.

    Raises:
        InputError: two models in the file fit equally well.
    """
    plain = {name.replace(COMPILED, ""): value for name, value in weights.items()}
    prefixes = {name[: end + 1] for name in plain for end, sign in enumerate(name) if sign == "."}
    found = {prefix: sum(prefix + name in plain for name in own) for prefix in ("", *prefixes)}
    best = [prefix for prefix in found if found[prefix] == max(found.values())]
    if "" in best:
        return plain
    if len(best) > 1:
        raise InputError(
            f"{source}: holds weights of several models that fit, whose names begin "
            f"with {list_names(sorted(best))}; save the state_dict of one alone"
        )
    (prefix,) = best
    return {name.removeprefix(prefix): plain[name] for name in plain if name.startswith(prefix)}


def classifier_names(model: nn.Module) -> list[str]:
    """The parameters of the classifier, see `classifier_prefixes`."""
    heads = classifier_prefixes(model)
    if not (names := [name for name, _ in model.named_parameters() if name.startswith(heads)]):
        raise InputError("this model has no linear layer as its classifier")
    return names


def load_pretrained(
    model: nn.Module,
    saved: SavedModel,
    source: str,
    *,
    classes: Sequence[str],
    flags: str = "architecture, image size",
    kept: Sequence[str] = (),
) -> tuple[str, bool]:
    """Load weights into a model. Its classifier keeps the outputs of classes of the same name.

    All other outputs begin as the model has them, as all do where the saved names are not known.

    Args:
        model: whose weights are replaced in place; it may take grey images where the weights are
            for colours, or the other way round.
        flags: what says which model it is, for messages.
        kept: names of what stays the model's own, whether or not there is a weight of that name.
    Returns:
        A line that says what was loaded, and which outputs begin anew; and whether any does.
    Raises:
        InputError: other weights than the classifier's are missing, unknown or of another shape.
    """
    classifier, state = classifier_names(model), model.state_dict()
    own = {name: value for name, value in state.items() if name not in kept}
    weights = {
        name: fit_channels(value, own.get(name))
        for name, value in match_names(saved.weights, own, source=source).items()
        if name not in kept and not name.startswith(AUXILIARY)
    }
    rows = matching_rows(saved.classes, classes)
    shapes = {name: (len(saved.classes), *own[name].shape[1:]) for name in classifier}
    if any(name not in weights or weights[name].shape != shapes[name] for name in classifier):
        rows = {}
    for name in classifier:
        anew = own[name].clone()
        for row, saved_row in rows.items():
            anew[row] = weights[name][saved_row]
        weights[name] = anew
    complete: Any = OrderedDict(weights | {name: state[name] for name in kept if name in state})
    # MNASNet asks for its version; without theirs, other modules rename what older files hold.
    complete._metadata = {"": state._metadata[""]}  # type: ignore[attr-defined]
    try:
        model.load_state_dict(complete)
    except RuntimeError as error:  # whose first line is a heading
        named, *others = " ".join(str(error).splitlines()[1:2]).strip().split('", "')
        reason = f'{named}" and {len(others)} more' if others else named
        raise InputError(f"{source}: not of this model ({flags}): {reason}") from None
    for name, value in model.state_dict().items():
        if not value.isfinite().all():
            raise InputError(f"{source}: {name} holds numbers that are not finite")
    num_loaded = len(own) - (0 if rows else len(classifier))
    layer = classifier[0].rpartition(".")[0]
    line = f"weights of {source}: {num_loaded} tensors{describe_rows(layer, rows, classes)}"
    return line, len(rows) < len(classes)


def matching_rows(saved_classes: Sequence[str], classes: Sequence[str]) -> dict[int, int]:
    """The numbers of classes, and those of the saved classes of the same name in any case.

    LABEL_1, as transformers calls a class without a name, is 1 as well.
    """
    names = [normal_form(str(name)) for name in saved_classes]
    numbers = {name.removeprefix("LABEL_"): number for number, name in enumerate(names)}
    numbers |= {name.casefold(): number for number, name in enumerate(names)}
    numbers |= {name: number for number, name in enumerate(names)}  # the same case counts more
    keys = [normal_form(name) for name in classes]
    found = [numbers.get(key, numbers.get(key.casefold(), -1)) for key in keys]
    return {row: number for row, number in enumerate(found) if number >= 0}


def describe_rows(layer: str, rows: Mapping[int, int], classes: Sequence[str]) -> str:
    """The end of a line that says what a classifier keeps, see `matching_rows`."""
    new = [name for number, name in enumerate(classes) if number not in rows]
    if not rows:
        return f"; {layer} begins anew, as the weights name no class that is here"
    if new:
        return f"; in {layer} begin anew: {list_names(new)}"
    return f"; {layer} keeps all outputs, by name"


def fit_channels(weight: Tensor, own: Tensor | None) -> Tensor:
    """A first convolution's weight for grey images as one for colours, or the other way round.

    On grey images, whose three channels are equal, both compute the same.

    Args:
        own: the model's weight of that name, if there is one.
    """
    if own is None or weight.ndim != 4 or own.ndim != 4:
        return weight
    if (weight.shape[1], own.shape[1]) == (1, 3):
        return weight.expand(-1, 3, -1, -1) / 3
    if (weight.shape[1], own.shape[1]) == (3, 1):
        return weight.sum(1, keepdim=True)
    return weight


def freeze_all_but(model: nn.Module, classifier: Collection[str]) -> None:
    """Train parameters of these names, and a prior's weight; the rest computes as in evaluation.

    `model.train()` leaves in evaluation mode whatever holds a frozen parameter: BatchNorm's
    statistics stay, and nothing is dropped there. Copies of the model do the same.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in (*classifier, "prior_weight"))
    model.train = partial(_train_unfrozen, model)  # type: ignore[method-assign]
    model.train()


def hold_norms(model: nn.Module) -> None:
    """Let `model.train()` leave BatchNorm in evaluation mode: it keeps the statistics it has.

    Scale and shift of each are trained. Statistics of a few images that are unlike those of the
    weights would change what all layers see, before these have learned anything.
    """
    model.train = partial(_train_all_but_norms, model)  # type: ignore[method-assign]
    model.train()


def _train_all_but_norms(model: nn.Module, mode: bool = True) -> nn.Module:
    type(model).train(model, mode)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def _train_unfrozen(model: nn.Module, mode: bool = True) -> nn.Module:
    type(model).train(model, False)
    for module in [*model.modules()][1:] if mode else ():
        trained = [parameter.requires_grad for parameter in module.parameters()]
        if trained and all(trained):
            module.train()  # with its dropout
    return model
