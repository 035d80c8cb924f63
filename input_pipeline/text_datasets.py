"""Text data sets: csv files to one flat integer tensor, the tokenizer, and batches of similar length.

splits, classes = read_text_splits("agnews", "data")          # {'train': TextSplit, 'test': TextSplit}
tokenizer = train_tokenizer(splits["train"].texts, "wordpiece", vocab_size=16_000)
train = TextSet(splits["train"], tokenizer, max_len=128, device=torch.device("cpu"))
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
AGNEWS_FILES = {  # rows of the official files, to notice a cut download
    "train.csv": 120_000,
    "test.csv": 7_600,
}
HEADLINES = Path(__file__).with_name("headlines.csv")
HEADLINES_TRAIN = 400  # the first rows; the others are the test set
TAG = re.compile(r"</?[A-Za-z!][^<>]*>")
BARE = re.compile(
    r"(?<![&\w])(#\d{2,4}|quot|amp|lt|gt|nbsp|apos|mdash|ndash);"
)  # AG News lost the ampersand
URL = re.compile(r"(?:https?://|www\.)\S+")


@dataclass
class TextSplit:
    """Labels 0..classes-1 and cleaned texts of one split."""

    labels: list[int]
    texts: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int]) -> TextSplit:
        """The given rows, in that order."""
        return TextSplit([self.labels[i] for i in rows], [self.texts[i] for i in rows])


def clean_text(text: str) -> str:
    """Drop HTML tags, entities and URLs; fold white space.

    >>> clean_text('Oil &lt;b&gt;up&lt;/b&gt;  at www.example.com today')
    'Oil up at today'
    """
    text = BARE.sub(r"&\1;", text.replace("\\", " "))  # AG News has a backslash where a line ended
    return " ".join(URL.sub(" ", TAG.sub(" ", html.unescape(text))).split())


def read_text_splits(name: str, data_dir: str) -> tuple[dict[str, TextSplit], list[str]]:
    """The training and test rows of a data set, and the names of its classes.

    Args:
        name: 'agnews', 'headlines' (embedded), or 'csv' (train.csv and test.csv in `data_dir`: label, text...).
    Raises:
        InputError: a file is missing or broken; the message names file, row and remedy.
    """
    if name == "headlines":
        rows = read_csv(HEADLINES, columns=3)
        labels, classes = number_labels(rows, AGNEWS_CLASSES, HEADLINES)
        split = {"train": range(HEADLINES_TRAIN), "test": range(HEADLINES_TRAIN, len(rows))}
        every = TextSplit(labels, [clean_text(" ".join(row[1:])) for row in rows])
        return {part: every.take(numbers) for part, numbers in split.items()}, classes
    if name == "agnews":
        folder, columns, classes = Path(data_dir) / "ag_news_csv", 3, AGNEWS_CLASSES
        for file in AGNEWS_FILES:
            if not (folder / file).exists():
                download_agnews(folder, file)
    else:
        folder, columns, classes = Path(data_dir), 0, []
    splits = {}
    for part in ("train", "test"):
        path = folder / f"{part}.csv"
        rows = read_csv(path, columns)
        labels, classes = number_labels(rows, classes, path)
        splits[part] = TextSplit(labels, [clean_text(" ".join(row[1:])) for row in rows])
    return splits, classes


def read_csv(path: Path, columns: int = 0) -> list[list[str]]:
    """TextSplit of a csv file, each of the same number of columns (`columns`, or the first row's when 0; at least 2)."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = []
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                columns = columns or max(2, len(row))
                if len(row) != columns:
                    raise InputError(
                        f"{path}, row {number}: {len(row)} columns, wanted {columns} (label, text...); mend or delete the row"
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
    rows: list[list[str]], classes: list[str], path: Path
) -> tuple[list[int], list[str]]:
    """Labels as 0..classes-1. AG News counts from 1; your own labels may be any words, numbered in sorted order.

    `classes` is empty for the training file of your own data: then it is learnt from the rows.
    """
    counted = classes == AGNEWS_CLASSES
    if not classes:
        classes = sorted(
            {row[0].strip() for row in rows}, key=lambda name: (not name.isdigit(), name.zfill(12))
        )
        if len(classes) < 2:
            raise InputError(
                f"{path}: only one label, {classes[0]!r}; classification needs two or more"
            )
    numbers = {str(i + 1) if counted else name: i for i, name in enumerate(classes)}
    labels = []
    for number, row in enumerate(rows, 1):
        label = numbers.get(row[0].strip())
        if label is None:
            known = ", ".join(list(numbers)[:10])
            raise InputError(
                f"{path}, row {number}: label {row[0][:40]!r} is out of range, wanted one of {known}"
            )
        labels.append(label)
    return labels, classes


def download_agnews(folder: Path, file: str) -> None:
    """Fetch one AG News file with a progress bar and a row count; InputError says what to do without a network."""
    from tqdm import tqdm  # only a download needs it here

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{file}.part"
    try:
        with (
            urllib.request.urlopen(AGNEWS_URL + file, timeout=20) as response,
            open(part, "wb") as out,
        ):
            size = int(response.headers.get("Content-Length", 0)) or None
            with tqdm(total=size, unit="B", unit_scale=True, desc=file) as bar:
                while chunk := response.read(1 << 20):
                    out.write(chunk)
                    bar.update(len(chunk))
        if len(read_csv(part, 3)) != AGNEWS_FILES[file]:
            raise OSError(f"{file} does not have {AGNEWS_FILES[file]} rows")
        part.rename(folder / file)
    except (OSError, InputError) as error:
        part.unlink(missing_ok=True)
        raise InputError(
            f"{folder / file} is missing and could not be downloaded ({error}): fetch train.csv and test.csv of AG News "
            f"(class, title, description) and put them in {folder}, or run with --dataset headlines"
        ) from None


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        lines = [
            line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path}: cannot be read as UTF-8 text ({error}); give text files with one text a line"
        ) from None
    if not lines:
        raise InputError(f"{path}: holds no text; give text files with one text a line")
    return lines
