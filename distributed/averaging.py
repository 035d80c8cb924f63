"""Means over ranks, flat or by way of nodes, and the bytes they take; for optimizers that communicate themselves.

exchange = Exchange(group=None, node_group=None)        # without a process group everything works and sends nothing
gradients = exchange.mean(gradients)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankAverager:
    """Means over the ranks, and the bytes this rank has put in.

    Args:
        group: the ranks; None is torch's default group, or this process alone where there is none.
        node_group: this node's ranks. Then what all ranks of a node have in common goes between nodes in equal parts, one a rank.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, node_group: dist.ProcessGroup | None
    ) -> None:
        here = dist.is_available() and dist.is_initialized()
        self.group, self.node_group, self.bytes_sent = group, node_group, 0
        self.size = dist.get_world_size(group) if here else 1
        self.local_size = dist.get_world_size(node_group) if node_group is not None and here else 1
        self.nodes = self.size // self.local_size
        self.across: dist.ProcessGroup | None = group
        if self.local_size > 1:
            self.across = self.make_across()

    def make_across(self) -> Any:
        """The ranks with this one's place in their nodes, of all nodes."""
        members: list[Any] = [None] * self.size
        dist.all_gather_object(
            members, dist.get_process_group_ranks(self.node_group), group=self.group
        )
        nodes = sorted({tuple(node) for node in members})
        if len({len(node) for node in nodes}) > 1:
            raise ValueError(f"SLAMB: nodes of different sizes {[len(node) for node in nodes]}")
        groups = [
            dist.new_group([node[place] for node in nodes]) for place in range(self.local_size)
        ]
        return groups[dist.get_rank(self.node_group)]

    def mean(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            self.reduce(values, self.group).div_(self.size)
        return values

    def mean_in_node(self, values: Tensor) -> Tensor:
        """Over this node's ranks, in place."""
        if self.local_size > 1:
            self.reduce(values, self.node_group).div_(self.local_size)
        return values

    def mean_across(self, values: Tensor) -> Tensor:
        """Of (n,) values that are the same on all ranks of a node, over the nodes."""
        if self.local_size == 1:
            return self.mean(values)
        padded = torch.nn.functional.pad(values, (0, -len(values) % self.local_size))
        mine = padded.chunk(self.local_size)[dist.get_rank(self.node_group)].contiguous()
        self.reduce(mine, self.across).div_(self.nodes)
        dist.all_gather_into_tensor(padded, mine, group=self.node_group)
        return padded[: len(values)]

    def take_bytes(self) -> int:
        """This rank's payload since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0
        return sent

    def reduce(self, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Sum, in place."""
        self.bytes_sent += values.nbytes
        dist.all_reduce(values, group=group)
        return values


@torch.no_grad()
def average(tensors: Sequence[Tensor], exchange: RankAverager) -> None:
    """Tensors become their mean over the ranks, in place; one collective."""
    if exchange.size == 1 or not tensors:
        return
    flat = exchange.mean(torch.cat([tensor.flatten() for tensor in tensors]))
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(mean.view(tensor.shape))
