"""How the methods look in all pictures: their labels, colours and markers, from pictures.yaml.

    labels = labels_of("mixup_agnews6k")     # {name of a run: label}
    styles = line_styles(labels.values())        # {label: keyword arguments of Axes.plot}

A label is the name of a method, or 'method, setting'. The settings of one method share its colour
and its marker, and differ in the line and in the filling of the marker. No line is dashed: that is
how pictures show what a model predicts.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

# The palette of Okabe and Ito, which the colour-blind can tell apart, with a wine red and a grey
# of other lightness in place of its yellow, which is hard to see on white.
COLOURS = {
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "black": "#000000",
    "wine": "#882255",
    "grey": "#777777",
}
GREY = COLOURS["grey"]
SETTINGS: tuple[dict[str, Any], ...] = (  # the first to fourth setting of a method
    {"linestyle": "-"},
    {"linestyle": ":", "markerfacecolor": "white"},
    {"linestyle": "-.", "fillstyle": "left"},
    {"linestyle": "--", "fillstyle": "top"},
)


@functools.cache
def read_pictures() -> dict[str, dict[str, Any]]:
    """Return the content of pictures.yaml."""
    return yaml.safe_load(Path(__file__).with_name("pictures.yaml").read_text(encoding="utf-8"))


def labels_of(group: str) -> dict[str, str]:
    """Return the labels of the runs in a group, in the order of the legend."""
    return read_pictures()["labels"][group]


def line_styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of `Axes.plot` for each label of a picture.

    A label that is the name of a method alone has a solid line and filled markers. The settings of
    a method have the line styles of SETTINGS in the order of the labels.
    """
    styles: dict[str, dict[str, Any]] = {}
    count = Counter[str]()  # of the settings of each method
    for label in sorted(dict.fromkeys(labels), key=lambda label: "," in label):
        method = label.split(",")[0]
        colour, marker = read_pictures()["styles"][method]
        style = {"color": COLOURS[colour], "marker": marker, "markersize": 5}
        styles[label] = {**style, **SETTINGS[count[method] % len(SETTINGS)]}
        count[method] += 1
    return styles
