"""What our optimizers have in common: ranges of their settings, closures, states that keep their precision, steps that are skipped.

class Plain(Base):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def check_hyperparameters(self, group):
        return {"lr": group["lr"] >= 0}

    def move(self):
        for group in self.param_groups:
            parameters, gradients, live = self.unscaled_grads(group)
            subtract_updates(parameters, gradients, group["lr"])            # zeros where the step is to be skipped
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GradScalerOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer that a GradScaler, and our engine, hand `found_inf` and `grad_scale` instead of reading them.

    Raises:
        ValueError: a setting of a group is out of its range.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._step_supports_amp_scaling = True
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = True

    @abstractmethod
    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        """Whether each setting of a group is in its range."""

    @abstractmethod
    def _apply_step(self) -> None:
        """The step, without gradients to it."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = self.defaults | param_group
        for name, good in self.check_hyperparameters(group).items():
            if not good:
                raise ValueError(f"{type(self).__name__}: {name}={group[name]} is out of its range")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their precision whatever the parameters' dtype is."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device)
        for group in self.param_groups:
            for name, value in group.items():
                if isinstance(value, Tensor):
                    group[name] = value.to(group["params"][0].device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure`, if given, computes the loss and its gradients anew; its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply_step()
        return loss

    def unscaled_grads(
        self, group: dict[str, Any]
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """(parameters, gradients, live) of a group: gradients that are there, unscaled, in fp32 at least.

        `live` is () and 0 where `found_inf` says that the step is to be skipped, else 1; None where nobody says so. The
        gradients are then zeros: 0 times what is not finite would not be 0. p.grad is never written. The host waits for nothing.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        parameters = [p for p in group["params"] if p.grad is not None]
        found = [p.grad for p in parameters]
        if any(gradient.is_sparse for gradient in found):
            raise RuntimeError(f"{type(self).__name__} does not take sparse gradients")
        found = [
            gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in found
        ]
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None and found:
            found = list(torch._foreach_div(found, scale))
        if skip is None:
            return parameters, found, None
        return (
            parameters,
            [torch.where(skip > 0, 0.0, gradient) for gradient in found],
            (skip == 0).double(),
        )


def tensor_norms(tensors: list[Tensor]) -> Tensor:
    """(tensors,) Euclidean norms, of fp16 and bf16 taken in fp32: the norm of 2,000 fp16 weights of 2,000 is past fp16's range."""
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return torch.stack(torch._foreach_norm(wide))


def subtract_updates(parameters: list[Tensor], moves: list[Tensor], rate: float) -> None:
    """parameters -= rate * moves, the product in the moves' precision."""
    if all(p.dtype == move.dtype for p, move in zip(parameters, moves)):
        torch._foreach_add_(parameters, moves, alpha=-rate)
    else:
        for p, move in zip(parameters, moves):
            p.copy_(p - rate * move)


def step_unless_skipped(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """The optimizer's step unless `skip`, a scalar; torch's fused kernels look at it on the device, so that nothing waits."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skip:
        optimizer.step()


class CommunicatingOptimizer(GradScalerOptimizer):
    """Placeholder until the optimizers' branch lands."""

    skipped: Tensor
