"""What balancing the shares of unequal workers wins, and what it costs where they are equal.

python -m benchmarks.dynamic_batch --quick          # three rounds
python -m benchmarks.dynamic_batch --json FILE      # six

Two processes of one thread train a ResNet-20 on the embedded digits at 32 x 32 through resnet50_test.py, with and without
--balance_workers in turn. The slow one is stopped and woken by signals, so that it runs half of the time. Compared are samples/s
of all training steps of an epoch, communication included: balanced, an epoch has one small step more, for the rows left over.

The best possible: with speeds s and s / 2 a batch takes B / s in equal shares, as the slow one needs for its half, and
B / 1.5 s in shares in proportion: 1.5 times as fast. 'gain' is what was won of these 50 %.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench, slow_network

GAIN = 0.85  # of the best possible, in the third epoch: the first is measured, the second mends, the third mends what was left
EQUAL = 1.03  # of the static time: shares that flutter, or timing that waits, would cost more

EPOCHS = 4
BEST = 1.5  # see above
SLICE = 0.01  # seconds that the slow one runs, and stands still
FLAGS = "--dataset digits --image_size 32 --arch resnet20 --bs 64 --threads 1 --device cpu --lr 0.02".split()


class Halved:
    """A process that runs half of the time."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process, self.over = process, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> Halved:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def run(self) -> None:
        """Until the block ends."""
        while not self.over.is_set() and self.process.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                self.process.send_signal(number)
                time.sleep(SLICE)


def train(balanced: bool, slow: bool) -> list[dict[str, Any]]:
    """TextSplit of a run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *FLAGS,
            "--epochs",
            str(EPOCHS),
            "--out",
            f"{folder}/run",
            *(["--balance_workers"] if balanced else []),
        ]
        port, command = slow_network.free_port(), [sys.executable, "resnet50_test.py", *flags]
        ranks = [
            subprocess.Popen(
                command,
                cwd=slow_network.ROOT,
                env=slow_network.as_rank(rank, 2, "127.0.0.1", port),
                stdout=subprocess.DEVNULL,
            )
            for rank in (0, 1)
        ]
        try:
            with Halved(ranks[1]) if slow else contextlib.nullcontext():
                if any(process.wait() for process in ranks):
                    raise RuntimeError(f"exit codes {[process.returncode for process in ranks]}")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]


def compare(slow: bool, rounds: int) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """TextSplit of a static and a balanced run, so many times; prints a line for each."""
    print(
        f"\n{'one rank at half speed' if slow else 'equal ranks':<24} static s, epochs 1..{EPOCHS} | balanced s | shares"
    )
    pairs = []
    for turn in range(rounds):
        sides = {
            balanced: train(balanced, slow)
            for balanced in ((False, True) if turn % 2 == 0 else (True, False))
        }
        pairs.append((sides[False], sides[True]))
        times = (" ".join(f"{row['train_seconds']:.2f}" for row in rows) for rows in pairs[-1])
        shares = " ".join("/".join(map(str, row["shares"])) for row in sides[True])
        print(f"{f'round {turn + 1}':<24} {' | '.join(times)} | {shares}", flush=True)
    return pairs


def main() -> int:
    started = time.perf_counter()
    args = bench.parser(__doc__).parse_args()
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine)
    rounds = 3 if args.quick else 6
    found = {name: compare(name == "slow", rounds) for name in ("slow", "equal")}
    rates: dict[str, bench.Row] = {}
    for name, pairs in found.items():
        for epoch in range(EPOCHS):
            ours, peer = (
                [pair[side][epoch]["samples_per_second"] for pair in pairs] for side in (1, 0)
            )
            rates[f"{name}, epoch {epoch + 1}"] = bench.Row(
                f"{name}, epoch {epoch + 1}", ours, peer
            )
    print("\n" + bench.table(list(rates.values()), "static"))
    won = [(ratio - 1) / (BEST - 1) for ratio in rates["slow, epoch 3"].ratios]
    equal = [
        statistics.mean(ratios)
        for ratios in zip(*(rates[f"equal, epoch {epoch + 1}"].ratios for epoch in range(EPOCHS)))
    ]
    print(
        f"part of the best possible gain in epoch 3: {statistics.median(won):.2f} ({min(won):.2f}..{max(won):.2f})"
    )
    seconds = time.perf_counter() - started
    bars = [
        bench.Bar("gain, third epoch", statistics.median(won), GAIN),
        bench.Bar("time of equal ranks", 1 / statistics.median(equal), EQUAL, at_most=True),
    ]
    print(f"{seconds:.0f} s")
    bench.write_json(
        args.json,
        list(rates.values()),
        bars,
        machine=machine,
        took=seconds,
        quick=args.quick,
        runs=found,
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(main())
