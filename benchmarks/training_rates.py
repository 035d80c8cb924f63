"""How fast logged runs train, in turns: seconds of the same real training steps, data included.

rates = training_rates.measure({"ngd": folder}, turns=3, steps=10, world=world)

As a program it is one rank of time_to_target.py, which `slow_network.run` starts: rank 0 prints
the rates as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from backends.device import keep_freed_memory
from benchmarks import bench, train_peer, trainers
from distributed.world import World, init_world
from errors import InputError
from training.trainer import Trainer


def open_run(folder: Path, world: World, out: Path) -> trainers.Opened:
    """Create what a logged run trained, from its command line, to be written to another folder.

    Raises:
        InputError: the folder has no config.json with the command line of a script.
    """
    try:
        command = json.loads((folder / "config.json").read_text())["command"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"{folder}: holds no config.json with a command line") from None
    name, arguments = command[0], [*command[1:], "--out", str(out)]
    if "--resume" in arguments:  # with the folder of a run whose checkpoints are gone
        at = arguments.index("--resume")
        del arguments[at : at + 2]
    if name == "train_peer.py":
        opened = train_peer.parse(arguments).open(world)
    elif name in train_peer.SCRIPTS:
        opened = trainers.open_script(train_peer.SCRIPTS[name], arguments, world)
    else:
        raise InputError(f"{folder}: {name} is no script whose steps can be measured")
    opened.trainer.wrap_model()
    opened.trainer.model.train()
    return opened


def samples_per_second(trainer: Trainer, steps: int) -> float:
    """Take the first training steps of an epoch, and return the rate of all ranks together."""
    trainer.batches.start_epoch(0)
    trainer.progress.epoch, trainer.progress.step_in_epoch = 0, 0
    plan = trainer.batches.plan(0, 0)[:steps]
    samples, start = 0, time.perf_counter()
    data = trainer.train_set.batches([planned.rows for planned in plan], 0)
    for (inputs, labels), planned in zip(data, plan):
        trainer.set_lr(trainer.scheduled_lr())
        trainer.train_step(inputs, labels, planned.weight, samples=planned.samples)
        trainer.progress.step_in_epoch += 1
        samples += planned.samples
    return samples / (time.perf_counter() - start)


def measure(
    runs: Mapping[str, Path], *, turns: int, steps: int, world: World
) -> dict[str, list[float]]:
    """Measure runs in turns, after one turn that allocates memory and compiles.

    Args:
        runs: folders of logged runs, by name.
        turns: of each run.
        steps: training steps of a turn.
        world: the ranks, all of which call this alike.
    Returns:
        Samples per second of each turn, by name.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = {}
        for name, folder in runs.items():
            opened = open_run(folder, world, Path(scratch) / name)
            sides[name] = partial(samples_per_second, opened.trainer, steps)
        for side in sides.values():
            side()
        return bench.take_turns(sides, turns)


def main() -> None:
    """Measure as one of several ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("device", help="network device of this rank")
    args = parser.parse_args()
    keep_freed_memory()
    runs = {name: Path(folder) for name, _, folder in (run.partition("=") for run in args.runs)}
    with init_world() as world:
        rates = measure(runs, turns=args.turns, steps=args.steps, world=world)
        if world.is_main:
            print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
