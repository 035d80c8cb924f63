"""What mixing costs: as a share of a training step, and compared with timm and torchvision.

python -m benchmarks.mixup_cost --quick                  # at most five minutes on two cores
python -m benchmarks.mixup_cost --json mixup-cost.json   # larger batch, more rounds

Steps: ResNet-18 on 32x32 images and the Transformer on 64 tokens, a training step with each kind of
mixing. The kinds take turns; in a round each takes 16 steps (those without a policy 4 with
--quick), with one update of the policy of meta-mixup, which is also measured with an update on
every step, as in its paper. Other kinds cost less than rounds differ from each other, so their bar
is the time of mixing and loss alone, without the model, over the median step.

Peers: timm's Mixup and torchvision's MixUp and CutMix mix a batch of images and compute the loss of
given logits, forward and backward, with one lambda or box per batch.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import v2

import mixup
from backends.device import keep_freed_memory, set_num_threads
from backends.precision import choose_precision
from benchmarks import bench, trainers
from benchmarks.stepping import clock
from distributed.world import World
from errors import exit_code
from models import image_models
from models.transformer import Transformer
from optimizers.param_groups import decay_groups
from optimizers.torch_fused import fused_adamw, fused_sgd
from training.losses import CrossEntropy, LossFn, MixedCrossEntropy
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep
from training.trainer import Trainer

# Share of a step: the batch is read twice, its activations hundreds of times.
PLAIN_SHARE = 0.02
# Share of a step with 16 steps between updates, the default: ten passes of a third of a step each.
META_SHARE = 0.30
PEER = 1.0  # at least as fast as theirs

EVERY = 16
QUICK_STEPS = 4  # of a kind without a policy in a round of --quick
CLASSES = 10
PEER_BATCH, SIZES = 128, (32, 224)
ALPHA = 1.0


@dataclass(frozen=True)
class Model:
    """A model with its batches, and the kinds of mixing that it is measured with."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    kinds: dict[str, tuple[str, bool]]  # name -> (kind of mixing, whether the model mixes)
    mixed_shape: tuple[int, ...]  # of one sample, where it is mixed
    optimizer: str
    batch: int
    quick_batch: int


def models() -> list[Model]:
    """Return ResNet-18 and the Transformer with the sizes of the scripts."""

    def images(size: int) -> Tensor:
        return torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last)

    def texts(mix_at: str) -> nn.Module:
        return Transformer(30_000, CLASSES, dropout=0.3, token_dropout=0.5, mix_at=mix_at)

    plain = {kind: (kind, False) for kind in ("mixup", "intra", "attention", "cutmix", "meta")}
    mixed_by_model = {kind: (kind, True) for kind in ("mixup", "intra", "meta")}
    return [
        Model(
            "ResNet-18",
            lambda: image_models.create_model(
                "resnet18", classes=CLASSES, channels=3, image_size=32
            ).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            images,
            plain,
            (3, 32, 32),
            "sgd",
            64,
            16,
        ),
        Model(
            "Transformer, pooled",
            partial(texts, "pooled"),
            tokens,
            mixed_by_model,
            (128,),
            "adamw",
            128,
            64,
        ),
        Model(
            "Transformer, tokens",
            partial(texts, "tokens"),
            tokens,
            mixed_by_model,
            (64, 128),
            "adamw",
            128,
            64,
        ),
    ]


def tokens(size: int) -> Tensor:
    return torch.randint(3, 30_000, (size, 64))


class RandomHeldOut:
    """A held-out set of random samples."""

    lengths = None

    def __init__(self, inputs: Callable[[int], Tensor]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 4096

    def batches(
        self, plan: Sequence[Tensor], epoch: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in plan:
            yield self.inputs(len(rows)), rows % CLASSES


def make_trainer(model: Model, kind: str, every: int, model_mixes: bool, batch: int) -> Trainer:
    """Return a trainer that takes the training steps of the scripts."""
    world, network = World(), model.make()
    loss_fn: LossFn = CrossEntropy()
    meta_learner = None
    if kind == "meta":
        meta = mixup.MetaMixup(CLASSES)
        loss_fn = mixed = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), model_mixes)
        held_out = HeldOutBatches(RandomHeldOut(model.inputs), batch, seed=0, world=world)
        meta_learner = MetaMixupStep(meta, mixed, held_out=held_out, every=every)
    elif kind != "none":
        loss_fn = MixedCrossEntropy(partial(mixup.sample_mix, kind, alpha=ALPHA), model_mixes)
    make = {"sgd": fused_sgd, "adamw": fused_adamw}[model.optimizer]
    return trainers.step_trainer(
        network.train(),
        make(decay_groups(network, 0.0), lr=1e-3),
        world,
        loss_fn=loss_fn,
        precision=choose_precision("auto", world.device),
        meta_learner=meta_learner,
    )


def step_sides(model: Model, batch: int, plain_steps: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure the mean seconds of a step, by kind of mixing.

    Args:
        model: what is trained.
        batch: its batch size.
        plain_steps: steps of a kind without a policy in a round.
    """
    inputs, labels = model.inputs(batch), torch.randint(CLASSES, (batch,))

    def side(trainer: Trainer, steps: int) -> Callable[[], float]:
        step = partial(trainer.train_step, inputs, labels)
        step()
        # With a meta-learner each measured call is to see the same number of its updates.
        for _ in range(steps - 1 if trainer.meta_learner is not None else 0):
            step()
        return lambda: clock(lambda: [step() for _ in range(steps)]) / steps

    sides = {"none": side(make_trainer(model, "none", 1, False, batch), plain_steps)}
    for name, (kind, model_mixes) in model.kinds.items():
        steps = EVERY if kind == "meta" else plain_steps
        sides[name] = side(make_trainer(model, kind, EVERY, model_mixes, batch), steps)
    sides["meta, every step"] = side(
        make_trainer(model, "meta", 1, model.kinds["meta"][1], batch), 2
    )
    return sides


def without_model(model: Model, batch: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure mixing and loss, forward and backward, without the model."""
    labels = torch.randint(CLASSES, (batch,))
    hidden = torch.randn(batch, *model.mixed_shape)
    logits = torch.randn(batch, CLASSES, requires_grad=True)
    model_mixes = model.kinds["meta"][1]
    if len(model.mixed_shape) == 3:
        hidden = hidden.to(memory_format=torch.channels_last)
    hidden.requires_grad_(model_mixes)

    def none() -> None:
        F.cross_entropy(logits, labels).backward()

    def mix(kind: str) -> None:
        drawn = mixup.sample_mix(kind, labels, alpha=ALPHA, height=32, width=32)
        mixed = mixup.blend(hidden, drawn)
        loss = mixup.cross_entropy(logits, labels, mix=drawn)
        torch.autograd.backward(
            [loss, mixed] if model_mixes else [loss],
            [None, mixed.detach()] if model_mixes else [None],
        )
        mixup.num_correct(logits, labels, mix=drawn)

    calls = {
        "none": none,
        **{name: partial(mix, kind) for name, (kind, _) in model.kinds.items() if kind != "meta"},
    }
    return {name: partial(repeated, call) for name, call in calls.items()}


def repeated(call: Callable[[], Any], times: int = 10) -> float:
    """Return the mean seconds of a call."""
    return clock(lambda: [call() for _ in range(times)]) / times


def peer_sides(size: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure mixing and loss of a batch of images, ours and theirs."""
    import timm.data
    import timm.loss

    images = torch.randn(PEER_BATCH, 3, size, size).to(memory_format=torch.channels_last)
    labels, logits = (
        torch.randint(CLASSES, (PEER_BATCH,)),
        torch.randn(PEER_BATCH, CLASSES, requires_grad=True),
    )
    soft_loss = timm.loss.SoftTargetCrossEntropy()
    timm_mixes = {
        "mixup": timm.data.Mixup(ALPHA, 0.0, label_smoothing=0.0, num_classes=CLASSES),
        "cutmix": timm.data.Mixup(0.0, ALPHA, label_smoothing=0.0, num_classes=CLASSES),
    }
    vision_mixes = {
        "mixup": v2.MixUp(alpha=ALPHA, num_classes=CLASSES),
        "cutmix": v2.CutMix(alpha=ALPHA, num_classes=CLASSES),
    }

    def ours(kind: str) -> None:
        mix = mixup.sample_mix(kind, labels, alpha=ALPHA, height=size, width=size)
        mixup.blend(images, mix)
        mixup.cross_entropy(logits, labels, mix=mix).backward()

    def theirs(
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        _, soft = mix(images, labels)
        loss(logits, soft).backward()

    sides: dict[str, Callable[[], Any]] = {}
    for kind in ("mixup", "cutmix"):
        sides[f"{kind} ours"] = partial(ours, kind)
        sides[f"{kind} timm"] = partial(theirs, timm_mixes[kind], soft_loss)
        sides[f"{kind} torchvision"] = partial(theirs, vision_mixes[kind], F.cross_entropy)
    return {name: partial(repeated, call, 20 if size < 64 else 2) for name, call in sides.items()}


def row(name: str, ours: list[float], peer: list[float]) -> bench.Row:
    """Return a row of rates from seconds."""
    return bench.Row(name, [1 / taken for taken in ours], [1 / taken for taken in peer])


def measure_model(
    model: Model, quick: bool, *, deadline: float
) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print the table of a model and return its rows and bars."""
    batch = model.quick_batch if quick else model.batch
    rounds = (5 if quick else 7) if model.optimizer == "sgd" else (7 if quick else 15)
    sides = step_sides(model, batch, QUICK_STEPS if quick else EVERY)
    steps = bench.take_turns(sides, rounds, {"meta, every step"}, deadline=deadline)
    mixing_seconds = bench.take_turns(without_model(model, batch), 30)
    median = {name: statistics.median(taken) for name, taken in steps.items()}
    print(
        f"\n{model.name}, batch {batch}: {1e3 * median['none']:.1f} ms/step without mixing, "
        f"{len(steps['none'])} rounds"
    )
    print(f"{'':18} {'step, x none':>13} {'spread':>14} {'alone, % of a step':>19}")
    rows, bars = [], []
    for name in [name for name in steps if name != "none"]:
        ratios = [taken / none for taken, none in zip(steps[name], steps["none"])]
        rows.append(row(f"{model.name} {name}", steps[name], steps["none"][: len(steps[name])]))
        spread, share = f"{min(ratios):.3f}..{max(ratios):.3f}", ""
        if name in mixing_seconds:
            extra = statistics.median(mixing_seconds[name]) - statistics.median(
                mixing_seconds["none"]
            )
            share = f"{100 * extra / median['none']:.2f}"
            bars.append(
                bench.Bar(
                    f"{model.name} {name} share", extra / median["none"], PLAIN_SHARE, at_most=True
                )
            )
        print(f"{name:18} {statistics.median(ratios):>13.3f} {spread:>14} {share:>19}")
        if name == "meta":
            bars.append(
                bench.Bar(
                    f"{model.name} meta cost",
                    statistics.median(ratios) - 1,
                    META_SHARE,
                    at_most=True,
                )
            )
    return rows, bars


def measure_peers(
    size: int, quick: bool, *, deadline: float
) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print the table of the peers and return its rows and bars."""
    seconds = bench.take_turns(peer_sides(size), 15 if quick else 41, deadline=deadline)
    rows = []
    for kind in ("mixup", "cutmix"):
        for peer in ("timm", "torchvision"):
            rows.append(
                row(f"{kind} {size}px / {peer}", seconds[f"{kind} ours"], seconds[f"{kind} {peer}"])
            )
    print(f"\n{PEER_BATCH} images of {size}x{size}, mixing and loss")
    print(bench.table(rows, "theirs", "batches/s"))
    return rows, [bench.Bar(each.name, each.ratio, PEER) for each in rows]


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    set_num_threads(0, 1)
    machine = bench.machine(torch.device("cpu"), ("torch", "torchvision", "timm"))
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    measurements = [partial(measure_peers, size) for size in SIZES] + [
        partial(measure_model, model) for model in models()
    ]
    budget = bench.Budget(args.quick, len(measurements))
    for measure in measurements:
        more_rows, more_bars = measure(args.quick, deadline=budget.next_deadline())
        rows += more_rows
        bars += more_bars
    print()
    bench.write_json(args.json, rows, bars, machine=machine)
    return bench.verdict(bars)


if __name__ == "__main__":
    sys.exit(exit_code(main))
