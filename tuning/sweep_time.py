"""How long the trials of a sweep take together: from an epoch at first, then from whole trials.

sweep_time = SweepTime(epochs=5, trials=20, jobs=1, ends_early=True, hint="fewer --trials")
sweep_time.epoch_done(row, elapsed=130.0)      # once: ["about 11 min a trial, 3.6 h for 20 trials"]
sweep_time.trial_ended(600.0)
sweep_time.seconds_left(trials_left=19)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from training.time_estimate import LONG_SECONDS, SHORT_SECONDS, in_words


class SweepTime:
    """Estimates the time of a sweep; several threads may share one.

    Args:
        epochs: of a trial.
        trials: that are still to be run.
        jobs: of them at the same time.
        ends_early: whether trials may end before their last epoch.
        hint: what makes a sweep shorter; follows the announcement of a long one.
    """

    def __init__(self, *, epochs: int, trials: int, jobs: int, ends_early: bool, hint: str) -> None:
        self.epochs, self.trials, self.jobs = epochs, trials, jobs
        self.ends_early, self.hint = ends_early, hint
        self.trial_seconds: list[float] = []  # of the trials that have ended
        self.is_announced = False
        self.lock = threading.Lock()

    def epoch_done(self, row: Mapping[str, Any], elapsed: float) -> list[str]:
        """Return the lines that announce the time of all trials; none but on the first call.

        Args:
            row: of metrics.jsonl.
            elapsed: seconds since the trial's process was started.
        """
        with self.lock:
            if self.is_announced:
                return []
            self.is_announced = True
        start_up = max(0.0, elapsed - row["seconds"])
        trial_seconds = start_up + row["seconds"] / row["epoch"] * self.epochs
        total = trial_seconds * math.ceil(self.trials / self.jobs)
        if total < SHORT_SECONDS:
            return []
        line = (
            f"about {in_words(trial_seconds)} a trial, {in_words(total)} for {self.trials} trials"
        )
        if self.ends_early:
            line += ", less where trials are ended early"
        return [line, self.hint] if total > LONG_SECONDS else [line]

    def trial_ended(self, seconds: float) -> None:
        """Note the time of a trial that was complete or pruned."""
        with self.lock:
            self.trial_seconds.append(seconds)

    def seconds_left(self, trials_left: int) -> float | None:
        """Return the time of so many more trials by the mean of the others; None without any."""
        with self.lock:
            if not self.trial_seconds:
                return None
            mean = sum(self.trial_seconds) / len(self.trial_seconds)
        return mean * math.ceil(trials_left / self.jobs)
