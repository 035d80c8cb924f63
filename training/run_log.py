"""What a run writes and shows: config.json, metrics.jsonl, a row an epoch, and its progress.

The console has a progress bar on a terminal, and elsewhere, as in a batch job, a line now and then.

log = RunLog(folder, is_main=True, config={"flags": flags, **describe_machine(device)})
log.begin(rows=[])
log.epoch([{"epoch": 1, "step": 390, "test_accuracy": 0.43, ...}])
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from errors import discard_stdout, writing
from training.atomic_file import atomic_write_text
from training.evaluation import Evaluation
from training.progress import Progress, duration
from training.run_folder import is_locked, lock_run_folder
from training.step_stats import StepTotals
from training.tracking import TrackedRun


class Column(NamedTuple):
    """A column of the console's table."""

    title: str  # above the column
    key: str  # its name in metrics.jsonl, or 'left', the run's remaining time
    width: int  # in characters
    format: str = "{}"  # of a value; of a share in per cent, the sign is left out

    def show(self, row: Mapping[str, Any]) -> str:
        """The value of a row; '' for None."""
        value = row[self.key]
        return "" if value is None else self.format.format(value).rstrip("%")


GAP = "  "  # between two columns
COLUMNS = (
    Column("epoch", "epoch", 5),
    Column("train loss", "train_loss", 10, "{:.4f}"),
    Column("train %", "train_accuracy", 7, "{:.2%}"),
    Column("val %", "val_accuracy", 6, "{:.2%}"),
    Column("test %", "test_accuracy", 6, "{:.2%}"),
    Column("val mAP", "val_map", 7, "{:.2%}"),
    Column("test mAP", "test_map", 8, "{:.2%}"),
    Column("lr", "lr", 8, "{:.3g}"),
    Column("samples/s", "samples_per_second", 9, "{:.0f}"),
    Column("seconds", "seconds", 7, "{:.1f}"),
    Column("left", "left", 6),
    Column("batch", "batch_size", 6, "{:d}"),
)
"""The columns of the console, of which a run may have no validation or no test set."""
TITLES_EVERY = 20  # rows
CONFUSION_FILE = "confusion.json"  # of a run folder
RESULT_FILE = "result.json"

ANNOUNCE_SECONDS = 30.0  # of a run, after which it says how long the whole of it takes
LONG_SECONDS = 600.0  # of a run that says it
LESS = "fewer epochs or rows, smaller images, shorter texts, a smaller network take less"


@dataclass(eq=False)
class RunLog:
    """Writes the run folder and the console; does nothing on other ranks than the main one."""

    folder: Path
    is_main: bool
    _: KW_ONLY
    # What config.json holds: flags, versions, device, commit.
    config: dict[str, Any] = field(default_factory=dict)
    track: str = "none"  # the tracker that gets the rows as well, one of `tracking.TRACKERS`
    # Off a terminal, seconds without a line on the console after which one says how far the run is.
    log_every: float = 0.0  # 0 is never
    lock: IO[str] | None = None  # what `lock_run_folder` returned, kept as long as the log
    clock = staticmethod(time.perf_counter)

    def __post_init__(self) -> None:
        self.tracked: TrackedRun | None = None
        self.epochs = 1  # of the run
        self.shown = 0  # rows on the console
        self.last_line = self.clock()  # when it was printed
        self.announced = self.last_line + ANNOUNCE_SECONDS  # when the run says how long it takes

    # ---------------------------------------------------------------- files

    def begin(self, rows: Sequence[Mapping[str, Any]], *, epochs: int = 1) -> None:
        """Write config.json and the rows that the run has already, once nothing can refuse it."""
        self.epochs = epochs
        if not self.is_main:
            return
        with writing(str(self.folder), "folder"):
            self._write_config()
        self.write_rows(rows)
        if self.track != "none":
            self.tracked = TrackedRun(self.track, self.folder, self.config, warn=self.info)
            self.tracked.catch_up(rows)

    def _write_config(self) -> None:
        text = json.dumps(self.config, indent=2, default=str) + "\n"
        atomic_write_text(self.folder / "config.json", text)

    def make_again(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Make the run folder again where it is gone, as on a disk that was unmounted.

        Return whether it was gone, and is there again; one that another run has made is refused.
        """
        if self.lock is None or is_locked(self.folder, self.lock):
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.close()
            self.lock = lock_run_folder(self.folder)
            self._write_config()
        except OSError:  # of which the file that is to be written there will tell
            return False
        self.write_rows(rows)
        self.info(f"warning: {self.folder} was gone, with its files, and is made again")
        return True

    def write_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make metrics.jsonl hold exactly these rows: those that the checkpoint knows.

        Numbers that are not finite, for which JSON has no spelling, are null.
        """
        if not self.is_main:
            return
        lines = (json.dumps(_finite_or_none(row), allow_nan=False) + "\n" for row in rows)
        self._write("metrics.jsonl", "".join(lines))

    def epoch(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows, the last of which is new, and print that one in the console's table."""
        if not self.is_main:
            return
        self.write_rows(rows)
        seconds, done = rows[-1]["seconds"], rows[-1]["epoch"]
        left = duration(seconds / done * (self.epochs - done))
        shown = {"epoch": round(done, 2), "left": left.replace("days", "d")}
        self._show({**rows[-1], **shown})
        if self.tracked is not None:
            self.tracked.send(rows[-1])

    def confusion(
        self, epoch: float, evaluated: Mapping[str, Evaluation], classes: Sequence[str]
    ) -> None:
        """Write confusion.json: how often each class was taken for each, after the last epoch."""
        counts = {
            name: each.confusion.tolist()
            for name, each in evaluated.items()
            if each.confusion is not None
        }
        if not self.is_main or not counts:
            return
        text = json.dumps({"epoch": epoch, "classes": list(classes), **counts})
        self._write(CONFUSION_FILE, text + "\n")

    def result(self, result: Mapping[str, Any]) -> None:
        """Write result.json: what `epoch_report.final_result` returned."""
        self._write(RESULT_FILE, json.dumps(_finite_or_none(result)) + "\n")

    def has_result(self, epoch: float) -> bool:
        """Whether result.json is of this epoch."""
        try:
            return json.loads((self.folder / RESULT_FILE).read_text())["epoch"] == epoch
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def _write(self, name: str, text: str) -> None:
        """Write a file of the folder; where that is not possible the run goes on with a warning."""
        path = self.folder / name
        try:
            atomic_write_text(path, text)
        except OSError as error:
            self.info(f"warning: {path} could not be written ({error.strerror}); the run goes on")

    # ---------------------------------------------------------------- console

    def info(self, line: str) -> None:
        """Print one line above the progress bar; the run goes on where that is not possible."""
        if not self.is_main:
            return
        try:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # nobody reads it any more, or its disk is full
            discard_stdout()
        self.last_line = self.clock()

    def _show(self, row: Mapping[str, Any]) -> None:
        """Print a row of the table, with the titles above it now and then."""
        columns = [column for column in COLUMNS if column.key in row]
        if self.shown % TITLES_EVERY == 0:
            self.info(GAP.join(f"{column.title:>{column.width}}" for column in columns))
        self.shown += 1
        self.info(GAP.join(f"{column.show(row):>{column.width}}" for column in columns))

    def status(self, bar: tqdm, progress: Progress, totals: StepTotals, *, steps: int) -> None:
        """Show how far the epoch of `steps` is on its bar, or in a line if one is due."""
        loss, accuracy = totals.loss / totals.samples, totals.num_correct / totals.samples
        done = progress.epoch + progress.step_in_epoch / steps
        once = progress.compile_seconds
        whole = once + (progress.seconds - once) / done * self.epochs
        if self.clock() >= self.announced:
            self.announced = math.inf
            if whole >= LONG_SECONDS:
                self.info(f"the whole run takes about {duration(whole)}; {LESS}")
        if not bar.disable:
            bar.set_postfix_str(f"loss {loss:.4f}, acc {100 * accuracy:.2f} %", refresh=False)
        elif self.log_every and self.clock() - self.last_line >= self.log_every:
            left = duration(progress.seconds / done * (self.epochs - done))
            self.info(
                f"epoch {progress.epoch + 1}/{self.epochs}, "
                f"step {progress.step_in_epoch} of {steps}: loss {loss:.4f}, "
                f"accuracy {100 * accuracy:.2f} %, "
                f"{progress.samples_per_second:.0f} samples/s, {left} left"
            )

    def close(self) -> None:
        if self.tracked is not None:
            self.tracked.close()
        if self.lock is not None:
            self.lock.close()


def _finite_or_none(value: Any) -> Any:
    """None instead of an infinite number or one that is not a number, also within others."""
    if isinstance(value, dict):
        return {name: _finite_or_none(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite_or_none(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
