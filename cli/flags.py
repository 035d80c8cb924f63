"""Flags of both scripts: names, defaults, help. Reading and checking them is options.py's.

parser = flags.shared_parser(__doc__, datasets=["cifar10", "mnist"], epochs=50)
parser.add_argument("--arch", default="resnet50")
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import dynamic_batch
import mixup
from backends import execution, nvidia_apex
from backends.precision import PRECISIONS
from distributed import comm_hooks, fsdp
from errors import InputError
from optimizers import schedules


class Parser(argparse.ArgumentParser):
    """Reports a bad flag as an InputError instead of printing the usage."""

    rates: dict[str, tuple[float, float]]  # see RATES

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see --help)")


# -------------------------------------------------------------------- types of values


def number(
    kind: Callable[[str], Any], low: float, high: float = math.inf, open_low: bool = False
) -> Callable[[str], Any]:
    """An argparse type: `kind` within [low, high], or (low, high] with `open_low`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"wanted {name}, got {text!r}") from None
        if not low <= value <= high or (open_low and value == low) or not math.isfinite(value):
            limits = f"{'above' if open_low else 'at least'} {low:g}" + (
                f" and at most {high:g}" if high < math.inf else ""
            )
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return convert


count, natural = number(int, 1), number(int, 0)
positive, not_negative = number(float, 0, open_low=True), number(float, 0)
share, below_one = number(float, 0, 1, open_low=True), number(float, 0, 0.999)


# -------------------------------------------------------------------- the flags


OPTIMIZERS = ("sgd", "adamw", "ngd", "lars", "lamb", "slamb", *nvidia_apex.OPTIMIZERS)
RATES = {
    "sgd": (0.02, 5e-4),
    "ngd": (0.02, 5e-4),
    "adamw": (1e-3, 0.05),
    "lars": (1.0, 5e-4),
    "lamb": (4e-3, 0.01),
    "slamb": (4e-3, 0.01),
    "apex_sgd": (0.02, 5e-4),
    "apex_lamb": (4e-3, 0.01),
    "apex_larc": (1.0, 5e-4),
}
"""Learning rate and weight decay of each optimizer where the command line names neither."""


def shared_parser(
    description: str | None,
    datasets: Sequence[str],
    rates: Mapping[str, tuple[float, float]] = RATES,
    mixes: Sequence[str] = mixup.KINDS,
    **defaults: Any,
) -> Parser:
    """The flags that both scripts have; `rates`, `mixes` (of --mixup) and `defaults` are those in which they differ."""
    parser = Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )
    add_data(parser, datasets)
    add_training(parser, mixes)
    add_optimizer(parser, rates, defaults.get("optimizer", "sgd"))
    add_speed(parser)
    add_communication(parser)
    add_batches(parser)
    add_run(parser)
    parser.set_defaults(**defaults)
    parser.rates = dict(rates)
    return parser


def add_data(parser: Parser, datasets: Sequence[str]) -> None:
    """Flags of the group 'data'."""
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--dataset", choices=datasets, default=datasets[0], help="data set (default %(default)s)")
    add(
        "--data_dir",
        default=os.environ.get("DATA_DIR", "./data"),
        help="folder of the data sets (default $DATA_DIR or ./data)",
    )
    add(
        "--subset",
        type=share,
        default=1.0,
        metavar="F",
        help="class-balanced fraction of the training set (default 1)",
    )
    add(
        "--val_fraction",
        type=below_one,
        metavar="F",
        help="part of the training set to validate on (default 0; 0.05 with --mixup meta)",
    )
    add(
        "--test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the test set after each epoch (default); --no-test, with --val_fraction: not at all, as in a search",
    )
    add(
        "--workers",
        type=natural,
        default=2,
        help="processes that decode images (default %(default)s)",
    )


def add_training(parser: Parser, mixes: Sequence[str]) -> None:
    """Flags of the group 'training'."""
    training = parser.add_argument_group("training")
    add = training.add_argument
    add(
        "--bs",
        "--batch_size",
        "-b",
        dest="batch_size",
        type=count,
        default=128,
        help="samples a process and micro-batch (128)",
    )
    add(
        "--epoch",
        "--epochs",
        dest="epochs",
        type=count,
        default=50,
        help="epochs (default %(default)s)",
    )
    add(
        "--accumulate",
        type=count,
        default=1,
        metavar="K",
        help="micro-batches a step: global batch = bs x K x processes (1)",
    )
    add(
        "--label_smoothing",
        type=below_one,
        default=0.0,
        help="weight of the uniform label (default %(default)s)",
    )
    add(
        "--mixup",
        choices=mixes,
        default="none",
        help="mix samples and labels; train accuracy is lambda-weighted (none)",
    )
    add(
        "--meta_learning",
        dest="mixup",
        action="store_const",
        const="meta",
        help="the same as --mixup meta: lambda is learned",
    )
    add(
        "--alpha",
        type=positive,
        default=0.99,
        help="of --mixup: lambda is drawn from Beta(alpha, alpha) (default %(default)s)",
    )
    add(
        "--meta_policy",
        choices=mixup.POLICIES,
        default="pair",
        help="of --mixup meta: what has a lambda of its own (pair)",
    )
    add(
        "--meta_every",
        type=count,
        default=16,
        metavar="STEPS",
        help="of --mixup meta: between its updates (default %(default)s)",
    )
    add(
        "--meta_lr",
        type=positive,
        default=0.1,
        help="of --mixup meta: rate of its Adam (default %(default)s)",
    )
    add(
        "--clip",
        type=not_negative,
        default=0.0,
        help="largest gradient norm, 0 is no limit (default %(default)s)",
    )
    add(
        "--seed",
        type=number(int, 0, 2**32 - 1),
        default=0,
        help="of weights, order, augmentation, dropout (default 0)",
    )


def add_optimizer(parser: Parser, rates: Mapping[str, tuple[float, float]], chosen: str) -> None:
    """Flags of the group 'optimizer and learning rate'; `chosen` is the default optimizer."""
    optimizer = parser.add_argument_group("optimizer and learning rate")
    add = optimizer.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help=f"optimizer (default {chosen})")
    add(
        "--ngd",
        dest="optimizer",
        action="store_const",
        const="ngd",
        help="the same as --optimizer ngd: online natural gradient",
    )
    lrs, decays = (", ".join(f"{name} {pair[i]:g}" for name, pair in rates.items()) for i in (0, 1))
    add("--lr", type=positive, help=f"learning rate (default {lrs})")
    add(
        "--weight_decay", type=not_negative, help=f"of matrices and convolutions (default {decays})"
    )
    add(
        "--momentum", type=below_one, default=0.9, help="of SGD, NGD and LARS (default %(default)s)"
    )
    add(
        "--nesterov",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Nesterov momentum of SGD, NGD and LARS",
    )
    add(
        "--betas",
        type=below_one,
        nargs=2,
        default=[0.9, 0.999],
        metavar="B",
        help="of AdamW, LAMB, SLAMB (default 0.9 0.999)",
    )
    add(
        "--ngd_rank",
        type=count,
        default=80,
        help="of NGD: eigenvectors kept of an axis, at most half its length (80)",
    )
    add(
        "--ngd_alpha",
        type=positive,
        default=4.0,
        help="of NGD: smoothing towards plain SGD (default %(default)s)",
    )
    add(
        "--ngd_eta",
        type=number(float, 1e-6, 0.999),
        default=0.1,
        help="of NGD: weight of a new gradient in the estimate (0.1)",
    )
    add(
        "--ngd_period",
        type=count,
        default=4,
        metavar="STEPS",
        help="of NGD: between updates of an estimate (default %(default)s)",
    )
    add(
        "--ngd_max_dim",
        type=count,
        default=4096,
        help="of NGD: longer axes are left alone (default %(default)s)",
    )
    add(
        "--ngd_skip",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of NGD: parameters whose names hold one of these take plain SGD",
    )
    add(
        "--trust_coefficient",
        type=positive,
        default=1e-3,
        help="of LARS: a layer's rate beside its weights (default %(default)s)",
    )
    add(
        "--larc",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of LARS: no layer's rate above --lr",
    )
    add(
        "--lr_schedule",
        choices=schedules.SCHEDULES,
        default="cosine",
        help="shape of the learning rate (default %(default)s)",
    )
    add(
        "--warmup",
        type=not_negative,
        default=0.0,
        metavar="EPOCHS",
        help="linear rise at the start (default %(default)s)",
    )
    add(
        "--gamma",
        type=positive,
        default=0.1,
        help="factor of step, multistep, exponential; rate of inverse (0.1)",
    )
    add(
        "--step_size",
        type=count,
        default=30,
        metavar="EPOCHS",
        help="of step and cyclic (default %(default)s)",
    )
    add(
        "--milestones",
        type=count,
        nargs="+",
        default=[30, 40],
        metavar="EPOCH",
        help="of multistep (default 30 40)",
    )
    add("--power", type=positive, default=1.0, help="of polynomial (default %(default)s)")
    add(
        "--lr_end",
        type=number(float, 0, 1),
        default=0.0,
        metavar="F",
        help="last rate of cosine and polynomial, x lr (default 0)",
    )
    add(
        "--peak",
        type=number(float, 1),
        default=5.0,
        metavar="F",
        help="highest rate of onecycle and cyclic, x lr (default 5)",
    )
    add(
        "--lr_scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="of --lr with global batch / --base_bs (default none)",
    )
    add(
        "--base_bs",
        type=count,
        default=128,
        help="global batch that --lr was tuned for (default %(default)s)",
    )


def add_speed(parser: Parser) -> None:
    """Flags of the group 'speed and devices'."""
    speed = parser.add_argument_group("speed and devices")
    add = speed.add_argument
    add(
        "--device",
        default="auto",
        help="auto, cpu, cuda, or cuda:N: one GPU, also for many processes (auto)",
    )
    add(
        "--precision",
        choices=PRECISIONS,
        default="auto",
        help="auto: bf16 where native, else fp16 on GPUs, fp32 on CPUs",
    )
    add(
        "--backend",
        choices=execution.BACKENDS,
        default="eager",
        help="how the model runs (default %(default)s)",
    )
    add(
        "--fuse",
        action="store_true",
        help="convolution, batch-norm, ReLU and MLPs keep their input alone: less memory",
    )
    add(
        "--checkpoint_activations",
        action="store_true",
        help="residual blocks keep their input alone: least memory",
    )
    add(
        "--threads",
        type=natural,
        default=0,
        help="CPU threads, 0 shares the cores among the node's processes (default 0)",
    )
    add(
        "--parallel",
        choices=fsdp.PARALLEL,
        default="ddp",
        help="fits a device: ddp; does not: fsdp; many nodes: hsdp (ddp)",
    )
    add(
        "--distributed",
        action="store_true",
        help="insist on torchrun (under torchrun it is understood)",
    )
    add(
        "--sync_bn",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="BatchNorm statistics over all GPUs",
    )


def add_communication(parser: Parser) -> None:
    """Flags of the group 'communication'."""
    group = parser.add_argument_group("communication")
    add = group.add_argument
    add(
        "--grad_compress",
        choices=comm_hooks.COMPRESSIONS,
        default="none",
        help="gradients on the wire (default none)",
    )
    add(
        "--powersgd_rank",
        type=count,
        default=2,
        help="of --grad_compress powersgd (default %(default)s)",
    )
    add(
        "--sync",
        choices=comm_hooks.SYNCS,
        default="sync",
        help="lag: a step late; local: weights every --local_steps (default sync)",
    )
    add(
        "--compress_ratio",
        type=share,
        default=0.1,
        metavar="K",
        help="of SLAMB: part of the momentum sent a step (0.1)",
    )
    add(
        "--compress_warmup",
        type=share,
        nargs="*",
        default=[0.5, 0.5, 0.2],
        metavar="K",
        help="its first epochs' (0.5 0.5 0.2)",
    )
    add(
        "--beta3",
        type=number(float, 0, 1),
        default=0.99,
        help="of SLAMB: trust kept a step in what was not sent (default 0.99)",
    )
    add(
        "--local_steps",
        type=count,
        default=50,
        metavar="STEPS",
        help="of SLAMB, local: between averagings of weights (50)",
    )
    add(
        "--dense_steps",
        type=natural,
        default=10,
        metavar="STEPS",
        help="of SLAMB, local: at the start, everything is sent (10)",
    )
    add(
        "--selection",
        choices=("block", "random"),
        default="block",
        help="of SLAMB: rows of 64 weights or single ones (block)",
    )
    add(
        "--wire_dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of SLAMB: what is sent (default bf16)",
    )
    add(
        "--node_groups",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of SLAMB: dense within a node, sparse between",
    )


def add_batches(parser: Parser) -> None:
    """Flags of the group 'batches that change'; sizes are global but for --micro_bs."""
    group = parser.add_argument_group("batches that change (sizes over all processes)")
    add = group.add_argument
    add(
        "--dynamic_batch",
        choices=dynamic_batch.RULES,
        default="none",
        help="how the batch changes, epoch by epoch (default none)",
    )
    add(
        "--min_bs",
        type=count,
        metavar="N",
        help="smallest batch (default the first; of decrease a sixteenth of it)",
    )
    add(
        "--max_bs",
        type=count,
        metavar="N",
        help="largest batch (default 16 times the first; of decrease the first)",
    )
    add(
        "--batch_factor",
        type=number(float, 1, open_low=True),
        default=2.0,
        metavar="F",
        help="by which it changes at once (2)",
    )
    add(
        "--batch_milestones",
        type=count,
        nargs="+",
        metavar="EPOCH",
        help="of increase, decrease (default 1/2 and 3/4 of the run)",
    )
    add(
        "--batch_growth",
        type=number(float, 1, open_low=True),
        metavar="F",
        help="of increase, decrease: by F after every epoch",
    )
    add(
        "--replace_decay",
        action="store_true",
        help="of increase: it grows where --lr_schedule decays, rate / batch goes alike",
    )
    add(
        "--dynamic_lr",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="of --lr with the batch (default none)",
    )
    add(
        "--loss_rule",
        choices=dynamic_batch.LOSS_RULES,
        default="progress",
        help="of loss: which formula (default progress)",
    )
    add(
        "--loss_window",
        type=number(int, 2),
        default=5,
        metavar="EPOCHS",
        help="of loss: epochs that it looks at (default 5)",
    )
    add(
        "--loss_threshold",
        type=not_negative,
        default=10.0,
        metavar="P",
        help="of loss: in thousandths (default 10)",
    )
    add(
        "--noise_scale",
        action="store_true",
        help="log the gradient noise scale (understood with --dynamic_batch noise)",
    )
    add(
        "--balance_workers",
        action="store_true",
        help="each process takes a share of the batch in proportion to its speed",
    )
    add(
        "--micro_bs",
        type=count,
        metavar="N",
        help="samples at once on a device (default --bs; GPUs, what fits)",
    )


def add_run(parser: Parser) -> None:
    """Flags of the group 'run'."""
    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--out", metavar="DIR", help="run folder (default runs/<script>-<time>)")
    add(
        "--resume",
        "-r",
        nargs="?",
        const="",
        metavar="PATH",
        help="checkpoint or run folder to go on from (--out, or the newest)",
    )
    add(
        "--save_every",
        type=natural,
        default=0,
        metavar="STEPS",
        help="also save within an epoch (default 0, never)",
    )
    add("--recipe", metavar="YAML", help="flags from a file; the command line overrides them")
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
    add(
        "--evaluate",
        action="store_true",
        help="with --resume: accuracy on the test set, overall and per class",
    )
    add("--predict", nargs="+", metavar="FILE", help="with --resume: classify files")
    add(
        "--export",
        metavar="FILE",
        help="with --resume: write the model as .onnx or .pt2 and check it",
    )
