"""The run itself: it learns, it is deterministic, and it recovers from what is not finite."""

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import conftest
import errors
import ranks
from conftest import each_of, run
from training import checkpoint, recovery
from training.batch_sampler import DynamicBatchSampler
from training.classifier import load
from training.losses import CrossEntropy
from training.progress import Progress
from training.run_log import RunLog
from training.trainer import Trainer

DIGITS = "--dataset digits --arch resnet20 --bs 64 --lr 0.1 --epochs 2 --threads 1"
LINES = "--dataset headlines --bs 16 --lr 4e-4 --epochs 8 --threads 1"


@pytest.fixture
def digits(here):
    """Train on the digits with further flags, in an empty folder; the call returns the console."""

    def train(flags: str = "", out: str = "run", code: int = 0) -> str:
        return run("images", DIGITS, "--arch resnet8", flags, "--out", out, code=code)

    return train


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Path]:
    """A folder for each script, in which `run` is one that has learned."""
    folders = {}
    for name, words in (("images", f"{DIGITS} --epochs 4"), ("texts", LINES)):
        folders[name] = folder = tmp_path_factory.mktemp(name)
        assert "best.pt: epoch " in run(name, words, "--out", folder / "run")
    return folders


def test_both_scripts_learn_and_leave_a_whole_run_folder(finished):
    texts = finished["texts"] / "run"
    assert max(row["test_accuracy"] for row in ranks.metrics(texts)) > 0.8
    folder = finished["images"] / "run"
    rows = ranks.metrics(folder)
    assert rows[-1]["test_accuracy"] > 0.85
    config = json.loads((folder / "config.json").read_text())
    assert (config["flags"]["arch"], config["torch"]) == ("resnet20", torch.__version__)


def test_a_dynamic_run_of_one_size_is_the_static_run_and_another_seed_gives_another(here, digits):
    common = "--bs 100 --precision fp32"  # 1,437 rows leave 37 over
    digits(common, "static")
    digits(f"{common} --dynamic_batch increase --batch_milestones 99", "dynamic")
    ranks.same_run(here / "static", here / "dynamic")
    rows = ranks.metrics(here / "static")
    assert [(row["samples"], row["step"]) for row in rows] == [(1437, 15), (2874, 30)]
    digits(f"{common} --seed 1", "seed")
    assert ranks.metrics(here / "seed") != rows


def test_validation_rows_choose_and_the_test_set_changes_nothing(here, digits, monkeypatch):
    held = "--subset 0.5 --val_fraction 0.2"
    digits(held, "with")
    last = digits(f"{held} --no-test", "without").rsplit("best.pt: epoch", 1)[1]
    assert "test accuracy" not in last
    rows = ranks.metrics(here / "with")
    assert rows[0]["samples"] <= 1437 * 0.5 * 0.8 + 10
    report = run("images", "--checkpoint without --evaluate --test")
    assert "accuracy on the test set" in report
    without = [{name: x for name, x in row.items() if name[:5] != "test_"} for row in rows]
    assert [len(row) for row in without] == [len(row) - 4 for row in rows]
    assert ranks.metrics(here / "without") == without


@pytest.fixture
def fail_in(monkeypatch):
    """Let forward passes of these numbers, and so BatchNorm's statistics, not be finite."""

    def fail(*bad: range) -> None:
        calls, loss_fn = itertools.count(), CrossEntropy()

        def loss(model, x, y):
            number = next(calls)
            is_bad = any(number in numbers for numbers in bad)
            return loss_fn(model, x * math.nan if is_bad else x, y)

        monkeypatch.setattr("cli.factory.CrossEntropy", lambda *settings: loss)

    return fail


def test_bad_steps_are_skipped_and_ten_go_back_with_half_the_rate(here, digits, fail_in):
    fail_in(range(4, 7), range(30, 40))
    console = digits("--lr_schedule constant --save_every 3 --ema 0.9")
    assert "3 of 23 steps of epoch 1 were skipped, since a gradient was not finite" in console
    assert "back to epoch 2, step 30" in console  # the last one that was saved before them
    rows = ranks.metrics(here / "run")
    assert [row["skipped_steps"] for row in rows] == [3, 0]
    assert all(math.isfinite(row["train_loss"]) for row in rows)
    assert [row["lr"] for row in rows] == [0.1, 0.05]
    assert [row["step"] for row in rows] == [23, 46]
    assert [row.get("rollbacks") for row in rows] == [None, 1]
    assert rows[-1]["test_accuracy"] > 0.3
    digits("--lr_schedule constant --lr 0.1 --epochs 3 --resume run")  # the same command again
    assert ranks.metrics(here / "run")[-1]["lr"] == 0.05
    digits("--lr_schedule constant --lr 0.2 --epochs 4 --resume run")
    assert ranks.metrics(here / "run")[-1]["lr"] == 0.2


def test_a_loss_that_stays_bad_ends_with_exit_code_3(here, digits, fail_in):
    """After three returns; the last checkpoint is from before, though an epoch has ended since."""
    fail_in(range(20, 10**9))
    console = digits(code=3)
    assert console.count("steps in a row were not finite") == recovery.MAX_ROLLBACKS
    assert console.splitlines()[-1].startswith("error:")
    found = checkpoint.load(here / "run", "resnet50_test")
    assert all(tensor.isfinite().all() for tensor in found.weights.values())
    assert found.progress["epoch"] == 0
    assert not ranks.metrics(here / "run")


def test_an_interruption_keeps_the_checkpoint_before_steps_that_were_not_finite(
    here, digits, fail_in, monkeypatch
):
    fail_in(range(20, 10**9))
    monkeypatch.setattr(Trainer, "wish", lambda self, _: int(self.progress.step == 22))
    assert "is of an earlier step, as the loss was not" in digits("--save_every 5", code=130)
    assert checkpoint.load(here / "run").progress["step"] in (15, 20)


def test_divergence_without_a_checkpoint_to_return_to_is_told_apart_from_bad_input():
    restore_last = mock.Mock(side_effect=errors.InputError("last.pt lacks moments"))
    with pytest.raises(errors.NonFiniteLoss, match="at epoch 1, step 0; last.pt lacks moments"):
        recovery.roll_back(Progress(), restore_last, mock.Mock())


def test_an_epoch_of_bad_steps_alone_at_the_end_is_exit_code_3(here, digits, fail_in):
    late = digits("--epochs 1 --bs 400 --lr 1e10 --warmup 0", code=3, out="late")
    assert "the loss after epoch 1 is not finite" in late
    half = digits("--epochs 1 --bs 400 --lr 1e30 --warmup 0 --precision fp16", code=3, out="half")
    assert "the loss after epoch 1 is not finite" in half, "fp16 may skip steps, and no more"
    assert checkpoint.load(here / "late").progress["epoch"] == 0
    fail_in(range(10**9))
    assert "no step of epoch 1 had finite gradients" in digits("--epochs 1 --bs 400", code=3)
    assert checkpoint.load(here / "run").progress["epoch"] == 0, "it can be trained again"


def one_long_operation(lines) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch's data loader does
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by jobs in the background
    with recovery.caught_signals(lines.send):
        lines.send("started")
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # in which Python calls no handler


@each_of("launcher", [False, True])  # under torchrun it is the launcher that ends all
def test_the_first_signal_is_answered_and_the_second_ends_at_once(launcher, monkeypatch):
    for name in ("RANK", "WORLD_SIZE") if launcher else ():
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(recovery, "SAME_SIGNAL_SECONDS", 3.0)  # also on a busy machine
    fork = multiprocessing.get_context("fork")
    lines, sender = fork.Pipe()
    process = fork.Process(target=one_long_operation, args=(sender,))
    process.start()
    try:
        assert lines.recv() == "started"
        for number in (signal.SIGCHLD, signal.SIGHUP):  # the latter is ignored, as by nohup
            os.kill(process.pid, number)
        assert not lines.poll(timeout=0.5)
        os.kill(process.pid, signal.SIGTERM)
        assert lines.poll(timeout=240)
        assert lines.recv() == "stopping after this step; again ends at once"
        os.kill(process.pid, signal.SIGUSR1)  # a sweep repeats that of the terminal
        process.join(timeout=1.1 * recovery.SAME_SIGNAL_SECONDS)
        os.kill(process.pid, signal.SIGXCPU)  # which Linux repeats after each further second
        process.join(timeout=0.5)
        assert process.exitcode is None
        os.kill(process.pid, signal.SIGINT)
        process.join(timeout=1 if launcher else 240)
        assert process.exitcode == (None if launcher else errors.INTERRUPTED)
    finally:
        process.kill()
        process.join()


def test_evaluate_predict_and_export_of_images(finished, monkeypatch):
    monkeypatch.chdir(folder := finished["images"])

    def resumed(words: str) -> list[str]:
        return run("images", "--resume run", words).splitlines()

    pixels = (load_digits().images[0] * 255 / 16).round().astype("uint8")
    Image.fromarray(pixels).save("zero.png")
    warned, *_, line = resumed("--predict zero.png --image_size 16 --bs 3 --arch resnet20")
    assert warned == "warning: --image_size has no effect with --predict: the model stays as it was"
    assert line.startswith("zero.png: 0 ")
    warned = resumed("--evaluate --lr 5 --epochs 9 --weights none.pt")[:2]
    ignored = "has no effect with --evaluate: the model stays as it was"
    assert warned == [f"warning: {name} {ignored}" for name in ("--lr", "--weights")]
    assert conftest.parsed("images", "--resume run --epochs 9 --weights none.pt").weights is None
    metadata = exported_metadata("images")
    content = torch.load(folder / "run" / "last.pt", weights_only=True)
    for name in ("classes", "channels", "size", "mean", "std"):
        assert metadata[name] == content[name]
    assert metadata["arch"] == content["flags"]["arch"]
    content["flags"]["device"] = "cuda:31"
    checkpoint.save(Path("elsewhere.pt"), content)
    assert "zero.png: 0 " in run("images", "--checkpoint elsewhere.pt --predict zero.png")

    resumed("--predict zero.png --predict_out zero.jsonl")
    expected = json.loads(Path("zero.jsonl").read_text())["probabilities"]
    classifier = pickle.loads(pickle.dumps(load("run/last.pt")))
    image = Image.open("zero.png")
    for samples in (["zero.png"] * 3, [Path("zero.png"), image, pixels, image.convert("RGB")]):
        found = classifier.probabilities(samples, batch_size=2)
        for row in found.tolist():
            assert dict(zip(classifier.classes, row)) == pytest.approx(expected, abs=2e-6)
    assert classifier.predict(["zero.png"]) == ["0"]
    assert classifier.probabilities([]).shape == (0, 10)
    for bad in (pixels[:0], pixels[:, :0], Image.new("L", (0, 3)), None, [[1], [1, 2]], "\ud800"):
        with pytest.raises(errors.InputError):
            classifier.predict([bad])
    for alone in ("zero.png", pixels, pixels[..., None].repeat(3, 2)):
        with pytest.raises(TypeError, match="give a list of samples"):
            classifier.predict(alone)
    with mock.patch.object(sys, "argv", ["classify_onnx.py", "model.onnx"]):
        example = runpy.run_path(str(ranks.ROOT / "examples" / "classify_onnx.py"))
    Image.fromarray(257 * pixels.astype("uint16")).save("deep.png")
    Image.fromarray(pixels.repeat(5, 0).repeat(3, 1)).save("tall.png")
    for path, row in zip(
        paths := ["zero.png", "deep.png", "tall.png"], classifier.probabilities(paths)
    ):
        wanted = dict(zip(classifier.classes, row.tolist()))
        assert example["classify"](path) == pytest.approx(wanted, abs=1e-4)
    example["info"]["output"] = ""  # of several labels
    odds = {name: p / (1 - p) for name, p in example["classify"](path).items()}
    shares = {name: each / sum(odds.values()) for name, each in odds.items()}
    assert shares == pytest.approx(wanted, abs=1e-3), "the sigmoid of the same logits"


def exported_metadata(script: str) -> dict:
    """Export the run in each format and assert that all of them say the same of it."""
    card = Path("model.pt2.md")
    card.write_text("# old\n\n## From who publishes it\n\nFor birds alone.\n")
    for name in ("model.onnx", "model.pt2", "model.safetensors"):
        assert "same probabilities" in run(script, "--resume run --export", name)
        assert Path(name).stat().st_size > 100_000
        assert Path(name).stat().st_mode == Path("run/config.json").stat().st_mode
    content, row = torch.load("run/last.pt", weights_only=True), card.read_text().splitlines()
    reached = 100 * content["progress"]["rows"][-1]["test_accuracy"]
    for said in (f"test accuracy {reached:.2f} %", f"{', '.join(content['classes'])} |"):
        assert said in card.read_text()
    assert [row[0], row[-1]] == ["# model.pt2", "For birds alone."], "what was added stays"
    with mock.patch.object(Path, "write_bytes", side_effect=OSError(28, "No space left on device")):
        line = run(script, "--resume run --export model.pt2", code=2).splitlines()[-1]
    assert "model.pt2: cannot be written (No space left on device)" in line, "the old one stays"
    onnxruntime = pytest.importorskip("onnxruntime")
    safetensors = pytest.importorskip("safetensors")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    names = [each.name for each in (*session.get_inputs(), *session.get_outputs())]
    assert names == ["input", "logits"]
    found = [dict(session.get_modelmeta().custom_metadata_map)]
    extra = {"metadata.json": ""}
    torch.export.load("model.pt2", extra_files=extra)
    plain = json.loads(extra["metadata.json"])
    with safetensors.safe_open("model.safetensors", framework="pt") as file:
        found.append(file.metadata())
    assert found[0] == found[1]
    assert {name: json.loads(value) for name, value in found[0].items()} == plain
    return plain


@pytest.mark.process
def test_predict_and_export_of_texts(finished, monkeypatch):
    monkeypatch.chdir(finished["texts"])
    Path("lines.txt").write_text(
        "The striker scored twice as the team won the cup final\n\n"
        "Shares of the bank fell after its profit report\n"
    )
    source, *lines = run("texts", "--resume run --predict lines.txt").splitlines()
    assert source.startswith("weights of run/last.pt: epoch 8, test accuracy ")
    assert [line.split(": ")[1].split()[0] for line in lines] == ["Sports", "Business"]
    texts = Path("lines.txt").read_text().split("\n\n")
    classifier = pickle.loads(pickle.dumps(load("run")))
    assert classifier.predict([f"\ud800 {text}" for text in texts]) == ["Sports", "Business"]
    metadata = exported_metadata("texts")
    assert metadata["classes"] == ["World", "Sports", "Business", "Sci/Tech"]
    assert json.loads(metadata["tokenizer"])["model"]["vocab"]


@pytest.mark.compile
def test_compile_trains_and_its_checkpoint_is_that_of_eager(here):
    small = f"{LINES} --epochs 1 --depth 1 --width 32 --mlp_width 32 --max_len 8"
    run("texts", small, "--backend compile --out run")
    run("texts", "--resume run --backend eager --epochs 2")
    rows = map(json.loads, (here / "run" / "metrics.jsonl").read_text().splitlines())
    first, second = (row["compile_seconds"] for row in rows)
    assert 0 < first == second


@each_of("more", ["", "--dynamic_batch increase --epochs 1"])
def test_the_smaller_last_batches_are_not_compiled_for(more, digits, monkeypatch):
    shapes = []

    def backend(graph, example_inputs):
        shapes.append(tuple(example_inputs[-1].shape))
        return graph.forward

    def compiled(name, model, *, few_shapes, may_fail):
        model.compile(backend=backend)
        return model

    monkeypatch.setattr("backends.execution.apply_backend", compiled)
    torch._dynamo.reset()
    digits(f"--bs 100 --precision fp32 {more}", "dynamic" if more else "static")  # 1,437 rows
    torch._dynamo.reset()
    assert len(shapes) == 1, "one graph for training, and none for evaluation"


def test_a_run_goes_on_where_stdout_is_closed_or_on_a_full_disk(here, monkeypatch):
    with open("/dev/full", "w") as full:
        for out, stdout in (("closed", None), ("full", full)):
            monkeypatch.setattr(sys, "stdout", stdout)
            words = f"{DIGITS} --arch resnet8 --epochs 1 --out {out}"
            assert conftest.call("images", words.split()) == 0
            assert len(ranks.metrics(here / out)) == 1
    with open("/dev/full", "w") as full, mock.patch("sys.stdout", full):  # before it trains
        assert conftest.call("images", f"{words}-noisy --label_noise 0.1".split()) == 2


def test_the_step_gets_the_weight_of_its_share(digits, monkeypatch):
    plan, train_step = DynamicBatchSampler.plan, Trainer.train_step

    def half_weights(*args):
        return [part._replace(weight=0.5) for part in plan(*args)]

    monkeypatch.setattr(DynamicBatchSampler, "plan", half_weights)
    with mock.patch.object(Trainer, "train_step", autospec=True, side_effect=train_step) as spy:
        digits("--epochs 1")
    assert {call.args[3].weight for call in spy.call_args_list} == {0.5}


def test_off_a_terminal_a_run_prints_its_progress(here, digits, monkeypatch):
    def console(log_every: str, seconds: float) -> list[str]:
        """The lines of a run on a clock that goes on with every look at it."""
        clock = itertools.count(1000.0, step=seconds).__next__
        monkeypatch.setattr(RunLog, "clock", staticmethod(clock))
        return digits(f"--log_every {log_every}", log_every).splitlines()

    status = re.compile(r"epoch \d/2, step \d+ of 23: loss \d\.\d{4}, .*left")
    often, never = console("30", seconds=1000.0), console("0", seconds=0.01)
    assert len([line for line in often if status.fullmatch(line)]) >= 4
    assert not [line for line in never if status.fullmatch(line)]
    assert ranks.metrics(here / "30") == ranks.metrics(here / "0")
