"""The charts of a report: SVG that matplotlib draws, as pictures within a page of HTML.

chart = draw_chart([Line("SGD", [1, 2], [0.4, 0.6], 0)], "epoch", "accuracy")
f'<img alt="{chart["alt"]}" src="{chart["source"]}">'

A chart holds no text of the runs, whose names are in the page's legend. Equal lines give equal
bytes.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from figures.methods import COLOURS

STYLES = [*itertools.product(("solid", "dashed", "dotted"), COLOURS.values())]
MAX_MARKED = 60  # points of a line that are marked one by one
SET_ASIDE = 0.1  # share of a line's values that may be outliers
SQUASHED = 10.0  # times the range of all other values that an outlier needs to be cut off


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: its name in the legend.
        x, y: its points; where y is nan, the line has a gap.
        number: chooses its colour and its kind.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    number: int

    @property
    def style(self) -> tuple[str, str]:
        """Kind of the line and colour, as both matplotlib and CSS call them."""
        return STYLES[self.number % len(STYLES)]


def draw_chart(
    lines: Sequence[Line], xlabel: str, ylabel: str, *, cut_outliers: bool = False
) -> dict[str, str]:
    """Draw lines; return what they show in words, and the SVG as a data URI.

    Each line has a value. Epochs are whole numbers, and a time begins at 0. With `cut_outliers`, a
    few values beyond the others do not squash them.
    """
    figure = Figure(figsize=(4.8, 2.9), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        kind, colour = line.style
        marker = "o" if len(line.y) <= MAX_MARKED else ""
        axes.plot(line.x, line.y, linestyle=kind, color=colour, marker=marker, markersize=3)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.yaxis.set_major_formatter("{x:g}")  # 2e-05, without an offset
    if xlabel == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    if cut_outliers:
        cut_off_outliers(axes, lines)
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", metadata=metadata)
    data = base64.b64encode(content.getvalue()).decode()
    alt = f"{ylabel} over {xlabel}: {', '.join(line.label for line in lines)}"
    return {"alt": alt, "source": f"data:image/svg+xml;base64,{data}"}


def cut_off_outliers(axes: Axes, lines: Sequence[Line]) -> None:
    """End the vertical axis below outliers, and write the highest value at its end."""
    values = [sorted(y for y in line.y if not math.isnan(y)) for line in lines]
    usual = [each[: -math.ceil(SET_ASIDE * len(each))] or each for each in values]
    low, high = min(each[0] for each in values), max(each[-1] for each in usual)
    bound, highest = low + SQUASHED * (high - low), max(each[-1] for each in values)
    if low < high and bound < highest:
        top = max(value for each in values for value in each if value <= bound)
        axes.set_ylim(low - 0.05 * (top - low), top + 0.1 * (top - low))
        note = f"cut off: up to {highest:.3g}"
        axes.text(0.99, 0.98, note, ha="right", va="top", fontsize=9, transform=axes.transAxes)
