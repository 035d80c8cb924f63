"""A checkpoint that is written in the background holds the moment of its save."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import test_kept_checkpoints
import torch
from test_run_result import FULL, FailingLink, accuracies_of, reported

import ranks
import resnet50_test
from test_training import run
from training import checkpoint, checkpoint_manager
from training.trainer import Trainer

FLAGS = """--dataset digits --arch resnet8 --bs 64 --lr 0.02 --epochs 2 --threads 1 --seed 2
    --save_every 5 --keep 3""".split()
BACKGROUND = [*FLAGS, "--save_in_background", "yes"]


class SlowSave:
    """Stands for `checkpoint.save`: waits first until the loop has done two steps or is waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self.steps_meanwhile: list[int] = []
        self.writing = self.most_at_once = 0
        self.real, train_step = checkpoint.save, Trainer.train_step
        monkeypatch.setattr(checkpoint, "save", self)

        def counted(trainer: Trainer, *batch: Any, **more: Any) -> None:
            train_step(trainer, *batch, **more)
            self.steps += 1

        monkeypatch.setattr(Trainer, "train_step", counted)

    def __call__(self, path: Path, state: dict[str, Any], *, keep: int) -> None:
        self.writing += 1
        self.most_at_once = max(self.most_at_once, self.writing)
        before, end = self.steps, time.monotonic() + 0.3
        while self.steps < before + 2 and time.monotonic() < end:
            time.sleep(0.001)
        self.real(path, state, keep=keep)
        self.steps_meanwhile.append(self.steps - before)
        self.writing -= 1


def same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    return one == other


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    """What two equal runs have in common."""
    progress = {key: value for key, value in state["progress"].items() if "seconds" not in key}
    progress["rows"] = len(progress["rows"])
    ranks_ = [{k: v for k, v in rank.items() if "seconds" not in k} for rank in state["ranks"]]
    return {**state, "progress": progress, "ranks": ranks_, "flags": None, "file": None}


def test_what_is_written_is_the_moment_of_the_save(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--optimizer", "adamw", "--mixup", "cutmix"]
    run(resnet50_test, *FLAGS, *flags, "--out", "whole", monkeypatch=monkeypatch)
    slow = SlowSave(monkeypatch)
    run(resnet50_test, *BACKGROUND, *flags, "--out", "run", monkeypatch=monkeypatch)
    assert slow.most_at_once == 1
    assert sum(count >= 2 for count in slow.steps_meanwhile) >= 5, "the loop was to go on"
    ranks.same_run(Path("whole"), Path("run"))
    for name in ("last.pt", "last-1.pt", "last-2.pt", "best.pt"):
        one, other = (
            without_times(checkpoint.load(Path(folder) / name, "resnet50_test"))
            for folder in ("whole", "run")
        )
        assert same_state(one, other), name


@pytest.mark.parametrize("size", [0, 1e9])
def test_by_default_large_models_are_written_in_the_background(
    size: float, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    real = checkpoint.save

    def save(path: Path, state: dict[str, Any], *, keep: int) -> None:
        threads.add(threading.current_thread().name)
        real(path, state, keep=keep)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(checkpoint_manager, "BACKGROUND_BYTES", size)
    run(resnet50_test, *FLAGS, "--out", "run", monkeypatch=monkeypatch)
    assert threads == {"MainThread" if size else "checkpoint_0"}


# -------------------------------------------------------------------- what goes wrong


def test_a_write_that_fails_is_reported_and_the_run_does_not_end_with_zero(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, state: dict[str, Any], **_: int) -> None:
        raise OSError(f"{path} could not be written (No space left on device)")

    monkeypatch.setattr(checkpoint, "save", full)
    console = run(resnet50_test, *BACKGROUND, "--out", "run", monkeypatch=monkeypatch, code=2)
    assert console.count("warning: run/last.pt could not be written") == 1 + 9 + 2
    assert console.splitlines()[-1].startswith("error: run/last.pt could not be written at the end")


def test_after_a_failed_save_the_best_is_the_best_that_is_on_the_disk(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies_of(monkeypatch, 0.2, 0.9, 0.5, 0.3)
    monkeypatch.setattr(checkpoint, "link_checkpoint", FailingLink(2, error=FULL))
    flags = [*BACKGROUND, "--save_every", "0", "--epochs", "4", "--out", "run"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert reported(console)["best"].startswith("best.pt: epoch 3, test accuracy 50.00 %")
    assert checkpoint.load(here / "run" / "best.pt", "resnet50_test")["progress"]["epoch"] == 3


def test_a_signal_waits_for_the_write_and_writes_once_more(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowSave(monkeypatch)
    real = slow.real

    def save(path: Path, state: dict[str, Any], *, keep: int) -> None:
        if state["progress"]["step"] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        real(path, state, keep=keep)

    slow.real = save
    console = run(resnet50_test, *BACKGROUND, "--out", "run", monkeypatch=monkeypatch, code=130)
    assert "last.pt is written" in console.splitlines()[-1]
    steps = [
        checkpoint.load(Path("run") / name, "resnet50_test")["progress"]["step"]
        for name in ("last.pt", "last-1.pt")
    ]
    assert steps[0] > steps[1] == 10
    monkeypatch.undo()
    os.chdir(here)
    run(resnet50_test, "--resume", "run", monkeypatch=monkeypatch)
    run(resnet50_test, *FLAGS, "--out", "whole", monkeypatch=monkeypatch)
    ranks.same_run(Path("whole"), Path("run"))


HANGING = """
import sys, time, torch
import resnet50_test
from training import checkpoint
real = torch.save
def half(state, file):
    real(state, file)
    if state["progress"]["step"] >= 15:
        file.truncate(file.tell() // 2)
        file.flush()
        open("writing", "w").close()
        time.sleep(600)
torch.save = half
sys.argv[0] = "resnet50_test.py"
resnet50_test.main()
"""


def test_a_kill_during_a_write_leaves_the_checkpoint_before(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*ranks.script("resnet50_test.py")[:1], "-c", HANGING, *BACKGROUND, "--out", "run"]
    process = ranks.start(command, here, PYTHONPATH=str(ranks.ROOT))
    ranks.wait_for((here / "writing").exists, process)
    assert process.poll() is None, (here / "console.log").read_text()
    ranks.kill(process)
    assert (here / "run" / "last.pt.part").exists()
    console = run(resnet50_test, "--resume", "run", monkeypatch=monkeypatch)
    assert "warning" not in console
    run(resnet50_test, *FLAGS, "--out", "whole", monkeypatch=monkeypatch)
    ranks.same_run(Path("whole"), Path("run"))


def test_a_return_after_divergence_waits_for_the_write(here: Path) -> None:
    from test_rollback import RUN, SCRIPT, goes_back_and_on

    flags = [*RUN, "--save_in_background", "yes", "--out", "run"]
    goes_back_and_on(ranks.script(SCRIPT, *flags), here)


# -------------------------------------------------------------------- in shards

sharded = test_kept_checkpoints.sharded  # the fixture: a run whose saves were in the foreground


@pytest.mark.process
def test_shards_are_written_in_the_background(sharded: Path, tmp_path: Path) -> None:
    flags = [*test_kept_checkpoints.TEXTS, "--save_in_background", "yes", "--save_every", "3"]
    command = ranks.torchrun("transformer_test.py", *flags, "--out", "run")
    console = ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    assert "warning" not in console
    assert ranks.metrics(tmp_path / "run") == ranks.metrics(sharded)
    whole, other = (
        test_kept_checkpoints.whole_weights(folder / "last.pt")
        for folder in (sharded, tmp_path / "run")
    )
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    command = ranks.torchrun("transformer_test.py", "--resume", "run", "--epochs", "3")
    ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    rows = ranks.metrics(tmp_path / "run")
    assert rows[2]["train_loss"] < rows[1]["train_loss"]


def test_a_resumed_run_does_not_hold_the_file_that_it_began_from(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(resnet50_test, *FLAGS, "--out", "run", monkeypatch=monkeypatch)
    held: list[bool] = []
    finish_epoch = Trainer.finish_epoch

    def note_maps(trainer: Trainer) -> None:
        held.append(str(here / "run" / "last") in Path("/proc/self/maps").read_text())
        finish_epoch(trainer)

    monkeypatch.setattr(Trainer, "finish_epoch", note_maps)
    run(resnet50_test, "--resume", "run", "--epochs", "3", monkeypatch=monkeypatch)
    assert held == [False]
