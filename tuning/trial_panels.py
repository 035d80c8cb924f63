"""The picture of a sweep: what each trial reached, over the values of each flag that was searched.

    trials = read_trials(folder / "results.csv")
    draw_trial_panel(axes, trials, "lr", logarithmic=True)                 # one panel
    figure = draw_trials(trials, "accuracy", logarithmic={"lr"})           # one for each flag

It is read at first sight, which Optuna's parallel coordinates are not: there the lines of all
trials cross, and what was stopped early is missing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from tuning.objective import NOT_REACHED

BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#777777"  # colours that the colour-blind tell apart
NO_FLAGS = ("rank", "trial", "state", "value", "epochs", "seconds", "folder", "error")
STOPPED_DEPTH = 0.1  # how far below all values the stopped trials are, as a part of their range

Trial = Mapping[str, str]
"""A row of results.csv: rank, state and value, and the value of each flag that was searched."""


def read_trials(path: Path) -> list[Trial]:
    """Return the trials of a sweep's results.csv, the best first."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def searched_flags(trials: Sequence[Trial]) -> list[str]:
    """Return the flags of which trials had different values."""
    return [name for name in trials[0] if name not in NO_FLAGS and len(values(trials, name)) > 1]


def values(trials: Sequence[Trial], flag: str) -> set[str]:
    """Return the different values of a flag, which some trials may not have."""
    return {trial[flag] for trial in trials} - {""}


def position(value: str) -> float | str:
    """Return where a flag's value is on an axis: a number, or a name of its own."""
    try:
        return float(value)
    except ValueError:
        return value


def is_complete(trial: Trial) -> bool:
    """Tell whether a trial has a value: it was not stopped, and reached what the sweep asks for."""
    return trial["state"] == "COMPLETE" and float(trial["value"]) < NOT_REACHED


def draw_trial_panel(
    axes: Axes,
    trials: Sequence[Trial],
    flag: str,
    *,
    logarithmic: bool = False,
    scale: float = 1.0,
) -> None:
    """Draw the value of each trial over a flag, with the best one marked.

    Trials without a value are crosses below all others.

    Args:
        axes: where to draw.
        trials: rows of results.csv, the best first.
        flag: name of the flag.
        logarithmic: whether the sweep searched the logarithm of the flag.
        scale: what values are multiplied by, such as 100 for percent.
    """
    tried = [trial for trial in trials if trial[flag]]
    places = [position(trial[flag]) for trial in tried]
    heights = [scale * float(trial["value"]) for trial in tried if is_complete(trial)]
    complete, stopped = places[: len(heights)], places[len(heights) :]
    lowest, highest = min(heights, default=0.0), max(heights, default=1.0)
    below = lowest - STOPPED_DEPTH * (highest - lowest)
    axes.scatter(complete, heights, s=24, color=BLUE, label="trial")
    axes.scatter(complete[:1], heights[:1], s=160, marker="*", color=VERMILION, label="best trial")
    label = "stopped early, no value"
    axes.scatter(stopped, [below] * len(stopped), s=24, marker="x", color=GREY, label=label)
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, index: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif any(isinstance(place, str) for place in places):
        axes.margins(x=0.4)
    axes.set_xlabel(f"--{flag}")
    axes.grid(alpha=0.3)


def draw_trials(trials: Sequence[Trial], objective: str, logarithmic: Collection[str]) -> Figure:
    """Draw a panel for each flag that was searched.

    Args:
        trials: rows of results.csv, the best first.
        objective: what the trials' value is.
        logarithmic: the flags of which the sweep searched the logarithm.

    Raises:
        ValueError: all trials had the same flags.
    """
    flags = searched_flags(trials)
    if not flags:
        raise ValueError("all trials had the same flags")
    columns = min(3, len(flags))
    rows = math.ceil(len(flags) / columns)
    figure = Figure(figsize=(1.2 + 2.8 * columns, 1.2 + 2.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for panel, flag in zip(panels, flags):
        draw_trial_panel(panel, trials, flag, logarithmic=flag in logarithmic)
    for unused in panels[len(flags) :]:
        unused.remove()
    figure.suptitle(f"{objective} of {len(trials)} trials over each flag")
    figure.supylabel(f"{objective}, on held-out rows", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
