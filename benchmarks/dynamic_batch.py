"""What balancing batch shares gains with unequal workers, and what it costs with equal ones.

python -m benchmarks.dynamic_batch --quick          # three rounds of three epochs
python -m benchmarks.dynamic_batch --json FILE      # six rounds of four
python -m benchmarks.dynamic_batch --cifar DIR      # on a tenth of CIFAR-10, which lies in DIR

Two processes of one thread train a ResNet-20 on the embedded digits at 32 x 32, or on a tenth of
CIFAR-10 at 24 x 24, through resnet50_test.py, with and without --balance_workers in turn. The slow
process is stopped and continued by signals, so that it runs half of the time. Compared are
samples/s of all training steps of an epoch, communication included; a balanced epoch has one more
small step for the last rows.

The upper bound: at speeds s and s / 2, a batch of B samples takes B / s in equal shares, as the
slow process needs for its half, and B / 1.5 s in proportional shares, which is 1.5 times as fast.
'gain' is the fraction of these 50 % that was reached.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench, slow_network
from cli.flag_parser import path_text
from errors import exit_code

# Of the upper bound, in the third epoch: the first epoch measures, the next two correct the shares.
GAIN = 0.85
# Of the time with static shares: shares that fluctuate, or a timer that waits, would cost more.
EQUAL = 1.03

SIZES = {True: (3, 3), False: (6, 4)}  # rounds and epochs; with --quick and without
JUDGED_EPOCH = 3
UPPER_BOUND = 1.5  # see above
SLICE = 0.01  # seconds for which the slow process runs, and for which it is stopped
FLAGS = "--arch resnet20 --bs 64 --optimizer sgd --lr 0.02 --threads 1 --device cpu".split()
DIGITS = "--dataset digits --image_size 32".split()
CIFAR = "--dataset cifar10 --subset 0.1 --image_size 24 --workers 0 --data_dir".split()


Rows = list[dict[str, Any]]
"""The rows of metrics.jsonl."""


@contextlib.contextmanager
def half_speed(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let a process run half of the time while the context lasts."""
    over = threading.Event()

    def stop_and_continue() -> None:
        while not over.is_set() and process.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                process.send_signal(number)
                time.sleep(SLICE)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def train(balanced: bool, slow: bool, data: list[str], *, epochs: int) -> Rows:
    """Train on two ranks, on the data of these flags."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, *data, "--epochs", str(epochs), "--out", f"{folder}/run"]
        command = ["resnet50_test.py", *flags, *(["--balance_workers"] if balanced else [])]
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(slow_network.start([slow_network.Place()] * 2, command))
            if slow:
                stack.enter_context(half_speed(ranks[1]))
            ranks[0].communicate()
            if any(process.wait() for process in ranks):
                raise RuntimeError(f"exit codes {[process.returncode for process in ranks]}")
        text = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def compare(slow: bool, rounds: int, data: list[str], *, epochs: int) -> list[tuple[Rows, Rows]]:
    """Return the metrics of a static and a balanced run for each round; print a line for each."""
    title = "one rank at half speed" if slow else "equal ranks"
    print(f"\n{title:<24} static s, epochs 1..{epochs} | balanced s | shares")
    pairs = []
    for turn in range(rounds):
        sides = {
            balanced: train(balanced, slow, data, epochs=epochs)
            for balanced in ((False, True) if turn % 2 == 0 else (True, False))
        }
        pairs.append((sides[False], sides[True]))
        times = (" ".join(f"{row['train_seconds']:.2f}" for row in rows) for rows in pairs[-1])
        shares = " ".join("/".join(map(str, row["shares"])) for row in sides[True])
        print(f"{f'round {turn + 1}':<24} {' | '.join(times)} | {shares}", flush=True)
    return pairs


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--cifar", type=path_text, metavar="DIR", help="folder of CIFAR-10 (default the digits)"
    )
    args = parser.parse_args()
    data = [*CIFAR, os.path.abspath(args.cifar)] if args.cifar else DIGITS
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine, "CIFAR-10" if args.cifar else "digits", sep="\n")
    rounds, epochs = SIZES[args.quick]
    runs = {
        name: compare(name == "slow", rounds, data, epochs=epochs) for name in ("slow", "equal")
    }
    rows: dict[tuple[str, int], bench.Row] = {}
    for name, pairs in runs.items():
        for epoch in range(1, epochs + 1):
            peer, ours = (
                [pair[side][epoch - 1]["samples_per_second"] for pair in pairs] for side in (0, 1)
            )
            rows[name, epoch] = bench.Row(f"{name}, epoch {epoch}", ours, peer)
    print("\n" + bench.table(rows.values(), "static"))
    gains = [(ratio - 1) / (UPPER_BOUND - 1) for ratio in rows["slow", JUDGED_EPOCH].ratios]
    gain = statistics.median(gains)
    of_rounds = zip(*(rows["equal", epoch].ratios for epoch in range(1, epochs + 1)))
    equal = statistics.median(map(statistics.mean, of_rounds))
    share = f"{gain:.2f} ({bench.spread(gains)})"
    print(f"share of the possible gain in epoch {JUDGED_EPOCH}: {share}")
    bars = [
        bench.Bar("gain, third epoch", gain, GAIN),
        bench.Bar("time of equal ranks", 1 / equal, EQUAL, at_most=True),
    ]
    return bench.finish(args, bars, rows=rows.values(), machine=machine, runs=runs)


if __name__ == "__main__":
    sys.exit(exit_code(main))
