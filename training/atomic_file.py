"""Files that are complete or not there.

with atomic_write(path) as temporary:      # a path beside `path`, renamed to it when the block ends
    figure.savefig(temporary)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Give the block the path of a temporary file, which replaces `path` if the block succeeds."""
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """Write a whole text file.

    Raises:
        OSError: it could not be written; the previous file is untouched.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(text)
