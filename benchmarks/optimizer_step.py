"""What a step of NGD and KaldiNGD costs in time, memory and operators, beside other optimizers.

python -m benchmarks.optimizer_step --quick                 # five minutes; with SOAP about ten
python -m benchmarks.optimizer_step --json optimizers.json  # more rounds, passes at the full batch

On one CPU thread, for ResNet-50 on 32x32 images and for the Transformer with its default sizes.
Every optimizer has its own copy of the model and takes the same gradients, of several random
batches in turn. After a warm-up the optimizers take turns: in a round each takes the steps of one
update period of KaldiNGD, and their mean counts. Where the processor does not compute in bf16, the
passes in bf16 and Muon, whose orthogonalisation is in bf16, are left out: a step would take
minutes. SOAP (optional: pip install pytorch_optimizer) is measured over ten steps, after which it
renews its bases.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.device import has_bf16, keep_freed_memory
from benchmarks import bench
from benchmarks.stepping import PERIOD, Side, clock
from benchmarks.straightforward_kaldi_ngd import StraightforwardNGD
from errors import exit_code
from models import image_models
from models.transformer import Transformer
from ngd import NGD
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.muon import Muon
from optimizers.param_groups import ngd_groups

try:
    import pytorch_optimizer
except ImportError:
    pytorch_optimizer = None

# Bars, all for ResNet-50 on one CPU thread.
# NGD's step, of forward and backward at batch size 128 in fp32: a better direction must cost next
# to nothing.
TRAINING_SHARE = 0.03
# NGD's step, of Muon's, which is what people pay today for a preconditioned direction.
MUON_SHARE = 0.3
# Reads of a tensor by the host in a step of NGD: each would drain a GPU's queue.
SYNCS = 0
# Bytes of NGD's directions per weight, small compared with the momentum's 4.
FACTOR_BYTES = 0.7
# Seconds of the straightforward KaldiNGD's step over those of KaldiNGD's.
SPEED_UP = 1.3

OURS, KALDI, PLAIN = "NGD", "KaldiNGD", "straightforward KaldiNGD"
MUON, SOAP, PASS = "Muon + AdamW", "SOAP", "forward + backward"
LR, WEIGHT_DECAY = 1e-3, 5e-4
# Not a multiple of the period, so that each gradient comes to update an estimate.
GRADIENTS = PERIOD + 1
SOAP_PERIOD = 10  # steps after which SOAP renews its bases, with the library's settings
BATCH = 128  # batch size of forward and backward
ROUNDS, QUICK_ROUNDS = 15, 5
QUICK_BATCH = 32

# -------------------------------------------------------------------- models and gradients


@dataclass(frozen=True)
class Workload:
    """A model, and how to draw a batch of a given size for it."""

    name: str
    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    gradient_batch: int
    images: bool

    def backward(self, samples: tuple[Tensor, Tensor]) -> None:
        """Compute the gradients of one batch."""
        self.model.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(samples[0]), samples[1]).backward()

    def gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients of random batches, a list over the parameters for each."""
        gradients = []
        for _ in range(GRADIENTS):
            self.backward(self.batch(self.gradient_batch))
            gradients.append([p.grad for p in self.model.parameters()])
        return gradients


def resnet_workload() -> Workload:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last)
        return images, torch.randint(10, (size,))

    model = image_models.create_model("resnet50", classes=10, channels=3, image_size=32)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Workload("ResNet-50", model, batch, 8, images=True)


def transformer_workload() -> Workload:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(3, 30_000, (size, 64)), torch.randint(4, (size,))

    return Workload("Transformer", Transformer(30_000, 4), batch, 32, images=False)


# -------------------------------------------------------------------- the optimizers


def build_sides(workload: Workload) -> dict[str, Side]:
    """Return all optimizers, after their first steps; Muon where bf16 is fast."""
    gradients, common = workload.gradients(), {"lr": LR, "weight_decay": WEIGHT_DECAY}
    makers: dict[str, Callable[[nn.Module], Any]] = {
        OURS: lambda m: NGD(ngd_groups(m, WEIGHT_DECAY), lr=LR),
        KALDI: lambda m: KaldiNGD(m.parameters(), momentum=0.9, update_period=PERIOD, **common),
        PLAIN: lambda m: StraightforwardNGD(m.parameters(), momentum=0.9, period=PERIOD, **common),
        "SGD (foreach)": lambda m: torch.optim.SGD(
            m.parameters(), momentum=0.9, foreach=True, **common
        ),
        "AdamW (fused)": lambda m: torch.optim.AdamW(m.parameters(), fused=True, **common),
    }
    if has_bf16(torch.device("cpu")):
        makers[MUON] = lambda m: Muon(ngd_groups(m, WEIGHT_DECAY), lr=LR)
    if pytorch_optimizer:
        makers[SOAP] = lambda m: pytorch_optimizer.SOAP(m.parameters(), lr=LR)
    sides = {}
    for name, make in makers.items():
        model = copy.deepcopy(workload.model)
        period = SOAP_PERIOD if name == SOAP else PERIOD
        sides[name] = Side(model, make(model), gradients, period)
        sides[name].warm_up()
    return sides


# -------------------------------------------------------------------- what is not an optimizer


def passes(workload: Workload, quick: bool) -> dict[str, Callable[[], float]]:
    """Return functions that measure forward and backward at the full batch, in fp32 and bf16.

    With `quick` a smaller batch is measured and scaled. bf16 is left out where the processor does
    not compute in it.
    """
    size = QUICK_BATCH if quick else BATCH
    samples = workload.batch(size)

    def measure(bf16: bool) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return clock(lambda: workload.backward(samples)) * BATCH / size

    calls = {f"{PASS}, fp32": lambda: measure(False)}
    if has_bf16(torch.device("cpu")):
        calls[f"{PASS}, bf16"] = lambda: measure(True)
    for call in calls.values():
        call()  # not timed: the first pass allocates the memory
    return calls


# -------------------------------------------------------------------- the table of a workload


@dataclass
class Result:
    """The results of one model: a row and counts for each optimizer, and what was left out."""

    workload: Workload
    rows: dict[str, bench.Row]
    facts: dict[str, dict[str, Any]]
    sides: dict[str, Side]
    notes: list[str]


def measure(workload: Workload, quick: bool, *, deadline: float) -> Result:
    """Measure all sides of a workload in turn, until a deadline of `bench.take_turns`."""
    sides = build_sides(workload)
    calls: dict[str, Callable[[], float]] = dict(sides)
    slow: set[str] = set()
    notes = []
    if MUON not in sides:
        notes.append(f"{MUON} left out: it computes in bf16, and this processor does not")
    if SOAP not in sides:
        notes.append(f"{SOAP} left out: not installed: pip install pytorch_optimizer")
    if workload.images:
        slow = {*(new := passes(workload, quick)), *({SOAP} & set(sides))}
        calls.update(new)
        if f"{PASS}, bf16" not in new:
            notes.append(f"{PASS} in bf16 left out: this processor does not compute in bf16")
    rounds = QUICK_ROUNDS if quick else ROUNDS
    seconds = bench.take_turns(calls, rounds, slow, deadline=deadline)
    rates = {name: [1 / taken for taken in all_taken] for name, all_taken in seconds.items()}
    rows = {
        name: bench.Row(f"{workload.name} {name}", rates[OURS], rate)
        for name, rate in rates.items()
    }
    facts = {name: side.facts() for name, side in sides.items()}
    return Result(workload, rows, facts, sides, notes)


def table(result: Result) -> str:
    """Write a line for each optimizer and each pass."""
    weights = sum(p.numel() for p in result.workload.model.parameters()) / 1e6
    title = f"{result.workload.name}, {weights:.1f} M weights"
    columns = f"{'ms/step':>10} {'x ours':>8} {'spread':>14} {'state B/weight':>15} {'factors':>8}"
    columns += f" {'operators':>10} {'syncs':>6}"
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
    lines += [
        f"ours is {100 / row.ratio:.1f} % of {name}"
        for name, row in result.rows.items()
        if name.startswith(PASS)
    ]
    scratch_bytes = result.facts[OURS]["scratch_bytes"]
    lines.append(f"ours also keeps {scratch_bytes:.2f} B/weight of scratch memory between steps")
    return "\n".join([*lines, f"{len(result.rows[OURS].ours)} rounds", *result.notes])


def create_bars(result: Result) -> list[bench.Bar]:
    """Return the bars, from the result of ResNet-50."""
    rows, facts = result.rows, result.facts[OURS]

    def share(name: str) -> float:
        return statistics.median(1 / ratio for ratio in rows[name].ratios)

    pairs = zip(rows[PLAIN].ratios, rows[KALDI].ratios)
    speed_up = statistics.median(plain / kaldi for plain, kaldi in pairs)
    return [
        bench.Bar(
            "share of forward and backward", share(f"{PASS}, fp32"), TRAINING_SHARE, at_most=True
        ),
        *(
            [bench.Bar("share of Muon", share(MUON), MUON_SHARE, at_most=True)]
            if MUON in rows
            else []
        ),
        bench.Bar("host syncs", facts["syncs"], SYNCS, at_most=True),
        bench.Bar("factor bytes a weight", facts["factor_bytes"], FACTOR_BYTES, at_most=True),
        bench.Bar("speed-up over straightforward KaldiNGD", speed_up, SPEED_UP),
    ]


def main() -> int:
    parser = bench.parser(__doc__)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="CPU threads; the bars are for the default of %(default)s",
    )
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    packages = ["torch", *(["pytorch_optimizer"] if pytorch_optimizer else [])]
    machine = bench.machine(torch.device("cpu"), packages)
    makers = (resnet_workload, transformer_workload)
    budget = bench.Budget(args.quick, len(makers))
    results = []
    for make in makers:
        deadline = budget.next_deadline()
        results.append(measure(make(), args.quick, deadline=deadline))
    for result in results:
        print(table(result), end="\n\n")
    size = (
        f"measured at {QUICK_BATCH} and multiplied by {BATCH // QUICK_BATCH}"
        if args.quick
        else "measured"
    )
    print(f"{PASS} is of batch {BATCH}, {size}")
    print("operators: launched by a step that updates all estimates, without views; a foreach or")
    print("fused operator counts once for each of its tensors")
    print("x ours: median over the rounds of the step's time in units of ours; spread: min..max")
    print(machine)
    rows = [row for result in results for row in result.rows.values()]
    facts = {
        result.workload.name: {
            "counted": result.facts,
            "seconds": {name: side.seconds for name, side in result.sides.items()},
            "notes": result.notes,
        }
        for result in results
    }
    return bench.finish(
        args,
        create_bars(results[0]),
        rows=rows,
        machine=machine,
        threads=args.threads,
        models=facts,
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
