"""How long a run takes, by clocks that the tests turn; and what the console shows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

import ranks
import resnet50_test
import transformer_test
from conftest import each_of
from test_training import DIGITS, run
from training import progress_bar
from training.run_log import EpochStatus, RunLog
from training.time_estimate import TimeEstimate, in_six_characters, in_words

HOUR = 3600.0
HINT = "for a shorter run: a smaller one"


class Clock:
    """A clock that stands still, or goes on by so many seconds in each call."""

    def __init__(self, each_call: float = 0.0) -> None:
        self.now, self.each_call = 1000.0, each_call

    def __call__(self) -> float:
        self.now += self.each_call
        return self.now


# -------------------------------------------------------------------- durations


@each_of(
    ("seconds", "words", "characters"),
    [
        (0, "0 s", "0s"),
        (59.4, "59 s", "59s"),
        (59.6, "60 s", "1m00s"),
        (89, "89 s", "1m29s"),
        (1200, "20 min", "20m00s"),
        (1.5 * HOUR, "1.5 h", "1h30m"),
        (2 * HOUR, "2 h", "2h00m"),
        (16.3 * HOUR, "16 h", "16h18m"),
        (76 * HOUR, "3.2 days", "3d04h"),
        (48 * HOUR, "2 days", "2d00h"),
        (2400 * HOUR, "100 days", "100d"),
    ],
)
def test_durations(seconds, words, characters):
    assert in_words(seconds) == words
    assert in_six_characters(seconds) == characters
    assert len(characters) <= 6


def test_an_unknown_duration_is_a_dash():
    assert in_six_characters(None) == "-"


# -------------------------------------------------------------------- the arithmetic


def steps(
    estimate: TimeEstimate,
    clock: Clock,
    *,
    first: int,
    last: int,
    seconds: float,
    samples: int = 10,
    before: int = 0,
) -> list[str]:
    """Do steps `first` to `last` of the run, each of some seconds and samples; what is announced.

    `before` are the steps before the current epoch.
    """
    lines = []
    for step in range(first, last + 1):
        clock.now += seconds
        estimate.observe(step, (step - before) * samples)
        lines += estimate.announcement()
    return lines


def test_the_estimate_leaves_out_the_first_steps_and_counts_each_part_once():
    clock = Clock()
    estimate = TimeEstimate(clock, hint=HINT)
    estimate.start_epoch(0, epochs=50, step=0, samples=1000, done=0)
    assert estimate.seconds_left() is None
    assert steps(estimate, clock, first=1, last=2, seconds=500) == []  # compilation
    assert steps(estimate, clock, first=3, last=5, seconds=12) == []
    assert estimate.seconds_left() is None
    lines = steps(estimate, clock, first=6, last=6, seconds=12)
    # 100 steps of 12 s make an epoch; 6 of them are done, and have taken 1048 s.
    assert estimate.seconds_left() == pytest.approx(5000 * 12 - 72)
    assert lines == ["about 20 min an epoch, 17 h in all, evaluation not counted yet", HINT]
    assert steps(estimate, clock, first=7, last=100, seconds=12) == []
    estimate.end_steps()
    assert estimate.seconds_left() == pytest.approx(49 * 1200)
    clock.now += 60  # evaluating and saving
    estimate.end_epoch()
    assert estimate.seconds_left() == pytest.approx(49 * 1260)
    assert estimate.announcement() == [], "the first line was not far off"
    estimate.start_epoch(1, epochs=50, step=100, samples=1000, done=0)
    assert steps(estimate, clock, first=101, last=200, seconds=6, before=100) == []
    estimate.end_steps()
    clock.now += 60
    estimate.end_epoch()
    assert estimate.seconds_left() == pytest.approx(48 * 660)
    assert estimate.announcement() == [], "one corrected line at most"


def test_a_correction_comes_where_evaluation_takes_much_longer():
    clock = Clock()
    estimate = TimeEstimate(clock, hint=HINT)
    estimate.start_epoch(0, epochs=10, step=0, samples=1000, done=0)
    lines = steps(estimate, clock, first=1, last=100, seconds=6)
    assert lines == ["about 10 min an epoch, 1.7 h in all, evaluation not counted yet"]
    estimate.end_steps()
    clock.now += 300
    estimate.end_epoch()
    assert estimate.announcement() == ["corrected: about 15 min an epoch, 2.5 h in all", HINT]
    assert estimate.announcement() == []


def test_without_evaluation_there_is_nothing_to_wait_for():
    clock = Clock()
    estimate = TimeEstimate(clock, eval_every=0)
    estimate.start_epoch(0, epochs=1, step=0, samples=1000, done=0)
    assert steps(estimate, clock, first=1, last=50, seconds=6) == ["about 10 min in all"]


def test_a_resumed_run_counts_what_it_does_itself():
    clock = Clock()
    estimate = TimeEstimate(clock)
    estimate.start_epoch(4, epochs=10, step=450, samples=1000, done=500)
    lines = steps(estimate, clock, first=451, last=500, seconds=12, before=400)
    # Half an epoch, and five whole ones.
    assert lines == [
        "about 20 min an epoch, 1.8 h for the 6 epochs that are left, evaluation not counted yet"
    ]
    estimate.end_steps()
    estimate.end_epoch()
    assert estimate.seconds_left() == pytest.approx(5 * 1200)


def test_epochs_that_are_too_short_to_be_measured_are_measured_together():
    clock = Clock()
    estimate = TimeEstimate(clock)
    told = []
    for epoch in range(9):
        before = 4 * epoch
        estimate.start_epoch(epoch, epochs=100, step=before, samples=40, done=0)
        seconds = 5.0 if epoch == 0 else 0.25
        steps(estimate, clock, first=before + 1, last=before + 4, seconds=seconds, before=before)
        estimate.end_steps()
        clock.now += 0.5
        estimate.end_epoch()
        told.append(estimate.announcement())
    assert estimate.seconds_left() == pytest.approx(91 * 1.5)
    assert told[:5] == [[]] * 5
    # 20.5 + 4 * 1.5 + 95 * 1.5 seconds once five epochs after the first are measured
    assert told[5] == ["about 2 s an epoch, 3 min in all"]


def test_runs_of_seconds_are_not_announced():
    clock = Clock()
    estimate = TimeEstimate(clock, hint=HINT)
    estimate.start_epoch(0, epochs=1, step=0, samples=580, done=0)
    assert steps(estimate, clock, first=1, last=58, seconds=1) == []
    assert estimate.seconds_left() == pytest.approx(0)


def test_a_roll_back_does_not_confuse_the_estimate():
    clock = Clock()
    estimate = TimeEstimate(clock)
    estimate.start_epoch(0, epochs=2, step=0, samples=1000, done=0)
    steps(estimate, clock, first=1, last=40, seconds=6)
    estimate.start_epoch(0, epochs=2, step=10, samples=1000, done=100)
    steps(estimate, clock, first=11, last=30, seconds=6)
    assert estimate.seconds_left() == pytest.approx(170 * 6)


# -------------------------------------------------------------------- a whole run


def console_of_a_slow_run(
    monkeypatch: pytest.MonkeyPatch, *flags: str, seconds: float = 10.0
) -> list[str]:
    """The lines of a run on a clock that goes on with every look at it."""
    monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=seconds)))
    console = run(resnet50_test, *DIGITS, *flags, "--out", "run", monkeypatch=monkeypatch)
    return console.splitlines()


PROGRESS = re.compile(
    r"epoch \d/2, step \d+ of 23: loss \d\.\d{4}, accuracy \d+\.\d\d %, \d+ samples/s"
    r"(, [\dhms]+ left)?"
)


def test_off_a_terminal_a_run_announces_its_time_and_prints_its_progress(here, monkeypatch):
    lines = console_of_a_slow_run(monkeypatch)
    announced = [line for line in lines if line.startswith("about ")]
    assert len(announced) == 1
    assert re.fullmatch(r"about \d+ min an epoch, \d+ min in all, evaluation .*", announced[0])
    progress = [line for line in lines if line.startswith("epoch ") and "step" in line]
    assert len(progress) >= 4
    assert all(PROGRESS.fullmatch(line) for line in progress), progress
    assert progress[-1].endswith(" left")


def test_log_every_sets_how_often_and_0_is_never(here, monkeypatch):
    often = console_of_a_slow_run(monkeypatch, "--log_every", "30")
    Path("run").rename("often")
    seldom = console_of_a_slow_run(monkeypatch, "--log_every", "300")
    Path("run").rename("seldom")
    never = console_of_a_slow_run(monkeypatch, "--log_every", "0")
    numbers = [sum(map(bool, map(PROGRESS.fullmatch, each))) for each in (often, seldom, never)]
    assert numbers[0] > numbers[1] > numbers[2] == 0
    assert ranks.metrics(here / "often") == ranks.metrics(here / "run")


def test_a_long_run_gets_a_hint_with_flags_that_there_are(here, monkeypatch):
    lines = console_of_a_slow_run(monkeypatch, seconds=1000.0)
    [hint] = [line for line in lines if line.startswith("for a shorter run: ")]
    assert "a smaller --arch such as resnet20" in hint
    assert hint.endswith("or a GPU")


@pytest.mark.parametrize("script", [resnet50_test, transformer_test])
def test_hints_name_flags_and_recipes_that_there_are(script):
    from cli import factory, image_classification, options, text_classification
    from distributed.world import World

    task = image_classification if script is resnet50_test else text_classification
    args, _ = options.parse(script.parser(), script.SCRIPT, [])
    hint = task.long_run_hint(args, factory.Run(script.SCRIPT, World(), None))
    assert set(re.findall(r"--\w+", hint)) <= script.parser().option_strings()
    [recipe] = re.findall(r"recipes/\S+\.yaml", hint)
    assert (ranks.ROOT / recipe).exists()
    args, _ = options.parse(script.parser(), script.SCRIPT, ["--dataset", script_dataset(script)])
    hint = task.long_run_hint(args, factory.Run(script.SCRIPT, World(), None))
    assert "recipe" not in hint


def script_dataset(script) -> str:
    """A data set that no recipe of a hint is about."""
    return "digits" if script is resnet50_test else "headlines"


def test_a_fast_run_announces_nothing(here, monkeypatch):
    lines = console_of_a_slow_run(monkeypatch, seconds=0.01)
    assert not [line for line in lines if "about" in line or PROGRESS.fullmatch(line)]


def test_two_runs_differ_in_nothing_but_time_and_the_rows_end_with_the_time_left(here, monkeypatch):
    lines = console_of_a_slow_run(monkeypatch)
    [titles] = [line for line in lines if line.startswith("epoch  train loss")]
    assert titles.split()[-1] == "left"
    assert lines[-4].split()[-1] == "0s"
    assert "left" not in ranks.metrics(here / "run")[0]


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


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), "epoch|train loss|train %|val %|test %|lr|samples/s|seconds|left"),
        (("val_accuracy",), "epoch|train loss|train %|test %|lr|batch|samples/s|seconds|left"),
        (
            ("test_accuracy", "batch_size"),
            "epoch|train loss|train %|val %|lr|lambda|samples/s|seconds|left",
        ),
    ],
)
def test_rows_fit_80_characters(missing, expected, tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    row = {key: value for key, value in ROW.items() if key not in missing}
    log.epoch([row], seconds_left=99 * 24 * HOUR)
    titles, values = capsys.readouterr().out.splitlines()
    assert "|".join(re.split(r"  +", titles.strip())) == expected
    assert len(titles) == len(values) <= 80


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
)


def test_a_terminal_has_a_bar_with_the_time_left_of_the_run_and_no_lines(
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
    assert shown[-1].endswith("samples/s, loss 1.2346, acc 45.68 %, 15h42m left")
    assert all(len(line) <= 80 for line in drawn)
    assert capsys.readouterr().out == ""


def test_off_a_terminal_only_rank_0_prints_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(RunLog, "clock", staticmethod(Clock(each_call=1000.0)))
    for is_main, expected in ((False, ""), (True, STATUS.line() + "\n")):
        log = RunLog(tmp_path, is_main=is_main, log_every=60)
        log.status(STATUS, log.bar(3, 50, total=1000, done=0))
        assert capsys.readouterr().out == expected
    assert STATUS.line() == (
        "epoch 3/50, step 120 of 390: loss 1.2346, accuracy 45.68 %, 42 samples/s, 15h42m left"
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
