"""How the loss after a training step depends on how that step was made: the derivative through one virtual SGD step.

    gradient = meta_gradient(model, mixed_loss, clean_loss, weights, rate=0.1)     # of clean_loss() to `weights`

With w the weights, the virtual step is theta' = theta - a grad L_mix(theta, w), and with v the gradient of the clean loss at
theta', d L_clean(theta') / dw = - a d/dw (v . grad_theta L_mix(theta, w)): a mixed second derivative times a vector. It is
taken by central differences of dL_mix/dw at theta +- e v (as in DARTS, arXiv:1806.09055, equation 8), so no graph of
gradients is built and any model will do: four passes, two of which need no gradient to the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

STRETCH = 0.01  # length of e v beside that of theta


def meta_gradient(
    model: nn.Module,
    mixed_loss: Callable[[Tensor], Tensor],
    clean_loss: Callable[[], Tensor],
    weights: Tensor,
    rate: float,
    scale: Tensor | float = 1.0,
    stretch: float = STRETCH,
) -> Tensor:
    """Gradient to `weights` of `clean_loss()` at theta - rate * grad `mixed_loss(weights)`; of the shape of `weights`.

    Parameters, buffers (BatchNorm's statistics) and random states are left as they were; no `.grad` is touched. All
    passes see the same random numbers, so dropout is part of the function that is differentiated.

    Args:
        model: whose parameters step; not wrapped for data parallelism.
        mixed_loss, clean_loss: scalars, computed by `model`.
        weights: what the first depends on.
        rate: of the virtual step, a.
        scale: losses are multiplied by it in front of each backward pass, for fp16.
        stretch: length of the differences' step beside the parameters' own.
    """
    parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}

    def gradient(loss: Callable[[], Tensor], to: list[Tensor]) -> list[Tensor]:
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            found = torch.autograd.grad(loss() * scale, to, allow_unused=True, materialize_grads=True)
        return list(torch._foreach_div(found, scale))

    with torch.no_grad(), unchanged(parameters, list(model.buffers())) as start:
        step = gradient(lambda: mixed_loss(weights.detach()), parameters)
        torch._foreach_add_(parameters, step, alpha=-rate)
        del step  # a copy of the model less
        direction = gradient(clean_loss, parameters)
        epsilon = stretch * length(start) / length(direction)
        torch._foreach_mul_(direction, epsilon)
        leaf, sides = weights.detach().requires_grad_(), []
        for sign in (1, -1):
            torch._foreach_copy_(parameters, start)
            torch._foreach_add_(parameters, direction, alpha=sign)
            sides += gradient(lambda: mixed_loss(leaf), [leaf])
        return (sides[1] - sides[0]) * (rate / (2 * epsilon))


@contextlib.contextmanager
def unchanged(parameters: list[Tensor], buffers: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters and buffers are bit for bit what they were, whatever the block does to them; gives the parameters' copies."""
    start, before = ([tensor.detach().clone() for tensor in tensors] for tensors in (parameters, buffers))
    try:
        yield start
    finally:
        with torch.no_grad():
            for tensor, old in zip([*parameters, *buffers], [*start, *before]):
                tensor.copy_(old)


def length(tensors: list[Tensor]) -> Tensor:
    """Euclidean norm of all of them together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
