"""Data of your own: the splits of a folder, the files below it, the rows of each class.

paths = find_splits(Path("my_images"))             # {"train": Path(...), "test": Path(...)}
left_out = LeftOut(paths["train"])
files = list_files(paths["train"], {".png"}, left_out)
print(*left_out.notes())                           # nothing where every file is used
class_table(["cat", "dog"], {"train": [0, 0, 1], "test": [1]})     # lines for the console
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from errors import InputError

DATASETS = ("folder", "csv")  # values of --dataset that are data of your own
SPLIT_NAMES = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "val": ("val", "valid", "validation", "dev"),
}
"""The splits, and the names that their folder or file may have, in upper or lower case."""
BETWEEN_LABELS = re.compile("[|;,+]")  # where a name joins several labels
MANY = 0.1  # of the classes
MAX_LISTED = 20  # classes of a table
MAX_NAMED = 8  # classes or columns of a sentence
LONGEST_NAME = 40  # characters of a name in a table or sentence
INVISIBLE = dict.fromkeys([0x00AD, 0x200B, 0x2060, 0xFE0E, 0xFE0F, 0xFEFF])
"""Characters that nobody sees in a name: soft hyphen, zero-width space, word joiner, variation
selectors, byte-order mark."""
SYSTEM_FOLDERS = frozenset(
    ["__MACOSX", "__pycache__", "@eaDir", "#recycle", "@Recycle", "lost+found", "$RECYCLE.BIN"]
    + ["System Volume Information"]
)
"""Folders that operating systems, archives and file servers add; they are left out like hidden
ones."""


@dataclass
class LeftOut:
    """Counts the files and folders that a reader does not use."""

    root: Path
    # How many are left out for each reason, and the first of them.
    paths: dict[str, tuple[int, Path]] = field(default_factory=dict)

    def add(self, reason: str, path: Path) -> None:
        """Count a path below `root`; the reason is a noun phrase such as 'dangling links'."""
        number, first = self.paths.get(reason, (0, path))
        self.paths[reason] = number + 1, first

    def summary(self) -> str:
        """Return the number of paths and an example for each reason, or ''.

        >>> left_out = LeftOut(Path("mine"))
        >>> left_out.add("dangling links", Path("mine/cat/1.png"))
        >>> left_out.summary()
        'left out: dangling links (1, such as cat/1.png)'
        """
        reasons = [
            f"{reason} ({number}, such as {first.relative_to(self.root)})"
            for reason, (number, first) in sorted(self.paths.items())
        ]
        return f"left out: {', '.join(reasons)}" if reasons else ""

    def notes(self) -> list[str]:
        """Return the summary as a line for the console, if there is something to say."""
        return [f"warning: {self.root}: {self.summary()}"] if self.paths else []

    def hint(self) -> str:
        """Return the summary as the end of an error message, or ''."""
        return f" ({self.summary()})" if self.paths else ""


def find_splits(root: Path, suffixes: Sequence[str] = ("",)) -> dict[str, Path]:
    """Find the splits that a folder of own data holds.

    Args:
        suffixes: of the files, in lower case; "" for folders, beside which a file comes first.
    Returns:
        The paths of 'train', 'test' and 'val', as far as they are there, in this order.
    Raises:
        InputError: a split is there twice or is a dangling link, or `root` is a file.
    """
    if root.is_file():
        raise InputError(f"--data_dir {root}: is a file; give the folder that contains it")
    entries = sorted(root.iterdir()) if root.is_dir() else []
    paths = {}
    for split, names in SPLIT_NAMES.items():
        candidates = {f"{name}{suffix}" for name in names for suffix in suffixes}
        named = [entry for entry in entries if entry.name.lower() in candidates]
        if dangling := [entry for entry in named if not entry.exists()]:
            raise InputError(
                f"{dangling[0]}: is a link to nothing, and would be the {split} split; fetch what "
                "it links to, or delete it"
            )
        files = [each for each in named if each.is_file()]  # a pipe would be waited for
        present = files or [each for each in named if "" in suffixes and each.is_dir()]
        if len(present) > 1:
            raise InputError(
                f"{present[0]} and {present[1].name} are both there: both would be the {split} "
                "split; move or delete one"
            )
        if present:
            paths[split] = present[0]
    return paths


def check_no_own(root: Path, missing: Path, suffixes: Sequence[str], *, kind: str) -> None:
    """Refuse a folder that has data of one's own in the place of a known data set.

    Args:
        missing: the folder of the data set.
        kind: of the own data, such as 'texts of your own add --dataset csv'.
    """
    if "train" in (own := find_splits(root, suffixes)):
        raise InputError(
            f"{missing} is missing, and there is {own['train']}: for {kind}, else give another "
            "--data_dir"
        )


def needed_splits(
    root: Path, suffixes: Sequence[str] = ("",), *, enough: Sequence[str] = ()
) -> dict[str, Path]:
    """Find the splits as `find_splits` does, and check that there are those that a run needs.

    Args:
        enough: splits of which one may be there alone; it is the training set as well. That may be
            `root` itself, where it holds classes and no split.
    Raises:
        InputError: the training set is missing, or both others are.
    """
    if not root.exists():
        raise InputError(f"--data_dir {root}: there is no such folder")
    paths, form = find_splits(root, suffixes), suffixes[0] or "/CLASS/*"
    if "train" in enough and "" in suffixes and root.is_dir() and not splits_classes(root, paths):
        return {"train": root}
    alone = [paths[split] for split in enough if split in paths]
    if alone or ("train" in paths and len(paths) > 1):
        return {"train": paths.get("train", *alone[:1]), **paths}
    if "test" in enough:
        problem = f"{root} has no test{form}, which is enough to evaluate; put the rows there"
        raise InputError("; ".join([problem, *unread_splits(root, paths, suffixes)]))
    missing = root / f"{'test' if 'train' in paths else 'train'}{suffixes[0]}"
    source = f"{root}{form}" if "" in suffixes and not paths else f"train{form}"
    problem = (
        f"{missing} is missing: a run needs train{form}, and test{form} or val{form}, or "
        f"--val_fraction 0.1 to hold out a tenth of {source}"
    )
    raise InputError("; ".join([problem, *unread_splits(root, paths, suffixes)]))


def splits_classes(root: Path, paths: Mapping[str, Path]) -> bool:
    """Tell whether a folder holds splits, or the classes of one, of which one may be called train.

    One folder without folders in it, beside others, is a class.
    """
    if len(paths) != 1 or (only := next(iter(paths.values()))).is_file():
        return bool(paths)

    def folders(parent: Path) -> set[str]:
        return {path.name for path in parent.glob("[!.]*") if path.is_dir()} - SYSTEM_FOLDERS

    return bool(folders(only)) or folders(root) <= {only.name}


def unread_splits(root: Path, paths: Mapping[str, Path], suffixes: Sequence[str]) -> list[str]:
    """Say in a line what lies beside the splits: names like train.csv.gz, or without splits all."""
    is_listed = "" in suffixes and any(path.is_file() for path in paths.values())
    beside = sorted(
        path.name
        for path in root.glob("[!.]*")
        if path not in paths.values() and not (is_listed and path.is_dir())
    )
    splits = "|".join(sum(SPLIT_NAMES.values(), ()))
    like = [name for name in beside if re.match(rf"({splits})([\W\d_]|$)", name.lower())]
    names = like if like or paths else beside
    read = ", ".join(suffix or "folders" for suffix in suffixes)
    return [f"{root}: train, test, val are {read}; not read: {list_names(names)}"] if names else []


def list_files(folder: Path, suffixes: Collection[str], left_out: LeftOut) -> list[str]:
    """Return the files below a folder that have one of the suffixes, sorted.

    Links to files and folders are followed, but for links to a folder above them.

    Args:
        folder: is read with all folders below it; it is the root of `left_out` or below it.
        suffixes: in lower case, with their dots.
        left_out: counts all other files, but for hidden ones of other suffixes.
    """
    files: list[str] = []
    for parent, folders, names in os.walk(
        folder,
        onerror=lambda error: left_out.add("unreadable folders", Path(error.filename)),
        followlinks=True,
    ):
        for name in sorted(names):
            path = os.path.join(parent, name)
            has_suffix = os.path.splitext(name)[1].lower() in suffixes
            if is_hidden(name):
                if has_suffix:
                    left_out.add("hidden files and folders", Path(path))
            elif has_suffix and os.path.isfile(path) and os.access(path, os.R_OK):
                files.append(path)
            else:
                reason = "unreadable files" if has_suffix else "files of other types"
                left_out.add(reason if os.path.exists(path) else "dangling links", Path(path))
        folders[:] = [name for name in sorted(folders) if is_used(Path(parent, name), left_out)]
    return sorted(files, key=lambda file: file.replace(os.sep, "\0"))  # folder by folder


def is_used(folder: Path, left_out: LeftOut) -> bool:
    """Return whether a folder is neither hidden nor a link to a folder above it; else count it."""
    if is_hidden(folder.name):
        left_out.add("hidden files and folders", folder)
        return False
    if folder.is_symlink():
        target = folder.resolve()
        if any(parent.resolve().is_relative_to(target) for parent in folder.absolute().parents):
            left_out.add("links to a folder above", folder)
            return False
    return True


def expand_files(
    path: Path, suffixes: Collection[str], *, what: str
) -> tuple[list[Path], list[str]]:
    """Return the files to classify: those below a folder, sorted, or the path if it is a file.

    Args:
        suffixes: of the files below a folder, in lower case, with their dots.
        what: those files, for the error message.
    Returns:
        The files, and a line on what was left out of a folder, if there is such.
    Raises:
        InputError: the path does not exist, or the folder has no such files.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_dir():
        return [path], []
    left_out = LeftOut(path)
    files = [Path(file) for file in list_files(path, suffixes, left_out)]
    if not files:
        raise InputError(f"{path}: contains no {what}{left_out.hint()}")
    return files, left_out.notes()


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or a folder that a system has added."""
    return name.startswith(".") or name in SYSTEM_FOLDERS


def normal_form(name: str) -> str:
    """Return the name of a class or column in the form in which names are compared.

    Its characters are composed (NFC), invisible ones are dropped, and blanks are single spaces.

    >>> normal_form("cafe\u0301\u00a0 au lait") == "caf\u00e9 au lait"
    True
    """
    return " ".join(unicodedata.normalize("NFC", name).translate(INVISIBLE).split())


def class_table(classes: Sequence[str], labels: Mapping[str, Sequence[int]]) -> list[str]:
    """Show the classes of a data set and how many rows of each are in every split.

    Args:
        labels: the class number of each row, by the name of the split.
    Returns:
        The lines of a table, shortened after 20 classes; and a line for each split that lacks some
        of the classes; and one where names are nearly alike, or many look like several labels.
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
    keys = [name.casefold().removesuffix(".0") for name in classes]
    with_key = Counter(keys)
    if alike := [name for name, key in zip(classes, keys) if with_key[key] > 1]:
        lines.append(f"warning: classes that differ in case or in .0 only: {list_names(alike)}")
    if len(several := combined_labels(classes)) > MANY * len(classes):
        lines.append(
            f"warning: {len(several)} of the {len(classes)} classes look like several labels, such "
            f"as {shorten(several[0])!r}; each combination is taken for a class of its own, unless "
            "the separator of the labels is given"
        )
    return lines


def combined_labels(classes: Sequence[str]) -> list[str]:
    """Return the names that join others, as comedy|drama: each part is in another name as well."""
    parts = {name: {part.strip() for part in BETWEEN_LABELS.split(name)} for name in classes}
    names_with = Counter(part for each in parts.values() for part in each)
    return [
        name
        for name, each in parts.items()
        if len(each) > 1 and all(part and names_with[part] > 1 for part in each)
    ]


def shorten(name: str, longest: int = LONGEST_NAME) -> str:
    """Cut a name to a length that fits into a table or a message."""
    return name if len(name) <= longest else name[: longest - 3] + "..."


def list_names(names: Sequence[str]) -> str:
    """Join names by commas, the first few of a long list."""
    listed = ", ".join(shorten(name) for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{listed} and {more} more" if more > 0 else listed
