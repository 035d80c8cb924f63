"""Reads image data sets: CIFAR-10, MNIST, scikit-learn's digits, or a folder of image files.

    dataset_splits, classes = read_image_splits("cifar10", "data")  # {"train": ImageSplit, ...}
    dataset_splits["train"].pixels                                  # (50000, 32, 32, 3) uint8

A missing CIFAR-10 or MNIST is downloaded by torchvision, which verifies checksums.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import get_worker_info

from errors import InputError, in_one_line
from input_pipeline.augmentation import RowChanges
from input_pipeline.csv_tables import (
    NO_CHOICE,
    SUFFIXES,
    ColumnChoice,
    CsvTable,
    find_columns,
    normalise,
    numbered,
    sort_classes,
    table_reader,
)
from input_pipeline.own_data import (
    MAX_NAMED,
    LeftOut,
    check_no_own,
    is_hidden,
    is_used,
    list_files,
    list_names,
    needed_splits,
    normal_form,
    unread_splits,
)
from input_pipeline.sampler import spread

IMAGE_FORMATS = frozenset("AVIF BMP DIB GIF JPEG JPEG2000 MPO PNG PPM QOI TGA TIFF WEBP".split())
"""Formats of Pillow that people keep images in. Others are those of icons, documents and sensors,
and lie beside images, or have the suffix of another type: a .pcd file is a cloud of points."""
NO_PIXELS = {".pfm"}  # of PPM: floats, such as depths
TORCHVISION_FOLDERS = {"cifar10": "cifar-10-batches-py", "mnist": "MNIST/raw"}  # below --data_dir
READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)
FOLDER_IMAGE_SIZE = 32  # pixels a side where --image_size is not given
FORMATS_OF_16_BITS = ("PNG", "PPM")  # have at most 16 bits, also where Pillow's mode is I
THUMBNAIL = 96  # pixels a side at most of an image of a page
IN_FOLDERS = "folder"  # names the folder below that of the class where there are no columns
SEARCH_SECONDS = 30.0  # for damaged images beside the first one
MARKED_FILES = 2000  # whose sizes tell a split from another of the same names
RESIZE_ROWS = 4096  # images resized at a time, to keep memory low


@dataclass
class ImageSplit:
    """The training or the test split: labels, and either the pixels or the files that hold them."""

    # (rows,) int64 class numbers; or (rows, classes) uint8, 1 for each label of a row, where it may
    # have several or none.
    labels: Tensor
    pixels: Tensor | None = None  # (rows, height, width, channels) uint8
    _: KW_ONLY
    files: np.ndarray | None = None  # (rows,) paths as bytes, all of the same width
    size: int = 0  # pixels a side
    channels: int = 3  # 3 for colour, 1 for grey
    # By which images are scaled: 'bilinear' or 'bicubic', both antialiased.
    interpolation: str = "bilinear"
    notes: tuple[str, ...] = ()  # what a user should know of how it was read, a line each
    groups: Callable[[], Sequence[str]] = tuple  # of each row what it belongs to, as of `TextSplit`

    def __len__(self) -> int:
        return len(self.labels)

    def select_rows(self, rows: Tensor) -> ImageSplit:
        """Return a split of the given rows, in that order."""
        pixels = None if self.pixels is None else self.pixels[rows]
        files = None if self.files is None else self.files[rows.numpy()]
        labels = self.labels[rows]
        return dataclasses.replace(self, labels=labels, pixels=pixels, files=files, groups=tuple)

    def marks(self) -> dict[str, bytes]:
        """The names of the files and sizes of some: the same on each node, wherever they lie."""
        files: Sequence[bytes] = () if self.files is None else self.files.tolist()
        some = [files[row] for row in spread(len(files), MARKED_FILES)]
        sizes = " ".join(str(os.path.getsize(file)) for file in some)
        return {"names": b"/".join(map(os.path.basename, files)), "sizes": sizes.encode()}

    def decode(self, rows: Tensor) -> Tensor:
        """Return the pixels of the given rows: (len(rows), height, width, channels) uint8."""
        return self.reader(rows)() if self.pixels is None else self.pixels[rows]

    def show(self, row: int) -> dict[str, str]:
        """Return a small PNG of a row as a data URI, and the name of its file, for a page."""
        pixels, content = self.decode(torch.tensor([row]))[0].numpy(), io.BytesIO()
        image = Image.fromarray(pixels if self.channels > 1 else pixels[:, :, 0])
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        image.save(content, "png")
        shown = {"image": f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"}
        return shown if self.files is None else {**shown, "name": os.fsdecode(self.files[row])}

    def reader(self, rows: Tensor, changes: RowChanges | None = None) -> Callable[[], Tensor]:
        """Return a function that reads images of the given rows, also in another process.

        Args:
            changes: how each row is augmented.
        """
        sources = np.asarray(self.files if self.pixels is None else self.pixels)
        return partial(
            read_images,
            sources[rows.numpy()],
            self.size,
            channels=self.channels,
            interpolation=self.interpolation,
            rows=rows.tolist(),
            changes=changes,
        )


def read_image_splits(
    name: str, data_dir: str, *, image_size: int = 0, interpolation: str = "bilinear", **own: Any
) -> tuple[dict[str, ImageSplit], list[str]]:
    """Read the images of a data set and the names of its classes.

    Args:
        name: 'cifar10', 'mnist', 'digits' (embedded) or 'folder'.
        data_dir: folder with the data set in its standard format; for 'folder' see `read_folder`.
        image_size: pixels a side; 0 keeps the data set's own size (32 for 'folder').
        interpolation: as of `ImageSplit`.
        own: of 'folder': as of `read_folder`.
    Returns:
        The splits 'train', 'test' and 'val', as far as the data set has them, and the class names
        in the order of their numbers.
    Raises:
        InputError: a file is missing or broken; the message says what to do.
    """
    if name == "folder":
        splits, names = read_folder(Path(data_dir), image_size or FOLDER_IMAGE_SIZE, **own)
    else:
        splits, names = read_digits() if name == "digits" else read_torchvision(name, data_dir)
    for split in splits.values():
        split.interpolation = interpolation
        if split.pixels is not None:
            if image_size:
                split.pixels = resize(split.pixels, image_size, interpolation=interpolation)
            split.size, split.channels = split.pixels.shape[1], split.pixels.shape[-1]
    return splits, names


def read_torchvision(name: str, data_dir: str) -> tuple[dict[str, ImageSplit], list[str]]:
    """Read CIFAR-10 or MNIST with torchvision, which downloads it where its folder is missing.

    Raises:
        InputError: the files are damaged, or missing and could not be downloaded.
    """
    from torchvision import datasets  # imported here: digits and folders do not need torchvision

    dataset_class = {"cifar10": datasets.CIFAR10, "mnist": datasets.MNIST}[name]
    folder = Path(data_dir) / TORCHVISION_FOLDERS[name]
    is_missing = not folder.is_dir() or not any(folder.iterdir())
    if is_missing:
        kind = "images of your own add --dataset folder"
        check_no_own(Path(data_dir), folder, ("",), kind=kind)
    splits, classes = {}, []
    for part in ("train", "test"):
        state = "is missing and could not be downloaded" if is_missing else "is damaged"
        advice = f": put the official {name} files there (python version), or run with --dataset"
        with in_one_line(f"{folder} {state}", f"{advice} digits", READ_ERRORS):
            data = dataset_class(root=data_dir, train=part == "train", download=is_missing)
            pixels = torch.as_tensor(np.ascontiguousarray(data.data))  # a transposed view
            labels = torch.as_tensor(data.targets)
            classes = list(data.classes)
        splits[part] = ImageSplit(labels, pixels if pixels.ndim == 4 else pixels.unsqueeze(-1))
    return splits, classes


def read_digits() -> tuple[dict[str, ImageSplit], list[str]]:
    """Read scikit-learn's embedded 8x8 digits: 1,437 rows to train on and the last 360 to test."""
    from sklearn.datasets import load_digits  # imported here: only this data set needs it

    data = load_digits()
    pixels = torch.from_numpy((data.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(-1)
    labels = torch.from_numpy(data.target).long()
    num_train = len(labels) * 4 // 5
    dataset_splits = {
        "train": ImageSplit(labels[:num_train], pixels[:num_train]),
        "test": ImageSplit(labels[num_train:], pixels[num_train:]),
    }
    return dataset_splits, [str(digit) for digit in range(10)]


@cache
def image_suffixes() -> frozenset[str]:
    """Return the suffixes of `IMAGE_FORMATS` by Pillow's list, in lower case with their dots."""
    formats = Image.registered_extensions()
    return frozenset(s for s, name in formats.items() if name in IMAGE_FORMATS) - NO_PIXELS


def read_folder(
    root: Path,
    size: int,
    *,
    classes: Sequence[str] = (),
    enough: Sequence[str] = (),
    choice: ColumnChoice = NO_CHOICE,
) -> tuple[dict[str, ImageSplit], list[str]]:
    """List the images of a folder, which are decoded later.

    The images are root/train/CLASS/*, or those that root/train.csv names (see `list_table`), and
    likewise of test and of val or validation. A folder without these three holds root/CLASS/*: a
    training set alone.

    Args:
        size: pixels a side to which images are scaled and cropped.
        classes: of a trained model; empty to take the names of the folders in train/, or the
            labels of train.csv, sorted.
        enough: as of `needed_splits`.
        choice: the separator of several labels, and the column of the groups, of which the usual
            ones are not chosen; without a table `IN_FOLDERS`.
    Returns:
        The splits that are there, and the classes.
    Raises:
        InputError: a folder is missing or empty, or test/ or val/ has a class that train/ lacks.
    """
    paths = needed_splits(root, ("", *SUFFIXES), enough=enough)
    tables = {
        split: open_image_table(path, choice) for split, path in paths.items() if path.is_file()
    }
    folders = set(paths) - set(tables)
    if choice.label is not None and not tables:
        raise InputError(
            f"{paths['train']}: its folders are the classes, and --label_column is for tables; "
            "leave it out"
        )
    if choice.separator is not None and folders:
        raise InputError(
            f"{paths[folders.pop()]}: an image in the folder of its class has one label; list the "
            "images in a table of that name, as .csv with the columns image and label"
        )
    names = list(classes)
    if not names and (table := tables.get("train")):
        names = sort_classes({name for *_, labels in table.labelled_rows() for name in labels})
    elif not names:
        names = sorted(class_folders(paths["train"], LeftOut(paths["train"])))
    if len(names) < 2:
        what = "classes" if "train" in tables else "class folders"
        raise InputError(
            f"{paths['train']} has {len(names)} {what}; classification needs two or more"
        )
    splits = {
        split: list_table(tables[split], names, size=size)
        if split in tables
        else list_split(path, names, size=size)
        for split, path in paths.items()
    }
    splits["train"].notes += tuple(unread_splits(root, paths, ("", *SUFFIXES)))
    if choice.group and "train" in tables:
        splits["train"].groups = partial(tables["train"].groups, choice.group)
    elif choice.group:
        files = splits["train"].files
        assert files is not None
        splits["train"].groups = partial(folders_of, files, paths["train"], choice.group)
    return splits, names


def open_image_table(path: Path, choice: ColumnChoice) -> CsvTable:
    """Find the columns of a table of images, whose first row names them: image, and the label.

    Raises:
        InputError: the file is broken, or has no such columns.
    """
    read = table_reader(path, choice.separator)
    _, header = next(read())
    if [*map(normalise, header)].count("image") != 1:
        raise InputError(
            f"{path}: the first row must name the columns image and label (it has "
            f"{list_names(header)}); name them so, or move the file away"
        )
    chosen = replace(choice, texts=("image",))
    label, images = find_columns(path, header, chosen, num_columns=len(header))
    return CsvTable(path, header, label, images, read, choice.separator)


def list_table(table: CsvTable, classes: Sequence[str], *, size: int) -> ImageSplit:
    """List the images of a table, whose paths are relative to it.

    Raises:
        InputError: a row is broken, its label is unknown, or its image is missing.
    """
    labels, files = [], []
    for number, row, names in table.labelled_rows(classes):
        labels.append(names)
        files.append(os.path.join(table.path.parent, row[table.texts[0]].strip()))
        if not os.path.isfile(files[-1]):
            raise InputError(
                f"{table.path}, row {number}: there is no image {files[-1]}; correct the path, "
                "which is relative to the table, or delete the row"
            )
    found = numbered(labels, classes, several=table.separator is not None)
    return ImageSplit(found, files=paths_array(files), size=size, notes=(table.describe("image"),))


def class_folders(folder: Path, left_out: LeftOut) -> dict[str, list[Path]]:
    """Return the folders in a folder by the class that each holds.

    A class has several folders if their names differ in nothing but the form of their characters.

    Args:
        left_out: counts other folders, images beside the folders and links to nothing.
    """
    by_class: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if is_used(path, left_out):
                by_class.setdefault(normal_form(path.name), []).append(path)
        elif not is_hidden(path.name):
            is_image = path.suffix.lower() in image_suffixes()
            reason = f"{'images' if is_image else 'files'} outside the folders of the classes"
            left_out.add(reason if path.exists() else "dangling links", path)
    return by_class


def list_split(folder: Path, classes: Sequence[str], *, size: int) -> ImageSplit:
    """List the images folder/CLASS/* of one split; some classes may be missing.

    Raises:
        InputError: there is an unknown class, or a class folder or the whole split is empty.
    """
    left_out = LeftOut(folder)
    folders = class_folders(folder, left_out)
    if unknown := sorted(set(folders) - {normal_form(name) for name in classes}):
        raise InputError(
            f"{folders[unknown[0]][0]}: not one of the {len(classes)} classes that are trained on; "
            "move or delete it"
        )
    files: list[np.ndarray] = []
    for name in classes:
        of_class = folders.get(normal_form(name), [])
        in_folders = (list_files(path, image_suffixes(), left_out) for path in of_class)
        files.append(paths_array(sum(in_folders, [])))
        if of_class and not len(files[-1]):
            raise InputError(
                f"{of_class[0]} contains no images; add some or delete the folder{left_out.hint()}"
            )
    if not any(map(len, files)):
        raise InputError(f"{folder} contains no images: it needs a folder for each class")
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(list(map(len, files))))
    return ImageSplit(labels, files=np.concatenate(files), size=size, notes=tuple(left_out.notes()))


def folders_of(files: Iterable[bytes], root: Path, group: str) -> list[str]:
    """Return the name of the folder below its class in which each image lies.

    Raises:
        InputError: an image lies in its class itself, or `group` is not `IN_FOLDERS`.
    """
    parts = [os.path.relpath(os.fsdecode(file), root).split(os.sep) for file in files]
    if (lone := next((each for each in parts if len(each) < 3), None)) or group != IN_FOLDERS:
        lies = f", and {os.path.join(*lone)} lies in none" if lone else f", not by {group}"
        raise InputError(
            f"{root}: images in folders are grouped by --group_column {IN_FOLDERS}, the folder "
            f"below that of their class{lies}"
        )
    return [name for _, name, *_ in parts]


def paths_array(paths: Iterable[str | Path]) -> np.ndarray:
    """Return paths as an array of bytes: millions of objects would take ten times the memory."""
    return np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)


def read_images(
    sources: Sequence[Any] | np.ndarray,
    size: int,
    *,
    channels: int = 3,
    interpolation: str = "bilinear",
    rows: Sequence[int] = (),
    changes: RowChanges | None = None,
) -> Tensor:
    """Read images as `read_image` does, and change them: (sources, size, size, channels) uint8.

    Args:
        sources: of each image the path as bytes, or (height, width, channels) uint8 pixels.
        size, channels, interpolation: as of `read_image`.
        rows: numbers of the images, on which random changes depend.
        changes: random ones.
    """
    pixels = torch.empty(len(sources), size, size, channels, dtype=torch.uint8)
    if get_worker_info() is not None:
        pixels.share_memory_()  # with the training process
    read_one = partial(read_image, size=size, channels=channels, interpolation=interpolation)
    for place, source in enumerate(sources):
        read = partial(read_one, source)
        image = read(None) if changes is None else changes.read(rows[place], read)
        pixels[place] = torch.from_numpy(np.array(image)).view_as(pixels[place])
    return pixels


def describe_damage(splits: Iterable[ImageSplit]) -> str:
    """Name the images of files that cannot be read, if there are several, within SEARCH_SECONDS."""
    end, looked_at, damaged = time.monotonic() + SEARCH_SECONDS, 0, []
    for file in chain.from_iterable(np.asarray(each.files) for each in splits):
        if time.monotonic() > end:
            break
        looked_at += 1
        try:
            read_image(file, None, size=8, channels=3, interpolation="bilinear")
        except InputError:
            damaged.append(os.fsdecode(file))
    if len(damaged) < 2:
        return ""
    rest = f" and {len(damaged) - MAX_NAMED} more" if len(damaged) > MAX_NAMED else ""
    names = ", ".join(damaged[:MAX_NAMED])
    return f"; of {looked_at} images {len(damaged)} cannot be read: {names}{rest}"


def open_image(source: bytes | np.ndarray | Image.Image) -> Image.Image:
    """Open a file by its path as bytes, or take (height, width, channels) uint8 pixels.

    An image is copied: what is opened here is closed, and its orientation applied in place.
    """
    if isinstance(source, Image.Image):
        return source.copy()
    if isinstance(source, bytes):
        return Image.open(os.fsdecode(source))
    return Image.fromarray(source if source.shape[2] == 3 else source[:, :, 0])


def read_image(
    source: bytes | np.ndarray | Image.Image,
    draw_part: Callable[[Image.Image], tuple[int, int, int, int]] | None,
    *,
    size: int,
    channels: int,
    interpolation: str,
) -> Image.Image:
    """Read one image, cut out a part and scale it to `size`.

    The orientation that a camera writes into a photo is applied. What is transparent becomes white.
    Grey pixels of 16 bits are scaled to 8 bits. A JPEG file is decoded at the smallest of its
    scales that has at least twice the pixels a side, or four times where a part is drawn, which is
    smaller.

    Args:
        source: path of a file, with pixels of 8 bits a channel, or of 16 bits; such an image; or
            (height, width, channels) uint8.
        draw_part: returns (left, top, right, bottom); None is the square in the centre.
        size: pixels a side of the result.
        channels: 3 for colour, 1 for grey.
        interpolation: as of `ImageSplit`.
    Raises:
        InputError: the file cannot be read, has no pixels, or those are floats or 32-bit integers.
    """
    path = os.fsdecode(source) if isinstance(source, bytes) else "pixels"
    advice = "; replace or delete it"
    with in_one_line(f"{path}: not a readable image", advice), open_image(source) as image:
        at_least = (2 if draw_part is None else 4) * size
        image.draft(None, (at_least, at_least))  # does nothing unless it is a JPEG file
        image.load()
        with contextlib.suppress(Exception):  # of damaged metadata beside sound pixels
            ImageOps.exif_transpose(image, in_place=True)
        side = min(image.size)
        if not side:
            raise ValueError("it has no pixels")
        left, top = ((length - side) // 2 for length in image.size)
        square = left, top, left + side, top + side
        part = image.crop(draw_part(image) if draw_part else square)
        part = to_8_bits(part, path, file_format=image.format)
        if part.has_transparency_data:
            white = Image.new("RGBA", part.size, "white")
            part = Image.alpha_composite(white, part.convert("RGBA"))
        part = part.convert("RGB" if channels == 3 else "L")
        return part.resize((size, size), Image.Resampling[interpolation.upper()])


def to_8_bits(image: Image.Image, path: str | Path, *, file_format: str | None) -> Image.Image:
    """Scale grey pixels of 16 bits to 8 bits; Pillow's own conversion would cut them off at 255.

    Raises:
        InputError: the pixels are floats or 32-bit integers, which have no common range.
    """
    is_16_bit = image.mode == "I" and file_format in FORMATS_OF_16_BITS
    if is_16_bit or image.mode.startswith("I;16"):
        pixels = np.asarray(image).astype(np.float64)
        pixels[pixels == image.info.get("transparency")] = 65_535  # white
        return Image.fromarray((pixels / 257).round().clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floats"
        raise InputError(
            f"{path}: its pixels are {kind}, which have no common range; save it with 8 or 16 bits "
            "a pixel"
        )
    return image


def resize(pixels: Tensor, size: int, *, interpolation: str) -> Tensor:
    """Resize images with antialiased interpolation.

    Args:
        pixels: (rows, height, width, channels) uint8.
        size: pixels a side of the result.
        interpolation: 'bilinear' or 'bicubic'.
    Returns:
        (rows, size, size, channels) uint8.
    """
    chunks = []
    for chunk in pixels.split(RESIZE_ROWS):
        images = chunk.permute(0, 3, 1, 2).float()
        scaled = F.interpolate(images, size=(size, size), mode=interpolation, antialias=True)
        scaled = scaled.round_().clamp_(0, 255).to(torch.uint8)
        chunks.append(scaled.permute(0, 2, 3, 1).contiguous())
    return torch.cat(chunks)
