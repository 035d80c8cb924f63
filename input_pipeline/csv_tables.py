"""Reads csv, tsv, jsonl and parquet files: their rows, and which columns are label and texts.

table = open_table(Path("my_texts/train.csv"), ColumnChoice())
for number, row in table.rows():                   # row by row, so that a file may be of any size
    label, texts = row[table.label], [row[i] for i in table.texts]

Columns are found by their usual names in a header row, or the user names them. Without a header
row the label comes first and all other columns are text, as in the files of AG News. A line of a
jsonl file, or a row of a parquet file, is an object such as {"label": "spam", "text": "Win now"}.
"""

import csv
import io
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from errors import InputError, in_one_line, needing
from input_pipeline.own_data import list_names, normal_form, shorten

Rows = Iterator[tuple[int, list[str]]]  # the number of each row in its file, and its columns

OF_OBJECTS = {".jsonl": "an object a line", ".parquet": "parquet"}  # and what is said of them
SUFFIXES = (".csv", ".tsv", *OF_OBJECTS)
PARQUET_ROWS = 1024  # read at a time: a row may hold an image
# The first one in a file outside quotes; a text within quotes is a longer match.
SEPARATORS = {".csv": re.compile(r'"[^"]*"|[,;\t|]'), ".tsv": re.compile(r"\t")}
LONGEST_CELL = 10**8  # characters: a quote that is never closed does not fill the memory
NESTED = (
    "a list, an object or bytes; write a string, choose another column, or for several labels give "
    "--label_separator (images that lie in the table itself: --dataset hf:FOLDER)"
)
"""This very object is the cell of a nested value, or of bytes."""
LIST = re.compile(r"""\s*\[\s*(['"].*['"]\s*|[^][]*,[^][]*|)\]\s*""", re.DOTALL)
"""A list written as text; [spam] and [a]|[b] may be names."""
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
    """The columns that the user chose, by name or number from 1 on, and what is between labels."""

    label: str | None = None  # the column of the label; None to find it
    texts: tuple[str, ...] = ()  # the columns of the text, which are joined; empty to find them
    separator: str | None = None  # of the labels in a cell; None where a row has one label
    group: str | None = None  # the column of what belongs together; None where rows do not


NO_CHOICE = ColumnChoice()
QUOTES = f"{string.whitespace}\"'"  # around a name, which files without quoting have


@dataclass(frozen=True)
class CsvTable:
    """A file, and which of its columns are read as what."""

    path: Path
    header: list[str]  # the names of the columns; empty where the file has no header row
    label: int  # of this and the next: positions in a row, from 0 on
    texts: tuple[int, ...]
    read: Callable[[], Rows]  # begins to read the rows, the header among them
    separator: str | None = None  # as of `ColumnChoice`

    def rows(self, *, to_classify: bool = False) -> Rows:
        """Yield the number in the file, from 1 on, and the columns of each row of data.

        Args:
            to_classify: the label may be anything, and there may be no row.
        Raises:
            InputError: there is none, or a row is broken or would become a class of its own: a
                header within the file, a drawn line or 'sep=;'; or a cell is a list or an object.
        """
        rows, number = islice(self.read(), bool(self.header), None), 0
        names = sorted(map(normalise, self.header))
        known = LABEL_NAMES.union(TEXT_NAMES, names)
        for number, row in rows:
            label = row[self.label]
            cells = sorted(map(normalise, row)) if normalise(label) in known else []
            is_again = cells == names and (len(cells) > 1 or not to_classify)
            is_again |= (to_classify or not names) and has_both_names(cells)
            if (is_again and cells) or (not to_classify and NO_LABEL.fullmatch(label)):
                raise InputError(
                    f"{self.path}, row {number} ({list_names(row)}): is no data; the header must "
                    "be the first row and the only one, so delete this row or those above it"
                )
            for position in self.texts if to_classify else (self.label, *self.texts):
                if is_nested(row[position], may_be_listed=position == self.label):
                    column = self.describe_column(position)
                    raise InputError(f"{self.path}, row {number}: {column} is {NESTED}")
            yield number, row
        if not number and not to_classify:
            raise InputError(
                f"{self.path} has a header row only: it needs at least one row below it"
            )

    def labelled_rows(
        self, classes: Sequence[str] = ()
    ) -> Iterator[tuple[int, list[str], tuple[str, ...]]]:
        """Yield what `rows` yields, and the labels of each row: one unless there is a separator.

        Args:
            classes: those that there may be; empty where all are taken.
        Raises:
            InputError: as of `rows`; or a row has no label, and needs one; or one is not known.
        """
        known = class_numbers(classes)
        labels: dict[str, tuple[str, ...]] = {}  # of each cell: rows of the same share the names
        for number, row in self.rows():
            cell = row[self.label]
            if cell not in labels:
                parts = [cell] if self.separator is None else cell.split(self.separator)
                if isinstance(cell, ListedNames):
                    parts = json.loads(cell)
                elif self.separator is not None and LIST.fullmatch(cell):
                    raise InputError(
                        f"{self.path}, row {number}: the label {shorten(cell)} is a list written "
                        "as text; write lists in .jsonl or .parquet, or names with separators"
                    )
                labels[cell] = tuple(filter(None, map(normal_form, parts)))
                if unknown := [name for name in labels[cell] if known and name not in known]:
                    raise InputError(
                        f"{self.path}, row {number}: label {shorten(unknown[0])!r} is out of "
                        f"range, expected one of {list_names(list(known))}"
                    )
            if not labels[cell] and self.separator is None:
                raise InputError(
                    f"{self.path}, row {number}: the label ({self.describe_column(self.label)}) is "
                    "empty; fill it in or delete the row"
                )
            yield number, row, labels[cell]

    def groups(self, name: str) -> list[str]:
        """Return the group of each row of data, which a column names.

        Raises:
            InputError: there is no such column, or a row's cell is empty.
        """
        _, (position,) = find_columns(
            self.path,
            self.header,
            ColumnChoice(texts=(name,)),
            num_columns=len(self.header) or len(next(self.read())[1]),
            has_label=False,
            flag="--group_column",
        )
        groups, column = [], self.describe_column(position)
        for number, row in self.rows():
            if is_nested(row[position]) or not row[position].strip():
                raise InputError(
                    f"{self.path}, row {number}: the group ({column}) is empty or nested; fill it "
                    "in or delete the row"
                )
            groups.append(row[position].strip())
        return groups

    def describe(self, what: str = "text") -> str:
        """Say in one line which columns are read as what, and which of a header are not read."""
        header = "row 1 is the header" if self.header else "no header row"
        header = OF_OBJECTS.get(self.path.suffix.lower(), header)
        texts = " and ".join(self.describe_column(position) for position in self.texts)
        label = f"the label is {self.describe_column(self.label)}, " if self.label >= 0 else ""
        unread = [i for i in range(len(self.header)) if i not in (self.label, *self.texts)]
        left_out = f"; left out: {list_names([*map(self.describe_column, unread)])}"
        return f"{self.path}: {header}; {label}the {what} {texts}{left_out if unread else ''}"

    def describe_column(self, position: int) -> str:
        """Name a column by its number from 1 on and by its name in the header."""
        name = " ".join(self.header[position].split()) if self.header else ""
        return f"column {position + 1}{name and f' ({name})'}"


class ListedNames(str):
    """The JSON of a list of names, which are several labels."""


def is_nested(cell: str, *, may_be_listed: bool = False) -> bool:
    """Tell whether a cell is of a nested value, other than a list of names where it may be one."""
    return cell is NESTED or (isinstance(cell, ListedNames) and not may_be_listed)


def normalise(name: str) -> str:
    """Return a column's name in lower case, unquoted, with one underscore for spaces and hyphens.

    >>> normalise(" Class Index")
    'class_index'
    """
    return re.sub(r"[\s_-]+", "_", normal_form(name.strip(QUOTES).casefold()))


def is_position(name: str, num_columns: int) -> bool:
    """Tell whether a name can be the number of a column, from 1 on."""
    return name.isdecimal() and 1 <= int(name) <= num_columns


def open_table(
    path: Path,
    choice: ColumnChoice,
    *,
    train: CsvTable | None = None,
    trained: ColumnChoice = NO_CHOICE,
    has_label: bool = True,
) -> CsvTable:
    """Find the columns of a file of own data.

    Args:
        path: the file, in UTF-8. Tabs separate the columns of a .tsv file; of a .csv file it is the
            first comma, semicolon, tab or vertical bar. A line of a .jsonl file is an object.
        train: the training file, whose columns another file must have.
        trained: names of a trained model's columns, chosen where the first row has its texts' once;
            some of them will do for texts to classify.
        has_label: False for texts to classify, of which `label` may then be -1.
    Raises:
        InputError: the file is missing, empty or broken, or it is not clear which of its columns
            are label and text.
    """
    separator = choice.separator
    keeps_empty = separator is not None or not has_label
    read = table_reader(path, separator, has_label=has_label, keeps_empty=keeps_empty)
    _, first = next(read())
    own = list(map(normalise, first))
    known = tuple(name for name in trained.texts if own.count(normalise(name)) == 1)
    if is_known := bool(known) and (known == trained.texts or not has_label):
        is_there = trained.label and own.count(normalise(trained.label)) == 1
        name = trained.label if is_there else choice.label
        choice = replace(choice, label=name if has_label else None, texts=known)
    names_columns = bool(train.header) if train else is_known or is_header(read(), choice)
    header = first if names_columns or path.suffix.lower() in OF_OBJECTS else []
    if train and header and own == list(map(normalise, train.header)):
        return CsvTable(path, header, train.label, train.texts, read, separator)
    if train and train.header and header:
        names = [train.header[position] for position in train.texts]
        choice = replace(choice, label=train.header[train.label], texts=tuple(names))
        if normalise(str(choice.label)) not in own and {*own}.issuperset(map(normalise, names)):
            raise InputError(
                f"{path}: has no column {choice.label}, the label of {train.path}; where rows have "
                "no labels, move the file away, give --val_fraction 0.1, and classify it with "
                "--predict"
            )
    label, texts = find_columns(path, header, choice, num_columns=len(first), has_label=has_label)
    return CsvTable(path, header, label, texts, read, separator)


# -------------------------------------------------------------------- classes


def sort_classes(names: Iterable[str]) -> list[str]:
    """Return the names of classes in sorted order, numbers before words."""
    return sorted(
        names, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)
    )


def class_numbers(classes: Sequence[str]) -> dict[str, int]:
    """Return the number of each class by its name in the form in which names are compared."""
    return {normal_form(name): number for number, name in enumerate(classes)}


def numbered(labels: Sequence[Sequence[str]], classes: Sequence[str], *, several: bool) -> Tensor:
    """Return the class number of each row, (rows,) int64.

    Of `several` labels a row (rows, classes) uint8: 1 where it has the label of the class, else 0.
    """
    numbers = class_numbers(classes)
    if not several:
        return torch.tensor([numbers[name] for (name,) in labels])
    targets = torch.zeros(len(labels), len(numbers), dtype=torch.uint8)
    for row, names in zip(targets.numpy(), labels):
        row[[numbers[name] for name in names]] = 1
    return targets


# -------------------------------------------------------------------- rows of a file


def table_reader(
    path: Path,
    label_separator: str | None = None,
    *,
    has_label: bool = True,
    keeps_empty: bool = False,
) -> Callable[[], Rows]:
    """Return what begins to read the rows of a file; see `open_table`.

    Args:
        label_separator: as of `ColumnChoice`. It does not separate columns, unless it is a comma or
            the only one; the cells of several labels are quoted there.
        keeps_empty: as of `read_rows`.
    """
    suffix = path.suffix.lower()
    if suffix in OF_OBJECTS:
        read = read_parquet if suffix == ".parquet" else read_objects
        every = read(path) if suffix == ".jsonl" else islice(read(path), 1)
        names = list(dict.fromkeys(name for _, value in every for name in value))
        if not names:
            raise InputError(f"{path} is empty: it needs at least one object")
        return partial(read_object_rows, path, read, names, label_separator)
    lines = islice(filter(str.strip, utf8_lines(path)), None if has_label else 1)
    split = ([match[0] for match in SEPARATORS[suffix].finditer(line)] for line in lines)
    first = next(split, [])
    found = chain(first, chain.from_iterable(split))
    alone = "\t" if suffix == ".tsv" else ","  # of a single column
    is_only = {each for each in first if len(each) == 1} == {label_separator}
    not_meant = label_separator if label_separator != "," and not is_only else None
    separator = next((each for each in found if len(each) == 1 and each != not_meant), alone)
    return partial(read_rows, path, separator, least=1 + has_label, keeps_empty=keeps_empty)


def utf8_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without byte-order marks, which joined files have within.

    Line feeds and carriage returns end lines, unlike form feeds and U+2028, which are in texts.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    readable = in_one_line(f"{path} cannot be read", "; fetch it again", (OSError,))
    with readable, open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if b"\0" in line:
                    raise ValueError("it has NUL bytes, as UTF-16")
                text = line.decode("utf-8").replace("\ufeff", "")
            except ValueError as error:  # as is a UnicodeDecodeError
                raise InputError(
                    f"{path} is not UTF-8 ({error}; line {number}); save it as UTF-8"
                ) from None
            yield from io.StringIO(text, newline="")


def read_rows(
    path: Path,
    separator: str = ",",
    *,
    columns: int = 0,
    least: int = 2,
    keeps_empty: bool = False,
) -> Rows:
    """Yield the rows of a csv file that are not blank.

    Quotes enclose cells, but where tabs separate them: such files mostly do not quote their texts,
    and there a quote is an ordinary character.

    Args:
        columns: that each row must have; 0 is as many as the first row, at least `least`.
        keeps_empty: rows of empty cells are no blank ones, as they may have no text and no label.
    Raises:
        InputError: the file is missing, empty or broken, or a row has another number of columns.
    """
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader(
        utf8_lines(path),
        delimiter=separator,
        quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
        strict=True,
        skipinitialspace=True,
    )
    is_empty = True
    try:
        for number, row in enumerate(reader, 1):
            if not row or (not keeps_empty and not any(cell.strip() for cell in row)):
                continue
            if is_empty and len(row) < least and not columns:
                wanted = "a comma, semicolon, tab or bar"
                wanted = "a tab; name it .csv if it has commas" if separator == "\t" else wanted
                raise InputError(
                    f"{path}, row {number}: has one column; label and text are separated by "
                    f"{wanted}"
                )
            columns = columns or len(row)
            if len(row) != columns:
                raise InputError(
                    f"{path}, row {number}: {len(row)} columns, expected {columns}; correct or "
                    "delete the row (a text that contains the separator needs double quotes, and "
                    "no tabs as separators)"
                )
            is_empty = False
            yield number, row
    except csv.Error as error:
        raise InputError(
            f"{path} cannot be read as UTF-8 csv: {error} in line {reader.line_num}; "
            "correct the line, or export the file again"
        ) from None
    if is_empty:
        raise InputError(f"{path} is empty: it needs at least one row")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line of a jsonl file, and its object.

    Raises:
        InputError: the file cannot be read, or a line is not an object.
    """
    for number, line in enumerate(utf8_lines(path), 1):
        if not line.strip():
            continue
        with in_one_line(f"{path}, row {number}: is not JSON", "; correct it"):
            value = json.loads(line.rstrip(), parse_constant=lambda name: None)
        if not isinstance(value, dict):
            raise InputError(f"{path}, row {number}: is not a JSON object")
        yield number, value


def read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row of a parquet file, and its values by the names of the columns.

    The first is numbered 1. Classes that Hugging Face's `datasets` has numbered get their names.

    Raises:
        InputError: the file cannot be read, or pyarrow is missing.
    """
    with needing(f"{path}", "pyarrow"):
        from pyarrow import parquet
    broken = in_one_line(f"{path} cannot be read as parquet", "; write it again")
    with broken, open(path, "rb") as opened, parquet.ParquetFile(opened) as file:
        known = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", "{}"))
        features = known.get("info", {}).get("features", {})
        numbered = {name: class_names(each) for name, each in features.items()}
        names = {name: found for name, found in numbered.items() if found}
        batches = (batch.to_pylist() for batch in file.iter_batches(PARQUET_ROWS))
        for number, row in enumerate(chain.from_iterable(batches), 1):
            yield number, row | {name: named(row[name], names[name]) for name in names}


def class_names(feature: Any) -> list[str]:
    """Return the names of a feature of Hugging Face, or of the elements of its list; [] of others.

    A column of objects is a mapping of features without a type.
    """
    kind = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
    is_class = isinstance(kind, dict) and kind.get("_type") == "ClassLabel"
    return kind["names"] if is_class else []


def named(value: Any, classes: Sequence[str]) -> Any:
    """Return the name of a class by its number, or those of a list; None for null and -1."""
    if isinstance(value, list):
        return [named(each, classes) for each in value]
    return None if value is None or value < 0 else classes[value]


def without_surrogates(text: str) -> str:
    """Return a text that UTF-8 can write: a question mark stands for each lone surrogate."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_object_rows(
    path: Path,
    read: Callable[[Path], Iterator[tuple[int, dict[str, Any]]]],
    names: list[str],
    label_separator: str | None = None,
) -> Rows:
    """Yield the names of all objects as row 0, and the values of each object that is read.

    Null, NaN and [] are empty, lists, objects and bytes `NESTED`; numbers are as in JSON. With a
    separator of labels a list of strings is `ListedNames`.
    """

    def cell(value: Any) -> str:
        is_names = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if value and is_names and label_separator is not None:
            return ListedNames(json.dumps([*map(without_surrogates, value)]))
        if isinstance(value, list | dict | bytes):
            return NESTED if value else ""
        if value is None or value != value:
            return ""
        is_of_json = isinstance(value, bool | int | float)
        return without_surrogates(json.dumps(value) if is_of_json else str(value))

    yield 0, names
    for number, value in read(path):
        yield number, [cell(value.get(name)) for name in names]


# -------------------------------------------------------------------- header and columns


def has_both_names(cells: Sequence[str]) -> bool:
    """Tell whether normalised cells have the usual names of both a label and a text."""
    return bool(LABEL_NAMES.intersection(cells) and TEXT_NAMES.intersection(cells))


def are_numbers(cells: Sequence[str]) -> bool:
    """Tell whether normalised cells are 0, 1 and so on, as pandas writes, perhaps with an index."""
    numbers = [cell for cell in cells if cell and not cell.startswith("unnamed:")]
    return bool(numbers) and sorted(numbers) == sorted(map(str, range(len(numbers))))


def is_header(rows: Rows, choice: ColumnChoice) -> bool:
    """Tell whether the first row names the columns.

    It does if it has a name that the user chose, the usual names of both a label and a text, or one
    usual name that no other row has in that column, but for the same row in joined files. Where it
    numbers the columns, as pandas does, a number above a word is a usual name.
    """
    first = next(rows)[1]
    cells = list(map(normalise, first))
    chosen = [name for name in (*choice.texts, choice.label, choice.group) if name is not None]
    chosen = [normalise(name) for name in chosen if not is_position(name, len(cells))]
    if has_both_names(cells) or any(name in cells for name in chosen):
        return True
    names = {i: name for i, name in enumerate(cells) if name in LABEL_NAMES | TEXT_NAMES}
    second = next(rows, (0, first))[1]
    if are_numbers(cells):
        names |= {i: n for i, n in enumerate(cells) if n.isdecimal() and not second[i].isdecimal()}
    for row in chain([second], (row for _, row in rows)):
        left = {i: name for i, name in names.items() if normalise(row[i]) != name}
        if len(left) < len(names) and list(map(normalise, row)) != cells:
            names = left
        if not names:
            break
    return bool(names)


def find_columns(
    path: Path,
    header: Sequence[str],
    choice: ColumnChoice,
    *,
    num_columns: int,
    has_label: bool = True,
    flag: str = "--text_column",
) -> tuple[int, tuple[int, ...]]:
    """Return the positions of the label and of the texts: the chosen ones, else by usual names.

    Without a header the label is the first column and all others are texts. Of texts to classify
    the label may be -1, and without a header their column is chosen or the only one. `flag` is what
    chooses the texts.

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
        if not same and is_position(chosen, num_columns):
            return int(chosen) - 1
        if len(same) != 1:
            there_is = "there are several columns" if same else "there is no column"
            raise refusal(f"{there_is} {shorten(chosen)}", flag)
        return same[0]

    # The column of the groups is neither, unless it is chosen; another file may lack it.
    group = choice.group or ""
    groups = [i for i, name in enumerate(names) if group and name == normalise(group)]
    if not groups and is_position(group, num_columns):
        groups = [int(group) - 1]
    texts = [position(name, flag) for name in choice.texts]
    taken = [*texts, *groups]
    labels = [i for i, name in enumerate(names) if name in LABEL_NAMES and i not in taken]
    if choice.label is not None:
        labels = [position(choice.label, "--label_column")]
    elif has_label and not header:
        labels = [i for i in [0] if i not in groups]
    if has_label and len(labels) != 1:
        which = "several columns may be" if labels else "no column is known to be"
        raise refusal(f"{which} the label", "--label_column")
    if not texts and (header or has_label or num_columns == 1):
        others = [i for i in range(num_columns) if i not in [*labels, *groups]]
        are_named = header and num_columns > 1
        texts = [i for i in others if not are_named or names[i] in TEXT_NAMES]
    if not texts:
        raise refusal("no column is known to be the text", flag)
    if set(labels).intersection(texts):
        raise refusal("the label's column is one of the texts' as well", flag)
    return labels[0] if labels else -1, tuple(texts)
