"""TODO."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backends import torch_compat
from distributed import fsdp
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from errors import InputError

BUCKET_MIB = 25  # of gradients in one all-reduce


def with_sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """The model with BatchNorm statistics over all ranks; parameters stay the same objects."""
    if world.device.type != "cuda":
        raise InputError(
            "--sync_bn needs GPUs: torch's SyncBatchNorm has no CPU kernel; leave it out"
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def wrap(
    model: nn.Module,
    world: World,
    sync_bn: bool,
    static_graph: bool,
    hook: AllReduceHook | None = None,
) -> nn.Module:
    """DistributedDataParallel whose bucketed all-reduce overlaps backward and counts its bytes; `model` at world size 1.

    BatchNorm statistics stay each rank's own between evaluations (`World.average_buffers`); `sync_bn` computes them
    over all ranks instead. `static_graph` is off with accumulation: torch's reducer cannot do both (pytorch #143580).
    `hook`: what is sent; None is the gradients as they are.
    """
    if world.size == 1:
        return model
    model = with_sync_batch_norm(model, world) if sync_bn else model
    hook = hook or AllReduceHook(world)
    one_bucket = (
        hook.name == "powersgd" and world.device.type == "cpu"
    )  # with two, torch's hook aborts on gloo
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        bucket_cap_mb=1 << 20 if one_bucket else BUCKET_MIB,
        **torch_compat.ddp_buffer_arguments(),  # type: ignore[arg-type]
    )
    wrapped.register_comm_hook(None, hook.run)
    return wrapped


def no_gradient_sync(model: nn.Module) -> contextlib.AbstractContextManager:
    """Within the block backward passes add up this rank's own gradients, of a model that is wrapped, sharded or neither."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return fsdp.no_gradient_sync(model) if fsdp.is_sharded(model) else contextlib.nullcontext()
