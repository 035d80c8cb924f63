"""demo.sh: the scripts accept its commands, and those that it shows at its end."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import ranks
import resnet50_test
import transformer_test
from cli import options

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


def shown(folder: Path) -> list[list[str]]:
    """The commands below 'Next:'."""
    text = (folder / "console.txt").read_text().split("Next:\n")[1].replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]


def test_the_scripts_accept_the_commands_of_the_demo(folder, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "DATA_DIR": str(folder)})
    trained = [call for call in calls(folder) if call[0] in SCRIPTS]
    for script, *arguments in trained:
        flags, _ = options.parse(SCRIPTS[script].parser(), SCRIPTS[script].SCRIPT, arguments)
        assert Path(flags.out).parent == folder / "my runs"
        assert flags.seed == 0
    assert [call[0] for call in trained] == 3 * ["resnet50_test.py"] + ["transformer_test.py"]


def test_the_two_sides_of_the_comparison_differ_in_the_optimizer_alone(folder):
    flags = {
        Path(parsed.out).name: vars(parsed)
        for script, *arguments in calls(folder)
        if script == "resnet50_test.py"
        for parsed, _ in [options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, arguments)]
    }
    different = {key for key, value in flags["sgd"].items() if value != flags["ngd"][key]}
    assert different <= {"optimizer", "opt_args", "out"}
    assert flags["ngd"]["optimizer"] == "ngd"


def test_the_reports_are_of_the_runs(folder):
    reported = [call[2:] for call in calls(folder) if "figures.report" in call]
    outs = [call[call.index("--out") + 1] for call in calls(folder) if call[0] in SCRIPTS]
    assert [run for words in reported for run in words[:-2]] == outs


def test_the_commands_shown_at_the_end_name_what_is_there(folder):
    commands = shown(folder)
    assert len(commands) == 5
    outs = {call[call.index("--out") + 1] for call in calls(folder) if call[0] in SCRIPTS}
    for command in commands:
        if "--checkpoint" in command:
            assert command[command.index("--checkpoint") + 1] in outs
            continue
        script = next(word for word in command if word in SCRIPTS)
        arguments = command[command.index(script) + 1 :]
        if "--help" not in arguments:
            options.parse(SCRIPTS[script].parser(), SCRIPTS[script].SCRIPT, arguments)
