"""The settings of one sweep, and what it optimises.

objective = Objective.parse("time_to:0.9")
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import InputError
from training.epoch_report import training_seconds
from tuning.target_script import TargetScript

Space = dict[str, dict[str, Any]]
"""Of each searched flag, the arguments of Optuna's suggest method and the method's `type`."""


def row_accuracy(row: dict[str, Any]) -> float:
    """Return the accuracy on the test set where a run uses it, or else on held-out rows."""
    return row["test_accuracy" if "test_accuracy" in row else "val_accuracy"]


@dataclass(frozen=True)
class Objective:
    """The accuracy after the last epoch, or the seconds until it reaches `target`."""

    name: str = "accuracy"  # the text of --objective
    target: float | None = None  # accuracy in 0..1 to reach, or None to maximise the accuracy

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
        raise InputError(f"--objective {text}: expected accuracy or, for instance, time_to:0.9")

    def is_reached(self, row: dict[str, Any]) -> bool:
        """Tell whether an epoch has reached the target, so that the trial may stop."""
        return self.target is not None and row["val_accuracy"] >= self.target

    def final_value(self, rows: Sequence[dict[str, Any]]) -> float | None:
        """Return a trial's value from its rows of metrics.jsonl; None if it missed the target."""
        if self.target is None:
            return row_accuracy(rows[-1])
        return next((training_seconds(row) for row in rows if self.is_reached(row)), None)


@dataclass(frozen=True)
class Arm:
    """One side of a race: its name, the script with its flags, and its own learning rate."""

    name: str
    script: TargetScript
    rate: float


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What a sweep searches, how, and where its results go: the flags of `sweep_parser`."""

    script: TargetScript
    space: Space = field(default_factory=dict)
    objective: Objective = Objective()
    val_fraction: float
    trials: int = 0
    sampler: str = "random"
    sweep_seed: int = 0
    pruner: str = "none"
    jobs: int
    nproc: int
    out: Path
    seeds: int = 0  # of the runs in full of a race, or of the best trials of a sweep
    is_strict: bool = False  # a trial that fails, but for divergence, ends all
    keeps_weights: bool = False  # of trials that have ended
