"""Flags of a command line that change nothing, as what they are a setting of is not chosen.

    given = given_flags(parser, ["--alpha", "0.2"])
    warnings(parser, given, args)      # ["warning: --alpha has no effect without --mixup"]

Values that a recipe or a checkpoint brings along are not named: who gives --mixup none beside a
recipe knows that its --alpha is of no use.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cli.flag_parser import FlagParser

NOT_GIVEN = object()


@dataclass(frozen=True)
class Settings:
    """Flags that are settings of something which other flags choose.

    Attributes:
        names: the flags, as attributes of the parsed arguments.
        chosen_by: what chooses it, as a user writes it.
        applies: whether it is chosen.
    """

    names: tuple[str, ...]
    chosen_by: str
    applies: Callable[[Namespace], Any]


def of_optimizers(names: str, *optimizers: str) -> Settings:
    """Settings of these optimizers; names are separated by spaces."""
    chosen_by = f"--optimizer {' or '.join(optimizers)}"
    return Settings(tuple(names.split()), chosen_by, lambda args: args.optimizer in optimizers)


def of_schedules(name: str, *schedules: str) -> Settings:
    """A setting of these schedules."""
    chosen_by = f"--lr_schedule {' or '.join(schedules)}"
    return Settings((name,), chosen_by, lambda args: args.lr_schedule in schedules)


WITH_MOMENTUM = ("sgd", "ngd", "kaldi_ngd", "muon", "lars", "apex_sgd", "apex_larc")
WITH_ADAM = ("adamw", "ngd", "muon", "lamb", "slamb", "apex_lamb")
SETTINGS = (
    Settings(("small_size",), "--small_epochs", lambda args: args.small_epochs),
    Settings(("alpha", "mix_at"), "--mixup", lambda args: args.mixup != "none"),
    Settings(
        ("meta_policy", "meta_every", "meta_lr"),
        "--meta_learning",
        lambda args: args.mixup == "meta",
    ),
    of_optimizers("momentum nesterov", *WITH_MOMENTUM),
    of_optimizers("betas", *WITH_ADAM),
    of_optimizers("trust_coefficient larc", "lars"),
    of_optimizers("ngd_rank", "ngd", "kaldi_ngd"),
    of_optimizers("ngd_skip", "ngd", "kaldi_ngd", "muon"),
    of_optimizers("ngd_alpha ngd_eta ngd_period ngd_max_dim", "kaldi_ngd"),
    of_optimizers("adamw_ratio", "ngd", "muon"),
    of_optimizers("compress_ratio compress_warmup beta3 selection node_groups", "slamb"),
    of_optimizers("demo_topk demo_chunk demo_decay", "demo"),
    of_schedules("gamma", "step", "multistep", "exponential", "inverse"),
    of_schedules("step_size", "step", "cyclic"),
    of_schedules("milestones", "multistep"),
    of_schedules("power", "polynomial"),
    of_schedules("lr_end", "cosine", "polynomial"),
    of_schedules("peak", "onecycle", "cyclic"),
    Settings(("base_bs",), "--lr_scaling", lambda args: args.lr_scaling != "none"),
    Settings(
        ("powersgd_rank",),
        "--grad_compress powersgd",
        lambda args: args.grad_compress == "powersgd",
    ),
    Settings(
        ("local_steps", "dense_steps"),
        "--optimizer slamb, or --sync local or diloco",
        lambda args: args.optimizer == "slamb" or args.sync in ("local", "diloco"),
    ),
    Settings(
        ("outer_lr", "outer_momentum"),
        "--optimizer slamb or --sync diloco",
        lambda args: args.optimizer == "slamb" or args.sync == "diloco",
    ),
    Settings(
        ("wire_dtype",),
        "--optimizer slamb or demo, or --sync diloco",
        lambda args: args.optimizer in ("slamb", "demo") or args.sync == "diloco",
    ),
    Settings(("fragments",), "--sync diloco", lambda args: args.sync == "diloco"),
    Settings(
        ("min_bs", "max_bs", "batch_factor", "dynamic_lr"),
        "--dynamic_batch",
        lambda args: args.dynamic_batch != "none",
    ),
    Settings(
        ("loss_rule", "loss_window", "loss_threshold"),
        "--dynamic_batch loss",
        lambda args: args.dynamic_batch == "loss",
    ),
)


def given_flags(parser: FlagParser, arguments: Sequence[str]) -> set[str]:
    """The flags that a command line gives, as attributes of the parsed arguments.

    Args:
        parser: knows the flags.
        arguments: of the command line, which are valid.
    """
    empty = Namespace(**dict.fromkeys(parser.names(), NOT_GIVEN))
    parsed = vars(parser.parse_args(arguments, empty))
    return {name for name, value in parsed.items() if value is not NOT_GIVEN}


def warnings(parser: FlagParser, given: set[str], args: Namespace) -> list[str]:
    """A line for each flag that was given and changes nothing.

    Args:
        parser: of the script.
        given: what `given_flags` returned.
        args: the flags of the run, with those of its recipe or checkpoint.
    """
    lines = []
    for settings in SETTINGS:
        unused = [name for name in settings.names if name in given]
        if unused and not settings.applies(args):
            spellings = {flag.action.dest: flag.name for flag in reversed(parser.flags)}
            names = ", ".join(spellings[name] for name in unused)
            verb = "has" if len(unused) == 1 else "have"
            lines.append(f"warning: {names} {verb} no effect without {settings.chosen_by}")
    return lines
