"""Reads text data sets: AG News, embedded headlines, or csv files of your own.

    dataset_splits, classes = read_text_splits("agnews", "data")  # {"train": TextSplit, ...}
    train = dataset_splits["train"]
    train.texts[0], classes[train.labels[0]]

A file is read row by row, so that it may be of any size. Texts are cleaned of HTML, entities and
addresses. A missing AG News is downloaded. AG News: Zhang et al., "Character-level Convolutional
Networks for Text Classification", arXiv:1509.01626.
"""

from __future__ import annotations

import html
import re
import unicodedata
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import InputError, in_one_line
from input_pipeline.csv_tables import (
    NO_CHOICE,
    SUFFIXES,
    ColumnChoice,
    CsvTable,
    Rows,
    numbered,
    open_table,
    read_rows,
    sort_classes,
    utf8_lines,
    without_surrogates,
)
from input_pipeline.own_data import (
    check_no_own,
    expand_files,
    list_names,
    needed_splits,
    shorten,
    unread_splits,
)
from input_pipeline.stored_texts import StoredTexts

AGNEWS_CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
AGNEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
AGNEWS_FILES = {
    "train.csv": "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
    "test.csv": "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
}
"""SHA-256 of each official file: the address is a branch that others may change."""
HEADLINES = Path(__file__).with_name("headlines.csv")  # in the format of AG News
HEADLINES_TRAIN = 400  # the first rows are the training set, the others the test set
TEXT_SUFFIXES = (".txt",)  # of texts to classify
SHOWN_CHARACTERS = 200  # of a text on a page
MIN_CHECKED_ROWS = 20  # a training file of fewer rows may have as many classes as rows
MAX_CLASSES_PER_ROW = 0.5  # more are no classes, so another column was meant
TAG = re.compile(r"</?[A-Za-z!][^<>]*>")
URL = re.compile(r"(?:https?://|www\.)[!-~]+")  # ASCII: some scripts have no space behind it
REPAIRED = ("agnews", "headlines")  # data sets of texts that `repair` is for
ENTITY_WITHOUT_AMPERSAND = re.compile(r"(?<![&\w])(#\d{2,4}|quot|amp|lt|gt|nbsp|apos|mdash|ndash);")
"""AG News has lost the ampersand of many entities, such as '#39;' for an apostrophe."""


@dataclass
class TextSplit:
    """The rows of one split."""

    # The class number of each row; or (rows, classes) uint8, 1 for each label of a row, where it
    # may have several or none.
    labels: Sequence[int] | Tensor
    texts: StoredTexts  # the cleaned text of each row
    # What a user should know of how the file was read, a line each.
    notes: tuple[str, ...] = field(default=(), compare=False)
    # Names of its columns, where the file has a header.
    columns: ColumnChoice = field(default=NO_CHOICE, compare=False)
    # Of each row what it belongs to, if such a column is chosen: rows of one group are trained on
    # together, or held out together.
    groups: Callable[[], Sequence[str]] = field(default=tuple, compare=False)

    def __len__(self) -> int:
        return len(self.labels)

    def select_rows(self, rows: Sequence[int] | Tensor) -> TextSplit:
        """Return a split of the given rows, in that order."""
        rows = torch.as_tensor(rows).tolist()
        labels = self.labels
        chosen = labels[rows] if isinstance(labels, Tensor) else [labels[row] for row in rows]
        return TextSplit(chosen, self.texts.select_rows(rows))

    def show(self, row: int) -> dict[str, str]:
        """Return the beginning of a row's text, for a page."""
        return {"text": shorten(self.texts[row], SHOWN_CHARACTERS)}

    def marks(self) -> dict[str, bytes]:
        """The lengths of the texts, which tell other rows apart without reading the texts again."""
        return {"lengths": self.texts.sizes.tobytes()}


def clean_text(text: str) -> str:
    """Remove HTML tags, entities and URLs, fold white space, and compose characters (NFC).

    A backslash becomes a space, since AG News has one where a line ended, a lone surrogate '?'.

    >>> clean_text('Oil &lt;b&gt;up&lt;/b&gt;  at www.example.com today')
    'Oil up at today'
    """
    text = without_surrogates(text).replace("\\", " ")
    text = URL.sub(" ", TAG.sub(" ", html.unescape(text)))
    return unicodedata.normalize("NFC", " ".join(text.split()))


def repair(text: str) -> str:
    """Give the entities of AG News their ampersands again.

    >>> repair('Stocks #36;5 up; it#39;s #1')
    'Stocks &#36;5 up; it&#39;s #1'
    """
    return ENTITY_WITHOUT_AMPERSAND.sub(r"&\1;", text)


def read_text_splits(
    name: str, data_dir: str, **own: Any
) -> tuple[dict[str, TextSplit], list[str]]:
    """Read the rows of a data set and the names of its classes.

    Args:
        name: 'agnews', 'headlines' (embedded) or 'csv'.
        data_dir: folder with ag_news_csv/ for 'agnews'; for 'csv' it contains train.csv and
            test.csv or val.csv.
        own: of 'csv': as of `read_own_csv`.
    Returns:
        The splits 'train', 'test' and 'val', as far as the data set has them, and the class names
        in the order of their numbers.
    Raises:
        InputError: a file is missing or broken; the message names file, row and remedy.
    """
    if name == "headlines":
        return read_headlines(), AGNEWS_CLASSES
    if name == "csv":
        return read_own_csv(Path(data_dir), **own)
    folder = Path(data_dir) / "ag_news_csv"
    for file in AGNEWS_FILES:
        if not (folder / file).exists():
            download_agnews(folder, file)
    splits = {part: read_agnews_file(folder / f"{part}.csv") for part in ("train", "test")}
    return splits, AGNEWS_CLASSES


def read_headlines() -> dict[str, TextSplit]:
    """Read the embedded headlines: 400 rows to train on and 80 to test."""
    all_rows = read_agnews_file(HEADLINES)
    return {
        "train": all_rows.select_rows(range(HEADLINES_TRAIN)),
        "test": all_rows.select_rows(range(HEADLINES_TRAIN, len(all_rows))),
    }


def read_agnews_file(path: Path) -> TextSplit:
    """Read a file in the format of AG News: class from 1 to 4, title, description; no header."""

    def read() -> Rows:
        for number, row in read_rows(path, columns=3):
            yield number, [*map(repair, row)]

    table = CsvTable(path, [], label=0, texts=(1, 2), read=read)
    return read_table(table, [str(number + 1) for number in range(len(AGNEWS_CLASSES))])[0]


# -------------------------------------------------------------------- own csv files


def read_own_csv(
    folder: Path,
    *,
    choice: ColumnChoice = NO_CHOICE,
    classes: Sequence[str] = (),
    enough: Sequence[str] = (),
    trained: ColumnChoice = NO_CHOICE,
) -> tuple[dict[str, TextSplit], list[str]]:
    """Read the files of own data for `read_text_splits`.

    Args:
        choice: the columns that the user chose.
        classes: of a trained model; empty to take those of the training file.
        enough: as of `needed_splits`.
        trained: names of a trained model's columns, taken where a file has all its texts'.
    Raises:
        InputError: a file is missing or broken, a column is not there, a label is empty or unknown.
    """
    paths = needed_splits(folder, SUFFIXES, enough=enough)
    is_chosen = choice.label is not None and bool(choice.texts)
    splits: dict[str, TextSplit] = {}
    names = list(classes)
    train: CsvTable | None = None
    for split, path in paths.items():
        table = open_table(path, choice, train=train, trained=trained)
        train = train or table
        splits[split], names = read_table(table, names, is_chosen=is_chosen)
        if choice.group and split == "train" and [*paths.values()].count(path) == 1:
            splits[split].groups = partial(table.groups, choice.group)
    splits["train"].notes += tuple(unread_splits(folder, paths, SUFFIXES))
    return splits, names


def read_table(
    table: CsvTable, classes: list[str], *, is_chosen: bool = False
) -> tuple[TextSplit, list[str]]:
    """Read the rows of a file, and return its classes as well.

    Args:
        classes: those that there may be; empty to take those of the file, see `name_classes`.
        is_chosen: as of `name_classes`.
    Raises:
        InputError: a row is broken, its label is empty or unknown, or no row has a text.
    """
    labels, texts, empty = [], StoredTexts(), []
    for number, row, names in table.labelled_rows(classes):
        labels.append(names)
        texts.append(clean_text(" ".join(row[i] for i in table.texts)))
        if not texts.sizes[-1]:
            empty.append(number)
    if len(empty) == len(labels):
        raise InputError(f"{table.path}: no row has a text; choose its column with --text_column")
    notes = [table.describe()]
    if empty:
        notes.append(
            f"warning: {table.path}: {len(empty)} of {len(labels)} rows have no text (the first is "
            f"row {empty[0]}); they are kept, and count like the others"
        )
    classes = classes or name_classes(labels, texts, table, is_chosen=is_chosen)
    columns = NO_CHOICE
    if header := table.header:
        columns = ColumnChoice(header[table.label], tuple(header[i] for i in table.texts))
    several = table.separator is not None
    found = numbered(labels, classes, several=several)
    return TextSplit(found if several else found.tolist(), texts, tuple(notes), columns), classes


def name_classes(
    labels: Sequence[tuple[str, ...]], texts: Sequence[str], table: CsvTable, *, is_chosen: bool
) -> list[str]:
    """Return the classes of own data: the different labels of the training file, sorted.

    Args:
        is_chosen: whether the user chose the columns of label and text.
    Raises:
        InputError: the labels are not those of a classification, or that of the first row seems to
            be from a header: no other text has it, and it comes once, or with one word as its text,
            unless the columns are chosen.
    """
    counts = Counter(chain.from_iterable(labels))
    first = next(iter(counts), "")
    where = f"{table.path}: {table.describe_column(table.label)} was read as the label and"
    if len(counts) < 2:
        raise InputError(
            f"{where} has only one value, {first!r}; classification needs two classes or "
            "more (choose another column with --label_column)"
        )
    is_checked = len(labels) >= MIN_CHECKED_ROWS and not is_chosen
    if is_checked and len(counts) > MAX_CLASSES_PER_ROW * counts.total():
        raise InputError(
            f"{where} has {len(counts)} different values in {len(labels)} rows, too many to be "
            f"classes (such as {shorten(first)!r}); choose the column of the label with "
            "--label_column"
        )
    places = [place for place, label in enumerate(labels) if first in label]
    has_one_text = {texts[place] for place in places} == {texts[0]}
    is_lone = places == [0] or (len(texts[0].split()) == 1 and not is_chosen)
    is_data = bool(table.header) or len({*zip(labels, texts)}) <= len(counts)
    if has_one_text and is_lone and not is_data:
        number, row = next(table.rows())
        raise InputError(
            f"{table.path}, row {number}: no other text has the label {shorten(first)!r}; if this "
            f"row is a header ({list_names(row)}), name its columns with --label_column and "
            "--text_column, or delete it below another header; if it is data, let the first row "
            "be a header such as label,text, and name the columns as well"
        )
    return sort_classes(counts)


# -------------------------------------------------------------------- files


def download_agnews(folder: Path, file: str) -> None:
    """Download one AG News file with a progress bar and verify its checksum.

    Raises:
        InputError: the download failed, or the folder is that of own texts.
    """
    check_no_own(folder.parent, folder, SUFFIXES, kind="texts of your own add --dataset csv")
    problem = f"{folder / file} is missing and could not be downloaded"
    advice = (
        ": fetch train.csv and test.csv of AG News (class, title, description) and put them in "
        f"{folder}, or run with --dataset headlines"
    )
    with in_one_line(problem, advice, (OSError, RuntimeError)):  # of another checksum
        folder.mkdir(parents=True, exist_ok=True)
        urllib.request.urlopen(AGNEWS_URL + file, timeout=20).close()  # torch has no time limit
        torch.hub.download_url_to_file(AGNEWS_URL + file, str(folder / file), AGNEWS_FILES[file])


def read_text_files(
    path: Path, choice: ColumnChoice = NO_CHOICE, *, trained: ColumnChoice = NO_CHOICE
) -> tuple[dict[Path, dict[int, str]], list[str]]:
    """Return the texts of a file, or of all .txt files below a folder.

    Args:
        choice: the texts' columns of a table, and what separates the labels beside them.
        trained: names of those in training, with which a table that has some of them is read.
    Returns:
        What `read_lines` returns of each file, in sorted order; and warnings of what was left out
        of a folder, files without text among them.
    Raises:
        InputError: a file cannot be read, or there is no text at all.
    """
    what = ".txt files with one text a line; name tables themselves"
    files, notes = expand_files(path, TEXT_SUFFIXES, what=what)
    texts = {}
    for file in files:
        if file.suffix.lower() in SUFFIXES:
            table = open_table(file, choice, trained=trained, has_label=False)
            notes.append(table.describe())
            rows = table.rows(to_classify=True)
            lines = {number: " ".join(row[i] for i in table.texts) for number, row in rows}
        elif file.suffix.lower() == ".json":
            raise InputError(f"{file}: is no text; save it as .jsonl, with an object on each line")
        else:
            lines = read_lines(file)
        blank = sum(not line.strip() for line in lines.values())
        if blank < len(lines):
            texts[file] = lines
        else:
            notes.append(f"warning: {file}: contains no text and is left out")
        if 0 < blank < len(lines):
            notes.append(f"warning: {file}: {blank} of {len(lines)} rows have no text")
    if not texts:
        raise InputError(f"{path}: contains no text")
    return texts, notes


def read_lines(path: Path) -> dict[int, str]:
    """Return the lines of a text file that are not blank, without white space at their ends.

    Returns:
        The text of each line by its number, from 1 on.
    Raises:
        InputError: the file cannot be read.
    """
    stripped = [line.strip() for line in utf8_lines(path)]
    return {number: line for number, line in enumerate(stripped, 1) if line}
