"""A process that has lost another one ends in time, with one line and exit code 1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import ranks
from distributed.world import lost_peer_reason

JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from distributed.agreement import local_main_first
from distributed.world import TimeLimits, init_world, new_group
from errors import InputError, exit_code

def main():
    with init_world("cpu", TimeLimits(start=6, step=2)) as world:
        group = new_group()  # as an optimizer makes it
        with local_main_first(world):
            time.sleep(0 if world.local_rank else 7)  # a download
        with world.waiting_at_most(6):
            time.sleep(0 if world.rank else 3)  # compilation, a save
        dist.all_reduce(torch.ones(3), group=group)
        world.first_step_done()
        with world.waiting_at_most(6):
            time.sleep(0 if world.rank else 3)  # compilation, a save
        print(f"rank {world.rank} is at work", flush=True)
        if world.rank == 1:
            end(sys.argv[1])
        dist.all_reduce(torch.ones(3), group=group)

def end(how):
    if how == "error":
        raise InputError("a broken image")
    if how == "bug":
        raise KeyError("a bug")
    if how != "not":
        os.kill(os.getpid(), getattr(signal, how))

sys.exit(exit_code(main))
"""


def write_job(folder: Path) -> dict[str, str]:
    """Write the job's script; returns the environment that it needs."""
    (folder / "job.py").write_text(JOB)
    return {**os.environ, "PYTHONPATH": str(ranks.ROOT)}


def start_ranks(folder: Path, how: str, *, numbers: Sequence[int]) -> list[subprocess.Popen]:
    """Start these ranks of a job of two, without a launcher that would end one after the other."""
    environment = write_job(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ours |= {"LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, "job.py", how],
            cwd=folder,
            env={**environment, **ours, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in numbers
    ]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("SIGSTOP", "no answer for 2 s"),
        pytest.param("SIGKILL", "", marks=pytest.mark.process),
        pytest.param("error", "", marks=pytest.mark.process),
        pytest.param("bug", "", marks=pytest.mark.process),
    ],
)
def test_a_rank_that_lost_another_one_ends_in_time_with_one_line(how, reason, tmp_path):
    first, second = start_ranks(tmp_path, how, numbers=(0, 1))
    assert first.stdout.readline() == "rank 0 is at work\n", first.stderr.read()
    begin = time.monotonic()
    try:
        _, stderr = first.communicate(timeout=60)
    finally:
        second.send_signal(signal.SIGKILL if how == "SIGSTOP" else 0)
        second.communicate()
    assert first.returncode == 1
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith(f"error: rank 0 has lost another process ({reason}")
    assert "--resume" in lines[0]
    assert time.monotonic() - begin < 15  # the limit, 5 s in which the other one can tell why
    if how == "error":
        assert second.returncode == 2


@pytest.mark.process
def test_a_long_download_or_save_is_no_lost_process(tmp_path):
    for process in start_ranks(tmp_path, "not", numbers=(0, 1)):
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, "")


@pytest.mark.process
def test_a_rank_whose_peer_never_starts_ends_in_time(tmp_path):
    (process,) = start_ranks(tmp_path, "not", numbers=(0,))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "(no answer for 6 s, see --timeout)" in stderr.splitlines()[-1], stderr
    assert "Traceback" not in stderr


@pytest.mark.process
@pytest.mark.parametrize(("how", "code"), [("error", 2), ("SIGKILL", 137), ("SIGSTOP", 1)])
def test_the_launcher_returns_the_code_of_the_rank_that_failed_first(how, code, tmp_path):
    environment = write_job(tmp_path)
    words = ["-m", "distributed.launch", "--standalone", "--nproc_per_node=2", "job.py", how]
    job = ranks.start([sys.executable, *words], tmp_path, PYTHONPATH=environment["PYTHONPATH"])
    console = ranks.finish(job, tmp_path, expected=code)
    (error,) = [line for line in console.splitlines() if "error" in line.lower()]
    assert "Traceback" not in console
    assert {"error": "broken image", "SIGKILL": "by signal 9", "SIGSTOP": "no answer"}[how] in error


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4", "Connection"),
        ("[gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", "no answer for 2 s"),
        ("NCCL error: remote process exited or there was a network error", "NCCL error"),
        ("The size of tensor a (3) must match the size of tensor b (4)", ""),
        ("op.preamble.length <= op.nbytes. 8 vs 4", ""),
    ],
)
def test_only_a_lost_connection_is_told_as_one(message, reason):
    assert lost_peer_reason(RuntimeError(message), 2.0).startswith(reason)
    assert bool(lost_peer_reason(RuntimeError(message), 2.0)) == bool(reason)
