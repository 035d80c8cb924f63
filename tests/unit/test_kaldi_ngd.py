"""KaldiNGD equals the float64 oracle, is an optimizer like others, and goes on from its state."""

import math

import pytest
import torch

from conftest import each_of
from kaldi_ngd_oracle import Oracle
from optimizer_cases import (
    Shapes,
    assert_same,
    correlated,
    distance,
    parameters_of,
    set_gradients,
    snapshot,
    train,
    weights,
)
from optimizers.kaldi_ngd import KaldiNGD

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of others, collected

# two alike, a convolution, biases, a scalar, a 3-d one laid out as a convolution, and one whose
# middle axis lies between two others
SHAPES: Shapes = [(40, 30), (40, 30), (20, 10, 3, 3), (7,), (7,), (), (30, 20, 4), (8, 20, 40)]
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def create(**settings) -> KaldiNGD:
    return KaldiNGD(weights(SHAPES), **(SGD | settings))


def estimates(optimizer: KaldiNGD) -> list[torch.Tensor]:
    return [v for _, state in snapshot(optimizer) for name, v in state.items() if "axis" in name]


def compare_with_oracle(shapes, dtype=torch.float32, spike=0.0, update_period=4, **settings):
    """Asserts that KaldiNGD equals the oracle in 50 steps: directions, norms and estimates."""
    parameters = weights(shapes, dtype)
    optimizer = KaldiNGD(parameters, lr=1.0, momentum=0.0, update_period=update_period, **settings)
    batches = list(dict.fromkeys(shapes))
    oracles = [  # which count their steps from 1
        Oracle(shape, period=update_period, phase=batches.index(shape) - 1, **settings)
        for shape in shapes
    ]
    tolerance, exact = (2e-9, 2e-9) if dtype == torch.float64 else (1e-5, 1e-6)
    if spike or (30, 500) in shapes:  # much of the gradient cancels
        tolerance *= 5
    gradients = (correlated(shape, 50, seed, spike=spike) for seed, shape in enumerate(shapes))
    for step in zip(*gradients):
        for p, gradient in zip(parameters, step):
            p.detach().zero_()
            p.grad = gradient.to(dtype)
        optimizer.step()
        for p, oracle in zip(parameters, oracles):
            assert distance(-p, oracle(p.grad)) < tolerance, tuple(p.shape)
            assert distance(p.norm(), p.grad.norm()) < exact
            for number, axis in oracle.axes.items():
                R, K = (optimizer.state[p][f"axis{number}_{name}"].double() for name in "RK")
                assert_same(R.mT @ K @ R, axis.W.mT @ axis.W, tolerance)


# N > D and N < D, N <= R, R = 32 < D / 2; kernels; a middle axis
CASES = (
    "300x40 30x500 170x33 2x9 16x17 1x50 50x1 1x1 "
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


@each_of("dtype", [torch.float32, torch.float64])
@each_of(("shape", "settings"), [*((case, {}) for case in CASES.split()), *SETTINGS])
def test_direction_and_estimates_equal_the_oracle(shape, settings, dtype):
    compare_with_oracle([tuple(map(int, shape.split("x")))], dtype, **settings)


def test_parameters_in_one_optimizer_equal_an_oracle_each():
    kernel = (24, 10, 3, 3)
    shapes = [(40, 30), (40, 30), (30, 40), kernel, (40, 30), kernel, (9, 5), (5, 8, 70)]
    compare_with_oracle(shapes)


@each_of("more", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}])
@each_of("decay", [0.0, 0.05])
def test_what_comes_after_the_preconditioning_is_the_step_of_sgd(more, decay):
    """Also of parameters without one, the last of which has no elements."""
    shapes, settings = [(40, 30), (7,), (), (0, 3)], {"lr": 0.1, "weight_decay": decay, **more}
    ours, theirs, oracle = weights(shapes), weights(shapes), Oracle(shapes[0], phase=-1)
    optimizer, peer = KaldiNGD(ours, **settings), torch.optim.SGD(theirs, **settings)
    for t, gradient in enumerate(correlated(shapes[0], 20)):
        for parameters in (ours, theirs):
            set_gradients(parameters, t)
        ours[0].grad, theirs[0].grad = gradient.float(), oracle(gradient.float()).float()
        optimizer.step()
        peer.step()
    assert_same(ours[0], theirs[0], 1e-5)
    assert_same(ours[1:], theirs[1:], 1e-6)


def test_a_zero_gradient_leaves_the_estimates_while_momentum_continues():
    optimizer, peer = train(create(), range(8)), torch.optim.SGD(weights(SHAPES), **SGD)
    before = estimates(optimizer)
    for p, (old, state) in zip(parameters_of(peer), snapshot(optimizer)):
        p.detach().copy_(old)
        peer.state[p]["momentum_buffer"] = state["momentum_buffer"]
    for each in (optimizer, peer):
        train(each, [8, 9], scale=0.0)
    assert_same(parameters_of(optimizer), parameters_of(peer), 1e-6)
    assert_same(estimates(optimizer), before)


def test_what_cannot_be_computed_leaves_the_estimates(monkeypatch):
    """On a GPU the Cholesky factor of NaN counts as computed."""
    optimizer = train(create(), range(3))
    before = estimates(optimizer)

    def not_a_number(A: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(A, math.nan), torch.zeros(A.shape[:-2], dtype=torch.int32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", not_a_number)
    train(optimizer, range(3, 6))
    assert_same(estimates(optimizer), before)
    assert all(p.isfinite().all() for p in parameters_of(optimizer))
