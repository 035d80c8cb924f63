"""Ranks that were started differently, or of which one finds a problem, end together."""

import functools
import os
import re
import shutil
import sys

import pytest

import ranks
from conftest import for_each, run, write_images
from distributed import agreement
from distributed.world import World
from errors import InputError, SharedInputError

FLAGS = "--dataset digits --arch resnet8 --subset 0.2 --threads 1 --epochs 1"


def ranks_agree_or_raise_together(world: World) -> None:
    agreement.check_equal(world, {"--lr": 0.1}, advice="mend it")
    if world.size > 1:
        with pytest.raises(SharedInputError, match="0.1 on rank 0 and 0.2 on rank 1; mend it"):
            agreement.check_equal(world, {"--lr": 0.1 * (1 + world.rank)}, advice="mend it")
        with pytest.raises(SharedInputError, match="/0 on rank 0 .*/1 on rank 1"):
            agreement.check_equal(world, {"--out": f"{'long/' * 20}{world.rank}"}, advice="mend it")
    assert agreement.on_main(world, lambda: world.rank) == 0
    assert (world.local_rank, world.devices) == (world.rank, 1), "no LOCAL_RANK, LOCAL_WORLD_SIZE"

    def refuse() -> None:
        raise InputError("the folder is taken")

    with pytest.raises(InputError, match="the folder is taken"):
        agreement.on_main(world, refuse)
    assert agreement.once_a_node(world, lambda: world.rank) == 0
    with pytest.raises(InputError, match="the folder is taken"):
        agreement.once_a_node(world, refuse)
    memory = agreement.node_memory(world, world.size if world.rank == 0 else 0)
    memory[world.rank] = 7 + world.rank
    world.all_gather(None)
    assert memory.tolist() == [7, 8][: world.size]
    assert len(agreement.node_memory(world, world.rank)) == 0  # rank 0 decides

    def read_file(failing: int) -> None:
        with agreement.local_main_first(world):
            if world.rank == failing:
                raise InputError(f"rank {failing} has no file")

    for failing in range(world.size):
        with pytest.raises(InputError, match=f"rank {failing} has no file"):
            read_file(failing)


def test_ranks_agree_or_raise_together():
    ranks_agree_or_raise_together(World())
    ranks.run_ranks(ranks_agree_or_raise_together, 2)


def add_flags_on_rank_1(flags: list[str]) -> None:
    if os.environ["RANK"] == "1":
        sys.argv += flags


def test_what_differs_on_one_rank_is_named_in_one_line(tmp_path):
    run("images", FLAGS, "--out", tmp_path / "done")
    images = "--dataset folder --arch resnet8 --bs 4 --epochs 1 --threads 1 --data_dir"
    fp16 = "--precision fp16"
    one, other = (str(write_images(tmp_path / f"images-{n}", "ab", rows=n, size=8)) for n in (8, 7))
    renamed = shutil.copytree(one, tmp_path / "renamed")
    (renamed / "train" / "a" / "03.png").rename(renamed / "train" / "a" / "033.png")

    def is_named(flags: str, more: str, expected: str) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        first = functools.partial(add_flags_on_rank_1, more.split())
        console = ranks.run(f"resnet50_test.py {flags}", folder, 2, expected=2, first=first)
        assert "Traceback" not in console
        (line,) = [line for line in console.splitlines() if line.startswith("error:")]
        assert expected in line
        assert not (folder / "runs").exists()

    for_each(
        [
            (FLAGS, "--lr 0.01", "--lr is 0.08 on rank 0 and 0.01 on rank 1"),
            (f"{FLAGS} --bs 9999", "", "--bs 9999"),  # on both
            (f"{FLAGS} --grad_compress sign {fp16}", "", f"sign is not supported with {fp16}"),
            (FLAGS, f"--resume {tmp_path}/done", "the checkpoint is None on rank 0 and [32, "),
            (f"{images} {one}", f"--data_dir {other}", "the train split is {'rows': 16, "),
            (
                f"{images} {one}",
                f"--data_dir {renamed}",
                "the hash of the names of the train files is ",
            ),
            (f"{images} {one}", "--data_dir nowhere", "nowhere"),
        ],
        is_named,
    )


def test_a_resume_with_other_data_is_reported_or_refused(here):
    data = write_images(here / "data", "ab", rows=8, size=8)
    flags = "--dataset folder --arch resnet8 --bs 4 --threads 1 --data_dir data --out run"
    run("images", flags, "--epochs 1 --val_fraction 0.25 --no-test")
    first = data / "train" / "a" / "00.png"
    other = first.rename(first.with_name("other.png"))
    console = run("images", "--checkpoint run --evaluate --data_dir data")
    assert "the train split has 16 rows with other labels or files" in console
    other.rename(first)
    write_images(here / "same_names", "ab", rows=8, size=9)
    console = run("images", "--checkpoint run --evaluate --data_dir same_names/train")
    assert "the train split has 16 rows with other labels or files" in console
    assert re.findall(r"of (\d+)\n", console) == ["8", "8"], "all of them"
    assert "also chose" not in console
    first.unlink()
    for words, what in (
        ("--checkpoint run --evaluate", "may have trained on some of the rows that are evaluated"),
        ("--resume run --epochs 2", "has trained on some of the rows now held out"),
    ):
        console = run("images", words, "--data_dir data")
        assert "not that of the checkpoint's run: the train split has 15 rows and had 16" in console
        assert f"the data changed: the run {what}" in console
    shutil.rmtree(data)
    console = run("images", "--resume run --dataset digits", code=2)
    assert "trained on other classes" in console
