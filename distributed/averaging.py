"""Means and tensors of all ranks, with the bytes they take: for whoever communicates by itself.

averager = RankAverager(group=None, node_group=None)    # without a process group nothing is sent
gradients = averager.mean(gradients)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from distributed.world import new_group


class RankAverager:
    """Means over the ranks, and tensors of all of them; counts the bytes that this rank puts in.

    Args:
        group: the ranks; None is torch's default group, or this process alone where there is none.
        node_group: the ranks of this node. When given, what the ranks of a node have in common is
            sent between nodes in equal parts, one part by each rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, node_group: dist.ProcessGroup | None
    ) -> None:
        initialized = dist.is_available() and dist.is_initialized()
        self.group, self.node_group = group, node_group
        self.bytes_sent = 0
        self.size = dist.get_world_size(group) if initialized else 1
        has_nodes = node_group is not None and initialized
        self.local_size = dist.get_world_size(node_group) if has_nodes else 1
        self.nodes = self.size // self.local_size
        self.across = self._group_across_nodes() if self.local_size > 1 else group

    def _group_across_nodes(self) -> dist.ProcessGroup:
        """The ranks that have this one's place in their nodes, of all nodes; collective."""
        members: list[list[int]] = [[]] * self.size
        mine = dist.get_process_group_ranks(self.node_group)
        dist.all_gather_object(members, mine, group=self.group)
        nodes = sorted({tuple(node) for node in members})
        if len({len(node) for node in nodes}) > 1:
            raise ValueError(f"nodes have different numbers of ranks: {[len(n) for n in nodes]}")
        places = range(self.local_size)
        groups = [new_group([node[place] for node in nodes]) for place in places]
        return groups[dist.get_rank(self.node_group)]

    def mean(self, values: Tensor) -> Tensor:
        """Replace values by their mean over all ranks."""
        if self.size > 1:
            self.all_reduce(values, self.group).div_(self.size)
        return values

    def mean_in_node(self, values: Tensor) -> Tensor:
        """Replace values by their mean over the ranks of this node."""
        if self.local_size > 1:
            self.all_reduce(values, self.node_group).div_(self.local_size)
        return values

    def mean_across(self, values: Tensor) -> Tensor:
        """The mean over the nodes of values (n,) that are the same on all ranks of a node."""
        if self.local_size == 1:
            return self.mean(values)
        padded = F.pad(values, (0, -len(values) % self.local_size))
        mine = padded.chunk(self.local_size)[dist.get_rank(self.node_group)].contiguous()
        self.all_reduce(mine, self.across).div_(self.nodes)
        dist.all_gather_into_tensor(padded, mine, group=self.node_group)
        return padded[: len(values)]

    def gather(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of each rank, whatever nodes they are in; one collective.

        Args:
            pieces: this rank's tensors, of the same shapes and dtypes on every rank.
        Returns:
            The tensors of every rank, in the order of the ranks.
        """
        if self.size == 1:
            return [list(pieces)]
        mine = torch.cat([piece.flatten().view(torch.uint8) for piece in pieces])
        everything = mine.new_empty(self.size * len(mine))
        dist.all_gather_into_tensor(everything, mine, group=self.group)
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

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Replace values by their sum over a group, and count their bytes."""
        self.bytes_sent += values.nbytes
        dist.all_reduce(values, group=group)
        return values


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor], averager: RankAverager) -> None:
    """Replace tensors by their mean over the ranks; one collective for all of them."""
    if averager.size == 1 or not tensors:
        return
    flat = averager.mean(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view(tensor.shape))
