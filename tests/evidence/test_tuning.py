"""Sweeps: search spaces, objectives, and sweeps on digits that are killed, interrupted or fail."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml

import conftest
import errors
import ranks
import resnet50_test
import transformer_test
from cli import options
from conftest import each_of
from tuning import report, resnet50_tuning, space, sweep, trial_panels, trials
from tuning.config import SweepConfig
from tuning.objective import Objective
from tuning.target_script import TargetScript

ROOT = ranks.ROOT
IMPORTS = {"PYTHONPATH": str(ROOT)}  # sweeps run in a folder of their own

DIGITS = "--dataset digits --arch resnet8 --bs 64 --subset 0.5 --precision fp32 --warmup 0".split()


def write(folder: Path, text: str) -> Path:
    path = folder / "space.yaml"
    path.write_text(text)
    return path


def test_a_space_is_read(tmp_path):
    path = write(
        tmp_path,
        "lr: {log: [1e-3, 0.5]}\n"
        "momentum: {uniform: [0.8, 0.9]}\n"
        "bs: {uniform: [16, 64]}\n"
        "ngd: {choice: [true, false]}\n",
    )
    read = space.read_space(path, resnet50_test.parser().own_name)
    assert [type(distribution).__name__ for distribution in read.values()] == [
        "FloatDistribution",
        "FloatDistribution",
        "IntDistribution",
        "CategoricalDistribution",
    ]
    trial = optuna.create_study().ask(read)
    values = space.suggest(trial, read)
    assert 1e-3 <= values["lr"] <= 0.5
    assert space.to_arguments(
        {"lr": 0.0123456789, "bs": 32, "ngd": True, "nesterov": False, "mixup": "none"}, {"lr"}
    ) == ("--lr 0.0123457 --bs 32 --ngd --mixup none".split())
    assert "--momentum" in space.to_arguments(values, set())
    assert space.to_arguments({"nesterov": False}, {"nesterov", "no-nesterov"}) == ["--no-nesterov"]


@each_of(
    ("text", "message"),
    [
        ("", "empty"),
        ("[1, 2]", "empty"),
        ("lr: [", "not YAML"),
        ("lr: 3", "lr: expected"),
        ("lr: {log: 3}", "lr: expected"),
        ("lr: {log: [0, 1]}", "lr: "),
        ("lr: {log: [1, 0.1]}", "lr: "),
        ("lr: {log: [1, 2, 3]}", "lr: expected two numbers, low and high, got 3"),
        ("lr: {log: [0.1]}", "lr: expected two numbers, low and high, got 1"),
        ("lr: {uniform: [0.1, .inf]}", "lr: inf is not a finite number"),
        ("lr: {uniform: [.nan, 1]}", "lr: nan is not a finite number"),
        ("lr: {log: [0.1, 1e999]}", "lr: 1e999 is not a finite number"),
        ("lr: {choice: [[1, 2]]}", r"lr: \[1, 2\] is not a number or a word"),
        ("lr: {choice: [null]}", "lr: None is not a number or a word"),
        ("lr: 2024-13-45", "not YAML"),
        ("lr: !!int abc", "not YAML"),
        ("lr: !!timestamp abc", "not YAML"),
        ("[" * 3000, "not YAML"),
        ("lr: {choice: [1]}\nlr: {choice: [2]}", "lr is there twice"),
        ("lr: {uniform: [a, b]}", "lr: "),
        ("lr: {uniform: [true, 2]}", "lr: True"),
        ("lr: {choice: []}", "lr: "),
        ("lr: {cubic: [1, 2]}", "cubic"),
        ("leraning_rate: {log: [0.1, 1]}", "no such flag; did you mean --learning_rate?"),
        ("lr: {choice: [1]}\nlearning-rate: {choice: [2]}", "lr is there twice"),
        ("torch_compile: {choice: [true]}", "stands for --backend compile; use backend"),
    ],
)
def test_a_wrong_space_is_refused(text, message, tmp_path):
    with pytest.raises(errors.InputError, match=message):
        space.read_space(write(tmp_path, text), resnet50_test.parser().own_name)


def test_a_message_about_a_space_is_short(tmp_path):
    lists = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))
    path = write(tmp_path, f"lr: [&a0 [1, 1, 1, 1, 1, 1, 1], {lists}]")
    with pytest.raises(errors.InputError) as refused:
        space.read_space(path, resnet50_test.parser().own_name)
    assert len(str(refused.value)) < 400


@each_of(
    ("text", "message"),
    [
        ("lr: {choice: [0.1, abc]}", "--lr: must be a number, got 'abc'"),
        ("lr: {uniform: [0, 1]}", "--lr: must be above 0, got 0"),
        ("momentum: {uniform: [0.5, 1.0]}", "--momentum: must be at least 0 and at most 0.999"),
        ("optimizer: {choice: [sgd, sdg]}", "did you mean sgd?"),
        ("mixup: {choice: [no, mixup]}", "mixup: false is not a value of this flag"),
        ("nesterov: {choice: [maybe]}", "nesterov: must be true or false, got maybe"),
        *(
            (f"{name}: {{choice: [0.5]}}", f"{name}: the sweep sets this flag")
            for name in ("out", "output_dir", "resume", "checkpoint", "val_fraction", "test")
        ),
        ("eval_every: {choice: [1]}", "eval_every: the sweep sets this flag"),
        ("no-test: {choice: [true]}", "the sweep sets this flag"),
        ("help: {choice: [true]}", "this flag cannot be searched"),
        ("recipe: {choice: [best, fast94]}", "this flag cannot be searched"),
    ],
)
def test_a_space_that_the_script_would_refuse_starts_no_trial(
    text, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, text)
    monkeypatch.setattr("sys.argv", ["sweep", "--space", str(path), "--out", "sweep"])
    assert errors.exit_code(sweep.main) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --space {path}")
    assert message in line
    assert not (tmp_path / "sweep").exists()


def test_spaces_of_the_project_are_accepted():
    for name in ("resnet50", "transformer"):
        script = TargetScript.read(f"{name}_test.py", [])
        path = ROOT / "tuning" / f"{name}.yaml"
        read = space.read_space(path, script.own_name)
        script.check_space(read, source=str(path))
        assert len(list(space.limits_and_choices(read))) >= 2 * len(read)


def test_a_sweep_of_images_names_sgd_where_its_user_names_no_optimizer(monkeypatch):
    configs: list[SweepConfig] = []
    monkeypatch.setattr(sweep, "run_sweep", configs.append)
    for words in ([], ["--ngd"], ["--recipe", "best"], ["--recipe", "tuned_resnet20"]):
        monkeypatch.setattr("sys.argv", ["resnet50_tuning", *words])
        resnet50_tuning.main()
    scripts = [config.script for config in configs]
    assert [script.given["optimizer"] for script in scripts] == ["sgd", "ngd", "kaldi_ngd", "sgd"]
    assert scripts[0].arguments[-2:] == ["--optimizer", "sgd"]
    assert scripts[0].recipe({})["optimizer"] == "sgd", "the recipe of the best trial names it too"


def test_a_tuned_recipe_has_a_searched_flag_once():
    script = TargetScript.read("resnet50_test.py", ["--bs", "512", "--alpha", "0.3"])
    assert script.recipe({"bs": 64}) == {"alpha": 0.3, "bs": 64}


def test_a_space_has_the_names_of_the_script_whatever_their_spelling(tmp_path):
    path = write(tmp_path, "learning-rate: {log: [0.1, 1]}\nmax_grad_norm: {choice: [0, 1]}\n")
    assert list(space.read_space(path, resnet50_test.parser().own_name)) == ["lr", "clip"]


def test_shared_arguments_have_the_names_of_the_script_whatever_their_spelling():
    script = TargetScript.read("resnet50_test.py", ["--model=resnet8", "--num-train-epochs", "3"])
    assert script.arguments == ["--arch=resnet8", "--epoch", "3"]
    assert script.given == {"arch": "resnet8", "epochs": 3}


def run_sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuning.sweep", *arguments, "--out", str(folder / "sweep")]
    return subprocess.run(
        [*command, "--recipe_out", str(folder / "tuned.yaml")],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | IMPORTS,
    )


@each_of(
    ("arguments", "message"),
    [
        ("--leraning_rate 1", "did you mean --learning_rate?"),
        ("--trial 3", "did you mean --trials?"),
        ("--sampler gird", "did you mean grid?"),
        ("--sampler grid", "is a range"),
        ("--objective speed", "--objective"),
        ("--objective time_to:2", "--objective"),
        ("--space nowhere.yaml", "nowhere.yaml"),
        ("--val_fraction 0", "--val_fraction"),
        ("--resume x", "--resume"),
        ("--resume-from-checkpoint=x", "--resume"),
        ("--no-test", "--no-test"),
        ("--trials 0", "--trials"),
        ("--storage nonsense://x", "--storage"),
    ],
)
def test_a_wrong_flag_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sweep", *arguments.split(), "--out", "sweep"])
    assert errors.exit_code(sweep.main) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert lines[0].startswith("error: ")


def rows(*accuracies: float) -> list[dict[str, float]]:
    return [
        {"epoch": n, "val_accuracy": a, "test_accuracy": 1.0, "seconds": 10.0 * n}
        for n, a in enumerate(accuracies, 1)
    ]


def test_objectives():
    accuracy, time = Objective.parse("accuracy"), Objective.parse("time_to:0.6")
    assert accuracy.final_value(rows(0.3, 0.7, 0.5)) == 0.5
    assert accuracy.direction == "maximize"
    assert not accuracy.is_reached(rows(1.0)[0])
    assert time.final_value(rows(0.3, 0.7, 0.5)) == 20.0
    assert time.direction == "minimize"
    assert [time.is_reached(row) for row in rows(0.5, 0.6)] == [False, True]
    never, closer = time.final_value(rows(0.3, 0.4)), time.final_value(rows(0.3, 0.5))
    assert never > closer > 1e6
    assert time.intermediate_value(rows(0.3)[0]) > time.intermediate_value(rows(0.4)[0])


def test_gpus_are_divided_among_trials(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slots = trials.gpu_slots(2, 2, gpus=4)
    assert [slots.get(), slots.get()] == ["0,1", "2,3"]
    assert trials.gpu_slots(3, 1, gpus=0).get() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert trials.gpu_slots(1, 2, gpus=2).get() == "5,7", "those that this process may see"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(errors.InputError, match="needs 4 GPUs, but there are 3"):
        trials.gpu_slots(2, 2, gpus=3)


@pytest.mark.parametrize("name", ["resnet50", "transformer"])
def test_both_sweeps_start_from_any_folder(name, tmp_path):
    command = ["bash", str(ROOT / "tuning" / f"{name}_tuning.sh"), "--sampler", "grid"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
    )
    assert done.returncode == 2
    assert f"tuning/{name}.yaml is a range" in done.stderr


@pytest.mark.process
def test_a_killed_sweep_resumes_and_finds_a_rate_that_trains(tmp_path):
    """12 trials; the space reaches far beyond what trains."""
    path = write(tmp_path, "lr: {log: [1e-6, 1.0]}\nmomentum: {choice: [0.9, 0.95]}\n")
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "tuning.sweep", "--space", str(path), *DIGITS]
    command += "--trials 12 --jobs 2 --epochs 3 --pruner_trials 2 --lr 1e-6".split()
    command += ["--out", str(folder), "--recipe_out", str(tmp_path / "tuned.yaml")]
    process = ranks.start(command, tmp_path, **IMPORTS)
    # The line that a trial has ended is too early: both jobs may stand between two trials then.
    ranks.wait_for(lambda: (folder / "trials" / "0004").exists(), process)
    process.kill()  # the sweep alone: its trials are to end by themselves
    process.wait()
    done = ranks.finish(ranks.start(command, tmp_path, **IMPORTS), tmp_path)
    first_start, second_start = re.findall(r"finished, (\d) resumed", done)
    assert first_start == "0"
    assert second_start in "12", "trials were running when the sweep was killed"
    with open(folder / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 12
    assert [row["rank"] for row in table] == [str(rank) for rank in range(1, 13)]
    assert len({row["lr"] for row in table}) == 12  # no values twice
    pruned = [row for row in table if row["state"] == "PRUNED"]
    assert len(pruned) >= 4
    assert float(table[0]["value"]) > 0.5  # a rate of 1e-6 stays at chance
    assert float(table[0]["lr"]) > 1e-4
    assert {"history.png", "trials.png"} <= {path.name for path in folder.iterdir()}
    recipe = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert recipe["base_bs"] == 64
    assert recipe["lr_scaling"] == "linear"
    assert recipe["batch_size"] == 64  # a flag of the command line
    assert not {"subset", "epochs", "seed"} & set(recipe)
    assert "test_accuracy" not in ranks.metrics(folder / "trials" / "0000")[0]
    run = tmp_path / "run"
    flags = [*DIGITS[:-2], "--recipe", tmp_path / "tuned.yaml", "--out", run]
    flags += "--bs 128 --epochs 1".split()
    assert ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *flags), tmp_path / "full"), tmp_path / "full"
    )
    assert ranks.metrics(run)[0]["batch_size"] == 128


def sweep_config(script: TargetScript, folder: Path, nproc: int) -> SweepConfig:
    return SweepConfig(
        script=script,
        space_path=folder / "space.yaml",
        space={},
        objective=Objective(),
        val_fraction=0.1,
        trials=1,
        jobs=1,
        nproc=nproc,
        sampler="tpe",
        sampler_seed=0,
        pruner="none",
        pruner_epochs=1,
        pruner_trials=1,
        storage="",
        out=folder,
        recipe_out=folder / "tuned.yaml",
    )


def test_each_folder_has_a_database_of_its_own(tmp_path):
    """Also folders whose names have characters with a meaning in a URL."""
    folders = [tmp_path / name for name in ("q?1", "q?2", "q", "a#b", "50%3F", "x&y=z;{v}", "é ü")]
    for number, folder in enumerate(folders):
        folder.mkdir()
        study = optuna.create_study(storage=sweep.sqlite_url(folder / "study.db"))
        study.enqueue_trial({"lr": number})
    for number, folder in enumerate(folders):
        assert [path.name for path in folder.iterdir()] == ["study.db"]
        (name,) = optuna.get_all_study_names(sweep.sqlite_url(folder / "study.db"))
        study = optuna.load_study(study_name=name, storage=sweep.sqlite_url(folder / "study.db"))
        assert study.trials[0].system_attrs["fixed_params"] == {"lr": number}


def test_the_printed_command_trains_on_the_same_data(tmp_path, monkeypatch, capsys):
    """A recipe has no folder of data; rows are held out where the data is a training set alone."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "my texts; $HOME"
    data.mkdir()
    rows = "label,text\n" + "spam,a prize\nham,at noon\n" * 8
    (data / "train.csv").write_text(rows)
    words = ["--dataset", "csv", "--data_dir", str(data), *"--width 8 --heads 2 --bs 4".split()]
    script = TargetScript.read("transformer_test.py", [*words, "--epochs", "1"])
    folder = tmp_path / "a sweep's"
    config = sweep_config(script, folder, nproc=1)
    trial = optuna.trial.create_trial(params={}, distributions={}, value=0.5)
    for split in ("train", "test"):  # what is there by then
        (data / f"{split}.csv").write_text(rows)
        report.write_recipe(config, trial, num_trials=1)
        command = report.training_command(config)
        _, name, *arguments = shlex.split(command)
        assert Path(name) == ranks.ROOT / "transformer_test.py"
        assert all(Path(word).is_absolute() for word in arguments[1:4:2])
        assert ("--val_fraction" in arguments) == (split == "train")
        arguments += ["--epochs", "1", "--out", f"run-{split}", "--threads", "1"]
        assert conftest.call(transformer_test, arguments) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "params", "nproc", "expected"),
    [
        ("", {"lr": 0.1}, 2, {"lr_scaling": "linear", "base_bs": 256}),
        (
            "--optimizer lamb",
            {"lr": 0.1, "bs": 32, "accumulate": 3},
            1,
            {"optimizer": "lamb", "lr_scaling": "sqrt", "base_bs": 96},
        ),
        (
            "--optimizer adamw",
            {"lr": 0.1, "ngd": True},
            1,
            {"optimizer": "adamw", "lr_scaling": "sqrt", "base_bs": 128},
        ),
        (
            "--bs 512 --lr_scaling sqrt --base_bs 64",
            {"lr": 0.1},
            1,
            {"batch_size": 512, "lr_scaling": "sqrt", "base_bs": 64},
        ),
        ("--recipe RECIPE", {"nesterov": False, "fuse": False}, 1, {"arch": "resnet20"}),
        ("--meta_learning --subset 0.1 --threads 1", {"alpha": 0.3}, 1, {"mixup": "meta"}),
    ],
)
def test_a_recipe_holds_what_the_best_trial_had(arguments, params, nproc, expected, tmp_path):
    (tmp_path / "given.yaml").write_text("nesterov: true\narch: resnet20\n")
    script = TargetScript.read(
        "resnet50_test.py", arguments.replace("RECIPE", str(tmp_path / "given.yaml")).split()
    )
    config = sweep_config(script, tmp_path, nproc)
    distributions = {
        name: optuna.distributions.CategoricalDistribution([value])
        for name, value in params.items()
    }
    best = optuna.trial.create_trial(value=0.5, params=params, distributions=distributions)
    report.write_recipe(config, best, num_trials=3)
    assert yaml.safe_load(config.recipe_out.read_text()) == params | expected
    read = resnet50_test.parser().parse_args(
        options.recipe_arguments(str(config.recipe_out), resnet50_test.parser())
    )
    assert vars(read) == script.flags(params) | {
        "recipe": None,
        "subset": 1.0,
        "threads": 0,
        "lr_scaling": expected.get("lr_scaling", "none"),
        "base_bs": expected.get("base_bs", 128),
    }


def test_the_picture_of_the_trials_marks_the_best_and_the_stopped_ones(tmp_path):
    read = space.read_space(
        write(tmp_path, "lr: {log: [1e-4, 1]}\nmixup: {choice: [none, mixup]}\n"),
        resnet50_test.parser().own_name,
    )
    study = optuna.create_study(direction="maximize")
    for lr, mixup, value in (
        (0.1, "none", 0.8),
        (0.01, "mixup", 0.9),
        (0.001, "none", None),
        (1.0, "none", 0.6),
    ):
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState["COMPLETE" if value else "PRUNED"],
                value=value,
                params={"lr": lr, "mixup": mixup},
                distributions=read,
            )
        )
    config = dataclasses.replace(
        sweep_config(TargetScript.read("resnet50_test.py", []), tmp_path, 1), space=read
    )
    ranking = report.rank_trials(study, study.trials)
    report.write_csv(tmp_path / "results.csv", ranking)
    assert tmp_path / "trials.png" in report.draw_figures(study, config)

    rows = trial_panels.read_trials(tmp_path / "results.csv")
    figure = trial_panels.draw_trials(rows, "accuracy", {"lr"})
    rates, mixing = figure.axes
    assert (rates.get_xlabel(), mixing.get_xlabel()) == ("--lr", "--mixup")
    assert (rates.get_xscale(), mixing.get_xscale()) == ("log", "linear")
    points = {each.get_label(): each.get_offsets().tolist() for each in rates.collections}
    assert points["trial"] == [[0.01, 0.9], [0.1, 0.8], [1.0, 0.6]]
    assert points["best trial"] == [[0.01, 0.9]]
    ((rate, height),) = points["stopped early, no value"]
    assert rate == 0.001
    assert height < 0.6


@pytest.mark.process
def test_a_folder_holds_one_sweep(tmp_path):
    """Another objective, space or flag would rank trials that do not compare."""
    path = write(tmp_path, "lr: {choice: [0.05]}\n")
    grid = ["--space", str(path), "--sampler", "grid", "--epochs", "1", *DIGITS]
    assert run_sweep(tmp_path, *grid).returncode == 0
    write(tmp_path, "lr: {choice: [0.05, 0.1]}\n")
    for arguments, message in (
        ([], "the space's lr"),
        (["--subset", "0.3"], "--subset"),
        (["--objective", "time_to:0.1"], "--objective"),
    ):
        done = run_sweep(tmp_path, *grid, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr
    write(tmp_path, "lr: {choice: [0.05]}\n")
    assert "1 finished" in run_sweep(tmp_path, *grid).stdout


def test_a_flag_that_every_trial_would_refuse_is_refused_first(tmp_path):
    done = run_sweep(tmp_path, "--epochs", "3", *DIGITS, "--warmup", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--warmup 5" in done.stderr


class Trial:
    """As much of a trial as `should_prune` reads."""

    def __init__(self, pruner: optuna.pruners.BasePruner, *values: float) -> None:
        self.study = optuna.create_study(direction="minimize", pruner=pruner)
        for value in values:
            self.study.add_trial(optuna.trial.create_trial(value=value))

    def should_prune(self) -> bool:
        return False


def test_a_trial_slower_than_the_fastest_is_pruned():
    runner = trials.TrialRunner(
        script="resnet50_test.py",
        arguments=[],
        objective=Objective.parse("time_to:0.5"),
        out=Path(),
        nproc=1,
        gpu_slots=trials.gpu_slots(1, 1, gpus=0),
    )
    median, none = optuna.pruners.MedianPruner(), optuna.pruners.NopPruner()
    late, early = {"seconds": 30.0}, {"seconds": 29.0}
    assert runner.should_prune(Trial(median, 40.0, 30.0), late)
    assert not runner.should_prune(Trial(median, 40.0, 30.0), early)
    assert not runner.should_prune(Trial(median), late)
    assert not runner.should_prune(Trial(none, 10.0), late)


def test_a_target_that_no_trial_reaches_makes_no_recipe(tmp_path):
    path = write(tmp_path, "lr: {choice: [1.0e-6]}\n")
    grid = ["--space", str(path), "--sampler", "grid", "--epochs", "1", *DIGITS]
    done = run_sweep(tmp_path, *grid, "--objective", "time_to:0.99")
    assert done.returncode == 2
    assert "never reached" in done.stdout
    assert "no trial reached it" in done.stderr
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.process
def test_a_trial_that_fails_is_recorded_and_a_grid_ends_by_itself(tmp_path):
    path = write(tmp_path, "lr: {choice: [0.05, 1.0e+30]}\n")
    grid = ["--space", str(path), "--sampler", "grid", "--epochs", "1", "--pruner", "none"]
    done = run_sweep(tmp_path, *grid, *DIGITS, "--bs", "16")
    assert done.returncode == 0, done.stderr
    assert "2 trials: 1 complete, 0 pruned, 1 failed" in done.stdout
    with open(tmp_path / "sweep" / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["state"] for row in table] == ["COMPLETE", "FAIL"]
    assert "not finite" in table[1]["error"]
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "2 trials of resnet50_test.py, and the best one by accuracy" in page
    again = run_sweep(tmp_path, *grid, *DIGITS, "--bs", "16")
    assert "2 finished" in again.stdout


@pytest.mark.process
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_enqueues_running_trials_again(jobs, tmp_path):
    path = write(tmp_path, "lr: {choice: [0.05, 0.1]}\n")
    command = [sys.executable, "-m", "tuning.sweep", "--space", str(path), *DIGITS]
    command += ["--trials", "3", "--jobs", jobs, "--epochs", "500"]
    command += ["--out", str(tmp_path / "sweep"), "--recipe_out", str(tmp_path / "tuned.yaml")]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | IMPORTS,
    )
    try:
        for _ in range(1200):
            if len(list((tmp_path / "sweep" / "trials").glob("*/last.pt"))) == int(jobs):
                break
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the sweep and its trials
        _, console = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "to resume the sweep" in console
    study = optuna.load_study(
        study_name="resnet50_test", storage=f"sqlite:///{tmp_path / 'sweep' / 'study.db'}"
    )
    assert not sweep.finished_trials(study)
    waiting = study.get_trials(states=(optuna.trial.TrialState.WAITING,))
    assert len(waiting) == int(jobs)
    assert all((Path(trial.user_attrs["folder"]) / "last.pt").exists() for trial in waiting)


def test_running_trials_of_other_machines_are_not_resumed(tmp_path):
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    elsewhere, killed, running = study.ask(), study.ask(), study.ask()
    elsewhere.set_user_attr("host", "elsewhere")
    for trial, pid in ((killed, 2**22 + 1), (running, os.getppid())):
        trial.set_user_attr("host", sweep.socket.gethostname())
        trial.set_user_attr("pid", pid)
        trial.set_user_attr("folder", str(tmp_path / str(trial.number)))
    assert sweep.enqueue_killed_trials(study) == 1
    states = [trial.state.name for trial in study.get_trials()]
    assert states == ["RUNNING", "FAIL", "RUNNING", "WAITING"]
    assert study.get_trials()[3].user_attrs == {"folder": str(tmp_path / "1"), "after": 1}
    assert not sweep.finished_trials(study)


def test_our_own_process_id_is_that_of_a_dead_sweep_in_a_container():
    assert not sweep.is_process_alive(os.getpid())
    assert sweep.is_process_alive(os.getppid())


def test_complete_trials_rank_first():
    study = optuna.create_study(direction="maximize")
    make = optuna.trial.create_trial
    given = [
        make(state=optuna.trial.TrialState.FAIL),
        make(state=optuna.trial.TrialState.PRUNED, intermediate_values={1: 0.9}),
        make(value=0.5),
        make(state=optuna.trial.TrialState.PRUNED, intermediate_values={1: 0.1, 2: 0.2}),
        make(value=0.7),
    ]
    order = report.rank_trials(study, given)
    assert [given.index(trial) for trial in order] == [4, 2, 3, 1, 0]


@pytest.mark.parametrize("name", ["resnet50_tuning", "transformer_tuning"])
def test_a_sweep_without_optuna_is_one_line(name, monkeypatch, capsys):
    module = importlib.import_module(f"tuning.{name}")
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    assert errors.exit_code(module.main) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "error: a sweep needs Optuna: pip install 'optuna>=4'"
