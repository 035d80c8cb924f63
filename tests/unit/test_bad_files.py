"""Damaged recipes, checkpoints and data sets: exit code 2 and one line that names the file."""

import os
import shutil
from pathlib import Path

import torch

from conftest import SHORT, for_each, write_images
from input_pipeline import image_batches
from training import checkpoint

ALIAS_BOMB = b"lr: [&a0 [%s], %s]" % (
    b", ".join([b"1"] * 9),
    b", ".join(b"&a%d [%s]" % (n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 10)),
)
COMMAND_LINE = "recipe resume checkpoint evaluate predict predict_out export config help".split()


WRONG_RECIPES = [
    (b"lr: [", "not YAML"),
    (b"", "flag: value"),
    (b"\xff\xfe\x00binary", "not YAML"),
    (b"lr: 2024-13-45", "must be a number, got '2024-13-45'"),
    (b"lr: 0.1\nepochs: 2\nlr: 0.2\n", "lr is given twice"),
    (b"batch_size: 8\nbs: 4", "batch_size and bs are one flag"),
    (b"ngd: true\noptimizer: sgd", "ngd and optimizer are one flag"),
    (ALIAS_BOMB, "is neither a value nor a list"),
    (b"augment: yes", "--augment: 'yes' is not one of standard, none"),
    (b"betas: [no, 0.9]", "--betas: must be a number, got 'no'"),
    (b"nestrov: false", "did you mean --no-nesterov?"),
    (b"lr: true", "expected one argument"),
    (b"ngd: no", "which optimizer instead"),
    *((f"{name}: true".encode(), f"{name}: a recipe cannot hold") for name in COMMAND_LINE),
]


def test_wrong_recipe_is_named(refused, tmp_path):
    for text, names in WRONG_RECIPES:
        (tmp_path / "fast.yaml").write_bytes(text)
        assert "fast.yaml" in refused("images", "--recipe fast.yaml", names)


UNFIT = [
    ("images", "--resume {texts}", "transformer_test"),
    ("texts", "--checkpoint {texts} --evaluate --depth 3", "Missing key(s) in state_dict"),
    ("images", "--resume {images} --predict nowhere.png", "nowhere.png"),
    ("images", "--resume {images} --predict {images}", "contains no images"),
    ("texts", "--resume {texts} --predict in.csv", "in.csv: no column is known to be the text"),
    ("texts", "--evaluate --checkpoint model.onnx", "is an export"),
    ("images", "--resume {images} --predict a.png --predict_out out.txt", "in .jsonl or .csv"),
    ("images", "--resume {images} --predict a.png --predict_out none/out.csv", "does not exist"),
    ("images", "--resume {images} --predict_out out.csv", "--predict_out needs something to"),
    ("texts", "--resume {texts} --predict in.csv --predict_out in.csv", "is there already"),
    ("images", "--resume {images} --export model.txt", "model.txt"),
    ("images", "--resume {images}/gone.pt", "--sync lag: the checkpoint has it"),
    ("images", "--resume {images} --export none/model.pt2", "none/model.pt2"),
]


def test_checkpoint_that_does_not_match_the_flags_is_named(runs, refused, tmp_path):
    (tmp_path / "in.csv").write_text("Stocks rise,today\n")
    (tmp_path / "model.onnx").write_bytes(b"an export")
    copies = {name: shutil.copytree(folder, tmp_path / name) for name, folder in runs.items()}
    content = torch.load(copies["images"] / "last.pt", weights_only=True)
    content["flags"]["sync"] = "lag"  # which was removed
    checkpoint.save(copies["images"] / "gone.pt", content)
    cases = [(name, extra.format(**copies), names) for name, extra, names in UNFIT]
    for_each(cases, lambda *case: refused(*case, base="--device cpu --threads 1"))


def test_damaged_data_set_is_named(refused, tmp_path):
    cifar, mnist = Path("data", "cifar-10-batches-py"), Path("data", "MNIST", "raw")
    for folder in (cifar, mnist):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / cifar / "data_batch_1").write_bytes(b"\x80\x02}q\x01(U")
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (tmp_path / mnist / f"{name}-ubyte").write_bytes(bytes([0, 0, 8, 3]) + bytes(1000))
    for name, folder in (("cifar10", cifar), ("mnist", mnist)):
        refused("images", f"--dataset {name} --data_dir data", str(folder))


WRONG_FOLDERS = [
    (lambda root: [path.unlink() for path in (root / "train" / "dog").iterdir()], "train/dog"),
    (lambda root: (root / "train" / "cat" / "03.png").write_text("words"), "train/cat/03.png"),
    (lambda root: os.truncate(root / "train" / "cat" / "03.png", 100), "train/cat/03.png"),
    # A worker process notices this one where images are streamed.
    (lambda root: os.truncate(root / "test" / "cat" / "03.png", 100), "test/cat/03.png"),
    (
        lambda root: [os.truncate(path, 100) for path in (root / "train").glob("*/03.png")],
        "of 24 images 2 cannot be read: ",
    ),
]


def test_wrong_image_folder_is_named(refused, tmp_path, monkeypatch):
    write_images(tmp_path / "good", ("cat", "dog"), rows=6, size=16)
    base = f"--dataset folder --arch resnet20 {SHORT} --bs 4 --image_size 8 --workers 1"
    for number, (damage, names) in enumerate(WRONG_FOLDERS):
        folder = shutil.copytree(tmp_path / "good", tmp_path / str(number))
        damage(folder)
        for in_memory in (True, False):
            monkeypatch.setattr(image_batches, "fits_in_memory", lambda *_, fits=in_memory: fits)
            refused("images", f"--data_dir {folder}", names, base)
