"""Reports: what a page says of run folders, what it leaves out, bad folders, and a real browser."""

from __future__ import annotations

import html
import html.parser
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import errors
import ranks
from backends.precision import Precision
from cli import options
from distributed.world import World
from figures import html_page, report
from figures.reported_run import names_of, read_run
from figures.svg_charts import TICKS, Axis, Series, line_chart, nice_step
from training.evaluation import evaluate

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "link", "img", "br"}  # elements of HTML that have no end
ROW = {
    "step": 10,
    "samples": 640,
    "seconds": 3.0,
    "train_seconds": 2.0,
    "compile_seconds": 0.0,
    "train_loss": 2.0,
    "train_accuracy": 0.3,
    "test_loss": 2.1,
    "test_accuracy": 0.25,
    "lr": 0.1,
    "batch_size": 64,
    "world_size": 2,
    "devices": 2,
    "peak_memory_bytes": 2**30,
    "comm_bytes": 500_000,
}
FLAGS = {"dataset": "digits", "arch": "resnet8", "optimizer": "ngd", "lr": 0.1, "subset": 0.5}
CONFIG = {
    "flags": {**FLAGS, "epochs": 2, "out": "runs/a", "data_dir": "./data"},
    "torch": "2.15.0",
    "python": "3.11",
    "device": "a processor, 1 threads",
    "precision": "bf16",
    "commit": "abc1234",
    "command": ["resnet50_test.py", "--ngd"],
}
COUNTS = [[8, 2, 0], [1, 9, 0], [0, 5, 0]]
CONFUSION = {"epoch": 2, "classes": ["cat", "dog", "cow"], "test": COUNTS}


def rows(*changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, an epoch each."""
    return [
        {"epoch": n, **ROW, "seconds": 3.0 * n, "eval_seconds": n, "samples": 640 * n, **change}
        for n, change in enumerate(changes, 1)
    ]


TWO = rows({}, {"test_accuracy": 0.5, "train_loss": 1.5})


def write_run(
    folder: Path,
    lines: Sequence[Mapping[str, Any]] = TWO,
    *,
    flags: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = CONFIG,
    confusion: Mapping[str, Any] | None = CONFUSION,
) -> Path:
    """Write a run folder; None leaves a file out."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        content = {**config, "flags": {**config["flags"], **(flags or {})}}
        (folder / "config.json").write_text(json.dumps(content))
    if confusion is not None:
        (folder / "confusion.json").write_text(json.dumps(confusion))
    return folder


def render(*folders: Path) -> str:
    """The report of some run folders, after a check that it is well formed."""
    page = report.render([read_run(f, n) for f, n in zip(folders, names_of(folders))])
    check_page(page)
    return page


def check_page(page: str) -> None:
    """Check that all elements are closed, and that nothing is loaded from anywhere."""
    stack: list[str] = []

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "iframe", "object")
            for name, value in attributes:
                assert not name.startswith("on")
                if name in ("src", "href"):
                    assert value is not None
                    assert value.startswith("data:")
            if tag not in VOID:
                stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag

    Checker().feed(page)
    assert not stack
    assert not re.search(r"@import|url\(|https?:", page)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)


def text_of(page: str) -> str:
    """What a reader sees of a page, cells apart by spaces."""
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def titles(page: str) -> list[str]:
    return [html.unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)]


# -------------------------------------------------------------------- content


def test_a_run_is_described(tmp_path):
    page = render(write_run(tmp_path / "my-run"))
    text = text_of(page)
    assert "<title>resnet8 on 50 % of digits</title>" in page
    for part in (
        "Optimizer ngd.",
        "after the last epoch test 50.00 %",
        "best epoch: 2 test 50.00 % chosen on the test set, so it is optimistic",
        "device-hours 0.003333",  # 6 s on 2 devices
        "samples/s 320",
        "peak memory 1.00 GiB",
        "command resnet50_test.py --ngd",
        "commit abc1234",
        "device a processor, 1 threads precision bf16 processes 2 devices 2 time 6 s",
        "sent by each process 1.0 MB",
        "--dataset digits cifar10",
        "--lr 0.1 0.08",
        "--subset 0.5 1",
    ):
        assert part in text
    assert "--out" not in text
    assert "--data_dir" not in text, "its default depends on the environment"
    assert "--optimizer ngd sgd" in text
    assert titles(page) == [
        "Over epochs",
        "Over training time",
        "Flags that are not at their defaults",
        "Classes",
        "Environment and cost",
    ]
    assert "training, epoch 2: 1.5<" in page
    assert "test, training time / s 4: 50<" in page, "without evaluation"


def test_scores_of_classes(tmp_path):
    text = text_of(render(write_run(tmp_path / "run")))
    assert "On the test set after epoch 2." in text
    assert "cat 88.89 80.00 84.21 10" in text  # 8 of 9 taken for cats, 8 of 10 cats
    assert "dog 56.25 90.00 69.23 10" in text
    assert "cow – 0.00 0.00 5" in text, "the precision of what was never predicted is not defined"
    assert "mean of the classes 72.57 56.67 51.15 25" in text
    assert "cat dog cow cat 8 2 dog 1 9 cow 5" in text  # the matrix


def test_many_classes_are_listed_by_their_mistakes(tmp_path):
    names = [f"class{number}" for number in range(60)]
    counts = np.diag([5] * 60)
    counts[3, 7], counts[4, 8] = 4, 2
    confusion = {"epoch": 2, "classes": names, "val": counts.tolist()}
    page = render(write_run(tmp_path / "run", confusion=confusion))
    assert "<summary>all 60 classes</summary>" in page
    assert "rows class3 class7 4 class4 class8 2" in text_of(page)
    assert '<table class="confusion">' not in page


def test_the_best_epoch_is_the_first_with_the_highest_validation_accuracy(tmp_path):
    changes = [{"val_accuracy": value} for value in (0.5, 0.7, 0.7)]
    text = text_of(render(write_run(tmp_path / "run", rows(*changes))))
    assert "best epoch: 2 test 25.00 %, validation 70.00 % chosen by validation rows" in text


def test_text_from_files_is_escaped(tmp_path):
    evil = '<script>alert("1")</script>&'
    confusion = {**CONFUSION, "classes": [evil, "b", "c"]}
    flags = {"arch": evil, "weights": evil, "dataset": evil}
    run = write_run(tmp_path / "a<b>&'\"", flags=flags, confusion=confusion)
    other = write_run(tmp_path / "b", confusion=confusion)
    for page in (render(run), render(run, other)):
        assert "<script" not in page
        assert html.escape(evil) in page
        assert evil in text_of(page)


def test_several_runs_are_compared(tmp_path):
    folders = [
        write_run(tmp_path / "one" / "run", flags={"lr": 0.1, "out": "x", "ema": 0.9}),
        write_run(tmp_path / "two" / "run", rows({"lr": 0.2}), flags={"lr": 0.2}),
    ]
    page = render(*folders)
    text = text_of(page)
    assert "<title>resnet8 on 50 % of digits: 2 runs</title>" in page
    assert "one/run 2 50.00 50.00 2 test 6 s" in text
    assert "two/run 1 of 2 25.00 25.00 1 test 3 s" in text
    flags = text[text.index("Flags that differ") : text.index("Classes one/run")]
    assert flags == "Flags that differ flag one/run two/run --lr 0.1 0.2 "
    assert "Learning rate and batch size" in titles(page)
    assert page.count("<h3>") == 1, "the second run has no epoch 2, of which the counts would be"
    for name in ("one/run", "two/run"):
        assert f"{name}, epoch 1: " in page


def test_equal_runs_say_so(tmp_path):
    page = render(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert "The runs have the same flags." in text_of(page)


def test_policies_are_drawn(tmp_path):
    changes = [{"batch_size": size, "noise_scale": 80.0, "mean_lambda": 0.8} for size in (64, 128)]
    run = write_run(tmp_path / "run", rows(*changes))
    picture = np.zeros((4, 4, 3))
    matplotlib.image.imsave(run / "policy.png", picture)
    page = render(run)
    assert {"Learning rate and batch size", "Mixing of samples"} <= set(titles(page))
    for ylabel in ("global batch / samples", "gradient noise scale / samples", "mean lambda"):
        assert f">{ylabel}</text>" in page
    assert "learning rate of the last step" not in page, "it is constant"
    assert page.count('src="data:image/png;base64,') == 1


def test_the_same_runs_give_the_same_page(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    assert render(*folders) == render(*folders)


# -------------------------------------------------------------------- missing parts


def test_what_is_missing_is_left_out(tmp_path):
    lines = [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": None, "lr": "high"}]
    page = render(write_run(tmp_path / "my-run", lines, config=None, confusion=None))
    assert "<title>my-run</title>" in page
    assert titles(page) == ["Over epochs", "Environment and cost"]
    assert "training, epoch 1: 2<" in page
    assert "epoch 2:" not in page
    for word in ("best", "accuracy", "device-hours", "nan", "None"):
        assert word not in text_of(page)


@pytest.mark.parametrize("epoch", [3, None, [2], "2"])
def test_a_confusion_of_an_epoch_that_is_not_there_is_left_out(epoch, tmp_path):
    page = render(write_run(tmp_path / "run", confusion={**CONFUSION, "epoch": epoch}))
    assert "Classes" not in titles(page)


def test_numbers_that_cannot_be_drawn_leave_a_gap(tmp_path):
    path = write_run(tmp_path / "run") / "metrics.jsonl"
    losses = ("1.0", "NaN", "Infinity", "1e300", f"1{'0' * 400}", "true", "2.0")
    lines = [f'{{"epoch": {n}, "train_loss": {x}}}\n' for n, x in enumerate(losses, 1)]
    path.write_text("".join(lines))
    page = render(path.parent)
    assert page.count("<circle") == 2
    assert re.search(r'class="line c0" d="M[\d. ]+M[\d. ]+"', page), "two points without a line"


def test_unusual_flags_of_another_version_are_no_error(tmp_path):
    flags = {"optimizer": "unknown", "epochs": "many", "subset": None, "unknown": [1]}
    run = write_run(tmp_path / "run", flags=flags)
    assert "resnet8 on digits" in render(run)
    assert "--optimizer ngd unknown" in text_of(render(write_run(tmp_path / "b"), run))


# -------------------------------------------------------------------- bad input


def spoil(folder: Path, name: str, content: str | None) -> None:
    """Replace a file of a run folder, or delete it."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)


LINE = json.dumps(TWO[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", None, "run holds no metrics.jsonl; give run folders"),
        ("metrics.jsonl", "", "metrics.jsonl is empty: the run has not finished an epoch"),
        ("metrics.jsonl", f"{LINE}\n{LINE[:40]}", "metrics.jsonl, line 2: is not a whole row"),
        ("metrics.jsonl", f"{LINE}\n[1]\n", "metrics.jsonl, line 2: is not a whole row"),
        ("metrics.jsonl", '{"epoch": "a"}\n', "metrics.jsonl, line 1: is not a whole row"),
        ("metrics.jsonl", "[" * 100_000, "metrics.jsonl, line 1: is not a whole row"),
        ("config.json", "{", "config.json: holds no JSON object"),
        ("config.json", "[]", "config.json: holds no JSON object"),
        ("confusion.json", '{"epoch"', "confusion.json: holds no JSON object"),
        (
            "confusion.json",
            json.dumps({**CONFUSION, "test": [[1, 2], [3]]}),
            "confusion.json: the counts of test rows are not a square table",
        ),
        (
            "confusion.json",
            json.dumps({**CONFUSION, "test": [["<"] * 3] * 3}),
            "confusion.json: the counts of test rows are not a square table",
        ),
    ],
)
def test_a_damaged_run_folder_is_one_line(name, content, message, here, capsys):
    spoil(write_run(here / "run"), name, content)
    assert errors.exit_code(lambda: report.main(["run"])) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert [path.name for path in here.iterdir()] == ["run"], "nothing is written"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere", "nowhere is no folder; give run folders"),
        ("run/metrics.jsonl", "run/metrics.jsonl is no folder; give run folders"),
        ("run nowhere", "nowhere is no folder"),
        ("run --out report.txt", "--out report.txt: the name must end in .html"),
        ("run --out run/metrics.jsonl/a.html", "cannot be written"),
        ("", "the following arguments are required"),
        ("run --ot a.html", "did you mean --out?"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message, here, capsys):
    write_run(here / "run")
    assert errors.exit_code(lambda: report.main(arguments.split())) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert [path.name for path in here.iterdir()] == ["run"]


def test_the_command_writes_the_file(here, capsys):
    write_run(here / "run")
    report.main(["run", "--out", "pages/a.html"])
    assert capsys.readouterr().out == "pages/a.html\n"
    check_page((here / "pages" / "a.html").read_text(encoding="utf-8"))


def test_names_tell_folders_apart():
    paths = [Path("/a/x/run"), Path("/b/x/run"), Path("/b/y/other")]
    assert names_of(paths[1:]) == ["run", "other"]
    assert names_of(paths) == ["a/x/run", "b/x/run", "b/y/other"]
    assert names_of([paths[0], paths[0]]) == ["run (1)", "run (2)"]


# -------------------------------------------------------------------- charts


@pytest.mark.parametrize(
    ("step", "expected"), [(1, 1), (1.1, 2), (0.021, 0.05), (7, 10), (0.1, 0.1), (3e-7, 5e-7)]
)
def test_steps_between_ticks_are_round(step, expected):
    assert nice_step(step) == pytest.approx(expected)


@pytest.mark.parametrize(
    "values", [[0.0], [3.0, 3.0], [-1e99, 1e99], [0.1, 0.2], [1e-9, 2e-9], [0, 999_999.0]]
)
def test_an_axis_has_some_ticks_within_it(values):
    axis = Axis.around(values)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 2 * TICKS
    assert len({axis.label(tick) for tick in axis.ticks}) == len(axis.ticks)


def test_epochs_are_whole_numbers():
    axis = Axis.around([1, 3], whole=True)
    assert [axis.label(tick) for tick in axis.ticks] == ["1", "2", "3"]
    assert Axis.around([1], whole=True).high == 2


def test_a_chart_without_points_is_left_out():
    assert line_chart([Series("a", [(1, None)])], "x", "y") == ""
    assert html_page.charts(["", ""]) == ""


# -------------------------------------------------------------------- what runs write


class Labelled:
    """Rows whose inputs are their numbers."""

    lengths = None

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, row_batches, epoch=0):
        return ((rows, self.labels[rows]) for rows in row_batches)


class Guess(nn.Module):
    """Predicts the number of a row modulo 3."""

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.one_hot(rows % 3, 4).float()


def check_confusion(world: World, size: int = 1) -> None:
    labels = torch.tensor([0, 1, 2, 0, 0, 0, 3])  # the guesses are 0 1 2 0 1 2 0
    result = evaluate(
        Guess(),
        Labelled(labels),
        precision=Precision("fp32", "cpu"),
        world=world,
        batch_size=2,
        count_classes=4,
    )
    assert result.confusion is not None
    assert result.confusion.tolist() == [[2, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0]]
    assert result.accuracy == 4 / 7


def test_confusion_counts_every_row_once():
    check_confusion(World())
    ranks.run_ranks(check_confusion, 2, 2)


@pytest.mark.parametrize("name", ["images", "texts"])
def test_a_run_writes_what_a_report_shows(name, runs, tmp_path):
    run = read_run(runs[name])
    assert run.confusion is not None
    counts = np.array(run.confusion.counts)
    accuracy = ranks.metrics(runs[name])[-1]["test_accuracy"]
    assert np.trace(counts) / counts.sum() == pytest.approx(accuracy, abs=1e-12)
    assert run.config["precision"] == "fp32"
    page = render(runs[name])
    assert "Classes" in titles(page)
    assert "precision fp32" in text_of(page)
    script = {"images": "resnet50_test", "texts": "transformer_test"}[name]
    parser = report.importlib.import_module(script).parser()
    defaults = options.defaults_for(parser, run.flags)
    for flag, value in re.findall(r'row">--(\w+)</th><td>.*?</td><td>(.*?)</td>', page):
        assert value == html.escape(report.show(defaults[flag]))
        assert run.flags[flag] != defaults[flag]


# -------------------------------------------------------------------- a browser


def browser() -> str:
    """The command of a browser that starts here; the test is skipped without one."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path and not subprocess.run([path, "--version"], capture_output=True).returncode:
            return path
    return pytest.skip(f"none of {', '.join(BROWSERS)} is installed")


def open_page(command: str, page: Path, folder: Path, *flags: str) -> tuple[str, list[str]]:
    """What a browser prints when it opens a page, and the messages of the page's console."""
    switches = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    switches += " --disable-background-networking --disable-component-update --disable-sync"
    switches += " --enable-logging=stderr --hide-scrollbars"
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [command, *switches.split(), profile, *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_shows_the_page_and_requests_nothing(tmp_path):
    command = browser()
    run = write_run(tmp_path / "run", rows({}, {"lr": 0.2}))
    matplotlib.image.imsave(run / "policy.png", np.zeros((4, 4, 3)))
    page = tmp_path / "report.html"
    report.write_report([read_run(run)], page)
    dom, messages = open_page(command, page, tmp_path, "--dump-dom")
    assert messages == []
    assert "<h1>resnet8 on 50 % of digits</h1>" in dom
    assert dom.count("<circle") == page.read_text().count("<circle") > 8
    for width in (390, 1200):
        shot = tmp_path / f"{width}.png"
        size = f"--window-size={width},1500"
        open_page(command, page, tmp_path, f"--screenshot={shot}", size)
        pixels = matplotlib.image.imread(shot)[..., :3]
        colours = np.unique((pixels.reshape(-1, 3) * 255).round().astype(int), axis=0)
        blue = (0, 0x72, 0xB2)  # the first line
        assert blue in set(map(tuple, colours.tolist()))

    loads = page.read_text().replace('src="data:image/png', 'src="http://localhost:9/x')
    page.write_text(loads)
    _, messages = open_page(command, page, tmp_path, "--dump-dom")
    assert "Content Security Policy" in messages[0], "this test sees a request, if there is one"
