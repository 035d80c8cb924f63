"""What a run writes and shows: config.json, metrics.jsonl, a row an epoch, a progress bar.

log = RunLog(folder, is_main=True, tensorboard=False)
log.config(flags, describe_machine(device))
log.epoch([{"epoch": 1, "step": 390, "test_accuracy": 0.43, ...}])
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from errors import InputError
from training.atomic_file import atomic_write, atomic_write_text


@dataclass(frozen=True)
class Column:
    """A column of the console's table; `key` is its name in metrics.jsonl."""

    title: str
    key: str
    format: str
    factor: int = 1

    def show(self, row: Mapping[str, Any]) -> str:
        """The value of a row."""
        return self.format.format(row[self.key] * self.factor)


COLUMNS = (
    Column("epoch", "epoch", "{:d}"),
    Column("train loss", "train_loss", "{:.4f}"),
    Column("train acc %", "train_accuracy", "{:.2f}", 100),
    Column("lambda", "mean_lambda", "{:.3f}"),
    Column("val acc %", "val_accuracy", "{:.2f}", 100),
    Column("test loss", "test_loss", "{:.4f}"),
    Column("test acc %", "test_accuracy", "{:.2f}", 100),
    Column("lr", "lr", "{:.3g}"),
    Column("batch", "batch_size", "{:d}"),
    Column("noise", "noise_scale", "{:.0f}"),
    Column("samples/s", "samples_per_second", "{:.0f}"),
    Column("seconds", "seconds", "{:.1f}"),
)
TITLES_EVERY = 20  # rows
MAX_NAMED_CLASSES = 40  # of a drawn table: more names would not be readable
TIMING_FIELDS = (
    "seconds",
    "train_seconds",
    "samples_per_second",
    "worker_samples_per_second",
    "peak_memory_bytes",
)
"""Fields of metrics.jsonl in which two equal runs may differ."""


def new_run_folder(script: str) -> Path:
    """runs/<script>-<time>, not yet made."""
    return Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def latest_run(script: str, elastic_id: str | None = None) -> Path | None:
    """The newest run folder of a script that holds a checkpoint.

    Args:
        script: its name without .py.
        elastic_id: consider only the folders that this torchrun job made.
    """
    folders = Path("runs").glob(f"{script}-*")
    for folder in sorted(folders, key=lambda path: path.name, reverse=True):
        if not (folder / "last.pt").exists():
            continue
        if elastic_id is None or read_config(folder).get("elastic_id") == elastic_id:
            return folder
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a run folder; empty where it is missing or cut."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}


class RunLog:
    """Writes the run folder and the console; does nothing on other ranks than the main one.

    Args:
        folder: the run folder; made here.
        is_main: whether this is rank 0.
        tensorboard: also write TensorBoard event files into the folder.
    Raises:
        InputError: the folder cannot be made or written, or TensorBoard is not installed.
    """

    def __init__(self, folder: Path, is_main: bool, *, tensorboard: bool = False) -> None:
        self.folder, self.is_main = folder, is_main
        self.board: Any = None
        self.written = self.shown = 0  # rows in metrics.jsonl, and on the console
        if not is_main:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out {folder}: cannot be made ({error.strerror}); choose another folder"
            ) from None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError("--tensorboard needs a package: pip install tensorboard") from None
            self.board = SummaryWriter(str(folder))

    # ---------------------------------------------------------------- files

    def config(self, flags: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        """Write config.json: flags, versions, device, commit."""
        if not self.is_main:
            return
        text = json.dumps({"flags": flags, **machine}, indent=2, default=str) + "\n"
        try:
            atomic_write_text(self.folder / "config.json", text)
        except OSError as error:
            raise InputError(
                f"--out {self.folder}: cannot be written ({error.strerror}); choose another folder"
            ) from None

    def restart(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make metrics.jsonl hold exactly these rows: those that the checkpoint knows."""
        if self.is_main:
            atomic_write_text(self.folder / "metrics.jsonl", _json_lines(rows))
            self.written = len(rows)

    def epoch(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the last of `rows` to metrics.jsonl and print it as a row of the console's table.

        A row that a full disk kept out is written with the next one.
        """
        if not self.is_main:
            return
        try:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(_json_lines(rows[self.written :]))
            self.written = len(rows)
        except OSError as error:
            path = self.folder / "metrics.jsonl"
            self.info(f"warning: {path} could not be written ({error.strerror}); the run goes on")
        self._show(rows[-1])
        if self.board is not None:
            for key, value in rows[-1].items():
                if isinstance(value, int | float):
                    self.board.add_scalar(key, value, rows[-1]["step"])

    def tables(self, name: str, tables: Mapping[str, Tensor], classes: Sequence[str]) -> None:
        """Draw (classes, classes) tables side by side as <name>.png, if there are any."""
        if not self.is_main or not tables:
            return
        from matplotlib.figure import Figure  # only for runs that learn a table

        side = 2 + 0.35 * min(len(classes), MAX_NAMED_CLASSES)
        figure = Figure(figsize=((side + 1) * len(tables), side), layout="constrained")
        axes = figure.subplots(1, len(tables), squeeze=False)[0]
        for axis, (title, table) in zip(axes, tables.items()):
            figure.colorbar(axis.imshow(table.cpu()), ax=axis, shrink=0.8)
            axis.set_title(f"learned {title} of each pair of classes")
            if len(classes) <= MAX_NAMED_CLASSES:
                axis.set_xticks(range(len(classes)), classes, rotation=90)
                axis.set_yticks(range(len(classes)), classes)
        try:
            with atomic_write(self.folder / f"{name}.png") as temporary:
                figure.savefig(temporary, dpi=100, format="png")
        except OSError as error:
            self.info(
                f"warning: {name}.png could not be written ({error.strerror}); the run goes on"
            )

    # ---------------------------------------------------------------- console

    def info(self, line: str) -> None:
        """Print one line above the progress bar."""
        if self.is_main:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def _show(self, row: Mapping[str, Any]) -> None:
        """Print a row of the table, with the titles above it now and then."""
        columns = [column for column in COLUMNS if row.get(column.key) is not None]
        if self.shown % TITLES_EVERY == 0:
            self.info("  ".join(f"{column.title:>11}" for column in columns))
        self.shown += 1
        self.info("  ".join(f"{column.show(row):>11}" for column in columns))

    def bar(self, epoch: int, epochs: int, *, total: int, done: int) -> tqdm:
        """A progress bar over the samples of an epoch; hidden where stderr is not a terminal."""
        return tqdm(
            total=total,
            initial=done,
            desc=f"epoch {epoch}/{epochs}",
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=not self.is_main or not sys.stderr.isatty(),
        )

    def close(self) -> None:
        """Write TensorBoard's last events."""
        if self.board is not None:
            self.board.close()


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
