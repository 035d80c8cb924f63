"""Meta-mixup in the training step: on every so many steps the mixing policy learns from a held-out batch, then the step is done.

meta = MetaMixup(classes=10, device=device)
task = MixedClassification(lambda labels, height, width: meta.mix(labels), inside=False)
step = Step(model, task, optimizer, precision, world, learner=MetaLearning(meta, task, Held(val, 128, seed, world), every=16))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from distributed.world import World
from errors import InputError
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import Sampler, rank_share
from mixup import MetaMixup, Mix
from training.losses import MixedCrossEntropy, classification
from training.step import Step


class HeldOutBatches:
    """Batches of a held-out set for ever, each rank its own; the same after `start(n)` as after n of them.

    Args:
        data: the set.
        batch_size: rows of one rank; fewer where the set does not hold as many for each.
        seed: of the order.
        world: the ranks.
    """

    def __init__(self, data: BatchedDataset, batch_size: int, seed: int, world: World) -> None:
        self.data, self.world = data, world
        self.rows = min(batch_size, len(data) // world.size)
        if self.rows < 2:  # BatchNorm wants two
            raise InputError(
                f"--mixup meta: {len(data)} held-out rows are too few; use a larger --val_fraction"
            )
        self.sampler = Sampler(len(data), seed, data.lengths)

    def start(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) from the batch of this number on."""
        size = self.rows * self.world.size
        epoch, skip = divmod(number, self.sampler.steps(size))
        while True:
            plan = [
                rank_share(batch, self.world.rank, self.world.size)
                for batch in self.sampler.epoch(epoch, size)[skip:]
            ]
            yield from self.data.batches(plan)
            epoch, skip = epoch + 1, 0


class MetaMixupStep:
    """The `step.MetaLearner` of a MetaMixup.

    Args:
        meta: the policy.
        task: of the step, whose `draw` is `meta.mix`.
        held: clean batches.
        every: steps from one update of the policy to the next.
    """

    def __init__(
        self, meta: MetaMixup, task: MixedCrossEntropy, held: HeldOutBatches, every: int
    ) -> None:
        self.meta, self.task, self.held, self.every = meta, task, held, every
        self.clean = classification(task.label_smoothing)
        self.steps = 0
        self.batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def __call__(self, step: Step, inputs: Tensor, labels: Tensor) -> None:
        """Let the policy learn on the first micro-batch of the step, on every `every`-th call."""
        self.steps += 1
        if (self.steps - 1) % self.every:
            return
        if self.batches is None:
            self.batches = self.held.start((self.steps - 1) // self.every)
        held = next(self.batches)
        splits = step.parts(len(labels))
        mine = inputs.chunk(splits)[0], labels.chunk(splits)[0]

        def mixed_loss(mix: Mix) -> Tensor:
            with step.precision.autocast():
                return self.task.under(mix, step.model, *mine)[0]

        def clean_loss() -> Tensor:
            with step.precision.autocast():
                return self.clean(step.model, *held)[0]

        scale = step.scaler.scale(
            torch.ones((), device=labels.device)
        )  # asked for its number, the scaler would wait
        rate = step.optimizer.param_groups[0]["lr"]
        self.meta.learn(
            step.model,
            mine[1],
            mixed_loss=mixed_loss,
            clean_loss=clean_loss,
            rate=rate,
            scale=scale,
        )

    def tables(self) -> dict[str, Tensor]:
        """As `MetaMixup.tables`."""
        return self.meta.tables()

    def state_dict(self) -> dict[str, Any]:
        """The policy, its optimizer, and how many steps there were."""
        return {"steps": self.steps, **self.meta.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`."""
        self.meta.load_state_dict(state)
        self.steps, self.batches = state["steps"], None
