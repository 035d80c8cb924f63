"""The search space of a sweep: a YAML file with the arguments of Optuna's `suggest_*` methods.

    lr: {around: 20}                             # the default, a twentieth, and twenty times it
    weight_decay: {type: float, low: 1e-5, high: 1e-2, log: true}
    bs: {type: int, low: 16, high: 64, step: 16}
    mixup: {type: categorical, choices: [none, mixup]}

space = read_space(Path("tuning/resnet50.yaml"), script)      # script: a TargetScript
suggest(trial, space)                                         # {"lr": 0.03, "bs": 32, ...}
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from cli.yaml_file import read_yaml
from errors import InputError, excerpt, first_line
from tuning.config import Space
from tuning.target_script import TargetScript

DISTRIBUTIONS = {  # by type, with the same arguments as the suggest method of that type
    "float": FloatDistribution,
    "int": IntDistribution,
    "categorical": CategoricalDistribution,
}
EXAMPLE = "lr: {type: float, low: 0.005, high: 0.5, log: true}"


def read_space(path: Path, script: TargetScript, *, is_usual: bool = False) -> Space:
    """Read a search space, and check both ends of each range and each choice with the script.

    Args:
        path: YAML in the format above; any spelling of a flag will do.
        script: the script whose flags are searched.
        is_usual: whether nobody chose this space; then it holds only flags that have an effect, and
            of those with a range around their default those whose default is not 0.

    Returns:
        The arguments of each flag's suggest method and its `type`, by the script's own name.

    Raises:
        InputError: the file is unreadable or empty, names an unknown flag or a flag twice, holds
            what Optuna refuses, or a value that the script refuses.
    """
    source = f"--space {path}"
    entries = read_yaml(path, source)
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{source}: expected lines such as '{EXAMPLE}'")
    space: Space = {}
    for spelling, entry in entries.items():
        try:
            name = script.own_name(str(spelling))
            if name in space:
                raise InputError(f"{name} is there twice; leave one out")
            if is_usual and not (
                script.has_effect(name) and ("around" not in entry or script.usual(name))
            ):
                continue
            space[name] = read_entry(entry, partial(script.usual, name))
        except InputError as error:
            raise InputError(f"{source}, {spelling}: {error}") from None
    choices = {name: entry["choices"] for name, entry in space.items() if "choices" in entry}
    for name, entry in space.items():
        ends = [entry[end] for end in ("low", "high") if end in entry]
        try:
            for value in [*ends, *entry.get("choices", [])]:
                script.check_value(name, value, owners=choices)
        except InputError as error:
            raise InputError(f"{source}, {name}: {error}") from None
    return space


def read_entry(entry: Any, usual: Callable[[], Any]) -> dict[str, Any]:
    """Return what YAML has made of a flag's line, with numbers as numbers: YAML reads 1e-5 as text.

    Args:
        usual: the flag's default, which `around` multiplies and divides.

    Raises:
        InputError: Optuna would refuse it.
    """
    if isinstance(entry, dict) and entry.keys() == {"around"}:
        default = usual()
        try:
            factor = float(entry["around"])
        except (TypeError, ValueError):
            factor = 0.0
        if not 1 < factor < math.inf:
            raise InputError(f"around: expected a factor above 1, got {excerpt(entry['around'])}")
        if not isinstance(default, float) or default <= 0:
            raise InputError(f"around: the default, {excerpt(default)}, is no fraction above 0")
        ends = {"low": default / factor, "high": default * factor}
        entry = {"type": "float", **ends, "log": True}
    kind = str(entry.get("type")) if isinstance(entry, dict) else ""
    if kind not in DISTRIBUTIONS:
        raise InputError(
            f"expected a type ({', '.join(DISTRIBUTIONS)}) and what Optuna's suggest_TYPE takes, "
            f"such as '{EXAMPLE}'; got {excerpt(entry)}"
        )
    try:
        for name in ("low", "high", "step"):
            if isinstance(entry.get(name), str):
                entry = entry | {name: float(entry[name])}
        arguments = {name: value for name, value in entry.items() if name != "type"}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            DISTRIBUTIONS[kind](**arguments)
    except (ArithmeticError, TypeError, ValueError, UserWarning) as error:
        raise InputError(first_line(error)) from None
    return entry


def usual_values(space: Space, script: TargetScript) -> dict[str, Any] | None:
    """Return the defaults of the searched flags, for a first trial; None if one is not searched."""
    values = {name: script.usual(name) for name in space}
    for name, value in values.items():
        entry = space[name]
        is_number = isinstance(value, int | float)
        if value not in entry.get("choices", [value]) or (
            "low" in entry and not (is_number and entry["low"] <= value <= entry["high"])
        ):
            return None
    return values


def grid(space: Space) -> dict[str, list[Any]]:
    """Return the choices of each flag, for a grid search.

    Raises:
        InputError: a flag has a range.
    """
    for name, entry in space.items():
        if entry["type"] != "categorical":
            raise InputError(
                f"--sampler grid: {name} has a range; "
                f"list its values: {name}: {{type: categorical, choices: [...]}}"
            )
    return {name: entry["choices"] for name, entry in space.items()}


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Any]:
    """Return this trial's value of each flag."""
    values = {}
    for name, entry in space.items():
        arguments = {key: entry[key] for key in entry if key != "type"}
        values[name] = getattr(trial, f"suggest_{entry['type']}")(name, **arguments)
    return values
