"""What mixing costs, as a share of a training step.

python -m benchmarks.mixup_cost --quick                  # at most five minutes on two cores
python -m benchmarks.mixup_cost --json mixup-cost.json   # larger batch, more rounds

Steps: ResNet-18 on 32x32 images and the Transformer on 64 tokens, a training step without mixing,
with mixup and with meta-mixup. They take turns; in a round each takes 32 steps (those without a
policy 4 with --quick), with one update of the policy of meta-mixup. Mixup costs less than rounds
differ from each other, so its bar is the time of mixing and loss alone, without the model, over the
median step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixup
from backends.device import keep_freed_memory, set_num_threads
from backends.precision import choose_precision
from benchmarks import bench, trainers
from distributed.world import World
from errors import exit_code
from models import image_models
from models.transformer import Transformer
from optimizers.param_groups import decay_groups
from optimizers.torch_fused import fused_adamw, fused_sgd
from training.losses import CrossEntropy, LossFn, MixedCrossEntropy
from training.meta_mixup_step import HeldOutBatches, MetaMixupStep

# Share of a step: the batch is read twice, its activations hundreds of times.
PLAIN_SHARE = 0.02
# Share of a step with 32 steps between updates, the default
META_SHARE = 0.15

EVERY = 32  # steps between updates of the policy
QUICK_STEPS = 4  # of a kind without a policy in a round of --quick
CLASSES = 10
WORDS = 30_000  # of the vocabulary
ALPHA = 1.0


@dataclass(frozen=True)
class Model:
    """A model with its batches."""

    name: str
    make: Callable[[], nn.Module]
    mixed_shape: tuple[int, ...]  # of one sample, where it is mixed
    mixes: bool  # the model mixes, and not what it is given
    make_optimizer: Callable[..., torch.optim.Optimizer]
    batch: dict[bool, int]  # with --quick and without, as the rounds
    rounds: dict[bool, int]

    def inputs(self, size: int) -> Tensor:
        """Draw a random batch."""
        if self.mixes:
            return torch.randint(3, WORDS, (size, 64))
        return torch.randn(size, 3, 32, 32).to(memory_format=torch.channels_last)


def resnet() -> nn.Module:
    model = image_models.create_model("resnet18", classes=CLASSES, channels=3, image_size=32)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def transformer(mix_at: str, *mixed_shape: int) -> Model:
    return Model(
        f"Transformer, {mix_at}",
        partial(Transformer, WORDS, CLASSES, dropout=0.3, token_dropout=0.5, mix_at=mix_at),
        mixed_shape=mixed_shape,
        mixes=True,
        make_optimizer=fused_adamw,
        batch={True: 64, False: 128},
        rounds={True: 7, False: 15},
    )


MODELS = (  # with the sizes of the scripts
    Model(
        "ResNet-18",
        resnet,
        mixed_shape=(3, 32, 32),
        mixes=False,
        make_optimizer=fused_sgd,
        batch={True: 16, False: 64},
        rounds={True: 5, False: 7},
    ),
    transformer("pooled", 128),
    transformer("tokens", 64, 128),
)


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


def step_of(model: Model, kind: str, batch: int) -> Callable[[], None]:
    """Return the training step of the scripts on one batch."""
    world, network = World(), model.make()
    loss_fn: LossFn = CrossEntropy()
    meta_learner = None
    if kind == "meta":
        meta = mixup.MetaMixup(CLASSES, rows=batch)
        loss_fn = mixed = MixedCrossEntropy(
            lambda labels, **size: meta.mix(labels), model.mixes, observe=meta.observe
        )
        held_out = HeldOutBatches(RandomHeldOut(model.inputs), batch, seed=0, world=world)
        meta_learner = MetaMixupStep(meta, mixed, held_out=held_out, every=EVERY)
    elif kind == "mixup":
        loss_fn = MixedCrossEntropy(partial(mixup.sample_mix, kind, alpha=ALPHA), model.mixes)
    trainer = trainers.step_trainer(
        network.train(),
        model.make_optimizer(decay_groups(network, 0.0), lr=1e-3),
        world,
        loss_fn=loss_fn,
        precision=choose_precision("auto", world.device),
        meta_learner=meta_learner,
    )
    labels = torch.randint(CLASSES, (batch,))
    return partial(trainer.train_step, model.inputs(batch), labels, rows=torch.arange(batch))


def repeated(call: Callable[[], object], times: int, *, warm_up: int = 1) -> Callable[[], float]:
    """Return a function that measures the mean seconds of several calls, after a warm-up."""
    for _ in range(warm_up):
        call()
    return lambda: bench.clock(lambda: [call() for _ in range(times)]) / times


def step_sides(model: Model, batch: int, plain_steps: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure the mean seconds of a step, by kind of mixing.

    In a round a kind without a policy takes `plain_steps`.
    """
    return {
        "none": repeated(step_of(model, "none", batch), plain_steps),
        "mixup": repeated(step_of(model, "mixup", batch), plain_steps),
        # Each measured call sees one update of the policy.
        "meta": repeated(step_of(model, "meta", batch), EVERY, warm_up=EVERY),
    }


def without_model(model: Model, batch: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure mixing and loss, forward and backward, without the model."""
    labels = torch.randint(CLASSES, (batch,))
    hidden = torch.randn(batch, *model.mixed_shape)
    logits = torch.randn(batch, CLASSES, requires_grad=True)
    if len(model.mixed_shape) == 3:
        hidden = hidden.to(memory_format=torch.channels_last)
    hidden.requires_grad_(model.mixes)

    def none() -> None:
        F.cross_entropy(logits, labels).backward()

    def mix() -> None:
        drawn = mixup.sample_mix("mixup", labels, alpha=ALPHA, height=32, width=32)
        mixed = mixup.blend(hidden, drawn)
        mixup.cross_entropy(logits, labels, mix=drawn).backward()
        if model.mixes:
            mixed.backward(mixed.detach())
        mixup.num_correct(logits, labels, mix=drawn)

    return {"none": repeated(none, 10), "mixup": repeated(mix, 10)}


def measure(
    model: Model, quick: bool, *, deadline: float
) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print the table of a model and return its rows and bars."""
    batch, rounds = model.batch[quick], model.rounds[quick]
    sides = step_sides(model, batch, QUICK_STEPS if quick else EVERY)
    steps = bench.take_turns(sides, rounds, deadline=deadline)
    alone = bench.take_turns(without_model(model, batch), 30)
    none = steps.pop("none")
    step = statistics.median(none)
    print(
        f"\n{model.name}, batch {batch}: {1e3 * step:.1f} ms/step without mixing, "
        f"{len(none)} rounds"
    )
    lines, rows, costs = [["", "step, x none", "spread"]], [], {}
    for name, taken in steps.items():
        # A row's ratio of the rates, none over the other's, is the other's time in units of none's.
        rows.append(bench.Row.of_seconds(f"{model.name} {name}", none, taken))
        costs[name] = rows[-1].ratio - 1
        lines.append([name, f"{rows[-1].ratio:.3f}", bench.spread(rows[-1].ratios, 3)])
    print(bench.aligned(lines))
    share = (statistics.median(alone["mixup"]) - statistics.median(alone["none"])) / step
    print(f"mixup alone: {100 * share:.2f} % of a step")
    return rows, [
        bench.Bar(f"{model.name} mixup share", share, PLAIN_SHARE, at_most=True),
        bench.Bar(f"{model.name} meta cost", costs["meta"], META_SHARE, at_most=True),
    ]


def main() -> int:
    args = bench.parser(__doc__).parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    set_num_threads(0, 1)
    machine = bench.machine(torch.device("cpu"), ["torch"])
    print(machine)
    rows: list[bench.Row] = []
    bars: list[bench.Bar] = []
    budget = bench.Budget(args.quick, len(MODELS))
    for model in MODELS:
        more_rows, more_bars = measure(model, args.quick, deadline=budget.next_deadline())
        rows += more_rows
        bars += more_bars
    print()
    return bench.finish(args, bars, rows=rows, machine=machine)


if __name__ == "__main__":
    sys.exit(exit_code(main))
