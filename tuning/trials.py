"""One trial of a sweep: the entry script as a process of its own, watched through its metrics.jsonl.

runner = Runner("resnet50_test.py", ["--subset", "0.1"], Objective.read("accuracy"), out, nproc=1, jobs=2)
value = runner(trial, ["--lr", "0.1"])    # raises optuna.TrialPruned, or TrialFailed with the script's own line
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import optuna

import errors
from errors import InputError

ROOT = Path(__file__).resolve().parents[1]
STOPPED = "interrupted"  # what a trial fails with that can go on from its checkpoint
LOOK_EVERY = 0.1  # seconds between two looks at metrics.jsonl
LEAVE = 60.0  # seconds that a script has to write its checkpoint
LIBC = (
    ctypes.CDLL(None) if sys.platform == "linux" else None
)  # loaded here: a forked child of a threaded process must not load
NOT_REACHED = 1e6  # seconds, at least, of a run that never gets there


class TrialFailed(Exception):
    """The script ended with an error; the message is its line."""


@dataclass(frozen=True)
class Objective:
    """What is sought: the validation accuracy of the last epoch, or the seconds until it reaches `target`."""

    target: float | None = None

    @classmethod
    def read(cls, text: str) -> Objective:
        """'accuracy' or 'time_to:0.9'."""
        if text == "accuracy":
            return cls()
        name, _, target = text.partition(":")
        with contextlib.suppress(ValueError):
            if name == "time_to" and 0 < float(target) <= 1:
                return cls(float(target))
        raise InputError(
            f"--objective {text}: wanted accuracy, or time_to:0.9 with an accuracy in 0..1"
        )

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.target is None else "minimize"

    def so_far(self, row: dict[str, Any]) -> float:
        """What the pruner compares after an epoch, in the objective's direction."""
        return row["val_accuracy"] if self.target is None else 1 - row["val_accuracy"]

    def done(self, row: dict[str, Any]) -> bool:
        """Whether a run need not go on."""
        return self.target is not None and row["val_accuracy"] >= self.target

    def value(self, rows: Sequence[dict[str, Any]]) -> float:
        """Of a finished run."""
        if self.target is None:
            return rows[-1]["val_accuracy"]
        reached = [row["seconds"] for row in rows if row["val_accuracy"] >= self.target]
        return (
            reached[0] if reached else NOT_REACHED * (2 - max(row["val_accuracy"] for row in rows))
        )


@dataclass(frozen=True)
class Runner:
    """Runs trials; threads may share it."""

    script: str
    words: list[str]
    objective: Objective
    out: Path
    nproc: int
    stop: threading.Event = field(
        default_factory=threading.Event, kw_only=True
    )  # set to end all trials
    slots: queue.Queue[
        str | None
    ]  # a GPU, or a comma-separated list of them, for each trial at a time; None on CPUs

    def __call__(self, trial: optuna.Trial, words: list[str]) -> float:
        """The objective's value of a trial with these flags."""
        folder = Path(trial.user_attrs.get("folder", self.out / "trials" / f"{trial.number:04d}"))
        for name, value in {
            "folder": str(folder),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }.items():
            trial.set_user_attr(name, value)
        slot = self.slots.get()
        try:
            return self.watch(trial, folder, self.start(folder, words, slot))
        finally:
            self.slots.put(slot)

    def start(self, folder: Path, words: list[str], slot: str | None) -> subprocess.Popen[str]:
        """The script as a process, going on from a checkpoint where there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume", str(folder)] if (folder / "last.pt").exists() else []
        if not resume:  # it was stopped before its first checkpoint
            (folder / "metrics.jsonl").unlink(missing_ok=True)
        head = [str(ROOT / self.script)]
        if self.nproc > 1:
            head = [
                "-m",
                "distributed.launch",
                "--standalone",
                f"--nproc_per_node={self.nproc}",
                *head,
            ]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        }
        env |= {"CUDA_VISIBLE_DEVICES": slot} if slot is not None else {}
        with open(folder / "console.log", "a") as console:
            command = [sys.executable, *head, *self.words, *words, *resume, "--out", str(folder)]
            return subprocess.Popen(
                command,
                stdout=console,
                stderr=console,
                text=True,
                env=env,
                preexec_fn=die_with_parent,
            )

    def watch(self, trial: optuna.Trial, folder: Path, process: subprocess.Popen[str]) -> float:
        """Report each epoch; end a hopeless run, or one that has reached its target."""
        seen = 0
        try:
            while True:
                ended = process.poll() is not None
                rows = read_rows(folder)
                if any(map(self.objective.done, rows)):
                    return self.objective.value(rows)
                for row in rows[seen:]:
                    trial.report(self.objective.so_far(row), row["epoch"])
                    if self.hopeless(trial, row):
                        raise optuna.TrialPruned
                seen = len(rows)
                if ended:
                    break
                if self.stop.is_set():
                    raise TrialFailed(STOPPED)
                time.sleep(LOOK_EVERY)
        finally:
            end(process)
        if process.returncode == errors.INTERRUPTED:
            raise TrialFailed(STOPPED)
        if process.returncode or not rows:
            raise TrialFailed(last_line(folder) or f"exit code {process.returncode}")
        return self.objective.value(rows)

    def hopeless(self, trial: optuna.Trial, row: dict[str, Any]) -> bool:
        """Whether to give a run up after an epoch: as the pruner says; of time_to, where the best one was there by now."""
        if self.objective.target is None or isinstance(
            trial.study.pruner, optuna.pruners.NopPruner
        ):
            return trial.should_prune()
        reached = [
            done.value
            for done in trial.study.get_trials(
                deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)
            )
        ]
        return row["seconds"] >= min(
            (value for value in reached if value is not None), default=NOT_REACHED
        )


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_line(folder: Path) -> str:
    """The script's own line about what went wrong, or the last one on its console."""
    lines = [line for line in (folder / "console.log").read_text().splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("error: ")]
    return (own or lines or [""])[-1][:300]


def end(process: subprocess.Popen[str]) -> None:
    """Leave no process: SIGTERM first, so that torchrun takes its workers along."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def die_with_parent() -> None:
    """In the child: SIGTERM when the sweep is killed, so that nothing trains on unwatched (Linux only)."""
    if LIBC is not None:
        LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of sys/prctl.h


def slots(jobs: int, nproc: int, gpus: int) -> queue.Queue[str | None]:
    """A place for each trial at a time: as many of the visible GPUs as it has processes, or None where there are no GPUs.

    Raises:
        InputError: more GPUs are wanted than there are.
    """
    places: queue.Queue[str | None] = queue.Queue()
    if gpus and jobs * nproc > gpus:
        raise InputError(
            f"--jobs {jobs} of --nproc {nproc} want {jobs * nproc} GPUs, {gpus} are here"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) >= gpus and names[0] else list(map(str, range(gpus)))
    for job in range(jobs):
        places.put(",".join(names[job * nproc : (job + 1) * nproc]) if gpus else None)
    return places
