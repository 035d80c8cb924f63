"""The prior work's accelerators by themselves: steps of both scripts under each, in turns.

python -m benchmarks.accelerators --json accelerators.json                # the default stack
.venv-legacy/bin/python -m benchmarks.accelerators --json legacy.json     # with ORTModule

Every side is a process of its own and trains on the real data, input pipeline included. The
baseline is eager execution in fp32; each other side differs in what its name says. --quick leaves
out what is compiled and halves the batches. No side has a target.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType

import resnet50_test
import transformer_test
from backends.device import has_bf16, keep_freed_memory
from benchmarks import bench, throughput
from cli import flags
from cli.flag_parser import path_text
from distributed.world import init_world
from errors import InputError, exit_code

SCRIPTS: dict[str, ModuleType] = {"resnet50": resnet50_test, "transformer": transformer_test}
BATCHES = {"resnet50": 64, "transformer": 128}
BASELINE = "eager"
FP32 = "--precision fp32"
SIZES = {True: (3, 2.0), False: (5, 8.0)}  # of --quick: rounds, and seconds of each side in one
AT_ONCE = 4  # sides in memory besides the baseline


@dataclass(frozen=True)
class Setting:
    """What a side sets, and its process.

    Attributes:
        flags: of the entry script.
        environment: set before the process starts, and so before torch is loaded.
    """

    flags: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The value of --backend in the flags."""
        return self.flags.partition("--backend ")[2] or "eager"

    def start(self, script: str, batch: int, data_dir: str, out: str) -> bench.Remote:
        """Start the process, which waits for its turns."""
        arguments = ["--data_dir", data_dir, "--bs", str(batch), "--out", out]
        arguments += ["--optimizer", throughput.OPTIMIZERS[script]]
        with environment(self.environment):
            return bench.Remote(steps, script, [*arguments, *self.flags.split()])


SIDES = {
    BASELINE: Setting(FP32),
    "compile": Setting(f"{FP32} --backend compile"),
    "ORTModule": Setting(f"{FP32} --backend ort"),
    "bf16": Setting("--precision bf16"),
    "compile, bf16": Setting("--precision bf16 --backend compile"),
    "threads wait actively": Setting(FP32, {"OMP_WAIT_POLICY": "active"}),
    "threads wait passively": Setting(FP32, {"OMP_WAIT_POLICY": "passive"}),
    "threads bound to cores": Setting(FP32, {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}),
    "one thread": Setting(f"{FP32} --threads 1"),
}


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that the block starts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def steps(script: str, arguments: list[str]) -> Iterator[int]:
    """Take training steps without end, in the process of a side; yield the samples of each."""
    with init_world() as world:
        opened = throughput.open_script(SCRIPTS[script], arguments, world)
        yield from throughput.our_steps(opened.trainer)


def check_data(script: str, data_dir: str) -> None:
    """Read the data set once here, where an error is one line, and not the end of a side.

    Raises:
        InputError: it is missing or damaged.
    """
    with init_world() as world, tempfile.TemporaryDirectory() as folder:
        arguments = ["--data_dir", data_dir, "--out", f"{folder}/run", "--bs", "16"]
        throughput.open_script(SCRIPTS[script], [*arguments, *FP32.split()], world)


def missing_sides() -> dict[str, str]:
    """Return why this stack or this processor lacks a side, by its name."""
    reasons = {
        name: flags.backend_unavailable_reason(side.backend)
        for name, side in SIDES.items()
        if side.backend != "eager"
    }
    if not has_bf16(bench.DEVICE):
        reasons |= {name: "this processor has no bf16" for name in SIDES if "bf16" in name}
    return {name: reason for name, reason in reasons.items() if reason}


def measure_script(script: str, names: list[str], data_dir: str, *, quick: bool) -> list[bench.Row]:
    """Measure the sides of a script over the baseline, a few at a time; print their table."""
    check_data(script, data_dir)
    rows: list[bench.Row] = []
    rounds, seconds = SIZES[quick]
    batch = BATCHES[script] // (2 if quick else 1)
    print(f"{script}, batch {batch}, over {BASELINE}")
    for start in range(0, len(names), AT_ONCE):
        some = [BASELINE, *names[start : start + AT_ONCE]]
        with tempfile.TemporaryDirectory() as folder:
            remotes = {
                name: SIDES[name].start(script, batch, data_dir, f"{folder}/{number}")
                for number, name in enumerate(some)
            }
            try:
                rates = bench.take_remote_turns(remotes, rounds, seconds)
            finally:
                for remote in remotes.values():
                    remote.close()
        rows += [bench.Row(f"{script} {name}", rates[name], rates[BASELINE]) for name in some[1:]]
    print(bench.table(rows, BASELINE), flush=True)
    return rows


def main() -> int:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--data_dir",
        type=path_text,
        default=os.environ.get("DATA_DIR", "./data"),
        help="folder of the data sets",
    )
    parser.add_argument("--only", choices=list(SCRIPTS), help="measure one script only")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES)[1:], help="default all there are")
    args = parser.parse_args()
    keep_freed_memory()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision"))
    print(machine)
    missing = missing_sides()
    for name in args.sides or ():
        if name in missing:
            raise InputError(f"--sides {name!r}: {missing[name]}")
    there = [name for name in SIDES if name not in {*missing, BASELINE}]
    if args.quick:
        there = [name for name in there if SIDES[name].backend != "compile"]
    scripts = [args.only] if args.only else list(SCRIPTS)
    rows = [
        row
        for script in scripts
        for row in measure_script(script, args.sides or there, args.data_dir, quick=args.quick)
    ]
    took = time.perf_counter() - started
    print(f"{took:.0f} s")
    bench.write_json(args.json, rows, [], machine=machine, took=took, quick=args.quick)
    return bench.verdict([])


if __name__ == "__main__":
    sys.exit(exit_code(main))
