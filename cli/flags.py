"""Flags of both scripts: names, aliases, defaults, help; cli/options.py reads and checks them.

parser = shared_parser(__doc__, datasets=["cifar10", "mnist"], optimizers=OPTIMIZERS, ...)
parser.group("images")("--arch", default="resnet50", help="Train this network.", common=True)

docs/flags.md is written from here by `python -m figures.flags_page`.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import dynamic_batch
import mixup
from backends import execution, nvidia_apex, onnx_runtime, precision, torch_compat
from cli.flag_parser import FlagParser, path_text
from distributed import comm_hooks, fsdp
from distributed.world import TimeLimits
from optimizers import schedules
from optimizers.demo import LARGEST_CHUNK
from training.tracking import TRACKERS


@dataclass(frozen=True)
class OptimizerChoice:
    """A value of --optimizer.

    Attributes:
        make: called as make(parameter_groups, lr=..., **settings), where the settings are those
            that `cli.factory.optimizer_settings` knows for this name.
        lr, weight_decay, nesterov, momentum: where the command line does not give them.
        has_momentum: --momentum is a setting of this optimizer.
    """

    make: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float
    nesterov: bool = False
    momentum: float = 0.9
    has_momentum: bool = True


class Parser(FlagParser):
    """The parser of an entry script.

    Attributes:
        optimizers: the values of --optimizer.
    """

    optimizers: Mapping[str, OptimizerChoice]


# -------------------------------------------------------------------- types of values


MAX_FLOAT = 1e38  # about what fp32 holds


def number(
    kind: Callable[[str], Any], low: float, high: float = MAX_FLOAT, *, open_low: bool = False
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
            limits = f"{'above' if open_low else 'at least'} {format_limit(low)}"
            if high < MAX_FLOAT or value > high:
                limits += f" and at most {format_limit(high)}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return convert


def format_limit(limit: float) -> str:
    """Write a limit with all digits of a whole number, and without needless ones of others."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


count, natural = number(int, 1), number(int, 0)
MAX_THREADS = 1024  # of a process; some thousands take minutes to start
positive, not_negative = number(float, 0, open_low=True), number(float, 0)
fraction, below_one = number(float, 0, 1, open_low=True), number(float, 0, 0.999)


# -------------------------------------------------------------------- choices


def optimizer_unavailable_reason(name: str) -> str:
    """Return why an optimizer cannot be used here, or ''."""
    if name == "muon":
        return torch_compat.unavailable_reason("muon")
    return nvidia_apex.unavailable_reason(name) if name in nvidia_apex.OPTIMIZERS else ""


def precision_unavailable_reason(name: str) -> str:
    """Return why a precision cannot be used here, or ''; whether there is a GPU does not count."""
    return nvidia_apex.amp_unavailable_reason() if name in nvidia_apex.LEVELS else ""


def backend_unavailable_reason(name: str) -> str:
    """Return why a backend cannot be used here, or ''; whether there is a GPU does not count."""
    return onnx_runtime.unavailable_reason() if name == "ort" else ""


def mixup_hint(value: str) -> str:
    """Return what to write where --mixup was given a number, as timm's flag of that name takes."""
    try:
        float(value)
    except ValueError:
        return ""
    return f"for mixup of that strength write --mixup mixup --alpha {value}"


def schedule_hint(value: str) -> str:
    """Return our name of Hugging Face's schedule 'linear', or ''."""
    return "polynomial falls linearly by default" if value == "linear" else ""


def defaults_by_optimizer(values: Mapping[str, float]) -> str:
    """Write default values, for example '0.02 for sgd, ngd; 1 for lars', without apex's."""
    names = defaultdict(list)
    for name, value in values.items():
        if name not in nvidia_apex.OPTIMIZERS:
            names[value].append(name)
    return "; ".join(f"{value:g} for {', '.join(group)}" for value, group in names.items())


ADVICE = {  # by flags that have no exact counterpart here, most of timm or Hugging Face
    "--amp": "did you mean --precision, with bf16 or fp16?",
    "--logging_steps": "did you mean --log_every, which takes seconds?",
    "--do_train": "the script trains unless --evaluate, --predict or --export is given",
    "--do_eval": "each epoch is evaluated; to evaluate a checkpoint alone, use --evaluate",
    "--do_predict": "did you mean --predict?",
    "--help_all": "did you mean --help all?",
}


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
    parser = Parser(description)
    add_data(parser, datasets)
    add_training(parser)
    add_mixing(parser, mixing)
    add_optimizer(parser, optimizers)
    add_ngd(parser)
    add_slamb(parser)
    add_demo(parser)
    add_schedule(parser)
    add_speed(parser)
    add_communication(parser)
    add_batches(parser, batch_rules)
    add_batch_rules(parser)
    add_run(parser)
    parser.set_defaults(**defaults)
    parser.optimizers = optimizers
    parser.advice = ADVICE
    return parser


def add_data(parser: Parser, datasets: Sequence[str]) -> None:
    """Add the group 'data'."""
    add = parser.group("data")
    add(
        "--dataset",
        choices=datasets,
        default=datasets[0],
        help="Train on this data set; folder (images) and csv (texts) read files of your own from "
        "--data_dir, as docs/own_data.md describes (default %(default)s).",
        common=True,
    )
    add(
        "--data_dir",
        type=path_text,
        default=os.environ.get("DATA_DIR") or "./data",
        metavar="DIR",
        help="Read data sets from this folder, and download missing ones into it "
        "(default $DATA_DIR, else ./data).",
        common=True,
    )
    add(
        "--subset",
        type=fraction,
        default=1.0,
        metavar="F",
        help="Train on this fraction of the training set, the same of each class "
        "(default %(default)s).",
        common=True,
    )
    add(
        "--val_fraction",
        type=below_one,
        metavar="F",
        help="Hold out this fraction of the training set, and choose the best epoch by it "
        "(default 0; 0.05 with --mixup meta).",
        common=True,
    )
    add(
        "--label_noise",
        type=below_one,
        default=0.0,
        metavar="F",
        help="Give this fraction of the training rows of each class a wrong label, to see how a "
        "method bears it; validation and test rows keep theirs (default %(default)s).",
    )
    add(
        "--test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Evaluate on the test set after each epoch, which is the default; --no-test leaves "
        "it alone, as a search should, and needs a validation set.",
    )
    add(
        "--workers",
        aliases=("--dataloader_num_workers",),
        type=natural,
        default=2,
        metavar="N",
        help="Decode image files in this many processes (default %(default)s).",
    )


def add_training(parser: Parser) -> None:
    """Add the group 'training'."""
    add = parser.group("training")
    add(
        "--bs",
        "--batch_size",
        "-b",
        aliases=("--per_device_train_batch_size",),
        dest="batch_size",
        type=count,
        default=128,
        metavar="N",
        help="Take this many samples per process in one forward and backward pass "
        "(default %(default)s).",
        common=True,
    )
    add(
        "--epoch",
        "--epochs",
        aliases=("--num_train_epochs",),
        dest="epochs",
        type=count,
        default=50,
        metavar="N",
        help="Train for this many epochs (default %(default)s).",
        common=True,
    )
    add(
        "--accumulate",
        aliases=("--grad_accum_steps", "--gradient_accumulation_steps"),
        type=count,
        default=1,
        metavar="K",
        help="Add up the gradients of K batches before each step, so that the global batch is "
        "bs x K x processes (default %(default)s).",
        common=True,
    )
    add(
        "--label_smoothing",
        aliases=("--smoothing", "--label_smoothing_factor"),
        type=below_one,
        default=0.0,
        metavar="F",
        help="Spread this fraction of each label evenly over all classes (default %(default)s).",
        common=True,
    )
    add(
        "--ema",
        aliases=("--model_ema_decay",),
        type=below_one,
        default=0.0,
        metavar="DECAY",
        help="Evaluate, and keep for use, a moving average of the weights over the steps with this "
        "decay, such as 0.999; 0 does not average (default %(default)s).",
    )
    add(
        "--clip",
        aliases=("--clip_grad", "--max_grad_norm"),
        type=not_negative,
        default=0.0,
        metavar="NORM",
        help="Clip the gradient to this norm before each step; 0 does not clip it "
        "(default %(default)s).",
    )
    add(
        "--seed",
        type=number(int, 0, 2**32 - 1),
        default=0,
        metavar="N",
        help="Seed the random numbers of weights, order, augmentation and dropout with "
        "this number (default %(default)s).",
        common=True,
    )


def add_mixing(parser: Parser, mixing: Sequence[str]) -> None:
    """Add the group 'mixing of samples'; `mixing` are the values of --mixup."""
    add = parser.group("mixing of samples")
    add(
        "--mixup",
        choices=mixing,
        default="none",
        hint=mixup_hint,
        help="Mix pairs of samples and of their labels in this way; the training accuracy then "
        "counts each label by its weight (default %(default)s).",
        common=True,
    )
    add(
        "--meta_learning",
        dest="mixup",
        action="store_const",
        const="meta",
        help="Learn how much to mix; this is the same as --mixup meta.",
        common=True,
    )
    add(
        "--alpha",
        type=positive,
        default=0.99,
        metavar="A",
        help="Draw the weights of --mixup from Beta(A, A): 0.2 mixes gently, 1 strongly "
        "(default %(default)s).",
        common=True,
    )
    add(
        "--mixup_weight",
        type=number(float, 0, 1),
        metavar="F",
        help="Give each sample of --mixup mixup or intra this weight, and its partner the rest, "
        "instead of weights drawn from the Beta distribution of --alpha (default: they are drawn).",
    )
    add(
        "--meta_policy",
        choices=mixup.POLICIES,
        default="pair",
        help="Let --mixup meta learn a weight (pair) or a Beta distribution (beta) for each "
        "pair of classes (default %(default)s).",
    )
    add(
        "--meta_every",
        type=count,
        default=16,
        metavar="STEPS",
        help="Update the policy of --mixup meta once in this many steps (default %(default)s).",
    )
    add(
        "--meta_lr",
        type=positive,
        default=0.1,
        metavar="RATE",
        help="Update the policy of --mixup meta by Adam with this learning rate "
        "(default %(default)s).",
    )


def add_optimizer(parser: Parser, optimizers: Mapping[str, OptimizerChoice]) -> None:
    """Add the group 'optimizer'."""
    add = parser.group("optimizer")
    add(
        "--optimizer",
        aliases=("--opt", "--optim"),
        choices=optimizers,
        default="sgd",
        unavailable_reason=optimizer_unavailable_reason,
        help="Train with this optimizer (default %(default)s).",
        common=True,
    )
    add(
        "--ngd",
        dest="optimizer",
        action="store_const",
        const="ngd",
        help="Train with the natural gradient; this is the same as --optimizer ngd.",
        common=True,
    )
    lrs = defaults_by_optimizer({name: choice.lr for name, choice in optimizers.items()})
    add(
        "--lr",
        aliases=("--learning_rate",),
        type=positive,
        metavar="RATE",
        help=f"Train with this learning rate (default {lrs}).",
        common=True,
    )
    momenta = defaults_by_optimizer(
        {name: choice.momentum for name, choice in optimizers.items() if choice.has_momentum}
    )
    nesterov_names = ", ".join(name for name, choice in optimizers.items() if choice.nesterov)
    decays = defaults_by_optimizer({name: each.weight_decay for name, each in optimizers.items()})
    add(
        "--weight_decay",
        aliases=("--wd",),
        type=not_negative,
        metavar="F",
        help="Shrink weights by this factor times the learning rate in each step, but not biases "
        f"and norms (default {decays}).",
        common=True,
    )
    add(
        "--layer_decay",
        aliases=("--layer_lr_decay",),
        type=fraction,
        default=1.0,
        metavar="F",
        help="Multiply the learning rate by this factor from each layer to the one before it, for "
        "fine-tuning; 1 is one rate for all (default %(default)s).",
    )
    add(
        "--momentum",
        type=below_one,
        metavar="F",
        help=f"Give these optimizers this momentum (default {momenta}).",
    )
    add(
        "--nesterov",
        action=argparse.BooleanOptionalAction,
        help="Use Nesterov momentum where --momentum applies (default on for "
        f"{nesterov_names}, unless --momentum is 0).",
    )
    add(
        "--betas",
        type=below_one,
        nargs=2,
        default=[0.9, 0.999],
        metavar="B",
        help="Let the first and the second moments of AdamW, LAMB and SLAMB decay by these "
        "factors per step; also of AdamW within NGD and Muon (default %(default)s).",
    )
    add(
        "--trust_coefficient",
        type=positive,
        default=1e-3,
        metavar="F",
        help="Let a step of LARS change each layer by this fraction of its weights, times --lr "
        "(default %(default)s).",
    )
    add(
        "--larc",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Limit the learning rate that LARS gives to a layer to --lr (default off).",
    )


WIRE_BITS = {"int8": 8, "int4": 4}  # values of --wire_dtype for SLAMB alone


def add_ngd(parser: Parser) -> None:
    """Add the group 'natural gradient'."""
    add = parser.group("natural gradient")
    add(
        "--ngd_rank",
        type=count,
        default=32,
        metavar="N",
        help="Tell the second moments of this many directions of a weight apart (ngd), or of each "
        "of its axes (kaldi_ngd), but of at most half its length (default %(default)s).",
    )
    add(
        "--adamw_ratio",
        type=not_negative,
        default=0.075,
        metavar="F",
        help="Train what is no hidden layer's matrix with AdamW at this fraction of --lr, within "
        "ngd and muon (default %(default)s).",
    )
    add(
        "--ngd_alpha",
        type=positive,
        default=4.0,
        metavar="A",
        help="Smooth the natural gradient of kaldi_ngd by this much; larger values are closer to "
        "plain SGD (default %(default)s).",
    )
    add(
        "--ngd_eta",
        type=number(float, 1e-6, 0.999),
        default=0.1,
        metavar="F",
        help="Give each new gradient this weight in the running estimates of kaldi_ngd (default "
        "%(default)s).",
    )
    add(
        "--ngd_period",
        type=count,
        default=4,
        metavar="STEPS",
        help="Update each running estimate of kaldi_ngd once in this many steps (default "
        "%(default)s).",
    )
    add(
        "--ngd_max_dim",
        type=count,
        default=4096,
        metavar="N",
        help="Leave axes longer than this, such as that of a vocabulary, to plain SGD within "
        "kaldi_ngd (default %(default)s).",
    )
    add(
        "--ngd_skip",
        nargs="+",
        default=[],
        metavar="WORD",
        help="Train parameters whose names contain one of these words with AdamW within ngd and "
        "muon, and with plain SGD within kaldi_ngd (default none).",
    )


def add_slamb(parser: Parser) -> None:
    """Add the group 'SLAMB'."""
    add = parser.group("SLAMB")
    add(
        "--compress_ratio",
        type=fraction,
        default=0.1,
        metavar="F",
        help="Send this fraction of the momentum in each step (default %(default)s).",
    )
    add(
        "--compress_warmup",
        type=fraction,
        nargs="*",
        default=[0.5, 0.5, 0.2],
        metavar="F",
        help="Send these fractions of the momentum in the first epochs, one after the other; "
        "without a value there is no warm-up (default %(default)s).",
    )
    add(
        "--beta3",
        type=number(float, 0, 1),
        default=0.99,
        metavar="F",
        help="Multiply the trust in momentum by this factor in each step in which it is not sent "
        "(default %(default)s).",
    )
    add(
        "--selection",
        choices=("block", "random"),
        default="block",
        help="Send momentum in rows of 64 weights (block) or weight by weight (random) "
        "(default %(default)s).",
    )
    add(
        "--node_groups",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Send whole gradients within a node, and fractions of the momentum only between "
        "nodes (default off).",
    )


def add_demo(parser: Parser) -> None:
    """Add the group 'DeMo'."""
    add = parser.group("DeMo")
    add(
        "--demo_topk",
        type=count,
        default=32,
        metavar="N",
        help="Send this many elements of the momentum's cosine transform in each chunk "
        "(default %(default)s).",
    )
    add(
        "--demo_chunk",
        type=number(int, 1, LARGEST_CHUNK),
        default=64,
        metavar="N",
        help="Cut weights into chunks of at most this many rows and columns (default %(default)s).",
    )
    add(
        "--demo_decay",
        type=number(float, 0, 1),
        default=0.999,
        metavar="F",
        help="Multiply the momentum that stays by this factor in each step (default %(default)s).",
    )


def add_schedule(parser: Parser) -> None:
    """Add the group 'learning rate'."""
    add = parser.group("learning rate")
    add(
        "--lr_schedule",
        aliases=("--sched", "--lr_scheduler_type"),
        choices=schedules.SCHEDULES,
        default="cosine",
        hint=schedule_hint,
        help="Let the learning rate follow this schedule over the run (default %(default)s).",
        common=True,
    )
    add(
        "--warmup",
        aliases=("--warmup_epochs",),
        type=not_negative,
        metavar="EPOCHS",
        help="Raise the learning rate linearly from 0 over this many epochs (default a tenth of "
        "the run and at most 5; 0 for onecycle and cyclic, which rise by themselves).",
        common=True,
    )
    add(
        "--gamma",
        type=positive,
        default=0.1,
        metavar="F",
        help="Multiply the rate by this factor at each change in step, multistep and exponential; "
        "divide it by 1 + F x epochs in inverse (default %(default)s).",
    )
    add(
        "--step_size",
        type=count,
        default=30,
        metavar="EPOCHS",
        help="Change the rate once in this many epochs in step; raise it for so long and lower "
        "it for so long in cyclic (default %(default)s).",
    )
    add(
        "--milestones",
        type=count,
        nargs="+",
        default=[30, 40],
        metavar="EPOCH",
        help="Change the rate at these epochs in multistep (default %(default)s).",
    )
    add(
        "--power",
        type=positive,
        default=1.0,
        metavar="P",
        help="Lower the rate in polynomial as the P-th power of what is left of the run; 1 is a "
        "straight line (default %(default)s).",
    )
    add(
        "--lr_end",
        type=number(float, 0, 1),
        default=0.0,
        metavar="F",
        help="End cosine and polynomial at this fraction of --lr (default %(default)s).",
    )
    add(
        "--peak",
        type=number(float, 1, 1e6),
        default=5.0,
        metavar="F",
        help="Let onecycle and cyclic rise to this multiple of --lr (default %(default)s).",
    )
    add(
        "--lr_scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="Multiply --lr by the global batch divided by --base_bs (linear), or by the square "
        "root of that (sqrt) (default %(default)s).",
    )
    add(
        "--base_bs",
        type=count,
        default=128,
        metavar="N",
        help="Tell --lr_scaling for which global batch, in samples, --lr was tuned "
        "(default %(default)s).",
    )


def add_speed(parser: Parser) -> None:
    """Add the group 'speed and devices'."""
    add = parser.group("speed and devices")
    add(
        "--device",
        default="auto",
        help="Compute on auto (a GPU if there is one), cpu, cuda, or cuda:N, which puts all "
        "processes on GPU number N (default %(default)s).",
        common=True,
    )
    add(
        "--precision",
        choices=precision.PRECISIONS,
        default="auto",
        value_aliases={"--bf16": "bf16", "--fp16": "fp16"},
        unavailable_reason=precision_unavailable_reason,
        help="Compute in this precision; auto is bf16 where the device has it, else fp16 on GPUs "
        "and fp32 on CPUs (default %(default)s).",
        common=True,
    )
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="On GPUs, choose kernels that give the same bits in every run, and warn where torch "
        "has none; slower. CPUs always give the same bits (default off).",
    )
    add(
        "--backend",
        choices=execution.BACKENDS,
        default="eager",
        value_aliases={"--torch_compile": "compile", "--torchcompile": "compile"},
        unavailable_reason=backend_unavailable_reason,
        help="Execute the model in this way; compile is torch.compile, and "
        "`python -m cli.capabilities` lists what this machine supports (default %(default)s).",
        common=True,
    )
    add(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Save memory: recompute convolution, batch-norm and ReLU, or MLPs, as one block in "
        "the backward pass (default off).",
    )
    add(
        "--checkpoint_activations",
        aliases=("--grad_checkpointing", "--gradient_checkpointing"),
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Save most memory: recompute each residual block in the backward pass (default off).",
    )
    add(
        "--threads",
        type=number(int, 0, MAX_THREADS),
        default=0,
        metavar="N",
        help="Use this many CPU threads in each process; 0 shares the cores of the node among its "
        "processes (default %(default)s).",
    )
    add(
        "--parallel",
        choices=fsdp.PARALLEL,
        default="ddp",
        help="Keep a copy of the model on each device (ddp), or shards of it over all devices "
        "(fsdp) or over those of each node (hsdp) (default %(default)s).",
    )
    add(
        "--distributed",
        action="store_true",
        help="End with an error unless torchrun started the script; without this flag, torchrun "
        "is recognised by itself.",
    )
    add(
        "--timeout",
        type=positive,
        nargs=2,
        default=[TimeLimits.start, TimeLimits.step],
        metavar="SECONDS",
        help="End when another process does not answer for this long: up to the first step, in "
        "evaluations and in saves, and then in later steps. Downloads have two hours "
        "(default %(default)s).",
    )
    add(
        "--sync_bn",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Compute the statistics of batch-norm over all GPUs (default off).",
    )


def add_communication(parser: Parser) -> None:
    """Add the group 'communication'."""
    add = parser.group("communication")
    add(
        "--grad_compress",
        choices=comm_hooks.COMPRESSIONS,
        default="none",
        help="Send gradients in this compressed form; powersgd, int8, int4 and sign correct what "
        "they lose in later steps (default %(default)s).",
    )
    add(
        "--powersgd_rank",
        type=count,
        default=2,
        metavar="N",
        help="Send matrices of this rank with --grad_compress powersgd (default %(default)s).",
    )
    add(
        "--sync",
        choices=comm_hooks.SYNCS,
        default="sync",
        help="Average gradients in each step (sync), apply their average a step late (lag), "
        "average weights every --local_steps (local), or let them take a step with momentum "
        "along their mean change (diloco) (default %(default)s).",
    )
    add(
        "--local_steps",
        type=count,
        default=50,
        metavar="STEPS",
        help="Let the weights of all processes meet once in this many steps, with SLAMB and "
        "--sync local or diloco (default %(default)s).",
    )
    add(
        "--dense_steps",
        type=natural,
        default=10,
        metavar="STEPS",
        help="Send everything in this many steps at the start, with SLAMB and --sync local or "
        "diloco (default %(default)s).",
    )
    add(
        "--wire_dtype",
        choices=("bf16", "fp16", "fp32", *WIRE_BITS),
        default="bf16",
        help="Send numbers in this format, with SLAMB, DeMo and --sync diloco. int8 and int4 are "
        "for SLAMB alone and round the momentum of its large tensors; it sends the rest as bf16 "
        "(default %(default)s).",
    )
    add(
        "--outer_lr",
        type=positive,
        default=0.7,
        metavar="RATE",
        help="Learning rate of the outer step of --sync diloco, which follows every --local_steps "
        "steps: a factor of the mean change of the weights since the last one (default "
        "%(default)s).",
    )
    add(
        "--outer_momentum",
        type=below_one,
        default=0.9,
        metavar="F",
        help="Momentum of the outer step of --sync diloco (default %(default)s).",
    )
    add(
        "--fragments",
        type=count,
        default=1,
        metavar="N",
        help="Let the weights of --sync diloco meet in this many parts, one after the other "
        "(default %(default)s).",
    )


def add_batches(parser: Parser, batch_rules: Collection[str]) -> None:
    """Add the group 'batches that change'."""
    add = parser.group("batches that change (sizes over all processes)")
    add(
        "--dynamic_batch",
        choices=batch_rules,
        default="none",
        help="Change the batch size from epoch to epoch by this rule (default %(default)s).",
        common=True,
    )
    add(
        "--min_bs",
        type=count,
        metavar="N",
        help="Keep the batch at this many samples at least (default the first batch; for "
        "decrease, a sixteenth of it).",
    )
    add(
        "--max_bs",
        type=count,
        metavar="N",
        help="Keep the batch at this many samples at most (default 16 times the first batch, and "
        "no more than an eighth of the training set; for decrease, the first batch).",
    )
    add(
        "--noise_scale",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Log the gradient noise scale after each epoch, as --dynamic_batch noise always does "
        "(default off).",
    )
    add(
        "--balance_workers",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Give each process a share of the batch in proportion to its speed (default off).",
        common=True,
    )
    add(
        "--micro_bs",
        type=count,
        metavar="N",
        help="Compute at most this many samples at once on a device (default --bs on CPUs, and "
        "as many as fit on GPUs).",
    )


def add_batch_rules(parser: Parser) -> None:
    """Add the group 'rules of --dynamic_batch'."""
    add = parser.group("rules of --dynamic_batch")
    add(
        "--batch_factor",
        type=number(float, 1, open_low=True),
        default=2.0,
        metavar="F",
        help="Multiply or divide the batch by this factor at each change; noise changes it by "
        "this factor at most (default %(default)s).",
    )
    add(
        "--batch_milestones",
        type=count,
        nargs="+",
        metavar="EPOCH",
        help="Change the batch at these epochs in increase and decrease (default one half and "
        "three quarters of the run).",
    )
    add(
        "--batch_growth",
        type=number(float, 1, open_low=True),
        metavar="F",
        help="Multiply the batch by this factor after each epoch in increase, or divide it by "
        "this factor in decrease, instead of at milestones.",
    )
    add(
        "--replace_decay",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Let the batch grow, in increase, where --lr_schedule would lower the learning rate "
        "(default off).",
    )
    add(
        "--dynamic_lr",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="Scale the learning rate with the batch (linear) or with its square root (sqrt) when "
        "it changes (default %(default)s).",
    )
    add(
        "--loss_rule",
        choices=dynamic_batch.LOSS_RULES,
        default="progress",
        help="Let the rule loss follow the progress of the training loss over several epochs, or "
        "a score of loss and time in the last two (default %(default)s).",
    )
    add(
        "--loss_window",
        type=number(int, 2),
        default=5,
        metavar="EPOCHS",
        help="Measure the progress of the training loss over this many epochs "
        "(default %(default)s).",
    )
    add(
        "--loss_threshold",
        type=not_negative,
        default=10.0,
        metavar="P",
        help="Let the batch grow when the mean training loss of --loss_window epochs is less than "
        "P thousandths above the lowest of them, or when the score improves by more than P "
        "thousandths (default %(default)s, which is 1 %%).",
    )


def add_run(parser: Parser) -> None:
    """Add the group 'run'."""
    add = parser.group("run")
    add(
        "--out",
        aliases=("--output", "--output_dir"),
        type=path_text,
        metavar="DIR",
        help="Write the run into this folder (default runs/SCRIPT-TIME).",
        common=True,
    )
    add(
        "--resume",
        "-r",
        aliases=("--resume_from_checkpoint",),
        nargs="?",
        const="",
        type=path_text,
        metavar="PATH",
        help="Continue from this checkpoint or run folder; without PATH, from --out or from the "
        "newest run.",
        common=True,
    )
    add(
        "--checkpoint",
        type=path_text,
        metavar="best|last|PATH",
        help="Take the weights of --evaluate, --predict and --export from this run folder or .pt "
        "file, or from the best or last checkpoint of --resume, --out or the newest run; with "
        "--resume, training goes on from there (default last).",
        common=True,
    )
    add(
        "--eval_every",
        type=count,
        default=1,
        metavar="EPOCHS",
        help="Evaluate after each epoch whose number is a multiple of this one, and after the last "
        "epoch; the best epoch is one of these (default %(default)s).",
    )
    add(
        "--save_every",
        type=natural,
        default=0,
        metavar="STEPS",
        help="Save a checkpoint once in this many steps as well; 0 saves after each epoch only "
        "(default %(default)s).",
    )
    add(
        "--keep",
        type=count,
        default=2,
        metavar="N",
        help="Keep this many of the latest checkpoints: last.pt, last-1.pt before it and so on; "
        "--resume uses the newest that is not damaged (default %(default)s).",
    )
    add(
        "--recipe",
        aliases=("--config", "-c"),
        type=path_text,
        metavar="NAME",
        help="Read flags from recipes/NAME.yaml of this project, or from the YAML file of that "
        "path; the command line overrides them.",
        common=True,
    )
    add(
        "--track",
        aliases=("--report_to",),
        value_aliases={"--tensorboard": "tensorboard", "--log_wandb": "wandb"},
        choices=TRACKERS,
        default="none",
        help="Send the flags, each epoch's row and numbers of single steps to this tracker too; "
        "wandb stays offline unless WANDB_MODE is set (default %(default)s).",
    )
    add(
        "--log_every",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="Print a line of progress after this time without output where there is no "
        "terminal, and send a step to the tracker; 0 is never (default %(default)s).",
    )
    add(
        "--evaluate",
        action="store_true",
        help="Print the accuracy on the test set, overall and of each class, of the model of "
        "--checkpoint.",
        common=True,
    )
    add(
        "--predict",
        nargs="+",
        type=path_text,
        metavar="PATH",
        help="Classify images, or each line of text files, with the model of --checkpoint; a "
        "folder stands for all such files below it.",
        common=True,
    )
    add(
        "--predict_out",
        type=path_text,
        metavar="FILE",
        help="Write the predictions, with the probability of every class, into this .jsonl or "
        ".csv file.",
        common=True,
    )
    add(
        "--export",
        type=path_text,
        metavar="FILE",
        help="Write the model of --checkpoint as .onnx or .pt2, or its weights as .safetensors, "
        "with classes and preprocessing, and check that the file computes the same.",
        common=True,
    )
