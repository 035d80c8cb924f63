"""What a run says that it has reached, and that inference from its checkpoints says the same."""

import functools
import itertools
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import ranks
from conftest import for_each, run
from figures.run_logs import read_run
from training import checkpoint, evaluation
from training.progress import EarlyStop, Progress
from training.run_log import RunLog

# A learning rate that is multiplied by 30 before the last epoch makes the last epoch a bad one.
WORSE_AT_THE_END = """--dataset digits --arch resnet8 --bs 64 --lr 0.1 --lr_schedule step
    --step_size 2 --gamma 30 --epochs 3 --threads 1"""
resnet = functools.partial(run, "images")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last epoch is worse than its best one; tests take copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    resnet(WORSE_AT_THE_END, "--out", folder)
    return folder


@pytest.fixture
def copied(finished: Path, here: Path) -> Path:
    """A copy of the finished run in the current folder, as runs/resnet50_test-1."""
    return shutil.copytree(finished, Path("runs") / "resnet50_test-1")


def best_row(folder: Path) -> dict:
    return max(ranks.metrics(folder), key=lambda row: row["test_accuracy"])


def reached(row: dict) -> str:
    accuracy, macro_f1 = (100 * row[f"test_{metric}"] for metric in ("accuracy", "macro_f1"))
    return f"epoch {row['epoch']}, test accuracy {accuracy:.2f} %, macro-F1 {macro_f1:.2f} %"


def reported(console: str) -> dict[str, str]:
    """The lines of the end of a run, by the name of the file that they are about."""
    return {line[:4]: line for line in console.splitlines() if line[:7] in ("last.pt", "best.pt")}


@pytest.mark.process
def test_two_ranks_report_their_last_and_their_best_epoch_as_evaluating_does(tmp_path):
    flags = f"resnet50_test.py {WORSE_AT_THE_END} --bs 32 --precision bf16 --out run"
    console = ranks.run(flags, tmp_path / "train", 2)
    lines = reported(console)
    assert console.count("best.pt: epoch") == 1, "rank 0 alone speaks"
    run = tmp_path / "train" / "run"
    last, best = ranks.metrics(run)[-1], best_row(run)
    assert best["epoch"] < 3, "the last epoch was to be a bad one"
    assert best["comm_bytes"] > 0
    share = (360 * last["test_accuracy"] + 2) / 364
    spread = 100 * (share * (1 - share) / 364) ** 0.5
    assert lines == {
        "last": f"last.pt: {reached(last)} (accuracy on 360 test rows: +- {spread:.1f})",
        "best": f"best.pt: {reached(best)} (chosen on the test set, so it is optimistic)",
    }
    for name in ("last", "best"):
        words = f"resnet50_test.py --resume ../train/run --checkpoint {name} --evaluate"
        report = ranks.run(words, tmp_path / name, 2)
        (accuracy,) = re.findall(r"all +(\d+\.\d\d %)", report)
        assert f"test accuracy {accuracy}" in lines[name]
        assert report.count("weights of ../train/run/") == 1, "one rank speaks for all"


def test_a_resumed_run_compares_its_epochs_with_all_that_are_comparable(finished, here):
    """Also in another folder, but of no other set of rows, and of none without its best.pt."""
    for name, more, best in (
        ("same", "", f"epoch {best_row(finished)['epoch']}, test"),
        ("left", "--out other", f"epoch {best_row(finished)['epoch']}, test"),
        ("lost", "--out found", "epoch 4, test"),
        ("validated", "--val_fraction 0.2", "epoch 4, validation"),
    ):
        shutil.copytree(finished, name)
        if name == "lost":
            Path(name, "best.pt").unlink()
        console = resnet("--resume", name, "--epochs 4 --lr 3", more)
        assert reported(console)["best"].startswith(f"best.pt: {best} accuracy ")
        folder = Path(more.split()[-1] if "--out" in more else name)
        stored = checkpoint.load(folder / "best.pt").progress["epoch"]
        assert best.startswith(f"epoch {stored},")
        told = "is not in found: the best epoch is chosen from here on"
        assert (told in console) == (name == "lost")
        assert [row["epoch"] for row in ranks.metrics(folder)] == [1, 2, 3, 4]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, is_full) -> None:
    """Let checkpoints of these files fail."""
    real = checkpoint.save

    def save(path: Path, state: dict, **more) -> None:
        if is_full(path):
            raise OSError(f"{path} could not be written (No space left on device)")
        real(path, state, **more)

    monkeypatch.setattr(checkpoint, "save", save)


def accuracies_of(monkeypatch: pytest.MonkeyPatch, *accuracies: float) -> None:
    """Let the evaluations of a run give these accuracies."""
    given = [evaluation.Evaluation(1.0, accuracy, 1.0, torch.ones(3, 2)) for accuracy in accuracies]
    monkeypatch.setattr(evaluation, "evaluate", mock.Mock(side_effect=given))


def test_the_metric_of_the_flag_chooses_the_best_epoch(here, monkeypatch):
    counts = [[[9, 0], [9, 1], [10, 0]], [[4, 3], [5, 5], [6, 4]], [[5, 1], [5, 5], [9, 1]]]
    given = [
        evaluation.Evaluation(loss, accuracy, 1.0, torch.tensor(of_classes))
        for loss, accuracy, of_classes in zip((1.0, 0.7, 0.5), (0.9, 0.7, 0.6), counts)
    ]
    for epoch, metric in enumerate(("accuracy", "macro_f1", "loss"), 1):
        monkeypatch.setattr(evaluation, "evaluate", mock.Mock(side_effect=given))
        console = resnet(WORSE_AT_THE_END, f"--best_by {metric} --out {metric}")
        line = reported(console)["best"]
        assert line.startswith(f"best.pt: epoch {epoch}, ")
        by = "" if metric == "accuracy" else f" by {evaluation.METRIC_NAMES[metric]}"
        assert line.endswith(f"(chosen{by} on the test set, so it is optimistic)")
        assert checkpoint.load(here / metric / "best.pt").progress["epoch"] == epoch
        assert read_run(here / metric).best_row()["epoch"] == epoch, "also in a report"


def test_what_ends_a_run():
    nan, before = float("nan"), "the best test accuracy is that of epoch 1 (patience 2)"
    for column, values, target, reason in (
        ("test_accuracy", [], 0.9, ""),
        ("test_accuracy", [0.5, 0.4, 0.5], 0.9, before),
        ("test_accuracy", [0.5, None, None], 0.1, ""),  # the last epoch was not evaluated
        ("test_accuracy", [0.5, None, None, 0.4], 0, before),
        ("val_macro_f1", [0.5, 0.9], 0.9, "the validation macro-F1 of 0.9000 has reached"),
        ("val_loss", [0.9, 0.4], 0.5, "the validation loss of 0.4000 has reached the target, 0.5"),
        ("val_loss", [0.9, 0.6, 0.7, nan], 0.5, "the best validation loss is that of epoch 2"),
        ("val_loss", [0.9, 0.6, nan, 0.5], 0, ""),
    ):
        rows = [{"epoch": epoch, column: value} for epoch, value in enumerate(values, 1)]
        found = EarlyStop(column, 2, target).reason(rows)
        assert found.startswith(reason), (found, reason)
        assert bool(found) == bool(reason)
    rows = [{"epoch": 0.4444, "test_accuracy": 0.5}, {"epoch": 1.4444, "test_accuracy": 0.4}]
    assert EarlyStop(patience=1).reason(rows), "their difference is a little less than 1"


def test_a_run_that_has_ended_stays_so_until_its_flags_change(here, monkeypatch):
    accuracies_of(monkeypatch, 0.2, 0.9, 0.5, 0.5, 0.5, 0.95, 0.3, *[0.2] * 9)
    words = "--epochs 9 --lr 0.01 --patience 2 --out run"
    line = "device-hours: the best test accuracy is that of epoch 2 (patience 2)"
    for flags in (f"{WORSE_AT_THE_END} {words}", "--resume run"):
        console = resnet(flags)
        assert line in console
        assert reported(console)["best"].startswith("best.pt: epoch 2, test accuracy 90.00 %")
        assert len(ranks.metrics(here / "run")) == 4
    console = resnet("--resume run --patience 4 --stop_at 0.95")
    assert "device-hours: the test accuracy of 0.9500 has reached the target, 0.95" in console
    assert len(ranks.metrics(here / "run")) == 6
    console = resnet("--resume run --patience 1 --stop_at 0 --out other")
    assert "that of epoch 6 (patience 1)" in console, "as in the run's own folder"
    assert len(ranks.metrics(here / "other")) == 7
    console = resnet("--resume run --epochs 7 --best_by loss --patience 1")
    assert len(ranks.metrics(here / "run")) == 7, "epochs that accuracy judged end no run of loss"
    assert "chosen by loss" in reported(console)["best"]
    assert read_run(here / "run").best_row()["epoch"] == 7, "also in a report"
    progress = Progress(best={"epoch": 1, "chosen_by": "a"}, rows=[{"epoch": 1, "a": 0.9}], since=1)
    assert progress.add_row({"epoch": 2, "a": 0.1}, "a") is None, "after there and back"


def test_after_a_failed_save_the_best_is_the_best_that_is_on_the_disk(here, monkeypatch):
    """And the first of two that are equal."""
    accuracies_of(monkeypatch, 0.2, 0.9, 0.5, 0.5)
    number = itertools.count(1)
    fill_the_disk(monkeypatch, lambda path: path.name == "best.pt" and next(number) == 2)
    console = resnet(WORSE_AT_THE_END, "--epochs 4 --lr 0.01 --out run")
    assert reported(console)["best"].startswith("best.pt: epoch 3, test accuracy 50.00 %")
    assert checkpoint.load(here / "run" / "best.pt", "resnet50_test").progress["epoch"] == 3


def test_a_run_whose_files_could_not_be_written_ends_with_2_and_says_so(here, monkeypatch):
    full = ["best.pt"]
    fill_the_disk(monkeypatch, lambda path: path.name in full)
    accuracies_of(monkeypatch, *2 * (0.2, 0.9, 0.1))
    assert "best.pt holds no epoch of this run" in resnet(WORSE_AT_THE_END, "--out a", code=2)
    full.append("last.pt")
    console = resnet(WORSE_AT_THE_END, "--out b", code=2)
    assert console.splitlines()[-1].startswith("error: b/last.pt could not be written at the end")
    assert "this epoch is not in the file" in reported(console)["last"]


def test_a_folder_that_is_gone_is_made_again_by_the_next_save(here, monkeypatch):
    accuracies_of(monkeypatch, 0.2, 0.9, 0.5)
    epoch = RunLog.epoch

    def lose_the_folder(log: RunLog, rows: list) -> None:
        epoch(log, rows)
        if len(rows) == 2:
            shutil.rmtree("run")

    monkeypatch.setattr(RunLog, "epoch", lose_the_folder)
    console = resnet(WORSE_AT_THE_END, "--epochs 3 --lr 0.01 --out run")
    assert "was gone, with its files, and is made again" in console
    assert reported(console)["best"].startswith("best.pt: epoch 3, test accuracy 50.00 %")
    assert checkpoint.load(here / "run" / "best.pt", "resnet50_test").progress["epoch"] == 3
    assert [row["epoch"] for row in ranks.metrics(here / "run")] == [1, 2, 3]
    assert (here / "run" / "config.json").exists()


def test_inference_names_its_file_and_epoch_and_the_other_one(copied):
    rows = {"last": ranks.metrics(copied)[-1], "best": best_row(copied)}
    shown = {name: reached(row) for name, row in rows.items()}

    def check(flags: str, file: str, other: str) -> None:
        assert resnet(flags, "--evaluate").splitlines()[0] == (
            f"weights of {copied / file}.pt: {shown[file]}; {other}.pt is of {shown[other]}: "
            f"--checkpoint {copied / other}.pt"
        )

    cases = [
        (f"--resume {copied}", "last", "best"),
        (f"--resume {copied}/last.pt --checkpoint best", "best", "last"),
        ("--checkpoint best", "best", "last"),
        (f"--checkpoint {copied}", "last", "best"),
    ]
    for_each(cases, check)


def test_first_layer_of_vgg8_is_made_from_the_training_images_and_kept(here):
    resnet("--arch vgg8 --dataset digits --image_size 12 --epochs 1 --threads 1 --out run")
    filters = ranks.weights(Path("run"))["filters"]
    torch.testing.assert_close(filters[4:], -filters[:4])  # as random ones would not be


def test_training_goes_on_from_the_best_checkpoint_in_a_folder_of_its_own(copied):
    best = checkpoint.load(copied / "best.pt").progress["epoch"]
    first = ranks.metrics(copied)
    flags = f"--resume {copied} --checkpoint best --lr 0.01"
    assert "would overwrite; choose another folder" in resnet(flags, code=2)
    assert ranks.metrics(copied) == first
    resnet(flags, "--out other")
    second = ranks.metrics(Path("other"))
    assert second[:best] == first[:best]
    assert second[best]["lr"] == pytest.approx(first[best]["lr"] / 10)
    assert "--out other already holds a run" in resnet(flags, "--out other", code=2)
    for name in ("half", "foreign"):  # a kill left the copy alone
        Path(name).mkdir()
        shutil.copy(copied / "best.pt", name)
    resnet(flags, "--out half")
    assert "already holds a run" in resnet("--out foreign", code=2)
    for name, text, message in (
        ("last.pt", (copied / "last.pt").read_bytes(), "already holds a run"),
        ("config.json", b'{"model_type": "bert"}', "holds a config.json of no run"),
    ):
        Path(name[:4]).mkdir()
        Path(name[:4], name).write_bytes(text)
        assert message in resnet(flags, f"--out {name[:4]}", code=2)


def test_a_checkpoint_that_cannot_be_used_is_refused(copied):
    Path("new").mkdir()
    shutil.copy(copied / "last.pt", "new")
    for flags, message in (
        (f"--checkpoint {copied}/best.pt", "nothing is to be done with it"),
        (f"--checkpoint {copied}/best.pt --resume {copied}", "with --resume it is best or last"),
        ("--checkpoint best --out new --evaluate", "new/best.pt: no such checkpoint"),
    ):
        [line] = resnet(flags, code=2).splitlines()
        assert message in line
    shutil.rmtree("runs")
    assert "no run of resnet50_test" in resnet("--checkpoint best --evaluate", code=2)
