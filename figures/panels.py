"""The parts of a figure: panels, lines of runs, axes, and the legend that explains bands and bars.

figure, axes = create_panels(2, "SGD and NGD\\nResNet-20, 20 % of CIFAR-10")
draw_panel(axes[0], named_runs, "epoch", "accuracy")
add_legend(figure, axes[0], title=describe_seeds(named_runs))
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot is imported
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from figures.methods import line_styles
from figures.run_logs import Runs, accuracy
from training.epoch_report import training_seconds

# Of a figure in inches, by its columns: on a page its text is readable.
WIDTH = {1: 8.0, 2: 8.0, 3: 9.6}
TITLE_HEIGHT, PANEL_HEIGHT, LEGEND_LINE = 0.5, 2.9, 0.2  # inches
MARKERS_PER_LINE = 15  # about; more of them hide the lines

AXES = {  # titles of the columns of metrics.jsonl, and of those that with_columns adds
    "epoch": "epoch",
    "time": "training time / s",
    "minutes": "training time / minutes",
    "accuracy": "test accuracy / %",
    "train_loss": "training loss (cross-entropy)",
    "lr": "learning rate at its end",
    "batch_size": "batch size / samples",
    "noise_scale": "gradient noise scale / samples",
}
BINARY = ("batch_size", "noise_scale")  # columns whose axis has powers of two


def with_columns(runs: Runs) -> Runs:
    """Return runs with the accuracy in percent and the seconds of training in each row."""
    return [
        [{**row, "accuracy": accuracy(row), "time": training_seconds(row)} for row in rows]
        for rows in runs
    ]


# -------------------------------------------------------------------- panels


def create_panels(columns: int, title: str) -> tuple[Figure, Any]:
    """Return a figure with a title, and the axes of its panels side by side."""
    size = WIDTH[columns], TITLE_HEIGHT + PANEL_HEIGHT
    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=11)
    return figure, axes


def label_axes(axes: Axes, xlabel: str, ylabel: str, *, title: str = "") -> None:
    """Set the labels and add a grid; epochs are whole numbers."""
    axes.set_title(title, fontsize=10)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if xlabel == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plain_log_ticks(axis: Any, base: int = 10) -> None:
    """Give a logarithmic axis (`axes.xaxis`) ticks at powers, written as plain numbers."""
    axis.set_major_locator(LogLocator(base, subs=(1.0, 3.0) if base == 10 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# -------------------------------------------------------------------- lines and their legend


def draw_panel(
    axes: Axes, named_runs: Mapping[str, Runs], x: str, y: str, *, title: str = ""
) -> None:
    """Draw one column over another: the mean over the seeds as a line, and their range as a band.

    Where the seeds end at different x, as they do at different times, a bar at the end of the line
    goes from the lowest to the highest.

    The columns are those of `AXES`; null is not a number.
    """
    styles = line_styles(named_runs)
    same_counts = len({len(runs) for runs in named_runs.values()}) == 1
    for label, runs in named_runs.items():
        epochs = min(map(len, runs))  # that all seeds have
        places, values = (
            np.array([[row[key] for row in rows[:epochs]] for rows in runs], dtype=float)
            for key in (x, y)
        )
        horizontal, vertical = (list(map(statistics.mean, each.T)) for each in (places, values))
        ends = places[:, -1]
        count = "" if same_counts else f", {len(runs)} seed{'s' if len(runs) > 1 else ''}"
        step = max(1, epochs // MARKERS_PER_LINE)
        marked = (epochs - 1) % step, step  # among them the last point
        axes.plot(horizontal, vertical, label=label + count, markevery=marked, **styles[label])
        colour = styles[label]["color"]
        if len(runs) > 1:
            low, high = list(map(min, values.T)), list(map(max, values.T))
            axes.fill_between(horizontal, low, high, color=colour, alpha=0.15, linewidth=0)
        if ends.max() > ends.min():
            end = horizontal[-1]
            bar = [[end - ends.min()], [ends.max() - end]]
            axes.errorbar([end], vertical[-1:], xerr=bar, color=colour, capsize=3, linewidth=1)
    label_axes(axes, AXES[x], AXES[y], title=title)
    if y in BINARY:
        axes.set_yscale("log", base=2)
        plain_log_ticks(axes.yaxis, 2)


def describe_seeds(named_runs: Mapping[str, Runs], *, band: str = "band") -> str:
    """Say how many seeds there are, and what a line and a band are, for the title of a legend."""
    counts = sorted({len(runs) for runs in named_runs.values()})
    if counts[-1] == 1:
        return "one seed each"
    seeds = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"line: mean over {seeds} seeds; {band}: lowest to highest seed"


def add_legend(
    figure: Figure, panel: Axes, *, title: str, columns: int = 3, further: Sequence[Artist] = ()
) -> None:
    """Put a legend of a panel's lines and of `further` artists below all panels.

    The figure grows for it. The title explains what is drawn, such as what a band is.
    """
    handles = [*panel.get_legend_handles_labels()[0], *further]
    lines = 1 + math.ceil(len(handles) / columns)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * lines)
    texts: dict[str, Any] = {"title": title, "fontsize": 9, "title_fontsize": 9}
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": columns, "handlelength": 3.2}
    figure.legend(handles=handles, **place, **texts)
