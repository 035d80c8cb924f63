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

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.device import keep_freed_memory
from benchmarks import bench, peers, slow_network, training_rates
from benchmarks.training_rates import Rates
from cli.flag_parser import file_path
from distributed.world import init_world
from errors import InputError, exit_code
from figures import run_logs

# With --quick and without: turns, and steps of each, or a few more: whole periods of --local_steps.
# SOAP's rare work comes again after ten steps.
SIZES = {True: (3, 10), False: (5, 50)}
NETWORKS = ("loopback", *slow_network.BURST)
SECONDS_A_STEP = 20  # of which nobody waits for more


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
    if ranks == 1:
        with init_world() as world:
            return training_rates.measure(runs, turns=turns, steps=steps, world=world)
    command = ["-m", "benchmarks.training_rates", "--turns", str(turns), "--steps", str(steps)]
    command += [json.dumps({name: str(folder.resolve()) for name, folder in runs.items()})]
    is_loopback = network == NETWORKS[0]
    joined = slow_network.loopback(ranks) if is_loopback else slow_network.joined(network, ranks)
    timeout = SECONDS_A_STEP * len(runs) * (turns + 1) * max(steps, SIZES[False][1])
    try:
        with joined as places:
            measured = slow_network.run(places, command, timeout=timeout)
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


def main() -> None:
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
    started = time.perf_counter()
    keep_freed_memory()
    runs, first = find_runs(args.groups, args.ranks, args.only)
    rates = measure_rates(first, network=args.network, ranks=args.ranks, quick=args.quick)
    targets = targets_of(runs)
    columns = "".join(f"{f'to {target} %':>22}" for target in targets)
    print(f"{'':<20}{'samples/s':>10}{'spread':>16}{'seeds':>6}{columns}")
    medians = {
        name: {epoch: statistics.median(turns) for epoch, turns in each.items()}
        for name, each in rates.items()
    }
    for name, each in runs.items():
        measured = whole_run(each, rates[name])
        cells = "".join(f"{time_to(target, each, medians[name]):>22}" for target in targets)
        spread = f"{min(measured):.0f}..{max(measured):.0f}"
        rate = statistics.median(measured)
        print(f"{name:<20}{rate:>10.0f}{spread:>16}{len(each):>6}{cells}")
    packages = ["torch", *(name for name in peers.OPTIONAL if getattr(peers, name))]
    machine = bench.machine(bench.DEVICE, packages)
    turns, steps = SIZES[args.quick]
    took = time.perf_counter() - started
    place = f"{args.ranks} process(es), {args.network}" if args.ranks > 1 else "1 process"
    print(f"{turns} turns of at least {steps} steps each; {place}; {machine}; {took:.0f} s")
    bench.write_json(
        args.json,
        [],
        [],
        machine=machine,
        took=took,
        quick=args.quick,
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
                target: [needed if math.isfinite(needed) else None for needed in of_seeds]
                for target in targets
                if (of_seeds := [run_logs.epochs_to(target, rows) for rows in each])
            }
            for name, each in runs.items()
        },
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
