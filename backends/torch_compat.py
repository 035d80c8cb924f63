"""TODO."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def supports_fused_optimizers(parameters: Iterable[Tensor]) -> bool:
    """Whether torch's fused optimizers take these parameters: on GPUs, and on CPUs from torch 2.5 on."""
    return TORCH_VERSION >= (2, 5) or all(
        parameter.device.type == "cuda" for parameter in parameters
    )


def ddp_buffer_arguments() -> dict[str, bool]:
    """The DistributedDataParallel argument that leaves BatchNorm statistics to each rank (renamed in torch 2.15)."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }
