"""The clock of a run: training is one thing, compiling and evaluating are others."""

import json
import time

import pytest

from training import step_stats
from training.epoch_report import training_seconds
from training.progress import Progress
from training.step_stats import TrainClock


def test_the_clock_tells_compiling_apart_and_goes_on_after_a_resume(monkeypatch):
    spent = [100.0]  # before the first step of this process
    monkeypatch.setattr(step_stats, "compile_seconds", lambda: spent[0])
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = Progress()
    for expected in (5.0, 10.0):
        clock = TrainClock(progress, None)
        spent[0] += 1000.0  # by something else, before the epoch
        clock.start()
        now[0], spent[0] = now[0] + 8.0, spent[0] + 5.0
        clock.add_elapsed()
        now[0] += 2.0
        clock.add_elapsed()
        assert progress.compile_seconds == expected
        resumed = Progress()
        resumed.load_state_dict(json.loads(json.dumps(progress.state_dict())))
        progress = resumed
    assert progress.seconds == 20.0


def test_an_epoch_goes_on_at_the_same_place_in_batches_of_another_size():
    progress = Progress(step_in_epoch=30)
    progress.rescale_epoch(64, 128)
    assert progress.step_in_epoch == 15


def test_rows_say_what_was_training(runs):
    for folder in runs.values():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert row["compile_seconds"] == 0  # eager
            assert 0 < row["eval_seconds"] < row["seconds"]
            assert training_seconds(row) == pytest.approx(row["train_seconds"], abs=1e-3)
    assert training_seconds({"seconds": 10.0}) == 10.0, "of an older log"
