"""Weights, gradients and optimizer state in shards, a part of each on every rank (FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054).

    sharding.shard(model, world, "fsdp")                # before the optimizer is made; in place
    sharding.save(folder, model, optimizer, world)      # collective: each rank writes what it holds
    sharding.load(folder, model, optimizer, world)      # on any number of ranks, in shards or whole
    weights = sharding.whole(folder)                    # the model's state_dict, in one process

Weights are gathered block by block just before they are needed, and again in the backward pass; gradients are averaged into
shards. With 'hsdp' the ranks of a node hold the shards, and every node a copy of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError
from models.residual import residual_blocks

PARALLEL = ("ddp", "fsdp", "hsdp")


def shard(model: nn.Module, world: Any, kind: str, wire: torch.dtype | None = None) -> None:
    """Cut the parameters of `model`, in place: residual blocks each for itself, then the rest.

    Args:
        model: on its device, before the optimizer is made; its parameters become DTensors in torch's default memory format.
        world: `distributed.World` of several ranks.
        kind: 'fsdp' over all ranks; 'hsdp' within each node, with a copy on every node.
        wire: what gradients are averaged in; None is their own.
    Raises:
        InputError: this torch cannot, or 'hsdp' on one node.
    """
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise InputError(
            f"--parallel {kind} needs torch 2.9 or newer, this is {torch.__version__}; use --parallel ddp"
        ) from None
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    policy = MixedPrecisionPolicy(
        reduce_dtype=wire, cast_forward_inputs=False
    )  # autocast casts: norms stay in fp32
    cut = partial(fully_shard, mesh=device_mesh(world, kind), mp_policy=policy)
    for block in residual_blocks(model):
        cut(block)
    cut(model)


def device_mesh(world: Any, kind: str) -> Any:
    """The ranks as a DeviceMesh: a line ('fsdp'), or nodes x ranks of a node ('hsdp')."""
    from torch.distributed.device_mesh import (
        init_device_mesh,  # this and torch.distributed.checkpoint load the compiler
    )

    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    nodes = world.size // world.local_size
    if nodes == 1 or world.size % world.local_size:
        raise InputError(
            "--parallel hsdp: wants several nodes of as many processes each; on one node use --parallel fsdp"
        )
    return init_device_mesh(
        world.device.type, (nodes, world.local_size), mesh_dim_names=("replicate", "shard")
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was here."""
    return hasattr(model, "set_requires_gradient_sync")


@contextlib.contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes within the block add up this rank's own gradients."""
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)  # type: ignore[operator]


def full(tensor: Tensor) -> Tensor:
    """A plain tensor: a sharded one is put together, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def traffic(model: nn.Module) -> tuple[int, int]:
    """Bytes that a rank's micro-batch has in collectives: of weights, and of gradients where they are averaged."""

    def size(module: nn.Module) -> int:
        return sum(
            parameter.numel() * parameter.element_size() for parameter in module.parameters()
        )

    every, blocks = (
        size(model),
        sum(size(block) for block in model.modules() if block is not model and is_sharded(block)),
    )
    return every + blocks, every  # blocks are gathered again in the backward pass


def spread(value: Any, like: Tensor) -> Any:
    """A whole tensor, the same on all ranks, as the shards that `like` has; what is not shaped like it stays as it is."""
    if (
        not hasattr(like, "full_tensor")
        or not isinstance(value, Tensor)
        or value.shape != like.shape
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
