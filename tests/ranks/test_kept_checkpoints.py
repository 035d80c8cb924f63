"""A damaged checkpoint is found out, and the run goes on from the one that was kept before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import resnet50_test
from distributed import sharded_checkpoint
from errors import DiskFull, InputError
from test_checkpoint import state_of
from test_training import run
from training import checkpoint, run_folder
from training.checkpoint_manager import delete_unused_shards

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
    """A copy of the finished run, in which best.pt is the same file as last.pt, as in the run."""
    folder = Path("runs") / "resnet50_test-1"
    shutil.copytree(finished, folder)
    assert (finished / "best.pt").samefile(finished / "last.pt")
    (folder / "best.pt").unlink()
    os.link(folder / "last.pt", folder / "best.pt")
    return folder


def flip(path: Path) -> None:
    """Change a byte in the middle of a file, which torch.load does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    torch.load(path, weights_only=True)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(os.urandom(100_000)),
    "flipped": flip,
    "missing": lambda path: path.unlink(),
}


def epoch_of(path: Path) -> int:
    return checkpoint.load(path, "resnet50_test")["progress"]["epoch"]


# -------------------------------------------------------------------- what is kept


def test_the_latest_checkpoints_are_kept(finished: Path) -> None:
    names = {path.name: epoch_of(path) for path in finished.glob("*.pt")}
    assert names == {"last.pt": 3, "last-1.pt": 2, "last-2.pt": 1, "best.pt": 3}


def test_two_are_kept_by_default_and_one_where_that_is_asked_for(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keep, names in (("2", ["last-1.pt", "last.pt"]), ("1", ["last.pt"])):
        flags = ["--resume", copied, "--epochs", str(6 - int(keep)), "--keep", keep]
        run(resnet50_test, *flags, monkeypatch=monkeypatch)
        assert sorted(path.name for path in copied.glob("last*.pt")) == names
    assert resnet50_test.parser().parse_args([]).keep == 2


def test_names_move_on_by_one(tmp_path: Path) -> None:
    for seed in range(1, 6):
        checkpoint.save(tmp_path / "last.pt", state_of(seed), keep=3)
    kept = {path.name: checkpoint.load(path, "a_test")["seed"] for path in tmp_path.iterdir()}
    assert kept == {"last.pt": 5, "last-1.pt": 4, "last-2.pt": 3}
    checkpoint.save(tmp_path / "last.pt", state_of(6))
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_kill_between_the_two_names_loses_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        checkpoint.save(tmp_path / "last.pt", state_of(seed), keep=3)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed_at("last.pt", Path.replace))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "last.pt", state_of(3), keep=3)
    assert checkpoint.load(tmp_path, "a_test")["seed"] == 2
    checkpoint.save(tmp_path / "last.pt", state_of(4), keep=3)
    kept = {path.name: checkpoint.load(path, "a_test")["seed"] for path in tmp_path.iterdir()}
    assert kept == {"last.pt": 4, "last-1.pt": 2, "last-2.pt": 1}


def killed_at(name: str, replace: Callable[..., Any]) -> Callable[..., Any]:
    """`Path.replace` that is interrupted where it would give a file this name."""

    def stopped(path: Path, target: Path) -> None:
        if target.name == name:
            raise KeyboardInterrupt
        replace(path, target)

    return stopped


def test_a_checkpoint_that_cannot_be_kept_does_not_stop_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoint.save(tmp_path / "last.pt", state_of(1), keep=2)
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", refuse)
    checkpoint.save(tmp_path / "last.pt", state_of(2), keep=2)
    assert checkpoint.load(tmp_path, "a_test")["seed"] == 2
    assert os.listdir(tmp_path) == ["last.pt"]


def test_older_checkpoints_make_room_for_a_new_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoint.save

    def save(path: Path, state: dict[str, Any], *, keep: int) -> None:
        if checkpoint.older_files(path.parent):
            raise DiskFull(f"{path} could not be written (No space left on device)")
        real(path, state, keep=keep)

    monkeypatch.setattr(checkpoint, "save", save)
    console = run(
        resnet50_test, "--resume", copied, "--epochs", "4", monkeypatch=monkeypatch
    ).splitlines()
    lines = [line for line in console if line.startswith("warning: the disk")]
    assert lines == [
        f"warning: the disk is full; {copied}/last-{number}.pt is deleted to make room"
        for number in (2, 1)
    ]
    assert epoch_of(copied / "last.pt") == 4


# -------------------------------------------------------------------- falling back


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    damage: str, finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DAMAGE[damage](copied / "last.pt")
    console = run(resnet50_test, "--resume", copied, monkeypatch=monkeypatch)
    [line] = [line for line in console.splitlines() if line.startswith("warning: runs")]
    problem = "missing;" if damage == "missing" else "damaged ("
    assert line.startswith(f"warning: {copied}/last.pt is {problem}")
    used = f"{copied}/last-1.pt is used instead, which was written after 2 epochs and 46 steps"
    assert line.endswith(used)
    ranks.same_run(finished, copied)
    names = {path.name: epoch_of(path) for path in copied.glob("*.pt")}
    assert names == {"last.pt": 3, "last-1.pt": 2, "last-2.pt": 1, "best.pt": 3}


def test_two_damaged_checkpoints_are_passed_over(
    finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(copied / "last.pt")
    flip(copied / "last-1.pt")
    console = run(resnet50_test, "--resume", monkeypatch=monkeypatch)  # of the newest run
    assert f"{copied}/last.pt and {copied}/last-1.pt are damaged (archive/data/" in console
    assert f"{copied}/last-2.pt is used instead" in console
    ranks.same_run(finished, copied)
    assert {path.name for path in copied.glob("last*.pt")} == {"last.pt", "last-1.pt", "last-2.pt"}
    assert [epoch_of(copied / name) for name in ("last.pt", "last-1.pt", "last-2.pt")] == [3, 2, 1]


def test_where_all_are_damaged_the_run_is_refused_and_left_as_it_is(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in checkpoint.latest_files(copied):
        os.truncate(path, 10)
    before = {path: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    console = run(resnet50_test, "--resume", copied, monkeypatch=monkeypatch, code=2)
    assert "last.pt and last-1.pt and last-2.pt are damaged" in console
    assert console.count("\n") == 1
    assert {path: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


def test_a_damaged_file_that_is_named_is_refused(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(copied / "last.pt")
    flags = ["--resume", copied / "last.pt"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "does not match its checksum" in console
    assert f"give the folder {copied}, which has last-1.pt as well" in console
    console = run(
        resnet50_test, "--checkpoint", "best", "--evaluate", monkeypatch=monkeypatch, code=2
    )
    assert "best.pt: damaged" in console


def test_an_older_checkpoint_can_be_named_only_where_newer_ones_are_damaged(
    finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--resume", copied / "last-2.pt"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "gone on to step 69 (last.pt)" in console
    flip(copied / "last.pt")
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "gone on to step 46 (last-1.pt)" in console
    (copied / "last-1.pt").unlink()
    run(resnet50_test, *flags, monkeypatch=monkeypatch)
    ranks.same_run(finished, copied)


@pytest.mark.parametrize("flags", ["--checkpoint last", "--checkpoint RUN", "--resume RUN"])
def test_a_damaged_last_checkpoint_is_evaluated_before_the_damage(
    flags: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(copied / "last.pt")
    damaged = (copied / "last.pt").read_bytes()
    words = flags.replace("RUN", str(copied)).split()
    console = run(resnet50_test, *words, "--evaluate", monkeypatch=monkeypatch)
    assert f"warning: {copied}/last.pt is damaged" in console
    assert f"weights of {copied}/last-1.pt: epoch 2" in console
    assert (copied / "last.pt").read_bytes() == damaged  # only a run that trains replaces it


def test_a_run_goes_on_elsewhere_and_leaves_the_damaged_folder_as_it_is(
    finished: Path, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(copied / "last.pt")
    before = {path.name: path.read_bytes() for path in copied.glob("*.pt")}
    run(resnet50_test, "--resume", copied, "--out", "other", monkeypatch=monkeypatch)
    ranks.same_run(finished, Path("other"))
    assert {path.name: path.read_bytes() for path in copied.glob("*.pt")} == before


def test_a_best_checkpoint_of_a_later_epoch_is_not_the_best_of_the_run(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system has no links, best.pt may be sound though the same last.pt is not."""
    (copied / "best.pt").unlink()
    shutil.copy(copied / "last.pt", copied / "best.pt")
    flip(copied / "last.pt")
    console = run(resnet50_test, "--resume", copied, "--lr", "1e-9", monkeypatch=monkeypatch)
    assert "last.pt: epoch 3" in console
    best = checkpoint.load(copied / "best.pt", "resnet50_test")["progress"]
    last = checkpoint.load(copied / "last.pt", "resnet50_test")["progress"]
    assert best["best"] == last["best"]
    assert best["rows"] == last["rows"][: best["epoch"]]


def test_a_folder_with_only_an_older_checkpoint_is_a_run(copied: Path) -> None:
    for path in (copied / "last.pt", copied / "best.pt"):
        path.unlink()
    assert run_folder.latest_run("resnet50_test") == copied


def test_a_file_without_permission_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        checkpoint.save(tmp_path / "last.pt", state_of(seed), keep=2)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(InputError, match="cannot be read.*Permission denied"):
        checkpoint.load(tmp_path, "a_test")


# -------------------------------------------------------------------- in shards

TEXTS = """--dataset headlines --bs 16 --lr 4e-4 --epochs 2 --depth 1 --width 32 --vocab_size 800
    --precision fp32 --threads 1 --parallel fsdp --keep 3""".split()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, of which each writes its part."""
    folder = tmp_path_factory.mktemp("sharded")
    command = ranks.torchrun("transformer_test.py", *TEXTS, "--out", "run")
    ranks.finish(ranks.start(command, folder, NGPU="2"), folder)
    return folder / "run"


def shards_of(path: Path) -> Path:
    return Path(checkpoint.load(path, "transformer_test")["shards"])


def flip_shard(folder: Path) -> None:
    path = next(folder.glob("__1_*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


SHARD_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "shard": flip_shard,
    "missing-shard": lambda folder: next(folder.glob("__1_*.distcp")).unlink(),
    "description": lambda folder: (folder / ".metadata").write_bytes(
        (folder / ".metadata").read_bytes().replace(b"model/", b"modem/")
    ),
    "folder": shutil.rmtree,
}


def test_shards_stay_while_any_file_of_the_folder_names_them(tmp_path: Path) -> None:
    for number, name in enumerate(("last.pt", "epoch10.pt"), 1):
        checkpoint.save(tmp_path / name, {**state_of(1), "shards": f"shards-{number}"})
    for number in (1, 2, 3):
        (tmp_path / f"shards-{number}").mkdir()
    delete_unused_shards(tmp_path)
    assert {path.name for path in tmp_path.glob("shards-*")} == {"shards-1", "shards-2"}


@pytest.mark.process
def test_the_shards_of_all_kept_checkpoints_stay(sharded: Path) -> None:
    files = list(sharded.glob("*.pt"))
    assert {path.name for path in files} == {"last.pt", "last-1.pt", "last-2.pt", "best.pt"}
    used = {shards_of(path).name for path in files}
    assert len(used) == 3
    assert {path.name for path in sharded.glob("shards-*")} == used


@pytest.mark.process
@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_damaged_shards_fall_back(damage: str, sharded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(sharded, copy)
    SHARD_DAMAGE[damage](shards_of(copy / "last.pt"))
    command = ranks.torchrun("transformer_test.py", "--resume", "run")
    console = ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    assert console.count("run/last-1.pt is used instead") == 1, "one rank speaks for all"
    assert ranks.metrics(copy) == ranks.metrics(sharded)
    whole, again = (whole_weights(folder / "last.pt") for folder in (sharded, copy))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert {path.name for path in copy.glob("shards-*")} == {
        shards_of(path).name for path in copy.glob("*.pt")
    }


def whole_weights(path: Path) -> dict[str, torch.Tensor]:
    return sharded_checkpoint.load_whole_model(shards_of(path))
