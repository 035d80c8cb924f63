"""The search space of a sweep: YAML to Optuna's distributions, sampled values to arguments.

space = read_space(Path("tuning/resnet50.yaml"), script.own_name)    # script: a TargetScript
values = suggest(trial, space)                       # {"lr": 0.03, "alpha": 0.2}
arguments = to_arguments(values, known)              # ["--lr", "0.03", "--alpha", "0.2"]

Each line of the file names a flag and its distribution:

    lr: {log: [0.005, 0.5]}                # log-uniform between the two
    momentum: {uniform: [0.8, 0.98]}       # uniform; over integers if both limits are integers
    mixup: {choice: [none, mixup]}         # categorical
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from cli.yaml_file import excerpt, read_yaml
from errors import InputError

Space = dict[str, BaseDistribution]


def read_space(path: Path, own_name: Callable[[str], str]) -> Space:
    """Read the distributions of a file.

    Args:
        path: YAML in the format above.
        own_name: maps any spelling of a flag of the script to the script's own, or raises
            InputError.

    Raises:
        InputError: the file is unreadable or empty, names an unknown flag or a flag twice, or
            holds a distribution that Optuna refuses.
    """
    entries = read_yaml(path, f"--space {path}")
    if not isinstance(entries, dict) or not entries:
        raise InputError(
            f"--space {path}: empty; expected lines such as 'lr: {{log: [0.005, 0.5]}}'"
        )
    space: Space = {}
    for spelling, entry in entries.items():
        try:
            name = own_name(str(spelling))
        except InputError as error:
            raise InputError(f"--space {path}, {spelling}: {error}") from None
        if name in space:
            raise InputError(f"--space {path}, {spelling}: {name} is there twice; leave one out")
        space[name] = parse_distribution(entry, f"--space {path}, {spelling}")
    return space


def parse_distribution(entry: Any, source: str) -> BaseDistribution:
    """Convert the entry of one flag, for example {"log": [0.005, 0.5]}.

    Args:
        entry: what YAML has made of the line.
        source: file and flag, which error messages start with.

    Raises:
        InputError: the entry is no distribution.
    """
    is_pair = isinstance(entry, dict) and len(entry) == 1
    if not is_pair or not isinstance(next(iter(entry.values())), list):
        raise InputError(
            f"{source}: expected {{log: [low, high]}}, {{uniform: [low, high]}} or "
            f"{{choice: [...]}}, got {excerpt(entry)}"
        )
    ((kind, values),) = entry.items()
    try:
        if kind == "choice":
            for value in values:
                if not isinstance(value, bool | int | float | str):
                    raise TypeError(f"{excerpt(value)} is not a number or a word")
            return CategoricalDistribution(values)
        if len(values) != 2:
            raise ValueError(f"expected two numbers, low and high, got {len(values)}")
        low, high = map(parse_number, values)
        if kind == "log":
            return FloatDistribution(low, high, log=True)
        if kind == "uniform":
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high)
            return FloatDistribution(low, high)
    except (ValueError, TypeError) as error:
        raise InputError(f"{source}: {str(error).splitlines()[0]}") from None
    raise InputError(f"{source}: {excerpt(kind)} is not one of log, uniform, choice")


def parse_number(value: Any) -> int | float:
    """Return a YAML value as a number; YAML reads '1e-5' as text, so text is converted.

    Raises:
        TypeError: the value is neither a number nor text.
        ValueError: the text is not a number, or the number is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{excerpt(value)} is not a number")
    number = value if isinstance(value, int | float) else float(value)
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{value} is not a finite number")
    return number


def limits_and_choices(space: Space) -> Iterator[tuple[str, Any]]:
    """Yield each flag with both ends of its range, or with each of its choices."""
    for name, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            yield from ((name, value) for value in distribution.choices)
        elif isinstance(distribution, IntDistribution | FloatDistribution):
            yield from ((name, distribution.low), (name, distribution.high))


def grid_values(path: Path, space: Space) -> dict[str, list[Any]]:
    """Return all values of each flag, for a grid search.

    Raises:
        InputError: a distribution is a range.
    """
    values: dict[str, list[Any]] = {}
    for name, distribution in space.items():
        if not isinstance(distribution, CategoricalDistribution):
            raise InputError(
                f"--sampler grid: {name} in {path} is a range; "
                f"list its values: {name}: {{choice: [...]}}"
            )
        values[name] = list(distribution.choices)
    return values


def grid_size(path: Path, space: Space) -> int:
    """Return the number of points of the grid; raises InputError as `grid_values` does."""
    return math.prod(len(values) for values in grid_values(path, space).values())


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Any]:
    """Sample this trial's value of each flag."""
    values: dict[str, Any] = {}
    for name, distribution in space.items():
        if isinstance(distribution, CategoricalDistribution):
            values[name] = trial.suggest_categorical(name, distribution.choices)
        elif isinstance(distribution, IntDistribution):
            values[name] = trial.suggest_int(name, distribution.low, distribution.high)
        elif isinstance(distribution, FloatDistribution):
            values[name] = trial.suggest_float(
                name, distribution.low, distribution.high, log=distribution.log
            )
    return values


def to_arguments(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Convert values of flags to command-line arguments.

    Args:
        values: value of each flag. False becomes --no-FLAG where that flag exists, else nothing.
        known: names of the flags that the script has.
    """
    arguments: list[str] = []
    for name, value in values.items():
        if value is True:
            arguments.append(f"--{name}")
        elif value is False:
            arguments += [f"--no-{name}"] if f"no-{name}" in known else []
        elif isinstance(value, float):
            arguments += [f"--{name}", f"{value:.6g}"]
        else:
            arguments += [f"--{name}", str(value)]
    return arguments
