"""benchmarks/gpu_evidence.sh on a CPU: its steps, and those that fail."""

import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest

import ranks

SCRIPT = ranks.ROOT / "benchmarks" / "gpu_evidence.sh"
PACKAGES = "torch torchvision numpy PIL yaml tqdm tokenizers sklearn pytest xdist".split()
FAKE_PYTHON = """#!/bin/sh
case "$*" in
-c* | *tarfile*) exec {python} "$@" ;;
*eager-256.json*) echo first; echo the GPU is on fire >&2; exit 7 ;;
*) echo "did $*" ;;
esac
"""


@pytest.fixture
def fake_python(tmp_path):
    """A python with empty packages that does nothing; one step fails."""
    for name in PACKAGES:
        (tmp_path / "packages").mkdir(exist_ok=True)
        (tmp_path / "packages" / f"{name}.py").write_text("")
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run_part(folder, *arguments: str, code: int = 0, **environment: str) -> str:
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


def archived(folder, part: str) -> set[str]:
    with tarfile.open(folder / "out" / f"{part}.tgz") as archive:
        return {member.name for member in archive if member.isfile()}


def summary(printed: str) -> list[str]:
    return printed.split("== summary of part")[1].splitlines()[1:]


def test_a_step_that_fails_is_reported_and_the_others_go_on(tmp_path, fake_python):
    printed = run_part(tmp_path, "B", ONLY="compile-256|eager-256|ngd-256", code=1)
    lines = summary(printed)
    assert [line.split()[0] for line in lines] == ["failed", "ok", "ok"]
    assert re.match(r"failed 7 +\d+ s  01-eager-256 +the GPU is on fire", lines[0])
    assert "    | first\n    | the GPU is on fire" in printed, "the end of what it wrote"
    assert {"B/01-eager-256.log", "B/summary.txt"} <= archived(tmp_path, "B")


@pytest.mark.process
def test_the_parts_run(tmp_path):
    for part, only, steps in (
        ("A", "ngd|ddp|text|tests", 4),
        ("B", "plain-256|cudagraph-256|kaldi-ngd-256", 3),
        ("C", "ngd-meta-seed0|ngd-seed0", 2),
    ):
        lines = summary(run_part(tmp_path, part, ONLY=only, PYTHON=sys.executable))
        assert len(lines) == steps
        assert all(line.startswith("ok ") for line in lines)
        names = archived(tmp_path, part)
        assert not [name for name in names if name.endswith(".pt")]
        if part == "B":
            assert {f"B/{step}.json" for step in only.split("|")} <= names
        if part == "C":  # with mixing, and without
            assert sum(name.endswith("metrics.jsonl") for name in names) == 2
