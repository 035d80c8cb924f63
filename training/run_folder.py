"""The folder of a run: its name, how it is found again, and who may write to it.

    folder = make_run_folder(None, "resnet50_test")     # runs/resnet50_test-20261122-074114
    lock = lock_run_folder(folder)         # another process that tries this ends with exit code 2

The system releases the lock when the process ends, however that ends.
"""

import contextlib
import fcntl
import itertools
import json
import os
import time
from pathlib import Path
from typing import IO, Any

from distributed.agreement import on_main
from distributed.worker import launcher_id
from distributed.world import World
from errors import InputError, in_one_line, writing
from training.checkpoint import Checkpoint, latest_files, read_progress

LOCK_FILE = ".lock"  # of a run folder


def latest_run(script: str, launcher: str | None = None) -> Path | None:
    """The run folder below runs/ with the newest checkpoint of a script, whatever its name is.

    The trials of sweeps do not count, which only their sweep resumes.

    Args:
        script: its name without .py.
        launcher: consider only the folders that the job of this launcher wrote to.
    """
    newest: dict[Path, int] = {}
    for folder in {path.parent for path in Path("runs").rglob("last*.pt")}:
        is_of_script = read_config(folder).get("script") == script
        is_of_job = launcher is None or is_run_of(launcher, folder)
        is_trial = folder.parent.name == "trials" and folder.name.isdigit()
        if is_of_script and is_of_job and not is_trial and (files := latest_files(folder)):
            newest[folder] = files[0].stat().st_mtime_ns
    return max(newest, key=lambda folder: (newest[folder], folder), default=None)


def is_run_of(launcher: str, folder: Path) -> bool:
    """Whether the job of this `launcher_id` was the last to write to a folder, if it is there."""
    return bool(launcher) and launcher in read_config(folder).get("launchers", [])


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run folder; empty where it is missing, cut or of another kind."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def make_run_folder(out: str | None, script: str) -> Path:
    """Make the folder of a run: `out`, which may be there already, or runs/<script>-<time>.

    A number is added to the latter where another run, as one of the same second, has taken it.

    Raises:
        InputError: the folder cannot be made.
    """
    folder = Path(out or f"runs/{script}-{time.strftime('%Y%m%d-%H%M%S')}")
    free = folder
    with in_one_line(f"{folder}: cannot be made", "; choose another folder", (OSError,)):
        if out:
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for number in itertools.count(2):
            with contextlib.suppress(FileExistsError):
                free.mkdir(parents=True)
                break
            free = folder.with_name(f"{folder.name}-{number}")
    return free


def lock_run_folder(folder: Path) -> IO[str]:
    """Reserve a run folder for this process until the returned file is closed.

    It is a POSIX record lock, which belongs to the process: its data loaders do not inherit it, so
    that none of them holds it after the process was killed. It works over NFS. Where the file
    system or the system has no such locks, nothing is reserved.

    Raises:
        InputError: another process has the folder, or it cannot be written to.
    """
    path = folder / LOCK_FILE
    with writing(str(folder), "folder"):
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the run
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise InputError(
            f"{folder}: another process is writing to this folder; wait until it has ended, "
            "stop it, or choose another folder"
        ) from None
    except OSError:  # the file system has no locks
        pass
    return file


def is_locked(folder: Path, lock: IO[str]) -> bool:
    """Whether `lock` is still a file of the folder, which may have been deleted or unmounted."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK_FILE))
    except OSError:
        return False


def open_run_folder(
    out: str | None, script: str, world: World, checkpoint: Checkpoint | None
) -> tuple[Path, IO[str] | None]:
    """Make the run folder and reserve it for this run; collective.

    Args:
        out: its path, or None for a default name.
        checkpoint: what the run goes on from, or None.
    Returns:
        The folder; and on rank 0 the lock, which holds until it is closed.
    Raises:
        InputError: the folder cannot be made, belongs to another run, or is in use.
    """
    locks: list[IO[str]] = []  # of rank 0

    def reserve() -> Path:
        folder = make_run_folder(out, script)
        locks.append(lock_run_folder(folder))
        check_overwritten(out, checkpoint, again=True)  # another run may have ended in the meantime
        return folder

    folder = on_main(world, reserve)
    return folder, locks[0] if locks else None


def check_overwritten(
    out: str | None, checkpoint: Checkpoint | None, *, again: bool = False
) -> None:
    """Check that a run does not overwrite what it is not a part of.

    A job whose processes torchrun starts anew goes on with what it wrote before.

    Args:
        out, checkpoint: as of `open_run_folder`.
        again: some time after it was read, so that its file may have been written anew.
    Raises:
        InputError: the run folder holds another run, or the same run at a later step.
    """
    if out is None:
        return
    folder, source = Path(out), checkpoint.file if checkpoint else Path()
    if checkpoint is None or source.resolve().parent != folder.resolve():
        is_own = is_run_of(launcher_id(), folder)
        steps = ((read_progress(path) or {"step": None})["step"] for path in latest_files(folder))
        holds_run = (folder / "metrics.jsonl").exists()
        if (folder / "best.pt").exists():  # unless a kill left a copy of the source's
            theirs = read_progress(source.parent / "best.pt") if checkpoint else None
            holds_run |= theirs is None or theirs != read_progress(folder / "best.pt")
        if not is_own and (holds_run or any(step != 0 for step in steps)):
            raise InputError(f"{folder} already holds a run: choose another folder, or resume it")
        if (folder / "config.json").exists() and "script" not in read_config(folder):
            raise InputError(f"{folder} holds a config.json of no run: choose another folder")
        return
    for path in latest_files(folder):
        if path.samefile(source) and not again:
            return
        later = read_progress(path)
        if later is not None and later["step"] > checkpoint.progress["step"]:
            raise InputError(
                f"the run of {source}, of step {checkpoint.progress['step']}, has gone on to step "
                f"{later['step']} ({path.name}), which training on from there would overwrite; "
                "choose another folder"
            )
        if path.samefile(source):
            return
