"""LAMB: Adam with each layer's step in proportion to its weights (You et al., arXiv:1904.00962).

    optimizer = LAMB(model.parameters(), lr=2e-3, weight_decay=0.01)

For a layer's weights w and gradient g, with |.| the Euclidean norm (the paper's algorithm 2),
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
    w <- w - lr trust u,  trust = |w| / |u|,  1 where either is 0
"""

from typing import Any

import torch
from torch import Tensor

from optimizers.adam import AdamStep, adam_updates
from optimizers.base import GradScalerOptimizer, foreach_scalar, subtract_updates, tensor_norms


def lamb_trust_ratios(weights: Tensor, updates: Tensor) -> Tensor:
    """Returns the trust ratios (layers,): the norms weights / updates, or 1 where either is 0."""
    return torch.where((weights > 0) & (updates > 0), weights / updates, 1.0)


class LAMB(GradScalerOptimizer):
    """Adam with layer-wise trust ratios; biases and norms, with one axis or none, have none.

    The bias correction counts the steps of a group: weights that are thawed late need a new one.

    State of a parameter: `exp_avg` (m) and `exp_avg_sq` (v), in fp32 at least. State of a group:
    `steps` (t). A step that a GradScaler finds non-finite changes nothing and is not counted.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: within the update, so that the trust ratio holds for both together.

    Raises:
        ValueError: a hyper-parameter is out of its range, or a group is on several devices.
    """

    needs_one_device = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _apply_step(self) -> None:
        for group in self.param_groups:
            parameters, grads, active = self.unscaled_grads(group)
            if not parameters:
                continue
            m, v = self.moments(parameters, grads, "exp_avg", "exp_avg_sq")
            device = parameters[0].device
            if "steps" not in group:
                group["steps"] = torch.zeros((), dtype=torch.float64, device=device)
            group["steps"] += 1 if active is None else active
            adam = AdamStep.of(group, group["steps"], active=active)
            updates = adam_updates(parameters, m, v, grads=grads, adam=adam)
            layers = [each for each in zip(parameters, updates) if each[0].ndim > 1]
            if layers:
                weights, layer_updates = map(list, zip(*layers))
                ratios = lamb_trust_ratios(tensor_norms(weights), tensor_norms(layer_updates))
                torch._foreach_mul_(layer_updates, list(ratios.unbind()))
            if active is not None:
                torch._foreach_mul_(updates, foreach_scalar(active, updates))
            subtract_updates(parameters, updates, lr=group["lr"])
