"""LARS: SGD with momentum and layer-wise rates (You et al., arXiv:1708.03888), and LARC.

    optimizer = LARS(model.parameters(), lr=2.0, momentum=0.9, weight_decay=1e-4)

For a layer's weights w and gradient g, with |.| the Euclidean norm (the paper's equation 6),
    trust = coefficient |w| / (|g| + weight_decay |w| + eps),  1 where |w| or |g| is 0
    m <- momentum m + trust (g + weight_decay w),  w <- w - lr m
LARC (`clip`) caps the layer's rate at lr: trust <- min(trust / lr, 1).
"""

from typing import Any

import torch
from torch import Tensor

from optimizers.base import GradScalerOptimizer, tensor_norms


def lars_trust_ratios(
    weights: Tensor, grads: Tensor, *, coefficient: float, weight_decay: float, eps: float
) -> Tensor:
    """Returns the trust ratios (layers,), equation 6 of the paper, or 1 where a norm is 0.

    Args:
        weights, grads: norm of each layer's weights and gradient, (layers,).
    """
    ratios = coefficient * weights / (grads + weight_decay * weights + eps)
    return torch.where((weights > 0) & (grads > 0), ratios, 1.0)


class LARS(GradScalerOptimizer):
    """SGD with layer-wise rates; biases and norms, with one axis or none, have the plain one.

    State of a parameter: `momentum_buffer`, in fp32 at least. A step that a GradScaler finds
    non-finite changes nothing.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        momentum, weight_decay, nesterov: as of torch.optim.SGD.
        trust_coefficient: a layer's rate is about lr times this times |w| / |g|.
        eps: added to the denominator of the trust ratio.
        clip: cap the layers' rates at lr (LARC).

    Raises:
        ValueError: a hyper-parameter is out of its range, or a group is on several devices.
    """

    own_ranges = {"trust_coefficient": lambda coefficient: coefficient > 0}
    needs_one_device = True

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        clip: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "clip": clip,
        }
        super().__init__(params, defaults)

    def _apply_step(self) -> None:
        for group in self.param_groups:
            parameters, grads, active = self.unscaled_grads(group)
            if not parameters:
                continue
            weight_decay = group["weight_decay"]
            updates = list(torch._foreach_add(grads, parameters, alpha=weight_decay))
            layers = [each for each in zip(parameters, grads, updates) if each[0].ndim > 1]
            if layers:
                weights, layer_grads, layer_updates = map(list, zip(*layers))
                ratios = lars_trust_ratios(
                    tensor_norms(weights),
                    tensor_norms(layer_grads),
                    coefficient=group["trust_coefficient"],
                    weight_decay=weight_decay,
                    eps=group["eps"],
                )
                if group["clip"]:
                    ratios = (ratios / group["lr"]).clamp(max=1.0)
                torch._foreach_mul_(layer_updates, list(ratios.unbind()))
            self.step_along(updates, parameters, group=group, active=active)
