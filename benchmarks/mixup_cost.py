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

# Share of a step: the batch is read twice, its activations hundreds of times.
PLAIN_SHARE = 0.02
# Share of a step with 16 steps between updates, the default: ten passes of a third of a step each.
META_SHARE = 0.30
PEER = 1.0  # at least as fast as theirs

EVERY = 16
META_EVERY_STEP = "meta, every step"
QUICK_STEPS = 4  # of a kind without a policy in a round of --quick
CLASSES = 10
WORDS = 30_000  # of the vocabulary
PEER_BATCH, SIZES = 128, (32, 224)
ALPHA = 1.0


@dataclass(frozen=True)
class Model:
    """A model with its batches, and the kinds of mixing that it is measured with."""

    name: str
    make: Callable[[], nn.Module]
    kinds: Sequence[str]  # besides meta-mixup
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
        kinds=("mixup", "intra"),
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
        kinds=("mixup", "intra", "attention", "cutmix"),
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


def step_of(model: Model, kind: str, batch: int, *, every: int = EVERY) -> Callable[[], None]:
    """Return the training step of the scripts on one batch; `every` of them updates the policy."""
    world, network = World(), model.make()
    loss_fn: LossFn = CrossEntropy()
    meta_learner = None
    if kind == "meta":
        meta = mixup.MetaMixup(CLASSES)
        loss_fn = mixed = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), model.mixes)
        held_out = HeldOutBatches(RandomHeldOut(model.inputs), batch, seed=0, world=world)
        meta_learner = MetaMixupStep(meta, mixed, held_out=held_out, every=every)
    elif kind != "none":
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
    return partial(trainer.train_step, model.inputs(batch), labels)


def repeated(call: Callable[[], object], times: int, *, warm_up: int = 1) -> Callable[[], float]:
    """Return a function that measures the mean seconds of several calls, after a warm-up."""
    for _ in range(warm_up):
        call()
    return lambda: clock(lambda: [call() for _ in range(times)]) / times


def step_sides(model: Model, batch: int, plain_steps: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure the mean seconds of a step, by kind of mixing.

    In a round a kind without a policy takes `plain_steps`.
    """
    sides = {
        kind: repeated(step_of(model, kind, batch), plain_steps) for kind in ("none", *model.kinds)
    }
    # Each measured call is to see the same number of the policy's updates.
    for name, every, steps in (("meta", EVERY, EVERY), (META_EVERY_STEP, 1, 2)):
        step = step_of(model, "meta", batch, every=every)
        sides[name] = repeated(step, steps, warm_up=steps)
    return sides


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

    def mix(kind: str) -> None:
        drawn = mixup.sample_mix(kind, labels, alpha=ALPHA, height=32, width=32)
        mixed = mixup.blend(hidden, drawn)
        mixup.cross_entropy(logits, labels, mix=drawn).backward()
        if model.mixes:
            mixed.backward(mixed.detach())
        mixup.num_correct(logits, labels, mix=drawn)

    calls = {"none": none, **{kind: partial(mix, kind) for kind in model.kinds}}
    return {name: repeated(call, 10) for name, call in calls.items()}


def peer_sides(size: int) -> dict[str, Callable[[], float]]:
    """Return functions that measure mixing and loss of a batch of images, ours and theirs."""
    import timm.data
    import timm.loss

    images = torch.randn(PEER_BATCH, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (PEER_BATCH,))
    logits = torch.randn(PEER_BATCH, CLASSES, requires_grad=True)
    timm_loss = timm.loss.SoftTargetCrossEntropy()
    timm_mix = partial(timm.data.Mixup, label_smoothing=0.0, num_classes=CLASSES)
    vision_mix = {"alpha": ALPHA, "num_classes": CLASSES}
    peers = {
        "mixup timm": (timm_mix(ALPHA, 0.0), timm_loss),
        "mixup torchvision": (v2.MixUp(**vision_mix), F.cross_entropy),
        "cutmix timm": (timm_mix(0.0, ALPHA), timm_loss),
        "cutmix torchvision": (v2.CutMix(**vision_mix), F.cross_entropy),
    }

    def ours(kind: str) -> None:
        mix = mixup.sample_mix(kind, labels, alpha=ALPHA, height=size, width=size)
        mixup.blend(images, mix)
        mixup.cross_entropy(logits, labels, mix=mix).backward()

    def theirs(mix: Callable[..., tuple[Tensor, Tensor]], loss: Callable[..., Tensor]) -> None:
        _, soft = mix(images, labels)
        loss(logits, soft).backward()

    calls: dict[str, Callable[[], None]]
    calls = {f"{kind} ours": partial(ours, kind) for kind in ("mixup", "cutmix")}
    calls |= {name: partial(theirs, mix, loss) for name, (mix, loss) in peers.items()}
    return {name: repeated(call, 20 if size < 64 else 2) for name, call in calls.items()}


def measure_model(
    model: Model, quick: bool, *, deadline: float
) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print the table of a model and return its rows and bars."""
    batch, rounds = model.batch[quick], model.rounds[quick]
    sides = step_sides(model, batch, QUICK_STEPS if quick else EVERY)
    steps = bench.take_turns(sides, rounds, {META_EVERY_STEP}, deadline=deadline)
    alone = {
        name: statistics.median(taken)
        for name, taken in bench.take_turns(without_model(model, batch), 30).items()
    }
    none = steps.pop("none")
    step = statistics.median(none)
    print(
        f"\n{model.name}, batch {batch}: {1e3 * step:.1f} ms/step without mixing, "
        f"{len(none)} rounds"
    )
    lines = [["", "step, x none", "spread", "alone, % of a step"]]
    rows, bars = [], []
    for name, taken in steps.items():
        # The inverse of a row's ratios, which are of rates: the step as a multiple of none.
        rows.append(bench.Row.of_seconds(f"{model.name} {name}", taken, none[: len(taken)]))
        ratios = [1 / ratio for ratio in rows[-1].ratios]
        cells = [f"{statistics.median(ratios):.3f}", bench.spread(ratios, 3)]
        if name in alone:
            share = (alone[name] - alone["none"]) / step
            cells.append(f"{100 * share:.2f}")
            bars.append(bench.Bar(f"{model.name} {name} share", share, PLAIN_SHARE, at_most=True))
        if name == "meta":
            cost = statistics.median(ratios) - 1
            bars.append(bench.Bar(f"{model.name} meta cost", cost, META_SHARE, at_most=True))
        lines.append([name, *cells, *([""] * (3 - len(cells)))])
    print(bench.aligned(lines))
    return rows, bars


def measure_peers(
    size: int, quick: bool, *, deadline: float
) -> tuple[list[bench.Row], list[bench.Bar]]:
    """Print the table of the peers and return its rows and bars."""
    seconds = bench.take_turns(peer_sides(size), 15 if quick else 41, deadline=deadline)
    rows = [
        bench.Row.of_seconds(
            f"{kind} {size}px / {peer}", seconds[f"{kind} ours"], seconds[f"{kind} {peer}"]
        )
        for kind in ("mixup", "cutmix")
        for peer in ("timm", "torchvision")
    ]
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
        partial(measure_model, model) for model in MODELS
    ]
    budget = bench.Budget(args.quick, len(measurements))
    for measure in measurements:
        more_rows, more_bars = measure(args.quick, deadline=budget.next_deadline())
        rows += more_rows
        bars += more_bars
    print()
    return bench.finish(args, bars, rows=rows, machine=machine)


if __name__ == "__main__":
    sys.exit(exit_code(main))
