"""How a run ends early and what it survives: signals, and steps that are not finite."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from distributed.world import under_torchrun

MAX_SKIPPED_IN_A_ROW = 10  # non-finite steps before the run goes back to its last checkpoint
MAX_ROLLBACKS = 3


class Diverged(Exception):
    """Too many steps in a row were not finite."""


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in a list; only a second Ctrl-C ends the process at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        # torchrun repeats the terminal's Ctrl-C, so under it a second one means nothing.
        if number == signal.SIGINT and caught and not under_torchrun():
            raise KeyboardInterrupt
        caught.append(number)

    previous = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
