"""Settings that a part of a run owns: --opt_args rank=16 sets a parameter of the optimizer.

complete(args, parser)      # args.opt_args is {"rank": 16, "adamw_ratio": 0.075}

Their names and defaults are those of the part's own parameters, which it documents and checks.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from cli.flags import Parser
from distributed.diloco import DiLoCo
from dynamic_batch import ByLoss, ByNoise, lr_power, schedule_growth
from errors import InputError, did_you_mean
from input_pipeline.image_batches import Augmentation
from mixup import MetaMixup, mixup
from models.transformer import Transformer
from optimizers.schedules import SETTINGS, Schedule
from training.meta_mixup_step import MetaMixupStep

Parts = Mapping[str, Mapping[str, Any]]  # by value of the flag that chooses the part, its settings


def own(part: Callable[..., Any], *names: str) -> dict[str, Any]:
    """The defaults of some parameters of a part."""
    parameters = inspect.signature(part).parameters
    return {name: parameters[name].default for name in names}


SMALL = own(Augmentation, "small_size", "small_stages")
BATCH = own(lr_power, "lr") | {"min": None, "max": None}
PARTS: dict[str, tuple[str, Parts]] = {
    "lr_args": (
        "lr_schedule",
        {name: own(Schedule, *settings) for name, settings in SETTINGS.items()},
    ),
    "sync_args": ("sync", {"diloco": own(DiLoCo, "lr", "momentum")}),
    "batch_args": (
        "dynamic_batch",
        {
            "increase": BATCH | own(schedule_growth, "factor", "growth"),
            "decrease": BATCH | own(schedule_growth, "factor", "growth"),
            "loss": BATCH | own(ByLoss, "kind", "factor", "threshold", "window"),
            "noise": BATCH | own(ByNoise, "factor"),
        },
    ),
    "mixup_args": (
        "mixup",
        {
            "mixup": own(mixup, "weight"),
            "intra": own(mixup, "weight"),
            "meta": own(MetaMixup, "policy", "lr") | own(MetaMixupStep, "every"),
        },
    ),
    "augment_args": (
        "augment",
        {
            "standard": {"pad": None, **own(Augmentation, "fill", "alternate")} | SMALL,
            "none": SMALL,
        },
    ),
}


def settings_of(args: Namespace, parser: Parser) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """For each --X_args, the part that has these settings in words, and their defaults."""
    choice = parser.optimizers[args.optimizer]
    found: dict[str, tuple[str, Mapping[str, Any]]] = {
        "opt_args": (f"--optimizer {args.optimizer}", own(choice.make, *choice.own)),
    }
    for name, (flag, parts) in PARTS.items():
        if name in parser.flags:
            value = getattr(args, flag)
            found[name] = (f"--{flag} {value}", parts.get(value, {}))
    if "model_args" in parser.flags:
        found["model_args"] = (
            "the Transformer",
            own(Transformer, "width", "depth", "heads", "mlp_width", "positions", "pooling"),
        )
    return found


def complete(args: Namespace, parser: Parser) -> None:
    """Check the settings that were given, and add the defaults of the others, in place.

    Raises:
        InputError: a part has no such setting, or the value is of another kind.
    """
    for name, (part, settings) in settings_of(args, parser).items():
        given = getattr(args, name)
        for key, value in given.items():
            flag = f"--{name} {key}={value}"
            if key not in settings:
                there_are = f"it has {', '.join(settings)}" if settings else "it has none"
                raise InputError(
                    f"{flag}: {part} has no such setting; {there_are}{did_you_mean(key, settings)}"
                )
            if not fits(value, settings[key]):
                kind = "a number" if settings[key] is None else f"like {settings[key]}"
                raise InputError(f"{flag}: must be {kind}")
        setattr(args, name, {**settings, **given})


def merged(values: Mapping[str, Any], given: Mapping[str, Any], parser: Parser) -> dict[str, Any]:
    """Flags with those that are given in their place; settings of the same part are added up."""
    result = {**values, **given}
    owners = {"opt_args": "optimizer", "model_args": "dataset"}
    owners |= {name: flag for name, (flag, _) in PARTS.items()}
    for name, owner in owners.items():
        if name in parser.flags and result[owner] == values[owner]:
            result[name] = {**values[name], **given.get(name, {})}
        elif name in parser.flags:
            result[name] = given.get(name, {})
    return result


def flat(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with each setting of a part, such as 'opt_args rank', as one of them."""
    result: dict[str, Any] = {}
    for name, value in flags.items():
        parts = value if isinstance(value, dict) else {"": value}
        result |= {f"{name} {key}".strip(): each for key, each in parts.items()}
    return result


def fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of a default; where that is None, a number or None."""
    if value is None:
        return default is None
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, int):
        return isinstance(value, int)
    if default is None or isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, str) and isinstance(default, str)
