"""AUROC and others of a run, the temperature of its probabilities, and its worst rows."""

import csv
import json
import re
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch.nn import functional as F

from conftest import SHORT, run, write_images
from figures.report import render
from figures.run_logs import read_run
from input_pipeline.text_datasets import AGNEWS_CLASSES, read_headlines
from training import scores
from training.checkpoint import FORMAT
from training.classifier import Classifier, load
from training.scores import ScoredRows, describe_scores

TEXTS = f"--dataset csv --width 8 --heads 2 --depth 1 {SHORT} --bs 8 --no-baseline"
LINE = "probabilities of last.pt on the test set: "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A folder of texts with a validation set, below it a run, and what that printed."""
    folder = tmp_path_factory.mktemp("texts")
    split = read_headlines()["train"]
    for part, rows in (("train", range(240)), ("val", range(240, 320)), ("test", range(320, 400))):
        with open(folder / f"{part}.csv", "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["text", "label"])
            named = ((split.texts[row], AGNEWS_CLASSES[split.labels[row]]) for row in rows)
            lines.writerows(pair for pair in named if part == "train" or pair[1] != "Business")
    words = f"{TEXTS} --best_by auroc --data_dir {folder} --out {folder / 'run'}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return folder, run("texts", words)


def rows_of(folder, part: str, classifier: Classifier) -> tuple[list[str], np.ndarray]:
    """The texts of a file, and the numbers of their classes."""
    with open(folder / f"{part}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [classifier.classes.index(row["label"]) for row in rows]
    return [row["text"] for row in rows], np.array(numbers)


def test_the_figures_are_those_of_scikit_learn_for_the_probabilities_of_load(trained):
    folder, console = trained
    classifier = load(folder / "run")
    texts, labels = rows_of(folder, "test", classifier)
    p = classifier.probabilities(texts).numpy()
    occurring = np.unique(labels)
    assert len(occurring) == 3, "a class that is missing is left out of the means"
    pairs = [(labels == number, p[:, number]) for number in occurring]
    confidence, right = p.max(1), p.argmax(1) == labels
    gaps = np.bincount((15 * confidence).astype(int), right - confidence)  # of each of 15 bins
    expected = {
        "auroc": np.mean([metrics.roc_auc_score(*pair) for pair in pairs]),
        "average_precision": np.mean([metrics.average_precision_score(*pair) for pair in pairs]),
        "kappa": metrics.cohen_kappa_score(labels, p.argmax(1)),
        "calibration_error": abs(gaps).sum() / len(p),
        "temperature": classifier.card.temperature,
    }
    result = json.loads((folder / "run" / "result.json").read_text())
    found = dict(result["scores"])
    assert found.pop("uncalibrated_error") > found["calibration_error"]
    assert found == pytest.approx(expected, abs=1e-5)
    [row] = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["test_auroc"] == found["auroc"]
    line = describe_scores(result["scores"])
    assert f"{LINE}{line}" in console
    assert f"probabilities: {line}" in run("texts", "--evaluate --checkpoint", folder / "run")
    (folder / "run" / "result.json").unlink()  # as a kill before it was written
    run("texts", "--resume", folder / "run")
    assert json.loads((folder / "run" / "result.json").read_text()) == result
    losses = -np.log(p[range(len(p)), labels])
    worst = np.argsort(-losses)[:12]
    assert [each["row"] - 1 for each in result["worst"]] == worst.tolist()
    for each, number in zip(result["worst"], worst):
        name = classifier.classes[labels[number]]
        assert each["labels"] == [[name, pytest.approx(p[number, labels[number]], abs=1e-5)]]
        assert each["loss"] == pytest.approx(losses[number], abs=1e-4)
        assert texts[number].startswith(each["text"].removesuffix("..."))


def test_the_temperature_is_that_of_the_validation_rows_and_moves_no_prediction(trained, tmp_path):
    folder, _ = trained
    classifier = load(folder / "run" / "best.pt")
    texts, labels = rows_of(folder, "val", classifier)
    with torch.no_grad():
        logits = classifier.model(classifier.prepare(texts)).double()
    grid = torch.logspace(-6, 6, 6001, base=2, dtype=torch.float64)
    target = torch.as_tensor(labels)
    sums = [F.cross_entropy(logits / t, target, reduction="sum") + t.log() ** 2 / 2 for t in grid]
    best = grid[torch.stack(sums).argmin()].item()
    assert classifier.card.temperature == pytest.approx(best, rel=2e-3)
    assert not 0.98 < best < 1.02
    assert torch.equal(classifier.probabilities(texts).argmax(1), logits.argmax(1))
    file = tmp_path / "model.pt2"
    run("texts", "--checkpoint", folder / "run" / "best.pt", "--export", file)
    program = torch.export.load(file).module()
    inputs = classifier.prepare(texts[:2])
    torch.testing.assert_close(program(inputs).softmax(1), classifier.probabilities(texts[:2]))
    content = torch.load(folder / "run" / "last.pt", weights_only=True)
    assert content["format"] == FORMAT
    del content["progress"]["temperature"]
    torch.save(content, tmp_path / "older.pt")
    assert load(tmp_path / "older.pt").card.temperature == 1


def test_without_validation_rows_nothing_is_fitted_and_a_report_shows_the_worst_images(tmp_path):
    folder = write_images(tmp_path / "<b>noise", ["cat", "dog"], rows=8, size=120)
    words = f"--dataset folder --arch resnet8 {SHORT} --bs 8 --image_size 112 --workers 0"
    console = run("images", words, "--data_dir", folder, "--out", tmp_path / "run")
    [line] = [each for each in console.splitlines() if each.startswith(LINE)]
    assert "AUROC" in line
    assert "temperature" not in line
    assert load(tmp_path / "run").card.temperature == 1
    page = render([read_run(tmp_path / "run")])
    assert len(re.findall(r'src="data:image/png;base64,', page)) == 12
    assert "<b>noise" not in page
    assert len(page) < 600_000


def test_figures_that_do_not_exist_are_left_out(refused, tmp_path, monkeypatch):
    def scored(logits, labels) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return ScoredRows(torch.tensor(logits), torch.tensor(labels)).scores()

    one = scored([[1.0, 2.0], [0.0, 3.0]], [1, 1])
    assert one.keys() == {"average_precision", "calibration_error"}, "of one class"
    two = scored([[1.0, 0.0], [0.0, 3.0], [0.0, 1.0]], [1, 1, 0])
    assert two["auroc"] == 0.5
    assert two["average_precision"] == pytest.approx(5 / 6), "of the second of two classes"
    assert scored([[1.0, torch.nan]], [1]) == {}
    assert describe_scores({}) == "a logit is not finite"
    monkeypatch.setattr(scores, "MAX_LOGITS", 99)
    folder = write_images(tmp_path / "noise", ["cat", "dog"], rows=50, size=8)
    words = f"--dataset folder --arch resnet8 {SHORT} --image_size 8 --workers 0 --no-baseline"
    words += f" --data_dir {folder} --out {tmp_path / 'run'}"
    refused("images", "--best_by auroc", "left out beyond 1,000 classes", words)
    assert f"{LINE}{scores.TOO_MANY}" in run("images", words)
