"""Evidence: the plan's commands, the results page, the recipes' headers, pictures, and the runner.

The runner of the experiments continues where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import errors
import ranks
import resnet50_test
import transformer_test
from benchmarks import airbench
from cli import options
from conftest import for_each
from errors import InputError
from figures import (
    draw,
    experiments,
    methods,
    pack_logs,
    pictures,
    run_logs,
    table,
    unlogged_flags,
)
from training import machine
from training.generated_section import replace_generated_section

ROOT = ranks.ROOT

AIRBENCH = "benchmarks.airbench"
SCRIPTS = {"resnet50_test.py": resnet50_test, "transformer_test.py": transformer_test}
PLANNED = [
    run
    for device in ("cpu", "gpu")
    for run in experiments.read_plan(experiments.PLAN, device, run_logs.LOGS)
    if run.name
]
# No axis of theirs is longer than 64, so that every --ngd_rank from 32 on is the same; 80 was the
# default once.
SMALL_NETWORKS = {"resnet8", "resnet20"}
MACHINE_FLAGS = {"data_dir", "threads", "workers", "out", "resume", "recipe"}


def flags_of(run: experiments.PlannedRun, logs: Path) -> argparse.Namespace:
    """Parse the flags of a run as its script does; `logs` is an empty folder."""
    arguments, _ = dataclasses.replace(run, logs=logs).command_line()
    if AIRBENCH in arguments:  # the peer, which is no script of ours
        return airbench.parser().parse_args(arguments[arguments.index(AIRBENCH) + 1 :])
    name = next(argument for argument in arguments if argument in SCRIPTS)
    script, arguments = SCRIPTS[name], arguments[arguments.index(name) + 1 :]
    return options.parse(script.parser(), script.SCRIPT, arguments)[0]


def test_the_scripts_accept_every_command_of_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)

    def check(run: experiments.PlannedRun) -> None:
        assert str(flags_of(run, tmp_path).out).endswith(f"{run.group}/{run.name}-seed0")

    for_each([(run,) for run in PLANNED if run.seed == 0], check)


LOGGED = [
    folder
    for path in sorted(run_logs.LOGS.glob("*.jsonl"))
    for folder in run_logs.run_folders(path.with_suffix(""))
]


def names_optimizer(arguments: list[str], recipe: str | None) -> bool:
    parser = resnet50_test.parser()
    words = [*(options.recipe_arguments(recipe, parser) if recipe else []), *arguments]
    return "optimizer" in parser.given(words)


def test_every_image_command_and_recipe_names_its_optimizer(monkeypatch):
    """So that another default does not change what was measured."""
    monkeypatch.chdir(ROOT)
    script = f"{resnet50_test.SCRIPT}.py"
    commands = {run.command for run in PLANNED if script in run.command}
    assert len(commands) > 200
    for command in commands:
        arguments = shlex.split(command.partition(script)[2])
        recipe = resnet50_test.parser().parse_args(arguments).recipe
        assert names_optimizer(arguments, recipe), command
    recipes = [path for path in options.RECIPES.glob("*.yaml") if script in path.read_text()]
    assert len(recipes) > 5
    for path in recipes:
        assert names_optimizer([], str(path)), path


def test_logs_were_made_with_the_flags_of_the_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    checked = 0
    for run in PLANNED:
        if run.is_done:
            logged = run_logs.read_config(run.folder)["flags"]
            planned = vars(flags_of(run, tmp_path))
            common = (planned.keys() & logged.keys()) - MACHINE_FLAGS
            if logged.get("optimizer") == "ngd" and "adamw_ratio" not in logged:
                logged["optimizer"] = "kaldi_ngd"  # which had that name then
            if logged.get("arch") in SMALL_NETWORKS or "ngd" not in logged.get("optimizer", ""):
                common -= {"ngd_rank"}
            if logged.get("sync") != "diloco":  # SLAMB had an outer step, with other defaults
                common -= {"outer_lr", "outer_momentum"}
            assert {key: planned[key] for key in common} == {key: logged[key] for key in common}, (
                run.folder
            )
            trained = run_logs.read_rows(run.folder)[0]["samples"]
            assert not run.rows or 0.9 * run.rows <= trained <= run.rows, run.folder
            checked += 1
    assert checked > 50


def test_logs_come_from_clean_commits():
    for config in unlogged_flags.read_configs(run_logs.LOGS):
        for segment in [config, *config.get("segments", [])]:
            commit, run = segment.get("commit"), config["run"]
            assert commit, run
            assert not commit.endswith("-dirty"), f"{run}: commit the code, then run it again"
            assert not segment.get("changed"), f"{run}: flags changed while the run was trained"


def test_the_results_page_shows_what_the_logs_say():
    text = draw.RESULTS_PAGE.read_text()
    shown = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.results(run_logs.read_groups(run_logs.LOGS), experiments.PLAN)


def test_the_results_page_lists_the_flags_without_a_log():
    text = draw.RESULTS_PAGE.read_text()
    shown = text.split(unlogged_flags.BEGIN)[1].split(unlogged_flags.END)[0].strip()
    assert shown == unlogged_flags.listed(unlogged_flags.read_configs(run_logs.LOGS))


def unlogged_of(*words: str) -> str:
    """The list where one run with these flags is logged."""
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", list(words))
    config = {"command": ["resnet50_test.py", *words], "flags": vars(args)}
    return unlogged_flags.listed([config])


def test_a_flag_is_without_a_log_until_a_run_has_set_it():
    by_command, by_recipe = ("`--ema`", "`--optimizer`"), ("`--alternate_flip`", "`--test_views`")
    without = unlogged_of()
    assert all(flag in without for flag in (*by_command, *by_recipe, "`--outer_momentum`"))
    assert "`--resume`" not in without  # it changes no result
    listed = unlogged_of("--ema", "0.9", "--ngd", "--recipe", "fast94_vgg8")
    assert not any(flag in listed for flag in (*by_command, *by_recipe))
    assert "`--optimizer ngd`" not in listed
    assert "`--optimizer demo`" in listed
    assert "`--outer_momentum`" in listed
    listed = unlogged_of("--dataset", "mnist", "--crop_fill", "reflect")
    assert "`--dataset mnist`" not in listed
    assert all(f"`--dataset {name}`" in listed for name in ("folder", "csv"))  # of one script each


def test_a_run_from_before_a_flag_had_its_default():
    old = {"command": ["resnet50_test.py"], "flags": {}}
    new = {
        "command": ["resnet50_test.py", "--crop_fill", "reflect"],
        "flags": {"crop_fill": "reflect"},
    }
    assert "`--crop_fill black`" in unlogged_flags.listed([new])
    assert "`--crop_fill black`" not in unlogged_flags.listed([old, new])
    texts = {"command": ["transformer_test.py"], "flags": {}}
    assert "`--crop_fill black`" in unlogged_flags.listed([texts, new])  # which have no crops


def test_planned_experiments_without_a_log_are_named_below_the_table():
    empty = table.results({}, experiments.PLAN)
    assert "log](" not in empty
    assert "Planned for a CPU and not run yet" in empty
    assert "Planned for a GPU and not run yet" in empty
    assert "open" not in empty


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


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_recipe_says_what_its_logs_show_or_that_it_has_none(path):
    header = " ".join(
        line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#")
    )
    reported = MEASURED.findall(header)
    assert reported or "Not run to its end yet" in header
    for value, deviation, group, name in reported:
        values = run_logs.last(run_logs.read_groups(run_logs.LOGS)[group][name], run_logs.accuracy)
        assert float(value) == pytest.approx(statistics.mean(values), abs=0.006)
        assert not deviation or float(deviation) == pytest.approx(
            statistics.stdev(values), abs=0.006
        )


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    """All pictures that can be drawn from the committed logs, by name."""
    groups = run_logs.read_groups(run_logs.LOGS)
    with plt.rc_context({"figure.max_open_warning": 0}):
        figures = {name: picture(groups) for name, picture in pictures.PICTURES.items()}
    plt.close("all")
    return {name: figure for name, figure in figures.items() if figure is not None}


def lines_of(*panels: Axes) -> list[tuple[str, Line2D]]:
    """Return the label and the line of each method in these panels."""
    lines = [(line.get_label(), line) for axes in panels for line in axes.get_lines()]
    for axes in panels:  # measurements with bars
        bars = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
        lines += [(each.get_label(), each.lines[0]) for each in bars if each.get_label()]
    return [(label, line) for label, line in lines if methods.method_of(label) in methods.STYLES]


def test_every_picture_whose_runs_are_logged_is_drawn(drawn):
    planned = {name for name in pictures.PICTURES if not (run_logs.LOGS / f"{name}.jsonl").exists()}
    assert drawn.keys() >= pictures.PICTURES.keys() - planned
    assert drawn.keys() >= {"time", "schedules", "scaling", "pareto"}
    pngs = {path.stem for path in draw.HERE.glob("*.png")}
    assert drawn.keys() == pngs - {"report"}, "run make figures"  # that one is a screenshot


def test_every_picture_says_what_it_shows(drawn):
    for name, figure in drawn.items():
        title = figure.get_suptitle() + "".join(axes.get_title() for axes in figure.axes)
        assert re.search(r"ResNet-(8|20|110)|VGG8|Transformer", title), name
        assert figure.get_suptitle(), name
        for axes in figure.axes:
            assert axes.get_xlabel(), name
            assert axes.get_ylabel(), name
        legends = [*figure.legends, *(each for sub in figure.subfigs for each in sub.legends)]
        named = {text.get_text() for legend in legends for text in legend.get_texts()}
        assert {label for label, _ in lines_of(*figure.axes)} <= named, name


def test_bands_are_explained(drawn):
    for name, figure in drawn.items():
        legends = " ".join(legend.get_title().get_text() for legend in figure.legends)
        artists = [artist for axes in figure.axes for artist in axes.collections]
        if any(isinstance(artist, PolyCollection) for artist in artists):
            assert re.search(r"mean over .*; band.*: lowest to highest seed", legends), name
        elif name != "pareto":
            assert "one seed each" in legends or "bar: lowest to highest" in legends, name


def test_a_method_has_its_colour_and_marker_in_every_picture(drawn):
    seen = set()
    for name, figure in drawn.items():
        assert lines_of(*figure.axes), name
        for label, line in lines_of(*figure.axes):
            method = methods.method_of(label)
            assert (line.get_color(), line.get_marker()) == methods.STYLES[method], (name, label)
            seen.add(method)
    assert seen == methods.STYLES.keys()
    assert len(set(methods.STYLES.values())) == len(methods.STYLES)


def test_methods_that_share_a_panel_differ_in_their_colours(drawn):
    for name, figure in drawn.items():
        for axes in figure.axes:
            labels = axes.get_legend_handles_labels()[1]
            shown = {methods.method_of(label) for label in labels} & methods.STYLES.keys()
            assert len({methods.STYLES[method][0] for method in shown}) == len(shown), name


def test_only_what_a_model_computes_is_dashed(drawn):
    for name, figure in drawn.items():
        dashed = [
            line
            for axes in figure.axes
            for line in axes.get_lines()
            if line.get_linestyle() == "--"
        ]
        assert bool(dashed) == (name in {"scaling", "critical_batch"}), name
    labels = [text.get_text() for text in drawn["scaling"].legends[0].get_texts()]
    assert labels[-2:] == ["model", "measured"]


def test_runs_share_axes_in_the_pareto_picture_only_if_they_solve_the_same_problem(drawn):
    drawn_runs = 0
    for axes in drawn["pareto"].axes:
        problems = set()
        points = {tuple(point) for _, line in lines_of(axes) for point in line.get_xydata()}
        for folder in LOGGED:
            last_row = run_logs.read_rows(folder)[-1]
            if "test_accuracy" not in last_row:
                continue
            if (run_logs.device_hours(last_row), run_logs.accuracy(last_row)) in points:
                flags = run_logs.read_config(folder)["flags"]
                if folder.name.startswith("airbench94"):  # a peer: its flags are its own
                    flags = {"arch": "vgg8", "dataset": "cifar10", "subset": 1.0, "threads": 2}
                network = flags.get("arch", "Transformer")
                problems.add((network, flags["dataset"], flags["subset"], flags["threads"]))
                drawn_runs += 1
        assert len(problems) == 1, axes.get_title()
    assert drawn_runs > 9


def test_a_picture_whose_runs_are_missing_is_left_out():
    for name, picture in pictures.PICTURES.items():
        assert picture({}) is None or name == "scaling"


@pytest.mark.parametrize("data_set", ["agnews12k", "cifar10"])
def test_optimizers_are_drawn_with_the_seeds_and_methods_that_there_are(data_set):
    logged = run_logs.read_groups(run_logs.LOGS)["optimizers_agnews12k"]
    groups = {f"optimizers_{data_set}": {"ngd": logged["ngd"], "sgd": logged["sgd"][:1]}}
    figure = pictures.PICTURES[f"optimizers_{data_set}"](groups)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"NGD, {len(logged['ngd'])} seeds", "SGD, 1 seed"]
    assert [axes.get_xlabel().partition(" ")[0] for axes in figure.axes[:2]] == [
        "epoch",
        "training",
    ]
    plt.close(figure)


def test_a_search_that_has_only_begun_is_drawn(tmp_path, monkeypatch):
    logged = run_logs.LOGS / "optimizer_search_cifar10_20pct"
    for source, name in (
        ("ngd-lr0.08-momentum0.6", "ngd-lr0.08"),
        ("ngd-lr0.16-momentum0.6", "ngd-lr0.16"),
        ("adamw-lr0.004-beta0.95", "adamw-lr0.004"),
    ):
        folder = tmp_path / "optimizer_search_cifar10" / f"{name}-seed0"
        folder.mkdir(parents=True)
        run = logged / f"{source}-seed0"
        (folder / "config.json").write_text(json.dumps(run_logs.read_config(run)))
        (folder / "metrics.jsonl").write_text("\n".join(run_logs.row_lines(run)))
    monkeypatch.setattr(run_logs, "LOGS", tmp_path)
    groups = run_logs.read_groups(tmp_path)
    figure = pictures.PICTURES["optimizer_search_cifar10"](groups)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["AdamW, betas 0.9 and 0.95", "NGD, momentum 0.6"]
    curve = dict(lines_of(figure.axes[0]))["NGD, momentum 0.6"]
    assert curve.get_xdata().tolist() == [0.08, 0.16]
    plt.close(figure)


def test_minutes_are_epochs_at_the_median_speed_of_the_turns():
    results = {
        "samples_per_epoch": {"ngd": 6000, "sgd": 6000},
        "samples_per_second": {"ngd": [100, 50, 30], "sgd": {"0": [100, 200, 300]}},
    }
    named_runs = {"NGD": runs(0.2, 0.5), "SGD": runs(0.1, 0.2), "AdamW": runs(0.3)}
    timed = pictures.with_minutes(named_runs, results, methods.OPTIMIZERS)
    minutes = {label: [row["minutes"] for row in rows] for label, (rows,) in timed.items()}
    assert minutes == {"NGD": [2, 4], "SGD": [0.5, 1]}


def test_the_best_setting_of_each_optimizer_is_the_one_of_the_lowest_loss():
    curves = {"NGD, momentum 0.6": {0.1: 0.5, 0.2: 0.4}, "NGD, momentum 0.9": {0.1: 0.3, 0.2: 0.6}}
    curves["SGD, momentum 0.9"] = {0.4: 0.9}
    assert pictures.best_settings(curves) == {
        "NGD, momentum 0.9": (0.1, 0.3),
        "SGD, momentum 0.9": (0.4, 0.9),
    }


def test_settings_of_a_method_differ_in_the_line_alone():
    styles = methods.line_styles(["SGD, batch 512", "SGD", "NGD", "my own run", "another"])
    assert styles["SGD"]["linestyle"] == styles["NGD"]["linestyle"] == "-"
    assert styles["SGD, batch 512"]["linestyle"] == ":"
    assert styles["SGD, batch 512"]["color"] == styles["SGD"]["color"] == methods.BLUE
    assert styles["my own run"]["color"] != styles["another"]["color"]


def test_pictures_are_small_and_the_same_bytes_each_time(tmp_path):
    groups = run_logs.read_groups(run_logs.LOGS)
    for name in ("time", "pareto"):
        for number in (1, 2):
            draw.save(pictures.PICTURES[name](groups), tmp_path / f"{name}{number}.png")
        first, second = ((tmp_path / f"{name}{number}.png").read_bytes() for number in (1, 2))
        assert first == second, name
    for path in draw.HERE.glob("*.png"):
        assert path.stat().st_size < 150_000, path.name


def runs(*accuracies: float) -> run_logs.Runs:
    return [
        [
            {"epoch": n, "seconds": 10.0 * n, "test_accuracy": value}
            for n, value in enumerate(accuracies, 1)
        ]
    ]


def test_no_other_run_beats_those_on_the_pareto_front():
    assert pictures.pareto_front([(1, 50), (2, 40), (2, 70), (3, 70), (4, 90), (0.5, 60)]) == [
        (0.5, 60),
        (2, 70),
        (4, 90),
    ]


TINY = """
cpu:
  one:
    what: digits
    {rows}
    seeds: [3, 4]
    command: >-
      python resnet50_test.py --dataset digits --arch resnet8 --bs 64 --precision fp32 --warmup 0
    runs:
      short: --epochs 1 --subset 0.1
      long: --epochs {epochs} --subset 0.5
"""


def runner(folder: Path) -> list[str]:
    plan = ["--plan", str(folder / "plan.yaml"), "--logs", str(folder / "logs")]
    return [sys.executable, "-m", "figures.experiments", "cpu", *plan, "--allow_dirty"]


def run_plan(
    folder: Path,
    *arguments: str,
    epochs: int = 2,
    rows: str = "",
    code: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """What the runner and its runs print, which are forked processes."""
    (folder / "plan.yaml").write_text(TINY.format(epochs=epochs, rows=rows))
    console = folder / "console.log"

    def start(words: list[str], cwd: Path, env: dict[str, str]) -> ranks.WarmJob:
        return ranks.WarmJob(words[1:], cwd, env, console=console)

    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    with pytest.MonkeyPatch.context() as patch, open(console, "w") as printed:
        patch.setattr(experiments.subprocess, "Popen", start)
        patch.setattr(experiments, "time", SimpleNamespace(monotonic=clock))
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            words = [*runner(folder)[3:], *arguments]
            found = errors.exit_code(lambda: experiments.main(words))
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    assert found == code, console.read_text()
    return console.read_text()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one commit, with this code and a plan of short runs."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = tmp_path_factory.mktemp("clone") / "code"
    unused = shutil.ignore_patterns(
        ".*", "__pycache__", "logs", "results", "runs", "data", "tests", "docs", "*.png"
    )
    shutil.copytree(ROOT, folder, ignore=unused)
    shutil.copy(ROOT / ".gitignore", folder)
    (folder / "plan.yaml").write_text(TINY.format(epochs=1, rows=""))
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def start_plan(folder: Path, *arguments: str, code: int) -> tuple[str, list[str]]:
    """Run a copy's plan; return what it prints, and the lines of stderr."""
    command = [sys.executable, "-m", "figures.experiments", "cpu", "--plan", "plan.yaml"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr.splitlines()


@pytest.mark.process
def test_a_run_starts_from_a_clean_commit_only(repository):
    logs = repository / "figures" / "logs" / "one"
    (repository / "recipes" / "new.yaml").write_text("lr: 1")
    with (repository / "ngd.py").open("a") as file:
        file.write("# edited\n")
    _, errors = start_plan(repository, code=2)
    assert len(errors) == 1
    assert "not committed: ngd.py, recipes/new.yaml;" in errors[0]
    assert not logs.exists()
    assert "open" in start_plan(repository, "--list", code=0)[0]

    (repository / "recipes" / "new.yaml").unlink()
    subprocess.run(["git", "checkout", "-q", "ngd.py"], cwd=repository, check=True)
    (repository / "figures" / "time.png").write_text("results do not count")
    start_plan(repository, code=0)  # four runs: the logs of the first do not stop the second
    commits = {run_logs.read_config(folder)["commit"] for folder in run_logs.run_folders(logs)}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True)
    assert len(commits) == 1
    assert head.stdout.decode().startswith(commits.pop())


def test_a_folder_without_a_commit_makes_no_evidence(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "training" / "machine.py"))
    plan = tmp_path / "plan.yaml"
    plan.write_text(TINY.format(epochs=1, rows=""))
    with pytest.raises(InputError, match="commit of this code is unknown .* is no evidence"):
        experiments.main(["cpu", "--plan", str(plan), "--logs", str(tmp_path / "logs")])
    with pytest.raises(InputError, match="figures/logs are evidence"):
        experiments.main(["cpu", "--plan", str(plan), "--allow_dirty"])
    logs = run_logs.LOGS / "below"
    with pytest.raises(InputError, match="figures/logs are evidence"):
        experiments.main(["cpu", "--plan", str(plan), "--allow_dirty", "--logs", str(logs)])


def test_the_plan_runs_all_of_a_seed_before_the_next(tmp_path):
    (tmp_path / "plan.yaml").write_text(TINY.format(epochs=2, rows=""))
    plan = experiments.read_plan(tmp_path / "plan.yaml", "cpu", tmp_path / "logs")
    names = [run.folder.name for run in plan]
    assert names == ["short-seed3", "long-seed3", "short-seed4", "long-seed4"]
    assert shlex.split(plan[0].command)[0] == "python"


@pytest.mark.process
def test_finished_runs_are_skipped(tmp_path):
    assert run_plan(tmp_path, "--list").count("open") == 4
    run_plan(tmp_path)
    assert run_plan(tmp_path, "--list").count("done") == 4
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
    assert len(ranks.metrics(folder)) > before
    assert [row["epoch"] for row in ranks.metrics(folder)] == list(
        range(1, len(ranks.metrics(folder)) + 1)
    )
    assert "short-seed3: done" in console


@pytest.mark.process
def test_a_failed_run_is_named_and_the_others_run(tmp_path):
    console = run_plan(tmp_path, epochs=0, code=2)
    assert "2 run(s) failed" in console
    assert "one/long-seed3 (exit code 2), one/long-seed4 (exit code 2)" in console
    assert "--epoch" in console
    assert run_plan(tmp_path, "--list").count("done") == 2


@pytest.mark.process
def test_runs_on_another_data_set_are_ended_and_their_logs_deleted(tmp_path):
    console = run_plan(tmp_path, rows="rows: 5000", code=2, epochs=200)
    assert "the plan expects 5000" in console
    assert not run_logs.read_groups(tmp_path / "logs")


@pytest.mark.process
def test_a_run_without_a_checkpoint_starts_again(tmp_path):
    folder = tmp_path / "logs" / "one" / "short-seed3"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    (folder / "config.json").write_text("{}")
    run_plan(tmp_path)
    assert run_plan(tmp_path, "--list").count("done") == 4


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
        pack_logs.main([str(folder)])
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
        pack_logs.main([str(group / "a-seed0")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_experiments_need_a_gpu(tmp_path):
    command = [each if each != "cpu" else "gpu" for each in runner(tmp_path)]
    (tmp_path / "plan.yaml").write_text(TINY.replace("cpu:", "gpu:").format(epochs=1, rows=""))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "gpu: this machine has none" in done.stderr


def test_held_out_rows_are_drawn_for_runs_without_test_rows():
    figure = pictures.overview(
        {"run": [[{"epoch": 1, "seconds": 1.0, "train_loss": 1.0, "val_accuracy": 0.5}]]}
    )
    assert "held-out" in figure.axes[0].get_ylabel()
    plt.close(figure)


def write_run(folder: Path, *accuracies: float) -> str:
    folder.mkdir(parents=True)
    rows = [{**row, "train_loss": 1.0} for row in runs(*accuracies)[0]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_own_runs_are_drawn_with_their_labels_and_a_title(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(draw, "save", lambda figure, path: saved.append(figure))
    folders = [write_run(tmp_path / name, 0.5, 0.6) for name in ("a", "b-seed0", "b-seed1")]
    draw.main(["--runs", *folders, "--labels", "SGD", "NGD", "NGD", "--title", "digits"])
    draw.main(["--runs", *folders])
    legends = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in saved]
    assert legends == [["SGD, 1 seed", "NGD, 2 seeds"], ["a, 1 seed", "b, 2 seeds"]]
    assert [figure.get_suptitle() for figure in saved] == ["digits", ""]
    for figure in saved:
        plt.close(figure)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--labels SGD", "give --runs too"),
        ("--title digits", "give --runs too"),
        ("--runs {run} --labels SGD NGD", "2 names for 1 --runs"),
        ("--runs {run} nowhere", "nowhere is no folder; give run folders"),
        ("--runs {run} {run}/..", "holds no metrics.jsonl"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, arguments, message):
    run = write_run(tmp_path / "run", 0.5)
    with pytest.raises(InputError, match=message):
        draw.main(arguments.format(run=run).split())


def test_an_unknown_group_is_one_line(tmp_path):
    assert "there are one" in run_plan(tmp_path, "--only", "two", code=2)


@pytest.mark.process
def test_sigterm_stops_the_runner_and_its_run(tmp_path):
    (tmp_path / "plan.yaml").write_text(TINY.format(epochs=4000, rows=""))
    process = subprocess.Popen(
        runner(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = tmp_path / "logs" / "one" / "long-seed3"
    ranks.wait_for(lambda: (folder / "metrics.jsonl").exists() and ranks.metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, console = process.communicate(timeout=60)
    assert process.returncode == 130, console
    assert (folder / "last.pt").exists()


def test_the_critical_batch_is_the_one_that_the_samples_were_made_with():
    batches = [32, 128, 512, 2048]
    samples = [5e4 * (1 + size / 700) for size in batches]
    least, critical = pictures.fit_critical_batch(batches, samples)
    assert (least, critical) == (pytest.approx(5e4, rel=0.01), pytest.approx(700, rel=0.01))


def test_samples_to_an_accuracy_are_read_by_batch_size_and_optimizer():
    target = pictures.CRITICAL_TARGET / 100
    rows = [
        {"epoch": 1, "samples": 1000, "test_accuracy": target - 0.1, "noise_scale": 50.0},
        {"epoch": 2, "samples": 2000, "test_accuracy": target + 0.1, "noise_scale": 80.0},
    ]
    runs = {"sgd-bs32": [rows, rows[:1]], "sgd-bs512": [rows, rows], "ngd-bs32": [rows[:1]]}
    reached = pictures.reached_by_batch(runs, "sgd")
    assert reached == {512: [pictures.Reached(pytest.approx(1500), 80.0)] * 2}
    assert pictures.reached_by_batch(runs, "ngd") == {}
