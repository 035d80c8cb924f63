"""TODO."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from backends import nvidia_apex
from backends.device import has_bf16
from errors import InputError

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", *nvidia_apex.LEVELS)


@dataclass(frozen=True)
class Precision:
    """How to compute: `dtype` is None without autocast; `scaled` asks for a GradScaler."""

    name: str
    device_type: str
    dtype: torch.dtype | None = None

    @property
    def scaled(self) -> bool:
        """Whether gradients can underflow, so that the loss is to be scaled."""
        return self.dtype is torch.float16

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context of the forward pass and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Model and optimizer as this precision wants them, and a GradScaler, or what acts like one."""
        if self.name in nvidia_apex.LEVELS:
            return nvidia_apex.prepare(self.name, model, optimizer)
        return model, optimizer, torch.amp.GradScaler(self.device_type, enabled=self.scaled)


def choose_precision(name: str, device: torch.device) -> Precision:
    """The precision of that name; 'auto' is the fastest that trains as well as fp32.

    tf32 lets GPU matrix products and convolutions round their inputs to 10 bits; on a CPU it is refused.
    Raises:
        InputError: the device cannot do it.
    """
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp16" if device.type == "cuda" else "fp32"
    if name in nvidia_apex.LEVELS and (reason := nvidia_apex.amp_unavailable_reason()):
        raise InputError(
            f"--precision {name}: {reason}; --precision fp16 is torch's own mixed precision"
        )
    if name == "tf32" and device.type != "cuda":
        raise InputError("--precision tf32 needs a GPU; use bf16 or fp32 on a CPU")
    if device.type == "cuda":
        tf32 = name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
    elif (
        name == "bf16"
    ):  # on CPUs the flash kernel's backward is slow in bf16: plain attention took a quarter of its time
        torch.backends.cuda.enable_flash_sdp(False)  # governs the CPU's choice of kernel as well
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    return Precision(name, device.type, dtype)
