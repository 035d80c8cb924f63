"""The pictures of pictures.yaml, drawn from the logs.

figure = draw_picture("slow_network_time", read_groups(LOGS))
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.methods import COLOURS, GREY, labels_of, line_styles, read_pictures
from figures.panels import (
    add_legend,
    create_panels,
    describe_seeds,
    draw_panel,
    label_axes,
    with_columns,
)
from figures.run_logs import ROOT, Runs, accuracy, last

Groups = Mapping[str, Mapping[str, Runs]]
"""The runs of all logs, by group and name."""

RESULTS = ROOT / "benchmarks" / "results"
ACCURACY_RANGE = 6  # points of accuracy below the highest that an enlarged panel shows


def draw_picture(name: str, groups: Groups) -> Figure:
    """Draw a picture of pictures.yaml by the function that is named there."""
    settings = dict(read_pictures()["pictures"][name])
    draw = globals()[f"draw_{settings.pop('draw')}"]
    return draw(groups, **settings)


def labelled(groups: Groups, *names: str) -> dict[str, Runs]:
    """Return the labelled runs of these groups, by label, in the order of the labels."""
    return {
        label: with_columns(groups[name][run])
        for name in names
        for run, label in labels_of(name).items()
        if run in groups[name]
    }


# -------------------------------------------------------------------- values over epochs and time


def draw_panels(
    groups: Groups,
    title: str,
    *,
    names: Sequence[str],
    panels: Sequence[str],
    labels: Sequence[str] = (),
    enlarged: bool = False,
    columns: int = 3,
) -> Figure:
    """Draw panels side by side: columns over epochs, or 'over time'.

    With `labels` they show these alone, with `enlarged` the highest accuracies alone.
    """
    named_runs = labelled(groups, *names)
    named_runs = {label: named_runs[label] for label in labels or named_runs}
    figure, axes = create_panels(len(panels), title)
    for panel, shown in zip(axes, panels):
        y, _, x = shown.partition(" over ")
        is_cut = enlarged and y == "accuracy"
        cut = "the highest accuracies" if is_cut else ""
        draw_panel(panel, named_runs, x or "epoch", y, title=cut)
        if is_cut:
            enlarge_highest(panel, named_runs)
    band = "band, and bar of times" if "accuracy over time" in panels else "band"
    add_legend(figure, axes[0], title=describe_seeds(named_runs, band=band), columns=columns)
    return figure


def enlarge_highest(axes: Axes, named_runs: Mapping[str, Runs]) -> None:
    """Let a panel show the accuracies near the highest last one."""
    highest = max(rows[-1]["accuracy"] for runs in named_runs.values() for rows in runs)
    axes.set_ylim(highest - ACCURACY_RANGE, highest + 0.1 * ACCURACY_RANGE)


def draw_mixing(groups: Groups, title: str, *, search: str, in_full: str, note: str = "") -> Figure:
    """Draw accuracies of a search over the rates for each kind of mixing, and its gain by seed."""
    kinds, named_runs = labels_of(in_full), groups[in_full]
    figure, axes = create_panels(3, title)
    styles = line_styles(kinds.values())
    tried: set[float] = set()  # rates, of any kind
    for number, (kind, label) in enumerate(kinds.items()):
        points = sorted(
            (float(name.partition("-lr")[2]), max(map(accuracy, runs[0])), accuracy(runs[0][-1]))
            for name, runs in groups[search].items()
            if name.partition("-lr")[0] == kind
        )
        # A control has the rate of another kind, and no search of its own.
        rates, highest, at_end = zip(*points) if points else ([], [], [])
        tried.update(rates)
        axes[0].plot(rates, highest, label=label, **styles[label])
        axes[1].plot(rates, at_end, **styles[label])
        plain = last(named_runs["none"], accuracy)
        own = last(named_runs[kind], accuracy)
        gains = [each - none for each, none in zip(own, plain, strict=True)]  # by seed
        style = {**styles[label], "linestyle": "", "markersize": 8}
        axes[2].plot([number] * len(gains), gains, **style)
    ticks = sorted(tried)
    unit, of_unit = (1e-4, " / 0.0001") if ticks[0] < 0.01 else (1.0, "")  # long ticks overlap
    for panel, title in ((axes[0], "search: best epoch"), (axes[1], "search: last epoch")):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [f"{rate / unit:g}" for rate in ticks])
        panel.minorticks_off()
        label_axes(panel, f"learning rate{of_unit}", "held-out accuracy / %", title=title)
    axes[2].set_xticks([])
    axes[2].axhline(0, color=GREY, linewidth=1, zorder=0)
    label_axes(axes[2], "kind of mixing", "gain in test accuracy", title="in full, last epoch")
    legend = f"search: one seed each; in full: a marker for each seed{note}"
    add_legend(figure, axes[0], title=legend)
    return figure


# -------------------------------------------------------------------- time on a free machine


def draw_minutes(
    groups: Groups, title: str, *, panels: Mapping[str, Mapping[str, Any]], level: str = ""
) -> Figure:
    """Draw accuracies of the logs over minutes on a machine with nothing else to do.

    A panel has the names of its groups, and the file of benchmarks/results with their samples a
    second, measured in turns. The last accuracy of the method `level` is a line; without it, the
    panels show the highest accuracies.
    """
    figure, axes = create_panels(len(panels), title)
    for panel, (title, shown) in zip(axes, panels.items()):
        named_runs = labelled(groups, *shown["names"])
        labels = labels_of(shown["names"][0])
        measured = json.loads((RESULTS / shown["measured"]).read_text(encoding="utf-8"))
        timed = with_minutes(named_runs, measured, labels)
        draw_panel(panel, timed, "minutes", "accuracy", title=title)
        if level:
            height = statistics.mean(last(named_runs[level], accuracy))
            panel.axhline(height, color=GREY, linewidth=1, zorder=0)
        else:
            enlarge_highest(panel, timed)
    line = Line2D([], [], color=GREY, linewidth=1, label=f"last accuracy of {level}")
    further = [line] if level else []
    add_legend(figure, axes[-1], title=describe_seeds(named_runs), further=further)
    return figure


def draw_ratios(groups: Groups, title: str, *, measured: str, sides: Mapping[str, str]) -> Figure:
    """Draw bars of the sides' speed over that of the first one, and its spread over the rounds.

    `measured` is a file of benchmarks/results, `sides` has the label of each of its rows.
    """
    rows = json.loads((RESULTS / measured).read_text(encoding="utf-8"))["rows"]
    ratios = {row["name"]: [a / b for a, b in zip(row["ours"], row["peer"])] for row in rows}
    figure, axes = create_panels(1, title)
    for side, label in sides.items():
        middle, low, high = statistics.median(ratios[side]), min(ratios[side]), max(ratios[side])
        bar = axes.barh(label, middle, xerr=[[middle - low], [high - middle]], color=COLOURS["sky"])
        axes.bar_label(bar, [f"{middle:.2f}"], label_type="center")
    axes.invert_yaxis()
    label_axes(axes, "samples a second over the first one's; line: all rounds", "")
    return figure


def with_minutes(
    named_runs: Mapping[str, Runs], results: Mapping[str, Any], labels: Mapping[str, str]
) -> dict[str, Runs]:
    """Add the minutes of training to each row, at the speed that was measured in turns.

    The batch of these runs does not change, so that all epochs of a run take the same time.
    Methods that are not in `results`, a file of benchmarks/results, are left out.
    """
    rates = {row["name"]: statistics.median(row["ours"]) for row in results["rows"]}
    for name, turns in results.get("samples_per_second", {}).items():  # of a former benchmark
        rates[name] = statistics.median(turns["0"] if isinstance(turns, dict) else turns)
    return {
        label: [
            [{**row, "minutes": row["samples"] / rates[name] / 60} for row in rows]
            for rows in named_runs[label]
        ]
        for name, label in labels.items()
        if label in named_runs and name in rates
    }
