"""Layers in one autograd function, which keeps their input alone and computes the rest again in the backward pass.

    fuse(model)                                    # in place; parameter names and checkpoints stay as they are
    y = conv_batch_norm(x, conv, norm, relu=True)  # relu(norm(conv(x)))
    y = mlp(x, w1, b1, w2, b2, "gelu")             # linear, activation, linear
    fold_batch_norm(model)                                    # for evaluation: batch-norm goes into the convolution's weights

Written as three modules, convolution, batch-norm and ReLU keep three buffers: the input of the convolution, that of batch-norm and,
for ReLU, the output, which the next convolution keeps as its input anyway. Here the middle one goes, for one more convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

ACTIVATIONS = {nn.ReLU: "relu", nn.GELU: "gelu"}


class _ConvBatchNorm(torch.autograd.Function):
    """Training mode: statistics of the batch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, *rest: Any
    ) -> Tensor:
        mean, var, factor, ctx.eps, ctx.geometry, ctx.relu = rest
        y = F.conv2d(x, weight, None, *ctx.geometry)
        out, batch_mean, inverse = torch.native_batch_norm(
            y, gamma, beta, mean, var, True, factor, ctx.eps
        )
        ctx.save_for_backward(x, weight, gamma, beta, batch_mean, inverse)
        return out.relu_() if ctx.relu else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, gamma, beta, batch_mean, inverse = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        y = F.conv2d(x, weight, None, *ctx.geometry)
        if ctx.relu:
            scale = inverse if gamma is None else inverse * gamma
            shift = -batch_mean * scale if beta is None else beta - batch_mean * scale
            grad = grad * (y * _of_channels(scale) > -_of_channels(shift))
        needs = ctx.needs_input_grad
        wanted = [True, gamma is not None, beta is not None]
        grads = torch.ops.aten.native_batch_norm_backward(
            grad, y, gamma, None, None, batch_mean, inverse, True, ctx.eps, wanted
        )
        outer, of_gamma, of_beta = grads
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            outer,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            [0, 0],
            groups,
            [needs[0], needs[1], False],
        )
        return (
            of_x,
            of_weight,
            of_gamma if gamma is not None else None,
            of_beta if beta is not None else None,
            *[None] * 6,
        )


def _of_channels(values: Tensor) -> Tensor:
    """(channels,) -> (channels, 1, 1)."""
    return values[:, None, None]


def conv_batch_norm(x: Tensor, conv: nn.Conv2d, norm: Any, relu: bool = False) -> Tensor:
    """relu(norm(conv(x))), running statistics updated as nn.BatchNorm2d does; evaluation takes the modules as they are.

    Args:
        x: (batch, channels, height, width).
        conv: without bias, which batch-norm would take away again; zero padding in numbers.
        norm: nn.BatchNorm2d, not synchronised: its statistics would need the other ranks within the function.

    Raises:
        ValueError: the modules are not like that, or a channel has a single value.
    """
    if isinstance(norm, nn.Identity) or not (norm.training and torch.is_grad_enabled()):
        y = norm(conv(x))
        return F.relu(y) if relu else y
    check(conv, norm)
    dtype = (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else conv.weight.dtype
    )
    factor = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the mean of all batches so far
            factor = 1.0 / float(norm.num_batches_tracked)
    geometry = list(conv.stride), list(conv.padding), list(conv.dilation), conv.groups
    with torch.autocast(x.device.type, enabled=False):
        statistics = norm.running_mean, norm.running_var, factor, norm.eps
        return _ConvBatchNorm.apply(
            x.to(dtype), conv.weight.to(dtype), norm.weight, norm.bias, *statistics, geometry, relu
        )


def check(conv: nn.Conv2d, norm: nn.Module) -> None:
    """Raises ValueError for layers that cannot be fused."""
    if type(norm) is not nn.BatchNorm2d:
        raise ValueError(
            f"{type(norm).__name__} cannot be fused: its statistics are not this process's alone"
        )
    if conv.bias is not None or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError(
            f"{conv} cannot be fused: only without bias, with zero padding given in numbers"
        )


class _Mlp(torch.autograd.Function):
    """Linear, activation, linear on rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str
    ) -> Tensor:
        ctx.save_for_backward(x, w1, b1, w2)
        ctx.activation = activation
        hidden = torch.addmm(b1, x, w1.t())
        active = F.gelu(hidden) if activation == "gelu" else hidden.relu_()
        return torch.addmm(b2, active, w2.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w1, b1, w2 = ctx.saved_tensors
        hidden = torch.addmm(b1, x, w1.t())
        outer = grad @ w2
        if ctx.activation == "gelu":
            active, outer = F.gelu(hidden), torch.ops.aten.gelu_backward(outer, hidden)
        else:
            active, outer = F.relu(hidden), torch.ops.aten.threshold_backward(outer, hidden, 0)
        return outer @ w1, outer.t() @ x, outer.sum(0), grad.t() @ active, grad.sum(0), None


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str = "gelu"
) -> Tensor:
    """act(x w1' + b1) w2' + b2 of x (..., inputs), w1 (hidden, inputs), w2 (outputs, hidden); act is 'relu' or the exact 'gelu'."""
    dtype = (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else w1.dtype
    )
    with torch.autocast(x.device.type, enabled=False):
        rows, *weights = (tensor.to(dtype) for tensor in (x.flatten(0, -2), w1, b1, w2, b2))
        return _Mlp.apply(rows, *weights, activation).view(*x.shape[:-1], -1)


class Mlp(nn.Sequential):
    """A Sequential of linear, activation and linear that runs through `mlp`."""

    def forward(self, x: Tensor) -> Tensor:
        first, activation, last = self[0], self[1], self[2]
        return mlp(
            x, first.weight, first.bias, last.weight, last.bias, ACTIVATIONS[type(activation)]
        )  # type: ignore[arg-type]


# -------------------------------------------------------------------- whole models


def fuse(model: nn.Module) -> int:
    """Let all modules that have a `join` (resnet.py) take `conv_batch_norm`, and each MLP become a `Mlp`; returns how many."""
    found = 0
    for module in model.modules():
        if hasattr(module, "join"):
            module.join = conv_batch_norm  # type: ignore[assignment]
            found += 1
        elif type(module) is nn.Sequential and is_mlp(module):
            module.__class__ = Mlp
            found += 1
    return found


def is_mlp(module: nn.Sequential) -> bool:
    """Whether it is linear, activation, linear, with biases."""
    if [type(part) for part in module] not in (
        [nn.Linear, kind, nn.Linear] for kind in ACTIVATIONS
    ):
        return False
    approximate = getattr(module[1], "approximate", "none")
    return approximate == "none" and module[0].bias is not None and module[2].bias is not None


def pairs(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, name of a convolution, name of the batch-norm after it) where names or a Sequential tell."""
    for module in model.modules():
        names = [name for name, _ in module.named_children()]
        for first, second in zip(names, names[1:]):
            conv, norm = getattr(module, first), getattr(module, second)
            next_to = isinstance(module, nn.Sequential) or hasattr(module, "join")
            if next_to and isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                yield module, first, second


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """For evaluation, in place: batch-norm goes into the weights of the convolution before it."""
    model.eval()
    for module, conv, norm in list(pairs(model)):
        setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
        setattr(module, norm, nn.Identity())
    return model
