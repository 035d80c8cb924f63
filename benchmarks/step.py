"""A training step of both scripts by precision, backend and memory saving, compared with peers.

python -m benchmarks.step --quick                    # without compiled sides; five minutes
python -m benchmarks.step --json step.json           # all; a quarter of an hour on two cores
python -m benchmarks.step --only resnet50 --sides ours 'ours, fuse'

Every side is a process of its own and trains on the real data, input pipeline included; the sides
take turns. 'plain' is the baseline of throughput.py (fp32, eager, NCHW, DataLoader workers),
'compiled' the same under torch.compile. 'as timm' does what timm's train.py does with
--amp --channels-last --torchcompile: autocast, channels_last, compiled model, timm's optimizer
factory. The utilisation ('of peak') is three times the floating-point operations of the forward
pass, over what a large matrix product reaches on this machine, in bf16 if it computes in bf16. With
--quick the batch is halved until a step in fp32 fits into a turn; the tables name the batch.
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
from backends.device import has_bf16, keep_freed_memory
from benchmarks import bench, throughput
from cli.flag_parser import path_text
from distributed.world import init_world
from errors import exit_code

SCRIPTS: dict[str, ModuleType] = {"resnet50": resnet50_test, "transformer": transformer_test}
# Speed-up over plain on two cores with AMX; bf16, channels_last and compile give ResNet-50 3.0.
BARS = {"resnet50": 5.0, "transformer": 2.5}
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
# Rounds, and seconds of each side in a round; with --quick and without.
SIZES = {True: (3, 4.0), False: (5, 8.0)}
MATRIX_SIZE = 4096  # of the matrix product that utilisation is relative to
SMALLEST_BATCH = 8  # of --quick on a slow machine
STEP_OF_TURN = 1.5  # a step of --quick may take so much of a turn: a side takes at least one


@dataclass(frozen=True)
class Side:
    """One side, as its process gets it; a peer gets a recipe, and none of our settings."""

    script: str
    name: str
    data_dir: str
    folder: str
    recipe: throughput.Recipe
    batch: int

    def steps(self) -> Iterator[int]:
        """Take training steps without end; yield the number of samples of each."""
        if self.name not in OURS:
            yield from peer_steps(self.name, self.recipe, self.data_dir, self.batch)
        out = f"{self.folder}/{self.name.replace(' ', '-')}"
        arguments = ["--data_dir", self.data_dir, "--bs", str(self.batch), "--out", out]
        arguments += ["--optimizer", throughput.OPTIMIZERS[self.script]]
        with init_world() as world:
            script = SCRIPTS[self.script]
            opened = throughput.open_script(
                script, [*arguments, *OURS.get(self.name, "").split()], world
            )
            yield from throughput.our_steps(opened.trainer)


def peer_steps(name: str, recipe: throughput.Recipe, data_dir: str, batch: int) -> Iterator[int]:
    """Take training steps of a peer without end; yield the number of samples of each."""
    if name == "compiled":
        recipe.model.compile()
    if name != "as timm":
        yield from throughput.plain_training(recipe, data_dir, batch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = recipe.model.to(device=device, memory_format=torch.channels_last)  # type: ignore
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


def inspect_script(name: str, data_dir: str, folder: str) -> tuple[throughput.Recipe, float]:
    """Return what a script trains, and the floating-point operations of a step per sample."""
    with init_world() as world:
        arguments = ["--data_dir", data_dir, "--out", f"{folder}/flops"]
        arguments += ["--bs", "16", "--precision", "fp32"]
        arguments += ["--optimizer", throughput.OPTIMIZERS[name]]
        opened = throughput.open_script(SCRIPTS[name], arguments, world)
        trainer = opened.trainer
        recipe = throughput.recipe_of(opened)
        if recipe.texts:
            row_batches = list(trainer.batches.order.full_batches(0, BATCHES[name]))
            padding = 100 * trainer.train_set.padding(row_batches)  # type: ignore[attr-defined]
            print(f"padding of batches of {BATCHES[name]}: {padding:.1f} % of the tokens")
        inputs, _ = next(throughput.our_batches(trainer, 16))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            trainer.model(inputs)
    return recipe, 3 * counter.get_total_flops() / 16


def affordable_batch(batch: int, seconds_per_sample: float, limit: float) -> int:
    """Halve a batch until a step takes at most `limit` seconds, or down to `SMALLEST_BATCH`."""
    while batch > SMALLEST_BATCH and batch * seconds_per_sample > limit:
        batch //= 2
    return batch


@dataclass(frozen=True)
class Peak:
    """Floating-point operations per second of a large matrix product, in fp32 and at its best."""

    fp32: float
    best: float
    best_dtype: str

    @classmethod
    def measured(cls) -> Peak:
        """Measure this machine; bf16 only where it computes in bf16, since it is slow elsewhere."""
        fp32 = peak_flops(torch.float32)
        if not has_bf16(bench.DEVICE):
            return cls(fp32, fp32, "fp32")
        return cls(fp32, peak_flops(torch.bfloat16), "bf16")


def peak_flops(dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    square = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=bench.DEVICE, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        bench.wait_for_device()
        start = time.perf_counter()
        square @ square
        bench.wait_for_device()
        best = min(best, time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / best


def measure(
    sides: dict[str, Side], rounds: int, seconds: float, *, deadline: float
) -> tuple[dict[str, bench.Row], dict[str, int]]:
    """Measure all sides of a script in turn; return rows over plain, and each peak memory.

    Args:
        sides: what is measured, by name.
        rounds: largest number of rounds.
        seconds: of each side in a round.
        deadline: as of `bench.take_turns`.
    """
    remotes = {name: bench.Remote(Side.steps, side) for name, side in sides.items()}
    try:
        rates = bench.take_remote_turns(remotes, rounds, seconds, deadline=deadline)
        memory = {side: remote.peak_memory() for side, remote in remotes.items()}
    finally:
        for remote in remotes.values():
            remote.close()
    return {
        name: bench.Row(f"{side.script} {name}", rates[name], rates[PLAIN])
        for name, side in sides.items()
    }, memory


def default_sides(quick: bool, bf16: bool) -> list[str]:
    """Return the sides besides plain; `bf16` says whether the device computes in it.

    Where it does not, the default precision on a processor is fp32, so that the sides of ours in
    fp32 would be measured twice.
    """
    ours = [side for side in OURS if bf16 or "fp32" not in side or torch.cuda.is_available()]
    every = [*ours[:2], *PEERS, *ours[2:]]  # peers take turns with what they are compared with
    return [side for side in every if not quick or ("compile" not in side and side not in PEERS)]


def groups_of(sides: list[str]) -> list[list[str]]:
    """Split the sides into groups that are in memory at the same time."""
    return [sides[start : start + AT_ONCE] for start in range(0, len(sides), AT_ONCE)]


def measure_script(
    name: str, sides: list[str], data_dir: str, *, quick: bool, peak: Peak, budget: bench.Budget
) -> tuple[dict[str, bench.Row], dict[str, int], int]:
    """Measure the sides of a script, a few at a time together with plain; print their table.

    Returns:
        The rows and the peak memory of each side, and the batch size.
    """
    rows: dict[str, bench.Row] = {}
    memory: dict[str, int] = {}
    rounds, seconds = SIZES[quick]
    batch = BATCHES[name]
    with tempfile.TemporaryDirectory() as folder:
        recipe, flops = inspect_script(name, data_dir, folder)
        if quick:
            batch = affordable_batch(batch, flops / peak.fp32, STEP_OF_TURN * seconds)
        for some in groups_of(sides):
            deadline = budget.next_deadline()
            made = {
                side: Side(name, side, data_dir, folder, recipe, batch) for side in (PLAIN, *some)
            }
            more_rows, more_memory = measure(made, rounds, seconds, deadline=deadline)
            rows, memory = more_rows | rows, more_memory | memory
    title = f"{name}, batch {batch}"
    columns = f"{'samples/s':>10} {'x plain':>8} {'spread':>12} {'peak GiB':>9} {'of peak':>8}"
    print(f"\n{title:<26} {columns} {'rounds':>7}")
    for side, row in rows.items():
        rate, spread = statistics.median(row.ours), f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        gigabytes, utilisation = memory[side] / 2**30, 100 * rate * flops / peak.best
        rates = f"{rate:>10.1f} {row.ratio:>8.2f} {spread:>12}"
        print(
            f"{side:<26} {rates} {gigabytes:>9.2f} {utilisation:>7.1f}% {len(row.ours):>7}",
            flush=True,
        )
    if batch != BATCHES[name]:
        print(f"this machine is slow, so the batch is {batch} instead of {BATCHES[name]}")
    return rows, memory, batch


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
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*OURS, *PEERS],
        help="sides besides plain (default all; with --quick those that are not compiled)",
    )
    args = parser.parse_args()
    keep_freed_memory()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision", "timm"))
    peak = Peak.measured()
    print(f"{machine}; peak of {MATRIX_SIZE} rows {peak.best / 1e9:.0f} in {peak.best_dtype}")
    sides = args.sides or default_sides(args.quick, has_bf16(bench.DEVICE))
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    memories: dict[str, Any] = {}
    batches: dict[str, int] = {}
    names = [args.only] if args.only else list(SCRIPTS)
    budget = bench.Budget(args.quick, len(names) * len(groups_of(sides)))
    for name in names:
        measured, memories[name], batches[name] = measure_script(
            name, sides, args.data_dir, quick=args.quick, peak=peak, budget=budget
        )
        rows += measured.values()
        ours = [row for side, row in measured.items() if side in OURS]
        best = max(ours, key=lambda row: row.ratio)
        bars.append(bench.Bar(f"{best.name} of plain", best.ratio, BARS[name]))
        for peer in (measured[side] for side in PEERS if side in measured):
            bars.append(bench.Bar(f"{best.name} of {peer.name}", best.ratio / peer.ratio, 1.0))
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        peak=peak.best,
        peak_precision=peak.best_dtype,
        batches=batches,
        took=seconds,
        quick=args.quick,
        memory=memories,
    )
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(exit_code(main))
