"""Waits that say what they wait for, and that end: those of torch are silent, and some never end.

with named_wait(lambda: "node 1 has not come", seconds=300):
    store = TCPStore(...)
"""

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from errors import INTERRUPTED, LOST_PEER, stop_signals

FIRST_SECONDS, NEXT_SECONDS = 5.0, 60.0  # after which a wait is reported, and reported again
AGAIN_SECONDS = 2.0  # after which a reason is asked for again that there was not
POLL_SECONDS = 0.2
HANDLER_SECONDS = 1.0  # that a main thread has to answer a signal
PROBE_SECONDS = 2.0  # of a connection that is tried


@contextlib.contextmanager
def named_wait(
    reason: Callable[[], str], seconds: float, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Report a wait within the block on stderr, and end the process with code 1 after a limit.

    A stop signal ends the process with 130: a main thread that waits in C++ calls no handler.

    Args:
        reason: what is missing, in words; "" where another process reports it.
        is_over: whether the wait is over before the block is.
    """
    done, handled = threading.Event(), stop_signals()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def goes_on() -> bool:
        if select.select([reader], [], [], POLL_SECONDS)[0]:
            is_stopped = os.read(reader, 1)[0] in handled
            if is_stopped and not done.wait(HANDLER_SECONDS) and not is_over():
                os._exit(INTERRUPTED)
        return not done.is_set() and not is_over()

    thread = threading.Thread(target=_report, args=(reason, seconds, goes_on), daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if handled else -1
    try:
        yield
    finally:
        done.set()
        if handled:
            signal.set_wakeup_fd(wakeup)
        thread.join()
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def named_stalls(
    reason: Callable[[], str], seconds: float, stage: Callable[[], object]
) -> Iterator[None]:
    """Report as `named_wait` does, from a thread, whenever the work within the block stands still.

    Args:
        reason: what is missing, in words; "" where it is not known yet, or others report it.
        seconds: the limit of each stall; may be infinite.
        stage: how far the work is; None where it waits for nothing.
    """
    done = threading.Event()

    def goes_on() -> bool:
        return not done.wait(POLL_SECONDS)

    thread = threading.Thread(target=_report, args=(reason, seconds, goes_on, stage), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(HANDLER_SECONDS)  # it may ask a process that is lost


def _report(
    reason: Callable[[], str],
    seconds: float,
    goes_on: Callable[[], bool],
    stage: Callable[[], object] = lambda: "the only one",
) -> None:
    """Report a wait for each stage that lasts, until `goes_on`, which pauses, says no."""
    seen, start, report_at = None, 0.0, 0.0
    while goes_on():
        now, reached = time.monotonic(), stage()
        if reached is None or reached != seen:
            seen, start, report_at = reached, now, min(FIRST_SECONDS, seconds)
        if (waited := now - start) < report_at:
            continue
        text, has_failed = reason(), waited >= seconds
        if not goes_on() or stage() != seen:
            continue
        if text:
            before = "error: no answer for" if has_failed else "waiting up to"
            limit = f"{before} {seconds:g} s (--timeout): " if seconds < math.inf else ""
            print(f"{limit}{text}", file=sys.stderr, flush=True)
        if has_failed:
            os._exit(LOST_PEER)
        report_at = min(waited + (NEXT_SECONDS if text else AGAIN_SECONDS), seconds)


def why_unreachable(host: str, port: int) -> str:
    """Why nothing answers at a port of a host, such as that its name is unknown; "" if it does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except (OSError, UnicodeError, OverflowError) as error:
        return f"nothing answers at {host}:{port} ({getattr(error, 'strerror', None) or error})"
    return ""
