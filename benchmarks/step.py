"""A training step of both scripts by precision, backend and memory saving, compared with peers.

python -m benchmarks.step --quick                    # without compiled sides; five minutes
python -m benchmarks.step --json step.json           # all; a quarter of an hour on two cores
python -m benchmarks.step --only resnet50            # one script

Every side is a process of its own and trains on the real data, input pipeline included; the sides
take turns. 'plain' is the baseline of throughput.py (fp32, eager, NCHW, DataLoader workers),
'compiled' the same under torch.compile. 'as timm' does what timm's train.py does with
--amp --channels-last --torchcompile: autocast, channels_last, compiled model, timm's optimizer
factory. The utilisation ('of peak') is three times the floating-point operations of the forward
pass, over what a large matrix product reaches on this machine, in bf16 if it computes in bf16. With
--quick the batch is halved until a step in fp32 fits into a turn; the tables name the batch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm.optim
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from backends.device import has_bf16
from benchmarks import bench, throughput, trainers
from benchmarks.stepping import clock
from benchmarks.throughput import PLAIN, Recipe
from benchmarks.trainers import BATCHES
from errors import exit_code

# Speed-up over plain on two cores with AMX; bf16, channels_last and compile give ResNet-50 3.0.
BARS = {"resnet50": 5.0, "transformer": 2.5}
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
# Rounds, and seconds of each side in a round; with --quick and without.
SIZES = {True: (3, 4.0), False: (5, 8.0)}
MATRIX_SIZE = 4096  # of the matrix product that utilisation is relative to
SMALLEST_BATCH = 8  # of --quick on a slow machine
STEP_OF_TURN = 1.5  # a step of --quick may take so much of a turn: a side takes at least one


def peer_steps(side: str, recipe: Recipe, data_dir: str, batch: int) -> Iterator[int]:
    """Take training steps of a peer without end; yield the number of samples of each."""
    if side == "compiled":
        recipe.model.compile()
    if side != "as timm":
        yield from throughput.plain_training(recipe, data_dir, batch)
    device = bench.DEVICE
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


def inspect_script(name: str, data_dir: str) -> tuple[Recipe, float]:
    """Return what a script trains, and the floating-point operations of a step per sample."""
    flags = ["--data_dir", data_dir, "--bs", "16", "--precision", "fp32"]
    with trainers.ready(name, flags) as opened:
        recipe, trainer = Recipe.of(opened), opened.trainer
        inputs, _ = next(trainers.all_batches(trainer, 16))
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

    def product() -> None:
        _ = square @ square
        bench.wait_for_device()

    bench.wait_for_device()
    return 2 * MATRIX_SIZE**3 / min(clock(product) for _ in range(3))


def default_sides(quick: bool, bf16: bool) -> list[str]:
    """Return the sides besides plain; `bf16` says whether the device computes in it.

    Where it does not, the default precision on a processor is fp32, so that the sides of ours in
    fp32 would be measured twice.
    """
    ours = [side for side in OURS if bf16 or "fp32" not in side or torch.cuda.is_available()]
    every = [*ours[:2], *PEERS, *ours[2:]]  # peers take turns with what they are compared with
    return [side for side in every if not quick or ("compile" not in side and side not in PEERS)]


def measure_script(
    name: str, sides: list[str], data_dir: str, *, quick: bool, peak: Peak, budget: bench.Budget
) -> tuple[dict[str, bench.Row], dict[str, int], int]:
    """Measure the sides of a script over plain and print their table.

    Returns:
        The rows and the peak memory of each side, and the batch size.
    """
    rounds, seconds = SIZES[quick]
    batch = BATCHES[name]
    recipe, flops = inspect_script(name, data_dir)
    if quick:
        batch = affordable_batch(batch, flops / peak.fp32, STEP_OF_TURN * seconds)
    flags = ["--data_dir", data_dir, "--bs", str(batch)]
    starts = {
        side: partial(bench.Remote, trainers.train_steps, name, [*flags, *OURS[side].split()])
        if side in OURS
        else partial(bench.Remote, peer_steps, side, recipe, data_dir, batch)
        for side in (PLAIN, *sides)
    }
    rows, memory = bench.compare(starts, name, rounds=rounds, seconds=seconds, budget=budget)
    columns = ["samples/s", "x plain", "spread", "peak GiB", "of peak", "rounds"]
    lines = [[f"{name}, batch {batch}", *columns]]
    for side, row in rows.items():
        rate = statistics.median(row.ours)
        sizes = [f"{memory[side] / 2**30:.2f}", f"{100 * rate * flops / peak.best:.1f}%"]
        ratios = [f"{row.ratio:.2f}", bench.spread(row.ratios)]
        lines.append([side, f"{rate:.1f}", *ratios, *sizes, str(len(row.ours))])
    print("\n" + bench.aligned(lines), flush=True)
    return rows, memory, batch


def main() -> int:
    parser = bench.parser(__doc__, reads_data=True)
    parser.add_argument("--only", choices=list(trainers.SCRIPTS), help="measure one script only")
    args = parser.parse_args()
    machine = bench.machine(bench.DEVICE, ("torch", "torchvision", "timm"))
    peak = Peak.measured()
    print(f"{machine}; peak of {MATRIX_SIZE} rows {peak.best / 1e9:.0f} in {peak.best_dtype}")
    sides = default_sides(args.quick, has_bf16(bench.DEVICE))
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    memories: dict[str, Any] = {}
    batches: dict[str, int] = {}
    names = [args.only] if args.only else list(trainers.SCRIPTS)
    budget = bench.Budget(args.quick, len(names) * len(bench.groups_of(sides)))
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
    return bench.finish(
        args,
        bars,
        rows=rows,
        machine=machine,
        peak=peak.best,
        peak_precision=peak.best_dtype,
        batches=batches,
        memory=memories,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
