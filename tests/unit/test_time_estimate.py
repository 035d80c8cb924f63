"""How long a run takes, by clocks that the tests turn; and what the console shows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import ranks
import resnet50_test
import transformer_test
from conftest import each_of
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


@each_of(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (89, "89 s"),
        (1200, "20 min"),
        (1.5 * HOUR, "1.5 h"),
        (2 * HOUR, "2 h"),
        (16.3 * HOUR, "16 h"),
        (76 * HOUR, "3.2 days"),
        (48 * HOUR, "2 days"),
    ],
)
def test_durations(seconds, words):
    assert in_words(seconds) == words


def announced(forecast: Forecast, clock: Clock, done: list[float], seconds: float) -> list[str]:
    """What is announced while these numbers of epochs are done, one after so many seconds."""
    lines = []
    for epochs_done in done:
        clock.now += seconds
        forecast.observe(epochs_done)
        lines += forecast.announcement()
    return lines


def test_the_forecast_leaves_out_the_first_steps_and_counts_evaluations():
    clock = Clock()
    forecast = Forecast(clock, epochs=50, hint=HINT)
    assert forecast.seconds_left() is None
    assert announced(forecast, clock, [0.01, 0.02, 0.03], seconds=500) == []  # compilation
    assert forecast.seconds_left() is None
    lines = announced(forecast, clock, [0.04, 0.05], seconds=12)
    assert lines == ["about 20 min an epoch, 17 h left, evaluation not counted yet", HINT]
    assert forecast.seconds_left() == pytest.approx(49.95 * 1200)
    assert announced(forecast, clock, [0.03 + 0.97 / 2, 0.999], seconds=581) == [], "only once"
    clock.now += 1.2 + 60  # evaluating and saving
    forecast.observe(1.0)
    assert forecast.seconds_left() == pytest.approx(49 / 0.97 * (24 + 1162 + 61.2))


def test_a_resumed_run_counts_what_it_does_itself():
    clock = Clock()
    forecast = Forecast(clock, epochs=10)
    done = [4.5, 4.6, 4.7, 4.9, 5.1]
    assert announced(forecast, clock, done, seconds=240) == [
        "about 20 min an epoch, 1.7 h left, evaluation not counted yet"
    ]
    assert forecast.seconds_left() == pytest.approx(4.9 * 1200)


def test_runs_of_seconds_are_not_announced():
    clock = Clock()
    forecast = Forecast(clock, epochs=1, hint=HINT)
    assert announced(forecast, clock, [0.1, 0.2, 0.3, 0.4, 0.5], seconds=10) == []
    assert forecast.seconds_left() == pytest.approx(50)


# -------------------------------------------------------------------- a whole run


def console_of_a_slow_run(
    monkeypatch: pytest.MonkeyPatch, *flags: str, seconds: float = 10.0
) -> list[str]:
    """The lines of a run on a clock that goes on with every look at it."""
    monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=seconds)))
    console = run(resnet50_test, *DIGITS, *flags, "--out", "run", monkeypatch=monkeypatch)
    return console.splitlines()


PROGRESS = re.compile(
    r"epoch \d/2, step \d+ of 23: loss \d\.\d{4}, accuracy \d+\.\d\d %, \d{1,6} samples/s"
    r"(, [\d.]+ (s|min|h|days) left)?"
)


def test_off_a_terminal_a_run_announces_its_time_and_prints_its_progress(here, monkeypatch):
    often = console_of_a_slow_run(monkeypatch, "--log_every", "30", seconds=1000.0)
    Path("run").rename("often")
    never = console_of_a_slow_run(monkeypatch, "--log_every", "0", seconds=0.01)
    [line, hint] = [each for each in often if re.match("about|for a shorter run: ", each)]
    assert re.fullmatch(r"about [\d.]+ h an epoch, \d+ h left, evaluation .*", line)
    assert "a smaller --arch such as resnet20" in hint
    progress = [line for line in often if line.startswith("epoch ") and "step" in line]
    assert len(progress) >= 4
    assert all(PROGRESS.fullmatch(line) for line in progress), progress
    assert progress[-1].endswith(" left")
    [titles] = [line for line in often if line.startswith("epoch  train loss")]
    assert titles.split()[-2:] == ["left", "batch"]
    assert not [line for line in never if "about" in line or PROGRESS.fullmatch(line)]
    assert ranks.metrics(here / "often") == ranks.metrics(here / "run")
    assert "left" not in ranks.metrics(here / "run")[0]


def test_hints_name_flags_and_recipes_that_there_are():
    from cli import factory, image_classification, options, text_classification
    from distributed.world import World

    for script, task, other in (
        (resnet50_test, image_classification, "digits"),
        (transformer_test, text_classification, "headlines"),
    ):
        run = factory.Run(script.SCRIPT, World(), None)
        args, _ = options.parse(script.parser(), script.SCRIPT, [])
        hint = task.long_run_hint(args, run)
        assert set(re.findall(r"--\w+", hint)) <= set(script.parser().names())
        [recipe] = re.findall(r"recipes/\S+\.yaml", hint)
        assert (ranks.ROOT / recipe).exists()
        args, _ = options.parse(script.parser(), script.SCRIPT, ["--dataset", other])
        assert "recipe" not in task.long_run_hint(args, run), "no recipe is about this data set"


# -------------------------------------------------------------------- what is shown


ROW = {
    "epoch": 10_000,
    "train_loss": 6059.94981,
    "train_accuracy": 1.0,
    "val_accuracy": 1.0,
    "val_loss": 1.0,
    "test_accuracy": 1.0,
    "test_loss": 6059.9498,
    "lr": 1.2345e-05,
    "batch_size": 65_536,
    "mean_lambda": 0.5,
    "noise_scale": 123_456.7,
    "samples_per_second": 1_234_567.8,
    "seconds": 1_234_567.89,
}


@each_of(
    ("missing", "expected"),
    [
        ((), "epoch|train loss|train %|val %|test %|lr|samples/s|seconds|left"),
        (("val_accuracy",), "epoch|train loss|train %|test %|lr|samples/s|seconds|left|batch"),
        (
            ("test_accuracy", "batch_size"),
            "epoch|train loss|train %|val %|lr|samples/s|seconds|left|lambda",
        ),
    ],
)
def test_rows_fit_80_characters(missing, expected, tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    row = {key: value for key, value in ROW.items() if key not in missing}
    log.epoch([row], seconds_left=99.1 * 24 * HOUR)
    titles, values = capsys.readouterr().out.splitlines()
    assert "|".join(re.split(r"  +", titles.strip())) == expected
    assert len(titles) == len(values) <= 80
    assert "99.1 d" in values


def test_titles_come_again_where_the_columns_change(tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    rows = [ROW, ROW, {key: value for key, value in ROW.items() if key != "val_accuracy"}]
    for number in range(1, 4):
        log.epoch(rows[:number])
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("epoch") for line in lines] == [True, False, False, True, False]


class Terminal(io.StringIO):
    """What stderr is on a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal; within the test, since pytest replaces stderr before it."""
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress_bar, "tqdm", always_drawn(tqdm))
    return screen


def always_drawn(bar: Callable) -> Callable:
    """The bar, drawn at every update, however fast they come."""
    forced = {"mininterval": 0, "miniters": 1, "ncols": 80, "dynamic_ncols": False}
    return lambda **settings: bar(**settings | forced)


STATUS = EpochStatus(
    epoch=3,
    epochs=50,
    step=120,
    steps=390,
    loss=1.23456,
    accuracy=0.45678,
    samples_per_second=42.4,
    seconds_left=15.7 * HOUR,
    run_step=900,
    lr=0.1,
    grad_norm=torch.tensor(2.0),
)


def test_a_terminal_has_a_bar_with_the_time_left_of_the_epoch_and_no_lines(
    tmp_path, monkeypatch, capsys
):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=1000.0)))
    log = RunLog(tmp_path, is_main=True, log_every=60)
    with log.bar(3, 50, total=1000, done=0) as bar:
        log.status(STATUS, bar)
        bar.update(10)
    drawn = terminal.getvalue().split("\r")
    shown = [line for line in drawn if "loss" in line]
    assert re.search(r"\| \d\d:\d\d, .* samples/s, loss 1.2346, acc 45.68 %$", shown[-1])
    assert all(len(line) <= 80 for line in drawn)
    assert capsys.readouterr().out == ""
    off_terminal = [RunLog(tmp_path, is_main=is_main, log_every=60) for is_main in (False, True)]
    monkeypatch.setattr("sys.stderr", io.StringIO())
    for log, expected in zip(off_terminal, ("", STATUS.line() + "\n")):  # of rank 0 alone
        log.status(STATUS, log.bar(3, 50, total=1000, done=0))
        assert capsys.readouterr().out == expected
    assert STATUS.line() == (
        "epoch 3/50, step 120 of 390: loss 1.2346, accuracy 45.68 %, 42 samples/s, 16 h left"
    )


def test_evaluation_has_a_bar_on_a_terminal(here, monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr("sys.argv", ["resnet50_test.py", *DIGITS, "--epochs", "1", "--out", "run"])
    resnet50_test.main()
    assert "evaluating on the test set 100%" in terminal.getvalue()
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr("sys.argv", ["resnet50_test.py", "--checkpoint", "run", "--evaluate"])
    resnet50_test.main()
    assert "evaluating on the test set 100%" in terminal.getvalue()
