"""A run folder as a report reads it: its rows, its configuration, and what else is there.

run = read_run(Path("runs/my-run"))
run.rows[-1]["test_accuracy"]         # of the last epoch
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from figures.run_logs import Row, read_config, read_object, read_rows
from training.epoch_report import EVAL_SET_NAMES, METRIC_NAMES, EpochResult
from training.progress import best_row
from training.run_log import CONFUSION_FILE


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for each.

    Attributes:
        epoch: after which the rows were counted.
        eval_set: 'test' or 'validation'.
        classes: names.
        counts: (classes, classes) rows by their class and the predicted one.
    """

    epoch: int
    eval_set: str
    classes: list[str]
    counts: np.ndarray


@dataclass(frozen=True)
class ReportedRun:
    """What a run folder holds for a report.

    Attributes:
        name: by which the report calls the run.
        rows: the numbers of each epoch: of a row of metrics.jsonl those that are finite.
        config: content of config.json; empty where that is missing.
        flags: the run's flags by name; empty where they are not known.
        confusion: None where it was not counted.
        policy: the picture of the learned mixing policy, or b"".
    """

    name: str
    rows: list[Row]
    config: dict[str, Any]
    flags: dict[str, Any]
    confusion: Confusion | None
    policy: bytes

    @property
    def chosen_by(self) -> str:
        """The column of metrics.jsonl that chooses the best epoch."""
        eval_set = "val" if any("val_accuracy" in row for row in self.rows) else "test"
        metric = self.flags.get("best_by")
        return f"{eval_set}_{metric if metric in METRIC_NAMES else 'accuracy'}"

    def best_result(self) -> EpochResult | None:
        """What the first of the best epochs reached; None where none was evaluated."""
        row = best_row(self.rows, self.chosen_by)
        return EpochResult(row["epoch"], row) if row else None


def read_run(folder: Path, name: str = "") -> ReportedRun:
    """Read a run folder; the name that the report gives the run is by default the folder's.

    Raises:
        InputError: it is no run folder, or a file in it is damaged.
    """
    rows = [
        {key: x for key, x in row.items() if type(x) in (int, float) and math.isfinite(x)}
        for row in read_rows(folder)
    ]
    config = read_config(folder)
    picture = folder / "policy.png"
    return ReportedRun(
        name=name or str(folder),
        rows=rows,
        config=config,
        flags=config.get("flags", {}),
        confusion=read_confusion(folder / CONFUSION_FILE, {row["epoch"] for row in rows}),
        policy=picture.read_bytes() if picture.is_file() else b"",
    )


def read_confusion(path: Path, epochs: set[int]) -> Confusion | None:
    """Return the confusion on the test set, or else on the validation set.

    It is None where the file is missing, or is of an epoch whose row is not there any more.

    Raises:
        InputError: the file holds no JSON object.
    """
    content = read_object(path)
    name = next((name for name in ("test", "val") if name in content), "")
    if not name or content["epoch"] not in epochs:
        return None
    return Confusion(
        content["epoch"], EVAL_SET_NAMES[name], content["classes"], np.array(content[name])
    )
