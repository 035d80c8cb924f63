"""From flags to objects: what both entry scripts build alike.

run = build.open_run(args, "resnet50_test", world)
rows = build.split_rows(labels, args)
trainer = build.trainer(args, run, model, train, {"test": test}, header)
build.report(run, trainer.fit(state), validated=False)
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dynamic_batch
import mixup
from backends import execution, nvidia_apex, torch_compat
from backends.device import keep_freed_memory, set_num_threads
from backends.precision import Precision, choose_precision
from cli import options
from distributed import ddp, fsdp, sharded_checkpoint
from distributed.comm_hooks import WIRE, AllReduceHook, DelayedAllReduce, LocalSGD
from distributed.world import World
from dynamic_batch import WorkerBalancer
from errors import InputError
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import Sampler, stratified_rows
from mixup import MetaMixup
from models import activation_checkpointing, fusion
from ngd import NGD
from optimizers import schedules
from optimizers.lars import LARS
from optimizers.param_groups import decay_groups, ngd_groups
from optimizers.torch_fused import fused_adamw, fused_sgd
from slamb import LAMB, SLAMB
from training import checkpoint, evaluation, machine, run_log
from training.batch_schedule import LEAST, BatchSchedule, BatchSizePolicy
from training.losses import LossFn, MixedCrossEntropy, classification
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep
from training.step import Step
from training.trainer import Settings, Trainer

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """What a run computes with and writes to."""

    script: str
    world: World
    precision: Precision
    folder: Path

    def log(self, args: argparse.Namespace) -> run_log.RunLog:
        """The run folder, made now, with its config.json."""
        log = run_log.RunLog(self.folder, self.world.is_main, args.tensorboard)
        log.config(vars(args), machine.describe_machine(self.world.device))
        return log


def create_run(args: argparse.Namespace, script: str, world: World) -> Run:
    """Settle threads, memory, precision and the run folder (rank 0's choice); nothing is written yet."""
    keep_freed_memory()
    set_num_threads(args.threads, world.local_size)
    auto = args.precision == "auto" and args.backend == "ort"  # ORTModule computes in fp32
    precision = choose_precision("fp32" if auto else args.precision, world.device)
    folder = world.broadcast(args.out or str(run_log.new_run_folder(script)))
    torch.manual_seed(
        args.seed
    )  # the same weights on every rank; `trainer` gives each its own dropout
    return Run(script, world, precision, Path(folder))


def split_rows(labels: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
    """Row numbers of 'train' and, with --val_fraction, 'val': class-balanced, both within the --subset."""
    rows = torch.arange(len(labels))
    if args.subset < 1:
        rows, _ = stratified_rows(labels, args.subset, args.seed)
    if not args.val_fraction:
        return {"train": rows}
    val, train = stratified_rows(labels[rows], args.val_fraction, args.seed + 1)
    return {"train": rows[train], "val": rows[val]}


def create_optimizer(
    args: argparse.Namespace, model: nn.Module, lr: float, world: World
) -> torch.optim.Optimizer:
    """The optimizer of the flags, with the learning rate `lr`."""
    own: dict[str, dict[str, Any]] = {
        "ngd": {
            "rank": args.ngd_rank,
            "alpha": args.ngd_alpha,
            "eta": args.ngd_eta,
            "update_period": args.ngd_period,
            "max_dim": args.ngd_max_dim,
        },
        "lars": {"trust_coefficient": args.trust_coefficient, "clip": args.larc},
        "slamb": {
            "compress_ratio": args.compress_ratio,
            "warmup": args.compress_warmup,
            "beta3": args.beta3,
            "local_steps": args.local_steps,
            "dense_steps": args.dense_steps,
            "selection": args.selection,
            "wire_dtype": WIRE_DTYPES[args.wire_dtype],
            "node_group": world.node_group()
            if args.optimizer == "slamb" and args.node_groups
            else None,
        },
    }
    settings = (
        args.weight_decay,
        args.momentum,
        args.nesterov,
        tuple(args.betas),
        own.get(args.optimizer),
        args.ngd_skip,
    )
    return build_optimizer(model, args.optimizer, lr, *settings)


def create_comm_hook(args: argparse.Namespace, run: Run) -> AllReduceHook:
    """What data parallelism sends under these flags."""
    if args.sync == "lag":
        if run.precision.scaled:
            raise InputError(
                "--sync lag: a late gradient does not fit the loss scale of fp16; use --precision bf16 or fp32"
            )
        return DelayedAllReduce(run.world, args.grad_compress)
    if args.sync == "local":
        return LocalSGD(run.world, args.local_steps, args.dense_steps)
    return AllReduceHook(run.world, args.grad_compress, args.powersgd_rank)


def create_loss(
    args: argparse.Namespace,
    world: World,
    classes: int,
    held_out: BatchedDataset | None,
    model_mixes: bool,
) -> tuple[LossFn, MetaMixupStep | None]:
    """What a step computes under these flags, and what learns beside the model; `model_mixes`: see `MixedCrossEntropy`."""
    if args.mixup == "none":
        return classification(args.label_smoothing), None
    if args.mixup != "meta":
        return MixedCrossEntropy(
            partial(mixup.sample_mix, args.mixup, args.alpha), model_mixes, args.label_smoothing
        ), None
    meta = MetaMixup(classes, args.meta_policy, args.alpha, args.meta_lr, world.device)
    task = MixedCrossEntropy(
        lambda labels, height, width: meta.mix(labels), model_mixes, args.label_smoothing
    )
    assert held_out is not None, "options.validate wants a --val_fraction"
    return task, MetaMixupStep(
        meta, task, HeldOutBatches(held_out, args.batch_size, args.seed + 2, world), args.meta_every
    )


def trainer(
    args: argparse.Namespace,
    run: Run,
    model: nn.Module,
    train: BatchedDataset,
    tests: Mapping[str, BatchedDataset],
    metadata: dict[str, Any],
    make_optimizer: Callable[
        [argparse.Namespace, nn.Module, float, World], torch.optim.Optimizer
    ] = create_optimizer,
    model_mixes: bool = False,
) -> Trainer:
    """The Trainer of these flags; `metadata`: what inference needs besides them; `model_mixes`: see `MixedCrossEntropy`."""
    world, order = run.world, Sampler(len(train), args.seed, train.lengths)
    global_batch = args.batch_size * args.accumulate * world.size
    if order.steps(global_batch) == 0:
        raise InputError(
            f"--bs {args.batch_size}: a global batch of {global_batch} samples (batch x accumulation x processes) "
            f"is larger than the training set of {len(train)}; use a smaller --bs"
        )
    task, learner = create_loss(
        args, world, len(metadata["classes"]), tests.get("val"), model_mixes
    )
    save_memory(args, model)
    log = run.log(args)
    lr = schedules.scale_lr(
        args.lr, args.lr_scaling, batch_size=global_batch, base_batch_size=args.base_bs
    )
    if args.parallel != "ddp" and world.size > 1:
        model = ddp.with_sync_batch_norm(model, world) if args.sync_bn else model
        fsdp.shard(model, world, args.parallel, WIRE.get(args.grad_compress))
    model = execution.apply_backend(args.backend, model)
    optimizer = make_optimizer(args, model, lr, world)
    schedule = options.schedule(args)
    batching = create_batch_schedule(args, world, order, global_batch, schedule)
    step = make_step(args, run, model, task, optimizer, log, learner, batching.whole)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        f"{len(train)} training samples, {parameters / 1e6:.2f} M parameters, global batch {global_batch} on {world.size} "
        f"process(es) of {machine.device_name(world.device)}, {run.precision.name}, {args.backend}; run folder {run.folder}"
    )
    if advice := large_batch_advice(args, global_batch, len(train)):
        log.info(advice)
    torch.manual_seed(args.seed * 1009 + 1 + world.rank)
    settings = Settings(args.epochs, args.batch_size, lr, args.save_every)
    tests = {name: data for name, data in tests.items() if args.test or name != "test"}
    metadata = {"script": run.script, "flags": vars(args), **metadata}
    return Trainer(step, schedule, train, batching, tests, log, settings, metadata)


def save_memory(args: argparse.Namespace, model: nn.Module) -> None:
    """What --fuse and --checkpoint_activations do to a model."""
    if args.fuse and torch_compat.TORCH_VERSION < (2, 4):
        raise InputError(
            f"--fuse needs torch 2.4 or newer, this is {torch.__version__}; leave it out"
        )
    if args.fuse and not fusion.fuse(model):
        raise InputError(
            "--fuse: there is nothing to fuse in this model; the ResNets of --help and the Transformer can be"
        )
    if args.checkpoint_activations and not activation_checkpointing.checkpoint_activations(model):
        raise InputError(
            "--checkpoint_activations: this model has no residual blocks of ours; leave it out"
        )


def make_step(
    args: argparse.Namespace,
    run: Run,
    model: nn.Module,
    task: LossFn,
    optimizer: torch.optim.Optimizer,
    log: run_log.RunLog,
    learner: MetaMixupStep | None,
    changing: bool,
) -> Step:
    """The step of these flags; `changing`: batches are, so that micro-batches are as many as it takes."""
    accumulate, micro_batch = args.accumulate, args.micro_bs
    if changing:
        accumulate = 1
        if micro_batch is None and (
            run.world.device.type == "cpu" or args.accumulate > 1 or args.balance_workers
        ):
            micro_batch = args.batch_size * (
                2 if args.balance_workers else 1
            )  # a fast rank's share is still one
    speed = accumulate, args.clip, args.sync_bn
    step = Step(
        model,
        task,
        optimizer,
        run.precision,
        run.world,
        *speed,
        log.info,
        learner,
        create_comm_hook(args, run),
        micro_batch,
    )
    if args.noise_scale or args.dynamic_batch == "noise":
        step.measure_noise()
    if args.balance_workers and run.world.size > 1:
        step.time()
    if args.backend == "cudagraph":
        step.capture()
    return step


def create_batch_schedule(
    args: argparse.Namespace,
    world: World,
    order: Sampler,
    base: int,
    schedule: Callable[[float], float],
) -> BatchSchedule:
    """Which rows make a batch under these flags; `base` is the first global batch.

    Raises:
        InputError: the limits leave no room.
    """
    balance = WorkerBalancer() if args.balance_workers and world.size > 1 else None
    kind = args.dynamic_batch
    if kind == "none":
        return BatchSchedule(world, order, base, None, balance)
    least = LEAST * world.size
    low = args.min_bs or (max(base // 16, least) if kind == "decrease" else base)
    high = args.max_bs or (
        base if kind == "decrease" else min(16 * base, max(len(order) // 8, base))
    )
    if not least <= low <= high <= len(order):
        raise InputError(
            f"--dynamic_batch {kind}: batches from {low} to {high} samples; wanted --min_bs at least {least} "
            f"and at most --max_bs, and that at most the {len(order)} training samples"
        )
    rule: dynamic_batch.Rule
    if kind == "loss":
        rule = dynamic_batch.ByLoss(
            args.loss_rule, args.batch_factor, args.loss_threshold, args.loss_window
        )
    elif kind == "noise":
        rule = dynamic_batch.ByNoise(args.batch_factor)
    else:
        rule = dynamic_batch.Scheduled(base, flags_multiple(args, schedule))
    power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[args.dynamic_lr]
    return BatchSchedule(
        world,
        order,
        base,
        BatchSizePolicy(rule, low, high, 1.0 if args.replace_decay else power),
        balance,
    )


def flags_multiple(
    args: argparse.Namespace, schedule: Callable[[float], float]
) -> Callable[[int], float]:
    """How the batch grows, or shrinks, with the epochs."""
    if args.replace_decay:
        return dynamic_batch.replacing_decay(schedule)
    if args.batch_growth:
        return dynamic_batch.every_epoch(
            args.batch_growth if args.dynamic_batch == "increase" else 1 / args.batch_growth
        )
    epochs = args.batch_milestones or [-(-args.epochs // 2), -(-3 * args.epochs // 4)]
    return dynamic_batch.at_milestones(
        args.batch_factor if args.dynamic_batch == "increase" else 1 / args.batch_factor, epochs
    )


def large_batch_advice(args: argparse.Namespace, global_batch: int, rows: int) -> str:
    """A line for runs whose batch is large for their training set and whose learning rate was not fitted to it; else empty.

    The square root of the number of samples is the rule of thumb of NERSC's guidelines for distributed training.
    """
    fitted = args.lr_scaling != "none" and args.warmup > 0
    if global_batch <= math.sqrt(rows) or global_batch <= args.base_bs or fitted:
        return ""
    return (
        f"advice: a global batch of {global_batch} is large for {rows} samples (their square root is {math.sqrt(rows):.0f}): "
        "scale the learning rate (--lr_scaling linear or sqrt) and warm it up (--warmup 5); beyond some thousands try "
        "--optimizer lamb or lars"
    )


def load_weights(model: nn.Module, state: dict[str, Any]) -> nn.Module:
    """`model` with the weights of a checkpoint."""
    weights = (
        sharded_checkpoint.whole(Path(state["shards"])) if state.get("shards") else state["model"]
    )
    checkpoint.load_into(model, weights, "model")
    return model


def evaluate_checkpoint(
    args: argparse.Namespace, run: Run, model: nn.Module, test: BatchedDataset, classes: list[str]
) -> None:
    """--evaluate: print accuracy on the test set, overall and per class.

    In fp32 batch-norm is folded into the convolutions; in 16 bits their rounding would make it another accuracy than training saw.
    """
    if run.precision.dtype is None:
        model = fusion.fold_batch_norm(model)
    result = evaluation.report(model, test, classes, run.precision, run.world, args.batch_size)
    if run.world.is_main:
        evaluation.print_report(result)


def report(run: Run, totals: dict[str, Any], validated: bool) -> None:
    """The last lines on the console (rank 0); `validated`: a validation split chose the best epoch."""
    if not run.world.is_main:
        return
    line = f"best {'validation' if validated else 'test'} accuracy {100 * totals['accuracy']:.2f} % in epoch {totals['epoch']}"
    if validated and totals["test_accuracy"] is not None:
        line += f", test accuracy there {100 * totals['test_accuracy']:.2f} %"
    print(line)
    print(
        f"{totals['seconds']:.1f} s, {totals['samples_per_second']:.0f} samples/s, peak memory "
        f"{totals['peak_memory_bytes'] / 2**30:.2f} GiB, {totals['device_hours']:.4f} device-hours; {run.folder}"
    )


def build_optimizer(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
    own: Mapping[str, Any] | None = None,
    ngd_skip: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """The optimizer of that name over all parameters of `model`; `own` holds the settings that only it has."""
    own = own or {}
    if name == "ngd":
        groups = ngd_groups(model, weight_decay, ngd_skip)
        return NGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, **own)
    groups = decay_groups(model, weight_decay)
    if name == "sgd":
        return fused_sgd(groups, lr=lr, momentum=momentum, nesterov=nesterov)
    if name == "adamw":
        return fused_adamw(groups, lr=lr, betas=betas)
    if name == "lars":
        return LARS(groups, lr=lr, momentum=momentum, nesterov=nesterov, **own)
    if name == "lamb":
        return LAMB(groups, lr=lr, betas=betas, **own)
    if name == "slamb":
        return SLAMB(groups, lr=lr, betas=betas, **own)
    if name in nvidia_apex.OPTIMIZERS:
        if reason := nvidia_apex.unavailable_reason(name):
            raise InputError(
                f"--optimizer {name}: {reason}; ours is --optimizer {name.removeprefix('apex_').replace('larc', 'lars')}"
            )
        return nvidia_apex.build_optimizer(name, groups, lr, momentum, nesterov, betas)
    raise ValueError(f"unknown optimizer {name}")
