"""Evidence: the plan's commands, the results page, the recipes' headers, pictures, and the runner.

The runner of the experiments continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
import yaml

import errors
import ranks
import resnet50_test
import transformer_test
from benchmarks import airbench
from cli import options, settings
from cli.foreign_names import FOREIGN
from conftest import each_of, for_each
from errors import InputError
from figures import draw, experiments, methods, pack_logs, pictures, run_logs
from training import machine
from training.generated_section import replace_generated_section

ROOT = ranks.ROOT

AIRBENCH = "benchmarks.airbench"
SCRIPTS = {"resnet50_test.py": resnet50_test, "transformer_test.py": transformer_test}
PLANNED = [
    run
    for device in ("cpu", "gpu")
    for run in experiments.read_plan(experiments.PLAN, device, run_logs.LOGS)
]
# No axis of theirs is longer than 64, so that every --ngd_rank from 32 on is the same; 80 was the
# default once.
SMALL_NETWORKS = {"resnet8", "resnet20"}
MACHINE_FLAGS = {"data_dir", "threads", "workers", "out", "resume", "recipe"}


def flags_of(run: experiments.PlannedRun, logs: Path) -> argparse.Namespace:
    """Parse the flags of a run as its script does; `logs` is an empty folder."""
    folder = logs / run.folder.parent.name / run.folder.name
    arguments = dataclasses.replace(run, folder=folder).arguments()
    if AIRBENCH in arguments:  # the peer, which is no script of ours
        return airbench.parser().parse_args(arguments[arguments.index(AIRBENCH) + 1 :])
    name = next(argument for argument in arguments if argument in SCRIPTS)
    script, arguments = SCRIPTS[name], arguments[arguments.index(name) + 1 :]
    return options.parse(script.parser(), script.SCRIPT, arguments)[0]


def test_the_scripts_accept_every_command_of_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)

    def check(run: experiments.PlannedRun) -> None:
        assert str(flags_of(run, tmp_path).out).endswith(run.title)

    for_each([(run,) for run in PLANNED if run.seed == 0], check)


LOGGED = [
    folder
    for path in sorted(run_logs.LOGS.glob("*.jsonl"))
    for folder in run_logs.run_folders(path.with_suffix(""))
]


def test_every_image_command_and_recipe_names_its_optimizer(monkeypatch):
    """So that another default does not change what was measured."""
    monkeypatch.chdir(ROOT)
    script, parser = f"{resnet50_test.SCRIPT}.py", resnet50_test.parser()
    commands = {run.command for run in PLANNED if script in run.command}
    recipes = [path for path in options.RECIPES.glob("*.yaml") if script in path.read_text()]
    assert len(commands) > 200
    assert len(recipes) > 5
    words = [shlex.split(command.partition(script)[2]) for command in commands]
    for arguments in [*words, *(["--recipe", str(path)] for path in recipes)]:
        recipe = parser.parse_args(arguments).recipe
        of_recipe = options.recipe_arguments(recipe, parser) if recipe else []
        assert "optimizer" in parser.given([*of_recipe, *arguments]), arguments


def with_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags, and settings of parts by names of their own; in some logs they are flags."""
    flat = settings.flat(flags)
    for former, own in FOREIGN.items():
        part, _, key = own.removeprefix("--").partition("=")
        if former[2:] in flat and key.partition("=")[2] in ("", "true") and "=" in key:
            flat[f"{part} {key.partition('=')[0]}"] = flat.pop(former[2:])
    return flat


def test_logs_were_made_with_the_flags_of_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    finished = [run for run in PLANNED if run_logs.finished(run.folder)]
    assert len(finished) > 50
    for run in finished:
        planned = with_settings(vars(flags_of(run, tmp_path)))
        logged = with_settings(run_logs.read_config(run.folder)["flags"])
        common = (planned.keys() & logged.keys()) - MACHINE_FLAGS
        if logged.get("optimizer") == "ngd" and "opt_args adamw_ratio" not in logged:
            logged["optimizer"] = "kaldi_ngd"  # which had that name then
        if logged.get("arch") in SMALL_NETWORKS or "ngd" not in logged.get("optimizer", ""):
            common -= {"opt_args rank"}
        different = [key for key in common if planned[key] != logged[key]]
        assert not different, (run.folder, different)
        trained = run_logs.read_rows(run.folder)[0]["samples"]
        assert not run.rows or 0.9 * run.rows <= trained <= run.rows, run.folder


def test_logs_come_from_clean_commits():
    for config in map(run_logs.read_config, LOGGED):
        for segment in [config, *config.get("segments", [])]:
            commit, run = segment.get("commit"), config["run"]
            assert commit, run
            assert not commit.endswith("-dirty"), f"{run}: commit the code, then run it again"
            assert not segment.get("changed"), f"{run}: flags changed while the run was trained"


def test_the_results_page_shows_what_the_logs_say():
    page, plan = draw.RESULTS_PAGE.read_text(), yaml.safe_load(experiments.PLAN.read_text())
    groups = run_logs.read_groups(run_logs.LOGS)
    assert draw.page_with_results(page, groups, plan) == page, "run make figures"

    empty = draw.page_with_results(f"{draw.BEGIN} {draw.END}", {}, plan)
    assert "jsonl](" not in empty
    for device in ("CPU", "GPU"):
        assert f"Planned for a {device} and not run yet" in empty


def test_only_the_section_between_the_markers_is_replaced():
    page = "title\n<!-- a -->\nold\n<!-- b -->\nrest\n"
    replaced = replace_generated_section(page, "<!-- a -->", "<!-- b -->", content="new")
    assert replaced == "title\n<!-- a -->\nnew\n<!-- b -->\nrest\n"
    for bad in (page + page, "no marker", "<!-- b --> <!-- a -->"):
        with pytest.raises(ValueError, match="exactly one '<!-- a -->'"):
            replace_generated_section(bad, "<!-- a -->", "<!-- b -->", content="new")


MEASURED = re.compile(
    r"(\d+\.\d+)(?: \+- (\d+\.\d+))? %[^()%]*\(figures/logs/(\S+)\.jsonl: (\S+)\)"
)


@each_of("path", sorted((ROOT / "recipes").glob("*.yaml")))
def test_a_recipe_says_what_its_logs_show_or_that_it_has_none(path):
    comments = [line.lstrip("# ") for line in path.read_text().splitlines() if line[:1] == "#"]
    header = " ".join(comments)
    reported = MEASURED.findall(header)
    assert reported or "Not run to its end yet" in header
    for value, deviation, group, name in reported:
        folders = [run for run in LOGGED if run.parent.name == group]
        values = run_logs.last(run_logs.by_name(folders)[name], run_logs.accuracy)
        assert float(value) == pytest.approx(statistics.mean(values), abs=0.006)
        if deviation:
            assert float(deviation) == pytest.approx(statistics.stdev(values), abs=0.006)


# -------------------------------------------------------------------- pictures


@pytest.mark.process
def test_every_picture_is_drawn_again_byte_for_byte(tmp_path):
    groups, styles = run_logs.read_groups(run_logs.LOGS), methods.read_pictures()["styles"]
    assert len({*map(tuple, styles.values())}) == len(styles), "no two methods look the same"
    names = set(methods.read_pictures()["pictures"])
    if f"matplotlib=={matplotlib.__version__} " not in (ROOT / "requirements-lock.txt").read_text():
        pytest.skip("another matplotlib draws other pixels")
    assert names == {path.stem for path in draw.PICTURES.glob("*.png")}
    for name in names:
        draw.save(pictures.draw_picture(name, groups), tmp_path / f"{name}.png")
        committed = (draw.PICTURES / f"{name}.png").read_bytes()
        assert (tmp_path / f"{name}.png").read_bytes() == committed, f"{name}: run make figures"
        assert len(committed) < 150_000, name


def test_minutes_are_epochs_at_the_median_speed_of_the_turns():
    speeds = {"ngd": [100, 50, 30], "sgd": {"0": [100, 200, 300]}}
    results = {"samples_per_epoch": {"ngd": 6000, "sgd": 6000}, "samples_per_second": speeds}
    named_runs = {"NGD": runs(0.2, 0.5), "SGD": runs(0.1, 0.2), "AdamW": runs(0.3)}
    names = {"ngd": "NGD", "sgd": "SGD", "adamw": "AdamW"}
    timed = pictures.with_minutes(named_runs, results, names)
    minutes = {label: [row["minutes"] for row in rows] for label, (rows,) in timed.items()}
    assert minutes == {"NGD": [2, 4], "SGD": [0.5, 1]}


def test_the_best_setting_of_each_optimizer_is_the_one_of_the_lowest_loss():
    curves = {"NGD, momentum 0.6": {0.1: 0.5, 0.2: 0.4}, "NGD, momentum 0.9": {0.1: 0.3, 0.2: 0.6}}
    best = {"NGD, momentum 0.9": (0.1, 0.3), "SGD, momentum 0.9": (0.4, 0.9)}
    assert pictures.best_settings({**curves, "SGD, momentum 0.9": {0.4: 0.9}}) == best


def runs(*accuracies: float) -> run_logs.Runs:
    numbered = enumerate(accuracies, 1)
    return [[{"epoch": n, "seconds": 10.0 * n, "test_accuracy": value} for n, value in numbered]]


def test_no_other_run_beats_those_on_the_pareto_front():
    points = [(1, 50), (2, 40), (2, 70), (3, 70), (4, 90), (0.5, 60)]
    assert pictures.pareto_front(points) == [(0.5, 60), (2, 70), (4, 90)]


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


def plan_in(folder: Path, epochs: int = 2, device: str = "cpu") -> list[str]:
    """The runner's arguments for the plan above, which is written into a folder."""
    text = TINY.replace("cpu:", f"{device}:").format(epochs=epochs)
    (folder / "plan.yaml").write_text(text)
    places = ["--plan", str(folder / "plan.yaml"), "--logs", str(folder / "logs")]
    return [device, *places, "--allow_dirty"]


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """The runner sets them, here for the length of a test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_plan(
    folder: Path,
    *arguments: str,
    epochs: int = 2,
    code: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """What the runner and its runs print, which are forked processes."""
    words, console = [*plan_in(folder, epochs), *arguments], folder / "console.log"

    def start(words: list[str], cwd: Path, env: dict[str, str]) -> ranks.WarmJob:
        return ranks.WarmJob(words[2:], cwd, env, console=console)

    with pytest.MonkeyPatch.context() as patch, open(console, "w") as printed:
        patch.setattr(experiments.subprocess, "Popen", start)
        patch.setattr(experiments, "time", SimpleNamespace(monotonic=clock))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            found = errors.exit_code(lambda: experiments.main(words))
    assert found == code, console.read_text()
    return console.read_text()


def test_a_run_starts_from_a_clean_commit_only(tmp_path, monkeypatch, capsys):
    """The log of the first run does not stop the second."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "training" / "machine.py"))
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "machine.py").write_text("")
    words = plan_in(tmp_path, epochs=1)[:-1]  # without --allow_dirty
    with pytest.raises(InputError, match="commit of this code is unknown .* is no evidence"):
        experiments.main(words)
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "new.py").write_text("")
    (tmp_path / "training" / "machine.py").write_text("edited")
    with pytest.raises(InputError, match=r"not committed: training/machine\.py, new\.py;"):
        experiments.main(words)
    assert not (tmp_path / "logs").exists()
    experiments.main([*words, "--list"])
    assert "open" in capsys.readouterr().out

    started = []

    def finish_at_once(run: experiments.PlannedRun, *_: object) -> str:
        started.append(run.title)
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.jsonl").write_text("{}")
        return ""

    monkeypatch.setattr(experiments, "execute", finish_at_once)
    (tmp_path / "new.py").unlink()
    (tmp_path / "training" / "machine.py").write_text("")
    experiments.main(words)
    assert len(started) == 4


def test_the_logs_of_this_repository_are_evidence(tmp_path):
    for logs in (run_logs.LOGS, run_logs.LOGS / "below"):
        with pytest.raises(InputError, match="figures/logs are evidence"):
            experiments.main([*plan_in(tmp_path), "--logs", str(logs)])


def test_the_plan_runs_all_of_a_seed_before_the_next(tmp_path):
    plan_in(tmp_path)
    plan = experiments.read_plan(tmp_path / "plan.yaml", "cpu", tmp_path / "logs")
    names = [run.folder.name for run in plan]
    assert names == ["short-seed3", "long-seed3", "short-seed4", "long-seed4"]


@pytest.mark.process
def test_finished_runs_are_skipped_and_those_without_a_checkpoint_start_again(tmp_path):
    assert run_plan(tmp_path, "--list").count("open") == 4
    folder = tmp_path / "logs" / "one" / "short-seed3"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    (folder / "config.json").write_text("{}")
    run_plan(tmp_path)
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


@pytest.mark.process
def test_a_failed_run_is_named_and_the_others_run(tmp_path):
    console = run_plan(tmp_path, epochs=0, code=2)
    assert "2 run(s) failed" in console
    assert "one/long-seed3 (exit code 2), one/long-seed4 (exit code 2)" in console
    assert "--epoch" in console
    assert run_plan(tmp_path, "--list").count("done") == 2


def test_logs_of_runs_on_another_data_set_are_deleted(tmp_path, monkeypatch):
    run = experiments.PlannedRun(tmp_path / "one" / "a-seed0", 0, "python a.py", rows=5000)

    def finish_at_once(*_: object, **__: object) -> SimpleNamespace:
        run.folder.mkdir(parents=True)
        (run.folder / "config.json").write_text('{"flags": {"epochs": 1}}')
        (run.folder / "metrics.jsonl").write_text('{"epoch": 1, "samples": 1437}\n')
        return SimpleNamespace(wait=lambda seconds: 0)

    monkeypatch.setattr(experiments.subprocess, "Popen", finish_at_once)
    failure = experiments.execute(run, deadline=math.inf, variables={})
    assert failure.endswith("1437 rows, the plan expects 5000; its log is deleted")
    assert not run.folder.exists()


def test_unfinished_runs_are_left_out(tmp_path):
    rows = [json.dumps({"epoch": epoch, "test_accuracy": 0.5}) + "\n" for epoch in (1, 2)]
    for seed, text in enumerate(("".join(rows), rows[0], rows[0] + rows[1][:9], "")):
        folder = tmp_path / "one" / f"long-seed{seed}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"flags": {"epochs": 2}}')
        (folder / "metrics.jsonl").write_text(text)
    assert run_logs.read_groups(tmp_path) == {"one": {"long": [[json.loads(row) for row in rows]]}}


def test_a_packed_run_reads_as_its_folder_did(tmp_path):
    """Without the places of a machine; a run that is packed again is replaced."""
    group, rows = tmp_path / "one", []
    for name, seconds in (("a-seed0", 1.5), ("b-seed1", 2.0), ("a-seed0", 3.0)):
        folder = group / name
        folder.mkdir(parents=True)
        config = {
            "flags": {"epochs": 1, "data_dir": "/home/me/data", "out": "../../runs/a"},
            "command": ["resnet50_test.py", "--data_dir=/home/me/data", "--lr", "0.1"],
            "launchers": ["a-boot"],
        }
        (folder / "config.json").write_text(json.dumps(config))
        rows = [f'{{"epoch": 1,  "seconds": {seconds}}}']
        (folder / "metrics.jsonl").write_text(rows[0] + "\n")
        pack_logs.pack(folder)
    assert not group.exists()
    assert [folder.name for folder in run_logs.run_folders(group)] == ["a-seed0", "b-seed1"]
    assert run_logs.row_lines(group / "a-seed0") == rows
    assert run_logs.read_config(group / "a-seed0") == {
        "run": "a-seed0",
        "flags": {"epochs": 1, "data_dir": "data", "out": "a"},
        "command": ["resnet50_test.py", "--data_dir=data", "--lr", "0.1"],
    }
    assert run_logs.read_groups(tmp_path)["one"]["b"] == [[{"epoch": 1, "seconds": 2.0}]]
    with pytest.raises(InputError, match="no folder of a finished run"):
        pack_logs.pack(group / "a-seed0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_experiments_need_a_gpu_and_a_group_is_one_of_the_plan(tmp_path):
    with pytest.raises(InputError, match="gpu: this machine has none"):
        experiments.main(plan_in(tmp_path, device="gpu"))
    with pytest.raises(InputError, match="there are one"):
        experiments.main([*plan_in(tmp_path), "--only", "two"])


@pytest.mark.process
def test_sigterm_stops_the_runner_and_its_run(tmp_path):
    command = ranks.script("figures/experiments.py", *plan_in(tmp_path, epochs=4000))
    process = ranks.start(command, tmp_path)
    folder = tmp_path / "logs" / "one" / "long-seed3"
    ranks.wait_for(lambda: (folder / "metrics.jsonl").exists() and ranks.metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    ranks.finish(process, tmp_path, expected=130)
    assert (folder / "last.pt").exists()


def test_the_critical_batch_is_the_one_that_the_samples_were_made_with():
    batches = [32, 128, 512, 2048]
    samples = [5e4 * (1 + size / 700) for size in batches]
    least, critical = pictures.fit_critical_batch(np.array(batches), np.array(samples))
    assert (least, critical) == (pytest.approx(5e4, rel=0.01), pytest.approx(700, rel=0.01))


def test_samples_to_an_accuracy_are_read_by_batch_size_and_optimizer():
    rows = [
        {"epoch": 1, "samples": 1000, "test_accuracy": 0.35, "noise_scale": 50.0},
        {"epoch": 2, "samples": 2000, "test_accuracy": 0.55, "noise_scale": 80.0},
    ]
    runs = {"sgd-bs32": [rows, rows[:1]], "sgd-bs512": [rows, rows], "ngd-bs32": [rows[:1]]}
    expected = {512: (pytest.approx([1500] * 2), [80.0] * 2)}
    assert pictures.reached_by_batch(runs, "sgd", 45) == expected
    assert pictures.reached_by_batch(runs, "ngd", 45) == {}
