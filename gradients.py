"""Gradients as a foreach optimizer wants them: those that are there, unscaled, in fp32, zeros where the step is to be skipped.

parameters, found, live = gradients.take(group, self)       # in `step`, for each parameter group
...                                                         # everything finite; what is multiplied by `live` stays as it was
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """(parameters, gradients, live) of a group, for an optimizer with `_step_supports_amp_scaling`.

    `live` is () and 0 where `optimizer.found_inf` says that the step is to be skipped, else 1; None where nobody says so. The
    gradients are then zeros: 0 times what is not finite would not be 0. p.grad is never written. The host waits for nothing.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    parameters = [p for p in group["params"] if p.grad is not None]
    found = [p.grad for p in parameters]
    if any(gradient.is_sparse for gradient in found):
        raise RuntimeError(f"{type(optimizer).__name__} does not take sparse gradients")
    found = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in found]
    scale, skip = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None and found:
        found = list(torch._foreach_div(found, scale))
    if skip is None:
        return parameters, found, None
    return parameters, [torch.where(skip > 0, 0.0, gradient) for gradient in found], (skip == 0).double()


def norms(tensors: list[Tensor]) -> Tensor:
    """(tensors,) Euclidean norms, of fp16 and bf16 taken in fp32: the norm of 1,000 fp16 weights of 2,000 is past fp16's range."""
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return torch.stack(torch._foreach_norm(wide))


def subtract(parameters: list[Tensor], moves: list[Tensor], rate: float) -> None:
    """parameters -= rate * moves, the product in the moves' precision."""
    if all(p.dtype == move.dtype for p, move in zip(parameters, moves)):
        torch._foreach_add_(parameters, moves, alpha=-rate)
    else:
        for p, move in zip(parameters, moves):
            p.copy_(p - rate * move)


def check(name: str, group: dict[str, Any], ranges: dict[str, bool]) -> None:
    """Raise ValueError where a hyper-parameter of a group of the optimizer `name` is out of its range."""
    for key, good in ranges.items():
        if not good:
            raise ValueError(f"{name}: {key}={group[key]} is out of its range")


def keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """After `load_state_dict`: state tensors as they were saved; torch casts them to the parameters' dtype."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][name] = value.to(parameter.device)
