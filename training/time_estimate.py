"""How long a run takes, from the steps that it has done itself.

    estimate = TimeEstimate(clock=time.perf_counter, eval_every=1)
    estimate.start_epoch(0, epochs=50, step=0, samples=50_000, done=0)
    estimate.observe(step=20, samples=2_560)       # at logging intervals; nothing waits for a GPU
    estimate.announcement()                        # once: "about 20 min an epoch, 16 h in all"
    estimate.seconds_left()                        # None until the speed is known
    estimate.end_steps()                           # then the run evaluates and saves
    estimate.end_epoch()

The first steps are left out of the speed, since compilation and cold caches make them slow. Epochs
that were done before a run was resumed count neither as time nor as work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

WARM_UP_STEPS = 3  # left out of the speed
MIN_STEPS, MIN_SECONDS = 3, 5.0  # behind a speed that is announced
SHORT_SECONDS = 60.0  # runs that are shorter are not announced
LONG_SECONDS = 2 * 3600.0  # runs that are longer are announced with a hint
FAR_OFF = 1.25  # a factor between two estimates that is worth a second line
MINUTE, HOUR, DAY = 60, 3600, 86400  # in seconds


def in_words(seconds: float) -> str:
    """A duration for a sentence: 45 s, 20 min, 2.5 h, 16 h, 3.2 days."""
    for unit, name, largest in ((1, "s", 90), (MINUTE, "min", 90), (HOUR, "h", 48)):
        if seconds < largest * unit:
            digits = 1 if unit == HOUR and seconds < 9.95 * HOUR else 0
            return f"{seconds / unit:.{digits}f} {name}".replace(".0 ", " ")
    return f"{seconds / DAY:.1f} days".replace(".0 ", " ")


def in_six_characters(seconds: float | None) -> str:
    """A duration for a table: 45s, 20m05s, 16h20m, 3d04h; '-' where it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole}s"
    if whole < HOUR:
        return f"{whole // MINUTE}m{whole % MINUTE:02d}s"
    if whole < DAY:
        return f"{whole // HOUR}h{whole % HOUR // MINUTE:02d}m"
    if whole < 100 * DAY:
        return f"{whole // DAY}d{whole % DAY // HOUR:02d}h"
    return f"{whole // DAY}d"


class Mark(NamedTuple):
    """How far an epoch was at a moment: optimizer steps of the run, samples of the epoch."""

    time: float
    step: int
    samples: int


class TimeEstimate:
    """Measures the speed of the steps and the time between epochs, and adds up what is left.

    Args:
        clock: gives the time in seconds.
        eval_every: epochs from one evaluation to the next, which the last epoch has in any case;
            0 is none at all.
        hint: what makes a run shorter; follows the announcement of a long one.
    """

    def __init__(self, clock: Callable[[], float], *, eval_every: int = 1, hint: str = "") -> None:
        self.clock, self.eval_every, self.hint = clock, eval_every, hint
        self.started = clock()
        self.seconds_per_sample: float | None = None
        self.saving = 0.0  # seconds between two epochs without an evaluation
        self.evaluating = 0.0  # and with one, which are of saving as well
        self.is_complete = not eval_every  # whether those of an evaluation are known
        self.is_stable = False  # whether enough was measured to be announced
        self.warm_seconds = 0.0  # of whole epochs after the first one
        self.first_epoch: int | None = None  # that this process works on
        self.first_step = 0
        self.resumed = False
        self.epoch = self.epochs = 0  # that are done, and of the run
        self.samples = self.done = 0  # of the current epoch in all, and by now
        self.in_epoch = False
        self.epoch_start = Mark(self.started, 0, 0)
        self.window_start: Mark | None = None
        self.announced_seconds: float | None = None
        self.may_correct = False

    # ---------------------------------------------------------------- measuring

    def start_epoch(self, epoch: int, *, epochs: int, step: int, samples: int, done: int) -> None:
        """Begin an epoch, or the rest of one.

        Args:
            epoch: its number, counted from 0.
            epochs: of the run.
            step: optimizer steps of the run by now.
            samples: of the epoch in all.
            done: those of them that are behind already.
        """
        if self.first_epoch is None:
            self.first_epoch, self.first_step, self.resumed = epoch, step, step > 0
        self.epoch, self.epochs, self.samples, self.done = epoch, epochs, samples, done
        self.in_epoch, self.window_start = True, None
        self.epoch_start = Mark(self.clock(), 0, done)

    def observe(self, step: int, samples: int) -> None:
        """Note how far the run is.

        On a GPU both may be ahead of what is computed, if they are so by as much in each call.

        Args:
            step: optimizer steps of the run.
            samples: of this epoch.
        """
        self.done = samples
        if step - self.first_step < WARM_UP_STEPS:
            return
        now = Mark(self.clock(), step, samples)
        if self.window_start is None:
            self.window_start = now
            return
        seconds = now.time - self.window_start.time
        if now.step - self.window_start.step >= MIN_STEPS and seconds >= MIN_SECONDS:
            self.seconds_per_sample = seconds / (samples - self.window_start.samples)
            self.is_stable = True

    def end_steps(self) -> None:
        """Note that the steps of the epoch are done, on the device as well."""
        now, done = self.clock(), self.samples - self.epoch_start.samples
        seconds = now - self.epoch_start.time
        is_warm = self.epoch != self.first_epoch
        if done and (is_warm or self.seconds_per_sample is None):
            self.seconds_per_sample = seconds / done
        if is_warm:
            self.warm_seconds += seconds
            self.is_stable |= self.warm_seconds >= MIN_SECONDS
        self.done, self.epoch_start = self.samples, Mark(now, 0, self.samples)

    def end_epoch(self, is_evaluated: bool = True) -> None:
        """Note that the run has saved, and has evaluated or not, since `end_steps`."""
        seconds = self.clock() - self.epoch_start.time
        if is_evaluated and self.eval_every:
            self.evaluating, self.is_complete = seconds, True
        else:
            self.saving = seconds
        self.in_epoch = False
        self.epoch += 1

    # ---------------------------------------------------------------- adding up

    def epoch_seconds(self) -> float | None:
        """Seconds of a whole epoch, in the mean of those left; None until the speed is known."""
        if self.seconds_per_sample is None:
            return None
        between = self.saving
        left = self.epochs - self.epoch
        if left and self.is_complete:
            evaluations = self._evaluations(self.epochs) - self._evaluations(self.epoch)
            between += evaluations / left * (self.evaluating - self.saving)
        return self.samples * self.seconds_per_sample + between

    def _evaluations(self, epochs: int) -> int:
        """How many evaluations there are in so many first epochs of the run."""
        if not self.eval_every:
            return 0
        has_another = epochs == self.epochs and epochs % self.eval_every != 0
        return epochs // self.eval_every + has_another

    def seconds_left(self) -> float | None:
        """Seconds until the end of the run; None until the speed is known."""
        epoch_seconds = self.epoch_seconds()
        if epoch_seconds is None or self.seconds_per_sample is None:
            return None
        left = (self.epochs - self.epoch) * epoch_seconds
        return left - self.done * self.seconds_per_sample if self.in_epoch else left

    # ---------------------------------------------------------------- saying so

    def announcement(self) -> list[str]:
        """The lines to print now; on nearly every call none.

        One is due as soon as the speed is known; and a corrected one, once the time of an
        evaluation is known, if the first was far off.
        """
        epoch_seconds, left = self.epoch_seconds(), self.seconds_left()
        if not self.is_stable or epoch_seconds is None or left is None:
            return []
        total = self.clock() - self.started + left
        if self.announced_seconds is None:
            if total < SHORT_SECONDS:
                return []
            lines = [self._sentence(epoch_seconds, total)]
            if not self.is_complete:
                lines = [f"{lines[0]}, evaluation not counted yet"]
            self.may_correct = not self.is_complete
        else:
            if not self.may_correct or not self.is_complete:
                return []
            self.may_correct = False
            if 1 / FAR_OFF < total / self.announced_seconds < FAR_OFF:
                return []
            lines = [f"corrected: {self._sentence(epoch_seconds, total)}"]
        self.announced_seconds = total
        if total > LONG_SECONDS and self.hint:
            lines.append(self.hint)
            self.hint = ""
        return lines

    def _sentence(self, epoch_seconds: float, total: float) -> str:
        epochs = self.epochs - (self.first_epoch or 0)
        if self.resumed:
            left = "the epoch that is left" if epochs == 1 else f"the {epochs} epochs that are left"
            return f"about {in_words(epoch_seconds)} an epoch, {in_words(total)} for {left}"
        if epochs == 1:
            return f"about {in_words(total)} in all"
        return f"about {in_words(epoch_seconds)} an epoch, {in_words(total)} in all"
