"""How long a run takes, by clocks that the tests turn; and what the console shows."""

from __future__ import annotations

import re

import pytest

import ranks
import resnet50_test
from test_training import DIGITS, run
from training.run_log import RunLog
from training.time_estimate import Forecast

HOUR = 3600.0
HINT = "for a shorter run: a smaller one"


class Clock:
    """A clock that stands still, or goes on by so many seconds in each call."""

    def __init__(self, each_call: float = 0.0) -> None:
        self.now, self.each_call = 1000.0, each_call

    def __call__(self) -> float:
        self.now += self.each_call
        return self.now


def announced(forecast: Forecast, done: list[float], seconds: float) -> list[str]:
    """What is announced while these numbers of epochs are done, one after so many seconds."""
    lines = []
    for epochs_done in done:
        forecast.clock.now += seconds
        forecast.observe(epochs_done)
        lines += forecast.announcement()
    return lines


def test_the_forecast_leaves_out_the_first_steps_and_counts_evaluations():
    forecast = Forecast(Clock(), epochs=50, hint=HINT)
    assert announced(forecast, [0.01, 0.02, 0.03], seconds=500) == []  # compilation
    assert forecast.seconds_left() is None
    lines = announced(forecast, [0.04, 0.05], seconds=12)
    assert lines == ["about 20 min an epoch, 17 h left, evaluation not counted yet", HINT]
    assert forecast.seconds_left() == pytest.approx(49.95 * 1200)
    assert announced(forecast, [0.03 + 0.97 / 2, 0.999], seconds=581) == [], "only once"
    announced(forecast, [1.0], seconds=1.2 + 60)  # evaluating and saving
    assert forecast.seconds_left() == pytest.approx(49 / 0.97 * (24 + 1162 + 61.2))


def test_a_resumed_run_counts_what_it_does_itself_and_one_of_seconds_is_not_announced():
    resumed, short = Forecast(Clock(), epochs=10), Forecast(Clock(), epochs=1, hint=HINT)
    lines = announced(resumed, [4.5, 4.6, 4.7, 4.9, 5.1], seconds=240)
    assert lines == ["about 20 min an epoch, 1.7 h left, evaluation not counted yet"]
    assert resumed.seconds_left() == pytest.approx(4.9 * 1200)
    assert announced(short, [0.1, 0.2, 0.3, 0.4, 0.5], seconds=10) == []
    assert short.seconds_left() == pytest.approx(50)


def test_off_a_terminal_a_run_announces_its_time_and_prints_its_progress(here, monkeypatch):
    def console(log_every: str, seconds: float) -> list[str]:
        """The lines of a run on a clock that goes on with every look at it."""
        monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=seconds)))
        words = [*DIGITS, "--arch", "resnet8", "--log_every", log_every, "--out", log_every]
        return run(resnet50_test, *words, monkeypatch=monkeypatch).splitlines()

    status = re.compile(
        r"epoch \d/2, step \d+ of 23: loss \d\.\d{4}, accuracy \d+\.\d\d %, \d{1,6} samples/s"
        r"(, [\d.]+ (s|min|h|days) left)?"
    )
    often, never = console("30", seconds=1000.0), console("0", seconds=0.01)
    [line, hint] = [each for each in often if re.match("about|for a shorter run: ", each)]
    assert re.fullmatch(r"about [\d.]+ h an epoch, \d+ h left, evaluation .*", line)
    assert "a smaller --arch such as resnet20" in hint
    progress = [line for line in often if line.startswith("epoch ") and "step" in line]
    assert len(progress) >= 4
    assert all(status.fullmatch(line) for line in progress), progress
    assert progress[-1].endswith(" left")
    assert not [line for line in never if "about" in line or status.fullmatch(line)]
    assert ranks.metrics(here / "30") == ranks.metrics(here / "0")
