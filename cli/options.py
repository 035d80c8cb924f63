"""Reading and checking flags: command line, recipe, checkpoint.

    parser = flags.shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS)
    args, checkpoint = parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else
from the default.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from backends import torch_compat
from cli import compatibility
from cli.flags import Parser
from distributed.world import under_torchrun
from errors import InputError, did_you_mean, first_line
from training import checkpoint, export, run_log

NOT_RESTORED = frozenset(
    ["resume", "recipe", "out", "evaluate", "predict", "export", "distributed", "tensorboard"]
)
"""Flags of one invocation: a resumed run does not take them from its checkpoint."""
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
META_VAL_FRACTION = 0.05  # held out for --mixup meta where the command line does not say


# -------------------------------------------------------------------- reading them


def parse(
    parser: Parser, script: str, arguments: Sequence[str] | None = None
) -> tuple[Namespace, dict[str, Any] | None]:
    """The flags, and the checkpoint to go on from or None.

    Args:
        parser: of the script.
        script: its name without .py.
        arguments: the command line; None is this process's own.
    Raises:
        InputError: a flag, the recipe or the checkpoint is wrong.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = parser.parse_args(arguments)
    state = None
    path = resume_path(given, script)
    if path is not None:
        state = checkpoint.load(path, script)
        restored = set(parser.names()) - NOT_RESTORED
        restored -= {"data_dir"} if "DATA_DIR" in os.environ else set()
        stored = {name: value for name, value in state["flags"].items() if name in restored}
        parser.set_defaults(**stored)
    arguments = [*(recipe_arguments(given.recipe, parser) if given.recipe else []), *arguments]
    if state is None:
        chosen = parser.parse_args(arguments)
        optimizer = parser.optimizers[chosen.optimizer]
        parser.set_defaults(
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            val_fraction=META_VAL_FRACTION if chosen.mixup == "meta" else 0.0,
        )
    args = parser.parse_args(arguments)
    if path is not None and args.out is None:
        args.out = str(path if path.is_dir() else path.parent)
    validate(args, script, resumed=state is not None)
    return args, state


def resume_path(args: Namespace, script: str) -> Path | None:
    """Where to resume from, or None for a new run.

    That is --resume; a job that torchrun has restarted resumes by itself.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        job = os.environ.get("TORCHELASTIC_RUN_ID")
        folder = Path(args.out) if args.out else run_log.latest_run(script, elastic_id=job)
        if folder is not None and (folder / "last.pt").exists():
            return folder
    if args.resume is None:
        return None
    if args.resume:
        return Path(args.resume)
    folder = Path(args.out) if args.out else run_log.latest_run(script)
    if folder is None:
        raise InputError(
            f"--resume: no run of {script} with a checkpoint below runs/; "
            "give --resume PATH, or leave it out"
        )
    return folder


def recipe_path(recipe: str) -> Path:
    """The file of --recipe, which is a path or the name of one of this project's recipes.

    A file of that path wins over a recipe of that name.

    Raises:
        InputError: there is neither.
    """
    path, named = Path(recipe), RECIPES / f"{recipe.removesuffix('.yaml')}.yaml"
    if path.exists() and not path.is_dir():
        return path
    if named.parent == RECIPES and named.is_file():
        return named
    names = sorted(each.stem for each in RECIPES.glob("*.yaml"))
    problem = "is a folder" if path.is_dir() else "is no file and no recipe of this project"
    raise InputError(
        f"--recipe {recipe}: this {problem}; give the path of a YAML file, or one of the recipes "
        f"{', '.join(names)}{did_you_mean(path.stem, names)}"
    )


def recipe_arguments(recipe: str, parser: Parser) -> list[str]:
    """A recipe as command-line arguments, so that it is checked like them.

    Args:
        recipe: a YAML file that maps names of flags to values, or the name of one of this
            project's recipes.
        parser: knows the flags.
    Raises:
        InputError: unreadable, not a mapping, or a flag is wrong.
    """
    try:
        values_by_name = yaml.safe_load(recipe_path(recipe).read_text())
    except OSError as error:
        raise InputError(
            f"--recipe {recipe}: {error.strerror}; give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--recipe {recipe}: not YAML ({first_line(error)})") from None
    if not isinstance(values_by_name, dict):
        raise InputError(f"--recipe {recipe}: must hold lines of 'flag: value'")
    arguments: list[str] = []
    for name, value in values_by_name.items():
        if value is False:
            arguments += negation(str(name), parser)
        elif value is True:
            arguments.append(f"--{name}")
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *map(str, values)]
    try:
        parser.parse_args(arguments)
    except InputError as error:
        raise InputError(f"--recipe {recipe}: {error}") from None
    return parser.translate(arguments)


def negation(name: str, parser: Parser) -> list[str]:
    """The arguments for a flag that a recipe sets to false.

    The false of a flag without an opposite is its absence. An unknown flag is returned as it is, so
    that it is refused with all others.
    """
    if not parser.knows(f"--{name}"):
        return [f"--{name}"]
    opposites = parser.translate([f"--no-{name}"])
    return [each for each in opposites if each in parser.option_strings()]


# -------------------------------------------------------------------- checking them


def validate(args: Namespace, script: str, resumed: bool) -> None:
    """Check what a single flag cannot tell.

    Raises:
        InputError: flags are not supported together, or something that they need is missing.
    """
    if args.distributed and not under_torchrun():
        raise InputError(
            f"--distributed needs torchrun: bash run_distributed.sh {script}.py ..., "
            f"or torchrun --standalone --nproc_per_node=2 {script}.py ..."
        )
    validate_inference(args, resumed)
    if not args.test and not args.val_fraction:
        raise InputError(
            "--no-test: nothing is left to choose the best epoch by; give --val_fraction above 0"
        )
    if args.mixup == "meta" and not args.val_fraction:
        raise InputError(
            "--mixup meta learns on held-out rows of the training set: give --val_fraction above 0"
        )
    compatibility.check(args)
    if args.warmup and args.warmup >= args.epochs:
        raise InputError(
            f"--warmup {args.warmup:g}: must be shorter than the run of {args.epochs} epochs"
        )
    if not resumed and args.out and (Path(args.out) / "metrics.jsonl").exists():
        raise InputError(
            f"--out {args.out} already holds a run: add --resume to go on with it, "
            "or choose another folder"
        )


def validate_inference(args: Namespace, resumed: bool) -> None:
    """Check --evaluate, --predict and --export.

    Raises:
        InputError: there is no model, or the export cannot be written.
    """
    for flag in ("evaluate", "predict", "export"):
        if getattr(args, flag) and not resumed:
            raise InputError(f"--{flag} needs a trained model: add --resume PATH")
    if not args.export:
        return
    if not args.export.endswith(export.SUFFIXES):
        raise InputError(
            f"--export {args.export}: the name must end in {' or '.join(export.SUFFIXES)}"
        )
    if reason := torch_compat.unavailable_reason("export"):
        raise InputError(
            f"--export {reason}: export from the stack of requirements.txt, "
            "which reads this run as well"
        )
    if not Path(args.export).parent.is_dir():
        raise InputError(f"--export {args.export}: the folder does not exist; make it first")
