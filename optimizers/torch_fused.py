"""torch's SGD and AdamW with their fused kernels, so that a skipped step costs no host read.

optimizer = fused_sgd(decay_groups(model, 5e-4), lr=0.1, momentum=0.9)
step_unless_skipped(optimizer, ~torch.isfinite(global_norm(gradients)))
"""

from typing import Any

import torch
from torch import Tensor

from backends.torch_compat import supports_fused_optimizers
from optimizers.shards import is_sharded


def fused_sgd(
    groups: list[dict[str, Any]], *, lr: float, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.SGD:
    """Creates torch's SGD, fused where it can be: sharded parameters take the plain kernels."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    optimizer = torch.optim.SGD(
        groups,
        lr=lr,
        momentum=momentum,
        nesterov=nesterov,
        fused=supports_fused_optimizers(parameters) and not any(map(is_sharded, parameters)),
    )
    optimizer.register_load_state_dict_post_hook(_fit_kernels)
    _start_momentum(optimizer)
    return optimizer


def fused_adamw(
    groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """Creates torch's AdamW, fused where it can be."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = supports_fused_optimizers(parameters)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused)
    optimizer.register_load_state_dict_post_hook(_fit_kernels)
    return optimizer


def _start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Gives SGD buffers, which torch leaves uninitialised if the very first step is skipped."""
    if optimizer.defaults.get("momentum"):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter].setdefault("momentum_buffer", zeros)


def laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns a tensor of a parameter's shape in the parameter's memory format."""
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _fit_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Makes a loaded state fit these kernels, of which fused ones read it in the weights' order."""
    for group in optimizer.param_groups:
        group["fused"] = optimizer.defaults["fused"]  # sharded parameters have other kernels
    _start_momentum(optimizer)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_tensor and value.stride() != parameter.stride():
                state[name] = laid_out_like(value, parameter)
