"""The legacy stack: ONNX Runtime's training, torchtext, and a stand-in for NVIDIA apex."""

import contextlib
import copy
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

import errors
import ranks
from backends import nvidia_apex, onnx_runtime
from backends.precision import choose_precision
from conftest import each_of, run
from input_pipeline import torchtext_tokenizer
from optimizer_cases import parameters_of
from trainers import build_optimizer, make_trainer, text_model

ORT = onnx_runtime.unavailable_reason()
TORCHTEXT = "" if importlib.util.find_spec("torchtext") else "torchtext is not installed"
needs_ort = pytest.mark.skipif(bool(ORT), reason=ORT)
needs_torchtext = pytest.mark.skipif(bool(TORCHTEXT), reason=TORCHTEXT)
IMAGES = """--dataset digits --arch resnet20 --bs 64 --lr 0.05 --epochs 2 --subset 0.5 --threads 1
    --backend ort --save_every 3 --keep 99"""
TEXTS = """--dataset headlines --bs 16 --lr 4e-4 --epochs 3 --threads 1 --depth 1 --width 64
    --backend ort --tokenizer torchtext"""


class Smooth(nn.Module):
    """Convolutions, batch-norms and GELUs: a smooth function, so that rounding stays rounding."""

    def __init__(self) -> None:
        super().__init__()
        strided = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.GELU()),
            *(strided, nn.BatchNorm2d(8, momentum=0.3), nn.GELU()),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def images(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 3, 12, 12).to(memory_format=torch.channels_last),)


def texts(rows: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(3, 50, (rows, 4 + rows % 5), dtype=torch.int32)
    tokens[0, 2:] = 0
    return (tokens,)


def mixed_texts(rows: int) -> tuple[torch.Tensor, ...]:
    return (*texts(rows), torch.randperm(rows), torch.rand(rows))


def transformer(**settings: object) -> nn.Module:
    return text_model(depth=2, **settings).float()


@needs_ort
@each_of(
    ("make", "batch"),
    [
        (Smooth, images),
        (transformer, texts),
        (transformer, mixed_texts),
        (lambda: transformer(mix_at="tokens"), mixed_texts),
    ],
)
def test_gradients_and_statistics_are_those_of_torch(make, batch):
    ours = make()
    plain = copy.deepcopy(ours)
    names = list(ours.state_dict())
    onnx_runtime.apply(ours)
    for rows in (6, 9, 5):  # batches of other sizes go through the same graph
        inputs = batch(rows)
        weight = torch.randn(rows, 4)
        for model in (ours, plain):
            model.zero_grad(set_to_none=True)
            (model(*inputs) * weight).sum().backward()
        for name, expected in plain.named_parameters():
            given = dict(ours.named_parameters())[name].grad
            atol = 1e-5 * expected.grad.abs().max().item()
            torch.testing.assert_close(given, expected.grad, rtol=1e-4, atol=atol, msg=name)
    assert list(ours.state_dict()) == names
    for name, expected in plain.state_dict().items():
        # ONNX divides variances by n, torch by n - 1; the smallest n here is 125.
        rtol = 0.01 if name.endswith("running_var") else 1e-5
        given = ours.state_dict()[name]
        torch.testing.assert_close(given, expected, rtol=rtol, atol=1e-6, msg=name)
    ours.load_state_dict(plain.state_dict())
    for model in (ours, plain):
        model.eval()
    inputs = batch(7)
    torch.testing.assert_close(ours(*inputs), plain(*inputs), rtol=1e-5, atol=1e-5)


class Unexportable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.matrix_exp(torch.outer(self.weight, x[0]))


@needs_ort
def test_what_onnx_runtime_does_not_compute_is_refused():
    model, unexportable = Smooth(), Unexportable()
    for each in (model, unexportable):
        onnx_runtime.apply(each)
    model.forward.graph = model.forward.eager  # what ORTModule's own fallback does
    with pytest.raises(errors.InputError, match="ran in torch"):
        model(*images(4))
    with pytest.raises(errors.InputError, match="cannot be exported"):
        unexportable(torch.ones(1, 3))


@needs_ort
@each_of(
    ("size", "more"), [(1, "--mixup cutmix"), (1, "--meta_learning --ngd"), (2, "--accumulate 2")]
)
def test_images_through_ort_learn_and_resume_bit_for_bit(size, more, tmp_path):
    folder = tmp_path / more.replace(" ", "")
    console = ranks.run(f"resnet50_test.py {IMAGES} {more} --out whole", folder, size)
    assert "fp32, ort" in console
    first, last = ranks.metrics(folder / "whole")
    assert last["train_loss"] < first["train_loss"]
    words = "resnet50_test.py --resume whole/last-2.pt --out resumed"
    ranks.run(words, folder, size)
    ranks.same_run(folder / "whole", folder / "resumed")


@needs_ort
@needs_torchtext
def test_texts_through_ort_and_torchtext_learn_and_predict(here):
    run("texts", TEXTS, "--out run")
    accuracy = ranks.metrics(here / "run")[-1]["test_accuracy"]
    assert accuracy > 0.5
    (here / "lines.txt").write_text("Striker scores twice as United win the final\n")
    assert "Striker" in run("texts", "--resume run --predict lines.txt")
    assert f"{100 * accuracy:.2f} %" in run("texts", "--resume run --evaluate")


@needs_torchtext
def test_torchtext_gives_words_by_frequency():
    learnt = torchtext_tokenizer.train(
        ["Oil up, oil down", "oil UP [PAD]"], 6, special_tokens=["[PAD]", "[UNK]", "[CLS]"]
    )
    assert learnt.get_vocab_size() == 6
    encodings = learnt.encode_batch_fast(["up OIL gas", ""])
    assert [encoding.ids for encoding in encodings] == [[2, 4, 3, 1], [2]]
    again = torchtext_tokenizer.TorchtextTokenizer.from_str(learnt.to_str())
    texts = ["oil, gas up"]
    assert again.encode_batch_fast(texts) == learnt.encode_batch_fast(texts)
    assert again.to_str() == learnt.to_str()


@each_of(
    ("script", "flags", "reason"),
    [
        ("images", "--backend ort", ORT),
        ("texts", "--tokenizer torchtext", TORCHTEXT),
        ("images", "--precision apex_O1", nvidia_apex.unavailable_reason()),
    ],
)
def test_what_is_not_installed_is_named_with_the_way_to_install_it(script, flags, reason, refused):
    if reason:
        line = refused(script, flags, flags.split()[0])
        assert "requirements-legacy.txt" in line or "github.com/NVIDIA/apex" in line


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with the documented interface; it scales losses by 1,024."""
    amp, root = types.ModuleType("apex.amp"), types.ModuleType("apex")
    amp.calls, amp.scale = [], 1024.0

    def initialize(models, optimizers=None, enabled=True, opt_level="O1", verbosity=1):
        amp.calls.append(opt_level)
        return models, optimizers

    @contextlib.contextmanager
    def scale_loss(loss, optimizers):
        before = [(p, p.grad) for p in parameters_of(optimizers)]
        optimizers.zero_grad(set_to_none=True)
        yield loss * amp.scale
        for p, old in before:
            if p.grad is not None:
                p.grad = p.grad / amp.scale + (0 if old is None else old)

    amp.initialize, amp.scale_loss = initialize, scale_loss
    root.__spec__ = types.SimpleNamespace(name="apex")
    for module in (root, amp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return amp


@each_of("level", nvidia_apex.LEVELS)
@each_of("accumulate", [1, 3])
def test_a_step_under_amp_is_the_step_in_fp32(level, accumulate, amp):
    results = []
    for name in ("fp32", level):
        torch.manual_seed(0)
        optimizer = build_optimizer(model := Smooth(), "sgd", 0.1, 1e-3)
        settings = {"accumulation_steps": accumulate, "max_grad_norm": 0.5}
        settings["precision"] = choose_precision(name, torch.device("cpu"))
        trainer = make_trainer(model, optimizer, **settings)
        for _ in range(3):
            trainer.train_step(torch.randn(6, 3, 12, 12), torch.randint(4, (6,)))
        results.append((trainer.sums.values.clone(), *trainer.model.state_dict().values()))
    assert amp.calls.pop() == level.removeprefix("apex_")
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_the_registrys_apex_is_not_taken_for_nvidias(tmp_path, monkeypatch):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("import zope_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "no apex.amp" in nvidia_apex.unavailable_reason()
