"""--track: what each tracker is sent, resumed runs, missing packages, and trackers that fail."""

import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import conftest
import ranks
from conftest import each_of
from training import tracking
from training.run_log import RunLog

NUMBERS = {"epoch": 1, "samples": 64, "seconds": 1.0, "train_loss": 2.0, "lr": 0.1}
ROW = {**NUMBERS, "step": 4}
# These are not sent:
ROW |= {"shares": [1, 2], "noise_scale": None, "test_loss": float("nan")}
ROWS = [ROW, {**ROW, "epoch": 2, "step": 8}]
CONFIG = {"flags": {"lr": 0.1, "out": Path("x")}, "commit": "abc", "threads": 1}
DIGITS = f"{conftest.IMAGES} --epochs 2".split()


def fake(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> mock.Mock:
    """Let a module that remembers its calls be wandb; `fails` names a call that fails."""
    library = mock.Mock(Settings=dict)

    def called(name: str) -> mock.Mock:
        random.seed(1)
        torch.manual_seed(1)  # a library may draw random numbers
        if name == fails:
            raise RuntimeError(f"{name} has failed\nwith a second line")
        return library

    for name in ("init", "log", "finish"):
        getattr(library, name).side_effect = lambda *_, name=name, **__: called(name)
    monkeypatch.setitem(sys.modules, "wandb", library)
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return library


def sent(library: mock.Mock) -> list:
    """The steps and values of the rows that it got."""
    return [(call.kwargs["step"], call.args[0]) for call in library.log.call_args_list]


def train(folder: Path, *flags: str) -> int:
    return conftest.call("images", [*DIGITS, *flags, "--out", str(folder)])


def log_rows(folder: Path, name: str, rows: list, known: int, is_main: bool = True) -> None:
    """Start a run that has `known` of these rows, and log the others."""
    log = RunLog(folder, is_main=is_main, config=CONFIG, track=name)
    log.begin(rows[:known])
    for number in range(known, len(rows)):
        log.epoch(rows[: number + 1])
    log.close()


def test_rows_and_flags_are_sent_and_a_resumed_run_goes_on(tmp_path, monkeypatch):
    """wandb is offline unless the user says otherwise."""
    library = fake(monkeypatch)
    for known, mode in enumerate(("", "online")):  # the second start goes on after the first row
        monkeypatch.setenv("WANDB_MODE", mode)
        for is_main in (False, True):
            log_rows(tmp_path, "wandb", ROWS[: known + 1], known, is_main)
    assert sent(library) == [(4, NUMBERS), (8, {**NUMBERS, "epoch": 2})]
    assert library.finish.call_count == 2
    first, second = (call.kwargs for call in library.init.call_args_list)
    assert (first.pop("mode"), second.pop("mode")) == ("offline", "online")
    assert first == second
    machine = {"commit": "abc", "threads": 1}
    assert first["config"] == {"lr": 0.1, "out": "x", "machine": machine}
    assert first["project"] == "faster-training"


def test_a_tracker_that_fails_changes_nothing_and_is_reported_once(tmp_path, monkeypatch, capsys):
    mixup = ("--mixup", "mixup")  # which draws random numbers
    assert train(tmp_path / "plain", *mixup) == 0
    for fails in ("init", "log", "finish"):
        fake(monkeypatch, fails)
        capsys.readouterr()
        assert train(tmp_path / fails, *mixup, "--track", "wandb") == 0
        console = capsys.readouterr()
        [line] = [line for line in console.out.splitlines() if "warning" in line]
        assert line == f"warning: wandb: {fails} has failed; the run goes on without it"
        assert console.err == ""
        ranks.same_run(tmp_path / "plain", tmp_path / fails)


@each_of("name", tracking.LIBRARIES)
def test_a_missing_package_is_one_line_before_the_run(name, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, tracking.LIBRARIES[name][0], None)  # as if not installed
    line = refused("images", f"--track {name} --out run", f"--track {name} needs a package")
    assert line.endswith(f"pip install {name}")
    assert not Path("run").exists()


def test_a_resumed_run_does_not_take_the_tracker_from_its_checkpoint(here, monkeypatch):
    library = fake(monkeypatch)
    assert train(here / "run", "--track", "wandb", "--epochs", "1") == 0
    for more in ([], ["--track", "wandb"]):
        resumed = ["--resume", "run", "--epochs", str(2 + len(more)), *more]
        assert conftest.call("images", resumed) == 0
        assert (library.init.call_count > 1) == bool(more)
    assert [values["epoch"] for _, values in sent(library)] == [1, 2, 3, 4], "also what it missed"


def test_tensorboard_itself_reads_what_was_sent(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for known, rows in enumerate((ROWS[:1], ROWS)):
        log_rows(tmp_path, "tensorboard", rows, known)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [4, 8]
    assert "_hparams_/session_start_info" in events.summary_metadata
