"""What a step of NGD costs in time, beside other optimizers and the passes of a training step.

python -m benchmarks.optimizer_step --quick                 # five minutes
python -m benchmarks.optimizer_step --json optimizers.json  # more rounds, passes at the full batch

On one CPU thread, for ResNet-50 and ResNet-20 on 32x32 images and for the Transformer with its
default sizes.
Every optimizer has its own copy of the model and takes the same gradients, of several random
batches in turn. After a warm-up the optimizers take turns: in a round each takes the steps of one
update period of KaldiNGD, and their mean counts. Where the processor does not compute in bf16, the
passes in bf16 and Muon, whose orthogonalisation is in bf16, are left out: a step would take
minutes.
"""

import copy
import itertools
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
from errors import exit_code
from models import image_models
from models.transformer import Transformer
from ngd import NGD
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.muon import Muon
from optimizers.param_groups import ngd_groups

# Bars of NGD's step: its share of forward and backward of ResNet-50 at batch size 128 in fp32, as a
# better direction must cost next to nothing; and of the step of Muon, which is what people pay
# today for a preconditioned direction.
TRAINING_SHARE = 0.03
MUON_SHARES = {"ResNet-50": 0.3, "ResNet-20": 0.75, "Transformer": 1.3}

OURS, MUON, PASS = "NGD", "Muon + AdamW", "forward + backward"
LR, WEIGHT_DECAY = 1e-3, 5e-4
PERIOD = 4  # steps between updates of KaldiNGD, and steps of a round
WARM_UP = 12  # steps; KaldiNGD updates all estimates in the first ten
# Not a multiple of the period, so that each gradient comes to update an estimate.
GRADIENTS = PERIOD + 1
BATCH, QUICK_BATCH = 128, 32  # of forward and backward
ROUNDS = 15

# -------------------------------------------------------------------- models and gradients


@dataclass(frozen=True)
class Workload:
    """A model, and how to draw a batch of a given size for it."""

    name: str
    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    gradient_batch: int

    def backward(self, samples: tuple[Tensor, Tensor]) -> None:
        self.model.zero_grad(set_to_none=True)
        F.cross_entropy(self.model(samples[0]), samples[1]).backward()

    def gradients(self) -> list[list[Tensor | None]]:
        """Return the gradients of random batches, a list over the parameters for each."""
        gradients = []
        for _ in range(GRADIENTS):
            self.backward(self.batch(self.gradient_batch))
            gradients.append([p.grad for p in self.model.parameters()])
        return gradients


def resnet_workload(name: str, gradient_batch: int) -> Workload:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last)
        return images, torch.randint(10, (size,))

    arch = name.lower().replace("-", "")
    model = image_models.create_model(arch, classes=10, channels=3, image_size=32)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Workload(name, model, batch, gradient_batch)


def transformer_workload() -> Workload:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(3, 30_000, (size, 64)), torch.randint(4, (size,))

    return Workload("Transformer", Transformer(30_000, 4, depth=2), batch, 32)


# -------------------------------------------------------------------- what takes turns


class Side:
    """An optimizer on its own copy of the model; a call returns the mean seconds of its steps."""

    def __init__(
        self, model: nn.Module, optimizer: Any, gradients: list[list[Tensor | None]]
    ) -> None:
        self.parameters = list(model.parameters())
        self.optimizer = optimizer
        self.gradients = itertools.cycle(gradients)
        for _ in range(WARM_UP):
            self.step_seconds()

    def step_seconds(self) -> float:
        """Give the parameters their next gradients; return the seconds of the step alone."""
        for p, gradient in zip(self.parameters, next(self.gradients)):
            p.grad = gradient
        return bench.clock(self.optimizer.step)

    def __call__(self) -> float:
        return statistics.mean(self.step_seconds() for _ in range(PERIOD))


def build_sides(workload: Workload) -> dict[str, Side]:
    """Return all optimizers, after their first steps; Muon where bf16 is fast."""
    gradients = workload.gradients()
    common: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}
    makers: dict[str, Callable[[nn.Module], Any]] = {
        OURS: lambda m: NGD(ngd_groups(m, WEIGHT_DECAY), lr=LR),
        "KaldiNGD": lambda m: KaldiNGD(
            m.parameters(), momentum=0.9, update_period=PERIOD, **common
        ),
        "SGD (foreach)": lambda m: torch.optim.SGD(
            m.parameters(), momentum=0.9, foreach=True, **common
        ),
        "AdamW (fused)": lambda m: torch.optim.AdamW(m.parameters(), fused=True, **common),
    }
    if has_bf16(torch.device("cpu")):
        makers[MUON] = lambda m: Muon(ngd_groups(m, WEIGHT_DECAY), lr=LR)
    sides = {}
    for name, make in makers.items():
        model = copy.deepcopy(workload.model)
        sides[name] = Side(model, make(model), gradients)
    return sides


def passes(workload: Workload, quick: bool) -> dict[str, Callable[[], float]]:
    """Return functions that measure forward and backward at the full batch, in fp32 and bf16.

    With `quick` a smaller batch is measured and scaled. bf16 is left out where the processor does
    not compute in it.
    """
    size = QUICK_BATCH if quick else BATCH
    samples = workload.batch(size)

    def measure(bf16: bool) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return bench.clock(lambda: workload.backward(samples)) * BATCH / size

    calls = {f"{PASS}, fp32": lambda: measure(False)}
    if has_bf16(torch.device("cpu")):
        calls[f"{PASS}, bf16"] = lambda: measure(True)
    for call in calls.values():
        call()  # not timed: the first pass allocates the memory
    return calls


# -------------------------------------------------------------------- the table of a workload


def measure(workload: Workload, quick: bool, *, with_passes: bool) -> dict[str, bench.Row]:
    """Measure all sides of a workload in turn, and print their table."""
    calls: dict[str, Callable[[], float]] = dict(build_sides(workload))
    slow = passes(workload, quick) if with_passes else {}
    seconds = bench.take_turns(calls | slow, bench.QUICK_ROUNDS if quick else ROUNDS)
    rates = {name: [1 / each for each in taken] for name, taken in seconds.items()}
    lines = [[f"{workload.name}, {len(rates[OURS])} rounds", "ms/step", "x ours", "spread"]]
    rows = {}
    for name, taken in seconds.items():
        # The ratio of the rates, ours over the other's, is the other's time in units of ours.
        rows[name] = row = bench.Row(f"{workload.name} {name}", rates[OURS], rates[name])
        milliseconds = f"{1000 * statistics.median(taken):.1f}"
        lines.append([name, milliseconds, f"{row.ratio:.2f}", bench.spread(row.ratios)])
    print("\n" + bench.aligned(lines))
    for name in slow:
        print(f"ours is {100 / rows[name].ratio:.1f} % of {name}")
    return rows


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = bench.machine(torch.device("cpu"), ["torch"])
    print(machine)
    workloads = [
        resnet_workload("ResNet-50", 8),
        resnet_workload("ResNet-20", 64),
        transformer_workload(),
    ]
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    for workload in workloads:
        is_first = workload is workloads[0]
        taken = measure(workload, args.quick, with_passes=is_first)
        rows += taken.values()
        shares = [(MUON, f"NGD_of_Muon_{workload.name}", MUON_SHARES[workload.name])]
        if is_first:
            shares.append((f"{PASS}, fp32", "NGD_of_training_ResNet-50", TRAINING_SHARE))
        bars += [
            bench.Bar(bar, 1 / taken[name].ratio, most, at_most=True)
            for name, bar, most in shares
            if name in taken
        ]
    print(f"\n{PASS} is of batch {BATCH}, with --quick measured at {QUICK_BATCH} and multiplied")
    return bench.finish(args, bars, rows=rows, machine=machine)


if __name__ == "__main__":
    sys.exit(exit_code(main))
