"""What all benchmarks share: interleaved blocks of two sides, a table of ratios, bars, a JSON file.

    row = bench.interleave("resnet50 training", ours, plain, block=5, blocks=9, limit=90)
    print(bench.table([row], "plain"))
    sys.exit(bench.verdict([bench.Bar("resnet50 training", row.ratio, 2.7)]))

With --quick the number of rounds follows the speed of the machine: see `Budget` and `take_turns`.
A side is an endless iterator, each `next` of which does one step and returns its number of samples
(or bytes, or calls); or a `Remote`, which runs such an iterator in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from backends.device import peak_memory
from cli.flag_parser import path_text
from errors import InputError
from training import run_log
from training.machine import commit_or_none, device_name

Name = TypeVar("Name")  # of a side
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PR_SET_PDEATHSIG = 1  # of prctl in linux/prctl.h
MIN_BLOCKS = 3  # blocks of each side that a median needs, however slow the machine is
# Seconds of --quick in which measurements take turns: the rest of five minutes is for imports, the
# last round, and what comes after it.
QUICK_SECONDS = 240.0


@dataclass(frozen=True)
class Row:
    """A measured pair: samples/s of each block of ours and of the peer.

    Block i of one side ran directly before or after block i of the other.
    """

    name: str
    ours: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, block by block, so that other load on the machine met both."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer)]

    @property
    def ratio(self) -> float:
        """The median ratio of all blocks."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class Bar:
    """A target that a measured number must reach; with `at_most`, one that it must not exceed."""

    name: str
    measured: float
    target: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the target is met, before any rounding."""
        return self.measured <= self.target if self.at_most else self.measured >= self.target


# -------------------------------------------------------------------- measuring


class Side:
    """One side of a pair. Its worker processes are stopped while the other side is measured.

    A DataLoader's workers fill their queue (2 batches each) while nobody asks for batches. Left
    running, the peer's would take the processor from our block, and the peer's next block would
    start with batches made in our time. So the workers get SIGSTOP when a block ends and SIGCONT
    after the clock of their next block has started: what was ready at the end of one block is ready
    at the start of the next, neither side computes in the other's time, and no queue has to be
    drained.
    """

    def __init__(self, steps: Iterator[int]) -> None:
        self.steps = steps
        self.workers: set[BaseProcess] = set()

    def rate(self, seconds: float) -> float:
        """Run steps for `seconds`, at least one step, and return samples/s."""
        others = set(multiprocessing.active_children()) - self.workers
        wait_for_device()
        start = time.perf_counter()
        self.send("SIGCONT")
        samples = next(self.steps)
        while time.perf_counter() - start < seconds:
            samples += next(self.steps)
        wait_for_device()
        taken = time.perf_counter() - start
        self.workers = set(multiprocessing.active_children()) - others
        self.send("SIGSTOP")
        return samples / taken

    def close(self) -> None:
        """Let the workers run again: a stopped process cannot be ended."""
        self.send("SIGCONT")

    def send(self, name: str) -> None:
        """Send a signal to every worker that is alive, if the system has it (Windows has not)."""
        for worker in self.workers:
            if hasattr(signal, name) and worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, getattr(signal, name))


class Remote:
    """A side in a process of its own, with a fresh interpreter's allocator and settings.

    `make(*arguments)` is called there and returns the iterator; both must be picklable. Between its
    turns the process is stopped, as its workers are: threads of OpenMP may wait actively.
    """

    def __init__(self, make: Callable[..., Iterator[int]], *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, make, arguments))
        self.process.start()
        there.close()

    def rate(self, seconds: float) -> float:
        """Run `Side.rate` in the process.

        Raises:
            InputError: the process has ended.
        """
        return self._ask(seconds)

    def peak_memory(self) -> int:
        """Return the peak memory of the process in bytes.

        Raises:
            InputError: the process has ended.
        """
        return self._ask("memory")

    def close(self) -> None:
        """End the process of this side."""
        self._send("SIGCONT")
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join()

    def _ask(self, request: Any) -> Any:
        """Let the process answer a request, and stop it until the next one."""
        self._send("SIGCONT")
        try:
            self.pipe.send(request)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise InputError("the process of a side has ended; its message is above") from None
        self._send("SIGSTOP")
        return answer

    def _send(self, name: str) -> None:
        """Send a signal to the process if it is alive and the system has it (Windows has not)."""
        if hasattr(signal, name) and self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, getattr(signal, name))


def serve(pipe: Any, make: Callable[..., Iterator[int]], arguments: tuple[Any, ...]) -> None:
    """Serve the requests of a `Remote`, in its process."""
    continue_if_parent_ends()
    side = Side(make(*arguments))
    with contextlib.suppress(EOFError):
        while (request := pipe.recv()) is not None:
            pipe.send(peak_memory(DEVICE) if request == "memory" else side.rate(request))
    side.close()


def continue_if_parent_ends() -> None:
    """Let this process be sent SIGCONT when its parent ends, so that it does not stay stopped.

    It then finds its pipe closed and ends. This needs Linux; elsewhere nothing happens.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleave(
    name: str,
    ours: Iterator[int],
    peer: Iterator[int] | Remote,
    block: float,
    blocks: int,
    limit: float,
) -> Row:
    """Measure two sides in turn: one untimed block each, then timed ones, in alternating order.

    Args:
        name: name of the row.
        ours: our side.
        peer: the other side.
        block: seconds of a block, and so the same effort on a slow machine, a busy one and a GPU.
        blocks: number of blocks of each side.
        limit: seconds after which three blocks are enough (a step can take longer than a block).
    """
    end = time.perf_counter() + limit
    sides = Side(ours), peer if isinstance(peer, Remote) else Side(peer)
    rates: tuple[list[float], list[float]] = ([], [])
    try:
        for side in sides:
            side.rate(block)
        for turn in range(blocks):
            for number in (0, 1) if turn % 2 == 0 else (1, 0):
                rates[number].append(sides[number].rate(block))
            if turn + 1 >= MIN_BLOCKS and time.perf_counter() > end:
                break
    finally:
        for side in sides:
            side.close()
    return Row(name, *rates)


class Budget:
    """The time of a benchmark, in equal shares for its measurements: limited with --quick.

    What a measurement leaves of its share goes to those after it.

    Args:
        quick: whether there is a limit, of `QUICK_SECONDS`.
        measurements: number of them.
    """

    def __init__(self, quick: bool, measurements: int) -> None:
        self.end = time.perf_counter() + (QUICK_SECONDS if quick else math.inf)
        self.left = measurements

    def next_deadline(self) -> float:
        """Return the value of time.perf_counter() at which the next measurement's share ends.

        To be called before the measurement's preparations, which belong to its share.
        """
        now = time.perf_counter()
        share = max(0.0, self.end - now) / self.left
        self.left -= 1
        return now + share


def take_turns(
    sides: Mapping[Name, Callable[[], float]],
    rounds: int,
    slow: Collection[Name] = (),
    *,
    deadline: float = math.inf,
) -> dict[Name, list[float]]:
    """Call each side in each round and return its values, one per round.

    Args:
        sides: by name; a different one comes first in each round.
        rounds: largest number of rounds.
        slow: names of sides that take part in the first few rounds only.
        deadline: value of time.perf_counter(); after `MIN_BLOCKS` rounds, none starts that would
            pass it if it took as long as the one before.
    """
    values: dict[Name, list[float]] = {name: [] for name in sides}
    names = list(sides)
    now = time.perf_counter()
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if turn < MIN_BLOCKS or name not in slow:
                values[name].append(sides[name]())
        before, now = now, time.perf_counter()
        if turn + 1 >= MIN_BLOCKS and now + (now - before) > deadline:
            break
    return values


def take_remote_turns(
    remotes: Mapping[Name, Remote], rounds: int, seconds: float, *, deadline: float = math.inf
) -> dict[Name, list[float]]:
    """Let each process run for `seconds`, untimed and then once a round; return its samples/s.

    Args:
        remotes: by name.
        rounds, deadline: as of `take_turns`.
        seconds: of a turn.
    Raises:
        InputError: a process has ended.
    """
    for remote in remotes.values():
        remote.rate(seconds)
    turns = {name: functools.partial(remote.rate, seconds) for name, remote in remotes.items()}
    return take_turns(turns, rounds, deadline=deadline)


# -------------------------------------------------------------------- showing


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: at most five minutes on two cores"
    )
    parser.add_argument("--json", type=path_text, metavar="FILE", help="write everything measured")
    return parser


def machine(device: torch.device, packages: Sequence[str]) -> str:
    """Describe versions of the packages, the processor, its speed and load by other programs."""
    load = ""
    if sys.platform != "win32":
        load = f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{versions}; {device_name(device, with_speed=True)}{load}"


def table(rows: Sequence[Row], peer: str, unit: str = "samples/s") -> str:
    """Write a line for each pair: median rates, ratios (median, smallest, largest), rounds."""
    rates = f"{'ours ' + unit:>16} {peer + ' ' + unit:>16}"
    lines = [f"{'pair':<24} {rates} {'ratio':>8} {'spread':>16} {'rounds':>7}"]
    for row in rows:
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        ours, other = statistics.median(row.ours), statistics.median(row.peer)
        rates = f"{ours:>16.1f} {other:>16.1f}"
        ratios = f"{row.ratio:>8.2f} {spread:>16} {len(row.ratios):>7}"
        lines.append(f"{row.name:<24} {rates} {ratios}")
    return "\n".join(lines)


def verdict(bars: Sequence[Bar]) -> int:
    """Print a line for each bar; return the exit code: 1 if a bar is short, else 0."""
    for bar in bars:
        name, result = bar.name.replace(" ", "_"), "holds" if bar.holds else "short"
        print(f"BAR {name} measured={bar.measured:.3f} wanted={bar.target:.3f} {result}")
    return int(not all(bar.holds for bar in bars))


def write_json(path: str | None, rows: Sequence[Row], bars: Sequence[Bar], **facts: Any) -> None:
    """Write everything measured to the file of --json, if it was given."""
    if path is None:
        return
    everything = {
        **facts,
        "commit": commit_or_none(),
        "rows": [{**asdict(row), "ratios": row.ratios, "ratio": row.ratio} for row in rows],
        "bars": [
            {
                "name": bar.name,
                "measured": bar.measured,
                "wanted": bar.target,  # named as in the printed line
                "at_most": bar.at_most,
                "holds": bar.holds,
            }
            for bar in bars
        ],
    }
    run_log.atomic_write_text(Path(path), json.dumps(everything, indent=2) + "\n")
