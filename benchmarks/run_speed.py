"""Samples/s of the planned runs of some groups, in turns: how fast each trains with nothing beside.

python -m benchmarks.run_speed optimizers_vgg8 peers_vgg8 --json speeds.json

A turn is the command of a run (figures/experiments.yaml) in a process of its own, for two epochs of
a share of its rows. The second epoch counts, without its evaluation.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from cli.flag_parser import fraction
from errors import InputError, exit_code
from figures.experiments import PLAN, PlannedRun, read_plan
from figures.run_logs import LOGS, ROOT, read_config, read_rows

ROUNDS = 5


def short_run(run: PlannedRun, share: float) -> tuple[float, dict[str, Any]]:
    """Train with this share of a run's rows; return samples/s of the second epoch, and its config.

    Raises:
        InputError: the run has failed.
    """
    short = f"--subset {share} --epochs 2 --val_fraction 0.01 --no-test".split()
    with tempfile.TemporaryDirectory() as folder:
        run = replace(run, folder=Path(folder) / "run")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        words = [*run.arguments(), *short]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{run.command} has failed:\n{done.stderr}")
        return read_rows(run.folder)[-1]["samples_per_second"], read_config(run.folder)


def main() -> int:
    parser = bench.parser(__doc__)
    add = parser.group("flags")
    add("groups", str, None, "groups of the plan; the first run is the baseline", nargs="+")
    add("--share", fraction, 0.06, "of the training rows", metavar="F")
    args = parser.parse_args()
    planned = [run for run in read_plan(PLAN, "cpu", LOGS) if run.seed == 0]
    sides: dict[str, Callable[[], tuple[float, dict[str, Any]]]] = {}
    for group in args.groups:
        runs = [run for run in planned if run.folder.parent.name == group]
        if not runs:
            raise InputError(f"{group}: the plan has no such group of runs for a CPU")
        names = [run.folder.name.removesuffix("-seed0") for run in runs]
        sides |= {name: partial(short_run, run, args.share) for name, run in zip(names, runs)}
    machine = bench.machine(torch.device("cpu"), ["torch"])
    turns = bench.take_turns(sides, bench.QUICK_ROUNDS if args.quick else ROUNDS)
    rates = {name: [rate for rate, _ in values] for name, values in turns.items()}
    base = next(iter(rates))
    rows = [bench.Row(name, each, rates[base]) for name, each in rates.items()]
    print(f"{machine}\n{bench.table(rows, base)}")
    peers = {name: values[0][1]["peer"] for name, values in turns.items() if "peer" in values[0][1]}
    facts = {"groups": args.groups, "share": args.share, "peers": peers}
    return bench.finish(args, [], rows=rows, machine=machine, **facts)


if __name__ == "__main__":
    sys.exit(exit_code(main))
