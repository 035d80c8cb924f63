"""KaldiNGD and its Fisher estimates equal the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conftest import each_of
from kaldi_ngd_cases import SGD, Shapes, assert_same, distance, estimates, parameters_of, weights
from kaldi_ngd_oracle import Axis, Oracle
from optimizers import fisher
from optimizers.kaldi_ngd import KaldiNGD
from trainers import build_optimizer

pytestmark = pytest.mark.filterwarnings("error")


def correlated(
    shape: Sequence[int], steps: int, seed: int = 1, decay: float = 3.0, spike: float = 0.0
) -> Iterator[Tensor]:
    """Yields random float64 gradients, mixed along each axis by an ill-conditioned matrix.

    The spectrum of the matrix falls by `decay` decades.

    At steps 20 to 24 a gradient of rank one, `spike` times as large, is added.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = []
    for dim in shape:
        left, right = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64)
        mixing.append(
            torch.linalg.qr(left)[0]
            * torch.logspace(0, -decay, dim, dtype=torch.float64)
            @ right
            / dim**0.5
        )
    for step in range(steps):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        if 20 <= step < 25:
            gradient = gradient + spike * gradient[:1]
        for axis, matrix in enumerate(mixing):
            gradient = torch.tensordot(gradient, matrix, dims=([axis], [0])).movedim(-1, axis)
        yield gradient


def compare_with_oracle(
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    decay: float = 3.0,
    spike: float = 0.0,
    update_period: int = 4,
    **settings: Any,
) -> list[Oracle]:
    """Asserts that KaldiNGD equals the oracle in 50 steps.

    The directions are equal and have the gradient's norm, the estimates are equal, and the rows of
    the factors are orthogonal.
    """
    parameters = weights(shapes, dtype)
    optimizer = KaldiNGD(
        parameters, lr=1.0, momentum=0.0, min_ndim=1, update_period=update_period, **settings
    )
    oracles = [Oracle(shape, period=update_period, **settings) for shape in shapes]
    tolerance, exact = (2e-9, 2e-9) if dtype == torch.float64 else (1e-5, 1e-6)
    if spike or (30, 500) in shapes:  # much of the gradient cancels
        tolerance *= 5
    for step in zip(
        *(correlated(shape, 50, seed, decay, spike) for seed, shape in enumerate(shapes))
    ):
        for p, gradient in zip(parameters, step):
            p.detach().zero_()
            p.grad = gradient.to(dtype)
        optimizer.step()
        phases = {
            p: batch.phase for batch in optimizer.schedule.batches[0] for p in batch.parameters
        }
        for p, oracle in zip(parameters, oracles):
            for axis in oracle.axes.values():
                axis.phase = phases[p] - 1  # the oracle counts its steps from 1
            assert distance(-p, oracle(p.grad)) < tolerance, tuple(p.shape)
            assert distance(p.norm(), p.grad.norm()) < exact
            for number, axis in oracle.axes.items():
                factor = optimizer.state[p][f"axis{number}_factor"].double()
                assert_same(factor.mT @ factor, axis.W.mT @ axis.W, tolerance)
    for p, oracle in zip(parameters, oracles):
        assert {name for name in optimizer.state[p] if "factor" in name} == {
            f"axis{number}_factor" for number in oracle.axes
        }
        for number, axis in oracle.axes.items():
            floors = [
                optimizer.state[p][f"axis{number}_{name}"] for name in ("floor", "smoothed_floor")
            ]
            trace = axis.D * axis.rho + axis.d.sum()
            expected = [axis.rho, axis.rho + axis.alpha / axis.D * trace]
            torch.testing.assert_close(
                torch.stack(floors),
                torch.tensor(expected, dtype=torch.float64)
                * (p.numel() // axis.D),  # ours are without the 1 / N
                rtol=100 * tolerance,
                atol=0,
            )
    return oracles


# N > D and N < D, N <= R, R = 32 < D / 2, one matrix and two thin ones; kernels, one of them too
# large for a matrix; a middle axis
CASES = (
    "40 9 300x40 30x500 170x33 2x9 16x17 1x50 50x1 1x1 "
    "64x32x3x3 2x1x3x3 16x8x5x5 3x24x4x4 60x40x1x1 6x20x9x9 8x20x100 20x30x6"
)
SETTINGS = [
    ("300x40", {"spike": 1e4}),
    ("30x500", {"rank": 80}),
    ("64x65", {"max_dim": 64}),
    ("12x10x3x5", {"max_dim": 4}),  # of the kernel, the first axis alone
    ("12x10x5x3", {"max_dim": 4}),  # the last alone
    ("40x30", {"rank": 5, "alpha": 0.5, "eta": 0.3, "update_period": 3}),
]


@each_of("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@each_of(("shape", "settings"), [*((case, {}) for case in CASES.split()), *SETTINGS], ids=str)
def test_direction_and_estimates_equal_the_oracle(
    shape: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    compare_with_oracle([tuple(map(int, shape.split("x")))], dtype, **settings)


@pytest.mark.parametrize("decay", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("rank", [16, 80])
def test_without_eigendecompositions_the_direction_is_nearly_that_of_the_oracle(
    rank: int, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizers.matrix_functions.EIGH_DEVICES", set())
    monkeypatch.setattr("optimizers.fisher.EIGH_DEVICES", set())
    monkeypatch.delattr("optimizers.matrix_functions.SquareRoot._with")
    shapes = [(300, 40), (30, 200), (64, 32, 3, 3), (5, 8, 70)]
    parameters = weights(shapes)
    optimizer = KaldiNGD(parameters, lr=1.0, momentum=0.0, rank=rank)
    oracles = [Oracle(shape, rank=rank) for shape in shapes]
    gradients = [
        correlated(shape, 200, seed, decay=decay, spike=1e3) for seed, shape in enumerate(shapes)
    ]
    for step in zip(*gradients):
        for p, gradient in zip(parameters, step):
            p.detach().zero_()
            p.grad = gradient.float()
        optimizer.step()
        for batch in optimizer.schedule.batches[0]:
            for p in batch.parameters:
                oracle = oracles[[q is p for q in parameters].index(True)]
                for axis in oracle.axes.values():
                    axis.phase = batch.phase - 1  # the oracle counts its steps from 1
                cosine = F.cosine_similarity(-p.double().flatten(), oracle(p.grad).flatten(), dim=0)
                assert cosine > 0.9999, (tuple(p.shape), 1 - cosine)


@pytest.mark.parametrize("missing", [0, 1, 30])
def test_rows_that_are_made_up_change_nothing(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sums of inverses the roots of a small matrix are as exact beside made-up rows."""
    monkeypatch.setattr("optimizers.matrix_functions.EIGH_DEVICES", set())
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -2, 6, dtype=torch.float64)
    X = torch.randn(50, 6, generator=generator, dtype=torch.float64) * scale
    W = fisher.initial_factor(3, 6, alpha=1.0)
    rho = beta = torch.zeros(1, dtype=torch.float64)
    for _ in range(10):
        rows = torch.cat([W, W @ X.T @ X])[None]
        A, rho, beta, is_valid = fisher.update_estimates(
            fisher._padded_gram(rows, size=3 + missing),
            rho=rho,
            beta=beta,
            dim=torch.tensor([6.0], dtype=torch.float64),
            rank=torch.tensor([3.0], dtype=torch.float64),
            g0=X.square().sum()[None],
            squared_norm=X.square().sum()[None],
            alpha=1.0,
            eta=0.1,
        )
        assert is_valid.all()
        W = (fisher._unpadded(A, rank=3) @ rows)[0]
    oracle = Axis(6, rank=3, alpha=1.0, eta=0.1)
    oracle.W = fisher.initial_factor(3, 6, alpha=1.0)
    for _ in range(10):
        oracle.update(X, float(X.square().sum()))
    assert_same(W.mT @ W, oracle.W.mT @ oracle.W, 2e-5)
    assert_same(rho / len(X), torch.tensor([oracle.rho], dtype=torch.float64), 1e-5)


def test_the_oracle_meets_floors_and_rows_that_must_be_orthogonalised() -> None:
    steep = compare_with_oracle([(64, 48)], spike=1e4)[0].axes.values()
    flat = compare_with_oracle([(64, 48)], decay=0.0)[0].axes.values()
    assert all(axis.floored > 15 and axis.reorthonormalised > 1 for axis in steep)
    assert all(axis.floored <= 1 and not axis.reorthonormalised for axis in flat)


def test_parameters_in_one_optimizer_equal_an_oracle_each() -> None:
    compare_with_oracle(
        [(40, 30), (40, 30), (30, 40), (24, 10, 3, 3), (40, 30), (24, 10, 3, 3), (9, 5), (5, 8, 70)]
    )


def test_momentum_decay_and_rate_come_after_the_preconditioning() -> None:
    ours, theirs, settings = weights([(40, 30)]), weights([(40, 30)]), SGD | {"nesterov": True}
    optimizer, peer, oracle = (
        KaldiNGD(ours, **settings),
        torch.optim.SGD(theirs, **settings),
        Oracle((40, 30), phase=-1),
    )
    for gradient in correlated((40, 30), 20):
        ours[0].grad, theirs[0].grad = gradient.float(), oracle(gradient.float()).float()
        optimizer.step()
        peer.step()
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e3])
def test_direction_does_not_depend_on_the_scale_of_the_gradient(scale: float) -> None:
    one, other = (KaldiNGD(weights([(40, 30), (20, 10, 3, 3)]), lr=0.1) for _ in range(2))
    for step in zip(correlated((40, 30), 20), correlated((20, 10, 3, 3), 20)):
        for p, q, gradient in zip(parameters_of(one), parameters_of(other), step):
            p.grad, q.grad = gradient.float(), gradient.float() * scale
        one.step()
        other.step()
        for moved, scaled in zip(estimates(one, "momentum"), estimates(other, "momentum")):
            assert distance(scaled / scale, moved) < 1e-5


def test_it_descends_faster_than_sgd_where_directions_differ_in_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 30, generator=generator) * torch.logspace(0, -1.5, 30)
    y = x @ torch.randn(30, 20, generator=generator)
    losses = {}
    for name in ("sgd", "kaldi_ngd"):
        model = nn.Linear(30, 20, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = build_optimizer(model, name, lr=0.1, weight_decay=0.0)
        for _ in range(100):
            optimizer.zero_grad()
            loss = (model(x) - y).square().sum(1).mean()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["kaldi_ngd"] < losses["sgd"] / 2, losses
