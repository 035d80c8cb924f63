"""Fused layers: each stores only its input and computes the rest again in the backward pass.

    fuse(model)                                     # in place; parameter names stay as they are
    y = conv_batch_norm(x, conv, norm=norm, relu=True)                       # relu(norm(conv(x)))
    y = mlp(x, linear1, linear2=linear2, activation="gelu")           # linear2(gelu(linear1(x)))
    fold_batch_norm(model)               # for evaluation: batch-norm goes into the convolutions

Written as three modules, convolution, batch-norm and ReLU store three buffers: the input of the
convolution, that of batch-norm and, for ReLU, the output, which the next convolution stores as its
input anyway. Here the second buffer is not stored, at the price of one more convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.resnet import ConvNormModule

ACTIVATIONS = {nn.ReLU: "relu", nn.GELU: "gelu"}


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Dtype in which a layer computes: that of autocast where it is enabled, else the weight's."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return weight.dtype


# -------------------------------------------------------------------- convolution, batch-norm, ReLU


class _ConvBatchNorm(torch.autograd.Function):
    """Convolution, batch-norm with the statistics of the batch and, where asked, ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        relu: bool,
    ) -> Tensor:
        y = F.conv2d(x, weight, None, stride, padding, dilation, groups)
        if y.numel() == y.shape[1]:
            raise ValueError(  # as nn.BatchNorm2d says it
                f"Expected more than 1 value per channel when training, got input size {y.shape}"
            )
        out, mean, inverse_std = torch.native_batch_norm(
            y, gamma, beta, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, gamma, beta, mean, inverse_std)
        ctx.geometry = stride, padding, dilation, groups
        ctx.eps = eps
        ctx.relu = relu
        return out.relu_() if relu else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, gamma, beta, mean, inverse_std = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        y = F.conv2d(x, weight, None, stride, padding, dilation, groups)
        if ctx.relu:
            scale = inverse_std if gamma is None else inverse_std * gamma
            shift = -mean * scale if beta is None else beta - mean * scale
            grad = grad * (y * scale[:, None, None] > -shift[:, None, None])
        grad_y, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(
            grad,
            y,
            gamma,
            None,  # running mean
            None,  # running variance
            mean,
            inverse_std,
            True,  # training
            ctx.eps,
            [True, gamma is not None, beta is not None],  # which gradients to compute
        )
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_y,
            x,
            weight,
            None,  # sizes of the bias
            stride,
            padding,
            dilation,
            False,  # transposed
            [0, 0],  # output padding
            groups,
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False],
        )
        grad_gamma = None if gamma is None else grad_gamma
        grad_beta = None if beta is None else grad_beta
        return grad_x, grad_weight, grad_gamma, grad_beta, *[None] * 9


def conv_batch_norm(x: Tensor, conv: nn.Conv2d, *, norm: nn.Module, relu: bool = False) -> Tensor:
    """Compute relu(norm(conv(x))) and store only x for the backward pass.

    Running statistics are updated as by nn.BatchNorm2d. In evaluation mode, or without gradients,
    the modules are called as they are.

    Args:
        x: (batch, channels, height, width).
        conv: a convolution without bias, since batch-norm would subtract it again, and with zero
            padding given in numbers.
        norm: nn.BatchNorm2d, or nn.Identity where it has been folded into `conv`. SyncBatchNorm is
            not supported: it would need the other ranks within this function.
        relu: whether ReLU follows.

    Returns:
        (batch, channels, height, width) of the output.

    Raises:
        ValueError: the modules are not as described, or a channel has a single value.
    """
    if isinstance(norm, nn.Identity) or not (norm.training and torch.is_grad_enabled()):
        y = norm(conv(x))
        return F.relu(y) if relu else y
    check_fusible(conv, norm)
    norm = cast(nn.BatchNorm2d, norm)
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the mean of all batches so far
            momentum = 1.0 / float(norm.num_batches_tracked)
    dtype = _compute_dtype(x, conv.weight)
    with torch.autocast(x.device.type, enabled=False):
        return _ConvBatchNorm.apply(
            x.to(dtype),
            conv.weight.to(dtype),
            norm.weight,
            norm.bias,
            norm.running_mean,
            norm.running_var,
            momentum,
            norm.eps,
            list(conv.stride),
            list(conv.padding),
            list(conv.dilation),
            conv.groups,
            relu,
        )


def check_fusible(conv: nn.Conv2d, norm: nn.Module) -> None:
    """Raise ValueError for layers that `conv_batch_norm` does not support."""
    if type(norm) is not nn.BatchNorm2d:
        raise ValueError(
            f"{type(norm).__name__} cannot be fused: only BatchNorm2d computes its statistics "
            "within one process"
        )
    if conv.bias is not None or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise ValueError(
            f"{conv} cannot be fused: it must have no bias, and zero padding given in numbers"
        )


# -------------------------------------------------------------------- linear, activation, linear


class _Mlp(torch.autograd.Function):
    """Linear, activation, linear on rows.

    Shapes: x (rows, inputs), w1 (hidden, inputs), w2 (outputs, hidden).
    """

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
        grad_active = grad @ w2
        if ctx.activation == "gelu":
            active = F.gelu(hidden)
            grad_hidden = torch.ops.aten.gelu_backward(grad_active, hidden)
        else:
            active = F.relu(hidden)
            grad_hidden = torch.ops.aten.threshold_backward(grad_active, hidden, 0)
        grad_w1, grad_b1 = grad_hidden.t() @ x, grad_hidden.sum(0)
        grad_w2, grad_b2 = grad.t() @ active, grad.sum(0)
        return grad_hidden @ w1, grad_w1, grad_b1, grad_w2, grad_b2, None


def mlp(x: Tensor, linear1: nn.Linear, *, linear2: nn.Linear, activation: str = "gelu") -> Tensor:
    """Compute linear2(activation(linear1(x))) and store only x for the backward pass.

    Args:
        x: (..., inputs).
        linear1: from inputs to hidden units, with bias.
        linear2: from hidden units to outputs, with bias.
        activation: 'relu' or 'gelu', the exact one.

    Returns:
        (..., outputs).
    """
    dtype = _compute_dtype(x, linear1.weight)
    with torch.autocast(x.device.type, enabled=False):
        rows = _Mlp.apply(
            x.flatten(0, -2).to(dtype),
            linear1.weight.to(dtype),
            linear1.bias.to(dtype),
            linear2.weight.to(dtype),
            linear2.bias.to(dtype),
            activation,
        )
        return rows.view(*x.shape[:-1], -1)


class FusedMlp(nn.Sequential):
    """Linear, activation and linear, computed by `mlp`.

    It holds the layers of the Sequential that it replaces under the same names.

    Args:
        layers: a Sequential for which `is_mlp` holds.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__(*layers)
        self.training = layers.training

    def forward(self, x: Tensor) -> Tensor:
        return mlp(
            x,
            cast(nn.Linear, self[0]),
            linear2=cast(nn.Linear, self[2]),
            activation=ACTIVATIONS[type(self[1])],
        )


def is_mlp(module: nn.Module) -> bool:
    """Tell whether a module is a plain Sequential of linear, activation and linear, with biases."""
    if type(module) is not nn.Sequential or len(module) != 3:
        return False
    first, activation, last = module
    if not isinstance(activation, (nn.ReLU, nn.GELU)):
        return False
    if isinstance(activation, nn.GELU) and activation.approximate != "none":
        return False
    return all(type(each) is nn.Linear and each.bias is not None for each in (first, last))


# -------------------------------------------------------------------- whole models


def fuse(model: nn.Module) -> int:
    """Fuse the layers of a model in place.

    Every `ConvNormModule` computes its layers by `conv_batch_norm`, and every MLP within `model`
    (see `is_mlp`) is replaced by a `FusedMlp` of the same layers. The names of parameters stay.

    Returns:
        The number of modules that were changed or replaced.
    """
    fused = 0
    for module in list(model.modules()):
        if isinstance(module, ConvNormModule):
            module.conv_norm = conv_batch_norm
            fused += 1
        for name, child in list(module.named_children()):
            if is_mlp(child):
                setattr(module, name, FusedMlp(cast(nn.Sequential, child)))
                fused += 1
    return fused


def fold_batch_norm(model: nn.Module) -> nn.Module:
    """Fold every batch-norm into the weights of the convolution before it, in place.

    Returns:
        The model, in evaluation mode.
    """
    model.eval()
    for module, conv_name, norm_name in list(_conv_norm_pairs(model)):
        conv, norm = getattr(module, conv_name), getattr(module, norm_name)
        setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
        setattr(module, norm_name, nn.Identity())
    return model


def _conv_norm_pairs(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, name of a convolution, name of the batch-norm that follows it).

    The order of the children tells which follows which in a Sequential or a ConvNormModule.
    """
    for module in model.modules():
        if isinstance(module, (nn.Sequential, ConvNormModule)):
            children = list(module.named_children())
            for (conv_name, conv), (norm_name, norm) in zip(children, children[1:]):
                if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                    yield module, conv_name, norm_name
