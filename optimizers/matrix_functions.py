"""Square roots of symmetric matrices, in batches, without waiting for a GPU.

    root = square_root(M)             # root @ root = M, for M (batch, n, n), float64
    absolute_value(A)                 # the eigenvalues of A without their signs

On a CPU they come from torch's eigendecomposition. On a GPU that makes the host wait, and torch up
to 2.11 decomposes matrices of more than 32 rows one after another. There they come from

    1 / sqrt(x) = sum over j of w_j / (x + p_j),

so that an inverse root is a weighted sum of the inverses of M + p_j I, all of them computed in one
call. The poles p and weights w are those of Zolotarev's best approximation (Hale, Higham and
Trefethen, SIAM J. Numer. Anal. 46, 2008; Nakatsukasa and Freund, SIAM Review 58, 2016).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EIGH_DEVICES = {"cpu"}  # on which an eigendecomposition is quick and nobody waits for it

# Relative to the trace of the matrix. For eigenvalues from RANGE^2 to 1 times the trace the root's
# relative error is at most MAX_ERROR; that of smaller ones is too small, and that of 0 is 0.
RANGE = 5e-4
MAX_ERROR = 7.6e-6
TERMS = (  # pole and weight of each
    (3.672583794208e-08, 2.553033874574e-04),
    (4.726972376994e-07, 4.053231918232e-04),
    (2.519909301019e-06, 7.935174386494e-04),
    (1.169716998360e-05, 1.648003824996e-03),
    (5.274503214621e-05, 3.470980605718e-03),
    (2.363383585510e-04, 7.334510821236e-03),
    (1.057805434263e-03, 1.551697080873e-02),
    (4.739782872955e-03, 3.290338885469e-02),
    (2.137269103132e-02, 7.044455314022e-02),
    (9.920991993659e-02, 1.574496031138e-01),
    (5.288797565750e-01, 4.287344620545e-01),
    (6.807196624272e00, 3.475800714452e00),
)
POLES, WEIGHTS = zip(*TERMS, strict=True)


def square_root(M: Tensor) -> Tensor:
    """Computes M^(1/2) of symmetric matrices (batch, n, n) without negative eigenvalues, float64.

    On a CPU it is exact, on other devices to MAX_ERROR, see above; there M may not be 0.
    """
    if M.device.type in EIGH_DEVICES:
        return _with_eigenvalues(M, lambda eigenvalues: eigenvalues.clamp(min=0).sqrt())
    return M @ inverse_square_root(M)


def absolute_value(A: Tensor) -> Tensor:
    """Computes (A^2)^(1/2) of symmetric matrices (batch, n, n), float64, as `square_root` does."""
    if A.device.type in EIGH_DEVICES:
        return _with_eigenvalues(A, torch.abs)
    return square_root(A @ A)


def inverse_square_root(M: Tensor) -> Tensor:
    """Computes M^(-1/2) of symmetric positive definite matrices (batch, n, n), float64.

    On a CPU it is exact; on other devices, for eigenvalues from RANGE^2 to 1 times the trace, its
    relative error is at most MAX_ERROR, and of smaller ones it is too small.
    """
    if M.device.type in EIGH_DEVICES:
        return _with_eigenvalues(M, lambda eigenvalues: eigenvalues.clamp(min=0).rsqrt())
    eye = torch.eye(M.shape[1], dtype=M.dtype, device=M.device)
    trace = traces(M)
    inverses = inverse(M[:, None] + _multiples(trace, POLES)[:, :, None, None] * eye)
    factors = _multiples(trace.sqrt(), WEIGHTS)
    return torch.bmm(factors[:, None], inverses.flatten(2)).view_as(M)


def inverse(A: Tensor) -> Tensor:
    """Computes the inverses of symmetric positive definite matrices (..., n, n).

    Cholesky's factors give them, since LU factors of many matrices on a GPU may make the host wait.
    A matrix that is not positive definite has NaN or a meaningless inverse.
    """
    L, _ = torch.linalg.cholesky_ex(A)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    L_inverse = torch.linalg.solve_triangular(L, eye, upper=False)
    return L_inverse.mT @ L_inverse


def traces(A: Tensor) -> Tensor:
    """Returns the traces (batch,) of matrices (batch, n, n)."""
    return A.diagonal(dim1=1, dim2=2).sum(1)


def _with_eigenvalues(A: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the matrices with a function of their eigenvalues (batch, n) in their place."""
    eigenvalues, vectors = torch.linalg.eigh(torch.nan_to_num(A, 0.0, 0.0, 0.0))
    return (vectors * function(eigenvalues)[:, None]) @ vectors.mT


def _multiples(x: Tensor, factors: Sequence[float]) -> Tensor:
    """Returns x (batch,) times each factor, (batch, factors), from one kernel launch and a copy."""
    return torch.stack(torch._foreach_mul([x] * len(factors), list(factors)), dim=1)
