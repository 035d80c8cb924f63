"""Read the logs of runs for figures and tables.

groups = read_groups(LOGS)                # {group: {name: [rows of each seed]}}
[[row["epoch"] for row in rows] for rows in groups["optimizers_vgg8"]["ngd"]]

run = read_run(Path("runs/my-run"))       # what a report shows of a run folder
pack(LOGS / "GROUP" / "NAME-seed0")       # into LOGS / "GROUP.jsonl"

A log is a run folder, LOGS/GROUP/NAME-seedN, or is packed into the file LOGS/GROUP.jsonl: a run is
one line, {"run": "NAME-seed0", "flags": {...}, "commit": ..., ...}, which is its config.json, and
behind it the lines of its metrics.jsonl as they are. The path of the folder names both.
"""

import functools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from errors import InputError
from training.atomic_file import atomic_write_text
from training.epoch_report import EVAL_SET_NAMES, METRIC_NAMES, is_evaluated
from training.progress import EarlyStop, best_row
from training.run_log import CONFUSION_FILE, RESULT_FILE

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "figures" / "logs"

Row = dict[str, Any]
"""One line of metrics.jsonl: one epoch."""
Runs = list[list[Row]]
"""The rows of runs that differ in nothing but the seed, a list for each seed."""

# -------------------------------------------------------------------- reading


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl, refusing a file without any and half a line."""
    path, rows = folder / "metrics.jsonl", []
    for number, line in enumerate(row_lines(folder), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or type(row.get("epoch")) not in (int, float):
            raise InputError(
                f"{path}, line {number}: is not a whole row of an epoch; the run may be writing "
                "it, else go on with the run by --resume, or delete the line"
            )
        rows.append(row)
    if not rows:
        raise InputError(f"{path} is empty: the run has not finished an epoch; train longer")
    return rows


def row_lines(folder: Path) -> list[str]:
    """Return the lines of a run's metrics.jsonl, in its folder or packed, else refuse it."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        if packed := packed_runs(packed_file(folder)).get(folder.name):
            return packed[1:]
        problem = "holds no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise InputError(f"{folder} {problem}; give run folders") from None
    return text.splitlines()


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's config.json, in its folder or packed, as of `read_object`."""
    packed = packed_runs(packed_file(folder)).get(folder.name, ["{}"])
    return read_object(folder / "config.json") or json.loads(packed[0])


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where it is missing. Something else is refused."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; delete the file to leave it out")
    return content


def packed_file(folder: Path) -> Path:
    """Return the file into which the runs of a folder's group are packed."""
    return Path(f"{folder.resolve().parent}.jsonl")


def packed_runs(path: Path) -> dict[str, list[str]]:
    """Return the lines of each run in a packed file by the run's name; {} where there is none."""
    return _packed_runs(path, path.stat().st_mtime_ns) if path.exists() else {}


@functools.lru_cache
def _packed_runs(path: Path, changed: int) -> dict[str, list[str]]:
    runs: dict[str, list[str]] = {}
    lines: list[str] = []  # of no run: another kind of file
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith('{"run": '):
            runs[json.loads(line)["run"]] = lines = []
        lines.append(line)
    return runs


def run_folders(group: Path) -> list[Path]:
    """Return the folders of a group's runs, sorted, those that are packed among them."""
    names = {path.parent.name for path in group.glob("*/metrics.jsonl")}
    return [group / name for name in sorted(names | packed_runs(packed_file(group / "x")).keys())]


def finished(folder: Path) -> bool:
    """Tell whether a run's log holds its last epoch, or one with which the run ended early."""
    try:
        config, rows = read_config(folder), read_rows(folder)
        flags = config["flags"]
        patience, target = flags.get("patience", 0), flags.get("stop_at", 0.0)
        early_stop = EarlyStop(chosen_by(flags, rows), patience, target)
        ended_early = early_stop.reason(rows, since=num_judged_otherwise(config, rows))
        return rows[-1]["epoch"] >= flags["epochs"] or bool(ended_early)
    except (InputError, KeyError):
        return False


def read_groups(logs: Path) -> dict[str, dict[str, Runs]]:
    """Return the finished runs below a folder of groups, those in NAME-seedN by NAME."""
    groups: dict[str, dict[str, Runs]] = {}
    for group in sorted({path.stem for path in logs.iterdir() if path.suffix in ("", ".jsonl")}):
        for folder in run_folders(logs / group):
            if finished(folder):
                name = folder.name.rpartition("-seed")[0] or folder.name
                groups.setdefault(group, {}).setdefault(name, []).append(read_rows(folder))
            else:
                print(f"{folder}: not finished, left out")
    return groups


# -------------------------------------------------------------------- packing


def pack(folder: Path) -> None:
    """Move the log of a finished run from LOGS/GROUP/NAME-seedN into LOGS/GROUP.jsonl.

    A run of the same name that is there is replaced. Only finished runs are taken.
    """
    if not folder.is_dir() or not finished(folder):
        raise InputError(f"{folder}: is no folder of a finished run")
    config = read_config(folder)
    config.pop("launchers", None)  # processes of the machine
    head = json.dumps({"run": folder.name, **without_places(config)})
    path = packed_file(folder)
    runs = {**packed_runs(path), folder.name: [head, *row_lines(folder)]}
    lines = [line for name in sorted(runs) for line in runs[name]]
    atomic_write_text(path, "\n".join(lines) + "\n")
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def without_places(value: Any) -> Any:
    """Return a value of config.json in which the name of a file stands for its absolute path."""
    if isinstance(value, dict):
        return {name: without_places(each) for name, each in value.items()}
    if isinstance(value, list):
        return [without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    flag, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    return f"{flag}{equals}{Path(path).name}" if path.startswith(("/", "../")) else value


# -------------------------------------------------------------------- for a report


@dataclass(frozen=True)
class Confusion:
    """How often each class was taken for each."""

    epoch: float  # after which the rows were counted
    eval_set: str  # 'test' or 'validation'
    classes: list[str]  # names
    counts: np.ndarray  # (classes, classes) rows by their class and the predicted one


@dataclass(frozen=True)
class ReportedRun:
    """What a run folder holds for a report."""

    name: str  # by which the report calls the run
    rows: list[Row]  # the numbers of each epoch: of a row of metrics.jsonl those that are finite
    config: dict[str, Any]  # content of config.json; empty where that is missing
    flags: dict[str, Any]  # the run's flags by name; empty where they are not known
    confusion: Confusion | None  # None where it was not counted
    result: dict[str, Any]  # content of result.json; empty where that is missing

    def best_row(self) -> Mapping[str, Any] | None:
        """The row of the first of the best epochs; None where none was evaluated."""
        rivals = self.rows[num_judged_otherwise(self.config, self.rows) :] or self.rows
        return best_row(rivals, chosen_by(self.flags, self.rows))


def read_run(folder: Path, name: str = "") -> ReportedRun:
    """Read a run folder; the name that the report gives the run is by default the folder's.

    Raises:
        InputError: it is no run folder, or a file in it is damaged.
    """
    rows = [
        {key: x for key, x in row.items() if type(x) in (int, float) and math.isfinite(x)}
        for row in read_rows(folder)
    ]
    config, epochs = read_config(folder), {row["epoch"] for row in rows}
    result = read_object(folder / RESULT_FILE)
    return ReportedRun(
        name=name or str(folder),
        rows=rows,
        config=config,
        flags=config.get("flags", {}),
        confusion=read_confusion(folder / CONFUSION_FILE, epochs),
        result=result if result.get("epoch") in epochs else {},
    )


def read_confusion(path: Path, epochs: set[float]) -> Confusion | None:
    """Return the confusion on the test set, or else on the validation set.

    It is None where the file is missing, or is of an epoch whose row is not there any more.
    """
    content = read_object(path)
    name = next((name for name in ("test", "val") if name in content), "")
    if not name or content["epoch"] not in epochs:
        return None
    return Confusion(
        content["epoch"], EVAL_SET_NAMES[name], content["classes"], np.array(content[name])
    )


# -------------------------------------------------------------------- values


def accuracy(row: Row) -> float:
    """Return the accuracy in percent on the test set, or on held-out rows if it was not used."""
    fraction = row["test_accuracy" if "test_accuracy" in row else "val_accuracy"]
    if fraction is None:  # not evaluated
        return math.nan
    return round(100 * fraction, 9)  # 58, where 100 * 0.58 is 57.99999999999999


def measure(row: Row) -> str:
    """Return what searches and races compare: 'map' where rows may have several labels."""
    return "map" if {"val_map", "test_map"} & row.keys() else "accuracy"


def measured(row: Row) -> float:
    """Return `measure` as a fraction, on the test set where a run uses it, or on held-out rows.

    It is -1 of a row without it, as of training that diverged.
    """
    name = measure(row)
    found = [row[each] for each in (f"test_{name}", f"val_{name}") if each in row]
    return found[0] if found else -1.0


def chosen_by(flags: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the column that chooses the best epoch of a run."""
    last = next(filter(is_evaluated, reversed(rows)), {})
    eval_set = "val" if "val_accuracy" in last else "test"
    metric = flags.get("best_by")
    return f"{eval_set}_{metric if metric in METRIC_NAMES else 'accuracy'}"


def num_judged_otherwise(config: Mapping[str, Any], rows: Sequence[Row]) -> int:
    """Return how many of the rows another --best_by judged, before a resume."""
    changed = (each for each in config.get("segments", []) if "--best_by" in each["changed"])
    before = max((each["after_steps"] for each in changed), default=0)
    return sum(row["step"] <= before for row in rows) if before else 0


def epochs_to(target: float, rows: Sequence[Row]) -> float:
    """Return how many epochs a run needs for an accuracy, with a fraction; infinite if it fails.

    Between evaluations the accuracy, in percent, is taken to grow evenly, from 0 at the start.
    """
    before, epochs_before = 0.0, 0.0
    for row in filter(is_evaluated, rows):
        reached = accuracy(row)
        if reached >= target:
            share = (target - before) / (reached - before) if reached > before else 1.0
            return epochs_before + share * (row["epoch"] - epochs_before)
        before, epochs_before = reached, row["epoch"]
    return math.inf


def last(runs: Runs, value: Callable[[Row], float]) -> list[float]:
    """Return a value after the last epoch, for each seed."""
    return [value(rows[-1]) for rows in runs]


def mean_and_deviation(values: Sequence[float]) -> str:
    """Write the mean of the seeds, and their standard deviation where there are several."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"
