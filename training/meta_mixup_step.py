"""Meta-mixup in the training step: before some steps the policy learns from a held-out batch.

meta = MetaMixup(classes=10, device=device)
loss_fn = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), False, observe=meta.observe)
held_out = HeldOutBatches(val, 128, seed=2, world=world)
meta_learner = MetaMixupStep(meta, loss_fn, held_out=held_out, every=32)    # for a Trainer
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from distributed.world import World
from errors import InputError
from input_pipeline.dataset import BatchedDataset
from input_pipeline.sampler import Sampler
from mixup import MetaMixup, Mix
from training.losses import MixedCrossEntropy

if TYPE_CHECKING:
    from training.trainer import Trainer


class HeldOutBatches:
    """Batches of a held-out set without end, each rank its own.

    `start(n)` begins with what would come after n batches.

    Args:
        batch_size: rows of one rank; fewer where the set is too small.
    Raises:
        InputError: the set is too small for BatchNorm.
    """

    def __init__(self, data: BatchedDataset, batch_size: int, *, seed: int, world: World) -> None:
        self.data, self.world = data, world
        self.rows = min(batch_size, len(data) // world.size)
        if self.rows < 2:
            raise InputError(
                f"--mixup meta: {len(data)} held-out rows are too few; use a larger --val_fraction"
            )
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
        every: steps from one update of the policy to the next.
    """

    def __init__(
        self,
        meta: MetaMixup,
        loss_fn: MixedCrossEntropy,
        *,
        held_out: HeldOutBatches,
        every: int = 32,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.meta, self.loss_fn, self.held_out, self.every = meta, loss_fn, held_out, every
        self.steps = 0
        self.batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def begin_step(self, rows: Tensor, *, again: bool) -> None:
        """Called before the batches of a step are mixed: their (batch,) rows of the training set.

        It is called again where memory ran out, and drops what was counted of the rows by then.
        """
        self.meta.rows = rows.to(self.meta.numbers.device, non_blocking=True)
        if again:
            self.meta.row_losses.sums[:, self.meta.rows] = 0

    def before_step(self, trainer: Trainer, inputs: Tensor, labels: Tensor) -> None:
        """Called before each training step; at every `every`-th call the policy learns.

        Parameters, buffers and gradients of the model are left as they are.

        Args:
            inputs, labels: the first micro-batch of the step on this rank.
        """
        self.steps += 1
        if (self.steps - 1) % self.every:
            return
        if self.batches is None:
            self.batches = self.held_out.start((self.steps - 1) // self.every)
        clean_inputs, clean_labels = next(self.batches)
        model = trainer.model

        def mixed_loss(mix: Mix) -> Tensor:
            with trainer.precision.autocast():
                return self.loss_fn.with_mix(mix, model, inputs=inputs, labels=labels).loss

        def clean_loss() -> Tensor:
            with trainer.precision.autocast():
                return self.loss_fn.unmixed(model, clean_inputs, clean_labels).loss

        # Asking the scaler for its number would make the host wait.
        scale = trainer.scaler.scale(torch.ones((), device=labels.device))
        self.meta.learn(
            model,
            labels,
            mixed_loss=mixed_loss,
            clean_loss=clean_loss,
            rate=trainer.last_lr(),
            metric=adam_metric(model, trainer.optimizer),  # of the virtual step, if Adam's
            scale=scale,
        )

    def end_epoch(self) -> dict[str, float]:
        """Ends an epoch of the policy; collective. Returns what it adds to the epoch's row."""
        self.meta.row_losses.end_epoch()
        return {"mix_slope": self.meta.numbers.item()} if self.meta.policy == "loss" else {}

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


def adam_metric(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    """1 / (sqrt(v) + eps) of each parameter that is trained; None unless the optimizer is AdamW.

    v is Adam's second moment, its bias corrected: none before the first step, 0 without gradients.
    """
    if not isinstance(optimizer, torch.optim.AdamW) or not any(optimizer.state.values()):
        return None
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    metric = []
    for p in (p for p in model.parameters() if p.requires_grad):
        state, group = optimizer.state.get(p), groups[p]
        if not state:
            metric.append(torch.zeros_like(p))
            continue
        corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** state["step"])
        metric.append(1 / (corrected.sqrt() + group["eps"]))
    return metric
