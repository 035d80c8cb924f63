"""Data of your own: which splits a folder holds, and how many rows each class has in them.

paths = find_splits(Path("my_images"))             # {"train": Path(...), "test": Path(...)}
class_table(["cat", "dog"], {"train": [0, 0, 1], "test": [1]})     # lines for the console
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from errors import InputError

DATASETS = ("folder", "csv")  # values of --dataset that are data of your own
SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "val": ("val", "valid", "validation", "dev"),
}
"""The splits, and the names that their folder or file may have, in upper or lower case."""
MAX_LISTED = 20  # classes of a table
MAX_NAMED = 8  # classes or columns of a sentence
LONGEST_NAME = 40  # characters of a name in a table or sentence


def find_splits(root: Path, suffixes: Sequence[str] = ("",)) -> dict[str, Path]:
    """Find the splits that a folder of own data holds.

    Args:
        root: the folder.
        suffixes: of the files, in lower case; "" for folders.
    Returns:
        The paths of 'train', 'test' and 'val', as far as they are there, in this order.
    Raises:
        InputError: a split is there twice, or `root` is a file or cannot be read.
    """
    if root.is_file():
        raise InputError(f"--data_dir {root}: is a file; give the folder that contains it")
    try:
        entries = sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise InputError(
            f"--data_dir {root}: cannot be read ({error.strerror}); give a folder that you may read"
        ) from None
    if "" in suffixes:
        entries = [entry for entry in entries if entry.is_dir()]
    else:  # what is neither a file nor a folder, such as a pipe, would be waited for
        entries = [entry for entry in entries if entry.is_file()]
    paths = {}
    for split, names in SPLIT_NAMES.items():
        candidates = {f"{name}{suffix}" for name in names for suffix in suffixes}
        present = [entry for entry in entries if entry.name.lower() in candidates]
        if len(present) > 1:
            raise InputError(
                f"{present[0]} and {present[1].name} are both there: both would be the {split} "
                "split; move or delete one"
            )
        if present:
            paths[split] = present[0]
    return paths


def class_table(classes: Sequence[str], labels: Mapping[str, Sequence[int]]) -> list[str]:
    """Show the classes of a data set and how many rows of each are in every split.

    Args:
        classes: names of the classes.
        labels: the class number of each row, by the name of the split.
    Returns:
        The lines of a table, shortened after 20 classes, and a line for each split that lacks some
        of the classes.
    """
    counts = {split: Counter(labels[split]) for split in SPLIT_NAMES if split in labels}
    lines = [f"{'class':>20}" + "".join(f"{split:>10}" for split in counts)]
    for number, name in enumerate(classes[:MAX_LISTED]):
        cells = "".join(f"{count[number]:>10}" for count in counts.values())
        lines.append(f"{shorten(name):>20}{cells}")
    if len(classes) > MAX_LISTED:
        lines.append(f"{f'{len(classes) - MAX_LISTED} more classes':>20}")
    totals = "".join(f"{count.total():>10}" for count in counts.values())
    lines.append(f"{f'all {len(classes)} classes':>20}{totals}")
    for split, count in counts.items():
        if missing := [name for number, name in enumerate(classes) if not count[number]]:
            lines.append(
                f"warning: the {split} split has no row of {len(missing)} of the {len(classes)} "
                f"classes: {list_names(missing)}"
            )
    return lines


def shorten(name: str) -> str:
    """Cut a name to a length that fits into a table or a message."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..."


def list_names(names: Sequence[str]) -> str:
    """Join names by commas, the first few of a long list."""
    listed = ", ".join(shorten(name) for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{listed} and {more} more" if more > 0 else listed
