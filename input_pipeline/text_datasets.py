"""Reads text data sets: AG News, embedded headlines, or csv files of your own.

    dataset_splits, classes = read_text_splits("agnews", "data")  # {"train": TextSplit, ...}
    train = dataset_splits["train"]
    train.texts[0], classes[train.labels[0]]

Texts are cleaned of HTML, entities and addresses. A missing AG News is downloaded. AG News: Zhang
et al., "Character-level Convolutional Networks for Text Classification", arXiv:1509.01626.
"""

from __future__ import annotations

import csv
import html
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from errors import InputError

AGNEWS_CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
AGNEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
AGNEWS_FILES = {"train.csv": 120_000, "test.csv": 7_600}
"""Number of rows of each official file, by which an incomplete download is noticed."""
AGNEWS_COLUMNS = 3  # class, title, description
HEADLINES = Path(__file__).with_name("headlines.csv")  # in the format of AG News
HEADLINES_TRAIN = 400  # the first rows are the training set, the others the test set
TAG = re.compile(r"</?[A-Za-z!][^<>]*>")
URL = re.compile(r"(?:https?://|www\.)\S+")
ENTITY_WITHOUT_AMPERSAND = re.compile(r"(?<![&\w])(#\d{2,4}|quot|amp|lt|gt|nbsp|apos|mdash|ndash);")
"""AG News has lost the ampersand of many entities, such as '#39;' for an apostrophe."""


@dataclass
class TextSplit:
    """The training or the test split: a class number and a cleaned text for each row."""

    labels: list[int]
    texts: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def select_rows(self, rows: Sequence[int]) -> TextSplit:
        """Return a split of the given rows, in that order."""
        return TextSplit([self.labels[row] for row in rows], [self.texts[row] for row in rows])


def clean_text(text: str) -> str:
    """Remove HTML tags, entities and URLs, and fold white space.

    A backslash becomes a space, since AG News has one where a line ended.

    >>> clean_text('Oil &lt;b&gt;up&lt;/b&gt;  at www.example.com today')
    'Oil up at today'
    """
    text = ENTITY_WITHOUT_AMPERSAND.sub(r"&\1;", text.replace("\\", " "))
    return " ".join(URL.sub(" ", TAG.sub(" ", html.unescape(text))).split())


def read_text_splits(name: str, data_dir: str) -> tuple[dict[str, TextSplit], list[str]]:
    """Read the training and test rows of a data set and the names of its classes.

    Args:
        name: 'agnews', 'headlines' (embedded) or 'csv'.
        data_dir: folder with ag_news_csv/ for 'agnews'; for 'csv' it contains train.csv and
            test.csv with the columns label, text...
    Returns:
        The splits 'train' and 'test', and the class names in the order of their numbers.
    Raises:
        InputError: a file is missing or broken; the message names file, row and remedy.
    """
    if name == "headlines":
        return read_headlines(), AGNEWS_CLASSES
    if name == "agnews":
        folder, columns, classes = Path(data_dir) / "ag_news_csv", AGNEWS_COLUMNS, AGNEWS_CLASSES
        for file in AGNEWS_FILES:
            if not (folder / file).exists():
                download_agnews(folder, file)
    else:
        folder, columns, classes = Path(data_dir), 0, []
    dataset_splits = {}
    for part in ("train", "test"):
        path = folder / f"{part}.csv"
        rows = read_csv(path, columns)
        labels, classes = number_labels(rows, classes, path=path)
        dataset_splits[part] = TextSplit(labels, [join_columns(row) for row in rows])
    return dataset_splits, classes


def read_headlines() -> dict[str, TextSplit]:
    """Read the embedded headlines: 400 rows to train on and 80 to test."""
    rows = read_csv(HEADLINES, AGNEWS_COLUMNS)
    labels, _ = number_labels(rows, AGNEWS_CLASSES, path=HEADLINES)
    all_rows = TextSplit(labels, [join_columns(row) for row in rows])
    return {
        "train": all_rows.select_rows(range(HEADLINES_TRAIN)),
        "test": all_rows.select_rows(range(HEADLINES_TRAIN, len(rows))),
    }


def join_columns(row: Sequence[str]) -> str:
    """Return the cleaned text of a csv row: all columns after the label, joined by spaces."""
    return clean_text(" ".join(row[1:]))


def read_csv(path: Path, columns: int = 0) -> list[list[str]]:
    """Read a csv file whose rows all have the same number of columns.

    Args:
        path: the file, in UTF-8.
        columns: number of columns; 0 stands for that of the first row, but at least 2.
    Returns:
        The columns of each row.
    Raises:
        InputError: the file is missing, empty or broken.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = []
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                columns = columns or max(2, len(row))
                if len(row) != columns:
                    raise InputError(
                        f"{path}, row {number}: {len(row)} columns, expected {columns} "
                        "(label, text...); correct or delete the row"
                    )
                rows.append(row)
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: put a csv file there with the columns label, text..."
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path} cannot be read as UTF-8 csv: {error}; fetch or export it again"
        ) from None
    if not rows:
        raise InputError(f"{path} is empty: it needs at least one row of label, text...")
    return rows


def number_labels(
    rows: list[list[str]], classes: list[str], *, path: Path
) -> tuple[list[int], list[str]]:
    """Convert the labels in the first column to class numbers from 0 on.

    AG News numbers its classes from 1. Labels of your own data may be any words; they are numbered
    in sorted order, numbers before words.

    Args:
        rows: rows of a csv file.
        classes: names of the classes; empty for a training file of your own data, from whose labels
            they are then taken.
        path: the file, for error messages.
    Returns:
        The class number of each row, and the names of the classes.
    Raises:
        InputError: a label is unknown, or all labels are the same.
    """
    counts_from_one = classes == AGNEWS_CLASSES
    if not classes:
        names = {row[0].strip() for row in rows}
        classes = sorted(names, key=lambda name: (not name.isdigit(), name.zfill(12)))
        if len(classes) < 2:
            raise InputError(
                f"{path}: only one label, {classes[0]!r}; classification needs two or more"
            )
    numbers = {str(i + 1) if counts_from_one else name: i for i, name in enumerate(classes)}
    labels = []
    for row_number, row in enumerate(rows, 1):
        label = numbers.get(row[0].strip())
        if label is None:
            known = ", ".join(list(numbers)[:10])
            raise InputError(
                f"{path}, row {row_number}: label {row[0][:40]!r} is out of range, "
                f"expected one of {known}"
            )
        labels.append(label)
    return labels, classes


def download_agnews(folder: Path, file: str) -> None:
    """Download one AG News file with a progress bar and check its number of rows.

    Args:
        folder: where to put the file.
        file: a key of `AGNEWS_FILES`.
    Raises:
        InputError: the download failed; the message says how to go on without a network.
    """
    from tqdm import tqdm  # imported here: only a download needs it

    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{file}.part"
    try:
        with (
            urllib.request.urlopen(AGNEWS_URL + file, timeout=20) as response,
            open(partial, "wb") as out,
        ):
            size = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=file) as bar:
                while chunk := response.read(1 << 20):
                    out.write(chunk)
                    bar.update(len(chunk))
        if len(read_csv(partial, AGNEWS_COLUMNS)) != AGNEWS_FILES[file]:
            raise OSError(f"{file} does not have {AGNEWS_FILES[file]} rows")
        partial.rename(folder / file)
    except (OSError, InputError) as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"{folder / file} is missing and could not be downloaded ({error}): fetch train.csv "
            f"and test.csv of AG News (class, title, description) and put them in {folder}, "
            "or run with --dataset headlines"
        ) from None


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not blank, without white space at their ends.

    Raises:
        InputError: the file cannot be read or has no text.
    """
    try:
        stripped = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        lines = [line for line in stripped if line]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); give text files with one text a line"
        ) from None
    if not lines:
        raise InputError(f"{path}: contains no text; give text files with one text a line")
    return lines
