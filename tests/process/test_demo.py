"""demo.sh: the scripts accept its commands."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import ranks
import tuning.compare
import tuning.race
from cli import options
from conftest import FILES, run

PYTHON = ".venv/bin/python"
RECORD = "#!/usr/bin/env bash\nprintf '%q ' \"$@\" >>calls.txt\necho >>calls.txt\n"


def test_the_demo_kills_one_of_two_equal_runs_and_races(tmp_path, monkeypatch):
    """With an interpreter that only records its arguments; headlines are learned by epochs."""
    folder = tmp_path / "demo"
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("demo.sh", "setup_venv.sh", "requirements*.txt"):
        for path in ranks.ROOT.glob(name):
            shutil.copy(path, folder)
    (folder / PYTHON).write_text(RECORD)
    (folder / PYTHON).chmod(0o755)
    subprocess.run(["bash", "demo.sh", "my runs"], cwd=folder, stdout=subprocess.PIPE, check=True)
    monkeypatch.setattr(os, "environ", {**os.environ, "DATA_DIR": str(folder)})
    lines = (folder / "calls.txt").read_text().splitlines()
    calls, flags = [shlex.split(line) for line in lines], {}
    for name, *words in calls:
        if name in FILES and "--out" in words:
            script = FILES[name]
            found = vars(options.parse(script.parser(), script.SCRIPT, words)[0])
            flags[Path(found["out"]).name] = found
    assert list(flags) == ["whole", "killed", "headlines"]
    assert {Path(each["out"]).parent for each in flags.values()} == {folder / "my runs"}
    assert flags["whole"] | {"out": ""} == flags["killed"] | {"out": ""}
    assert ["resnet50_test.py", "--resume", str(folder / "my runs" / "killed")] in calls
    assert ["-m", "figures.report", str(folder / "my runs" / "headlines")] in calls
    (race,) = (call[2:] for call in calls if "tuning.compare" in call)
    configs = []
    monkeypatch.setattr(tuning.race, "run_race", configs.append)
    tuning.compare.main(race)
    assert [arm.name for arm in configs[0].arms] == ["sgd", "ngd"]
    monkeypatch.chdir(tmp_path)
    headlines = next(words for name, *words in calls if name == "transformer_test.py")
    run("texts", *headlines[:-2], "--out run")
    accuracies = [row["test_accuracy"] for row in ranks.metrics(tmp_path / "run")]
    assert accuracies[0] + 0.3 < accuracies[3] < accuracies[-1]
