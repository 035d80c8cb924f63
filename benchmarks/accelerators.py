"""The prior work's accelerators by themselves: steps of both scripts under each, in turns.

python -m benchmarks.accelerators --json accelerators.json                # the default stack
.venv-legacy/bin/python -m benchmarks.accelerators --json legacy.json     # with ORTModule

Every side is a process of its own and trains on the real data, input pipeline included. The
baseline is eager execution in fp32; each other side differs in what its name says. --quick leaves
out what is compiled and halves the batches. No side has a target.
"""

from __future__ import annotations

import sys
from functools import partial

from backends import onnx_runtime
from backends.device import has_bf16
from benchmarks import bench, trainers
from errors import exit_code

BASELINE = "eager"
FP32 = "--precision fp32"
SIZES = {True: (3, 2.0), False: (5, 8.0)}  # of --quick: rounds, and seconds of each side in one
SIDES = {
    BASELINE: FP32,
    "compile": f"{FP32} --backend compile",
    "ORTModule": f"{FP32} --backend ort",
    "bf16": "--precision bf16",
    "compile, bf16": "--precision bf16 --backend compile",
    "threads wait actively": FP32,
    "threads wait passively": FP32,
    "threads bound to cores": FP32,
    "one thread": f"{FP32} --threads 1",
}
ENVIRONMENTS = {  # set before torch is loaded
    "threads wait actively": {"OMP_WAIT_POLICY": "active"},
    "threads wait passively": {"OMP_WAIT_POLICY": "passive"},
    "threads bound to cores": {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"},
}


def backend_of(side: str) -> str:
    """Return the value of --backend of a side."""
    return SIDES[side].partition("--backend ")[2] or "eager"


def missing_sides() -> dict[str, str]:
    """Return why this stack or this processor lacks a side, by its name."""
    reasons = {
        name: onnx_runtime.unavailable_reason() for name in SIDES if backend_of(name) == "ort"
    }
    if not has_bf16(bench.DEVICE):
        reasons |= {name: "this processor has no bf16" for name in SIDES if "bf16" in name}
    return {name: reason for name, reason in reasons.items() if reason}


def measure_script(script: str, names: list[str], data_dir: str, *, quick: bool) -> list[bench.Row]:
    """Measure the sides of a script over the baseline and print their table."""
    batch = trainers.BATCHES[script] // (2 if quick else 1)
    common = ["--data_dir", data_dir, "--bs", str(batch)]
    with trainers.ready(script, [*common, *FP32.split()]):
        pass  # a data set that is missing is one line here, and not the end of a side
    starts = {
        name: partial(
            bench.Remote,
            trainers.train_steps,
            script,
            [*common, *SIDES[name].split()],
            environment=ENVIRONMENTS.get(name),
        )
        for name in (BASELINE, *names)
    }
    print(f"{script}, batch {batch}, over {BASELINE}")
    rounds, seconds = SIZES[quick]
    budget = bench.Budget(False, len(bench.groups_of(names)))
    measured, _ = bench.compare(starts, script, rounds=rounds, seconds=seconds, budget=budget)
    rows = [measured[name] for name in names]
    print(bench.table(rows, BASELINE), flush=True)
    return rows


def main() -> int:
    parser = bench.parser(__doc__, reads_data=True)
    parser.add_argument("--only", choices=list(trainers.SCRIPTS), help="measure one script only")
    args = parser.parse_args()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision"))
    print(machine)
    sides = list(SIDES)[1:]
    for name, reason in missing_sides().items():
        print(f"{name} left out: {reason}")
        sides.remove(name)
    if args.quick:
        sides = [name for name in sides if backend_of(name) != "compile"]
    rows = [
        row
        for script in ([args.only] if args.only else trainers.SCRIPTS)
        for row in measure_script(script, sides, args.data_dir, quick=args.quick)
    ]
    return bench.finish(args, [], rows=rows, machine=machine)


if __name__ == "__main__":
    sys.exit(exit_code(main))
