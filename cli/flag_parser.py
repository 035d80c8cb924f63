"""Flags as people type them: other spellings, errors that suggest, and help in two lengths.

    parser = FlagParser(description=__doc__)
    add = parser.group("training")
    add("--clip", type=float, default=0.0, metavar="NORM", aliases=("--max_grad_norm",),
        help="Clip the norm of the gradient to this value (default %(default)s).", common=True)
    parser.parse_args(["--max-grad-norm", "1"]).clip     # 1.0

It is argparse with four additions. Hyphens in the name of a flag are read as underscores. An alias
is replaced by its flag before argparse sees it, so that nothing else knows aliases. A flag or a
choice that does not exist gets a suggestion. `--help` shows the flags that were added with
`common=True`, and `--help all` shows all of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from errors import InputError, did_you_mean

HELP_COLUMN = 26  # where the text of a flag begins in --help
WIDEST_HELP = 100  # columns of --help in a wide terminal


def path_text(text: str) -> str:
    """An argparse type: a path as text, in which ~ and ~NAME stand for home folders."""
    return os.path.expanduser(text)


def file_path(text: str) -> Path:
    """An argparse type: as `path_text`, as a Path."""
    return Path(path_text(text))


def nothing(value: str) -> str:
    """Return '', whatever the value of the flag is."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What --help, errors and docs/flags.md say of a flag, beside what argparse knows.

    Attributes:
        action: argparse's part.
        group: title of the group that lists it.
        common: whether the short --help shows it.
        aliases: other names, with their dashes.
        value_aliases: names that stand for the flag with a value.
        unavailable_reason: maps a choice to why this installation lacks it, or to ''.
        hint: maps a value that is no choice to what the user may have meant, or to ''.
    """

    action: argparse.Action
    group: str
    common: bool = False
    aliases: Sequence[str] = ()
    value_aliases: Mapping[str, str]
    unavailable_reason: Callable[[str], str] = nothing
    hint: Callable[[str], str] = nothing

    @property
    def name(self) -> str:
        """The first spelling, with its dashes; of an argument without a flag, its name."""
        return (self.action.option_strings or [self.action.dest])[0]

    def signature(self) -> str:
        """Return all spellings and what follows them, for example '--bs, --batch_size, -b N'."""
        names = ", ".join(self.action.option_strings) or f"[{self.action.dest}]"
        if self.action.nargs == 0 or not self.action.option_strings:
            return names
        default = "NAME" if self.action.choices else self.action.dest.upper()
        value = str(self.action.metavar or default)
        if isinstance(self.action.nargs, int):
            return f"{names} {' '.join([value] * self.action.nargs)}"
        values = {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}
        return f"{names} {values.get(str(self.action.nargs), value)}"

    def choices(self, *, installed_only: bool = True) -> list[str]:
        """Return the choices, without those that this installation lacks unless asked for."""
        choices = [str(choice) for choice in self.action.choices or ()]
        if not installed_only:
            return choices
        return [choice for choice in choices if not self.unavailable_reason(choice)]

    def text(self, *, installed_only: bool = True) -> str:
        """Return the help text, with the default filled in and a sentence of the choices."""
        default = format_default(self.action.default)
        text = (self.action.help or "") % (vars(self.action) | {"default": default})
        choices = ", ".join(self.choices(installed_only=installed_only))
        return f"{text} Choices: {choices}." if choices else text

    def lines(self, width: int) -> list[str]:
        """Return the lines of --help; text that does not fit beside the signature goes below it."""
        first = f"  {self.signature()}"
        indent = " " * HELP_COLUMN
        lines = textwrap.wrap(
            self.text(),
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        if lines and len(first) <= HELP_COLUMN - 2:
            return [first.ljust(HELP_COLUMN) + lines[0].lstrip(), *lines[1:]]
        return [first, *lines]


def format_default(default: Any) -> str:
    """Return a default as one would type it: numbers without needless digits, lists with spaces."""
    if isinstance(default, list | tuple):
        return " ".join(map(format_default, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


class ShowHelp(argparse.Action):
    """--help prints the common flags, --help all prints all of them; then the process ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlagParser)
        print(parser.format_help(everything=values == "all"), end="")
        parser.exit()


class FlagParser(argparse.ArgumentParser):
    """An argparse parser as described above; a bad flag raises InputError.

    Args:
        description: text above the flags, printed as it is.
        usage: what follows the name of the program in the first line.

    Attributes:
        flags: the flags in the order in which they were added.
        suggested: further flags that the same command line may have, for suggestions.
        advice: what to say of flags of other projects that this one lacks, by their names with
            underscores, such as {"--amp": "write --precision"}.
    """

    def __init__(self, description: str | None = None, usage: str = "[flags]") -> None:
        super().__init__(
            description=description, usage=f"%(prog)s {usage}", allow_abbrev=False, add_help=False
        )
        self.flags: list[Flag] = []
        self.suggested: list[str] = []
        self.advice: dict[str, str] = {}
        self._titles: list[str] = []
        self._own_spelling: dict[str, str] = {}  # any spelling -> what argparse is given for it
        self.add_argument(
            "--help",
            "-h",
            action=ShowHelp,
            nargs="?",
            type=str.lower,
            choices=("all",),
            default=argparse.SUPPRESS,
            group="help",
            help="Print the flags that most runs need, or all of them, and exit.",
        )

    # ---- adding flags

    def group(self, title: str, after: str | None = None) -> Callable[..., argparse.Action]:
        """Return `add_argument` for the flags of a group.

        Args:
            title: heading of the group in --help.
            after: title of the group that it follows; None is the end.
        """
        if title not in self._titles:
            end = len(self._titles)
            self._titles.insert(end if after is None else self._titles.index(after) + 1, title)
        return functools.partial(self.add_argument, group=title)

    def add_argument(  # type: ignore[override]
        self,
        *names: str,
        group: str = "flags",
        common: bool = False,
        aliases: Sequence[str] = (),
        value_aliases: Mapping[str, str] | None = None,
        unavailable_reason: Callable[[str], str] = nothing,
        hint: Callable[[str], str] = nothing,
        **settings: Any,
    ) -> argparse.Action:
        """Add a flag.

        Args:
            names: its own spellings, with dashes; all of them are in --help.
            group: see `group`.
            common, aliases, value_aliases, unavailable_reason, hint: see `Flag`.
            settings: further arguments of argparse's add_argument.
        """
        action = super().add_argument(*names, **settings)
        action.help = settings.get("help")  # before Python 3.13 some actions append the default
        flag = Flag(
            action=action,
            group=group,
            common=common,
            aliases=aliases,
            value_aliases=value_aliases or {},
            unavailable_reason=unavailable_reason,
            hint=hint,
        )
        self.flags.append(flag)
        if group not in self._titles and group != "help":
            self._titles.append(group)
        spellings = {name: name for name in action.option_strings}
        spellings |= dict.fromkeys(aliases, flag.name)
        if isinstance(action, argparse.BooleanOptionalAction):
            opposite = flag.name.replace("--", "--no-", 1)
            spellings |= {alias.replace("--", "--no-", 1): opposite for alias in aliases}
        spellings |= {alias: f"{flag.name}={value}" for alias, value in flag.value_aliases.items()}
        for spelling, own in spellings.items():
            if self._own_spelling.setdefault(with_underscores(spelling), own) != own:
                raise ValueError(f"{spelling} would stand for two flags")
        return action

    # ---- reading flags

    def translate(self, arguments: Iterable[str]) -> list[str]:
        """Replace other spellings of flags by their own, and leave values as they are."""
        translated: list[str] = []
        remaining = iter(arguments)
        for argument in remaining:
            if argument == "--":  # what follows are no flags
                return [*translated, argument, *remaining]
            name, equals, value = argument.partition("=")
            own = self._own_spelling.get(with_underscores(name), name)
            translated.append(f"{own}{equals}{value}")
        return translated

    def find(self, name: str) -> Flag | None:
        """Return the flag of any spelling, which is without dashes in front; None if there is none.

        A name that stands for a flag with a value finds that flag.
        """
        own = self._own_spelling.get(with_underscores(f"--{name}"), "").partition("=")[0]
        return next((flag for flag in self.flags if own in flag.action.option_strings), None)

    def stands_for_value(self, name: str) -> bool:
        """Return whether a name, without dashes, stands for a flag with a value."""
        return "=" in self._own_spelling.get(with_underscores(f"--{name}"), "")

    def own_name(self, name: str) -> str:
        """Return a flag's own name for any spelling; both are without dashes in front.

        Raises:
            InputError: there is no such flag, or the name stands for a flag with a value.
        """
        own = self._own_spelling.get(with_underscores(f"--{name}"))
        if own is None:
            raise InputError(self.explain_unknown(f"--{name}"))
        flag, _, value = own.removeprefix("--").partition("=")
        if value:
            raise InputError(f"--{name} stands for --{flag} {value}; use {flag}")
        return flag

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parse as argparse does, after `translate`.

        Raises:
            InputError: a value is empty, as that of a shell's variable that is not set.
        """
        arguments = self.translate(sys.argv[1:] if args is None else args)
        self._check_empty(arguments)
        return super().parse_known_args(arguments, namespace)

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        """Parse as argparse does; an unknown flag gets a suggestion.

        Raises:
            InputError: a flag is unknown, or its value is not valid.
        """
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            first = next((each for each in unknown if each.startswith("-")), unknown[0])
            raise InputError(self.explain_unknown(first.partition("=")[0]))
        return namespace

    def _check_empty(self, arguments: Sequence[str]) -> None:
        """Raise InputError for an argument that is empty, with the flag that it belongs to."""
        flag = ""
        for argument in arguments:
            name, equals, value = argument.partition("=")
            if argument.startswith("-"):
                flag = f"{name}: "
            is_empty = bool(equals) and name in self.option_strings() and not value.strip()
            if is_empty or not argument.strip():
                raise InputError(f"{flag}the value is empty; give one, or leave the flag out")

    def error(self, message: str) -> NoReturn:
        """Raise an InputError in place of printing the usage."""
        raise InputError(f"{message.removeprefix('argument ')} (see --help)")

    def explain_unknown(self, name: str) -> str:
        """Return the line for a flag that does not exist, or for a value that belongs to none."""
        if not name.startswith("-"):
            return f"{name}: this is neither a flag nor the value of one (see --help)"
        spelling = with_underscores(name)
        if spelling in self.advice:
            return f"{name}: there is no such flag; {self.advice[spelling]}"
        positive = self._own_spelling.get(spelling.replace("--no_", "--", 1))
        switch = next((each for each in self.flags if each.name == positive), None)
        if switch is not None and switch.action.const is True:
            return f"{name}: there is no such flag; {switch.name} is off unless it is given"
        if switch is not None and switch.action.nargs == 0:  # it stands for a value of another
            return (
                f"{name}: there is no such flag; give --{switch.action.dest} another value than "
                f"{switch.action.const}"
            )
        known = [
            own if with_underscores(own) == each else each
            for each, own in self._own_spelling.items()
        ]
        guess = did_you_mean(spelling, [*known, *self.suggested])
        return f"{name}: there is no such flag{guess or '; --help all prints all flags'}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise argparse's error for a value that is not among the choices, with a suggestion."""
        if action.choices is None or value in action.choices:
            return
        flag = next(flag for flag in self.flags if flag.action is action)
        choices = flag.choices()
        hint = flag.hint(str(value))
        advice = f"; {hint}" if hint else did_you_mean(str(value), choices)
        raise argparse.ArgumentError(
            action, f"{value!r} is not one of {', '.join(choices)}{advice}"
        )

    # ---- describing flags

    def names(self) -> list[str]:
        """The names of all flags as attributes of the parsed arguments, as they were added."""
        return list(dict.fromkeys(flag.action.dest for flag in self.flags))

    def spelling_of(self) -> dict[str, str]:
        """How a user writes each flag that takes a value or is a switch, by its attribute's name.

        Of several flags of one attribute, such as --optimizer and --ngd, it is that with a value.
        """
        spellings: dict[str, str] = {}
        for flag in self.flags:
            if flag.action.nargs != 0 or flag.action.dest not in spellings:
                spellings[flag.action.dest] = flag.name
        return spellings

    def given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """What a command line gives, by attribute and without the defaults of other flags.

        Raises:
            InputError: a flag is unknown, or its value is not valid.
        """
        not_given = object()  # a flag that has a value already is not set to its default
        values = argparse.Namespace(**dict.fromkeys(self.names(), not_given))
        self.parse_args(arguments, values)
        return {name: value for name, value in vars(values).items() if value is not not_given}

    def option_strings(self) -> set[str]:
        """The own spellings of all flags, with their dashes; no aliases."""
        return {option for flag in self.flags for option in flag.action.option_strings}

    def spellings(self) -> set[str]:
        """The spellings of all flags with their dashes, aliases included."""
        return self.option_strings() | set(self._own_spelling)

    def grouped_flags(self, *, common_only: bool = False) -> dict[str, list[Flag]]:
        """Return the flags of each group by its title; groups without any are left out."""
        groups = {
            title: [
                flag
                for flag in self.flags
                if flag.group == title and (flag.common or not common_only)
            ]
            for title in self._titles
        }
        return {title: flags for title, flags in groups.items() if flags}

    def format_help(self, *, everything: bool = False) -> str:
        """Return the text of --help: the common flags if there are any, or else all flags."""
        width = min(WIDEST_HELP, max(60, shutil.get_terminal_size().columns)) - 1
        common_only = not everything and any(flag.common for flag in self.flags)
        parts = [self.format_usage().strip(), (self.description or "").strip()]
        for title, flags in self.grouped_flags(common_only=common_only).items():
            parts.append("\n".join([f"{title}:", *(x for f in flags for x in f.lines(width))]))
        if common_only:
            closing = (
                f"These are the flags that most runs need. --help all prints all "
                f"{sum(flag.group != 'help' for flag in self.flags)}, and docs/flags.md lists them "
                "with the names of timm and Hugging Face that are understood as well."
            )
            parts.append(textwrap.fill(closing, width))
        return "\n\n".join(part for part in parts if part) + "\n"


def with_underscores(name: str) -> str:
    """Return a flag's name with its hyphens as underscores, but for the dashes in front.

    What does not begin with two dashes stays as it is.
    """
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
