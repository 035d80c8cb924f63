"""Settings that a part of a run owns: --opt_args rank=16 sets a parameter of the optimizer.

own(NGD, "rank")            # {"rank": 32}: for the declaration of the flag, see `Flag.parts`
complete(args, parser)      # args.opt_args is {"rank": 16, "adamw_ratio": 0.075}

Their names and defaults are those of the part's own parameters, which it documents and checks.
"""

from __future__ import annotations

import contextlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cli.flag_parser import Flag, ScriptParser
from errors import InputError, did_you_mean


@contextlib.contextmanager
def refused_as(flag: str) -> Iterator[None]:
    """Turn a part's refusal of its settings into the line of the flag that gave them."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{flag}: {error}") from None


def own(part: Callable[..., Any], *names: str) -> dict[str, Any]:
    """The defaults of some parameters of a part."""
    parameters = inspect.signature(part).parameters
    return {name: parameters[name].default for name in names}


def defaults_of(flag: Flag, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a flag can give to the part that is chosen, with their defaults.

    Args:
        values: of all flags.
    """
    return dict(flag.parts.get(values.get(flag.owner, ""), {}))


def complete(args: Namespace, parser: ScriptParser) -> None:
    """Check the settings that were given, and add the defaults of the others, in place.

    Raises:
        InputError: a part has no such setting, or the value is of another kind.
    """
    for flag in parser.settings():
        settings = defaults_of(flag, vars(args))
        given = getattr(args, flag.dest)
        for key, value in given.items():
            problem = f"{flag.name} {key}={value}"
            if key not in settings:
                part = f"--{flag.owner} {getattr(args, flag.owner)}" if flag.owner else "the model"
                raise InputError(
                    f"{problem}: {part} has no such setting; it has "
                    f"{', '.join(settings) or 'none'}{did_you_mean(key, settings)}"
                )
            if not fits(value, settings[key]):
                kind = "a number" if settings[key] is None else f"like {settings[key]}"
                raise InputError(f"{problem}: must be {kind}")
        setattr(args, flag.dest, {**settings, **given})


def merged(
    values: Mapping[str, Any], given: Mapping[str, Any], parser: ScriptParser
) -> dict[str, Any]:
    """Flags with those that are given in their place; settings of the same part are added up."""
    result = {**values, **given}
    for flag in parser.settings():
        old, new = values.get(flag.owner), result.get(flag.owner)
        # Policies of --augment share what they set; names that optimizers share mean other things.
        is_alike = flag.owner == "augment" and flag.parts.get(str(old)) == flag.parts.get(str(new))
        before = values[flag.dest] if old == new or is_alike else {}
        result[flag.dest] = {**before, **given.get(flag.dest, {})}
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
    if value is None or isinstance(value, bool):
        return type(value) is type(default)
    kinds = {int: int, str: str}.get(type(default), int | float)
    return isinstance(value, kinds) and not isinstance(default, bool)
