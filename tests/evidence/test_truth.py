"""What a run says is so: skipped steps, numbers that are not finite, learning rates, passwords."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import ranks
from dynamic_batch import ByLoss
from training.run_log import RunLog

FLAGS = ["--dataset", "digits", "--arch", "resnet8", "--threads", "1", "--precision", "fp32"]
ROW = {"epoch": 1, "step": 3, "train_loss": math.nan, "test_loss": math.inf, "lr": 0.1}


def strict_rows(folder):
    """The rows of metrics.jsonl, read by a reader that knows no NaN and no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def run_script(folder, *flags, expected=0, script="resnet50_test.py"):
    """Run an entry script to its end; returns the console."""
    return ranks.finish(ranks.start(ranks.script(script, *flags), folder), folder, expected)


def test_numbers_that_are_not_finite_are_null(tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    log.begin([])
    log.epoch([{**ROW, "losses": [1.0, math.nan]}])
    (row,) = strict_rows(tmp_path)
    assert row == {**ROW, "train_loss": None, "test_loss": None, "losses": [1.0, None]}
    assert " nan " in capsys.readouterr().out


def test_rows_that_a_full_disk_kept_out_are_written_later(tmp_path, capsys, monkeypatch):
    log = RunLog(tmp_path, is_main=True)
    log.begin([{**ROW, "epoch": 0}])
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    path.mkdir()  # so that nothing can be written
    rows = [{**ROW, "epoch": 0}, ROW]
    log.epoch(rows)
    assert "could not be written" in capsys.readouterr().out
    path.rmdir()
    log.epoch([*rows, {**ROW, "epoch": 2}])
    assert [row["epoch"] for row in strict_rows(tmp_path)] == [0, 1, 2]


def test_a_loss_that_is_not_a_number_leaves_the_batch_size():
    rule = ByLoss("progress", 2.0, threshold=10.0, window=2)
    for loss in (1.0, math.nan, 1.0):
        rule.observe(64, loss, seconds=1.0, noise=None)
    assert rule.next_batch_size(3, 64) == 128  # a plateau of the two losses there are


def test_an_epoch_of_skipped_steps_has_no_loss(tmp_path):
    console = run_script(
        tmp_path, *FLAGS, "--lr", "1e30", "--epochs", "1", "--bs", "512", "--out", "run"
    )
    (row,) = strict_rows(tmp_path / "run")
    assert row["skipped_steps"] > 0
    assert "steps of epoch 1 were skipped, since a gradient was not finite" in console
    if row["skipped_steps"] == row["step"]:
        assert row["train_loss"] is None


@pytest.mark.process
def test_a_raised_learning_rate_is_reported(tmp_path):
    run_script(tmp_path, *FLAGS, "--epochs", "2", "--out", "run")
    console = run_script(tmp_path, "--resume", "run", "--epochs", "6")
    assert "warning: the learning rate goes on at" in console
    again = run_script(tmp_path, "--resume", "run", "--epochs", "6")
    assert again.count("warning: the learning rate goes on at") == 1  # the line of the run before


@pytest.mark.process
def test_a_new_rate_takes_the_place_of_the_halved_one(tmp_path):
    flags = [*FLAGS, "--epochs", "2", "--bs", "64", "--lr_schedule", "constant", "--warmup", "0"]
    run_script(tmp_path, *flags, "--lr", "1e30", "--out", "run", expected=3)
    run_script(tmp_path, "--resume", "run", "--lr", "0.01")
    assert {row["lr"] for row in strict_rows(tmp_path / "run")} == {0.01}


@pytest.mark.process
def test_a_run_goes_on_when_nobody_reads_its_lines(tmp_path):
    command = ranks.script("resnet50_test.py", *FLAGS, "--epochs", "3", "--out", "run")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert "Traceback" not in errors
    assert len(strict_rows(tmp_path / "run")) == 3


@pytest.mark.process
def test_predictions_that_nobody_reads_end_quietly(tmp_path):
    run_script(tmp_path, "--dataset", "headlines", "--epochs", "1", "--threads", "1",
               "--out", "run", script="transformer_test.py")  # fmt: skip
    (tmp_path / "texts.txt").write_text("stocks rise\n" * 20_000)
    command = ranks.script("transformer_test.py", "--checkpoint", "run", "--predict", "texts.txt")
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 141
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


@pytest.mark.parametrize(
    ("url", "secrets"),
    [
        ("postgresql://optuna:S3cretPw@host/db", ["S3cretPw"]),
        ("mysql+pymysql://u@host/db?password=S3cretPw&x=1", ["S3cretPw"]),
        ("journal://user:S3cret@Pw@host", ["S3cret", "Pw@"]),
        ("sqlite:////nowhere/study.db", []),
    ],
)
def test_a_password_is_not_printed(url, secrets):
    pytest.importorskip("optuna")
    from tuning.search import without_password

    masked = without_password(url)
    assert all(secret not in masked for secret in secrets)
    assert ("***" in masked) == bool(secrets)


def test_a_storage_that_fails_hides_its_password(tmp_path, capfd):
    pytest.importorskip("optuna")
    command = [sys.executable, "-m", "tuning.sweep", "--out", str(tmp_path / "sweep")]
    command += ["--storage", "postgresql://optuna:S3cretPw@nohost/db", "--dataset", "digits"]
    done = subprocess.run(
        command, cwd=ranks.ROOT, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 2
    assert "S3cretPw" not in done.stdout + done.stderr
    assert done.stderr.startswith("error: --storage postgresql://optuna:***@nohost/db:")


def test_a_pipe_is_no_split(tmp_path):
    from input_pipeline.own_data import find_splits

    os.mkfifo(tmp_path / "train.csv")
    assert find_splits(tmp_path, (".csv",)) == {}


@pytest.mark.parametrize(
    "flags",
    [
        "--gamma 1e300 --lr_schedule exponential --epochs 5",
        "--gamma 1e9 --lr_schedule step --step_size 1 --epochs 3",
        "--peak 1e30 --lr_schedule cyclic",
        "--threads 5000",
    ],
)
def test_flags_out_of_reach_are_refused_before_a_folder_is_made(flags, tmp_path):
    console = run_script(tmp_path, *FLAGS, *flags.split(), expected=2)
    assert console.splitlines()[-1].startswith("error: --")
    assert not (tmp_path / "runs").exists()
