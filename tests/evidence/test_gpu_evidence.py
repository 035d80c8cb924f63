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
FAILING_PYTHON = """#!/bin/sh
case "$*" in *eager-256.json*) echo first; echo the GPU is on fire >&2; exit 7 ;; esac
exec {python} "$@"
"""


def run_part(folder, part: str, only: str, python, code: int) -> str:
    """What the steps of a part print; its results are in folder/out."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    variables = {
        "MINIATURE": "1",
        "COMMIT": "abcdef0",
        "OUT": str(folder / "out"),
        "WORK": str(folder / "work"),
        "PYTHON": str(python),
        "ONLY": only,
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), part],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.process
def test_the_parts_run_and_a_step_that_fails_stops_no_other_one(tmp_path):
    python = tmp_path / "python"
    python.write_text(FAILING_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    for part, only, steps in (
        ("A", "ngd|ddp|text|tests", 4),
        ("B", "plain-256|eager-256|cudagraph-256|kaldi-ngd-256", 4),
        ("C", "ngd-meta-seed0|ngd-seed0", 2),
    ):
        printed = run_part(tmp_path, part, only, python, code=int(part == "B"))
        lines = printed.split("== summary of part")[1].splitlines()[1:]
        failed = [line for line in lines if not line.startswith("ok ")]
        assert (len(lines), len(failed)) == (steps, int(part == "B"))
        with tarfile.open(tmp_path / "out" / f"{part}.tgz") as archive:
            names = {member.name for member in archive if member.isfile()}
        assert not [name for name in names if name.endswith(".pt")]
        if part == "B":
            assert re.match(r"failed 7 +\d+ s  \d\d-eager-256 +the GPU is on fire", failed[0])
            assert "    | first\n    | the GPU is on fire" in printed, "the end of what it wrote"
            done = {f"B/{step}-256.json" for step in ("plain", "cudagraph", "kaldi-ngd")}
            assert names >= {"B/summary.txt", *done}
            assert any(name.endswith("eager-256.log") for name in names)
        if part == "C":  # with mixing, and without
            assert sum(name.endswith("metrics.jsonl") for name in names) == 2
