"""The row of an epoch in metrics.jsonl, and the summary of a run."""

from __future__ import annotations

from typing import Any

from backends.device import peak_memory
from distributed.world import World
from training.progress import Progress
from training.step_stats import StepTotals


def epoch_row(
    progress: Progress,
    totals: StepTotals,
    *,
    evaluated: dict[str, float],
    lr: float,
    batch_size: int,
    world: World,
) -> dict[str, Any]:
    """One flat object for the epoch that is over.

    Args:
        progress: of the run, the epoch still being counted as not done.
        totals: the epoch's sums over all ranks.
        evaluated: loss and accuracy on each evaluation set.
        lr: the learning rate of the last step.
        batch_size: the global batch.
        world: the ranks; their `bytes_sent` is the epoch's.
    """
    before = progress.rows[-1]["samples"] if progress.rows else 0
    samples = progress.samples - before
    row = {
        "epoch": progress.epoch + 1,
        "step": progress.step,
        "samples": progress.samples,
        "seconds": round(progress.seconds, 4),
        "train_seconds": round(progress.train_seconds, 4),
        "samples_per_second": round(samples / max(progress.train_seconds, 1e-9), 2),
        "train_loss": totals.loss / max(totals.samples, 1),
        "train_accuracy": totals.num_correct / max(totals.samples, 1),
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


def run_summary(progress: Progress, world: World) -> dict[str, Any]:
    """The best accuracy and the totals of a run."""
    train_seconds = sum(row["train_seconds"] for row in progress.rows)
    return {
        **progress.best,
        "seconds": progress.seconds,
        "samples_per_second": progress.samples / max(train_seconds, 1e-9),
        "peak_memory_bytes": peak_memory(world.device),
        "device_hours": progress.seconds * world.devices / 3600,
    }
