"""How long a run still takes, by the share of it that was done since its first steps.

forecast = Forecast(time.perf_counter, epochs=50)
forecast.observe(0.05)             # epochs that are done; nothing waits for a GPU
forecast.seconds_left()            # None until the speed is known
forecast.announcement()            # once: "about 20 min an epoch, 16 h left"
"""

from __future__ import annotations

from collections.abc import Callable

WARM_UP = 3  # observations left out of the speed, since compilation and cold caches make them slow
MIN_SECONDS = 5.0  # behind a speed that is announced
SHORT_SECONDS = 60.0  # runs that are shorter are not announced
LONG_SECONDS = 2 * 3600.0  # runs that are longer are announced with a hint


def in_words(seconds: float) -> str:
    """A duration for a sentence: 45 s, 20 min, 2.5 h, 16 h, 3.2 days."""
    for unit, name, largest in ((1, "s", 90), (60, "min", 90), (3600, "h", 48)):
        if seconds < largest * unit:
            digits = 1 if name == "h" and seconds < 9.95 * unit else 0
            return f"{seconds / unit:.{digits}f} {name}".replace(".0 ", " ")
    return f"{seconds / 86400:.1f} days".replace(".0 ", " ")


class Forecast:
    """Estimates the time left by the mean speed that this process has had so far.

    Evaluations and saving count from the end of the first epoch on, as they take their share of the
    time. Epochs that were done before a run was resumed count neither as time nor as work.

    Args:
        hint: what makes a run shorter; follows the announcement of a long one.
    """

    def __init__(self, clock: Callable[[], float], *, epochs: int, hint: str = "") -> None:
        self.clock, self.epochs, self.hint = clock, epochs, hint
        self.observations = 0
        self.start = self.now = (0.0, 0.0)  # seconds, and epochs that are done
        self.is_announced = False

    def observe(self, epochs_done: float) -> None:
        """Note how far the run is; on a GPU it may be ahead of what is computed."""
        self.now = (self.clock(), epochs_done)
        self.observations += 1
        if self.observations <= WARM_UP:
            self.start = self.now

    def seconds_left(self) -> float | None:
        """Seconds until the end of the run; None until the speed is known."""
        seconds, done = self.now[0] - self.start[0], self.now[1] - self.start[1]
        return seconds / done * (self.epochs - self.now[1]) if done > 0 else None

    def announcement(self) -> list[str]:
        """The lines to print now: once, as soon as the speed is known, of a run of minutes."""
        left, epochs_left = self.seconds_left(), self.epochs - self.now[1]
        is_known = self.now[0] - self.start[0] >= MIN_SECONDS
        if self.is_announced or left is None or not is_known or left < SHORT_SECONDS:
            return []
        self.is_announced = True
        line = f"about {in_words(left / epochs_left)} an epoch, {in_words(left)} left"
        if int(self.now[1]) == int(self.start[1]):
            line += ", evaluation not counted yet"
        return [line, self.hint] if self.hint and left > LONG_SECONDS else [line]
