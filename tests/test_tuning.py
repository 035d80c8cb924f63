"""Sweeps: spaces, objectives, a whole sweep on digits that is killed on the way, and what it leaves."""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import yaml

import ranks

ROOT = ranks.ROOT

import errors  # noqa: E402
import resnet50_test  # noqa: E402
from cli import options
from tuning import report, space, sweep, trials

DIGITS = "--dataset digits --arch resnet8 --bs 64 --subset 0.5 --precision fp32 --warmup 0".split()


def write(folder: Path, text: str) -> Path:
    path = folder / "space.yaml"
    path.write_text(text)
    return path


def test_a_space_is_read(tmp_path):
    path = write(
        tmp_path,
        "lr: {log: [1e-3, 0.5]}\nmomentum: {uniform: [0.8, 0.9]}\nbs: {uniform: [16, 64]}\nngd: {choice: [true, false]}\n",
    )
    read = space.read_space(path, {"lr", "momentum", "bs", "ngd"})
    assert [type(of).__name__ for of in read.values()] == [
        "FloatDistribution",
        "FloatDistribution",
        "IntDistribution",
        "CategoricalDistribution",
    ]
    trial = optuna.create_study().ask(read)
    values = space.suggest(trial, read)
    assert 1e-3 <= values["lr"] <= 0.5
    assert space.as_words(
        {"lr": 0.0123456789, "bs": 32, "ngd": True, "nesterov": False, "mixup": "none"}, {"lr"}
    ) == ("--lr 0.0123457 --bs 32 --ngd --mixup none".split())
    assert "--momentum" in space.as_words(values, set())
    assert space.as_words({"nesterov": False}, {"nesterov", "no-nesterov"}) == ["--no-nesterov"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty"),
        ("[1, 2]", "empty"),
        ("lr: [", "not YAML"),
        ("lr: 3", "lr: wanted"),
        ("lr: {log: 3}", "lr: wanted"),
        ("lr: {log: [0, 1]}", "lr: "),
        ("lr: {log: [1, 0.1]}", "lr: "),
        ("lr: {log: [1, 2, 3]}", "lr: "),
        ("lr: {uniform: [a, b]}", "lr: "),
        ("lr: {uniform: [true, 2]}", "lr: True"),
        ("lr: {choice: []}", "lr: "),
        ("lr: {cubic: [1, 2]}", "cubic"),
        ("leraning_rate: {log: [0.1, 1]}", "no flag --leraning_rate"),
    ],
)
def test_a_space_that_will_not_do_is_named(text, named, tmp_path):
    with pytest.raises(errors.InputError, match=named):
        space.read_space(write(tmp_path, text), {"lr"})


def called(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuning.sweep", *words, "--out", str(folder / "sweep")]
    return subprocess.run(
        [*command, "--recipe_out", str(folder / "tuned.yaml")],
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--leraning_rate 1", "--leraning_rate"),
        ("--sampler grid", "is a range"),
        ("--objective speed", "--objective"),
        ("--objective time_to:2", "--objective"),
        ("--space nowhere.yaml", "nowhere.yaml"),
        ("--val_fraction 0", "--val_fraction"),
        ("--resume x", "--resume"),
        ("--no-test", "--no-test"),
        ("--trials 0", "--trials"),
        ("--storage nonsense://x", "--storage"),
    ],
)
def test_a_wrong_flag_is_one_line(words, named, tmp_path):
    done = called(tmp_path, *words.split())
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert named in lines[0]
    assert lines[0].startswith("error: ")


def rows(*accuracies: float) -> list[dict[str, float]]:
    return [
        {"epoch": n, "val_accuracy": a, "test_accuracy": 1.0, "seconds": 10.0 * n}
        for n, a in enumerate(accuracies, 1)
    ]


def test_objectives():
    accuracy, time = trials.Objective.read("accuracy"), trials.Objective.read("time_to:0.6")
    assert accuracy.value(rows(0.3, 0.7, 0.5)) == 0.5
    assert accuracy.direction == "maximize"
    assert not accuracy.done(rows(1.0)[0])
    assert time.value(rows(0.3, 0.7, 0.5)) == 20.0
    assert time.direction == "minimize"
    assert [time.done(row) for row in rows(0.5, 0.6)] == [False, True]
    never, closer = time.value(rows(0.3, 0.4)), time.value(rows(0.3, 0.5))
    assert never > closer > 1e6
    assert time.so_far(rows(0.3)[0]) > time.so_far(rows(0.4)[0])


def test_gpus_are_given_out(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    places = trials.slots(2, 2, 4)
    assert [places.get(), places.get()] == ["0,1", "2,3"]
    assert trials.slots(3, 1, 0).get() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert trials.slots(1, 2, 2).get() == "5,7", "those that this process may see"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(errors.InputError, match="4 GPUs, 3 are here"):
        trials.slots(2, 2, 3)


@pytest.mark.parametrize("name", ["resnet50", "transformer"])
def test_the_two_sweeps_start_from_any_folder(name, tmp_path):
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


@pytest.mark.slow
def test_a_sweep_is_killed_goes_on_and_beats_a_rate_that_is_wrong(tmp_path):
    """12 trials; the space reaches far beyond what trains."""
    path = write(tmp_path, "lr: {log: [1e-6, 1.0]}\nmomentum: {choice: [0.9, 0.95]}\n")
    words = [
        "--space",
        str(path),
        "--trials",
        "12",
        "--jobs",
        "2",
        "--epochs",
        "3",
        "--pruner_trials",
        "2",
        *DIGITS,
        "--lr",
        "1e-6",
    ]
    folder = tmp_path / "sweep"
    command = [sys.executable, "-m", "tuning.sweep", *words, "--out", str(folder)]
    command += ["--recipe_out", str(tmp_path / "tuned.yaml")]
    process = ranks.start(command, tmp_path)
    console = tmp_path / "console.log"
    ranks.wait_for(lambda: console.exists() and "trial 4 of 12" in console.read_text(), process)
    process.kill()  # the sweep alone: its trials are to end by themselves
    process.wait()
    ranks.wait_for(
        lambda: not ranks.relatives(process), process, 30
    ) if process.poll() is None else None
    done = ranks.finish(ranks.start(command, tmp_path), tmp_path)
    assert "taken up again" in done
    with open(folder / "results.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 12
    assert [row["rank"] for row in found] == [str(rank) for rank in range(1, 13)]
    assert len({row["lr"] for row in found}) == 12  # no values twice
    pruned = [row for row in found if row["state"] == "PRUNED"]
    assert len(pruned) >= 4
    assert float(found[0]["value"]) > 0.5  # a rate of 1e-6 stays at chance
    assert float(found[0]["lr"]) > 1e-4
    assert {"history.png", "parallel.png"} <= {path.name for path in folder.iterdir()}
    recipe = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert recipe["base_bs"] == 64
    assert recipe["lr_scaling"] == "linear"
    assert recipe["batch_size"] == 64  # what was given beside the space
    assert not {"subset", "epochs", "seed"} & set(recipe)
    assert "test_accuracy" not in ranks.metrics(folder / "trials" / "0000")[0]
    run = tmp_path / "run"
    flags = [
        "--recipe",
        tmp_path / "tuned.yaml",
        *DIGITS[:-2],
        "--bs",
        "128",
        "--epochs",
        "1",
        "--out",
        run,
    ]
    assert ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", *flags), tmp_path / "full"), tmp_path / "full"
    )
    assert ranks.metrics(run)[0]["batch_size"] == 128


@pytest.mark.parametrize(
    ("words", "params", "nproc", "wanted"),
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
            {"optimizer": "adamw", "lr_scaling": "linear", "base_bs": 128},
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
def test_a_recipe_holds_what_the_best_trial_had(words, params, nproc, wanted, tmp_path):
    (tmp_path / "given.yaml").write_text("nesterov: true\narch: resnet20\n")
    script = sweep.Script.read(
        "resnet50_test.py", words.replace("RECIPE", str(tmp_path / "given.yaml")).split()
    )
    args = argparse.Namespace(objective="accuracy", nproc=nproc, recipe_out=tmp_path / "tuned.yaml")
    distributions = {
        name: optuna.distributions.CategoricalDistribution([value])
        for name, value in params.items()
    }
    report.write_recipe(
        args,
        script,
        optuna.trial.create_trial(value=0.5, params=params, distributions=distributions),
        3,
    )
    assert yaml.safe_load(args.recipe_out.read_text()) == params | wanted
    read = resnet50_test.parser().parse_args(
        options.recipe_words(str(args.recipe_out), resnet50_test.parser())
    )
    assert vars(read) == vars(script.flags(params)) | {
        "recipe": None,
        "subset": 1.0,
        "threads": 0,
        "lr_scaling": wanted.get("lr_scaling", "none"),
        "base_bs": wanted.get("base_bs", 128),
    }


def test_a_folder_holds_one_sweep(tmp_path):
    """Another objective, space or flag would rank trials that do not compare."""
    path = write(tmp_path, "lr: {choice: [0.05]}\n")
    grid = ["--space", str(path), "--sampler", "grid", "--epochs", "1", *DIGITS]
    assert called(tmp_path, *grid).returncode == 0
    write(tmp_path, "lr: {choice: [0.05, 0.1]}\n")
    for words, named in (
        ([], "the space's lr"),
        (["--subset", "0.3"], "--subset"),
        (["--objective", "time_to:0.1"], "--objective"),
    ):
        done = called(tmp_path, *grid, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert named in done.stderr
    write(tmp_path, "lr: {choice: [0.05]}\n")
    assert "1 of them done" in called(tmp_path, *grid).stdout


def test_what_no_trial_could_do_is_said_before_the_first(tmp_path):
    done = called(tmp_path, "--epochs", "3", *DIGITS, "--warmup", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--warmup 5" in done.stderr


class Trial:
    """As much of one as `hopeless` looks at."""

    def __init__(self, pruner: optuna.pruners.BasePruner, *values: float) -> None:
        self.study = optuna.create_study(direction="minimize", pruner=pruner)
        for value in values:
            self.study.add_trial(optuna.trial.create_trial(value=value))

    def should_prune(self) -> bool:
        return False


def test_a_run_that_is_later_than_the_best_is_given_up():
    runner = trials.Runner(
        "resnet50_test.py", [], trials.Objective(0.5), Path(), 1, trials.slots(1, 1, 0)
    )
    median, none = optuna.pruners.MedianPruner(), optuna.pruners.NopPruner()
    late, early = {"seconds": 30.0}, {"seconds": 29.0}
    assert runner.hopeless(Trial(median, 40.0, 30.0), late)
    assert not runner.hopeless(Trial(median, 40.0, 30.0), early)
    assert not runner.hopeless(Trial(median), late)
    assert not runner.hopeless(Trial(none, 10.0), late)


@pytest.mark.slow
def test_a_time_that_no_trial_reaches_makes_no_recipe(tmp_path):
    path = write(tmp_path, "lr: {choice: [1.0e-6]}\n")
    done = called(
        tmp_path,
        "--space",
        str(path),
        "--sampler",
        "grid",
        "--objective",
        "time_to:0.99",
        "--epochs",
        "1",
        *DIGITS,
    )
    assert done.returncode == 2
    assert "never reached" in done.stdout
    assert "no trial reached it" in done.stderr
    assert not (tmp_path / "tuned.yaml").exists()


@pytest.mark.slow
def test_a_trial_that_fails_is_recorded_and_a_grid_ends_by_itself(tmp_path):
    path = write(tmp_path, "lr: {choice: [0.05, 1.0e+30]}\n")
    done = called(
        tmp_path,
        "--space",
        str(path),
        "--sampler",
        "grid",
        "--epochs",
        "1",
        "--pruner",
        "none",
        *DIGITS,
        "--bs",
        "16",
    )
    assert done.returncode == 0, done.stderr
    assert "2 trials: 1 whole, 0 given up, 1 failed" in done.stdout
    with open(tmp_path / "sweep" / "results.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["state"] for row in found] == ["COMPLETE", "FAIL"]
    assert "not finite" in found[1]["error"]
    again = called(
        tmp_path,
        "--space",
        str(path),
        "--sampler",
        "grid",
        "--epochs",
        "1",
        "--pruner",
        "none",
        *DIGITS,
        "--bs",
        "16",
    )
    assert "2 of them done" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_puts_trials_back(jobs, tmp_path):
    path = write(tmp_path, "lr: {choice: [0.05, 0.1]}\n")
    command = [
        sys.executable,
        "-m",
        "tuning.sweep",
        "--space",
        str(path),
        "--trials",
        "3",
        "--jobs",
        jobs,
    ]
    command += [
        "--epochs",
        "500",
        *DIGITS,
        "--out",
        str(tmp_path / "sweep"),
        "--recipe_out",
        str(tmp_path / "tuned.yaml"),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
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
    assert "goes on with the sweep" in console
    study = optuna.load_study(
        study_name="resnet50_test", storage=f"sqlite:///{tmp_path / 'sweep' / 'study.db'}"
    )
    assert not sweep.finished(study)
    waiting = study.get_trials(states=(optuna.trial.TrialState.WAITING,))
    assert len(waiting) == int(jobs)
    assert all((Path(trial.user_attrs["folder"]) / "last.pt").exists() for trial in waiting)


def test_trials_of_other_machines_are_left_alone(tmp_path):
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    away, gone, here = study.ask(), study.ask(), study.ask()
    away.set_user_attr("host", "elsewhere")
    for trial, pid in ((gone, 2**22 + 1), (here, os.getppid())):
        trial.set_user_attr("host", sweep.socket.gethostname())
        trial.set_user_attr("pid", pid)
        trial.set_user_attr("folder", str(tmp_path / str(trial.number)))
    assert sweep.take_up(study) == 1
    states = [trial.state.name for trial in study.get_trials()]
    assert states == ["RUNNING", "FAIL", "RUNNING", "WAITING"]
    assert study.get_trials()[3].user_attrs == {"folder": str(tmp_path / "1"), "after": 1}
    assert not sweep.finished(study)


def test_a_container_may_give_a_dead_sweep_s_number_to_the_next():
    assert not sweep.alive(os.getpid())
    assert sweep.alive(os.getppid())


def test_ranking_puts_whole_runs_first():
    study = optuna.create_study(direction="maximize")
    make = optuna.trial.create_trial
    given = [
        make(state=optuna.trial.TrialState.FAIL),
        make(state=optuna.trial.TrialState.PRUNED, intermediate_values={1: 0.9}),
        make(value=0.5),
        make(state=optuna.trial.TrialState.PRUNED, intermediate_values={1: 0.1, 2: 0.2}),
        make(value=0.7),
    ]
    order = report.ranked(study, given)
    assert [given.index(trial) for trial in order] == [4, 2, 3, 1, 0]
    assert resnet50_test.SCRIPT in "resnet50_test.py"
