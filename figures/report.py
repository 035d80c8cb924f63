"""A report of one or several runs as one HTML file that needs no network.

python -m figures.report runs/my-run                              # writes report.html
python -m figures.report runs/sgd runs/ngd --out sgd_and_ngd.html

It shows what was trained, curves, how the runs differ, scores of each class, what was learned
beside the model, and on what it ran. What a run folder does not hold is left out. The same folders
give the same file.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cli import options
from cli.flag_parser import FlagParser, file_path, format_default
from errors import InputError, exit_code
from figures.html_page import (
    MISSING,
    Section,
    charts,
    details,
    facts,
    heading_of,
    heat_table,
    page,
    paragraph,
    png_image,
    table,
)
from figures.reported_run import ClassScores, Confusion, ReportedRun, names_of, read_run
from figures.svg_charts import Point, Series, legend, line_chart
from training.atomic_file import atomic_write
from training.epoch_report import EVAL_SET_NAMES
from training.run_segments import describe_all
from training.time_estimate import in_words

SETS = {"train": "training", **EVAL_SET_NAMES}  # in the order of the charts
SCRIPTS = ("resnet50_test", "transformer_test")
MINUTE, HOUR = 60.0, 3600.0
MAX_MATRIX = 40  # classes of a matrix that can be read
MAX_TABLE = 40  # classes of a table that is open from the start
MAX_MISTAKES = 30  # that are listed where the matrix would be too large
COSTS = ("time", "device-hours", "samples/s", "peak memory")
COLOURED = ("sgd", "ngd", "muon", "kaldi_ngd", "lamb", "soap", "adamw", "slamb", "lars", "demo")
ENDINGS = (".html", ".htm")


def write_report(
    runs: Sequence[ReportedRun], path: Path, *, title: str = "", first: Sequence[Section] = ()
) -> None:
    """Write the report of some runs.

    Args:
        runs: at least one.
        path: of the file.
        title: above the page; '' says what was trained.
        first: sections before those of the runs.
    Raises:
        InputError: the file cannot be written.
    """
    text = render(runs, title=title, first=first)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot be written ({error.strerror}); choose another file"
        ) from None


def render(runs: Sequence[ReportedRun], *, title: str = "", first: Sequence[Section] = ()) -> str:
    """The page of `write_report`."""
    sections = [
        *first,
        Section("Over epochs", curves(runs, over_time=False)),
        Section("Over training time", curves(runs, over_time=True)),
        Section("Learning rate and batch size", rate_and_batch(runs)),
        Section("Mixing of samples", mixing(runs)),
        differing_flags(runs) if len(runs) > 1 else changed_flags(runs[0]),
        Section("Classes", scores_of_classes(runs)),
        Section("Environment and cost", environment(runs)),
    ]
    return page(title or what_was_trained(runs), sections, head=heading(runs))


# -------------------------------------------------------------------- heading


def what_was_trained(runs: Sequence[ReportedRun]) -> str:
    """A title: model and data, where all runs have the same; else the number of runs."""
    subjects = {subject(run) for run in runs}
    if len(runs) == 1:
        return subjects.pop()
    return f"{subjects.pop()}: {len(runs)} runs" if len(subjects) == 1 else f"{len(runs)} runs"


def subject(run: ReportedRun) -> str:
    """Model and data of a run, or its name where they are not known."""
    flags = run.flags
    model = flags.get("arch") or ("Transformer" if "max_len" in flags else "")
    if not model or not flags.get("dataset"):
        return run.name
    subset = flags.get("subset", 1)
    part = f"{100 * subset:g} % of " if isinstance(subset, int | float) and subset < 1 else ""
    return f"{model} on {part}{flags['dataset']}"


def heading(runs: Sequence[ReportedRun]) -> str:
    """What the runs have reached and cost: facts of one, a table of several."""
    if len(runs) > 1:
        return paragraph("Accuracies are in percent.") + summary_table(runs)
    [run] = runs
    last, best = run.last_result(), run.best_result()
    values = {"epochs": (epochs_done(run), "")}
    if last.accuracies:
        values["after the last epoch"] = (accuracies(last.accuracies), "")
    if best is not None:
        reached = accuracies(best.accuracies)
        values[f"best epoch: {best.epoch}"] = (reached, run.how_best_was_chosen())
    values |= {name: (value, "") for name, value in costs(run).items()}
    return paragraph(f"Run folder {run.folder}. {method(run)}".strip()) + facts(values)


def method(run: ReportedRun) -> str:
    """The optimizer and what mixes samples, in a sentence; '' where they are not known."""
    flags = run.flags
    if not flags.get("optimizer"):
        return ""
    mixup = flags.get("mixup", "none")
    parts = [f"Optimizer {flags['optimizer']}", "" if mixup == "none" else f"mixup {mixup}"]
    return f"{', '.join(filter(None, parts))}."


def epochs_done(run: ReportedRun) -> str:
    """For example '4 of 10'."""
    done, planned = f"{run.last('epoch'):g}", run.flags.get("epochs")
    return f"{done} of {planned}" if isinstance(planned, int) and str(planned) != done else done


def accuracies(values: Mapping[str, float]) -> str:
    """For example 'test 94.00 %, validation 95.00 %'."""
    shown = [f"{EVAL_SET_NAMES[name]} {100 * value:.2f} %" for name, value in values.items()]
    return ", ".join(reversed(shown))


def costs(run: ReportedRun) -> dict[str, str]:
    """Time, speed and memory, as far as they are known."""
    seconds, hours = run.last("seconds"), run.device_hours()
    samples, train_seconds = run.last("samples"), run.total("train_seconds")
    memory = run.last("peak_memory_bytes")
    texts = (
        "" if seconds is None else in_words(seconds),
        "" if hours is None else f"{hours:.4g}",
        f"{samples / train_seconds:.0f}" if samples and train_seconds else "",
        "" if memory is None else f"{memory / 2**30:.2f} GiB",
    )
    return {name: text for name, text in zip(COSTS, texts) if text}


def summary_table(runs: Sequence[ReportedRun]) -> str:
    """A row for each run; columns that no run has a value for are left out."""
    rows: dict[str, dict[str, str]] = {}
    for run in runs:
        last, best = run.last_result(), run.best_result()
        cells = {"epochs": epochs_done(run)}
        for name, text in reversed(EVAL_SET_NAMES.items()):
            if name in last.accuracies:
                cells[f"last {text}"] = f"{100 * last.accuracies[name]:.2f}"
        for name, text in reversed(EVAL_SET_NAMES.items()):
            if best is not None and name in best.accuracies:
                cells[f"best {text}"] = f"{100 * best.accuracies[name]:.2f}"
        for name, text in reversed(EVAL_SET_NAMES.items()):
            if name in last.over_views:
                over_views = f"{100 * last.over_views[name]:.2f}"
                cells[f"last {text}, {last.views} views"] = over_views
        if best is not None:
            cells |= {"best epoch": str(best.epoch), "chosen by": EVAL_SET_NAMES[run.chosen_on]}
        rows[run.name] = cells | costs(run)
    return table_of_runs(rows)


def table_of_runs(rows: Mapping[str, Mapping[str, str]]) -> str:
    """A table of named cells, a row for each run."""
    columns = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    lines = [[run, *(cells.get(name, MISSING) for name in columns)] for run, cells in rows.items()]
    return table(["run", *columns], lines, numbers=True)


# -------------------------------------------------------------------- curves


def curves(runs: Sequence[ReportedRun], *, over_time: bool) -> str:
    """Loss and accuracy: of one run a line for each set, of several runs a chart for each set."""
    unit, name = time_unit(runs)
    xlabel = f"training time / {name}" if over_time else "epoch"
    horizontal = {"whole_x": not over_time, "x_from_zero": over_time}

    def points(run: ReportedRun, key: str, scale: float) -> list[Point]:
        return run.values_in_time(key, unit, scale) if over_time else run.values(key, scale)

    quantities = (("loss", "loss", 1.0), ("accuracy", "accuracy / %", 100.0))
    drawn = []
    if len(runs) == 1:
        for quantity, ylabel, scale in quantities:
            lines = [
                Series(text, points(runs[0], f"{name}_{quantity}", scale), index)
                for index, (name, text) in enumerate(SETS.items())
            ]
            drawn.append(line_chart(lines, xlabel, ylabel, **horizontal))
    else:
        for name, (quantity, ylabel, scale) in itertools.product(SETS, quantities):
            lines = [
                Series(run.name, points(run, f"{name}_{quantity}", scale), index)
                for index, run in zip(colours(runs), runs)
            ]
            drawn.append(line_chart(lines, xlabel, f"{SETS[name]} {ylabel}", **horizontal))
    shown = charts(drawn)
    return legend_of(runs) + shown if shown else ""


def colours(runs: Sequence[ReportedRun]) -> list[int]:
    """The number of each run's colour: that of its optimizer where each has another; else in turn.

    The colours of optimizers are those that they have in the figures of figures/methods.py.
    """
    names = [run.flags.get("optimizer") for run in runs]
    if len(set(names)) < len(runs) or not set(names) <= set(COLOURED):
        return list(range(len(runs)))
    return [COLOURED.index(name) for name in names]


def legend_of(runs: Sequence[ReportedRun]) -> str:
    """The legend of the curves: the sets of one run, or the names of several."""
    if len(runs) > 1:
        return legend([Series(run.name, [], index) for index, run in zip(colours(runs), runs)])
    present = {key for row in runs[0].rows for key in row}
    sets = enumerate(SETS.items())
    return legend(
        [
            Series(text, [], index)
            for index, (name, text) in sets
            if present & {f"{name}_loss", f"{name}_accuracy"}
        ]
    )


def time_unit(runs: Sequence[ReportedRun]) -> tuple[float, str]:
    """Seconds in the unit of time for these runs, and its sign."""
    longest = max(
        (row["seconds"] for run in runs for row in run.rows if "seconds" in row), default=0
    )
    if longest < 5 * MINUTE:
        return 1.0, "s"
    return (MINUTE, "min") if longest < 3 * HOUR else (HOUR, "h")


def chart_of(
    runs: Sequence[ReportedRun], key: str, ylabel: str, *, only_if_it_varies: bool = False
) -> str:
    """A column of metrics.jsonl over the epochs, a line for each run; '' where none has it."""
    lines = [Series(run.name, run.values(key), index) for index, run in zip(colours(runs), runs)]
    values = {y for line in lines for _, y in line.points if y is not None}
    if only_if_it_varies and len(values) < 2:
        return ""
    return line_chart(lines, "epoch", ylabel, whole_x=True)


def with_legend(runs: Sequence[ReportedRun], drawn: str) -> str:
    """Charts below the names of the runs, which one run does not need."""
    return legend_of(runs) + drawn if drawn and len(runs) > 1 else drawn


def rate_and_batch(runs: Sequence[ReportedRun]) -> str:
    """Learning rate and batch size where they change, and the noise scale that may steer it."""
    drawn = charts(
        [
            chart_of(runs, "lr", "learning rate of the last step", only_if_it_varies=True),
            chart_of(runs, "batch_size", "global batch / samples", only_if_it_varies=True),
            chart_of(runs, "noise_scale", "gradient noise scale / samples"),
        ]
    )
    return with_legend(runs, drawn)


def mixing(runs: Sequence[ReportedRun]) -> str:
    """The mean weight of the unpermuted sample, and the policies that were learned."""
    drawn = with_legend(runs, charts([chart_of(runs, "mean_lambda", "mean lambda")]))
    pictures = []
    for run in runs:
        if run.policy:
            name = f" ({run.name})" if len(runs) > 1 else ""
            pictures.append(
                paragraph(
                    f"What was learned for each pair of classes{name}. Lambda is the weight of the "
                    "own sample, so 1 is no mixing."
                )
            )
            pictures.append(png_image(run.policy, f"learned mixing policy of {run.name}"))
    return "\n".join(filter(None, [drawn, *pictures]))


# -------------------------------------------------------------------- flags


def differing_flags(runs: Sequence[ReportedRun]) -> Section:
    """The flags in which runs differ. A flag that a run does not know is no difference."""
    names = dict.fromkeys(name for run in runs for name in compared_flags(run))
    rows = []
    for name in names:
        shown = [show(run.flags[name]) if name in run.flags else MISSING for run in runs]
        if len({value for run, value in zip(runs, shown) if name in run.flags}) > 1:
            rows.append([f"--{name}", *shown])
    body = table(["flag", *(run.name for run in runs)], rows)
    is_known = all(run.flags for run in runs)
    return Section(
        "Flags that differ",
        body or (paragraph("The runs have the same flags.") if is_known else ""),
    )


def changed_flags(run: ReportedRun) -> Section:
    """The flags of a run that are not at their defaults."""
    flags, defaults = compared_flags(run), default_flags(run)
    rows = [
        [f"--{name}", show(value), show(defaults[name])]
        for name, value in flags.items()
        if name in defaults and show(value) != show(defaults[name])
    ]
    return Section(
        "Flags that are not at their defaults", table(["flag", "value", "default"], rows)
    )


def compared_flags(run: ReportedRun) -> dict[str, Any]:
    """The flags that say what a run computes, and not where its files are."""
    flags = {n: value for n, value in run.flags.items() if n not in options.NOT_RESTORED}
    if not options.is_own_data(flags.get("dataset")):
        flags.pop("data_dir", None)
    return flags


def default_flags(run: ReportedRun) -> dict[str, Any]:
    """The defaults of the script that the run is of; empty where that is not known."""
    command = run.config.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    script = next((name for name in SCRIPTS if f"{name}.py" in words), None)
    if script is None or not isinstance(run.flags.get("epochs"), int):
        return {}
    return options.defaults_for(importlib.import_module(script).parser(), run.flags)


def show(value: Any) -> str:
    """The value of a flag as one would type it."""
    return "not given" if value is None else format_default(value) or "none"


# -------------------------------------------------------------------- classes


def scores_of_classes(runs: Sequence[ReportedRun]) -> str:
    """The classes of each run that has counted them."""
    parts = []
    for run in runs:
        if run.confusion is not None:
            if len(runs) > 1:
                parts.append(heading_of(run.name))
            parts.append(scores_of_run(run.confusion))
    return "\n".join(parts)


def scores_of_run(confusion: Confusion) -> str:
    """Precision, recall, F1 and rows of each class, and the confusion matrix."""
    where = f"On the {EVAL_SET_NAMES[confusion.eval_set]} set after epoch {confusion.epoch}."
    scores = class_table(confusion)
    if len(confusion.classes) > MAX_TABLE:
        scores = details(f"all {len(confusion.classes)} classes", scores)
    parts = [paragraph(where), scores]
    if len(confusion.classes) <= MAX_MATRIX:
        parts.append(paragraph("Rows are the true classes, columns the predicted ones."))
        parts.append(heat_table(confusion.classes, confusion.counts))
    else:
        mistakes = [
            [name, taken_for, str(count)]
            for count, name, taken_for in confusion.mistakes()[:MAX_MISTAKES]
        ]
        parts.append(paragraph(f"The {len(mistakes)} most frequent mistakes."))
        parts.append(table(["class", "taken for", "rows"], mistakes))
    return "\n".join(parts)


def class_table(confusion: Confusion) -> str:
    """A row for each class, in percent, and the means over the classes."""
    scores = confusion.per_class()
    rows = [
        [name, percent(each.precision), percent(each.recall), percent(each.f1), str(each.rows)]
        for name, each in zip(confusion.classes, scores)
    ]
    parts: list[Callable[[ClassScores], float | None]] = [
        lambda each: each.precision,
        lambda each: each.recall,
        lambda each: each.f1,
    ]
    means = [percent(mean([part(each) for each in scores])) for part in parts]
    rows.append(["mean of the classes", *means, str(sum(each.rows for each in scores))])
    return table(["class", "precision %", "recall %", "F1 %", "rows"], rows, numbers=True)


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are defined."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def percent(value: float | None) -> str:
    """A share in percent."""
    return MISSING if value is None else f"{100 * value:.2f}"


# -------------------------------------------------------------------- environment


def environment(runs: Sequence[ReportedRun]) -> str:
    """What each run ran on, and its cost: a row for each fact, a column for each run."""
    columns = [environment_of(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    cells = {name: [column.get(name, "") for column in columns] for name in names}
    rows = [
        [name, *(text or MISSING for text in each)] for name, each in cells.items() if any(each)
    ]
    titles = [run.name for run in runs] if len(runs) > 1 else ["value"]
    return table(["", *titles], rows)


def environment_of(run: ReportedRun) -> dict[str, str]:
    """Commit, versions, device, precision, processes, time and bytes; '' is not known."""
    config, sent = run.config, run.total("comm_bytes")
    device, processor = str(config.get("device", "")), str(config.get("processor", ""))
    command = config.get("command")
    evaluating, compiling = run.last("eval_seconds"), run.last("compile_seconds")
    return {
        "command": " ".join(map(str, command)) if isinstance(command, list) else "",
        "commit": str(config.get("commit") or ""),
        "changes during the run": changes_in_words(config.get("segments")),
        "torch": str(config.get("torch", "")),
        "Python": str(config.get("python", "")),
        "device": device,
        "processor": "" if processor in device else processor,
        "precision": str(config.get("precision") or run.flags.get("precision") or ""),
        "processes": number(run.last("world_size")),
        "devices": number(run.last("devices")),
        **dict.fromkeys(COSTS, ""),
        **costs(run),
        "of the time evaluating": "" if evaluating is None else in_words(evaluating),
        "of the time compiling": in_words(compiling) if compiling else "",
        "sent by each process": f"{sent / 1e6:.1f} MB" if sent else "",
        "run folder": str(run.folder),
    }


def changes_in_words(segments: Any) -> str:
    """What changed while a run was trained; '' where nothing did, or the entry cannot be read."""
    try:
        return describe_all(segments or [])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return ""


def number(value: float | None) -> str:
    """A number, or '' where there is none."""
    return "" if value is None else f"{value:g}"


# -------------------------------------------------------------------- command line


def report_parser() -> FlagParser:
    """Return the parser of the command line."""
    parser = FlagParser(__doc__, usage="RUN... [flags]")
    add = parser.group("flags")
    add(
        "runs",
        nargs="+",
        type=file_path,
        metavar="RUN",
        help="Report on the runs in these folders.",
    )
    add(
        "--out",
        type=file_path,
        default=Path("report.html"),
        metavar="FILE",
        help="Write the report to this file, whose name ends in .html (default %(default)s).",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report that the command line asks for."""
    args = report_parser().parse_args(argv)
    if args.out.suffix.lower() not in ENDINGS:
        raise InputError(f"--out {args.out}: the name must end in .html")
    runs = [read_run(folder, name) for folder, name in zip(args.runs, names_of(args.runs))]
    write_report(runs, args.out)
    print(args.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
