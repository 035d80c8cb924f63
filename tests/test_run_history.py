"""What a run says of parts that were trained with other flags, by other code or elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import resnet50_test
from cli import options
from figures.report import parts_in_words
from test_training import run
from training import checkpoint, machine
from training.run_history import describe_parts, next_history

FLAGS = "--dataset digits --arch resnet8 --subset 0.2 --bs 64 --lr 0.02 --threads 1".split()


def config_of(folder: str) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def test_config_json_says_which_part_of_a_run_had_which_flags_and_code(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "commit_or_none", lambda: "aaa")
    console = run(resnet50_test, *FLAGS, "--epochs", "1", "--out", "a", monkeypatch=monkeypatch)
    assert "goes on with" not in console
    assert "history" not in config_of("a")

    flags = ["--epochs", "2", "--label_noise", "0.5", "--no-nesterov"]
    console = run(resnet50_test, "--resume", "a", *flags, monkeypatch=monkeypatch)
    line = next(line for line in console.splitlines() if line.startswith("goes on with"))
    assert "--label_noise 0.5 (before: 0.0)" in line
    assert "--epoch 2 (before: 1)" in line

    monkeypatch.setattr(machine, "commit_or_none", lambda: "bbb")
    more = ["--out", "b", "--epochs", "3"]
    console = run(resnet50_test, "--resume", "a", *more, monkeypatch=monkeypatch)
    history = config_of("b")["history"]
    assert [part["changed"] for part in history] == [
        {},
        {"--label_noise": [0.0, 0.5], "--epoch": [1, 2], "--nesterov": [True, False]},
        {"--epoch": [2, 3]},
    ]
    assert [part["after_epochs"] for part in history] == [0, 1, 2]
    assert [part["commit"] for part in history] == ["aaa", "aaa", "bbb"]
    steps = checkpoint.load(Path("b"), "resnet50_test")["progress"]["step"]
    assert [part["after_steps"] for part in history] == [0, steps // 3, 2 * steps // 3]
    assert describe_parts(history).endswith("--epoch 3 (before: 2), commit bbb (before: aaa)")
    assert len(config_of("a")["history"]) == 2, "the run that b began from stays as it is"


def test_a_run_that_goes_on_as_it_was_has_one_part(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what changes is a flag of one invocation, or where known data lie."""
    run(resnet50_test, *FLAGS, "--epochs", "1", "--out", "a", monkeypatch=monkeypatch)
    monkeypatch.setenv("DATA_DIR", str(here / "elsewhere"))
    more = ["--out", "b", "--data_dir", "./data"]
    console = run(resnet50_test, "--resume", "a", *more, monkeypatch=monkeypatch)
    assert "goes on with" not in console
    assert "history" not in config_of("b")


def test_a_flag_that_a_checkpoint_does_not_know_has_not_changed() -> None:
    args = resnet50_test.parser().parse_args(["--lr", "0.1", "--betas", "0.8", "0.9"])
    before = {"betas": [0.8, 0.9], "lr": 0.2, "gone": 1}
    changed = options.changed_flags(resnet50_test.parser(), before, args)
    assert changed == {"--lr": [0.2, 0.1]}


def test_a_checkpoint_without_a_history_begins_one() -> None:
    state = {"progress": {"epoch": 3, "step": 40}, "changed": {}}
    history = next_history(state, {"commit": "abc"})
    assert history == [{"after_epochs": 3, "after_steps": 40, "changed": {}, "commit": "abc"}]
    assert next_history({**state, "history": history}, {"commit": "abc"}) == history
    assert len(next_history({**state, "history": history}, {"commit": "def"})) == 2
    assert len(history) == 1, "the checkpoint's own list is not changed"


@pytest.mark.parametrize("history", [None, 3, [3, 4], ["ab", "cd"], [{}, {}], {"a": 1, "b": 2}])
def test_a_history_that_cannot_be_read_is_left_out_of_a_report(history: object) -> None:
    assert parts_in_words(history) == ""
