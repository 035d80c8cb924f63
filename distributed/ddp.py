"""DistributedDataParallel as this project uses it.

parallel = wrap(model, world, hook=AllReduceHook(world), sync_batch_norm=False, static_graph=True)
set_gradient_sync(parallel, False)          # for the micro-batches before the last one of a step
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from backends.torch_compat import ddp_buffer_arguments
from distributed import fsdp
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from errors import InputError

BUCKET_MIB = 25  # of gradients in one all-reduce


def with_sync_batch_norm(model: nn.Module, world: World) -> nn.Module:
    """The model with BatchNorm statistics over all ranks; parameters stay the same objects.

    Raises:
        InputError: the ranks compute on CPUs, for which torch has no such BatchNorm; or a layer of
            the network does more than BatchNorm, which torch would leave out.
    """
    if world.device.type != "cuda":
        raise InputError(
            "--sync_bn needs GPUs: torch's SyncBatchNorm has no CPU kernel; leave it out"
        )
    for name, norm in model.named_modules():
        if isinstance(norm, _BatchNorm) and type(norm).forward is not _BatchNorm.forward:
            raise InputError(f"--sync_bn: the layer {name} does more than BatchNorm; leave it out")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def wrap(
    model: nn.Module,
    world: World,
    *,
    hook: AllReduceHook,
    sync_batch_norm: bool,
    static_graph: bool,
) -> nn.Module:
    """DistributedDataParallel whose bucketed all-reduce overlaps the backward pass.

    Args:
        model: on its device.
        world: the ranks; `model` itself is returned where there is only one.
        hook: what is sent.
        sync_batch_norm: compute BatchNorm's statistics over all ranks. Otherwise they stay each
            rank's own until the trainer averages them before an evaluation.
        static_graph: the same parameters get a gradient in every backward pass. It must be False
            when gradients are accumulated: torch's reducer cannot do both (pytorch #143580).
    """
    if world.size == 1:
        return model
    if sync_batch_norm:
        model = with_sync_batch_norm(model, world)
    wrapped = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        static_graph=static_graph,
        bucket_cap_mb=BUCKET_MIB,
        **ddp_buffer_arguments(),  # type: ignore[arg-type]
    )
    wrapped.register_comm_hook(None, hook.run)
    return wrapped


def set_gradient_sync(model: nn.Module, is_on: bool) -> None:
    """Let the next forward and backward passes send gradients, or add up this rank's own alone.

    Args:
        model: wrapped by `wrap`, sharded by `fsdp.shard`, or neither.
        is_on: whether they send.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = is_on
    elif fsdp.is_sharded(model):
        model.set_requires_gradient_sync(is_on)  # type: ignore[operator]
