"""Rows of metrics.jsonl, sent to an experiment tracker as well: TensorBoard, trackio or wandb.

check_tracker("wandb")                                # before anything else: is it installed?
tracked = TrackedRun("wandb", folder, warn=print)
tracked.begin(config, rows=[])
tracked.send([{"epoch": 1, "step": 390, "test_accuracy": 0.43}])
tracked.close()

A resumed run goes on with the run that the tracker knows: TensorBoard reads all event files of the
run folder, and trackio and wandb are given the name that tracking.json keeps. Nothing here needs
a network: trackio writes into its own folder on this machine, and wandb into the run folder, from
where `wandb sync` sends it, unless the environment variable WANDB_MODE says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from errors import InputError, first_line
from training.atomic_file import atomic_write_text

PROJECT = "faster-training"  # under which a tracker lists the runs
STATE_FILE = "tracking.json"  # of a run folder: what was sent, and under which name


class Tracker(Protocol):
    """A run that a tracker has open."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Send the scalars of an epoch; `step` is the optimizer step at its end."""
        ...

    def close(self) -> None:
        """Write what is still waiting."""
        ...


@dataclass(frozen=True)
class RunIdentity:
    """What a tracker needs to open a run.

    Attributes:
        folder: the run folder.
        run_id: by which the tracker finds the run again.
        is_known: whether the tracker has rows of this run already.
        config: plain values: flags, versions, device, commit.
    """

    folder: Path
    run_id: str
    is_known: bool
    config: dict[str, Any]


# -------------------------------------------------------------------- the trackers


class TensorBoardTracker:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, library: Any, run: RunIdentity) -> None:
        self.writer = library.SummaryWriter(str(run.folder))
        if not run.is_known:  # a code block of Markdown, which four spaces make
            lines = json.dumps(run.config, indent=2).splitlines()
            self.writer.add_text("config", "\n".join(f"    {line}" for line in lines), 0)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class TrackioTracker:
    """A run of trackio, in its folder on this machine: `trackio show`."""

    def __init__(self, library: Any, run: RunIdentity) -> None:
        self.run = library.init(
            project=PROJECT,
            name=f"{run.folder.resolve().name}-{run.run_id}",  # trackio finds a run by its name
            config=run.config,
            resume="allow" if run.is_known else "never",
        )
        self.library = library

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.library.finish()  # of the run alone, it would be called again when Python ends


class WandbTracker:
    """A run of Weights & Biases, kept in the run folder unless WANDB_MODE is set."""

    def __init__(self, library: Any, run: RunIdentity) -> None:
        self.run = library.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.run_id,
            name=run.folder.resolve().name,
            dir=str(run.folder),
            config=run.config,
            resume="allow",
            mode=os.environ.get("WANDB_MODE") or "offline",
            settings=library.Settings(console="off"),  # the console stays that of the run
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


@dataclass(frozen=True)
class Library:
    """The package of a tracker.

    Attributes:
        module: is imported.
        package: name for pip.
        open: makes a `Tracker` of the imported module and a run.
    """

    module: str
    package: str
    open: Callable[[Any, RunIdentity], Tracker]


LIBRARIES = {
    "tensorboard": Library("torch.utils.tensorboard", "tensorboard", TensorBoardTracker),
    "trackio": Library("trackio", "trackio", TrackioTracker),
    "wandb": Library("wandb", "wandb", WandbTracker),
}
"""The trackers, by the values of --track."""
TRACKERS = ("none", *LIBRARIES)


def check_tracker(name: str) -> None:
    """Check that the package of a tracker can be imported.

    Args:
        name: one of `TRACKERS`.
    Raises:
        InputError: it cannot.
    """
    if name == "none":
        return
    library = LIBRARIES[name]
    try:
        importlib.import_module(library.module)
    except ImportError:
        raise InputError(f"--track {name} needs a package: pip install {library.package}") from None
    except Exception as error:  # of a package that does not fit the others of this environment
        raise InputError(
            f"--track {name}: {library.package} cannot be imported ({first_line(error)}); "
            "install it again, or leave the flag out"
        ) from None


# -------------------------------------------------------------------- a run's rows


class TrackedRun:
    """Sends the rows of a run to a tracker; for rank 0.

    A tracker that fails does not disturb the run: it is reported once, and gets nothing more.

    Args:
        name: one of `LIBRARIES`.
        folder: the run folder.
        warn: prints a line.
    """

    def __init__(self, name: str, folder: Path, *, warn: Callable[[str], None]) -> None:
        self.name, self.folder, self.warn = name, folder, warn
        self.tracker: Tracker | None = None
        self.run_id = secrets.token_hex(4)  # draws from no generator of the run
        self.sent = 0  # the last epoch that the tracker has

    def begin(self, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Open the run, and send the rows that it has already and the tracker has not.

        Args:
            config: flags, versions, device, commit.
            rows: of all epochs that are done.
        """
        is_known = self._read_state()
        plain = json.loads(json.dumps(config, default=str))
        run = RunIdentity(self.folder, self.run_id, is_known, plain)
        library = LIBRARIES[self.name]

        def open_run() -> None:
            self.tracker = library.open(importlib.import_module(library.module), run)

        self._call(open_run)
        if self.tracker is not None:
            self._write_state()  # before the first epoch is over: the run may be killed in it
        self.send(rows)

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send what is new of the rows of all epochs: their finite numbers."""
        for row in rows:
            tracker = self.tracker
            if tracker is None or row["epoch"] <= self.sent:
                continue
            values, step = finite_numbers(row), int(row["step"])
            values.pop("step", None)  # it is the horizontal axis; trackio warns of the name
            self._call(partial(tracker.log, values, step))
            if self.tracker is not None:
                self.sent = row["epoch"]
                self._write_state()

    def close(self) -> None:
        """Close the run; nothing is sent any more."""
        if self.tracker is not None:
            self._call(self.tracker.close)
        self.tracker = None

    def _call(self, action: Callable[[], None]) -> None:
        """Call a function of the tracker, which may fail and may draw random numbers."""
        try:
            with torch.random.fork_rng(devices=[]):
                action()
        except Exception as error:
            self.tracker = None
            self.warn(
                f"warning: --track {self.name}: {first_line(error)}; the run goes on without it"
            )

    def _read_states(self) -> dict[str, Any]:
        """What tracking.json holds of each tracker; empty where there is no such file."""
        try:
            states = json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return states if isinstance(states, dict) else {}

    def _read_state(self) -> bool:
        """Take name and position of an earlier start; returns whether there was one."""
        try:
            state = self._read_states()[self.name]
            self.run_id, self.sent = str(state["id"]), int(state["epoch"])
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def _write_state(self) -> None:
        """Keep name and position; where the disk is full, a resumed run sends rows again."""
        states = {**self._read_states(), self.name: {"id": self.run_id, "epoch": self.sent}}
        with contextlib.suppress(OSError):
            atomic_write_text(self.folder / STATE_FILE, json.dumps(states) + "\n")


def finite_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that a tracker can draw: no lists, and nothing that is not finite."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
