"""benchmarks/gpu_evidence.sh on a CPU: data in pieces, steps that fail, what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

import ranks

SCRIPT = ranks.ROOT / "benchmarks" / "gpu_evidence.sh"
PLAN = ranks.ROOT / "figures" / "experiments.yaml"
DATA_SET = "cifar-10-batches-py"
PACKAGES = "torch torchvision numpy PIL yaml tqdm tokenizers sklearn pytest xdist".split()
FAKE_PYTHON = """#!/bin/sh
case "$*" in
-c* | *tarfile*) exec {python} "$@" ;;
*eager-256.json*) echo first; echo the GPU is on fire >&2; exit 7 ;;
*plain-256.json*) sleep 60 ;;
*) echo "did $*" ;;
esac
"""


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """A python with empty packages that does nothing; one step fails, another takes too long."""
    for name in PACKAGES:
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text("")
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run_part(folder: Path, *arguments: str, code: int = 0, **environment: str) -> str:
    """The lines that a part prints; its results are in folder/out."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    variables = {
        "MINIATURE": "1",
        "COMMIT": "abcdef0",
        "OUT": str(folder / "out"),
        "WORK": str(folder / "work"),
        "PYTHON": str(folder / "python"),
        "PYTHONPATH": str(folder / "packages"),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**os.environ, **variables, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A folder with files of random bytes in three pieces, and the files."""
    folder = tmp_path_factory.mktemp("packed")
    files = {f"data_batch_{number}": os.urandom(50_000 + number) for number in range(1, 6)}
    files["batches.meta"] = b"airplane"
    source = folder / "data" / DATA_SET
    source.mkdir(parents=True)
    for name, content in files.items():
        (source / name).write_bytes(content)
    run_part(folder, "pack", "pieces", DATA_DIR=str(folder / "data"), PYTHON=sys.executable)
    return folder / "pieces", files


def archived(folder: Path, part: str) -> set[str]:
    with tarfile.open(folder / "out" / f"{part}.tgz") as archive:
        return {member.name for member in archive if member.isfile()}


def summary(printed: str) -> list[str]:
    return printed.split("== summary of part")[1].splitlines()[1:]


def test_data_that_comes_in_pieces_is_the_data(packed, tmp_path, fake_python):
    pieces, files = packed
    shutil.copytree(pieces, tmp_path / "pieces")
    only = {"A": "ceilings|sgd", "B": "compile-256", "C": ".*"}
    for number, part in enumerate(only, 1):
        piece = tmp_path / "pieces" / str(number)
        printed = run_part(tmp_path, part, f"pieces/{number}", ONLY=only[part])
        assert f"== part {part} of abcdef0" in printed
        assert all(line.startswith("ok ") for line in summary(printed))
        assert f"{part}/summary.txt" in archived(tmp_path, part)
        shutil.rmtree(piece)  # each part finds its own piece alone
    joined = tmp_path / "work" / "data" / DATA_SET
    assert {path.name: path.read_bytes() for path in joined.iterdir()} == files
    plan = yaml.safe_load(PLAN.read_text())["gpu"]
    for log, group, run in (
        ("02-ngd-seed0", "gpu_fast94", "ngd"),
        ("05-sgd-lr0.1-seed0", "gpu_fast94_search", "sgd-lr0.1"),
    ):
        command = (tmp_path / "work" / "C" / f"{log}.log").read_text()
        planned = f"{plan[group]['command']} {plan[group]['runs'][run]}"
        assert planned.removeprefix("python ") in command


def test_a_damaged_or_missing_piece_is_named(packed, tmp_path, fake_python):
    shutil.copytree(packed[0], tmp_path / "pieces")
    (tmp_path / "pieces" / "2" / "cifar10.tar.xz.1").write_bytes(b"damaged")
    run_part(tmp_path, "B", "pieces/2", ONLY="compile-256")
    printed = run_part(tmp_path, "C", "pieces/3", ONLY="join|ngd-seed1", code=1)
    assert "cifar10.tar.xz.0: No such file" in printed
    assert "cifar10.tar.xz.1: FAILED" in printed
    assert [line.split()[0] for line in summary(printed)] == ["failed", "ok"]
    assert not (tmp_path / "work" / "data" / DATA_SET).exists()


def test_a_step_that_fails_or_takes_too_long_is_reported(tmp_path, fake_python):
    """The others go on, as long as there is time."""
    printed = run_part(tmp_path, "B", ONLY="compile-256|eager-256|ngd-256", code=1)
    lines = summary(printed)
    assert [line.split()[0] for line in lines] == ["failed", "ok", "ok"]
    assert re.match(r"failed 7 +\d+ s  01-eager-256 +the GPU is on fire", lines[0])
    assert "    | first\n    | the GPU is on fire" in printed, "the end of what it wrote"
    assert {"B/01-eager-256.log", "B/summary.txt"} <= archived(tmp_path, "B")
    lines = summary(run_part(tmp_path, "B", ONLY="plain-256|ngd-256", code=1, LIMIT="6"))
    assert [line.split()[0] for line in lines] == ["timeout", "skipped"]


@pytest.mark.process
def test_the_parts_run(tmp_path):
    for part, only, steps in (
        ("A", "ceilings|ngd|ddp|text|tests", 5),
        ("B", "plain-256|cudagraph-256|kaldi-ngd-256", 3),
        ("C", "ngd-seed0", 2),
    ):
        lines = summary(run_part(tmp_path, part, ONLY=only, PYTHON=sys.executable))
        assert len(lines) == steps
        assert all(line.startswith("ok ") for line in lines)
        names = archived(tmp_path, part)
        assert not [name for name in names if name.endswith(".pt")]
        if part == "B":
            assert {f"B/{step}.json" for step in only.split("|")} <= names
        if part == "C":  # in full, and held out
            assert sum(name.endswith("metrics.jsonl") for name in names) == 2
