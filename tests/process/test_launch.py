"""The launcher: which failures it repeats, on one node and on two, and how it ends its workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks

JOB = """
import os, signal, sys, time
rank, code, seconds = os.environ["RANK"], int(sys.argv[1]), float(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
start, shutdown = "TORCHELASTIC_RESTART_COUNT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
lines = f"rank {rank}, start {os.environ[start]}\\n{os.environ[shutdown]} s to end\\n"
os.write(1, lines.encode())  # at once: python -u would write each end of a line by itself
if rank == "1":
    time.sleep(1)
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
time.sleep(seconds)
"""


def launch(
    folder: Path, *arguments: object, code: int = 0, seconds: float = 2, **environment: str
) -> subprocess.Popen[str]:
    """Start a job whose rank 1 ends with this exit code and the others after so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.py").write_text(JOB)
    words = [sys.executable, "-m", "distributed.launch", *arguments, "job.py", code, seconds]
    environment = {"PYTHONPATH": str(ranks.ROOT), **environment}
    return ranks.start([str(word) for word in words], folder, **environment)


def starts(console: str) -> list[str]:
    return sorted(line for line in console.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize(
    ("code", "restarts"),
    [
        (2, 0),
        pytest.param(3, 0, marks=pytest.mark.process),
        pytest.param(130, 0, marks=pytest.mark.process),
        (1, 1),
        pytest.param(-signal.SIGKILL, 1, marks=pytest.mark.process),
    ],
)
def test_only_failures_that_may_pass_are_repeated(code, restarts, tmp_path):
    job = launch(tmp_path, "--standalone", "--nproc_per_node=2", "--max_restarts=1", code=code)
    console = ranks.finish(job, tmp_path, expected=128 - code if code < 0 else code)
    numbers = range(restarts + 1)
    assert starts(console) == sorted(f"rank {r}, start {n}" for r in (0, 1) for n in numbers)
    errors = [line for line in console.splitlines() if not line.startswith(("rank ", "110 s"))]
    assert errors == (["error: process 1 was ended by signal 9"] if code < 0 else [])


@pytest.mark.process
@pytest.mark.parametrize(("code", "restarts"), [(2, 0), (1, 1)])
def test_all_nodes_count_alike_and_end_together(code, restarts, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    rendezvous = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}"]
    folders = [tmp_path / name for name in "ab"]
    words = [*rendezvous, "--rdzv_id=any", "--nproc_per_node=1", "--max_restarts=1"]
    nodes = [launch(folder, *words, code=code, seconds=6) for folder in folders]
    consoles = [ranks.finish(node, folder, code) for node, folder in zip(nodes, folders)]
    for rank in (0, 1):
        console = next(each for each in consoles if f"rank {rank}, start 0" in each)
        assert starts(console) == [f"rank {rank}, start {n}" for n in range(restarts + 1)]
    assert sum(each.count("error:") for each in consoles) == 1
    assert "the job has ended on another node" in "".join(consoles)


def test_workers_have_as_long_to_end_as_the_variable_says(tmp_path):
    variable = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    job = launch(tmp_path, "--standalone", "--nproc_per_node=1", seconds=60, **variable)
    log = tmp_path / "console.log"
    ranks.wait_for(lambda: "to end" in log.read_text(), job)
    begin = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    console = ranks.finish(job, tmp_path, expected=130)
    assert 2 <= time.monotonic() - begin < 15, "torch's own limit is 30 s"
    assert console.splitlines() == ["rank 0, start 0", "2 s to end"]
