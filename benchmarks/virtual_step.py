"""How well the meta-gradient predicts what a change of lambda does to the held-out loss.

python -m benchmarks.virtual_step --quick   # one minute; CIFAR-10 below $DATA_DIR or ./data

ResNet-20 after some steps on CIFAR-10; a batch of 64 mixed in pairs; the held-out loss of another
batch after one step of SGD. The measured slope is that of the held-out loss when lambda of one
sample is changed by +-0.05. It is compared with the exact gradient (double backward, float64) and
with central differences at several step sizes in the weights, in fp32 and, where the processor
computes in it, bf16. A ReLU network is piecewise smooth: its exact gradient is that of the current
piece, a larger step averages over many.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
from backends.device import has_bf16, set_num_threads
from benchmarks import bench
from errors import exit_code
from input_pipeline import image_batches, image_datasets
from mixup import FINITE_DIFFERENCE_STEP, Mix, meta_gradient, restore_on_exit
from models import image_models

# Cosine with the measured slopes of central differences in the default precision, over that of
# double backward: the cheap gradient must be no worse.
MIN_RATIO = 1.0
STRETCHES = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1)
BATCH, RATE, NUDGE = 64, 0.05, 0.05


class Problem:
    """A trained network, a batch to mix in pairs, and a held-out batch."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        dataset_splits, _ = image_datasets.read_image_splits(
            "cifar10", os.environ.get("DATA_DIR", "./data")
        )
        train = dataset_splits["train"]
        mean, std = image_batches.channel_statistics(train)
        data = image_batches.ImageDataset(
            train,
            image_batches.AUGMENTATIONS["cifar10"],
            mean=mean,
            std=std,
            device=torch.device("cpu"),
        )
        plan = torch.randperm(len(train))[: (steps + 2) * BATCH].view(-1, BATCH)
        self.model = image_models.create_model(
            "resnet20", classes=10, channels=3, image_size=32
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        batches: Iterator[tuple[Tensor, Tensor]] = data.batches(list(plan), 0)
        for _ in range(steps):
            x, labels = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(self.model(x), labels).backward()
            optimizer.step()
        (self.x, self.labels), (self.clean_x, self.clean_labels) = batches
        self.partner, self.weight = torch.randperm(BATCH), 0.5 + 0.4 * torch.rand(BATCH)

    def mixed_loss(self, weight: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        mix = Mix(self.partner, weight)
        logits = (call or self.model)(mixup.blend(self.x, mix))
        return mixup.cross_entropy(logits, self.labels, mix=mix)

    def clean_loss(self, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return F.cross_entropy((call or self.model)(self.clean_x), self.clean_labels)

    def after(self, weight: Tensor) -> float:
        """Return the held-out loss after a step of SGD at these lambdas."""
        parameters = list(self.model.parameters())
        with restore_on_exit(parameters, list(self.model.buffers())):
            gradients = torch.autograd.grad(self.mixed_loss(weight), parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-RATE)
                return self.clean_loss().item()

    def measured_slopes(self, samples: int) -> Tensor:
        """Return slopes of the held-out loss to lambda of the first samples: shape (samples,)."""
        nudges = NUDGE * torch.eye(BATCH)[:samples]
        return torch.tensor(
            [
                (self.after(self.weight + n) - self.after(self.weight - n)) / (2 * NUDGE)
                for n in nudges
            ]
        )

    def exact(self) -> Tensor:
        """Return the gradient by double backward in float64: shape (batch,)."""
        wide = copy.copy(self)
        wide.model, wide.x, wide.clean_x = (
            copy.deepcopy(self.model).double(),
            self.x.double(),
            self.clean_x.double(),
        )
        named, weight = dict(wide.model.named_parameters()), self.weight.double().requires_grad_()
        gradients = torch.autograd.grad(
            wide.mixed_loss(weight), list(named.values()), create_graph=True
        )
        virtual_parameters = {name: p - RATE * g for (name, p), g in zip(named.items(), gradients)}
        loss = wide.clean_loss(
            lambda x: torch.func.functional_call(wide.model, virtual_parameters, (x,))
        )
        return torch.autograd.grad(loss, weight)[0].float()

    def differences(self, stretch: float, bf16: bool) -> Tensor:
        """Return the gradient by central differences: shape (batch,)."""

        def network(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return self.model(x).float()

        model: nn.Module = self.model
        loss, clean = (
            lambda weight: self.mixed_loss(weight, network),
            lambda: self.clean_loss(network),
        )
        return meta_gradient(
            model,
            self.weight,
            mixed_loss=loss,
            clean_loss=clean,
            rate=RATE,
            finite_difference_step=stretch,
        )


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    set_num_threads(0, 1)
    machine = bench.machine(torch.device("cpu"), ("torch",))
    print(machine)
    precisions = {"fp32": False, "bf16": True}
    if not has_bf16(torch.device("cpu")):
        del precisions["bf16"]
        print("bf16 left out: this processor does not compute in it; the bar is of fp32")
    as_used = list(precisions)[-1]  # the scripts' default on this machine
    cosines: dict[str, list[float]] = {}
    for seed in range(1 if args.quick else 3):
        problem = Problem(seed, steps=60)
        slopes = problem.measured_slopes(24 if args.quick else BATCH)
        estimates = {"double backward, float64": problem.exact()}
        for stretch in STRETCHES:
            for name, bf16 in precisions.items():
                estimates[f"differences at {stretch:g}, {name}"] = problem.differences(
                    stretch, bf16
                )
        for name, estimate in estimates.items():
            cosine = F.cosine_similarity(estimate[: len(slopes)], slopes, dim=0).item()
            cosines.setdefault(name, []).append(cosine)
    print(f"{'cosine with the measured slopes':32} {'median':>8} {'spread':>16}")
    for name, values in cosines.items():
        spread = f"{min(values):.3f}..{max(values):.3f}"
        print(f"{name:32} {statistics.median(values):>8.3f} {spread:>16}")
    ratios = [
        ours / exact
        for ours, exact in zip(
            cosines[f"differences at {FINITE_DIFFERENCE_STEP:g}, {as_used}"],
            cosines["double backward, float64"],
        )
    ]
    bars = [bench.Bar("differences beside double backward", statistics.median(ratios), MIN_RATIO)]
    bench.write_json(args.json, [], bars, machine=machine, cosines=cosines)
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(exit_code(main))
