"""Texts and tokens of millions of rows: they lie in temporary files, which a node has once.

texts = StoredTexts()
texts.append("Stocks rise")
texts[0], texts[:10], len(texts)                   # read from the file
same = pickle.loads(pickle.dumps(texts))           # in another process of the node: the same file
"""

from __future__ import annotations

import copy
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from errors import in_one_line


class NodeFile:
    """An unlinked temporary file that processes of a node share: a pickle of it holds its place.

    The pickle can be loaded while the process that made it has the file open, where Linux's /proc
    is. The file vanishes when the last process has ended, however it ends.

    Attributes:
        file: for reading, and in the process that made it for writing.
    """

    def __init__(self, path: str = "") -> None:
        self.file = open(path, "rb") if path else tempfile.TemporaryFile()  # noqa: SIM115

    def write(self, data: bytes | array[int]) -> int:
        """Append to the file; returns the number of bytes.

        Raises:
            InputError: the disk is full.
        """
        advice = "; make room there, or set TMPDIR to a folder of a larger disk"
        problem = f"{tempfile.gettempdir()}: the texts could not be written"
        with in_one_line(problem, advice, (OSError,)):
            return self.file.write(data)

    def __reduce__(self) -> tuple[Any, ...]:
        self.file.flush()
        return NodeFile, (f"/proc/{os.getpid()}/fd/{self.file.fileno()}",)


class StoredTexts(Sequence[str]):
    """Texts in a file, in UTF-8. Each takes 16 bytes of memory."""

    def __init__(self) -> None:
        self.utf8 = NodeFile()
        self.starts, self.sizes = array("q"), array("q")  # of each text in the file, in bytes

    def append(self, text: str) -> None:
        """Add a text; not to what `select_rows` returned."""
        self.starts.append(self.starts[-1] + self.sizes[-1] if self.starts else 0)
        self.sizes.append(self.utf8.write(text.encode()))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        self.utf8.file.seek(self.starts[row])
        return self.utf8.file.read(self.sizes[row]).decode()

    def select_rows(self, rows: Iterable[int]) -> StoredTexts:
        """Return the texts of these rows, in that order, in the same file."""
        chosen, rows = copy.copy(self), list(rows)
        chosen.starts = array("q", (self.starts[row] for row in rows))
        chosen.sizes = array("q", (self.sizes[row] for row in rows))
        return chosen
