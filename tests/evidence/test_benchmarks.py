"""The results of benchmarks, the processes of their sides, and peers; bad input is one line."""

import copy
import json
import math
import time
from pathlib import Path

import pytest
import torch

import errors
from benchmarks import bench, fine_tune, train_peer


def test_the_json_file_names_the_commit_and_a_short_bar_is_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "commit_or_none", lambda: "abc-dirty")
    args = bench.parser(None).parse_args(["--json", str(tmp_path / "a.json")])
    short = bench.Bar("speed", measured=1.0, wanted=2.0)
    assert errors.exit_code(lambda: bench.finish(args, [short], machine="m")) == 1
    assert json.loads((tmp_path / "a.json").read_text())["commit"] == "abc-dirty"
    assert errors.exit_code(lambda: bench.finish(args, [], machine="m")) == 0


def three_steps():
    """A side that ends after three steps of ten samples."""
    for _ in range(3):
        time.sleep(0.01)
        yield 10


def test_a_process_is_stopped_between_its_turns_and_its_end_is_one_line(capfd):
    remote = bench.Remote(three_steps)
    folder = Path(f"/proc/{remote.process.pid}")
    try:
        for _ in range(2):
            assert 0 < remote.ask("rate", 0.001) < 1000
            end = time.monotonic() + 240
            while (folder / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < end
        with pytest.raises(errors.InputError, match="has ended; its message is above"):
            remote.ask("rate", 1)
    finally:
        remote.close()
    assert not remote.process.is_alive()


def fine_tuned(start: float, *accuracies: float | None) -> fine_tune.Run:
    """A run whose epochs took ten seconds each."""
    rows = enumerate(accuracies, 1)
    return fine_tune.Run(
        [{"epoch": n, "train_seconds": 10.0, "test_accuracy": each} for n, each in rows], start
    )


def test_seconds_of_fine_tuning_are_to_the_mean_accuracy_of_the_peer(tmp_path):
    peer = [fine_tuned(4.0, None, None, 0.81), fine_tuned(6.0, None, None, 0.79)]
    ours = [fine_tuned(2.0, 0.5, 0.74, 0.9), fine_tuned(2.0, 0.7, 0.76, 0.9)]
    target = fine_tune.final(peer)
    assert target == pytest.approx(80)
    assert fine_tune.seconds_to(target, peer) == pytest.approx(5 + 30)
    assert fine_tune.seconds_to(target, ours) == pytest.approx(2 + 20 + 10 / 3)
    never = fine_tune.seconds_to(91, ours)
    assert never == math.inf
    args = bench.parser(None).parse_args(["--json", str(tmp_path / "a.json")])
    assert bench.finish(args, [bench.Bar("a", never, 0.6, at_most=True)], machine="m") == 1
    assert json.loads((tmp_path / "a.json").read_text())["bars"][0]["measured"] is None


def test_a_peer_of_matrices_trains_the_weights_of_the_model():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 2)]
    model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    groups = [{"params": train_peer.matrices_of(list(model.parameters()))}]
    assert [p.ndim for p in groups[0]["params"]] == [2, 1, 2, 1]
    theirs = train_peer.copying_gradients(torch.optim.SGD(groups, lr=0.1), groups)
    usual = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        for images in torch.randn(2, 5, 2, 3, 3):  # gradients add up over two parts
            for each in (model, plain):
                each(images).square().sum().backward()
        for optimizer in (theirs, usual):
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own, other)


def test_a_peer_refuses_what_it_would_ignore():
    for flag in ("--weights a.pt", "--freeze", "--lr_scaling sqrt"):
        words = ["soap", "resnet50_test.py", "--optimizer", "adamw", *flag.split()]
        with pytest.raises(errors.InputError, match="is for the script alone"):
            train_peer.parse(words)
