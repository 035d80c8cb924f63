"""The row of an epoch in metrics.jsonl, the result of an epoch, and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.device import peak_memory
from distributed.world import World
from errors import InputError
from input_pipeline.baseline import Baseline
from training.checkpoint import read_progress
from training.evaluation import EVAL_SET_NAMES, Evaluation
from training.progress import Progress
from training.step_stats import StepTotals


def epoch_columns(
    evaluated: Mapping[str, Evaluation | None], suffix: str = ""
) -> dict[str, float | None]:
    """Loss and accuracy on each evaluation set by their names in metrics.jsonl.

    They are None of a set that was not evaluated after the epoch.
    """
    columns: dict[str, float | None] = {}
    for name, result in evaluated.items():
        columns[f"{name}_loss{suffix}"] = None if result is None else result.loss
        columns[f"{name}_accuracy{suffix}"] = None if result is None else result.accuracy
    return columns


def is_evaluated(row: Mapping[str, Any]) -> bool:
    """Whether there was an evaluation after the epoch of a row of metrics.jsonl."""
    return any(row.get(f"{name}_accuracy") is not None for name in EVAL_SET_NAMES)


def epoch_row(
    progress: Progress,
    totals: StepTotals,
    *,
    evaluated: Mapping[str, float | None],
    lr: float,
    batch_size: int,
    world: World,
) -> dict[str, Any]:
    """One flat object for the epoch that is over, which is still counted as not done.

    Args:
        totals: the epoch's sums over all ranks, without skipped steps; if all of them were skipped,
            loss and accuracy are not a number.
        evaluated: what `epoch_columns` returned.
        batch_size: the global batch.
        world: the ranks; their `bytes_sent` is the epoch's.
    """
    row = {
        "epoch": progress.epoch + 1,
        "step": progress.step,
        "samples": progress.samples,
        "seconds": round(progress.seconds, 4),
        "train_seconds": round(progress.train_seconds, 4),
        "compile_seconds": round(progress.compile_seconds, 4),
        "eval_seconds": round(progress.eval_seconds, 4),
        "samples_per_second": round(progress.epoch_samples / max(progress.train_seconds, 1e-9), 2),
        "train_loss": totals.loss / totals.samples if totals.samples else math.nan,
        "train_accuracy": totals.num_correct / totals.samples if totals.samples else math.nan,
    }
    if totals.mix_weight:
        row["mean_lambda"] = totals.mix_weight / totals.samples
    return row | {
        **evaluated,
        "lr": lr,
        "batch_size": batch_size,
        "world_size": world.size,
        "devices": world.devices,
        "peak_memory_bytes": peak_memory(world.device),
        "comm_bytes": world.bytes_sent,
    }


def training_seconds(row: Mapping[str, Any]) -> float:
    """The time that a run took to reach this row of metrics.jsonl: the clock of every comparison.

    It counts the training steps with their data, and what they need; neither compiling nor
    evaluating. Rows of older logs do not tell these apart: of them it is all.
    """
    return row["seconds"] - row.get("compile_seconds", 0.0) - row.get("eval_seconds", 0.0)


@dataclass(frozen=True)
class EpochResult:
    """What a run had reached after one of its epochs."""

    epoch: int  # its number, counted from 1; 0 is before the first one
    accuracies: Mapping[str, float]  # in 0..1, by the name of the evaluation set
    # The same of outputs that are averaged over views of each image; mostly empty.
    over_views: Mapping[str, float] = field(default_factory=dict)
    views: int = 1

    def show(self) -> str:
        """For example 'epoch 6, validation accuracy 95.00 %, test accuracy 94.00 %'."""
        epoch = f"epoch {self.epoch}" if self.epoch else "before the first epoch"
        return ", ".join([epoch, *show_accuracies(self.accuracies)])

    def show_views(self) -> str:
        """For example 'test accuracy 94.00 %, averaged over 6 views of each image'."""
        accuracies = ", ".join(show_accuracies(self.over_views))
        return f"{accuracies}, averaged over {self.views} views of each image"


def show_accuracies(accuracies: Mapping[str, float]) -> list[str]:
    """Each accuracy in words; they are in 0..1, by the name of the evaluation set."""
    return [
        f"{EVAL_SET_NAMES[name]} accuracy {100 * accuracy:.2f} %"
        for name, accuracy in accuracies.items()
    ]


def epoch_result(rows: Sequence[Mapping[str, Any]], epoch: int) -> EpochResult:
    """The result of an epoch, counted from 1, from the rows of metrics.jsonl."""
    row: Mapping[str, Any] = next((row for row in rows if row["epoch"] == epoch), {})

    def accuracies(suffix: str) -> dict[str, float]:
        keys = {name: f"{name}_accuracy{suffix}" for name in EVAL_SET_NAMES}
        return {name: row[key] for name, key in keys.items() if row.get(key) is not None}

    return EpochResult(epoch, accuracies(""), accuracies("_views"), row.get("views", 1))


@dataclass(frozen=True)
class RunSummary:
    """What a run has reached and what it took."""

    last: EpochResult
    best: EpochResult
    how_chosen: str  # the best epoch, and what that means for its accuracy
    unsaved: Collection[str]  # of 'last' and 'best', what the last save failed to write
    seconds: float  # of all epochs, those before the run was resumed included
    samples_per_second: float  # of the training steps
    peak_memory_bytes: int  # of this rank's device, or of its process on a CPU
    device_hours: float


def how_chosen(epochs: int, evaluations: int, *, chosen_on: str, meta_learned: bool) -> str:
    """How the best of so many epochs was chosen, and what that means for its accuracy.

    Args:
        evaluations: how many of them were evaluated.
        chosen_on: name of the evaluation set that chose the best epoch, 'val' or 'test'.
        meta_learned: whether a mixing policy learned from the rows of 'val'.
    """
    if epochs == 1:
        return "the only epoch"
    if evaluations == 1:
        return "the only epoch that was evaluated"
    if chosen_on == "test":
        return "chosen on the test set, so it is optimistic"
    if meta_learned:
        return "chosen by validation rows, from which the mixing policy learned as well"
    return "chosen by validation rows"


def run_summary(
    progress: Progress,
    world: World,
    *,
    chosen_on: str,
    meta_learned: bool,
    unsaved: Collection[str],
) -> RunSummary:
    """The summary of a run that is over; the arguments are those of `how_chosen`."""
    train_seconds = sum(row["train_seconds"] for row in progress.rows)
    evaluations = sum(map(is_evaluated, progress.rows))
    return RunSummary(
        last=epoch_result(progress.rows, progress.epoch),
        best=epoch_result(progress.rows, progress.best["epoch"]),
        how_chosen=how_chosen(
            progress.epoch, evaluations, chosen_on=chosen_on, meta_learned=meta_learned
        ),
        unsaved=unsaved,
        seconds=progress.seconds,
        samples_per_second=progress.samples / max(train_seconds, 1e-9),
        peak_memory_bytes=peak_memory(world.device),
        device_hours=progress.seconds * world.devices / 3600,
    )


def report_result(
    world: World, summary: RunSummary, *, folder: Path, baseline: Mapping[str, Any]
) -> None:
    """Print the last lines of a run (rank 0): what its last and best epochs reached, and the cost.

    Args:
        summary: what `Trainer.fit` returned.
        folder: the run folder.
        baseline: the fields of a `Baseline` and the name of its evaluation set, or nothing.
    Raises:
        InputError: the last checkpoint could not be written.
    """
    if not world.is_main:
        return
    is_saved = "last" not in summary.unsaved
    missing = "" if is_saved else "; this epoch is not in the file, which could not be written"
    print(f"last.pt: {summary.last.show()}{missing}")
    if summary.last.over_views:
        print(f"last.pt: {summary.last.show_views()}")
    if summary.best.epoch:
        print(f"best.pt: {summary.best.show()} ({summary.how_chosen})")
    else:
        print("best.pt holds no epoch of this run, see above")
    print(
        f"{summary.seconds:.1f} s, {summary.samples_per_second:.0f} samples/s, peak memory "
        f"{summary.peak_memory_bytes / 2**30:.2f} GiB, {summary.device_hours:.4f} "
        f"device-hours; run folder {folder}",
        flush=True,
    )
    found = dict(baseline)
    if (accuracy := summary.last.accuracies.get(found.pop("eval_set", ""))) is not None:
        print(f"last.pt: {Baseline(**found).verdict(accuracy)}", flush=True)
    if not is_saved:
        raise InputError(
            f"{folder}/last.pt could not be written at the end of the run (see the warnings "
            "above); make room on the disk, and train again or go on with --resume"
        )


def describe_checkpoint(path: Path, progress: Mapping[str, Any]) -> str:
    """The file and epoch of a checkpoint; and where best and last differ, those of the other."""
    line = f"weights of {path}: {describe_progress(progress)}"
    other = path.with_name({"last.pt": "best.pt", "best.pt": "last.pt"}.get(path.name, path.name))
    stored = read_progress(other)
    if stored is None or stored["step"] == progress["step"]:
        return line
    return f"{line}; {other.name} is of {describe_progress(stored)}: --checkpoint {other}"


def describe_progress(progress: Mapping[str, Any]) -> str:
    """Where a checkpoint was written, and the accuracies of the epoch before."""
    reached = epoch_result(progress["rows"], progress["epoch"]).show()
    steps = progress["step_in_epoch"]
    return f"{reached}, and {steps} steps of the next epoch" if steps else reached
