"""Meta-mixup in the training step: before some steps the policy learns from a held-out batch.

meta = MetaMixup(len(train), device=device)
loss_fn = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), False, observe=meta.observe)
held_out = HeldOutBatches(val, 128, seed=2, world=world)
meta_learner = MetaMixupStep(meta, loss_fn, held_out=held_out, every=16)    # for a Trainer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distributed.world import World
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import Sampler
from mixup import MetaMixup, Mix, mean_doubt
from training.losses import MixedCrossEntropy, at_least_fp32

if TYPE_CHECKING:
    from training.trainer import Trainer


class HeldOutBatches:
    """Batches of a held-out set without end, each rank its own.

    `start(n)` begins with what would come after n batches.

    Args:
        batch_size: rows of one rank; fewer where the set is too small.
    Raises:
        ValueError: the set is too small for BatchNorm.
    """

    def __init__(self, data: BatchedDataset, batch_size: int, *, seed: int, world: World) -> None:
        self.data, self.world = data, world
        self.rows = min(batch_size, len(data) // world.size)
        if self.rows < 2:
            raise ValueError(f"{len(data)} held-out rows are too few; give a larger held_out")
        self.sampler = Sampler(len(data), seed, lengths=data.lengths)

    def start(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels), beginning with the batch of this number."""
        batch_size = self.rows * self.world.size
        sizes = [batch_size] * (len(self.sampler) // batch_size)
        epoch, skip = divmod(number, len(sizes))
        while True:
            batches = self.sampler.epoch(epoch, sizes)[skip:]  # the rows left over differ by epoch
            yield from self.data.batches(
                [rows[self.world.rank :: self.world.size] for rows in batches]
            )
            epoch, skip = epoch + 1, 0


class MetaMixupStep:
    """Lets a mixing policy learn beside the model.

    Args:
        loss_fn: of the training step; its mixes come from `meta`.
        every: steps from one trial of the policy to the next.
        until: number of the first epoch, counted from 0, in which it learns no more; None is none.
    """

    def __init__(
        self,
        meta: MetaMixup,
        loss_fn: MixedCrossEntropy,
        *,
        held_out: HeldOutBatches,
        every: int = 16,
        until: int | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.meta, self.loss_fn, self.held_out = meta, loss_fn, held_out
        self.every, self.until = every, until
        self.steps = 0
        self.batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def begin_step(self, rows: Tensor, *, again: bool) -> None:
        """Called before the batches of a step are mixed: their (batch,) rows of the training set.

        It is called again where memory ran out, and drops what was counted of the rows by then.
        """
        self.meta.rows = rows.to(self.meta.slope.device, non_blocking=True)
        if again:
            self.meta.row_losses.sums[:, self.meta.rows] = 0

    def before_step(self, trainer: Trainer, inputs: Tensor, labels: Tensor) -> None:
        """Called before each training step; at every `every`-th call the policy learns.

        Args:
            inputs, labels: the first micro-batch of the step on this rank.
        """
        number, rest = divmod(self.steps, self.every)
        self.steps += 1
        is_over = self.until is not None and trainer.progress.epoch >= self.until
        if rest or is_over or not self.meta.row_losses.is_known:
            return
        if self.batches is None:
            self.batches = self.held_out.start(number)
        held_inputs, held_labels = next(self.batches)
        model = trainer.model

        def mixed_loss(mix: Mix) -> Tensor:
            with trainer.precision.autocast():
                return self.loss_fn.with_mix(mix, model, inputs=inputs, labels=labels).loss

        def measure() -> Tensor:
            with trainer.precision.autocast():
                logits = at_least_fp32(model(held_inputs))
            return mean_doubt(logits, held_labels)

        # Asking the scaler for its number would make the host wait.
        scale = trainer.scaler.scale(torch.ones((), device=labels.device))
        self.meta.learn(
            model,
            trainer.optimizer,
            labels,
            mixed_loss=mixed_loss,
            measure=measure,
            scale=scale,
            max_grad_norm=trainer.config.max_grad_norm,
        )

    def end_epoch(self) -> dict[str, float]:
        """Ends an epoch of the policy; collective. Returns what it adds to the epoch's row."""
        self.meta.row_losses.end_epoch()
        return {"mix_slope": self.meta.slope.item()}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, **self.meta.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meta.load_state_dict(state)
        self.steps, self.batches = state["steps"], None

    def rank_state_dict(self) -> dict[str, Tensor]:
        """What is this rank's own; those of all ranks may be added up."""
        return {"sums": self.meta.row_losses.sums.cpu()}

    def load_rank_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `rank_state_dict` returned."""
        self.meta.row_losses.sums.copy_(state["sums"])
