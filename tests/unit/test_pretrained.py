"""Fine-tuning: which files give weights, the classifier, frozen layers, rates of layers."""

import copy
import json
import pickle
import re
import shutil
import urllib.error
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn
from torchvision import models

import ranks
from cli import fine_tuning
from conftest import each_of, run, write, write_images
from errors import InputError
from input_pipeline.text_datasets import read_headlines
from models import image_models, pretrained
from models.image_models import create_model
from models.pretrained import SavedModel
from test_checkpoint import flip
from training import checkpoint, linear_probe

SOURCE = "--dataset digits --arch resnet8 --bs 64 --lr 0.1 --epochs 6 --threads 1 --ema 0.9"
TUNE = """--dataset folder --data_dir small --image_size 8 --augment none --arch resnet8
    --optimizer sgd --bs 25 --lr 0.02 --epochs 3 --threads 1 --warmup 0"""
TEXT_SOURCE = """--dataset headlines --width 32 --depth 1 --heads 2 --mlp_width 64 --bs 32
    --epochs 12 --lr 5e-3 --dropout 0 --token_dropout 0.2 --threads 1"""
TEXT_TUNE = f"{TEXT_SOURCE} --dataset csv --data_dir few --bs 8 --lr 2e-3 --epochs 6"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, with averaged weights."""
    folder = tmp_path_factory.mktemp("images") / "run"
    run("images", SOURCE, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def text_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the embedded headlines."""
    folder = tmp_path_factory.mktemp("texts") / "run"
    run("texts", TEXT_SOURCE, "--out", folder)
    return folder


@pytest.fixture
def small(here: Path) -> Path:
    """Another data set: digits 5 to 9 as images in colour, ten of each in training."""
    digits = load_digits()
    for label in range(5, 10):
        images = (digits.images[digits.target == label] * 255 / 16).round().astype("uint8")
        for number, pixels in enumerate(images[:110]):
            folder = here / "small" / ("train" if number < 10 else "test") / f"class-{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return here / "small"


def test_a_probe_is_a_logistic_regression():
    inputs = torch.randn(300, 40) @ torch.randn(40, 40) + 3
    labels = (inputs[:, :3] + torch.randn(300, 3)).argmax(1)
    scaler = StandardScaler().fit(inputs)
    solver = {"C": 1 / (linear_probe.DECAY * 300), "tol": 1e-9, "max_iter": 10**4}
    scaled = scaler.transform(inputs)
    for factors in ([1.0, 1.0, 1.0], [0.5, 4.0, 1.0]):
        reference = LogisticRegression(**solver, class_weight=dict(enumerate(factors)))
        expected = reference.fit(scaled, labels).predict_proba(scaled)
        weights = torch.tensor(factors)
        weight, bias = linear_probe.fit_probe(inputs, labels, classes=3, class_weights=weights)
        found = (inputs.double() @ weight.T + bias).softmax(1)
        torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-3, atol=1e-4)


def test_a_new_classifier_begins_as_a_probe_and_statistics_stay(source, small):
    weights = f"--weights {source}/best.pt --lr 1e-9 --epochs 1"
    console = run("images", TUNE, weights, "--out probe")
    probed = float(re.search(r"linear probe: ([\d.]+) %", console)[1]) / 100
    found, other = ranks.metrics(Path("probe"))[-1], "--head random --out random"
    assert "linear probe" not in run("images", TUNE, weights, other)
    assert found["train_accuracy"] > 0.8 > ranks.metrics(Path("random"))[-1]["train_accuracy"]
    assert probed > 0.5
    first, tuned = (
        torch.load(path, weights_only=True) for path in (source / "best.pt", Path("probe/last.pt"))
    )
    statistics = "bn1.running_var"
    assert torch.equal(first["average"]["weights"][statistics], tuned["model"][statistics])
    kept = run("images", TUNE, "--weights probe --epochs 1 --no-freeze_norms --out again")
    moved = torch.load("again/last.pt", weights_only=True)["model"]
    assert not torch.equal(moved[statistics], tuned["model"][statistics])
    assert "fc keeps all outputs" in kept
    assert "linear probe" not in kept, "it would undo what was trained"
    for image in (small / "train" / "class-5").glob("[0-4].png"):
        image.unlink()
    with mock.patch.object(linear_probe, "fit_probe", wraps=linear_probe.fit_probe) as fit:
        for flags in ("--class_weights balanced", "--balanced_sampling"):
            run("images", TUNE, weights, flags, "--bs 10 --out weighted" + flags[2:4])
            factors = fit.call_args.kwargs["class_weights"]
            torch.testing.assert_close(factors, torch.tensor([2.0, 1, 1, 1, 1]) * 0.9)
    beside = f"the linear probe of {100 * probed:.2f} %"
    assert beside in console.splitlines()[-1]
    assert beside in run("images", "--resume probe --epochs 2").splitlines()[-1]


def test_a_frozen_network_stays_and_computes_each_row_once(source, small, monkeypatch):
    """With the same result; and a run that goes on is the uninterrupted one."""
    forward, computed = nn.Conv2d.forward, []

    def counted(layer: nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
        computed.append(len(inputs) * (layer.in_channels == 3))  # the first layer
        return forward(layer, inputs)

    monkeypatch.setattr(nn.Conv2d, "forward", counted)
    frozen = f"--weights {source}/best.pt --freeze --precision fp32 --keep 9"
    run("images", TUNE, frozen, "--out once")
    assert 50 + 500 <= sum(computed) < 50 + 500 + 10, "and when the model was made"
    first = torch.load(source / "best.pt", weights_only=True)["average"]["weights"]
    first["conv1.weight"] = first["conv1.weight"].expand(-1, 3, -1, -1) / 3  # grey to colours
    tuned = ranks.weights(Path("once"))
    same = {name for name in first if torch.equal(first[name], tuned[name])}
    assert first.keys() - same == {"fc.weight", "fc.bias"}, "also BatchNorm's statistics stay"
    run("images", "--resume once/last-2.pt --out rest")
    with mock.patch("cli.fine_tuning.keeps_features", return_value=False):
        run("images", TUNE, frozen, "--out each")
    once, rest, each = (ranks.metrics(Path(name)) for name in ("once", "rest", "each"))
    times = json.loads(Path("once/metrics.jsonl").read_text().splitlines()[0])
    of_steps = times["train_seconds"] + times["eval_seconds"]
    assert times["seconds"] - of_steps > 0.001, "what the network computed counts"
    for name in ("train_loss", "test_loss", "test_accuracy"):
        assert [row[name] for row in rest] == [row[name] for row in once]
        assert [row[name] for row in each] == pytest.approx([row[name] for row in once], rel=1e-4)


def test_frozen_layers_stay_in_evaluation_mode_in_every_form_of_the_model():
    head = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(), head)
    pretrained.freeze_all_but(model, pretrained.classifier_names(model))
    for each in (model, pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        nn.Sequential(each.eval()).train()  # as DistributedDataParallel does
        assert [module.training for module in each.modules()] == 4 * [False] + 3 * [True]


@pytest.fixture
def few_texts(here: Path) -> None:
    """Rows of the headlines under other classes, 16 of them to train on."""
    rows = read_headlines()["test"]
    names = ["affairs", "play", "affairs", "play"]  # World, Sports, Business, Sci/Tech
    texts = (text.replace('"', "'") for text in rows.texts)
    lines = [f'{names[label]},"{text}"\n' for label, text in zip(rows.labels, texts)]
    train, test = ("".join(["label,text\n", *part]) for part in (lines[::5], lines[1::5]))
    write(here / "few", train__csv=train, test__csv=test)


def test_an_exported_classifier_is_tuned_with_its_tokenizer(text_source, few_texts):
    run("texts", "--checkpoint", text_source, "--export text.safetensors")
    words = "--weights text.safetensors --freeze --prior naive_bayes --out tuned"
    console = run("texts", TEXT_TUNE, words)
    assert "head begins anew" in console
    first = torch.load(text_source / "last.pt", weights_only=True)
    tuned = torch.load("tuned/last.pt", weights_only=True)
    assert tuned["tokenizer"] == first["tokenizer"]
    assert torch.equal(tuned["model"]["embed.weight"], first["model"]["embed.weight"])
    assert "prior" in tuned["model"]


def test_weights_of_another_model_are_refused(source, text_source, few_texts, refused, here):
    shutil.copy(source / "last.pt", "flipped.pt")
    flip(here / "flipped.pt")
    for flags, expected in (
        ("--freeze", "--freeze needs --weights"),
        (f"--weights {source}", "holds no tokenizer"),
        ("--weights flipped.pt", "is no readable file of weights"),
        ("--weights DEFAULT", "there are none for texts"),
        (f"--weights {text_source} --width 32 --depth 1 --heads 4", "heads=2"),
    ):
        refused("texts", f"--dataset csv --data_dir few {flags}", expected)


@each_of(("saved", "own"), [(1, 3), (3, 1)])
def test_grey_images_give_the_same_features_through_colour_weights(saved, own):
    weight, fresh = (nn.Conv2d(channels, 4, 3).weight.detach() for channels in (saved, own))
    fitted = pretrained.fit_channels(weight, fresh)
    x = torch.randn(2, 1, 6, 6)
    mine, theirs = (x.expand(-1, channels, -1, -1) for channels in (own, saved))
    torch.testing.assert_close(
        nn.functional.conv2d(mine, fitted), nn.functional.conv2d(theirs, weight)
    )


def create_named(arch: str = "resnet8") -> nn.Module:
    return create_model(arch, classes=5, channels=1, image_size=8)


def load_into(model: nn.Module, saved: SavedModel, classes="abcde") -> str:
    return pretrained.load_pretrained(model, saved, "x", classes=list(classes))[0]


def test_weights_of_many_kinds_of_files(tmp_path):
    state = {name: value.clone() for name, value in create_named().state_dict().items()}
    bias = state["fc.bias"]
    files = {
        "a.safetensors": state,
        "DDP": {"state_dict": {f"module.{n}": v for n, v in state.items()}},
        "compiled": {n.replace("layer1.", "layer1._orig_mod."): v for n, v in state.items()},
        "Lightning": {
            "state_dict": {f"model.{n}": v for n, v in state.items()} | {"loss.weight": bias},
            "optimizer_states": [{"state": {}}],
        },
        "a name of its own": {"net": {f"backbone.net.{n}": v for n, v in state.items()}},
        "with numbers beside": {**state, "epoch": 3},
        "timm": {"state_dict": {"a.b": bias}, "state_dict_ema": state, "args": Namespace(lr=1)},
        "beside an optimizer": {"net": state, "optimizer": {"state": {0: {"m": bias}}}},
    }
    for name, content in files.items():
        path = tmp_path / name
        (safetensors.torch.save_file if name == "a.safetensors" else torch.save)(content, path)
        other = create_named()
        saved = pretrained.read_saved_model(path)
        assert "fc begins anew" in load_into(other, saved), "whose classes are not known"
        line = load_into(other, replace(saved, classes=list("abcde")))
        assert line.startswith(f"weights of x: {len(state)} tensors"), name
        assert all(torch.equal(v, state[n]) for n, v in other.state_dict().items()), name


def test_a_model_of_timm_says_which_layers_classify():
    model = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(2, 3, 1), nn.Linear(2, 3))
    for said, numbers in ((None, [2]), ("1", [1]), (("0", "2"), [0, 2])):
        model.default_cfg = {"classifier": said}
        names = [f"{number}.{name}" for number in numbers for name in ("weight", "bias")]
        assert pretrained.classifier_names(model) == names


def test_weights_are_refused_by_what_is_wrong():
    state = create_named().state_dict()
    cases = {
        "mismatch for conv1.weight": state | {"conv1.weight": torch.zeros(16, 1, 5, 5)},
        'Unexpected key(s) in state_dict: "conv9.weight"': state | {"conv9.weight": torch.zeros(3)},
    }
    for message, weights in cases.items():
        with pytest.raises(InputError, match=re.escape(message)):
            load_into(create_named(), SavedModel(weights))
    with pytest.raises(InputError, match=r"x: not of this model \(architecture"):
        load_into(create_named(), SavedModel(create_named("resnet20").state_dict()))


def test_files_without_the_weights_of_one_model_are_refused(tmp_path, capsys):
    state, path = create_named().state_dict(), tmp_path / "x.pt"
    with_object = {"state_dict": state, "hyper_parameters": Path("x")}
    for content, message in (
        ({"params": state, "params_ema": state}, r"of several models \(params, params_ema\)"),
        (with_object, r"objects of Python .*\(pathlib.*the state_dict"),
        ({"epoch": 3}, "holds no weights by their names"),
    ):
        torch.save(content, path)
        with pytest.raises(InputError, match=message):
            pretrained.read_saved_model(path)
    with pytest.raises(InputError, match="no such file"):
        pretrained.read_saved_model(tmp_path / "missing.pt")
    torch.save({"model": state}, tmp_path / "last-1.pt")
    (tmp_path / "last.pt").write_bytes((tmp_path / "last-1.pt").read_bytes()[:-900])
    assert fine_tuning.read_weights(tmp_path).weights.keys() == state.keys()
    assert "last.pt is damaged; " in capsys.readouterr().err
    for content in (b"", b"nothing", b"PK\x03\x04 half an archive"):
        for name in ("x.pt", "x.safetensors"):
            (tmp_path / name).write_bytes(content)
            message = f"{tmp_path}/{name}: (cannot be read|is no readable)"
            with pytest.raises(InputError, match=message):
                pretrained.read_saved_model(tmp_path / name)


def test_the_classifier_keeps_the_outputs_of_classes_of_the_same_name():
    """Also where the name is written in another form of Unicode or another case."""
    model, other = create_named(), create_named()
    own = model.fc.weight.detach().clone()
    saved = SavedModel(other.state_dict(), ["A", "b", "cafe\u0301", "d", "e"])
    line = load_into(model, saved, ["e", "x", "a", "y", "caf\u00e9"])
    assert line.endswith("tensors; in fc begin anew: x, y")
    for row, saved_row in ((0, 4), (2, 0), (4, 2)):
        assert torch.equal(model.fc.weight[row], other.fc.weight[saved_row])
        assert model.fc.bias[row] == other.fc.bias[saved_row]
    assert torch.equal(model.fc.weight[[1, 3]], own[[1, 3]])
    assert "fc begins anew" in load_into(model, saved, "vwxyz")
    names = ("vwxyz", "abxyz", ["d", "e", "a", "b", "caf\u00e9"])
    anew = [pretrained.load_pretrained(model, saved, "x", classes=each)[1] for each in names]
    assert anew == [True, True, False], "a probe leaves no output random"


def test_pretrained_weights_bring_their_preprocessing(here, monkeypatch):
    """Into the run, its export and its predictions; a run resumed or tuned from there keeps it."""
    write_images(here / "images", ("a", "b"), rows=3, size=40)
    known = models.ResNet18_Weights.DEFAULT
    cached = here / "hub" / "checkpoints" / Path(known.url).name
    cached.parent.mkdir(parents=True)
    torch.save(models.resnet18().state_dict(), cached)
    monkeypatch.setenv("TORCH_HOME", str(here))
    tune = "--dataset folder --data_dir images --arch resnet18 --bs 3 --epochs 1 --threads 1"
    tune = f"{tune} --no-baseline --weights"
    console = run("images", tune, "DEFAULT --out first")
    assert "images are prepared as for them" in console
    run("images", tune, "first --out tuned")
    run("images", tune, cached, "--image_size 224 --out plain")
    run("images", "--checkpoint tuned --export x.safetensors")
    with safetensors.safe_open("x.safetensors", "pt") as file:
        exported = {name: json.loads(text) for name, text in file.metadata().items()}
    expected = known.transforms()
    for name in ("first", "tuned", "plain", "export"):
        state = exported if name == "export" else checkpoint.load(here / name).metadata
        assert (state["mean"], state["std"]) == (expected.mean, expected.std), name
        assert (state["size"], state["interpolation"]) == (224, "bilinear"), name
    predicted = run("images", "--checkpoint tuned --predict images/test")
    assert "images/test/b/02.png: " in predicted


def test_what_is_known_of_pretrained_weights():
    assert image_models.usual_preprocessing("resnet8") == {}
    found = image_models.usual_preprocessing("timm:vit_tiny_patch16_224")
    halves = [0.5, 0.5, 0.5]
    assert found == {"mean": halves, "std": halves, "interpolation": "bicubic", "size": 224}


def test_weights_that_need_a_network_are_refused_at_once_without_one(monkeypatch, tmp_path):
    no_network = urllib.error.URLError("no network in tests")
    monkeypatch.setattr(torch.hub, "urlopen", mock.Mock(side_effect=no_network))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    expected = "those of resnet18 could not be downloaded \\(no network in tests\\); give a file"
    with pytest.raises(InputError, match=expected):
        image_models.default_weights("resnet18")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", mock.Mock(side_effect=no_network))
    with pytest.raises(InputError, match=expected.replace("resnet18", "timm:resnet10t")):
        image_models.default_weights("timm:resnet10t")
