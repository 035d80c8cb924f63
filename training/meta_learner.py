"""Meta-mixup in the training loop: held-out rows say after each epoch how many labels are wrong.

meta = MetaMixup(len(train), device=device)
loss_fn = MixedCrossEntropy(lambda labels, **size: meta.mix(labels), False, observe=meta.observe)
meta_learner = MetaLearner(meta, held_out, until=14)                      # for a Trainer
"""

from typing import Any

import torch
from torch import Tensor, nn

from distributed.world import World
from input_pipeline.dataset import BatchedDataset
from mixup import MetaMixup
from training.evaluation import outputs


class MetaLearner:
    """Lets a mixing policy learn beside the model.

    Args:
        held_out: rows that are not trained on as long as the policy learns.
        until: number of the first epoch, counted from 0, in which it learns no more.
    """

    def __init__(self, meta: MetaMixup, held_out: BatchedDataset, *, until: int) -> None:
        self.meta, self.held_out, self.until = meta, held_out, until
        self.is_over = False  # the held-out rows have been trained on
        excess = meta.row_losses.excess
        self.buffer = torch.zeros_like(excess, dtype=torch.long)  # where recorded steps read rows

    def begin_step(self, rows: Tensor, *, again: bool) -> None:
        """Called before the batches of a step are mixed: their (batch,) rows of the training set.

        It is called again where memory ran out, and drops what was counted of the rows by then.
        """
        self.meta.rows = self.buffer[: len(rows)]
        self.meta.rows.copy_(rows, non_blocking=True)
        if again:
            self.meta.row_losses.sums[:, self.meta.rows] = 0

    def mixes(self, epoch: int) -> bool:
        """Whether the samples of an epoch, counted from 0, are mixed; asked at its start."""
        self.is_over |= epoch >= self.until
        return self.meta.wrong > 0

    def end_epoch(self, model: nn.Module, *, world: World, **how: Any) -> dict[str, float]:
        """End an epoch of the policy by `outputs`; return what it adds to the row; collective."""
        self.meta.row_losses.end_epoch()
        if not self.is_over:
            found = [torch.empty(3, 0, dtype=torch.float64)]
            for _, logits, labels in outputs(model, self.held_out, world=world, **how):
                confidence, predicted = logits.softmax(1).max(1)
                columns = [each.double() for each in (predicted, confidence, labels)]
                found.append(torch.stack(columns).cpu())
            of_ranks = torch.cat(world.all_gather(torch.cat(found, 1)), 1)
            predicted, confidence, labels = of_ranks.unbind()
            self.meta.learn(predicted.long(), confidence, labels.long())
        return {"wrong_labels": self.meta.wrong}

    def describe(self, number: int) -> str:
        """What is done from the epoch of a number on, counted from 1, as a line of the log."""
        has_joined = number > self.until
        mixed = "nothing is mixed"
        if self.meta.wrong:
            mixed = f"samples are mixed, as about {self.meta.wrong:.0%} of the labels are wrong"
        rows = f"; {len(self.held_out)} held-out rows are trained on" if has_joined else ""
        return f"from epoch {number} on {mixed}{rows}"

    def state_dict(self) -> dict[str, Any]:
        return {**self.meta.state_dict(), "is_over": self.is_over, "until": self.until}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.meta.load_state_dict(state)
        self.is_over = state["is_over"]
        if self.is_over:  # also of a run that is made longer
            self.until = state["until"]

    def rank_state_dict(self) -> dict[str, Tensor]:
        """What is this rank's own; those of all ranks may be added up."""
        return {"sums": self.meta.row_losses.sums.cpu()}

    def load_rank_state_dict(self, state: dict[str, Tensor]) -> None:
        self.meta.row_losses.sums.copy_(state["sums"])
