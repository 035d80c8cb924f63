"""A run that is killed or interrupted and resumed equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

import ranks

IMAGES = """--dataset digits --arch resnet8 --bs 64 --lr 0.05 --mixup cutmix --epochs 3
    --save_every 5
--threads 1 --seed 3""".split()
TEXTS = """--dataset headlines --bs 16 --lr 4e-4 --epochs 6 --save_every 7
--meta_learning --meta_policy beta --meta_every 5 --mix_at tokens
--threads 1 --depth 1 --width 64 --vocab_size 800""".split()


def killed_and_resumed(command: list[str], folder: Path, kills: int, **environment: str) -> None:
    """Run to the end in `folder`/run, SIGKILLed at `kills` random moments on the way."""
    run, dice = folder / "run", random.Random(5)
    last = run / "last.pt"
    for attempt in range(kills):
        stamp = last.stat().st_mtime_ns if last.exists() else 0
        resume = ["--resume"] if last.exists() else []
        process = ranks.start([*command, "--out", str(run), *resume], folder, **environment)
        saves = 1 + attempt + dice.randrange(2)
        for _ in range(
            saves
        ):  # so many checkpoints later, somewhere before or in the writing of the next one
            ranks.wait_for(
                lambda stamp=stamp: last.exists() and last.stat().st_mtime_ns != stamp, process
            )
            stamp = last.stat().st_mtime_ns
        time.sleep(dice.random() * 0.1)
        assert process.poll() is None, "the run was over before it could be killed"
        ranks.kill(process)
    ranks.finish(
        ranks.start([*command, "--out", str(run), "--resume"], folder, **environment), folder
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "resnet50_test.py",
            [*IMAGES, *"--dynamic_batch noise --min_bs 16 --dynamic_lr sqrt --ema 0.95".split()],
        ),
        (
            "transformer_test.py",
            [*TEXTS, "--dynamic_batch", "loss", "--loss_window", "2", "--loss_threshold", "80"],
        ),
    ],
)
def test_sigkill_then_resume_on_one_process(name, flags, tmp_path):
    whole = tmp_path / "whole"
    reference = ranks.start(ranks.script(name, *flags, "--out", whole / "run"), whole)
    killed_and_resumed(ranks.script(name, *flags), tmp_path / "killed", kills=2)
    ranks.finish(reference, whole)
    ranks.same_run(whole / "run", tmp_path / "killed" / "run")


@pytest.mark.process
@pytest.mark.parametrize(
    "more",
    [
        "--ngd --meta_learning --meta_every 4",
        "--dynamic_batch noise --max_bs 512 --ema 0.95",
        "--optimizer slamb --lr 3e-3 --local_steps 8 --wire_dtype int8",
        "--sync lag --grad_compress bf16",
        "--ngd --grad_compress sign",
        "--sync local --local_steps 7",
        "--sync diloco --local_steps 7 --fragments 2 --optimizer adamw",
        "--optimizer demo",
    ],
)
def test_sigkill_then_resume_on_two_ranks(more, tmp_path):
    flags = [*IMAGES[:4], "--bs", "32", *IMAGES[6:], *more.split()]
    whole = tmp_path / "whole"
    ranks.finish(
        ranks.start(
            ranks.torchrun("resnet50_test.py", *flags, "--out", whole / "run"), whole, NGPU="2"
        ),
        whole,
    )
    killed_and_resumed(
        ranks.torchrun("resnet50_test.py", *flags), tmp_path / "killed", kills=1, NGPU="2"
    )
    ranks.same_run(whole / "run", tmp_path / "killed" / "run")
    assert len(torch.load(whole / "run" / "last.pt", weights_only=True)["ranks"]) == 2


@pytest.mark.process
@pytest.mark.parametrize(
    "more",
    [
        "",  # a sum over four ranks depends on where a gradient lies in DDP's buckets
        "--optimizer slamb --lr 3e-3 --local_steps 8",
    ],
)
def test_sigkill_then_resume_on_four_ranks(more, tmp_path):
    flags = [*IMAGES[:4], "--bs", "16", *IMAGES[6:], *more.split()]
    whole = tmp_path / "whole"
    command = ranks.torchrun("resnet50_test.py", *flags, "--out", whole / "run")
    ranks.finish(ranks.start(command, whole, NGPU="4"), whole)
    command = ranks.torchrun("resnet50_test.py", *flags)
    killed_and_resumed(command, tmp_path / "killed", kills=1, NGPU="4")
    ranks.same_run(whole / "run", tmp_path / "killed" / "run")


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_writes_a_checkpoint_and_leaves_with_130(number, tmp_path):
    flags = [*IMAGES[:-4], "--save_every", "0", "--threads", "1", "--seed", "3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *flags, "--out", whole / "run"), whole), whole
    )
    process = ranks.start(ranks.script("resnet50_test.py", *flags, "--out", cut / "run"), cut)
    ranks.wait_for(
        lambda: (
            len(ranks.metrics(cut / "run")) > 0
            if (cut / "run" / "metrics.jsonl").exists()
            else False
        ),
        process,
    )
    process.send_signal(number)
    console = ranks.finish(process, cut, expected=130)
    assert "--resume" in console.splitlines()[-1]
    assert "Traceback" not in console
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", "--resume", cut / "run"), cut), cut
    )  # flags come along
    ranks.same_run(whole / "run", cut / "run")


@pytest.mark.process
def test_a_signal_to_the_whole_job_spares_the_processes_that_decode_images(tmp_path):
    """systemd and Slurm send it to every process of a job, and a terminal its Ctrl-C."""
    for split, (number, name) in itertools.product(("train", "test"), enumerate(("cat", "dog"))):
        folder = tmp_path / "mine" / split / name
        folder.mkdir(parents=True)
        for i in range(60):
            Image.new("RGB", (64, 64), (4 * i, 90 * number, 9)).save(folder / f"{i}.png")
    flags = "--dataset folder --data_dir mine --resident no --arch resnet8 --bs 8".split()
    flags += "--epochs 500 --threads 1".split()
    for number in (signal.SIGTERM, signal.SIGINT):
        run = tmp_path / f"run-{number}"
        command = ranks.script("resnet50_test.py", *flags, "--out", run)
        process = ranks.start(["setsid", *command], tmp_path)
        ranks.wait_for(lambda run=run: (run / "last.pt").exists(), process)
        time.sleep(0.2)  # into an epoch, which has workers of its own
        os.killpg(process.pid, number)
        console = ranks.finish(process, tmp_path, expected=130)
        assert "Traceback" not in console
        assert not ranks.relatives(process)


@pytest.mark.process
def test_torchrun_restarts_by_itself_after_a_rank_dies(tmp_path):
    flags = [*IMAGES[:4], "--bs", "32", *IMAGES[6:], "--ngd", "--meta_learning"]
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    reference = ranks.torchrun("resnet50_test.py", *flags, "--out", whole / "run")
    ranks.finish(ranks.start(reference, whole, NGPU="2"), whole)
    process = ranks.start(
        ranks.torchrun("resnet50_test.py", *flags), hurt, NGPU="2", MAX_RESTARTS="1"
    )  # --out by default

    def rows() -> list[Path]:
        return [path for path in hurt.glob("runs/*/metrics.jsonl") if path.read_text()]

    ranks.wait_for(lambda: bool(rows()), process)
    ranks.kill_one_rank(process)
    console = ranks.finish(process, hurt)
    assert console.count("training samples") == 2, "the job was to start twice"
    ranks.same_run(whole / "run", rows()[0].parent)


@pytest.mark.process
@pytest.mark.parametrize(
    "more",
    [
        "--optimizer slamb --lr 3e-3",
        "--optimizer demo",
        "--sync local --local_steps 7",
        "--sync diloco --local_steps 7",
    ],
)
def test_ranks_with_weights_of_their_own_go_on_as_one_process(more, tmp_path):
    flags = [
        "--dataset",
        "digits",
        "--arch",
        "resnet8",
        "--bs",
        "32",
        "--epochs",
        "1",
        "--threads",
        "1",
        *more.split(),
    ]
    run = tmp_path / "run"
    ranks.finish(
        ranks.start(ranks.torchrun("resnet50_test.py", *flags, "--out", run), tmp_path, NGPU="2"),
        tmp_path,
    )
    parts = torch.load(run / "last.pt", weights_only=True)["ranks"]
    momentum = "exp_avg" if "slamb" in more else "momentum_buffer"
    first, second = (
        [state[momentum] for state in part["optimizer"]["state"].values()] for part in parts
    )
    assert not all(torch.equal(*pair) for pair in zip(first, second))
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", "--resume", run, "--epochs", "2"), tmp_path),
        tmp_path,
    )
    rows = ranks.metrics(run)
    assert [row["world_size"] for row in rows] == [2, 1]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]


@pytest.mark.process
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
    flags = "--dataset digits --arch resnet8 --bs 16 --epochs 500 --threads 1 --out run".split()
    job = ranks.start(ranks.torchrun("resnet50_test.py", *flags), tmp_path, cold=True)
    log = tmp_path / "run" / "metrics.jsonl"
    ranks.wait_for(lambda: log.exists() and log.read_text().count("\n") > 1, job)
    workers = [number for number, environment in ranks.relatives(job) if b"\0RANK=" in environment]
    assert len(workers) == 2
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    end = time.monotonic() + 10
    while ranks.relatives(job) and time.monotonic() < end:
        time.sleep(0.1)
    assert ranks.relatives(job) == []


@pytest.mark.process
def test_what_rounding_has_left_on_each_rank_goes_on_on_four_ranks(tmp_path):
    flags = "--dataset digits --arch resnet8 --bs 32 --threads 1 --grad_compress sign".split()
    run = tmp_path / "run"
    command = ranks.torchrun("resnet50_test.py", *flags, "--epochs", "1", "--out", run)
    ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    first, second = (
        part["hook"] for part in torch.load(run / "last.pt", weights_only=True)["ranks"]
    )
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[number], second[number]) for number in first)
    command = ranks.torchrun("resnet50_test.py", "--resume", run, "--epochs", "2")
    ranks.finish(ranks.start(command, tmp_path, NGPU="4"), tmp_path)
    rows = ranks.metrics(run)
    assert [row["world_size"] for row in rows] == [2, 4]
    assert rows[1]["train_loss"] < rows[0]["train_loss"]
