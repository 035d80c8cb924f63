"""After divergence every optimizer and every way to communicate goes back to its checkpoint."""

import itertools
import math
import os
from functools import partial
from pathlib import Path

import pytest

import ranks
from cli import factory
from conftest import for_each
from training import losses

RUN = """resnet50_test.py --dataset digits --arch resnet8 --subset 0.5 --epochs 1 --threads 1
    --precision fp32 --seed 1 --out run"""
OPTIMIZERS = ["sgd", "adamw", "ngd", "lars", "lamb", "slamb"]
APART = "--local_steps 4 --dense_steps 2 --save_every 3"  # where one rank alone diverges
WAYS = [
    "--optimizer slamb",
    f"--optimizer lamb --sync local {APART}",
    f"--optimizer lamb --sync diloco {APART}",
    "--grad_compress bf16",
    "--grad_compress int4",
    "--ngd --balance_workers --dynamic_batch increase",
    "--optimizer adamw --parallel fsdp",
]
FIRST_BAD = 3


class Diverging(losses.CrossEntropy):
    """Cross-entropy whose calls number 3 to 12 return NaN."""

    def __init__(self, *arguments: float) -> None:
        super().__init__(*arguments)
        self.calls = itertools.count()

    def __call__(self, *batch):
        result = super().__call__(*batch)
        is_bad = FIRST_BAD <= next(self.calls) < FIRST_BAD + 10
        return result._replace(loss=result.loss * math.nan) if is_bad else result


def diverge(alone: bool = False) -> None:
    if not alone or os.environ["RANK"] == "1":
        factory.CrossEntropy = Diverging
    if os.environ.get("RANK", "0") != "0":  # another node, which does not see the run folder
        Path("node").mkdir(exist_ok=True)
        os.chdir("node")


@pytest.mark.process
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_goes_back_within_the_first_epoch(size, tmp_path):
    def goes_back(way: str) -> None:
        folder: Path = tmp_path / way.replace(" ", "")
        alone = APART in way
        first = partial(diverge, alone=alone)
        console = ranks.run(f"{RUN} --bs {32 // size} {way}", folder, size, first=first)
        back = f"back to epoch 1, step {3 if alone else 0}, learning rate x 0.5"
        assert console.count(back) == 1, console
        [row] = ranks.metrics(folder / "run")
        assert row["samples"] == 719
        assert row["skipped_steps"] == 0
        assert ("shares" in row) == ("balance" in way)
        assert 0 < row["train_loss"] < 3

    ways = WAYS if size > 1 else [f"--optimizer {name}" for name in OPTIMIZERS]
    for_each([(way,) for way in ways], goes_back)
