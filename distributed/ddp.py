"""DistributedDataParallel as this project uses it.

parallel = wrap(model, world, hook=AllReduceHook(world), static_graph=True)
set_gradient_sync(parallel, False)          # for the micro-batches before the last one of a step
"""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backends.torch_compat import ddp_buffer_arguments
from distributed import fsdp
from distributed.comm_hooks import AllReduceHook
from distributed.world import World

BUCKET_MIB = 25  # of gradients in one all-reduce


def wrap(
    model: nn.Module,
    world: World,
    *,
    hook: AllReduceHook,
    static_graph: bool,
) -> nn.Module:
    """DistributedDataParallel whose bucketed all-reduce overlaps the backward pass.

    Args:
        model: on its device.
        world: the ranks; `model` itself is returned where there is only one.
        hook: what is sent.
        static_graph: the same parameters get a gradient in every backward pass. It must be False
            when gradients are accumulated: torch's reducer cannot do both (pytorch #143580).
    """
    if world.size == 1:
        return model
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
