"""Numeric precision of a run: fp32, tf32, bf16 and fp16 by torch, O1 and O2 by NVIDIA apex.

    precision = choose_precision("auto", device)        # bf16 where the device computes in it
    model, optimizer, scaler = precision.prepare(model, optimizer)
    with precision.autocast():
        loss = F.cross_entropy(model(inputs), labels)

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from backends import nvidia_apex
from backends.device import has_bf16
from errors import InputError

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", *nvidia_apex.LEVELS)
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """How forward and backward passes compute."""

    name: str  # one of `PRECISIONS` except 'auto'
    device_type: str  # 'cpu' or 'cuda'
    dtype: torch.dtype | None = None  # of torch's autocast; None without autocast

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the context in which the forward pass and the loss are computed."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Return the model, the optimizer and the loss scaler with which to train.

        torch's own precisions leave parameters and optimizer as they are; the scaler is a
        torch.amp.GradScaler, disabled unless the precision is fp16. Apex converts both, and the
        scaler is a `nvidia_apex.Scaler`; see `nvidia_apex.prepare`.
        """
        if self.name in nvidia_apex.LEVELS:
            return nvidia_apex.prepare(self.name, model, optimizer=optimizer)
        if self.device_type == "cpu" and self.dtype is torch.bfloat16:
            # bf16 makes depthwise convolutions slower on CPUs: a step of EfficientNet-lite0 takes
            # 1,250 ms in bf16, 1,090 in fp32, 780 with these in fp32.
            for module in model.modules():
                if isinstance(module, nn.Conv2d) and 1 < module.groups == module.in_channels:
                    module.forward = partial(_without_autocast, module)  # type: ignore[method-assign]
        scaler = torch.amp.GradScaler(self.device_type, enabled=self.dtype is torch.float16)
        return model, optimizer, scaler


def _without_autocast(conv: nn.Conv2d, images: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return type(conv).forward(conv, images.to(conv.weight.dtype))


def choose_precision(name: str, device: torch.device) -> Precision:
    """Return the precision of that name and set torch's global switches that belong to it.

    On GPUs every precision but fp32 also lets the remaining fp32 matrix products and convolutions
    round their inputs to tf32, which has 10 bits of mantissa.

    Args:
        name: one of `PRECISIONS`; 'auto' is bf16 where the device computes in it natively, else
            fp16 on GPUs and fp32 on CPUs.
        device: the training device.
    Raises:
        InputError: the device or the installation does not support it.
    """
    if name == "auto":
        name = "bf16" if has_bf16(device) else "fp16" if device.type == "cuda" else "fp32"
    if name in nvidia_apex.LEVELS and (reason := nvidia_apex.unavailable_reason()):
        raise InputError(f"{name}: {reason}; fp16 is torch's own mixed precision")
    if name == "tf32" and device.type != "cuda":
        raise InputError("tf32 needs a GPU; use bf16 or fp32 on a CPU")
    if device.type == "cuda":
        allow_tf32 = name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = allow_tf32
        torch.backends.cudnn.allow_tf32 = allow_tf32
        torch.backends.cudnn.benchmark = True
    elif name == "bf16":
        # In bf16 the backward pass of the CPU's flash attention is slow: plain attention took a
        # quarter of its time. In spite of its name the switch also governs the CPU's kernels.
        torch.backends.cuda.enable_flash_sdp(False)
    return Precision(name, device.type, dtype=AUTOCAST_DTYPES.get(name))
