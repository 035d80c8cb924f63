"""Damaged recipes, checkpoints and data sets: exit code 2 and one line that names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import conftest
import resnet50_test
from cli import options
from conftest import each_of
from input_pipeline import image_batches

Refused = Callable[..., str]


# -------------------------------------------------------------------- recipes and checkpoints


ALIAS_BOMB = b"lr: [&a0 [%s], %s]" % (
    b", ".join([b"1"] * 9),
    b", ".join(b"&a%d [%s]" % (n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10)),
)
COMMAND_LINE = "help recipe resume checkpoint evaluate predict predict_out export config".split()


@each_of(
    ("text", "names"),
    [
        (b"lr: [", "not YAML"),
        (b"just words", "flag: value"),
        (b"", "flag: value"),
        (b"learning: 1", "--learning"),
        (b"epo: 1", "--epo"),
        (b"lr: fast", "--lr"),
        (b"bs: 0", "--bs"),
        (b"lr:", "--lr"),
        (b"\xff\xfe\x00binary", "not YAML"),
        (b"lr: 2024-13-45", "not YAML (month must be in 1..12)"),
        (b"lr: !!int abc", "not YAML"),
        (b"lr: !!timestamp abc", "not YAML"),
        (b"[" * 3000, "not YAML"),
        (ALIAS_BOMB, "--lr: [1, 1"),
        (b"lr: false", "--lr: false is not a value of this flag; give its value"),
        (b"warmup: off", "--warmup: false"),
        (b"augment: yes", "--augment: true is not a value of this flag; choose one of standard, "),
        (b"milestones: [3, true]", "--milestones: True"),
        (b"betas: [no, 0.9]", "--betas: False"),
        (b"out:", "--out: None"),
        (b"out: ''", "--out: the value is empty"),
        (b"fuse: 3", "--fuse: must be true or false"),
        (b"fuse: []", "--fuse: must be true or false"),
        (b"torch_compile: eager", "--torch_compile: must be true or false"),
        (b"lr: {log: 1}", "--lr: {'log': 1}"),
        (b"lr: 1\nlr: 2", "lr is there twice"),
        (b"lr: 1\nlearning-rate: 2", "lr and learning-rate are the same flag"),
        (b"torch_compile: true\nbackend: eager", "torch_compile and backend are the same flag"),
        *((f"{name}: true".encode(), f"{name}: a recipe cannot hold") for name in COMMAND_LINE[1:]),
    ],
)
def test_wrong_recipe_is_named(text: bytes, names: str, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "fast.yaml").write_bytes(text)
    assert "fast.yaml" in refused("images", "--recipe fast.yaml", names)


def cut(path: Path, length: int = 5000) -> None:
    path.write_bytes(path.read_bytes()[:length])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a checkpoint"),
    "tensor": lambda path: torch.save(torch.zeros(3), path),
    "weights": lambda path: torch.save({"model": {"w": torch.zeros(3)}}, path),
    "objects": lambda path: torch.save({"format": Path("x")}, path),
    "protocol": lambda path: torch.save(
        [1], path, pickle_protocol=4, _use_new_zipfile_serialization=False
    ),
}


def test_file_that_is_no_checkpoint_is_named(
    runs: dict[str, Path], refused: Refused, tmp_path: Path
) -> None:
    for damage in DAMAGE.values():
        shutil.copy(runs["images"] / "last.pt", tmp_path / "mine.pt")
        damage(tmp_path / "mine.pt")
        refused("images", "--resume mine.pt", "mine.pt")


@each_of(
    ("name", "extra", "names"),
    [
        ("images", "--resume {texts}", "transformer_test"),
        ("texts", "--resume {images}", "resnet50_test"),
        ("images", "--resume {images} --export model.txt", "model.txt"),
        ("images", "--resume {images} --epochs 2 --arch resnet32", "--resume"),
        ("images", "--resume {images} --epochs 2 --optimizer adamw", "--resume"),
        ("images", "--resume {images} --epochs 2 --ngd", "--resume"),
        ("texts", "--resume {texts} --epochs 2 --depth 2", "--resume"),
        ("images", "--resume {images} --predict nowhere.png", "nowhere.png"),
        ("images", "--resume {images} --predict text.png", "text.png"),
        ("images", "--resume {images} --predict .", "text.png: not a readable image"),
        ("images", "--resume {images} --predict {images}", "contains no images"),
        ("texts", "--resume {texts} --predict {texts}", "contains no .txt files"),
        ("texts", "--resume {texts} --predict nowhere.txt", "nowhere.txt"),
        ("texts", "--resume {texts} --predict image.txt", "image.txt"),
        ("texts", "--resume {texts} --predict empty.txt", "empty.txt"),
        ("images", "--resume {images} --export none/model.pt2", "none/model.pt2"),
    ],
)
def test_checkpoint_that_does_not_match_the_flags_is_named(
    name: str, extra: str, names: str, runs: dict[str, Path], refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "text.png").write_text("words")
    (tmp_path / "empty.txt").write_text(" \n")
    Image.new("RGB", (8, 8), (200, 180, 255)).save(tmp_path / "image.png")
    (tmp_path / "image.png").rename(tmp_path / "image.txt")
    copies = {
        script: shutil.copytree(folder, tmp_path / script, dirs_exist_ok=True)
        for script, folder in runs.items()
    }
    refused(name, extra.format(**copies), names, base="--device cpu --threads 1")


def change_flags(path: Path, **values: object) -> None:
    state = torch.load(path, weights_only=True)
    torch.save({**state, "flags": state["flags"] | values}, path)


@each_of(
    ("name", "flag", "value", "advice"),
    [
        ("images", "mixup", "sample", "choose one of none, mixup, intra"),
        ("images", "optimizer", "adagrad", "choose one of sgd, "),
        ("images", "lr", "fast", "give its value on the command line"),
        ("images", "nesterov", "no", "give its value"),
        ("images", "betas", [0.9, 2.0], "give its value"),
        ("texts", "prior", "max", "choose one of none, naive_bayes"),
    ],
)
def test_value_of_a_checkpoint_that_is_not_known_is_named(
    name: str,
    flag: str,
    value: object,
    advice: str,
    runs: dict[str, Path],
    refused: Refused,
    tmp_path: Path,
) -> None:
    shutil.copytree(runs[name], tmp_path / "run", dirs_exist_ok=True)
    change_flags(tmp_path / "run" / "last.pt", **{flag: value})
    line = refused(name, "--resume run --epochs 2", advice, base="")
    assert f"the checkpoint's --{flag} " in line
    assert "is not supported any more" in line


def test_value_that_inference_does_not_need_may_be_unknown(
    runs: dict[str, Path], refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("images", "texts"):
        shutil.copytree(runs[name], tmp_path / name)
        change = {"optimizer": "adagrad", "mixup": "sample", "lr": "fast"}
        change_flags(tmp_path / name / "last.pt", **change)
        script, _ = conftest.SCRIPTS[name]
        words = f"--checkpoint {tmp_path / name} --evaluate --device cpu --threads 1"
        assert conftest.call(script, words.split()) == 0
        assert "weights of" in capsys.readouterr().out
    change_flags(tmp_path / "texts" / "last.pt", model_args={"pooling": "max"})
    refused("texts", "--checkpoint texts --evaluate", "pooling=max must be mean or cls", base="")


def test_value_that_is_not_known_can_be_replaced(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["images"], tmp_path / "run")
    change_flags(tmp_path / "run" / "last.pt", mixup="sample", mixup_args={"width": 3})
    words = f"--resume {tmp_path / 'run'} --epochs 2 --mixup cutmix"
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", words.split())
    assert (args.mixup, args.arch) == ("cutmix", "resnet20")


@each_of(("name", "entry"), [("images", "mean"), ("texts", "tokenizer")])
def test_checkpoint_without_what_inference_needs_is_named(
    name: str, entry: str, runs: dict[str, Path], refused: Refused, tmp_path: Path
) -> None:
    state = torch.load(runs[name] / "last.pt", weights_only=True)
    del state[entry]
    torch.save(state, tmp_path / "mine.pt")
    refused(name, "--checkpoint mine.pt --evaluate", f"incomplete (it has no {entry})", base="")


def test_model_that_does_not_fit_is_said_with_the_flag_and_the_reason(
    runs: dict[str, Path], refused: Refused
) -> None:
    extra = f"--checkpoint {runs['texts']} --evaluate --depth 3 --device cpu"
    line = refused("texts", extra, "Missing key(s) in state_dict", base="")
    assert line.startswith("error: --checkpoint: the checkpoint's model does not fit")


# -------------------------------------------------------------------- data


@each_of("name", ["cifar10", "mnist"])
def test_damaged_data_set_is_named(name: str, refused: Refused, tmp_path: Path) -> None:
    cifar, mnist = tmp_path / "data" / "cifar-10-batches-py", tmp_path / "data" / "MNIST" / "raw"
    if name == "cifar10":
        cifar.mkdir(parents=True)
        (cifar / "data_batch_1").write_bytes(b"\x80\x02}q\x01(U")
    else:
        mnist.mkdir(parents=True)
        for part, rows in (("train", 60_000), ("t10k", 10_000)):
            for kind, sizes in (("images-idx3", (rows, 28, 28)), ("labels-idx1", (rows,))):
                metadata = bytes([0, 0, 8, len(sizes)]) + np.array(sizes, dtype=">i4").tobytes()
                (mnist / f"{part}-{kind}-ubyte").write_bytes(metadata + bytes(1000))  # cut short
    refused(
        "images",
        f"--dataset {name} --data_dir data",
        f"{cifar if name == 'cifar10' else mnist}".removeprefix(f"{tmp_path}/"),
    )


GOOD_CSV = b"spam,win a prize\nham,see you soon\n" * 20


@each_of(
    ("part", "content", "names"),
    [
        ("train", None, "train.csv is missing"),
        ("test", None, "test.csv is missing"),
        ("train", b"", "train.csv is empty"),
        ("test", b"", "test.csv is empty"),
        ("train", GOOD_CSV + b"ham,one,two\n", "train.csv, row 41"),
        ("train", b"ham\nspam\n", "train.csv, row 1"),
        ("test", b"ham,a\nspam,b,c\n", "test.csv, row 2"),
        ("train", b"ham,a\nham,b\n", "train.csv"),
        ("train", GOOD_CSV + b'ham,"never closed\n', "train.csv"),
        ("train", b"\x00\x01\x02" * 100, "train.csv is not UTF-8"),
    ],
)
def test_wrong_csv_is_named_with_its_row(
    part: str, content: bytes | None, names: str, refused: Refused, tmp_path: Path
) -> None:
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_bytes(GOOD_CSV)
    path = tmp_path / f"{part}.csv"
    path.unlink() if content is None else path.write_bytes(content)
    refused("texts", f"--dataset csv --data_dir {tmp_path} --vocab_size 300 --bs 4", names)


WRONG_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda root: shutil.rmtree(root / "train"), "train is missing"),
    (lambda root: shutil.rmtree(root / "test"), "test is missing"),
    (lambda root: [shutil.rmtree(folder) for folder in (root / "test").iterdir()], "test"),
    (lambda root: shutil.rmtree(root / "train" / "dog"), "train"),
    (lambda root: [path.unlink() for path in (root / "train" / "dog").iterdir()], "train/dog"),
    (lambda root: (root / "test" / "emu").mkdir(), "test/emu"),
    (lambda root: (root / "train" / "cat" / "3.png").write_text("words"), "train/cat/3.png"),
    (lambda root: cut(root / "train" / "cat" / "3.png", 100), "train/cat/3.png"),
    # A worker process notices this one where images are streamed.
    (lambda root: cut(root / "test" / "cat" / "3.png", 100), "test/cat/3.png"),
]


def test_wrong_image_folder_is_named(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for path in (f"good/{part}/{name}" for part in ("train", "test") for name in ("cat", "dog")):
        (tmp_path / path).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(pixels).save(tmp_path / path / f"{i}.png")
    base = (
        "--dataset folder --arch resnet20 --epochs 1 --bs 4 --device cpu --precision fp32 "
        "--threads 1 --image_size 8 --workers 1"
    )
    for number, (damage, names) in enumerate(WRONG_FOLDERS):
        folder = shutil.copytree(tmp_path / "good", tmp_path / str(number))
        damage(folder)
        for in_memory in (True, False):
            monkeypatch.setattr(image_batches, "fits_in_memory", lambda *_, fits=in_memory: fits)
            refused("images", f"--data_dir {folder}", names, base)
