"""Numbers of a run, sent to an experiment tracker as well: TensorBoard, trackio or wandb.

check_tracker("wandb")                                # before anything else: is it installed?
tracked = TrackedRun("wandb", folder, warn=print)
tracked.begin(config, rows=[])
tracked.send_step(200, {"loss": 1.9, "lr": 0.1})      # now and then within an epoch
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from errors import InputError, first_line
from training.atomic_file import atomic_write_text

PROJECT = "faster-training"  # under which a tracker lists the runs
STATE_FILE = "tracking.json"  # of a run folder: what was sent, and under which name


Log = Callable[[dict[str, float], int], None]  # sends numbers by their tags, and the step
Close = Callable[[], None]  # writes what is still waiting


def open_tensorboard(library: Any, run: TrackedRun) -> tuple[Log, Close]:
    """Event files in the run folder: `tensorboard --logdir runs`."""
    writer = library.SummaryWriter(str(run.folder))
    if not run.is_known:
        numbers_and_words = {
            name: value if isinstance(value, int | float) else str(value)
            for name, value in run.config.items()
        }
        writer.add_hparams(numbers_and_words, {}, run_name=".")  # into the same folder

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log, writer.close


def open_trackio(library: Any, run: TrackedRun) -> tuple[Log, Close]:
    """A run of trackio, in its folder on this machine: `trackio show`."""
    opened = library.init(
        project=PROJECT,
        name=f"{run.folder.resolve().name}-{run.run_id}",  # trackio finds a run by its name
        config=run.config,
        resume="allow" if run.is_known else "never",
    )
    # The library's finish: that of the run alone would be called again when Python ends.
    return lambda values, step: opened.log(values, step=step), library.finish


def open_wandb(library: Any, run: TrackedRun) -> tuple[Log, Close]:
    """A run of Weights & Biases, kept in the run folder unless WANDB_MODE is set."""
    opened = library.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        id=run.run_id,
        name=run.folder.resolve().name,
        dir=str(run.folder),
        config=run.config,
        resume="allow",
        mode=os.environ.get("WANDB_MODE") or "offline",
        settings=library.Settings(console="off"),  # the console stays that of the run
    )
    return lambda values, step: opened.log(values, step=step), opened.finish


LIBRARIES: dict[str, tuple[str, Callable[[Any, TrackedRun], tuple[Log, Close]]]] = {
    "tensorboard": ("torch.utils.tensorboard", open_tensorboard),
    "trackio": ("trackio", open_trackio),
    "wandb": ("wandb", open_wandb),
}
"""The module of each tracker, and what opens a run, by the value of --track and its package."""
TRACKERS = ("none", *LIBRARIES)


def check_tracker(name: str) -> None:
    """Check that the package of a tracker, one of `TRACKERS`, can be imported.

    Raises:
        InputError: it cannot.
    """
    if name == "none":
        return
    try:
        importlib.import_module(LIBRARIES[name][0])
    except Exception as error:  # also of a package that does not fit the others
        raise InputError(
            f"--track {name} needs a package that can be imported ({first_line(error)}): "
            f"pip install {name}"
        ) from None


class TrackedRun:
    """Sends the numbers of a run to a tracker; for rank 0.

    A tracker that fails does not disturb the run: it is reported once, and gets nothing more.

    Args:
        name: one of `LIBRARIES`.

    Attributes:
        config: the flags, and under 'machine' the versions, device and commit, as plain values.
        run_id: by which the tracker finds the run again.
        is_known: whether the tracker has something of this run already.
        sent: the last epoch that it has.
    """

    def __init__(self, name: str, folder: Path, *, warn: Callable[[str], None]) -> None:
        self.name, self.folder, self.warn = name, folder, warn
        self.opened: tuple[Log, Close] | None = None
        self.config: dict[str, Any] = {}
        self.run_id = secrets.token_hex(4)  # draws from no generator of the run
        self.is_known, self.sent = False, 0

    def begin(self, config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Open the run, and send the rows that it has already and the tracker has not.

        Args:
            config: flags, versions, device, commit.
        """
        machine = json.loads(json.dumps(config, default=str))
        self.config = {**machine.pop("flags", {}), "machine": machine}
        module, open_tracker = LIBRARIES[self.name]
        with self._no_disturbance():
            if state := self._read_states().get(self.name):
                self.is_known, self.run_id, self.sent = True, state["id"], state["epoch"]
            self.opened = open_tracker(importlib.import_module(module), self)
            self._write_state()  # before the first epoch is over: the run may be killed in it
        self.send(rows)

    def send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send what is new of the rows of all epochs: their finite numbers."""
        for row in rows:
            if self.opened is not None and row["epoch"] > self.sent:
                with self._no_disturbance():
                    self.opened[0](tagged_numbers(row), int(row["step"]))
                    self.sent = row["epoch"]
                    self._write_state()

    def send_step(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step within an epoch."""
        if self.opened is not None:
            numbers = {f"step/{name}": x for name, x in values.items() if math.isfinite(x)}
            with self._no_disturbance():
                self.opened[0](numbers, step)

    def close(self) -> None:
        """Close the run; nothing is sent any more."""
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
            self.warn(
                f"warning: --track {self.name}: {first_line(error)}; the run goes on without it"
            )

    def _read_states(self) -> dict[str, Any]:
        """What tracking.json holds of each tracker; empty where there is no such file."""
        try:
            return json.loads((self.folder / STATE_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def _write_state(self) -> None:
        """Keep name and position; where the disk is full, a resumed run sends rows again."""
        states = {**self._read_states(), self.name: {"id": self.run_id, "epoch": self.sent}}
        with contextlib.suppress(OSError):
            atomic_write_text(self.folder / STATE_FILE, json.dumps(states) + "\n")


def tagged_numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row of metrics.jsonl by tags in groups, without lists.

    The groups are 'train', 'val' and 'test' for losses and accuracies, 'time', and 'run'. The step
    is left out: it is the horizontal axis.

    >>> tagged_numbers({"step": 4, "test_loss": 2.0, "train_seconds": 1.5, "lr": 0.1})
    {'test/loss': 2.0, 'time/train_seconds': 1.5, 'run/lr': 0.1}
    """
    numbers = {}
    for name, value in row.items():
        if name == "step" or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        group, _, rest = name.partition("_")
        if "second" in name:
            tag = f"time/{name}"
        elif group in ("train", "val", "test"):
            tag = f"{group}/{rest}"
        else:
            tag = f"run/{name}"
        numbers[tag] = value
    return numbers
