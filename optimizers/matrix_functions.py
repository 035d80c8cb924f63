"""Square roots of symmetric matrices, in batches, without waiting for a GPU.

    root = SquareRoot(M)
    root.matrix                       # root.matrix @ root.matrix = M
    root.distance_from(level)         # |root.matrix - level I|, of which all eigenvalues are >= 0

On a CPU both come from torch's eigendecomposition of M. On a GPU that makes the host wait, and
torch up to 2.11 decomposes matrices of more than 32 rows one after another. There both come from

    sqrt(x) = sum over j of w_j x / (x + p_j) = sum over j of w_j (1 - p_j / (x + p_j)),

so that a root is a weighted sum of the inverses of M + p_j I, all of them computed in one call. The
poles p and weights w are those of Zolotarev's best approximation (Hale, Higham and Trefethen, SIAM
J. Numer. Anal. 46, 2008; Nakatsukasa and Freund, SIAM Review 58, 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EIGH_DEVICES = {"cpu"}  # on which an eigendecomposition is quick and nobody waits for it

# Relative to the trace of the matrix. For eigenvalues from RANGE^2 to 1 times the trace the root's
# relative error is at most MAX_ERROR; that of smaller ones is too small, and that of 0 is 0.
RANGE = 5e-4
MAX_ERROR = 7.6e-6
POLES = (
    3.672583794208e-08,
    4.726972376994e-07,
    2.519909301019e-06,
    1.169716998360e-05,
    5.274503214621e-05,
    2.363383585510e-04,
    1.057805434263e-03,
    4.739782872955e-03,
    2.137269103132e-02,
    9.920991993659e-02,
    5.288797565750e-01,
    6.807196624272e00,
)
WEIGHTS = (
    2.553033874574e-04,
    4.053231918232e-04,
    7.935174386494e-04,
    1.648003824996e-03,
    3.470980605718e-03,
    7.334510821236e-03,
    1.551697080873e-02,
    3.290338885469e-02,
    7.044455314022e-02,
    1.574496031138e-01,
    4.287344620545e-01,
    3.475800714452e00,
)


class SquareRoot:
    """The square root of symmetric matrices (batch, n, n) without negative eigenvalues, float64."""

    matrix: Tensor  # (batch, n, n)

    def __init__(self, M: Tensor) -> None:
        self.has_eigenvectors = M.device.type in EIGH_DEVICES
        if self.has_eigenvectors:
            squares, self.vectors = torch.linalg.eigh(torch.nan_to_num(M, 0.0, 0.0, 0.0))
            self.eigenvalues = squares.clamp(min=0).sqrt()
            self.matrix = self._with(self.eigenvalues)
        else:
            self.matrix = sqrt_by_inverses(M)

    def distance_from(self, level: Tensor) -> Tensor:
        """Computes the absolute value (batch, n, n) of the root less `level` (batch,) times I."""
        if self.has_eigenvectors:
            return self._with((self.eigenvalues - level[:, None]).abs())
        eye = torch.eye(self.matrix.shape[1], dtype=level.dtype, device=level.device)
        difference = self.matrix - level[:, None, None] * eye
        return sqrt_by_inverses(difference @ difference)

    def _with(self, eigenvalues: Tensor) -> Tensor:
        """Returns the matrices with these eigenvalues (batch, n) instead."""
        return (self.vectors * eigenvalues[:, None]) @ self.vectors.mT


def sqrt_by_inverses(M: Tensor) -> Tensor:
    """Computes the roots of matrices to MAX_ERROR by inverses alone.

    Args:
        M: symmetric matrices (batch, n, n), float64, not 0.
    """
    eye = torch.eye(M.shape[1], dtype=M.dtype, device=M.device)
    trace = M.diagonal(dim1=1, dim2=2).sum(1)
    shifts = _multiples(trace, POLES)  # (batch, poles)
    inverses = inverse(M[:, None] + shifts[:, :, None, None] * eye)
    factors = _multiples(trace, [w * p for w, p in zip(WEIGHTS, POLES)])
    weighted = torch.bmm(factors[:, None], inverses.flatten(2)).view_as(M)
    return trace.sqrt()[:, None, None] * (sum(WEIGHTS) * eye - weighted)


def inverse_square_root(M: Tensor) -> Tensor:
    """Computes M^(-1/2) of symmetric positive definite matrices (batch, n, n), float64.

    On a CPU it is exact; on other devices, for eigenvalues from RANGE^2 to 1 times the trace, its
    relative error is at most MAX_ERROR, and of smaller ones it is too small.
    """
    if M.device.type in EIGH_DEVICES:
        eigenvalues, vectors = torch.linalg.eigh(torch.nan_to_num(M, 0.0, 0.0, 0.0))
        return (vectors * eigenvalues.clamp(min=0).rsqrt()[:, None]) @ vectors.mT
    eye = torch.eye(M.shape[1], dtype=M.dtype, device=M.device)
    trace = M.diagonal(dim1=1, dim2=2).sum(1)
    inverses = inverse(M[:, None] + _multiples(trace, POLES)[:, :, None, None] * eye)
    factors = _multiples(trace.sqrt(), WEIGHTS)
    return torch.bmm(factors[:, None], inverses.flatten(2)).view_as(M)


def inverse(A: Tensor) -> Tensor:
    """Computes the inverses of symmetric positive definite matrices (..., n, n).

    They come from Cholesky's factors: for LU factors of many matrices torch's library for GPUs may
    make the host wait. What is not positive definite has an inverse without meaning, or NaN.
    """
    L, _ = torch.linalg.cholesky_ex(A)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    L_inverse = torch.linalg.solve_triangular(L, eye, upper=False)
    return L_inverse.mT @ L_inverse


def _multiples(x: Tensor, factors: Sequence[float]) -> Tensor:
    """Returns x (batch,) times each factor, (batch, factors), from one kernel launch and a copy."""
    return torch.stack(torch._foreach_mul([x] * len(factors), list(factors)), dim=1)
