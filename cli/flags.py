"""Flags of both scripts: names, defaults, help; cli/options.py reads and checks them.

parser = shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS, ...)
parser.add_argument("--arch", default="resnet50")
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

import dynamic_batch
import mixup
from backends import execution, precision
from distributed import comm_hooks, fsdp
from errors import InputError
from optimizers import schedules


@dataclass(frozen=True)
class OptimizerChoice:
    """A value of --optimizer.

    Attributes:
        make: called as make(parameter_groups, lr=..., **settings), where the settings are those
            that `cli.factory.optimizer_settings` knows for this name.
        lr, weight_decay: where the command line gives neither.
    """

    make: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float


class Parser(argparse.ArgumentParser):
    """Reports a bad flag as an InputError instead of printing the usage."""

    optimizers: Mapping[str, OptimizerChoice]

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see --help)")

    def names(self) -> list[str]:
        """The names of all flags as attributes of the parsed arguments, in the order of --help."""
        return list(dict.fromkeys(action.dest for action in self._actions))

    def option_strings(self) -> set[str]:
        """All spellings of all flags, with their dashes."""
        return {option for action in self._actions for option in action.option_strings}


# -------------------------------------------------------------------- types of values


def number(
    kind: Callable[[str], Any], low: float, high: float = math.inf, *, open_low: bool = False
) -> Callable[[str], Any]:
    """An argparse type: numbers of a kind within [low, high], or (low, high] with `open_low`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None
        in_range = low <= value <= high and not (open_low and value == low)
        if not in_range or not math.isfinite(value):
            limits = f"{'above' if open_low else 'at least'} {low:g}"
            limits += f" and at most {high:g}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return convert


count, natural = number(int, 1), number(int, 0)
positive, not_negative = number(float, 0, open_low=True), number(float, 0)
fraction, below_one = number(float, 0, 1, open_low=True), number(float, 0, 0.999)


# -------------------------------------------------------------------- the flags


def shared_parser(
    description: str | None,
    datasets: Sequence[str],
    *,
    optimizers: Mapping[str, OptimizerChoice],
    mixing: Sequence[str],
    batch_rules: Collection[str],
    **defaults: Any,
) -> Parser:
    """The flags that both scripts have.

    Args:
        description: the script's docstring.
        datasets: values of --dataset, the default first.
        optimizers: values of --optimizer.
        mixing: values of --mixup.
        batch_rules: values of --dynamic_batch.
        defaults: of other flags in which the scripts differ.
    """
    parser = Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data(parser, datasets)
    add_training(parser)
    add_mixing(parser, mixing)
    add_optimizer(parser, optimizers, defaults.get("optimizer", "sgd"))
    add_ngd(parser)
    add_slamb(parser)
    add_schedule(parser)
    add_speed(parser)
    add_communication(parser)
    add_batches(parser, batch_rules)
    add_batch_rules(parser)
    add_run(parser)
    parser.set_defaults(**defaults)
    parser.optimizers = optimizers
    return parser


def add_data(parser: Parser, datasets: Sequence[str]) -> None:
    """Add the group 'data'."""
    add = parser.add_argument_group("data").add_argument
    add("--dataset", choices=datasets, default=datasets[0], help="data set (default %(default)s)")
    add(
        "--data_dir",
        default=os.environ.get("DATA_DIR", "./data"),
        help="folder of the data sets (default $DATA_DIR or ./data)",
    )
    add(
        "--subset",
        type=fraction,
        default=1.0,
        metavar="F",
        help="train on a class-balanced fraction of the training set (default 1)",
    )
    add(
        "--val_fraction",
        type=below_one,
        metavar="F",
        help="hold out this part of the training set for validation (default 0; 0.05 with "
        "--mixup meta)",
    )
    add(
        "--test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="evaluate on the test set after each epoch (default); --no-test, with a "
        "validation set, leaves the test set alone, as a search should",
    )
    add(
        "--workers",
        type=natural,
        default=2,
        help="processes that decode images (default %(default)s)",
    )


def add_training(parser: Parser) -> None:
    """Add the group 'training'."""
    add = parser.add_argument_group("training").add_argument
    add(
        "--bs",
        "--batch_size",
        "-b",
        dest="batch_size",
        type=count,
        default=128,
        help="samples of one process in one micro-batch (default 128)",
    )
    add(
        "--epoch",
        "--epochs",
        dest="epochs",
        type=count,
        default=50,
        help="length of the run in epochs (default %(default)s)",
    )
    add(
        "--accumulate",
        type=count,
        default=1,
        metavar="K",
        help="micro-batches of a step: the global batch is bs x K x processes (default 1)",
    )
    add(
        "--label_smoothing",
        type=below_one,
        default=0.0,
        help="weight of the uniform distribution in the labels (default %(default)s)",
    )
    add(
        "--clip",
        type=not_negative,
        default=0.0,
        help="clip the gradient to this norm; 0 is no limit (default %(default)s)",
    )
    add(
        "--seed",
        type=number(int, 0, 2**32 - 1),
        default=0,
        help="seed of weights, order, augmentation and dropout (default 0)",
    )


def add_mixing(parser: Parser, mixing: Sequence[str]) -> None:
    """Add the group 'mixing of samples'; `mixing` are the values of --mixup."""
    add = parser.add_argument_group("mixing of samples").add_argument
    add(
        "--mixup",
        choices=mixing,
        default="none",
        help="mix samples and labels; the training accuracy is then weighted by lambda "
        "(default none)",
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
        help="of --mixup meta: what has a lambda of its own (default pair)",
    )
    add(
        "--meta_every",
        type=count,
        default=16,
        metavar="STEPS",
        help="of --mixup meta: steps between two updates of the policy (default %(default)s)",
    )
    add(
        "--meta_lr",
        type=positive,
        default=0.1,
        help="of --mixup meta: learning rate of the policy's Adam (default %(default)s)",
    )


def add_optimizer(parser: Parser, optimizers: Mapping[str, OptimizerChoice], default: str) -> None:
    """Add the group 'optimizer'; `default` is the name of the default one."""
    add = parser.add_argument_group("optimizer").add_argument
    add("--optimizer", choices=optimizers, default="sgd", help=f"optimizer (default {default})")
    add(
        "--ngd",
        dest="optimizer",
        action="store_const",
        const="ngd",
        help="the same as --optimizer ngd: SGD along the online natural gradient",
    )
    lrs = ", ".join(f"{name} {choice.lr:g}" for name, choice in optimizers.items())
    decays = ", ".join(f"{name} {choice.weight_decay:g}" for name, choice in optimizers.items())
    add("--lr", type=positive, help=f"learning rate (default {lrs})")
    add(
        "--weight_decay",
        type=not_negative,
        help=f"weight decay of matrices and convolutions (default {decays})",
    )
    add(
        "--momentum",
        type=below_one,
        default=0.9,
        help="of SGD, NGD and LARS (default %(default)s)",
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
        help="decay rates of the moments of AdamW, LAMB and SLAMB (default 0.9 0.999)",
    )
    add(
        "--trust_coefficient",
        type=positive,
        default=1e-3,
        help="of LARS: size of a layer's step relative to its weights (default %(default)s)",
    )
    add(
        "--larc",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="of LARS: let no layer's rate exceed --lr",
    )


def add_ngd(parser: Parser) -> None:
    """Add the group 'natural gradient'."""
    add = parser.add_argument_group("natural gradient").add_argument
    add(
        "--ngd_rank",
        type=count,
        default=80,
        help="eigenvectors kept of an axis, at most half its length (default 80)",
    )
    add(
        "--ngd_alpha",
        type=positive,
        default=4.0,
        help="smoothing towards plain SGD (default %(default)s)",
    )
    add(
        "--ngd_eta",
        type=number(float, 1e-6, 0.999),
        default=0.1,
        help="weight of a new gradient in the running estimate (default 0.1)",
    )
    add(
        "--ngd_period",
        type=count,
        default=4,
        metavar="STEPS",
        help="steps between two updates of an estimate (default %(default)s)",
    )
    add(
        "--ngd_max_dim",
        type=count,
        default=4096,
        help="longer axes are not preconditioned (default %(default)s)",
    )
    add(
        "--ngd_skip",
        nargs="+",
        default=[],
        metavar="NAME",
        help="parameters whose names contain one of these take plain SGD",
    )


def add_slamb(parser: Parser) -> None:
    """Add the group 'SLAMB'."""
    add = parser.add_argument_group("SLAMB").add_argument
    add(
        "--compress_ratio",
        type=fraction,
        default=0.1,
        metavar="K",
        help="part of the momentum that is sent in a step (default 0.1)",
    )
    add(
        "--compress_warmup",
        type=fraction,
        nargs="*",
        default=[0.5, 0.5, 0.2],
        metavar="K",
        help="the same in its first epochs (default 0.5 0.5 0.2)",
    )
    add(
        "--beta3",
        type=number(float, 0, 1),
        default=0.99,
        help="decay a step of the trust in what was not sent (default 0.99)",
    )
    add(
        "--selection",
        choices=("block", "random"),
        default="block",
        help="send rows of 64 weights, or single weights (default block)",
    )
    add(
        "--wire_dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="precision of what is sent (default bf16)",
    )
    add(
        "--node_groups",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="dense communication within a node, sparse between nodes",
    )


def add_schedule(parser: Parser) -> None:
    """Add the group 'learning rate'."""
    add = parser.add_argument_group("learning rate").add_argument
    add(
        "--lr_schedule",
        choices=schedules.SCHEDULES,
        default="cosine",
        help="shape of the learning rate over the run (default %(default)s)",
    )
    add(
        "--warmup",
        type=not_negative,
        default=0.0,
        metavar="EPOCHS",
        help="let the rate rise linearly at the start (default %(default)s)",
    )
    add(
        "--gamma",
        type=positive,
        default=0.1,
        help="factor of step, multistep and exponential; rate of inverse (default 0.1)",
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
        help="last rate of cosine and polynomial, as a multiple of --lr (default 0)",
    )
    add(
        "--peak",
        type=number(float, 1),
        default=5.0,
        metavar="F",
        help="highest rate of onecycle and cyclic, as a multiple of --lr (default 5)",
    )
    add(
        "--lr_scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="scale --lr with global batch / --base_bs (default none)",
    )
    add(
        "--base_bs",
        type=count,
        default=128,
        help="global batch that --lr was tuned for (default %(default)s)",
    )


def add_speed(parser: Parser) -> None:
    """Add the group 'speed and devices'."""
    add = parser.add_argument_group("speed and devices").add_argument
    add(
        "--device",
        default="auto",
        help="auto, cpu, cuda, or cuda:N, which puts all processes on one GPU (default auto)",
    )
    add(
        "--precision",
        choices=precision.PRECISIONS,
        default="auto",
        help="auto is bf16 where the device has it, else fp16 on GPUs and fp32 on CPUs "
        "(default auto)",
    )
    add(
        "--backend",
        choices=execution.BACKENDS,
        default="eager",
        help="how the model is executed (default %(default)s)",
    )
    add(
        "--fuse",
        action="store_true",
        help="keep only the inputs of fused blocks (convolution, batch-norm, ReLU; MLPs) and "
        "recompute the rest in the backward pass, to save memory",
    )
    add(
        "--checkpoint_activations",
        action="store_true",
        help="keep only the inputs of residual blocks, to save most memory",
    )
    add(
        "--threads",
        type=natural,
        default=0,
        help="CPU threads; 0 shares the cores among the node's processes (default 0)",
    )
    add(
        "--parallel",
        choices=fsdp.PARALLEL,
        default="ddp",
        help="ddp if the model fits a device, fsdp if it does not, hsdp for that on many nodes "
        "(default ddp)",
    )
    add(
        "--distributed",
        action="store_true",
        help="insist on torchrun; without the flag, torchrun is recognised by itself",
    )
    add(
        "--sync_bn",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute BatchNorm statistics over all GPUs",
    )


def add_communication(parser: Parser) -> None:
    """Add the group 'communication'."""
    add = parser.add_argument_group("communication").add_argument
    add(
        "--grad_compress",
        choices=comm_hooks.COMPRESSIONS,
        default="none",
        help="how gradients are compressed on the wire (default none)",
    )
    add(
        "--powersgd_rank",
        type=count,
        default=2,
        help="of --grad_compress powersgd: rank of the approximation (default %(default)s)",
    )
    add(
        "--sync",
        choices=comm_hooks.SYNCS,
        default="sync",
        help="lag applies gradients a step late; local averages weights every --local_steps "
        "(default sync)",
    )
    add(
        "--local_steps",
        type=count,
        default=50,
        metavar="STEPS",
        help="of SLAMB and --sync local: steps between averagings of the weights (default 50)",
    )
    add(
        "--dense_steps",
        type=natural,
        default=10,
        metavar="STEPS",
        help="of SLAMB and --sync local: steps at the start that send everything (default 10)",
    )


def add_batches(parser: Parser, batch_rules: Collection[str]) -> None:
    """Add the group 'batches that change'."""
    group = parser.add_argument_group("batches that change (sizes over all processes)")
    add = group.add_argument
    add(
        "--dynamic_batch",
        choices=batch_rules,
        default="none",
        help="how the batch size changes from epoch to epoch (default none)",
    )
    add(
        "--min_bs",
        type=count,
        metavar="N",
        help="smallest batch (default the first one; of decrease a sixteenth of it)",
    )
    add(
        "--max_bs",
        type=count,
        metavar="N",
        help="largest batch (default 16 times the first one; of decrease the first one)",
    )
    add(
        "--noise_scale",
        action="store_true",
        help="log the gradient noise scale, as --dynamic_batch noise does by itself",
    )
    add(
        "--balance_workers",
        action="store_true",
        help="give each process a share of the batch in proportion to its speed",
    )
    add(
        "--micro_bs",
        type=count,
        metavar="N",
        help="samples at once on a device (default --bs; on GPUs what fits)",
    )


def add_batch_rules(parser: Parser) -> None:
    """Add the group 'rules of --dynamic_batch'."""
    add = parser.add_argument_group("rules of --dynamic_batch").add_argument
    add(
        "--batch_factor",
        type=number(float, 1, open_low=True),
        default=2.0,
        metavar="F",
        help="factor of one change (default 2)",
    )
    add(
        "--batch_milestones",
        type=count,
        nargs="+",
        metavar="EPOCH",
        help="of increase and decrease (default one half and three quarters of the run)",
    )
    add(
        "--batch_growth",
        type=number(float, 1, open_low=True),
        metavar="F",
        help="of increase and decrease: change by this factor after every epoch",
    )
    add(
        "--replace_decay",
        action="store_true",
        help="of increase: let the batch grow where --lr_schedule would let the rate decay",
    )
    add(
        "--dynamic_lr",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="scale the learning rate with the batch (default none)",
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
        help="of loss: how many epochs it looks at (default 5)",
    )
    add(
        "--loss_threshold",
        type=not_negative,
        default=10.0,
        metavar="P",
        help="of loss: threshold of the progress, in thousandths (default 10)",
    )


def add_run(parser: Parser) -> None:
    """Add the group 'run'."""
    add = parser.add_argument_group("run").add_argument
    add("--out", metavar="DIR", help="run folder (default runs/<script>-<time>)")
    add(
        "--resume",
        "-r",
        nargs="?",
        const="",
        metavar="PATH",
        help="go on from a checkpoint or run folder (without PATH: --out, or the newest run)",
    )
    add(
        "--checkpoint",
        metavar="best|last|PATH",
        help="Weights for --evaluate, --predict and --export: a run folder or .pt file, or the "
        "best or last checkpoint of --resume, --out or the newest run; with --resume alone, where "
        "training goes on from (default last).",
    )
    add(
        "--save_every",
        type=natural,
        default=0,
        metavar="STEPS",
        help="also save within an epoch (default 0, never)",
    )
    add(
        "--log_every",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="Off a terminal, print a line of progress after this time without output; 0 is "
        "never (default 60).",
    )
    add("--recipe", metavar="YAML", help="flags from a file; the command line overrides them")
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
    add(
        "--evaluate",
        action="store_true",
        help="with --resume: print the accuracy on the test set, overall and of each class",
    )
    add(
        "--predict",
        nargs="+",
        metavar="PATH",
        help="with --resume: classify files, or all files below a folder",
    )
    add(
        "--predict_out",
        metavar="FILE",
        help="of --predict: write the probability of every class as .jsonl or .csv",
    )
    add(
        "--export",
        metavar="FILE",
        help="with --resume: write the model as .onnx or .pt2 and check the file",
    )
