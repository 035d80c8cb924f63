"""A run whose last.pt is damaged goes on from the checkpoint before, bit for bit."""

import functools
import shutil
from pathlib import Path

import pytest

import ranks
import resnet50_test
from conftest import run
from test_checkpoint import flip
from training import checkpoint

FLAGS = "--dataset digits --arch resnet8 --bs 64 --lr 0.02 --epochs 3 --threads 1 --seed 2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs that kept three checkpoints; tests take copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(resnet50_test, FLAGS, "--keep 3 --out", folder)
    return folder


@pytest.fixture
def copied(finished: Path, here: Path) -> Path:
    return Path(shutil.copytree(finished, Path("runs") / "resnet50_test-1"))


def epochs(folder: Path) -> dict[str, int]:
    return {path.name: checkpoint.load(path).progress["epoch"] for path in folder.glob("*.pt")}


def test_a_damaged_or_missing_last_checkpoint_is_passed_over(finished, copied):
    assert epochs(finished) == {"last.pt": 3, "last-1.pt": 2, "last-2.pt": 1, "best.pt": 3}
    for damage, names, used in (
        (Path.unlink, ["last.pt", "best.pt"], "last-1.pt"),
        (flip, ["last.pt", "last-1.pt", "best.pt"], "last-2.pt"),
    ):
        shutil.copytree(finished, copied, dirs_exist_ok=True)
        for name in names:
            damage(copied / name)
        console = run(resnet50_test, "--resume")  # of the newest run
        [line] = [line for line in console.splitlines() if line.startswith("warning: runs")]
        assert f"{copied}/{used} is used instead, which was written after" in line
        ranks.same_run(finished, copied)
        assert epochs(copied)["best.pt"] == 3


def test_an_older_checkpoint_can_be_named_only_where_newer_ones_are_damaged(finished, copied):
    resume = functools.partial(run, resnet50_test, f"--resume {copied}/last-2.pt")
    assert "gone on to step 69 (last.pt)" in resume(code=2)
    flip(copied / "last.pt")
    assert "gone on to step 46 (last-1.pt)" in resume(code=2)
    (copied / "last-1.pt").unlink()
    resume()
    ranks.same_run(finished, copied)


def test_only_a_run_that_trains_there_changes_the_damaged_folder(finished, copied):
    flip(copied / "last.pt")
    before = {path.name: path.read_bytes() for path in copied.glob("*.pt")}
    console = run(resnet50_test, "--checkpoint last --evaluate")
    assert f"warning: {copied}/last.pt is damaged" in console
    assert f"weights of {copied}/last-1.pt: epoch 2" in console
    run(resnet50_test, "--resume", copied, "--out other")
    ranks.same_run(finished, Path("other"))
    assert {path.name: path.read_bytes() for path in copied.glob("*.pt")} == before


def test_a_best_checkpoint_that_the_run_has_yet_to_reach_is_not_its_best(copied):
    flip(copied / "last.pt")
    console = run(resnet50_test, "--resume", copied, "--lr 1e-9")
    assert f"best.pt of epoch 2 is not in {copied}: the best epoch is chosen" in console
    best, last = (checkpoint.load(copied / f"{name}.pt").progress for name in ("best", "last"))
    assert best["best"] == last["best"]
    assert best["rows"] == last["rows"][: best["epoch"]]
