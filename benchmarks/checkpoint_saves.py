"""How long training stands still for a checkpoint, written in the background and not.

python -m benchmarks.checkpoint_saves --quick        # two minutes; embedded data

ResNet-50 with SGD and momentum, about 190 MiB, on the embedded digits; two trainers of it take
turns. A round of one is a step, a save, whose time until the loop goes on is measured, and steps
until the save is over. That a step takes longer while a thread writes is not measured.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

import resnet50_test
from backends.device import set_num_threads
from benchmarks import bench
from benchmarks.trainers import open_script
from distributed.world import World
from errors import exit_code
from training.trainer import Trainer

# Share of the foreground's standstill: a copy in memory against a write to a disk and its fsync.
MAX_SHARE = 0.5
FLAGS = "--dataset digits --arch resnet50 --bs 4 --optimizer sgd --precision fp32 --no-test"


class Side:
    """A trainer whose saves are measured."""

    def __init__(self, folder: Path, in_background: str) -> None:
        flags = [*FLAGS.split(), "--val_fraction", "0.1", "--out", str(folder)]
        opened = open_script(
            resnet50_test, [*flags, "--save_in_background", in_background], World()
        )
        self.trainer: Trainer = opened.trainer
        rows = torch.arange(4)
        data = opened.data.train.batches([rows], 0)
        self.inputs, self.labels = next(iter(data))
        self.trainer.model.train()
        self.standstill: list[float] = []  # seconds of each save until the loop goes on

    def round(self) -> None:
        """Measure a save after a step."""
        self.trainer.train_step(self.inputs, self.labels)
        start = time.perf_counter()
        self.trainer.save()
        self.standstill.append(time.perf_counter() - start)
        pending = self.trainer.checkpoints.pending
        while pending is not None and not pending.unsaved.done():
            self.trainer.train_step(self.inputs, self.labels)
        self.trainer.checkpoints.wait()


def seconds_of_check(path: Path) -> float:
    """The time that it takes to read a file and compare it with its checksums."""
    start = time.perf_counter()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return time.perf_counter() - start


def describe(seconds: list[float]) -> str:
    """The median, the smallest and the largest."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}..{max(seconds):.3f})"


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    set_num_threads(1, 1)  # the thread that writes has a core of its own
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sides = {
            name: Side(Path(folder) / name, in_background)
            for name, in_background in (("foreground", "no"), ("background", "yes"))
        }
        for number in range(6 if args.quick else 13):
            for side in sides.values():
                side.round()
                if number == 0:  # the first one allocates the memory of the copy
                    side.standstill.clear()
        path = Path(folder) / "background" / "last.pt"
        size, checks = path.stat().st_size, [seconds_of_check(path) for _ in range(5)]
    print(f"seconds for which the loop stands still at a save of {size / 2**20:.0f} MiB")
    for name, side in sides.items():
        print(f"{name:12}{describe(side.standstill):>24}")
    print(f"seconds to compare it with its checksums: {describe(checks)}")
    pairs = zip(sides["background"].standstill, sides["foreground"].standstill)
    share = statistics.median(ours / theirs for ours, theirs in pairs)
    bars = [bench.Bar("foreground's standstill over the background's", 1 / share, 1 / MAX_SHARE)]
    seconds = {name: side.standstill for name, side in sides.items()}
    bench.write_json(
        args.json, [], bars, machine=machine, bytes=size, seconds=seconds, checks=checks
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(exit_code(main))
