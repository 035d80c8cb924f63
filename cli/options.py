"""Reading the flags of flags.py: command line, recipe, checkpoint; and validation with one clear line.

    parser = flags.shared_parser(__doc__, datasets=["cifar10", "mnist"], epochs=50)
    parser.add_argument("--arch", default="resnet50")
    args = options.parse(parser, script="resnet50_test")

A value comes from the command line, else from --recipe, else from the checkpoint of --resume, else from the default.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from backends import torch_compat
from cli.flags import Parser
from distributed.world import under_torchrun
from errors import InputError
from optimizers import schedules
from training import checkpoint, run_log

NOT_RESTORED = {
    "resume",
    "recipe",
    "out",
    "evaluate",
    "predict",
    "export",
    "distributed",
    "tensorboard",
}
"""Flags of one invocation: a resumed run does not take them from its checkpoint."""
META_VAL_FRACTION = (
    0.05  # of the training set, held out for --mixup meta where the command line does not say
)


# -------------------------------------------------------------------- reading them


def parse(
    parser: Parser, script: str, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, dict[str, Any] | None]:
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
        parser.set_defaults(
            **{name: value for name, value in state["flags"].items() if name in known}
        )
    words = recipe_words(given.recipe, parser) if given.recipe else []
    words += argv if argv is not None else sys.argv[1:]
    if state is None:
        chosen = parser.parse_args(words)
        lr, decay = parser.rates[chosen.optimizer]
        parser.set_defaults(
            lr=lr,
            weight_decay=decay,
            val_fraction=META_VAL_FRACTION if chosen.mixup == "meta" else 0.0,
        )
    args = parser.parse_args(words)
    if path is not None and args.out is None:
        args.out = str(path if path.is_dir() else path.parent)
    validate(args, script, resumed=state is not None)
    return args, state


def resume_path(args: argparse.Namespace, script: str) -> Path | None:
    """Where to resume from: --resume, or by itself when torchrun has restarted this job; None for a new run."""
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
            f"--resume: no run of {script} with a checkpoint below runs/; give --resume PATH, or leave it out"
        )
    return folder


def recipe_words(path: str, parser: Parser) -> list[str]:
    """A recipe as command-line words, so that it is checked like one. YAML: a mapping of flag names to values."""
    try:
        recipe = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(
            f"--recipe {path}: {error.strerror}; give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--recipe {path}: not YAML ({checkpoint.first_line(error)})") from None
    if not isinstance(recipe, dict):
        raise InputError(f"--recipe {path}: wanted lines of 'flag: value'")
    words: list[str] = []
    for name, value in recipe.items():
        if isinstance(value, bool):  # false of a flag without an opposite is its absence
            known = any(f"--no-{name}" in action.option_strings for action in parser._actions)
            words += [f"--{name}"] if value else [f"--no-{name}"] if known else []
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    try:
        parser.parse_args(words)
    except InputError as error:
        raise InputError(f"--recipe {path}: {error}") from None
    return words


def validate(args: argparse.Namespace, script: str, resumed: bool) -> None:
    """What single flags cannot tell."""
    if args.distributed and not under_torchrun():
        raise InputError(
            f"--distributed needs torchrun: bash run_distributed.sh {script}.py ..., "
            f"or torchrun --standalone --nproc_per_node=2 {script}.py ..."
        )
    for flag in ("evaluate", "predict", "export"):
        if getattr(args, flag) and not resumed:
            raise InputError(f"--{flag} needs a trained model: add --resume PATH")
    if args.export and not args.export.endswith((".onnx", ".pt2")):
        raise InputError(f"--export {args.export}: the name must end in .onnx or .pt2")
    if args.export and torch_compat.TORCH_VERSION < (2, 9):
        raise InputError(
            "--export needs torch 2.9 or newer: export from the stack of requirements.txt, which reads this run as well"
        )
    if args.export and not Path(args.export).parent.is_dir():
        raise InputError(f"--export {args.export}: the folder does not exist; make it first")
    if not args.test and not args.val_fraction:
        raise InputError(
            "--no-test: nothing is left to choose the best epoch by; give --val_fraction above 0"
        )
    if args.mixup == "meta" and not args.val_fraction:
        raise InputError(
            "--mixup meta learns on held-out rows of the training set: give --val_fraction above 0"
        )
    if args.sync != "sync" and args.optimizer == "slamb":
        raise InputError(
            f"--sync {args.sync}: SLAMB has its own way to send; leave it out, or use another --optimizer"
        )
    if args.grad_compress != "none" and args.optimizer == "slamb":
        raise InputError(
            f"--grad_compress {args.grad_compress}: SLAMB has its own way to send; use --compress_ratio"
        )
    if args.grad_compress == "powersgd" and args.sync == "lag":
        raise InputError("--sync lag goes with --grad_compress none, fp16 or bf16")
    if args.grad_compress != "none" and args.sync == "local":
        raise InputError("--sync local sends weights, not gradients: leave --grad_compress out")
    validate_batches(args)
    validate_parallel(args)
    validate_graph(args)
    if args.precision.startswith("apex") and (
        args.mixup == "meta" or args.noise_scale or args.dynamic_batch == "noise"
    ):
        raise InputError(
            f"--precision {args.precision}: meta-mixup and the noise scale need torch's own loss scale; use --precision fp16"
        )
    if args.backend == "ort" and args.precision not in ("auto", "fp32"):
        raise InputError(f"--backend ort computes in fp32: leave --precision {args.precision} out")
    if args.backend == "ort" and (args.fuse or args.checkpoint_activations):
        raise InputError(
            "--backend ort keeps what it likes: leave --fuse and --checkpoint_activations out"
        )
    if args.fuse and args.sync_bn:
        raise InputError(
            "--fuse: batch-norm over all GPUs (--sync_bn) cannot be fused; leave one of them out"
        )
    if args.nesterov and args.momentum == 0:
        raise InputError("--nesterov needs --momentum above 0")
    if args.warmup and args.warmup >= args.epochs:
        raise InputError(
            f"--warmup {args.warmup:g}: must be shorter than the run of {args.epochs} epochs"
        )
    if not resumed and args.out and (Path(args.out) / "metrics.jsonl").exists():
        raise InputError(
            f"--out {args.out} already holds a run: add --resume to go on with it, or choose another folder"
        )


def validate_batches(args: argparse.Namespace) -> None:
    """Of batches that change: what goes together."""
    noise = args.noise_scale or args.dynamic_batch == "noise"
    replicas_diverge = args.optimizer == "slamb" or args.sync == "local"
    if replicas_diverge and (noise or args.balance_workers):
        name = "--balance_workers" if args.balance_workers else "the noise scale"
        raise InputError(
            f"{name} needs averaged gradients: not with --optimizer slamb or --sync local"
        )
    if noise and args.grad_compress == "powersgd":
        raise InputError(
            "the noise scale needs gradients as they are: not with --grad_compress powersgd"
        )
    if args.replace_decay and args.dynamic_batch != "increase":
        raise InputError("--replace_decay goes with --dynamic_batch increase")
    if args.replace_decay and args.dynamic_lr != "none":
        raise InputError(
            "--replace_decay scales the learning rate with the batch itself: leave --dynamic_lr out"
        )
    if (args.batch_growth or args.batch_milestones) and args.dynamic_batch not in (
        "increase",
        "decrease",
    ):
        raise InputError(
            "--batch_growth and --batch_milestones go with --dynamic_batch increase or decrease"
        )
    if sum(map(bool, (args.batch_growth, args.batch_milestones, args.replace_decay))) > 1:
        raise InputError(
            "--batch_growth, --batch_milestones and --replace_decay are three ways: choose one"
        )


def validate_parallel(args: argparse.Namespace) -> None:
    """Of weights in shards: what each rank does for itself on whole weights does not go."""
    if args.parallel == "ddp":
        return
    refused = {
        f"--optimizer {args.optimizer} (sgd and adamw do)": args.optimizer not in ("sgd", "adamw"),
        f"--sync {args.sync}": args.sync != "sync",
        "--grad_compress powersgd": args.grad_compress == "powersgd",
        "--mixup meta": args.mixup == "meta",
        "the noise scale": args.noise_scale or args.dynamic_batch == "noise",
        "--balance_workers": args.balance_workers,
        f"--dynamic_batch {args.dynamic_batch}": args.dynamic_batch != "none",
        f"--precision {args.precision}": args.precision.startswith("apex"),
        f"--backend {args.backend}": args.backend != "eager",  # torch 2.15's compiler fails on it
    }
    for what, wanted in refused.items():
        if wanted:
            raise InputError(
                f"--parallel {args.parallel} does not go with {what}; use --parallel ddp"
            )


def validate_graph(args: argparse.Namespace) -> None:
    """Of steps that are recorded: what the host decides within a step does not go."""
    if args.backend != "cudagraph":
        return
    refused = {
        f"--optimizer {args.optimizer} (sgd and adamw do)": args.optimizer not in ("sgd", "adamw"),
        f"--precision {args.precision}": args.precision == "fp16"
        or args.precision.startswith("apex"),
        "--mixup cutmix, whose rectangle the host draws": args.mixup == "cutmix",
        "--mixup meta": args.mixup == "meta",
        "several processes": int(os.environ.get("WORLD_SIZE", 1)) > 1,
    }
    for what, wanted in refused.items():
        if wanted:
            raise InputError(f"--backend cudagraph does not go with {what}; use --backend compile")


def schedule(args: argparse.Namespace) -> schedules.Schedule:
    """The learning-rate schedule of the flags."""
    return schedules.Schedule(
        args.lr_schedule,
        args.epochs,
        warmup=args.warmup,
        gamma=args.gamma,
        step_size=args.step_size,
        milestones=args.milestones,
        power=args.power,
        end=args.lr_end,
        peak=args.peak,
    )
