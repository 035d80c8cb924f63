"""Fine-tuning by flags, for both scripts: weights from elsewhere, frozen layers.

saved = read_saved_model(settings, run)
data = begin_with_weights(settings, run, model, saved, data)
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cli.data import Data, Run
from cli.factory import MIN_EVAL_BATCH, class_weights
from cli.flag_parser import flat
from cli.options import print_once
from cli.settings import Settings
from cli.text_classification import TextSettings
from distributed.agreement import local_main_first, raise_together
from errors import InputError, refused_as
from input_pipeline import own_data
from models import image_models, lora, pretrained
from models.hugging_face import Encoder, is_hf, read_encoder, refused
from models.pretrained import SavedModel
from training import linear_probe
from training.checkpoint import latest_files, load_into
from training.evaluation import EVAL_SET_NAMES
from training.losses import is_right

MOST_PROBED = 10_000  # rows of a set that a linear probe sees


def read_saved_model(settings: Settings, run: Run) -> SavedModel | None:
    """What --weights or --arch hf:NAME names; None without both.

    Raises:
        InputError: there is no such file, it holds no weights, or --freeze is given without; or
            there is no --data_dir, which is said before anything is downloaded.
    """
    is_own, folder = settings.dataset in own_data.DATASETS, Path(settings.data_dir)
    with raise_together(run.world):
        if is_own and not folder.exists():
            raise InputError(f"--data_dir {settings.data_dir}: there is no such folder")
    is_of_texts, arch = isinstance(settings, TextSettings), settings.arch
    if settings.weights is None and is_hf(arch) and is_of_texts:
        with refused_as(f"--arch {arch}"), local_main_first(run.world), refused(arch):
            return read_encoder(arch)
    if settings.weights is None:
        if settings.freeze or settings.lora:
            needed = "needs --weights or --arch hf:NAME: else all layers but the last stay random"
            raise InputError(f"{'--freeze' if settings.freeze else '--lora'} {needed}")
        return None
    with refused_as(f"--weights {settings.weights}"), local_main_first(run.world):
        if settings.weights != "DEFAULT":
            saved = read_weights(Path(settings.weights))
        elif is_of_texts:
            raise InputError("there are none for texts; use --arch hf:NAME")
        else:
            weights, names = image_models.default_weights(arch)
            saved = SavedModel(weights, names)
        if not is_of_texts and not saved.preprocessing:
            usual = image_models.usual_preprocessing(arch)
            saved = dataclasses.replace(saved, preprocessing=usual)
        return saved


def read_weights(path: Path) -> SavedModel:
    """As `pretrained.read_saved_model`; of a run folder the newest checkpoint that can be read."""
    files = latest_files(path) if path.is_dir() else []
    for file, older in pairwise(files):
        with contextlib.suppress(InputError):
            return pretrained.read_saved_model(file)
        print_once(f"warning: {file} is damaged; {older} is used instead")
    return pretrained.read_saved_model(files[-1] if files else path)


def begin_with_weights(
    settings: Settings, run: Run, model: nn.Module, saved: SavedModel | None, data: Data
) -> Data:
    """Freeze what --freeze does, load weights, let a new classifier begin as a probe, add --lora.

    Lines say what was loaded, and what the probe reaches.

    Args:
        saved: what `read_saved_model` returned; None for a run that goes on.
    Returns:
        The data; with --freeze, where that is the same, as what the classifier sees of it.
    Raises:
        InputError: the weights are not of this model.
    """
    world, head, is_new = run.world, list[str](), False
    if settings.freeze or settings.lora:
        with refused_as("--freeze" if settings.freeze else "--lora"):
            own = model.head_names() if isinstance(model, Encoder) else None
            head = own or pretrained.classifier_names(model)
    if settings.freeze:
        pretrained.freeze_all_but(model, head)
    elif settings.lora and isinstance(model, Encoder):  # so that its weights must all be there
        model.model.base_model.requires_grad_(False)
    if settings.freeze and run.checkpoint is not None:
        with refused_as("--resume", (InputError,)):
            load_into(model, run.checkpoint.state["model"], "model")
    if saved is not None:
        line, is_new = load_weights(settings, run, model, saved, data.metadata)
        if world.is_main:
            print(line, flush=True)
    if run.checkpoint is not None and (known := run.checkpoint.metadata.get("probe")):
        data.metadata["probe"] = known
    if saved is not None or settings.freeze:
        data = probe(settings, run, model, data, is_new=is_new and settings.head == "probe")
    if settings.lora:
        with refused_as("--lora"):
            inputs, _ = next(iter(data.train.batches([torch.arange(min(2, len(data.train)))])))
            lora.add_adapters(model, inputs, rank=settings.lora, classifier=head)
    return data


def load_weights(
    settings: Settings, run: Run, model: nn.Module, saved: SavedModel, metadata: Mapping[str, Any]
) -> tuple[str, bool]:
    """Load weights into a new model; return what `pretrained.load_pretrained` does."""
    arch = settings.arch
    if isinstance(model, Encoder) and settings.weights is None:
        with refused_as(f"--arch {arch}"), local_main_first(run.world), refused(arch):
            return model.load(arch, metadata["classes"])
    flags = settings.model_flags
    if isinstance(model, Encoder):
        flags = ("arch",)  # as it takes texts of any length
    given = flat({name: saved.flags[name] for name in flags if name in saved.flags})
    own = {**flat(vars(settings)), "image_size": metadata.get("size")}
    if other := next((name for name in given if own.get(name) != given[name]), None):
        raise InputError(
            f"--weights {settings.weights}: is of a model of --{other}={given[other]}; give that "
            f"instead of {own.get(other)}"
        )
    with refused_as(f"--weights {settings.weights}", (InputError,)):
        line, is_new = pretrained.load_pretrained(
            image_models.part_for_colours(model),
            saved,
            str(settings.weights),
            classes=metadata["classes"],
            flags=", ".join(
                f"--{name} {own[name]}" for name in (*flags, "image_size") if own.get(name)
            )
            + "; at another size, as above 64, layers may fit" * bool(own["image_size"]),
            kept=("prior", "prior_weight"),  # they are of the data
        )
    if saved.preprocessing:
        line += f"; images are prepared as for them, at {metadata['size']} pixels"
    return line, is_new


def probe(settings: Settings, run: Run, model: nn.Module, data: Data, *, is_new: bool) -> Data:
    """Fit a new last layer to what the network computes before it; and with --freeze keep that.

    Args:
        is_new: whether the layer is fitted; else its weights stay.
    """
    if (head := linear_probe.last_linear(model)) is None:
        return data
    trained = {p for p in model.parameters() if p.requires_grad}
    keeps = settings.freeze and keeps_features(settings) and trained <= {*head.parameters()}
    if not (is_new or keeps):
        return data
    most, world = None if keeps else MOST_PROBED, run.world
    name, classes = "test" if "test" in data.eval_sets else "val", data.metadata["classes"]
    sets = {**(data.eval_sets if keeps else {name: data.eval_sets[name]}), "train": data.train}
    features, ends = {}, [time.perf_counter()]
    for key, each in sets.items():  # the training set last
        with world.waiting_at_most(world.limits.start):
            found = linear_probe.compute_features(
                model,
                head,
                each,
                precision=run.precision,
                world=world,
                batch_size=MIN_EVAL_BATCH,
                most=most,
                multilabel_classes=len(classes) if settings.label_separator else 0,
                title="features of the network",
            )
        if found is None:
            return data
        features[key] = linear_probe.Features(*found, world.device)
        ends.append(time.perf_counter())
    if is_new:
        train, evaluated = features["train"], features[name]
        weights = class_weights(settings, run, data)
        if settings.balanced_sampling:
            counts = train.labels.bincount(minlength=len(classes)).clamp(min=1)
            drawn = len(train.labels) / (counts * len(train.labels.unique()))
            weights = drawn if weights is None else drawn * weights
        fitted = linear_probe.fit_probe(
            train.features, train.labels, classes=len(classes), class_weights=weights
        )
        of_main = world.broadcast([each.cpu() for each in fitted])  # a GPU's would stay on that GPU
        weight, bias = (each.to(world.device) for each in of_main)
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.bias is not None:
                head.bias.copy_(bias)
            logits, labels = evaluated.features.to(weight.dtype) @ weight.T + bias, evaluated.labels
        accuracy = is_right(logits, labels).cpu().double().mean().item()
        if world.is_main:
            print(
                f"linear probe: {100 * accuracy:.2f} % on the {EVAL_SET_NAMES[name]} set by "
                "logistic regression on what the network computes; the classifier begins so",
                flush=True,
            )
        if len(labels) == len(data.eval_sets[name]):  # else it is of a part of the set
            reached = {"features": "", "accuracy": accuracy, "largest_class": 0.0}
            data.metadata["probe"] = {**reached, "eval_set": name}
    data = dataclasses.replace(
        data, seconds=time.perf_counter() - ends[-2], eval_seconds=ends[-2] - ends[0]
    )
    if not keeps:
        return data
    # Other layers are frozen: the model takes what its head sees in place of inputs.
    model.forward = head.forward  # type: ignore[method-assign]
    train = features.pop("train")
    return dataclasses.replace(data, train=train, eval_sets=features, model_mixes=False)


def keeps_features(settings: Settings) -> bool:
    """Whether a frozen network computes the same of a row in every epoch."""
    return (
        settings.repeats_samples
        and settings.views == 1
        and settings.mixup == "none"
        and settings.backend in ("auto", "eager")
        and settings.parallel == "ddp"
    )
