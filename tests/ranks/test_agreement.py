"""Ranks that were started differently, or of which one finds a problem, end together."""

from __future__ import annotations

import shutil

import pytest
from PIL import Image

import ranks
from distributed import agreement
from distributed.world import World
from errors import InputError, SharedInputError

FLAGS = ["--dataset", "digits", "--arch", "resnet8", "--threads", "1", "--epochs", "1"]


def test_the_first_difference_is_named():
    same = {"--lr": "0.1", "--bs": "32"}
    assert agreement.first_difference([same, dict(same)]) == ""
    assert (
        agreement.first_difference([same, dict(same), {**same, "--bs": "64"}])
        == "--bs is 32 on rank 0 and 64 on rank 2"
    )
    assert agreement.first_difference([{}, same]) == "--lr is nothing on rank 0 and 0.1 on rank 1"


def test_one_process_agrees_with_itself():
    world = World()
    agreement.check_equal(world, {"--lr": 0.1}, advice="")
    assert agreement.on_main(world, lambda: 7) == 7
    with agreement.local_main_first(world):
        pass
    with pytest.raises(InputError, match="no space"):
        agreement.raise_together(world, "no space")


def rank_body(world: World) -> None:
    """Each function agrees, or raises the same on both ranks."""
    agreement.check_equal(world, {"--lr": 0.1}, advice="mend it")
    with pytest.raises(SharedInputError, match="--lr is 0.1 on rank 0 and 0.2 on rank 1; mend it"):
        agreement.check_equal(world, {"--lr": 0.1 * (1 + world.rank)}, advice="mend it")
    assert agreement.on_main(world, lambda: world.rank) == 0

    def refuse() -> None:
        raise InputError("the folder is taken")

    with pytest.raises(SharedInputError, match="the folder is taken"):
        agreement.on_main(world, refuse)
    with agreement.local_main_first(world):
        pass

    def read_file(failing: int) -> None:
        with agreement.local_main_first(world):
            if world.rank == failing:
                raise InputError(f"rank {failing} has no file")

    for failing in range(world.size):
        with pytest.raises(SharedInputError, match=f"rank {failing} has no file"):
            read_file(failing)


def test_two_ranks_agree_or_raise_together():
    ranks.run_ranks(rank_body, 2)


def run_two(folder, *flags, other=(), expected=2, script="resnet50_test.py"):
    """Run a script on two ranks, of which rank 1 has further flags; returns the console."""
    wrapper = str(ranks.ROOT / "tests" / "one_rank_differs.py")
    command = ranks.torchrun(wrapper, script, *flags, "--", *other)
    return ranks.finish(ranks.start(command, folder, NGPU="2"), folder, expected=expected)


def error_lines(console: str) -> list[str]:
    """The lines on the console that are errors; there is no traceback."""
    assert "Traceback" not in console
    return [line for line in console.splitlines() if line.startswith("error:")]


@pytest.mark.process
@pytest.mark.parametrize(
    "other", [("--lr", "0.01"), ("--bs", "16"), ("--seed", "5"), ("--subset", "0.5"), ("--ngd",)]
)
def test_another_flag_on_one_rank_is_named(other, tmp_path):
    console = run_two(tmp_path, *FLAGS, other=other)
    (line,) = error_lines(console)
    name = {"--ngd": "--optimizer", "--bs": "--batch_size"}.get(other[0], other[0])
    assert name in line
    assert "on rank 0" in line
    assert not (tmp_path / "runs").exists()


def write_images(folder, num_images):
    """A folder data set of two classes in which the first one has so many training images."""
    for split, name, number in [
        ("train", "a", num_images),
        ("train", "b", 8),
        ("test", "a", 2),
        ("test", "b", 2),
    ]:
        target = folder / split / name
        target.mkdir(parents=True)
        for index in range(number):
            Image.new("RGB", (8, 8), (index * 20, 0, 99)).save(target / f"{index}.png")


@pytest.mark.process
def test_other_data_on_one_rank_is_named(tmp_path):
    for name, number in [("one", 8), ("other", 7)]:
        write_images(tmp_path / name, number)
    flags = ["--dataset", "folder", "--arch", "resnet8", "--bs", "4", "--epochs", "1"]
    flags += ["--threads", "1", "--data_dir", str(tmp_path / "one")]
    console = run_two(tmp_path, *flags, other=["--data_dir", str(tmp_path / "other")])
    (line,) = error_lines(console)
    assert "the number of rows of the train split is 16 on rank 0 and 15 on rank 1" in line


@pytest.mark.process
def test_a_rank_that_resumes_alone_ends_the_job(tmp_path):
    run = tmp_path / "run"
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *FLAGS, "--out", run), tmp_path), tmp_path
    )
    console = run_two(tmp_path, *FLAGS, other=["--resume", run, "--epochs", "1"])
    (line,) = error_lines(console)
    assert "the checkpoint is none on rank 0 and of step" in line


@pytest.mark.process
@pytest.mark.parametrize("missing_on", [0, 1])
def test_data_that_is_missing_on_a_rank_is_one_line(missing_on, tmp_path):
    write_images(tmp_path / "there", 8)
    paths = [tmp_path / "there", tmp_path / "missing"]
    if missing_on == 0:
        paths.reverse()
    flags = ["--dataset", "folder", "--arch", "resnet8", "--epochs", "1"]
    console = run_two(tmp_path, *flags, "--data_dir", paths[0], other=["--data_dir", str(paths[1])])
    (line,) = error_lines(console)
    assert "missing" in line


@pytest.mark.process
def test_a_resume_with_other_data_is_reported_or_refused(tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    write_images(data, 8)
    flags = ["--arch", "resnet8", "--bs", "4", "--threads", "1", "--data_dir", data]
    first = ranks.script(
        "resnet50_test.py", *flags, "--dataset", "folder", "--epochs", "1", "--out", run
    )
    ranks.finish(ranks.start(first, tmp_path), tmp_path)
    (data / "train" / "a" / "0.png").unlink()
    resume = ["--resume", run, "--data_dir", data]
    console = ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *resume, "--epochs", "2"), tmp_path), tmp_path
    )
    assert "not that of the checkpoint's run: the train split has 15 rows instead of 16" in console
    shutil.rmtree(data)
    other = ranks.script("resnet50_test.py", "--resume", run, "--dataset", "digits")
    console = ranks.finish(ranks.start(other, tmp_path), tmp_path, expected=2)
    (line,) = error_lines(console)
    assert "trained on other classes (class 1 was 'a' and is '0' now)" in line
