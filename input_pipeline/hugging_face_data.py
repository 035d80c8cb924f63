"""Converts data sets of Hugging Face into own data, once: parquet tables, and images as files.

    folder = convert("stanfordnlp/imdb", Path("data"))    # data/hf/stanfordnlp-imdb/train.parquet
    folder = convert("my_folder", Path("data"))           # data/hf/my_folder-1a2b3c4d/train.parquet

Later reads need neither network nor Hugging Face's `datasets`.
"""

import fcntl
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.waiting import named_wait
from errors import InputError, in_one_line, needing
from input_pipeline.csv_tables import normalise
from input_pipeline.own_data import SPLIT_NAMES, list_names

OF_SAVE_TO_DISK = ("dataset_dict.json", "state.json")  # one of them is in a folder that it wrote
JPEG = b"\xff\xd8"  # begins the files; others are told by their names, or taken for PNG
ADVICE = (
    "; check the name and the network, or give a folder of save_to_disk, or of parquet, csv or "
    "jsonl files"
)
NO_CLASS = [-1]  # the labels of a test set that its authors keep to themselves


def convert(name: str, root: Path) -> Path:
    """Return the folder of own data made of a data set, which is made where it is not there yet.

    A conversion that was interrupted begins anew, and one of another process is waited for.

    Args:
        name: NAME or NAME:CONFIG of the hub; or a folder that `save_to_disk` wrote, or with what
            `load_dataset` reads. A folder whose files change is converted anew.
        root: the folder is made below hf/ in it.
    Raises:
        InputError: the data set cannot be loaded or written, or `datasets` is missing.
    """
    source = Path(name).expanduser().resolve()
    made = root / "hf" / re.sub(r"[^\w.-]+", "-", source.name if source.is_dir() else name)
    if source.is_dir():
        files = [(str(path), path.stat()) for path in sorted(source.rglob("*")) if path.is_file()]
        marks = repr([(path, stat.st_size, stat.st_mtime_ns) for path, stat in files])
        made = made.with_name(f"{made.name}-{hashlib.sha256(marks.encode()).hexdigest()[:8]}")
    if made.is_dir():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    part, cache = Path(f"{made}.part"), Path(f"{made}.cache")
    waits_for = f"another process converts {name}" if os.environ.get("RANK", "0") == "0" else ""
    with open(f"{made}.lock", "w") as lock:
        with named_wait(lambda: waits_for, math.inf):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if made.is_dir():
            return made
        print(f"{name} becomes own data in {made}; delete that to convert it anew", flush=True)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            with in_one_line("cannot be loaded", ADVICE):
                write_splits(load(name, source, cache), part, source)
                os.sync()
                part.rename(made)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(cache, ignore_errors=True)
    return made


def load(name: str, source: Path, cache: Path) -> Mapping[str, Any]:
    """Return the splits of a data set as `datasets.Dataset`, by their names.

    Args:
        source: its path, which is there where it is a folder.
        cache: a folder for what `datasets` writes while it reads files.
    """
    with needing("it", "datasets"):
        import datasets
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    if any((source / each).exists() for each in OF_SAVE_TO_DISK):
        found = datasets.load_from_disk(str(source))
    else:
        path, _, config = (str(source), "", "") if source.is_dir() else name.partition(":")
        found = datasets.load_dataset(path, config or None, cache_dir=str(cache))
    return found if isinstance(found, Mapping) else {"train": found}


def write_splits(splits: Mapping[str, Any], folder: Path, source: Path) -> None:
    """Write splits as parquet tables of own data into a new folder, and their images beside them.

    Args:
        source: the folder to which paths of images are relative.
    Raises:
        InputError: there are none, or there are several columns of images.
    """
    folder.mkdir()
    known = [name for name in splits if name.lower() in sum(SPLIT_NAMES.values(), ())]
    if not known:
        there_is = list_names(list(splits))
        raise InputError(f"no split is named train, validation or test (there is {there_is})")
    if others := [name for name in splits if name not in known]:
        print(f"not converted: the splits {list_names(others)}", flush=True)
    for name in known:
        split = splits[name]
        labels = [n for n, kind in split.features.items() if type(kind).__name__ == "ClassLabel"]
        if any(split.unique(label) == NO_CLASS for label in labels):
            print(f"the {name} split has no labels, and is left out", flush=True)
            continue
        split = with_image_files(split, folder / "images" / name, source)
        split.to_parquet(str(folder / f"{name}.parquet"))


def with_image_files(split: Any, folder: Path, source: Path) -> Any:
    """Return a split whose images, if it has any, are files with their paths in column `image`.

    Args:
        folder: receives images whose bytes are in the split; it is two folders below the table.
        source: as of `write_splits`.
    """
    from datasets import Image

    pixels = [each for each, kind in split.features.items() if isinstance(kind, Image)]
    columns = pixels or [each for each in split.features if normalise(each) == "image"]
    if not columns:
        return split
    if len(columns) > 1:
        raise InputError(f"several columns have images: {list_names(columns)}; keep one")
    (column,), paths = columns, []
    split = split.cast_column(column, Image(decode=False))
    folder.mkdir(parents=True)
    for number, row in enumerate(split.select_columns(column)):
        value = row[column] or {}
        path = value.get("path") or ""
        if (data := value.get("bytes")) is None:
            paths.append(path and str(source / path))
            continue
        suffix = ".jpg" if data.startswith(JPEG) else Path(path).suffix or ".png"
        file = folder / f"{number:07}{suffix}"
        file.write_bytes(data)
        paths.append(str(file.relative_to(folder.parents[1])))
    return split.remove_columns(column).add_column("image", paths)
