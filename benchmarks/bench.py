"""What all benchmarks do alike: interleaved blocks of two sides, a table of ratios, bars, a JSON file.

    row = bench.interleave("resnet50 training", ours, plain, block=5, blocks=9, limit=90)
    print(bench.table([row], "plain"))
    sys.exit(bench.verdict([bench.Bar("resnet50 training", row.ratio, 2.7)]))

A side is an endless iterator: each `next` does one step and says how many samples (or bytes, or calls) it took; or a
`Remote`, which runs such an iterator in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from backends.device import peak_memory
from training import run_log
from training.machine import device_name

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LEAST_BLOCKS = 3  # blocks of each side that a median wants, however slow the machine is


@dataclass(frozen=True)
class Row:
    """A measured pair: the rate (samples/s) of each block of ours and of the peer; block i of both ran one after the other."""

    name: str
    ours: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, block by block: what else the machine did in that minute met both."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer)]

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class Bar:
    """A number that must be reached; or, with `at_most`, not be passed."""

    name: str
    measured: float
    wanted: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is, before any rounding."""
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


# -------------------------------------------------------------------- measuring


class Side:
    """One side of a pair. Its worker processes stand still while the other side is measured.

    A DataLoader's workers fill their queue (2 batches each) while nobody asks for batches. Left running, the peer's would
    take the processor from our block and hand the peer's next block batches made on our time. So the workers get SIGSTOP
    in the instant a block ends and SIGCONT after the clock of their next block has started: what was ready at the end of
    one block is ready at the start of the next, neither side computes on the other's time, and nothing has to be drained.
    """

    def __init__(self, steps: Iterator[int]) -> None:
        self.steps = steps
        self.workers: set[BaseProcess] = set()

    def rate(self, seconds: float) -> float:
        """Samples/s of the steps of the next `seconds`, at least one."""
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
        """Let the workers run on: a process that stands still cannot be ended."""
        self.send("SIGCONT")

    def send(self, name: str) -> None:
        """Send a signal to every worker that is left; where the system has no such signal (Windows) they run on."""
        for worker in self.workers:
            if hasattr(signal, name) and worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, getattr(signal, name))


class Remote:
    """A side in a process of its own: a fresh interpreter's allocator and settings, nothing of ours.

    `make(*arguments)` is called there and returns the iterator; both must be picklable. The process waits at a pipe, and
    its workers stand still, while the other side is measured.
    """

    def __init__(self, make: Callable[..., Iterator[int]], *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, make, arguments))
        self.process.start()
        there.close()

    def rate(self, seconds: float) -> float:
        """As `Side.rate`."""
        self.pipe.send(seconds)
        return self.pipe.recv()

    def peak_memory(self) -> int:
        """Bytes the process has held at most."""
        self.pipe.send("memory")
        return self.pipe.recv()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join()


def serve(pipe: Any, make: Callable[..., Iterator[int]], arguments: tuple[Any, ...]) -> None:
    """The other end of a `Remote`."""
    side = Side(make(*arguments))
    with contextlib.suppress(EOFError):
        while (wish := pipe.recv()) is not None:
            pipe.send(peak_memory(DEVICE) if wish == "memory" else side.rate(wish))
    side.close()


def wait_for_device() -> None:
    """Until a GPU has done what it was given."""
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
    """One untimed block of each side, then `blocks` timed ones in turn; the side that goes first changes every time.

    Args:
        name: of the row.
        ours, peer: the two sides.
        block: seconds of each block of each side: the same effort on a slow machine, a busy one and a GPU.
        blocks: of each side.
        limit: seconds after which three blocks will do (a step can be longer than a block).
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
            if turn + 1 >= LEAST_BLOCKS and time.perf_counter() > end:
                break
    finally:
        for side in sides:
            side.close()
    return Row(name, *rates)


def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, slow: Collection[str] = ()
) -> dict[str, list[float]]:
    """What each returns in each round, the first one changing; those in `slow` sit out all rounds but the first few."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if turn < LEAST_BLOCKS or name not in slow:
                found[name].append(sides[name]())
    return found


# -------------------------------------------------------------------- showing


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="at most five minutes on two cores")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    return parser


def machine(device: torch.device, packages: Sequence[str]) -> str:
    """Versions of the peers, the processor and its threads, and how busy others keep it."""
    load = (
        f"; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        if hasattr(os, "getloadavg")
        else ""
    )
    return (
        f"{', '.join(f'{name} {version(name)}' for name in packages)}; {device_name(device)}{load}"
    )


def table(rows: Sequence[Row], peer: str, unit: str = "samples/s") -> str:
    """A line a pair: median rate of ours and of `peer`, median ratio, smallest and largest ratio."""
    lines = [
        f"{'pair':<24} {'ours ' + unit:>16} {peer + ' ' + unit:>16} {'ratio':>8} {'spread':>16}"
    ]
    for row in rows:
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        ours, other = statistics.median(row.ours), statistics.median(row.peer)
        lines.append(f"{row.name:<24} {ours:>16.1f} {other:>16.1f} {row.ratio:>8.2f} {spread:>16}")
    return "\n".join(lines)


def verdict(bars: Sequence[Bar]) -> int:
    """Print a line a bar; the exit code: 1 where one is short, else 0."""
    for bar in bars:
        name = bar.name.replace(" ", "_")
        print(
            f"BAR {name} measured={bar.measured:.3f} wanted={bar.wanted:.3f} {'holds' if bar.holds else 'short'}"
        )
    return int(not all(bar.holds for bar in bars))


def write_json(path: str | None, rows: Sequence[Row], bars: Sequence[Bar], **facts: Any) -> None:
    """Everything measured, to the file of --json; nothing where there is none."""
    if path is None:
        return
    everything = {
        **facts,
        "rows": [{**asdict(row), "ratios": row.ratios, "ratio": row.ratio} for row in rows],
        "bars": [{**asdict(bar), "holds": bar.holds} for bar in bars],
    }
    run_log.atomic_write_text(Path(path), json.dumps(everything, indent=2) + "\n")
