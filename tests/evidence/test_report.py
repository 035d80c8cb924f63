"""Reports: what a page says of run folders, what it leaves out, and bad folders."""

import base64
import html
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree

import markupsafe
import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn
from torch.nn import functional as F

import errors
import ranks
from conftest import for_each
from distributed.world import World
from figures import report
from figures.run_logs import read_run
from trainers import FP32
from training.evaluation import MAX_CONFUSED_CLASSES, evaluate

ROW = {"step": 10, "samples": 640, "lr": 0.1, "batch_size": 64, "world_size": 2, "devices": 2}
ROW |= {"train_seconds": 2.0, "compile_seconds": 0.0, "train_loss": 2.0, "train_accuracy": 0.3}
ROW |= {"test_loss": 2.1, "test_accuracy": 0.25, "peak_memory_bytes": 2**30, "comm_bytes": 500_000}
FLAGS = {"dataset": "digits", "arch": "resnet8", "optimizer": "ngd", "lr": 0.1, "subset": 0.5}
FLAGS |= {"epochs": 2, "out": "runs/a", "data_dir": "./elsewhere"}
CONFIG = {"flags": FLAGS, "torch": "2.15.0", "device": "a processor, 1 threads"}
CONFIG |= {"precision": "bf16", "commit": "abc1234", "command": ["resnet50_test.py", "--ngd"]}
COUNTS = [[8, 2, 0], [1, 9, 0], [0, 5, 0]]
CONFUSION = {"epoch": 2, "classes": ["cat", "dog", "cow"], "test": COUNTS}


def rows(*changes) -> list:
    """Rows of metrics.jsonl, an epoch each."""
    return [
        {"epoch": n, **ROW, "seconds": 3.0 * n, "eval_seconds": n, "samples": 640 * n, **change}
        for n, change in enumerate(changes, 1)
    ]


TWO = rows({}, {"test_accuracy": 0.5, "train_loss": 1.5})


def write_run(folder, lines=TWO, *, flags=None, config=CONFIG, confusion=CONFUSION):
    """Write a run folder; None leaves a file out."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        content = {**config, "flags": {**config["flags"], **(flags or {})}}
        (folder / "config.json").write_text(json.dumps(content))
    if confusion is not None:
        (folder / "confusion.json").write_text(json.dumps(confusion))
    return folder


def render(*folders) -> str:
    """The report of some run folders, after a check that it loads nothing and runs nothing."""
    page = report.render([read_run(folder, folder.name) for folder in folders])
    assert not re.search(r"<(script|iframe|object)|<[^>]* on\w+=|@import|url\(|https?:", page)
    sources = re.findall(r'<[^>]* (?:src|href)="(.*?)"', page)
    assert all(source.startswith("data:") for source in sources)
    assert "default-src 'none';" in page
    return page


def text_of(page: str) -> str:
    """What a reader sees of a page, cells apart by spaces."""
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def text_of_charts(page: str) -> str:
    sources = re.findall(r'src="data:image/svg\+xml;base64,(.*?)"', page)
    drawings = [ElementTree.fromstring(base64.b64decode(source)) for source in sources]
    texts = [text for drawing in drawings for text in drawing.itertext() if text.strip()]
    return "|".join([*texts, ""])


def titles(page: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)]


def test_a_run_is_described(tmp_path):
    page = render(write_run(tmp_path / "my-run"))
    text = text_of(page)
    assert "<title>resnet8 on 50 % of digits</title>" in page
    for part in (
        "last result epoch 2, test accuracy 50.00 %",
        "best result epoch 2, test accuracy 50.00 %, chosen on the test set, so it is optimistic",
        "time 6 s device-hours 0.003333 samples/s 320 peak memory 1.00 GiB",  # on 2 devices
        "command resnet50_test.py --ngd commit abc1234",
        "all 6 flags flag my-run --dataset digits --arch resnet8 --optimizer ngd --lr 0.1",
        "cat 88.89 80.00 84.21 10",  # 8 of 9 taken for cats, 8 of 10 cats
        "cow 0.00 0.00 0.00 5 mean, sum 48.38 56.67 51.15 25",
        "cat dog cow cat 8 2 dog 1 9 cow 5",  # the matrix
    ):
        assert part in text
    assert "--out" not in text
    assert "--data_dir" not in text, "known data may lie anywhere"
    assert titles(page)[:2] == ["Over epochs", "Over training time"]
    assert "Settings that change" not in titles(page)
    assert render(tmp_path / "my-run") == page, "the same folder gives the same file"


def test_text_from_files_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>&'
    confusion = {**CONFUSION, "classes": [evil, "b", "c"]}
    worst = {"row": 1, "loss": 2.0, "labels": [[evil, 0.1]], "predicted": [], "text": evil}
    scores = {"accuracy": 0.5, "temperature": 1.2}
    result = {"epoch": 1, "eval_set": evil, "scores": scores, "worst": [worst]}
    flags = {"arch": evil, "weights": evil, "dataset": evil}
    run = write_run(tmp_path / "a<b>&'\"$x_", flags=flags, confusion=confusion)
    (run / "result.json").write_text(json.dumps(result))
    assert "after epoch 1 time" in text_of(render(run)), "probabilities of an earlier epoch"
    assert f"label {evil} 10.0 % predicted no label loss 2.000, row 1" in text_of(render(run))
    for page in (render(run), render(run, write_run(tmp_path / "_b"))):
        assert str(markupsafe.escape(evil)) in page
        assert evil in text_of(page)


def test_several_runs_are_compared(here, capsys):
    write_run(here / "one" / "run", flags={"lr": 0.1, "out": "x", "ema": 0.9})
    write_run(here / "stamped", rows({"lr": 0.2}), flags={"lr": 0.2})
    (here / "two").mkdir()
    (here / "two" / "run").symlink_to(here / "stamped")
    report.main(["one/run", "two/run", "--out", "pages/a.html"])
    assert capsys.readouterr().out == "pages/a.html\n"
    page = (here / "pages" / "a.html").read_text(encoding="utf-8")
    text = text_of(page)
    assert "Flags that differ flag one/run two/run --lr 0.1 0.2 Classes" in text
    assert titles(page).count("Classes of one/run") == 1
    assert "Classes of two/run" not in titles(page), "it has no epoch 2, of which the counts are"
    assert "training loss|" in text_of_charts(page)
    for words, file in (
        (["stamped"], "stamped/report.html"),
        (["one/run", "two/run"], "report.html"),
    ):
        report.main(words)
        assert capsys.readouterr().out == f"{file}\n"
        assert (here / file).exists()


def test_what_changes_is_drawn_and_one_bad_epoch_does_not_flatten_a_loss(tmp_path):
    changes = [{"batch_size": size, "noise_scale": size, "mean_lambda": 0.8} for size in (64, 128)]
    changes += [{"train_loss": 2.0 * 0.8**epoch} for epoch in range(9)]
    run = write_run(tmp_path / "run", rows(*changes))
    page = render(run)
    assert "Settings that change" in titles(page)
    texts = text_of_charts(page)
    assert "global batch / samples" in texts
    assert "gradient noise scale / samples" in texts
    assert "learning rate" not in texts, "it is constant"
    assert "|10000|" not in texts
    changes[5]["train_loss"], changes[7]["train_loss"] = 3e4, math.nan
    bad = render(write_run(tmp_path / "bad", rows(*changes)))
    assert "|10000|" in text_of_charts(bad)


def test_what_is_missing_or_of_another_version_is_left_out(tmp_path):
    losses = ("1.0", "NaN", "Infinity", "true", "2.0")
    lines = [{"epoch": n, "train_loss": json.loads(x), "lr": "a"} for n, x in enumerate(losses, 1)]
    run = write_run(tmp_path / "my-run", lines, config=None, confusion=None)
    assert [row.get("train_loss") for row in read_run(run).rows] == [1.0, *[None] * 3, 2.0]
    page = render(run)
    assert "<title>my-run</title>" in page
    assert "Over training time" not in titles(page)
    for word in ("best", "accuracy", "device-hours", "nan", "Classes"):
        assert word not in text_of(page)


LINE = json.dumps(TWO[0])


def test_a_damaged_run_folder_or_a_wrong_command_is_one_line(here, capsys):
    def check(words: str, message: str, name: str = "config.json", content: str = "{}") -> None:
        shutil.rmtree(here / "run", ignore_errors=True)
        path = write_run(here / "run") / name
        path.unlink() if content == "none" else path.write_text(content)
        assert errors.exit_code(lambda: report.main(words.split())) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert [path.name for path in here.iterdir()] == ["run"], "nothing is written"

    log, not_whole = "metrics.jsonl", "is not a whole row"
    cases = [
        ("run", "run holds no metrics.jsonl; give run folders", log, "none"),
        ("run", "metrics.jsonl is empty: the run has not finished an epoch", log, ""),
        ("run", f"metrics.jsonl, line 2: {not_whole}", log, f"{LINE}\n{LINE[:40]}"),
        ("run", "config.json: holds no JSON object", "config.json", "[]"),
        ("run nowhere", "nowhere is no folder; give run folders"),
        ("run --out report.txt", "--out report.txt: the name must end in .html"),
        ("run --out run/metrics.jsonl/a.html", "cannot be written"),
    ]
    for_each(cases, check)


class Labelled(list):
    """Labels of rows whose inputs are their numbers."""

    lengths = None

    def batches(self, row_batches):
        return ((rows, torch.tensor(self)[rows]) for rows in row_batches)


def check_confusion(world: World) -> None:
    settings = {"precision": FP32, "world": world, "batch_size": 2}
    logits = torch.randn(51, 8, generator=torch.Generator().manual_seed(world.size))
    logits[:, 7] = -9.0  # neither a label nor predicted
    labels = Labelled([int(row.argsort()[7 - n % 7]) for n, row in enumerate(logits)])
    result, of_many = (
        evaluate(nn.Embedding.from_pretrained(each), labels, num_classes=len(each.T), **settings)
        for each in (logits, F.pad(logits, (0, MAX_CONFUSED_CLASSES), value=-9.0))
    )
    guesses = logits.argmax(1)
    assert result.confusion is not None
    counts = sklearn.metrics.confusion_matrix(labels, guesses, labels=range(8))
    assert result.confusion.tolist() == counts.tolist()
    f1 = sklearn.metrics.f1_score(labels, guesses, average="macro")
    top5 = sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(8))
    assert (of_many.macro_f1, of_many.confusion) == (result.macro_f1, None)
    assert (result.macro_f1, result.top5_accuracy) == (pytest.approx(f1), top5)
    assert result.accuracy == np.trace(counts) / 51
    assert 0.1 < result.accuracy < result.top5_accuracy < 0.9


def test_confusion_counts_every_row_once():
    check_confusion(World())
    ranks.run_ranks(check_confusion, 2)


def test_a_run_writes_what_a_report_shows(runs):
    for folder in runs.values():
        run = read_run(folder)
        assert run.confusion is not None
        accuracy = ranks.metrics(folder)[-1]["test_accuracy"]
        counts = run.confusion.counts
        assert np.trace(counts) / counts.sum() == pytest.approx(accuracy, abs=1e-12)
        page, row = render(folder), ranks.metrics(folder)[-1]
        assert f" {100 * row['test_macro_f1']:.2f} {counts.sum()} Rows are" in text_of(page)
        assert ("test_top5_accuracy" in row) == (len(counts) > 5)
        assert "precision fp32" in text_of(page)
        assert re.search(r'row">--dataset</th><td>\w+</td>', page)
