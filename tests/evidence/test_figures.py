"""Evidence: the plan's commands, the results page, pictures, and the runner.

The runner of the experiments continues where it was stopped.
"""

import contextlib
import functools
import json
import re
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import matplotlib
import pytest
import torch
import yaml

import errors
import ranks
import resnet50_test
import transformer_test
from backends import machine
from benchmarks import airbench, plain_training, train_peer
from cli import options
from errors import InputError
from figures import draw, experiments, methods, pictures, run_logs

ROOT = ranks.ROOT


def parsed(script: ModuleType, words: list[str]):
    return options.parse(script.parser(), script.SCRIPT, words)[0]


PARSE = {
    "benchmarks.airbench": airbench.parser().parse_args,
    "benchmarks.plain_training": plain_training.parser().parse_args,
    "benchmarks.train_peer": lambda words: train_peer.parse(words).settings,
    "resnet50_test.py": functools.partial(parsed, resnet50_test),
    "transformer_test.py": functools.partial(parsed, transformer_test),
}


def test_scripts_accept_the_commands_of_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    plans = [experiments.read_plan(experiments.PLAN, name, tmp_path) for name in ("cpu", "gpu")]
    for run in {run.command: run for plan in plans for run in plan}.values():
        arguments = run.arguments()
        number = next(number for number, word in enumerate(arguments) if word in PARSE)
        flags = PARSE[arguments[number]](arguments[number + 1 :])
        assert str(flags.out).endswith(run.title)


def test_logs_come_from_clean_commits():
    paths = run_logs.LOGS.glob("*.jsonl")
    folders = [run for path in paths for run in run_logs.run_folders(path.with_suffix(""))]
    assert len(folders) > 50
    for config in map(run_logs.read_config, folders):
        for segment in [config, *config.get("segments", [])]:
            commit, run = segment.get("commit"), config["run"]
            assert commit, run
            assert not commit.endswith("-dirty"), f"{run}: commit the code, then run it again"
            assert not segment.get("changed"), f"{run}: flags changed while the run was trained"


def test_the_results_page_shows_what_the_logs_say():
    page, plan = draw.RESULTS_PAGE.read_text(), yaml.safe_load(experiments.PLAN.read_text())
    groups = run_logs.read_groups(run_logs.LOGS)
    assert draw.page_with_results(page, groups, plan) == page, "run make figures"


@pytest.mark.process
def test_every_picture_is_drawn_again_byte_for_byte(tmp_path):
    groups, names = run_logs.read_groups(run_logs.LOGS), set(methods.read_pictures()["pictures"])
    assert names == {path.stem for path in draw.PICTURES.glob("*.png")}
    if f"matplotlib=={matplotlib.__version__} " not in (ROOT / "requirements-lock.txt").read_text():
        pytest.skip("another matplotlib draws other pixels")
    for name in names:
        draw.save(pictures.draw_picture(name, groups), tmp_path / f"{name}.png")
        committed = (draw.PICTURES / f"{name}.png").read_bytes()
        assert (tmp_path / f"{name}.png").read_bytes() == committed, f"{name}: run make figures"


TINY = """
cpu:
  one:
    what: digits
    seeds: [3, 4]
    command: >-
      python resnet50_test.py --dataset digits --arch resnet8 --bs 64 --precision fp32 --warmup 0
    runs:
      short: --epochs 1 --subset 0.1
      long: --epochs {epochs} --subset 0.5
"""


def plan_in(folder: Path, epochs: int = 2) -> list[str]:
    """The runner's arguments for the plan above, which is written into a folder."""
    text = TINY.format(epochs=epochs)
    (folder / "plan.yaml").write_text(text + text.replace("cpu:", "gpu:"))
    places = ["--plan", str(folder / "plan.yaml"), "--logs", str(folder / "logs")]
    return ["cpu", *places, "--allow_dirty"]


def run_plan(folder: Path, *arguments: str, epochs=2, code=0, clock=time.monotonic) -> str:
    """What the runner and its runs print, which are forked processes."""
    words, console = [*plan_in(folder, epochs), *arguments], folder / "console.log"

    def start(words: list[str], cwd: Path, env: dict[str, str]) -> ranks.WarmJob:
        return ranks.WarmJob(words[2:], cwd, env, console=console)

    with pytest.MonkeyPatch.context() as patch, open(console, "w") as printed:
        patch.setattr(experiments.subprocess, "Popen", start)
        patch.setattr(experiments.signal, "signal", lambda *_: None)
        patch.setattr(experiments, "time", SimpleNamespace(monotonic=clock))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = errors.exit_code(lambda: experiments.main(words))
    assert found == code, console.read_text()
    return console.read_text()


def test_wrong_commands_and_uncommitted_code_are_refused(tmp_path, monkeypatch):
    """What is evidence comes from a commit; a log that the runner has written does not stop it."""
    words = plan_in(tmp_path)

    untracked = {tmp_path / "logs": ["new.py"]}  # apart from what is below that folder
    monkeypatch.setattr(experiments.signal, "signal", lambda *_: None)
    monkeypatch.setattr(machine, "modified_files", lambda: ["backends/machine.py"])
    monkeypatch.setattr(machine, "untracked_files", lambda ignored: untracked[ignored])

    cases = [
        (words[:-1], r"not committed: backends/machine\.py, new\.py;"),
        ([*words, "--logs", str(run_logs.LOGS / "below")], "figures/logs are evidence"),
        ([*words, "--only", "two"], "there are one"),
    ]
    if not torch.cuda.is_available():
        cases.append((["gpu", *words[1:]], "gpu: this machine has none"))
    for wrong, match in cases:
        with pytest.raises(InputError, match=match):
            experiments.main(wrong)
    assert not (tmp_path / "logs").exists()


@pytest.mark.process
def test_runs_that_are_done_are_skipped_and_those_that_fail_are_named(tmp_path):
    """All of a seed run before the next; a run without a checkpoint starts again."""
    assert run_plan(tmp_path, "--list").count("open") == 4
    folder = tmp_path / "logs" / "one" / "short-seed3"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    (folder / "config.json").write_text("{}")
    console = run_plan(tmp_path, epochs=0, code=2)
    assert "one/long-seed3 (exit code 2), one/long-seed4 (exit code 2)" in console
    assert run_plan(tmp_path, "--list").count("done") == 2
    started = re.findall(r"\] (\S+): (?!done)", run_plan(tmp_path))
    assert started == ["one/long-seed3", "one/long-seed4"]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["one.jsonl"]
    assert run_plan(tmp_path).count("done") == 4
    assert run_logs.read_config(tmp_path / "logs" / "one" / "long-seed3")["flags"]["seed"] == 3


@pytest.mark.process
def test_a_plan_that_runs_out_of_time_resumes_from_its_checkpoint(tmp_path):
    folder = tmp_path / "logs" / "one" / "long-seed3"
    before = 0

    def clock() -> float:
        """The time is over when the run has trained a little."""
        there = (folder / "metrics.jsonl").exists() and (folder / "last.pt").exists()
        return 1e9 if there and len(ranks.metrics(folder)) > before else 0.0

    console = run_plan(tmp_path, "--minutes", "1", epochs=4000, code=130, clock=clock)
    assert "run the same command again to resume it" in console
    assert (folder / "last.pt").exists()
    assert "long-seed4" not in console, "no run starts after the deadline"
    before = len(ranks.metrics(folder))
    console = run_plan(tmp_path, "--minutes", "1", epochs=4000, code=130, clock=clock)
    epochs = [row["epoch"] for row in ranks.metrics(folder)]
    assert epochs == list(range(1, len(epochs) + 1))
    assert len(epochs) > before
    assert "short-seed3: done" in console


def write_log(folder: Path, text: str, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"flags": {"epochs": 1}} | config))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_a_packed_run_reads_as_its_folder_did(tmp_path):
    """Without the places of a machine; a run that is packed again is replaced."""
    group, row = tmp_path / "one", '{{"epoch": 1,  "seconds": {}}}\n'
    for name, seconds in (("a-seed0", 1.5), ("b-seed1", 2.0), ("a-seed0", 3.0)):
        config = {
            "flags": {"epochs": 1, "data_dir": "/home/me/data", "out": "../../runs/a"},
            "command": ["resnet50_test.py", "--data_dir=/home/me/data", "--lr", "0.1"],
            "launchers": ["a-boot"],
        }
        run_logs.pack(write_log(group / name, row.format(seconds), **config))
    assert not group.exists()
    assert [folder.name for folder in run_logs.run_folders(group)] == ["a-seed0", "b-seed1"]
    assert run_logs.row_lines(group / "a-seed0") == ['{"epoch": 1,  "seconds": 3.0}']
    assert run_logs.read_config(group / "a-seed0") == {
        "run": "a-seed0",
        "flags": {"epochs": 1, "data_dir": "data", "out": "a"},
        "command": ["resnet50_test.py", "--data_dir=data", "--lr", "0.1"],
    }
    for seed, text in enumerate(('{"epoch": 2}\n', '{"epoch": 1}\n{"epo', "")):  # unfinished
        write_log(tmp_path / "two" / f"c-seed{seed}", text, flags={"epochs": 3})
    row = '{"epoch": 1, "test_accuracy": 0.9}\n'
    write_log(tmp_path / "two" / "ended-seed0", row, flags={"epochs": 3, "stop_at": 0.9})
    groups = run_logs.read_groups(tmp_path)
    assert groups["one"]["b"] == [[{"epoch": 1, "seconds": 2.0}]]
    assert groups["two"].keys() == {"ended"}
    with pytest.raises(InputError, match="no folder of a finished run"):
        run_logs.pack(group / "a-seed0")
