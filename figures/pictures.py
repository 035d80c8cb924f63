"""The figures: each a function of the logs' groups that returns a figure, or None without its runs.

figure = PICTURES["slamb"](read_groups(LOGS))
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot is imported
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from figures.run_logs import (
    ROOT,
    Row,
    Runs,
    accuracy,
    device_hours,
    last,
    mean,
    per_epoch,
    repeated,
    seconds_to,
)
from training.epoch_report import training_seconds

# The palette of Okabe and Ito, which the colour-blind can tell apart.
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
COLOURS = (BLUE, VERMILION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv*P"
Groups = Mapping[str, Mapping[str, Runs]]
"""The runs of all logs, by group and name."""

DEFAULTS = {  # runs of defaults_cifar10_20pct, and what they are called
    "default": "SGD",
    "default-kaldi-ngd": "KaldiNGD",
    "default-muon": "torch's Muon",
    "default-ngd": "NGD",
}
METHODS = {"sgd": "SGD", "kaldi-ngd": "Kaldi's NGD"}  # in the names of runs
IMAGES, TEXTS = "ResNet-20, 20 % of CIFAR-10", "Transformer, AG News subset"
ABLATIONS = {  # each row adds one method to those before it
    IMAGES: {
        "plain: fp32, SGD": ("resnet20_batch", "sgd-64-fp32"),
        "+ bf16": ("resnet20_batch", "sgd-64"),
        "+ natural\ngradient": ("resnet20_batch", "kaldi-ngd-64"),
    },
    TEXTS: {
        "plain: fp32": ("agnews12k", "plain-fp32"),
        "+ bf16": ("agnews12k", "plain"),
        "+ prior,\nhalf the epochs,\nlower learning rate": ("agnews12k", "prior"),
    },
}
SCALING_RESULTS = ROOT / "benchmarks" / "results" / "scaling-cpu.json"

# -------------------------------------------------------------------- columns of metrics.jsonl


def epoch(row: Row) -> float:
    """Return the epoch of a row."""
    return row["epoch"]


def seconds(row: Row) -> float:
    """Return the seconds of training since the start of the run."""
    return training_seconds(row)


def column(key: str, scale: float = 1.0) -> Callable[[Row], float]:
    """Return a function that reads one column, multiplied by `scale`; null is not a number."""
    return lambda row: math.nan if row[key] is None else scale * row[key]


def with_megabytes_sent(rows: Sequence[Row]) -> list[Row]:
    """Add to each row the megabytes that each rank has sent since the start of the run."""
    totals = itertools.accumulate(row["comm_bytes"] for row in rows)
    return [{**row, "sent": total / 1e6} for row, total in zip(rows, totals)]


# -------------------------------------------------------------------- parts of a figure


def style(index: int) -> dict[str, Any]:
    """Return colour and marker of the line with this index."""
    return {"color": COLOURS[index % 7], "marker": MARKERS[index % 7], "markersize": 4}


def plot_runs(
    axes: Axes,
    runs: Runs,
    *,
    x: Callable[[Row], float],
    y: Callable[[Row], float],
    index: int,
    label: str,
) -> None:
    """Plot the mean over seeds as a line, and the range over seeds as a band."""
    values = per_epoch(runs, y)
    horizontal = mean(per_epoch(runs, x))
    axes.plot(horizontal, mean(values), label=label, **style(index))
    low, high = [min(each) for each in values], [max(each) for each in values]
    axes.fill_between(horizontal, low, high, color=COLOURS[index % 7], alpha=0.15, linewidth=0)


def label_axes(
    axes: Axes, xlabel: str, ylabel: str, *, title: str = "", legend: bool = False
) -> None:
    """Set the labels, and add a grid and, if asked for, a legend."""
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(fontsize=8)


def plain_log_ticks(axis: Any, base: int = 10) -> None:
    """Give a logarithmic axis (`axes.xaxis`) ticks at powers, written as plain numbers."""
    axis.set_major_locator(LogLocator(base, subs=(1.0, 3.0) if base == 10 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def create_panels(rows: int, columns: int) -> tuple[Figure, Any]:
    """Return a figure and its axes, an array of shape (rows, columns)."""
    size = (4 * columns, 3.6 * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


# -------------------------------------------------------------------- the figures


def overview(named_runs: Mapping[str, Runs], title: str = "") -> Figure:
    """Plot test accuracy against epochs and seconds, and training loss against epochs."""
    figure, axes = create_panels(1, 3)
    figure.suptitle(title)
    has_test = all("test_accuracy" in rows[0] for runs in named_runs.values() for rows in runs)
    ylabel = "test accuracy / %" if has_test else "accuracy on test or held-out rows / %"
    for index, (name, runs) in enumerate(named_runs.items()):
        plot_runs(axes[0, 0], runs, x=epoch, y=accuracy, index=index, label=name)
        plot_runs(axes[0, 1], runs, x=seconds, y=accuracy, index=index, label=name)
        plot_runs(axes[0, 2], runs, x=epoch, y=column("train_loss"), index=index, label=name)
    label_axes(axes[0, 0], "epoch", ylabel, legend=True)
    label_axes(axes[0, 1], "time / s", ylabel)
    label_axes(axes[0, 2], "epoch", "training loss")
    return figure


def draw_group(group: str, groups: Groups, *, only_repeated: bool = False) -> Figure | None:
    """Draw the overview of one group.

    Args:
        group: name of the group.
        groups: all logs.
        only_repeated: leave out runs of a single seed, which were the search for a setting.
    """
    named_runs = groups.get(group, {})
    if not named_runs:
        return None
    return overview(repeated(named_runs) if only_repeated else named_runs)


def draw_time(groups: Groups) -> Figure | None:
    """Draw time against epochs for each ablation, and what each method saves.

    The saving is in the time to the highest accuracy that all runs of the ablation reach.
    """
    ablations = {
        title: {
            name: groups[group][run]
            for name, (group, run) in rows.items()
            if run in groups.get(group, {})
        }
        for title, rows in ABLATIONS.items()
    }
    if any(len(ablation) < 2 for ablation in ablations.values()):
        return None
    figure, axes = create_panels(2, 2)
    for panel, (title, ablation) in enumerate(ablations.items()):
        for index, (name, runs) in enumerate(ablation.items()):
            plot_runs(axes[0, panel], runs, x=epoch, y=seconds, index=index, label=name)
        label_axes(axes[0, panel], "epoch", "time / s", title=title, legend=True)
        target = min(statistics.mean(last(runs, accuracy)) for runs in ablation.values())
        times = {name: seconds_to(runs, target) for name, runs in ablation.items()}
        reached = {name: time for name, time in times.items() if time}
        draw_waterfall(axes[1, panel], list(reached), list(reached.values()))
        label_axes(axes[1, panel], "", f"time to {target:.1f} % test accuracy / s")
    return figure


def draw_waterfall(axes: Axes, names: Sequence[str], times: Sequence[float]) -> None:
    """Draw bars from the time before each method to the time with it.

    Args:
        axes: where to draw.
        names: the first is the plain run, each other one adds a method.
        times: seconds of each.
    """
    first, final, changes = times[0], times[-1], list(zip(times, times[1:]))
    axes.bar(0, first, color=BLUE)
    for position, (before, after) in enumerate(changes, 1):
        colour = GREEN if after <= before else VERMILION
        axes.bar(position, before - after, bottom=after, color=colour)
    axes.bar(len(times), final, color=BLUE)
    heights = [first, *(max(change) for change in changes), final]
    labels = [f"{first:.0f} s"]
    labels += [f"{after - before:+.0f} s" for before, after in changes]
    labels += [f"{final:.0f} s\n{first / final:.1f} x faster"]
    for position, (height, label) in enumerate(zip(heights, labels)):
        axes.annotate(label, (position, height), ha="center", va="bottom", fontsize=8)
    tick_labels = [name.replace(": ", ":\n") for name in names] + ["all"]
    axes.set_xticks(range(len(times) + 1), tick_labels, fontsize=8)
    axes.set_ylim(0, 1.2 * max(heights))


def draw_ngd_batches(groups: Groups) -> Figure | None:
    """Draw training and test accuracy of SGD and NGD at a small and a large batch size."""
    named_runs = {
        name: runs
        for name, runs in groups.get("resnet20_batch", {}).items()
        if not name.endswith("fp32")
    }
    if not named_runs:
        return None
    figure, axes = create_panels(1, 2)
    train_accuracy = column("train_accuracy", 100)
    for index, (name, runs) in enumerate(named_runs.items()):
        method, _, batch = name.rpartition("-")
        label = f"{METHODS[method]}, batch {batch}"
        plot_runs(axes[0, 0], runs, x=epoch, y=train_accuracy, index=index, label=label)
        plot_runs(axes[0, 1], runs, x=epoch, y=accuracy, index=index, label=label)
    label_axes(axes[0, 0], "epoch", "training accuracy / %", title=IMAGES, legend=True)
    label_axes(axes[0, 1], "epoch", "test accuracy / %", title=IMAGES)
    return figure


def draw_defaults(groups: Groups) -> Figure | None:
    """Draw test accuracy and training loss of optimizers at their default rates, over epochs.

    Times are left out: other work ran beside some of these runs.
    """
    named_runs = groups.get("defaults_cifar10_20pct", {})
    if not DEFAULTS.keys() <= named_runs.keys():
        return None
    figure, axes = create_panels(1, 2)
    for index, (name, label) in enumerate(DEFAULTS.items()):
        runs = named_runs[name]
        plot_runs(axes[0, 0], runs, x=epoch, y=accuracy, index=index, label=label)
        plot_runs(axes[0, 1], runs, x=epoch, y=column("train_loss"), index=index, label=label)
    label_axes(axes[0, 0], "epoch", "test accuracy / %", title=IMAGES, legend=True)
    label_axes(axes[0, 1], "epoch", "training loss", title="default rates, three seeds")
    return figure


def draw_dynamic_batching(processes: int, groups: Groups) -> Figure | None:
    """Draw accuracy and batch size of each batch-size rule on MNIST and CIFAR-10."""
    data_sets = {
        "MNIST": groups.get(f"dynamic_batch_mnist_{processes}p", {}),
        "CIFAR-10": groups.get(f"dynamic_batch_cifar10_{processes}p", {}),
    }
    if not all(data_sets.values()):
        return None
    figure, axes = create_panels(2, 2)
    batch_size = column("batch_size")
    for panel, (data_set, named_runs) in enumerate(data_sets.items()):
        for index, (name, runs) in enumerate(named_runs.items()):
            plot_runs(axes[0, panel], runs, x=epoch, y=accuracy, index=index, label=name)
            plot_runs(axes[1, panel], runs, x=epoch, y=batch_size, index=index, label=name)
        title = f"10 % of {data_set}, {processes} process{'es' if processes > 1 else ''}"
        label_axes(axes[0, panel], "epoch", "test accuracy / %", title=title, legend=True)
        label_axes(axes[1, panel], "epoch", "global batch size / samples")
        axes[1, panel].set_yscale("log", base=2)
        plain_log_ticks(axes[1, panel].yaxis, 2)
    return figure


def draw_slamb(groups: Groups) -> Figure | None:
    """Draw accuracy against epochs and against the bytes that each rank has sent."""
    named_runs = groups.get("slamb_convergence_20pct")
    if not named_runs:
        return None
    figure, axes = create_panels(1, 2)
    sent = column("sent")
    for index, (name, runs) in enumerate(named_runs.items()):
        runs_with_sent = [with_megabytes_sent(rows) for rows in runs]
        plot_runs(axes[0, 0], runs, x=epoch, y=accuracy, index=index, label=name)
        plot_runs(axes[0, 1], runs_with_sent, x=sent, y=accuracy, index=index, label=name)
    axes[0, 1].set_xscale("log")
    plain_log_ticks(axes[0, 1].xaxis)
    title = f"{IMAGES}, two ranks"
    label_axes(axes[0, 0], "epoch", "test accuracy / %", title=title, legend=True)
    label_axes(axes[0, 1], "sent by each rank / MB", "test accuracy / %")
    return figure


def draw_scaling(groups: Groups) -> Figure | None:
    """Draw parallel efficiency against processes: predicted as lines, measured as points."""
    if not SCALING_RESULTS.exists():
        return None
    results = json.loads(SCALING_RESULTS.read_text())
    ratios = {row["name"]: row["ratios"] for row in results["rows"]}
    figure, axes = create_panels(1, 2)
    figure.set_size_inches(8, 4.2)
    for panel, (arch, batch) in enumerate((("resnet20", 64), ("resnet110", 32))):
        for network, line_style, mbits in (
            ("1 Gbit/s", "-", "1000 Mbit/s"),
            ("100 Mbit/s", "--", "100 Mbit/s"),
        ):
            predicted = results["measured"][f"{arch} predicted"][mbits]
            for index, (method, values) in enumerate(predicted.items()):
                colour = COLOURS[index]
                label = method.replace(" hook", "").replace(" block k=0.1", "") + f", {network}"
                axes[0, panel].plot(results["many"], values, line_style, color=colour, label=label)
                if measured := ratios.get(f"{arch} {network} N=2 {method}", []):
                    plot_measured_efficiency(axes[0, panel], measured, index)
        axes[0, panel].set_xscale("log", base=2)
        plain_log_ticks(axes[0, panel].xaxis, 2)
        axes[0, panel].set_ylim(0, 1.05)
        title = f"{arch.replace('resnet', 'ResNet-')}, {batch} images per process"
        label_axes(axes[0, panel], "processes", "efficiency", title=title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def plot_measured_efficiency(axes: Axes, ratios: Sequence[float], index: int) -> None:
    """Plot the median of two processes' efficiency, with bars from minimum to maximum."""
    median = statistics.median(ratios)
    bars = [[median - min(ratios)], [max(ratios) - median]]
    axes.errorbar([2], [median], bars, fmt=MARKERS[index], color=COLOURS[index], capsize=3)


def draw_pareto(groups: Groups) -> Figure | None:
    """Draw device-hours against accuracy of every run, and the Pareto front.

    Data sets, and runs on CPUs and GPUs, have a panel each.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for group, named_runs in groups.items():
        if "mnist" in group:
            continue
        data_set = "AG News" if "agnews" in group or "transformer" in group else "CIFAR-10"
        device = "GPU" if group.startswith("gpu_") else "CPU"
        panels.setdefault(f"{data_set}, {device}", {})[group] = [
            (device_hours(rows[-1]), accuracy(rows[-1]))
            for runs in named_runs.values()
            for rows in runs
        ]
    if not panels:
        return None
    figure, axes = create_panels(1, len(panels))
    figure.set_size_inches(5.5 * len(panels), 4.5)
    for panel, (title, points) in zip(axes[0], sorted(panels.items())):
        for index, (group, pairs) in enumerate(points.items()):
            plot_points(panel, pairs, index=index, label=group)
        front = pareto_front([pair for pairs in points.values() for pair in pairs])
        panel.plot(*zip(*front), color="0.5", linewidth=1, zorder=0)
        panel.set_xscale("log")
        plain_log_ticks(panel.xaxis)
        spread_high_accuracies(panel)
        title = f"{title}: every run, last epoch"
        label_axes(panel, "device-hours", "test accuracy / %", title=title, legend=True)
    return figure


def plot_points(
    axes: Axes, points: Sequence[tuple[float, float]], *, index: int, label: str
) -> None:
    """Plot points; after seven groups the markers are hollow."""
    colour = COLOURS[index % 7]
    x, y = zip(*points)
    axes.scatter(
        x,
        y,
        s=22,
        marker=MARKERS[index % 7],
        edgecolors=colour,
        facecolors="none" if index >= 7 else colour,
        label=label,
    )


def spread_high_accuracies(axes: Axes) -> None:
    """Scale the vertical axis by -log(102 - percent), which gives high accuracies more room."""
    to_axis, from_axis = (lambda a: -np.log(102 - a)), (lambda e: 102 - np.exp(-e))
    axes.set_yscale("function", functions=(to_axis, from_axis))
    percents = (10, 30, 50, 60, 70, 80, 85, 90, 95, 98)
    axes.set_yticks([percent for percent in percents if percent < axes.get_ylim()[1]])


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, value) that no other point beats in both, the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


OVERVIEWS = (
    "ngd_meta",
    "agnews12k",
    "mixup_agnews12k",
    "mixup_cifar10_10pct",
    "recipes_cifar10_20pct",
    "tuning_agnews12k",
)
PICTURES: dict[str, Callable[[Groups], Figure | None]] = {
    "time": draw_time,
    "training_ngd_batch_compare": draw_ngd_batches,
    "dynamic_batching_1": partial(draw_dynamic_batching, 1),
    "dynamic_batching_2": partial(draw_dynamic_batching, 2),
    "dynamic_batching_4": partial(draw_dynamic_batching, 4),
    "slamb": draw_slamb,
    "scaling": draw_scaling,
    "pareto": draw_pareto,
    "defaults_cifar10_20pct": draw_defaults,
    **{group: partial(draw_group, group) for group in OVERVIEWS},
}
