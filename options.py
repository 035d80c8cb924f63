"""Flags of both scripts: names, defaults, help, recipes, and validation with one clear line.

    parser = options.shared_parser(__doc__, datasets=["cifar10", "mnist"], epochs=50)
    parser.add_argument("--arch", default="resnet50")
    args = options.parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else from the default.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

import backends
import checkpoint
import distributed
import hooks
import mixup
import optim
import runlog
from errors import InputError

NOT_RESTORED = {"resume", "recipe", "out", "evaluate", "predict", "export", "distributed", "tensorboard"}
"""Flags of one invocation: a resumed run does not take them from its checkpoint."""


class Parser(argparse.ArgumentParser):
    """Reports a bad flag as an InputError instead of printing the usage."""

    rates: dict[str, tuple[float, float]]  # see RATES

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see --help)")


# -------------------------------------------------------------------- types of values


def number(kind: Callable[[str], Any], low: float, high: float = math.inf, open_low: bool = False) -> Callable[[str], Any]:
    """An argparse type: `kind` within [low, high], or (low, high] with `open_low`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"wanted {name}, got {text!r}") from None
        if not low <= value <= high or (open_low and value == low) or not math.isfinite(value):
            limits = f"{'above' if open_low else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return convert


count, natural = number(int, 1), number(int, 0)
positive, not_negative = number(float, 0, open_low=True), number(float, 0)
share, below_one = number(float, 0, 1, open_low=True), number(float, 0, 0.999)


# -------------------------------------------------------------------- the flags


RATES = {
    "sgd": (0.02, 5e-4),
    "ngd": (0.02, 5e-4),
    "adamw": (1e-3, 0.05),
    "lars": (1.0, 5e-4),
    "lamb": (4e-3, 0.01),
    "slamb": (4e-3, 0.01),
}
"""Learning rate and weight decay of each optimizer where the command line names neither."""
META_VAL_FRACTION = 0.05  # of the training set, held out for --mixup meta where the command line does not say


def shared_parser(
    description: str | None,
    datasets: Sequence[str],
    rates: Mapping[str, tuple[float, float]] = RATES,
    mixes: Sequence[str] = mixup.KINDS,
    **defaults: Any,
) -> Parser:
    """The flags that both scripts have; `rates`, `mixes` (of --mixup) and `defaults` are those in which they differ."""
    parser = Parser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=True
    )
    add_data(parser, datasets)
    add_training(parser, mixes)
    add_optimizer(parser, rates, defaults.get("optimizer", "sgd"))
    add_speed(parser)
    add_communication(parser)
    add_run(parser)
    parser.set_defaults(**defaults)
    parser.rates = dict(rates)
    return parser


def add_data(parser: Parser, datasets: Sequence[str]) -> None:
    """Flags of the group 'data'."""
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--dataset", choices=datasets, default=datasets[0], help="data set (default %(default)s)")
    add("--data_dir", default=os.environ.get("DATA_DIR", "./data"), help="folder of the data sets (default $DATA_DIR or ./data)")
    add("--subset", type=share, default=1.0, metavar="F", help="class-balanced fraction of the training set (default 1)")
    add(
        "--val_fraction",
        type=below_one,
        metavar="F",
        help="part of the training set to validate on (default 0; 0.05 with --mixup meta)",
    )
    add("--workers", type=natural, default=2, help="processes that decode images (default %(default)s)")


def add_training(parser: Parser, mixes: Sequence[str]) -> None:
    """Flags of the group 'training'."""
    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--bs", "--batch_size", "-b", dest="batch_size", type=count, default=128, help="samples a process and micro-batch (128)")
    add("--epoch", "--epochs", dest="epochs", type=count, default=50, help="epochs (default %(default)s)")
    add("--accumulate", type=count, default=1, metavar="K", help="micro-batches a step: global batch = bs x K x processes (1)")
    add("--label_smoothing", type=below_one, default=0.0, help="weight of the uniform label (default %(default)s)")
    add("--mixup", choices=mixes, default="none", help="mix samples and labels; train accuracy is lambda-weighted (none)")
    add("--meta_learning", dest="mixup", action="store_const", const="meta", help="the same as --mixup meta: lambda is learned")
    add("--alpha", type=positive, default=0.99, help="of --mixup: lambda is drawn from Beta(alpha, alpha) (default %(default)s)")
    add("--meta_policy", choices=mixup.POLICIES, default="pair", help="of --mixup meta: what has a lambda of its own (pair)")
    add("--meta_every", type=count, default=16, metavar="STEPS", help="of --mixup meta: between its updates (default %(default)s)")
    add("--meta_lr", type=positive, default=0.1, help="of --mixup meta: rate of its Adam (default %(default)s)")
    add("--clip", type=not_negative, default=0.0, help="largest gradient norm, 0 is no limit (default %(default)s)")
    add("--seed", type=number(int, 0, 2**32 - 1), default=0, help="of weights, order, augmentation, dropout (default 0)")


def add_optimizer(parser: Parser, rates: Mapping[str, tuple[float, float]], chosen: str) -> None:
    """Flags of the group 'optimizer and learning rate'; `chosen` is the default optimizer."""
    optimizer = parser.add_argument_group("optimizer and learning rate")
    add = optimizer.add_argument
    add("--optimizer", choices=optim.OPTIMIZERS, default="sgd", help=f"optimizer (default {chosen})")
    add("--ngd", dest="optimizer", action="store_const", const="ngd", help="the same as --optimizer ngd: online natural gradient")
    lrs, decays = (", ".join(f"{name} {pair[i]:g}" for name, pair in rates.items()) for i in (0, 1))
    add("--lr", type=positive, help=f"learning rate (default {lrs})")
    add("--weight_decay", type=not_negative, help=f"of matrices and convolutions (default {decays})")
    add("--momentum", type=below_one, default=0.9, help="of SGD, NGD and LARS (default %(default)s)")
    add("--nesterov", action=argparse.BooleanOptionalAction, default=False, help="Nesterov momentum of SGD, NGD and LARS")
    add("--betas", type=below_one, nargs=2, default=[0.9, 0.999], metavar="B", help="of AdamW, LAMB, SLAMB (default 0.9 0.999)")
    add("--ngd_rank", type=count, default=80, help="of NGD: eigenvectors kept of an axis, at most half its length (80)")
    add("--ngd_alpha", type=positive, default=4.0, help="of NGD: smoothing towards plain SGD (default %(default)s)")
    add("--ngd_eta", type=number(float, 1e-6, 0.999), default=0.1, help="of NGD: weight of a new gradient in the estimate (0.1)")
    add("--ngd_period", type=count, default=4, metavar="STEPS", help="of NGD: between updates of an estimate (default %(default)s)")
    add("--ngd_max_dim", type=count, default=4096, help="of NGD: longer axes are left alone (default %(default)s)")
    add("--ngd_skip", nargs="+", default=[], metavar="NAME", help="of NGD: parameters whose names hold one of these take plain SGD")
    add("--trust_coefficient", type=positive, default=1e-3, help="of LARS: a layer's rate beside its weights (default %(default)s)")
    add("--larc", action=argparse.BooleanOptionalAction, default=False, help="of LARS: no layer's rate above --lr")
    add("--lr_schedule", choices=optim.SCHEDULES, default="cosine", help="shape of the learning rate (default %(default)s)")
    add("--warmup", type=not_negative, default=0.0, metavar="EPOCHS", help="linear rise at the start (default %(default)s)")
    add("--gamma", type=positive, default=0.1, help="factor of step, multistep, exponential; rate of inverse (0.1)")
    add("--step_size", type=count, default=30, metavar="EPOCHS", help="of step and cyclic (default %(default)s)")
    add("--milestones", type=count, nargs="+", default=[30, 40], metavar="EPOCH", help="of multistep (default 30 40)")
    add("--power", type=positive, default=1.0, help="of polynomial (default %(default)s)")
    add("--lr_end", type=number(float, 0, 1), default=0.0, metavar="F", help="last rate of cosine and polynomial, x lr (default 0)")
    add("--peak", type=number(float, 1), default=5.0, metavar="F", help="highest rate of onecycle and cyclic, x lr (default 5)")
    add(
        "--lr_scaling",
        choices=("none", "linear", "sqrt"),
        default="none",
        help="of --lr with global batch / --base_bs (default none)",
    )
    add("--base_bs", type=count, default=128, help="global batch that --lr was tuned for (default %(default)s)")


def add_speed(parser: Parser) -> None:
    """Flags of the group 'speed and devices'."""
    speed = parser.add_argument_group("speed and devices")
    add = speed.add_argument
    add("--device", default="auto", help="auto, cpu or cuda (default auto)")
    add("--precision", choices=backends.PRECISIONS, default="auto", help="auto: bf16 where native, else fp16 on GPUs, fp32 on CPUs")
    add("--backend", choices=backends.BACKENDS, default="eager", help="how the model runs (default %(default)s)")
    add("--threads", type=natural, default=0, help="CPU threads, 0 shares the cores among the node's processes (default 0)")
    add("--distributed", action="store_true", help="insist on torchrun (under torchrun it is understood)")
    add("--sync_bn", action=argparse.BooleanOptionalAction, default=False, help="BatchNorm statistics over all GPUs")


def add_communication(parser: Parser) -> None:
    """Flags of the group 'communication'."""
    group = parser.add_argument_group("communication")
    add = group.add_argument
    add("--grad_compress", choices=hooks.COMPRESSIONS, default="none", help="gradients on the wire (default none)")
    add("--powersgd_rank", type=count, default=2, help="of --grad_compress powersgd (default %(default)s)")
    add("--sync", choices=hooks.SYNCS, default="sync", help="lag: a step late; local: weights every --local_steps (default sync)")
    add("--compress_ratio", type=share, default=0.1, metavar="K", help="of SLAMB: part of the momentum sent a step (0.1)")
    add("--compress_warmup", type=share, nargs="*", default=[0.5, 0.5, 0.2], metavar="K", help="its first epochs' (0.5 0.5 0.2)")
    add("--beta3", type=number(float, 0, 1), default=0.99, help="of SLAMB: trust kept a step in what was not sent (default 0.99)")
    add("--local_steps", type=count, default=50, metavar="STEPS", help="of SLAMB, local: between averagings of weights (50)")
    add("--dense_steps", type=natural, default=10, metavar="STEPS", help="of SLAMB, local: at the start, everything is sent (10)")
    add("--selection", choices=("block", "random"), default="block", help="of SLAMB: rows of 64 weights or single ones (block)")
    add("--wire_dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of SLAMB: what is sent (default bf16)")
    add("--node_groups", action=argparse.BooleanOptionalAction, default=False, help="of SLAMB: dense within a node, sparse between")


def add_run(parser: Parser) -> None:
    """Flags of the group 'run'."""
    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--out", metavar="DIR", help="run folder (default runs/<script>-<time>)")
    add("--resume", "-r", nargs="?", const="", metavar="PATH", help="checkpoint or run folder to go on from (--out, or the newest)")
    add("--save_every", type=natural, default=0, metavar="STEPS", help="also save within an epoch (default 0, never)")
    add("--recipe", metavar="YAML", help="flags from a file; the command line overrides them")
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
    add("--evaluate", action="store_true", help="with --resume: accuracy on the test set, overall and per class")
    add("--predict", nargs="+", metavar="FILE", help="with --resume: classify files")
    add("--export", metavar="FILE", help="with --resume: write the model as .onnx or .pt2 and check it")


# -------------------------------------------------------------------- reading them


def parse(parser: Parser, script: str, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any] | None]:
    """The flags, and the state to resume from or None.

    Raises:
        InputError: a flag, the recipe or the checkpoint is wrong.
    """
    given = parser.parse_args(argv)
    state = None
    path = resume_path(given, script)
    if path is not None:
        state = checkpoint.load(path, script)
        known = {action.dest for action in parser._actions} - NOT_RESTORED
        known -= {"data_dir"} if "DATA_DIR" in os.environ else set()
        parser.set_defaults(**{name: value for name, value in state["flags"].items() if name in known})
    words = recipe_words(given.recipe, parser) if given.recipe else []
    words += argv if argv is not None else sys.argv[1:]
    if state is None:
        chosen = parser.parse_args(words)
        lr, decay = parser.rates[chosen.optimizer]
        parser.set_defaults(lr=lr, weight_decay=decay, val_fraction=META_VAL_FRACTION if chosen.mixup == "meta" else 0.0)
    args = parser.parse_args(words)
    if path is not None and args.out is None:
        args.out = str(path if path.is_dir() else path.parent)
    validate(args, script, resumed=state is not None)
    return args, state


def resume_path(args: argparse.Namespace, script: str) -> Path | None:
    """Where to resume from: --resume, or by itself when torchrun has restarted this job; None for a new run."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        job = os.environ.get("TORCHELASTIC_RUN_ID")
        folder = Path(args.out) if args.out else runlog.latest_run(script, elastic_id=job)
        if folder is not None and (folder / "last.pt").exists():
            return folder
    if args.resume is None:
        return None
    if args.resume:
        return Path(args.resume)
    folder = Path(args.out) if args.out else runlog.latest_run(script)
    if folder is None:
        raise InputError(f"--resume: no run of {script} with a checkpoint below runs/; give --resume PATH, or leave it out")
    return folder


def recipe_words(path: str, parser: Parser) -> list[str]:
    """A recipe as command-line words, so that it is checked like one. YAML: a mapping of flag names to values."""
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(f"--recipe {path}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--recipe {path}: not YAML ({checkpoint.first_line(error)})") from None
    if not isinstance(recipe, dict):
        raise InputError(f"--recipe {path}: wanted lines of 'flag: value'")
    words: list[str] = []
    for name, value in recipe.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else [f"--no-{name}"]
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    try:
        parser.parse_args(words)
    except InputError as error:
        raise InputError(f"--recipe {path}: {error}") from None
    return words


def validate(args: argparse.Namespace, script: str, resumed: bool) -> None:
    """What single flags cannot tell."""
    if args.distributed and not distributed.under_torchrun():
        raise InputError(
            f"--distributed needs torchrun: bash run_distributed.sh {script}.py ..., "
            f"or torchrun --standalone --nproc_per_node=2 {script}.py ..."
        )
    for flag in ("evaluate", "predict", "export"):
        if getattr(args, flag) and not resumed:
            raise InputError(f"--{flag} needs a trained model: add --resume PATH")
    if args.export and not args.export.endswith((".onnx", ".pt2")):
        raise InputError(f"--export {args.export}: the name must end in .onnx or .pt2")
    if args.export and not Path(args.export).parent.is_dir():
        raise InputError(f"--export {args.export}: the folder does not exist; make it first")
    if args.mixup == "meta" and not args.val_fraction:
        raise InputError("--mixup meta learns on held-out rows of the training set: give --val_fraction above 0")
    if args.sync != "sync" and args.optimizer == "slamb":
        raise InputError(f"--sync {args.sync}: SLAMB has its own way to send; leave it out, or use another --optimizer")
    if args.grad_compress != "none" and args.optimizer == "slamb":
        raise InputError(f"--grad_compress {args.grad_compress}: SLAMB has its own way to send; use --compress_ratio")
    if args.grad_compress == "powersgd" and args.sync == "lag":
        raise InputError("--sync lag goes with --grad_compress none, fp16 or bf16")
    if args.grad_compress != "none" and args.sync == "local":
        raise InputError("--sync local sends weights, not gradients: leave --grad_compress out")
    if args.nesterov and args.momentum == 0:
        raise InputError("--nesterov needs --momentum above 0")
    if args.warmup and args.warmup >= args.epochs:
        raise InputError(f"--warmup {args.warmup:g}: must be shorter than the run of {args.epochs} epochs")
    if not resumed and args.out and (Path(args.out) / "metrics.jsonl").exists():
        raise InputError(f"--out {args.out} already holds a run: add --resume to go on with it, or choose another folder")


def schedule(args: argparse.Namespace) -> optim.Schedule:
    """The learning-rate schedule of the flags."""
    return optim.Schedule(
        args.lr_schedule, args.epochs, args.warmup, args.gamma, args.step_size, args.milestones, args.power, args.lr_end, args.peak
    )
