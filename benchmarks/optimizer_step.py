"""What a step of NGD costs, in time, memory and launched operators, beside torch's optimizers, K-FAC and the plain way to write it.

python -m benchmarks.optimizer_step --quick                 # at most five minutes on two cores
python -m benchmarks.optimizer_step --json optimizers.json  # more rounds, forward and backward at the full batch

On one CPU thread, for ResNet-50 on 32x32 images and for the Transformer with its default sizes. Every optimizer has its own
copy of the model and takes the same gradients, of several random batches in turn. After a warm-up the optimizers take turns:
in a round each does one update period of ours, and its mean step counts. K-FAC (optional: pip install nngeometry) is put
together from its parts, see peers.py.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.device import keep_freed_memory
from benchmarks import bench, peers
from benchmarks.stepping import PERIOD, Side, clock
from benchmarks.straightforward_ngd import StraightforwardNGD
from models import resnet
from models.transformer import Transformer
from ngd import NGD

# Bars, all for ResNet-50 on one CPU thread.
SPEED_UP = 2.7  # over the straightforward NGD: fewer passes over a gradient and batched updates must pay; 3.5 is hoped for
TRAINING_SHARE = 0.025  # of forward and backward at batch 128 in fp32: a better direction must cost next to nothing
MUON_SHARE = 0.65  # of Muon's step: what people pay today for a preconditioned direction
WORST_SHARE = 0.35  # our worst steady step, of the straightforward update step: updates are spread over the period
OPERATOR_SHARE = 0.2  # launched on a step that updates all estimates: what a GPU's queue sees
SYNCS = 0  # reads of a tensor by the host in such a step: each would drain that queue
FACTOR_BYTES = 0.7  # of our factors, a parameter: small beside momentum's 4

OURS, PLAIN, MUON, PASS = "NGD (ours)", "straightforward NGD", "Muon + AdamW", "forward + backward"
LR, WEIGHT_DECAY = 1e-3, 5e-4
GRADIENTS = (
    PERIOD + 1
)  # in turn: no multiple of the period, so that an estimate learns from all of them
BATCH = 128  # of forward and backward
ROUNDS, QUICK_ROUNDS = 15, 5
QUICK_BATCH = 32

# -------------------------------------------------------------------- the models and their gradients


@dataclass(frozen=True)
class LossFn:
    """A model, and how to draw a batch of so many samples for it."""

    name: str
    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    gradient_batch: int
    images: bool

    def backward(self, samples: tuple[Tensor, Tensor]) -> None:
        """The gradients of one batch."""
        self.model.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(samples[0]), samples[1]).backward()

    def gradients(self) -> list[list[Tensor | None]]:
        """Of random batches; a list of parameters' each."""
        found = []
        for _ in range(GRADIENTS):
            self.backward(self.batch(self.gradient_batch))
            found.append([p.grad for p in self.model.parameters()])
        return found


def resnet_task() -> LossFn:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last)
        return images, torch.randint(10, (size,))

    model = resnet.create_model("resnet50", classes=10, channels=3, image_size=32).to(
        memory_format=torch.channels_last
    )  # type: ignore[call-overload]
    return LossFn("ResNet-50", model, batch, 8, images=True)


def transformer_task() -> LossFn:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(3, 30_000, (size, 64)), torch.randint(4, (size,))

    return LossFn("Transformer", Transformer(30_000, 4), batch, 32, images=False)


# -------------------------------------------------------------------- the optimizers


def build_sides(task: LossFn) -> dict[str, Side]:
    """All optimizers but K-FAC, warm."""
    gradients, common = task.gradients(), {"lr": LR, "weight_decay": WEIGHT_DECAY}
    makers: dict[str, Callable[[nn.Module], Any]] = {
        OURS: lambda m: NGD(m.parameters(), momentum=0.9, update_period=PERIOD, **common),
        PLAIN: lambda m: StraightforwardNGD(m.parameters(), momentum=0.9, period=PERIOD, **common),
        "SGD (foreach)": lambda m: torch.optim.SGD(
            m.parameters(), momentum=0.9, foreach=True, **common
        ),
        "AdamW (fused)": lambda m: torch.optim.AdamW(m.parameters(), fused=True, **common),
        MUON: lambda m: peers.Muon(m, **common),
    }
    sides = {}
    for name, make in makers.items():
        model = copy.deepcopy(task.model)
        sides[name] = Side(model, make(model), gradients)
        sides[name].warm_up()
    return sides


# -------------------------------------------------------------------- what is not an optimizer


def passes(task: LossFn, quick: bool) -> dict[str, Callable[[], float]]:
    """Seconds of forward and backward at the full batch, in fp32 and bf16; with `quick` from a smaller one."""
    size = QUICK_BATCH if quick else BATCH
    samples = task.batch(size)

    def measure(bf16: bool) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return clock(lambda: task.backward(samples)) * BATCH / size

    for bf16 in (False, True):
        measure(bf16)
    return {f"{PASS}, fp32": lambda: measure(False), f"{PASS}, bf16": lambda: measure(True)}


def kfac_side(
    task: LossFn, gradients: list[list[Tensor | None]], quick: bool
) -> tuple[Side, Callable[[], float]]:
    """K-FAC; the function returns its amortised seconds. Raises peers.Absent."""
    size, model = QUICK_BATCH if quick else BATCH, copy.deepcopy(task.model)
    optimizer = peers.KFAC(model, task.batch(size)[0] if task.images else None)
    side = Side(model, optimizer, gradients)

    def measure() -> float:
        parts = optimizer.seconds(side.set_gradients, BATCH / size)
        side.seconds.append(list(parts.values()))
        return parts["amortised"]

    return side, measure


# -------------------------------------------------------------------- a task's table


@dataclass
class Result:
    """Of one model: a row an optimizer, what was counted, and a note on K-FAC."""

    task: LossFn
    rows: dict[str, bench.Row]
    facts: dict[str, dict[str, Any]]
    sides: dict[str, Side]
    note: str


def measure(task: LossFn, quick: bool) -> Result:
    """All sides of a task, interleaved."""
    sides = build_sides(task)
    calls: dict[str, Callable[[], float]] = dict(sides)
    slow: set[str] = set()
    if task.images:
        slow = set(new := passes(task, quick))
        calls.update(new)
    try:
        side, call = kfac_side(task, sides[OURS].gradients, quick)
        name = f"K-FAC ({side.optimizer.name})"
        sides[name], calls[name], note = side, call, ""
        slow.add(name)
    except peers.Absent as absent:
        note = f"K-FAC left out: {absent}"
    seconds = bench.take_turns(calls, QUICK_ROUNDS if quick else ROUNDS, slow)
    rates = {name: [1 / taken for taken in all_taken] for name, all_taken in seconds.items()}
    rows = {
        name: bench.Row(f"{task.name} {name}", rates[OURS], rate) for name, rate in rates.items()
    }
    return Result(task, rows, {name: side.facts() for name, side in sides.items()}, sides, note)


def table(result: Result) -> str:
    """A line an optimizer and a pass."""
    weights = sum(p.numel() for p in result.task.model.parameters()) / 1e6
    title = f"{result.task.name}, {weights:.1f} M weights"
    columns = f"{'ms a step':>10} {'x ours':>8} {'spread':>14} {'state B/weight':>15} {'factors':>8} {'operators':>10} {'syncs':>6}"
    lines = [f"{title:<28} {columns}"]
    for name, row in result.rows.items():
        spread = f"{min(row.ratios):.2f}..{max(row.ratios):.2f}"
        line = (
            f"{name:<28} {1000 / statistics.median(row.peer):>10.1f} {row.ratio:>8.2f} {spread:>14}"
        )
        if name in result.sides:
            facts = result.facts[name]
            counted = (facts["operators"], facts["syncs"]) if facts["operators"] else ("", "")
            factors = f"{facts['factor_bytes']:.2f}" if facts["factor_bytes"] else ""
            line += f" {facts['state_bytes']:>15.2f} {factors:>8} {counted[0]:>10} {counted[1]:>6}"
        lines.append(line.rstrip())
    ours, plain = result.sides[OURS], result.sides[PLAIN]
    lines.append(
        f"longest step of a period: ours {1000 * ours.worst():.1f} ms, {PLAIN} {1000 * plain.worst():.1f} ms"
    )
    lines += [
        f"ours is {100 / row.ratio:.1f} % of {name}"
        for name, row in result.rows.items()
        if name.startswith(PASS)
    ]
    lines.append(
        f"ours also keeps {result.facts[OURS]['scratch_bytes']:.2f} B/weight of scratch memory between steps"
    )
    return "\n".join([*lines, *([result.note] if result.note else [])])


def bars_of(result: Result) -> list[bench.Bar]:
    """The bars, from ResNet-50's result."""
    rows, facts = result.rows, result.facts

    def share(name: str) -> float:
        return statistics.median(1 / ratio for ratio in rows[name].ratios)

    worst = result.sides[OURS].worst() / result.sides[PLAIN].worst()
    operators = facts[OURS]["operators"] / facts[PLAIN]["operators"]
    return [
        bench.Bar("speed-up over straightforward NGD", rows[PLAIN].ratio, SPEED_UP),
        bench.Bar(
            "share of forward and backward", share(f"{PASS}, fp32"), TRAINING_SHARE, at_most=True
        ),
        bench.Bar("share of Muon", share(MUON), MUON_SHARE, at_most=True),
        bench.Bar("worst step of straightforward update", worst, WORST_SHARE, at_most=True),
        bench.Bar("operators of straightforward NGD", operators, OPERATOR_SHARE, at_most=True),
        bench.Bar("host syncs", facts[OURS]["syncs"], SYNCS, at_most=True),
        bench.Bar("factor bytes a weight", facts[OURS]["factor_bytes"], FACTOR_BYTES, at_most=True),
    ]


def main() -> None:
    started = time.perf_counter()
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; the bars are for %(default)s, the default"
    )
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    packages = ["torch", *(["nngeometry"] if peers.nngeometry else [])]
    machine = bench.machine(torch.device("cpu"), packages)
    results = [measure(make(), args.quick) for make in (resnet_task, transformer_task)]
    bars, seconds = bars_of(results[0]), time.perf_counter() - started
    for result in results:
        print(table(result), end="\n\n")
    size = (
        f"measured at {QUICK_BATCH} and multiplied by {BATCH // QUICK_BATCH}"
        if args.quick
        else "measured"
    )
    print(f"{PASS}, and the factors of K-FAC, are of batch {BATCH}, {size}")
    print(
        "operators: launched by a step that updates all estimates; no views, a foreach or fused one for each of its tensors"
    )
    print(
        "x ours: median over the rounds of the time of a step, as a multiple of ours; spread: smallest and largest"
    )
    print(f"{machine}; {seconds:.0f} s")
    rows = [row for result in results for row in result.rows.values()]
    facts = {
        result.task.name: {
            "counted": result.facts,
            "seconds": {name: side.seconds for name, side in result.sides.items()},
            "note": result.note,
        }
        for result in results
    }
    bench.write_json(
        args.json,
        rows,
        bars,
        machine=machine,
        took=seconds,
        quick=args.quick,
        threads=args.threads,
        models=facts,
    )
    sys.exit(bench.verdict(bars))


if __name__ == "__main__":
    main()
