"""After divergence every optimizer and every way to communicate goes back to its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks

RUN = "--dataset digits --arch resnet8 --bs 64 --epochs 1 --threads 1 --precision fp32".split()
SCRIPT = "tests/diverging_run.py"


def goes_back_and_on(command: list[str], folder: Path) -> None:
    console = ranks.finish(ranks.start(command, folder, NGPU="2"), folder)
    assert console.count("back to epoch 1, step 0, learning rate x 0.5") == 1, console
    [row] = ranks.metrics(folder / "run")
    assert row["samples"] == 1437
    assert row["skipped_steps"] == 0
    assert 0 < row["train_loss"] < 3


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "ngd", "lars", "lamb", "slamb", "demo"])
def test_every_optimizer_goes_back_within_the_first_epoch(optimizer, tmp_path):
    flags = [*RUN, "--optimizer", optimizer, "--out", "run"]
    goes_back_and_on(ranks.script(SCRIPT, *flags), tmp_path)


WAYS = [
    "--optimizer slamb",
    "--optimizer slamb --node_groups",
    "--optimizer lamb --sync local --local_steps 4 --dense_steps 2",
    "--optimizer demo",
    "--optimizer lamb --sync diloco --local_steps 4 --dense_steps 2",
    "--sync lag",
    "--sync lag --grad_compress bf16",
    "--grad_compress fp16",
    "--grad_compress powersgd",
    "--grad_compress int4",
    "--ngd --balance_workers --dynamic_batch increase",
    "--optimizer adamw --parallel fsdp",
]


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_communicate_goes_back_within_the_first_epoch(way, tmp_path):
    flags = [*RUN, "--bs", "32", "--seed", "1", *way.split(), "--out", "run"]
    goes_back_and_on(ranks.torchrun(str(ranks.ROOT / SCRIPT), *flags), tmp_path)
