"""The run itself: it learns, it is deterministic, and it recovers from what is not finite."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import errors
import ranks
import resnet50_test
import transformer_test
from training import checkpoint, recovery
from training.batch_sampler import DynamicBatchSampler
from training.losses import CrossEntropy
from training.trainer import Trainer

DIGITS = [
    "--dataset",
    "digits",
    "--arch",
    "resnet20",
    "--bs",
    "64",
    "--lr",
    "0.1",
    "--epochs",
    "2",
    "--threads",
    "1",
]
LINES = ["--dataset", "headlines", "--bs", "16", "--lr", "4e-4", "--epochs", "8", "--threads", "1"]


def run(module, *flags, monkeypatch, code: int = 0) -> str:
    """Run a script's main in this process; returns stdout and stderr."""
    monkeypatch.setattr(sys, "argv", [module.SCRIPT + ".py", *map(str, flags)])
    console = io.StringIO()
    with contextlib.redirect_stdout(console), contextlib.redirect_stderr(console):
        given = errors.exit_code(module.main)
    assert given == code, console.getvalue()
    return console.getvalue()


def test_resnet_learns_the_digits_and_leaves_a_whole_run_folder(here, monkeypatch):
    console = run(
        resnet50_test,
        *DIGITS,
        "--epochs",
        "4",
        "--tensorboard",
        "--out",
        "run",
        monkeypatch=monkeypatch,
    )
    assert "best.pt: epoch " in console
    rows = ranks.metrics(here / "run")
    assert rows[-1]["test_accuracy"] > 0.85
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    fields = "epoch step samples train_loss train_accuracy test_loss test_accuracy lr batch_size"
    assert {*fields.split(), "world_size", "comm_bytes"} <= set(rows[0])
    raw = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert set(raw) >= ranks.TIMING - {"worker_samples_per_second"}
    config = json.loads((here / "run" / "config.json").read_text())
    assert config["flags"]["arch"] == "resnet20"
    assert config["torch"] == torch.__version__
    assert {"last.pt", "best.pt"} <= {path.name for path in (here / "run").iterdir()}
    assert list((here / "run").glob("events.out.tfevents.*"))


def test_transformer_learns_the_headlines(here, monkeypatch):
    run(transformer_test, *LINES, "--out", "run", monkeypatch=monkeypatch)
    assert max(row["test_accuracy"] for row in ranks.metrics(here / "run")) > 0.8
    assert (here / "run" / "tokenizer.json").exists()


def test_the_same_seed_gives_the_same_run_and_another_seed_another(here, monkeypatch):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(resnet50_test, *DIGITS, "--seed", seed, "--out", name, monkeypatch=monkeypatch)
    ranks.same_run(here / "a", here / "b")
    assert ranks.metrics(here / "a") != ranks.metrics(here / "c")


def test_a_dynamic_run_whose_size_never_changes_is_the_static_run(here, monkeypatch):
    common = [*DIGITS, "--bs", "100", "--precision", "fp32"]  # 1,437 rows leave 37 over
    never = ["--dynamic_batch", "increase", "--batch_milestones", "99"]
    for name, more in (("static", []), ("dynamic", never)):
        run(resnet50_test, *common, *more, "--out", name, monkeypatch=monkeypatch)
    ranks.same_run(here / "static", here / "dynamic")
    rows = ranks.metrics(here / "static")
    assert [row["samples"] for row in rows] == [1437, 2874]
    assert [row["step"] for row in rows] == [15, 30]


def test_the_validation_split_chooses_the_best_and_never_holds_test_rows(here, monkeypatch):
    run(
        resnet50_test,
        *DIGITS,
        "--val_fraction",
        "0.2",
        "--subset",
        "0.5",
        "--out",
        "run",
        monkeypatch=monkeypatch,
    )
    rows = ranks.metrics(here / "run")
    state = torch.load("run/best.pt", weights_only=True)
    assert state["progress"]["best"]["accuracy"] == max(row["val_accuracy"] for row in rows)
    assert rows[0]["samples"] <= 1437 * 0.5 * 0.8 + 10


def test_without_the_test_set_a_run_is_the_same_but_for_it(here, monkeypatch):
    held = [*DIGITS, "--val_fraction", "0.2"]
    run(resnet50_test, *held, "--out", "with", monkeypatch=monkeypatch)
    last = run(
        resnet50_test, *held, "--no-test", "--out", "without", monkeypatch=monkeypatch
    ).rsplit("best.pt: epoch", 1)[1]
    assert "test accuracy" not in last
    rows = ranks.metrics(here / "with")
    for row in rows:
        assert row.pop("test_accuracy")
        assert row.pop("test_loss")
    assert ranks.metrics(here / "without") == rows


def test_a_recipe_is_overridden_by_the_command_line_and_a_resumed_run_keeps_its_flags(
    here, monkeypatch
):
    Path("recipe.yaml").write_text(
        "arch: resnet20\ndataset: digits\nbs: 64\nepochs: 2\nnesterov: true\n"
        "milestones: [1, 2]\nlr: 0.5\n"
    )
    run(
        resnet50_test,
        "--recipe",
        "recipe.yaml",
        "--lr",
        "0.05",
        "--epochs",
        "1",
        "--out",
        "run",
        monkeypatch=monkeypatch,
    )
    run(resnet50_test, "--resume", "run", "--epochs", "3", monkeypatch=monkeypatch)
    flags = torch.load("run/last.pt", weights_only=True)["flags"]
    assert (flags["lr"], flags["nesterov"], flags["milestones"], flags["epochs"]) == (
        0.05,
        True,
        [1, 2],
        3,
    )
    assert [row["epoch"] for row in ranks.metrics(here / "run")] == [1, 2, 3]


def failing_after(step: int, times: int):
    """A loss that is not finite from that call on, for so many calls."""
    calls = iter(range(10**9))
    loss_fn = CrossEntropy()

    def bad(model, x, y):
        batch = loss_fn(model, x, y)
        is_bad = step <= next(calls) < step + times
        return batch._replace(loss=batch.loss * math.nan) if is_bad else batch

    return bad


def test_a_few_bad_steps_are_skipped_counted_and_survived(here, monkeypatch):
    monkeypatch.setattr("cli.factory.CrossEntropy", lambda smoothing: failing_after(4, 3))
    run(resnet50_test, *DIGITS, "--out", "run", monkeypatch=monkeypatch)
    rows = ranks.metrics(here / "run")
    assert [row["skipped_steps"] for row in rows] == [3, 0]
    assert all(math.isfinite(row["train_loss"]) for row in rows)


def test_ten_bad_steps_in_a_row_go_back_to_the_checkpoint_with_half_the_rate(here, monkeypatch):
    monkeypatch.setattr("cli.factory.CrossEntropy", lambda smoothing: failing_after(30, 10))
    console = run(
        resnet50_test, *DIGITS, "--lr_schedule", "constant", "--out", "run", monkeypatch=monkeypatch
    )
    assert "back to epoch 2, step 23" in console
    rows = ranks.metrics(here / "run")
    assert [row["lr"] for row in rows] == [0.1, 0.05]
    assert rows[-1]["test_accuracy"] > 0.3
    assert rows[-1]["step"] == 46


def test_a_loss_that_stays_bad_ends_with_exit_code_3_after_three_returns(here, monkeypatch):
    monkeypatch.setattr("cli.factory.CrossEntropy", lambda smoothing: failing_after(5, 10**9))
    console = run(resnet50_test, *DIGITS, "--out", "run", monkeypatch=monkeypatch, code=3)
    assert console.count("steps in a row were not finite") == recovery.MAX_ROLLBACKS
    assert console.splitlines()[-1].startswith("error:")
    state = checkpoint.load(here / "run", "resnet50_test")
    assert all(tensor.isfinite().all() for tensor in state["model"].values()), (
        "the last checkpoint is sound"
    )


def test_evaluate_predict_and_export_of_images(here, monkeypatch):
    pytest.importorskip("onnxruntime")
    run(resnet50_test, *DIGITS, "--out", "run", monkeypatch=monkeypatch)
    report = run(resnet50_test, "--resume", "run", "--evaluate", monkeypatch=monkeypatch)
    assert (
        f"{100 * ranks.metrics(here / 'run')[-1]['test_accuracy']:.2f} %" in report.splitlines()[-1]
    )
    assert len(report.splitlines()) == 13
    from PIL import Image
    from sklearn.datasets import load_digits

    pixels = (load_digits().images[0] * 255 / 16).round().astype("uint8")
    Image.fromarray(pixels).save("zero.png")
    assert (
        run(resnet50_test, "--resume", "run", "--predict", "zero.png", monkeypatch=monkeypatch)
        .splitlines()[-1]
        .startswith("zero.png: 0 ")
    )
    metadata = exported_metadata(resnet50_test, monkeypatch)
    state = checkpoint.load(here / "run", "resnet50_test")
    for name in ("classes", "channels", "size", "mean", "std"):
        assert metadata[name] == state[name]
    assert metadata["arch"] == state["flags"]["arch"]

    words = ["--resume", "run", "--predict", "zero.png", "--predict_out", "zero.jsonl"]
    run(resnet50_test, *words, monkeypatch=monkeypatch)
    expected = json.loads(Path("zero.jsonl").read_text())["probabilities"]
    served = answer_of_the_example(Path("zero.png").read_bytes())
    assert served == pytest.approx(expected, abs=1e-4)
    assert "cannot identify" in answer_of_the_example(b"not an image")["error"]


def test_vgg8_is_exported(here, monkeypatch):
    pytest.importorskip("onnxruntime")
    flags = "--arch vgg8 --image_size 12 --epochs 1 --out run".split()
    run(resnet50_test, *DIGITS, *flags, monkeypatch=monkeypatch)
    assert exported_metadata(resnet50_test, monkeypatch)["arch"] == "vgg8"


def exported_metadata(script, monkeypatch) -> dict[str, Any]:
    """Export the run in each format and assert that all of them say the same of it."""
    for name in ("model.onnx", "model.pt2", "model.safetensors"):
        console = run(script, "--resume", "run", "--export", name, monkeypatch=monkeypatch)
        assert "same probabilities" in console
        assert Path(name).stat().st_size > 100_000
    onnxruntime = pytest.importorskip("onnxruntime")
    safetensors = pytest.importorskip("safetensors")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    found = [dict(session.get_modelmeta().custom_metadata_map)]
    extra = {"metadata.json": ""}
    torch.export.load("model.pt2", extra_files=extra)
    found.append(json.loads(extra["metadata.json"]))
    with safetensors.safe_open("model.safetensors", framework="pt") as file:
        found.append(file.metadata())
    assert found[0] == found[1] == found[2]
    return {name: json.loads(value) for name, value in found[0].items()}


def answer_of_the_example(content: bytes) -> dict[str, Any]:
    """What examples/serve_onnx.py answers to an upload, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    example = str(ranks.ROOT / "examples" / "serve_onnx.py")
    server = subprocess.Popen([sys.executable, example, "model.onnx", str(port)])
    try:
        for _ in range(200):
            time.sleep(0.1)
            with contextlib.suppress(ConnectionRefusedError):
                connection = http.client.HTTPConnection("localhost", port)
                connection.request("POST", "/", content)
                return json.loads(connection.getresponse().read())
        raise AssertionError("the example does not answer")
    finally:
        server.kill()
        server.wait()


@pytest.mark.process
def test_predict_and_export_of_texts(here, monkeypatch):
    pytest.importorskip("onnxruntime")
    run(transformer_test, *LINES, "--out", "run", monkeypatch=monkeypatch)
    Path("lines.txt").write_text(
        "The striker scored twice as the team won the cup final\n\n"
        "Shares of the bank fell after its profit report\n"
    )
    lines = run(
        transformer_test, "--resume", "run", "--predict", "lines.txt", monkeypatch=monkeypatch
    ).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("weights of run/last.pt: epoch 8, test accuracy ")
    assert ": Sports " in lines[1]
    assert ": Business " in lines[2]
    metadata = exported_metadata(transformer_test, monkeypatch)
    assert metadata["classes"] == ["World", "Sports", "Business", "Sci/Tech"]
    assert json.loads(metadata["tokenizer"])["model"]["vocab"]


@pytest.mark.process
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains(precision, here, monkeypatch):
    flags = [*DIGITS, "--arch", "resnet8", "--precision", precision, "--out", "run"]
    run(resnet50_test, *flags, monkeypatch=monkeypatch)
    assert ranks.metrics(here / "run")[-1]["test_accuracy"] > 0.5


@pytest.mark.compile
def test_compile_trains_and_its_checkpoint_is_that_of_eager(here, monkeypatch):
    flags = [
        *LINES[:-4],
        "--epochs",
        "1",
        "--depth",
        "1",
        "--width",
        "32",
        "--mlp_width",
        "32",
        "--max_len",
        "8",
    ]
    run(transformer_test, *flags, "--backend", "compile", "--out", "run", monkeypatch=monkeypatch)
    run(
        transformer_test,
        "--resume",
        "run",
        "--backend",
        "eager",
        "--epochs",
        "2",
        monkeypatch=monkeypatch,
    )
    assert len(ranks.metrics(here / "run")) == 2


@pytest.mark.parametrize("more", ["", "--dynamic_batch increase --epochs 1"])
def test_the_smaller_last_batches_are_not_compiled_for(more, here, monkeypatch):
    shapes = []

    def backend(graph, example_inputs):
        shapes.append(tuple(example_inputs[-1].shape))
        return graph.forward

    def compiled(name, model, *, few_shapes):
        model.compile(backend=backend)
        return model

    monkeypatch.setattr("backends.execution.apply_backend", compiled)
    torch._dynamo.reset()
    flags = [*DIGITS, "--bs", "100", "--precision", "fp32", "--out", "run"]  # 1,437 rows
    run(resnet50_test, *flags, *more.split(), monkeypatch=monkeypatch)
    torch._dynamo.reset()
    assert len(shapes) == 1, "one graph for training, and none for evaluation"


def test_a_full_disk_keeps_the_previous_checkpoint_and_the_run_goes_on(here, monkeypatch):
    real, calls = checkpoint.torch.save, iter(range(100))

    def full(*arguments: object) -> None:
        if next(calls) in (2, 3):  # the start, epoch 1, and then epoch 2 fails, also a second time
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(checkpoint.torch, "save", full)
    console = run(resnet50_test, *DIGITS, "--epochs", "3", "--out", "run", monkeypatch=monkeypatch)
    assert "No space left on device" in console
    assert [row["epoch"] for row in ranks.metrics(here / "run")] == [1, 2, 3]
    assert checkpoint.load(here / "run", "resnet50_test")["progress"]["epoch"] == 3


@pytest.mark.process
@pytest.mark.data
def test_the_real_data_sets_train(data_dir, here, monkeypatch):
    flags = [
        "--arch",
        "resnet20",
        "--subset",
        "0.02",
        "--bs",
        "50",
        "--lr",
        "0.1",
        "--epochs",
        "2",
        "--data_dir",
        data_dir,
    ]
    run(resnet50_test, *flags, "--out", "cifar", monkeypatch=monkeypatch)
    assert ranks.metrics(here / "cifar")[-1]["test_accuracy"] > 0.15
    flags = [
        "--subset",
        "0.1",
        "--bs",
        "32",
        "--lr",
        "2e-4",
        "--epochs",
        "2",
        "--depth",
        "1",
        "--data_dir",
        data_dir,
    ]
    run(transformer_test, *flags, "--out", "agnews", monkeypatch=monkeypatch)
    assert ranks.metrics(here / "agnews")[-1]["test_accuracy"] > 0.4


def test_the_step_gets_the_weight_of_its_share_and_the_rate_of_its_batch(here, monkeypatch):
    plan, train_step, given = DynamicBatchSampler.plan, Trainer.train_step, []
    monkeypatch.setattr(
        DynamicBatchSampler,
        "plan",
        lambda *args: [part._replace(weight=0.5) for part in plan(*args)],
    )
    monkeypatch.setattr(
        Trainer,
        "train_step",
        lambda *args, **named: (given.append(args[3]), train_step(*args, **named)),
    )
    growth = "--lr_schedule constant --dynamic_batch increase --batch_growth 2"
    growth = f"{growth} --dynamic_lr linear".split()
    run(resnet50_test, *DIGITS, *growth, "--out", "run", monkeypatch=monkeypatch)
    rows = ranks.metrics(here / "run")
    assert set(given) == {0.5}
    assert [row["batch_size"] for row in rows] == [64, 128]
    assert [row["lr"] for row in rows] == [0.1, 0.2]
