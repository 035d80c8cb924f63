"""The rounds of a benchmark follow the speed of the machine; bad input is one line."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import errors
import ranks
import resnet50_test
from benchmarks import airbench, bench, time_to_target, train_peer
from conftest import call, each_of
from figures import run_logs
from training import machine

try:
    from benchmarks import step
except ImportError:
    step = None

needs_timm = pytest.mark.skipif(step is None, reason="timm is not installed")


def test_a_table_shows_medians_and_the_number_of_rounds():
    row = bench.Row.of_seconds("pair", ours=[0.5, 0.25, 1.0], peer=[1.0, 1.0, 1.0])
    title, line = bench.table([row], "plain").splitlines()
    assert title.split()[-1] == "rounds"
    assert line.split() == ["pair", "2.0", "1.0", "2.00", "1.00..4.00", "3"]


def test_the_json_file_names_the_commit_and_a_short_bar_is_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "commit_or_none", lambda: "abc-dirty")
    args = bench.parser(None).parse_args(["--json", str(tmp_path / "a.json")])
    short = bench.Bar("speed", measured=1.0, target=2.0)
    assert errors.exit_code(lambda: bench.finish(args, [short], machine="m")) == 1
    assert json.loads((tmp_path / "a.json").read_text())["commit"] == "abc-dirty"
    assert errors.exit_code(lambda: bench.finish(args, [], machine="m")) == 0


def three_steps() -> Iterator[int]:
    """A side that ends after three steps of ten samples."""
    for _ in range(3):
        time.sleep(0.01)
        yield 10


def wait_until_stopped(process: int | None) -> None:
    """Wait until the state of a process in /proc is 'T'."""
    end = time.monotonic() + 10
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_is_stopped_between_its_turns_and_its_end_is_one_line(capfd):
    remote = bench.Remote(three_steps, environment={"OMP_PLACES": "cores"})
    assert "OMP_PLACES" not in os.environ
    try:
        for _ in range(2):
            assert 0 < remote.rate(0.001) < 1000
            wait_until_stopped(remote.process.pid)
        environment = Path(f"/proc/{remote.process.pid}/environ").read_text()
        assert "OMP_PLACES=cores" in environment.split("\0")
        assert remote.peak_memory() > 0
        with pytest.raises(errors.InputError, match="has ended; its message is above"):
            remote.rate(1)
    finally:
        remote.close()
    assert not remote.process.is_alive()


@needs_timm
@each_of("name", ["accelerators", "profile_step", "step", "throughput"])
def test_a_missing_data_set_is_one_line(name, tmp_path, monkeypatch, capsys):
    def no_network(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "none"))
    if name == "step":
        monkeypatch.setattr(module, "peak_flops", lambda dtype: 1e11)
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    assert errors.exit_code(module.main) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert f"{tmp_path}/none/cifar-10-batches-py is missing" in lines[0]


def test_a_peer_trains_and_its_log_names_it(tmp_path):
    pytest.importorskip("pytorch_optimizer")
    words = "soap resnet50_test.py --dataset digits --arch resnet8 --bs 64 --epochs 1 --subset 0.2"
    words = [*words.split(), "--threads", "1", "--out", str(tmp_path / "run")]
    for wrong, message in ((words, "--optimizer adamw"), (["nothing"], "usage")):
        with pytest.raises(errors.InputError, match=message):
            train_peer.main(wrong)
    train_peer.main([*words, "--optimizer", "adamw"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["peer"].startswith("soap, pytorch_optimizer ")


SMALL_RUN = "--dataset digits --arch resnet8 --bs 64 --subset 0.5 --threads 1 --epochs 2 --lr 0.01"


@pytest.fixture(scope="module")
def small_logs(tmp_path_factory):
    """A folder of logged runs: two seeds of NGD, one of SGD; it is not to be changed."""
    logs = tmp_path_factory.mktemp("small") / "logs"
    for name, flags in (("ngd-seed0", "--ngd"), ("ngd-seed1", "--ngd --seed 1"), ("sgd-seed0", "")):
        words = [*SMALL_RUN.split(), *flags.split(), "--out", str(logs / name)]
        assert call(resnet50_test, words) == 0
    return logs


@pytest.fixture
def copied_logs(small_logs, tmp_path):
    """A copy of the logged runs."""
    return shutil.copytree(small_logs, tmp_path / "logs")


def run_time_to_target(monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["time_to_target.py", "--quick", *map(str, words)])
    time_to_target.main()


def test_time_to_an_accuracy_of_logged_runs(small_logs, tmp_path, capsys, monkeypatch):
    opened = []
    take_steps = time_to_target.samples_per_second

    def spy(trainer, steps):
        opened.append(type(trainer.optimizer).__name__)
        return take_steps(trainer, steps)

    monkeypatch.setattr(time_to_target, "samples_per_second", spy)
    capsys.readouterr()
    run_time_to_target(monkeypatch, "--json", tmp_path / "times.json", small_logs)
    assert opened.count("NGD") == opened.count("SGD") == 4  # to warm up, and three turns
    header, *rows = capsys.readouterr().out.strip().splitlines()[-5:-2]
    assert "samples/s" in header
    assert [row.split()[0:4:3] for row in rows] == [["ngd", "2"], ["sgd", "1"]]
    text = (tmp_path / "times.json").read_text()
    assert "Infinity" not in text
    written = json.loads(text)
    assert machine.device_name(torch.device("cpu"), with_speed=True) in written["machine"]
    assert written["samples_per_epoch"] == {"ngd": 719, "sgd": 719}
    assert [len(written["samples_per_second"][name]) for name in ("ngd", "sgd")] == [3, 3]


def test_what_time_to_target_cannot_compare_is_one_line(copied_logs, monkeypatch):
    logs = copied_logs

    def refused(*words, match):
        with pytest.raises(errors.InputError, match=match):
            run_time_to_target(monkeypatch, *words)

    refused(logs / "sgd-seed0" / "none", match="no finished run")
    refused(logs, logs, match="as a folder before it")
    refused(logs, "--ranks", "2", match="is of 1 ranks; add --ranks 1")
    refused(logs, "--only", "sgd", "lamb", match="--only lamb: no folder holds")
    path = logs / "sgd-seed0" / "config.json"
    config = json.loads(path.read_text())
    for changes, match in (
        ({"command": [*config["command"], "--momentum", "0.5"]}, "momentum = 0.9, .* 0.5 today"),
        ({"command": [*config["command"], "--resume", "gone"]}, ""),
        ({"command": "python"}, "is not the run of a script"),
        ({"command": ["tune.py"]}, "tune.py is no script"),
    ):
        path.write_text(json.dumps(config | changes))
        if match:
            refused(logs, match=match)
        else:
            run_time_to_target(monkeypatch, logs)
    for words in ("--ranks 0", "--network 100mbit"):
        with pytest.raises(SystemExit):
            run_time_to_target(monkeypatch, logs, *words.split())


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes as Linux does")
def test_time_to_an_accuracy_of_two_ranks(copied_logs, capfd, monkeypatch):
    for path in copied_logs.glob("*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 2'))
    run_time_to_target(monkeypatch, "--ranks", "2", copied_logs)
    *_, ngd, sgd, place, _ = capfd.readouterr().out.strip().splitlines()
    assert (ngd.split()[0], sgd.split()[0]) == ("ngd", "sgd")
    assert "2 process(es), loopback" in place


def test_epochs_to_an_accuracy_are_counted_with_a_fraction():
    rows = [{"epoch": 1, "test_accuracy": 0.5}, {"epoch": 2, "test_accuracy": 0.7, "samples": 1}]
    assert run_logs.epochs_to(30, rows) == pytest.approx(0.6)
    assert run_logs.epochs_to(60, rows) == pytest.approx(1.5)
    assert run_logs.epochs_to(71, rows) == float("inf")
    runs = {"a": [rows], "b": [[{"epoch": 1, "test_accuracy": 0.559}], rows]}
    assert time_to_target.targets_of(runs) == [55, 70]
    rows[0]["samples"] = 600
    assert time_to_target.time_to(60, [rows], rate=10.0) == "1.50 ep 1.50 min"
    assert time_to_target.time_to(71, [rows], rate=10.0) == "0 of 1 seeds"


AIRBENCH = """
import torch
import torchvision.transforms as T
from torch import nn

CIFAR_MEAN, CIFAR_STD = torch.full((3,), 0.5), torch.full((3,), 0.25)
zeropower_via_newtonschulz5 = lambda matrix: matrix

class Muon(torch.optim.SGD):
    pass

class CifarLoader:
    def __len__(self):
        return len(self.images) // self.batch_size
    def __iter__(self):
        assert self.shuffle and self.drop_last and self.aug == {"flip": True, "translate": 2}
        self.epoch += 1
        for rows in torch.randperm(len(self.images)).split(self.batch_size):
            yield self.normalize(self.images[rows]), self.labels[rows]

class CifarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten, self.norm = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 8, 3), nn.Linear(8, 10)
        self.whiten.weight.requires_grad_(False)
    def reset(self):
        pass
    def init_whiten(self, images):
        assert images.abs().max() <= 2
    def forward(self, x, whiten_bias_grad=True):
        return self.head(self.conv(self.norm(self.whiten(x))).amax((2, 3)))

def infer(model, loader, views):
    assert views in (0, 2)
    with torch.no_grad():
        return model.eval()(loader.normalize(loader.images))
"""


def test_airbench_trains_by_the_file_of_its_authors(data_dir, tmp_path):
    (tmp_path / "source.py").write_text(AIRBENCH)
    words = f"--source {tmp_path}/source.py --data_dir {data_dir} --rows 64 --epochs 2"
    airbench.main([*words.split(), "--out", str(tmp_path / "run")])
    rows = ranks.metrics(tmp_path / "run")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert set(rows[1]) - set(rows[0]) == {"test_accuracy_views", "views"}
    assert [row["samples"] for row in rows] == [64, 128]
    text = (tmp_path / "run" / "config.json").read_text()
    assert str(tmp_path) not in text
    assert "source.py, sha256" in json.loads(text)["peer"]
    with pytest.raises(errors.InputError, match="holds the log of a run"):
        airbench.main([*words.split(), "--out", str(tmp_path / "run")])
