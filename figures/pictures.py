"""The figures: each a function of the logs' groups that returns a figure, or None without its runs.

figure = PICTURES["slow_network_time"](read_groups(LOGS))
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    create_subfigures,
    describe_seeds,
    epoch,
    kilobytes_a_step,
    label_axes,
    plain_log_ticks,
    plot_methods,
    seconds,
)
from figures.run_logs import (
    LOGS,
    ROOT,
    Runs,
    accuracy,
    device_hours,
    epochs_to,
    last,
    read_flags,
)

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
FITTED_SIZES = 3  # of the batch, at least, for the two numbers of the model
CRITICAL_TARGET = 45  # percent, in the picture of the critical batch
LOGARITHMIC = {"lr", "weight_decay"}  # flags whose logarithm a sweep searched
STOPPED_DEPTH = 0.1  # how far below all values stopped trials are, as a part of their range
ACCURACY_RANGE = 6  # points of accuracy below the highest that an enlarged panel shows


def relabel(named_runs: Mapping[str, Runs], labels: Mapping[str, str]) -> dict[str, Runs]:
    """Return the runs that have a label, by their labels and in the labels' order."""
    return {label: named_runs[name] for name, label in labels.items() if name in named_runs}


def labelled(groups: Groups, *names: str) -> dict[str, Runs]:
    """Return the runs of these groups by their labels."""
    named_runs: dict[str, Runs] = {}
    for name in names:
        named_runs |= relabel(groups.get(name, {}), LABELS[name])
    return named_runs


# -------------------------------------------------------------------- accuracy over epochs and time


def overview(named_runs: Mapping[str, Runs], title: str = "") -> Figure:
    """Plot test accuracy against epochs and seconds, and training loss against epochs."""
    figure, axes = create_panels(1, 3, title)
    has_test = all("test_accuracy" in rows[0] for runs in named_runs.values() for rows in runs)
    ylabel = "test accuracy / %" if has_test else "accuracy on test or held-out rows / %"
    plot_methods(axes[0, 0], named_runs, x=epoch, y=accuracy)
    plot_methods(axes[0, 1], named_runs, x=seconds, y=accuracy)
    plot_methods(axes[0, 2], named_runs, x=epoch, y=column("train_loss"))
    label_axes(axes[0, 0], "epoch", ylabel)
    label_axes(axes[0, 1], "training time / s", ylabel)
    label_axes(axes[0, 2], "epoch", "training loss (cross-entropy)")
    bands = describe_seeds(named_runs, band="band, and bar of times")
    add_legend(figure, axes[0, 0], title=bands, columns=4 if len(named_runs) == 4 else 3)
    return figure


def draw_overview(group: str, title: str, groups: Groups) -> Figure | None:
    """Draw the overview of the runs of one group."""
    named_runs = labelled(groups, group)
    return overview(named_runs, title) if named_runs else None


def draw_optimizers(data_set: str, title: str, groups: Groups) -> Figure | None:
    """Draw test accuracy of optimizers over epochs and over time, and its highest part enlarged."""
    named_runs = labelled(groups, f"optimizers_{data_set}", f"soap_{data_set}")
    title = f"Optimizers, each at the best setting of its search\n{title}"
    return overview_and_end(named_runs, title, "training time on one core, beside other work / s")


def draw_fast94(groups: Groups) -> Figure | None:
    """Draw test accuracy of our recipe and of its peer over epochs and over time."""
    title = "VGG8 on all of CIFAR-10 and two cores\naccuracy over one view of each test image"
    return overview_and_end(labelled(groups, "fast94_vgg8"), title, "training time / s")


def overview_and_end(named_runs: Mapping[str, Runs], title: str, time_label: str) -> Figure | None:
    """Plot test accuracy against epochs and time, above the same with the highest part enlarged."""
    if not named_runs:
        return None
    figure, axes = create_panels(2, 2, title)
    for panel, x, xlabel in ((0, epoch, "epoch"), (1, seconds, time_label)):
        for row in axes[:, panel]:
            plot_methods(row, named_runs, x=x, y=accuracy)
            label_axes(row, xlabel, "test accuracy / %")
    highest = max(max(last(runs, accuracy)) for runs in named_runs.values())
    for panel in axes[1]:
        panel.set_ylim(highest - ACCURACY_RANGE, highest + 0.1 * ACCURACY_RANGE)
        panel.set_title("the highest accuracies, enlarged", fontsize=10)
    bands = describe_seeds(named_runs, band="band, and bar of times")
    add_legend(figure, axes[0, 0], title=bands)
    return figure


def draw_defaults(groups: Groups) -> Figure | None:
    """Draw test accuracy and training loss of optimizers at their default rates, over epochs.

    Times are left out: other work ran beside some of these runs.
    """
    named_runs = labelled(groups, "defaults_cifar10_20pct")
    if not named_runs:
        return None
    title = f"Optimizers at their default learning rates\n{SMALL_IMAGES}, batch 128, 10 epochs"
    figure, axes = create_panels(1, 2, title)
    plot_methods(axes[0, 0], named_runs, x=epoch, y=accuracy)
    plot_methods(axes[0, 1], named_runs, x=epoch, y=column("train_loss"))
    label_axes(axes[0, 0], "epoch", "test accuracy / %")
    label_axes(axes[0, 1], "epoch", "training loss (cross-entropy)")
    add_legend(figure, axes[0, 0], title=describe_seeds(named_runs), columns=4)
    return figure


def draw_mixing(group: str, search: str, title: str, note: str, groups: Groups) -> Figure | None:
    """Draw accuracies of a search over the rates for each kind of mixing, and its gain by seed."""
    kinds, named_runs = LABELS[group], groups.get(group, {})
    if not named_runs.keys() >= kinds.keys() or search not in groups:
        return None
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
    for panel, title in ((axes[0, 0], "search: best epoch"), (axes[0, 1], "search: last epoch")):
        panel.set_xscale("log", base=2)
        ticks = sorted(tried)
        unit = 1e-4 if ticks[0] < 0.01 else 1.0  # ticks of many digits would overlap
        xlabel = "learning rate" + (" / 0.0001" if unit < 1 else "")
        panel.set_xticks(ticks, [f"{rate / unit:g}" for rate in ticks])
        panel.minorticks_off()
        label_axes(panel, xlabel, "held-out accuracy / %", title=title)
    axes[0, 2].set_xticks(range(len(kinds)), kinds, rotation=45, ha="right", fontsize=8)
    axes[0, 2].axhline(0, color=GREY, linewidth=1, zorder=0)
    label_axes(axes[0, 2], "kind of mixing", "gain in test accuracy", title="in full, last epoch")
    legend = f"search: one seed each; in full: a marker for each seed{note}"
    add_legend(figure, axes[0, 0], title=legend, columns=3)
    return figure


def draw_critical_batch(groups: Groups) -> Figure | None:
    """Draw steps and samples to an accuracy over the batch size, and the gradient noise scale.

    A dashed line is the model of McCandlish et al. (https://arxiv.org/abs/1812.06162, equation
    2.11), fitted to the samples. A dotted upright line is the noise scale that the runs measured in
    the epoch in which they reach the accuracy: the median of all runs of the optimizer.
    A size of which a seed does not reach the accuracy is left out.
    """
    group = "critical_batch_cifar10_20pct"
    points = {
        OPTIMIZERS[optimizer]: reached_by_batch(groups.get(group, {}), optimizer)
        for optimizer in ("sgd", "ngd")
    }
    if min(map(len, points.values())) < FITTED_SIZES:
        return None
    title = f"Steps and samples to {CRITICAL_TARGET} % at the best rate of each batch size"
    figure, axes = create_panels(1, 2, f"{title}\n{SMALL_IMAGES} at 16 pixels, constant rates")
    styles = line_styles(points)
    for label, by_batch in points.items():
        batches = sorted(by_batch)
        samples = [statistics.mean(each.samples for each in by_batch[size]) for size in batches]
        least, critical = fit_critical_batch(batches, samples)
        noise = statistics.median(each.noise for runs in by_batch.values() for each in runs)
        for panel, scale in ((axes[0, 0], lambda size: size), (axes[0, 1], lambda size: 1)):
            colour = styles[label]["color"]
            for size, mean_samples in zip(batches, samples):
                values = [each.samples / scale(size) for each in by_batch[size]]
                centre = mean_samples / scale(size)
                bar = [[centre - min(values)], [max(values) - centre]]
                panel.errorbar([size], [centre], bar, color=colour, capsize=3, linewidth=1)
            means = [value / scale(size) for size, value in zip(batches, samples)]
            model = [least * (1 + size / critical) / scale(size) for size in batches]
            panel.plot(batches, means, label=label, **{**styles[label], "linestyle": ""})
            panel.plot(batches, model, "--", color=colour, linewidth=1, zorder=0)
            panel.axvline(noise, color=colour, linestyle=":", linewidth=1, zorder=0)
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
    best = (math.inf, 0.0, 0.0)
    for position in range(1001):
        critical = 2.0 ** (position / 50)  # 1 to 1,000,000
        least_of_each = [
            math.log(each / (1 + size / critical)) for size, each in zip(batches, samples)
        ]
        error = statistics.pvariance(least_of_each)
        best = min(best, (error, math.exp(statistics.mean(least_of_each)), critical))
    return best[1], best[2]


def draw_dynamic_batching(groups: Groups) -> Figure | None:
    """Draw accuracy, batch size and gradient noise scale of each rule for the batch size."""
    named_runs = labelled(groups, "dynamic_batch_cifar10_20pct")
    if not named_runs:
        return None
    title = "Rules for the batch size (--dynamic_batch), each at the best rate of its search"
    figure, axes = create_panels(1, 3, f"{title}\n{SMALL_IMAGES} at 24 pixels, SGD")
    for panel, name, ylabel in (
        (axes[0, 1], "batch_size", "batch size / samples"),
        (axes[0, 2], "noise_scale", "gradient noise scale / samples"),
    ):
        plot_methods(panel, named_runs, x=epoch, y=column(name))
        label_axes(panel, "epoch", ylabel)
        panel.set_yscale("log", base=2)
        plain_log_ticks(panel.yaxis, 2)
    plot_methods(axes[0, 0], named_runs, x=epoch, y=accuracy)
    label_axes(axes[0, 0], "epoch", "test accuracy / %")
    add_legend(figure, axes[0, 0], title=describe_seeds(named_runs), columns=4)
    return figure


def draw_schedules(groups: Groups) -> Figure | None:
    """Draw test accuracy and learning rate of each schedule over epochs."""
    named_runs = labelled(groups, "schedules_cifar10_20pct")
    if not named_runs:
        return None
    title = "Schedules of the learning rate, each at the best rate of its search"
    figure, axes = create_panels(1, 2, f"{title}\n{SMALL_IMAGES} at 24 pixels, SGD, batch 128")
    plot_methods(axes[0, 0], named_runs, x=epoch, y=accuracy)
    plot_methods(axes[0, 1], named_runs, x=epoch, y=column("lr"))
    label_axes(axes[0, 0], "epoch", "test accuracy / %")
    label_axes(axes[0, 1], "epoch", "learning rate at its end")
    add_legend(figure, axes[0, 0], title=describe_seeds(named_runs), columns=5)
    return figure


def draw_slow_network(groups: Groups) -> Figure | None:
    """Draw accuracy against the bytes of a step in the search, and over epochs in full."""
    found = best_of_search(groups.get("slow_network_search_cifar10", {}))
    labels = LABELS["slow_network_search_cifar10"]
    searched = relabel(found, labels)
    named_runs = labelled(groups, "slow_network_cifar10")
    if not searched or not named_runs:
        return None
    title = (
        "Methods for slow networks, each at the best rate of its search\n"
        "ResNet-20, all of CIFAR-10 at 24 pixels, two ranks of batch 512"
    )
    figure, axes = create_panels(1, 2, title)
    styles = line_styles(searched)
    for label, runs in searched.items():
        (sent,), (value,) = map(kilobytes_a_step, runs), last(runs, accuracy)
        style = {**styles[label], "linestyle": "", "markersize": 8}
        axes[0, 0].plot([sent], [value], label=label, **style)
    for names in COMPRESSIONS:
        there = [name for name in names if name in found]
        points = [
            (kilobytes_a_step(rows), accuracy(rows[-1]))
            for (rows,) in map(found.__getitem__, there)
        ]
        colour = styles[labels[there[0]]]["color"] if there else GREY
        axes[0, 0].plot(*zip(*points), color=colour, linewidth=1, zorder=0)
    axes[0, 0].set_xscale("log")
    plain_log_ticks(axes[0, 0].xaxis)
    plot_methods(axes[0, 1], named_runs, x=epoch, y=accuracy)
    xlabel, ylabel = "sent by each rank in a step / kB", "held-out accuracy / %"
    label_axes(axes[0, 0], xlabel, ylabel, title="search: one seed, a tenth held out")
    label_axes(axes[0, 1], "epoch", "test accuracy / %", title="in full")
    bands = f"right, {describe_seeds(named_runs)}"
    add_legend(figure, axes[0, 0], title=bands, columns=3)
    return figure


def draw_slow_network_time(groups: Groups) -> Figure | None:
    """Draw accuracy against the minutes of training on two slow networks, and LAMB's as a level."""
    named_runs = labelled(groups, "slow_network_cifar10")
    paths = {network: RESULTS / file for network, file in SLOW_NETWORKS.items()}
    if "LAMB" not in named_runs or not all(path.exists() for path in paths.values()):
        return None
    title = "Time to an accuracy on slow networks\nResNet-20, 24 pixels, two ranks of batch 512"
    figure, axes = create_panels(1, 2, title)
    level = statistics.mean(last(named_runs["LAMB"], accuracy))
    labels = LABELS["slow_network_cifar10"]
    for panel, (network, path) in zip(axes[0], paths.items()):
        timed = with_minutes(named_runs, json.loads(path.read_text(encoding="utf-8")), labels)
        plot_methods(panel, timed, x=column("minutes"), y=accuracy)
        panel.axhline(level, color=GREY, linewidth=1, zorder=0)
        label_axes(panel, "training time / minutes", "test accuracy / %", title=network)
    level_line = Line2D([], [], color=GREY, linewidth=1, label="last accuracy of LAMB")
    bands = describe_seeds(timed)
    add_legend(figure, axes[0, 0], title=bands, columns=3, further=[level_line])
    return figure


def best_of_search(named_runs: Mapping[str, Runs]) -> dict[str, Runs]:
    """Return the runs METHOD-lrRATE with the lowest last validation loss, by METHOD."""
    best: dict[str, Runs] = {}
    for name, runs in named_runs.items():
        method, loss = name.partition("-lr")[0], statistics.mean(last(runs, column("val_loss")))
        if method not in best or loss < statistics.mean(last(best[method], column("val_loss"))):
            best[method] = runs
    return best


# -------------------------------------------------------------------- time


def draw_time(groups: Groups) -> Figure | None:
    """Draw the highest accuracies of optimizers over minutes of training, a panel for each problem.

    The accuracies are those of the logs, and the minutes those of a machine with nothing else to
    do, where time_to_target measured each optimizer's samples a second.
    """
    problems = {
        title: (labelled(groups, f"optimizers_{data_set}", f"soap_{data_set}"), RESULTS / file)
        for title, (data_set, file) in TIMES.items()
    }
    if not all(named_runs and path.exists() for named_runs, path in problems.values()):
        return None
    title = "Test accuracy over training time on one core, each optimizer at its best rate"
    figure, axes = create_panels(1, 3, title)
    for panel, (title, (named_runs, path)) in zip(axes[0], problems.items()):
        timed = with_minutes(named_runs, json.loads(path.read_text(encoding="utf-8")), OPTIMIZERS)
        plot_methods(panel, timed, x=column("minutes"), y=accuracy)
        highest = max(max(last(runs, accuracy)) for runs in timed.values())
        panel.set_ylim(highest - ACCURACY_RANGE, highest + 0.1 * ACCURACY_RANGE)
        label_axes(panel, "training time / minutes", "test accuracy / %", title=title)
    bands = describe_seeds(problems[SMALL_TEXTS][0])
    add_legend(figure, axes[0, 2], title=bands)
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


def draw_optimizer_search(names: Sequence[str], title: str, groups: Groups) -> Figure | None:
    """Draw the loss on held-out rows over the learning rate, a curve for each momentum.

    Args:
        names: groups whose runs are named OPTIMIZER-lrRATE and so on.
        title: network, data and length of the runs.
        groups: all logs.
    """
    curves = search_curves(names, groups)
    if not curves:
        return None
    figure, axes = create_panels(1, 2, f"Search of the learning rates: held-out loss\n{title}")
    styles, best = line_styles(curves), best_settings(curves)
    for panel in axes[0]:
        for label, losses in curves.items():
            panel.plot(*zip(*sorted(losses.items())), label=label, **styles[label])
        for label, point in best.items():
            colour = styles[label]["color"]
            panel.plot(*point, "o", markersize=14, markerfacecolor="none", color=colour)
        panel.set_xscale("log")
        plain_log_ticks(panel.xaxis)
    lowest = min(loss for _, loss in best.values())
    axes[0, 1].set_ylim((1 - 0.1 * SEARCH_RANGE) * lowest, (1 + SEARCH_RANGE) * lowest)
    ylabel = "validation loss (cross-entropy)"
    label_axes(axes[0, 0], "learning rate", ylabel, title="all settings")
    label_axes(axes[0, 1], "learning rate", ylabel, title="the lowest losses, enlarged")
    note = "one seed each; ring: the best setting of an optimizer"
    add_legend(figure, axes[0, 0], title=note, columns=2)
    return figure


def search_curves(names: Sequence[str], groups: Groups) -> dict[str, dict[float, float]]:
    """Return the last validation loss by rate, of each optimizer and momentum."""
    curves: dict[str, dict[float, float]] = {}
    for optimizer, method in OPTIMIZERS.items():
        for group in names:
            for run, runs in groups.get(group, {}).items():
                if run.partition("-lr")[0] == optimizer:
                    flags = read_flags(group, run)
                    curve = curves.setdefault(f"{method}, {setting_of(flags)}", {})
                    curve[flags["lr"]] = statistics.mean(last(runs, column("val_loss")))
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
) -> Figure | None:
    """Draw the trials of a sweep over three flags, and what its best ones reach in full.

    Args:
        group: the runs in full with the best flags, beside whose logs the trials lie.
        defaults: group of the runs with the defaults of the script.
        flags: three that were searched.
        title: what was trained.
        groups: the runs of all logs.
    """
    path = LOGS / f"{group}-trials.csv"
    named_runs = labelled(groups, group)
    if not named_runs or defaults not in groups or not path.exists():
        return None
    named_runs = {"defaults": groups[defaults]["default"], **named_runs}
    with open(path, encoding="utf-8", newline="") as file:
        trials = list(csv.DictReader(file))
    first_line = f"A sweep of {len(trials)} trials, and its result in full"
    figure, axes = create_panels(2, 2, f"{first_line}\n{title}")
    for flag, panel in zip(flags, axes.flat):
        draw_trials(panel, trials, flag)
        label_axes(panel, f"--{flag}", "held-out accuracy / %", title="trials")
    plot_methods(axes[1, 1], named_runs, x=epoch, y=accuracy)
    label_axes(axes[1, 1], "epoch", "test accuracy / %", title="in full")
    note = f"trials: one seed each; in full: {describe_seeds(named_runs)}"
    add_legend(figure, axes[0, 0], axes[1, 1], title=note)
    return figure


def draw_trials(axes: Axes, trials: Sequence[Mapping[str, str]], flag: str) -> None:
    """Draw the accuracy of each trial over a flag, and the stopped trials as crosses below.

    Args:
        axes: where to draw.
        trials: rows of a sweep's trials.csv, the best first.
        flag: name of a searched flag, whose values are numbers.
    """
    places = [float(trial[flag]) for trial in trials]
    heights = [100 * float(trial["value"]) for trial in trials if trial["state"] == "COMPLETE"]
    below = min(heights) - STOPPED_DEPTH * (max(heights) - min(heights))
    complete, stopped = places[: len(heights)], places[len(heights) :]
    axes.scatter(complete, heights, s=24, color=BLUE, label="trial")
    axes.scatter(complete[:1], heights[:1], s=160, marker="*", color=VERMILION, label="best trial")
    label = "stopped early, no value"
    axes.scatter(stopped, [below] * len(stopped), s=24, marker="x", color=GREY, label=label)
    if flag in LOGARITHMIC:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())


# -------------------------------------------------------------------- device-hours


def draw_pareto(groups: Groups) -> Figure | None:
    """Draw device-hours against test accuracy after the last epoch, a panel for each problem.

    Runs share a panel only if they train the same network on the same data on the same kind of
    device; but the peer of fast94_vgg8 has its own network. Only runs that may use both cores of
    their machine are drawn: those with --threads 1 leave the other one to other work, so that they
    are not hours of a device.
    """
    problems: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for group, named_runs in groups.items():
        for run, label in LABELS.get(group, {}).items():
            for rows in named_runs.get(run, []):
                flags = read_flags(group, run)
                if flags["threads"] != 1 and "test_accuracy" in rows[-1]:
                    points = problems.setdefault(problem_of(group, flags), {})
                    point = device_hours(rows[-1]), accuracy(rows[-1])
                    points.setdefault(label, []).append(point)
    problems = {title: points for title, points in problems.items() if len(points) > 1}
    if not problems:
        return None
    title = "Device-hours and test accuracy after the last epoch, a marker for each run"
    figure, subfigures = create_subfigures(len(problems), title)
    for subfigure, (problem, points) in zip(subfigures, sorted(problems.items())):
        axes = subfigure.subplots()
        draw_pareto_panel(axes, points)
        label_axes(axes, "device-hours", "test accuracy / %", title=problem)
        columns = 2 if len(points) > 6 else 1
        subfigure.legend(loc="outside lower center", fontsize=8, ncols=columns, handlelength=1.5)
    return figure


def problem_of(group: str, flags: Mapping[str, Any]) -> str:
    """Name the network, the data and the device of a run."""
    device = "GPU" if group.startswith("gpu_") else "CPU"
    rows = "" if device == "GPU" else "12,000 rows of "
    if flags.get("dataset") == "agnews":
        return f"Transformer, {rows}AG News, {device}"
    if group == "fast94_vgg8":  # the peer's network is much like it, and its flags do not name it
        return f"VGG8, all of CIFAR-10, {device}"
    network = flags["arch"].replace("resnet", "ResNet-")
    data_set = {"mnist": "MNIST", "cifar10": "CIFAR-10"}[flags["dataset"]]
    fraction = "" if flags["subset"] == 1 else f"{flags['subset']:.0%} of ".replace("%", " %")
    return f"{network}, {fraction}{data_set}, {device}"


def draw_pareto_panel(axes: Axes, points: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw the runs of one problem as markers, and their Pareto front as a line."""
    styles = line_styles(points)
    for label, pairs in points.items():
        axes.plot(*zip(*pairs), label=label, **{**styles[label], "linestyle": ""})
    front = pareto_front([pair for pairs in points.values() for pair in pairs])
    label = "none is cheaper and better"
    (line,) = axes.plot(*zip(*front), "o-", color=GREY, linewidth=1, zorder=0, label=label)
    line.set(markersize=11, markerfacecolor="none")


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (cost, value) that no other point beats in both, the cheapest first."""
    front: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or value > front[-1][1]:
            front.append((cost, value))
    return front


# -------------------------------------------------------------------- scaling


def draw_scaling(groups: Groups) -> Figure | None:
    """Draw parallel efficiency against processes: the model as lines, measurements as markers."""
    if not (RESULTS / "scaling-cpu.json").exists():
        return None
    results = json.loads((RESULTS / "scaling-cpu.json").read_text(encoding="utf-8"))
    ratios = {row["name"]: row["ratios"] for row in results["rows"]}
    figure, axes = create_panels(2, 2, "Parallel efficiency of LAMB and SLAMB on slow networks")
    for column_index, (arch, batch) in enumerate((("resnet20", 64), ("resnet110", 32))):
        for row_index, (network, mbits) in enumerate(
            (("1 Gbit/s", "1000 Mbit/s"), ("100 Mbit/s", "100 Mbit/s"))
        ):
            panel = axes[row_index, column_index]
            predicted = results["measured"][f"{arch} predicted"][mbits]
            for key, method in SCALING_METHODS.items():
                measured = ratios[f"{arch} {network} N=2 {key}"]
                plot_efficiency(panel, results["many"], predicted[key], measured, label=method)
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


def plot_efficiency(
    axes: Axes,
    processes: Sequence[int],
    predicted: Sequence[float],
    measured: Sequence[float],
    *,
    label: str,
) -> None:
    """Plot a method's predicted efficiency, and the measured one of two processes with its range.

    Args:
        axes: where to draw.
        processes: numbers of processes for which there is a prediction.
        predicted: efficiency for each of them.
        measured: efficiency of two processes in each round.
        label: name of the method.
    """
    style = line_styles([label])[label]
    axes.plot(processes, predicted, "--", color=style["color"])
    median = statistics.median(measured)
    bars = [[median - min(measured)], [max(measured) - median]]
    axes.errorbar(
        [2],
        [median],
        bars,
        linestyle="",
        color=style["color"],
        marker=style["marker"],
        markersize=8,
        elinewidth=1,
        capsize=4,
        label=label,
    )


# -------------------------------------------------------------------- all pictures

SEARCHES = {  # groups that share axes; the first one names the picture
    ("optimizer_search_cifar10_20pct", "soap_search_cifar10_20pct"): (
        f"{SMALL_IMAGES}, batch 128, 6 epochs, 10 % held out"
    ),
    ("optimizer_search_vgg8_20pct", "soap_search_vgg8_20pct"): (
        "VGG8, 20 % of CIFAR-10 at 24 pixels, batch 128, 4 epochs, 10 % held out"
    ),
    ("optimizer_search_agnews12k", "soap_search_agnews12k"): (
        f"{SMALL_TEXTS}, batch 128, 8 epochs, 10 % held out"
    ),
    ("optimizer_search_cifar10", "soap_search_cifar10"): (
        "ResNet-20, all of CIFAR-10, batch 128, 4 epochs, 10 % held out"
    ),
}
PICTURES: dict[str, Callable[[Groups], Figure | None]] = {
    "time": draw_time,
    "fast94_vgg8": draw_fast94,
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
    "dynamic_batching": draw_dynamic_batching,
    "schedules": draw_schedules,
    "slow_network_cifar10": draw_slow_network,
    "slow_network_time": draw_slow_network_time,
    "scaling": draw_scaling,
    "pareto": draw_pareto,
    "defaults_cifar10_20pct": draw_defaults,
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
    "optimizers_agnews12k": partial(
        draw_optimizers, "agnews12k", f"{SMALL_TEXTS}, batch 128, 8 epochs"
    ),
    "optimizers_cifar10": partial(
        draw_optimizers, "cifar10", "ResNet-20, all of CIFAR-10, batch 128"
    ),
    "optimizers_vgg8": partial(
        draw_optimizers, "vgg8", "VGG8, all of CIFAR-10 at 24 pixels, batch 128"
    ),
    "agnews12k": partial(
        draw_overview,
        "agnews12k",
        f"The naive Bayes prior and bf16\n{SMALL_TEXTS}, AdamW, two cores",
    ),
    **{names[0]: partial(draw_optimizer_search, names, title) for names, title in SEARCHES.items()},
}
