"""Flags: each is declared once, as a typed field of a settings class, and argparse reads them.

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        alpha: float = flag(positive, 0.99, "strength of mixing", group="mixing of samples")

    parser = ScriptParser("...", Settings, learning_rates={}, changes={})
    parser.given(["--alpha", "0.2"])     # {"alpha": 0.2}

A declaration also says to what a flag belongs (`Scope`) and with which others it means something
(`only_with`): what a resumed run restores, what the processes of a job compare, what a recipe may
hold, warnings, --help and docs/flags.md follow from it. Hyphens are read as underscores, names of
timm and Hugging Face are replaced by ours, and a flag or value that does not exist gets a
suggestion. --opt_args rank=16 sets a parameter of the part that another flag chooses; the part
documents and checks it, and `own` reads its default from there.
"""

import argparse
import contextlib
import enum
import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from cli.foreign_names import FOREIGN
from errors import InputError, did_you_mean
from models.own_parts import is_own
from training.run_segments import flag_value

# -------------------------------------------------------------------- values

MAX_FLOAT = 1e38  # about what fp32 holds
SIMILAR_FLAGS = 0.8  # share of letters that a misspelt flag has; less would guess at other words


switch = bool  # stands for the type of a flag without a value, which --no-NAME turns off
path_text = os.path.expanduser  # an argparse type: ~ and ~NAME stand for home folders


def file_path(text: str) -> Path:
    """An argparse type: as `path_text`, as a Path."""
    return Path(path_text(text))


def number(
    kind: Callable[[str], Any], low: float, high: float = MAX_FLOAT, *, open_low: bool = False
) -> Callable[[str], Any]:
    """An argparse type: numbers of a kind within [low, high], or (low, high] with `open_low`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None
        if not low <= value <= high or (open_low and value == low):
            limits = f"{'above' if open_low else 'at least'} {flag_value(low)}"
            if high < MAX_FLOAT or value > high:
                limits += f" and at most {flag_value(high)}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return value

    return convert


count, natural = number(int, 1), number(int, 0)
positive, not_negative = number(float, 0, open_low=True), number(float, 0)
fraction, below_one = number(float, 0, 1, open_low=True), number(float, 0, 0.999)


@dataclass(eq=False)  # argparse looks types up by their hash
class Choice:
    """An argparse type: one of some names.

    A part that is not installed here can be chosen as well, and says itself what is missing.
    """

    names: Collection[str]
    also: Callable[[str], bool] = lambda text: False  # whether another name can be chosen

    def __call__(self, text: str) -> str:
        if not (text in self.names or self.also(text)):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(self.names)}{did_you_mean(text, self.names)}"
            )
        return text


def output_file(suffixes: Sequence[str], *, overwrite: bool) -> Callable[[str], str]:
    """An argparse type: the path of a file to write, in a folder that exists.

    Args:
        suffixes: one of which the name must have.
        overwrite: whether the file may be there already.
    """

    def convert(text: str) -> str:
        path, problem = path_text(text), ""
        if os.path.splitext(path)[1] not in suffixes:
            problem = f"the name must end in {' or '.join(suffixes)}"
        elif not os.path.isdir(os.path.dirname(path) or "."):
            problem = "the folder does not exist; make it first"
        elif not overwrite and os.path.lexists(path):
            problem = "is there already and would be overwritten; choose another name"
        if problem:
            raise argparse.ArgumentTypeError(f"{path}: {problem}")
        return path

    return convert


def setting(text: str) -> tuple[str, Any]:
    """An argparse type: NAME=VALUE, where the value is a number, true, false or a word."""
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"write NAME=VALUE, got {text!r}")
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return name.replace("-", "_"), convert(value)
    return name.replace("-", "_"), {"true": True, "false": False}.get(value.lower(), value)


def own(part: Callable[..., Any], *names: str) -> dict[str, Any]:
    """The defaults of some parameters of a part, for the `parts` of a flag that sets them."""
    parameters = inspect.signature(part).parameters
    return {name: parameters[name].default for name in names}


def fits(value: Any, default: Any) -> bool:
    """Whether a value is of the kind of a default; where that is None, a number or None."""
    if value is None or isinstance(value, bool):
        return type(value) is type(default)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    kinds = {int: int, str: str}.get(type(default), int | float)
    return isinstance(value, kinds) and not isinstance(default, bool)


def flat(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with each setting of a part, such as 'opt_args rank', as one of them."""
    result: dict[str, Any] = {}
    for name, value in flags.items():
        parts = value if isinstance(value, dict) else {"": value}
        result |= {f"{name} {key}".strip(): each for key, each in parts.items()}
    return result


# -------------------------------------------------------------------- what a flag belongs to


class Scope(enum.Enum):
    """What a flag belongs to."""

    # What the run computes. Restored by --resume, which names a change; the same on all processes.
    RESULT = enum.auto()
    HOW = enum.auto()  # how it is run, as how often it saves: as RESULT, but a change is not named
    PLACE = enum.auto()  # where the data is. Restored, and may differ between nodes
    NODE = enum.auto()  # what a node has, such as cores: as HOW, and may differ between nodes
    OUTPUT = enum.auto()  # where this start of the script writes. Not restored
    START = enum.auto()  # what this start of the script does. Not restored, no part of a recipe


class Not(tuple):  # type: ignore[type-arg]
    """Any value but these."""


OFF = (None, False, 0, "none")
ON = Not(OFF)
Values = Mapping[str, Sequence[Any]]  # by name of a flag, those of its values that are meant


def holds(flags: Mapping[str, Any], name: str, values: Sequence[Any]) -> bool:
    """Whether a flag has one of these values; `processes` is whether the job has several."""
    if name == "processes":
        value: Any = os.environ.get("WORLD_SIZE", "") not in ("", "1")  # another is refused later
    else:
        value = flags[name]
    return value not in values if isinstance(values, Not) else value in values


def conditions_in_words(values: Values) -> str:
    """Values as a user gives them: '--sync local or diloco', 'several processes'."""
    words = []
    for name, each in values.items():
        *first, last = map(str, each)
        choices = f"{', '.join(first)} or {last}" if first else last
        if name == "processes":
            words.append("several processes")
        elif each is OFF or list(each) == [None]:
            words.append(f"a run without --{name}")
        elif each is ON or list(each) == [True]:
            words.append(f"--{name}")
        else:
            words.append(f"--{name} {choices}")
    return " and ".join(words)


@dataclass(frozen=True)
class Flag:
    """What is known of a flag."""

    names: Sequence[str]  # its spellings with dashes, the first is its own
    type: Callable[[str], Any]  # converts its text; `switch` for a flag without a value
    default: Any  # its value where it is not given; None where that depends on other flags
    help: str  # what it is, without its default, in a noun phrase
    _: KW_ONLY
    group: str = ""  # title of the group that lists it
    dest: str = ""  # its attribute of the parsed arguments
    common: bool = False  # whether the short --help shows it
    metavar: str = ""  # stands for its value
    nargs: str | int | None = None  # as of argparse
    scope: Scope = Scope.RESULT
    only_with: Sequence[Values] = ()  # it has an effect where all values of one of these hold
    owner: str = ""  # of NAME=VALUE settings: the flag that chooses the part to which they belong
    # The settings of each part with their defaults, by the value of that flag.
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its own spelling, with dashes."""
        return self.names[0]

    def text(self) -> str:
        """Return the help with the choices and the default."""
        text = self.help
        if isinstance(self.type, Choice):
            text += f": {', '.join(self.type.names)}"
        if "(default" not in text and self.default not in (None, "", [], {}):
            text += f" (default {flag_value(self.default)})"
        return text

    def has_effect(self, flags: Mapping[str, Any]) -> bool:
        """Whether all values of an alternative of `only_with` hold."""
        return not self.only_with or any(
            all(holds(flags, name, values) for name, values in each.items())
            for each in self.only_with
        )


def flag(
    type: Callable[[str], Any], default: Any, help: str, *, names: str = "", **more: Any
) -> Any:
    """Declare a field of a settings class as a flag.

    Args:
        type, default, help, more: attributes of `Flag`; a `group` holds until the next one.
        names: its spellings with dashes, separated by spaces; that of the field by default.
    """
    declaration = {"type": type, "default": default, "help": help, "names": names, **more}
    return field(metadata=declaration)


# -------------------------------------------------------------------- parsers


class FlagParser(argparse.ArgumentParser):
    """An argparse parser whose errors are InputErrors of one line.

    Args:
        description: text above the flags, printed as it is.
        usage: what follows the name of the program in the first line.
        foreign: names of other projects, with underscores: the flag that they mean, as
            '--backend=compile' where they stand for one of its values, '--opt_args=rank=' for a
            setting of a part; or a sentence that says what there is instead.
    """

    def __init__(
        self,
        description: str | None = None,
        usage: str = "[flags]",
        foreign: Mapping[str, str] | None = None,
        add_help: bool = True,
    ) -> None:
        super().__init__(
            description=description,
            usage=f"%(prog)s {usage}",
            allow_abbrev=False,
            add_help=add_help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.foreign = foreign or {}
        self.suggested: list[str] = []  # further flags that the same command line may have

    def group(self, title: str) -> Callable[..., None]:
        """Return what declares a flag of a new group, by its name, type, default and help."""
        group = self.add_argument_group(title)

        def declare(name: str, *declaration: Any, **more: Any) -> None:
            flag = Flag([name], *declaration)
            more |= {"action": "store_true"} if flag.type is switch else {"type": flag.type}
            group.add_argument(
                name, default=flag.default, help=flag.text().replace("%", "%%"), **more
            )

        return declare

    def translate(self, arguments: Iterable[str]) -> list[str]:
        """Replace hyphens and foreign names of flags, and leave values as they are.

        Raises:
            InputError: a value is empty, as that of a shell's variable that is not set, or a
                foreign name has no counterpart.
        """
        translated: list[str] = []
        remaining, flag = iter(arguments), ""
        for argument in remaining:
            if argument == "--":  # what follows are no flags
                return [*translated, argument, *remaining]
            word, equals, value = argument, "", ""
            if argument.startswith("-"):
                flag = argument.partition("=")[0]
            if argument.startswith("--"):
                word, equals, value = argument.partition("=")
                word = self.own_name(word)
                if word.endswith("="):  # a setting of a part
                    word, value = word[:-1], value if equals else next(remaining, "")
                    equals = "="
            if not (value if equals else word):
                raise InputError(f"{flag}: the value is empty; give one, or leave the flag out")
            translated.append(f"{word}{equals}{value}")
        return translated

    def own_name(self, name: str) -> str:
        """Return our spelling of a flag, with its dashes: '--no-fuse', '--backend=compile'.

        Raises:
            InputError: there is no such flag, and a sentence says what there is instead.
        """
        own = f"--{name[2:].replace('-', '_')}"
        own = self.foreign.get(own, own)
        if own.startswith("--no_"):
            return f"--no-{self.own_name(f'--{own[5:]}')[2:]}"
        if not own.startswith("--"):
            raise InputError(f"{name}: there is no such flag; {own}")
        return own

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parse as argparse does; an unknown flag gets a suggestion.

        Raises:
            InputError: a flag is unknown, or its value is not valid.
        """
        arguments = self.translate(sys.argv[1:] if args is None else args)
        namespace, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            first = next((each for each in unknown if each.startswith("-")), unknown[0])
            raise InputError(self.explain_unknown(first.partition("=")[0]))
        return namespace

    def names(self) -> list[str]:
        """All flags, with their dashes."""
        return [option for action in self._actions for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise an InputError in place of printing the usage."""
        raise InputError(f"{message.removeprefix('argument ')} (see --help)")

    def explain_unknown(self, name: str) -> str:
        """Return the line for a flag that does not exist, or for a value that belongs to none."""
        if not name.startswith("-"):
            return f"{name}: this is neither a flag nor the value of one (see --help)"
        names = self.names()
        known = [each for each, own in self.foreign.items() if own.partition("=")[0] in names]
        guess = did_you_mean(name, [*names, *known, *self.suggested], similar=SIMILAR_FLAGS)
        return f"{name}: there is no such flag{guess or '; --help all prints all flags'}"


class ShowHelp(argparse.Action):
    """--help prints the common flags, --help all prints all of them; then the process ends."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        print(parser.format_help(everything=values == "all"), end="")
        parser.exit()


T = TypeVar("T")


class ScriptParser(FlagParser, Generic[T]):
    """The parser of an entry script; its flags are declared as in the example above.

    Args:
        kind: the settings class that the flags become.
        learning_rates: defaults of --lr, by optimizer.
        changes: what differs from a field's declaration, by field.

    Attributes:
        flags: what is known of each flag, by its attribute, in the order of the declarations.
    """

    def __init__(
        self,
        description: str | None,
        kind: type[T],
        *,
        learning_rates: Mapping[str, float],
        changes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        super().__init__(description, foreign=FOREIGN, add_help=False)
        self.add_argument(
            *("--help", "-h"),
            action=ShowHelp,
            nargs="?",
            type=Choice(["all"]),
            default=argparse.SUPPRESS,
            metavar="all",
            help="the flags that most runs need, or all of them",
        )
        self.kind, self.learning_rates = kind, learning_rates
        self.flags: dict[str, Flag] = {}
        # In groups: the first, those of the class's own, those of its base.
        groups, title = dict[str, list[Any]](), ""
        for each in fields(kind):  # type: ignore[arg-type]
            title = each.metadata.get("group", title)
            groups.setdefault(title, []).append(each)
        own = [title for title in groups if groups[title][0].name in kind.__annotations__]
        for title in dict.fromkeys([next(iter(groups)), *own, *groups]):
            listed = self.add_argument_group(title)
            for each in groups[title]:
                declaration = {**each.metadata, **changes.get(each.name, {}), "group": title}
                names = (declaration.pop("names") or f"--{each.name}").split()
                if declaration["type"] is setting:
                    declaration |= {"nargs": "+", "metavar": "NAME=VALUE"}
                self._add(listed, Flag(names, **declaration, dest=each.name))

    def _add(self, group: Any, flag: Flag) -> None:
        settings: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if flag.type is not switch:
            settings = {"type": flag.type, "nargs": flag.nargs, "metavar": flag.metavar or None}
            if flag.type is setting:
                settings["action"] = "extend"  # --opt_args rank=16 --opt_args adamw_ratio=0.1
            if flag.nargs == "?":
                settings["const"] = ""
        self.flags[flag.dest] = flag
        group.add_argument(*flag.names, dest=flag.dest, default=argparse.SUPPRESS, **settings)

    def settings(self) -> list[Flag]:
        """The flags that take NAME=VALUE."""
        return [flag for flag in self.flags.values() if flag.type is setting]

    def format_help(self, *, everything: bool = False) -> str:
        """Return the text of --help: of the common flags, or of all."""
        for action in self._actions:
            if flag := self.flags.get(action.dest):
                is_shown = everything or flag.common
                action.help = flag.text().replace("%", "%%") if is_shown else argparse.SUPPRESS
        rest = "\n--help all prints all flags, and docs/flags.md lists them.\n"
        return super().format_help() + ("" if everything else rest)

    def defaults(self) -> dict[str, Any]:
        return {name: flag.default for name, flag in self.flags.items()}

    def words(self, name: str, value: Any) -> str:
        """Return a flag, by attribute, with a value, as one would type it."""
        flag = self.flags[name].name
        if isinstance(value, dict):
            value = " ".join(f"{key}={each}" for key, each in value.items())
        return flag if value is True else f"{flag} {value}"

    def given(self, arguments: Sequence[str] | None) -> dict[str, Any]:
        """What a command line gives, by attribute; None is this process's own.

        Raises:
            InputError: a flag is unknown, or its value is not valid.
        """
        given = vars(self.parse_args(arguments))
        return given | {
            flag.dest: dict(given[flag.dest]) for flag in self.settings() if flag.dest in given
        }

    def merged(self, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Flags with those that are given in their place; settings of a part are added up."""
        result = {**values, **given}
        for flag in self.settings():
            old, new = str(values.get(flag.owner)), str(result.get(flag.owner))
            is_alike = flag.parts.get(old) is flag.parts.get(new)  # declared as one, as policies
            before = values[flag.dest] if old == new or is_alike else {}
            result[flag.dest] = {**before, **given.get(flag.dest, {})}
        return result

    def complete(self, flags: dict[str, Any]) -> None:
        """Check the settings of parts that were given, and add the defaults of others, in place.

        Raises:
            InputError: a part has no such setting, or the value is of another kind.
        """
        for flag in self.settings():
            chosen = flags[flag.owner]
            if is_own(chosen):  # which checks them itself
                continue
            settings, given = flag.parts.get(chosen, {}), flags[flag.dest]
            for key, value in given.items():
                problem = f"{flag.name} {key}={value}"
                if key not in settings:
                    raise InputError(
                        f"{problem}: --{flag.owner} {chosen} has no such setting; it has "
                        f"{', '.join(settings) or 'none'}{did_you_mean(key, settings)}"
                    )
                if not fits(value, settings[key]):
                    kind = "a number" if settings[key] is None else f"like {settings[key]}"
                    raise InputError(f"{problem}: must be {kind}")
            flags[flag.dest] = {**settings, **given}

    def find(self, name: str) -> Flag | None:
        """The flag of any spelling, without dashes in front; None if there is none."""
        own = self.own_name(f"--{name}").partition("=")[0].replace("--no-", "--")
        return next((flag for flag in self.flags.values() if own in flag.names), None)

    def of_scope(self, *scopes: Scope) -> Collection[str]:
        """The attributes of the flags that belong to one of these scopes."""
        return [name for name, flag in self.flags.items() if flag.scope in scopes]

    def unused(self, given: Iterable[str], flags: Mapping[str, Any]) -> list[str]:
        """A line for each flag that was given and has no effect.

        Args:
            given: the attributes of the flags of the command line. Values of a recipe or a
                checkpoint are not named: who gives --mixup none beside a recipe knows that the
                recipe's --alpha is then of no use.
        """
        lines = []
        for flag in map(self.flags.__getitem__, given):
            if flags[flag.dest] is not False and not flag.has_effect(flags):
                meant = " or ".join(map(conditions_in_words, flag.only_with))
                lines.append(f"{flag.name} has no effect here: it is for {meant}")
        return lines
