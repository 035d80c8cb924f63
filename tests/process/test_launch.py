"""Real processes, as a user starts them: kills, signals, restarts, and torchrun's exit codes.

Seventeen interpreters are started in all.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

import ranks
from conftest import each_of
from distributed.launch import launch

RUN = """resnet50_test.py --dataset digits --arch resnet8 --subset 0.2 --lr 0.05 --mixup cutmix
    --epochs 12 --save_every 4 --threads 1 --precision fp32 --seed 3 --out run"""


def command(size: int) -> list[str]:
    """The command of a run whose global batch is the same on any number of ranks."""
    return f"{RUN} --bs {32 // size}".split()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The uninterrupted run on so many ranks."""

    @functools.cache
    def finish(size: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        goes_on(folder, size, "--keep", "1")
        return folder / "run"

    return finish


def goes_on(folder: Path, size: int, *more: str) -> None:
    words = [*command(size), *more]
    started = ranks.torchrun(*words) if size > 1 else ranks.script(*words)
    ranks.finish(ranks.start(started, folder, NGPU=str(size)), folder)


def start_launcher(folder: Path, size: int) -> subprocess.Popen[str]:
    words = ["-m", "distributed.launch", "--standalone", f"--nproc_per_node={size}"]
    script, *flags = command(size)
    words = [sys.executable, *words, str(ranks.ROOT / script), *flags]
    return ranks.start(words, folder, PYTHONPATH=str(ranks.ROOT))


def wait_for_a_row(folder: Path, job: subprocess.Popen[str]) -> None:
    """Until an epoch is done, of which there are eleven more."""
    log = folder / "run" / "metrics.jsonl"
    ranks.wait_for(lambda: log.exists() and "\n" in log.read_text(), job)
    assert job.poll() is None, (folder / "console.log").read_text()


def kill_rank(job: subprocess.Popen[str], rank: int) -> None:
    mark = f"\0RANK={rank}\0".encode()
    [number] = [number for number, environment in ranks.relatives(job) if mark in environment]
    os.kill(number, signal.SIGKILL)


# -------------------------------------------------------------------- kills and signals


def test_a_killed_process_goes_on_bit_for_bit(whole, tmp_path):
    job = ranks.start(ranks.script(*command(1)), tmp_path, cold=True)
    wait_for_a_row(tmp_path, job)
    ranks.kill(job)
    goes_on(tmp_path, 1, "--resume")
    ranks.same_run(whole(1), tmp_path / "run")


def test_two_ranks_end_with_a_killed_launcher_and_go_on_bit_for_bit(whole, tmp_path):
    job = start_launcher(tmp_path, 2)
    wait_for_a_row(tmp_path, job)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    dead = subprocess.Popen(["sleep", "60"])
    ranks.wait_for(lambda: not ranks.relatives(job), dead, seconds=30)
    dead.kill()
    dead.wait()
    goes_on(tmp_path, 2, "--resume")
    ranks.same_run(whole(2), tmp_path / "run")


def test_four_ranks_end_with_one_of_them_and_go_on_bit_for_bit(whole, tmp_path):
    job = start_launcher(tmp_path, 4)
    wait_for_a_row(tmp_path, job)
    kill_rank(job, 2)
    console = ranks.finish(job, tmp_path, expected=128 + signal.SIGKILL)
    assert "error: process 2 was ended by signal 9" in console
    assert "Traceback" not in console
    assert not ranks.relatives(job)
    goes_on(tmp_path, 4, "--resume")
    ranks.same_run(whole(4), tmp_path / "run")


def test_a_job_restarts_by_itself_after_a_rank_dies(whole, tmp_path):
    """And whatever port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"NGPU": "2", "MAX_RESTARTS": "1", "MASTER_PORT": str(taken.getsockname()[1])}
        job = ranks.start(ranks.torchrun(*command(2)), tmp_path, **variables)
        wait_for_a_row(tmp_path, job)
        kill_rank(job, 1)
        console = ranks.finish(job, tmp_path)
    assert console.count("training samples") == 2, "the job was to start twice"
    ranks.same_run(whole(2), tmp_path / "run")


def test_a_signal_to_the_whole_job_spares_the_processes_that_decode_images(tmp_path):
    """systemd and Slurm send it to every process of a job, and a terminal its Ctrl-C."""
    for split, (number, name) in itertools.product(("train", "test"), enumerate(("cat", "dog"))):
        folder = tmp_path / "mine" / split / name
        folder.mkdir(parents=True)
        for i in range(30):
            Image.new("RGB", (64, 64), (8 * i, 90 * number, 9)).save(folder / f"{i}.png")
    flags = "--dataset folder --data_dir mine --resident no --arch resnet8 --bs 8 --out run"
    flags = f"{flags} --epochs 500 --threads 1 --workers 1".split()
    job = ranks.start(["setsid", *ranks.script("resnet50_test.py", *flags)], tmp_path)
    wait_for_a_row(tmp_path, job)
    os.killpg(job.pid, signal.SIGTERM)
    console = ranks.finish(job, tmp_path, expected=130)
    assert "last.pt is written" in console.splitlines()[-1]
    assert "Traceback" not in console
    assert not ranks.relatives(job)


# -------------------------------------------------------------------- torchrun


def exit_with(words: list[str], console: Path) -> None:
    """Become a launcher with these words."""
    with open(console, "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os._exit(launch(["--standalone", *words]))


@each_of(
    ("script", "code"),
    [
        ("exit 0", 0),
        ('[ "$RANK" = 0 ] && exec sleep 60; exit 3', 3),
        ('[ "$RANK" = 0 ] && exec sleep 60; kill -9 $$$$', 137),  # torchrun halves each $$
    ],
)
def test_the_launcher_returns_the_code_of_the_rank_that_failed_first(script, code, tmp_path):
    words = ["--nproc_per_node=2", "--no_python", "sh", "-c", script]
    process = ranks.FORKSERVER.Process(target=exit_with, args=(words, tmp_path / f"{code}.log"))
    process.start()
    process.join(60)
    assert process.exitcode == code
    lines = (tmp_path / f"{code}.log").read_text().splitlines()
    assert lines == (["error: process 1 was ended by signal 9"] if code == 137 else [])
