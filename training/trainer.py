"""The run of both scripts: epochs, measuring, saving, resuming, recovering. The step itself is in step.py.

trainer = Trainer(step, schedule, train, batching, {"test": test}, log, Settings(epochs=50, batch_size=128, lr=0.1), header)
totals = trainer.fit()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.device import peak_memory
from distributed.world import Vote, caught_signals
from errors import Interrupted, NonFiniteLoss
from input_pipeline.dataset import BatchedDataset
from optimizers.base import CommunicatingOptimizer
from optimizers.schedules import Schedule
from training import evaluation, train_state
from training.batch_schedule import BatchSchedule
from training.run_log import RunLog
from training.step import HITS, LAMBDA, LOSS, SAMPLES, SKIPPED, SKIPPED_RUN, Step

MAX_SKIPPED_RUN, MAX_ROLLBACKS = (
    10,
    3,
)  # non-finite steps in a row before going back; times of going back
LOOK_EVERY = {
    "cpu": 1,
    "cuda": 20,
}  # steps between two looks at the sums; a GPU is never waited for
PROGRESS = (  # what `Trainer.state` keeps of the run itself
    *("epoch", "step", "step_in_epoch", "samples", "rollbacks", "lr_factor"),
    *("seconds", "train_seconds", "best", "rows"),
)


class Diverged(Exception):
    """Too many non-finite steps in a row."""


@dataclass(frozen=True)
class Settings:
    """Named values of a run. `batch_size` is that of measuring, of one process; `save_every` counts steps, 0 is never."""

    epochs: int
    batch_size: int
    lr: float
    save_every: int = 0


class Trainer:
    """Fits a model to `train` and measures it on the sets of `tests` after each epoch.

    Args:
        step: the training step; knows model, optimizer, precision and process group.
        schedule: the rate before each step is `settings.lr * schedule(progress in epochs)`.
        train, batching: the training set, and which of its rows make a batch.
        tests: data sets by name ('test', 'val'); the best checkpoint is chosen by 'val' where there is one.
        log: the run folder and the console.
        settings: named values.
        header: plain values stored at the top of every checkpoint (script, flags, what inference needs).
    """

    def __init__(
        self,
        step: Step,
        schedule: Schedule,
        train: BatchedDataset,
        batching: BatchSchedule,
        tests: Mapping[str, BatchedDataset],
        log: RunLog,
        settings: Settings,
        metadata: dict[str, Any],
    ) -> None:
        self.do_step, self.schedule, self.train_set, self.batching, self.tests = (
            step,
            schedule,
            train,
            batching,
            tests,
        )
        self.world, self.model, self.log, self.settings, self.metadata = (
            step.world,
            step.model,
            log,
            settings,
            metadata,
        )
        self.vote = Vote(self.world)
        self.keeper = train_state.CheckpointManager(step, batching, log, metadata)
        self.epoch = self.step = self.step_in_epoch = self.rollbacks = self.samples = 0
        self.lr_factor, self.seconds, self.train_seconds = 1.0, 0.0, 0.0
        self.best: dict[str, Any] = {"accuracy": -1.0, "epoch": 0}
        self.rows: list[dict[str, Any]] = []

    # ---------------------------------------------------------------- the run

    def fit(self, resume: dict[str, Any] | None = None) -> dict[str, Any]:
        """Train until the last epoch; returns the best and the totals.

        Args:
            resume: a state to go on from, as `checkpoint.load` returns it.
        Raises:
            Interrupted: SIGINT or SIGTERM came and last.pt was written.
            NonFiniteLoss: the loss stayed non-finite.
        """
        if self.world.device.type == "cuda" and not self.do_step.is_sharded_model:
            self.probe_memory()
        self.do_step.wrap()
        if (
            resume is not None
        ):  # after wrap: DistributedDataParallel gives every rank the buffers of rank 0
            self.load_state(resume)
        if resume is None:
            self.save()  # before there is a log: what has one can be gone on with
        self.log.restart(self.rows)
        with caught_signals() as signals:
            while self.epoch < self.settings.epochs:
                try:
                    stop = self.train_epoch(signals)
                except Diverged:
                    self.roll_back()
                    continue
                self.finish_epoch()
                if stop and self.epoch < self.settings.epochs:
                    self.interrupt()
        self.log.close()
        return self.summary()

    def train_epoch(self, signals: list[int]) -> bool:
        """The steps of this epoch that are not yet done; True where a signal came too late to stop within it."""
        self.model.train()
        optimizer = self.do_step.optimizer
        if isinstance(optimizer, CommunicatingOptimizer):
            optimizer.start_epoch(self.epoch)
        self.batching.start_epoch(self.epoch)
        plan = self.batching.plan(self.epoch, self.step_in_epoch)
        bar = self.log.bar(
            self.epoch + 1,
            self.settings.epochs,
            len(self.train_set),
            self.step_in_epoch * self.batching.size,
        )
        every = LOOK_EVERY[self.world.device.type]
        clock = self.start_clock()
        with (
            bar,
            contextlib.closing(
                self.train_set.batches([part.rows for part in plan], self.epoch)
            ) as batches,
        ):
            for (inputs, labels), part in zip(batches, plan):
                self.set_lr()
                self.do_step(inputs, labels, part.weight)
                self.step += 1
                self.step_in_epoch += 1
                self.samples += part.samples
                bar.update(part.samples)
                if self.step % every == 0:
                    self.look(bar)
                clock = self.lap(clock)
                if self.settings.save_every and self.step % self.settings.save_every == 0:
                    self.save()
                    clock = self.start_clock()
                if self.vote.ask(bool(signals)):
                    self.interrupt()
            self.look(bar, wait=True)
        self.lap(clock)
        return self.vote.finish()

    def finish_epoch(self) -> None:
        """Measure, settle the next epoch's batches, save, write the row."""
        sums = self.do_step.sums
        skipped = int(sums[SKIPPED])
        totals = self.world.sum(sums[:SKIPPED].clone()).tolist()
        row = self.epoch_row(totals) | {"skipped_steps": skipped}
        told = (
            self.do_step.take_seconds(self.train_seconds),
            self.do_step.noise(totals, self.step_in_epoch - skipped),
        )
        row |= self.batching.end_epoch(self.epoch, row["train_loss"], self.train_seconds, *told)
        self.rows.append(row)
        self.epoch, self.step_in_epoch, self.train_seconds, self.world.bytes_sent = (
            self.epoch + 1,
            0,
            0.0,
            0,
        )
        sums[:SKIPPED_RUN] = 0
        accuracy = row["val_accuracy" if "val" in self.tests else "test_accuracy"]
        better = accuracy > self.best["accuracy"]
        if better:
            self.best = {
                "accuracy": accuracy,
                "epoch": row["epoch"],
                "test_accuracy": row.get("test_accuracy"),
            }
        self.save(best=better)
        self.log.epoch(self.rows)
        if advice := self.batching.advice(row["batch_size"]):
            self.log.info(advice)
        if self.do_step.learner is not None:
            self.log.tables("policy", self.do_step.learner.tables(), self.metadata["classes"])

    def epoch_row(self, totals: Sequence[float]) -> dict[str, Any]:
        """What metrics.jsonl holds of the epoch that is over; measures the model."""
        clock = time.perf_counter()
        self.do_step.settle()
        before = self.rows[-1]["samples"] if self.rows else 0
        group = self.do_step.optimizer.param_groups[0]
        row = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "samples": self.samples,
            "seconds": 0.0,
            "train_seconds": round(self.train_seconds, 4),
            "samples_per_second": round((self.samples - before) / max(self.train_seconds, 1e-9), 2),
            "train_loss": totals[LOSS] / max(totals[SAMPLES], 1),
            "train_accuracy": totals[HITS] / max(totals[SAMPLES], 1),
        }
        if totals[LAMBDA]:
            row["mean_lambda"] = totals[LAMBDA] / totals[SAMPLES]
        batch = max(64, self.settings.batch_size)
        for name, data in self.tests.items():
            measured = evaluation.evaluate(
                self.model, data, self.do_step.precision, self.world, batch
            )
            row[f"{name}_loss"], row[f"{name}_accuracy"] = measured
        self.seconds += time.perf_counter() - clock
        row |= {
            "seconds": round(self.seconds, 4),
            "lr": float(group["lr"]),
            "batch_size": self.batching.size,
            "world_size": self.world.size,
            "devices": self.world.devices,
            "peak_memory_bytes": peak_memory(self.world.device),
            "comm_bytes": self.world.bytes_sent,
        }
        optimizer = self.do_step.optimizer
        if isinstance(optimizer, CommunicatingOptimizer):
            row |= optimizer.epoch_metrics()
        return row

    def set_lr(self) -> None:
        """The learning rate of the step about to be done."""
        one_step = 1 / self.batching.steps()
        factor = (
            self.schedule(self.epoch + self.step_in_epoch * one_step, one_step)
            * self.lr_factor
            * self.batching.lr_factor
        )
        self.do_step.set_lr(self.settings.lr * factor)

    def look(self, bar: Any, wait: bool = False) -> None:
        """Show the sums so far and stop a run of non-finite steps."""
        sums = self.do_step.read_sums(wait)
        if sums is None:
            return
        if sums[SKIPPED_RUN] >= MAX_SKIPPED_RUN:
            raise Diverged
        if not bar.disable and sums[SAMPLES]:
            loss, accuracy = sums[LOSS] / sums[SAMPLES], 100 * sums[HITS] / sums[SAMPLES]
            bar.set_postfix_str(f"loss {loss:.4f}, accuracy {accuracy:.2f} %", refresh=False)

    def probe_memory(self) -> None:
        """Try the largest batch of the training set, so that a micro-batch that does not fit is halved before the start."""
        rows = torch.arange(len(self.train_set))
        if self.train_set.lengths is not None:
            rows = torch.argsort(self.train_set.lengths, descending=True)
        largest = max(self.batching.largest_share, self.do_step.micro_batch or 0)
        for inputs, labels in self.train_set.batches([rows[:largest]], epoch=0):
            self.do_step.probe_memory(inputs, labels)
        self.batching.limit(self.do_step.micro_batch)

    def start_clock(self) -> float:
        """The time now, after something that is not training."""
        if self.do_step.watch is not None:
            self.do_step.watch.start()
        return time.perf_counter()

    def lap(self, clock: float) -> float:
        """Book the time since `clock` as training time; returns the time now."""
        now = time.perf_counter()
        self.train_seconds += now - clock
        self.seconds += now - clock
        return now

    def summary(self) -> dict[str, Any]:
        """Best accuracy and totals of the run."""
        train_seconds = sum(row["train_seconds"] for row in self.rows)
        return {
            **self.best,
            "seconds": self.seconds,
            "samples_per_second": self.samples / max(train_seconds, 1e-9),
            "peak_memory_bytes": peak_memory(self.world.device),
            "device_hours": self.seconds * self.world.devices / 3600,
        }

    # ---------------------------------------------------------------- saving and recovering

    def progress(self) -> dict[str, Any]:
        """Where the run is, as plain values."""
        return {name: getattr(self, name) for name in PROGRESS}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. At another batch the epoch goes on close by."""
        self.keeper.restore(state)
        for name, value in state["progress"].items():
            setattr(self, name, value)
        self.step_in_epoch = self.step_in_epoch * state["batching"]["size"] // self.batching.size

    def save(self, best: bool = False) -> None:
        """Write last.pt (and best.pt); collective."""
        self.keeper.save(self.progress(), best)

    def roll_back(self) -> None:
        """Back to the last checkpoint with half the learning rate."""
        rollbacks, factor = self.rollbacks + 1, self.lr_factor / 2
        where = f"epoch {self.epoch + 1}, step {self.step}"
        if rollbacks > MAX_ROLLBACKS:
            raise NonFiniteLoss(
                f"the loss was not finite at {where}, after {MAX_ROLLBACKS} returns to the last checkpoint with half the "
                "learning rate each; lower --lr, add --clip 1 or --warmup 1, or use --precision fp32"
            )
        self.vote.finish()
        self.load_state(self.keeper.load_last())
        self.rollbacks, self.lr_factor = rollbacks, factor
        self.do_step.sums[SKIPPED_RUN] = 0
        self.log.restart(self.rows)
        self.save()
        self.log.info(
            f"{MAX_SKIPPED_RUN} steps in a row were not finite at {where}: back to epoch {self.epoch + 1}, step {self.step}, "
            f"learning rate x {factor:g} (return {rollbacks} of {MAX_ROLLBACKS})"
        )

    def interrupt(self) -> None:
        """Write last.pt and leave."""
        self.save()
        where = f"epoch {self.epoch + 1}, step {self.step}"
        raise Interrupted(
            f"interrupted in {where}; last.pt is written, go on with --resume {self.log.folder}"
        )
