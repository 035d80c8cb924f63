"""Several labels a row: files, metrics, predictions; and images that a table lists."""

import csv
import json
import re
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics
from sklearn.datasets import load_digits
from torch.nn import functional as F

import ranks
from cli import factory
from conftest import LABELS, SHORT, run, write, write_headlines, write_images
from errors import InputError
from figures.report import render
from figures.run_logs import read_run
from input_pipeline import csv_tables
from input_pipeline.csv_tables import ColumnChoice
from input_pipeline.text_datasets import read_text_files, read_text_splits
from mixup import Mix
from training.classifier import load
from training.losses import BinaryCrossEntropy

SEPARATED = "--label_separator |"
IMAGES = f"--dataset folder --arch resnet8 {SHORT} --bs 16 --image_size 8 --workers 0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a run on texts of several labels, and what it printed."""
    folder = write_headlines(tmp_path_factory.mktemp("labels"))
    flags = f"{LABELS} --mixup mixup --class_weights balanced --label_smoothing 0.1"
    return folder, run("texts", flags, "--data_dir", folder, "--out", folder / "run")


def targets_of(folder, classes: list[str]) -> tuple[list[str], np.ndarray]:
    """The texts of test.csv, and (rows, classes) whether each has the label."""
    with open(folder / "test.csv", newline="") as file:
        _, *rows = csv.reader(file)
    return [t for t, _ in rows], np.array([[c in s.split(" | ") for c in classes] for _, s in rows])


def test_a_run_reports_what_scikit_learn_measures(trained):
    folder, console = trained
    classifier = load(folder / "run")
    texts, targets = targets_of(folder, classifier.classes)
    found = classifier.probabilities(texts).numpy()
    row = json.loads((folder / "run" / "metrics.jsonl").read_text())
    precisions = metrics.average_precision_score(targets, found, average=None)
    expected = {
        "map": precisions.mean(),
        "accuracy": metrics.accuracy_score(targets, found > 0.5),
        "micro_f1": metrics.f1_score(targets, found > 0.5, average="micro"),
        "macro_f1": metrics.f1_score(targets, found > 0.5, average="macro"),
        "loss": F.binary_cross_entropy(torch.tensor(found), torch.tensor(targets).float()).item()
        * len(classifier.classes),
    }
    assert {name: row[f"test_{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert row["test_map"] > 0.8
    assert json.loads((folder / "run" / "result.json").read_text())["rows"] == len(texts)
    auroc = metrics.roc_auc_score(targets, found, average="macro")
    gaps = np.bincount((15 * found).astype(int).ravel(), (targets - found).ravel())
    figures = f"average precision {precisions.mean():.2%}, calibration error "
    figures = f"AUROC {auroc:.2%}, {figures}{abs(gaps).sum() / found.size:.2%}".replace("%", " %")
    assert f"on the test set: {figures}\n" in console
    page = render([read_run(folder / "run")])
    counts = [2 * (targets & (found > 0.5)).sum(0), (targets + 1.0 * (found > 0.5)).sum(0)]
    for name, f1 in zip(classifier.classes, 100 * counts[0] / counts[1]):
        assert re.search(rf'row">{name}</th>(<td>[\d.]+</td>){{2}}<td>{f1:.2f}</td>', page)
    assert len(re.findall("<blockquote>", page)) == 12
    evaluated = run("texts", "--evaluate --checkpoint", folder / "run")
    for name, precision in zip(classifier.classes, precisions):
        line = f"{name:>20}  AP {100 * precision:6.2f} %  F1"
        assert line in console
        assert line in evaluated
    assert "rows without a label: 7 of 80 in test, 48 of 400 in train" in console
    assert re.search(r"a logistic regression for each label, mAP 9\d\.\d\d % on the test", console)
    assert re.search(r"last.pt: [\d.]+ points (ahead of|behind) the baseline", console)


def test_predictions_and_exports_have_the_labels_above_the_threshold(
    trained, tmp_path, monkeypatch
):
    folder, _ = trained
    monkeypatch.setenv("HOME", str(folder))
    classifier = load("~/run")
    texts, _ = targets_of(folder, classifier.classes)
    labels = classifier.predict(texts)
    assert {len(each) for each in labels} >= {1, 2}
    everything = classifier.predict(texts, threshold=0.0)
    assert everything == [classifier.classes] * 80
    for suffix in ("jsonl", "csv"):
        run("texts", "--checkpoint", folder / "run", "--predict", folder / "test.csv",
            "--predict_out", tmp_path / f"out.{suffix}")  # fmt: skip
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["predicted"] for line in lines] == labels
    with open(tmp_path / "out.csv", newline="") as file:
        assert [row["predicted"] for row in csv.DictReader(file)] == list(map("|".join, labels))
    run("texts", "--checkpoint", folder / "run", "--export", tmp_path / "model.pt2")
    more = {"metadata.json": ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=more)
    assert "sigmoid" in json.loads(more["metadata.json"])["output"]


def test_labels_of_csv_and_of_lists_in_jsonl_are_read_alike(tmp_path):
    rows: list[tuple[list[str], str]] = [(["b", "a"], "one"), ([], "two, three"), (["b"], "four")]
    table = "".join(f'{"|".join(names)},"{text}"\n' for names, text in rows)
    lines = "".join(json.dumps({"label": n, "text": t}) + "\n" for n, t in rows)
    for name, text in (("csv", table), ("jsonl", lines)):
        folder = write(tmp_path / name, **{f"train__{name}": text, f"test__{name}": text})
        splits, classes = read_text_splits("csv", str(folder), choice=ColumnChoice(separator="|"))
        assert (classes, list(splits["test"].texts)) == (["a", "b"], ["one", "two, three", "four"])
        assert splits["train"].labels.tolist() == [[1, 1], [0, 0], [0, 1]]
        [path] = folder.glob("test.*")
        to_classify = ColumnChoice(texts=("2" if name == "csv" else "text",), separator="|")
        found = read_text_files(path, to_classify)[0][path]
        assert [*found.values()] == ["one", "two, three", "four"], "as in training"
    empty = "label,text\na|b,x\n,\nb,y\n,\n"  # rows without a label and a text are rows
    folder = write(tmp_path / "empty", train__csv=empty, test__csv=empty)
    splits, _ = read_text_splits("csv", str(folder), choice=ColumnChoice(separator="|"))
    assert splits["test"].labels.tolist() == [[1, 1], [0, 0], [0, 1], [0, 0]]
    lines = '{"label": ["a|b", "c"], "text": "x"}\n{"label": ["c"], "text": "y"}\n'
    folder = write(tmp_path / "names", train__jsonl=lines, test__jsonl=lines)
    splits, classes = read_text_splits("csv", str(folder), choice=ColumnChoice(separator="|"))
    assert classes == ["a|b", "c"], "a name in a list is a label as it is"
    lists = lines.replace('"x"', '["x", "y"]')
    folder = write(tmp_path / "texts", train__jsonl=lists, test__jsonl=lists)
    with pytest.raises(InputError, match=r"column 2 \(text\) is a list"):
        read_text_splits("csv", str(folder), choice=ColumnChoice(separator="|"))


def test_the_loss_is_the_sum_over_the_labels_and_linear_in_mixed_targets():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 3), torch.randint(2, (5, 3), dtype=torch.uint8)
    weights = torch.tensor([1.0, 2.0, 3.0])
    p, q = logits.sigmoid(), 0.9 * labels + 0.05
    expected = -(weights * q * p.log() + (1 - q) * (1 - p).log()).sum(1).mean()
    torch.testing.assert_close(
        BinaryCrossEntropy(0.1, weights).compare(logits, labels)[0], expected
    )
    labels[:, 0] = torch.tensor([1, 0, 0, 0, 0])
    job, settings = mock.Mock(), mock.Mock(class_weights="balanced", balanced_sampling=False)
    job.world.device = "cpu"
    data = mock.Mock(labels=labels, metadata={"classes": ["a", "b", "c"]})
    assert factory.class_weights(settings, job, data)[0] == 4, "rows without / rows with the label"
    loss, mix = BinaryCrossEntropy(), Mix(torch.tensor([1, 0, 3, 4, 2]), torch.rand(5))
    found = loss.compare_mixed(logits, labels, mix)
    each = [
        mix.weight[i] * loss.compare(logits[i : i + 1], labels[i : i + 1]).loss
        + (1 - mix.weight[i]) * loss.compare(logits[i : i + 1], labels[j : j + 1]).loss
        for i, j in enumerate(mix.partner.tolist())
    ]
    torch.testing.assert_close(found.loss, torch.stack(each).mean())


def write_digits(folder):
    """Digits in scans/, which train.csv and test.csv list with the labels even and large."""
    (folder / "scans").mkdir(parents=True)
    data = load_digits()
    digits = data.target.tolist()
    for part, rows in (("train", range(96)), ("test", range(96, 128))):
        lines = ["id,image,label"]
        for i in rows:
            pixels = (data.images[i] * 15).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "scans" / f"{i}.png")
            names = ["even"] * (digits[i] % 2 == 0) + ["large"] * (digits[i] > 4)
            lines.append(f"{i},scans/{i}.png,{'|'.join(names)}")
        (folder / f"{part}.csv").write_text("\n".join([*lines, ""]))
    return folder


def test_images_of_a_table_have_one_label_or_several(tmp_path):
    folder = write_digits(tmp_path / "digits")
    console = run("images", IMAGES, SEPARATED, "--data_dir", folder, "--out", tmp_path / "run")
    bare = {part: (folder / f"{part}.csv").read_text().count(",\n") for part in ("test", "train")}
    assert f"a label: {bare['test']} of 32 in test, {bare['train']} of 96 in train" in console
    assert load(tmp_path / "run").predict([folder / "scans" / "0.png"], threshold=0) == [
        ["even", "large"]
    ]
    folder = write_images(tmp_path / "noise", ["cat", "dog"], rows=16, size=8)
    files = sorted((folder / "train").glob("*/*.png"))
    lines = [f"{file.relative_to(folder)},{file.parent.name}" for file in files[4:]]
    named = ["--label_column fine_kind", "--data_dir", folder, "--out", tmp_path / "one"]
    assert "--label_column is for tables" in run("images", IMAGES, *named, code=2)
    (folder / "train.csv").write_text("\n".join(["image,Fine Kind", *lines]))
    console = run("images", IMAGES, *named)
    assert "28 training samples" in console, "the table decides what is in train/"
    console = run("images", "--resume", tmp_path / "one", SEPARATED, "--epochs 2", code=2)
    assert "the run was trained with one label a row" in console


@pytest.mark.ranks
def test_two_ranks_and_a_resumed_run_measure_what_one_process_does(tmp_path):
    folder = write_headlines(tmp_path / "texts")
    flags = f"transformer_test.py {LABELS} --data_dir {folder} --val_fraction 0.1 --subset 0.5"
    flags += " --best_by auroc"
    flags += " --lr_schedule constant --warmup 0 --dropout 0 --token_dropout 0 --no-baseline"
    ranks.run(f"{flags} --epochs 2 --out {tmp_path / 'whole'}", tmp_path / "a")
    ranks.run(f"{flags} --bs 4 --epochs 1 --out {tmp_path / 'two'}", tmp_path / "b", 2)
    ranks.run(f"transformer_test.py --resume {tmp_path / 'two'} --epochs 2", tmp_path / "c", 2)
    alone, together = (ranks.metrics(tmp_path / name) for name in ("whole", "two"))
    names = [name for name in alone[0] if name.startswith(("val_", "test_", "train_"))]
    assert {"val_map", "val_auroc", "test_micro_f1"} <= {*names}
    one, two = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "two")
    )
    assert one["scores"] == pytest.approx(two["scores"], rel=1e-3)
    assert [each["row"] for each in one["worst"][:3]] == [each["row"] for each in two["worst"][:3]]
    for one, two in zip(alone, together, strict=True):
        assert [one[n] for n in names] == pytest.approx([two[n] for n in names], rel=1e-3)


def test_what_does_not_go_together_is_refused_in_one_line(refused, tmp_path):
    folder = write_digits(tmp_path / "digits")
    base = f"{IMAGES} --data_dir {folder} --out {tmp_path / 'run'}"
    for words, names in (
        ("--balanced_sampling", "it needs one label a row"),
        ("--label_noise 0.2", "it needs one label a row"),
        ("--mixup inter_class", "it needs one label a row"),
        ("--meta_learning", "it needs one label a row"),
        ("--dataset digits", "each row of that data has one label"),
    ):
        refused("images", f"{SEPARATED} {words}", names, base)
    refused("images", "--best_by map", "measured where rows may have several labels", base)
    (bare := tmp_path / "bare").mkdir()
    write(bare, train__csv="label,text\n" + "a|b,x\nb,y\n" * 8, test__csv="label,text\n,x\n,y\n")
    for measure in ("map", "auroc"):
        words = f"--data_dir {bare} --best_by {measure}"
        refused("texts", words, "the test rows are all of one class or of none", LABELS)
    write(bare, train__csv="label,text\n" + "\"['a', 'b']\",x\nb,y\n" * 8)
    refused("texts", f"--data_dir {bare}", "row 2: the label ['a', 'b'] is a list", LABELS)
    texts = ["['a', 'b']", '["a"]', "[a, b]", "[]", "[a]|[b]", "[spam]"]
    assert [bool(csv_tables.LIST.fullmatch(text)) for text in texts] == [True] * 4 + [False] * 2
    refused("images", "", "train.csv, row 3: the label (column 3 (label)) is empty", base)
    (folder / "scans" / "7.png").unlink()
    refused("images", SEPARATED, f"train.csv, row 9: there is no image {folder}/scans/7.png", base)
    (folder / "test.csv").write_text("file,label\na.png,even\n")
    refused("images", SEPARATED, "test.csv: the first row must name the columns image and", base)
    noise = write_images(tmp_path / "noise", ["cat", "dog"], rows=2, size=8)
    refused("images", f"{SEPARATED} --data_dir {noise}", "in the folder of its class has one", base)
