"""A report of one or several runs as one HTML file that needs no network.

python -m figures.report runs/my-run                              # writes report.html into it
python -m figures.report runs/sgd runs/ngd --out sgd_and_ngd.html

What a run folder does not hold is left out. The same folders give the same file. The page is
figures/report.html.j2.
"""

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch

import resnet50_test
import transformer_test
from cli.flag_parser import FlagParser, Scope, file_path, flat
from errors import InputError, exit_code, writing
from figures.report_charts import Line, draw_chart
from figures.run_logs import Confusion, ReportedRun, Row, chosen_by, read_run
from input_pipeline import own_data
from training import evaluation
from training.atomic_file import atomic_write
from training.epoch_report import (
    EVAL_SET_NAMES,
    METRIC_NAMES,
    describe_probabilities,
    how_chosen,
    is_evaluated,
    show_result,
    show_views,
    training_seconds,
)
from training.progress import device_hours, duration, whole_epochs
from training.run_segments import describe_all, flag_value

SETS = {"train": "training", **EVAL_SET_NAMES}  # in the order of the charts
DRAWN = ("loss", "accuracy", "macro_f1", "map", "auroc")  # of METRIC_NAMES, with these titles
QUANTITIES = {each: METRIC_NAMES[each] + " / %" * (each != "loss") for each in DRAWN}
CHANGING = {  # columns of metrics.jsonl that are drawn if they change
    "lr": "learning rate of the last step",
    "batch_size": "global batch / samples",
    "noise_scale": "gradient noise scale / samples",
    "mean_lambda": "mean lambda",
}
RECORDED = ("command", "commit", "torch", "python", "device", "processor", "precision")
MISSING = "–"  # a value that is not known
MAX_CLASSES = 40  # of a readable confusion matrix, and mistakes in the list beyond it


@dataclass(frozen=True)
class Column:
    """A column of a run's metrics.jsonl, and how a legend calls it."""

    label: str
    run: ReportedRun
    key: str


Table = Sequence[Sequence[str]]
"""Rows that begin with their names; the first one, which may be empty, has the titles."""


def write_report(runs: Sequence[ReportedRun], path: Path) -> None:
    """Write the report of some runs."""
    text = render(runs)
    with writing(f"--out {path}", "file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the page of `write_report`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2").render(
        title=", ".join(dict.fromkeys(map(subject, runs))),
        runs=runs,
        results=table_of_facts(runs, results_of),
        curves=curves(runs),
        flags=table_of_flags(runs),
        class_scores=class_scores,
        in_words=in_words,
        max_classes=MAX_CLASSES,
        most_frequent_mistakes=most_frequent_mistakes,
        environment=table_of_facts(runs, environment_of),
    )


# -------------------------------------------------------------------- what was trained and reached


def subject(run: ReportedRun) -> str:
    """Return model and data of a run, or its name where they are not known."""
    flags = run.flags
    model = flags.get("arch") or ("Transformer" if "max_len" in flags else "")
    if not model or not flags.get("dataset"):
        return run.name
    subset = flags.get("subset", 1)
    part = f"{100 * subset:g} % of " if isinstance(subset, int | float) and subset < 1 else ""
    return f"{model} on {part}{flags['dataset']}"


def table_of_facts(
    runs: Sequence[ReportedRun], facts_of: Callable[[ReportedRun], Mapping[str, str]]
) -> Table:
    """Return a row for each fact that a run knows, and a column for each run."""
    columns = [facts_of(run) for run in runs]
    rows = [[name, *(each[name] or MISSING for each in columns)] for name in columns[0]]
    titles = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return [titles, *(row for row in rows if {*row[1:]} != {MISSING})]


def results_of(run: ReportedRun) -> dict[str, str]:
    """Return what a run has reached and cost; '' is not known."""
    row, flags, best = run.rows[-1], run.flags, run.best_row()
    chosen = how_chosen(run.rows, chosen_by=chosen_by(flags, run.rows))
    seconds = training_seconds(row) if "seconds" in row else 0
    peak = max(each.get("peak_memory_bytes", 0) for each in run.rows)  # each of one process
    probabilities = describe_probabilities(run.result) if run.result else ""
    if run.result and run.result["epoch"] != row["epoch"]:
        probabilities += f", after epoch {run.result['epoch']}"
    return {
        "optimizer": str(flags.get("optimizer", "")),
        "mixup": str(flags.get("mixup", "")),
        "planned epochs": str(flags.get("epochs", "")),
        "last result": show_result(row),
        "averaged result": show_views(row),
        "best result": f"{show_result(best)}, {chosen}" if best else "",
        "probabilities": probabilities,
        "time": duration(row["seconds"]) if "seconds" in row else "",
        "device-hours": f"{device_hours(run.rows):.4g}" if "seconds" in row else "",
        "samples/s": show(row, "samples", "{:.0f}", 1 / seconds if seconds else 0),
        "peak memory": show({"peak": peak}, "peak", "{:.2f} GiB", 2**-30),
    }


def show(row: Row, key: str, form: str, scale: float = 1.0) -> str:
    """Write a number of a row, times `scale`; '' where the row lacks it, or for 0."""
    return form.format(scale * row[key]) if scale * row.get(key, 0) else ""


def environment_of(run: ReportedRun) -> dict[str, str]:
    """Return command, commit, versions, device, processes, times and bytes; '' is not known."""
    row, command = run.rows[-1], run.config.get("command")
    sent = sum(each.get("wire_bytes", 0) for each in whole_epochs(run.rows))
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    recorded = {**run.flags, **run.config, "command": command}
    return {
        **{name: str(recorded.get(name) or "") for name in RECORDED},
        "changes during the run": describe_all(run.config.get("segments") or []),
        "processes": show(row, "world_size", "{:g}"),
        "devices": show(row, "devices", "{:g}"),
        "time of evaluation": show(row, "eval_seconds", "{:.0f} s"),
        "time of compilation": show(row, "compile_seconds", "{:.0f} s"),
        "sent by each process": show({"sent": sent}, "sent", "{:.1f} MB", 1e-6),
        "run": run.name,
    }


# -------------------------------------------------------------------- curves


def curves(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return sections of charts: over epochs and over training time, and of settings that change.

    Of one run a chart has a line for each set, and of several runs there is a chart for each set.
    """
    panels: dict[str, list[Column]] = {}  # by the title of the vertical axis
    for name, text in SETS.items():
        for quantity, ylabel in QUANTITIES.items():
            key = f"{name}_{quantity}"
            if len(runs) == 1:
                panels.setdefault(ylabel, []).append(Column(text, runs[0], key))
            else:
                panels[f"{text} {ylabel}"] = [Column(run.name, run, key) for run in runs]
    changing = {
        ylabel: [Column(run.name, run, key) for run in runs]
        for key, ylabel in CHANGING.items()
        if any(len({row[key] for row in run.rows if key in row}) > 1 for run in runs)
    }
    longest = max(row.get("seconds", 0) for run in runs for row in run.rows)
    unit, seconds = ("s", 1) if longest < 300 else ("min", 60) if longest < 10_800 else ("h", 3600)
    return [
        draw_section("Over epochs", panels, "epoch"),
        draw_section("Over training time", panels, f"training time / {unit}", seconds),
        draw_section("Settings that change", changing, "epoch"),
    ]


def draw_section(
    title: str, panels: Mapping[str, Sequence[Column]], xlabel: str, seconds: float = 0
) -> dict[str, Any]:
    """Return title, legend, and a chart for each title of a vertical axis that has values.

    They are over epochs, or over the training time in units of `seconds`.
    """
    charts: list[dict[str, str]] = []
    legend: dict[str, Line] = {}
    for ylabel, columns in panels.items():
        lines = []
        for number, column in enumerate(columns):
            key, rows = column.key, column.run.rows
            if key.startswith(tuple(EVAL_SET_NAMES)):
                rows = list(filter(is_evaluated, rows))
            if seconds:
                rows = [row for row in rows if "seconds" in row]
            if any(key in row for row in rows):
                x = [training_seconds(row) / seconds if seconds else row["epoch"] for row in rows]
                scale = 100 if ylabel.endswith("%") else 1
                y = [scale * row.get(key, math.nan) for row in rows]
                lines.append(Line(column.label, x, y, number))
        if lines:
            charts.append(draw_chart(lines, xlabel, ylabel, is_loss="loss" in ylabel))
        legend |= {line.label: line for line in lines}
    shown = list(legend.values()) if len(legend) > 1 else []
    return {"title": title, "legend": shown, "charts": charts}


# -------------------------------------------------------------------- flags


def table_of_flags(runs: Sequence[ReportedRun]) -> Table:
    """Return the flags in which runs differ, or all of one run.

    A flag that a run does not know is no difference.
    """
    columns = list(map(compared_flags, runs))
    rows = []
    for name in dict.fromkeys(name for flags in columns for name in flags):
        shown = [flag_value(flags[name]) if name in flags else MISSING for flags in columns]
        if len(runs) == 1 or len({*shown} - {MISSING}) > 1:
            rows.append([f"--{name}", *shown])
    return [["flag", *(run.name for run in runs)], *rows]


def compared_flags(run: ReportedRun) -> dict[str, Any]:
    """Return the flags that say what a run computes, and not where its files are."""
    scopes = [Scope.RESULT, Scope.HOW, Scope.NODE]
    if run.flags.get("dataset") in own_data.DATASETS:
        scopes.append(Scope.PLACE)
    scripts = (resnet50_test, transformer_test)
    names = {name for script in scripts for name in script.parser().of_scope(*scopes)}
    return flat({name: value for name, value in run.flags.items() if name in names})


# -------------------------------------------------------------------- classes


def class_scores(names: Sequence[str], *class_counts: Sequence[int]) -> Table:
    """Return a row for each class and one for their means: scores in percent, and rows.

    The counts are of each class correct rows, rows and predictions.
    """
    counts = torch.from_numpy(np.stack(class_counts))
    scores = (100 * evaluation.class_scores(counts)).tolist()
    rows = [*counts[1].tolist(), counts[1].sum().item()]
    lines = zip([*names, "mean, sum"], scores, rows)
    titles = ["class", "precision %", "recall %", "F1 %", "rows"]
    return [titles, *([name, *map("{:.2f}".format, each), str(n)] for name, each, n in lines)]


def in_words(labels: Sequence[tuple[str, float]]) -> str:
    """Write labels with their probabilities."""
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in labels) or "no label"


def most_frequent_mistakes(confusion: Confusion) -> Table:
    """Return the pairs of classes that were most often taken for one another."""
    wrong = confusion.counts - np.diag(confusion.counts.diagonal())
    cells = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CLASSES]
    pairs = [pair for pair in zip(*np.unravel_index(cells, wrong.shape)) if wrong[pair]]
    rows = [[*(confusion.classes[each] for each in pair), str(wrong[pair])] for pair in pairs]
    return [["class", "taken for", "rows"], *rows]


# -------------------------------------------------------------------- command line


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report that the command line asks for."""
    parser = FlagParser(__doc__, usage="RUN... [flags]")
    add = parser.group("flags")
    add("runs", file_path, None, "folders of the runs", nargs="+", metavar="RUN")
    text = "file for the report, whose name ends in .html"
    default = "(default report.html, in the folder of a single run)"
    add("--out", file_path, None, f"{text} {default}", metavar="FILE")
    args = parser.parse_args(argv)
    args.out = args.out or Path(*args.runs if len(args.runs) == 1 else (), "report.html")
    if args.out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--out {args.out}: the name must end in .html")
    folders = [Path(os.path.abspath(folder)) for folder in args.runs]  # links keep their names
    parent = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(folder, os.path.relpath(folder, parent)) for folder in folders]
    write_report(runs, args.out)
    print(args.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
