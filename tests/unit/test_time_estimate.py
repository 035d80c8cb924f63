"""How long a run takes, by clocks that the tests turn; and what the console shows."""

from __future__ import annotations

import io
import re

import pytest
import torch
from tqdm import tqdm

import ranks
import resnet50_test
from test_training import DIGITS, run
from training import progress_bar
from training.run_log import EpochStatus, RunLog
from training.time_estimate import Forecast, in_words

HOUR = 3600.0
HINT = "for a shorter run: a smaller one"


class Clock:
    """A clock that stands still, or goes on by so many seconds in each call."""

    def __init__(self, each_call: float = 0.0) -> None:
        self.now, self.each_call = 1000.0, each_call

    def __call__(self) -> float:
        self.now += self.each_call
        return self.now


def test_durations():
    words = {0: "0 s", 89: "89 s", 1200: "20 min", 1.5 * HOUR: "1.5 h", 2 * HOUR: "2 h"}
    words |= {16.3 * HOUR: "16 h", 76 * HOUR: "3.2 days", 48 * HOUR: "2 days"}
    assert {seconds: in_words(seconds) for seconds in words} == words


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


ROW = {"epoch": 10_000, "train_loss": 6059.94981, "test_loss": 6059.9498, "lr": 1.2345e-05}
ROW |= {"train_accuracy": 1.0, "val_accuracy": 1.0, "test_accuracy": 1.0, "mean_lambda": 0.5}
ROW |= {"batch_size": 65_536, "samples_per_second": 1_234_567.8, "seconds": 1_234_567.89}


def test_rows_fit_80_characters_and_titles_come_again_where_columns_change(tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    rows = [ROW, ROW] + [
        {key: value for key, value in ROW.items() if key not in missing}
        for missing in (["val_accuracy"], ["test_accuracy", "batch_size"])
    ]
    for number in range(1, 5):
        log.epoch(rows[:number], seconds_left=99.1 * 24 * HOUR)
    lines = capsys.readouterr().out.splitlines()
    titles = [re.split(r"  +", line.strip()) for line in lines if line.startswith("epoch")]
    assert ["|".join(names) for names in titles] == [
        "epoch|train loss|train %|val %|test %|lr|samples/s|seconds|left",
        "epoch|train loss|train %|test %|lr|samples/s|seconds|left|batch",
        "epoch|train loss|train %|val %|lr|samples/s|seconds|left|lambda",
    ]
    assert all(len(line) <= 80 for line in lines)
    assert [number for number, line in enumerate(lines) if "99.1 d" in line] == [1, 2, 4, 6]


STATUS = EpochStatus(
    **{"epoch": 3, "epochs": 50, "step": 120, "steps": 390, "loss": 1.23456, "accuracy": 0.45678},
    **{"samples_per_second": 42.4, "seconds_left": 15.7 * HOUR, "run_step": 900, "lr": 0.1},
    grad_norm=torch.tensor(2.0),
)
LINE = "epoch 3/50, step 120 of 390: loss 1.2346, accuracy 45.68 %, 42 samples/s, 16 h left\n"


def test_a_terminal_has_a_bar_and_no_lines_which_are_those_of_rank_0(tmp_path, monkeypatch, capsys):
    drawn_always = {"mininterval": 0, "miniters": 1, "ncols": 80, "dynamic_ncols": False}
    monkeypatch.setattr(progress_bar, "tqdm", lambda **settings: tqdm(**settings | drawn_always))
    monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=1000.0)))
    logs = [RunLog(tmp_path, is_main=is_main, log_every=60) for is_main in (True, False, True)]
    screens = [io.StringIO(), io.StringIO(), io.StringIO()]
    screens[0].isatty = lambda: True
    for log, screen, expected in zip(logs, screens, ("", "", LINE)):
        monkeypatch.setattr("sys.stderr", screen)
        with log.bar(3, 50, total=1000, done=0) as bar:
            log.status(STATUS, bar)
            bar.update(10)
        assert capsys.readouterr().out == expected
    drawn = screens[0].getvalue().split("\r")
    shown = [line for line in drawn if "loss" in line]
    assert re.search(r"\| \d\d:\d\d, .* samples/s, loss 1.2346, acc 45.68 %$", shown[-1])
    assert all(len(line) <= 80 for line in drawn)
