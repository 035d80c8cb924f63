"""Weights, gradients and optimizer state in shards, a part of each on every rank.

    shard(model, world, kind="fsdp", blocks=residual_blocks(model))   # before the optimizer is made

Through torch's `fully_shard` (FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054). Weights are gathered
block by block just before they are needed, and again in the backward pass; gradients are averaged
into shards. With 'hsdp' the ranks of a node hold the shards, and every node a copy of them. See
sharded_checkpoint.py for files.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends import torch_compat
from distributed.world import World
from errors import InputError

PARALLEL = ("ddp", "fsdp", "hsdp")


def shard(
    model: nn.Module,
    world: World,
    *,
    kind: str,
    blocks: Sequence[nn.Module],
    wire_dtype: torch.dtype | None = None,
) -> None:
    """Cut the parameters of a model into shards, in place: each block for itself, then the rest.

    Args:
        model: on its device, before the optimizer is made; its parameters become DTensors in
            torch's default memory format.
        world: several ranks.
        kind: 'fsdp' over all ranks; 'hsdp' within each node, with a copy on every node.
        blocks: modules of the model whose weights are gathered together.
        wire_dtype: what gradients are averaged in; None is their own.
    Raises:
        InputError: this torch is too old, or 'hsdp' was asked for on one node.
    """
    if reason := torch_compat.unavailable_reason("fsdp"):
        raise InputError(f"--parallel {kind} {reason}; use --parallel ddp")
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    # Inputs are not cast: autocast does that, and normalisation stays in fp32.
    policy = MixedPrecisionPolicy(reduce_dtype=wire_dtype, cast_forward_inputs=False)
    cut = partial(fully_shard, mesh=device_mesh(world, kind), mp_policy=policy)
    for block in blocks:
        cut(block)
    cut(model)


def device_mesh(world: World, kind: str) -> Any:
    """The ranks as a DeviceMesh: a line for 'fsdp', nodes x ranks of a node for 'hsdp'."""
    # Here, since this import and torch.distributed.checkpoint load torch's compiler.
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    nodes = world.size // world.local_size
    if nodes == 1 or world.size % world.local_size:
        raise InputError(
            "--parallel hsdp needs several nodes with the same number of processes; "
            "use --parallel fsdp on one node"
        )
    names = ("replicate", "shard")
    return init_device_mesh(world.device.type, (nodes, world.local_size), mesh_dim_names=names)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` has cut this module's parameters."""
    # Importing torch's module takes most of a second, and `shard` has done so where it was called.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None or torch_compat.unavailable_reason("fsdp"):
        return False
    return isinstance(module, torch_fsdp.FSDPModule)


@contextlib.contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Let backward passes within the block add up this rank's own gradients of a sharded model."""
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)  # type: ignore[operator]


def unshard(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; collective."""
    return tensor.full_tensor()  # type: ignore[attr-defined]


def distribute_like(value: Any, like: Tensor) -> Any:
    """Cut a whole tensor, the same on all ranks, into the shards that `like` has.

    What is no tensor of the shape of `like`, or where `like` is not sharded, is returned as it is.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    whole = value.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def bytes_per_micro_batch(model: nn.Module) -> tuple[int, int]:
    """Bytes of weights that a micro-batch gathers, and of gradients where they are averaged."""

    def size(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    whole = size(model)
    blocks = [module for module in model.modules() if module is not model and is_sharded(module)]
    # Blocks are gathered a second time, in the backward pass.
    return whole + sum(map(size, blocks)), whole
