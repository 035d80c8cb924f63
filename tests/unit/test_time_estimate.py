"""What the console shows off a terminal, by a clock that the tests turn."""

from __future__ import annotations

import itertools
import re

import ranks
import resnet50_test
from conftest import run
from test_training import DIGITS
from training.run_log import RunLog


def test_off_a_terminal_a_run_prints_its_progress(here, monkeypatch):
    def console(log_every: str, seconds: float) -> list[str]:
        """The lines of a run on a clock that goes on with every look at it."""
        clock = itertools.count(1000.0, step=seconds).__next__
        monkeypatch.setattr(RunLog, "clock", staticmethod(clock))
        more = f"--arch resnet8 --log_every {log_every} --out {log_every}"
        return run(resnet50_test, DIGITS, more).splitlines()

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
