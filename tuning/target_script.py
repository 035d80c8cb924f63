"""The entry script that a sweep tunes: its flags, and the arguments that all trials share.

script = TargetScript.read("resnet50_test.py", ["--subset", "0.1", "--recipe", "fast94"])
script.flags({"lr": 0.1, "nesterov": False})["lr"]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from cli import options
from cli.flag_parser import Scope, ScriptParser, setting
from cli.settings import begins_with_weights
from errors import InputError
from input_pipeline import csv_tables, own_data

HELD_OUT = ("val_fraction", "fold", "test")
SET_BY_SWEEP = ("out", "resume", "checkpoint", "eval_every", *HELD_OUT)
ENDS = ("patience", "stop_at", "best_by")  # all runs are to end at their last epoch
SPEED_FLAGS = ("device", "resident", "threads", "workers")
MACHINE_FLAGS = {*SPEED_FLAGS, "data_dir", "log_every", "track"}
NOT_COMPARABLE = "the search sets this flag for each run, so that all compare"
OF_OPTIMIZER = ("lr", "weight_decay", "momentum", "nesterov", "betas")  # values for one alone
USUAL_EPOCHS = 5  # of a pretrained encoder
NOT_IN_RECIPE = MACHINE_FLAGS | {"subset", "epochs", "seed", "recipe", "save_every"}
"""Flags of a trial that its recipe does not fix."""


@dataclass(frozen=True)
class TargetScript:
    """An entry script and the arguments that all trials share."""

    file: str  # name of the script, for example resnet50_test.py
    arguments: list[str]  # in each flag's own spelling, after those of their --recipe
    given: dict[str, Any]  # value of each flag in `arguments`, in the order of the script's parser
    _: KW_ONLY
    has_usual_epochs: bool = False  # of `USUAL_EPOCHS`: a run alone would choose them by its rows

    @functools.cached_property
    def parser(self) -> ScriptParser:
        return script_parser(self.file)

    @classmethod
    def read(
        cls, file: str, arguments: Sequence[str], *, sweep_flags: Collection[str] = ()
    ) -> TargetScript:
        """Parse the shared arguments, in any spelling; a misspelt one may stand for a sweep's flag.

        Raises:
            InputError: the script does not know an argument, or the sweep sets that flag itself.
        """
        parser = script_parser(file)
        parser.suggested = sorted(sweep_flags)
        arguments = parser.translate(arguments)
        own = parser.given(arguments)
        if taken := [name for name in SET_BY_SWEEP if name in own]:
            raise InputError(f"--{taken[0]}: {NOT_COMPARABLE}; leave it out")
        if recipe := own.get("recipe"):
            held = parser.defaults() | parser.given(options.recipe_arguments(recipe, parser))
            kept = parser.merged(held, own)  # without settings of another optimizer than own
            lost = [each for each in parser.settings() if held[each.dest].keys() - kept[each.dest]]
            if held["optimizer"] != kept["optimizer"]:
                lost += map(parser.flags.__getitem__, OF_OPTIMIZER)
            alone = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            alone.add_argument("--recipe", "-c")
            _, arguments = alone.parse_known_args(arguments)  # else a trial would read it as well
            arguments = [*options.recipe_arguments(recipe, parser, without=lost), *arguments]
        own = options.own_form(parser.given(arguments), parser)
        arguments += [word for name, value in own.items() for word in (f"--{name}", value)]
        given = parser.given(arguments)
        for name in (*HELD_OUT, *ENDS):
            if name in given:
                raise InputError(f"--{name}: {NOT_COMPARABLE}; leave it out, also of a recipe")
        if has_usual_epochs := not cls(file, arguments, given).flags({})["epochs"]:
            arguments += ["--epochs", str(USUAL_EPOCHS)]
        return cls(file, arguments, given, has_usual_epochs=has_usual_epochs)

    def own_name(self, name: str) -> str:
        """Return the script's own name of a searched flag for any spelling, both without dashes.

        Raises:
            InputError: the script has no such flag, or it cannot be searched.
        """
        flag = self.parser.find(name.partition(".")[0])
        if flag is None:
            raise InputError(self.parser.explain_unknown(f"--{name}"))
        own = flag.name.removeprefix("--")
        if own in (*SET_BY_SWEEP, *ENDS):
            raise InputError(f"{flag.name}: {NOT_COMPARABLE}; leave it out")
        if flag.scope is Scope.START:
            raise InputError(f"{flag.name}: this flag cannot be searched; leave it out")
        return name if flag.type is setting else own

    def to_arguments(self, params: Mapping[str, Any]) -> list[str]:
        """Return the command-line arguments for these values of searched flags.

        Raises:
            InputError: a value is of a kind that its flag does not take.
        """
        return [
            word
            for name, value in params.items()
            for word in options.flag_arguments(name, value, self.parser)
        ]

    def flags(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return all flags of a trial with these searched ones; InputError where one is refused."""
        given = self.parser.given([*self.arguments, *self.to_arguments(params)])
        defaults = self.parser.defaults()
        defaults |= options.defaults_of_situation(defaults | given, self.parser)
        return self.parser.merged(defaults, given)

    def check_value(self, name: str, value: Any, owners: Mapping[str, Sequence[Any]]) -> None:
        """Raise InputError where the script refuses a value of a searched flag in every trial.

        Args:
            owners: choices of searched flags, of which one may have the setting `name`.
        """
        flags, flag = self.flags({name: value}), self.parser.find(name.partition(".")[0])
        if flag is None or flag.type is not setting:
            return
        alone = {**flags, **{other.dest: {} for other in self.parser.settings()}}
        alone |= self.parser.given(self.to_arguments({name: value}))
        refused: list[InputError] = []
        choices = owners.get(flag.owner, [flags[flag.owner]])
        for chosen in choices:
            try:
                self.parser.complete({**alone, flag.owner: chosen})
            except InputError as error:
                refused.append(error)
        if len(refused) == len(choices):
            raise refused[0]

    def has_effect(self, name: str) -> bool:
        flag = self.parser.find(name)
        return flag is not None and flag.has_effect(self.flags({}))

    def usual(self, name: str) -> Any:
        """Return the value of a flag where no trial sets it.

        None for a setting of a part, and for a batch that a run chooses by its rows.
        """
        flags, flag = self.flags({}), self.parser.find(name)
        value = None if flag is None else flags[flag.dest]
        if flag is not None and flag.dest == "batch_size" and not value:
            if begins_with_weights(flags):
                return self.parser.kind.pretrained["batch_size"]
            measured = self.parser.kind.measured_for(flags)
            return measured.batch if measured else None
        return options.computed_defaults(flags, self.parser).get(name) if value is None else value

    def check(self, arguments: Sequence[str], *, processes: int) -> None:
        """Raise InputError where the script would refuse these arguments in every trial."""
        given = self.parser.defaults() | self.parser.given(arguments)
        is_own, folder = given["dataset"] in own_data.DATASETS, given["data_dir"]
        if is_own and not os.path.exists(folder):
            raise InputError(f"--data_dir {folder}: there is no such folder")
        os.environ["WORLD_SIZE"] = str(processes)  # on which the effect of some flags depends
        try:
            options.parse(self.parser, self.file.removesuffix(".py"), arguments)
        finally:
            del os.environ["WORLD_SIZE"]

    def recipe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a recipe fixes of a trial: the shared flags and the searched values."""
        found = filter(None, map(self.parser.find, params))
        searched = {flag.dest for flag in found if flag.type is not setting}
        left_out = NOT_IN_RECIPE | searched
        shared = {name: value for name, value in self.given.items() if name not in left_out}
        return shared | dict(params)

    def own_paths(self) -> dict[str, Path]:
        """Return what own data has of train, val and test."""
        flags = self.flags({})
        folders = () if flags["dataset"] == "csv" else ("",)
        return own_data.find_splits(Path(flags["data_dir"]), (*folders, *csv_tables.SUFFIXES))

    def own_splits(self) -> Collection[str]:
        """Return which of train, val and test own data has; all of them for other data."""
        is_own = self.flags({})["dataset"] in own_data.DATASETS
        return self.own_paths() if is_own else own_data.SPLIT_NAMES

    def settings(self) -> dict[str, Any]:
        """Return the shared flags that trials need in common to be compared, and own data."""
        flags = self.flags({})
        shared = {name: value for name, value in self.given.items() if name not in MACHINE_FLAGS}
        if flags["dataset"] in own_data.DATASETS:
            root = Path(os.path.abspath(flags["data_dir"]))
            shared["data_dir"] = str(root)
            shared["data_dir's files"] = [
                [path.name, path.stat().st_size if path.is_file() else file_count(path)]
                for path in self.own_paths().values() or [root]
            ]
        return shared


def file_count(folder: Path) -> int:
    """Return the number of files in a folder and those below it."""
    return sum(len(names) for _, _, names in os.walk(folder))


def script_parser(file: str) -> ScriptParser:
    """Return a new parser of an entry script."""
    return importlib.import_module(file.removesuffix(".py")).parser()
