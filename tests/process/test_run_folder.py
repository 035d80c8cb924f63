"""A run folder belongs to one process at a time, and a refused run changes nothing in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ranks
from errors import InputError
from training.run_folder import LOCK_FILE, latest_run, lock_run_folder, make_run_folder

FLAGS = ["--dataset", "digits", "--arch", "resnet8", "--threads", "1", "--epochs", "2"]
HOLD = """
import pathlib, time
from training.run_folder import lock_run_folder
lock = lock_run_folder(pathlib.Path({folder!r}))
if {fork}:
    import os
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("locked", flush=True)
time.sleep(60)
"""


def hold_lock(folder, fork=False) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(folder=str(folder), fork=fork)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ranks.ROOT)},
    )
    assert process.stdout.readline() == "locked\n"
    return process


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process and what it has started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def contents(folder):
    """Name, bytes and time of change of every file but the lock."""
    files = [path for path in folder.iterdir() if path.name != LOCK_FILE]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_default_name_that_is_taken_gets_a_number(tmp_path):
    name = tmp_path / "runs" / "a-20260101-000000"
    made = [make_run_folder(name, is_default=True).name for _ in range(3)]
    assert made == [name.name, f"{name.name}-2", f"{name.name}-3"]
    assert make_run_folder(name, is_default=False) == name  # the user may give one that is there


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    for is_default in (True, False):
        with pytest.raises(InputError, match="cannot be made"):
            make_run_folder(tmp_path / "file" / "run", is_default=is_default)


def test_the_error_names_the_process_that_holds_the_lock(tmp_path):
    process = hold_lock(tmp_path)
    try:
        with pytest.raises(InputError, match=rf"process {process.pid} on .* is writing to this"):
            lock_run_folder(tmp_path)
    finally:
        end_group(process)


def test_the_lock_ends_with_the_process_though_its_children_live_on(tmp_path):
    process = hold_lock(tmp_path, fork=True)
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        lock_run_folder(tmp_path).close()
    finally:
        end_group(process)


def test_a_run_in_use_is_neither_resumed_nor_replaced(tmp_path):
    run = tmp_path / "run"
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *FLAGS, "--out", run), tmp_path), tmp_path
    )
    process, before = hold_lock(run), contents(run)
    try:
        resume = ranks.script("resnet50_test.py", "--resume", run, "--epochs", "3")
        console = ranks.finish(ranks.start(resume, tmp_path), tmp_path, expected=2)
    finally:
        end_group(process)
    assert f"process {process.pid}" in console.splitlines()[-1]
    assert contents(run) == before


def test_a_resume_that_does_not_fit_changes_no_file(tmp_path):
    run = tmp_path / "run"
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *FLAGS, "--out", run), tmp_path), tmp_path
    )
    before = contents(run)
    resume = ranks.script(
        "resnet50_test.py", "--resume", run, "--arch", "resnet20", "--lr", "7", "--epochs", "3"
    )
    console = ranks.finish(ranks.start(resume, tmp_path), tmp_path, expected=2)
    assert "does not fit" in console.splitlines()[-1]
    assert contents(run) == before


def test_the_newest_run_is_that_of_the_newest_checkpoint(here):
    """Whatever the folders are called, and wherever below runs/ they are."""
    made = [
        ("runs/resnet50_test-20260101-000000", {"script": "resnet50_test"}),
        ("runs/final", {"script": "resnet50_test"}),
        ("runs/group/a-seed0", {"command": ["resnet50_test.py", "--ngd"]}),  # of an older version
        ("runs/linked", {"script": "resnet50_test"}),
        ("runs/resnet50_test-20250101-000000", {}),
        ("runs/resnet50_test-of-texts", {"script": "transformer_test"}),
        ("runs/resnet50_test-29991231-235959", None),  # has no checkpoint
        ("runs/.hidden", {"script": "resnet50_test"}),
        ("runs/tuning/trials/0003", {"script": "resnet50_test"}),  # of a sweep
    ]
    (here / "elsewhere").mkdir()
    (here / "runs").mkdir()
    (here / "runs" / "linked").symlink_to(here / "elsewhere")
    for number, (name, config) in enumerate(made):
        folder = here / name
        folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
            (folder / "last.pt").touch()
            os.utime(folder / "last.pt", (number, number))
    assert latest_run("transformer_test") == Path(made[5][0])
    for newest in (7, 4, 3, 2, 1, 0):
        assert latest_run("resnet50_test") == Path(made[newest][0])
        os.utime(here / made[newest][0] / "last.pt", (-newest, -newest))
    os.utime(here / "runs/final/last.pt", (99, 99))
    assert latest_run("resnet50_test") == Path("runs/final")
