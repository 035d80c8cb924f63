"""Fused layers: each stores only its input and computes the rest again in the backward pass.

    fuse(model)                                     # in place; parameter names stay as they are
    y = conv_batch_norm(x, conv, norm=norm, relu=True)                       # relu(norm(conv(x)))

Written as three modules, convolution, batch-norm and ReLU store three buffers: the input of the
convolution, that of batch-norm and, for ReLU, the output, which the next convolution stores as its
input anyway. Here the second buffer is not stored, at the price of one more convolution.
"""

from collections import OrderedDict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from models.resnet import ConvNormModule


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
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        stride: list[int],
        padding: list[int],
        relu: bool,
    ) -> Tensor:
        y = F.conv2d(x, weight, None, stride, padding)
        if y.numel() == y.shape[1]:
            raise ValueError(  # as nn.BatchNorm2d says it
                f"Expected more than 1 value per channel when training, got input size {y.shape}"
            )
        out, mean, inverse_std = torch.native_batch_norm(
            y, gamma, beta, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, gamma, beta, mean, inverse_std)
        ctx.stride, ctx.padding = stride, padding
        ctx.eps = eps
        ctx.relu = relu
        return out.relu_() if relu else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, gamma, beta, mean, inverse_std = ctx.saved_tensors
        y = F.conv2d(x, weight, None, ctx.stride, ctx.padding)
        if ctx.relu:
            scale = inverse_std * gamma
            shift = beta - mean * scale
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
            [True, True, True],  # which gradients to compute
        )
        grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
            grad_y,
            x,
            weight,
            None,  # sizes of the bias
            ctx.stride,
            ctx.padding,
            [1, 1],  # dilation
            False,  # transposed
            [0, 0],  # output padding
            1,  # groups
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False],
        )
        return grad_x, grad_weight, grad_gamma, grad_beta, *[None] * 7


def conv_batch_norm(x: Tensor, conv: nn.Conv2d, *, norm: nn.Module, relu: bool = False) -> Tensor:
    """Compute relu(norm(conv(x))) and store only x for the backward pass.

    Running statistics are updated as by nn.BatchNorm2d. In evaluation mode, or without gradients,
    the modules are called as they are.

    Args:
        x: (batch, channels, height, width).
        conv: a convolution without bias, since batch-norm would subtract it again, of one group and
            without dilation.
        norm: nn.BatchNorm2d with a momentum and with weight and bias. SyncBatchNorm is not
            supported: it would need the other ranks within this function.
        relu: whether ReLU follows.

    Returns:
        (batch, channels, height, width) of the output.

    Raises:
        ValueError: a channel has a single value.
    """
    if not (norm.training and torch.is_grad_enabled()):
        y = norm(conv(x))
        return F.relu(y) if relu else y
    norm = cast(nn.BatchNorm2d, norm)
    if norm.num_batches_tracked is not None:  # None within a recomputed block
        norm.num_batches_tracked.add_(1)
    dtype = _compute_dtype(x, conv.weight)
    with torch.autocast(x.device.type, enabled=False):
        return _ConvBatchNorm.apply(
            x.to(dtype),
            conv.weight.to(dtype),
            norm.weight,
            norm.bias,
            norm.running_mean,
            norm.running_var,
            norm.momentum,
            norm.eps,
            list(conv.stride),
            list(conv.padding),
            relu,
        )


# -------------------------------------------------------------------- linear, activation, linear


class FusedMlp(nn.Sequential):
    """Linear, activation and linear, which store only their input for the backward pass.

    It holds the layers of the Sequential that it replaces under the same names.

    Args:
        layers: a Sequential for which `is_mlp` holds.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__(OrderedDict(layers.named_children()))
        self.training = layers.training

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(_compute_dtype(x, cast(nn.Linear, self[0]).weight))
        # torch stops before the second linear layer, whose output the backward pass needs not.
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def is_mlp(module: nn.Module) -> bool:
    """Tell whether a module is a plain Sequential of linear, activation and linear."""
    kinds = [type(layer) for layer in module.children()]
    is_sequential = type(module) is nn.Sequential and len(kinds) == 3
    return is_sequential and kinds[0] is kinds[2] is nn.Linear and kinds[1] in (nn.ReLU, nn.GELU)


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
