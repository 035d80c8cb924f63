"""LARS: SGD with momentum, each layer at a rate in proportion to its weights (You et al., arXiv:1708.03888), and LARC.

    optimizer = LARS(model.parameters(), lr=2.0, momentum=0.9, weight_decay=1e-4)

For a layer's weights w and gradient g, with |.| the Euclidean norm (the paper's equation 6),
    trust = coefficient |w| / (|g| + weight_decay |w| + eps),  1 where |w| or |g| is 0
    m <- momentum m + trust (g + weight_decay w),  w <- w - lr m
LARC (`clip`) caps the layer's rate at lr: trust <- min(trust / lr, 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer, subtract_updates, tensor_norms


def lars_trust_ratios(
    weights: Tensor, found: Tensor, coefficient: float, decay: float, eps: float
) -> Tensor:
    """Of layers whose weights and gradients have these norms (layers,); see above."""
    ratio = coefficient * weights / (found + decay * weights + eps)
    return torch.where((weights > 0) & (found > 0), ratio, 1.0)


class LARS(GradScalerOptimizer):
    """SGD with layer-wise rates.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum, nesterov, weight_decay: as torch.optim.SGD.
        trust_coefficient, eps: see above.
        clip: LARC.
        adapt: whether a group has layer-wise rates; None: its parameters with two axes or more do, biases and norms do not.

    State: `momentum_buffer`, in fp32 at least. A step that a GradScaler finds not finite changes nothing.

    Raises:
        ValueError: a hyper-parameter is out of its range.
        RuntimeError: a gradient is sparse.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        clip: bool = False,
        adapt: bool | None = None,
    ) -> None:
        names = (
            "lr",
            "momentum",
            "weight_decay",
            "nesterov",
            "trust_coefficient",
            "eps",
            "clip",
            "adapt",
        )
        values = (lr, momentum, weight_decay, nesterov, trust_coefficient, eps, clip, adapt)
        super().__init__(params, dict(zip(names, values)))

    def check_hyperparameters(self, group: dict[str, Any]) -> dict[str, bool]:
        """See Base."""
        return {
            "lr": group["lr"] >= 0,
            "momentum": 0 <= group["momentum"] < 1,
            "weight_decay": group["weight_decay"] >= 0,
            "nesterov": group["momentum"] > 0 or not group["nesterov"],
            "trust_coefficient": group["trust_coefficient"] > 0,
            "eps": group["eps"] >= 0,
        }

    def _apply_step(self) -> None:
        """See Base."""
        for group in self.param_groups:
            parameters, found, live = self.unscaled_grads(group)
            if parameters:
                self.update(group, parameters, found, live)

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        found: list[Tensor],
        live: Tensor | None,
    ) -> None:
        """The step of one group."""
        lr, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
        moves = (
            list(torch._foreach_add(found, parameters, alpha=decay))
            if decay
            else list(torch._foreach_mul(found, 1.0))
        )
        wanted = [(p.ndim > 1) if group["adapt"] is None else group["adapt"] for p in parameters]
        adapted = [number for number, yes in enumerate(wanted) if yes]
        if adapted:
            weights = tensor_norms([parameters[number] for number in adapted])
            lengths = tensor_norms([found[number] for number in adapted])
            ratios = lars_trust_ratios(
                weights, lengths, group["trust_coefficient"], decay, group["eps"]
            )
            if group["clip"]:
                ratios = (ratios / lr).clamp(max=1.0)
            torch._foreach_mul_([moves[number] for number in adapted], list(ratios.unbind()))
        if momentum:
            for p, move in zip(parameters, moves):
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(move)
            buffers = [self.state[p]["momentum_buffer"] for p in parameters]
            if live is None:
                torch._foreach_mul_(buffers, momentum)
            else:  # where the step is skipped the buffer stays, and so does nothing of the decay come in
                torch._foreach_mul_(buffers, 1 - live * (1 - momentum))
                torch._foreach_mul_(moves, live)
            torch._foreach_add_(buffers, moves)
            moves = (
                list(torch._foreach_add(moves, buffers, alpha=momentum))
                if group["nesterov"]
                else buffers
            )
        if live is not None:
            moves = list(torch._foreach_mul(moves, live))
        subtract_updates(parameters, moves, lr)
