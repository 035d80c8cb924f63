"""A run whose last.pt is damaged goes on from the checkpoint before, bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ranks
import resnet50_test
from test_checkpoint import flip
from test_training import run
from training import checkpoint

FLAGS = "--dataset digits --arch resnet8 --bs 64 --lr 0.02 --epochs 3 --threads 1 --seed 2".split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs that kept three checkpoints; tests take copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run(resnet50_test, *FLAGS, "--keep", "3", "--out", folder, monkeypatch=patch)
    return folder


@pytest.fixture
def copied(finished: Path, here: Path) -> Path:
    return Path(shutil.copytree(finished, Path("runs") / "resnet50_test-1"))


def epochs(folder: Path) -> dict[str, int]:
    return {path.name: checkpoint.load(path)["progress"]["epoch"] for path in folder.glob("*.pt")}


def test_a_damaged_or_missing_last_checkpoint_is_passed_over(finished, copied, monkeypatch):
    assert epochs(finished) == {"last.pt": 3, "last-1.pt": 2, "last-2.pt": 1, "best.pt": 3}
    for damage, names, used in (
        (Path.unlink, ["last.pt", "best.pt"], "last-1.pt"),
        (flip, ["last.pt", "last-1.pt", "best.pt"], "last-2.pt"),
    ):
        shutil.copytree(finished, copied, dirs_exist_ok=True)
        for name in names:
            damage(copied / name)
        console = run(resnet50_test, "--resume", monkeypatch=monkeypatch)  # of the newest run
        [line] = [line for line in console.splitlines() if line.startswith("warning: runs")]
        assert f"{copied}/{used} is used instead, which was written after" in line
        ranks.same_run(finished, copied)
        assert epochs(copied)["best.pt"] == 3


def test_where_all_are_damaged_the_run_is_refused_and_left_as_it_is(copied, monkeypatch):
    for path in checkpoint.latest_files(copied):
        os.truncate(path, 10)
    before = {path: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    console = run(resnet50_test, "--resume", copied, monkeypatch=monkeypatch, code=2)
    assert console.count(".pt is damaged") == 3
    assert console.count("\n") == 1
    assert {path: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


def test_an_older_checkpoint_can_be_named_only_where_newer_ones_are_damaged(
    finished, copied, monkeypatch
):
    flags = ["--resume", copied / "last-2.pt"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "gone on to step 69 (last.pt)" in console
    flip(copied / "last.pt")
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "gone on to step 46 (last-1.pt)" in console
    (copied / "last-1.pt").unlink()
    run(resnet50_test, *flags, monkeypatch=monkeypatch)
    ranks.same_run(finished, copied)


def test_only_a_run_that_trains_there_changes_the_damaged_folder(finished, copied, monkeypatch):
    flip(copied / "last.pt")
    before = {path.name: path.read_bytes() for path in copied.glob("*.pt")}
    flags = ["--checkpoint", "last", "--evaluate"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert f"warning: {copied}/last.pt is damaged" in console
    assert f"weights of {copied}/last-1.pt: epoch 2" in console
    run(resnet50_test, "--resume", copied, "--out", "other", monkeypatch=monkeypatch)
    ranks.same_run(finished, Path("other"))
    assert {path.name: path.read_bytes() for path in copied.glob("*.pt")} == before


def test_a_best_checkpoint_that_the_run_has_yet_to_reach_is_not_its_best(copied, monkeypatch):
    flip(copied / "last.pt")
    console = run(resnet50_test, "--resume", copied, "--lr", "1e-9", monkeypatch=monkeypatch)
    assert f"best.pt of epoch 2 is not in {copied}: the best epoch is chosen" in console
    best, last = (checkpoint.load(copied / f"{name}.pt")["progress"] for name in ("best", "last"))
    assert best["best"] == last["best"]
    assert best["rows"] == last["rows"][: best["epoch"]]
