"""What a run says of segments that were trained with other flags, by other code or elsewhere."""

from pathlib import Path

from backends import machine
from conftest import run
from training import checkpoint
from training.run_folder import read_config
from training.run_segments import describe_all

FLAGS = "--dataset digits --arch resnet8 --subset 0.2 --bs 64 --lr 0.02 --threads 1 --epochs 1"
GOES_ON = "the run goes on with "


def line_of(console: str) -> str:
    """What the line on changes says, or ''."""
    lines = [line for line in console.splitlines() if line.startswith(GOES_ON)]
    assert len(lines) < 2
    return lines[0].removeprefix(GOES_ON) if lines else ""


def test_config_json_says_which_segment_of_a_run_had_which_flags_and_code(here, monkeypatch):
    monkeypatch.setattr(machine, "commit_or_none", lambda: "aaa")
    assert line_of(run("images", FLAGS, "--out a")) == ""
    assert "segments" not in read_config(Path("a"))
    monkeypatch.setattr(machine, "commit_or_none", lambda: "bbb")
    flags = "--epochs 2 --label_noise 0.5 --no-nesterov --out b"
    console = run("images", "--resume a", flags)
    changes = "--label_noise 0.5 (was 0), --epoch 2 (was 1), --nesterov off (was on)"
    changes += ", --warmup 0.2 (was 0.1), commit bbb (was aaa)"  # whose default follows --epochs
    assert line_of(console) == changes
    assert "as of cosine over 2 epochs" in console
    groups = checkpoint.load(here / "b").state["optimizer"]["param_groups"]
    assert not any(group["nesterov"] for group in groups), "and what it says is so"
    first, second = read_config(Path("b"))["segments"]
    assert (first["commit"], second["commit"], second["after_epochs"]) == ("aaa", "bbb", 1)
    assert second["changed"]["--nesterov"] == [True, False]
    expected = f"from step {second['after_steps'] + 1} on: {changes}"
    assert describe_all([first, second]) == expected
    assert "segments" not in read_config(Path("a")), "the run that b began from stays as it is"
    run("images", "--resume b --epochs 3")
    assert [each["after_epochs"] for each in read_config(Path("b"))["segments"]] == [0, 1, 2]


def test_a_run_that_goes_on_as_it_was_has_one_segment(here):
    """Also where known data lie elsewhere, or where a flag changes that changes no result."""
    run("images", FLAGS, "--out a")
    more = f"--out b --data_dir {here}/elsewhere --keep 1 --workers 1"
    console = run("images", "--resume a", more)
    assert line_of(console) == ""
    assert "nothing is left to train; more epochs make a run longer" in console
    assert "segments" not in read_config(Path("b"))
