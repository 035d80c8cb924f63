"""The training loop, from the run down to the optimizer step, in reading order.

    fit               the epochs; resumes, rolls back after divergence, stops on a signal
    train_epoch       the steps of an epoch
    train_step        one optimizer step on this rank's share of a global batch
    forward_backward  gradients of the micro-batches
    optimizer_step    unscale, clip, skip what is not finite, step
    evaluate          loss and accuracy on each evaluation set

A step's order is: learning rate, backward, unscale, clip, step, update of the loss scale, clear.
Sums of loss and accuracy stay on the device: within an epoch nothing waits for a GPU.

    trainer = Trainer(model, optimizer, CrossEntropy(), batches, train_set=train, ...)
    summary = trainer.fit(checkpoint)
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backends.cuda_graph import CudaGraphRunner, make_capturable
from backends.execution import without_compilation
from backends.precision import Precision
from distributed import ddp, fsdp
from distributed.comm_hooks import AllReduceHook
from distributed.world import StopVote, World
from errors import InputError, Interrupted, NonFiniteLoss
from input_pipeline.dataset import BatchedDataset
from models.averaged_views import AveragedViews
from optimizers.base import CommunicatingOptimizer, global_norm, step_unless_skipped
from optimizers.schedules import Schedule
from training import evaluation
from training.batch_sampler import DynamicBatchSampler
from training.checkpoint import rng_states, set_rng_states
from training.checkpoint_manager import CheckpointManager
from training.epoch_report import EVAL_SET_NAMES, RunSummary, epoch_columns, epoch_row, run_summary
from training.losses import LossFn
from training.meta_mixup_step import MetaLearner
from training.micro_batches import MicroBatches
from training.progress import Progress
from training.recovery import MAX_ROLLBACKS, MAX_SKIPPED_IN_A_ROW, Diverged, caught_signals
from training.run_log import EpochStatus, RunLog
from training.step_stats import ComputeTimer, NoiseMeter, StepSums, StepTotals, TrainClock
from training.time_estimate import Forecast
from training.train_state import TrainState
from training.weight_average import WeightAverage

RAISED_LR = 2.01  # times the last step's rate; a warm-up at most doubles it in one step
MAX_COUNTED_CLASSES = 1000  # of a confusion matrix: 8 MB, which the ranks add up
LOG_INTERVAL = {"cpu": 1, "cuda": 20}  # steps between two reads of the sums


@dataclass(frozen=True)
class TrainerConfig:
    """Named values of a run.

    Attributes:
        epochs: length of the run.
        lr: the learning rate that the schedule multiplies.
        eval_batch_size: of one process in evaluation.
        accumulation_steps: micro-batches of a step, at least.
        micro_batch_size: samples of one at most; None is no limit.
        max_grad_norm: gradients are clipped to this norm; 0 is no limit.
        average_decay: decay of the average of the weights that is evaluated; 0 is none.
        num_views: views of each image, over which the outputs of the trained model are averaged.
        sync_batch_norm: BatchNorm statistics over all GPUs.
        eval_every: epochs from one evaluation to the next; the last epoch has one in any case.
        save_every: steps between checkpoints within an epoch; 0 is none.
        keep: how many checkpoints stay: last.pt and those before it.
        measure_noise_scale: sum what the gradient noise scale is estimated from.
        time_compute: measure each rank's seconds without waiting for others.
        record_cuda_graph: record the step once for each shape of batch, and replay it.
        long_run_hint: a line for the user of a run of many hours: what makes it shorter.
    """

    epochs: int = 1
    lr: float = 0.1
    eval_batch_size: int = 128
    accumulation_steps: int = 1
    micro_batch_size: int | None = None
    max_grad_norm: float = 0.0
    average_decay: float = 0.0
    num_views: int = 1
    sync_batch_norm: bool = False
    eval_every: int = 1
    save_every: int = 0
    keep: int = 1
    measure_noise_scale: bool = False
    time_compute: bool = False
    record_cuda_graph: bool = False
    long_run_hint: str = ""


class Trainer:
    """Fits a model to a training set and evaluates it between epochs.

    Args:
        model: on its device, not wrapped for data parallelism.
        optimizer: over parameters of `model`. A `CommunicatingOptimizer` exchanges what it needs by
            itself and takes each rank's own gradients; for any other one they are averaged.
        loss_fn: what a step computes of a batch.
        batches: which rows of the training set make a batch.
        train_set: the training set.
        eval_sets: by name ('test', 'val'); the best checkpoint is chosen by 'val' where there is
            one.
        lr_schedule: (progress in epochs, one step in epochs) -> multiple of `config.lr`.
        precision: autocast and loss scaling.
        world: the ranks.
        log: the run folder and the console.
        config: named values.
        metadata: plain values stored at the top of every checkpoint: script, flags, what inference
            needs.
        comm_hook: what data parallelism sends; None is averaged gradients.
        meta_learner: learns beside the model, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        batches: DynamicBatchSampler,
        *,
        train_set: BatchedDataset,
        eval_sets: Mapping[str, BatchedDataset],
        lr_schedule: Schedule,
        precision: Precision,
        world: World,
        log: RunLog,
        config: TrainerConfig,
        metadata: dict[str, Any],
        comm_hook: AllReduceHook | None = None,
        meta_learner: MetaLearner | None = None,
    ) -> None:
        self.model, self.optimizer, self.scaler = precision.prepare(model, optimizer)
        self.parallel_model: nn.Module = self.model  # `wrap_model` wraps it
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.loss_fn = loss_fn
        self.batches = batches
        self.train_set = train_set
        self.eval_sets = eval_sets
        self.chosen_on = "val" if "val" in eval_sets else "test"  # what the best is chosen by
        self.lr_schedule = lr_schedule
        self.precision = precision
        self.world = world
        self.log = log
        self.config = config
        self.metadata = metadata
        self.comm_hook = comm_hook or AllReduceHook(world)
        self.meta_learner = meta_learner

        self.communicating: CommunicatingOptimizer | None = None
        if isinstance(self.optimizer, CommunicatingOptimizer):
            self.communicating = self.optimizer
        self.replicas_diverge = self.communicating is not None or self.comm_hook.replicas_diverge
        self.is_sharded = fsdp.is_sharded(self.model)
        self.sharded_bytes = fsdp.bytes_per_micro_batch(self.model) if self.is_sharded else (0, 0)
        self.sums = StepSums(world.device)
        self.micro_batches = MicroBatches(config.accumulation_steps, config.micro_batch_size)
        self.progress = Progress()
        self.samples_before_epoch = 0
        self.compute_timer = ComputeTimer(world.device) if config.time_compute else None
        self.clock = TrainClock(self.progress, self.compute_timer)
        self.forecast = Forecast(log.clock, epochs=config.epochs, hint=config.long_run_hint)
        self.step_lr = 0.0  # of the last step; on the host, also where the optimizer's is not
        self.grad_norm = torch.zeros((), device=world.device)  # of the last step, before clipping
        self.noise_meter: NoiseMeter | None = None
        if config.measure_noise_scale:
            self.noise_meter = NoiseMeter(self.parameters, world)
            self.comm_hook.observers.append(self.noise_meter.local_norm.add)
            if world.size == 1:
                self.micro_batches.require(2)  # which are compared
        if self.compute_timer is not None:
            self.comm_hook.observers.append(self.compute_timer.gradients_ready)
        self.graph: CudaGraphRunner | None = None
        if config.record_cuda_graph:
            self.graph = CudaGraphRunner(self._whole_step)
            make_capturable(self.optimizer)
        self.average: WeightAverage | None = None
        if config.average_decay:
            self.average = WeightAverage(self.model, config.average_decay)
        self.vote = StopVote(world)
        train_state = TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            comm_hook=self.comm_hook,
            batches=batches,
            sums=self.sums,
            world=world,
            compute_timer=self.compute_timer,
            meta_learner=meta_learner,
            replicas_diverge=self.replicas_diverge,
            average=self.average,
        )
        self.checkpoints = CheckpointManager(train_state, log, metadata, keep=config.keep)

    # ---------------------------------------------------------------- the run

    def fit(self, checkpoint: dict[str, Any] | None = None) -> RunSummary:
        """Train until the last epoch; returns the last and best epochs and the totals of the run.

        Args:
            checkpoint: a state to go on from, as `training.checkpoint.load` returns it; it is empty
                afterwards.
        Raises:
            Interrupted: SIGINT or SIGTERM came, and last.pt was written.
            NonFiniteLoss: the loss stayed non-finite.
        """
        if self.world.device.type == "cuda" and not self.is_sharded:
            self.probe_memory()
        self.wrap_model()
        self.world.set_time_limit(self.world.limits.start)  # by now all process groups are made
        if checkpoint is None:
            self.save()  # first, so that every run that has a log can be resumed
        else:  # after wrapping, which gives every rank the buffers of rank 0
            self.arrange_buckets(checkpoint["progress"]["step"])
            self.restore(checkpoint)
            path = Path(checkpoint["file"])
            self.checkpoints.resume_from(path, self.progress)
            if path.resolve().parent != self.log.folder.resolve():
                self.save()
            self.report_raised_lr()
            checkpoint.clear()  # it would keep its file on the disk when another takes the name
        self.log.begin(self.progress.rows)
        try:
            self.train_epochs()
        finally:
            self.log.close()
        return run_summary(
            self.progress,
            self.world,
            chosen_on=self.chosen_on,
            meta_learned=self.meta_learner is not None,
            unsaved=self.checkpoints.unsaved,
        )

    def train_epochs(self) -> None:
        """Do the epochs that are not yet done.

        Raises:
            Interrupted, NonFiniteLoss: as of `fit`.
        """
        with caught_signals() as signals:
            while self.progress.epoch < self.config.epochs:
                try:
                    stop = self.train_epoch(signals)
                except Diverged:
                    self.roll_back()
                    continue
                with self.world.waiting_at_most(self.world.limits.start):
                    self.finish_epoch()
                if stop and self.progress.epoch < self.config.epochs:
                    self.interrupt()

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
        if self.communicating is not None:
            self.communicating.start_epoch(progress.epoch)
        self.batches.start_epoch(progress.epoch)
        plan = self.batches.plan(progress.epoch, progress.step_in_epoch)
        total = len(self.train_set)
        done = total - sum(planned.samples for planned in plan)
        self.samples_before_epoch = progress.samples - done
        bar = self.log.bar(progress.epoch + 1, self.config.epochs, total=total, done=done)
        data = self.train_set.batches([planned.rows for planned in plan], progress.epoch)
        one_shape = self.train_set.lengths is None  # but for the last batches of an epoch
        self.clock.start()
        with bar, contextlib.closing(data):
            for (inputs, labels), planned in zip(data, plan):
                self.set_lr(self.scheduled_lr())
                with without_compilation(one_shape and planned.samples != self.batches.size):
                    self.train_step(inputs, labels, planned.weight, samples=planned.samples)
                if self.average is not None:
                    self.average.update(self.model)
                self.world.first_step_done()
                progress.step += 1
                progress.step_in_epoch += 1
                progress.samples += planned.samples
                bar.update(planned.samples)
                self.clock.add_elapsed()
                if progress.step % LOG_INTERVAL[self.world.device.type] == 0:
                    self.log_progress(bar)
                if self.config.save_every and progress.step % self.config.save_every == 0:
                    self.save()
                    self.clock.start()
                if self.vote.ask(bool(signals)):
                    self.interrupt()
            self.log_progress(bar, wait=True)
        self.clock.add_elapsed()
        return self.vote.finish()

    # ---------------------------------------------------------------- one step

    def train_step(
        self, inputs: Tensor, labels: Tensor, weight: float = 1.0, *, samples: int | None = None
    ) -> None:
        """One optimizer step. Micro-batches are halved while the GPU's memory runs out.

        Args:
            inputs, labels: this rank's share of the global batch, (batch, ...) and (batch,).
            weight: of its mean loss in the mean over the ranks: share x ranks / global batch.
            samples: rows of the global batch; None is as many on every rank as on this one.
        Raises:
            InputError: the batch is too small for BatchNorm, or too large for the memory.
        """
        if self.graph is not None:
            self.graph(inputs, labels, weight=weight)
            return
        meta_learner = self.meta_learner
        number = None
        if self.is_sharded and samples is not None:
            number = self.micro_batches.number_on_all_ranks(samples, self.world.size)
        while True:
            try:
                if meta_learner is not None:
                    learner, meta_learner = meta_learner, None  # once, also if memory runs out
                    self._meta_update(learner, inputs, labels)
                step_sums = self.forward_backward(
                    self.parallel_model, inputs, labels, weight, num_micro_batches=number
                )
                break
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise InputError(
                    "--bs 1: BatchNorm needs two values a channel; use a larger --bs or image"
                ) from None
            except torch.cuda.OutOfMemoryError:
                if self.world.size > 1:  # the others are inside a collective: no going back alone
                    raise InputError(
                        f"out of memory in mid-run on rank {self.world.rank}; use a smaller --bs"
                    ) from None
                self.halve_micro_batch(len(labels))
        if self.compute_timer is not None:
            self.compute_timer.stop()
        self.optimizer_step(step_sums)

    def _meta_update(self, meta_learner: MetaLearner, inputs: Tensor, labels: Tensor) -> None:
        """Let the meta-learner learn on the first micro-batch of the step."""
        x, y = self.micro_batches.split(inputs, labels)[0]
        lr = self.last_lr()
        meta_learner.before_step(
            self.model, x, y, lr=lr, precision=self.precision, scaler=self.scaler
        )

    def _whole_step(self, inputs: Tensor, labels: Tensor, weight: float) -> None:
        """A step without its exceptions, which waits for nothing: what a CUDA graph records."""
        self.optimizer_step(self.forward_backward(self.parallel_model, inputs, labels, weight))

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

        Args:
            model: wrapped for data parallelism, or not.
            inputs, labels, weight: as of `train_step`.
            num_micro_batches: None is as many as this rank's share needs.
        """
        sums = StepSums(labels.device)
        micro_batches = self.micro_batches.split(inputs, labels, number=num_micro_batches)
        for number, (x, y) in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            sync = contextlib.nullcontext() if is_last else ddp.no_gradient_sync(model)
            with sync:
                with self.precision.autocast():
                    output = self.loss_fn(model, x, y)
                share = weight * len(y) / len(labels)
                self.scaler.scale(output.loss * share).backward()
            weight_bytes, gradient_bytes = self.sharded_bytes
            self.world.bytes_sent += weight_bytes + (gradient_bytes if is_last else 0)
            sums.loss += output.loss.detach() * len(y)
            sums.num_correct += output.num_correct
            if output.mix_weight is not None:
                sums.mix_weight += output.mix_weight
            sums.samples += len(y)
            if self.noise_meter is not None and number == 1:
                self.noise_meter.add_small(
                    sums,
                    self.gradients(),
                    scale=self.scaler.scale(torch.ones((), device=labels.device)) * share,
                    samples=len(y),
                    is_averaged=is_last,
                )
                sums.inverse_big.fill_(weight / (len(labels) * self.world.size))
        return sums

    def optimizer_step(self, step_sums: StepSums) -> None:
        """Unscale, clip, step, clear; all ranks skip a step with a non-finite gradient.

        The host does not wait to hear of it. Gradients are averaged already, so a non-finite one on
        any rank is non-finite on all. Where replicas diverge, the ranks tell each other.
        """
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        gradients = self.gradients()
        norm = global_norm(gradients)
        if self.is_sharded:
            norm = fsdp.unshard(norm)
        self.grad_norm.copy_(norm)
        skip = ~torch.isfinite(norm)
        if self.replicas_diverge and self.communicating is None:
            skip = self.world.sum(skip.float()) > 0
        if self.config.max_grad_norm:
            if self.replicas_diverge:  # the root of the mean square over the ranks
                norm = (self.world.sum(norm.square()) / self.world.size).sqrt()
            factor = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            step_unless_skipped(self.optimizer, skip)
        if self.communicating is not None:
            skip = self.communicating.skipped > 0
            self.world.bytes_sent += self.communicating.take_bytes()
        if self.noise_meter is not None:
            step_sums.big_square.copy_(norm.square())
        self.comm_hook.after_step(self.parameters)
        self.optimizer.zero_grad(set_to_none=True)
        self.sums.add_step(step_sums, skip)

    def gradients(self) -> list[Tensor]:
        """The gradients of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def scheduled_lr(self) -> float:
        """The learning rate of the step about to be done."""
        one_step = 1 / self.batches.steps()
        epochs_done = self.progress.epoch + self.progress.step_in_epoch * one_step
        factor = self.lr_schedule(epochs_done, one_step)
        return self.config.lr * (factor * self.progress.lr_factor * self.batches.lr_factor)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters.

        A recorded step reads it from a tensor on the device. One on the CPU, as a checkpoint has
        it, would be read while recording, and never again.
        """
        self.step_lr, device = lr, self.world.device
        for group in self.optimizer.param_groups:
            rate, own_lr = group["lr"], lr * group.get("lr_scale", 1.0)
            if self.graph is None:
                group["lr"] = own_lr
            elif isinstance(rate, Tensor) and rate.device.type == device.type:
                rate.fill_(own_lr)
            else:
                group["lr"] = torch.tensor(own_lr, device=device)

    def last_lr(self) -> float:
        """The learning rate of the last step, without the factors of layers."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"]) / group.get("lr_scale", 1.0)

    # ---------------------------------------------------------------- the end of an epoch

    def finish_epoch(self) -> None:
        """Evaluate if it is due, decide the next epoch's batches, save, write the epoch's row."""
        progress = self.progress
        totals = self.sums.totals(self.world)
        start = time.perf_counter()
        self.sync_replicas()  # after each epoch, so that evaluating changes no training
        number = progress.epoch + 1
        is_evaluated = number % self.config.eval_every == 0 or number == self.config.epochs
        evaluated = (
            self.evaluate() if is_evaluated else epoch_columns(dict.fromkeys(self.eval_sets))
        )
        eval_seconds = time.perf_counter() - start
        progress.seconds += eval_seconds
        progress.eval_seconds += eval_seconds
        row = epoch_row(
            progress,
            totals,
            evaluated=evaluated,
            lr=self.last_lr(),
            batch_size=self.batches.size,
            world=self.world,
        )
        if self.communicating is not None:
            row |= self.communicating.epoch_metrics()
        row["skipped_steps"] = int(totals.skipped)
        if totals.skipped:
            why = ", as some are while fp16 finds its scale" if self.scaler.is_enabled() else ""
            self.log.info(
                f"warning: {totals.skipped:.0f} of {progress.step_in_epoch} steps of epoch "
                f"{progress.epoch + 1} were skipped, since a gradient was not finite{why}"
            )
        row |= self.batches.end_epoch(
            row["train_loss"],
            progress.train_seconds,
            compute_seconds=self.clock.take_compute_seconds(),
            noise=self._noise_means(totals),
        )
        progress.rows.append(row)
        progress.epoch, progress.step_in_epoch, progress.train_seconds = progress.epoch + 1, 0, 0.0
        self.world.reset_bytes()
        self.sums.start_epoch()
        accuracy = row[f"{self.chosen_on}_accuracy"]  # or None
        best = progress.best
        if best.get("chosen_on", self.chosen_on) != self.chosen_on:
            best = Progress().best  # a resumed run with other evaluation sets cannot compare them
        is_best = accuracy is not None and accuracy > best["accuracy"]
        if is_best:
            progress.best = {
                "chosen_on": self.chosen_on,
                "accuracy": accuracy,
                "epoch": row["epoch"],
                "test_accuracy": row.get("test_accuracy"),
            }
        self.checkpoints.save(progress, previous_best=best if is_best else None)
        self.forecast.observe(progress.epoch)
        self.log.epoch(progress.rows, self.forecast.seconds_left())
        if advice := self.batches.advice(row["batch_size"]):
            self.log.info(advice)
        if self.meta_learner is not None:
            self.log.tables("policy", self.meta_learner.tables(), self.metadata["classes"])

    def evaluate(self) -> dict[str, float | None]:
        """Loss and accuracy on each evaluation set, after `sync_replicas`.

        They are those of the averaged weights where the run averages them. After the last epoch
        they are there over several views of each image as well, where the run has them. The log
        gets how often each class was taken for each.
        """
        model = self.model if self.average is None else self.average.model
        classes = self.metadata.get("classes", ())
        evaluated = self._evaluate_model(
            model, len(classes) if len(classes) <= MAX_COUNTED_CLASSES else 0
        )
        epoch = self.progress.epoch + 1
        confusions = {name: each.confusion for name, each in evaluated.items()}
        self.log.confusion(epoch, confusions, classes)
        columns = epoch_columns(evaluated)
        if self.config.num_views > 1 and epoch == self.config.epochs:
            over_views = self._evaluate_model(AveragedViews(model, self.config.num_views))
            columns |= {"views": self.config.num_views, **epoch_columns(over_views, "_views")}
        return columns

    def _evaluate_model(
        self, model: nn.Module, count_classes: int = 0
    ) -> dict[str, evaluation.Evaluation]:
        """What a model does on each evaluation set, by its name."""
        return {
            name: evaluation.evaluate(
                model,
                data,
                precision=self.precision,
                world=self.world,
                batch_size=self.config.eval_batch_size,
                count_classes=count_classes,
                title=f"evaluating on the {EVAL_SET_NAMES[name]} set",
            )
            for name, data in self.eval_sets.items()
        }

    def sync_replicas(self) -> None:
        """Give all ranks the same weights and BatchNorm statistics; collective.

        The averages of the weights have statistics of their own, which are made the same as well.
        """
        self.world.average_buffers(self.model)
        if self.average is not None:
            self.world.average_buffers(self.average.model)
        if self.communicating is not None:
            self.communicating.average_weights()
            self.world.bytes_sent += self.communicating.take_bytes()
        else:
            self.comm_hook.sync_replicas(self.parameters)

    def _noise_means(self, totals: StepTotals) -> dict[str, float] | None:
        """The arguments of `dynamic_batch.noise_scale` for this epoch, or None."""
        if self.noise_meter is None:
            return None
        return self.noise_meter.means(totals, self.progress.step_in_epoch)

    def log_progress(self, bar: Any, wait: bool = False) -> None:
        """Show the sums so far and the time left, and stop a series of non-finite steps.

        Args:
            bar: of the epoch.
            wait: for a GPU to have done all steps of the epoch.
        Raises:
            Diverged: too many steps in a row were not finite.
        """
        totals = self.sums.read(wait)
        if totals is None:
            return
        if totals.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise Diverged
        progress = self.progress
        samples = progress.samples - self.samples_before_epoch
        self.forecast.observe(progress.epoch + samples / len(self.train_set))
        for line in self.forecast.announcement():
            self.log.info(line)
        if not totals.samples:
            return
        status = EpochStatus(
            epoch=progress.epoch + 1,
            epochs=self.config.epochs,
            step=progress.step_in_epoch,
            steps=self.batches.steps(),
            loss=totals.loss / totals.samples,
            accuracy=totals.num_correct / totals.samples,
            samples_per_second=samples / max(progress.train_seconds, 1e-9),
            seconds_left=self.forecast.seconds_left(),
            run_step=progress.step,
            lr=self.step_lr,
            grad_norm=self.grad_norm,
        )
        self.log.status(status, bar)

    # ---------------------------------------------------------------- parallelism and memory

    def wrap_model(self) -> None:
        """Wrap the model for data parallelism; collective.

        It comes once it is known whether there are micro-batches. A sharded model stays as it is,
        and so does one whose optimizer communicates by itself.
        """
        if self.communicating is not None or self.is_sharded:
            return
        several = self.world.max_over_ranks(int(self.micro_batches.several))
        self.parallel_model = ddp.wrap(
            self.model,
            self.world,
            hook=self.comm_hook,
            sync_batch_norm=self.config.sync_batch_norm,
            static_graph=not several,
        )
        self.comm_hook.start(self.parameters)

    def arrange_buckets(self, steps: int) -> None:
        """Let DDP lay out its buckets of gradients as it has after so many steps; collective.

        It does so anew after one or two steps, in the order in which gradients become ready. A sum
        over more than two ranks depends on the layout by its rounding, so a resumed run needs the
        right one from its first step on. What else this changes, `restore` sets anew.
        """
        if self.world.size <= 2 or not ddp.is_wrapped(self.parallel_model):
            return
        rows = torch.arange(min(self.batches.largest_share, len(self.train_set)))
        for inputs, labels in self.train_set.batches([rows] * min(steps, 2), epoch=0):
            self.probe_step(self.parallel_model, inputs, labels)
        self.world.reset_bytes()

    def probe_memory(self) -> None:
        """Try the largest batch, so that a micro-batch that does not fit is halved at the start.

        Weights, BatchNorm statistics and random states are left as they were.
        """
        rows = torch.arange(len(self.train_set))
        if self.train_set.lengths is not None:
            rows = torch.argsort(self.train_set.lengths, descending=True)
        largest = max(self.batches.largest_share, self.micro_batches.limit or 0)
        for inputs, labels in self.train_set.batches([rows[:largest]], epoch=0):
            self.probe_step(self.model, inputs, labels)
        self.batches.limit(self.micro_batches.limit)

    def probe_step(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        """Halve this rank's micro-batch until a batch fits, without an optimizer step."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        states = rng_states(self.world.device)
        self.model.train()
        while True:
            try:
                # Not for a batch that may never come; DDP's layout depends on the compiled model.
                with without_compilation(model is self.model):
                    self.forward_backward(model, inputs, labels)
                break
            except torch.cuda.OutOfMemoryError:
                self.halve_micro_batch(len(labels))
        self.optimizer.zero_grad(set_to_none=True)
        for buffer, before in zip(self.model.buffers(), buffers):
            buffer.copy_(before)
        set_rng_states(states, self.world.device)

    def halve_micro_batch(self, batch_size: int) -> None:
        """Go on with the same global batch in half the memory.

        Raises:
            InputError: a micro-batch of one sample does not fit.
        """
        message = self.micro_batches.halve(batch_size)
        self.optimizer.zero_grad(set_to_none=True)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        self.log.info(message)

    # ---------------------------------------------------------------- saving and recovering

    def save(self) -> None:
        """Write a new last.pt; collective."""
        with self.world.waiting_at_most(self.world.limits.start):
            self.checkpoints.save(self.progress)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint; with another batch size at about the same place in the epoch."""
        self.checkpoints.train_state.load_state_dict(checkpoint)
        if self.graph is not None:
            self.graph.invalidate()  # what the recorded step works on may lie elsewhere now
            make_capturable(self.optimizer)  # also with the checkpoint of a run without graphs
        self.progress.load_state_dict(checkpoint["progress"])
        stored_size = checkpoint["batching"]["size"]
        self.progress.rescale_epoch(stored_size, self.batches.size)

    def report_raised_lr(self) -> None:
        """Say so if a resumed run goes on with a much larger learning rate than it had.

        Other flags can do that: --epochs moves the end of a schedule, --lr scales it.
        """
        before, now = self.last_lr(), self.scheduled_lr()
        is_over = self.progress.epoch >= self.config.epochs
        if self.progress.step and not is_over and 0 < before < now / RAISED_LR:
            self.log.info(
                f"warning: the learning rate goes on at {now:.3g}, and was {before:.3g} in the "
                "last step: --lr, --epochs or the schedule are not those of the checkpoint"
            )

    def roll_back(self) -> None:
        """Return to the last checkpoint with half the learning rate.

        Raises:
            NonFiniteLoss: it has been done too often.
        """
        progress = self.progress
        rollbacks, lr_factor = progress.rollbacks + 1, progress.lr_factor / 2
        where = f"epoch {progress.epoch + 1}, step {progress.step}"
        if rollbacks > MAX_ROLLBACKS:
            raise NonFiniteLoss(
                f"the loss was not finite at {where}, after {MAX_ROLLBACKS} returns to the last "
                "checkpoint with half the learning rate each; lower --lr, add --clip 1 or "
                "--warmup 1, or use --precision fp32"
            )
        self.vote.finish()
        self.restore(self.checkpoints.load_last())
        progress.rollbacks, progress.lr_factor = rollbacks, lr_factor
        self.sums.skipped_in_a_row.zero_()
        self.log.restart(progress.rows)
        self.save()
        self.log.info(
            f"{MAX_SKIPPED_IN_A_ROW} steps in a row were not finite at {where}: back to epoch "
            f"{progress.epoch + 1}, step {progress.step}, learning rate x {lr_factor:g} "
            f"(return {rollbacks} of {MAX_ROLLBACKS})"
        )

    def interrupt(self) -> None:
        """Write last.pt and leave.

        Raises:
            Interrupted: always.
        """
        self.save()
        where = f"epoch {self.progress.epoch + 1}, step {self.progress.step}"
        if self.checkpoints.unsaved:
            raise Interrupted(
                f"interrupted in {where}; last.pt could not be written, so that --resume "
                f"{self.log.folder} would go on from the save before, if there is one"
            )
        raise Interrupted(
            f"interrupted in {where}; last.pt is written, go on with --resume "
            f"{shlex.quote(str(self.log.folder))}"
        )
