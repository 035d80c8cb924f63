"""Sweeps: search spaces and flags, and sweeps on digits that are killed, interrupted or fail."""

import csv
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import optuna
import pytest
import torch
import yaml

import conftest
import errors
import ranks
from cli import options
from conftest import each_of, for_each
from distributed.worker import SWEEP
from figures import verdict
from figures.run_logs import ReportedRun
from figures.verdict import Contender, paired_difference
from training import run_folder
from tuning import compare, race, results, search, space, sweep, trials
from tuning.config import SweepConfig
from tuning.target_script import TargetScript

ROOT = ranks.ROOT
DIGITS = "--dataset digits --arch resnet8 --bs 64 --subset 0.5 --precision fp32 --warmup 0".split()
DIGITS += ["--threads", "1"]


@pytest.fixture
def run_sweep(tmp_path, monkeypatch, capsys):
    """Run a sweep in this process, its trials in forked ones; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def start(command: list[str], *, stdout, env: dict[str, str], **_: object):
        env = {**env, SWEEP: ""}  # whose child it is not
        return ranks.WarmJob(command[1:], tmp_path, env, console=Path(stdout.name))

    forking = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(trials, "subprocess", forking)

    def run(searched: str | None, *words: str, main=sweep.main) -> tuple[int, str, str]:
        if searched is not None:
            (tmp_path / "space.yaml").write_text(searched)
            words = ("--space", str(tmp_path / "space.yaml"), *words)
        capsys.readouterr()
        code = errors.exit_code(lambda: main([*words, "--out", "sweep"]))
        return code, *capsys.readouterr()

    return run


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "trials.csv", newline="") as file:
        return list(csv.DictReader(file))


def categorical(name: str, *choices: object) -> str:
    return f"{name}: {{type: categorical, choices: {list(choices)}}}\n"


def test_a_space_is_read_and_sampled(tmp_path):
    script = TargetScript.read("resnet50_test.py", [])
    path = tmp_path / "space.yaml"
    path.write_text(
        "learning-rate: {type: float, low: 1e-3, high: 0.5, log: true}\n"
        "max_grad_norm: {type: float, low: 0, high: 1, step: 0.5}\n"
        "bs: {type: int, low: 16, high: 64, step: 16}\n"
        "nesterov: {type: categorical, choices: [false]}\n"
        "optimizer: {type: categorical, choices: [sgd, kaldi_ngd]}\n"
        "opt_args.alpha: {type: categorical, choices: [1.0]}\n"  # of one of them
        "lr_args.end: {type: float, low: 0.0, high: 0.1}\n"
        "crop_pad: {type: int, low: 1, high: 4}\n"  # a former name of a setting
    )
    ours = ["optimizer", "opt_args.alpha", "lr_args.end", "crop_pad"]
    values = space.suggest(optuna.create_study().ask(), space.read_space(path, script))
    assert list(values) == ["lr", "clip", "bs", "nesterov", *ours]
    assert 1e-3 <= values["lr"] <= 0.5
    assert values["clip"] in (0, 0.5, 1)
    assert values["bs"] in (16, 32, 48, 64)
    flags = script.flags(values)
    assert (flags["lr"], flags["nesterov"]) == (values["lr"], False)
    for name in ("resnet50", "transformer"):
        script = TargetScript.read(f"{name}_test.py", [])
        assert "lr" in space.read_space(ROOT / "tuning" / f"{name}.yaml", script)


def test_a_wrong_space_or_flag_is_one_line(run_sweep, tmp_path, monkeypatch):
    cases = [
        ("", "", "expected lines such as"),
        ("lr: {type: float, low: 0.1}", "", "lr: FloatDistribution"),
        ("bs: {type: float, low: 16, high: 64.5}", "", "must be a whole number"),
        (categorical("lr", 0.1, "abc"), "", "--lr: must be a number, got 'abc'"),
        (categorical("opt_args.rnak", 8), "", "did you mean rank?"),
        (categorical("optimizer", "sgd", "adamw") + categorical("opt_args.rank", 8), "", "rank"),
        (categorical("out", "x"), "", "the search sets this flag"),
        (None, "--leraning_rate 1", "did you mean --learning_rate?"),
        (None, "--sampler grid", "lr has a range"),
        (None, "--epochs 3 --warmup 5", "warmup=5"),  # which every trial would refuse
        (None, "--stop-at 0.9", "leave it out"),
        (None, "--dataset folder --data_dir no", "there is no such folder"),
    ]

    def check(text: str | None, words: str, message: str) -> None:
        code, out, error = run_sweep(text, *words.split())
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert message in error
        assert not (tmp_path / "sweep").exists()

    for_each(cases, check)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.8.0")
    assert run_sweep(None)[2].endswith(f" {sys.executable} -m pip install 'optuna>=5'\n")


@pytest.mark.process
def test_the_shell_script_starts_from_any_folder(tmp_path):
    (tmp_path / "errors.py").write_text("raise SystemExit('not of this project')\n")
    command = ["bash", str(ROOT / "tuning" / "transformer_tuning.sh"), "--space", "none.yaml"]
    process = ranks.start(command, tmp_path)
    assert "error: --space none.yaml" in ranks.finish(process, tmp_path, expected=2)


def test_a_failed_trial_says_why(tmp_path):
    """A signal is that of the kernel that ran out of memory; an earlier start had its own error."""
    console = tmp_path / "console.log"
    console.write_text("error: interrupted\n-- start\nepoch 1\n")
    assert trials.how_it_failed(tmp_path, 1) == "exit code 1 after: epoch 1"
    assert trials.how_it_failed(tmp_path, -9) == "ended by SIGKILL after: epoch 1"
    console.write_text("-- start\nerror: no such file\n")
    assert trials.how_it_failed(tmp_path, 2) == "error: no such file"


def test_a_trial_that_went_on_at_a_lower_rate_has_diverged(tmp_path):
    ended = SimpleNamespace(poll=lambda: 0, returncode=0)
    conftest.write(tmp_path, metrics__jsonl='{"epoch": 1, "rollbacks": 1, "test_accuracy": 0.5}\n')
    for keeps in (False, True):
        config = SimpleNamespace(script=None, keeps_weights=keeps, ends_after_one=False)
        runner = trials.TrialRunner(config, [], None)
        trial = mock.MagicMock(should_prune=lambda: False)
        if keeps:  # in full, where the verdict names it
            assert runner.follow(trial, tmp_path, process=ended) == 0.5
        else:
            with pytest.raises(trials.TrialFailed, match="diverged at this rate"):
                runner.follow(trial, tmp_path, process=ended)


def test_a_failure_among_the_last_of_several_jobs_ends_the_sweep(tmp_path, run_sweep):
    def fail(runner: object, trial: optuna.Trial, arguments: list[str]) -> float:
        trial.set_user_attr("folder", str(tmp_path))
        if trial.number:
            raise SystemExit("no memory")
        return 0.5

    with mock.patch.object(trials.TrialRunner, "__call__", fail):
        code, _, error = run_sweep(None, "--trials", "2", "--jobs", "2")
    assert (code, error) == (2, "error: no memory\n")


def test_what_trials_have_in_common_names_own_data_and_its_files(here):
    def common(words: str):
        return TargetScript.read("resnet50_test.py", words.split()).settings()

    own = "--dataset folder --data_dir"
    assert common(f"{own} cats") != common(f"{own} dogs")
    assert common("--data_dir a") == common("--data_dir b")
    files = {
        "cats": {"train__csv": "image,label\n"},
        "cats/test": {"a": ""},
        "cats/test/x": {"b": ""},
    }
    for folder, new in files.items():
        before = common(f"{own} cats")
        conftest.write(here / folder, **new)
        assert common(f"{own} cats") != before, folder
    conftest.write(here / "all/x", a="")  # no train, val or test
    before = common(f"{own} all")
    conftest.write(here / "all/y", b="")
    assert common(f"{own} all") != before
    assert common(f"{own} {here}/all") == common(f"{own} all")


def test_a_recipe_of_one_optimizer_gives_another_one_nothing(here):
    conftest.write(here, sgd__yaml="optimizer: sgd\nlr: 0.3\nweight_decay: 0.1\nema: 0.5\n")
    for words in ("--recipe sgd.yaml", "--recipe=sgd.yaml", "-c sgd.yaml"):
        words = [*words.split(), "--optimizer", "adamw"]
        script = TargetScript.read("resnet50_test.py", words)
        settings, _ = options.parse(script.parser, "resnet50_test", script.arguments)
        assert (settings.lr, settings.weight_decay, settings.ema) == (0.003, 0.05, 0.5)


def test_the_usual_space_fits_an_optimizer_and_a_batch_by_rows_is_no_default(here):
    conftest.write(here, bs__yaml=categorical("bs", 32, 128), mine__py="class SGD: pass\n")
    script = TargetScript.read("resnet50_test.py", ["--dataset", "digits"])
    searched = space.read_space(Path("bs.yaml"), script)
    assert space.usual_values(searched, script) is None
    usual = ROOT / "tuning" / "resnet50.yaml"
    for words in ("--optimizer mine:SGD --lr 0.1", "--optimizer adamw --weight_decay 0"):
        script = TargetScript.read("resnet50_test.py", words.split())
        names = space.read_space(usual, script, is_usual=True)
        assert [*names] == ["lr", "label_smoothing"], words


def test_gpus_are_divided_among_trials(monkeypatch):
    def slots(jobs: int, nproc: int, *, gpus: int, **given: str):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        script = SimpleNamespace(given=given)
        return trials.gpu_slots(SimpleNamespace(jobs=jobs, nproc=nproc, script=script))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = slots(2, 2, gpus=4)
    assert [two.get(), two.get()] == ["0,1", "2,3"]
    assert slots(3, 1, gpus=0).get() is slots(3, 1, gpus=1, device="cpu").get() is None
    with pytest.raises(errors.InputError, match="needs 4 GPUs, but there are 3"):
        slots(2, 2, gpus=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert slots(1, 2, gpus=2).get() == "5,7", "those that this process may see"


@pytest.mark.process
def test_a_killed_sweep_resumes_its_trial(tmp_path):
    command = ranks.script("tuning/sweep.py", "--script", "resnet50_test.py", *DIGITS)
    out = tmp_path / "a sweep's?#"
    command += ["--trials", "1", "--epochs", "8", "--out", str(out)]
    trial = out / "trials" / "0000"
    process = ranks.start(command, tmp_path)
    ranks.wait_for(lambda: len(trials.complete_rows(trial)) > 1, process)
    os.kill(process.pid, signal.SIGKILL)  # the sweep alone: its trial is to end by itself
    process.wait()
    lock = out / "study.log.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to("nothing")  # as the sweep leaves it where it was killed while it wrote
    done = ranks.finish(ranks.start(command, tmp_path), tmp_path)
    assert "0 finished, 1 resumed" in done
    (row,) = table(trial.parents[1])
    assert (row["state"], row["folder"], row["epochs"]) == ("COMPLETE", "0000", "8")
    console = (trial / "console.log").read_text()
    assert "error: interrupted" in console, "a trial outlived its sweep"
    assert [row["epoch"] for row in ranks.metrics(trial)] == list(range(1, 9))
    assert "test_accuracy" not in ranks.metrics(trial)[0]
    assert console.count("\n    1 ") == 1, "the resumed trial began anew"
    recipe = (trial.parents[1] / "recipe.yaml").read_text()
    assert float(row["lr"]) == yaml.safe_load(recipe)["lr"] == 0.08, "the defaults come first"


@pytest.mark.process
def test_hopeless_trials_are_pruned_and_failures_recorded(run_sweep, tmp_path, monkeypatch):
    """And the folder holds this sweep alone, which another start finds complete."""
    searched = categorical("lr", 0.05, 1e-6, 1e30)
    grid = ["--sampler", "grid", *DIGITS, "--epochs", "4", "--bs", "16", "--lr", "1e-6"]
    grid += ["--seeds", "2"]
    monkeypatch.setattr(search, "MEDIAN_TRIALS", 1)
    code, out, error = run_sweep(searched, *grid, "--sweep_seed", "5")
    assert code == 0, error
    assert "3 trials: 1 complete, 1 pruned, 1 failed" in out
    best, pruned, failed = table(tmp_path / "sweep")
    assert float(best["value"]) > 0.5
    assert (pruned["lr"], pruned["value"], pruned["epochs"]) == ("1e-06", "", "2")
    assert (failed["lr"], failed["epochs"]) == ("1e+30", "0")
    assert "not finite" in failed["error"]
    assert len(list((tmp_path / "sweep").glob("*.png"))) == 4
    assert "is ahead of defaults" in out
    assert yaml.safe_load((tmp_path / "sweep" / "recipe.yaml").read_text())["lr"] == 0.05
    code, _, error = run_sweep(categorical("lr", 0.05), *grid, "--subset", "0.3")
    assert (code, error.count("\n")) == (2, 1), error
    assert "trials with another --subset, the space's lr;" in error
    with (tmp_path / "sweep" / "study.log").open("a") as log:
        log.write('{"op_code": 5, "wor')  # as where the machine lost its power
    assert "3 finished, 0 resumed" in run_sweep(searched, *grid)[1]
    monkeypatch.setattr(fcntl, "lockf", mock.Mock(side_effect=BlockingIOError))
    assert "another process is writing to this folder" in run_sweep(searched, *grid)[2]


def test_trials_race_at_their_own_rates_and_none_twice(tmp_path):
    script = TargetScript.read("resnet50_test.py", ["--seed", "2", "--device", "cpu"])
    settings = {"val_fraction": 0.1, "jobs": 1, "nproc": 1, "out": tmp_path, "seeds": 2}
    names = enumerate(("adamw", "adamw", "sgd", "lamb"))
    found = [SimpleNamespace(number=n, params={"optimizer": name}) for n, name in names]
    with mock.patch.object(race, "run_seeds") as run:
        race.race_defaults(SweepConfig(script=script, **settings), found)
    values = run.call_args.args[1]
    rates = {"defaults": 0.12, "trial 0": 0.003, "trial 2": 0.1}
    assert {each["arm"]: each["lr"] for each in values} == rates
    assert [each["seed"] for each in values] == [1, 1, 1, 3, 3, 3], "not that of the search"
    assert run.call_args.args[0].script.given["device"] == "cpu", "where no GPUs are divided"
    assert run.call_args.args[0].is_strict, "a run that was killed is no loser"
    arms = compare.read_arms(script, [], flag="weights", values=["my run/best.pt", "b.pt"])
    assert arms[0].script.given["weights"] == "my run/best.pt"


def test_a_sweep_without_a_complete_trial_makes_no_recipe(run_sweep, tmp_path):
    grid = ["--sampler", "grid", "--epochs", "1", *DIGITS]
    conftest.write(tmp_path / "sweep", recipe__yaml="lr: 0.1")  # which may be its own --recipe
    assert "holds a recipe.yaml" in run_sweep(categorical("lr", 1e30), *grid)[2]
    (tmp_path / "sweep" / "recipe.yaml").unlink()
    code, _, error = run_sweep(categorical("lr", 1e30), *grid)
    assert (code, error.count("\n")) == (2, 1)
    assert "no trial is complete, so there is no recipe: error: " in error
    assert table(tmp_path / "sweep")[0]["state"] == "FAIL"
    assert not (tmp_path / "sweep" / "recipe.yaml").exists()


def written(words: list[str], params: dict, folder: Path, nproc: int = 1):
    """As much of a sweep's settings as its command needs, after its recipe is written."""
    script, *flags = words
    config = SimpleNamespace(
        script=TargetScript.read(script, flags), nproc=nproc, val_fraction=0.1, out=folder
    )
    flags = config.script.flags(params)
    batch = (flags["batch_size"] or 128) * flags["accumulate"] * nproc
    results.write_recipe(config, params, batch=batch, comment="# best\n")
    return config


def test_the_printed_command_trains_on_the_same_data(here, capsys):
    """A recipe has no folder of data; rows are held out where the data is a training set alone."""
    data = here / "my texts; $HOME"
    texts = "label,text\n" + "spam,a prize\nham,at noon\n" * 8
    for split in ("train", "test"):  # what is there by then
        conftest.write(data, **{f"{split}__csv": texts})
        flags = "transformer_test.py --dataset csv --width 8 --heads 2 --bs 4 --epochs 1".split()
        flags += ["--weights", "run-train"] if split == "test" else []
        config = written([*flags, "--data_dir", data.name], {}, here)
        _, name, *arguments = shlex.split(results.training_command(config))
        assert Path(name) == ROOT / "transformer_test.py"
        assert ("--val_fraction" in arguments) == (split == "train")
        assert (str(here / "run-train") in arguments) == (split == "test")
        arguments += ["--epochs", "1", "--out", f"run-{split}", "--threads", "1"]
        assert conftest.call("texts", arguments) == 0, capsys.readouterr().err
    config.nproc = 2
    _, python, size, *words = shlex.split(results.training_command(config))
    assert (python, size) == (f"PYTHON={sys.executable}", "NGPU=2")
    assert words[:3] == ["bash", str(ROOT / "run_distributed.sh"), "transformer_test.py"]


SCALED = {"lr_scaling": "sqrt", "base_bs": 96}
LAMB = {"optimizer": "lamb", **SCALED}
LINEAR = {"optimizer": "sgd", "lr_scaling": "linear", "base_bs": 256}


@each_of(
    ("flags", "params", "nproc", "expected"),
    [
        ("--optimizer sgd", {"lr": 0.1}, 2, LINEAR),
        ("--optimizer lamb", {"lr": 0.1, "bs": 32, "accumulate": 3}, 1, LAMB),
        ("--bs 512 --lr_scaling sqrt --base_bs 96", {"lr": 0.1}, 1, {"batch_size": 512, **SCALED}),
        ("--recipe given.yaml", {"nesterov": False}, 1, {"arch": "resnet20"}),
        ("--crop_fill reflect", {"crop_pad": 2}, 1, {"augment_args": {"fill": "reflect"}}),
    ],
)
def test_a_recipe_holds_what_the_best_trial_had(flags, params, nproc, expected, here):
    """And the learning rate's scaling, so that it holds for other numbers of processes."""
    (here / "given.yaml").write_text("nesterov: true\narch: resnet20\n")
    config = written(["resnet50_test.py", *flags.split()], params, here, nproc)
    assert yaml.safe_load((config.out / "recipe.yaml").read_text()) == params | expected
    parser = conftest.parser("images")
    given = parser.given(options.recipe_arguments(str(config.out / "recipe.yaml"), parser))
    changed = {"recipe": None, "subset": 1.0, "lr_scaling": "none"}
    changed |= {name: value for name, value in expected.items() if name in (*changed, "base_bs")}
    defaults = parser.defaults()
    defaults |= options.defaults_of_situation(defaults | given, parser)
    assert parser.merged(defaults, given) == config.script.flags(params) | changed


# -------------------------------------------------------------------- races


def test_an_arm_is_ahead_if_its_paired_difference_is_beyond_chance():
    for first, second, row, expected in (
        ([90.0, 91.0], [92.0, 93.1], 0.01, (2.05, 0.05, "ahead of")),
        ([92.0, 93.1], [90.0, 91.0], 0.01, (-2.05, 0.05, "behind")),
        ([90.0, 91.0], [92.0, 93.4], 0.01, (2.2, 0.2, "")),  # 11 errors; two seeds need 12.7
        ([90.0, 91.0, 92.0], [92.0, 93.4, 94.0], 0.01, (2.133, 0.133, "ahead of")),  # 4.3
        ([90.0, 91.0], [92.0, 93.0], 0.28, (2.0, 0.198, "")),  # as wide as a test row at least
        ([90.0, 91.0], [90.0, 91.0], 0.0, (0.0, 0.0, "")),
        ([90.0], [99.0], 0.01, (9.0, 0.0, "")),
    ):
        found = paired_difference(first, second, row)
        assert (found.mean, found.error) == pytest.approx(expected[:2], abs=1e-3)
        assert found.verdict == expected[2], (first, second)


def test_arms_whose_rows_have_several_labels_are_compared_by_map():
    arms = []
    for name, accuracy, precision in (("a", 0.1, 0.9), ("b", 0.3, 0.5)):
        row = {"test_accuracy": accuracy, "test_map": precision, "train_seconds": 1.0}
        row |= {"rollbacks": 1} if name == "b" else {}
        result = {"rows": 200} if name == "b" else {}
        run = ReportedRun(name, [row], {"commit": name}, {}, None, result)
        tried = {rate: {"val_accuracy": rate, "val_map": 1 - rate} for rate in (0.1, 0.3)}
        arms.append(Contender(name, tried, [run, run]))
    assert (arms[0].rate, arms[0].measure, arms[0].accuracies) == (0.1, "mAP", [90, 90])
    found = arms[1].difference(arms[0])
    assert (found.verdict, found.error) == ("behind", 0.5 / math.sqrt(2)), "that of a row of 200"
    limits = " ".join(verdict.limits(arms))
    assert "one test row" not in limits, "it is not known"
    assert "Runs are not of one commit: a and b;" in limits
    assert "2 runs of b diverged and went on at a lower rate." in limits


def test_what_folds_say_is_of_the_rows_of_all_folds():
    confusion = SimpleNamespace(counts=torch.tensor([[6, 2], [6, 6]]).numpy())
    row = {"test_accuracy": 0.6}
    runs = [ReportedRun("", [row], {}, {"fold": "1/5"}, confusion, {})] * 5
    limits = " ".join(verdict.limits([Contender("a", {0.1: row}, runs)]))
    assert "Another 100 rows may change an accuracy by 4.9 points." in limits
    assert "a has learned nothing: the largest class alone has 60.0 %." in limits


def test_a_search_goes_beyond_a_best_rate_at_its_edge_and_halves_its_steps_elsewhere():
    rows = {0.03: {"val_accuracy": 0.8}, 0.1: {"val_accuracy": 0.9, "val_loss": 0.4}}
    assert race.next_rates(0.1, {}) == [0.1, 0.0333, 0.3]
    assert race.next_rates(0.1, {**rows, 0.3: {}}) == [0.0548, 0.173]
    assert race.next_rates(0.1, dict.fromkeys((0.1, 0.03, 0.3), {})) == [0.01, 0.00333]
    assert race.next_rates(0.1, {**rows, 0.3: {"val_accuracy": 0.9, "val_loss": None}})[1] == 0.173
    equal = {"val_accuracy": 0.9, "val_loss": 0.3}
    assert race.next_rates(0.1, {**rows, 0.3: equal}) == [0.173, 0.9]


def test_a_wrong_race_is_one_line(run_sweep, here):
    conftest.write(here, a__yaml="epochs: 1\n", b__yaml="epochs: 2\n", val__csv="")
    conftest.write(here, own__yaml="dataset: folder\ndata_dir: .\n")
    conftest.write(here, other__yaml="dataset: folder\ndata_dir: other\n")
    cases = [
        ("", "give either --optimizers"),
        ("--optimizers sgd", "give two values or more"),
        ("--vary lerning_rate=1,2", "did you mean --learning_rate?"),
        ("--vary lr=1,2", "searches the rate"),
        ("--vary ngd=true,false", "stands for --optimizer ngd; write --vary optimizer="),
        ("--vary seed=1,2", "all runs of a race have the same"),
        ("--vary recipe=a.yaml,b.yaml", "differ in epochs"),
        ("--vary recipe=own.yaml,other.yaml", "differ in data_dir"),
        ("--vary mixup=none,fmix --vary alpha=1,2", "--vary is given twice"),
        ("--vary recipe=a.yaml,a.yaml --recipe b.yaml", "--recipe: each run of the race has its"),
        ("--optimizers sgd adamw --lr 1", "--lr: each run of the race has its own"),
        ("--optimizers sgd adamw --epochs 1 --warmup 3", "warmup=3"),
        ("--optimizers sgd adamw --dataset folder --data_dir .", "has no test set"),
        ("--vary recipe=own.yaml,own.yaml", "has no test set"),
        ("--optimizers sgd adamw --folds 5 --seeds 3", "--folds and --seeds"),
        ("--optimizers sgd adamw --dataset folder --data_dir . --folds 5", "has a validation set"),
        ("--optimizers sgd adamw --fold 1/5", "--fold: the search sets this flag"),
    ]

    def check(words: str, message: str) -> None:
        script = ("resnet50_test.py", *words.split())
        code, out, error = run_sweep(None, *script, main=compare.main)
        assert (code, out, error.count("\n")) == (2, "", 1), error
        assert message in error

    for_each(cases, check)
    diverged = mock.patch.object(trials.TrialRunner, "__call__", side_effect=trials.TrialFailed)
    with diverged:
        check("--optimizers sgd adamw --dataset digits", "the loss of every arm is not finite")


def pretend(accuracy: Callable[[optuna.Trial], float]):
    """Let runs write what they would have reached, and nothing else."""

    def run(runner: trials.TrialRunner, trial: optuna.Trial, arguments: list[str]) -> float:
        folder = trials.trial_folder(runner.config, trial)
        trial.set_user_attr("folder", str(folder))
        value = accuracy(trial)
        row = {"epoch": 1, "step": 1, "batch_size": 9, "test_accuracy": value, "val_loss": 0.1}
        row |= dict.fromkeys(("seconds", "train_seconds", "devices", "samples"), 1)
        config = {"script": "", "flags": {"dataset": "digits", "arch": "a"}, "commit": ""}
        texts = {"metrics__jsonl": json.dumps(row), "config__json": json.dumps(config)}
        conftest.write(folder, **texts)
        return value

    return mock.patch.object(trials.TrialRunner, "__call__", run)


def test_a_race_whose_last_rivals_diverge_ends_with_the_winner(run_sweep, tmp_path, monkeypatch):
    """Whose recipe can be read, and in whose folder no other script trains."""
    monkeypatch.setattr(race, "make_plan", lambda config: race.Plan(3, 1))

    def accuracy(trial: optuna.Trial) -> float:
        if trial.params == {**trial.params, "arm": "class_weights=balanced", "seed": 2}:
            trial.set_user_attr("error", "error: not finite")
            raise trials.TrialFailed
        return 0.5

    words = "--epochs 1 --vary class_weights=none,balanced --seeds 3".split()
    images, texts = ("resnet50_test.py", *DIGITS), ("transformer_test.py", "--dataset", "headlines")
    with pretend(accuracy):
        code, out, error = run_sweep(None, *images, *words, main=compare.main)
        assert code == 0, error
        assert "class_weights=balanced is left out (class_weights=balanced-seed2: error: " in out
        assert "**class_weights=none alone has come to its end.**" in out
        recipe = str(tmp_path / "sweep" / "recipe.yaml")
        assert conftest.parsed("images", f"--recipe {recipe}").class_weights is None
        code, _, error = run_sweep(None, *texts, *words, main=compare.main)
        assert (code, "trials of resnet50_test; choose another folder" in error) == (2, True)


def test_fewer_seeds_finish_what_they_need(run_sweep, monkeypatch):
    monkeypatch.setattr(race, "make_plan", lambda config: race.Plan(3, 1))
    later, is_killed = threading.Event(), True

    def accuracy(trial: optuna.Trial) -> float:
        if is_killed and trial.params["seed"] < race.SEARCH_SEED and trial.number % 2:
            later.wait(60)
            raise SystemExit(errors.INTERRUPTED)
        later.set() if trial.params["seed"] == 1 else None
        return 0.5

    words = "resnet50_test.py --epochs 1 --vary label_smoothing=0,0.1 --jobs 2".split()
    with pretend(accuracy):
        assert run_sweep(None, *words, *DIGITS, "--seeds", "3", main=compare.main)[0] == 130
        is_killed = False
        code, out, error = run_sweep(None, *words, *DIGITS, "--seeds", "1", main=compare.main)
    assert code == 0, error
    assert "With one seed nothing can be concluded" in out


@pytest.mark.process
def test_a_race_that_is_interrupted_finds_a_planted_difference(run_sweep, tmp_path, monkeypatch):
    """And a copy of the first arm, equal bit for bit, is not ahead; too little time is refused."""
    monkeypatch.setattr(race, "TRIALS", (3,))
    conftest.write(tmp_path, a__yaml="momentum: 0.8\n", b__yaml="label_noise: 0.9\n")
    words = ["resnet50_test.py", "--vary", "recipe=a.yaml,a.yaml,b.yaml", *DIGITS, "--epochs", "3"]
    words += ["--optimizer", "sgd", "--seeds", "2", "--jobs", "2"]
    run = functools.partial(run_sweep, None, *words, main=compare.main)
    code, out, error = run("--minutes", "0.01")
    assert (code, error.count("\n")) == (2, 1)
    assert "seeds in full) of 3 epochs need --minutes" in error
    full, trial = (tmp_path / "sweep" / part / "trials" for part in ("in_full", "search"))

    def press() -> None:
        while not trials.complete_rows(full / "0001"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    code, _, error = run()
    assert (code, "run the same command again to resume" in error) == (130, True)
    before = [path.stat().st_mtime for path in trial.glob("*/console.log")]
    code, out, error = run()
    assert code == 0, error
    assert "1 resumed" in out or "2 resumed" in out, "what only waits has not begun"
    assert [path.stat().st_mtime for path in trial.glob("*/console.log")] == before
    assert "recipe.yaml of a:\n" in out
    assert "a#2 cannot be told apart from a (+0.00 ± 0.20 points)" in out
    assert "b is behind a (-" in out
    assert "b has learned nothing: the largest class alone has " in out
    assert "a has learned" not in out
    assert out.endswith((tmp_path / "sweep" / "verdict.md").read_text())
    assert not [*trial.glob("*/*.pt")], "the weights of a search are left behind"
    for name in ("verdict.png", "report.html", "recipe.yaml"):
        assert (tmp_path / "sweep" / name).stat().st_size
    first_row, *_, last_row = ranks.metrics(full / "0000")
    assert "val_accuracy" not in last_row
    assert first_row["test_accuracy"] is None, "the test set is looked at once"
    assert "are not of one" not in out
    code, out, error = run("--seeds", "3")  # which are added
    assert code == 0, error
    assert [path.stat().st_mtime for path in trial.glob("*/console.log")] == before
    assert len([*full.iterdir()]) == 9


@pytest.mark.process
def test_a_race_in_folds_compares_runs_of_the_same_fold(run_sweep, tmp_path, monkeypatch):
    """Which leave the test set alone; folds that there cannot be are refused at once."""
    words = ["resnet50_test.py", "--vary", "label_noise=0,0.9", *DIGITS, "--epochs", "1"]
    words += ["--optimizer", "sgd", "--jobs", "2", "--folds", "3"]
    code, _, error = run_sweep(None, *words, "--folds", "500", main=compare.main)
    assert (code, "label_noise=0: " in error, "--fold 1/500" in error) == (2, True, True), error
    monkeypatch.setattr(race, "make_plan", lambda config: race.Plan(3, 1))
    code, out, error = run_sweep(None, *words, main=compare.main)
    assert code == 0, error
    found = set()
    for folder in (tmp_path / "sweep" / "in_full" / "trials").iterdir():
        flags = run_folder.read_config(folder)["flags"]
        found.add((flags["label_noise"], flags["seed"], flags["fold"]))
        assert "test_accuracy" not in ranks.metrics(folder)[-1]
    assert found == {(noise, n, f"{n + 1}/3") for noise in (0, 0.9) for n in range(3)}
    assert "Student's t for 3 folds" in out
    code, _, error = run_sweep(None, *words, "--folds", "4", main=compare.main)
    assert (code, "another --folds" in error) == (2, True)
