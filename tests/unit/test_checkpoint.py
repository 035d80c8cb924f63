"""checkpoint.py: whole or not there, and nothing but plain data."""

import errno
import os
import re
import stat
from pathlib import Path
from unittest import mock

import pytest
import torch

from conftest import each_of
from errors import InputError
from training import checkpoint


def state_of(seed: int) -> dict:
    tensor = torch.randn(100, 100, generator=torch.Generator().manual_seed(seed))
    return {
        "script": "a_test",
        "model": {"w": tensor},
        "flags": {"dataset": "digits", "lr": 0.1, "betas": [0.9, 0.99], "out": None},
        "progress": {"epoch": 1, "step": 10, "best": {"accuracy": 0.5, "epoch": 1}},
        "seed": seed,
    }


def save(folder: Path, *seeds: int, keep: int = 1) -> None:
    for seed in seeds:
        checkpoint.save_last(folder, state_of(seed), keep=keep)


def kept(folder: Path) -> dict[str, int]:
    """The seeds of what the files of a folder hold."""
    return {path.name: checkpoint.load(path).metadata["seed"] for path in folder.iterdir()}


def test_a_file_does_not_repeat_a_flat_buffer_for_each_part_of_it():
    part = checkpoint.to_cpu([torch.zeros(9)[:2]])
    assert part[0].untyped_storage().nbytes() == 8


def test_another_version_is_refused_in_one_line(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(InputError, match="not a checkpoint of this version"):
        checkpoint.load(tmp_path / "tensor.pt")
    torch.save({"format": "faster-training-3", **state_of(1)}, tmp_path / "last.pt")
    with pytest.raises(InputError, match=r"not a checkpoint of this version .*faster-training-3"):
        checkpoint.load(tmp_path)


@each_of(("broken", "before"), [("os.fsync", 0), ("os.fsync", 1), ("torch.save", 1)])
def test_a_save_that_fails_keeps_the_previous_file_and_leaves_nothing(broken, before, tmp_path):
    folder = tmp_path / f"{broken}-{before}"
    folder.mkdir()
    save(folder, *range(before))
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(broken, mock.Mock(side_effect=full))
        with pytest.raises(OSError, match=r"last\.pt could not be written .*No space left"):
            save(folder, 2)
    assert kept(folder) == ({"last.pt": 0} if before else {})


def test_a_new_file_is_on_the_disk_before_it_takes_the_name(tmp_path):
    events: list[tuple[str, int]] = []
    sync, rename = os.fsync, Path.replace

    def note_sync(number: int) -> None:
        status = os.fstat(number)
        is_folder = stat.S_ISDIR(status.st_mode)
        events.append(("sync folder", 0) if is_folder else ("sync", status.st_size))
        sync(number)

    def note_rename(path: Path, target: Path) -> None:
        events.append(("rename", path.stat().st_size))
        rename(path, target)

    with mock.patch.object(os, "fsync", note_sync), mock.patch.object(Path, "replace", note_rename):
        save(tmp_path, 1)
    size = (tmp_path / "last.pt").stat().st_size
    assert events == [("sync", size), ("rename", size), ("sync folder", 0)]


@each_of("link", [os.link, mock.Mock(side_effect=OSError)])  # where there are no links
def test_the_latest_checkpoints_keep_numbered_names(link, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", link)
    (own := tmp_path / "last-50.pt").write_bytes(b"of the user")
    save(tmp_path, 1, 2, 3, 4, 5, keep=3)
    assert own.read_bytes() == b"of the user"
    own.unlink()
    assert kept(tmp_path) == {"last.pt": 5, "last-1.pt": 4, "last-2.pt": 3}
    save(tmp_path, 6)
    assert kept(tmp_path) == {"last.pt": 6}


def test_load_makes_no_object_and_so_runs_no_code_of_the_file(tmp_path):
    torch.save({"format": checkpoint.FORMAT, **state_of(1), "x": Path("x")}, tmp_path / "last.pt")
    with pytest.raises(InputError, match=r"last\.pt"):
        checkpoint.load(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@each_of(
    ("damage", "problem"),
    [
        (flip, r"last\.pt is damaged \(archive/data/0 in it does not match its checksum"),
        (lambda path: os.truncate(path, 5000), r"last\.pt is damaged \(truncated or not"),
        (Path.unlink, r"last\.pt is missing"),
    ],
)
def test_a_folder_means_the_newest_checkpoint_that_is_not_damaged(damage, problem, tmp_path):
    for path in tmp_path.iterdir():
        path.unlink()
    save(tmp_path, 1, 2, 3, keep=3)
    assert not checkpoint.load(tmp_path).warning
    damage(tmp_path / "last.pt")
    found = checkpoint.load(tmp_path)
    assert found.metadata["seed"] == 2
    assert re.search(problem, found.warning), found.warning
    flip(tmp_path / "last-1.pt")
    assert checkpoint.load(tmp_path).metadata["seed"] == 1
    flip(tmp_path / "last-2.pt")
    with pytest.raises(InputError, match=r"last-1\.pt is damaged .*last-2\.pt is damaged .*best"):
        checkpoint.load(tmp_path)


def test_a_file_without_permission_is_not_taken_for_damaged(tmp_path):
    save(tmp_path, 1, 2, keep=2)
    error = PermissionError(13, "Permission denied")
    refused = pytest.raises(InputError, match=r"cannot be read.*Permission denied")
    with mock.patch("zipfile.ZipFile", side_effect=error), refused:
        checkpoint.load(tmp_path)


def test_a_loaded_state_stays_what_it_was_when_another_file_takes_the_name(tmp_path):
    """It is mapped into memory, so that a rank reads its own part alone."""
    save(tmp_path, 1)
    found = checkpoint.load(tmp_path)
    assert str(tmp_path / "last.pt") in Path("/proc/self/maps").read_text(encoding="utf-8")
    save(tmp_path, 2)
    assert torch.equal(found.weights["w"], state_of(1)["model"]["w"])
