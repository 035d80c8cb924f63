"""A training step of both scripts under each combination of precision, backend and what is kept, beside other ways to write it.

python -m benchmarks.step --quick                    # without compiled sides; five minutes on two cores
python -m benchmarks.step --json step.json           # all; a quarter of an hour
python -m benchmarks.step --only resnet50 --sides ours 'ours, fuse'

Every side is a process of its own and trains on the real data, input pipeline included; they take turns. 'plain' is the recipe of
throughput.py (fp32, eager, NCHW, DataLoader workers), 'compiled' the same under torch.compile, 'as timm' does what timm's train.py
does with --amp --channels-last --torchcompile: autocast, channels_last, compiled model, timm's optimizer factory. Utilisation:
three times the forward pass's floating-point operations, over what a large matrix product reaches here in bf16.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import timm.optim
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import resnet50_test
import transformer_test
from backends.device import keep_freed_memory
from benchmarks import bench, throughput
from distributed.world import init_world

RESNET, TRANSFORMER = (
    5.0,
    2.5,
)  # x plain, on two cores with AMX: bf16, channels_last and compile give 3.0 of the first
SCRIPTS: dict[str, ModuleType] = {"resnet50": resnet50_test, "transformer": transformer_test}
BARS = {"resnet50": RESNET, "transformer": TRANSFORMER}
BATCHES = {"resnet50": 64, "transformer": 128}
PLAIN = "plain"
OURS = {
    "ours": "",
    "ours, compile": "--backend compile",
    "ours, fuse": "--fuse",
    "ours, checkpoint": "--checkpoint_activations",
    "ours, fp32": "--precision fp32",
    "ours, compile, fuse": "--backend compile --fuse",
    "ours, fp32, compile": "--precision fp32 --backend compile",
}
PEERS = ("compiled", "as timm")  # besides plain; both compile
AT_ONCE = 4  # sides in memory besides plain: each is a process with a model of its own
SIZES = {True: (3, 4.0), False: (5, 8.0)}  # rounds, seconds of each side in a round; --quick or not
SQUARE = 4096  # of the matrix product that utilisation is measured against


@dataclass(frozen=True)
class Side:
    """What a process is told; a peer's gets a recipe, and so nothing of our allocator's settings."""

    script: str
    name: str
    data_dir: str
    folder: str
    recipe: throughput.Recipe

    def steps(self) -> Iterator[int]:
        """Endless training steps: samples of each."""
        if self.name not in OURS:
            yield from peer_steps(self.name, self.recipe, self.data_dir, BATCHES[self.script])
        words = [
            "--data_dir",
            self.data_dir,
            "--bs",
            str(BATCHES[self.script]),
            "--out",
            f"{self.folder}/{self.name.replace(' ', '-')}",
        ]
        with init_world() as world:
            script = SCRIPTS[self.script]
            opened = throughput.open_script(
                script, [*words, *OURS.get(self.name, "").split()], world
            )
            yield from throughput.our_steps(opened.trainer)


def peer_steps(name: str, recipe: throughput.Recipe, data_dir: str, batch: int) -> Iterator[int]:
    """A side that is not ours."""
    if name == "compiled":
        recipe.model.compile()
    if name != "as timm":
        yield from throughput.plain_training(recipe, data_dir, batch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = recipe.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    kind = {"opt": "adamw"} if recipe.texts else {"opt": "sgd", "momentum": recipe.momentum}
    optimizer = timm.optim.create_optimizer_v2(
        model, lr=recipe.lr, weight_decay=recipe.weight_decay, **kind
    )
    model.compile()
    for inputs, labels in throughput.plain_batches(recipe, data_dir, batch):
        inputs, labels = inputs.to(device), labels.to(device)
        if not recipe.texts:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield len(labels)


def look_at(name: str, data_dir: str, folder: str) -> tuple[throughput.Recipe, float]:
    """What a script trains, and the floating-point operations of a training step for each sample."""
    with init_world() as world:
        words = [
            "--data_dir",
            data_dir,
            "--bs",
            "16",
            "--out",
            f"{folder}/flops",
            "--precision",
            "fp32",
        ]
        opened = throughput.open_script(SCRIPTS[name], words, world)
        trainer = opened.trainer
        if opened.recipe.texts:
            plan = list(trainer.batching.order.epoch(0, BATCHES[name]))
            print(
                f"padding of batches of {BATCHES[name]}: {100 * trainer.train_set.padding(plan):.1f} % of the tokens"
            )  # type: ignore[attr-defined]
        inputs, _ = next(throughput.our_batches(trainer, 16))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            trainer.model(inputs)
    return opened.recipe, 3 * counter.get_total_flops() / 16


def peak_flops() -> float:
    """What a large bf16 matrix product reaches, per second."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    square = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(5):
        bench.wait_for_device()
        start = time.perf_counter()
        square @ square
        bench.wait_for_device()
        best = min(best, time.perf_counter() - start)
    return 2 * SQUARE**3 / best


def measure(
    sides: dict[str, Side], rounds: int, seconds: float
) -> tuple[dict[str, bench.Row], dict[str, int]]:
    """All sides of a script in turn; their rates beside plain's, and the most memory each held."""
    remotes = {name: bench.Remote(Side.steps, side) for name, side in sides.items()}
    try:
        for remote in remotes.values():
            remote.rate(seconds)
        rates = bench.take_turns(
            {side: lambda remote=remote: remote.rate(seconds) for side, remote in remotes.items()},
            rounds,
        )
        memory = {side: remote.peak_memory() for side, remote in remotes.items()}
    finally:
        for remote in remotes.values():
            remote.close()
    return {
        name: bench.Row(f"{side.script} {name}", rates[name], rates[PLAIN])
        for name, side in sides.items()
    }, memory


def measure_script(
    name: str, wanted: list[str], data_dir: str, quick: bool, peak: float
) -> tuple[dict[str, bench.Row], dict[str, int]]:
    """The sides of a script, a few at a time, each beside plain; prints their table."""
    found: dict[str, bench.Row] = {}
    memory: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe, flops = look_at(name, data_dir, folder)
        for first in range(0, len(wanted), AT_ONCE):
            some = (PLAIN, *wanted[first : first + AT_ONCE])
            rates, held = measure(
                {side: Side(name, side, data_dir, folder, recipe) for side in some}, *SIZES[quick]
            )
            found, memory = rates | found, held | memory
    title = f"{name}, batch {BATCHES[name]}"
    print(
        f"\n{title:<26} {'samples/s':>10} {'x plain':>8} {'spread':>12} {'peak GiB':>9} {'of peak':>8}"
    )
    for side, row in found.items():
        rate, spread = statistics.median(row.ours), f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        used = 100 * rate * flops / peak
        print(
            f"{side:<26} {rate:>10.1f} {row.ratio:>8.2f} {spread:>12} {memory[side] / 2**30:>9.2f} {used:>7.1f}%",
            flush=True,
        )
    return found, memory


def main() -> int:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--data_dir", default=os.environ.get("DATA_DIR", "./data"), help="folder of the data sets"
    )
    parser.add_argument("--only", choices=list(SCRIPTS), help="one of the two")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*OURS, *PEERS],
        help="besides plain (default all; --quick: those not compiled)",
    )
    args = parser.parse_args()
    keep_freed_memory()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision", "timm"))
    peak = peak_flops()
    print(f"{machine}; bf16 matrix product {peak / 1e9:.0f} GFLOP/s")
    every = [
        *list(OURS)[:2],
        *PEERS,
        *list(OURS)[2:],
    ]  # peers take turns with what they are to be compared with
    wanted = args.sides or [
        side for side in every if not args.quick or ("compile" not in side and side not in PEERS)
    ]
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    memories: dict[str, Any] = {}
    for name in [args.only] if args.only else SCRIPTS:
        found, memories[name] = measure_script(name, wanted, args.data_dir, args.quick, peak)
        rows += found.values()
        best = max((row for side, row in found.items() if side in OURS), key=lambda row: row.ratio)
        bars.append(bench.Bar(f"{best.name} of plain", best.ratio, BARS[name]))
        for peer in (found[side] for side in PEERS if side in found):
            bars.append(bench.Bar(f"{best.name} of {peer.name}", best.ratio / peer.ratio, 1.0))
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        peak=peak,
        took=seconds,
        quick=args.quick,
        memory=memories,
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(main())
