"""Parameters in shards, as FSDP's DTensors: each rank steps with its shards and owns some matrices.

    shard = local(p)                              # in the memory of the DTensor
    state["exp_avg"] = sharded_like(torch.zeros_like(shard), p)
    owners = balanced_owners([p.numel() for p in matrices], ranks_of_shards(p).size())

Elementwise work is done on shards. Work on a whole matrix is done by the one rank that owns the
matrix, as in Dion (arXiv:2504.05295). Plain tensors pass through unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it would take a second
    return isinstance(tensor, getattr(module, "DTensor", ()))  # torch 2.3 has the module without it


def local(tensor: Any) -> Tensor:
    """Returns this rank's shard of a tensor, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Any) -> Tensor:
    """Returns all of a tensor; collective."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def sharded_like(shard: Tensor, parameter: Any) -> Tensor:
    """Returns a tensor with this shard, of the shape of a parameter and cut as the parameter is."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements, stride = parameter.device_mesh, parameter.placements, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=stride)


def owned_like(value: Tensor, parameter: Any, *, is_owner: bool) -> Tensor:
    """Returns a tensor that only the owner of a parameter keeps, for checkpoints to gather.

    It is the sum of the ranks' own: of zeros, which take no memory, but on the owner.
    """
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Partial

    own = value if is_owner else value.new_zeros(()).expand(value.shape)
    placements = [Partial() if each.is_shard() else each for each in parameter.placements]
    return DTensor.from_local(own, parameter.device_mesh, placements)


def ranks_of_shards(parameter: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that together hold a parameter once; None where it is not sharded.

    Raises:
        ValueError: it is not cut along its first axis alone.
    """
    if not is_sharded(parameter):
        return None
    cut = {axis: each for axis, each in enumerate(parameter.placements) if each.is_shard()}
    if [each.dim for each in cut.values()] != [0]:
        raise ValueError(f"a matrix is cut along its first axis alone, not {parameter.placements}")
    return parameter.device_mesh.get_group(*cut)


def shard_sizes(parameter: Tensor, ranks: int) -> list[int]:
    """Returns how many elements of a parameter each rank holds: FSDP cuts as torch.chunk does."""
    length, columns = len(parameter), parameter.numel() // len(parameter)
    chunk = -(-length // ranks)
    return [columns * min(chunk, max(0, length - rank * chunk)) for rank in range(ranks)]


def balanced_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns an owner for each cost, so that the sums of the ranks differ little."""
    owners, loads = [0] * len(costs), [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
