"""Run a function in several gloo processes; and run the scripts as a user does.

Processes are forked from a server that has imported torch and the scripts, which takes 0.3 s where
a start takes 4 s. Where the start itself matters, as that of torchrun: `start(..., cold=True)`.
"""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from backends import device
from training import checkpoint

ROOT = Path(__file__).parent.parent
TIMING = {  # fields of metrics.jsonl in which two equal runs may differ
    *("seconds", "train_seconds", "compile_seconds", "eval_seconds", "peak_memory_bytes"),
    *("samples_per_second", "worker_samples_per_second"),
}
PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("sklearn.datasets", "torchvision", "resnet50_test", "transformer_test", "ranks"),
]
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(PRELOADED)
# A start asks all processes for their exit codes; the second of two threads that ask reads 255.
ASKING = threading.Lock()


@contextlib.contextmanager
def rank_environments(size: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank of a group, whose store lives as long as the block."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    yield [{**shared, "RANK": str(rank)} for rank in range(size)]  # the rest is found out
    del store


def run_ranks(body: Callable[..., None], size: int, *arguments: Any, device: str = "cpu") -> None:
    """Call `body(world, *arguments)` in `size` processes of one gloo group.

    An exception in any of them is raised here. All processes share the device, such as 'cuda:0'.
    """
    with rank_environments(size) as environments:
        mp.start_processes(
            _one_rank,
            args=(environments, device, body, arguments),
            nprocs=size,
            start_method="forkserver",
        )


def _one_rank(rank: int, environments, device: str, body, arguments: tuple[Any, ...]) -> None:
    os.environ |= environments[rank]
    torch.set_num_threads(1)
    from distributed.world import init_world

    with init_world(device) as world:
        body(world, *arguments)


class WarmJob:
    """A script in forked processes, as torchrun starts it, with the methods of `Popen` in use."""

    def __init__(
        self, words: list[str], folder: Path, environment, *, size=0, console=None, first=None
    ) -> None:
        self.returncode: int | None = None
        self._group = contextlib.ExitStack()
        ranks: list[dict[str, str]] = [{}]
        if size:
            ranks = self._group.enter_context(rank_environments(size))
        self.processes = [
            FORKSERVER.Process(
                target=_run_script,
                args=(words, folder, {**environment, **own}),
                kwargs={"console": console or folder / "console.log", "first": first},
            )
            for own in ranks
        ]
        for process in self.processes:
            with ASKING:
                process.start()
        self.pid = self.processes[0].pid

    def poll(self) -> int | None:
        """The exit code, or None while a process runs; a failed one ends the others."""
        codes = self._exit_codes()
        if any(codes) and None in codes:
            self.send_signal(signal.SIGTERM)
        if self.returncode is None and None not in codes:
            self.returncode = next(filter(None, codes), 0)
            self._group.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when all processes have ended."""
        end = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a warm job", timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def _exit_codes(self) -> list[int | None]:
        with ASKING:
            return [process.exitcode for process in self.processes]

    def send_signal(self, number: int) -> None:
        for process, code in zip(self.processes, self._exit_codes()):
            if code is None:
                with contextlib.suppress(ProcessLookupError):  # ended, its exit code not yet read
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to each process and to all that it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _run_script(words: list[str], folder: Path, environment, *, console: Path, first) -> None:
    """Become the process of a script: its command line, folder, environment and console."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(console, "a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(stream, "wb", 0), write_through=True, errors=errors)
        for stream, errors in ((1, "strict"), (2, "backslashreplace"))
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device.num_cores = lambda: 1  # as in conftest
    sys.argv = words
    if first is not None:
        first()
    runpy.run_path(words[0], run_name="__main__")


def start(command: list[str], folder: Path, *, cold=False, first=None, **environment: str) -> Any:
    """Start a command, as of `script` or `torchrun`, in `folder`, output to folder/console.log.

    `cold` starts an interpreter, and torchrun, also for a script; so is a job with restarts.
    `first` is called in each process of a warm job before the script, to change it.
    """
    cold = cold or "MAX_RESTARTS" in environment
    job = f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "PYTHON": sys.executable, "TEST_JOB": job, **environment}
    folder.mkdir(parents=True, exist_ok=True)
    words = command[2 if command[0] == "bash" else 1 :]  # without run_distributed.sh
    if not cold and words[0].endswith(".py"):
        size = int(env["NGPU"]) if command[0] == "bash" else 0
        return WarmJob([str(ROOT / words[0]), *words[1:]], folder, env, size=size, first=first)
    with open(folder / "console.log", "a") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, text=True)
    process.job = job
    return process


def script(name: str, *flags: object) -> list[str]:
    """Command line of an entry script in one process."""
    return [sys.executable, str(ROOT / name), *map(str, flags)]


def torchrun(name: str, *flags: object) -> list[str]:
    """Command line of an entry script through run_distributed.sh."""
    return ["bash", str(ROOT / "run_distributed.sh"), name, *map(str, flags)]


def finish(process: Any, folder: Path, expected: int = 0, seconds: float = 240) -> str:
    """Wait for the exit code `expected`; returns the console."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    console = (folder / "console.log").read_text()
    assert code == expected, f"exit code {code}, expected {expected}:\n{console[-3000:]}"
    return console


def run(words: str, folder: Path, size: int = 1, *, expected: int = 0, **more: Any) -> str:
    """Run an entry script on so many ranks to its end; returns the console."""
    command = (torchrun if size > 1 else script)(*words.split())
    return finish(start(command, folder, NGPU=str(size), **more), folder, expected)


def kill(process: Any) -> None:
    """Send SIGKILL to a command and to all that it started, also outside its process group."""
    if isinstance(process, WarmJob):
        process.kill()
    else:
        for number, _ in relatives(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    process.wait()


def relatives(process: Any) -> list[tuple[int, bytes]]:
    """(process number, environment) of all processes that carry this command's mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes()
            mark = f"TEST_JOB={process.job}"
            if mark.encode() in environment.split(b"\0"):
                found.append((int(folder.name), environment))
    return found


def wait_for(condition: Callable[[], bool], process: Any, seconds: float = 240) -> None:
    """Until `condition` holds or the process has ended."""
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the fields that time decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in rows]


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """Model tensors of last.pt, or of best.pt."""
    return checkpoint.load(folder / f"{name}.pt").state["model"]


def same_run(one: Path, other: Path, files: Sequence[str] = ("last", "best")) -> None:
    """Assert equal metrics, and bit-identical weights in last.pt and best.pt."""
    assert metrics(one) == metrics(other)
    for file in files:
        torch.testing.assert_close(weights(one, file), weights(other, file), rtol=0, atol=0)
