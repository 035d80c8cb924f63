"""Files that are complete or not there, also after a power cut.

with atomic_write(path) as temporary:      # a path beside `path`, renamed to it when the block ends
    figure.savefig(temporary)
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path: Path, before_rename: Callable[[], None] | None = None) -> Iterator[Path]:
    """Give the block the path of a temporary file, which replaces `path` if the block succeeds.

    The new content is on the disk before it takes the name, and the name before this returns.
    Between the two `before_rename` is called.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        sync_file(temporary)
        if before_rename is not None:
            before_rename()
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system can do that with a folder
        number = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a whole text file, as `atomic_write` does."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
