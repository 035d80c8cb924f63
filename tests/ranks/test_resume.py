"""A run that ends at any point and is resumed equals the uninterrupted one, bit for bit."""

import functools
import os
import shutil
from multiprocessing import connection
from pathlib import Path

import pytest
import torch

import conftest
import ranks
from conftest import for_each
from test_checkpoint import flip
from training import atomic_file, checkpoint
from training.trainer import Trainer

IMAGES = """resnet50_test.py --dataset digits --arch resnet8 --subset 0.2 --lr 0.05 --epochs 3
    --mixup cutmix --save_every 2 --keep 99 --threads 1 --precision fp32 --seed 3"""
TEXTS = """transformer_test.py --dataset headlines --subset 0.4 --bs 16 --lr 4e-4 --epochs 3
    --depth 1 --width 32 --vocab_size 800 --save_every 2 --keep 99 --threads 1 --precision fp32
    --prior none"""
META = "--meta_learning --mix_at tokens"
WAYS = {  # name: number of ranks, command
    "noise": (1, f"{IMAGES} --bs 32 --dynamic_batch noise --batch_args min=16 lr=sqrt --ema 0.9"),
    "loss": (1, f"{TEXTS} {META} --dynamic_batch loss --loss_window 2 --batch_args threshold=80"),
    "augment": (2, f"{IMAGES} --bs 16 --workers 2 --augment auto --random_erasing 0.5"),
    "meta": (2, f"{IMAGES} --bs 16 --ngd --meta_learning --mixup_args held_out=0.2"),
    "bf16": (2, f"{IMAGES} --bs 16 --grad_compress bf16 --balanced_sampling"),
    "sign": (2, f"{IMAGES} --bs 16 --ngd --grad_compress sign"),
    "local": (2, f"{IMAGES} --bs 16 --sync local --local_steps 3 --class_weights balanced"),
    "diloco": (2, f"{IMAGES} --bs 16 --sync diloco --local_steps 3 --wire_dtype sign"),
    "slamb": (2, f"{IMAGES} --bs 16 --optimizer slamb --lr 3e-3 --local_steps 3 --wire_dtype int8"),
    "fsdp": (2, f"{TEXTS} --parallel fsdp"),
    "owners": (2, f"{IMAGES} --bs 16 --ngd --parallel fsdp"),
    "copies": (2, f"{TEXTS} --parallel ddp --balanced_sampling --best_by macro_f1"),
    "ddp-4": (4, f"{IMAGES} --bs 8"),  # a sum over four ranks depends on DDP's buckets
    "slamb-4": (4, f"{IMAGES} --bs 8 --optimizer slamb --lr 3e-3 --local_steps 3"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """The folder of an uninterrupted run of a way, which kept all of its checkpoints."""

    @functools.cache
    def finish(way: str) -> Path:
        folder = tmp_path_factory.mktemp(way)
        size, command = WAYS[way]
        ranks.run(f"{command} --out {folder}/run", folder, size)
        return folder / "run"

    return finish


def test_every_way_to_train_goes_on_bit_for_bit(finished, tmp_path):
    """From a checkpoint within the second of three epochs, or after its last step."""

    def goes_on(way: str, place: str) -> None:
        size, command = WAYS[way]
        whole, folder = finished(way), tmp_path / f"{way}-{place}"
        script = command.split()[0]
        found = [checkpoint.load(path).progress for path in checkpoint.latest_files(whole)]
        within = [i for i, p in enumerate(found) if p["epoch"] == 1 and p["step_in_epoch"] > 1]
        number = within[0 if place == "end" else len(within) // 2]
        (folder / "run").mkdir(parents=True)
        name = f"last-{number}.pt"
        (folder / "run" / name).symlink_to(whole / name)
        ranks.run(f"{script} --resume run/{name} --out {folder}/resumed", folder, size)
        ranks.same_run(whole, folder / "resumed")

    for_each([*((way, "middle") for way in WAYS), ("fsdp", "end")], goes_on)


def test_the_loss_scale_goes_on(here):
    ranks.run(f"{IMAGES} --bs 32 --precision fp16 --epochs 1 --out run", here)
    state = torch.load("run/last.pt", weights_only=True)
    assert state["scaler"]["scale"] != 128.0
    state["ranks"][0]["scaler"]["scale"] = 128.0  # of each rank its own
    torch.save(state, "run/last.pt")
    ranks.run("resnet50_test.py --resume run --epochs 2", here)
    assert checkpoint.load(here / "run").state["scaler"]["scale"] == 128.0


POINTS = ["mid-epoch", "before best.pt", "before fsync", "before rename", "between the two names"]
CRASHED = 9
KILLED = f"{IMAGES} --epochs 2 --keep 2 --out run"


def crash_at(point: str, rank: str = "0") -> None:
    """Let this rank end at once when the run comes to a point of its second half."""
    if os.environ.get("RANK", "0") != rank:
        return
    steps = 0

    def before(owner, name: str, is_point) -> None:
        real = getattr(owner, name)

        def crash_or_go_on(*args, **named):
            if is_point(*args) and steps > 5:
                os._exit(CRASHED)
            return real(*args, **named)

        setattr(owner, name, crash_or_go_on)

    def count(*_) -> bool:
        nonlocal steps
        steps += 1
        return point == "mid-epoch"

    before(Trainer, "train_step", count)
    if point == "before best.pt":
        before(checkpoint, "save", lambda path, _: path.name == "best.pt")
    if point == "before fsync":
        before(atomic_file, "sync_file", lambda path: path.name == "last.pt.part")
    if point == "before rename":
        before(checkpoint, "keep_previous", lambda folder: True)
    if point == "between the two names":
        before(Path, "replace", lambda path, target: target.name == "last.pt")


@pytest.mark.parametrize("size", [1, 4])
def test_a_run_that_ends_at_any_point_goes_on_bit_for_bit(size, tmp_path):
    command = f"{KILLED} --bs {32 // size}"
    ranks.run(command, tmp_path / "whole", size)

    def goes_on(point: str) -> None:
        folder, crash = tmp_path / point, functools.partial(crash_at, point)
        words = (ranks.torchrun if size > 1 else ranks.script)(*command.split())
        job = ranks.start(words, folder, first=crash, NGPU=str(size))
        connection.wait([job.processes[0].sentinel], timeout=240)
        assert job.processes[0].exitcode == CRASHED, (folder / "console.log").read_text()
        ranks.kill(job)
        console = ranks.run(f"{command} --resume", folder, size)
        assert "warning" not in console, "last.pt was complete"
        ranks.same_run(tmp_path / "whole" / "run", folder / "run")

    for_each([(point,) for point in POINTS], goes_on)


@pytest.mark.parametrize(
    ("way", "size", "more"),
    [
        ("slamb", 1, "--bs 32"),
        ("local", 1, "--bs 32"),
        ("diloco", 1, "--bs 32"),
        ("sign", 4, "--bs 8"),
        ("fsdp", 1, "--bs 32"),
        ("fsdp", 3, "--bs 11"),
        ("copies", 2, "--parallel fsdp"),
        ("owners", 3, "--bs 11"),
    ],
)
def test_a_run_goes_on_with_other_ranks_and_other_ways(way, size, more, finished, tmp_path):
    """The fourth epoch is better than the third; wrong weights or moments would not be."""
    shutil.copytree(finished(way), tmp_path / "run", symlinks=True)
    parts = [part["optimizer"] for part in checkpoint.load(tmp_path / "run").state["ranks"]]
    if parts[0]:
        first, second = (
            [t for state in part["state"].values() for t in state.values() if torch.is_tensor(t)]
            for part in parts
        )
        assert not all(map(torch.equal, first, second)), "each rank has moments of its own"
    script = WAYS[way][1].split()[0]
    flags = f"--out run --resume auto --epochs 4 --lr_schedule constant --keep 1 {more}"
    ranks.run(f"{script} {flags}", tmp_path, size)
    rows = ranks.metrics(tmp_path / "run")
    assert rows[3]["train_loss"] < rows[2]["train_loss"]
    assert [row["world_size"] for row in rows] == [2, 2, 2, size]


# -------------------------------------------------------------------- damaged checkpoints

KEPT = "--dataset digits --arch resnet8 --bs 64 --lr 0.02 --epochs 3 --threads 1 --seed 2"


@pytest.fixture(scope="module")
def finished_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs that kept three checkpoints; tests take copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    conftest.run("images", KEPT, "--keep 3 --out", folder)
    return folder


@pytest.fixture
def copied(finished_alone: Path, here: Path) -> Path:
    return Path(shutil.copytree(finished_alone, Path("runs") / "resnet50_test-1"))


def test_an_older_checkpoint_can_be_named_only_where_newer_ones_are_damaged(finished_alone, copied):
    resume = functools.partial(conftest.run, "images", f"--resume {copied}/last-2.pt")
    assert "gone on to step 69 (last.pt)" in resume(code=2)
    flip(copied / "last.pt")
    assert "gone on to step 46 (last-1.pt)" in resume(code=2)
    (copied / "last-1.pt").unlink()
    (copied / "best.pt").unlink()
    resume()
    ranks.same_run(finished_alone, copied)


def test_only_a_run_that_trains_there_changes_the_damaged_folder(finished_alone, copied):
    flip(copied / "last.pt")
    before = {path.name: path.read_bytes() for path in copied.glob("*.pt")}
    console = conftest.run("images", "--checkpoint last --evaluate")
    assert f"warning: {copied}/last.pt is damaged" in console
    assert f"weights of {copied}/last-1.pt: epoch 2" in console
    conftest.run("images", "--resume", copied, "--out other")
    ranks.same_run(finished_alone, Path("other"))
    assert {path.name: path.read_bytes() for path in copied.glob("*.pt")} == before


def test_a_best_checkpoint_that_the_run_has_yet_to_reach_is_not_its_best(copied):
    flip(copied / "last.pt")
    console = conftest.run("images", "--resume", copied, "--lr 1e-9")
    assert f"best.pt of epoch 2 is not in {copied}: the best epoch is chosen" in console
    best, last = (checkpoint.load(copied / f"{name}.pt").progress for name in ("best", "last"))
    assert best["best"] == last["best"]
    assert best["rows"] == last["rows"][: best["epoch"]]
