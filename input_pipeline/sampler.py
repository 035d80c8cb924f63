"""Which rows go into which batch: every rank computes it alike, without communication.

    sampler = Sampler(rows=50_000, seed=0)
    for batch in sampler.epoch(3, batch_size=512):     # global batches, the same on every rank
        mine = rank_share(batch, rank=1, world_size=4)      # or batch[row_owners([200, 100, 100, 112]) == 1]

The order is a function of (seed, epoch) alone: no random state to save, a run resumes at any step of any epoch, and
W ranks of b rows draw the same global batch as one rank of W b rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 128  # batches that are sorted by length together: padding falls, the order stays random


class Sampler:
    """Shuffles rows into global batches; rows of similar length go together when `lengths` is given.

    Args:
        rows: number of samples in the training set.
        seed: of the order; the epoch number is mixed in.
        lengths: (rows,) number of tokens of each sample, or None.
    """

    def __init__(self, rows: int, seed: int, lengths: Tensor | None = None) -> None:
        self.rows = rows
        self.seed = seed
        self.lengths = lengths

    def __len__(self) -> int:
        return self.rows

    def steps(self, batch_size: int) -> int:
        """Steps in an epoch; the rows that do not fill a last batch wait for another epoch's order."""
        return self.rows // batch_size

    def epoch(self, epoch: int, batch_size: int) -> Tensor:
        """Row numbers of every global batch of one epoch: (steps, batch_size) int64."""
        return torch.stack(self.batches(epoch, batch_size, self.steps(batch_size) * batch_size))

    def whole_epoch(self, epoch: int, batch_size: int, least: int) -> list[Tensor]:
        """As `epoch`, but every row comes: those left over make a smaller batch; fewer than `least` join another."""
        batches = self.batches(epoch, batch_size, self.rows)
        short = [
            number for number, batch in enumerate(batches) if len(batch) < min(least, batch_size)
        ]
        for number in short:
            rest = batches.pop(number)
            batches[-1] = torch.cat([batches[-1], rest])
        return batches

    def batches(self, epoch: int, batch_size: int, rows: int) -> list[Tensor]:
        """So many of the rows, in batches."""
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(self.rows, generator=generator)[:rows]
        if self.lengths is None:
            return list(order.split(batch_size))
        group = torch.arange(len(order)) // (GROUP * batch_size)
        longest = int(self.lengths.max()) + 1
        batches = order[torch.argsort(group * longest + self.lengths[order], stable=True)].split(
            batch_size
        )
        return [batches[number] for number in torch.randperm(len(batches), generator=generator)]


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A CPU generator that depends on (seed, epoch) only."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def rank_share(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's rows of a global batch: every `world_size`-th, so that lengths are shared out evenly."""
    return batch[rank::world_size]


def row_owners(shares: Sequence[int]) -> Tensor:
    """The rank of each place of a global batch of sum(shares) rows, each rank's spread evenly; equal shares go in turn."""
    ranks = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    places = torch.cat([(torch.arange(n, dtype=torch.float64) + 0.5) / max(n, 1) for n in shares])
    return ranks[torch.argsort(places, stable=True)]


def stratified_rows(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `fraction` of the rows of each class (at least one), without replacement.

    Args:
        labels: (rows,) class numbers.
        fraction: in (0, 1].
    Returns:
        (drawn rows, all other rows), both sorted.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        of_class = order[labels[order] == label]
        drawn[of_class[: max(1, round(fraction * len(of_class)))]] = True
    return drawn.nonzero().flatten(), (~drawn).nonzero().flatten()
