"""demo.sh: the scripts accept its commands."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import ranks
import resnet50_test
import transformer_test
import tuning.compare
import tuning.race
from cli import options
from conftest import run

SCRIPTS = {"resnet50_test.py": resnet50_test, "transformer_test.py": transformer_test}
PYTHON = ".venv/bin/python"
RECORD = "#!/usr/bin/env bash\nprintf '%q ' \"$@\" >>calls.txt\necho >>calls.txt\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of demo.sh after its run, with an interpreter that only records its arguments."""
    folder = tmp_path_factory.mktemp("demo")
    for path in (ranks.ROOT / "demo.sh", ranks.ROOT / "setup_venv.sh"):
        shutil.copy(path, folder)
    for path in ranks.ROOT.glob("requirements*.txt"):
        shutil.copy(path, folder)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / PYTHON).write_text(RECORD)
    (folder / PYTHON).chmod(0o755)
    with (folder / "console.txt").open("w") as console:
        subprocess.run(["bash", "demo.sh", "my runs"], cwd=folder, stdout=console, check=True)
    return folder


def calls(folder: Path) -> list[list[str]]:
    return [shlex.split(line) for line in (folder / "calls.txt").read_text().splitlines()]


def parsed(words: list[str]) -> dict:
    """The flags of a command that names a script."""
    number = next(number for number, word in enumerate(words) if word in SCRIPTS)
    script = SCRIPTS[words[number]]
    return vars(options.parse(script.parser(), script.SCRIPT, words[number + 1 :])[0])


def test_the_demo_kills_one_of_two_equal_runs_and_races(folder, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "DATA_DIR": str(folder)})
    outs = [call for call in calls(folder) if call[0] in SCRIPTS and "--out" in call]
    flags = {Path(each["out"]).name: each for each in map(parsed, outs)}
    assert list(flags) == ["whole", "killed", "headlines"]
    assert {Path(each["out"]).parent for each in flags.values()} == {folder / "my runs"}
    assert flags["whole"] | {"out": ""} == flags["killed"] | {"out": ""}
    assert ["resnet50_test.py", "--resume", str(folder / "my runs" / "killed")] in calls(folder)
    (race,) = (call[2:] for call in calls(folder) if "tuning.compare" in call)
    configs = []
    monkeypatch.setattr(tuning.race, "run_race", configs.append)
    tuning.compare.main(race)
    assert [arm.name for arm in configs[0].arms] == ["sgd", "ngd"]


def test_the_headlines_are_learned_epoch_by_epoch(folder, here):
    command = next(call for call in calls(folder) if call[0] == "transformer_test.py")
    run(transformer_test, *command[1:-2], "--out run")
    accuracies = [row["test_accuracy"] for row in ranks.metrics(here / "run")]
    assert accuracies[0] + 0.3 < accuracies[3] + 0.1 < accuracies[-1]
