"""--track: what each tracker is sent, resumed runs, missing packages, and trackers that fail."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import conftest
import ranks
import resnet50_test
from cli import options
from errors import InputError
from training import tracking
from training.run_log import RunLog

ROW = {
    "epoch": 1,
    "step": 4,
    "samples": 64,
    "seconds": 1.0,
    "samples_per_second": 64.0,
    "train_loss": 2.0,
    "train_accuracy": 0.5,
    "test_accuracy": 0.4,
    "lr": 0.1,
    "shares": [1, 2],
    "noise_scale": None,
    "test_loss": float("nan"),
}
ROWS = [ROW, {**ROW, "epoch": 2, "step": 8}]
LEFT_OUT = ("shares", "noise_scale", "test_loss", "step")  # no finite numbers; the axis
NUMBERS = {name: value for name, value in ROW.items() if name not in LEFT_OUT}
CONFIG = {"flags": {"lr": 0.1, "out": Path("x")}, "commit": "abc"}
DIGITS = f"{conftest.IMAGES} --epochs 2".split()


class FakeLibrary(types.ModuleType):
    """A tracker's module that remembers what it is given; `fails` names a call that fails."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("fake")
        self.fails, self.opened, self.sent, self.texts, self.closed = fails, [], [], [], 0

    def call(self, name: str) -> None:
        random.seed(1)
        torch.manual_seed(1)  # a library may draw random numbers
        if name == self.fails:
            raise RuntimeError(f"{name} has failed\nwith a second line")

    # trackio and wandb
    def init(self, **settings: Any) -> FakeLibrary:
        self.opened.append(settings)
        self.call("init")
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.call("log")
        self.sent.append((step, values))

    def finish(self) -> None:
        self.call("finish")
        self.closed += 1

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    # TensorBoard
    def SummaryWriter(self, folder: str) -> FakeLibrary:
        return self.init(folder=folder)

    def add_text(self, name: str, text: str, step: int) -> None:
        self.texts.append(text)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.call("log")
        if not self.sent or self.sent[-1][0] != step:
            self.sent.append((step, {}))
        self.sent[-1][1][name] = value

    def flush(self) -> None: ...

    def close(self) -> None:
        self.finish()


def fake(name: str, monkeypatch: pytest.MonkeyPatch, fails: str = "") -> FakeLibrary:
    library = FakeLibrary(fails)
    monkeypatch.setitem(sys.modules, tracking.LIBRARIES[name].module, library)
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return library


def train(folder: Path, *flags: str) -> int:
    return conftest.call(resnet50_test, [*DIGITS, *flags, "--out", str(folder)])


@pytest.mark.parametrize("name", tracking.LIBRARIES)
def test_rows_and_configuration_are_sent(name, tmp_path, monkeypatch):
    library = fake(name, monkeypatch)
    log = RunLog(tmp_path, is_main=True, config=CONFIG, track=name)
    log.begin([])
    for count in (1, 2):
        log.epoch(ROWS[:count])
    log.close()
    assert library.sent == [(4, NUMBERS), (8, {**NUMBERS, "epoch": 2})]
    assert library.closed == 1
    [settings] = library.opened
    plain = {"flags": {"lr": 0.1, "out": "x"}, "commit": "abc"}
    if name == "tensorboard":
        assert settings == {"folder": str(tmp_path)}
        [text] = library.texts
        assert json.loads(text) == plain
    else:
        assert settings["config"] == plain
        assert settings["project"] == "faster-training"


@pytest.mark.parametrize("name", tracking.LIBRARIES)
def test_a_resumed_run_continues_the_same_tracked_run(name, tmp_path, monkeypatch):
    library = fake(name, monkeypatch)
    for rows in (ROWS[:1], ROWS):  # the second start sends what the first has not
        log = RunLog(tmp_path, is_main=True, config=CONFIG, track=name)
        log.begin(rows[:-1])
        log.epoch(rows)
        log.close()
    assert [step for step, _ in library.sent] == [4, 8]
    first, second = library.opened
    for key in {"id", "name", "folder"} & first.keys():
        assert first[key] == second[key]
    if name == "trackio":
        assert (first["resume"], second["resume"]) == ("never", "allow")


def test_rows_that_the_tracker_does_not_have_are_sent_at_the_start(tmp_path, monkeypatch):
    for name in ("trackio", "wandb"):  # the other tracker has nothing of the run
        library = fake(name, monkeypatch)
        tracked = tracking.TrackedRun(name, tmp_path, warn=print)
        tracked.begin(CONFIG, ROWS)
        assert [step for step, _ in library.sent] == [4, 8]


def test_each_tracker_keeps_its_place_while_another_one_follows(tmp_path, monkeypatch):
    trackio, wandb = fake("trackio", monkeypatch), fake("wandb", monkeypatch)
    for name, rows in (("trackio", ROWS[:1]), ("wandb", ROWS), ("trackio", ROWS)):
        tracked = tracking.TrackedRun(name, tmp_path, warn=print)
        tracked.begin(CONFIG, rows)
        tracked.close()
    assert [step for step, _ in trackio.sent] == [4, 8]
    assert [step for step, _ in wandb.sent] == [4, 8]
    assert len({each["name"] for each in trackio.opened}) == 1


def test_a_run_that_is_killed_in_its_first_epoch_keeps_its_name(tmp_path, monkeypatch):
    library = fake("wandb", monkeypatch)
    for _ in range(2):
        tracking.TrackedRun("wandb", tmp_path, warn=print).begin(CONFIG, [])
    assert len({each["id"] for each in library.opened}) == 1


@pytest.mark.parametrize(("given", "expected"), [(None, "offline"), ("online", "online")])
def test_wandb_is_offline_unless_the_user_says_otherwise(given, expected, tmp_path, monkeypatch):
    library = fake("wandb", monkeypatch)
    if given:
        monkeypatch.setenv("WANDB_MODE", given)
    tracking.TrackedRun("wandb", tmp_path, warn=print).begin(CONFIG, [])
    assert library.opened[0]["mode"] == expected


def test_only_rank_0_tracks(tmp_path, monkeypatch):
    library = fake("wandb", monkeypatch)
    log = RunLog(tmp_path, is_main=False, config=CONFIG, track="wandb")
    log.begin([])
    log.epoch(ROWS)
    log.close()
    assert not library.opened
    assert not library.sent


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_changes_nothing_and_is_reported_once(
    fails, tmp_path, monkeypatch, capsys
):
    assert train(tmp_path / "plain") == 0
    fake("wandb", monkeypatch, fails=fails)
    capsys.readouterr()
    assert train(tmp_path / "tracked", "--track", "wandb") == 0
    console = capsys.readouterr()
    [line] = [line for line in console.out.splitlines() if "warning" in line]
    assert line == f"warning: --track wandb: {fails} has failed; the run goes on without it"
    assert console.err == ""
    ranks.same_run(tmp_path / "plain", tmp_path / "tracked")


@pytest.mark.parametrize("name", tracking.LIBRARIES)
def test_a_missing_package_is_one_line_before_the_run(name, refused, monkeypatch):
    library = tracking.LIBRARIES[name]
    monkeypatch.setitem(sys.modules, library.module, None)  # as if it were not installed
    line = refused("images", f"--track {name} --out run", f"--track {name} needs a package")
    assert line.endswith(f"pip install {library.package}")
    assert not Path("run").exists()


def test_a_package_that_cannot_be_imported_is_one_line(monkeypatch):
    def broken(name: str) -> None:
        raise TypeError("Descriptors cannot be created directly")

    monkeypatch.setattr(tracking.importlib, "import_module", broken)
    with pytest.raises(InputError, match="wandb cannot be imported .Descriptors cannot be"):
        tracking.check_tracker("wandb")


def test_an_unknown_tracker_gets_a_suggestion(refused):
    refused("images", "--track wandd", "did you mean wandb?")


def test_a_resumed_run_does_not_take_the_tracker_from_its_checkpoint(here, monkeypatch):
    library = fake("trackio", monkeypatch)
    assert train(here / "run", "--track", "trackio") == 0
    resumed = ["--resume", "run", "--epochs", "3"]
    args, _ = options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, resumed)
    assert args.track == "none"
    assert conftest.call(resnet50_test, [*resumed, "--track", "trackio"]) == 0
    assert [values["epoch"] for _, values in library.sent] == [1, 2, 3]


def test_evaluation_needs_no_tracker(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    flags = ["--checkpoint", str(runs["images"]), "--evaluate", "--track", "wandb"]
    assert conftest.call(resnet50_test, flags) == 0


def test_tensorboard_itself_reads_what_was_sent(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, is_main=True, config=CONFIG, track="tensorboard")
    log.begin([])
    log.epoch(ROWS)
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("test_accuracy")] == [4, 8]
