"""LAMB: Adam with each layer's step in proportion to its weights (You et al., arXiv:1904.00962).

    optimizer = LAMB(model.parameters(), lr=2e-3, weight_decay=0.01)

For a layer's weights w and gradient g, with |.| the Euclidean norm (the paper's algorithm 2),
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
    w <- w - lr trust u,  trust = |w| / |u|,  1 where either is 0
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer, subtract_updates, tensor_norms


def lamb_trust_ratios(
    weights: Tensor, updates: Tensor, clamp: tuple[float, float] = (0.0, math.inf)
) -> Tensor:
    """Of layers whose weights and updates have these norms (layers,): weights / updates within `clamp`, 1 where one is 0."""
    return torch.where((weights > 0) & (updates > 0), weights / updates, 1.0).clamp(*clamp)


class LAMB(GradScalerOptimizer):
    """Adam with layer-wise trust ratios.

    Args:
        params: parameters or parameter groups.
        lr, betas, eps: see above.
        weight_decay: within the update, so that the trust ratio holds for both together.
        debias: divide m and v by 1 - b^t.
        adapt: whether a group has trust ratios; None: its parameters with two axes or more do, biases and norms do not.
        trust_clamp: least and largest trust ratio.
        max_grad_norm: gradients are divided by max(1, norm of all of them / this) in front of everything; 0 does not.

    State: `exp_avg` and `exp_avg_sq`, in fp32 at least, and the group's `steps`. A step that a GradScaler finds not finite
    changes nothing and is not counted.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        debias: bool = True,
        adapt: bool | None = None,
        trust_clamp: tuple[float, float] = (0.0, math.inf),
        max_grad_norm: float = 0.0,
    ) -> None:
        names = (
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "debias",
            "adapt",
            "trust_clamp",
            "max_grad_norm",
        )
        super().__init__(
            params,
            dict(
                zip(
                    names, (lr, betas, eps, weight_decay, debias, adapt, trust_clamp, max_grad_norm)
                )
            ),
        )

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        """See Base."""
        return {
            "lr": group["lr"] >= 0,
            "betas": all(0 <= beta < 1 for beta in group["betas"]),
            "eps": group["eps"] >= 0,
            "weight_decay": group["weight_decay"] >= 0,
            "trust_clamp": 0 <= group["trust_clamp"][0] <= group["trust_clamp"][1],
            "max_grad_norm": group["max_grad_norm"] >= 0,
        }

    def _apply_step(self) -> None:
        """See Base."""
        taken = [self.unscaled_grads(group) for group in self.param_groups]
        everything = [gradient for _, found, _ in taken for gradient in found]
        wanted = everything and any(group["max_grad_norm"] for group in self.param_groups)
        norm = torch.linalg.vector_norm(tensor_norms(everything)) if wanted else None
        for group, (parameters, found, live) in zip(self.param_groups, taken):
            if not parameters:
                continue
            if group["max_grad_norm"]:
                found = list(
                    torch._foreach_div(found, (norm / group["max_grad_norm"]).clamp(min=1.0))
                )
            self.update(group, parameters, found, live)

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        found: list[Tensor],
        live: Tensor | None,
    ) -> None:
        """The step of one group."""
        for p, gradient in zip(parameters, found):
            if not self.state[p]:
                self.state[p] = {
                    name: torch.zeros_like(gradient) for name in ("exp_avg", "exp_avg_sq")
                }
        first, second = (
            [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")
        )
        device = parameters[0].device
        alive = torch.ones((), dtype=torch.float64, device=device) if live is None else live
        steps = group.setdefault("steps", torch.zeros((), dtype=torch.float64, device=device))
        steps += alive
        moves = direction(first, second, found, group, steps, alive)
        if group["weight_decay"]:
            torch._foreach_add_(moves, parameters, alpha=group["weight_decay"])
        wanted = [(p.ndim > 1) if group["adapt"] is None else group["adapt"] for p in parameters]
        adapted = [number for number, yes in enumerate(wanted) if yes]
        if adapted:
            weights = tensor_norms([parameters[number] for number in adapted])
            updates = tensor_norms([moves[number] for number in adapted])
            ratios = lamb_trust_ratios(weights, updates, group["trust_clamp"])
            torch._foreach_mul_([moves[number] for number in adapted], list(ratios.unbind()))
        if live is not None:
            torch._foreach_mul_(moves, live)
        subtract_updates(parameters, moves, group["lr"])


def direction(
    first: list[Tensor],
    second: list[Tensor],
    found: list[Tensor],
    group: dict[str, Any],
    steps: Tensor,
    live: Tensor,
) -> list[Tensor]:
    """Adam's direction, without weight decay; moves both moments along unless `live` is 0."""
    b1, b2 = group["betas"]
    torch._foreach_mul_(first, 1 - live * (1 - b1))
    torch._foreach_add_(first, found, alpha=1 - b1)
    torch._foreach_mul_(second, 1 - live * (1 - b2))
    torch._foreach_addcmul_(second, found, found, value=1 - b2)
    roots = list(torch._foreach_sqrt(second))
    moves = first
    if group["debias"]:
        counted = steps.clamp(min=1)  # a skipped first step has not happened
        torch._foreach_div_(roots, (1 - b2**counted).sqrt())
        moves = list(torch._foreach_div(first, 1 - b1**counted))
    torch._foreach_add_(roots, group["eps"])
    return list(torch._foreach_div(moves, roots))
