"""Differences between versions of torch; no other package tests for a version.

    torch.optim.AdamW(parameters, fused=supports_fused_optimizers(parameters))
    if reason := unavailable_reason("export"):          # "needs torch 2.9 or newer, this is 2.3.1"
        raise InputError(f"exporting {reason}")

The code runs on torch 2.3, of the legacy stack, and on torch 2.9 and newer.
"""

import inspect
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor, nn

TORCH_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
MINIMUM_VERSIONS = {
    "fuse": (2, 4),
    "fsdp": (2, 9),
    "export": (2, 9),
    "muon": (2, 9),
    "shared_gpu": (2, 11),  # before it, gloo's futures end too early for a GPU (pytorch #170812)
}


def unavailable_reason(feature: str) -> str:
    """Return why this torch is too old for a feature of `MINIMUM_VERSIONS`, or ''."""
    minimum = MINIMUM_VERSIONS[feature]
    if minimum <= TORCH_VERSION:
        return ""
    return f"needs torch {minimum[0]}.{minimum[1]} or newer, this is {torch.__version__}"


def supports_fused_optimizers(parameters: Iterable[Tensor]) -> bool:
    """Return whether torch's fused optimizers support these parameters.

    They support GPUs in every version, and CPUs from torch 2.5 on.
    """
    return TORCH_VERSION >= (2, 5) or all(each.device.type == "cuda" for each in parameters)


def ddp_buffer_arguments() -> dict[str, bool]:
    """Return the DistributedDataParallel argument that keeps BatchNorm statistics local to a rank.

    The argument was renamed in torch 2.15.
    """
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def gloo_needs_final_barrier() -> bool:
    """Return whether a gloo process group may hang when a rank destroys it before the others.

    This is the case before torch 2.9; a barrier in front of the end avoids it.
    """
    return TORCH_VERSION < (2, 9)


def abort_process_groups() -> None:
    """End the communication of all process groups without waiting for other ranks.

    torch's function for it is private, and before torch 2.6 there is none.
    """
    c10d = torch.distributed.distributed_c10d
    getattr(c10d, "_abort_process_group", torch.distributed.destroy_process_group)()


def set_group_timeouts(seconds: float) -> None:
    """Give the collectives that process groups of this rank begin from now on a time limit.

    torch 2.14 has a public function for it, and older versions a private one. The list of all
    groups, those that torch made for itself included, is private in all of them.
    """
    c10d = torch.distributed.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    for group in tuple(c10d._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


def cpu_has_bf16() -> bool:
    """Return whether the CPU has bf16 instructions, AVX512-BF16 or AMX, that torch knows of.

    torch's probes are private functions, which not every version has.
    """
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in probes if hasattr(torch.cpu, name))
