"""Fine-tuning by flags, for both scripts: weights from elsewhere, frozen layers.

add_flags(add, "FILE", "Begin with these weights: ...")
saved = read_saved_model(args, run)
begin_with_weights(args, run, model, saved, classes=classes, flags=["arch", "image_size"])
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from cli.factory import Run
from cli.flag_parser import OFF, path_text, switch
from distributed.agreement import local_main_first
from errors import InputError
from models import pretrained
from models.pretrained import SavedModel


def add_flags(add: Callable[..., None], metavar: str, help: str) -> None:
    """Declare --weights, with the help of a script, and --freeze in a group."""
    add(
        "--weights",
        path_text,
        None,
        f"{help}; the classifier keeps classes of the same name (default random)",
        metavar=metavar,
        only_with={"resume": OFF},
        common=True,
    )
    add("--freeze", switch, False, "training of the last linear layer alone, with --weights")


def read_saved_model(
    args: Namespace, run: Run, default: Callable[[], dict[str, Tensor]] | None = None
) -> SavedModel | None:
    """What --weights names; None where it is not given.

    Args:
        default: the weights that `--weights DEFAULT` means; None where there are none.
    Raises:
        InputError: there is no such file, it holds no weights, or --freeze is given without.
    """
    if args.weights is None and args.freeze:
        raise InputError(
            "--freeze needs --weights: without them all layers but the last would stay random"
        )
    if args.weights is None:
        return None
    with local_main_first(run.world):
        if args.weights != "DEFAULT":
            return pretrained.read_saved_model(Path(args.weights))
        if default is None:
            raise InputError("--weights DEFAULT: there are none for texts; give a run or a file")
        return SavedModel(default())


def begin_with_weights(
    args: Namespace,
    run: Run,
    model: nn.Module,
    saved: SavedModel,
    *,
    classes: Sequence[str],
    flags: Sequence[str],
    kept: Sequence[str] = (),
) -> None:
    """Load weights into a new model; one line says what was loaded.

    Args:
        model: whose weights are replaced.
        saved: the weights.
        classes: names of the model's classes.
        flags: names of those that say what the model is.
        kept: names of what stays the model's own.
    Raises:
        InputError: the weights are not of this model.
    """
    for name in flags:
        given, own = saved.flags.get(name), getattr(args, name)
        if isinstance(own, dict):
            given = " ".join(f"{k}={v}" for k, v in (given or {}).items() if own.get(k) != v)
            own = "others" if given else ""
        if given is not None and given != own:
            raise InputError(
                f"--weights {args.weights}: is of a model of --{name} {given}; give that flag "
                f"instead of --{name} {own}"
            )
    line = pretrained.load_pretrained(
        model,
        saved,
        args.weights,
        classes=classes,
        flags=", ".join(f"--{name}" for name in flags),
        kept=kept,
    )
    if run.world.is_main:
        print(line, flush=True)
