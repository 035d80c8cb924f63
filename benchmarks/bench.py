"""What all benchmarks share: sides that take turns, tables of ratios, bars, a JSON file.

sides = {"plain": partial(bench.Remote, plain), "ours": partial(bench.Remote, ours)}
rows, _ = bench.compare(sides, "resnet50", rounds=9, seconds=4)
return bench.finish(args, [bench.Bar("resnet50", rows["ours"].ratio, 2.7)], ...)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from backends.device import peak_memory
from backends.execution import compile_seconds
from backends.machine import commit_or_none, device_name
from cli.flag_parser import FlagParser, path_text, switch
from errors import InputError
from training.atomic_file import atomic_write_text

Name = TypeVar("Name")  # of a side
Value = TypeVar("Value")  # what a turn measures
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUICK_ROUNDS = 3  # that a median needs


@dataclass(frozen=True)
class Row:
    """A measured pair: samples/s, or steps/s, of ours and of the peer, in each round."""

    name: str
    ours: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, round by round, so that other load on the machine met both."""
        return [ours / peer for ours, peer in zip(self.ours, self.peer)]

    @property
    def ratio(self) -> float:
        """The median ratio of all rounds."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class Bar:
    """A target that a measured number must reach; with `at_most`, one that it must not exceed."""

    name: str
    measured: float
    wanted: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


# -------------------------------------------------------------------- measuring


def clock(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Remote:
    """A side in a process of its own, with a fresh interpreter's allocator and settings.

    `make(*arguments)` is called there and returns an endless iterator, each `next` of which takes
    one step and returns its number of samples; both must be picklable. Between its turns the
    process is stopped, with its DataLoader's workers: they would fill their queues, and threads of
    OpenMP wait actively, in the time of the other sides.
    """

    def __init__(self, make: Callable[..., Iterator[int]], *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(there, make, arguments))
        self.process.start()
        there.close()

    def ask(self, what: str, *values: float) -> Any:
        """Let the process answer a request, and stop it until the next one.

        Args:
            what: 'rate', samples/s of steps for some seconds, at least one step; 'warm up', steps
                for some seconds until nothing is compiled; or 'memory', the peak in bytes.

        Raises:
            InputError: the process has ended.
        """
        self._send(signal.SIGCONT)
        try:
            self.pipe.send((what, *values))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise InputError("the process of a side has ended; its message is above") from None
        self._send(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._send(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its workers."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # no group yet, or no longer
            os.killpg(self.process.pid, number)


def serve(pipe: Any, make: Callable[..., Iterator[int]], arguments: tuple[Any, ...]) -> None:
    """Serve the requests of a `Remote`, in its process."""
    os.setpgrp()  # a group of stopped processes ends with the one that started it
    steps = make(*arguments)
    answers: dict[str, Callable[..., Any]] = {
        "rate": partial(samples_a_second, steps),
        "warm up": partial(warm_up, steps),
        "memory": partial(peak_memory, DEVICE),
    }
    with contextlib.suppress(EOFError):
        while (request := pipe.recv()) is not None:
            name, *values = request
            pipe.send(answers[name](*values))


def samples_a_second(steps: Iterator[int], seconds: float) -> float:
    """Take steps for `seconds`, at least one, and return their rate."""
    wait_for_device()
    start = time.perf_counter()
    samples = next(steps)
    while time.perf_counter() - start < seconds:
        samples += next(steps)
    wait_for_device()
    return samples / (time.perf_counter() - start)


def warm_up(steps: Iterator[int], seconds: float) -> None:
    """Take steps for `seconds`, and again as long as torch.compile has had work in them."""
    compiled = None
    while compiled != compile_seconds():
        compiled = compile_seconds()
        samples_a_second(steps, seconds)


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, has finished its queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def take_turns(sides: Mapping[Name, Callable[[], Value]], rounds: int) -> dict[Name, list[Value]]:
    """Call each side in each round, a different one first, and return its values, one per round."""
    values: dict[Name, list[Value]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            values[name].append(sides[name]())
    return values


def compare(
    starts: Mapping[str, Callable[[], Remote]],
    title: str,
    *,
    rounds: int,
    seconds: float,
) -> tuple[dict[str, Row], dict[str, int]]:
    """Measure sides over the first one, in pairs, each after untimed turns.

    Only two processes exist at a time: how fast memory is got depends on what others hold.

    Args:
        starts: starts the process of each side, by its name; the first is the baseline.
        title: of the rows, before the name of the side.
        rounds: number of rounds.
        seconds: of a side in a round.

    Returns:
        The row over the baseline and the peak memory in bytes of each side, the baseline included,
        whose rates are those of all pairs.

    Raises:
        InputError: a process has ended.
    """
    baseline, *others = starts
    rows: dict[str, Row] = {}
    memory: dict[str, int] = {}
    rates_of_baseline: list[float] = []
    for other in others:
        remotes = {name: starts[name]() for name in (baseline, other)}
        try:
            for remote in remotes.values():
                remote.ask("warm up", seconds)
            turns = {name: partial(each.ask, "rate", seconds) for name, each in remotes.items()}
            rates = take_turns(turns, rounds)
            memory = {name: each.ask("memory") for name, each in remotes.items()} | memory
        finally:
            for remote in remotes.values():
                remote.close()
        rows[other] = Row(f"{title} {other}", rates[other], rates[baseline])
        rates_of_baseline += rates[baseline]
    alone = Row(f"{title} {baseline}", rates_of_baseline, rates_of_baseline)
    return {baseline: alone, **rows}, memory


# -------------------------------------------------------------------- showing


def parser(description: str | None) -> FlagParser:
    """Return a parser with the flags that every benchmark has."""
    parser = FlagParser(description)
    parser.set_defaults(started=time.perf_counter())
    add = parser.group("flags of every benchmark")
    add("--quick", switch, False, "fewer rounds: at most five minutes on two cores")
    add("--json", path_text, None, "file for everything measured", metavar="FILE")
    return parser


def add_data_dir(parser: FlagParser) -> None:
    """Add --data_dir, which is that of the entry scripts."""
    usual = os.environ.get("DATA_DIR") or "./data"
    parser.group("data")("--data_dir", path_text, usual, "folder of the data sets", metavar="DIR")


def machine(device: torch.device, packages: Sequence[str]) -> str:
    """Describe versions of the packages, the processor and its load by other programs."""
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return f"{versions}; {device_name(device)}; {load}"


def aligned(lines: Iterable[Sequence[str]]) -> str:
    """Write cells in columns: the first to the left, the others to the right."""
    lines = list(lines)
    first, *widths = (max(map(len, column)) for column in zip(*lines))
    return "\n".join(
        "  ".join(
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths))]
        ).rstrip()
        for name, *cells in lines
    )


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Write the smallest and the largest value."""
    values = list(values)
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}"


def table(rows: Iterable[Row], peer: str) -> str:
    """Write a line for each pair: median rates, ratios (median, smallest, largest), rounds."""
    lines = [["pair", "ours samples/s", f"{peer} samples/s", "ratio", "spread", "rounds"]]
    for row in rows:
        rates = [f"{statistics.median(each):.1f}" for each in (row.ours, row.peer)]
        ratios = [f"{row.ratio:.2f}", spread(row.ratios), str(len(row.ratios))]
        lines.append([row.name, *rates, *ratios])
    return aligned(lines)


def finish(
    settings: argparse.Namespace,
    bars: Sequence[Bar],
    *,
    rows: Iterable[Row] = (),
    machine: str,
    **facts: Any,
) -> int:
    """Print the time and a line for each bar, and write the JSON file.

    Args:
        settings: the arguments of `parser`.
        facts: further entries of the file.

    Returns:
        The exit code: 1 if a bar is short, else 0.
    """
    took = time.perf_counter() - settings.started
    print(f"{took:.0f} s")
    written = []
    for bar in bars:
        name, result = bar.name.replace(" ", "_"), "holds" if bar.holds else "short"
        print(f"BAR {name} measured={bar.measured:.3f} wanted={bar.wanted:.3f} {result}")
        # JSON has no infinity, of a target that is not reached
        measured = bar.measured if math.isfinite(bar.measured) else None
        written.append({**asdict(bar), "measured": measured, "holds": bar.holds})
    if settings.json:
        everything = {
            "machine": machine,
            "took": took,
            "quick": settings.quick,
            **facts,
            "commit": commit_or_none(),
            "rows": [{**asdict(row), "ratios": row.ratios, "ratio": row.ratio} for row in rows],
            "bars": written,
        }
        atomic_write_text(Path(settings.json), json.dumps(everything, indent=2) + "\n")
    return int(not all(bar.holds for bar in bars))
