"""From flags to objects: one function for each part of a run that both entry scripts name.

check_processes(settings, parser, world, checkpoint)             # all were started alike
run = create_run(settings, "resnet50_test", world, checkpoint)
optimizer = create_optimizer(settings, run, model)
loss = create_loss(settings, run, data)
batches = create_batch_sampler(settings, run, data)
trainer = create_trainer(settings, run, data, model=model, ...)
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dynamic_batch
import mixup
from backends import device, execution, onnx_runtime, torch_compat
from backends.machine import commit_or_none, describe_machine, device_name
from backends.precision import choose_precision
from cli import compatibility
from cli.data import Data, Run, class_numbers, policy_rows, redrawn_by
from cli.flag_parser import Scope, ScriptParser
from cli.optimizers import optimizer_choice
from cli.options import create_lr_schedule, uses_trained_model
from cli.settings import S, Settings, begins_with_weights
from distributed import comm_hooks, fsdp
from distributed.agreement import check_equal, on_main, report_restart
from distributed.diloco import DiLoCo
from distributed.worker import launcher_id
from distributed.world import World
from dynamic_batch import WorkerBalancer
from errors import InputError, refused_as
from input_pipeline.fingerprint import is_same
from input_pipeline.label_noise import class_number
from input_pipeline.own_data import list_names
from mixup import MetaMixup
from models import fusion, own_parts
from models.activation_checkpointing import checkpoint_activations
from models.averaged_views import AveragedViews
from models.residual import residual_blocks
from training import classifier, evaluation, predictions, run_log
from training.batch_sampler import MIN_RANK_ROWS, DynamicBatchSampler
from training.checkpoint import Checkpoint
from training.classifier import Classifier
from training.epoch_report import EVAL_SET_NAMES, describe_checkpoint
from training.export import Calibrated, export
from training.losses import BinaryCrossEntropy, CrossEntropy, LossFn, MixedCrossEntropy
from training.meta_learner import MetaLearner
from training.model_card import write_model_card
from training.predictions import Sample
from training.progress import EarlyStop
from training.run_folder import open_run_folder
from training.run_segments import describe_last, next_segments
from training.scores import TOO_MANY, describe_scores, keeps_logits
from training.tracking import check_tracker
from training.trainer import Trainer, TrainerConfig

# Where --bs is not given: samples of one process, and steps of an epoch whose batch will change.
SMALLEST_BATCH, CHANGING_STEPS = 8, 8
MIN_EVAL_BATCH = 64  # samples of one process in a batch of an evaluation, also where --bs is less
GRAPH_STEPS = 3000  # of a run, from which --backend auto compiles the model


# -------------------------------------------------------------------- the run


def check_processes(
    settings: Settings, parser: ScriptParser[S], world: World, checkpoint: Checkpoint | None
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
    with refused_as(f"--track {settings.track}"):
        on_main(world, lambda: check_tracker(settings.track))
    if world.size == 1:
        return
    names = parser.of_scope(Scope.RESULT, Scope.HOW)
    progress = checkpoint and [checkpoint.progress[key] for key in ("step", "seconds")]
    values = {
        "the checkpoint": progress,  # first, since its --bs differs
        **{f"--{name}": getattr(settings, name) for name in names},
        "the version of the code": commit_or_none(),
        "the version of own code": own_parts.versions(settings.arch, settings.optimizer),
        "the version of torch": torch.__version__,
        **{f"--{name}": bool(getattr(settings, name)) for name in parser.of_scope(Scope.START)},
    }
    advice = "start every process with the same flags, code and checkpoint"
    check_equal(world, values, advice=advice)


def create_run(
    settings: Settings, script: str, world: World, checkpoint: Checkpoint | None = None
) -> Run:
    """Settle threads, memory, precision and seed; nothing is written yet.

    Raises:
        InputError: the device does not support the precision, or a flag does not go with it.
    """
    onnx_runtime.silence_onnxruntime_notice()
    device.keep_freed_memory()
    device.set_num_threads(settings.threads, world.core_sharers)
    is_auto_ort = settings.precision == "auto" and settings.backend == "ort"  # which has fp32 alone
    in_fp32 = is_auto_ort or settings.predict or settings.export
    with refused_as(f"--precision {settings.precision}"):
        precision = choose_precision("fp32" if in_fp32 else settings.precision, world.device)
    what_auto_is = {"--precision auto": precision.name}  # as on GPUs of different kinds
    check_equal(world, what_auto_is, advice="give --precision fp16 or fp32")
    if not uses_trained_model(vars(settings)):  # with the precision that auto has chosen
        compatibility.check({**vars(settings), "precision": precision.name})
    if settings.deterministic:
        device.make_deterministic(world.device)  # after the precision has set cuDNN's switches
    torch.manual_seed(settings.seed)  # the same weights on every rank
    return Run(script, world, precision, checkpoint)


def global_batch_size(settings: Settings, world: World) -> int:
    """Samples of the first step over all ranks."""
    return settings.batch_size * settings.accumulate * world.size


def with_batch_size(settings: S, run: Run, data: Data) -> S:
    """The settings, with --bs by the training rows where it was not given.

    It is the settings' usual one, or less where an epoch would have fewer steps than they want: one
    step of a pretrained network. A resumed run whose batch is larger than the rows of more
    processes gets the largest that fits.
    """
    rows, ranks = len(data.train), settings.accumulate * run.world.size
    if settings.batch_size:
        fitting, changed = max(1, rows // ranks), run.checkpoint.changed if run.checkpoint else None
        if changed is None or "--bs" in changed or settings.batch_size <= fitting:
            return settings
        changed["--bs"] = [settings.batch_size, fitting]
        return replace(settings, batch_size=fitting)
    steps = settings.fewest_steps if settings.dynamic_batch == "none" else CHANGING_STEPS
    steps = 1 if begins_with_weights(vars(settings)) else steps
    batch = max(round(rows / steps / ranks), SMALLEST_BATCH)
    usual = settings.usual_batch(ranks)
    batch = max(1, min(usual, batch, rows // ranks))
    if batch < usual and run.world.is_main:
        print(f"batches of {batch}, as there are {rows} training samples (--bs)", flush=True)
    return replace(settings, batch_size=batch)


# -------------------------------------------------------------------- model


def choose_backend(settings: Settings, run: Run, batches: DynamicBatchSampler) -> str:
    """What --backend is in this run, where it is auto.

    A CUDA graph of a compiled model, where the flags allow it and the run is long enough for the
    minute that compiling takes, else eager.
    """
    if settings.backend != "auto":
        return settings.backend
    flags = {**vars(settings), "backend": "cudagraph", "precision": run.precision.name}
    is_recorded = (
        run.world.device.type == "cuda"
        and run.world.size == 1
        and not settings.freeze
        and not settings.lora
        and ":" not in settings.arch  # networks of other libraries may wait for the device
        and settings.epochs * batches.steps() >= GRAPH_STEPS
        and not compatibility.first_conflict(flags)
    )
    return "cudagraph" if is_recorded else "eager"


def prepare_model(
    settings: Settings, run: Run, model: nn.Module, batches: DynamicBatchSampler
) -> nn.Module:
    """The model with what the flags do to it, in place: saving memory, sharding, compilation.

    Raises:
        InputError: the model, or this torch, does not support a flag.
    """
    if settings.fuse and (reason := torch_compat.unavailable_reason("fuse")):
        raise InputError(f"--fuse {reason}; leave it out")
    if settings.fuse and not fusion.fuse(model):
        raise InputError("--fuse: this network cannot be recomputed; leave it out")
    if settings.checkpoint_activations and not checkpoint_activations(model):
        raise InputError("--checkpoint_activations: no blocks to recompute; leave it out")
    if settings.parallel != "ddp" and run.world.size > 1:
        with refused_as(f"--parallel {settings.parallel}", (InputError,)):
            fsdp.shard(
                model,
                run.world,
                kind=settings.parallel,
                blocks=residual_blocks(model),
                wire_dtype=comm_hooks.WIRE_DTYPES.get(settings.grad_compress),
                compute_dtype=None if settings.fuse else run.precision.dtype,
            )
    few_shapes = settings.several_sizes and settings.dynamic_batch == "none"
    backend = choose_backend(settings, run, batches)
    with refused_as(f"--backend {backend}", (InputError,)):
        return execution.apply_backend(
            backend, model, few_shapes=few_shapes, may_fail=settings.backend == "auto"
        )


# -------------------------------------------------------------------- optimizer


def create_optimizer(settings: Settings, run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over all parameters of the model.

    Raises:
        InputError: this torch has no Muon, or --opt_args do not go together.
    """
    name = settings.optimizer
    if name == "muon" and (reason := torch_compat.unavailable_reason("muon")):
        raise InputError(f"--optimizer muon {reason}; ours is --optimizer ngd")
    choice = optimizer_choice(name)
    groups = choice.groups(model, settings.weight_decay)
    own = {flag: getattr(settings, flag) for flag in choice.flags}
    if name == "slamb":
        own |= wire_format(settings.wire_dtype)
        own["warmup"] = own.pop("compress_warmup")
    ratio = global_batch_size(settings, run.world) / settings.base_bs
    # 'linear' is of Goyal et al. (arXiv:1706.02677), 'sqrt' of Krizhevsky (arXiv:1404.5997)
    lr = settings.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.lr_scaling]
    with refused_as(f"--optimizer {name}" if own_parts.is_own(name) else "--opt_args"):
        return choice.make(groups, lr=lr, **own, **settings.opt_args)


# -------------------------------------------------------------------- loss and mixing


def class_weights(settings: Settings, run: Run, data: Data) -> Tensor | None:
    """The factors of --class_weights, (classes,) of mean 1 over the rows that are drawn, or None.

    Of several labels a row they are factors of the labels that rows have, and balanced makes these
    weigh as much as those that they lack.

    Raises:
        InputError: they name a class that the data does not have.
    """
    given, classes = settings.class_weights, data.metadata["classes"]
    if given is None:
        return None
    is_multilabel = data.labels.ndim > 1
    counts = class_numbers(data.labels).bincount(minlength=len(classes)).double()
    if settings.balanced_sampling:  # which draws the classes equally often
        counts = (counts > 0).double()
    weights = 1 / counts.clamp(min=1)
    if is_multilabel:
        weights *= (len(data.labels) - counts).clamp(min=1)
    if isinstance(given, dict):
        weights = torch.ones_like(weights)
        with refused_as("--class_weights"):
            for name, weight in given.items():
                weights[class_number(name, classes)] = weight
    if not is_multilabel:
        weights *= counts.sum() / (weights * counts).sum()
    return weights.float().to(run.world.device)


class Loss(NamedTuple):
    """What a step computes of a batch, and what learns beside the model, if anything does."""

    function: LossFn
    meta_learner: MetaLearner | None = None


def create_loss(
    settings: Settings,
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
    kind = BinaryCrossEntropy if settings.label_separator else CrossEntropy
    unmixed = kind(settings.label_smoothing, class_weights(settings, run, data))
    if settings.mixup == "none":
        return Loss(unmixed)
    mixed = partial(MixedCrossEntropy, model_mixes=data.model_mixes, unmixed=unmixed)
    own = dict(settings.mixup_args)
    del own["end"]
    until = mixed_epochs(settings)
    if until < settings.epochs and run.world.is_main and not run.checkpoint:
        first = f"in the first {until} of" if until else "in none of the"
        first = f"{first} {settings.epochs} epochs"
        if data.held_out is None:
            print(f"samples are mixed {first}")
        elif until < 2:
            print("warning: fewer than 3 epochs cannot say how many labels are wrong")
        else:
            rows = f"{len(data.held_out)} rows are held out {first}"
            print(f"{rows}, and say how many labels are wrong: if many are, samples are mixed")
    if data.held_out is None:  # a kind that learns nothing
        with refused_as("--mixup_args"):
            mixup.sample_beta(settings.alpha, 0, weight=own.get("weight"))
        sample_mix = partial(sample_mix, settings.mixup, alpha=settings.alpha, **own)
        return Loss(mixed(sample_mix, mixes=lambda epoch: epoch < until))
    meta = meta_mixup(len(data.train), alpha=settings.alpha, device=run.world.device)
    learner = MetaLearner(meta, data.held_out, until=until)
    loss_fn = mixed(
        lambda labels, **size: meta.mix(labels), observe=meta.observe, mixes=learner.mixes
    )
    return Loss(loss_fn, learner)


def mixed_epochs(settings: Settings) -> int:
    """How many epochs at the start of the run mix samples by --mixup_args end.

    Raises:
        InputError: it is no share.
    """
    end = settings.mixup_args["end"]
    if not 0 <= end <= 1:
        raise InputError(f"--mixup_args end={end:g} must be between 0 and 1")
    return int(end * settings.epochs + 1e-9)


# -------------------------------------------------------------------- batches


def create_batch_sampler(
    settings: Settings, run: Run, data: Data, rules: Mapping[str, type[dynamic_batch.Rule] | None]
) -> DynamicBatchSampler:
    """Which rows make a batch, by --bs, --dynamic_batch and --balance_workers.

    Raises:
        InputError: the batch, or its limits, do not fit the training set.
    """
    world, kind, own = run.world, settings.dynamic_batch, dict(settings.batch_args)
    base, rows = global_batch_size(settings, world), len(data.train)
    change: dict[str, Any] = {}
    if (rule := rules[kind]) is not None:
        with refused_as("--batch_args"):
            low, high = dynamic_batch.batch_limits(
                base,
                low=own.pop("min"),
                high=own.pop("max"),
                smallest=MIN_RANK_ROWS * world.size,
                rows=rows,
                shrinks=kind == "decrease",
            )
            replaces_decay = own.get("replace_decay", False)
            power = dynamic_batch.lr_power(own.pop("lr"), replace_decay=replaces_decay)
            if rule is dynamic_batch.Scheduled:
                growth = dynamic_batch.schedule_growth(
                    settings.batch_milestones,
                    epochs=settings.epochs,
                    lr_schedule=create_lr_schedule(settings),
                    grows=kind == "increase",
                    **own,
                )
                own = {"base": base, "multiple": growth}
            change = {"rule": rule(**own), "low": low, "high": high, "lr_power": power}
    with refused_as(f"--bs {settings.batch_size}"):
        return DynamicBatchSampler(
            rows,
            base,
            balancer=WorkerBalancer() if settings.balance_workers and world.size > 1 else None,
            seed=settings.seed,
            lengths=data.train.lengths,
            labels=data.labels if settings.balanced_sampling else None,
            held_out=policy_rows(settings, data.labels),
            until=mixed_epochs(settings) if settings.mixup == "meta" else 0,
            world=world,
            **change,
        )


# -------------------------------------------------------------------- trainer


def create_trainer(
    settings: Settings,
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
    sizes = [(len(each), len(data.metadata["classes"])) for each in data.eval_sets.values()]
    if settings.best_by == "auroc" and not all(keeps_logits(*size) for size in sizes):
        raise InputError(f"--best_by auroc: {TOO_MANY}; use accuracy or macro_f1")
    comm_hook, lr_schedule = create_comm_hook(settings, run), create_lr_schedule(settings)
    with refused_as(f"--out {settings.out or 'runs'}"):
        folder, lock = open_run_folder(settings.out, run.script, world, run.checkpoint)
    machine = {**describe_machine(world.device), "precision": run.precision.name}
    if own_code := own_parts.versions(settings.arch, settings.optimizer):
        machine["own_code"] = own_code
    environment = {**machine, "processes": world.size}
    del environment["command"]  # it changes also where nothing else has
    segments = next_segments(run.checkpoint, environment)
    said = {"script": run.script, "flags": {**vars(settings)}}
    config = {
        **said,
        **machine,
        "launchers": sorted({*world.gather(launcher_id())} - {""}),  # a restarted job knows its run
        **({"segments": segments} if len(segments) > 1 else {}),
    }
    log = run_log.RunLog(
        folder,
        world.is_main,
        config=config,
        track=settings.track,
        log_every=settings.log_every,
        lock=lock,
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        f"{len(data.train)} training samples, {num_parameters / 1e6:.2f} M parameters, "
        f"global batch {batches.base} on {world.size} process(es) of "
        f"{device_name(world.device)}, {run.precision.name}, "
        f"{choose_backend(settings, run, batches)}; run folder {folder}"
    )
    is_new = run.checkpoint is not None and segments != run.checkpoint.metadata["segments"]
    if is_new and (changes := describe_last(segments)):
        log.info(f"the run goes on with {changes}")
    torch.manual_seed(settings.seed * 1009 + 1 + world.rank)  # each rank has dropout of its own
    trainer = Trainer(
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
        config=create_trainer_config(settings, run, batches),
        metadata={**said, "segments": segments, **data.metadata},
        comm_hook=comm_hook,
        meta_learner=loss.meta_learner,
        early_stop=EarlyStop(
            f"{'val' if 'val' in data.eval_sets else 'test'}_{settings.best_by}",
            settings.patience,
            settings.stop_at,
        ),
        shown=data.shown,
    )
    if run.checkpoint is None:  # what computing features took is a part of the run
        trainer.progress.seconds = data.seconds + data.eval_seconds
        trainer.progress.eval_seconds = data.eval_seconds
    return trainer


def create_trainer_config(
    settings: Settings, run: Run, batches: DynamicBatchSampler
) -> TrainerConfig:
    """The named values of a run.

    Batches that change are cut into as many micro-batches as it takes.
    """
    accumulation_steps, micro_batch_size = settings.accumulate, settings.micro_bs
    measures_noise = settings.noise_scale or settings.dynamic_batch == "noise"
    if measures_noise and run.world.size == 1 and batches.base < 2 * MIN_RANK_ROWS:
        raise InputError(
            f"--bs {batches.base}: the noise scale needs {2 * MIN_RANK_ROWS} samples a step"
        )
    if batches.changes:
        accumulation_steps = 1
        # elsewhere the largest batch is tried, see `Probe`
        is_untried = run.world.device.type == "cpu" or settings.parallel != "ddp"
        if micro_batch_size is None and (is_untried or settings.accumulate > 1 or batches.balancer):
            # Twice as many with --balance_workers, so that a fast rank's share is still one.
            micro_batch_size = settings.batch_size * (2 if batches.balancer else 1)
    return TrainerConfig(
        epochs=settings.epochs,
        eval_batch_size=max(MIN_EVAL_BATCH, settings.batch_size),
        accumulation_steps=accumulation_steps,
        micro_batch_size=micro_batch_size,
        max_grad_norm=settings.clip,
        average_decay=settings.ema,
        num_views=settings.views,
        eval_every=settings.eval_every,
        save_every=settings.save_every,
        keep=settings.keep,
        measure_noise_scale=measures_noise,
        time_compute=settings.balance_workers and run.world.size > 1,
        record_cuda_graph=choose_backend(settings, run, batches) == "cudagraph",
        may_fall_back=settings.backend == "auto",
        is_multilabel=bool(settings.label_separator),
        passes_vary=":" in settings.arch,  # networks of other libraries and own ones
    )


def create_comm_hook(settings: Settings, run: Run) -> comm_hooks.AllReduceHook:
    """What data parallelism sends, by --sync and --grad_compress."""
    if settings.grad_compress in comm_hooks.ROUNDED_BITS:
        return comm_hooks.RoundedGradients(run.world, settings.grad_compress)
    if settings.sync == "local":
        return comm_hooks.LocalSGD(run.world, settings.local_steps, after=settings.dense_steps)
    if settings.sync == "diloco":
        with refused_as("--sync_args"):
            return DiLoCo(
                run.world,
                settings.local_steps,
                after=settings.dense_steps,
                **wire_format(settings.wire_dtype),
                **settings.sync_args,
            )
    return comm_hooks.AllReduceHook(run.world, settings.grad_compress)


def wire_format(name: str) -> dict[str, Any]:
    """What SLAMB and DiLoCo take for a --wire_dtype."""
    dtype = torch.float32 if name == "fp32" else torch.bfloat16  # also of what is not rounded
    return {"wire_dtype": dtype, "wire_bits": comm_hooks.ROUNDED_BITS.get(name, 0)}


# -------------------------------------------------------------------- trained models


def trained_classifier(
    settings: Settings, run: Run, metadata: Mapping[str, Any] | None = None
) -> Classifier:
    """The model of the checkpoint on its device, with its weights.

    One line says which file and epoch they are of. With --predict it goes to stderr, so that stdout
    holds the predictions alone.

    Args:
        metadata: of other data; None is the checkpoint's own.
    """
    checkpoint = run.checkpoint
    assert checkpoint is not None
    changes = {**(metadata or {}), "flags": {**vars(settings)}}
    with refused_as(f"--arch {settings.arch}", (InputError,)):
        found = classifier.of_checkpoint(checkpoint, run.world.device, changes)
    if run.world.is_main:
        line = describe_checkpoint(checkpoint.file, checkpoint.progress)
        print(line, file=sys.stderr if settings.predict else sys.stdout, flush=True)
    return found


def export_model(settings: Settings, run: Run, file: str) -> None:
    """--export: write the model to a file, and a model card beside it."""
    checkpoint = run.checkpoint
    assert checkpoint is not None
    found = trained_classifier(settings, run)
    card, model, example = found.card, found.model, found.card.example()
    if card.temperature != 1 and not file.endswith(".safetensors"):  # a program: it divides
        model, card = Calibrated(model, card.temperature), replace(card, temperature=1.0)
    how = {**card.export_settings(), "probabilities": card.probabilities}
    with refused_as(f"--export {file}"):
        export(model, example, Path(file), **how)
    write_model_card(Path(file), checkpoint, found.card)


def evaluate_checkpoint(settings: Settings, run: Run, data: Data) -> None:
    """--evaluate: print the accuracy on the test set, overall and of each class.

    It is the validation set where the run has no test set, or leaves it alone by --no-test. The
    model computes just as after an epoch of training, so that the accuracy is the one that the run
    reported; with --test_views that over these views.
    """
    name, views = "test" if "test" in data.eval_sets else "val", settings.views
    classes, found = data.metadata["classes"], trained_classifier(settings, run, data.metadata)
    result = evaluation.evaluate(
        AveragedViews(found.model, views),
        data.eval_sets[name],
        precision=run.precision,
        world=run.world,
        batch_size=max(MIN_EVAL_BATCH, settings.batch_size),
        num_classes=len(classes),
        is_multilabel=found.card.is_multilabel,
        title=f"evaluating on the {EVAL_SET_NAMES[name]} set",
    )
    if run.world.is_main:
        before = run.checkpoint.splits if run.checkpoint else {}
        now = data.metadata["data"]["splits"]
        is_known = all(split in before and is_same(before[split], now[split]) for split in now)
        is_new = name == "test" or not is_known or redrawn_by(run)
        why = "" if is_new else ", which also chose the best epoch"
        over = f", averaged over {views} views of each image" if views > 1 else ""
        what = "each label" if found.card.is_multilabel else "accuracy"
        print(f"{what} on the {EVAL_SET_NAMES[name]} set{over}{why}")
        print(evaluation.class_table(result, classes))
        rows = result.calibrated(found.card.temperature).rows
        print(f"probabilities: {describe_scores(rows.scores() if rows else None)}")


def report_predictions(
    settings: Settings,
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
    trained = trained_classifier(settings, run)
    unread: dict[str, str] = {}
    batch = max(MIN_EVAL_BATCH, settings.batch_size)
    found = predictions.predict(trained, inputs, samples, batch_size=batch, unread=unread)
    if not run.world.is_main:
        return
    for note in notes:
        print(note, file=sys.stderr)
    if settings.predict_out:
        count = predictions.write_predictions(Path(settings.predict_out), found, trained.card)
        print(f"{settings.predict_out}: {count} predictions")
    else:
        predictions.print_predictions(found, trained.card)
    if unread:
        why = next(iter(unread.values()))
        if len(inputs) > 1:
            why = f"no prediction of {list_names([*unread])}: {why}"
        raise InputError(why)
