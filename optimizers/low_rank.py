"""Thin products of gradients with a few directions along one of their axes, for NGD and KaldiNGD.

    X = gradients.view(batch, left, D, right)     # left and right of the axis in memory
    H = project(W, X)                             # with W (batch, rank, D)
    subtract_projection(X, H, W=W)                # X - X W'W along the axis

Nothing is transposed in memory. H is (batch, left, rank) where the axis is the last one, which is
where `right` is 1, and (batch left, rank, right) elsewhere.
"""

from functools import partial

import torch
from torch import Tensor

NORM_PART = 512  # elements of a norm in fp32


def project(W: Tensor, X: Tensor, *, buffer: Tensor | None = None) -> Tensor:
    """Computes H, the components of X along the rows of W.

    Args:
        W: (batch, rank, D).
        X: (batch, left, D, right), contiguous.
        buffer: flat memory for the result; None: new memory.
    """
    (batch, left, dim, right), rank = X.shape, W.shape[1]
    shape = (batch, left, rank) if right == 1 else (batch * left, rank, right)
    out = None if buffer is None else buffer[: batch * left * rank * right].view(shape)
    if right == 1:
        return torch.bmm(X.view(batch, left, dim), W.mT, out=out)
    return torch.bmm(_repeat(W, left), X.view(batch * left, dim, right), out=out)


def second_moment(H: Tensor, X: Tensor) -> Tensor:
    """Computes J = W X'X along the axis, (batch, rank, D), from H of `project`."""
    batch, left, dim, right = X.shape
    if right == 1:
        return torch.bmm(H.mT, X.view(batch, left, dim))
    J = torch.bmm(H, X.view(batch * left, dim, right).mT)
    return J if left == 1 else J.view(batch, left, -1, dim).sum(1)


def subtract_projection(X: Tensor, H: Tensor, *, W: Tensor) -> None:
    """Subtracts H W along the axis from X (batch, left, D, right) in place."""
    batch, left, dim, right = X.shape
    if right == 1:
        X.view(batch, left, dim).baddbmm_(H, W, alpha=-1)
    else:
        X.view(batch * left, dim, right).baddbmm_(_repeat(W, left).mT, H, alpha=-1)


def row_norms(X: Tensor) -> Tensor:
    """Returns the norm of each row of X (batch, elements), shape (batch,), float64.

    On a CPU torch adds millions of squares one after the other, and in fp32 the sum is off by 1e-4:
    there it is of the norms of parts.
    """
    norm = partial(torch.linalg.vector_norm, dtype=torch.promote_types(X.dtype, torch.float32))
    if X.device.type != "cpu":
        return norm(X, dim=1).double()
    whole = X.shape[1] // NORM_PART * NORM_PART
    parts = norm(X[:, :whole].unflatten(1, (-1, NORM_PART)), dim=2)
    rest = norm(X[:, whole:], dim=1, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([parts, rest], dim=1).double(), dim=1)


def _repeat(W: Tensor, times: int) -> Tensor:
    """Returns each matrix of W (batch, rank, D) `times` times in a row, (batch times, rank, D)."""
    return W[:, None].expand(-1, times, -1, -1).reshape(-1, *W.shape[1:])
