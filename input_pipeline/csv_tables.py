"""Reads csv and tsv files: their separator, their header row, the columns of labels and texts.

table = read_table(Path("my_texts/train.csv"), ColumnChoice())
columns = find_columns(table, ColumnChoice())
label, texts = table.rows[0][columns.label], [table.rows[0][i] for i in columns.texts]

A header row is recognised by the names of its columns. Without one, the label comes first and all
other columns are text, as in the files of AG News.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from errors import InputError
from input_pipeline.own_data import list_names, normal_form, shorten

SUFFIXES = (".csv", ".tsv")
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "vertical bar"}
SAMPLE_ROWS = 20  # by which the separator is recognised
LONGEST_CELL = 2**31 - 1  # characters; the limit of the csv module is 131,072 by default
LONGEST_NUMBER = 640  # digits, which Python converts under every setting of its limit
LONGEST_HEADER_CELL = 64  # characters; a row with a longer cell is a header by two names only
MOST_SPACES = 8  # around a name in a header that is there once more
PREAMBLE_ROWS = 30  # that may stand above a header, such as a title or comments
SEPARATOR_LINE = re.compile(r'(?im)^"?sep=([^\w\s"]|\t)"?[,;|\t ]*$')
"""The first line of a file that a spreadsheet is to open: 'sep=;'."""
RULE = re.compile(r"[\s:+|]*[-=_\u2500\u2501]{3,}[-=_\u2500\u2501\s:+|]*")
"""A cell of a line that is drawn below a header or around a table."""
NUM_ROWS = re.compile(r"\(\d+ rows?\)")  # the last line of what a data base prints
LABEL_NAMES = frozenset(
    """label labels class classes class_index class_name category categories target targets
    sentiment topic intent y""".split()
)
TEXT_NAMES = frozenset(
    """text texts sentence sentences content title description headline body review message comment
    question tweet document article abstract summary subject""".split()
)
OTHER_NAMES = frozenset(["", "id", "index", "idx", "unnamed:_0", "date", "url", "author"])
"""Columns that are never taken for the text by themselves; pandas writes an index without name."""


@dataclass(frozen=True)
class ColumnChoice:
    """The columns that the user chose: names in the header, or numbers from 1 on.

    Attributes:
        label: the column of the label; None to find it.
        texts: the columns of the text, which are joined; empty to find them.
    """

    label: str | None = None
    texts: tuple[str, ...] = ()

    def names(self) -> set[str]:
        """Return the normalised names of the chosen columns, without those given by number."""
        chosen = [*self.texts, *([] if self.label is None else [self.label])]
        return {normalise(name) for name in chosen if not is_number(name)}


@dataclass(frozen=True)
class CsvTable:
    """The rows of a file.

    Attributes:
        path: the file.
        header: the names of the columns; empty where the file has no header row.
        rows: the other rows, all of the same length.
        numbers: the number of each row in the file, from 1 on, for messages.
        note: a line on rows that are no data and were left out, or ''.
    """

    path: Path
    header: list[str]
    rows: list[list[str]]
    numbers: list[int]
    note: str = ""


@dataclass(frozen=True)
class Columns:
    """Positions of the label and of the texts in a row, from 0 on."""

    label: int
    texts: tuple[int, ...]


def normalise(name: str) -> str:
    """Return a column's name in lower case, with one underscore for spaces and hyphens.

    >>> normalise(" Class Index")
    'class_index'
    """
    return re.sub(r"[\s_-]+", "_", normal_form(name.strip().casefold()))


def is_number(name: str) -> bool:
    """Tell whether a label or the name of a column is a whole number of ordinary length."""
    return name.isdecimal() and len(name) <= LONGEST_NUMBER


# -------------------------------------------------------------------- rows of a file


def read_table(path: Path, choice: ColumnChoice, *, train: CsvTable | None = None) -> CsvTable:
    """Read a csv or tsv file of own data and recognise its header row.

    Args:
        path: the file, in UTF-8; its columns are separated by commas, tabs, semicolons or
            vertical bars.
        choice: the columns that the user named.
        train: the training file, where another one is read.
    Raises:
        InputError: the file is missing, empty or broken, or only one of the files has a header.
    """
    text = read_utf8(path)
    if stated := SEPARATOR_LINE.match(text):
        separator = stated[1]
    elif path.suffix.lower() == ".tsv":
        separator = "\t"
    else:
        separator = recognise_separator(text, choice)
    rows = parse(SEPARATOR_LINE.sub("", text), separator, path=path)  # the line breaks stay
    drawn = {number for number, row in rows if is_drawn(row)}
    rows = [(number, row) for number, row in rows if number not in drawn]
    header_at = find_header(rows, choice)
    table = check_rows(path, rows[header_at:], separator=separator)
    if not has_header(table.rows, choice, train):
        if train is not None and train.header:
            raise InputError(
                f"{path}: row 1 ({list_names(table.rows[0])}) is not a header with columns of "
                f"{train.path.name} ({list_names(train.header)}); give both files a header row"
            )
        return dataclasses.replace(table, note=describe_left_out(path, drawn))
    header, *data_rows = table.rows
    named = named_columns(header)
    again = {number for number, row in zip(table.numbers, table.rows) if repeats_header(row, named)}
    data = [(n, row) for n, row in zip(table.numbers[1:], data_rows) if n not in again]
    names = sorted(map(normalise, header))
    for number, row in data:
        may_be_names = len(row[0]) <= LONGEST_HEADER_CELL and normalise(row[0]) in names
        if may_be_names and sorted(map(normalise, row)) == names:
            raise InputError(
                f"{path}, row {number}: is the header with its columns in another order, as where "
                "files were joined; give all parts one order"
            )
    if not data:
        raise InputError(f"{path} has a header row only: it needs at least one row below it")
    numbers, data_rows = map(list, zip(*data))
    others = {number for number, _ in rows[:header_at]} | again - {table.numbers[0]} | drawn
    return CsvTable(path, header, data_rows, numbers, note=describe_left_out(path, others))


def describe_left_out(path: Path, numbers: Collection[int]) -> str:
    """Return a line that names the rows of a file that are no data, or ''."""
    if not numbers:
        return ""
    rows = list_names([str(number) for number in sorted(numbers)])
    return (
        f"warning: {path}: left out, as they are no data (a title, a drawn line, the header once "
        f"more): rows {rows}"
    )


def find_header(rows: Sequence[tuple[int, Sequence[str]]], choice: ColumnChoice) -> int:
    """Return the position of the first row that is surely a header; 0 if there is none.

    It has names of a label and a text, or all names that the user chose. A title or comments may
    stand above it.

    Args:
        rows: number and columns of each row.
        choice: the columns that the user named.
    """
    chosen = choice.names()
    for position, (_, row) in enumerate(rows[: PREAMBLE_ROWS + 1]):
        names = {normalise(cell) for cell in row}
        if (LABEL_NAMES & names and TEXT_NAMES & names) or (chosen and chosen <= names):
            return position
    return 0


def named_columns(header: Sequence[str]) -> dict[int, str]:
    """Return the normalised names of a header by position, without those such as of an index."""
    names = {position: normalise(name) for position, name in enumerate(header)}
    return {position: name for position, name in names.items() if name not in OTHER_NAMES}


def repeats_header(row: Sequence[str], named: Mapping[int, str]) -> bool:
    """Tell whether a row is the header once more, as where files were joined.

    Args:
        row: of the file.
        named: the columns that `named_columns` found in the header.
    """
    return bool(named) and all(
        len(row[position]) <= len(name) + MOST_SPACES and normalise(row[position]) == name
        for position, name in named.items()
    )


def is_drawn(row: Sequence[str]) -> bool:
    """Tell whether a row is a line such as --- | ---, or the number of rows below a table."""
    cells = [cell for cell in row if cell.strip()]
    return all(RULE.fullmatch(cell) for cell in cells) or bool(
        len(cells) == 1 and NUM_ROWS.fullmatch(cells[0].strip())
    )


def read_csv(path: Path, columns: int = 0) -> list[list[str]]:
    """Read a csv file without header row, whose columns are separated by commas.

    Args:
        path: the file, in UTF-8.
        columns: number of columns; 0 stands for that of the first row, but at least 2.
    Returns:
        The columns of each row.
    Raises:
        InputError: the file is missing, empty or broken.
    """
    return check_rows(path, parse(read_utf8(path), ",", path=path), columns=columns).rows


def read_utf8(path: Path) -> str:
    """Return a file's text without byte-order marks, which joined files have within.

    Raises:
        InputError: the file is missing or not UTF-8.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return file.read().replace("\ufeff", "")
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing: put a csv file there with the columns label, text..."
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read as UTF-8 csv: {error}; fetch or export it again"
        ) from None


def parse(
    text: str, separator: str, *, path: Path, limit: int | None = None
) -> list[tuple[int, list[str]]]:
    """Return the number and the columns of each of the first `limit` rows that is not blank.

    Many tab-separated files do not quote their texts, so that a quote is an ordinary character.
    Such a file is recognised by quotes that do not fit together, or that have both a line break and
    a tab between them: these are two stray quotes with rows between them.

    Raises:
        InputError: the text is not csv.
    """
    csv.field_size_limit(LONGEST_CELL)
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=separator,
            quoting=quoting,
            strict=True,
            skipinitialspace=True,
        )
        try:
            rows = list(enumerate(islice(reader, limit), 1))
        except csv.Error as error:
            if separator != "\t" or quoting == csv.QUOTE_NONE:
                raise InputError(
                    f"{path} cannot be read as UTF-8 csv: {error} in line {reader.line_num}; "
                    "correct the line, or export the file again"
                ) from None
            continue
        if separator != "\t" or not any(has_rows_inside(cell) for _, row in rows for cell in row):
            return [(number, row) for number, row in rows if any(cell.strip() for cell in row)]
    raise AssertionError("the loop returns or raises")


def has_rows_inside(cell: str) -> bool:
    """Tell whether a cell of a tab-separated file has swallowed rows: a line break and a tab."""
    return "\t" in cell and ("\n" in cell or "\r" in cell)


def recognise_separator(text: str, choice: ColumnChoice) -> str:
    """Return the separator that gives the first rows equally many columns, at least two.

    Where several do, it is the one that comes first; where none does, a comma. Rows above a header
    do not count.
    """
    first_cells: dict[str, int] = {}
    for separator in SEPARATORS:
        try:
            rows = [row for _, row in parse(text, separator, path=Path(), limit=SAMPLE_ROWS)]
        except InputError:
            continue
        rows = [row for row in rows if not is_drawn(row)]
        rows = rows[find_header(list(enumerate(rows)), choice) :]
        if rows and len(rows[0]) > 1 and len({len(row) for row in rows}) == 1:
            first_cells[separator] = len(rows[0][0])
    return min(first_cells, key=lambda separator: first_cells[separator], default=",")


def check_rows(
    path: Path, rows: list[tuple[int, list[str]]], *, columns: int = 0, separator: str = ","
) -> CsvTable:
    """Check that all rows have the same number of columns.

    Args:
        path: the file, for error messages.
        rows: number and columns of each row.
        columns: how many they should be; 0 stands for that of the first row, but at least 2.
        separator: between the columns, for error messages.
    Raises:
        InputError: there are no rows, or a row has another number of columns.
    """
    if not rows:
        raise InputError(f"{path} is empty: it needs at least one row of label, text...")
    columns = columns or max(2, len(rows[0][1]))
    for number, row in rows:
        if len(row) != columns:
            name = SEPARATORS.get(separator, repr(separator))
            raise InputError(
                f"{path}, row {number}: {len(row)} columns, expected {columns}; correct or delete "
                f"the row (a text that contains a {name} needs double quotes)"
            )
    return CsvTable(path, [], [row for _, row in rows], [number for number, _ in rows])


# -------------------------------------------------------------------- header and columns


def has_header(rows: Sequence[Sequence[str]], choice: ColumnChoice, train: CsvTable | None) -> bool:
    """Tell whether the first row names the columns.

    It does if it has a column that the user named, or names of both a label and a text. In the
    training file one such name is enough if no other row has it in that column. Another file may
    also share a name with the header of the training file.
    """
    names = [normalise(cell) for cell in rows[0]]
    if choice.names() & set(names):
        return True
    if LABEL_NAMES & set(names) and TEXT_NAMES & set(names):
        return True
    if train is None and max(map(len, rows[0])) > LONGEST_HEADER_CELL:
        return False
    if train is not None:
        return bool({normalise(name) for name in train.header if name.strip()} & set(names))
    named = named_columns(rows[0])
    others = [row for row in rows[1:] if not repeats_header(row, named)]
    return any(
        name in LABEL_NAMES | TEXT_NAMES
        and not any(normalise(row[position]) == name for row in others)
        for position, name in enumerate(names)
    )


def find_columns(table: CsvTable, choice: ColumnChoice) -> Columns:
    """Find the columns of label and text by the user's choice, else by name, else by position.

    Raises:
        InputError: a column is not there, or it is not clear which one is meant.
    """
    label = find_label(table, choice)
    texts = find_texts(table, choice, label)
    if label in texts:
        raise InputError(
            f"{table.path}: {describe_column(table, label)} would be both label and text; "
            "give --label_column and --text_column different columns"
        )
    return Columns(label, texts)


def choose_alike(
    table: CsvTable, choice: ColumnChoice, *, train: CsvTable, columns: Columns
) -> ColumnChoice:
    """Choose those columns of another file that have the names of the training file's columns.

    What the user chose stays. A role whose names the other file does not have is left open.

    Args:
        table: the other file.
        choice: of the user.
        train: the training file.
        columns: of the training file.
    Returns:
        The choice for `table`, by number.
    Raises:
        InputError: the file has some of the columns that the text is joined from, but not all.
    """
    if not (train.header and table.header):
        return choice
    names = [normalise(name) for name in table.header]
    label_name = normalise(train.header[columns.label])
    label, texts = choice.label, choice.texts
    if label is None and names.count(label_name) == 1:
        label = str(names.index(label_name) + 1)
    text_names = [normalise(train.header[position]) for position in columns.texts]
    if not texts and any(name in names for name in text_names):
        if missing := [name for name in text_names if name not in names]:
            raise InputError(
                f"{table.path}: has no column {list_names(missing)}, which is text in "
                f"{train.path.name}; add it, or choose the columns with --text_column"
            )
        if all(names.count(name) == 1 for name in text_names):
            texts = tuple(str(names.index(name) + 1) for name in text_names)
    return ColumnChoice(label, texts)


def find_label(table: CsvTable, choice: ColumnChoice) -> int:
    """Return the position of the label.

    Raises:
        InputError: the column is not there, or the header has no or several names of a label.
    """
    if choice.label is not None:
        return column_position(table, choice.label, flag="--label_column")
    if not table.header:
        return 0
    named = [i for i, name in enumerate(table.header) if normalise(name) in LABEL_NAMES]
    chosen = [column_position(table, name, flag="--text_column") for name in choice.texts]
    named = [position for position in named if position not in chosen]
    if len(named) != 1:
        problem = "several columns that may be" if named else "no column that is known to be"
        raise InputError(
            f"{table.path}: the header has {problem} the label (columns: "
            f"{list_names(table.header)}); choose it with --label_column"
        )
    return named[0]


def find_texts(table: CsvTable, choice: ColumnChoice, label: int) -> tuple[int, ...]:
    """Return the positions of the texts.

    Raises:
        InputError: a column is not there, or the header has no name of a text and several columns
            that may be one.
    """
    if choice.texts:
        return tuple(column_position(table, name, flag="--text_column") for name in choice.texts)
    others = [position for position in range(len(table.rows[0])) if position != label]
    if not table.header:
        return tuple(others)
    names = [normalise(name) for name in table.header]
    named = [i for i in others if names[i] in TEXT_NAMES]
    unknown = [i for i in others if names[i] not in OTHER_NAMES | LABEL_NAMES]
    if not named and len(unknown) != 1:
        raise InputError(
            f"{table.path}: the header has no column that is known to be the text (columns: "
            f"{list_names(table.header)}); choose it with --text_column"
        )
    if len({names[i] for i in named}) < len(named):
        raise InputError(
            f"{table.path}: several columns have the same name (columns: "
            f"{list_names(table.header)}); choose with --text_column, by number"
        )
    return tuple(named or unknown)


def column_position(table: CsvTable, chosen: str, *, flag: str) -> int:
    """Return the position, from 0 on, of a column given by its name, or by its number from 1 on.

    Raises:
        InputError: the column is not there, or its name occurs twice.
    """
    columns = len(table.rows[0])
    if is_number(chosen):
        if 1 <= int(chosen) <= columns:
            return int(chosen) - 1
        raise InputError(f"{flag} {shorten(chosen)}: {table.path} has the columns 1 to {columns}")
    if not table.header:
        raise InputError(
            f"{flag} {shorten(chosen)}: {table.path} has no header row with that name (row 1: "
            f"{list_names(table.rows[0])}); give a name of the header, or a number from 1 on"
        )
    names = [name.strip() for name in table.header]
    if chosen.strip() not in names:  # it may differ in case or in spaces
        names, chosen = [normalise(name) for name in names], normalise(chosen)
    same = [position for position, name in enumerate(names) if name == chosen.strip()]
    if len(same) == 1:
        return same[0]
    problem = "several columns" if same else "no column"
    raise InputError(
        f"{flag} {shorten(chosen)}: {table.path} has {problem} of that name (columns: "
        f"{list_names(table.header)}); give another name, or a number from 1 on"
    )


def describe_columns(table: CsvTable, columns: Columns) -> str:
    """Say in one line which columns of a file are read as what."""
    header = "row 1 is the header" if table.header else "no header row"
    texts = " and ".join(describe_column(table, position) for position in columns.texts)
    label = describe_column(table, columns.label)
    return f"{table.path}: {header}; the label is {label}, the text {texts}"


def describe_column(table: CsvTable, position: int) -> str:
    """Name a column by its number from 1 on and by its name in the header."""
    name = f" ({table.header[position]})" if table.header else ""
    return f"column {position + 1}{name}"
