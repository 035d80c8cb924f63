"""The order of the rows: which rows go into which global batch, computed alike on every rank.

    sampler = Sampler(rows=50_000, seed=0)
    for batch in sampler.epoch(3, batch_size=512):             # global batches, equal on all ranks
        local_rows = rank_share(batch, rank=1, world_size=4)   # the rows that this rank computes

The order is a function of (seed, epoch) alone. There is no random state to save, a run can resume
at any step of any epoch without communication, and W ranks of b rows draw the same global batch as
one rank of W x b rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BATCHES_PER_SORT = 128  # batches whose rows are sorted by length together, see `Sampler`


class Sampler:
    """Shuffles the rows of a training set into global batches.

    With `lengths`, the shuffled rows are cut into groups of 128 batches, the rows of each group are
    sorted by length, and the resulting batches are shuffled: batches hold rows of similar length,
    which need little padding, while their order stays random.

    Args:
        rows: number of samples in the training set.
        seed: seed of the order; the epoch number is mixed in.
        lengths: (rows,) number of tokens of each sample; None where all are equally long.
    """

    def __init__(self, rows: int, seed: int, *, lengths: Tensor | None = None) -> None:
        self.rows = rows
        self.seed = seed
        self.lengths = lengths

    def __len__(self) -> int:
        return self.rows

    def steps(self, batch_size: int) -> int:
        """Return the number of full batches in an epoch."""
        return self.rows // batch_size

    def epoch(self, epoch: int, batch_size: int) -> Tensor:
        """Draw the full batches of one epoch; rows that do not fill a last batch are left out.

        Other rows are left out in every epoch.

        Args:
            epoch: number of the epoch.
            batch_size: rows of a global batch.
        Returns:
            (steps, batch_size) int64 row numbers.
        """
        num_rows = self.steps(batch_size) * batch_size
        return torch.stack(self._shuffled_batches(epoch, batch_size, num_rows=num_rows))

    def whole_epoch(self, epoch: int, batch_size: int, *, min_size: int) -> list[Tensor]:
        """Draw the batches of one epoch, in which every row occurs once.

        Args:
            epoch: number of the epoch.
            batch_size: rows of a full global batch; one batch may be smaller.
            min_size: a smaller batch of fewer rows than this is appended to another batch.
        Returns:
            Row numbers of each batch, (batch,) int64.
        """
        batches = self._shuffled_batches(epoch, batch_size, num_rows=self.rows)
        limit = min(min_size, batch_size)
        too_small = [number for number, batch in enumerate(batches) if len(batch) < limit]
        for number in too_small:
            remainder = batches.pop(number)
            batches[-1] = torch.cat([batches[-1], remainder])
        return batches

    def _shuffled_batches(self, epoch: int, batch_size: int, *, num_rows: int) -> list[Tensor]:
        """Draw `num_rows` rows at random and cut them into batches, one of which may be short."""
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(self.rows, generator=generator)[:num_rows]
        if self.lengths is None:
            return list(order.split(batch_size))
        group = torch.arange(len(order)) // (BATCHES_PER_SORT * batch_size)
        sort_key = group * (int(self.lengths.max()) + 1) + self.lengths[order]
        batches = order[torch.argsort(sort_key, stable=True)].split(batch_size)
        return [batches[number] for number in torch.randperm(len(batches), generator=generator)]


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator whose state depends on (seed, epoch) only."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def rank_share(batch: Tensor, rank: int, *, world_size: int) -> Tensor:
    """Return one rank's rows of a global batch.

    A rank takes every `world_size`-th row, so that long and short rows are spread evenly.
    """
    return batch[rank::world_size]


def row_owners(shares: Sequence[int]) -> Tensor:
    """Assign each row of a global batch to a rank, for ranks that take shares of unequal size.

    The rows of each rank are spread evenly over the batch. Equal shares give 0, 1, ..., 0, 1, ...,
    as in `rank_share`.

    Args:
        shares: number of rows of each rank; their sum is the global batch.
    Returns:
        (sum(shares),) int64, the rank of each position of the batch.
    """
    ranks = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    positions = torch.cat(
        [(torch.arange(share, dtype=torch.float64) + 0.5) / max(share, 1) for share in shares]
    )
    return ranks[torch.argsort(positions, stable=True)]


def stratified_rows(labels: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the same fraction of the rows of each class (at least one), without replacement.

    Args:
        labels: (rows,) class numbers.
        fraction: the fraction to draw, in (0, 1].
        seed: seed of the draw.
    Returns:
        (drawn rows, all other rows), both sorted.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    is_drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows_of_class = order[labels[order] == label]
        count = max(1, round(fraction * len(rows_of_class)))
        is_drawn[rows_of_class[:count]] = True
    return is_drawn.nonzero().flatten(), (~is_drawn).nonzero().flatten()
