"""The training loop, from the run down to the optimizer step, in reading order.

    fit               the epochs; resumes, rolls back after divergence, stops on a signal
    train_epoch       the steps of an epoch
    train_step        one optimizer step on this rank's share of a global batch
    forward_backward  gradients of the micro-batches
    optimizer_step    unscale, clip, step unless a gradient is not finite
    evaluate          the metrics on each evaluation set

A step's order is: learning rate, backward, unscale, clip, step, update of the loss scale, clear.
Sums of loss and accuracy stay on the device: the host waits for a GPU every 20 steps, to read them.

    trainer = Trainer(model, optimizer, CrossEntropy(), batches, train_set=train, ...)
    trainer.fit(checkpoint)
"""

import contextlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backends.cuda_graph import CudaGraphRunner, make_capturable
from backends.device import peak_memory
from backends.execution import without_compilation
from backends.precision import Precision
from distributed.agreement import on_main
from distributed.averaging import RankAverager, Traffic, average_tensors
from distributed.comm_hooks import AllReduceHook
from distributed.world import StopVote, World
from errors import InputError, Interrupted, refused_as
from input_pipeline.dataset import BatchedDataset
from models.averaged_views import AveragedViews
from optimizers.base import step_unless_skipped
from optimizers.schedules import Schedule
from training import evaluation, recovery, step_stats
from training.batch_sampler import DynamicBatchSampler, RankBatch
from training.checkpoint import Checkpoint
from training.checkpointer import Checkpointer
from training.epoch_report import is_evaluated, report_result
from training.losses import LossFn, MixedCrossEntropy
from training.meta_learner import MetaLearner
from training.micro_batches import MicroBatches
from training.parallel import choose_parallel
from training.probe import Probe
from training.progress import EarlyStop, Progress
from training.progress_bar import progress_bar
from training.recovery import MAX_SKIPPED_IN_A_ROW, Diverged
from training.run_log import RunLog
from training.scores import Show, fit_temperature
from training.step_stats import ComputeTimer, NoiseMeter, StepSums, StepTotals, TrainClock
from training.train_state import TrainState
from training.weight_average import WeightAverage

DIVERGED = 2  # what ranks that train apart vote for, beside 1 for a stop
LARGE_RISE = 2  # of the learning rate in a step, as where a run is made longer
LOG_INTERVAL = {"cpu": 1, "cuda": 20}  # steps between two reads of the sums


@dataclass(frozen=True)
class TrainerConfig:
    """Named values of a run."""

    epochs: int = 1  # length of the run
    eval_batch_size: int = 128  # of one process in evaluation
    accumulation_steps: int = 1  # micro-batches of a step, at least
    micro_batch_size: int | None = None  # samples of one at most; None is no limit
    max_grad_norm: float = 0.0  # gradients are clipped to this norm; 0 is no limit
    average_decay: float = 0.0  # of the average of the weights that is evaluated; 0 is none
    num_views: int = 1  # views of each image, over which the trained model's outputs are averaged
    eval_every: float = 1  # epochs from one evaluation to the next; the last one has its own
    save_every: int = 0  # steps between checkpoints within an epoch; 0 is none
    keep: int = 1  # how many checkpoints stay: last.pt and those before it
    measure_noise_scale: bool = False  # sum what the gradient noise scale is estimated from
    time_compute: bool = False  # measure each rank's seconds without waiting for others
    record_cuda_graph: bool = False  # record the step once for each shape of batch, and replay it
    may_fall_back: bool = False  # a step that cannot be recorded runs without a graph, with a line
    is_multilabel: bool = False  # rows may have several labels
    passes_vary: bool = False  # a pass may use other parameters of the model than the one before


@dataclass(eq=False, repr=False)
class Trainer:
    """Fits a model to a training set and evaluates it between epochs."""

    model: nn.Module  # on its device, not wrapped for data parallelism
    # Over parameters of `model`. A `CommunicatingOptimizer` exchanges what it needs by itself and
    # takes each rank's own gradients; for any other one they are averaged.
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn  # what a step computes of a batch
    batches: DynamicBatchSampler  # which rows of the training set make a batch
    _: KW_ONLY
    train_set: BatchedDataset
    eval_sets: Mapping[str, BatchedDataset]  # by name, 'val' and 'test'
    # (progress in epochs, one step in epochs) -> multiple of the rate the optimizer was made with.
    lr_schedule: Schedule
    precision: Precision  # autocast and loss scaling
    world: World  # the ranks
    log: RunLog  # the run folder and the console
    config: TrainerConfig
    # Plain values at the top of every checkpoint: script, flags, what inference needs.
    metadata: dict[str, Any]
    comm_hook: AllReduceHook  # what data parallelism sends
    meta_learner: MetaLearner | None = None  # learns beside the model
    early_stop: EarlyStop = EarlyStop()  # what chooses the best epoch, and may end the run
    # What a report shows of the rows of an evaluation set, by its name; not of every one.
    shown: Mapping[str, Show] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world, config = self.world, self.config
        self.model, self.optimizer, self.scaler = self.precision.prepare(self.model, self.optimizer)
        self.parallel = choose_parallel(self.model, self.optimizer, self.comm_hook)
        layers = {name: [*each.parameters(False)] for name, each in self.model.named_modules()}
        self.frozen = {
            name for name, own in layers.items() if own and not any(p.requires_grad for p in own)
        }
        self.sums = StepSums(world.device)
        # The noise scale compares two micro-batches where there are no other ranks.
        least = 2 if config.measure_noise_scale and world.size == 1 else 1
        self.micro_batches = MicroBatches(
            max(config.accumulation_steps, least), config.micro_batch_size
        )
        self.progress = Progress()
        self.num_classes = len(self.metadata["classes"])
        further = ["top5_accuracy"] * (self.num_classes > evaluation.TOP)
        further = ["map", "micro_f1"] if config.is_multilabel else further
        of_best = ["auroc"] * self.early_stop.chosen_by.endswith("_auroc")
        self.metrics = ["loss", "accuracy", "macro_f1", *further, *of_best]
        self.inference: dict[str, Any] = {
            "precision": self.precision,
            "world": world,
            "batch_size": config.eval_batch_size,
        }
        self.evaluated: dict[str, evaluation.Evaluation] = {}  # the last evaluation on each set
        self.compute_timer = ComputeTimer(world.device) if config.time_compute else None
        self.clock = TrainClock(self.progress, self.compute_timer)
        self.noise_meter: NoiseMeter | None = None
        if config.measure_noise_scale:
            self.noise_meter = NoiseMeter(self.parallel.parameters, world)
            self.parallel.observers.append(self.noise_meter.add_bucket)
        if self.compute_timer is not None:
            self.parallel.observers.append(self.compute_timer.gradients_ready)
        self.graph: CudaGraphRunner | None = None
        if config.record_cuda_graph:
            say = self.log.info if config.may_fall_back else None
            self.graph = CudaGraphRunner(self._whole_step, fall_back=say)
            make_capturable(self.optimizer)
        decay = config.average_decay
        self.average = WeightAverage(self.model, decay) if decay else None
        self.vote, self.has_diverged = StopVote(world), False
        self.num_skipped, self.sound_statistics = 0, self.copied_statistics()
        self.parts = TrainState(
            world,
            parallel=self.parallel,
            batches=self.batches,
            sums=self.sums,
            scaler=self.scaler,
            average=self.average,
            meta_learner=self.meta_learner,
            compute_timer=self.compute_timer,
        )
        self.checkpointer = Checkpointer(
            self.parts, self.progress, self.log, metadata=self.metadata, keep=config.keep
        )
        self.probe = Probe(
            self.model, world, self.micro_batches, self.forward_backward, log=self.log
        )

    # ---------------------------------------------------------------- the run

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train until the run is over; a checkpoint to go on from has no state afterwards.

        Raises:
            Interrupted: a stop signal came, and last.pt was written.
            NonFiniteLoss: the loss stayed non-finite.
        """
        self.begin(checkpoint)
        before = len(self.progress.rows)
        if self.progress.epoch >= self.config.epochs:
            self.log.info("nothing is left to train; more epochs make a run longer")
        with contextlib.closing(self.log), recovery.caught_signals(self.log.info) as signals:
            if self.is_over():
                self.complete_result()
            while not self.is_over():
                try:
                    stop = self.train_epoch(signals)
                except Diverged:
                    recovery.roll_back(self.progress, self.restore_last, self.log)
                    self.checkpointer.save()
                    continue
                if self.is_over():  # within the epoch
                    break
                with self.world.waiting_at_most(self.world.limits.start):
                    self.finish_epoch()
                if stop and not self.is_over():
                    self.interrupt()
            if len(self.progress.rows) > before:
                recovery.check_last_epoch(self.progress.rows, is_scaled=self.scaler.is_enabled())
            if reason := self.early_stop.reason(self.progress.rows, since=self.progress.since):
                hours = self.progress.device_hours(self.world)
                self.log.info(f"the run has ended after {hours:.4f} device-hours: {reason}")

    def complete_result(self) -> None:
        """Evaluate again where a kill came between the last epoch and its result.json."""
        last = self.progress.rows[-1]
        is_there = on_main(self.world, lambda: self.log.has_result(last["epoch"]))
        if is_evaluated(last) and not is_there and not self.parallel.replicas_diverge:
            with self.world.waiting_at_most(self.world.limits.start):
                self.evaluate(last["epoch"])

    def is_over(self, row: Mapping[str, Any] | None = None) -> bool:
        """Whether all epochs are done or the run ends early, also if `row` is that of one more."""
        rows = [*self.progress.rows, *([] if row is None else [row])]
        has_ended = self.early_stop.reason(rows, since=self.progress.since)
        return bool(rows and rows[-1]["epoch"] >= self.config.epochs or has_ended)

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Fit the first step into the memory, load the checkpoint, and write what a run has."""
        world, largest = self.world, self.batches.largest_share
        if world.device.type == "cuda" and not self.parallel.passes_communicate:
            self.probe.fit_memory(
                self.train_set,
                largest=max(largest, self.micro_batches.limit or 0),
                epoch=self.config.epochs - 1,
                records_steps=self.graph is not None,
            )
            limits = world.all_gather(self.micro_batches.limit)
            self.micro_batches.limit = min(filter(None, limits), default=None)
        self.wrap_model()
        world.set_time_limit(world.limits.start)  # by now all process groups are made
        if checkpoint is None:
            self.checkpointer.save()  # first, so that every run that has a log can be resumed
        else:  # after wrapping, which gives every rank the buffers of rank 0
            steps = checkpoint.progress["step"]
            module = self.parallel.module
            self.probe.lay_out_buckets(module, self.train_set, largest=largest, steps=steps)
            self.restore(checkpoint)
            lr, before = self.scheduled_lr(), self.last_lr()
            if lr > LARGE_RISE * before and not self.is_over():
                of = f"{self.lr_schedule.name} over {self.config.epochs} epochs"
                self.log.info(f"the learning rate goes from {before:.3g} to {lr:.3g}, as of {of}")
            self.checkpointer.settle_files(checkpoint.file)
            checkpoint.state.clear()  # else its file would stay on the disk after it is replaced
        self.log.begin(self.progress.rows, epochs=self.config.epochs)

    def wrap_model(self) -> None:
        """Wrap the model for data parallelism, once the micro-batches are known; collective."""
        several = self.world.all_gather(self.micro_batches.several)
        self.parallel.wrap(accumulates=any(several), varies=self.config.passes_vary)

    def report(self) -> None:
        """Print the result of the run as `report_result` does, and raise what it raises."""
        report_result(
            self.progress,
            self.world,
            self.log,
            is_saved="last" not in self.checkpointer.unsaved,
            metadata=self.metadata,
            evaluated=self.evaluated,
            shown=self.shown,
        )

    def train_epoch(self, signals: list[int]) -> bool:
        """Do the steps of this epoch that are not yet done.

        Returns:
            Whether a signal came too late to stop within the epoch.
        Raises:
            Diverged: too many steps in a row were not finite.
            Interrupted: a signal came.
        """
        progress = self.progress
        self.model.train()
        self.num_skipped, self.sound_statistics = 0, self.copied_statistics()
        self.parallel.start_epoch(progress.epoch)
        self.batches.start_epoch(progress.epoch)
        if isinstance(self.loss_fn, MixedCrossEntropy):
            begins_or_ends = self.loss_fn.start_epoch(progress.epoch)
            if begins_or_ends and self.graph is not None:
                self.graph.invalidate()
        plan = self.batches.plan(progress.epoch, progress.step_in_epoch)
        total = self.batches.rows_in_epoch
        done = total - sum(planned.samples for planned in plan)
        title = f"epoch {progress.epoch + 1}/{self.config.epochs}"
        bar = progress_bar(title, total, is_main=self.world.is_main, done=done)
        data = self.train_set.batches([planned.rows for planned in plan], progress.epoch)
        evaluations = self.evaluations_within_epoch()
        one_shape = self.train_set.lengths is None  # but for the last batches of an epoch
        self.clock.start()
        with bar, contextlib.closing(data):
            for (inputs, labels), planned in zip(data, plan):
                self.world.stage += 1  # this rank waits for no images
                self.set_lr(self.scheduled_lr())
                with without_compilation(one_shape and planned.samples != self.batches.size):
                    self.train_step(inputs, labels, planned)
                if self.average is not None:
                    self.average.update()
                self.world.first_step_done()
                progress.step += 1
                progress.step_in_epoch += 1
                progress.samples += planned.samples
                bar.update(planned.samples)
                self.clock.add_elapsed()
                if progress.step % LOG_INTERVAL[self.world.device.type] == 0:
                    self.log_progress(bar)
                if progress.step_in_epoch in evaluations:
                    self.evaluate_within_epoch()
                    if self.is_over():
                        break
                if self.config.save_every and progress.step % self.config.save_every == 0:
                    skipped = int(self.sums.read().skipped)  # a GPU has done its steps
                    self.clock.add_elapsed()
                    self.guard_statistics(skipped)
                    totals = self.sums.totals(self.world)
                    if not totals.skipped_in_a_row:  # else a return would find diverged weights
                        self.checkpointer.save()
                    self.clock.start()
                agreed = self.vote.ask(self.wish(signals))
                if agreed == DIVERGED:
                    raise Diverged
                if agreed:
                    self.interrupt()
            self.log_progress(bar)
            agreed = max(self.vote.ask(self.wish(signals)), self.vote.finish())
        self.clock.add_elapsed()
        if agreed == DIVERGED:
            raise Diverged
        return bool(agreed)

    def wish(self, signals: list[int]) -> int:
        return DIVERGED if self.has_diverged else int(bool(signals))

    # ---------------------------------------------------------------- one step

    def train_step(self, inputs: Tensor, labels: Tensor, planned: RankBatch | None = None) -> None:
        """One optimizer step. Micro-batches are halved while the GPU's memory runs out.

        Args:
            inputs, labels: this rank's share of the global batch, (batch, ...) and (batch,).
            planned: what the plan says of the share; None is a share as large as all others.
        Raises:
            InputError: the batch is too small for BatchNorm, or too large for the memory.
        """
        weight = 1.0 if planned is None else planned.weight
        number, is_again = None, False
        if self.parallel.passes_communicate and planned is not None:
            number = self.micro_batches.number_on_all_ranks(planned.samples, self.world.size)
        while True:
            try:
                if self.meta_learner is not None and planned is not None:
                    self.meta_learner.begin_step(planned.rows, again=is_again)
                if self.graph is not None:
                    self.graph(inputs, labels, weight=weight)
                    return
                step_sums = self.forward_backward(
                    self.parallel.module, inputs, labels, weight, num_micro_batches=number
                )
                break
            except torch.cuda.OutOfMemoryError:
                # Other ranks are inside a collective, and a graph keeps its memory: no going back.
                if self.world.size > 1 or self.graph is not None:
                    raise InputError(
                        f"out of memory in mid-run on rank {self.world.rank}; use smaller "
                        "micro-batches, or checkpoint activations"
                    ) from None
                self.probe.halve_micro_batch(len(labels))
                is_again = True
        if self.compute_timer is not None:
            self.compute_timer.stop()
        self.world.stage += 1
        self.optimizer_step(step_sums)

    def _whole_step(self, inputs: Tensor, labels: Tensor, weight: float) -> None:
        """A step without its exceptions, which waits for nothing: what a CUDA graph records."""
        self.optimizer_step(self.forward_backward(self.parallel.module, inputs, labels, weight))

    def forward_backward(
        self,
        model: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        weight: float = 1.0,
        *,
        num_micro_batches: int | None = None,
    ) -> StepSums:
        """Gradients of weight x the mean loss, micro-batch by micro-batch; returns the sums.

        The batch is as of `train_step`, and has as many micro-batches as it needs by default.
        """
        sums = StepSums(labels.device)
        micro_batches = self.micro_batches.split(inputs, labels, number=num_micro_batches)
        for number, (x, y) in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            self.parallel.sync_next(is_last)
            try:
                with self.precision.autocast():
                    output = self.loss_fn(model, x, y)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise InputError(
                    "a batch of 1: BatchNorm needs two values a channel; use larger ones or images"
                ) from None
            share = weight * len(y) / len(labels)
            self.scaler.scale(output.loss * share).backward()
            sums.loss += output.loss.detach() * len(y)
            sums.num_correct += output.num_correct
            if output.mix_weight is not None:
                sums.mix_weight += output.mix_weight
            sums.samples += len(y)
            # One micro-batch on one rank has nothing to be compared with.
            is_measured = number == 1 and (not is_last or self.world.size > 1)
            if self.noise_meter is not None and is_measured:
                scale = self.scaler.scale(torch.ones((), device=labels.device)) * share
                # After the whole step gradients are averaged: this rank's own are in the buckets.
                own = self.noise_meter.squares
                square = own.sum() if is_last else step_stats.squared_norm(self.gradients())
                sums.small_square.copy_(square / scale.square())
                sums.inverse_small.fill_(1 / len(y))
                sums.inverse_big.fill_(weight / (len(labels) * self.world.size))
        return sums

    def optimizer_step(self, step_sums: StepSums) -> None:
        """Unscale, clip, step, clear; a step with a non-finite gradient is skipped.

        The host does not wait to hear of it. Gradients are averaged already, so a non-finite one on
        any rank is non-finite on all. Ranks that train apart clip and skip each for itself.
        """
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = self.gradients()
        norm = self.parallel.norm(gradients)
        skip = ~torch.isfinite(norm)
        if self.config.max_grad_norm:
            norm = self.parallel.clipping_norm(norm)
            factor = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            step_unless_skipped(self.optimizer, skip)
        skip = self.parallel.finish_step(skip)
        if self.noise_meter is not None:
            square = torch.where(step_sums.inverse_small > 0, norm.square(), 0)
            step_sums.big_square.copy_(square)
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.add_step(step_sums, skip)

    def gradients(self) -> list[Tensor]:
        return [each.grad for each in self.parallel.parameters if each.grad is not None]

    def scheduled_lr(self) -> float:
        one_step = 1 / self.batches.steps()
        epochs_done = self.progress.epoch + self.progress.step_in_epoch * one_step
        factor = self.lr_schedule(epochs_done, one_step) * self.progress.lr_factor
        return self.optimizer.defaults["lr"] * (factor * self.batches.lr_factor)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters; a recorded step reads it from a tensor."""
        for group in self.optimizer.param_groups:
            if self.graph is not None:
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def last_lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # ---------------------------------------------------------------- the end of an epoch

    def finish_epoch(self) -> None:
        """Evaluate if it is due, decide the next epoch's batches, save, write the epoch's row."""
        progress = self.progress
        totals = self.sums.totals(self.world)
        self.checkpointer.renew_folder()
        number, every = progress.epoch + 1, max(1, self.config.eval_every)
        try:
            with self.clock.evaluating():
                # after each epoch, so that evaluating changes no training
                self.parallel.sync_replicas(self.statistics())
                if number % every == 0 or number == self.config.epochs:
                    evaluated = self.evaluate(number)
                else:
                    evaluated = self.columns(dict.fromkeys(self.eval_sets))
        except InputError:  # a broken file of the evaluation set costs no epoch
            if not self.parallel.passes_communicate and not self.may_have_diverged(totals):
                self.checkpointer.save()
            raise
        learned: dict[str, float] = {}
        if self.meta_learner is not None:
            self.clock.start()  # as a part of the training
            before = self.meta_learner.meta.wrong
            learned = self.meta_learner.end_epoch(self.model, **self.inference)
            wrong = self.meta_learner.meta.wrong
            has_changed = bool(wrong) != bool(before) or number == self.meta_learner.until
            if has_changed and number < self.config.epochs:
                self.log.info(self.meta_learner.describe(number + 1))
            if self.graph is not None and wrong != before:
                self.graph.invalidate()  # it is a constant of a recorded step
            self.clock.add_elapsed()
        row = self.row(number, totals, evaluated)
        row |= learned | self.parallel.epoch_metrics()
        if self.parallel.passes_communicate:  # torch does not say what it sends
            del row["comm_bytes"], row["wire_bytes"]
        row["skipped_steps"] = math.ceil(totals.skipped)
        if progress.rollbacks:
            row["rollbacks"] = progress.rollbacks
        if totals.skipped:
            why = ", as some are while fp16 finds its scale" if self.scaler.is_enabled() else ""
            self.log.info(
                f"warning: {row['skipped_steps']} of {progress.step_in_epoch} steps of epoch "
                f"{number} were skipped, since a gradient was not finite{why}"
            )
        meter, timer = self.noise_meter, self.compute_timer
        noise = meter.means(totals, progress.step_in_epoch) if meter is not None else None
        row |= self.batches.end_epoch(
            row["train_loss"],
            progress.train_seconds,
            compute_seconds=timer.take_seconds() if timer is not None else None,
            noise=noise,
        )
        best = progress.add_row(row, self.early_stop.chosen_by)
        progress.end_epoch()
        self.world.traffic = Traffic()
        self.sums.start_epoch()
        has_trained = recovery.has_finite_losses(row, is_scaled=self.scaler.is_enabled())
        if has_trained and (not self.may_have_diverged(totals) or self.is_over()):
            self.checkpointer.save(best=best)  # else the epoch is done anew after a return
        self.log.epoch(progress.rows)

    def row(
        self, epoch: float, totals: StepTotals, evaluated: Mapping[str, float | None]
    ) -> dict[str, Any]:
        """A row of metrics.jsonl; of an epoch in which all steps were skipped the loss is nan."""
        progress, samples, world = self.progress, totals.samples, self.world
        row = {
            "epoch": epoch,
            "step": progress.step,
            "samples": progress.samples,
            "seconds": round(progress.seconds, 4),
            "train_seconds": round(progress.train_seconds, 4),
            "compile_seconds": round(progress.compile_seconds, 4),
            "eval_seconds": round(progress.eval_seconds, 4),
            "samples_per_second": round(progress.samples_per_second, 2),
            "train_loss": totals.loss / samples if samples else math.nan,
            "train_accuracy": totals.num_correct / samples if samples else math.nan,
        }
        if totals.mix_weight:
            row["mean_lambda"] = totals.mix_weight / samples
        return row | {
            **evaluated,
            "lr": self.last_lr(),
            "batch_size": self.batches.size,
            "world_size": world.size,
            "devices": world.devices,
            "peak_memory_bytes": peak_memory(world.device),
            "comm_bytes": world.traffic.payload,
            "wire_bytes": round(world.traffic.wire),
        }

    def evaluations_within_epoch(self) -> set[int]:
        """After which steps of this epoch, but for its last, there is an evaluation."""
        steps = self.batches.steps()
        share = max(self.config.eval_every, 1 / steps)
        marks = (round(number * share * steps) for number in range(1, math.ceil(1 / share)))
        return {min(max(mark, 1), steps) for mark in marks} - {steps}

    def evaluate_within_epoch(self) -> None:
        """Evaluate and write a row, with best.pt if it is the best; training is as without it."""
        progress, world = self.progress, self.world
        totals = self.sums.totals(world)  # a GPU has done its steps
        self.clock.add_elapsed()
        own = self.statistics() + self.parallel.parameters * self.parallel.replicas_diverge
        kept = [each.detach().clone() for each in own]
        with world.waiting_at_most(world.limits.start), torch.no_grad():
            self.checkpointer.renew_folder()
            epoch = round(progress.epoch + progress.step_in_epoch / self.batches.steps(), 4)
            try:
                with self.clock.evaluating():
                    average_tensors(own, RankAverager())
                    evaluated = self.evaluate(epoch)
            except InputError:  # as in `finish_epoch`
                for each, value in zip(own, kept):
                    each.copy_(value)
                if not self.parallel.passes_communicate and not self.may_have_diverged(totals):
                    self.checkpointer.save()
                raise
            row = self.row(epoch, totals, evaluated)
            best = progress.add_row(row, self.early_stop.chosen_by)
            if self.may_have_diverged(totals):
                best = None
            is_saved = best is not None or self.is_over()
            shown = self.parts.shown_state() if is_saved else None
            for each, value in zip(own, kept):
                each.copy_(value)
        self.model.train()
        if is_saved:
            self.checkpointer.save(best=best, shown=shown)
        self.log.epoch(progress.rows)
        self.clock.start()

    def evaluate(self, epoch: float) -> dict[str, float | None]:
        """The metrics on each evaluation set, after the ranks' weights have been made the same.

        They are those of the averaged weights where the run averages them. After the last epoch
        they are there over several views of each image as well, where the run has them. The log
        gets how often each class was taken for each. A temperature is fitted to validation rows.
        """
        model = self.model if self.average is None else self.average.model
        evaluated = self.evaluate_on_sets(model)
        rows = evaluated["val"].rows if "val" in evaluated else None
        # as rank 0 computes it: ranks that round otherwise would choose another best epoch
        temperature = self.world.broadcast(fit_temperature(rows) if rows else 1.0)
        self.progress.temperature = temperature
        evaluated = {name: each.calibrated(temperature) for name, each in evaluated.items()}
        self.evaluated = evaluated
        self.log.confusion(epoch, evaluated, self.metadata["classes"])
        columns = self.world.broadcast(self.columns(evaluated))
        if (views := self.config.num_views) > 1 and self.is_over({"epoch": epoch, **columns}):
            evaluated = self.evaluate_on_sets(AveragedViews(model, views))
            columns |= {"views": views, **self.columns(evaluated, suffix="_views")}
        return columns

    def columns(
        self, evaluated: Mapping[str, evaluation.Evaluation | None], suffix: str = ""
    ) -> dict[str, float | None]:
        """The metrics on each set by their names in metrics.jsonl; None of one not evaluated."""
        return {
            f"{name}_{metric}{suffix}": None if result is None else getattr(result, metric)
            for name, result in evaluated.items()
            for metric in self.metrics
        }

    def evaluate_on_sets(self, model: nn.Module) -> dict[str, evaluation.Evaluation]:
        return {
            name: evaluation.evaluate(
                model,
                data,
                num_classes=self.num_classes,
                is_multilabel=self.config.is_multilabel,
                title=f"evaluating on the {evaluation.EVAL_SET_NAMES[name]} set",
                **self.inference,
            )
            for name, data in self.eval_sets.items()
        }

    def log_progress(self, bar: Any) -> None:
        """Show the sums so far; raise Diverged after too many non-finite steps on all ranks."""
        totals = self.sums.read()
        self.has_diverged = totals.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW
        if self.has_diverged and not self.parallel.skips_apart:
            raise Diverged
        self.guard_statistics(int(totals.skipped))
        if totals.samples:
            self.log.status(bar, self.progress, totals, steps=self.batches.steps())

    def may_have_diverged(self, totals: StepTotals) -> bool:
        """Whether the last step was skipped; with fp16, which finds its scale so, the last two."""
        return totals.skipped_in_a_row > self.scaler.is_enabled()

    def statistics(self) -> list[Tensor]:
        """BatchNorm's running statistics, of the averaged weights as well, but of frozen layers."""
        models = [self.model, *([self.average.model] if self.average is not None else [])]
        named = (pair for model in models for pair in model.named_buffers())
        kinds = ("running_mean", "running_var")
        moving = (pair for pair in named if pair[0].rpartition(".")[0] not in self.frozen)
        return [each for name, each in moving if name.endswith(kinds)]

    def copied_statistics(self) -> list[Tensor]:
        return [each.clone() for each in self.statistics()]

    def guard_statistics(self, num_skipped: int) -> None:
        """Give statistics that skipped steps of the epoch have left not finite older values."""
        if num_skipped > self.num_skipped:
            for each, sound in zip(self.statistics(), self.sound_statistics):
                each.copy_(torch.where(each.isfinite(), each, sound))
        self.num_skipped, self.sound_statistics = num_skipped, self.copied_statistics()

    # ---------------------------------------------------------------- recovering

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; with another batch size at about the same place in the epoch."""
        with refused_as(str(checkpoint.file), (InputError,)):
            self.parts.load_state_dict(checkpoint.state)
        if self.graph is not None:
            self.graph.invalidate()  # what the recorded step works on may lie elsewhere now
            make_capturable(self.optimizer)  # also with the checkpoint of a run without graphs
        self.progress.load_state_dict(checkpoint.progress)
        chosen_by = self.early_stop.chosen_by
        if self.progress.best.get("chosen_by", chosen_by) != chosen_by:
            self.progress.since = len(self.progress.rows)  # epochs which another column judged
        elif best_epoch := self.progress.best["epoch"]:
            # back at the column that chose the best epoch, before any epoch had ended
            before = sum(row["epoch"] < best_epoch for row in self.progress.rows)
            self.progress.since = min(self.progress.since, before)
        self.progress.rescale_epoch(checkpoint.state["batching"]["size"], self.batches.size)

    def restore_last(self) -> None:
        """Return to the last checkpoint; collective."""
        self.vote.finish()
        self.restore(self.checkpointer.load_last())
        self.sums.skipped_in_a_row.zero_()
        self.has_diverged = False

    def interrupt(self) -> None:
        """Write last.pt, unless the weights may have diverged, and raise Interrupted."""
        self.guard_statistics(int(self.sums.read().skipped))
        how = "is of an earlier step, as the loss was not finite"
        if not self.may_have_diverged(self.sums.totals(self.world)):
            self.checkpointer.save()
            kept = "could not be written, an older one is kept, if there is one"
            how = kept if self.checkpointer.unsaved else "is written"
        epoch, step = self.progress.epoch + 1, self.progress.step_in_epoch
        raise Interrupted(
            f"interrupted in epoch {epoch}, step {step}; last.pt {how}, resume "
            f"{shlex.quote(str(self.log.folder))} to go on"
        )
