"""Texts of millions of rows: a node reads and encodes them once, row by row."""

import contextlib
import os
import random
import re
import threading
from pathlib import Path

import pytest
import torch

import ranks
from cli import factory, text_classification
from conftest import parsed
from errors import InputError
from input_pipeline import text_datasets
from input_pipeline.stored_texts import StoredTexts

TOKENS = 90  # of a row
ROWS = (2_000, 9_000)
MAX_BYTES = 600  # of memory of its own that a process takes for a row
WORDS = "--dataset csv --vocab_size 1000 --device cpu --threads 1"


def write_rows(folder: Path, num_rows: int) -> None:
    """Write train.csv of `num_rows` rows, and a short test.csv."""
    folder.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(500)]
    for name, rows in (("train", num_rows), ("test", 10)):
        lines = (f"{row % 3},{' '.join(rng.choices(words, k=TOKENS - 1))}\n" for row in range(rows))
        (folder / f"{name}.csv").write_text("label,text\n" + "".join(lines))


def own_memory() -> int:
    """Bytes of this process that are not pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


@contextlib.contextmanager
def memory_seen():
    """The memory of this process, as a thread sees it in the block again and again."""
    seen, done = [], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(own_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    done.set()
    thread.join()
    seen.append(own_memory())


def load(world, folder: Path) -> None:
    """Load the data as the script does; write the peak of memory and what was loaded."""
    args = parsed("texts", WORDS, "--no-baseline --data_dir", folder)
    run = factory.create_run(args, "transformer_test", world)
    if world.local_rank:
        text_datasets.read_text_splits = None  # the first process of the node reads for all
    with memory_seen() as memory:
        data = text_classification.load_data(args, run)
    file = data.train.token_file.file
    result = {
        "peak": max(memory),
        "file": os.fstat(file.fileno()).st_ino,
        "lengths": data.train.lengths,
        "batch": next(data.train.batches([torch.tensor([0, 5, len(data.train) - 1])])),
    }
    torch.save(result, folder / f"rank-{world.rank}.pt")


@pytest.mark.process
def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    peaks: list[list[int]] = []
    for num_rows in ROWS:
        folder = tmp_path / str(num_rows)
        write_rows(folder, num_rows)
        ranks.run_ranks(load, 2, folder)
        first, other = (torch.load(folder / f"rank-{rank}.pt") for rank in range(2))
        assert first["file"] == other["file"]
        assert torch.equal(first["lengths"], other["lengths"])
        assert all(map(torch.equal, first["batch"], other["batch"]))
        peaks.append([first["peak"], other["peak"]])
    assert float(first["lengths"].float().mean()) == pytest.approx(TOKENS, rel=0.05)
    for small, large in zip(*peaks):
        assert (large - small) / (ROWS[1] - ROWS[0]) < MAX_BYTES


def test_a_full_disk_is_named() -> None:
    texts = StoredTexts()
    with (
        open("/dev/full", "wb", buffering=0) as texts.utf8.file,
        pytest.raises(InputError, match="No space left on device.*set TMPDIR"),
    ):
        texts.append("Stocks rise")
