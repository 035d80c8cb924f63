"""The clock of a run: training is one thing, compiling and evaluating are others."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import nn

from backends import execution
from backends.precision import Precision
from distributed.world import World
from training import step_stats
from training.epoch_report import training_seconds
from training.evaluation import evaluate
from training.progress import Progress
from training.step_stats import TrainClock

needs_stance = pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 has no set_stance"
)


class Rows:
    """Ten rows of three columns."""

    lengths = None

    def __len__(self):
        return 10

    def batches(self, row_batches, epoch=None):
        for rows in row_batches:
            yield torch.ones(len(rows), 3), torch.zeros(len(rows), dtype=torch.long)


def test_compiling_is_timed_once_for_each_shape():
    execution._compile_clock.install()
    execution._compile_clock.install()
    model = nn.Linear(3, 2)
    model.compile(backend="eager", dynamic=False)
    before = execution.compile_seconds()
    model(torch.ones(4, 3)).sum().backward()
    compiled = execution.compile_seconds()
    assert compiled > before
    model(torch.ones(4, 3))
    assert execution.compile_seconds() == compiled
    model(torch.ones(5, 3))
    assert execution.compile_seconds() > compiled


@needs_stance
def test_an_evaluation_compiles_nothing():
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph

    model = nn.Linear(3, 2)
    model.compile(backend=backend, dynamic=False)
    arguments = {"precision": Precision("fp32", "cpu"), "world": World()}
    evaluate(model, Rows(), batch_size=4, **arguments)
    assert not compiled
    model(torch.ones(4, 3))
    assert len(compiled) == 1


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


def test_rows_say_what_was_training(runs):
    for folder in runs.values():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            assert row["compile_seconds"] == 0  # eager
            assert 0 < row["eval_seconds"] < row["seconds"]
            assert training_seconds(row) == pytest.approx(row["train_seconds"], abs=1e-3)
    assert training_seconds({"seconds": 10.0}) == 10.0, "of an older log"
    row = {"seconds": 10.0, "compile_seconds": 3.0, "eval_seconds": 2.0}
    assert training_seconds(row) == 5.0
