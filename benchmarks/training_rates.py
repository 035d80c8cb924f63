"""How fast logged runs train, in turns: samples/s of the same training steps on the real data.

rates = training_rates.measure({"ngd": folder}, turns=3, steps=10, world=world)

As a program it is one rank of time_to_target.py, which `slow_network.run` starts: rank 0 prints
the rates as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from backends.device import keep_freed_memory
from benchmarks import bench, train_peer, trainers
from cli import options
from distributed.world import World, init_world
from errors import InputError, exit_code
from training.trainer import Trainer

# Flags that may differ from the logged ones: none of them changes a step.
UNCOMPARED = frozenset(["out", "resume", "checkpoint", "recipe", "data_dir", "seed", "track"])


def open_run(folder: Path, world: World, *, steps: int, out: Path) -> Trainer:
    """Create what a logged run trained, from its command line, ready for its first step.

    Args:
        folder: of the logged run.
        world: the ranks.
        steps: training steps of a turn.
        out: the run folder of what is opened.
    Returns:
        The trainer, its model in training mode and wrapped for data parallelism.
    Raises:
        InputError: the folder has no command line of a script, the flags mean something else in
            this version, or the first steps do not stand for all steps of the run.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        command, flags = config["command"], config["flags"]
    except (OSError, ValueError, KeyError):
        raise InputError(f"{folder}: holds no config.json with a command line") from None
    if not isinstance(command, list):
        raise InputError(f"{folder}: is not the run of a script")
    arguments = [*without_resume(command[1:]), "--out", str(out)]
    if command[0] == "train_peer.py":
        peer = train_peer.parse(arguments)
        args, open_trainer = peer.args, peer.open
    elif command[0] in train_peer.SCRIPTS:
        script = train_peer.SCRIPTS[command[0]]
        args, _ = options.parse(script.parser(), script.SCRIPT, arguments)
        open_trainer = partial(trainers.open_script, script, arguments)
    else:
        raise InputError(f"{folder}: {command[0]} is no script whose steps can be measured")
    check_steps(folder, vars(args), flags, steps=steps)
    trainer = open_trainer(world).trainer
    trainer.wrap_model()
    trainer.model.train()
    return trainer


def without_resume(arguments: Sequence[str]) -> list[str]:
    """Leave --resume out of a command line, and the path after it, whose checkpoint is gone."""
    kept: list[str] = []
    follows = False  # whether --resume is the argument before
    for argument in arguments:
        is_path, follows = follows and not argument.startswith("-"), argument == "--resume"
        if not (follows or is_path or argument.startswith("--resume=")):
            kept.append(argument)
    return kept


def check_steps(
    folder: Path, given: Mapping[str, Any], flags: Mapping[str, Any], *, steps: int
) -> None:
    """Check that the first steps of these flags are the steps of a logged run.

    Args:
        folder: of the logged run.
        given: the flags that its command line gives in this version, by name.
        flags: the logged ones.
        steps: training steps of a turn.
    Raises:
        InputError: they are not.
    """
    today = json.loads(json.dumps(given))  # tuples become lists
    for name in sorted(flags.keys() & today.keys() - UNCOMPARED):
        if flags[name] != today[name]:
            raise InputError(
                f"{folder}: ran with {name} = {flags[name]}, and its command line means "
                f"{today[name]} today; such a run cannot be measured"
            )
    varying = {
        "--small_epochs": bool(today.get("small_epochs")),
        "--dynamic_batch": today["dynamic_batch"] != "none",
        "--ema": bool(today["ema"]),
        "--compress_warmup": today["optimizer"] == "slamb" and bool(today["compress_warmup"]),
    }
    for name, is_used in varying.items():
        if is_used:
            raise InputError(
                f"{folder}: with {name} steps differ in their cost, so that the first ones do not "
                "stand for all of them"
            )
    averages_weights = today["optimizer"] == "slamb" or today["sync"] in ("local", "diloco")
    if averages_weights and steps % today["local_steps"]:
        raise InputError(
            f"{folder}: its ranks average their weights every {today['local_steps']} steps, and a "
            f"turn has {steps}; leave --quick out"
        )


def samples_per_second(trainer: Trainer, steps: int) -> float:
    """Take the first training steps of an epoch, and return the rate of all ranks together."""
    trainer.batches.start_epoch(0)
    trainer.progress.epoch, trainer.progress.step_in_epoch = 0, 0
    if trainer.communicating is not None:
        trainer.communicating.start_epoch(0)
    plan = trainer.batches.plan(0, 0)[:steps]
    samples = 0
    start = time_together(trainer.world)
    data = trainer.train_set.batches([planned.rows for planned in plan], 0)
    for (inputs, labels), planned in zip(data, plan):
        trainer.set_lr(trainer.scheduled_lr())
        trainer.train_step(inputs, labels, planned.weight, samples=planned.samples)
        trainer.progress.step_in_epoch += 1
        samples += planned.samples
    return samples / (time_together(trainer.world) - start)


def time_together(world: World) -> float:
    """Wait until all ranks and their devices are here, and return time.perf_counter()."""
    bench.wait_for_device()
    world.max_over_ranks(0)
    return time.perf_counter()


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
    Raises:
        InputError: see `open_run`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = {}
        for name, folder in runs.items():
            trainer = open_run(folder, world, steps=steps, out=Path(scratch) / name)
            sides[name] = partial(samples_per_second, trainer, steps)
        for side in sides.values():
            side()
        return bench.take_turns(sides, turns)


def main() -> None:
    """Measure as one of several ranks."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--turns", type=int, required=True, help="of each run")
    parser.add_argument("--steps", type=int, required=True, help="training steps of a turn")
    parser.add_argument("runs", help="folders of logged runs by name, as JSON")
    parser.add_argument("device", help="network device of this rank")
    args = parser.parse_args()
    keep_freed_memory()
    runs = {name: Path(folder) for name, folder in json.loads(args.runs).items()}
    with init_world() as world:
        rates = measure(runs, turns=args.turns, steps=args.steps, world=world)
        if world.is_main:
            print(json.dumps(rates), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
