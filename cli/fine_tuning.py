"""Fine-tuning by flags, for both scripts: weights from elsewhere, frozen layers.

saved = read_saved_model(args, run)
begin_with_weights(args, run, model, saved, classes=classes)
"""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from cli.factory import Run
from cli.flag_parser import flat
from distributed.agreement import local_main_first
from errors import InputError
from models import image_models, pretrained
from models.hugging_face import HF, Encoder, read_encoder, refused
from models.pretrained import SavedModel

MODEL_FLAGS = ("arch", "max_len", "model_args")  # which weights must share with the model


def read_saved_model(args: Namespace, run: Run) -> SavedModel | None:
    """What --weights or --arch hf:NAME names; None without both.

    Raises:
        InputError: there is no such file, it holds no weights, or --freeze is given without.
    """
    if args.weights is None and args.arch.startswith(HF) and "max_len" in args:
        with local_main_first(run.world), refused(args.arch):
            return read_encoder(args.arch)
    if args.weights is None and args.freeze:
        raise InputError(
            "--freeze needs --weights or --arch hf:NAME: else all layers but the last stay random"
        )
    if args.weights is None:
        return None
    with local_main_first(run.world):
        if args.weights != "DEFAULT":
            saved = pretrained.read_saved_model(Path(args.weights))
        elif "max_len" in args:
            raise InputError("--weights DEFAULT: there are none for texts; use --arch hf:NAME")
        else:
            weights, names = image_models.default_weights(args.arch)
            saved = SavedModel(weights, names)
        if "max_len" not in args and not saved.preprocessing:
            usual = image_models.usual_preprocessing(args.arch)
            if args.weights != "DEFAULT":  # weights from elsewhere may be for any size
                usual.pop("size", None)
            saved = dataclasses.replace(saved, preprocessing=usual)
        return saved


def begin_with_weights(
    args: Namespace, run: Run, model: nn.Module, saved: SavedModel, *, classes: Sequence[str]
) -> None:
    """Load weights into a new model; one line says what was loaded.

    Args:
        model: whose weights are replaced.
        saved: what `read_saved_model` returned.
        classes: names of the model's classes.
    Raises:
        InputError: the weights are not of this model.
    """
    if isinstance(model, Encoder) and args.weights is None:
        with local_main_first(run.world), refused(args.arch):
            line = model.load(args.arch, classes)
            if run.world.is_main:
                print(line, flush=True)
        return
    fixed = ("arch",) if isinstance(model, Encoder) else MODEL_FLAGS  # of which --max_len is free
    flags = [name for name in fixed if name in args]
    given = flat({name: saved.flags[name] for name in flags if name in saved.flags})
    own = flat(vars(args))
    if other := next((name for name in given if own.get(name) != given[name]), None):
        raise InputError(
            f"--weights {args.weights}: is of a model of --{other}={given[other]}; give that "
            f"instead of {own.get(other)}"
        )
    line = pretrained.load_pretrained(
        image_models.part_for_colours(model),
        saved,
        args.weights,
        classes=classes,
        flags=", ".join(f"--{name}" for name in (*flags, "image_size") if name in args),
        kept=("prior", "prior_weight"),  # they are of the data
    )
    if saved.preprocessing:
        line += "; images are prepared as for them"
    if run.world.is_main:
        print(line, flush=True)
