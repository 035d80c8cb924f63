"""Time to an accuracy: epochs from the logs of runs, and their seconds a step, measured in turns.

python -m benchmarks.time_to_target figures/logs/optimizers_cifar10 figures/logs/soap_cifar10

The clock of a run that shared its machine with other work says little. Here the first run of each
name NAME-seedN in these folders is opened again as its config.json says, on the real data, and the
runs take turns with the same training steps. Targets are, for each name, the last accuracy
of its lowest seed, rounded down to a whole percent. Within an epoch the accuracy is
taken to grow evenly, from that of guessing before the first. Evaluations are not counted.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from backends.device import keep_freed_memory
from benchmarks import bench, peers, throughput, train_peer
from benchmarks.trainers import Opened
from distributed.world import World, init_world
from errors import InputError, exit_code
from figures import run_logs

# With --quick and without: turns, and steps of each, a multiple of the ten steps after which SOAP's
# rare work comes again.
SIZES = {True: (3, 10), False: (7, 30)}


def open_run(folder: Path, world: World, out: Path) -> Opened:
    """Create what a logged run trained, from its command line, to be written to another folder.

    Raises:
        InputError: the folder has no config.json, or one without a command line.
    """
    try:
        command = json.loads((folder / "config.json").read_text())["command"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"{folder}: holds no config.json with a command line") from None
    arguments = [*command[1:], "--out", str(out)]
    if command[0] == "train_peer.py":
        opened = train_peer.parse(arguments).open(world)
    elif command[0] in train_peer.SCRIPTS:
        script = train_peer.SCRIPTS[command[0]]
        opened = throughput.trainers.open_script(script, arguments, world)
    else:
        raise InputError(f"{folder}: {command[0]} is no script whose steps can be measured")
    opened.trainer.wrap_model()
    opened.trainer.model.train()
    return opened


def epochs_to(target: float, rows: Sequence[run_logs.Row], *, guessing: float) -> float:
    """Return how many epochs a run needs for an accuracy, with a fraction; infinite if it fails.

    Args:
        target: the accuracy in percent.
        rows: of the run's epochs.
        guessing: accuracy of guessing in percent, that of epoch 0.
    """
    before = guessing
    for row in rows:
        reached = run_logs.accuracy(row)
        if reached >= target:
            return row["epoch"] - 1 + (target - before) / (reached - before)
        before = reached
    return math.inf


def targets_of(runs: dict[str, run_logs.Runs]) -> list[int]:
    """Return the last accuracy of each name's lowest seed, rounded down, lowest first."""
    return sorted({int(min(run_logs.last(each, run_logs.accuracy))) for each in runs.values()})


def samples_per_second(opened: Opened, steps: int) -> float:
    """Take the first training steps of an epoch, and return the rate."""
    generator = throughput.our_steps(opened.trainer)
    start = time.perf_counter()
    samples = sum(itertools.islice(generator, steps))
    return samples / (time.perf_counter() - start)


def time_to(target: float, runs: run_logs.Runs, rate: float, *, guessing: float) -> str:
    """Write the mean epochs and minutes to an accuracy, or that not all seeds reach it.

    Args:
        target: the accuracy in percent.
        runs: the rows of each seed.
        rate: samples per second.
        guessing: see `epochs_to`.
    """
    epochs = [epochs_to(target, rows, guessing=guessing) for rows in runs]
    if math.inf in epochs:
        return f"{sum(map(math.isfinite, epochs))} of {len(epochs)} seeds"
    mean = statistics.mean(epochs)
    samples = runs[0][0]["samples"] * mean
    return f"{mean:.2f} ep {samples / rate / 60:.2f} min"


def main() -> None:
    """Measure the steps and print the table."""
    parser = bench.parser(__doc__)
    parser.add_argument("groups", nargs="+", type=Path, metavar="FOLDER", help="of NAME-seedN")
    args = parser.parse_args()
    started = time.perf_counter()
    keep_freed_memory()
    folders = [
        path.parent for group in args.groups for path in sorted(group.glob("*-seed*/config.json"))
    ]
    if not folders:
        raise InputError("no folder NAME-seedN with a config.json in these folders")
    runs = run_logs.by_name(folders)
    first = {folder.name.rpartition("-seed")[0]: folder for folder in reversed(folders)}
    turns, steps = SIZES[args.quick]
    with tempfile.TemporaryDirectory() as scratch, init_world() as world:
        opened = {
            name: open_run(folder, world, Path(scratch) / name) for name, folder in first.items()
        }
        sides = {name: partial(samples_per_second, each, steps) for name, each in opened.items()}
        for side in sides.values():
            side()  # not timed: the first steps allocate memory
        rates = bench.take_turns(sides, turns)
    guessing = 100 / len(next(iter(opened.values())).data.metadata["classes"])
    targets = targets_of(runs)
    columns = "".join(f"{f'to {target} %':>22}" for target in targets)
    print(f"{'':<12}{'samples/s':>10}{'spread':>16}{'seeds':>6}{columns}")
    for name, each in runs.items():
        rate = statistics.median(rates[name])
        cells = "".join(f"{time_to(t, each, rate, guessing=guessing):>22}" for t in targets)
        spread = f"{min(rates[name]):.0f}..{max(rates[name]):.0f}"
        print(f"{name:<12}{rate:>10.0f}{spread:>16}{len(each):>6}{cells}")
    packages = ["torch", *(name for name in peers.OPTIONAL if getattr(peers, name))]
    machine = bench.machine(world.device, packages)
    took = time.perf_counter() - started
    print(f"{turns} turns of {steps} steps each; {machine}; {took:.0f} s")
    bench.write_json(
        args.json,
        [],
        [],
        machine=machine,
        took=took,
        quick=args.quick,
        samples_per_second=rates,
        epochs_to_target={
            name: {t: [epochs_to(t, rows, guessing=guessing) for rows in each] for t in targets}
            for name, each in runs.items()
        },
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
