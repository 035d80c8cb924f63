"""Time to an accuracy: epochs from the logs of runs, and samples/s, measured in turns.

python -m benchmarks.time_to_target figures/logs/{optimizers,soap}_cifar10.jsonl

The clock of a run that shared its machine with other work says little. Here the first run of each
name NAME-seedN in these folders is opened again by its command line, on the real data, and the runs
take turns with the same training steps; SLAMB has turns of its own for its first epochs, in which
it sends more (--compress_warmup). Targets are, for each name, the final accuracy of its worst seed,
rounded down to a whole percent. Within an epoch the accuracy is taken to grow evenly, from 0 in the
first. Evaluations are not counted. Runs of several ranks are measured with --ranks and
--network (see slow_network.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from backends.device import keep_freed_memory
from benchmarks import bench, peers, slow_network, train_peer, trainers
from cli import options
from cli.flag_parser import file_path
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
Rates = dict[int, list[float]]
"""Samples per second of each turn, by the first epoch of the stretch whose steps were taken."""


# -------------------------------------------------------------------- steps of a logged run


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


def measure_rank(
    world: World, *, device: str, runs: Mapping[str, str], turns: int, steps: int
) -> dict[str, Rates]:
    """Measure runs in turns as one rank, after a short turn that allocates memory and compiles.

    Args:
        world: the ranks, all of which call this alike.
        device: network device of this rank.
        runs: folders of logged runs, by name.
        turns: of each stretch of each run.
        steps: training steps of a turn, at least.
    Returns:
        The rates by name.
    Raises:
        InputError: see `open_run`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = {}
        for name, folder in runs.items():
            trainer, args = open_run(Path(folder), world, out=Path(scratch) / name)
            samples_per_second(trainer, args.dense_steps + 2)  # past the first, dense steps
            taken = steps_of_turn(vars(args), steps)
            for epoch in stretches(vars(args)):
                sides[name, epoch] = partial(samples_per_second, trainer, taken, epoch)
        rates: dict[str, Rates] = {name: {} for name in runs}
        for (name, epoch), each in bench.take_turns(sides, turns).items():
            rates[name][epoch] = each
        return rates


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
        ranks: of which every run must be.
        only: names of the runs to take; None is all.
    Returns:
        The rows of each seed, and the folder of the first one, by name.
    Raises:
        InputError: a folder holds no finished run, two hold the same name, none holds a run of one
            of these names, or a run had another number of ranks.
    """
    runs: dict[str, run_logs.Runs] = {}
    first: dict[str, Path] = {}
    for group in groups:
        folders = run_logs.run_folders(group.with_suffix(""))
        finished = [folder for folder in folders if run_logs.finished(folder)]
        if not finished:
            raise InputError(f"{group}: holds no finished run NAME-seedN")
        if only:
            finished = [folder for folder in finished if name_of(folder) in only]
        found = run_logs.by_name(finished)
        if both := sorted(found.keys() & runs.keys()):
            raise InputError(f"{group}: has runs {both[0]}, as a folder before it")
        runs.update(found)
        for folder in finished:
            first.setdefault(name_of(folder), folder)
            had = run_logs.read_rows(folder)[-1].get("world_size", 1)
            if had != ranks:
                raise InputError(f"{folder}: is of {had} ranks; add --ranks {had}")
    if only and (missing := [name for name in only if name not in runs]):
        raise InputError(f"--only {missing[0]}: no folder holds a finished run of this name")
    return runs, first


def name_of(folder: Path) -> str:
    """Return NAME of a folder NAME-seedN."""
    return folder.name.rpartition("-seed")[0] or folder.name


def measure_rates(
    runs: Mapping[str, Path], *, network: str, ranks: int, quick: bool
) -> dict[str, Rates]:
    """Return the samples per second of each turn, by name and first epoch.

    Args:
        runs: folders of logged runs, by name.
        network: one of `NETWORKS`, between several ranks.
        ranks: processes on this machine, of one thread each if there are several.
        quick: whether to take few turns.
    Raises:
        InputError: this machine cannot have such a network, or a run cannot be measured.
        subprocess.TimeoutExpired: the ranks take far too long.
    """
    turns, steps = SIZES[quick]
    given = {name: str(folder.resolve()) for name, folder in runs.items()}
    if ranks == 1:
        with init_world() as world:
            return measure_rank(world, device="", runs=given, turns=turns, steps=steps)
    rate = None if network == NETWORKS[0] else network
    timeout = SECONDS_A_STEP * len(runs) * (turns + 1) * max(steps, SIZES[False][1])
    try:
        with slow_network.places(rate, ranks) as places:
            measured = slow_network.run(
                places,
                "time_to_target.measure_rank",
                timeout=timeout,
                runs=given,
                turns=turns,
                steps=steps,
            )
    except slow_network.Unavailable as reason:
        raise InputError(f"--network {network}: {reason}") from None
    except RuntimeError:
        raise InputError("a rank failed; its message is above") from None
    return {  # JSON made the epochs strings
        name: {int(epoch): each for epoch, each in rates.items()}
        for name, rates in measured.items()
    }


def minutes_of(epochs: float, samples: int, rates: Mapping[int, float]) -> float:
    """Return how many minutes epochs take.

    Args:
        epochs: from the start of the run, with a fraction.
        samples: of an epoch.
        rates: samples per second from each of these epochs on, the first of which is 0.
    """
    starts = sorted(rates)
    ends = [*starts[1:], math.inf]
    parts = (max(0.0, min(epochs, end) - start) for start, end in zip(starts, ends))
    return sum(part * samples / rates[start] for part, start in zip(parts, starts)) / 60


def time_to(target: float, runs: run_logs.Runs, rates: Mapping[int, float]) -> str:
    """Write the mean epochs and minutes to an accuracy, or that not all seeds reach it.

    Args:
        target: the accuracy in percent.
        runs: the rows of each seed.
        rates: samples per second from each of these epochs on.
    """
    epochs = [run_logs.epochs_to(target, rows) for rows in runs]
    if math.inf in epochs:
        return f"{sum(map(math.isfinite, epochs))} of {len(epochs)} seeds"
    minutes = statistics.mean(minutes_of(each, runs[0][0]["samples"], rates) for each in epochs)
    return f"{statistics.mean(epochs):.2f} ep {minutes:.2f} min"


def whole_run(runs: run_logs.Runs, rates: Rates) -> list[float]:
    """Return the samples per second of a whole run, for each turn.

    Args:
        runs: the rows of each seed.
        rates: samples per second of each turn, by first epoch.
    """
    epochs, samples = len(runs[0]), runs[0][0]["samples"]
    of_turns = [dict(zip(rates, turn)) for turn in zip(*rates.values())]
    return [epochs * samples / minutes_of(epochs, samples, turn) / 60 for turn in of_turns]


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
    medians = {
        name: {epoch: statistics.median(turns) for epoch, turns in each.items()}
        for name, each in rates.items()
    }
    lines = [["", "samples/s", "spread", "seeds", *(f"to {target} %" for target in targets)]]
    for name, each in runs.items():
        measured = whole_run(each, rates[name])
        cells = [f"{statistics.median(measured):.0f}", bench.spread(measured, 0), str(len(each))]
        lines.append([name, *cells, *(time_to(target, each, medians[name]) for target in targets)])
    print(bench.aligned(lines))
    packages = ["torch", *(name for name in peers.OPTIONAL if getattr(peers, name))]
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
        samples_per_second=rates,  # of each turn, by the first epoch that it stands for
        minutes_of_epochs={
            name: [
                minutes_of(row["epoch"], each[0][0]["samples"], medians[name]) for row in each[0]
            ]
            for name, each in runs.items()
        },
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
