"""Run a function in several gloo processes; and run the scripts as a user does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from training.run_log import TIMING_FIELDS

ROOT = Path(__file__).parent.parent
TIMING = set(TIMING_FIELDS)


def run_ranks(body: Callable[..., None], size: int, *arguments: Any, device: str = "cpu") -> None:
    """Call `body(world, *arguments)` in `size` processes of one gloo group.

    An exception in any of them is raised here. All processes share the device, such as 'cuda:0'.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_one_rank, args=(size, port, device, body, arguments), nprocs=size)


def _one_rank(
    rank: int,
    size: int,
    port: int,
    device: str,
    body: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    from distributed.world import init_world

    with init_world(device) as world:
        body(world, *arguments)


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a command of the repository in `folder`, output to folder/console.log."""
    job = f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "PYTHON": sys.executable, "TEST_JOB": job, **environment}
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "console.log", "a") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, text=True)
    process.job = job  # type: ignore[attr-defined]
    return process


def script(name: str, *flags: object) -> list[str]:
    """Command line of an entry script in one process."""
    return [sys.executable, str(ROOT / name), *map(str, flags)]


def torchrun(name: str, *flags: object) -> list[str]:
    """Command line of an entry script through run_distributed.sh."""
    return ["bash", str(ROOT / "run_distributed.sh"), name, *map(str, flags)]


def finish(
    process: subprocess.Popen[str], folder: Path, expected: int = 0, seconds: float = 240
) -> str:
    """Wait for the exit code `expected`; returns the console."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    console = (folder / "console.log").read_text()
    assert code == expected, f"exit code {code}, expected {expected}:\n{console[-3000:]}"
    return console


def kill(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a command and to all that it started, also outside its process group."""
    for number, _ in relatives(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def kill_one_rank(process: subprocess.Popen[str]) -> None:
    """SIGKILL to rank 1 of a started torchrun job."""
    worker = next(
        number for number, environment in relatives(process) if b"\0RANK=1\0" in environment
    )
    os.kill(worker, signal.SIGKILL)


def relatives(process: subprocess.Popen[str]) -> list[tuple[int, bytes]]:
    """(process number, environment) of all processes that carry this command's mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes()
            mark = f"TEST_JOB={process.job}"  # type: ignore[attr-defined]
            if mark.encode() in environment.split(b"\0"):
                found.append((int(folder.name), environment))
    return found


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120
) -> None:
    """Until `condition` holds or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the fields that time decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Model tensors of last.pt."""
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def same_run(one: Path, other: Path) -> None:
    """Assert equal metrics and bit-identical weights."""
    assert metrics(one) == metrics(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
