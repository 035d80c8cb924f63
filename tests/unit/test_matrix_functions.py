"""Roots and absolute values of matrices, with and without eigendecompositions."""

import pytest
import torch
from torch import Tensor

from optimizers import matrix_functions
from optimizers.matrix_functions import MAX_ERROR, absolute_value, inverse_square_root, square_root


def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """A symmetric matrix for each row of eigenvalues (batch, n), float64."""
    generator = torch.Generator().manual_seed(0)
    count, size = eigenvalues.shape
    random = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(random)[0]
    return (Q * eigenvalues[:, None]) @ Q.mT


def spectra(size: int = 20) -> Tensor:
    """Eigenvalues (batch, size) from RANGE^2 to 1 times their sum, of several shapes and scales."""
    spread = torch.logspace(0, -6, size, dtype=torch.float64)
    flat = torch.ones(size, dtype=torch.float64)
    one = torch.cat([flat[:1], torch.full((size - 1,), 3e-7, dtype=torch.float64)])
    return torch.stack([spread, flat, one, 1e-80 * spread, 1e80 * one])


@pytest.mark.parametrize("way", ["eigh", "inverses"])
def test_they_have_the_function_of_the_eigenvalues_on_cpus_and_on_gpus(way, monkeypatch):
    limit = 1e-9
    if way == "inverses":
        monkeypatch.setattr(matrix_functions, "EIGH_DEVICES", set())
        limit = MAX_ERROR
    eigenvalues = spectra()
    M, roots = with_eigenvalues(eigenvalues), eigenvalues.sqrt()
    shifted = roots[:3:2] - roots[:3:2].mean(1, keepdim=True)
    for found, expected in (
        (square_root(M), roots),
        (inverse_square_root(M), 1 / roots),
        (absolute_value(with_eigenvalues(shifted)), shifted.abs()),
    ):
        error = torch.linalg.matrix_norm(found - with_eigenvalues(expected), 2)
        assert (error / expected.amax(1)).max() < 3 * limit
    computed = torch.linalg.eigvalsh(square_root(M)).flip(1) / roots
    assert (computed - 1).abs().max() < max(1.01 * limit, 1e-7)
    M[0, 3, 4] = torch.nan  # which raises nothing, and leaves the other matrices alone
    assert torch.equal(square_root(M)[1], square_root(M[1:])[0])
