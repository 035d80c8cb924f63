"""The figures: each a function of the logs' groups that returns a figure.

figure = PICTURES["slow_network_time"](read_groups(LOGS))
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from figures.methods import (
    BLUE,
    COMPRESSIONS,
    GREY,
    LABELS,
    OPTIMIZERS,
    VERMILION,
    line_styles,
    method_of,
    setting_of,
)
from figures.panels import (
    add_legend,
    column,
    create_panels,
    describe_seeds,
    epoch,
    label_axes,
    plain_log_ticks,
    plot_methods,
)
from figures.run_logs import (
    LOGS,
    ROOT,
    Row,
    Runs,
    accuracy,
    device_hours,
    epochs_to,
    last,
    read_flags,
)
from training.epoch_report import training_seconds

Groups = Mapping[str, Mapping[str, Runs]]
"""The runs of all logs, by group and name."""

SMALL_IMAGES = "ResNet-20, 20 % of CIFAR-10"
SMALL_TEXTS = "Transformer, 12,000 rows of AG News"
RESULTS = ROOT / "benchmarks" / "results"
TIMES = {  # time_to_target's measurements of the runs in optimizers_* and soap_*
    "ResNet-20, all of CIFAR-10": ("cifar10", "time-to-target-resnet20-cpu.json"),
    "VGG8, all of CIFAR-10 at 24 pixels": ("vgg8", "time-to-target-vgg8-cpu.json"),
    SMALL_TEXTS: ("agnews12k", "time-to-target-texts-cpu.json"),
}
SLOW_NETWORKS = {  # the same of the runs in slow_network_cifar10
    "1 Gbit/s": "time-to-target-1gbit-cpu.json",
    "100 Mbit/s": "time-to-target-100mbit-cpu.json",
}
SCALING_METHODS = {  # in these results, and what they are called
    "DDP + LAMB": "LAMB",
    "DDP bf16 hook + LAMB": "LAMB with bf16 gradients",
    "SLAMB block k=0.1 bf16": "SLAMB",
}
SEARCH_RANGE = 0.3  # of losses in the enlarged panel of a search, as a part of the lowest
CRITICAL_TARGET = 45  # percent, in the picture of the critical batch
LOGARITHMIC = {"lr", "weight_decay"}  # flags whose logarithm a sweep searched
ACCURACY_RANGE = 6  # points of accuracy below the highest that an enlarged panel shows
STOPPED_DEPTH = 0.1  # how far below all values the stopped trials are, as a part of their range


def labelled(groups: Groups, *names: str) -> dict[str, Runs]:
    """Return the runs of these groups that have a label, by their labels and in that order."""
    return {
        label: groups[name][run]
        for name in names
        for run, label in LABELS[name].items()
        if run in groups[name]
    }


def read_results(file: str) -> Any:
    """Return the content of a file of benchmarks/results."""
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


# -------------------------------------------------------------------- values over epochs and time


@dataclass(frozen=True)
class Panel:
    """A value of each row of metrics.jsonl over another.

    Attributes:
        y, ylabel: the value and the title of its axis.
        x, xlabel: the same of the horizontal axis.
        is_binary: whether the vertical axis has powers of two.
    """

    y: Callable[[Row], float]
    ylabel: str
    x: Callable[[Row], float] = epoch
    xlabel: str = "epoch"
    is_binary: bool = False

    def over_time(self, xlabel: str = "training time / s") -> Panel:
        """Return the same over the seconds of training since the start of the run."""
        return replace(self, x=training_seconds, xlabel=xlabel)

    def draw(self, axes: Axes, named_runs: Mapping[str, Runs], title: str = "") -> None:
        """Draw a line for each method."""
        plot_methods(axes, named_runs, x=self.x, y=self.y)
        label_axes(axes, self.xlabel, self.ylabel, title=title)
        if self.is_binary:
            axes.set_yscale("log", base=2)
            plain_log_ticks(axes.yaxis, 2)


ACCURACY = Panel(accuracy, "test accuracy / %")
LOSS = Panel(column("train_loss"), "training loss (cross-entropy)")


def overview(named_runs: Mapping[str, Runs], title: str = "") -> Figure:
    """Draw accuracy against epochs and seconds, and training loss against epochs."""
    has_test = all("test_accuracy" in rows[0] for runs in named_runs.values() for rows in runs)
    ylabel = ACCURACY.ylabel if has_test else "accuracy on test or held-out rows / %"
    panel = replace(ACCURACY, ylabel=ylabel)
    columns = 4 if len(named_runs) == 4 else 3
    return draw_panels((panel, panel.over_time(), LOSS), named_runs, title, columns=columns)


def draw_panels(
    panels: Sequence[Panel],
    named_runs: Mapping[str, Runs],
    title: str,
    *,
    enlarged: bool = False,
    columns: int = 3,
) -> Figure:
    """Draw panels side by side.

    Args:
        panels: what they show.
        named_runs: the runs by their labels.
        title: of the figure.
        enlarged: draw the panels a second time, with their highest accuracies alone.
        columns: of the legend.
    """
    figure, axes = create_panels(1 + enlarged, len(panels), title)
    for row in axes:
        for panel, each in zip(row, panels):
            each.draw(panel, named_runs)
    for panel in axes[1] if enlarged else ():
        enlarge_highest(panel, named_runs)
        panel.set_title("the highest accuracies, enlarged", fontsize=10)
    has_time = any(panel.x is training_seconds for panel in panels)
    band = "band, and bar of times" if has_time else "band"
    bands = describe_seeds(named_runs, band=band)
    add_legend(figure, axes[0, 0], title=bands, columns=columns)
    return figure


def enlarge_highest(axes: Axes, named_runs: Mapping[str, Runs]) -> None:
    """Let a panel show the accuracies near the highest last one."""
    highest = max(max(last(runs, accuracy)) for runs in named_runs.values())
    axes.set_ylim(highest - ACCURACY_RANGE, highest + 0.1 * ACCURACY_RANGE)


def draw_group(
    names: Sequence[str], panels: Sequence[Panel], title: str, groups: Groups, **settings: Any
) -> Figure:
    """Draw panels of the runs of these groups; `settings` are those of `draw_panels`."""
    return draw_panels(panels, labelled(groups, *names), title, **settings)


def optimizers_in_full(data_set: str, title: str) -> Callable[[Groups], Figure]:
    """Return a function that draws optimizers over epochs and time, at the best of a search."""
    time = ACCURACY.over_time("training time on one core, beside other work / s")
    title = f"Optimizers, each at the best setting of its search\n{title}"
    names = (f"optimizers_{data_set}", f"soap_{data_set}")
    return partial(draw_group, names, (ACCURACY, time), title, enlarged=True)


# -------------------------------------------------------------------- mixing of samples


def draw_mixing(group: str, search: str, title: str, note: str, groups: Groups) -> Figure:
    """Draw accuracies of a search over the rates for each kind of mixing, and its gain by seed."""
    kinds, named_runs = LABELS[group], groups[group]
    figure, axes = create_panels(1, 3, title)
    styles = line_styles(kinds.values())
    tried: set[float] = set()  # rates, of any kind
    for number, (kind, label) in enumerate(kinds.items()):
        points = sorted(
            (read_flags(search, name)["lr"], max(map(accuracy, runs[0])), accuracy(runs[0][-1]))
            for name, runs in groups[search].items()
            if name.partition("-lr")[0] == kind
        )
        rates, highest, at_end = zip(*points)
        tried.update(rates)
        axes[0, 0].plot(rates, highest, label=label, **styles[label])
        axes[0, 1].plot(rates, at_end, **styles[label])
        plain = last(named_runs["none"], accuracy)
        own = last(named_runs[kind], accuracy)
        gains = [each - none for each, none in zip(own, plain, strict=True)]  # by seed
        style = {**styles[label], "linestyle": "", "markersize": 8}
        axes[0, 2].plot([number] * len(gains), gains, **style)
    ticks = sorted(tried)
    unit, of_unit = (1e-4, " / 0.0001") if ticks[0] < 0.01 else (1.0, "")  # long ticks overlap
    for panel, title in ((axes[0, 0], "search: best epoch"), (axes[0, 1], "search: last epoch")):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{rate / unit:g}" for rate in ticks])
        panel.minorticks_off()
        label_axes(panel, f"learning rate{of_unit}", "held-out accuracy / %", title=title)
    axes[0, 2].set_xticks(range(len(kinds)), kinds, rotation=45, ha="right", fontsize=8)
    axes[0, 2].axhline(0, color=GREY, linewidth=1, zorder=0)
    label_axes(axes[0, 2], "kind of mixing", "gain in test accuracy", title="in full, last epoch")
    legend = f"search: one seed each; in full: a marker for each seed{note}"
    add_legend(figure, axes[0, 0], title=legend)
    return figure


# -------------------------------------------------------------------- the critical batch


def draw_critical_batch(groups: Groups) -> Figure:
    """Draw steps and samples to an accuracy over the batch size, and the gradient noise scale.

    A dashed line is the model of McCandlish et al. (https://arxiv.org/abs/1812.06162, equation
    2.11), fitted to the samples. A dotted upright line is the noise scale that the runs measured in
    the epoch in which they reach the accuracy: the median of all runs of the optimizer.
    A size of which a seed does not reach the accuracy is left out.
    """
    title = f"Steps and samples to {CRITICAL_TARGET} % at the best rate of each batch size"
    figure, axes = create_panels(1, 2, f"{title}\n{SMALL_IMAGES} at 16 pixels, constant rates")
    for optimizer in ("sgd", "ngd"):
        by_batch = reached_by_batch(groups["critical_batch_cifar10_20pct"], optimizer)
        label, batches = OPTIMIZERS[optimizer], sorted(by_batch)
        style = line_styles([label])[label]
        samples = [[run.samples for run in by_batch[size]] for size in batches]
        least, critical = fit_critical_batch(batches, list(map(statistics.mean, samples)))
        noise = statistics.median(run.noise for runs in by_batch.values() for run in runs)
        for panel, scales in ((axes[0, 0], batches), (axes[0, 1], [1] * len(batches))):
            scaled = [[each / scale for each in seeds] for seeds, scale in zip(samples, scales)]
            means = list(map(statistics.mean, scaled))
            bars = [
                [mean - min(seeds) for mean, seeds in zip(means, scaled)],
                [max(seeds) - mean for mean, seeds in zip(means, scaled)],
            ]
            model = [least * (1 + size / critical) / scale for size, scale in zip(batches, scales)]
            line = {"color": style["color"], "linewidth": 1}
            panel.errorbar(batches, means, bars, linestyle="", capsize=3, **line)
            panel.plot(batches, means, label=label, **{**style, "linestyle": ""})
            panel.plot(batches, model, "--", zorder=0, **line)
            panel.axvline(noise, linestyle=":", zorder=0, **line)
    for panel, ylabel in ((axes[0, 0], "steps"), (axes[0, 1], "samples")):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        plain_log_ticks(panel.xaxis, 2)
        plain_log_ticks(panel.yaxis)
        label_axes(panel, "batch size / samples", f"{ylabel} to {CRITICAL_TARGET} %")
    kinds = (
        Line2D([], [], linestyle="--", color=GREY, label="fitted model"),
        Line2D([], [], linestyle=":", color=GREY, label="noise scale, measured"),
    )
    note = "marker: mean over the seeds; bar: lowest to highest seed"
    add_legend(figure, axes[0, 0], title=note, columns=4, further=kinds)
    return figure


@dataclass(frozen=True)
class Reached:
    """What a run needs for the accuracy of the picture of the critical batch.

    Attributes:
        samples: trained on until then.
        noise: the gradient noise scale of that epoch, in samples.
    """

    samples: float
    noise: float


def reached_by_batch(named_runs: Mapping[str, Runs], optimizer: str) -> dict[int, list[Reached]]:
    """Return what each seed of the runs OPTIMIZER-bsSIZE needs, by the size of the batch.

    A size is left out if one of its seeds does not reach the accuracy.
    """
    reached: dict[int, list[Reached]] = {}
    for name, runs in named_runs.items():
        method, _, size = name.partition("-bs")
        epochs = [epochs_to(CRITICAL_TARGET, rows) for rows in runs]
        if method == optimizer and all(map(math.isfinite, epochs)):
            reached[int(size)] = [
                Reached(each * rows[0]["samples"], rows[math.ceil(each) - 1]["noise_scale"])
                for each, rows in zip(epochs, runs)
            ]
    return reached


def fit_critical_batch(batches: Sequence[int], samples: Sequence[float]) -> tuple[float, float]:
    """Fit samples = least * (1 + batch / critical) by least squares of the logarithms.

    Returns:
        The least number of samples, and the critical batch size in samples.
    """
    critical = 2.0 ** (np.arange(1001) / 50)  # 1 to 1,000,000
    least = np.log(samples) - np.log1p(np.array(batches) / critical[:, None])  # by each batch
    best = least.var(axis=1).argmin()
    return float(np.exp(least[best].mean())), float(critical[best])


# -------------------------------------------------------------------- slow networks


def draw_slow_network(groups: Groups) -> Figure:
    """Draw accuracy against the bytes of a step in the search, and over epochs in full."""
    found = best_of_search(groups["slow_network_search_cifar10"])
    labels = LABELS["slow_network_search_cifar10"]
    named_runs = labelled(groups, "slow_network_cifar10")
    title = (
        "Methods for slow networks, each at the best rate of its search\n"
        "ResNet-20, all of CIFAR-10 at 24 pixels, two ranks of batch 512"
    )
    figure, (panels,) = create_panels(1, 2, title)
    styles = line_styles([label for name, label in labels.items() if name in found])
    points = {name: (kilobytes_a_step(rows), accuracy(rows[-1])) for name, rows in found.items()}
    for name, label in labels.items():
        if name in found:
            style = {**styles[label], "linestyle": "", "markersize": 8}
            panels[0].plot(*points[name], label=label, **style)
    for names in COMPRESSIONS:
        colour = styles[labels[names[0]]]["color"]
        line = zip(*(points[name] for name in names))
        panels[0].plot(*line, color=colour, linewidth=1, zorder=0)
    panels[0].set_xscale("log")
    plain_log_ticks(panels[0].xaxis)
    xlabel, ylabel = "sent by each rank in a step / kB", "held-out accuracy / %"
    label_axes(panels[0], xlabel, ylabel, title="search: one seed, a tenth held out")
    ACCURACY.draw(panels[1], named_runs, title="in full")
    add_legend(figure, panels[0], title=f"right, {describe_seeds(named_runs)}")
    return figure


def kilobytes_a_step(rows: Sequence[Row]) -> float:
    """Return the kilobytes that each rank has sent in a step, on average over the run."""
    return sum(row["comm_bytes"] for row in rows) / rows[-1]["step"] / 1e3


def best_of_search(named_runs: Mapping[str, Runs]) -> dict[str, list[Row]]:
    """Return the run METHOD-lrRATE with the lowest last validation loss, by METHOD."""
    best: dict[str, list[Row]] = {}
    for name, (rows,) in named_runs.items():
        method = name.partition("-lr")[0]
        if method not in best or rows[-1]["val_loss"] < best[method][-1]["val_loss"]:
            best[method] = rows
    return best


def draw_slow_network_time(groups: Groups) -> Figure:
    """Draw accuracy against the minutes of training on two slow networks, and LAMB's as a level."""
    named_runs = labelled(groups, "slow_network_cifar10")
    title = "Time to an accuracy on slow networks\nResNet-20, 24 pixels, two ranks of batch 512"
    figure, (panels,) = create_panels(1, 2, title)
    level = statistics.mean(last(named_runs["LAMB"], accuracy))
    labels = LABELS["slow_network_cifar10"]
    for panel, (network, file) in zip(panels, SLOW_NETWORKS.items()):
        timed = with_minutes(named_runs, read_results(file), labels)
        OVER_MINUTES.draw(panel, timed, title=network)
        panel.axhline(level, color=GREY, linewidth=1, zorder=0)
    level_line = Line2D([], [], color=GREY, linewidth=1, label="last accuracy of LAMB")
    add_legend(figure, panels[0], title=describe_seeds(timed), further=[level_line])
    return figure


# -------------------------------------------------------------------- time on a free machine

OVER_MINUTES = replace(ACCURACY, x=column("minutes"), xlabel="training time / minutes")


def draw_time(groups: Groups) -> Figure:
    """Draw the highest accuracies of optimizers over minutes of training, a panel for each problem.

    The accuracies are those of the logs, and the minutes those of a machine with nothing else to
    do, where time_to_target measured each optimizer's samples a second.
    """
    title = "Test accuracy over training time on one core, each optimizer at its best rate"
    figure, (panels,) = create_panels(1, 3, title)
    for panel, (title, (data_set, file)) in zip(panels, TIMES.items()):
        named_runs = labelled(groups, f"optimizers_{data_set}", f"soap_{data_set}")
        timed = with_minutes(named_runs, read_results(file), OPTIMIZERS)
        OVER_MINUTES.draw(panel, timed, title=title)
        enlarge_highest(panel, timed)
    add_legend(figure, panels[2], title=describe_seeds(named_runs))
    return figure


def with_minutes(
    named_runs: Mapping[str, Runs], results: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Runs]:
    """Add the minutes of training to each row, at the speed that time_to_target measured.

    The batch of these runs does not change, so that all epochs of a run take the same time.

    Args:
        named_runs: the runs by their labels; those that were not measured are left out.
        results: the json of time_to_target.
        labels: the labels by the names of the runs, as in the json.
    """
    timed = {}
    for name, label in labels.items():
        if label not in named_runs or name not in results["samples_per_second"]:
            continue
        turns = results["samples_per_second"][name]
        rate = statistics.median(turns["0"] if isinstance(turns, dict) else turns)
        minutes = results["samples_per_epoch"][name] / rate / 60  # of an epoch
        timed[label] = [
            [{**row, "minutes": minutes * row["epoch"]} for row in rows]
            for rows in named_runs[label]
        ]
    return timed


# -------------------------------------------------------------------- searches


def draw_optimizer_search(data_set: str, title: str, groups: Groups) -> Figure:
    """Draw the loss on held-out rows over the learning rate, a curve for each momentum.

    Args:
        data_set: ends the names of two groups, whose runs are named OPTIMIZER-lrRATE and so on.
        title: network, data and length of the runs.
        groups: all logs.
    """
    curves = search_curves(data_set, groups)
    figure, (panels,) = create_panels(1, 2, f"Search of the learning rates: held-out loss\n{title}")
    styles, best = line_styles(curves), best_settings(curves)
    for panel, title in zip(panels, ("all settings", "the lowest losses, enlarged")):
        for label, losses in curves.items():
            panel.plot(*zip(*sorted(losses.items())), label=label, **styles[label])
        for label, point in best.items():
            colour = styles[label]["color"]
            panel.plot(*point, "o", markersize=14, markerfacecolor="none", color=colour)
        panel.set_xscale("log")
        plain_log_ticks(panel.xaxis)
        label_axes(panel, "learning rate", "validation loss (cross-entropy)", title=title)
    lowest = min(loss for _, loss in best.values())
    panels[1].set_ylim((1 - 0.1 * SEARCH_RANGE) * lowest, (1 + SEARCH_RANGE) * lowest)
    note = "one seed each; ring: the best setting of an optimizer"
    add_legend(figure, panels[0], title=note, columns=2)
    return figure


def search_curves(data_set: str, groups: Groups) -> dict[str, dict[float, float]]:
    """Return the last validation loss by rate, of each optimizer and momentum."""
    curves: dict[str, dict[float, float]] = {}
    for optimizer, method in OPTIMIZERS.items():
        for group in (f"optimizer_search_{data_set}", f"soap_search_{data_set}"):
            for run, (rows,) in groups[group].items():
                if run.partition("-lr")[0] == optimizer:
                    flags = read_flags(group, run)
                    curve = curves.setdefault(f"{method}, {setting_of(flags)}", {})
                    curve[flags["lr"]] = rows[-1]["val_loss"]
    return curves


def best_settings(curves: Mapping[str, Mapping[float, float]]) -> dict[str, tuple[float, float]]:
    """Return rate and loss of each optimizer's best setting, by the label of its curve."""
    best: dict[str, tuple[str, float, float]] = {}
    for label, losses in curves.items():
        for rate, loss in losses.items():
            method = method_of(label)
            if method not in best or loss < best[method][2]:
                best[method] = (label, rate, loss)
    return {label: (rate, loss) for label, rate, loss in best.values()}


def draw_tuning(
    group: str, defaults: str, flags: Sequence[str], title: str, groups: Groups
) -> Figure:
    """Draw the trials of a sweep over three flags, and what its best ones reach in full.

    Args:
        group: the runs in full with the best flags, beside whose logs the trials lie.
        defaults: group of the runs with the defaults of the script.
        flags: three that were searched.
        title: what was trained.
        groups: the runs of all logs.
    """
    named_runs = {"defaults": groups[defaults]["default"], **labelled(groups, group)}
    with open(LOGS / f"{group}-trials.csv", encoding="utf-8", newline="") as file:
        trials = list(csv.DictReader(file))  # the best first
    first_line = f"A sweep of {len(trials)} trials, and its result in full"
    figure, axes = create_panels(2, 2, f"{first_line}\n{title}")
    for flag, panel in zip(flags, axes.flat):
        draw_trials(panel, trials, flag)
    ACCURACY.draw(axes[1, 1], named_runs, title="in full")
    note = f"trials: one seed each; in full: {describe_seeds(named_runs)}"
    add_legend(figure, axes[0, 0], axes[1, 1], title=note)
    return figure


def draw_trials(axes: Axes, trials: Sequence[Mapping[str, str]], flag: str) -> None:
    """Draw what each trial reached over a flag, and crosses below for those without a value."""
    places = {True: [], False: []}  # by whether the trial is complete
    for trial in trials:
        if trial[flag]:
            places[trial["state"] == "COMPLETE"].append(float(trial[flag]))
    heights = [100 * float(t["value"]) for t in trials if t[flag] and t["state"] == "COMPLETE"]
    lowest, highest = min(heights), max(heights)
    below = [lowest - STOPPED_DEPTH * (highest - lowest)] * len(places[False])
    axes.scatter(places[True], heights, s=24, color=BLUE, label="trial")
    best = places[True][:1], heights[:1]
    axes.scatter(*best, s=160, marker="*", color=VERMILION, label="best trial")
    label = "stopped early, no value"
    axes.scatter(places[False], below, s=24, marker="x", color=GREY, label=label)
    if flag in LOGARITHMIC:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    label_axes(axes, f"--{flag}", "held-out accuracy / %", title="trials")


# -------------------------------------------------------------------- device-hours


def draw_pareto(groups: Groups) -> Figure:
    """Draw device-hours against test accuracy after the last epoch, a panel for each problem.

    Runs share a panel only if they train on the same data on the same kind of device; the peer of
    fast94_vgg8 has its own network. Runs with --threads 1 are left out: they leave the other core
    to other work, so that they are not hours of a device.
    """
    figure = plt.figure(figsize=(8, 4.9), layout="constrained")
    figure.suptitle(
        "Device-hours and test accuracy after the last epoch, a marker for each run", fontsize=11
    )
    problems = (
        ("agnews12k", f"{SMALL_TEXTS}, CPU"),
        ("fast94_vgg8", "VGG8, all of CIFAR-10, CPU"),
    )
    for subfigure, (group, title) in zip(figure.subfigures(1, 2), problems):
        axes = subfigure.subplots()
        named_runs = labelled(groups, group)
        styles, front = line_styles(named_runs), []
        for label, runs in named_runs.items():
            points = [(device_hours(rows[-1]), accuracy(rows[-1])) for rows in runs]
            axes.plot(*zip(*points), label=label, **{**styles[label], "linestyle": ""})
            front += points
        ring = {"markersize": 11, "markerfacecolor": "none", "label": "none is cheaper and better"}
        axes.plot(*zip(*pareto_front(front)), "o-", color=GREY, linewidth=1, zorder=0, **ring)
        label_axes(axes, "device-hours", "test accuracy / %", title=title)
        subfigure.legend(loc="outside lower center", fontsize=8, handlelength=1.5)
    return figure


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, value) that no other point beats in both, the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


# -------------------------------------------------------------------- scaling


def draw_scaling(groups: Groups) -> Figure:
    """Draw parallel efficiency against processes: the model as lines, measurements as markers.

    The measurements are those of benchmarks/results, and not of the logs.
    """
    results = read_results("scaling-cpu.json")
    ratios = {row["name"]: row["ratios"] for row in results["rows"]}
    figure, axes = create_panels(2, 2, "Parallel efficiency of LAMB and SLAMB on slow networks")
    styles = line_styles(SCALING_METHODS.values())
    places = itertools.product(
        (("1 Gbit/s", "1000 Mbit/s"), ("100 Mbit/s", "100 Mbit/s")),
        (("resnet20", 64), ("resnet110", 32)),
    )
    for panel, ((network, mbits), (arch, batch)) in zip(axes.flat, places):
        predicted = results["measured"][f"{arch} predicted"][mbits]
        for key, label in SCALING_METHODS.items():
            colour, marker = styles[label]["color"], styles[label]["marker"]
            panel.plot(results["many"], predicted[key], "--", color=colour)
            rounds = ratios[f"{arch} {network} N=2 {key}"]
            median = statistics.median(rounds)
            bars = [[median - min(rounds)], [max(rounds) - median]]
            style = {"color": colour, "marker": marker, "markersize": 8, "linestyle": ""}
            panel.errorbar([2], [median], bars, elinewidth=1, capsize=4, label=label, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(results["many"], results["many"])
        panel.minorticks_off()
        panel.set_ylim(0, 1.05)
        title = f"{arch.replace('resnet', 'ResNet-')}, {batch} images per process, {network}"
        label_axes(panel, "processes", "parallel efficiency", title=title)
    note = "measured: two processes; marker: median, bar: lowest to highest of all rounds"
    kinds = (
        Line2D([], [], linestyle="--", color=GREY, label="model"),
        Line2D([], [], linestyle="", marker="o", color=GREY, label="measured"),
    )
    add_legend(figure, axes[0, 0], title=note, further=kinds, columns=5)
    return figure


# -------------------------------------------------------------------- all pictures

PICTURES: dict[str, Callable[[Groups], Figure]] = {
    "time": draw_time,
    "fast94_vgg8": partial(
        draw_group,
        ["fast94_vgg8"],
        [ACCURACY, ACCURACY.over_time()],
        "VGG8 on all of CIFAR-10 and two cores\naccuracy over one view of each test image",
        enlarged=True,
    ),
    "mixup_cifar10_10pct": partial(
        draw_mixing,
        "mixup_cifar10_10pct",
        "mixup_search_cifar10_10pct",
        "Mixing of samples\nResNet-20, 4,000 images of CIFAR-10 at 24 pixels, SGD, 30 epochs",
        "",
    ),
    "mixup_agnews6k": partial(
        draw_mixing,
        "mixup_agnews6k",
        "mixup_search_agnews6k",
        "Mixing of pooled texts and of tokens\nTransformer, 4,800 rows of AG News, AdamW, 8 epochs",
        "",
    ),
    "label_noise_agnews12k": partial(
        draw_mixing,
        "label_noise_agnews12k",
        "label_noise_search_agnews12k",
        "Mixing of samples where 40 % of the training labels are wrong\n"
        f"{SMALL_TEXTS}, AdamW, 8 epochs",
        ", which has its own wrong labels",
    ),
    "few_rows_agnews12k": partial(
        draw_mixing,
        "few_rows_agnews12k",
        "few_rows_search_agnews12k",
        "Mixing of samples on few rows\nTransformer, 2,880 rows of AG News, AdamW, 20 epochs",
        "",
    ),
    "critical_batch": draw_critical_batch,
    "dynamic_batching": partial(
        draw_group,
        ["dynamic_batch_cifar10_20pct"],
        [
            ACCURACY,
            Panel(column("batch_size"), "batch size / samples", is_binary=True),
            Panel(column("noise_scale"), "gradient noise scale / samples", is_binary=True),
        ],
        "Rules for the batch size (--dynamic_batch), each at the best rate of its search\n"
        f"{SMALL_IMAGES} at 24 pixels, SGD",
        columns=4,
    ),
    "schedules": partial(
        draw_group,
        ["schedules_cifar10_20pct"],
        [ACCURACY, Panel(column("lr"), "learning rate at its end")],
        "Schedules of the learning rate, each at the best rate of its search\n"
        f"{SMALL_IMAGES} at 24 pixels, SGD, batch 128",
        columns=5,
    ),
    "slow_network_cifar10": draw_slow_network,
    "slow_network_time": draw_slow_network_time,
    "scaling": draw_scaling,
    "pareto": draw_pareto,
    "defaults_cifar10_20pct": partial(  # without times: other work ran beside some of these runs
        draw_group,
        ["defaults_cifar10_20pct"],
        [ACCURACY, LOSS],
        f"Optimizers at their default learning rates\n{SMALL_IMAGES}, batch 128, 10 epochs",
        columns=4,
    ),
    "tuning_cifar10_20pct": partial(
        draw_tuning,
        "tuning_cifar10_20pct",
        "defaults_cifar10_20pct",
        ("lr", "momentum", "weight_decay"),
        f"{SMALL_IMAGES}, SGD; trials: 5 epochs, a fifth held out; in full: 10 epochs",
    ),
    "tuning_agnews12k": partial(
        draw_tuning,
        "tuning_agnews12k",
        "defaults_agnews12k",
        ("lr", "token_dropout", "dropout"),
        f"{SMALL_TEXTS}, 8 epochs; trials: half of the rows, a fifth held out",
    ),
    "optimizers_agnews12k": optimizers_in_full("agnews12k", f"{SMALL_TEXTS}, batch 128, 8 epochs"),
    "optimizers_cifar10": optimizers_in_full("cifar10", "ResNet-20, all of CIFAR-10, batch 128"),
    "optimizers_vgg8": optimizers_in_full("vgg8", "VGG8, all of CIFAR-10 at 24 pixels, batch 128"),
    "agnews12k": lambda groups: overview(
        labelled(groups, "agnews12k"),
        f"The naive Bayes prior and bf16\n{SMALL_TEXTS}, AdamW, two cores",
    ),
    "optimizer_search_cifar10_20pct": partial(
        draw_optimizer_search,
        "cifar10_20pct",
        f"{SMALL_IMAGES}, batch 128, 6 epochs, 10 % held out",
    ),
    "optimizer_search_vgg8_20pct": partial(
        draw_optimizer_search,
        "vgg8_20pct",
        "VGG8, 20 % of CIFAR-10 at 24 pixels, batch 128, 4 epochs, 10 % held out",
    ),
    "optimizer_search_agnews12k": partial(
        draw_optimizer_search,
        "agnews12k",
        f"{SMALL_TEXTS}, batch 128, 8 epochs, 10 % held out",
    ),
}
