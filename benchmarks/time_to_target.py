"""Time to an accuracy: epochs from the logs of runs, and samples/s, measured in turns.

python -m benchmarks.time_to_target figures/logs/{optimizers,soap}_cifar10.jsonl

The clock of a run that shared its machine with other work says little. Here the first run of each
name NAME-seedN in these folders is opened again by its command line, on the real data, and the runs
take turns with the same training steps. Targets are, for each name, the final accuracy of its worst
seed, rounded down to a whole percent. Within an epoch the accuracy is taken to grow evenly, from 0
in the first. Evaluations are not counted. Runs of several ranks are measured with --ranks and
--network (see slow_network.py).
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.device import keep_freed_memory
from benchmarks import bench, slow_network, train_peer, trainers
from cli import options
from cli.flag_parser import file_path, flat
from distributed.world import World, init_world
from errors import InputError, exit_code
from figures import run_logs
from training.trainer import Trainer

# With --quick and without: turns, and steps of each, or a few more: whole periods of --local_steps.
# SOAP's rare work comes again after ten steps.
SIZES = {True: (3, 10), False: (5, 50)}
NETWORKS = ("loopback", *slow_network.BURST)
SECONDS_A_STEP = 20  # of which nobody waits for more
# Flags that may differ from the logged ones: none of them changes a step.
UNCOMPARED = frozenset(["out", "resume", "checkpoint", "recipe", "data_dir", "seed", "track"])

# -------------------------------------------------------------------- steps of a logged run


def open_run(folder: Path, world: World, *, out: Path) -> tuple[Trainer, argparse.Namespace]:
    """Create what a logged run trained, from its command line, ready for its first step.

    Returns:
        The trainer, its model in training mode and wrapped for data parallelism, and its flags.
    Raises:
        InputError: the folder has no command line of a script, the flags mean something else in
            this version, or a few steps do not stand for all steps of the run.
    """
    try:
        config = run_logs.read_config(folder)
        command, flags = config["command"], config["flags"]
    except (ValueError, KeyError):
        raise InputError(f"{folder}: holds no config.json with a command line") from None
    if not isinstance(command, list):
        raise InputError(f"{folder}: is not the run of a script")
    arguments = [*without_resume(command[1:]), "--out", str(out)]
    if command[0] == "train_peer.py":
        peer = train_peer.parse(arguments)
        args, open_trainer = peer.args, peer.open
    elif command[0] in train_peer.FILES:
        script = train_peer.FILES[command[0]]
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
    """Check that a command line gives the logged flags today, and that a few steps tell all.

    Raises:
        InputError: it does not, or they do not.
    """
    today = flat(json.loads(json.dumps(given)))  # tuples become lists
    flags = flat(flags)
    for name in sorted(flags.keys() & today.keys() - UNCOMPARED):
        if flags[name] != today[name]:
            raise InputError(
                f"{folder}: ran with {name} = {flags[name]}, and its command line means "
                f"{today[name]} today; such a run cannot be measured"
            )
    varying = {
        "--small_epochs": bool(today.get("augment_args small_epochs")),
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


def steps_of_turn(flags: Mapping[str, Any], at_least: int) -> int:
    """Return the steps of a turn: whole periods of --local_steps, where ranks average weights."""
    averages_weights = flags["optimizer"] == "slamb" or flags["sync"] in ("local", "diloco")
    period = flags["local_steps"] if averages_weights else 1
    return math.ceil(at_least / period) * period


def samples_per_second(world: World, steps: Iterator[int], count: int) -> float:
    """Take `count` steps; return the samples per second of all ranks."""
    start = time_together(world)
    samples = sum(itertools.islice(steps, count))
    return samples / (time_together(world) - start)


def time_together(world: World) -> float:
    """Wait until all ranks and their devices are here, and return time.perf_counter()."""
    bench.wait_for_device()
    world.all_gather(0)
    return time.perf_counter()


def measure_rank(
    world: World, *, runs: Mapping[str, str], turns: int, steps: int
) -> dict[str, list[float]]:
    """Measure runs in turns as one rank, after a short turn that allocates memory and compiles.

    Returns:
        The samples per second of each turn, by the name of the run.
    Raises:
        InputError: see `open_run`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = {}
        for name, folder in runs.items():
            trainer, args = open_run(Path(folder), world, out=Path(scratch) / name)
            taken = trainers.steps_of(trainer)
            samples_per_second(world, taken, args.dense_steps + 2)  # past the first, dense steps
            count = steps_of_turn(vars(args), steps)
            sides[name] = partial(samples_per_second, world, taken, count)
        return bench.take_turns(sides, turns)


# -------------------------------------------------------------------- runs and targets


def targets_of(runs: dict[str, run_logs.Runs]) -> list[int]:
    """Return the final accuracy of each name's worst seed, rounded down, lowest first."""
    return sorted({int(min(run_logs.last(each, run_logs.accuracy))) for each in runs.values()})


def find_runs(
    groups: Sequence[Path], ranks: int, only: Sequence[str] | None = None
) -> tuple[dict[str, run_logs.Runs], dict[str, Path]]:
    """Find the finished runs in folders of groups.

    Args:
        groups: folders that hold folders NAME-seedN, or packed files of them.
        ranks: number of ranks of every run.
        only: names of the runs to take; None is all.
    Returns:
        The rows of each seed, and the folder of the first one, by name.
    Raises:
        InputError: a folder holds no finished run, two folders hold the same name, a name has no
            run, or a run had another number of ranks.
    """
    runs: dict[str, run_logs.Runs] = {}
    first: dict[str, Path] = {}
    for group in groups:
        folders = run_logs.run_folders(group.with_suffix("") if group.is_file() else group)
        finished = [folder for folder in folders if run_logs.finished(folder)]
        if not finished:
            raise InputError(f"{group}: holds no finished run NAME-seedN")
        if only:
            finished = [folder for folder in finished if run_logs.name_of(folder) in only]
        found = run_logs.by_name(finished)
        if both := sorted(found.keys() & runs.keys()):
            raise InputError(f"{group}: has runs {both[0]}, as a folder before it")
        runs.update(found)
        for folder in finished:
            first.setdefault(run_logs.name_of(folder), folder)
            had = run_logs.read_rows(folder)[-1].get("world_size", 1)
            if had != ranks:
                raise InputError(f"{folder}: is of {had} ranks; add --ranks {had}")
    if missing := [name for name in only or () if name not in runs]:
        raise InputError(f"--only {missing[0]}: no folder holds a finished run of this name")
    return runs, first


def measure_rates(
    runs: Mapping[str, Path], *, network: str, ranks: int, quick: bool
) -> dict[str, list[float]]:
    """Return the samples per second of each turn, by name.

    Raises:
        InputError: this machine cannot have such a network, or a run cannot be measured.
        subprocess.TimeoutExpired: the ranks take far too long.
    """
    turns, steps = SIZES[quick]
    given: dict[str, Any] = {
        "runs": {name: str(folder.resolve()) for name, folder in runs.items()},
        "turns": turns,
        "steps": steps,
    }
    if ranks == 1:
        with init_world() as world:
            return measure_rank(world, **given)
    rate = None if network == NETWORKS[0] else network
    timeout = SECONDS_A_STEP * len(runs) * (turns + 1) * max(steps, SIZES[False][1])
    try:
        with slow_network.places(rate, ranks) as places:
            return slow_network.run(places, "time_to_target.measure_rank", timeout=timeout, **given)
    except slow_network.Unavailable as reason:
        raise InputError(f"--network {network}: {reason}") from None
    except RuntimeError:
        raise InputError("a rank failed; its message is above") from None


def time_to(target: float, runs: run_logs.Runs, rate: float) -> str:
    """Write the mean epochs and minutes to an accuracy in percent, at a rate in samples/s."""
    epochs = [run_logs.epochs_to(target, rows) for rows in runs]
    if math.inf in epochs:
        return f"{sum(map(math.isfinite, epochs))} of {len(epochs)} seeds"
    mean = statistics.mean(epochs)
    return f"{mean:.2f} ep {mean * runs[0][0]['samples'] / rate / 60:.2f} min"


def main() -> int:
    """Measure the steps and print the table."""
    parser = bench.parser(__doc__)
    parser.add_argument("groups", nargs="+", type=file_path, metavar="FOLDER", help="of NAME-seedN")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs to take (default all)")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument(
        "--network",
        choices=NETWORKS,
        default="loopback",
        help="between the processes; slow ones need Linux and root (default %(default)s)",
    )
    args = parser.parse_args()
    if args.ranks < 1 or (args.ranks == 1 and args.network != NETWORKS[0]):
        parser.error("--ranks must be at least 1, and at least 2 with --network")
    keep_freed_memory()
    runs, first = find_runs(args.groups, args.ranks, args.only)
    rates = measure_rates(first, network=args.network, ranks=args.ranks, quick=args.quick)
    targets = targets_of(runs)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    lines = [["", "samples/s", "spread", "seeds", *(f"to {target} %" for target in targets)]]
    for name, each in runs.items():
        measured = [f"{medians[name]:.0f}", bench.spread(rates[name], 0), str(len(each))]
        lines.append(
            [name, *measured, *(time_to(target, each, medians[name]) for target in targets)]
        )
    print(bench.aligned(lines))
    peers = {peer.package for peer in train_peer.PEERS.values()}
    packages = ["torch", *sorted(filter(find_spec, peers))]
    machine = bench.machine(bench.DEVICE, packages)
    turns, steps = SIZES[args.quick]
    place = f"{args.ranks} process(es), {args.network}" if args.ranks > 1 else "1 process"
    print(f"{turns} turns of at least {steps} steps each; {place}; {machine}")
    return bench.finish(
        args,
        [],
        machine=machine,
        ranks=args.ranks,
        network=args.network,
        steps_a_turn=steps,
        folders=[str(group) for group in args.groups],
        samples_per_epoch={name: each[0][0]["samples"] for name, each in runs.items()},
        samples_per_second=rates,  # of each turn
        epochs_to_target={  # null: not reached
            name: {
                target: [
                    needed if math.isfinite(needed := run_logs.epochs_to(target, rows)) else None
                    for rows in each
                ]
                for target in targets
            }
            for name, each in runs.items()
        },
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
