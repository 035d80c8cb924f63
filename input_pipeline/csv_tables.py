"""Reads csv, tsv and jsonl files: their rows, and which columns are the label and the texts.

table = read_table(Path("my_texts/train.csv"), ColumnChoice())
label, texts = table.rows[0][table.label], [table.rows[0][i] for i in table.texts]

Columns are found by their usual names in a header row, or the user names them. Without a header
row the label comes first and all other columns are text, as in the files of AG News.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from errors import InputError
from input_pipeline.json_lines import parse_json_lines
from input_pipeline.own_data import list_names, normal_form, shorten

Rows = list[tuple[int, list[str]]]  # the number of each row in its file, and its columns

SUFFIXES = (".csv", ".tsv", ".jsonl")
SEPARATORS = {".csv": re.compile(r"[,;\t|]"), ".tsv": re.compile(r"\t")}  # the first one in a file
LONGEST_CELL = 2**31 - 1  # characters; the limit of the csv module is 131,072 by default
LONGEST_NUMBER = 640  # digits, which Python converts under every setting of its limit
NO_LABEL = re.compile(r"[\s:|+]*[-=_]{3,}[\s:|+=_-]*|sep=.?", re.IGNORECASE)
"""A part of a line that is drawn, or of one that names the separator for a spreadsheet."""
LABEL_NAMES = frozenset(
    """label labels class classes class_index class_name category categories target targets
    sentiment topic intent y""".split()
)
TEXT_NAMES = frozenset(
    """text texts sentence sentences content title description headline body review message comment
    question tweet document article abstract summary subject""".split()
)


@dataclass(frozen=True)
class ColumnChoice:
    """The columns that the user chose: names in the header, or numbers from 1 on.

    Attributes:
        label: the column of the label; None to find it.
        texts: the columns of the text, which are joined; empty to find them.
    """

    label: str | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CsvTable:
    """The rows of a file.

    Attributes:
        path: the file.
        header: the names of the columns; empty where the file has no header row.
        rows: the other rows, all of the same length.
        numbers: the number of each row in the file, from 1 on, for messages.
        label, texts: positions of the label and of the texts in a row, from 0 on.
    """

    path: Path
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]
    label: int
    texts: tuple[int, ...]

    def describe(self) -> str:
        """Say in one line which columns are read as what."""
        header = "row 1 is the header" if self.header else "no header row"
        if self.path.suffix.lower() == ".jsonl":
            header = "an object a line"
        texts = " and ".join(self.describe_column(position) for position in self.texts)
        label = self.describe_column(self.label)
        return f"{self.path}: {header}; the label is {label}, the text {texts}"

    def describe_column(self, position: int) -> str:
        """Name a column by its number from 1 on and by its name in the header."""
        name = f" ({self.header[position]})" if self.header else ""
        return f"column {position + 1}{name}"


def normalise(name: str) -> str:
    """Return a column's name in lower case, with one underscore for spaces and hyphens.

    >>> normalise(" Class Index")
    'class_index'
    """
    return re.sub(r"[\s_-]+", "_", normal_form(name.strip().casefold()))


def is_number(name: str) -> bool:
    """Tell whether a label or the name of a column is a whole number of ordinary length."""
    return name.isdecimal() and len(name) <= LONGEST_NUMBER


def read_table(path: Path, choice: ColumnChoice, *, train: CsvTable | None = None) -> CsvTable:
    """Read a file of own data.

    Args:
        path: the file, in UTF-8. Tabs separate the columns of a .tsv file; of a .csv file it is the
            first comma, semicolon, tab or vertical bar. A line of a .jsonl file is an object.
        choice: the columns that the user named.
        train: the training file, whose columns another file must have.
    Raises:
        InputError: the file is missing, empty or broken, has rows that are no data, or it is not
            clear which of its columns are label and text.
    """
    text = read_utf8(path)
    if path.suffix.lower() == ".jsonl":
        rows, has_header = parse_json_lines(text, path=path), True
    else:
        found = SEPARATORS[path.suffix.lower()].search(text)
        separator = found[0] if found else ","
        rows = check_lengths(path, parse_csv(text, separator, path=path))
        has_header = bool(train.header) if train else is_header(rows, choice)
    header = rows[0][1] if has_header else []
    if train and train.header and header:
        names = [train.header[position] for position in train.texts]
        choice = ColumnChoice(train.header[train.label], tuple(names))
    label, texts = find_columns(path, header, choice, num_columns=len(rows[0][1]))
    rows = rows[1:] if has_header else rows
    if not rows:
        raise InputError(f"{path} has a header row only: it needs at least one row below it")
    check_labels(path, rows, header, label)
    numbers, cells = [number for number, _ in rows], [row for _, row in rows]
    return CsvTable(path, header, cells, numbers, label, texts)


# -------------------------------------------------------------------- rows of a file


def read_csv(path: Path, columns: int) -> list[list[str]]:
    """Return the rows of a csv file with commas and without header row, of so many columns.

    Raises:
        InputError: the file is missing, empty or broken.
    """
    rows = check_lengths(path, parse_csv(read_utf8(path), ",", path=path), columns)
    return [row for _, row in rows]


def read_utf8(path: Path) -> str:
    """Return a file's text without byte-order marks, which joined files have within.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); fetch it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None
    if "\0" in text:
        raise InputError(f"{path} is not UTF-8 (it has NUL bytes, as UTF-16); save it as UTF-8")
    return text.replace("\ufeff", "")


def parse_csv(text: str, separator: str, *, path: Path) -> Rows:
    """Return the rows that are not blank.

    Many tab-separated files do not quote their texts, so that a quote is an ordinary character.
    They are recognised by quotes that do not pair, or that have both a tab and a line break between
    them.

    Raises:
        InputError: the text is not csv.
    """
    csv.field_size_limit(LONGEST_CELL)

    def parse(has_quotes: bool) -> Rows:
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=separator,
            quoting=csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE,
            strict=True,
            skipinitialspace=True,
        )
        try:
            rows = list(enumerate(reader, 1))
        except csv.Error as error:
            raise InputError(
                f"{path} cannot be read as UTF-8 csv: {error} in line {reader.line_num}; "
                "correct the line, or export the file again"
            ) from None
        return [(number, row) for number, row in rows if any(cell.strip() for cell in row)]

    if separator != "\t":
        return parse(has_quotes=True)
    with contextlib.suppress(InputError):
        rows = parse(has_quotes=True)
        if not any("\t" in cell and "\n" in cell for _, row in rows for cell in row):
            return rows
    return parse(has_quotes=False)


def check_lengths(path: Path, rows: Rows, columns: int = 0) -> Rows:
    """Return the rows, which must have `columns` columns; 0 is as many as the first, at least 2.

    Raises:
        InputError: there are no rows, or a row has another number of columns.
    """
    if not rows:
        raise InputError(f"{path} is empty: it needs at least one row of label, text...")
    columns = columns or max(2, len(rows[0][1]))
    for number, row in rows:
        if len(row) != columns:
            raise InputError(
                f"{path}, row {number}: {len(row)} columns, expected {columns}; correct or delete "
                "the row (a text that contains the separator needs double quotes)"
            )
    return rows


def check_labels(path: Path, rows: Rows, header: Sequence[str], label: int) -> None:
    """Check that no row is a header within the file, a drawn line or a line such as 'sep=;'.

    Raises:
        InputError: such a row would become a class of its own.
    """
    names = sorted(map(normalise, header))
    known = names or LABEL_NAMES | TEXT_NAMES
    for number, row in rows:
        cells = sorted(map(normalise, row)) if normalise(row[label]) in known else []
        is_header_again = cells == names if names else has_both_names(cells)
        if is_header_again or NO_LABEL.fullmatch(row[label]):
            raise InputError(
                f"{path}, row {number} ({list_names(row)}): is no data; the header must be the "
                "first row and the only one, so delete this row or those above it"
            )


# -------------------------------------------------------------------- header and columns


def has_both_names(cells: Sequence[str]) -> bool:
    """Tell whether normalised cells have the usual names of both a label and a text."""
    return bool(LABEL_NAMES.intersection(cells) and TEXT_NAMES.intersection(cells))


def is_header(rows: Rows, choice: ColumnChoice) -> bool:
    """Tell whether the first row names the columns.

    It does if it has a name that the user chose, the usual names of both a label and a text, or one
    usual name that no other row has in that column.
    """
    cells = [normalise(cell) for cell in rows[0][1]]
    chosen = [*choice.texts, *([] if choice.label is None else [choice.label])]
    if has_both_names(cells) or any(normalise(n) in cells for n in chosen if not is_number(n)):
        return True
    return any(
        name in LABEL_NAMES | TEXT_NAMES
        and not any(normalise(row[position]) == name for _, row in rows[1:])
        for position, name in enumerate(cells)
    )


def find_columns(
    path: Path, header: Sequence[str], choice: ColumnChoice, *, num_columns: int
) -> tuple[int, tuple[int, ...]]:
    """Return the positions of the label and of the texts: the chosen ones, else by usual names.

    Without a header the label is the first column and all others are texts.

    Raises:
        InputError: a column is not there, or it is not clear which one is meant.
    """
    names = [normalise(name) for name in header]

    def refusal(problem: str, flag: str) -> InputError:
        columns = list_names(header) if header else f"{num_columns} without names"
        return InputError(
            f"{path}: {problem} (columns: {columns}); choose with {flag}, by name or by number "
            "from 1 on"
        )

    def position(chosen: str, flag: str) -> int:
        same = [i for i, name in enumerate(names) if name == normalise(chosen)]
        if not same and is_number(chosen) and 1 <= int(chosen) <= num_columns:
            return int(chosen) - 1
        if len(same) != 1:
            there_is = "there are several columns" if same else "there is no column"
            raise refusal(f"{there_is} {shorten(chosen)}", flag)
        return same[0]

    texts = [position(name, "--text_column") for name in choice.texts]
    labels = [i for i, name in enumerate(names) if name in LABEL_NAMES and i not in texts]
    if choice.label is not None:
        labels = [position(choice.label, "--label_column")]
    elif not header:
        labels = [0]
    if len(labels) != 1:
        which = "several columns may be" if labels else "no column is known to be"
        raise refusal(f"{which} the label", "--label_column")
    if not texts:
        others = [i for i in range(num_columns) if i not in labels]
        texts = [i for i in others if names[i] in TEXT_NAMES] if header else others
    if not texts or labels[0] in texts:
        raise refusal("no column is known to be the text", "--text_column")
    return labels[0], tuple(texts)
