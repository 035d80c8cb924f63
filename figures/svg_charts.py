"""Line charts as SVG, for a page of HTML that defines the colours.

line_chart([Series("SGD", [(1, 0.4), (2, 0.6)])], "epoch", "accuracy")

Lines and text have the CSS classes and variables of `figures.html_page`, so that a chart follows
the page into dark mode and onto paper. The same values give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 280  # of the drawing, in its own units
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 14, 48  # margins, which hold the ticks and the titles of axes
TICKS = 6  # of an axis, about
MAX_MARKED = 60  # points of a line that are marked one by one
NUM_COLOURS = 7
DASHES = ("", "7 4", "2 3")  # tell lines of the same colour apart

Point = tuple[float, float | None]
"""x and y; without y the line has a gap."""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: its name.
        points: in the order of x.
        index: chooses colour and dashes.
    """

    label: str
    points: Sequence[Point]
    index: int = 0

    @property
    def style(self) -> str:
        """The attributes of its stroke."""
        dash = DASHES[self.index // NUM_COLOURS % len(DASHES)]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return f'class="line c{self.index % NUM_COLOURS}"{dashes}'


@dataclass(frozen=True)
class Axis:
    """A linear axis.

    Attributes:
        low, high: its ends.
        ticks: values in between.
        decimals: of the ticks' labels; None is scientific.
    """

    low: float
    high: float
    ticks: Sequence[float]
    decimals: int | None

    @classmethod
    def around(cls, values: Sequence[float], *, whole: bool = False) -> Axis:
        """An axis that holds all values.

        Args:
            values: at least one.
            whole: they are numbers of things: no ticks in between.
        """
        low, high = min(values), max(values)
        if low == high:
            margin = abs(low) / 2 or 1.0
            low, high = low - margin, high + margin
        step = nice_step((high - low) / TICKS)
        if whole:
            step = max(1.0, step)
            low, high = min(values), max(*values, min(values) + 1)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        is_readable = decimals <= 5 and abs(high) < 1e6 and abs(low) < 1e6
        ticks = [number * step for number in range(first, last + 1)]
        return cls(low, high, ticks, decimals if is_readable else None)

    def label(self, value: float) -> str:
        """The text beside a tick."""
        return f"{value:.1e}" if self.decimals is None else f"{value:.{self.decimals}f}"

    def position(self, value: float, start: float, end: float) -> float:
        """Where a value lies between two coordinates."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def nice_step(step: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def line_chart(
    series: Sequence[Series],
    xlabel: str,
    ylabel: str,
    *,
    whole_x: bool = False,
    x_from_zero: bool = False,
) -> str:
    """A chart as an `svg` element; '' where no series has a point.

    Args:
        series: the lines; those without a y are left out.
        xlabel, ylabel: titles of the axes.
        whole_x: x are whole numbers, such as epochs.
        x_from_zero: let the axis begin at 0, as that of a time does.
    """
    series = [line for line in series if any(y is not None for _, y in line.points)]
    if not series:
        return ""
    known = [(x, y) for line in series for x, y in line.points if y is not None]
    start = [0.0] if x_from_zero else []
    horizontal = Axis.around([*start, *(x for x, _ in known)], whole=whole_x)
    vertical = Axis.around([y for _, y in known])
    names = ", ".join(line.label for line in series)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(f"{ylabel} against {xlabel}: {names}")}">',
        *axis_lines(horizontal, vertical),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(xlabel)}</text>",
        f'<text transform="translate(15 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(ylabel)}</text>',
    ]
    for line in series:
        parts += draw_line(line, horizontal, vertical, xlabel=xlabel)
    return "\n".join([*parts, "</svg>"])


def axis_lines(horizontal: Axis, vertical: Axis) -> list[str]:
    """Grid lines with their labels, and the frame's two axes."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in vertical.ticks:
        y = vertical.position(tick, bottom, TOP)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        label = vertical.label(tick)
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4.5:.1f}" text-anchor="end">{label}</text>')
    for tick in horizontal.ticks:
        x = horizontal.position(tick, LEFT, right)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        label = horizontal.label(tick)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    return parts


def draw_line(line: Series, horizontal: Axis, vertical: Axis, *, xlabel: str) -> list[str]:
    """A line with gaps, and its points if they are few or stand alone; each says its values."""
    commands, marks, pen_is_down = [], [], False
    mark_all = len(line.points) <= MAX_MARKED
    for number, (x, y) in enumerate(line.points):
        if y is None:
            pen_is_down = False
            continue
        left = horizontal.position(x, LEFT, WIDTH - RIGHT)
        top = vertical.position(y, HEIGHT - BOTTOM, TOP)
        commands.append(f"{'L' if pen_is_down else 'M'}{left:.1f} {top:.1f}")
        is_last = number + 1 == len(line.points) or line.points[number + 1][1] is None
        if mark_all or (is_last and not pen_is_down):
            text = escape(f"{line.label}, {xlabel} {x:g}: {y:.5g}")
            marks.append(
                f'<circle class="mark c{line.index % NUM_COLOURS}" cx="{left:.1f}" cy="{top:.1f}" '
                f'r="3"><title>{text}</title></circle>'
            )
        pen_is_down = True
    return [f'<path {line.style} d="{"".join(commands)}"/>', *marks]


def legend(series: Sequence[Series]) -> str:
    """A list of the lines with their names."""
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 28 10" aria-hidden="true"><path {line.style} '
        f'd="M1 5H27"/></svg>{escape(line.label)}</li>'
        for line in series
    )
    return f'<ul class="legend">{items}</ul>'
