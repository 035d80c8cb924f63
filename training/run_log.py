"""What a run leaves behind and shows while it goes: config.json, metrics.jsonl, a row an epoch, a progress bar.

log = RunLog(folder, first=True, tensorboard=False)
log.config(flags, versions)
log.epoch([{"epoch": 1, "step": 390, "test_accuracy": 0.43, ...}])
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from errors import InputError

# The console row: column title, key in metrics.jsonl, format, scale.
COLUMNS = (
    ("epoch", "epoch", "{:d}", None),
    ("train loss", "train_loss", "{:.4f}", None),
    ("train acc %", "train_accuracy", "{:.2f}", 100),
    ("lambda", "mean_lambda", "{:.3f}", None),
    ("val acc %", "val_accuracy", "{:.2f}", 100),
    ("test loss", "test_loss", "{:.4f}", None),
    ("test acc %", "test_accuracy", "{:.2f}", 100),
    ("lr", "lr", "{:.3g}", None),
    ("batch", "batch_size", "{:d}", None),
    ("noise", "noise_scale", "{:.0f}", None),
    ("samples/s", "samples_per_second", "{:.0f}", None),
    ("seconds", "seconds", "{:.1f}", None),
)
TIMING_FIELDS = (
    "seconds",
    "train_seconds",
    "samples_per_second",
    "worker_samples_per_second",
    "peak_memory_bytes",
)
"""Fields of metrics.jsonl that two equal runs may differ in."""


def new_run_folder(script: str) -> Path:
    """runs/<script>-<time>, not yet made."""
    return Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"


def latest_run(script: str, elastic_id: str | None = None) -> Path | None:
    """The newest run folder of a script that holds a checkpoint; with `elastic_id`, only one that torchrun job started."""
    for folder in sorted(
        Path("runs").glob(f"{script}-*"), key=lambda path: path.name, reverse=True
    ):
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
    """Writes a run folder and the console; on ranks other than the first every method does nothing.

    Args:
        folder: the run folder; made here.
        first: whether this is rank 0.
        tensorboard: also write TensorBoard event files into the folder.
    Raises:
        InputError: the folder cannot be made or written, or TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first: bool, tensorboard: bool) -> None:
        self.folder = folder
        self.first = first
        self.board = None
        self.written = self.shown = 0
        if not first:
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

    def config(self, flags: dict[str, Any], machine: dict[str, Any]) -> None:
        """Write config.json: flags, versions, device, commit."""
        if not self.first:
            return
        try:
            atomic_write_text(
                self.folder / "config.json",
                json.dumps({"flags": flags, **machine}, indent=2, default=str) + "\n",
            )
        except OSError as error:
            raise InputError(
                f"--out {self.folder}: cannot be written ({error.strerror}); choose another folder"
            ) from None

    def restart(self, rows: list[dict[str, Any]]) -> None:
        """Make metrics.jsonl hold exactly these rows: those the checkpoint knows."""
        if self.first:
            atomic_write_text(
                self.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
            )
            self.written = len(rows)

    def epoch(self, rows: list[dict[str, Any]]) -> None:
        """Append the last of `rows`, one flat object, to metrics.jsonl and print it as one aligned row.

        A row that a full disk kept out is written with the next one.
        """
        if not self.first:
            return
        try:
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows[self.written :]))
            self.written = len(rows)
        except OSError as error:
            self.info(
                f"warning: {self.folder / 'metrics.jsonl'} could not be written ({error.strerror}); the run goes on"
            )
        row = rows[-1]
        shown = [
            (title, key, form, scale)
            for title, key, form, scale in COLUMNS
            if row.get(key) is not None
        ]
        if self.shown % 20 == 0:
            self.info("  ".join(f"{title:>11}" for title, *_ in shown))
        self.shown += 1
        self.info(
            "  ".join(
                f"{form.format(row[key] * (scale or 1)):>11}" for _, key, form, scale in shown
            )
        )
        if self.board:
            for key, value in row.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(key, value, row["step"])

    def tables(self, name: str, tables: dict[str, Tensor], classes: list[str]) -> None:
        """Draw (classes, classes) tables side by side as <name>.png; nothing where there are none."""
        if not self.first or not tables:
            return
        from matplotlib.figure import Figure  # only for runs that learn a table

        side = 2 + 0.35 * min(len(classes), 40)
        figure = Figure(figsize=((side + 1) * len(tables), side), layout="constrained")
        for axis, (title, table) in zip(
            figure.subplots(1, len(tables), squeeze=False)[0], tables.items()
        ):
            figure.colorbar(axis.imshow(table.cpu()), ax=axis, shrink=0.8)
            axis.set_title(title)
            if len(classes) <= 40:
                axis.set_xticks(range(len(classes)), classes, rotation=90)
                axis.set_yticks(range(len(classes)), classes)
        try:
            part = self.folder / f"{name}.png.part"
            figure.savefig(part, dpi=100, format="png")
            part.replace(self.folder / f"{name}.png")
        except OSError as error:
            self.info(
                f"warning: {name}.png could not be written ({error.strerror}); the run goes on"
            )

    def info(self, line: str) -> None:
        """Print one line (rank 0)."""
        if self.first:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def bar(self, epoch: int, epochs: int, total: int, done: int) -> tqdm:
        """Progress over the samples of one epoch; hidden on other ranks and where stderr is not a terminal."""
        return tqdm(
            total=total,
            initial=done,
            desc=f"epoch {epoch}/{epochs}",
            unit=" samples",
            unit_scale=True,
            leave=False,
            disable=not self.first or not sys.stderr.isatty(),
        )

    def close(self) -> None:
        """Flush TensorBoard."""
        if self.board:
            self.board.close()


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
