"""The pictures: each a function of the logs' groups that returns a figure, or None where its runs are not there.

picture = PICTURES["slamb"](read_groups(LOGS))
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend comes first
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

from figures.logs import (
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

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito's, for the colour-blind too
MARKERS = "os^Dv*P"
Groups = Mapping[str, Mapping[str, Runs]]

IMAGES, TEXTS = "ResNet-20, 20 % of CIFAR-10", "Transformer, AG News subset"
LADDERS = {  # each trick added to those before
    IMAGES: {
        "plain: fp32, SGD": ("resnet20_batch", "sgd-64-fp32"),
        "+ bf16": ("resnet20_batch", "sgd-64"),
        "+ natural\ngradient": ("resnet20_batch", "ngd-64"),
    },
    TEXTS: {
        "plain: fp32": ("agnews12k", "plain-fp32"),
        "+ bf16": ("agnews12k", "plain"),
        "+ prior,\nhalf the epochs,\na lower rate": ("agnews12k", "prior"),
    },
}
SCALING = ROOT / "benchmarks" / "results" / "scaling-cpu.json"


def epoch(row: Row) -> float:
    return row["epoch"]


def seconds(row: Row) -> float:
    return row["seconds"]


def value_of(key: str, scale: float = 1.0) -> Callable[[Row], float]:
    """A column of metrics.jsonl."""
    return lambda row: scale * row[key]


def style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 7], "marker": MARKERS[number % 7], "markersize": 4}


def line(
    axis: Axes,
    runs: Runs,
    across: Callable[[Row], float],
    up: Callable[[Row], float],
    number: int,
    label: str,
) -> None:
    """The mean over seeds, and a band from the least to the most."""
    values = per_epoch(runs, up)
    horizontal = mean(per_epoch(runs, across))
    axis.plot(horizontal, mean(values), label=label, **style(number))
    low, high = [min(each) for each in values], [max(each) for each in values]
    axis.fill_between(horizontal, low, high, color=COLOURS[number % 7], alpha=0.15, linewidth=0)


def finish(axis: Axes, across: str, up: str, title: str = "", legend: bool = False) -> None:
    axis.set(xlabel=across, ylabel=up, title=title)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=8)


def logarithmic(axis: Any, base: int = 10) -> None:
    """An axis (`axes.xaxis`) in powers, its ticks plain numbers."""
    axis.set_major_locator(LogLocator(base, subs=(1.0, 3.0) if base == 10 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def panels(rows: int, columns: int) -> tuple[Figure, Any]:
    return plt.subplots(
        rows, columns, figsize=(4 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )


def overview(named: Mapping[str, Runs]) -> Figure:
    """Test accuracy against epochs and seconds, training loss against epochs."""
    figure, axes = panels(1, 3)
    tested = all("test_accuracy" in rows[0] for runs in named.values() for rows in runs)
    what = (
        "test accuracy / %"
        if tested
        else "accuracy (held-out rows where the test set was left alone) / %"
    )
    for number, (name, runs) in enumerate(named.items()):
        line(axes[0, 0], runs, epoch, accuracy, number, name)
        line(axes[0, 1], runs, seconds, accuracy, number, name)
        line(axes[0, 2], runs, epoch, value_of("train_loss"), number, name)
    finish(axes[0, 0], "epoch", what, legend=True)
    finish(axes[0, 1], "time / s", what)
    finish(axes[0, 2], "epoch", "training loss")
    return figure


def time(groups: Groups) -> Figure | None:
    """Time against epochs with and without the tricks, and what each takes off the time to an accuracy that all of them reach."""
    ladders = {
        title: {
            name: groups[group][run]
            for name, (group, run) in ladder.items()
            if run in groups.get(group, {})
        }
        for title, ladder in LADDERS.items()
    }
    if any(len(ladder) < 2 for ladder in ladders.values()):
        return None
    figure, axes = panels(2, 2)
    for column, (title, ladder) in enumerate(ladders.items()):
        for number, (name, runs) in enumerate(ladder.items()):
            line(axes[0, column], runs, epoch, seconds, number, name)
        finish(axes[0, column], "epoch", "time / s", title, legend=True)
        target = min(statistics.mean(last(runs, accuracy)) for runs in ladder.values())
        reached = {
            name: taken for name, runs in ladder.items() if (taken := seconds_to(runs, target))
        }
        waterfall(axes[1, column], list(reached), list(reached.values()))
        finish(axes[1, column], "", f"time to {target:.1f} % test accuracy / s")
    return figure


def waterfall(axis: Axes, names: Sequence[str], taken: Sequence[float]) -> None:
    """Bars from the time before a trick to the time with it; the first and the last stand on the ground."""
    axis.bar(0, taken[0], color=COLOURS[0])
    for place, (before, after) in enumerate(zip(taken, taken[1:]), 1):
        axis.bar(
            place, before - after, bottom=after, color=COLOURS[2] if after <= before else COLOURS[1]
        )
    axis.bar(len(taken), taken[-1], color=COLOURS[0])
    heights = [taken[0], *map(max, taken, taken[1:]), taken[-1]]
    texts = [
        f"{taken[0]:.0f} s",
        *(f"{after - before:+.0f} s" for before, after in zip(taken, taken[1:])),
    ]
    for place, (height, text) in enumerate(
        zip(heights, [*texts, f"{taken[-1]:.0f} s\n{taken[0] / taken[-1]:.1f} x faster"])
    ):
        axis.annotate(text, (place, height), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(
        range(len(taken) + 1), [name.replace(": ", ":\n") for name in names] + ["all"], fontsize=8
    )
    axis.set_ylim(0, 1.2 * max(heights))


def ngd_batches(groups: Groups) -> Figure | None:
    """SGD and NGD, small and large batch, train and test."""
    named = {
        name: runs
        for name, runs in groups.get("resnet20_batch", {}).items()
        if not name.endswith("fp32")
    }
    if not named:
        return None
    figure, axes = panels(1, 2)
    for number, (name, runs) in enumerate(named.items()):
        method, _, batch = name.partition("-")
        for axis, up in zip(axes[0], (value_of("train_accuracy", 100), accuracy)):
            line(axis, runs, epoch, up, number, f"{method.upper()}, batch {batch}")
    finish(axes[0, 0], "epoch", "training accuracy / %", IMAGES, legend=True)
    finish(axes[0, 1], "epoch", "test accuracy / %", IMAGES)
    return figure


def of_group(group: str, groups: Groups, searched: bool = False) -> Figure | None:
    """The overview of one group; `searched`: of the settings that were repeated, without the search for them."""
    named = groups.get(group, {})
    return overview(repeated(named) if searched else named) if named else None


def dynamic_batching(processes: int, groups: Groups) -> Figure | None:
    """Ways to change the batch, on so many processes: accuracy and batch of MNIST and CIFAR-10."""
    found = {
        name: groups.get(f"dynamic_batch_{name.lower().replace('-', '')}_{processes}p", {})
        for name in ("MNIST", "CIFAR-10")
    }
    if not all(found.values()):
        return None
    figure, axes = panels(2, 2)
    for column, (title, named) in enumerate(found.items()):
        for number, (name, runs) in enumerate(named.items()):
            line(axes[0, column], runs, epoch, accuracy, number, name)
            line(axes[1, column], runs, epoch, value_of("batch_size"), number, name)
        heading = f"10 % of {title}, {processes} process{'es' if processes > 1 else ''}"
        finish(axes[0, column], "epoch", "test accuracy / %", heading, legend=True)
        finish(axes[1, column], "epoch", "global batch / samples")
        axes[1, column].set_yscale("log", base=2)
        logarithmic(axes[1, column].yaxis, 2)
    return figure


def slamb(groups: Groups) -> Figure | None:
    """Accuracy against epochs, and against the bytes that each rank has sent."""
    named = groups.get("slamb_convergence_20pct")
    if not named:
        return None
    figure, axes = panels(1, 2)
    for number, (name, runs) in enumerate(named.items()):
        line(axes[0, 0], runs, epoch, accuracy, number, name)
        line(
            axes[0, 1], [with_sent(rows) for rows in runs], value_of("sent"), accuracy, number, name
        )
    axes[0, 1].set_xscale("log")
    logarithmic(axes[0, 1].xaxis)
    finish(axes[0, 0], "epoch", "test accuracy / %", f"{IMAGES}, two ranks", legend=True)
    finish(axes[0, 1], "sent by each rank / MB", "test accuracy / %")
    return figure


def with_sent(rows: Sequence[Row]) -> list[Row]:
    """Rows with the megabytes sent since the start."""
    return [
        {**row, "sent": sent / 1e6}
        for row, sent in zip(rows, itertools.accumulate(row["comm_bytes"] for row in rows))
    ]


def scaling(groups: Groups) -> Figure | None:
    """Efficiency against workers: lines are the model's, points were measured."""
    if not SCALING.exists():
        return None
    found = json.loads(SCALING.read_text())
    spread = {row["name"]: row["ratios"] for row in found["rows"]}
    figure, axes = panels(1, 2)
    figure.set_size_inches(8, 4.2)
    for axis, (arch, batch) in zip(axes[0], (("resnet20", 64), ("resnet110", 32))):
        for network, dashes, mbits in (
            ("1 Gbit/s", "-", "1000 Mbit/s"),
            ("100 Mbit/s", "--", "100 Mbit/s"),
        ):
            for number, (method, values) in enumerate(
                found["measured"][f"{arch} predicted"][mbits].items()
            ):
                label = method.replace(" hook", "").replace(" block k=0.1", "")
                axis.plot(
                    found["many"],
                    values,
                    dashes,
                    color=COLOURS[number],
                    label=f"{label}, {network}",
                )
                ratios = spread.get(f"{arch} {network} N=2 {method}", [])
                if ratios:
                    middle = statistics.median(ratios)
                    bars = [[middle - min(ratios)], [max(ratios) - middle]]
                    axis.errorbar(
                        [2], [middle], bars, fmt=MARKERS[number], color=COLOURS[number], capsize=3
                    )
        axis.set_xscale("log", base=2)
        logarithmic(axis.xaxis, 2)
        axis.set_ylim(0, 1.05)
        finish(
            axis,
            "processes",
            "efficiency",
            f"{arch.replace('resnet', 'ResNet-')}, {batch} images a process",
        )
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8
    )
    return figure


def pareto(groups: Groups) -> Figure | None:
    """Device-hours against accuracy of every run, CPUs and GPUs apart; the line joins those that no other one beats in both."""
    tasks: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for group, named in groups.items():
        if "mnist" in group:
            continue
        task = "AG News" if "agnews" in group or "transformer" in group else "CIFAR-10"
        points = [
            (device_hours(rows[-1]), accuracy(rows[-1])) for runs in named.values() for rows in runs
        ]
        tasks.setdefault(f"{task}, {'GPU' if group.startswith('gpu_') else 'CPU'}", {})[group] = (
            points
        )
    if not tasks:
        return None
    figure, axes = panels(1, len(tasks))
    figure.set_size_inches(5.5 * len(tasks), 4.5)
    for axis, (task, found) in zip(axes[0], sorted(tasks.items())):
        for number, (group, points) in enumerate(found.items()):
            colour = COLOURS[number % 7]
            inside = "none" if number >= 7 else colour
            axis.scatter(
                *zip(*points),
                s=22,
                marker=MARKERS[number % 7],
                edgecolors=colour,
                facecolors=inside,
                label=group,
            )
        best = frontier([point for points in found.values() for point in points])
        axis.plot(*zip(*best), color="0.5", linewidth=1, zorder=0)
        axis.set_xscale("log")
        logarithmic(axis.xaxis)
        axis.set_yscale(
            "function", functions=(lambda a: -np.log(102 - a), lambda e: 102 - np.exp(-e))
        )  # room at the top
        axis.set_yticks(
            [
                percent
                for percent in (10, 30, 50, 60, 70, 80, 85, 90, 95, 98)
                if percent < axis.get_ylim()[1]
            ]
        )
        finish(
            axis, "device-hours", "test accuracy / %", f"{task}: every run, last epoch", legend=True
        )
    return figure


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those for which no other is cheaper and more accurate, the cheapest first."""
    best: list[tuple[float, float]] = []
    for hours, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or value > best[-1][1]:
            best.append((hours, value))
    return best


PICTURES: dict[str, Callable[[Groups], Figure | None]] = {
    "time": time,
    "training_ngd_batch_compare": ngd_batches,
    "ngd_meta": partial(of_group, "ngd_meta"),
    **{f"dynamic_batching_{count}": partial(dynamic_batching, count) for count in (1, 2, 4)},
    "slamb": slamb,
    "scaling": scaling,
    "pareto": pareto,
    **{
        group: partial(of_group, group)
        for group in ("agnews12k", "mixup_agnews12k", "mixup_cifar10_10pct")
    },
    **{group: partial(of_group, group) for group in ("recipes_cifar10_20pct", "tuning_agnews12k")},
    "ngd_convergence": partial(of_group, "ngd_convergence", searched=True),
}
