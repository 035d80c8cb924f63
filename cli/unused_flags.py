"""Flags of a command line that change nothing in this run, such as --alpha without --mixup.

    unused_flags.warn(parser, args)     # warning: --alpha has no effect without --mixup

Values that a recipe or a checkpoint brings along are not named: who gives --mixup none beside a
recipe knows that the recipe's --alpha is then of no use.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cli.compatibility import has_peers
from cli.flag_parser import FlagParser
from cli.options import uses_trained_model


@dataclass(frozen=True)
class Condition:
    """When some flags have an effect.

    Attributes:
        names: the flags, as attributes of the parsed arguments.
        otherwise: what to say where they have none, after 'has no effect'.
        holds: whether they have one.
    """

    names: Sequence[str]
    otherwise: str
    holds: Callable[[Namespace], bool]


def listed(words: Sequence[str], conjunction: str) -> str:
    """Write a list in words: 'a, b or c'."""
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def needs_optimizer(names: Sequence[str], optimizers: Sequence[str]) -> Condition:
    """Flags that are settings of these optimizers; apex's own are not named in the warning."""
    shown = [name for name in optimizers if not name.startswith("apex_")]
    return Condition(
        names,
        f"without --optimizer {listed(shown, 'or')}",
        lambda args: args.optimizer in optimizers,
    )


def needs_schedule(name: str, schedules: Sequence[str]) -> Condition:
    """A flag that is a setting of these schedules."""
    return Condition(
        [name],
        f"without --lr_schedule {listed(schedules, 'or')}",
        lambda args: args.lr_schedule in schedules,
    )


WITH_MOMENTUM = ["sgd", "ngd", "kaldi_ngd", "muon", "lars", "apex_sgd", "apex_larc"]
WITH_ADAM = ["adamw", "ngd", "muon", "lamb", "slamb", "apex_lamb"]
OF_KALDI = ["ngd_alpha", "ngd_eta", "ngd_period", "ngd_max_dim"]
OF_SLAMB = ["compress_ratio", "compress_warmup", "beta3", "selection", "node_groups"]
ALONE = "in a single process"
CONDITIONS = (
    # ---- data
    Condition(
        ["small_size", "small_stages"], "without --small_epochs", lambda args: args.small_epochs > 0
    ),
    Condition(
        ["weights", "tokenizer", "vocab_size"], "with --resume", lambda args: args.resume is None
    ),
    Condition(["tokenizer", "vocab_size"], "with --weights", lambda args: args.weights is None),
    # ---- mixing
    Condition(["alpha", "mix_at"], "without --mixup", lambda args: args.mixup != "none"),
    Condition(["alpha"], "with --mixup_weight", lambda args: args.mixup_weight is None),
    Condition(
        ["alpha"],
        "with --meta_policy pair",
        lambda args: args.mixup != "meta" or args.meta_policy != "pair",
    ),
    Condition(
        ["meta_policy", "meta_every", "meta_lr"],
        "without --meta_learning",
        lambda args: args.mixup == "meta",
    ),
    # ---- optimizers and schedules
    needs_optimizer(["momentum", "nesterov"], WITH_MOMENTUM),
    needs_optimizer(["betas"], WITH_ADAM),
    needs_optimizer(["trust_coefficient", "larc"], ["lars"]),
    needs_optimizer(["ngd_rank"], ["ngd", "kaldi_ngd"]),
    needs_optimizer(["ngd_skip"], ["ngd", "kaldi_ngd", "muon"]),
    needs_optimizer(OF_KALDI, ["kaldi_ngd"]),
    needs_optimizer(["adamw_ratio"], ["ngd", "muon"]),
    needs_optimizer(OF_SLAMB, ["slamb"]),
    needs_optimizer(["demo_topk", "demo_chunk", "demo_decay"], ["demo"]),
    needs_schedule("gamma", ["step", "multistep", "exponential", "inverse"]),
    needs_schedule("step_size", ["step", "cyclic"]),
    needs_schedule("milestones", ["multistep"]),
    needs_schedule("power", ["polynomial"]),
    needs_schedule("lr_end", ["cosine", "polynomial"]),
    needs_schedule("peak", ["onecycle", "cyclic"]),
    Condition(
        ["base_bs"], "on the rate without --lr_scaling", lambda args: args.lr_scaling != "none"
    ),
    # ---- communication
    Condition(
        ["grad_compress", "balance_workers", "parallel", "sync_bn"], ALONE, lambda _: has_peers()
    ),
    Condition(["sync"], ALONE, lambda args: args.sync == "diloco" or has_peers()),
    Condition(
        ["powersgd_rank"],
        "without --grad_compress powersgd",
        lambda args: args.grad_compress == "powersgd",
    ),
    Condition(
        ["local_steps", "dense_steps"],
        "without --optimizer slamb, --sync local or --sync diloco",
        lambda args: args.optimizer == "slamb" or args.sync in ("local", "diloco"),
    ),
    Condition(
        ["outer_lr", "outer_momentum", "fragments"],
        "without --sync diloco",
        lambda args: args.sync == "diloco",
    ),
    Condition(
        ["wire_dtype"],
        "without --optimizer slamb, --optimizer demo or --sync diloco",
        lambda args: args.optimizer in ("slamb", "demo") or args.sync == "diloco",
    ),
    # ---- batches that change
    Condition(
        ["min_bs", "max_bs", "batch_factor", "dynamic_lr"],
        "without --dynamic_batch",
        lambda args: args.dynamic_batch != "none",
    ),
    Condition(
        ["batch_factor"],
        "with --batch_growth or --replace_decay",
        lambda args: not (args.batch_growth or args.replace_decay),
    ),
    Condition(
        ["loss_rule", "loss_window", "loss_threshold"],
        "without --dynamic_batch loss",
        lambda args: args.dynamic_batch == "loss",
    ),
    Condition(["loss_window"], "with --loss_rule score", lambda args: args.loss_rule != "score"),
)


def warnings(names: Collection[str], args: Namespace, *, parser: FlagParser) -> list[str]:
    """A line for each reason why flags have no effect, without 'warning: '.

    Args:
        names: the flags that the command line gives, as attributes of the parsed arguments.
        args: the flags of the run, with those of its recipe or checkpoint.
        parser: of the script.
    """
    spellings, lines = parser.spelling_of(), []
    for condition in CONDITIONS:
        unused = [spellings[name] for name in condition.names if name in names]
        if unused and not condition.holds(args):
            verb = "has" if len(unused) == 1 else "have"
            lines.append(f"{listed(unused, 'and')} {verb} no effect {condition.otherwise}")
    return lines


def warn(parser: FlagParser, args: Namespace) -> None:
    """Print a line for each flag of this process's command line that changes nothing (rank 0).

    Args:
        parser: of the script; its defaults do not matter.
        args: the flags of the run.
    """
    if os.environ.get("RANK", "0") == "0" and not uses_trained_model(args):
        given = parser.given(sys.argv[1:])
        names = [name for name, value in given.items() if value is not False]  # of --no-NAME
        for line in warnings(names, args, parser=parser):
            print(f"warning: {line}", file=sys.stderr, flush=True)
