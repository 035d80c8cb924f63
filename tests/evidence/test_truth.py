"""What a run says is so: skipped steps, numbers that are not finite, learning rates."""

import json
import math
import subprocess

import pytest

import ranks
from training.run_log import RunLog

ROW = {"seconds": 1.0, "epoch": 1, "step": 3, "lr": 0.1}
ROW |= {"train_loss": math.nan, "test_loss": math.inf}


def strict_rows(folder):
    """The rows of metrics.jsonl, read by a reader that knows no NaN and no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


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


@pytest.mark.process
def test_lines_that_nobody_reads_do_not_stop_a_run_and_end_predictions_quietly(tmp_path):
    def errors_of(script, *flags, expected):
        command = ranks.script(script, *flags)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=tmp_path, text=True, **pipes)
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=240) == expected, errors
        return errors

    flags = "--dataset headlines --subset 0.2 --bs 16 --epochs 3 --threads 1 --out run".split()
    assert "Traceback" not in errors_of("transformer_test.py", *flags, expected=0)
    assert len(strict_rows(tmp_path / "run")) == 3
    (tmp_path / "texts.txt").write_text("stocks rise\n" * 20_000)
    flags = "--checkpoint run --predict texts.txt".split()
    errors = errors_of("transformer_test.py", *flags, expected=141)
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
