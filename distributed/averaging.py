"""Means and tensors of all ranks, with the bytes they take: for whoever communicates by itself.

averager = RankAverager()               # without a process group nothing is sent
gradients = averager.mean(gradients)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank puts into collectives (payload), and those that it then sends (wire).

    W ranks in a ring send 2 (W - 1) / W bytes for each byte that is reduced, and W - 1 for each
    that is gathered.
    """

    payload: int = 0
    wire: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.payload + other.payload, self.wire + other.wire)

    @classmethod
    def reduced(cls, payload: int, size: int) -> Traffic:
        return cls(payload, 2 * (size - 1) / size * payload)

    @classmethod
    def gathered(cls, payload: int, size: int) -> Traffic:
        return cls(payload, (size - 1) * payload)


class RankAverager:
    """Means over the ranks, and tensors of all of them; counts what this rank sends.

    The ranks are those of torch's default process group, or this process alone without one.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def mean(self, values: Tensor) -> Tensor:
        """Replace values by their mean over the ranks."""
        if self.size > 1:
            self.traffic += Traffic.reduced(values.nbytes, self.size)
            dist.all_reduce(values)
            values.div_(self.size)
        return values

    def gather(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of each rank, of the same shapes and dtypes on all; one collective."""
        if self.size == 1:
            return [list(pieces)]
        mine = torch.cat([piece.flatten().view(torch.uint8) for piece in pieces])
        everything = mine.new_empty(self.size * len(mine))
        # its name since torch 2.14, or the one before
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(everything, mine)
        self.traffic += Traffic.gathered(mine.nbytes, self.size)
        sizes = [piece.nbytes for piece in pieces]
        return [
            [
                part.clone().view(piece.dtype).view(piece.shape)  # a copy lies at a whole address
                for part, piece in zip(of_rank.split(sizes), pieces)
            ]
            for of_rank in everything.split(len(mine))
        ]

    def take_traffic(self) -> Traffic:
        """This rank's traffic since the last call."""
        sent, self.traffic = self.traffic, Traffic()
        return sent


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor], averager: RankAverager) -> None:
    """Replace tensors by their mean over the ranks; one collective for all of them."""
    tensors = list(tensors)  # it may be model.parameters(), which is gone through once
    if averager.size == 1 or not tensors:
        return
    flat = averager.mean(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view(tensor.shape))
