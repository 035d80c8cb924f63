"""What a run says of segments that were trained with other flags, by other code or elsewhere."""

import json
from pathlib import Path
from typing import Any

import resnet50_test
from backends import machine
from conftest import run
from training import checkpoint
from training.run_segments import describe_all

FLAGS = "--dataset digits --arch resnet8 --subset 0.2 --bs 64 --lr 0.02 --threads 1 --epochs 1"
GOES_ON = "the run goes on with "


def config_of(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


def line_of(console: str) -> str:
    """What the line on changes says, or ''."""
    lines = [line for line in console.splitlines() if line.startswith(GOES_ON)]
    assert len(lines) < 2
    return lines[0].removeprefix(GOES_ON) if lines else ""


def test_config_json_says_which_segment_of_a_run_had_which_flags_and_code(here, monkeypatch):
    monkeypatch.setattr(machine, "commit_or_none", lambda: "aaa")
    assert line_of(run(resnet50_test, FLAGS, "--out a")) == ""
    assert "segments" not in config_of("a")

    flags = "--epochs 2 --label_noise 0.5 --no-nesterov --keep 3"
    console = run(resnet50_test, "--resume a", flags)
    # the default of --warmup follows --epochs
    warmer = "--warmup 0.2 (was 0.1)"
    changes = f"--label_noise 0.5 (was 0.0), --epoch 2 (was 1), --nesterov off (was on), {warmer}"
    assert line_of(console) == changes
    groups = checkpoint.load(here / "a").state["optimizer"]["param_groups"]
    assert not any(group["nesterov"] for group in groups), "and what it says is so"

    monkeypatch.setattr(machine, "commit_or_none", lambda: "bbb")
    console = run(resnet50_test, "--resume a --out b --epochs 4")
    last = "--epoch 4 (was 2), --warmup 0.4 (was 0.2), commit bbb (was aaa)"
    assert line_of(console) == last
    assert "the learning rate goes from " in console
    assert "as of cosine over 4 epochs" in console
    segments = config_of("b")["segments"]
    assert [segment["changed"] for segment in segments] == [
        {},
        {
            "--label_noise": [0.0, 0.5],
            "--epoch": [1, 2],
            "--nesterov": [True, False],
            "--warmup": [0.1, 0.2],
        },
        {"--epoch": [2, 4], "--warmup": [0.2, 0.4]},
    ]
    assert [segment["after_epochs"] for segment in segments] == [0, 1, 2]
    assert [segment["commit"] for segment in segments] == ["aaa", "aaa", "bbb"]
    steps = [segment["after_steps"] for segment in segments]
    assert steps[0] == 0 < 2 * steps[1] == steps[2]
    assert describe_all(segments) == (
        f"from step {steps[1] + 1} on: {changes}; from step {steps[2] + 1} on: {last}"
    )
    assert len(config_of("a")["segments"]) == 2, "the run that b began from stays as it is"

    console = run(resnet50_test, "--resume b --epochs 5 --val_fraction 0.2")
    assert "--val_fraction changed: the run has trained on some of the rows now held out" in console


def test_a_run_that_goes_on_as_it_was_has_one_segment(here):
    """Also where known data lie elsewhere, or where a flag changes that changes no result."""
    run(resnet50_test, FLAGS, "--out a")
    more = f"--out b --data_dir {here}/elsewhere --keep 1 --workers 1"
    console = run(resnet50_test, "--resume a", more)
    assert line_of(console) == ""
    assert "nothing is left to train; more epochs make a run longer" in console
    assert "segments" not in config_of("b")
