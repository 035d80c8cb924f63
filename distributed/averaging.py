"""Means and tensors of all ranks, with the bytes they take: for whoever communicates by itself.

averager = RankAverager()               # without a process group nothing is sent
gradients = averager.mean(gradients)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RankAverager:
    """Means over the ranks, and tensors of all of them; counts the bytes that this rank puts in.

    The ranks are those of torch's default process group, or this process alone without one.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0

    @property
    def size(self) -> int:
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def mean(self, values: Tensor) -> Tensor:
        """Replace values by their mean over the ranks."""
        if self.size > 1:
            self.bytes_sent += values.nbytes
            dist.all_reduce(values)
            values.div_(self.size)
        return values

    def gather(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of each rank; one collective.

        Args:
            pieces: this rank's tensors, of the same shapes and dtypes on every rank.
        Returns:
            The tensors of every rank, in the order of the ranks.
        """
        if self.size == 1:
            return [list(pieces)]
        mine = torch.cat([piece.flatten().view(torch.uint8) for piece in pieces])
        everything = mine.new_empty(self.size * len(mine))
        dist.all_gather_into_tensor(everything, mine)
        self.bytes_sent += mine.nbytes
        sizes = [piece.nbytes for piece in pieces]
        return [
            [
                part.clone().view(piece.dtype).view(piece.shape)  # a copy lies at a whole address
                for part, piece in zip(of_rank.split(sizes), pieces)
            ]
            for of_rank in everything.split(len(mine))
        ]

    def take_bytes(self) -> int:
        """This rank's payload in bytes since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor], averager: RankAverager) -> None:
    """Replace tensors by their mean over the ranks; one collective for all of them."""
    if averager.size == 1 or not tensors:
        return
    flat = averager.mean(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view(tensor.shape))
