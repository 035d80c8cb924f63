"""Adam's moments and the updates made of them, for AdamW within NGD, for LAMB and for SLAMB.

    adam = AdamStep(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, steps=steps)
    updates = adam_updates(parameters, m, v, grads=grads, adam=adam)      # lists of tensors

With g the gradient of weights w at step t (Kingma and Ba, arXiv:1412.6980, algorithm 1; the decay
of Loshchilov and Hutter, arXiv:1711.05101):
    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.torch_compat import supports_fused_optimizers
from optimizers.base import foreach_scalar, subtract_updates


@dataclass(frozen=True)
class AdamStep:
    """What a step of Adam needs besides its tensors."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    steps: Tensor  # t, () or of each tensor (tensors,); 0, of a skipped first step, counts as 1
    active: Tensor | None = None  # (), 0 where the step is skipped; None: it is not

    @classmethod
    def of(cls, group: dict[str, Any], steps: Tensor, *, active: Tensor | None) -> AdamStep:
        return cls(group["betas"], group["eps"], group["weight_decay"], steps, active)


def adam_updates(
    parameters: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    *,
    grads: list[Tensor],
    adam: AdamStep,
) -> list[Tensor]:
    """Updates the moments and returns u for each parameter, in the dtype of the moments.

    Args:
        parameters: w; they stay what they are.
        m, v, grads, adam: see `adam_update_`.
    """
    updates = [torch.empty_like(each) for each in m]
    torch._foreach_copy_(updates, parameters)
    adam_update_(updates, m, v, grads=grads, adam=adam)
    return updates


def adam_update_(
    w: list[Tensor], m: list[Tensor], v: list[Tensor], *, grads: list[Tensor], adam: AdamStep
) -> None:
    """Updates the moments m and v, and writes u over the weights w.

    Where torch has a fused kernel for the tensors, that takes one pass over memory. It is a step of
    AdamW at a rate of -1, which adds Adam's direction to the weights, with a decay of
    `weight_decay` - 1, which multiplies them by `weight_decay` before. In fp32 on a GPU,
    `weight_decay` - 1 is rounded to 6e-8, so that of much smaller decays nothing is left.

    Args:
        w: weights, dense, which become u; in a step that is skipped they are not u, but finite.
        m: first moments.
        v: second moments.
        grads: gradients; of a step that is skipped they may be non-finite.
        adam: of this step.
    """
    if _fits_fused_kernel(w, m, v, grads):
        _fused_adamw_(w, m, v, grads, adam, lr=-1.0, weight_decay=adam.weight_decay - 1)
    else:
        update_moments(m, v, grads=grads, adam=adam)
        weights_to_updates_(w, m, v, adam=adam)


def adamw_step_(
    w: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    *,
    grads: list[Tensor],
    adam: AdamStep,
    lr: float | Tensor,
) -> None:
    """Takes AdamW's step: updates the moments, and subtracts lr u from the weights.

    Args:
        w, m, v, grads, adam: see `adam_update_`; in a step that is skipped the weights stay.
        lr: learning rate, () if it is a tensor.
    """
    if _fits_fused_kernel(w, m, v, grads):
        _fused_adamw_(w, m, v, grads, adam, lr=lr, weight_decay=adam.weight_decay)
        return
    updates = adam_updates(w, m, v, grads=grads, adam=adam)
    if adam.active is not None:
        torch._foreach_mul_(updates, foreach_scalar(adam.active, updates))
    subtract_updates(w, updates, lr=lr)


def _fused_adamw_(
    w: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    grads: list[Tensor],
    adam: AdamStep,
    *,
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    """Takes a step of AdamW by torch's kernel, whose function would count the steps itself."""
    torch._fused_adamw_(
        w,
        grads,
        m,
        v,
        [],
        # On the tensors' device and in fp32, since a GPU's kernel reads them without a check.
        list(adam.steps.to(w[0].device, torch.float32).expand(len(w)).unbind()),
        lr=lr,
        beta1=adam.betas[0],
        beta2=adam.betas[1],
        weight_decay=weight_decay,
        eps=adam.eps,
        amsgrad=False,
        maximize=False,
        found_inf=(
            None if adam.active is None else (1 - adam.active).to(w[0].device, torch.float32)
        ),
    )


def _fits_fused_kernel(w: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether the fused kernel, which reads all tensors in the order of memory, can take these."""
    kinds = {(each.dtype, each.device) for tensors in (w, *others) for each in tensors}
    return (
        len(kinds) == 1
        and supports_fused_optimizers(w)
        and all(
            each.shape == like.shape and _have_same_order(each, like)
            for tensors in others
            for each, like in zip(tensors, w)
        )
    )


def _have_same_order(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same order in memory."""
    if one.stride() == other.stride():
        return True
    steps = zip(one.shape, one.stride(), other.stride())
    return all(size == 1 or step == other_step for size, step, other_step in steps)


def update_moments(
    m: list[Tensor], v: list[Tensor], *, grads: list[Tensor], adam: AdamStep
) -> None:
    """Updates Adam's two moments by the gradients; not where the step is skipped."""
    b1, b2 = adam.betas
    grads = [grad.to(each.dtype) for grad, each in zip(grads, m)]
    if adam.active is None:
        torch._foreach_lerp_(m, grads, 1 - b1)
        torch._foreach_mul_(v, b2)
    else:
        grads = [torch.where(adam.active > 0, grad, 0.0) for grad in grads]
        torch._foreach_mul_(m, foreach_scalar(1 - adam.active * (1 - b1), m))
        torch._foreach_add_(m, grads, alpha=1 - b1)
        torch._foreach_mul_(v, foreach_scalar(1 - adam.active * (1 - b2), v))
    torch._foreach_addcmul_(v, grads, grads, value=1 - b2)


def weights_to_updates_(
    w: list[Tensor], m: list[Tensor], v: list[Tensor], *, adam: AdamStep
) -> None:
    """Writes u over the weights w."""
    roots = list(torch._foreach_sqrt(v))
    counted = adam.steps.double().clamp(min=1)
    first, second = (1 - beta**counted for beta in adam.betas)
    _multiply_each_(roots, 1 / second.sqrt())
    torch._foreach_add_(roots, adam.eps)
    _multiply_each_(roots, first)
    torch._foreach_mul_(w, adam.weight_decay)
    torch._foreach_addcdiv_(w, m, roots)


def _multiply_each_(tensors: list[Tensor], factors: Tensor) -> None:
    """Multiplies the tensors by one factor (), or each by its own (tensors,)."""
    factors = foreach_scalar(factors, tensors)
    torch._foreach_mul_(tensors, list(factors.unbind()) if factors.ndim else factors)
