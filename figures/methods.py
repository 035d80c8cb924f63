"""The methods in the pictures: their names, and the colour and the marker that each always has.

    labels = LABELS["few_rows_agnews12k"]        # {name of a run: label}
    styles = line_styles(labels.values())        # {label: keyword arguments of Axes.plot}

A label is the name of a method, or 'method, setting'. The settings of one method share its colour
and its marker, and differ in the line and in the filling of the marker. No line is dashed: that is
how pictures show what a model predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The palette of Okabe and Ito, which the colour-blind can tell apart, with a wine red and a grey
# of other lightness in place of its yellow, which is hard to see on white.
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, WINE, GREY = "#E69F00", "#56B4E9", "#000000", "#882255", "#777777"

STYLES: Mapping[str, tuple[str, str]] = {  # colour and marker; no two methods share both
    # optimizers
    "SGD": (BLUE, "o"),
    "AdamW": (BLACK, "s"),
    "NGD": (VERMILION, "D"),
    "KaldiNGD": (PINK, "^"),
    "torch's Muon": (GREEN, "v"),
    "SOAP": (SKY, "P"),
    "LAMB": (ORANGE, "X"),
    "LAMB with bf16 gradients": (GREY, "d"),
    "SLAMB": (WINE, "*"),
    "PowerSGD": (GREEN, "s"),
    "DiLoCo": (SKY, "h"),
    "DeMo": (PINK, "p"),
    "LARS": (GREY, "^"),
    # mixing of samples
    "no mixing": (GREY, "o"),
    "mixup": (ORANGE, "s"),
    "meta-mixup": (SKY, "D"),
    # rules for the batch size
    "static": (GREY, "s"),
    "increase": (BLUE, "^"),
    "decrease": (ORANGE, "v"),
    "loss": (GREEN, "D"),
    "noise": (VERMILION, "o"),
    # schedules of the learning rate
    "constant": (GREY, "v"),
    "multistep": (BLUE, "X"),
    "cosine": (VERMILION, "s"),
    "one-cycle": (GREEN, "^"),
    "cyclic": (ORANGE, "p"),
    # recipes, and what was tuned
    "recipe fast94_vgg8": (VERMILION, ">"),
    "cifar10-airbench": (BLACK, "p"),
    "naive Bayes prior": (VERMILION, "p"),
    "defaults": (BLACK, "o"),
    "tuned by a sweep": (GREEN, "*"),
}
UNNAMED = tuple(zip((BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, BLACK), "os^Dv*P"))
"""Colours and markers for runs of the user's own, whose labels are no methods named above."""
SETTINGS: tuple[dict[str, Any], ...] = (  # the first to fourth setting of a method
    {"linestyle": "-"},
    {"linestyle": ":", "markerfacecolor": "white"},
    {"linestyle": "-.", "fillstyle": "left"},
    {"linestyle": "--", "fillstyle": "top"},
)

OPTIMIZERS = {  # in the names of runs
    "adamw": "AdamW",
    "soap": "SOAP",
    "muon": "torch's Muon",
    "ngd": "NGD",
    "kaldi-ngd": "KaldiNGD",
    "sgd": "SGD",
    "lamb": "LAMB",
    "slamb": "SLAMB",
    "lars": "LARS",
}
SENT = {  # what is sent
    "ngd-int4": "NGD, gradients in 4 bits",
    "ngd-sign": "NGD, gradients in 1 bit",
    "diloco-ngd": "DiLoCo",
    "diloco-ngd-momentum0.5": "DiLoCo, outer momentum 0.5",
    "demo": "DeMo",
    "ngd-powersgd": "PowerSGD",
}
COMPRESSIONS = (  # the same method in runs that send ever less
    ("ngd", "ngd-int4", "ngd-sign"),
    ("diloco-ngd-every10", "diloco-ngd"),
    ("ngd-powersgd-rank8", "ngd-powersgd"),
)
BATCH_RULES = {
    "static": "static",
    "cosine": "static, 32, with a cosine",
    "increase": "increase",
    "replace_decay": "increase, in place of the cosine",
    "decrease": "decrease",
    "loss": "loss",
    "noise": "noise",
}
SCHEDULES = {
    "constant": "constant",
    "multistep": "multistep",
    "cosine": "cosine",
    "onecycle": "one-cycle",
    "cyclic": "cyclic",
}
MIXING_KINDS = {
    "none": "no mixing",
    "mixup0.2": "mixup, alpha 0.2",
    "mixup1": "mixup, alpha 1",
    "weight0.8": "mixup, constant weight 0.8",
    "meta-pair": "meta-mixup, a weight for each pair",
    "meta-beta": "meta-mixup, a distribution for each pair",
}
LABELS: Mapping[str, Mapping[str, str]] = {
    "agnews12k": {
        "plain-fp32": "AdamW, fp32",
        "plain": "AdamW",
        "prior": "naive Bayes prior, half the epochs, lower rate",
    },
    "label_noise_agnews12k": MIXING_KINDS,
    "few_rows_agnews12k": MIXING_KINDS,
    "fast94_vgg8": {
        "ngd-14-epochs": "recipe fast94_vgg8",
        "ngd": "recipe fast94_vgg8, 10 epochs",
        "airbench94": "cifar10-airbench",
    },
    "tuning_cifar10_20pct": {"tuned": "tuned by a sweep"},
    "tuning_agnews12k": {"tuned": "tuned by a sweep"},
    "slow_network_search_cifar10": {
        **OPTIMIZERS,
        **SENT,
        "slamb-int4": "SLAMB, 40 % in 4 bits",
        "slamb-outer": "SLAMB, outer momentum",
        "diloco-ngd-every10": "DiLoCo, every 10 steps",
        "diloco-lamb": "DiLoCo, with LAMB",
        "lamb-sign": "LAMB, gradients in 1 bit",
        "sgd-powersgd": "PowerSGD, with SGD",
        "ngd-powersgd-rank8": "PowerSGD, of rank 8",
    },
    "slow_network_cifar10": {
        **OPTIMIZERS,
        **SENT,
        "slamb-int4-lr0.08": "SLAMB, 40 % in 4 bits",
    },
    "mixup_cifar10_10pct": {
        "none": "no mixing",
        "mixup0.2": "mixup, alpha 0.2",
        "mixup1": "mixup, alpha 1",
        "meta-pair": "meta-mixup, a weight for each pair",
    },
    "mixup_agnews6k": {
        "none": "no mixing",
        "mixup1": "mixup, alpha 1",
        "mixup1-tokens": "mixup, alpha 1, of tokens",
        "meta-pair": "meta-mixup, a weight for each pair",
        "meta-pair-tokens": "meta-mixup, a weight for each pair, of tokens",
    },
    "dynamic_batch_cifar10_20pct": BATCH_RULES,
    "schedules_cifar10_20pct": SCHEDULES,
    "defaults_cifar10_20pct": {
        "default": "SGD",
        "default-kaldi-ngd": "KaldiNGD",
        "default-muon": "torch's Muon",
        "default-ngd": "NGD",
    },
    **{
        f"{source}_{data_set}": OPTIMIZERS
        for source in ("optimizers", "soap")
        for data_set in ("agnews12k", "cifar10", "vgg8")
    },
}
"""The labels of the runs in each group, in the order of the legend; other runs are not drawn."""


def method_of(label: str) -> str:
    """Return the method of a label, 'SGD' of 'SGD, batch 512'."""
    return label.split(",")[0]


def setting_of(flags: Mapping[str, Any]) -> str:
    """Describe the momentum of an optimizer from the flags of a run, as in 'momentum 0.6'."""
    if flags["optimizer"] == "adamw":  # also of SOAP, which takes AdamW's place
        return "betas {:g} and {:g}".format(*flags["betas"])
    if flags["optimizer"] == "kaldi_ngd":
        return f"alpha {flags['ngd_alpha']:g}"
    return f"momentum {flags['momentum']:g}"


def line_styles(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of `Axes.plot` for each label of a picture.

    A label that is the name of a method alone has a solid line and filled markers. The settings of
    a method have the line styles of SETTINGS in the order of the labels.
    """
    labels = list(dict.fromkeys(labels))
    methods = list(dict.fromkeys(map(method_of, labels)))
    unnamed = [method for method in methods if method not in STYLES]
    styles = {}
    for method in methods:
        if method in STYLES:
            colour, marker = STYLES[method]
        else:
            colour, marker = UNNAMED[unnamed.index(method) % len(UNNAMED)]
        settings = [label for label in labels if method_of(label) == method]
        settings.sort(key=lambda label: "," in label)
        for index, label in enumerate(settings):
            setting = SETTINGS[index % len(SETTINGS)]
            styles[label] = {"color": colour, "marker": marker, "markersize": 5, **setting}
    return styles
