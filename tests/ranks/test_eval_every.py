"""--eval_every: a run that evaluates less often is the same run, and what reads it copes."""

from __future__ import annotations

import signal

import pytest
import torch

import ranks
import resnet50_test
from figures import report
from figures.run_logs import epochs_to
from test_training import DIGITS, run
from training.epoch_report import how_chosen, is_evaluated
from training.run_log import RunLog, fitting_columns
from training.trainer import Trainer

FLAGS = [*DIGITS, "--epochs", "5", "--lr", "0.05", "--seed", "3"]


def test_evaluating_less_often_changes_no_weight(here, monkeypatch):
    run(resnet50_test, *FLAGS, "--out", "each", monkeypatch=monkeypatch)
    console = run(
        resnet50_test, *FLAGS, "--eval_every", "2", "--out", "second", monkeypatch=monkeypatch
    )
    each, second = ranks.metrics(here / "each"), ranks.metrics(here / "second")
    assert [is_evaluated(row) for row in each] == [True] * 5
    assert [is_evaluated(row) for row in second] == [False, True, False, True, True]
    for row, other in zip(each, second, strict=True):
        assert row.keys() == other.keys()
        given = {key: value for key, value in other.items() if value is not None}
        assert given == {key: row[key] for key in given}
        assert len(row) - len(given) == (0 if is_evaluated(other) else 2)
    weights, others = ranks.weights(here / "each"), ranks.weights(here / "second")
    assert all(weights[name].equal(others[name]) for name in weights)
    best = max(filter(is_evaluated, second), key=lambda row: row["test_accuracy"])
    assert f"best.pt: epoch {best['epoch']}, " in console
    assert console.count("test %") == 1, "an empty column is no other table"


def test_reports_leave_out_what_was_not_evaluated(here, monkeypatch):
    run(resnet50_test, *FLAGS, "--eval_every", "2", "--out", "run", monkeypatch=monkeypatch)
    drawn = {}

    def draw_chart(lines, xlabel, ylabel, **settings):
        drawn.update({f"{line.label} {ylabel} {xlabel}": list(line.x) for line in lines})
        return {"alt": "", "source": ""}

    monkeypatch.setattr(report, "draw_chart", draw_chart)
    report.main(["run", "--out", "run.html"])
    assert drawn["test accuracy / % epoch"] == [2, 4, 5]
    assert drawn["training loss epoch"] == [1, 2, 3, 4, 5]


def test_a_run_without_an_evaluation_by_now_can_be_resumed_and_reported(here, monkeypatch):
    flags = [*FLAGS, "--eval_every", "9"]
    whole = run(resnet50_test, *flags, "--out", "whole", monkeypatch=monkeypatch)
    assert "(the only epoch that was evaluated)" in whole

    def stop_after_the_second(log, rows):
        original(log, rows)
        if len(rows) == 2:
            signal.raise_signal(signal.SIGTERM)

    original = RunLog.epoch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "epoch", stop_after_the_second)
        run(resnet50_test, *flags, "--out", "cut", monkeypatch=monkeypatch, code=130)
    assert not any(map(is_evaluated, ranks.metrics(here / "cut")))
    report.main(["cut", "--out", "cut.html"])
    run(resnet50_test, "--resume", "cut", monkeypatch=monkeypatch)
    ranks.same_run(here / "whole", here / "cut")


def test_the_first_of_equally_accurate_epochs_is_the_best(here, monkeypatch):
    evaluated = {"test_loss": 1.0, "test_accuracy": 0.5}
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: dict(evaluated))
    flags = [*DIGITS, "--epochs", "2", "--subset", "0.1", "--out", "run"]
    run(resnet50_test, *flags, monkeypatch=monkeypatch)
    state = torch.load(here / "run" / "best.pt", weights_only=True)
    assert state["progress"]["best"]["epoch"] == state["progress"]["epoch"] == 1


def test_the_columns_of_the_console_stay():
    row = {"epoch": 1, "train_loss": 0.5, "val_accuracy": None, "noise_scale": None}
    columns = fitting_columns(row)
    assert [column.title for column in columns] == ["epoch", "train loss", "val %", "noise"]
    assert [column.show(row).strip() for column in columns] == ["1", "0.5000", "", ""]


def test_an_accuracy_grows_evenly_between_evaluations():
    rows = [
        {"epoch": epoch, "test_accuracy": accuracy}
        for epoch, accuracy in enumerate([None, 0.4, None, None, 0.7], 1)
    ]
    assert epochs_to(20, rows) == 1
    assert epochs_to(50, rows) == pytest.approx(3)
    assert epochs_to(70, rows) == 5


def test_how_the_only_evaluated_epoch_was_chosen():
    assert how_chosen(3, 1, chosen_on="val", meta_learned=False) == (
        "the only epoch that was evaluated"
    )
    assert how_chosen(1, 1, chosen_on="val", meta_learned=False) == "the only epoch"


@pytest.mark.process
@pytest.mark.parametrize("more", ["--optimizer slamb --lr 3e-3 --local_steps 8", "--ema 0.9"])
def test_ranks_agree_as_often_without_evaluating(more, tmp_path):
    flags = [*DIGITS, "--epochs", "4", "--seed", "3", *more.split()]
    for name, eval_every in (("each", "1"), ("last", "4")):
        words = [*flags, "--eval_every", eval_every, "--out", name]
        command = ranks.torchrun("resnet50_test.py", *words)
        ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    weights, others = ranks.weights(tmp_path / "each"), ranks.weights(tmp_path / "last")
    assert all(weights[name].equal(others[name]) for name in weights)
    each, last = (ranks.metrics(tmp_path / name)[-1] for name in ("each", "last"))
    assert each == last
