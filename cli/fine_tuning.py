"""Fine-tuning by flags, for both scripts: weights from elsewhere, frozen layers.

add_flags(add, "FILE", "Begin with these weights: ...")
begin_with_weights(args, run, model, flags="--arch, --image_size")
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cli.factory import Run
from distributed.agreement import local_main_first
from training import pretrained


def add_flags(add: Callable[..., Any], metavar: str, help: str) -> None:
    """Add --weights, with the help of a script, and --freeze to a group."""
    add(
        "--weights",
        metavar=metavar,
        help=f"{help} A classifier for other classes begins anew (default random weights).",
        common=True,
    )
    add(
        "--freeze",
        action="store_true",
        help="Train the last linear layer alone, and leave all other weights as they are.",
    )


def begin_with_weights(
    args: Namespace,
    run: Run,
    model: nn.Module,
    *,
    flags: str,
    default: Callable[[], dict[str, Tensor]] | None = None,
    kept: Sequence[str] = (),
) -> None:
    """Load the weights of --weights into a new model; one line says what was loaded.

    Args:
        args: the flags.
        run: the run.
        model: whose weights are replaced.
        flags: which say what the model is, for messages.
        default: the weights that `--weights DEFAULT` means; None where there are none.
        kept: names of what stays the model's own.
    Raises:
        InputError: there are none, or they are not of this model.
    """
    if args.weights is None:
        return
    with local_main_first(run.world):
        if default is not None and args.weights == "DEFAULT":
            weights = default()
        else:
            weights = pretrained.read_weights(Path(args.weights))
    line = pretrained.load_pretrained(model, weights, args.weights, flags=flags, kept=kept)
    if run.world.is_main:
        print(line, flush=True)
