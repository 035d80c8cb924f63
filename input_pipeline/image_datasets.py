"""Image data sets as read from their files: labels, and pixels as one uint8 tensor or the list of files that hold them.

splits, classes = read_image_splits("cifar10", "data", image_size=0)      # {'train': Images, 'test': Images}
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from errors import InputError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
DOWNLOADS = {"cifar10": "cifar-10-batches-py", "mnist": "MNIST/raw"}  # folder below --data_dir


@dataclass
class ImageSplit:
    """One split: labels, and either pixels (rows, height, width, channels) uint8 or the files that hold them."""

    labels: Tensor
    pixels: Tensor | None = None
    files: list[Path] | None = None
    size: int = 0  # pixels a side, for files
    channels: int = 3

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> ImageSplit:
        """The given rows, in that order."""
        if self.pixels is not None:
            return ImageSplit(self.labels[rows], self.pixels[rows], None, self.size, self.channels)
        assert self.files is not None
        return ImageSplit(
            self.labels[rows],
            None,
            [self.files[i] for i in rows.tolist()],
            self.size,
            self.channels,
        )

    def decode(self, rows: Tensor) -> Tensor:
        """Pixels of some rows: (len(rows), height, width, channels) uint8."""
        if self.pixels is not None:
            return self.pixels[rows]
        assert self.files is not None
        return torch.stack(
            [read_image(self.files[i], self.size, self.channels) for i in rows.tolist()]
        )


def read_image_splits(
    name: str, data_dir: str, image_size: int
) -> tuple[dict[str, ImageSplit], list[str]]:
    """Training and test images of a data set, and the names of its classes.

    Args:
        name: 'cifar10', 'mnist', 'digits' (embedded) or 'folder'.
        data_dir: holds the data set in its standard format; 'folder': train/CLASS/* and test/CLASS/*.
        image_size: pixels a side; 0 is the data set's own ('folder': 32).
    Raises:
        InputError: a file is missing or broken; the message says what to do.
    """
    if name == "digits":
        splits, classes = read_digits()
    elif name == "folder":
        return read_folder(Path(data_dir), image_size or 32)
    else:
        splits, classes = read_torchvision(name, data_dir)
    for images in splits.values():
        assert images.pixels is not None
        images.pixels = resize(images.pixels, image_size) if image_size else images.pixels
        images.size, images.channels = images.pixels.shape[1], images.pixels.shape[-1]
    return splits, classes


def read_torchvision(name: str, data_dir: str) -> tuple[dict[str, ImageSplit], list[str]]:
    """CIFAR-10 or MNIST through torchvision, downloaded with checksum where the folder is missing."""
    from torchvision import datasets  # only here: digits and folders do without

    kind = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[name]
    folder = Path(data_dir) / DOWNLOADS[name]
    missing = not folder.is_dir() or not any(folder.iterdir())
    splits, classes = {}, []
    for part in ("train", "test"):
        try:
            data = kind(root=data_dir, train=part == "train", download=missing)
            pixels = torch.as_tensor(
                np.ascontiguousarray(data.data)
            )  # torchvision's is a transposed view
            labels = torch.as_tensor(data.targets)
            classes = list(data.classes)
            if len(labels) != len(pixels) or not 0 <= int(labels.min()) <= int(labels.max()) < len(
                classes
            ):
                raise ValueError("labels do not match the images")
        except (
            OSError,
            RuntimeError,
            ValueError,
            KeyError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            state = "is missing and could not be downloaded" if missing else "is damaged"
            raise InputError(
                f"{folder} {state} ({str(error).splitlines()[0][:120]}): put the official {name} files there "
                "(python version), or run with --dataset digits"
            ) from None
        splits[part] = ImageSplit(labels, pixels if pixels.ndim == 4 else pixels.unsqueeze(-1))
    return splits, classes


def read_digits() -> tuple[dict[str, ImageSplit], list[str]]:
    """scikit-learn's embedded 8x8 digits: 1,437 to train on and the last 360 to test."""
    from sklearn.datasets import load_digits  # embedded in the package, no download

    data = load_digits()
    pixels = torch.from_numpy((data.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(-1)
    labels = torch.from_numpy(data.target).long()
    border = len(labels) * 4 // 5
    splits = {
        "train": ImageSplit(labels[:border], pixels[:border]),
        "test": ImageSplit(labels[border:], pixels[border:]),
    }
    return splits, [str(digit) for digit in range(10)]


def read_folder(root: Path, size: int) -> tuple[dict[str, ImageSplit], list[str]]:
    """root/train/CLASS/* and root/test/CLASS/*: file lists; the classes are those of train/, sorted."""
    splits: dict[str, ImageSplit] = {}
    classes: list[str] = []
    for part in ("train", "test"):
        folder = root / part
        if not folder.is_dir():
            raise InputError(
                f"{folder} is missing: --dataset folder wants {root}/train/CLASS/* and {root}/test/CLASS/*"
            )
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        if part == "train":
            classes = names
            if len(classes) < 2:
                raise InputError(
                    f"{folder} has {len(names)} class folders; classification needs two or more"
                )
        strangers = sorted(set(names) - set(classes))
        if strangers:
            raise InputError(
                f"{folder / strangers[0]}: a class that {root / 'train'} does not have; move or delete it"
            )
        files, labels = [], []
        for number, name in enumerate(classes):
            found = sorted(p for p in (folder / name).glob("**/*") if p.suffix.lower() in SUFFIXES)
            if not found and (part == "train" or name in names):
                raise InputError(
                    f"{folder / name} holds no images ({', '.join(sorted(SUFFIXES))}); fill it or delete it"
                )
            files += found
            labels += [number] * len(found)
        if not files:
            raise InputError(
                f"{folder} holds no images: it wants a folder for each class, as in {root / 'train'}"
            )
        splits[part] = ImageSplit(torch.tensor(labels), files=files, size=size)
    return splits, classes


def read_image(path: Path, size: int, channels: int = 3) -> Tensor:
    """One image file, its shorter side scaled to `size`, the centre cut out: (size, size, channels) uint8.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with Image.open(path) as image:
            image = image.convert("RGB" if channels == 3 else "L")
            scale = size / min(image.size)
            width, height = (max(size, round(side * scale)) for side in image.size)
            left, top = (width - size) // 2, (height - size) // 2
            image = image.resize((width, height), Image.Resampling.BILINEAR).crop(
                (left, top, left + size, top + size)
            )
            return torch.from_numpy(np.array(image)).view(size, size, channels)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path}: not a readable image ({str(error)[:80]}); replace or delete it"
        ) from None


def resize(pixels: Tensor, size: int) -> Tensor:
    """(rows, height, width, channels) uint8 to `size` x `size`, in parts that keep memory low."""
    parts = []
    for part in pixels.split(4096):
        scaled = F.interpolate(
            part.permute(0, 3, 1, 2).float(), size=(size, size), mode="bilinear", antialias=True
        )
        parts.append(
            scaled.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
        )
    return torch.cat(parts)
