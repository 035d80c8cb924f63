"""checkpoint.py: whole or not there, and nothing but plain data."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import each_of
from errors import InputError
from training import atomic_file, checkpoint

ROOT = Path(__file__).parents[2]


def state_of(seed: int, rows: int = 100) -> dict[str, Any]:
    tensor = torch.randn(rows, 100, generator=torch.Generator().manual_seed(seed))
    return {
        "script": "a_test",
        "model": {"w": tensor},
        "flags": {"dataset": "digits", "lr": 0.1, "betas": [0.9, 0.99], "out": None},
        "progress": {"epoch": 1, "step": 10, "best": {"accuracy": 0.5, "epoch": 1}},
        "classes": ["cat", "dog"],
        "optimizer": {},
        "optimizer_kind": "SGD",
        "hook": None,
        "scaler": {},
        "learner": None,
        "batching": {"size": 32},
        "ranks": [],
        "seed": seed,
    }


def test_load_gives_back_what_was_saved_by_file_and_by_folder(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "last.pt", state_of(1))
    for path in (tmp_path, tmp_path / "last.pt"):
        state = checkpoint.load(path, "a_test")
        torch.testing.assert_close(state.pop("model"), state_of(1)["model"], rtol=0, atol=0)
        assert {**state, "model": None} == {
            **state_of(1),
            "format": checkpoint.FORMAT,
            "file": str(tmp_path / "last.pt"),
            "model": None,
        }
    assert os.listdir(tmp_path) == ["last.pt"]


@each_of("name", [*checkpoint.ENTRIES, "script", "mean"])
def test_a_missing_entry_is_named(name: str, tmp_path: Path) -> None:
    state = {**state_of(1), "mean": [0.5]}
    del state[name]
    checkpoint.save(tmp_path / "last.pt", state)
    with pytest.raises(InputError, match=rf"last.pt: .* incomplete \(it has no {name}\)"):
        checkpoint.load(tmp_path, "a_test", metadata=["mean"])
    is_optional = name == "mean"  # read_progress knows no script's own entries
    assert (checkpoint.read_progress(tmp_path / "last.pt") is not None) == is_optional


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"flags": 3}, "the type of its flags is int"),
        ({"flags": {"lr": 0.1}}, "there is no dataset in its flags"),
        ({"progress": {"epoch": 1, "step": 10}}, "there is no best in its progress"),
        ({"model": [1]}, "the type of its model is list"),
    ],
)
def test_an_entry_of_another_kind_is_named(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "last.pt", {**state_of(1), **change})
    with pytest.raises(InputError, match=rf"--checkpoint .* incomplete \({problem}\)"):
        checkpoint.load(tmp_path, "a_test", flag="--checkpoint")


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("broken", ["os.fsync", "torch.save"])
@pytest.mark.parametrize("first", [True, False], ids=["nothing-before", "one-before"])
def test_save_that_fails_keeps_the_previous_file_and_leaves_nothing(
    broken: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    if not first:
        checkpoint.save(path, state_of(1))
    before = None if first else path.read_bytes()
    monkeypatch.setattr(broken, full_disk)
    with pytest.raises(OSError, match="last.pt could not be written .*No space left"):
        checkpoint.save(path, state_of(2))
    assert (path.read_bytes() if path.exists() else None) == before
    assert os.listdir(tmp_path) == ([] if first else ["last.pt"])


@pytest.mark.parametrize("writer", ["checkpoint", "copy", "text"])
def test_new_file_is_on_the_disk_before_it_takes_the_name(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "last.pt", []
    sync, rename = os.fsync, Path.replace

    def kind(number: int) -> str:
        return "sync folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "sync"

    monkeypatch.setattr(
        os,
        "fsync",
        lambda number: (events.append((kind(number), os.fstat(number).st_size)), sync(number)),
    )
    monkeypatch.setattr(
        Path,
        "replace",
        lambda part, to: (events.append(("rename", part.stat().st_size)), rename(part, to)),
    )
    if writer == "text":
        atomic_file.atomic_write_text(path, "text")
    else:
        checkpoint.save(path, state_of(1))
    if writer == "copy":
        events.clear()
        monkeypatch.setattr(os, "link", full_disk)
        checkpoint.link_checkpoint(path, "best.pt")
    size = path.stat().st_size
    assert events == [("sync", size), ("rename", size), ("sync folder", tmp_path.stat().st_size)]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from test_checkpoint import state_of
from training import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({path!r})
checkpoint.save(path, state_of(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 * path.stat().st_size, resource.RLIM_INFINITY))
try:
    checkpoint.save(path, state_of(2, rows=10_000))
except OSError as error:
    print("refused:", error)
checkpoint.save(path.with_name("small.pt"), state_of(3))
"""


def test_write_that_the_system_cuts_short_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    run = subprocess.run(
        [sys.executable, "-c", LIMITED.format(path=str(path))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "unit"))
            ),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"refused: {path} could not be written")
    assert checkpoint.load(path, "a_test")["seed"] == 1
    assert checkpoint.load(tmp_path / "small.pt", "a_test")["seed"] == 3  # a later save works again
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "small.pt"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_best_survives_the_next_save_of_last(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", full_disk)
    for seed, best in ((1, True), (2, True), (3, False), (4, False)):
        checkpoint.save(tmp_path / "last.pt", state_of(seed))
        if best:
            checkpoint.link_checkpoint(tmp_path / "last.pt", "best.pt")
    assert checkpoint.load(tmp_path / "best.pt", "a_test")["seed"] == 2
    assert checkpoint.load(tmp_path / "last.pt", "a_test")["seed"] == 4
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


def test_second_name_that_fails_keeps_the_old_one_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "last.pt", state_of(1))
    checkpoint.link_checkpoint(tmp_path / "last.pt", "best.pt")
    checkpoint.save(tmp_path / "last.pt", state_of(2))

    def cut_copy(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        full_disk()

    monkeypatch.setattr(os, "link", full_disk)
    monkeypatch.setattr(shutil, "copyfile", cut_copy)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.link_checkpoint(tmp_path / "last.pt", "best.pt")
    assert checkpoint.load(tmp_path / "best.pt", "a_test")["seed"] == 1
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt"]


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_checkpoint_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    torch.save({"format": "faster-training-3", **state_of(1)}, tmp_path / "last.pt")
    with pytest.raises(InputError, match="another version of this project .faster-training-3"):
        checkpoint.load(tmp_path, "resnet50_test")


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_load_runs_no_code_of_the_file(writer: str, tmp_path: Path) -> None:
    state, trap = {"format": checkpoint.FORMAT, **state_of(1)}, tmp_path / "sprung"
    path = tmp_path / "last.pt"
    if writer == "torch":
        torch.save({**state, "x": Trap(trap)}, path)
    else:
        path.write_bytes(pickle.dumps({**state, "x": Trap(trap)}))
    with pytest.raises(InputError, match="last.pt"):
        checkpoint.load(path, "a_test")
    assert not trap.exists()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_cut_file_is_named_as_such(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, state_of(1))
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(InputError, match=r"last.pt: damaged \(truncated or not a "):
        checkpoint.load(path, "a_test")


def test_random_states_come_back() -> None:
    before = checkpoint.rng_states(torch.device("cpu"))
    drawn = torch.rand(5)
    torch.rand(3)
    checkpoint.set_rng_states(before, torch.device("cpu"))
    assert torch.equal(torch.rand(5), drawn)


def mapped_kib(path: Path) -> int:
    """How much of a file this process has in its memory; 0 where it is not mapped."""
    lines, total, inside = (
        Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines(),
        0,
        False,
    )
    for line in lines:
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_rank_reads_its_own_part_alone(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    parts = [{"weights": torch.full((1024, 1024), float(rank))} for rank in range(8)]  # 4 MiB each
    checkpoint.save(path, {**state_of(1), "ranks": parts})
    state = checkpoint.load(path, "a_test")
    assert torch.equal(checkpoint.copied(state["ranks"][3])["weights"], parts[3]["weights"])
    assert 4096 <= mapped_kib(path) < 2 * 4096


def test_what_was_loaded_stays_when_another_file_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, state_of(1))
    state = checkpoint.load(path, "a_test")
    checkpoint.save(path, state_of(2))
    assert torch.equal(state["model"]["w"], state_of(1)["model"]["w"])


def test_a_changed_byte_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """Between the entries of the file there are bytes that mean nothing."""
    path = tmp_path / "last.pt"
    checkpoint.save(path, state_of(1, rows=2))
    whole = path.read_bytes()
    found = 0
    for place in range(0, len(whole), 17):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            state = checkpoint.load(path, "a_test")
        except InputError:
            found += 1
            continue
        assert torch.equal(state["model"]["w"], state_of(1, rows=2)["model"]["w"]), place
        assert state["progress"] == state_of(1)["progress"], place
    assert found > len(whole) / 17 / 2
