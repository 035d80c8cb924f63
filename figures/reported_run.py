"""A run folder as a report reads it: its rows, its configuration, and what else is there.

run = read_run(Path("runs/my-run"))
run.values("test_accuracy")           # [(1, 0.41), (2, 0.55)]: by epoch
run.confusion.per_class()             # precision, recall, F1 and rows of each class
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import InputError
from figures.run_logs import device_hours, read_config, read_rows
from figures.svg_charts import Point
from training.epoch_report import (
    EVAL_SET_NAMES,
    EpochResult,
    epoch_result,
    how_chosen,
    is_evaluated,
    training_seconds,
)
from training.run_log import CONFUSION_FILE

LARGEST = 1e100  # what is larger is as good as infinite, and is not drawn
PNG = b"\x89PNG\r\n"  # how the file of a picture begins
EVAL_SETS = ("test", "val")  # in the order in which one is preferred


@dataclass(frozen=True)
class ClassScores:
    """What a model makes of one class; None where it is not defined.

    Attributes:
        precision: share of the rows that were taken for this class and are of it.
        recall: share of the rows of this class that were taken for it.
        f1: harmonic mean of the two.
        rows: of this class.
    """

    precision: float | None
    recall: float | None
    f1: float | None
    rows: int


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for each.

    Attributes:
        epoch: after which this was counted.
        eval_set: 'test' or 'val'.
        classes: names.
        counts: (classes, classes) rows by their class and the predicted one.
    """

    epoch: int
    eval_set: str
    classes: list[str]
    counts: list[list[int]]

    def per_class(self) -> list[ClassScores]:
        """The scores of each class."""
        predicted = [sum(column) for column in zip(*self.counts)]
        scores = []
        for number, row in enumerate(self.counts):
            correct, rows = row[number], sum(row)
            scores.append(
                ClassScores(
                    precision=share(correct, predicted[number]),
                    recall=share(correct, rows),
                    f1=share(2 * correct, rows + predicted[number]),
                    rows=rows,
                )
            )
        return scores

    def mistakes(self) -> list[tuple[int, str, str]]:
        """(rows, class, predicted class) of all mistakes, the most frequent first."""
        found = [
            (count, self.classes[i], self.classes[j])
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if i != j and count
        ]
        return sorted(found, key=lambda mistake: -mistake[0])


def share(part: int, whole: int) -> float | None:
    """A share, or None of nothing."""
    return part / whole if whole else None


@dataclass(frozen=True)
class ReportedRun:
    """What a run folder holds for a report.

    Attributes:
        name: by which the report calls the run.
        folder: the run folder.
        rows: the numbers of each epoch: of a row of metrics.jsonl what is finite.
        config: content of config.json; empty where that is missing.
        confusion: None where it was not counted.
        policy: the picture of the learned mixing policy, or b"".
    """

    name: str
    folder: Path
    rows: list[dict[str, float]]
    config: dict[str, Any] = field(default_factory=dict)
    confusion: Confusion | None = None
    policy: bytes = b""

    @property
    def flags(self) -> dict[str, Any]:
        """The run's flags by name; empty where they are not known."""
        flags = self.config.get("flags")
        return flags if isinstance(flags, dict) else {}

    @property
    def chosen_on(self) -> str:
        """The evaluation set that chooses the best epoch."""
        return "val" if any("val_accuracy" in row for row in self.rows) else "test"

    def values(self, key: str, scale: float = 1.0) -> list[Point]:
        """(epoch, value) of each epoch, the value None where a row should have one."""
        return [(row["epoch"], scaled(row.get(key), scale)) for row in self._rows_of(key)]

    def values_in_time(self, key: str, unit: float, scale: float = 1.0) -> list[Point]:
        """(training time, value) of each epoch whose time is known; the time in `unit` seconds."""
        return [
            (training_seconds(row) / unit, scaled(row.get(key), scale))
            for row in self._rows_of(key)
            if "seconds" in row
        ]

    def _rows_of(self, key: str) -> list[dict[str, float]]:
        """The epochs that may have a value: of an evaluation set only those that were evaluated."""
        if key.partition("_")[0] not in EVAL_SETS:
            return self.rows
        return [row for row in self.rows if is_evaluated(row)]

    def last(self, key: str) -> float | None:
        """A value after the last epoch, or None."""
        return self.rows[-1].get(key)

    def total(self, key: str) -> float | None:
        """The sum of a value over all epochs, or None."""
        known = [row[key] for row in self.rows if key in row]
        return sum(known) if known else None

    def last_result(self) -> EpochResult:
        """The accuracies after the last epoch."""
        return epoch_result(self.rows, int(self.rows[-1]["epoch"]))

    def best_result(self) -> EpochResult | None:
        """The accuracies after the first of the best epochs; None where none was evaluated."""
        key = f"{self.chosen_on}_accuracy"
        evaluated = [row for row in self.rows if key in row]
        if not evaluated:
            return None
        return epoch_result(self.rows, int(max(evaluated, key=lambda row: row[key])["epoch"]))

    def how_best_was_chosen(self) -> str:
        """A remark on the accuracy of the best epoch."""
        meta_learned = self.flags.get("mixup") == "meta"
        return how_chosen(
            len(self.rows),
            sum(map(is_evaluated, self.rows)),
            chosen_on=self.chosen_on,
            meta_learned=meta_learned,
        )

    def device_hours(self) -> float | None:
        """Hours times devices, or None where the time is not known."""
        return device_hours(self.rows[-1]) if "seconds" in self.rows[-1] else None


def scaled(value: float | None, scale: float) -> float | None:
    """A value times `scale`, or None."""
    return None if value is None else scale * value


# -------------------------------------------------------------------- reading


def read_run(folder: Path, name: str = "") -> ReportedRun:
    """Read a run folder.

    Args:
        folder: the run folder.
        name: by which the report calls the run; '' is the folder's name.
    Raises:
        InputError: it is no run folder, or a file in it is damaged.
    """
    rows = [finite_numbers(row) for row in read_rows(folder)]
    try:
        policy = (folder / "policy.png").read_bytes()
    except OSError:
        policy = b""
    return ReportedRun(
        name=name or folder.resolve().name,
        folder=folder,
        rows=rows,
        config=read_object(folder / "config.json") or read_config(folder),
        confusion=read_confusion(folder / CONFUSION_FILE, {row["epoch"] for row in rows}),
        policy=policy if policy.startswith(PNG) else b"",
    )


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row can be drawn."""
    return {
        key: value
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    }


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; empty where the file is missing.

    Raises:
        InputError: the file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; delete the file to leave it out")
    return content


def read_confusion(path: Path, epochs: set[float]) -> Confusion | None:
    """The confusion on the test set, or else on the validation set.

    Args:
        path: of confusion.json.
        epochs: of the run; a file of another epoch is of rows that are not there any more.
    Returns:
        None where the file is missing or of another epoch.
    Raises:
        InputError: the file is damaged.
    """
    content = read_object(path)
    name = next((name for name in EVAL_SETS if name in content), "")
    epoch = content.get("epoch")
    if not name or type(epoch) is not int or epoch not in epochs:
        return None
    classes, counts = content.get("classes"), content[name]
    if not isinstance(classes, list) or not is_square(counts, len(classes)):
        raise InputError(
            f"{path}: the counts of {EVAL_SET_NAMES[name]} rows are not a square table with a name "
            "for each class; delete the file to leave it out"
        )
    return Confusion(epoch, name, list(map(str, classes)), counts)


def is_square(counts: Any, side: int) -> bool:
    """Whether this is a table of whole numbers with as many rows and columns."""
    return (
        isinstance(counts, list)
        and len(counts) == side > 0
        and all(isinstance(row, list) and len(row) == side for row in counts)
        and all(type(count) is int and count >= 0 for row in counts for count in row)
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names that tell folders apart: as many of the last parts of their paths as it takes."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    for count in range(1, longest + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{each[-1]} ({number})" for number, each in enumerate(parts, 1)]
