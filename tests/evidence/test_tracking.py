"""--track: what each tracker is sent, resumed runs, missing packages, and trackers that fail."""

from __future__ import annotations

import itertools
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import conftest
import ranks
import resnet50_test
from conftest import each_of
from training import tracking
from training.run_log import RunLog

NUMBERS = {"run/epoch": 1, "run/samples": 64, "time/seconds": 1.0, "time/train_seconds": 0.5}
NUMBERS |= {"time/samples_per_second": 64.0, "train/loss": 2.0, "test/accuracy": 0.4, "run/lr": 0.1}
ROW = {"epoch": 1, "step": 4, "samples": 64, "seconds": 1.0, "train_seconds": 0.5, "lr": 0.1}
ROW |= {"samples_per_second": 64.0, "train_loss": 2.0, "test_accuracy": 0.4}
ROW |= {"shares": [1, 2], "noise_scale": None, "test_loss": float("nan")}  # which are not sent
ROWS = [ROW, {**ROW, "epoch": 2, "step": 8}]
CONFIG = {"flags": {"lr": 0.1, "out": Path("x")}, "commit": "abc", "threads": 1}
DIGITS = f"{conftest.IMAGES} --epochs 2".split()


class FakeLibrary(types.ModuleType):
    """A tracker's module that remembers what it is given; `fails` names a call that fails."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("fake")
        self.fails, self.opened, self.sent, self.closed = fails, [], [], 0

    def call(self, name: str) -> None:
        random.seed(1)
        torch.manual_seed(1)  # a library may draw random numbers
        if name == self.fails:
            raise RuntimeError(f"{name} has failed\nwith a second line")

    def init(self, **settings: Any) -> FakeLibrary:
        self.opened.append(settings)
        self.call("init")
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.call("log")
        self.sent.append((step, values))

    def finish(self) -> None:
        self.call("finish")
        self.closed += 1

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings


def fake(name: str, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> FakeLibrary:
    library = FakeLibrary(fails)
    monkeypatch.setitem(sys.modules, tracking.LIBRARIES[name][0], library)
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return library


def train(folder: Path, *flags: str) -> int:
    return conftest.call(resnet50_test, [*DIGITS, *flags, "--out", str(folder)])


def log_rows(folder: Path, name: str, rows: list, known: int, is_main: bool = True) -> None:
    """Start a run that has `known` of these rows, and log the others."""
    log = RunLog(folder, is_main=is_main, config=CONFIG, track=name)
    log.begin(rows[:known])
    for number in range(known, len(rows)):
        log.epoch(rows[: number + 1])
    log.close()


@each_of("name", ["trackio", "wandb"])
def test_rows_and_flags_are_sent_and_a_resumed_run_goes_on(name, tmp_path, monkeypatch):
    library, folder = fake(name, monkeypatch), tmp_path / name
    folder.mkdir()
    for known, rows in enumerate((ROWS[:1], ROWS)):  # the second start sends what the first has not
        for is_main in (False, True):
            log_rows(folder, name, rows, known, is_main)
    log_rows(
        folder, "wandb" if name == "trackio" else "trackio", ROWS, known=2
    )  # has its own place
    log_rows(folder, name, ROWS, known=2)
    assert library.sent == [(4, NUMBERS), (8, {**NUMBERS, "run/epoch": 2})]
    assert library.closed == 3
    first, second, _ = library.opened
    for key in {"id", "name"} & first.keys():
        assert first[key] == second[key]
    machine = {"commit": "abc", "threads": 1}
    assert first["config"] == {"lr": 0.1, "out": "x", "machine": machine}
    assert first["project"] == "faster-training"
    if name == "trackio":
        assert (first["resume"], second["resume"]) == ("never", "allow")


def test_a_run_sends_numbers_of_its_steps(tmp_path, monkeypatch):
    library = fake("wandb", monkeypatch)
    monkeypatch.setattr(RunLog, "clock", staticmethod(itertools.count(step=10).__next__))
    assert train(tmp_path / "run", "--track", "wandb", "--log_every", "100", "--lr", "0.05") == 0
    steps = [(step, values) for step, values in library.sent if "step/loss" in values]
    assert 2 <= len(steps) <= 6, "of ten steps, each of which takes about 50 s"
    names = ("loss", "accuracy", "lr", "grad_norm", "samples_per_second", "peak_memory_bytes")
    for step, values in steps:
        assert values.keys() == {f"step/{name}" for name in names}
        assert all(value > 0 for value in values.values())
        assert 0 < step <= 12


def test_wandb_is_offline_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    """And a run that was killed keeps its name."""
    library = fake("wandb", monkeypatch)
    for given in ("", "online"):
        monkeypatch.setenv("WANDB_MODE", given)
        tracking.TrackedRun("wandb", tmp_path, warn=print).begin(CONFIG, [])
    assert [each["mode"] for each in library.opened] == ["offline", "online"]
    assert len({each["id"] for each in library.opened}) == 1


def test_a_tracker_that_fails_changes_nothing_and_is_reported_once(tmp_path, monkeypatch, capsys):
    mixup = ("--mixup", "mixup")  # which draws random numbers
    assert train(tmp_path / "plain", *mixup) == 0
    for fails in ("init", "log", "finish"):
        fake("wandb", monkeypatch, fails=fails)
        capsys.readouterr()
        assert train(tmp_path / fails, *mixup, "--track", "wandb", "--log_every", "0.001") == 0
        console = capsys.readouterr()
        [line] = [line for line in console.out.splitlines() if "warning" in line]
        assert line == f"warning: --track wandb: {fails} has failed; the run goes on without it"
        assert console.err == ""
        ranks.same_run(tmp_path / "plain", tmp_path / fails)


@each_of("name", tracking.LIBRARIES)
def test_a_missing_package_is_one_line_before_the_run(name, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, tracking.LIBRARIES[name][0], None)  # as if not installed
    line = refused("images", f"--track {name} --out run", f"--track {name} needs a package")
    assert line.endswith(f"pip install {name}")
    assert not Path("run").exists()


def test_a_resumed_run_does_not_take_the_tracker_from_its_checkpoint(here, monkeypatch):
    library = fake("trackio", monkeypatch)
    assert train(here / "run", "--track", "trackio", "--epochs", "1") == 0
    for more in ([], ["--track", "trackio"]):
        resumed = ["--resume", "run", "--epochs", str(2 + len(more)), *more]
        assert conftest.call(resnet50_test, resumed) == 0
        assert (len(library.opened) > 1) == bool(more)
    assert [values["run/epoch"] for _, values in library.sent] == [1, 2, 3, 4]


def test_tensorboard_itself_reads_what_was_sent(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for known, rows in enumerate((ROWS[:1], ROWS)):
        log_rows(tmp_path, "tensorboard", rows, known)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("test/accuracy")] == [4, 8]
    assert "_hparams_/session_start_info" in events.summary_metadata
