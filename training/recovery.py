"""How a run ends early and what it survives: signals, and steps that are not finite."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from distributed.world import under_torchrun
from errors import (
    INTERRUPTED,
    STOP_SIGNALS,
    InputError,
    Interrupted,
    NonFiniteLoss,
    first_line,
    handled_signals,
    stop_signals,
)
from training.progress import Progress, Row
from training.run_log import RunLog

MAX_SKIPPED_IN_A_ROW = 10  # non-finite steps before the run goes back to its last checkpoint
MAX_ROLLBACKS = 3
REMEDIES = "lower the learning rate, clip gradients at 1, warm up for an epoch, or use fp32"
END = b"\0"  # no signal: what ends the thread that answers them
SAME_SIGNAL_SECONDS = 1.0  # a sweep, which gets the terminal's Ctrl-C too, repeats it to its run


# -------------------------------------------------------------------- signals


@contextlib.contextmanager
def caught_signals(say: Callable[[str], None]) -> Iterator[list[int]]:
    """Note stop signals in a list; a second one ends the process at once, with exit code 130.

    A thread answers, since Python calls a handler only after the operation of torch that is being
    computed. Under torchrun it is the launcher that a second signal ends, and with it the ranks:
    the launcher repeats the first one, which all processes of a job may have got as well.

    Raises:
        Interrupted: a signal has ended a process on which a step depends, such as a compiler.
    """
    caught: list[int] = []
    if not stop_signals():  # in a thread, which gets none
        yield caught
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def answer() -> None:
        first = 0.0
        while (number := os.read(reader, 1)) != END:
            if number[0] not in STOP_SIGNALS:  # such as SIGCHLD, of which a data loader learns
                continue
            if not first:
                first = time.monotonic()
                say("stopping after this step; again ends at once")
            elif number[0] == signal.SIGXCPU:  # repeated after each further second
                continue
            elif time.monotonic() - first > SAME_SIGNAL_SECONDS and not under_torchrun():
                os._exit(INTERRUPTED)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with handled_signals(lambda number, _: caught.append(number)):
            yield caught
    except (RuntimeError, OSError, EOFError) as error:
        if not caught:
            raise
        raise Interrupted(
            f"interrupted within a step ({first_line(error)}); go on from the last checkpoint"
        ) from None
    finally:
        if signal.SIGXCPU in caught:
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup)
        os.write(writer, END)
        thread.join()
        os.close(reader)
        os.close(writer)


# -------------------------------------------------------------------- steps that are not finite


class Diverged(Exception):
    """Too many steps in a row were not finite."""


def has_finite_losses(row: Row, *, is_scaled: bool) -> bool:
    """Whether the training loss and all evaluation losses of an epoch are finite.

    The training loss is not a number where every step of an epoch too short for `roll_back` was
    skipped; where the loss `is_scaled` that is how fp16 finds its scale, and does not count.
    """
    names = ["val_loss", "test_loss", *([] if is_scaled else ["train_loss"])]
    return all(loss is None or math.isfinite(loss) for loss in map(row.get, names))


def check_last_epoch(rows: Sequence[Row], *, is_scaled: bool) -> None:
    """Raise NonFiniteLoss if a loss of the last epoch is not finite, as of `has_finite_losses`."""
    if rows and not has_finite_losses(rows[-1], is_scaled=is_scaled):
        epoch = f"epoch {rows[-1]['epoch']}"
        if is_scaled or math.isfinite(rows[-1]["train_loss"]):
            raise NonFiniteLoss(f"the loss after {epoch} is not finite; {REMEDIES}")
        raise NonFiniteLoss(f"no step of {epoch} had finite gradients; {REMEDIES}")


def roll_back(progress: Progress, restore_last: Callable[[], None], log: RunLog) -> None:
    """Return to the last checkpoint with half the learning rate.

    Raises:
        NonFiniteLoss: it has returned too often, or the checkpoint cannot be read back.
    """
    rollbacks, lr_factor = progress.rollbacks + 1, progress.lr_factor / 2
    where = f"epoch {progress.epoch + 1}, step {progress.step}"
    if rollbacks > MAX_ROLLBACKS:
        raise NonFiniteLoss(
            f"the loss was not finite at {where}, after {MAX_ROLLBACKS} returns to the last "
            f"checkpoint with half the learning rate each; {REMEDIES}"
        )
    spent = progress.seconds, progress.compile_seconds, progress.eval_seconds
    try:
        restore_last()
    except InputError as error:
        raise NonFiniteLoss(f"the loss was not finite at {where}; {error}; {REMEDIES}") from None
    progress.seconds, progress.compile_seconds, progress.eval_seconds = spent
    progress.rollbacks, progress.lr_factor = rollbacks, lr_factor
    log.write_rows(progress.rows)
    log.info(
        f"{MAX_SKIPPED_IN_A_ROW} steps in a row were not finite at {where}: back to epoch "
        f"{progress.epoch + 1}, step {progress.step}, learning rate x {lr_factor:g} "
        f"(return {rollbacks} of {MAX_ROLLBACKS})"
    )
