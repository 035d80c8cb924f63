"""The search space of a sweep: YAML to Optuna's distributions, and a trial's values to command-line words.

space = read_space(Path("tuning/resnet50.yaml"), known={"lr", "momentum", ...})
values = suggest(trial, space)                       # {"lr": 0.03, "alpha": 0.2}
words = as_words(values, names)                       # ["--lr", "0.03", "--alpha", "0.2"]

Each line of the file names a flag and says where its values come from:

    lr: {log: [0.005, 0.5]}                # between, evenly in the logarithm
    momentum: {uniform: [0.8, 0.98]}       # between; of whole numbers where both ends are
    mixup: {choice: [none, mixup]}         # one of these
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from errors import InputError

Space = dict[str, BaseDistribution]


def read_space(path: Path, known: Collection[str]) -> Space:
    """The distributions of a file.

    Args:
        path: YAML as above.
        known: names of flags that the script has.
    Raises:
        InputError: unreadable, empty, an unknown flag, or what Optuna refuses.
    """
    try:
        lines = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(
            f"--space {path}: {error.strerror}; give the path of a YAML file"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--space {path}: not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(lines, dict) or not lines:
        raise InputError(f"--space {path}: empty; wanted lines such as 'lr: {{log: [0.005, 0.5]}}'")
    return {str(name): distribution(path, str(name), what, known) for name, what in lines.items()}


def distribution(path: Path, name: str, what: Any, known: Collection[str]) -> BaseDistribution:
    """Of one line."""
    where = f"--space {path}, {name}"
    if name not in known:
        raise InputError(f"{where}: the script has no flag --{name}")
    if (
        not isinstance(what, dict)
        or len(what) != 1
        or not isinstance(next(iter(what.values())), list)
    ):
        raise InputError(
            f"{where}: wanted {{log: [low, high]}}, {{uniform: [low, high]}} or {{choice: [...]}}, got {what}"
        )
    ((kind, values),) = what.items()
    try:
        if kind == "choice":
            return CategoricalDistribution(values)
        low, high = map(number, values)
        if kind == "log":
            return FloatDistribution(low, high, log=True)
        if kind == "uniform":
            whole = isinstance(low, int) and isinstance(high, int)
            return IntDistribution(low, high) if whole else FloatDistribution(low, high)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise InputError(f"{where}: {str(error).splitlines()[0]}") from None
    raise InputError(f"{where}: {kind} is not one of log, uniform, choice")


def number(value: Any) -> int | float:
    """A number as YAML gives it; '1e-5', which YAML takes for text, too."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
    return value if isinstance(value, int | float) else float(value)


def grid(path: Path, space: Space) -> dict[str, list[Any]]:
    """All values of each flag, for a grid.

    Raises:
        InputError: one of them is a range.
    """
    for name, of in space.items():
        if not isinstance(of, CategoricalDistribution):
            raise InputError(
                f"--sampler grid: {name} in {path} is a range; list its values: {name}: {{choice: [...]}}"
            )
    return {name: list(of.choices) for name, of in space.items()}  # type: ignore[attr-defined]


def suggest(trial: optuna.Trial, space: Space) -> dict[str, Any]:
    """This trial's value of each flag."""
    values: dict[str, Any] = {}
    for name, of in space.items():
        if isinstance(of, CategoricalDistribution):
            values[name] = trial.suggest_categorical(name, of.choices)
        elif isinstance(of, IntDistribution):
            values[name] = trial.suggest_int(name, of.low, of.high)
        elif isinstance(of, FloatDistribution):
            values[name] = trial.suggest_float(name, of.low, of.high, log=of.log)
    return values


def as_words(values: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Command-line words; true and false are a flag and its opposite, or its absence where there is no opposite."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else [f"--no-{name}"] if f"no-{name}" in known else []
        else:
            words += [f"--{name}", f"{value:.6g}" if isinstance(value, float) else str(value)]
    return words
