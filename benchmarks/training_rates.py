"""How fast logged runs train, in turns: samples/s of the same training steps on the real data.

rates = training_rates.measure({"ngd": folder}, turns=3, steps=10, world=world)["ngd"][0]

As a program it is one rank of time_to_target.py, which `slow_network.run` starts: rank 0 prints
the rates as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
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
from figures.run_logs import read_config
from training.trainer import Trainer

# Flags that may differ from the logged ones: none of them changes a step.
UNCOMPARED = frozenset(["out", "resume", "checkpoint", "recipe", "data_dir", "seed", "track"])


Rates = dict[int, list[float]]
"""Samples per second of each turn, by the first epoch of the stretch whose steps were taken."""


def open_run(folder: Path, world: World, *, out: Path) -> tuple[Trainer, argparse.Namespace]:
    """Create what a logged run trained, from its command line, ready for its first step.

    Args:
        folder: of the logged run.
        world: the ranks.
        out: the run folder of what is opened.
    Returns:
        The trainer, its model in training mode and wrapped for data parallelism, and its flags.
    Raises:
        InputError: the folder has no command line of a script, the flags mean something else in
            this version, or a few steps do not stand for all steps of the run.
    """
    try:
        config = read_config(folder)
        command, flags = config["command"], config["flags"]
    except (ValueError, KeyError):
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
    check_steps(folder, vars(args), flags)
    trainer = open_trainer(world).trainer
    trainer.wrap_model()
    trainer.model.train()
    return trainer, args


def without_resume(arguments: Sequence[str]) -> list[str]:
    """Leave --resume out of a command line, and the path after it, whose checkpoint is gone."""
    kept: list[str] = []
    follows = False  # whether --resume is the argument before
    for argument in arguments:
        is_path, follows = follows and not argument.startswith("-"), argument == "--resume"
        if not (follows or is_path or argument.startswith("--resume=")):
            kept.append(argument)
    return kept


def check_steps(folder: Path, given: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Check that these flags are those of a logged run, and that a few of its steps tell all.

    Args:
        folder: of the logged run.
        given: the flags that its command line gives in this version, by name.
        flags: the logged ones.
    Raises:
        InputError: they are not, or do not.
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
    }
    for name, is_used in varying.items():
        if is_used:
            raise InputError(
                f"{folder}: with {name} steps differ in their cost, so that the first ones do not "
                "stand for all of them"
            )


def stretches(flags: Mapping[str, Any]) -> list[int]:
    """Return the first epochs of the stretches of a run within which steps cost the same.

    There is one, but for SLAMB, which sends more in its first epochs.

    Args:
        flags: of the run, by name.
    """
    if flags["optimizer"] != "slamb":
        return [0]
    final = flags["compress_ratio"]
    ratios = [*(max(ratio, final) for ratio in flags["compress_warmup"] or ()), final]
    starts = [epoch for epoch in range(1, len(ratios)) if ratios[epoch] != ratios[epoch - 1]]
    return [start for start in (0, *starts) if start < flags["epochs"]]


def steps_of_turn(flags: Mapping[str, Any], at_least: int) -> int:
    """Return the steps of a turn: whole periods of --local_steps, where ranks average weights.

    Args:
        flags: of the run, by name.
        at_least: so many steps, or a few more.
    """
    averages_weights = flags["optimizer"] == "slamb" or flags["sync"] in ("local", "diloco")
    period = flags["local_steps"] if averages_weights else 1
    return math.ceil(at_least / period) * period


def samples_per_second(trainer: Trainer, steps: int, epoch: int = 0) -> float:
    """Take training steps of an epoch, again and again if it has fewer; return samples/s.

    Args:
        trainer: of one rank, each of which calls this alike.
        steps: to take.
        epoch: counted from 0.
    Returns:
        The rate of all ranks together.
    """
    trainer.batches.start_epoch(epoch)
    trainer.progress.epoch = epoch
    if trainer.communicating is not None:
        trainer.communicating.start_epoch(epoch)
    samples = 0
    start = time_together(trainer.world)
    while steps:
        trainer.progress.step_in_epoch = 0
        plan = trainer.batches.plan(epoch, 0)[:steps]
        data = trainer.train_set.batches([planned.rows for planned in plan], epoch)
        for (inputs, labels), planned in zip(data, plan):
            trainer.set_lr(trainer.scheduled_lr())
            trainer.train_step(inputs, labels, planned.weight, samples=planned.samples)
            trainer.progress.step_in_epoch += 1
            samples += planned.samples
        steps -= len(plan)
    return samples / (time_together(trainer.world) - start)


def time_together(world: World) -> float:
    """Wait until all ranks and their devices are here, and return time.perf_counter()."""
    bench.wait_for_device()
    world.max_over_ranks(0)
    return time.perf_counter()


def measure(runs: Mapping[str, Path], *, turns: int, steps: int, world: World) -> dict[str, Rates]:
    """Measure runs in turns, after a short one that allocates memory and compiles.

    Args:
        runs: folders of logged runs, by name.
        turns: of each stretch of each run.
        steps: training steps of a turn, at least.
        world: the ranks, all of which call this alike.
    Returns:
        The rates by name.
    Raises:
        InputError: see `open_run`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = {}
        for name, folder in runs.items():
            trainer, args = open_run(folder, world, out=Path(scratch) / name)
            samples_per_second(trainer, args.dense_steps + 2)  # past the first, dense steps
            taken = steps_of_turn(vars(args), steps)
            for epoch in stretches(vars(args)):
                sides[name, epoch] = partial(samples_per_second, trainer, taken, epoch)
        rates: dict[str, Rates] = {name: {} for name in runs}
        for (name, epoch), each in bench.take_turns(sides, turns).items():
            rates[name][epoch] = each
        return rates


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
