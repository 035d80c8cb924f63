"""--eval_every: a run that evaluates less often is the same run, and what reads it copes."""

import signal
from unittest import mock

import pytest
import torch
from torch import nn

import ranks
from conftest import each_of, for_each, run
from distributed.world import World
from errors import InputError
from figures import report
from optimizer_cases import assert_same
from test_training import DIGITS
from trainers import trainer_of
from training import checkpoint
from training.epoch_report import is_evaluated
from training.run_log import RunLog
from training.trainer import Trainer

FLAGS = f"{DIGITS} --epochs 5 --lr 0.05 --seed 3"


@pytest.mark.process
def test_evaluating_less_often_changes_no_weight(here):
    run("images", FLAGS, "--out each")
    console = run("images", FLAGS, "--eval_every 2 --out second")
    each, second = ranks.metrics(here / "each"), ranks.metrics(here / "second")
    assert [is_evaluated(row) for row in each] == [True] * 5
    assert [is_evaluated(row) for row in second] == [False, True, False, True, True]
    for row, other in zip(each, second, strict=True):
        assert row.keys() == other.keys()
        given = {key: value for key, value in other.items() if value is not None}
        assert given == {key: row[key] for key in given}
        assert len(row) - len(given) == (0 if is_evaluated(other) else 4)
    assert_same(ranks.weights(here / "each"), ranks.weights(here / "second"))
    best = max(filter(is_evaluated, second), key=lambda row: row["test_accuracy"])
    assert f"best.pt: epoch {best['epoch']}, " in console
    assert console.count("test %") == 1, "an empty column is no other table"


def test_a_broken_file_of_an_evaluation_within_an_epoch_costs_no_steps(here, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", mock.Mock(side_effect=InputError("broken")))
    run("images", FLAGS, "--eval_every 0.5 --out cut", code=2)
    assert checkpoint.load(here / "cut").progress["step"] > 0


@pytest.mark.process
def test_a_run_without_an_evaluation_by_now_can_be_resumed_and_reported(here, monkeypatch):
    run("images", FLAGS, "--eval_every 9 --out whole")

    def stop_after_the_second(log, rows):
        original(log, rows)
        if len(rows) == 2:
            signal.raise_signal(signal.SIGTERM)

    original = RunLog.epoch
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "epoch", stop_after_the_second)
        run("images", FLAGS, "--eval_every 9 --out cut", code=130)
    assert not any(map(is_evaluated, ranks.metrics(here / "cut")))
    report.main(["cut", "--out", "cut.html"])
    run("images", "--resume cut")
    ranks.same_run(here / "whole", here / "cut")


@pytest.mark.process
@each_of("more", ["--optimizer slamb --lr 3e-3 --local_steps 8", "--ema 0.9"])
def test_ranks_agree_as_often_without_evaluating(more, tmp_path):
    one, other = (tmp_path / f"{more.split()[0]}-{eval_every}" for eval_every in (1, 4))
    for folder in (one, other):
        words = f"{DIGITS} --epochs 4 {more} --eval_every {folder.name[-1]} --out {folder}"
        ranks.run(f"resnet50_test.py {words}", tmp_path, 2)
    assert_same(ranks.weights(one), ranks.weights(other))
    assert ranks.metrics(one)[-1] == ranks.metrics(other)[-1]


WITHIN = """resnet50_test.py --dataset digits --arch resnet8 --subset 0.2 --lr 0.05 --epochs 2
    --save_every 1 --keep 99 --precision fp32 --seed 3"""
WAYS = [  # number of ranks, flags
    (1, "--bs 32 --ema 0.9 --dynamic_batch noise --batch_args min=16 lr=sqrt --stop_at 0.55"),
    (2, "--bs 16 --workers 2 --augment auto --accumulate 2 --patience 1 --stop_at 0.18"),
    (2, "--bs 16 --optimizer slamb --lr 3e-3 --local_steps 3 --stop_at 0.15"),
]


def test_there_is_at_most_an_evaluation_after_each_step():
    trainer = trainer_of(nn.Linear(2, 2), World(), eval_every=5e-324)  # 1 / it is infinite
    assert trainer.evaluations_within_epoch() == {*range(1, trainer.batches.steps())}


@pytest.mark.process
def test_an_evaluation_within_an_epoch_changes_no_training_and_may_end_it(tmp_path):
    """It has a row, counts for best.pt, and a run that goes on from it is the same."""

    def check(size: int, flags: str) -> None:
        command, folder = f"{WITHIN} {flags}", tmp_path / str(WAYS.index((size, flags)))
        ranks.run(f"{command} --stop_at 0 --out whole", folder, size)
        ranks.run(f"{command} --stop_at 0 --eval_every 0.4 --out often", folder, size)
        rows = ranks.metrics(folder / "often")
        assert [row["epoch"] == int(row["epoch"]) for row in rows] == [False, False, True] * 2
        assert rows[2::3] == ranks.metrics(folder / "whole")
        states = [checkpoint.load(folder / name).state for name in ("whole", "often")]
        for part in ("model", "optimizer", "average", "ranks"):
            assert_same(*({"": state[part]} for state in states))

        console = ranks.run(f"{command} --eval_every 0.4 --out ended", folder, size)
        assert "has reached the target" in console
        rows, files = ranks.metrics(folder / "ended"), checkpoint.latest_files(folder / "ended")
        assert not isinstance(rows[-1]["epoch"], int)
        state = checkpoint.load(files[0]).state
        of_ranks = [rank["weights"] for rank in state["ranks"]]
        for name in of_ranks[0]:  # the weights that were evaluated are what inference gets
            means = torch.stack([own[name] for own in of_ranks]).double().mean(0).float()
            torch.testing.assert_close(state["model"][name].float(), means)
        console = ranks.run(f"resnet50_test.py --checkpoint {files[0]} --evaluate", folder, size)
        assert f"all  {100 * rows[-1]['test_accuracy']:6.2f} %" in console
        stored = {path: checkpoint.load(path).progress for path in files}
        first = next(path for path in reversed(files) if stored[path]["rows"])  # as best.pt
        assert stored[first]["step"] == rows[0]["step"]
        words = f"resnet50_test.py --resume {first} --stop_at 0 --out resumed"
        ranks.run(words, folder, size)
        ranks.same_run(folder / "often", folder / "resumed", files=["last"])

    for_each(WAYS, check)
