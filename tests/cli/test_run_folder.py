"""A run folder belongs to one process at a time, and a refused run changes nothing in it."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from conftest import run, write
from errors import InputError
from training.run_folder import LOCK_FILE, latest_run, lock_run_folder, make_run_folder

FLAGS = "--dataset digits --arch resnet8 --subset 0.2 --threads 1 --epochs 1"


@contextlib.contextmanager
def held_lock(folder: Path):
    """A process, whose number is given, holds the lock of a folder, and its child lives on."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        lock = lock_run_folder(folder)
        if os.fork() > 0:
            os.write(writer, b"locked")
        time.sleep(600)
        lock.close()
        os._exit(0)
    assert os.read(reader, 6) == b"locked"
    try:
        yield process
    finally:
        os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)


def contents(folder):
    """Name, bytes and time of change of every file but the lock."""
    files = [path for path in folder.iterdir() if path.name != LOCK_FILE]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_default_name_that_is_taken_gets_a_number(here, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    made = [make_run_folder(None, "a").name for _ in range(3)]
    assert made == ["a-20260101-000000", "a-20260101-000000-2", "a-20260101-000000-3"]
    assert make_run_folder("mine", "a") == make_run_folder("mine", "a")  # it may be there
    (here / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        make_run_folder("file/run", "a")


def test_the_lock_ends_with_the_process_though_its_children_live_on(tmp_path):
    with held_lock(tmp_path) as process:
        with pytest.raises(InputError, match="another process is writing to this folder"):
            lock_run_folder(tmp_path)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        lock_run_folder(tmp_path).close()


def test_a_resume_that_is_refused_changes_no_file(here):
    """Another process has the folder, or the checkpoint does not fit the flags."""
    folder = here / "run"
    run("images", FLAGS, "--out run")
    before, resume = contents(folder), "--resume run --epochs 3"
    with held_lock(folder):
        console = run("images", resume, code=2)
    assert "another process is writing" in console.splitlines()[-1]
    console = run("images", resume, "--arch resnet20 --lr 7", code=2)
    assert "does not fit" in console.splitlines()[-1]
    assert contents(folder) == before


def test_the_newest_run_is_that_of_the_newest_checkpoint(here):
    """Whatever the folders are called, and wherever below runs/ they are."""
    ours, trial, texts = "runs/group/a-seed0", "runs/tuning/trials/0003", "runs/texts"
    for number, name in enumerate(("runs/final", ours, texts, trial)):  # from the oldest
        script = "transformer_test" if name == texts else "resnet50_test"
        folder = write(here / name, config__json=json.dumps({"script": script}))
        file = folder / ("last-1.pt" if name == ours else "last.pt")  # any is enough
        file.touch()
        os.utime(file, (number, number))
    assert latest_run("transformer_test") == Path(texts)
    assert latest_run("resnet50_test") == Path(ours), "not the trial of a sweep"
    os.utime(here / "runs/final/last.pt", (9, 9))
    assert latest_run("resnet50_test") == Path("runs/final")
