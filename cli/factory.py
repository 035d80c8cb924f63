"""From flags to objects: one function for each part of a run that both entry scripts name.

check_processes(args, parser, world, checkpoint)             # all were started alike
run = create_run(args, "resnet50_test", world, checkpoint)
optimizer = create_optimizer(args, run, model, OPTIMIZERS)
loss = create_loss(args, run, data)
batches = create_batch_sampler(args, run, data)
trainer = create_trainer(args, run, data, model=model, ...)
"""

import dataclasses
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dynamic_batch
import mixup
from backends import device, execution, onnx_runtime, torch_compat
from backends.machine import commit_or_none, describe_machine, device_name
from backends.precision import Precision, choose_precision
from cli import compatibility
from cli.flag_parser import Scope, ScriptParser
from cli.flags import WIRE_BITS, OptimizerChoice
from cli.options import check_validation_set, create_lr_schedule, uses_trained_model
from distributed import comm_hooks, fsdp
from distributed.agreement import check_equal, on_main, report_restart
from distributed.diloco import DiLoCo
from distributed.worker import launcher_id
from distributed.world import READ_SECONDS, World
from dynamic_batch import WorkerBalancer
from errors import InputError, refused_as
from input_pipeline import own_data
from input_pipeline.baseline import MOST_CLASSES, Baseline
from input_pipeline.dataset import BatchedDataset
from input_pipeline.fingerprint import check_data
from input_pipeline.label_noise import class_number, swapped_classes, with_noise
from input_pipeline.sampler import held_out_rows, stratified_rows
from mixup import MetaMixup
from models import activation_checkpointing, fusion, pretrained
from models.averaged_views import VIEWS, AveragedViews
from models.residual import residual_blocks
from training import classifier, evaluation, predictions, run_log
from training.batch_sampler import MIN_RANK_ROWS, DynamicBatchSampler
from training.card import read_card
from training.checkpoint import Checkpoint
from training.classifier import Classifier
from training.epoch_report import EVAL_SET_NAMES, describe_checkpoint
from training.export import export
from training.losses import CrossEntropy, LossFn, MixedCrossEntropy
from training.meta_learner import MetaLearner
from training.predictions import Sample
from training.progress import EarlyStop
from training.run_folder import open_run_folder
from training.run_segments import describe_last, next_segments
from training.tracking import check_tracker
from training.trainer import Trainer, TrainerConfig

MIN_EVAL_BATCH = 64  # samples of one process in a batch of an evaluation, also where --bs is less
GRAPH_STEPS = 3000  # of a run, from which --backend auto compiles the model
NOISE_SEED = 2  # added to --seed for --label_noise; --val_fraction adds 1
POLICY_SEED = 3  # for the rows that --mixup meta learns from
MOST_POLICY_ROWS = 500  # which are enough; but at least one of each class
OWN_WIRE_DTYPES = {
    "fp32": torch.float32,
    **dict.fromkeys(["bf16", *WIRE_BITS], torch.bfloat16),  # of what SLAMB does not round further
}


# -------------------------------------------------------------------- run and data


@dataclass(frozen=True)
class Run:
    """What a run computes with.

    Attributes:
        checkpoint: what `options.parse` returned: the run goes on from it, or uses its model; None
            for a new run.
    """

    script: str
    world: World
    precision: Precision
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        train: the training set.
        eval_sets: 'test', or 'val' (own data, or --val_fraction), or both.
        metadata: plain values that a checkpoint keeps for inference: class names and what
            preprocessing needs.
        labels: (rows,) class numbers of the training set.
        held_out: the rows of `policy_rows`, from which a mixing policy learns.
        model_mixes: the model mixes hidden representations itself; see `MixedCrossEntropy`.
    """

    train: BatchedDataset
    eval_sets: Mapping[str, BatchedDataset]
    metadata: dict[str, Any]
    labels: Tensor
    held_out: BatchedDataset | None = None
    model_mixes: bool = False


def check_processes(
    args: Namespace, parser: ScriptParser, world: World, checkpoint: Checkpoint | None
) -> None:
    """Check that all processes of a job were started alike; collective.

    Args:
        parser: of the script. --data_dir, and what a node has, may differ.
        checkpoint: what the run goes on from, or None.
    Raises:
        InputError: they differ in a flag, in the code, in torch, or in where they go on from; or
            the tracker is not installed.
    """
    report_restart(world, 1 if checkpoint is None else checkpoint.progress["epoch"] + 1)
    on_main(world, lambda: check_tracker(args.track))
    if world.size == 1:
        return
    started = {name: bool(getattr(args, name)) for name in parser.of_scope(Scope.START)}
    values = {name: getattr(args, name) for name in parser.of_scope(Scope.RESULT, Scope.HOW)}
    check_equal(
        world,
        {
            **{f"--{name}": value for name, value in values.items()},
            "the version of the code": commit_or_none(),
            "the version of torch": torch.__version__,
            "the checkpoint": checkpoint
            and [checkpoint.progress[key] for key in ("step", "seconds")],
            **{f"--{name}": value for name, value in started.items()},
        },
        advice="start every process with the same flags, code and checkpoint",
    )


def create_run(
    args: Namespace, script: str, world: World, checkpoint: Checkpoint | None = None
) -> Run:
    """Settle threads, memory, precision and seed; nothing is written yet.

    Raises:
        InputError: the device does not support the precision, or a flag does not go with it.
    """
    onnx_runtime.silence_onnxruntime_notice()
    device.keep_freed_memory()
    device.set_num_threads(args.threads, world.core_sharers)
    ort_auto = args.precision == "auto" and args.backend == "ort"  # ORTModule computes in fp32
    in_fp32 = ort_auto or args.predict or args.export
    precision = choose_precision("fp32" if in_fp32 else args.precision, world.device)
    what_auto_is = {"--precision auto": precision.name}  # as on GPUs of different kinds
    check_equal(world, what_auto_is, advice="give --precision fp16 or fp32")
    if not uses_trained_model(args):  # with the precision that auto has chosen
        compatibility.check(Namespace(**{**vars(args), "precision": precision.name}))
    if args.deterministic:
        device.make_deterministic(world.device)  # after the precision has set cuDNN's switches
    torch.manual_seed(args.seed)  # the same weights on every rank
    return Run(script, world, precision, checkpoint)


def split_rows(args: Namespace, labels: Tensor, has_val: bool = False) -> dict[str, Tensor]:
    """Class-balanced row numbers of 'train' and, with --val_fraction, of 'val'.

    Args:
        labels: (rows,) of the training set.
        has_val: the data set has a validation set of its own, which is used instead.
    Raises:
        InputError: there is no validation set, and a flag needs one, or no rows are left.
    """
    check_validation_set(args, has_val or bool(args.val_fraction))
    rows = torch.arange(len(labels))
    if args.subset < 1:
        rows, _ = stratified_rows(labels, args.subset, seed=args.seed)
    if has_val or not args.val_fraction:
        return {"train": rows}
    with refused_as("--val_fraction"):
        val, train = held_out_rows(labels[rows], args.val_fraction, seed=args.seed + 1)
    return {"train": rows[train], "val": rows[val]}


def choose_rows(
    args: Namespace, run: Run, splits: Mapping[str, Any], classes: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rows of each split that a run uses, after a check of what was read; collective.

    Args:
        splits: what was read of the data set, 'train' and some of 'val' and 'test'.
        classes: their names.
    Returns:
        The splits, 'val' among them with --val_fraction, and 'held_out' with --mixup meta, whose
        training labels are wrong by the share of --label_noise; and what a checkpoint keeps of the
        data to know it again.
    """
    # Rows of the training split are looked at, be it to train or because some are held out.
    is_held_out = bool(args.val_fraction) and "val" not in splits
    is_train_used = not args.evaluate or (is_held_out and not ("test" in splits and args.test))
    used = [name for name in splits if name != "train" or is_train_used]
    fingerprint = check_data(
        run.world,
        classes,
        data={name: splits[name] for name in used},
        trained=run.checkpoint.metadata if run.checkpoint else None,
        source=f"--data_dir {args.data_dir}",
    )
    if run.checkpoint and (now := fingerprint["splits"].get("train")):
        before = run.checkpoint.splits.get("train")
        if before and before != now:  # other rows are held out, and a baseline is another
            pair = [f"{split['rows']} rows" for split in (before, now)]
            run.checkpoint.changed["the data"] = pair
    unused = {"train"} if args.test else {"train", "test"}
    chosen = {name: split for name, split in splits.items() if name not in unused}
    train, has_val = splits["train"], "val" in splits
    redrawn = redrawn_by(run)
    is_other_data = args.evaluate and "the data" in redrawn
    for name, rows in split_rows(args, torch.as_tensor(train.labels), has_val).items():
        is_whole = len(rows) == len(train.labels) or is_other_data
        chosen[name] = train if is_whole else train.select_rows(rows)
    if args.dataset in own_data.DATASETS and not args.evaluate and run.world.is_main:
        notes = [note for split in splits.values() for note in split.notes]
        if has_val and args.val_fraction:
            notes.append("no training rows are held out: the data has val rows")
        labels = {name: torch.as_tensor(split.labels).tolist() for name, split in chosen.items()}
        print(*notes, *own_data.class_table(classes, labels), sep="\n")
    before, now = redrawn.get("--val_fraction", (0, args.val_fraction))
    has_fewer = list(redrawn) == ["--val_fraction"] and now < before  # of the same rows
    if redrawn and is_held_out and not has_fewer and run.world.is_main:
        names = " and ".join(redrawn)
        what = "has trained on some of the rows now held out"
        if is_other_data:  # of which all rows are evaluated
            what = "may have trained on some of the rows that are evaluated"
        print(f"warning: {names} changed: the run {what}")
    if args.evaluate:  # only one training row is prepared, since nothing trains
        chosen["train"] = chosen["train"].select_rows(torch.arange(1))
    elif args.label_noise:
        share, _, pairs = str(args.label_noise).partition(":")
        train = chosen["train"]
        right, seed = torch.as_tensor(train.labels), args.seed + NOISE_SEED
        with refused_as("--label_noise"):
            wrong = swapped_classes(pairs, classes)
        noisy = with_noise(right, float(share), classes=len(classes), seed=seed, wrong=wrong)
        of_texts = right is not train.labels
        chosen["train"] = dataclasses.replace(train, labels=noisy.tolist() if of_texts else noisy)
        if run.world.is_main:
            count = int((noisy != right).sum())
            print(f"--label_noise: {count} of {len(right)} training labels are wrong", flush=True)
    given = torch.as_tensor(chosen["train"].labels)
    if not args.evaluate and (learned_from := policy_rows(args, given)) is not None:
        chosen["held_out"] = chosen["train"].select_rows(learned_from)
        if run.checkpoint and not run.checkpoint.state["learner"] and run.world.is_main:
            print("warning: meta-mixup learns from rows that the run has trained on")
    return chosen, fingerprint


def policy_rows(args: Namespace, labels: Tensor) -> Tensor | None:
    """The rows of the training set that --mixup meta learns from while it mixes the others.

    Args:
        labels: (rows,) of the training set.
    Raises:
        InputError: there are too few.
    """
    if args.mixup != "meta":
        return None
    share = args.mixup_args["held_out"]
    if not 0 < share < 1:
        raise InputError(f"--mixup_args held_out={share:g} must be above 0 and below 1")
    share = min(share, MOST_POLICY_ROWS / len(labels))
    try:
        return held_out_rows(labels, share, seed=args.seed + POLICY_SEED)[0]
    except ValueError:
        reason = "leaves none to learn from, or none of some class to train on"
        raise InputError(
            f"--mixup_args held_out: that share of {len(labels)} rows {reason}"
        ) from None


def redrawn_by(run: Run) -> dict[str, Any]:
    """What, changed since the checkpoint, chooses other rows; each as [before, now]."""
    changed = run.checkpoint.changed if run.checkpoint else {}
    names = ("--seed", "--subset", "--val_fraction", "the data")
    return {name: changed[name] for name in names if name in changed}


def report_baseline(
    args: Namespace, run: Run, splits: Mapping[str, Any], measure: Callable[[Any, Any], Baseline]
) -> dict[str, Any]:
    """With --baseline, what a linear model reaches, which rank 0 prints; for checkpoints.

    Args:
        splits: as of `choose_rows`.
        measure: fits the model to a training split, and evaluates it on another.
    """
    if (
        run.checkpoint
        and not redrawn_by(run)
        and (known := run.checkpoint.metadata.get("baseline"))
    ):
        return known
    is_wanted = args.baseline
    if is_wanted is None:
        few = len(torch.as_tensor(splits["train"].labels).unique()) <= MOST_CLASSES
        is_wanted = few and args.dataset in own_data.DATASETS
    if args.evaluate or not is_wanted:
        return {}
    name = "test" if "test" in splits else "val"
    with run.world.waiting_at_most(READ_SECONDS):
        found = on_main(run.world, lambda: measure(splits["train"], splits[name]))
    if run.world.is_main:
        print(found.line(EVAL_SET_NAMES[name]), flush=True)
    return {"eval_set": name, **dataclasses.asdict(found)}


def global_batch_size(args: Namespace, world: World) -> int:
    """Samples of the first step over all ranks."""
    return args.batch_size * args.accumulate * world.size


# -------------------------------------------------------------------- model


def choose_backend(args: Namespace, run: Run, batches: DynamicBatchSampler) -> str:
    """What --backend is in this run, where it is auto.

    A CUDA graph of a compiled model, where the flags allow it and the run is long enough for the
    minute that compiling takes, else eager.
    """
    if args.backend != "auto":
        return args.backend
    flags = {**vars(args), "backend": "cudagraph", "precision": run.precision.name}
    is_recorded = (
        run.world.device.type == "cuda"
        and run.world.size == 1
        and not args.freeze
        and ":" not in args.arch  # networks of other libraries may wait for the device
        and args.epochs * batches.steps() >= GRAPH_STEPS
        and not compatibility.first_conflict(Namespace(**flags))
    )
    return "cudagraph" if is_recorded else "eager"


def prepare_model(
    args: Namespace, run: Run, model: nn.Module, batches: DynamicBatchSampler
) -> nn.Module:
    """The model with what the flags do to it, in place: saving memory, sharding, compilation.

    Raises:
        InputError: the model, or this torch, does not support a flag.
    """
    if args.fuse and (reason := torch_compat.unavailable_reason("fuse")):
        raise InputError(f"--fuse {reason}; leave it out")
    if args.fuse and not fusion.fuse(model):
        raise InputError("--fuse: this network cannot be recomputed; leave it out")
    if args.checkpoint_activations and not activation_checkpointing.checkpoint_activations(model):
        raise InputError("--checkpoint_activations: no blocks to recompute; leave it out")
    if args.parallel != "ddp" and run.world.size > 1:
        fsdp.shard(
            model,
            run.world,
            kind=args.parallel,
            blocks=residual_blocks(model),
            wire_dtype=comm_hooks.WIRE_DTYPES.get(args.grad_compress),
            compute_dtype=None if args.fuse else run.precision.dtype,
        )
    small_epochs = getattr(args, "augment_args", {}).get("small_epochs", 0)
    sizes_of_images = small_epochs > 0 and args.dynamic_batch == "none"
    backend = choose_backend(args, run, batches)
    return execution.apply_backend(
        backend, model, few_shapes=sizes_of_images, may_fail=args.backend == "auto"
    )


# -------------------------------------------------------------------- optimizer


def create_optimizer(
    args: Namespace, run: Run, model: nn.Module, optimizers: Mapping[str, OptimizerChoice]
) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over all parameters of the model.

    Raises:
        InputError: this torch has no Muon, or --opt_args do not go together.
    """
    name = args.optimizer
    if name == "muon" and (reason := torch_compat.unavailable_reason("muon")):
        raise InputError(f"--optimizer muon {reason}; ours is --optimizer ngd")
    groups = optimizers[name].groups(model, args.weight_decay)
    if args.layer_decay < 1:
        groups = pretrained.decay_layers(model, groups, args.layer_decay)
    choice = optimizers[name]
    settings = {flag: getattr(args, flag) for flag in choice.flags}
    if name == "slamb":
        settings["wire_dtype"] = OWN_WIRE_DTYPES[args.wire_dtype]
        settings["warmup"] = settings.pop("compress_warmup")
        settings["wire_bits"] = WIRE_BITS.get(args.wire_dtype, 0)
    ratio = global_batch_size(args, run.world) / args.base_bs
    # 'linear' is of Goyal et al. (arXiv:1706.02677), 'sqrt' of Krizhevsky (arXiv:1404.5997)
    lr = args.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[args.lr_scaling]
    with refused_as("--opt_args"):
        return choice.make(groups, lr=lr, **settings, **args.opt_args)


# -------------------------------------------------------------------- loss and mixing


def class_weights(args: Namespace, run: Run, data: Data) -> Tensor | None:
    """The factors of --class_weights, (classes,) of mean 1 over the rows that are drawn, or None.

    Raises:
        InputError: they name a class that the data does not have.
    """
    given, classes = args.class_weights, data.metadata["classes"]
    if given is None:
        return None
    counts = data.labels.bincount(minlength=len(classes)).double()
    if args.balanced_sampling:  # which draws the classes equally often
        counts = (counts > 0).double()
    weights = 1 / counts.clamp(min=1)
    if given != "balanced":
        weights = torch.ones_like(weights)
        with refused_as("--class_weights"):
            for name, weight in given.items():
                weights[class_number(name, classes)] = weight
    weights *= counts.sum() / (weights * counts).sum()
    return weights.float().to(run.world.device)


class Loss(NamedTuple):
    """What a step computes of a batch, and what learns beside the model, if anything does."""

    function: LossFn
    meta_learner: MetaLearner | None = None


def create_loss(
    args: Namespace,
    run: Run,
    data: Data,
    *,
    sample_mix: Callable[..., mixup.Mix],
    meta_mixup: type[MetaMixup],
) -> Loss:
    """The loss, and with --mixup meta what learns how to mix.

    Args:
        sample_mix: how samples are mixed, as `mixup.sample_mix` does.
        meta_mixup: the class of a policy that learns how to mix.
    """
    unmixed = CrossEntropy(args.label_smoothing, class_weights(args, run, data))
    if args.mixup == "none":
        return Loss(unmixed)
    mixed = partial(MixedCrossEntropy, model_mixes=data.model_mixes, unmixed=unmixed)
    settings = dict(args.mixup_args)
    del settings["end"]
    until = mixed_epochs(args)
    if until < args.epochs and run.world.is_main and not run.checkpoint:
        kept = "" if data.held_out is None else f", and {len(data.held_out)} rows are held out"
        first = f"in the first {until} of" if until else "in none of the"
        print(f"samples are mixed{kept} {first} {args.epochs} epochs")
    if data.held_out is None:  # a kind that learns nothing
        with refused_as("--mixup_args"):
            mixup.sample_beta(args.alpha, 0, weight=settings.get("weight"))
        sample_mix = partial(sample_mix, args.mixup, alpha=args.alpha, **settings)
        return Loss(mixed(sample_mix, mixes=lambda epoch: epoch < until))
    meta = meta_mixup(len(data.train), alpha=args.alpha, device=run.world.device)
    learner = MetaLearner(meta, data.held_out, until=until)
    loss_fn = mixed(
        lambda labels, **size: meta.mix(labels),
        observe=meta.observe,
        mixes=learner.mixes,
    )
    return Loss(loss_fn, learner)


def mixed_epochs(args: Namespace) -> int:
    """How many epochs at the start of the run mix samples by --mixup_args end.

    Raises:
        InputError: it is no share.
    """
    end = args.mixup_args["end"]
    if not 0 <= end <= 1:
        raise InputError(f"--mixup_args end={end:g} must be between 0 and 1")
    return int(end * args.epochs + 1e-9)


# -------------------------------------------------------------------- batches


def create_batch_sampler(
    args: Namespace, run: Run, data: Data, rules: Mapping[str, type[dynamic_batch.Rule] | None]
) -> DynamicBatchSampler:
    """Which rows make a batch, by --bs, --dynamic_batch and --balance_workers.

    Raises:
        InputError: the batch, or its limits, do not fit the training set.
    """
    world, kind, settings = run.world, args.dynamic_batch, dict(args.batch_args)
    base, rows = global_batch_size(args, world), len(data.train)
    change: dict[str, Any] = {}
    if (rule := rules[kind]) is not None:
        with refused_as("--batch_args"):
            low, high = dynamic_batch.batch_limits(
                base,
                low=settings.pop("min", None),
                high=settings.pop("max", None),
                smallest=MIN_RANK_ROWS * world.size,
                rows=rows,
                shrinks=kind == "decrease",
            )
            replaces_decay = settings.get("replace_decay", False)
            power = dynamic_batch.lr_power(settings.pop("lr", "none"), replace_decay=replaces_decay)
            if rule is dynamic_batch.Scheduled:
                growth = dynamic_batch.schedule_growth(
                    args.batch_milestones,
                    epochs=args.epochs,
                    lr_schedule=create_lr_schedule(args),
                    grows=kind == "increase",
                    **settings,
                )
                settings = {"base": base, "multiple": growth}
            change = {"rule": rule(**settings), "low": low, "high": high, "lr_power": power}
    with refused_as(f"--bs {args.batch_size}"):
        return DynamicBatchSampler(
            rows,
            base,
            balancer=WorkerBalancer() if args.balance_workers and world.size > 1 else None,
            seed=args.seed,
            lengths=data.train.lengths,
            labels=data.labels if args.balanced_sampling else None,
            held_out=policy_rows(args, data.labels),
            until=mixed_epochs(args) if args.mixup == "meta" else 0,
            world=world,
            **change,
        )


# -------------------------------------------------------------------- trainer


def create_trainer(
    args: Namespace,
    run: Run,
    data: Data,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: DynamicBatchSampler,
) -> Trainer:
    """Make the trainer of these parts, and the run folder."""
    world = run.world
    comm_hook, lr_schedule = create_comm_hook(args, run), create_lr_schedule(args)
    folder, lock = open_run_folder(args.out, run.script, world, run.checkpoint)
    machine = {**describe_machine(world.device), "precision": run.precision.name}
    environment = {**machine, "processes": world.size}
    del environment["command"]  # it changes also where nothing else has
    segments = next_segments(run.checkpoint, environment)
    config = {
        "script": run.script,
        "flags": vars(args),
        **machine,
        "launchers": sorted({*world.gather(launcher_id())} - {""}),  # a restarted job knows its run
        **({"segments": segments} if len(segments) > 1 else {}),
    }
    settings = {"track": args.track, "log_every": args.log_every, "lock": lock}
    log = run_log.RunLog(folder, world.is_main, config=config, **settings)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        f"{len(data.train)} training samples, {num_parameters / 1e6:.2f} M parameters, "
        f"global batch {batches.base} on {world.size} process(es) of "
        f"{device_name(world.device)}, {run.precision.name}, "
        f"{choose_backend(args, run, batches)}; run folder {folder}"
    )
    is_new = run.checkpoint is not None and segments != run.checkpoint.metadata["segments"]
    if is_new and (changes := describe_last(segments)):
        log.info(f"the run goes on with {changes}")
    torch.manual_seed(args.seed * 1009 + 1 + world.rank)  # each rank has dropout of its own
    return Trainer(
        model,
        optimizer,
        loss.function,
        batches,
        train_set=data.train,
        eval_sets=data.eval_sets,
        lr_schedule=lr_schedule,
        precision=run.precision,
        world=world,
        log=log,
        config=create_trainer_config(args, run, batches),
        metadata={"script": run.script, "flags": vars(args), "segments": segments, **data.metadata},
        comm_hook=comm_hook,
        meta_learner=loss.meta_learner,
        early_stop=EarlyStop(
            f"{'val' if 'val' in data.eval_sets else 'test'}_{args.best_by}",
            args.patience,
            args.stop_at,
        ),
    )


def create_trainer_config(args: Namespace, run: Run, batches: DynamicBatchSampler) -> TrainerConfig:
    """The named values of a run.

    Batches that change are cut into as many micro-batches as it takes.
    """
    accumulation_steps, micro_batch_size = args.accumulate, args.micro_bs
    if batches.changes:
        accumulation_steps = 1
        # elsewhere the largest batch is tried, see `Probe`
        is_untried = run.world.device.type == "cpu" or args.parallel != "ddp"
        if micro_batch_size is None and (is_untried or args.accumulate > 1 or batches.balancer):
            # Twice as many with --balance_workers, so that a fast rank's share is still one.
            micro_batch_size = args.batch_size * (2 if batches.balancer else 1)
    return TrainerConfig(
        epochs=args.epochs,
        eval_batch_size=max(MIN_EVAL_BATCH, args.batch_size),
        accumulation_steps=accumulation_steps,
        micro_batch_size=micro_batch_size,
        max_grad_norm=args.clip,
        average_decay=args.ema,
        num_views=num_views(args),
        eval_every=args.eval_every,
        save_every=args.save_every,
        keep=args.keep,
        measure_noise_scale=args.noise_scale or args.dynamic_batch == "noise",
        time_compute=args.balance_workers and run.world.size > 1,
        record_cuda_graph=choose_backend(args, run, batches) == "cudagraph",
        may_fall_back=args.backend == "auto",
    )


def num_views(args: Namespace) -> int:
    """Views of a test image, over which outputs are averaged; a text has one."""
    return VIEWS[getattr(args, "test_views", "none")]


def create_comm_hook(args: Namespace, run: Run) -> comm_hooks.AllReduceHook:
    """What data parallelism sends, by --sync and --grad_compress."""
    if args.grad_compress in comm_hooks.ROUNDED_BITS:
        return comm_hooks.RoundedGradients(run.world, args.grad_compress)
    if args.sync == "local":
        return comm_hooks.LocalSGD(run.world, args.local_steps, after=args.dense_steps)
    if args.sync == "diloco":
        settings = {"after": args.dense_steps, "wire_dtype": OWN_WIRE_DTYPES[args.wire_dtype]}
        with refused_as("--sync_args"):
            return DiLoCo(run.world, args.local_steps, **settings, **args.sync_args)
    return comm_hooks.AllReduceHook(run.world, args.grad_compress)


# -------------------------------------------------------------------- trained models


def trained_classifier(
    args: Namespace, run: Run, metadata: Mapping[str, Any] | None = None
) -> Classifier:
    """The model of the checkpoint on its device, with its weights.

    One line says which file and epoch they are of. With --predict it goes to stderr, so that stdout
    holds the predictions alone.

    Args:
        metadata: of other data; None is the checkpoint's own.
    """
    checkpoint = run.checkpoint
    assert checkpoint is not None
    card = read_card({**checkpoint.metadata, **(metadata or {}), "flags": vars(args)})
    flag = "--resume" if args.checkpoint is None else "--checkpoint"
    weights, device = checkpoint.weights, run.world.device
    found = classifier.trained_classifier(weights, card, device, flag=flag)
    if run.world.is_main:
        line = describe_checkpoint(checkpoint.file, checkpoint.progress)
        print(line, file=sys.stderr if args.predict else sys.stdout, flush=True)
    return found


def export_model(args: Namespace, run: Run) -> None:
    """--export: write the model to a file."""
    found = trained_classifier(args, run)
    example = found.card.example()
    export(found.model, example, Path(args.export), **found.card.export_settings())


def evaluate_checkpoint(args: Namespace, run: Run, data: Data) -> None:
    """--evaluate: print the accuracy on the test set, overall and of each class.

    It is the validation set where the run has no test set, or leaves it alone by --no-test. The
    model computes just as after an epoch of training, so that the accuracy is the one that the run
    reported; with --test_views that over these views.
    """
    name, views = "test" if "test" in data.eval_sets else "val", num_views(args)
    classes, found = data.metadata["classes"], trained_classifier(args, run, data.metadata)
    result = evaluation.evaluate(
        AveragedViews(found.model, views),
        data.eval_sets[name],
        precision=run.precision,
        world=run.world,
        batch_size=max(MIN_EVAL_BATCH, args.batch_size),
        count_classes=len(classes),
        title=f"evaluating on the {EVAL_SET_NAMES[name]} set",
    )
    if run.world.is_main:
        before = run.checkpoint.splits if run.checkpoint else {}
        now = data.metadata.get("data", {}).get("splits", {})
        is_new = name == "test" or any(now[split] != before.get(split) for split in now)
        why = "" if is_new else ", which also chose the best epoch"
        over = f", averaged over {views} views of each image" if views > 1 else ""
        print(f"accuracy on the {EVAL_SET_NAMES[name]} set{over}{why}")
        print(evaluation.class_table(result, classes))


def report_predictions(
    args: Namespace,
    run: Run,
    inputs: Sequence[Any],
    samples: Iterable[Sample],
    *,
    notes: Sequence[str],
) -> None:
    """--predict: print the predictions, or write them to the file of --predict_out (rank 0).

    Args:
        inputs: what the classifier takes of each sample.
        notes: what was left out, for stderr.
    """
    trained = trained_classifier(args, run)
    found = predictions.predict(trained, inputs, samples, batch_size=args.batch_size)
    if not run.world.is_main:
        return
    for note in notes:
        print(note, file=sys.stderr)
    if not args.predict_out:
        predictions.print_predictions(found, trained.classes)
        return
    count = predictions.write_predictions(Path(args.predict_out), found, trained.classes)
    print(f"{args.predict_out}: {count} predictions")
