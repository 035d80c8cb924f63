"""Rows of a run's metrics, sent to an experiment tracker as well: TensorBoard or wandb.

check_tracker("wandb")                                # before anything else: is it installed?
tracked = TrackedRun("wandb", folder, config, warn=print)
tracked.catch_up(rows)                                # those of a resumed run
tracked.send({"epoch": 1, "step": 390, "test_accuracy": 0.43})
tracked.close()

A resumed run goes on with the run that the tracker knows: TensorBoard reads all event files of the
run folder, and wandb is given the name that tracking.json keeps. Nothing here needs a network:
wandb writes into the run folder, from where `wandb sync` sends it, unless the environment variable
WANDB_MODE says otherwise.
"""

import contextlib
import importlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from errors import first_line, needing
from training.atomic_file import atomic_write_text

PROJECT = "faster-training"  # under which a tracker lists the runs
STATE_FILE = "tracking.json"  # of a run folder: the run's name in wandb, and the last step sent


def read_state(folder: Path) -> dict[str, Any]:
    """What a run folder keeps of its tracker; empty before there is one."""
    path = folder / STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def update_state(folder: Path, **values: Any) -> None:
    """Keep values beside those that are there."""
    text = json.dumps({**read_state(folder), **values}) + "\n"
    atomic_write_text(folder / STATE_FILE, text)


Log = Callable[[dict[str, float], int], None]  # sends numbers by their names, and the step
Close = Callable[[], None]  # writes what is still waiting


def open_tensorboard(library: Any, folder: Path, config: Mapping[str, Any]) -> tuple[Log, Close]:
    """Event files in the run folder: `tensorboard --logdir runs`."""
    writer = library.SummaryWriter(str(folder))
    numbers_and_words = {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in config.items()
    }
    writer.add_hparams(numbers_and_words, {}, run_name=".")  # into the same folder

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def open_wandb(library: Any, folder: Path, config: Mapping[str, Any]) -> tuple[Log, Close]:
    """A run of Weights & Biases, kept in the run folder unless WANDB_MODE is set."""
    if "wandb" not in read_state(folder):  # the name draws from no generator of the run
        update_state(folder, wandb=secrets.token_hex(4))
    opened = library.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        id=read_state(folder)["wandb"],
        name=folder.resolve().name,
        dir=str(folder),
        config=config,
        resume="allow",
        mode=os.environ.get("WANDB_MODE") or "offline",
        settings=library.Settings(console="off"),  # the console stays that of the run
    )
    return lambda values, step: opened.log(values, step=step), opened.finish


LIBRARIES: dict[str, tuple[str, Callable[..., tuple[Log, Close]]]] = {
    "tensorboard": ("torch.utils.tensorboard", open_tensorboard),
    "wandb": ("wandb", open_wandb),
}
"""The module of each tracker, and what opens a run, by its name, which is its package's."""
TRACKERS = ("none", *LIBRARIES)


def check_tracker(name: str) -> None:
    """Raise an InputError if the package of a tracker, one of `TRACKERS`, cannot be imported."""
    if name != "none":
        with needing(name, name):
            importlib.import_module(LIBRARIES[name][0])


class TrackedRun:
    """Sends the numbers of a run to a tracker; for rank 0.

    A tracker that fails does not disturb the run: it is reported once, and gets nothing more.
    """

    def __init__(
        self, name: str, folder: Path, config: Mapping[str, Any], *, warn: Callable[[str], None]
    ) -> None:
        self.name, self.folder, self.warn = name, folder, warn
        self.opened: tuple[Log, Close] | None = None
        machine = json.loads(json.dumps(config, default=str))
        settings = {**machine.pop("flags", {}), "machine": machine}
        module, open_tracker = LIBRARIES[name]
        with self._no_disturbance():
            self.opened = open_tracker(importlib.import_module(module), folder, settings)

    def catch_up(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Send the rows of a run that were not sent before, as of another folder."""
        with self._no_disturbance():
            sent = read_state(self.folder).get("step", 0)
            for row in rows:
                if row["step"] > sent:
                    self.send(row)

    def send(self, row: Mapping[str, Any]) -> None:
        """Send the finite numbers of an epoch's row, under their names in metrics.jsonl."""
        numbers = {
            name: value
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        if self.opened is not None:
            with self._no_disturbance():
                self.opened[0](numbers, int(row["step"]))
                update_state(self.folder, step=int(row["step"]))

    def close(self) -> None:
        if self.opened is not None:
            with self._no_disturbance():
                self.opened[1]()
        self.opened = None

    @contextlib.contextmanager
    def _no_disturbance(self) -> Iterator[None]:
        """Call functions of the tracker, which may fail and may draw random numbers."""
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        except Exception as error:
            self.opened = None
            self.warn(f"warning: {self.name}: {first_line(error)}; the run goes on without it")
