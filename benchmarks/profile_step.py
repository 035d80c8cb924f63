"""Where a training step spends its time: both scripts under torch's profiler, by operator.

python -m benchmarks.profile_step                        # a minute on two cores
python -m benchmarks.profile_step --text profile.txt     # also writes the tables
python -m benchmarks.profile_step --only resnet50 --more --backend compile

The data sets are the real ones and the input pipeline is included; times are those of an operator
without the operators that it calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import resnet50_test
import transformer_test
from backends.device import keep_freed_memory
from benchmarks import bench, throughput
from cli.flag_parser import path_text
from distributed.world import init_world
from errors import exit_code

SCRIPTS = {"resnet50": (resnet50_test, 64), "transformer": (transformer_test, 128)}
WARM_UP, STEPS = 4, 6  # steps before profiling, profiled steps
ROWS = 14  # operators in the table


def table(name: str, arguments: list[str], data_dir: str) -> Iterator[str]:
    """Yield lines with each operator's share of a step, milliseconds and calls per step."""
    script, batch = SCRIPTS[name]
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with tempfile.TemporaryDirectory() as folder, init_world() as world:
        flags = ["--data_dir", data_dir, "--bs", str(batch), "--out", f"{folder}/run"]
        flags += ["--optimizer", throughput.OPTIMIZERS[name]]
        opened = throughput.open_script(script, [*flags, *arguments], world)
        steps = throughput.our_steps(opened.trainer)
        for _ in range(WARM_UP):
            next(steps)
        bench.wait_for_device()
        with profile(activities=activities) as profiler:
            for _ in range(STEPS):
                next(steps)
            bench.wait_for_device()
    rows = [
        (
            event.self_device_time_total if cuda else event.self_cpu_time_total,
            event.count,
            event.key,
        )
        for event in profiler.key_averages()
    ]
    rows = sorted((row for row in rows if not row[2].startswith("ProfilerStep")), reverse=True)
    total = sum(time for time, _, _ in rows)
    title = f"{name}, batch {batch}, {opened.run.precision.name} {' '.join(arguments)}"
    yield f"{title}: {total / STEPS / 1e3:.1f} ms of operators per step"
    yield f"{'share':>7} {'ms/step':>9} {'calls/step':>11}  operator"
    for time, calls, key in rows[:ROWS]:
        share, milliseconds = 100 * time / total, time / STEPS / 1e3
        yield f"{share:>6.1f}% {milliseconds:>9.2f} {calls / STEPS:>11.1f}  {key}"


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--data_dir",
        type=path_text,
        default=os.environ.get("DATA_DIR", "./data"),
        help="folder of the data sets",
    )
    parser.add_argument("--only", choices=list(SCRIPTS), help="profile one script only")
    parser.add_argument(
        "--text", type=path_text, metavar="FILE", help="also write the tables to this file"
    )
    parser.add_argument(
        "--more",
        nargs="...",
        default=[],
        metavar="FLAG",
        help="further flags for the script; must come last",
    )
    args = parser.parse_args()
    keep_freed_memory()
    lines = [bench.machine(bench.DEVICE, ("torch",))]
    for name in [args.only] if args.only else SCRIPTS:
        lines += ["", *table(name, args.more, args.data_dir)]
    print("\n".join(lines))
    if args.text:
        Path(args.text).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
