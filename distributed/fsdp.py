"""Weights, gradients and optimizer state in shards, a part of each on every rank.

    shard(model, world, kind="fsdp", blocks=residual_blocks(model),   # before the optimizer is made
          compute_dtype=torch.bfloat16)

Through torch's `fully_shard` (FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054). Weights are gathered
block by block just before they are needed, and again in the backward pass; gradients are averaged
into shards. With 'hsdp' the ranks of a node hold the shards, and every node a copy of them.
Checkpoints hold whole tensors: see `gather` and `distribute_like`.
"""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends import torch_compat
from distributed.world import World
from errors import InputError

PARALLEL = ("ddp", "fsdp", "hsdp")
NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)


def shard(
    model: nn.Module,
    world: World,
    *,
    kind: str,
    blocks: Sequence[nn.Module],
    wire_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Cut the parameters of a model into shards, in place: each block for itself, then the rest.

    Weights of blocks are gathered in `compute_dtype`: from fp32 weights autocast would make copies
    that stay until the backward pass. The norms of all blocks, which autocast computes in fp32, are
    gathered together in their own dtype, as is what lies outside the blocks.

    Args:
        model: on its device, before the optimizer is made; its parameters become DTensors in
            torch's default memory format.
        world: several ranks.
        kind: 'fsdp' over all ranks; 'hsdp' within each node, with a copy on every node.
        blocks: modules of the model whose weights are gathered together.
        wire_dtype: what gradients are averaged in; None is the dtype of the parameters.
        compute_dtype: of autocast; None is no autocast, or fused layers, which call no norm.
    Raises:
        InputError: this torch is too old, ranks share a GPU, or 'hsdp' was asked for on one node.
    """
    if reason := torch_compat.unavailable_reason("fsdp"):
        raise InputError(f"{kind} {reason}; use ddp")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    own_dtype = next(model.parameters()).dtype
    # Inputs are not cast: autocast does that.
    own = MixedPrecisionPolicy(reduce_dtype=wire_dtype or own_dtype, cast_forward_inputs=False)
    of_blocks = dataclasses.replace(own, param_dtype=compute_dtype)
    norms = [each for block in blocks for each in block.modules() if isinstance(each, NORMS)]
    cut = partial(fully_shard, mesh=device_mesh(world, kind))
    if compute_dtype is not None and norms:
        cut(norms, mp_policy=own)
    for block in blocks:
        cut(block, mp_policy=of_blocks)
    cut(model, mp_policy=own)


def device_mesh(world: World, kind: str) -> Any:
    """The ranks as a DeviceMesh: a line for 'fsdp', nodes x ranks of a node for 'hsdp'."""
    # Here, since this import and torch.distributed.checkpoint load torch's compiler.
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if world.shares_gpu:  # gloo, which connects such ranks, crashes in fully_shard
        raise InputError(f"{kind} needs a GPU for each process; use ddp")
    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    if len(world.nodes) == 1 or len(set(map(len, world.nodes))) > 1:
        needed = "several nodes with the same number of processes"
        raise InputError(f"{kind} needs {needed}; use fsdp on one node")
    names = ("replicate", "shard")
    return DeviceMesh(world.device.type, torch.tensor(world.nodes), mesh_dim_names=names)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` has cut this module's parameters."""
    # Importing torch's module takes most of a second, and `shard` has done so where it was called.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(torch_fsdp, "FSDPModule", ()))


def gather(value: Any, *, keep: bool) -> Any:
    """A state_dict of whole tensors on the host, or of None unless `keep`; collective."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        whole = value.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(value, dict):
        return {name: gather(each, keep=keep) for name, each in value.items()}
    return value


def distribute_like(value: Any, like: Tensor) -> Any:
    """Cut a whole tensor, the same on all ranks, into the shards that `like` has.

    If `like` is not sharded, or the value is no tensor of its shape, the value itself is returned.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    whole = value.to(like.device, copy=True)  # the file is not kept open
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
