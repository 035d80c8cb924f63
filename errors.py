"""The ways in which a run ends early, and their exit codes.

raise InputError("--bs 0: must be at least 1")       # one line on stderr, exit code 2
raise NonFiniteLoss("...")                            # exit code 3
sys.exit(exit_code(main))                             # what both entry scripts end with
"""

import contextlib
import difflib
import errno
import io
import os
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

LOST_PEER, BAD_INPUT, NON_FINITE, INTERRUPTED = 1, 2, 3, 130
BROKEN_PIPE = 141  # what a shell reports of a process that SIGPIPE ended
GRACE_SECONDS = 3.0  # that rank 0 has to report first
LOST_PEER_SECONDS = 5.0  # that the process which ended first has to report why
LINE_LIMIT = 160  # characters of another library's message within ours
LONGEST_EXCERPT = 60  # characters of a value within a message
SHORTEST_BEGINNING = 3  # letters of an abbreviated name that are enough for a guess
# of a path that nobody can use, whatever lies there
UNUSABLE_PATH = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.ENOTDIR, errno.EROFS}
UNUSABLE_PATH |= {errno.EIO, errno.ESTALE, errno.ENOTCONN}  # of a disk or file server that fails
NO_MEMORY = (
    "this machine's memory is too small; use smaller micro-batches (--micro_bs 8), "
    "--checkpoint_activations, or smaller images, texts or models"
)
RUNTIME_PROBLEMS = {  # by words of what torch raises, the first that fit
    "DefaultCPUAllocator": NO_MEMORY,
    "shared memory": "/dev/shm, through which processes that read images send pixels, is full; "
    "make it larger (docker run --shm-size 2g), or use smaller batches, or --workers 0",
    "DataLoader worker": "a process that reads images has ended, as the system ends one where "
    "memory runs out; use fewer --workers, or smaller images",
}
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
# What terminals, shells and schedulers send to end a run, some as a warning before a SIGKILL.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
STOP_SIGNALS += [signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]
SIMILAR = 0.65  # share of letters, from 0 to 1, that two similar names have in common


class InputError(Exception):
    """Bad flags or data: the message is one line that says what, why, and what to do."""


class SharedInputError(InputError):
    """An InputError that every rank of a job raises alike, so that rank 0 alone reports it."""


class NonFiniteLoss(Exception):
    """The loss stayed non-finite after every recovery that was allowed."""


class LostPeer(Exception):
    """Another process of the job has ended or does not answer; a restart may help."""


class Interrupted(Exception):
    """One of `STOP_SIGNALS` arrived and a checkpoint was written; the message names it."""


@contextlib.contextmanager
def in_one_line(
    problem: str, advice: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn what a library raises into an InputError: the problem, the library's reason, advice."""
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{problem} ({reason}){advice}") from None


def needing(what: str, packages: str) -> contextlib.AbstractContextManager[None]:
    """Turn an import that fails into an InputError that says what to install."""
    return in_one_line(f"{what} needs a package", f": pip install {packages}")


def writing(what: str, kind: str) -> contextlib.AbstractContextManager[None]:
    """Turn a file or folder (`kind`) that cannot be written into an InputError."""
    return in_one_line(f"{what}: cannot be written", f"; choose another {kind}", (OSError,))


@contextlib.contextmanager
def refused_as(
    flag: str, kinds: tuple[type[Exception], ...] = (ValueError, InputError)
) -> Iterator[None]:
    """Turn a part's refusal of its settings into the line of the flag that gave them.

    Args:
        flag: with its value, which is said once where the refusal begins with it.
        kinds: what a refusal is. An InputError keeps its class, and a flag that it has already.
    """
    try:
        yield
    except kinds as error:
        text = str(error) if isinstance(error, ValueError | InputError) else first_line(error)
        name, _, value = flag.partition(" ")
        if not text.startswith("--"):
            text = f"{name} {text}" if value and text.startswith(value) else f"{flag}: {text}"
        raise (type(error) if isinstance(error, InputError) else InputError)(text) from None


def stop_signals() -> list[signal.Signals]:
    """Return `STOP_SIGNALS` without those that this process ignores, as nohup starts it.

    None outside the main thread, which alone may handle them.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let a handler answer `stop_signals` within the block."""
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def interruptible() -> None:
    """Let a stop signal end this process with one line and 130, until something else handles it."""

    def end(number: int, _: FrameType | None) -> None:
        if os.environ.get("RANK", "0") == "0":
            report(f"interrupted by {signal.Signals(number).name}")
        os._exit(INTERRUPTED)

    for each in stop_signals():
        signal.signal(each, end)


def exit_code(main: Callable[[], object]) -> int:
    """Run `main`; its exceptions become one line on stderr and the documented exit code.

    A number that `main` returns is the exit code, as of a benchmark that misses a target. Under
    torchrun one rank speaks for all: the others wait first, and are ended meanwhile when rank 0
    failed too. A path that nobody can use, such as one that is too long, is bad input. Names that
    stdout cannot encode are printed with backslash escapes, as on stderr. Every stop signal is
    Ctrl-C unless `main` handles it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        with handled_signals(signal.default_int_handler):
            result = main()
            return result if isinstance(result, int) else 0
    except (InputError, NonFiniteLoss, Interrupted) as error:
        if not is_main:
            time.sleep(GRACE_SECONDS)
        is_own = isinstance(error, InputError) and not isinstance(error, SharedInputError)
        if is_main or is_own:  # the others happen to all ranks alike
            report(str(error))
        if isinstance(error, InputError):
            return BAD_INPUT
        return NON_FINITE if isinstance(error, NonFiniteLoss) else INTERRUPTED
    except LostPeer as error:
        time.sleep(LOST_PEER_SECONDS if is_main else LOST_PEER_SECONDS + GRACE_SECONDS)
        report(str(error))
        return LOST_PEER
    except KeyboardInterrupt:
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        lines = (line for sign, line in RUNTIME_PROBLEMS.items() if sign in str(error))
        line = next(lines, None if isinstance(error, RuntimeError) else NO_MEMORY)
        if line is None:
            raise
        report(line)
        return BAD_INPUT
    except BrokenPipeError:  # whoever read stdout, such as head, has enough
        discard_stdout()
        return BROKEN_PIPE
    except OSError as error:
        is_full = error.errno in FULL_DISK
        if not is_full and (error.errno not in UNUSABLE_PATH or error.filename is None):
            raise
        where, advice = error.filename, "make room on the disk" if is_full else "give another path"
        if where is None:  # as of stdout, which would be written again at the very end
            where = "the output"
            discard_stdout()
        report(f"{where}: {error.strerror}; {advice}")
        return BAD_INPUT


def report(message: str) -> None:
    """Print an error on stderr, in one line; a terminal that has been closed gets none."""
    with contextlib.suppress(OSError):
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """Let everything that is printed from now on vanish, as nobody reads it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def did_you_mean(word: str, names: Iterable[str], *, similar: float = SIMILAR) -> str:
    """The end of a message about a misspelt word: '; did you mean sgd?', or '' without a guess.

    The guess is the three shortest names that begin with the word, or else the name that is most
    similar to it, if one is. Case and dashes in front do not count.
    """
    word = word.lower().lstrip("-")
    by_key = {name.lower().lstrip("-"): name for name in names}
    longer = [key for key in by_key if key.startswith(word)]
    guesses = sorted(longer, key=lambda key: (len(key), key))[:3]
    if len(word) < SHORTEST_BEGINNING or not guesses:
        guesses = difflib.get_close_matches(word, by_key, n=1, cutoff=similar)
    meant = " or ".join(by_key[key] for key in guesses)
    return f"; did you mean {meant}?" if meant else ""


def excerpt(value: Any) -> str:
    """A value as a message quotes it: the beginning of one that is long or deeply nested."""
    return reprlib.repr(value)[:LONGEST_EXCERPT]


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to a length that fits into a message of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:LINE_LIMIT]


def last_line(error: BaseException) -> str:
    """The last line, which tells most where an exception's text begins with a heading."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:LINE_LIMIT]
