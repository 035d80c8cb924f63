"""Roots and absolute values of matrices, with and without eigendecompositions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizers import matrix_functions
from optimizers.matrix_functions import MAX_ERROR, POLES, RANGE, WEIGHTS, SquareRoot


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


@pytest.fixture(params=["eigh", "inverses"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """The relative error that is allowed, on the way of CPUs and on that of GPUs."""
    if request.param == "eigh":
        return 1e-9
    monkeypatch.setattr(matrix_functions, "EIGH_DEVICES", set())
    return MAX_ERROR


def test_the_root_has_the_roots_of_the_eigenvalues(path: float) -> None:
    eigenvalues = spectra()
    root = SquareRoot(with_eigenvalues(eigenvalues)).matrix
    expected = with_eigenvalues(eigenvalues.sqrt())
    error = torch.linalg.matrix_norm(root - expected, 2) / eigenvalues.amax(1).sqrt()
    assert error.max() < path
    computed = torch.linalg.eigvalsh(root).flip(1) / eigenvalues.sqrt()
    assert (computed - 1).abs().max() < max(1.01 * path, 1e-7)


def test_the_distance_from_a_level_has_those_of_the_eigenvalues(path: float) -> None:
    roots = spectra()[:3].sqrt()
    level = roots.mean(1)
    expected = with_eigenvalues((roots - level[:, None]).abs())
    distance = SquareRoot(with_eigenvalues(roots**2)).distance_from(level)
    error = torch.linalg.matrix_norm(distance - expected, 2) / roots.amax(1)
    assert error.max() < 3 * path


def approximate_sqrt(x: Tensor) -> Tensor:
    terms = [w * x / (x + p) for w, p in zip(WEIGHTS, POLES)]
    return torch.stack(terms).sum(0)


def test_no_sum_of_as_many_inverses_has_a_smaller_error() -> None:
    """The relative error reaches its limit with alternating sign, as only that of the best does."""
    x = torch.logspace(0, 2 * torch.tensor(RANGE).log10().item(), 200_001, dtype=torch.float64)
    error = approximate_sqrt(x) / x.sqrt() - 1
    assert error.abs().max() < MAX_ERROR
    extremes = error[error.abs() > 0.9999 * error.abs().max()].sign()
    assert 1 + int((extremes[1:] != extremes[:-1]).sum()) == 2 * len(POLES) + 1


def test_eigenvalues_below_the_range_have_smaller_roots() -> None:
    x = torch.logspace(-20, 2 * torch.tensor(RANGE).log10().item(), 1000, dtype=torch.float64)
    root = approximate_sqrt(x)
    assert (root <= x.sqrt() * (1 + MAX_ERROR)).all()
    assert (root.diff() > 0).all()
    assert approximate_sqrt(torch.zeros(1)) == 0


def test_what_is_not_finite_raises_nothing(path: float) -> None:
    matrices = with_eigenvalues(spectra()[:2])
    matrices[0, 3, 4] = torch.nan
    level = torch.ones(2, dtype=torch.float64)
    both, second = SquareRoot(matrices), SquareRoot(matrices[1:])
    assert torch.equal(both.matrix[1], second.matrix[0])
    assert torch.equal(both.distance_from(level)[1], second.distance_from(level[1:])[0])
