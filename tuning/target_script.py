"""What a sweep knows of the script that it tunes.

script = Script.read("resnet50_test.py", ["--subset", "0.1", "--recipe", "recipes/fast94.yaml"])
script.flags({"lr": 0.1, "nesterov": False}).lr
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli import options
from errors import InputError
from tuning import space

OWN = ("out", "resume", "val_fraction", "test", "no-test")  # flags of a trial that the sweep gives
OF_A_MACHINE = {"data_dir", "workers", "threads", "device", "resident"}
OF_A_SEARCH = OF_A_MACHINE | {"subset", "epochs", "seed", "recipe", "save_every", "tensorboard"}
"""Flags of a trial that its recipe leaves to the run."""


@dataclass(frozen=True)
class Script:
    """An entry script and the flags that all trials have.

    Attributes:
        words: those flags, as on the command line; `whole`: with those of their --recipe in front.
        names: of all flags it has.
        given: the values of those in `whole`.
    """

    file: str
    words: list[str]
    whole: list[str]
    names: set[str]
    given: dict[str, Any]

    @classmethod
    def read(cls, file: str, words: Sequence[str]) -> Script:
        """Look at its parser.

        Raises:
            InputError: it does not know a word, or one is the sweep's to give.
        """
        parser = parser_of(file)
        names = {
            option.removeprefix("--")
            for action in parser._actions
            for option in action.option_strings
        }
        for name in OWN:
            if any(word.split("=")[0] == f"--{name}" for word in words):
                raise InputError(f"--{name} is the sweep's own flag, not a trial's")
        recipe = parser.parse_args(list(words)).recipe
        whole = [*(options.recipe_words(recipe, parser) if recipe else []), *words]
        parser.parse_args(whole)
        parser._defaults.clear()
        for action in parser._actions:
            action.default = argparse.SUPPRESS
        return cls(file, list(words), whole, names, vars(parser.parse_args(whole)))

    def flags(self, params: Mapping[str, Any]) -> argparse.Namespace:
        """All flags of a trial with these values of the searched ones."""
        return parser_of(self.file).parse_args([*self.whole, *space.as_words(params, self.names)])

    def check(self, words: Sequence[str]) -> None:
        """Raises InputError where the script would refuse these words, whatever is searched."""
        options.parse(parser_of(self.file), self.file.removesuffix(".py"), words)

    def recipe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a recipe holds of a trial: what was given beside the space, and the searched values."""
        return {
            name: value for name, value in self.given.items() if name not in OF_A_SEARCH
        } | dict(params)

    def settings(self) -> dict[str, Any]:
        """What trials must have in common to be compared."""
        return {name: value for name, value in self.given.items() if name not in OF_A_MACHINE}


def parser_of(file: str) -> Any:
    """A new parser of an entry script."""
    return importlib.import_module(file.removesuffix(".py")).parser()
