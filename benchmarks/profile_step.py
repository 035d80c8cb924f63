"""Where a training step spends its time: both scripts under torch's profiler, by operator.

python -m benchmarks.profile_step                        # a minute on two cores
python -m benchmarks.profile_step --only resnet50 --more --backend compile

The data sets are the real ones and the input pipeline is included; times are those of an operator
without the operators that it calls.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import bench, trainers
from errors import exit_code

WARM_UP, STEPS = 4, 6  # steps before profiling, profiled steps
ROWS = 14  # operators in the table


def table(name: str, flags: list[str]) -> str:
    """Write each operator's share of a step, milliseconds and calls per step."""
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with trainers.ready(name, flags) as opened:
        steps = trainers.steps_of(opened.trainer)
        for _ in range(WARM_UP):
            batch = next(steps)
        bench.wait_for_device()
        with profile(activities=activities) as profiler:
            for _ in range(STEPS):
                next(steps)
            bench.wait_for_device()
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = [
        (getattr(event, attribute), event.count, event.key)
        for event in profiler.key_averages()
        if not event.key.startswith("ProfilerStep")
    ]
    total = sum(time for time, _, _ in events)
    lines = [["operator", "share", "ms/step", "calls/step"]]
    for time, calls, key in sorted(events, reverse=True)[:ROWS]:
        times = f"{100 * time / total:.1f}%", f"{time / STEPS / 1e3:.2f}"
        lines.append([key, *times, f"{calls / STEPS:.1f}"])
    title = f"{name}, batch {batch}, {opened.run.precision.name} {' '.join(flags[4:])}"
    return f"{title}: {total / STEPS / 1e3:.1f} ms of operators per step\n{bench.aligned(lines)}"


def main() -> int:
    parser = bench.parser(__doc__, reads_data=True)
    parser.add_argument("--only", choices=list(trainers.SCRIPTS), help="profile one script only")
    parser.add_argument(
        "--more",
        nargs="...",
        default=[],
        metavar="FLAG",
        help="further flags for the script; must come last",
    )
    args = parser.parse_args()
    print(bench.machine(bench.DEVICE, ("torch",)))
    for name in [args.only] if args.only else trainers.SCRIPTS:
        flags = ["--data_dir", args.data_dir, "--bs", str(trainers.BATCHES[name]), *args.more]
        print(f"\n{table(name, flags)}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
