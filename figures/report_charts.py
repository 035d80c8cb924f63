"""The charts of a report: SVG that matplotlib draws, as pictures within a page of HTML.

chart = draw_chart([Line("SGD", [1, 2], [0.4, 0.6], 0)], "epoch", "accuracy")
f'<img alt="{chart["alt"]}" src="{chart["source"]}">'

A chart holds no text of the runs, whose names are in the page's legend. Equal lines give equal
bytes.
"""

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from figures.methods import COLOURS

STYLES = [*itertools.product(("solid", "dashed", "dotted"), COLOURS.values())]
MAX_MARKED = 60  # points of a line that are marked one by one
SQUASHED = 10.0  # highest loss over lowest above which the axis is logarithmic


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    label: str  # its name in the legend
    x: Sequence[float]  # of this and the next: its points; where y is nan, the line has a gap
    y: Sequence[float]
    number: int  # chooses its colour and its kind

    @property
    def style(self) -> tuple[str, str]:
        """Kind of the line and colour, as both matplotlib and CSS call them."""
        return STYLES[self.number % len(STYLES)]


def draw_chart(
    lines: Sequence[Line], xlabel: str, ylabel: str, *, is_loss: bool = False
) -> dict[str, str]:
    """Draw lines; return what they show in words, and the SVG as a data URI.

    Each line has a value. Epochs are whole numbers, and a time begins at 0. The axis of a loss that
    changes much is logarithmic, so that one bad epoch does not squash the others.
    """
    figure = Figure(figsize=(4.8, 2.9), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        kind, colour = line.style
        marker = "o" if len(line.y) <= MAX_MARKED else ""
        axes.plot(line.x, line.y, linestyle=kind, color=colour, marker=marker, markersize=3)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    losses = [y for line in lines for y in line.y if y > 0] if is_loss else []
    if losses and max(losses) > SQUASHED * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter("")
    axes.yaxis.set_major_formatter("{x:g}")  # 2e-05, without an offset
    if xlabel == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(content, format="svg", metadata=metadata)
    data = base64.b64encode(content.getvalue()).decode()
    alt = f"{ylabel} over {xlabel}: {', '.join(line.label for line in lines)}"
    return {"alt": alt, "source": f"data:image/svg+xml;base64,{data}"}
