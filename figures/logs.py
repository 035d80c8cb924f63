"""Logs of runs, read for pictures and tables.

groups = read_groups(LOGS)                # {group: {name: [rows of each seed]}}
[[row["epoch"] for row in rows] for rows in groups["ngd_meta"]["ngd"]]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "figures" / "logs"

Row = dict[str, Any]
Runs = list[list[Row]]
"""The rows of metrics.jsonl of runs that differ in the seed alone, a list a seed."""


def read_rows(folder: Path) -> list[Row]:
    """Rows of a run's metrics.jsonl; ends the program with a line where there are none."""
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        sys.exit(f"error: {folder} holds no metrics.jsonl; give run folders")
    if not rows:
        sys.exit(f"error: {folder}/metrics.jsonl is empty: the run has not finished an epoch")
    return rows


def by_name(folders: Sequence[Path]) -> dict[str, Runs]:
    """Runs of folders NAME-seedN by NAME, in the order of the seeds."""
    named: dict[str, Runs] = {}
    for folder in folders:
        named.setdefault(folder.name.rpartition("-seed")[0] or folder.name, []).append(
            read_rows(folder)
        )
    return named


def finished(folder: Path) -> bool:
    """Whether a run's log holds its last epoch."""
    try:
        epochs = json.loads((folder / "config.json").read_text())["flags"]["epochs"]
        return (
            json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["epoch"] >= epochs
        )
    except (OSError, IndexError, KeyError, ValueError):
        return False


def read_groups(logs: Path) -> dict[str, dict[str, Runs]]:
    """All runs below a folder of groups that have come to their end: an unfinished one is no result."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(logs.glob("*/*/metrics.jsonl")):
        if finished(path.parent):
            folders.setdefault(path.parent.parent.name, []).append(path.parent)
        else:
            print(f"{path.parent}: not finished, left out")
    return {group: by_name(each) for group, each in folders.items()}


def per_epoch(runs: Runs, value: Callable[[Row], float]) -> list[list[float]]:
    """A value after each epoch that all seeds have: a list of the seeds' values an epoch."""
    return [[value(row) for row in rows] for rows in zip(*runs)]


def mean(values: Sequence[Sequence[float]]) -> list[float]:
    """Over the seeds, epoch by epoch."""
    return [statistics.mean(each) for each in values]


def accuracy(row: Row) -> float:
    """On the test set, in percent; on held-out rows in a run that leaves the test set alone."""
    return 100 * row["test_accuracy" if "test_accuracy" in row else "val_accuracy"]


def last(runs: Runs, value: Callable[[Row], float]) -> list[float]:
    """The seeds' values after the last epoch."""
    return [value(rows[-1]) for rows in runs]


def device_hours(row: Row) -> float:
    """Of GPUs, or of nodes that compute on their CPUs, from the start of the run, evaluation included."""
    return (
        row["seconds"] * row.get("devices", 1) / 3600
    )  # the first logs, all of one node's CPU, do not say


def spread(values: Sequence[float]) -> str:
    """'93.21 ± 0.10', or the value alone where there is one."""
    return f"{statistics.mean(values):.2f}" + (
        f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    )


def seconds_to(runs: Runs, target: float) -> float | None:
    """Mean seconds at the first epoch whose mean test accuracy is at least `target` percent; None where there is none."""
    seconds = mean(per_epoch(runs, lambda row: row["seconds"]))
    reached = (
        second for second, value in zip(seconds, mean(per_epoch(runs, accuracy))) if value >= target
    )
    return next(reached, None)


def repeated(named: Mapping[str, Runs]) -> Mapping[str, Runs]:
    """Where some were repeated with other seeds, those alone: runs of a single seed are the search for the setting."""
    return {name: runs for name, runs in named.items() if len(runs) > 1} or named
