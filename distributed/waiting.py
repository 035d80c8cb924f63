"""Waits that say what they wait for, and that end: those of torch are silent, and some never end.

with named_wait(lambda: "node 1 has not come", seconds=300):
    store = TCPStore(...)
"""

import contextlib
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
        seconds: the limit.
        reason: what is missing, in words; "" where another process reports it.
        is_over: whether the wait is over before the block is.
    """
    done, start, handled = threading.Event(), time.monotonic(), stop_signals()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        report_at = min(FIRST_SECONDS, seconds)
        while not done.is_set() and not is_over():
            if select.select([reader], [], [], POLL_SECONDS)[0]:
                is_stopped = os.read(reader, 1)[0] in handled
                if is_stopped and not done.wait(HANDLER_SECONDS) and not is_over():
                    os._exit(INTERRUPTED)
            if (waited := time.monotonic() - start) < report_at:
                continue
            text, has_failed = reason(), waited >= seconds
            if text and not done.is_set():
                before = "error: no answer for" if has_failed else "waiting up to"
                print(f"{before} {seconds:g} s (--timeout): {text}", file=sys.stderr, flush=True)
            if has_failed and not done.is_set():
                os._exit(LOST_PEER)
            report_at = min(report_at + NEXT_SECONDS, seconds)

    thread = threading.Thread(target=watch, daemon=True)
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


def why_unreachable(host: str, port: int) -> str:
    """Why nothing answers at a port of a host, such as that its name is unknown; "" if it does."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except (OSError, UnicodeError, OverflowError) as error:
        return f"nothing answers at {host}:{port} ({getattr(error, 'strerror', None) or error})"
    return ""
