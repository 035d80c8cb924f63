"""Where a run is: what a checkpoint needs to go on; its best epoch, and its end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed.world import World
from training.evaluation import EVAL_SET_NAMES, METRIC_NAMES

Row = Mapping[str, Any]  # of metrics.jsonl


def best_row(rows: Sequence[Row], column: str) -> Row | None:
    """The first row with the best finite value, the least of a loss; None where no row has one."""
    known = [row for row in rows if row.get(column) is not None and math.isfinite(row[column])]
    sign = -1 if column.endswith("_loss") else 1
    return max(known, key=lambda row: sign * row[column], default=None)


def whole_epochs(rows: Sequence[Row]) -> list[Row]:
    """The rows of epochs, without those of evaluations within one."""
    return [row for row in rows if isinstance(row["epoch"], int)]


@dataclass(frozen=True)
class EarlyStop:
    """What ends a run before its last epoch. It looks at the rows, which a checkpoint holds."""

    chosen_by: str = "test_accuracy"  # column of metrics.jsonl that chooses the best epoch
    patience: int = 0  # epochs without a better one that end the run; 0 is no limit
    target: float = 0.0  # value that ends the run; 0 is none

    def reason(self, rows: Sequence[Row], *, since: int = 0) -> str:
        """Why the run is over after its last row, or ''; the best is one after `since` rows."""
        if not rows or (value := rows[-1].get(self.chosen_by)) is None:
            return ""
        eval_set, _, metric = self.chosen_by.partition("_")
        name = f"{EVAL_SET_NAMES[eval_set]} {METRIC_NAMES[metric]}"
        is_reached = value <= self.target if metric == "loss" else value >= self.target
        if self.target and is_reached:
            return f"the {name} of {value:.4f} has reached the target, {self.target:g}"
        best = best_row(rows[since:], self.chosen_by)
        best_epoch = best["epoch"] if best else rows[since - 1]["epoch"] if since else 0
        if self.patience and rows[-1]["epoch"] - best_epoch >= self.patience - 1e-6:
            return f"the best {name} is that of epoch {best_epoch} (patience {self.patience})"
        return ""


def duration(seconds: float) -> str:
    """A duration for a sentence: 45 s, 20 min, 2.5 h, 16 h, 3.2 days."""
    for unit, name, largest in ((1, "s", 90), (60, "min", 90), (3600, "h", 48)):
        if seconds < largest * unit:
            digits = 1 if name == "h" and seconds < 9.95 * unit else 0
            return f"{seconds / unit:.{digits}f} {name}".replace(".0 ", " ")
    return f"{seconds / 86400:.1f} days".replace(".0 ", " ")


def device_hours(rows: Sequence[Row]) -> float:
    """What epochs have cost: hours times GPUs, or nodes on CPUs, which may change on the way."""
    ends = [row["seconds"] for row in rows]
    spans = zip(rows, ends, [0.0, *ends])
    return sum((end - start) * row.get("devices", 1) for row, end, start in spans) / 3600


@dataclass
class Progress:
    """Where a run is."""

    epoch: int = 0  # of each of the first four: how many are done
    step: int = 0
    step_in_epoch: int = 0
    samples: int = 0  # of all ranks
    rollbacks: int = 0  # returns to a checkpoint after divergence
    lr_factor: float = 1.0  # what they did to the learning rate
    seconds: float = 0.0  # since the run began, without saving
    train_seconds: float = 0.0  # of this epoch's steps
    compile_seconds: float = 0.0  # of `seconds`, what was compiling
    eval_seconds: float = 0.0  # of `seconds`, what was evaluating
    # The best epoch so far, a fraction if within one, and the column of `rows` that chose it.
    best: dict[str, Any] = field(default_factory=lambda: {"epoch": 0})
    rows: list[dict[str, Any]] = field(default_factory=list)  # those of metrics.jsonl
    since: int = 0  # how many of them are no rivals of `best`
    temperature: float = 1.0  # of the last evaluation's logits, fitted to validation rows

    @property
    def samples_per_second(self) -> float:
        """The speed of this epoch's training."""
        before = next((row["samples"] for row in reversed(whole_epochs(self.rows))), 0)
        return (self.samples - before) / max(self.train_seconds, 1e-9)

    def device_hours(self, world: World) -> float:
        return device_hours([*self.rows, {"seconds": self.seconds, "devices": world.devices}])

    def rescale_epoch(self, old_batch_size: int, new_batch_size: int) -> None:
        """Count the steps of this epoch in batches of another size."""
        self.step_in_epoch = self.step_in_epoch * old_batch_size // new_batch_size

    def end_epoch(self) -> None:
        self.epoch, self.step_in_epoch, self.train_seconds = self.epoch + 1, 0, 0.0

    def add_row(self, row: dict[str, Any], chosen_by: str) -> dict[str, Any] | None:
        """Add a row; returns what `best` is to become, or None if this is not the best.

        Args:
            chosen_by: column of the row that chooses the best epoch. A resumed run with another one
                does not compare its epochs with those before.
        """
        best = self.best
        is_comparable = best.get("chosen_by") == chosen_by
        rivals = [each for each in self.rows if each["epoch"] == best["epoch"]] * is_comparable
        self.rows.append(row)
        if best_row([*rivals, row], chosen_by) is not row:
            return None
        return {"epoch": row["epoch"], "chosen_by": chosen_by}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
