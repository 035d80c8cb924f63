"""What the console shows off a terminal, by a clock that the tests turn; and how long runs take."""

from __future__ import annotations

import itertools
import re

import ranks
import resnet50_test
from test_training import DIGITS, run
from training.run_log import RunLog
from training.time_estimate import in_words, time_left


def test_the_time_left_is_told_by_the_mean_of_the_epochs_that_are_done():
    assert time_left(30.0, done=2.5, epochs=5) == "30 s"
    words = {45: "45 s", 1200: "20 min", 9000: "2.5 h", 57_000: "16 h", 276_480: "3.2 days"}
    assert [in_words(seconds) for seconds in words] == list(words.values())


def test_off_a_terminal_a_run_prints_its_progress(here, monkeypatch):
    def console(log_every: str, seconds: float) -> list[str]:
        """The lines of a run on a clock that goes on with every look at it."""
        clock = itertools.count(1000.0, step=seconds).__next__
        monkeypatch.setattr(RunLog, "clock", staticmethod(clock))
        words = [*DIGITS, "--arch", "resnet8", "--log_every", log_every, "--out", log_every]
        return run(resnet50_test, *words, monkeypatch=monkeypatch).splitlines()

    status = re.compile(
        r"epoch \d/2, step \d+ of 23: loss \d\.\d{4}, accuracy \d+\.\d\d %, \d{1,6} samples/s, "
        r"[\d.]+ (s|min|h|days) left"
    )
    often, never = console("30", seconds=1000.0), console("0", seconds=0.01)
    progress = [line for line in often if line.startswith("epoch ") and "step" in line]
    assert len(progress) >= 4
    assert all(status.fullmatch(line) for line in progress), progress
    assert not [line for line in never if status.fullmatch(line)]
    assert ranks.metrics(here / "30") == ranks.metrics(here / "0")
