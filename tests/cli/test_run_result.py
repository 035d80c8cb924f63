"""What a run says that it has reached, and that inference from its checkpoints says the same."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import ranks
import resnet50_test
from test_training import run
from training import checkpoint, evaluation
from training.epoch_report import EpochResult, epoch_result, how_chosen

# A learning rate that is multiplied by 30 before the last epoch makes the last epoch a bad one.
WORSE_AT_THE_END = """--dataset digits --arch resnet8 --bs 64 --lr 0.1 --lr_schedule step
    --step_size 2 --gamma 30 --epochs 3 --threads 1""".split()
VALIDATED = [*WORSE_AT_THE_END, "--val_fraction", "0.2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose last epoch is worse than its best one; tests take copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run(resnet50_test, *WORSE_AT_THE_END, "--out", folder, monkeypatch=patch)
    return folder


@pytest.fixture
def copied(finished, here) -> Path:
    """A copy of the finished run in the current folder, as runs/resnet50_test-1."""
    folder = Path("runs") / "resnet50_test-1"
    shutil.copytree(finished, folder)
    return folder


def percent(accuracy: float) -> str:
    return f"{100 * accuracy:.2f} %"


def reported(console: str) -> dict[str, str]:
    """The lines of the end of a run, by the name of the file that they are about."""
    lines = console.splitlines()
    return {name: line for line in lines for name in ("last", "best") if line[:7] == f"{name}.pt"}


def evaluated(console: str) -> str:
    """The accuracy that --evaluate prints over all classes."""
    found = re.search(r"all +(\d+\.\d\d %)", console)
    assert found, console
    return found[1]


# -------------------------------------------------------------------- the end of a run


def test_a_run_reports_its_last_and_its_best_epoch_and_how_it_chose(here, monkeypatch):
    console = run(resnet50_test, *WORSE_AT_THE_END, "--out", "run", monkeypatch=monkeypatch)
    rows = ranks.metrics(here / "run")
    best = max(rows, key=lambda row: row["test_accuracy"])
    assert best["epoch"] < 3, "the last epoch was to be a bad one"
    lines = reported(console)
    accuracy = percent(rows[-1]["test_accuracy"])
    assert lines["last"] == f"last.pt: epoch 3, test accuracy {accuracy}"
    assert lines["best"] == (
        f"best.pt: epoch {best['epoch']}, test accuracy {percent(best['test_accuracy'])} "
        "(chosen on the test set, so it is optimistic)"
    )


@pytest.mark.parametrize("tested", [True, False])
def test_a_run_with_validation_rows_says_that_they_chose(tested, here, monkeypatch):
    flags = VALIDATED if tested else [*VALIDATED, "--no-test"]
    console = run(resnet50_test, *flags, "--out", "run", monkeypatch=monkeypatch)
    rows = ranks.metrics(here / "run")
    best = max(rows, key=lambda row: row["val_accuracy"])
    expected = (
        f"best.pt: epoch {best['epoch']}, validation accuracy {percent(best['val_accuracy'])}"
    )
    if tested:
        expected += f", test accuracy {percent(best['test_accuracy'])}"
    assert reported(console)["best"] == f"{expected} (chosen by validation rows)"
    assert ("test accuracy" in console) == tested


def test_a_meta_learned_run_says_that_the_policy_saw_the_validation_rows(here, monkeypatch):
    flags = ["--meta_learning", "--val_fraction", "0.2", "--epochs", "2", "--out", "run"]
    console = run(resnet50_test, *WORSE_AT_THE_END, *flags, monkeypatch=monkeypatch)
    best = reported(console)["best"]
    assert best.endswith(
        "(chosen by validation rows, from which the mixing policy learned as well)"
    )


def test_a_resumed_run_reports_the_best_of_all_its_epochs(copied, monkeypatch):
    console = run(
        resnet50_test, "--resume", copied, "--epochs", "4", "--lr", "3", monkeypatch=monkeypatch
    )
    rows = ranks.metrics(copied)
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    best = max(rows, key=lambda row: row["test_accuracy"])
    assert best["epoch"] < 3
    assert reported(console)["best"].startswith(
        f"best.pt: epoch {best['epoch']}, test accuracy {percent(best['test_accuracy'])} "
    )


def test_a_run_resumed_into_another_folder_chooses_its_best_epoch_there(copied, monkeypatch):
    flags = ["--epochs", "4", "--lr", "3", "--out", "other"]
    console = run(resnet50_test, "--resume", copied, *flags, monkeypatch=monkeypatch)
    assert "is not in other: the best epoch is chosen from here on" in console
    assert reported(console)["best"].startswith("best.pt: epoch 4, ")
    assert checkpoint.load(Path("other") / "best.pt")["progress"]["epoch"] == 4


def test_a_run_resumed_with_a_validation_set_does_not_compare_it_with_the_test_set(
    copied, monkeypatch
):
    flags = ["--epochs", "4", "--lr", "3", "--val_fraction", "0.2"]
    console = run(resnet50_test, "--resume", copied, *flags, monkeypatch=monkeypatch)
    assert reported(console)["best"].startswith("best.pt: epoch 4, validation accuracy")
    stored = checkpoint.load(copied / "best.pt", "resnet50_test")
    assert stored["progress"]["epoch"] == 4


def fail_to_save_best(monkeypatch, *failures: int) -> None:
    """Let these writes of best.pt fail, of which the first is number 1."""
    real, number = checkpoint.save, itertools.count(1)

    def save(path: Path, state: dict, **more) -> None:
        if path.name == "best.pt" and next(number) in failures:
            raise OSError(28, "No space left on device")
        real(path, state, **more)

    monkeypatch.setattr(checkpoint, "save", save)


def accuracies_of(monkeypatch, *accuracies: float) -> None:
    """Let the evaluations of a run give these accuracies."""
    given = iter(accuracies)
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *_, **__: evaluation.Evaluation(1.0, next(given))
    )


def test_a_best_checkpoint_that_was_never_written_is_not_announced(here, monkeypatch):
    accuracies_of(monkeypatch, 0.2, 0.9, 0.1)
    fail_to_save_best(monkeypatch, 1, 2, 3)
    console = run(resnet50_test, *WORSE_AT_THE_END, "--out", "run", monkeypatch=monkeypatch, code=2)
    assert "best.pt holds no epoch of this run" in console


def test_after_a_failed_save_the_best_is_the_best_that_is_on_the_disk(here, monkeypatch):
    accuracies_of(monkeypatch, 0.2, 0.9, 0.5, 0.3)
    fail_to_save_best(monkeypatch, 2)
    flags = [*WORSE_AT_THE_END, "--epochs", "4", "--lr", "0.01", "--out", "run"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert reported(console)["best"].startswith("best.pt: epoch 3, test accuracy 50.00 %")
    assert checkpoint.load(here / "run" / "best.pt", "resnet50_test")["progress"]["epoch"] == 3


def test_a_run_whose_last_save_failed_says_so_and_does_not_end_with_zero(here, monkeypatch):
    def full(path: Path, state: dict, **_: int) -> None:
        raise OSError(f"{path} could not be written (No space left on device)")

    monkeypatch.setattr(checkpoint, "save", full)
    flags = [*WORSE_AT_THE_END, "--out", "run"]
    console = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert console.splitlines()[-1].startswith("error: run/last.pt could not be written at the end")
    assert "this epoch is not in the file" in reported(console)["last"]


def test_an_interrupted_run_that_could_not_save_says_so(here, monkeypatch):
    def full(path: Path, state: dict, **_: int) -> None:
        if state["progress"]["step"]:  # signals are caught once the steps begin
            os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(f"{path} could not be written (No space left on device)")

    monkeypatch.setattr(checkpoint, "save", full)
    console = run(
        *(resnet50_test, *WORSE_AT_THE_END, "--save_every", "2", "--out", "run"),
        monkeypatch=monkeypatch,
        code=130,
    )
    assert "last.pt could not be written" in console.splitlines()[-1]
    assert "last.pt is written" not in console


def test_the_only_epoch_was_not_chosen():
    one = epoch_result([{"epoch": 1, "test_accuracy": 0.5}], 1)
    assert how_chosen(1, 1, chosen_on="test", meta_learned=False) == "the only epoch"
    assert one.show() == "epoch 1, test accuracy 50.00 %"
    assert EpochResult(0, {}).show() == "before the first epoch"


# -------------------------------------------------------------------- inference


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluating_prints_what_the_run_reported(precision, here, monkeypatch):
    flags = [*WORSE_AT_THE_END, "--precision", precision, "--out", "run"]
    lines = reported(run(resnet50_test, *flags, monkeypatch=monkeypatch))
    for name in ("last", "best"):
        report = run(
            resnet50_test,
            *["--resume", "run", "--checkpoint", name, "--evaluate"],
            monkeypatch=monkeypatch,
        )
        assert f"test accuracy {evaluated(report)}" in lines[name]


def test_first_layer_of_vgg8_is_made_from_the_training_images_and_kept(here, monkeypatch):
    flags = "--arch vgg8 --dataset digits --image_size 12 --epochs 1 --threads 1 --out run".split()
    lines = reported(run(resnet50_test, *flags, monkeypatch=monkeypatch))
    filters = torch.load("run/last.pt", weights_only=True)["model"]["filters"]
    torch.testing.assert_close(filters[4:], -filters[:4])  # as random ones would not be
    report = run(resnet50_test, "--checkpoint", "run", "--evaluate", monkeypatch=monkeypatch)
    assert f"test accuracy {evaluated(report)}" in lines["last"]


@pytest.mark.process
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluating_on_two_ranks_prints_what_they_reported(precision, tmp_path):
    flags = [*WORSE_AT_THE_END, "--bs", "32", "--precision", precision, "--out", "run"]
    command = ranks.torchrun("resnet50_test.py", *flags)
    lines = reported(ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path))
    for name in ("last", "best"):
        command = ranks.torchrun(
            "resnet50_test.py", "--resume", "run", "--checkpoint", name, "--evaluate"
        )
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run").symlink_to(tmp_path / "run")
        report = ranks.finish(ranks.start(command, folder, NGPU="2"), folder)
        assert f"test accuracy {evaluated(report)}" in lines[name]
        assert report.count("weights of run/") == 1, "one rank speaks for all"


def test_a_run_without_test_set_is_evaluated_on_its_validation_rows(here, monkeypatch):
    flags = [*VALIDATED, "--no-test", "--out", "run"]
    lines = reported(run(resnet50_test, *flags, monkeypatch=monkeypatch))
    flags = ["--checkpoint", "run/best.pt", "--evaluate"]
    report = run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert "accuracy on the validation set" in report
    assert f"validation accuracy {evaluated(report)}" in lines["best"]
    report = run(resnet50_test, *flags, "--test", monkeypatch=monkeypatch)
    assert "accuracy on the test set" in report


@pytest.mark.parametrize(
    ("flags", "file", "hint"),
    [
        ("--resume RUN", "last", "--checkpoint best"),
        ("--resume RUN --checkpoint last", "last", "--checkpoint best"),
        ("--resume RUN --checkpoint best", "best", "--checkpoint last"),
        ("--resume RUN/last.pt --checkpoint best", "best", "--checkpoint last"),
        ("--out RUN --checkpoint best", "best", "--checkpoint last"),
        ("--checkpoint best", "best", "--checkpoint last"),
        ("--checkpoint RUN", "last", "--checkpoint RUN/best.pt"),
        ("--checkpoint RUN/best.pt", "best", "--checkpoint RUN/last.pt"),
    ],
)
def test_inference_names_its_file_and_epoch_and_the_other_one(
    flags, file, hint, copied, monkeypatch
):
    flags, hint = (text.replace("RUN", str(copied)) for text in (flags, hint))
    console = run(resnet50_test, *flags.split(), "--evaluate", monkeypatch=monkeypatch)
    rows = ranks.metrics(copied)
    last, best = rows[-1], max(rows, key=lambda row: row["test_accuracy"])
    shown = {
        name: f"epoch {row['epoch']}, test accuracy {percent(row['test_accuracy'])}"
        for name, row in (("last", last), ("best", best))
    }
    other = "best" if file == "last" else "last"
    assert console.splitlines()[0] == (
        f"weights of {copied / file}.pt: {shown[file]}; {other}.pt is of {shown[other]}: {hint}"
    )


def test_predictions_stand_alone_on_stdout(copied, monkeypatch, capsys):
    from PIL import Image

    Image.new("L", (8, 8)).save("black.png")
    flags = ["--checkpoint", "best", "--predict", "black.png"]
    monkeypatch.setattr("sys.argv", ["resnet50_test.py", *flags])
    resnet50_test.main()
    printed = capsys.readouterr()
    assert printed.out.startswith("black.png: ")
    assert printed.out.count("\n") == 1
    assert printed.err.startswith(f"weights of {copied / 'best.pt'}: epoch ")


def test_a_checkpoint_within_an_epoch_says_so(here, monkeypatch):
    real = checkpoint.save

    def stop_after_the_first_epoch(path: Path, state: dict, **more) -> None:
        real(path, state, **more)
        if state["progress"]["step_in_epoch"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", stop_after_the_first_epoch)
    flags = [*WORSE_AT_THE_END, "--save_every", "25", "--out", "run"]
    run(resnet50_test, *flags, monkeypatch=monkeypatch, code=130)
    console = run(resnet50_test, "--checkpoint", "run", "--evaluate", monkeypatch=monkeypatch)
    assert ", and 2 steps of the next epoch; best.pt is of epoch 1" in console.splitlines()[0]


# -------------------------------------------------------------------- training from a checkpoint


def test_training_goes_on_from_the_best_checkpoint_in_a_folder_of_its_own(copied, monkeypatch):
    best = torch.load(copied / "best.pt", weights_only=True)["progress"]["epoch"]
    before = (copied / "metrics.jsonl").read_bytes()
    flags = ["--resume", copied, "--checkpoint", "best", "--lr", "0.01"]
    message = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "would overwrite; give --out" in message
    assert (copied / "metrics.jsonl").read_bytes() == before
    run(resnet50_test, *flags, "--out", "other", monkeypatch=monkeypatch)
    first, second = ranks.metrics(copied), ranks.metrics(Path("other"))
    assert second[:best] == first[:best]
    assert second[best]["lr"] == pytest.approx(first[best]["lr"] / 10)
    message = run(resnet50_test, *flags, "--out", "other", monkeypatch=monkeypatch, code=2)
    assert "--out other already holds a run" in message


def test_training_goes_on_from_best_where_last_is_damaged(copied, monkeypatch):
    shutil.copy(copied / "last.pt", copied / "last-1.pt")  # later than the best, whichever it is
    (copied / "last.pt").write_bytes(b"cut")
    flags = ["--resume", copied / "best.pt", "--epochs", "3"]
    message = run(resnet50_test, *flags, monkeypatch=monkeypatch, code=2)
    assert "(last-1.pt), which training on from there would overwrite" in message
    (copied / "last-1.pt").unlink()
    run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert len(ranks.metrics(copied)) == 3
    assert checkpoint.load(copied / "last.pt", "resnet50_test")["progress"]["epoch"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--checkpoint best", "nothing is to be done with it"),
        ("--checkpoint RUN/best.pt", "nothing is to be done with it"),
        ("--checkpoint RUN/best.pt --resume RUN", "with --resume it is best or last"),
        ("--checkpoint nowhere --evaluate", "--checkpoint nowhere: no such checkpoint"),
        ("--checkpoint best --out nowhere --evaluate", "--checkpoint nowhere/best.pt: no such"),
        ("--checkpoint best --out new --evaluate", "--checkpoint best: new has no best.pt"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused(flags, message, copied, monkeypatch):
    Path("new").mkdir()
    (Path("new") / "last.pt").write_bytes((copied / "last.pt").read_bytes())
    words = flags.replace("RUN", str(copied)).split()
    console = run(resnet50_test, *words, monkeypatch=monkeypatch, code=2)
    assert message in console
    assert len(console.splitlines()) == 1


def test_without_any_run_there_is_no_best_checkpoint(here, monkeypatch):
    console = run(
        resnet50_test, "--checkpoint", "best", "--evaluate", monkeypatch=monkeypatch, code=2
    )
    assert "--checkpoint best: no run of resnet50_test" in console
