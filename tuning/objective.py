"""What a sweep optimises: the validation accuracy, or the time until a target accuracy.

objective = Objective.parse("time_to:0.9")
study = optuna.create_study(direction=objective.direction)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from errors import InputError
from training.epoch_report import training_seconds

NOT_REACHED = 1e6  # seconds; the smallest value of a trial that never reaches the target


@dataclass(frozen=True)
class Objective:
    """The validation accuracy after the last epoch, or the seconds until it reaches `target`.

    Attributes:
        name: the text of --objective.
        target: accuracy in 0..1 to reach, or None to maximise the accuracy.
    """

    name: str = "accuracy"
    target: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read 'accuracy' or 'time_to:0.9'.

        Raises:
            InputError: the text is neither.
        """
        if text == "accuracy":
            return cls()
        kind, _, target = text.partition(":")
        with contextlib.suppress(ValueError):
            if kind == "time_to" and 0 < float(target) <= 1:
                return cls(text, float(target))
        raise InputError(
            f"--objective {text}: expected accuracy, or time_to:0.9 with an accuracy in 0..1"
        )

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """Optuna's direction of the study."""
        return "maximize" if self.target is None else "minimize"

    def intermediate_value(self, row: dict[str, Any]) -> float:
        """Return what the pruner compares after an epoch, in the objective's direction."""
        return row["val_accuracy"] if self.target is None else 1 - row["val_accuracy"]

    def is_reached(self, row: dict[str, Any]) -> bool:
        """Tell whether an epoch has reached the target, so that the trial may stop."""
        return self.target is not None and row["val_accuracy"] >= self.target

    def final_value(self, rows: Sequence[dict[str, Any]]) -> float:
        """Return the value of a complete trial from its rows of metrics.jsonl.

        A trial that never reached the target gets at least NOT_REACHED, less the closer it came.
        """
        if self.target is None:
            return rows[-1]["val_accuracy"]
        for row in rows:
            if self.is_reached(row):
                return training_seconds(row)
        return NOT_REACHED * (2 - max(row["val_accuracy"] for row in rows))
