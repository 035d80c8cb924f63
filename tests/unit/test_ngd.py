"""NGD equals a float64 oracle and flattens leading directions; test_optim.py has the rest."""

import math

import pytest
import torch
from torch import Tensor, nn

import ngd
from conftest import each_of
from ngd import NGD
from ngd_oracle import Oracle
from optimizer_cases import (
    Shapes,
    assert_same,
    copied,
    correlated,
    distance,
    parameters_of,
    set_gradients,
    snapshot,
    train,
    weights,
)
from optimizers import matrix_functions
from optimizers.low_rank import row_norms
from optimizers.matrix_functions import MAX_ERROR, absolute_value, inverse_square_root, square_root
from optimizers.muon import Muon
from optimizers.param_groups import ngd_groups

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of others, collected

# two alike, a taller one, convolutions, a kernel as large as a matrix, what is no matrix
SHAPES: Shapes = [(40, 30), (40, 30), (20, 50), (20, 10, 3, 3), (7, 5, 1, 1), (7,), (7,), ()]
MATRICES = 5


def create(**settings) -> NGD:
    return NGD(weights(SHAPES), **({"lr": 0.1} | settings))


def as_matrix(tensor: Tensor) -> Tensor:
    """A weight as (outputs, kernel and inputs)."""
    return tensor.detach().permute(0, *range(2, tensor.ndim), 1).reshape(len(tensor), -1)


@each_of("dtype", [torch.float32, torch.float64])
@each_of(
    ("shape", "settings"),
    [
        *(
            ([int(n) for n in case.split("x")], {})
            for case in "40x9 300x40 30x500 170x133 2x9 9x4 64x32x3x3 8x16x1x1".split()
        ),
        ([60, 80], {"rank": 5, "momentum": 0.5}),
        ([60, 80], {"nesterov": False}),
    ],
)
def test_fifty_steps_equal_the_oracle(shape, settings, dtype):
    p = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = NGD([p], lr=1.0, weight_decay=0.0, **settings)
    oracle = Oracle((shape[0], p.numel() // shape[0]), **settings)
    worst = 0.0
    for gradient in correlated(shape, 50, decay=0.5):
        p.detach().zero_()
        p.grad = gradient.to(dtype)
        optimizer.step()
        worst = max(worst, distance(as_matrix(p), oracle(as_matrix(p.grad))))
    # in fp32 the least of the leading directions depend on rounding where the columns that the
    # first iteration samples are nearly dependent, as those of these kernels are
    rounding = 0.05 if len(shape) > 2 else 1e-3
    assert worst < (1e-8 if dtype == torch.float64 else rounding), worst


def test_norms_of_millions_of_elements_are_exact():
    X = torch.randn(2, 2_359_301)
    torch.testing.assert_close(row_norms(X), X.double().norm(dim=1), rtol=1e-7, atol=0)


def test_a_gradient_of_rank_one_or_zero_keeps_the_directions_orthonormal():
    p = nn.Parameter(torch.zeros(50, 70))
    optimizer = NGD([p], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    for step in range(20):
        p.detach().zero_()
        p.grad = torch.randn(50, 1) @ torch.randn(1, 70)
        if step % 3 == 2:
            p.grad.zero_()
        optimizer.step()
        R = optimizer.state[p]["directions"]
        assert_same(R @ R.mT, torch.eye(25), 1e-3)
        if step % 3 == 2:
            assert not p.any()
        else:
            assert distance(-p, p.grad * math.sqrt(50) / p.grad.norm()) < 5e-2


def test_directions_are_found_to_which_the_first_ones_are_nearly_orthogonal():
    """As in the softmax of two classes, whose rows have opposite gradients."""
    for seed in range(6):
        torch.manual_seed(seed)
        unseen = torch.linalg.svd(Oracle((64, 576)).R)[2][32:]  # of R_0
        wide = unseen.mT.float() @ torch.randn(32, 576) + 1e-4 * torch.randn(64, 576)
        two = torch.randn(1, 300) * torch.tensor([[1.0], [-1.0]]) + 1e-6 * torch.randn(2, 300)
        for gradient in (wide, two):
            p = nn.Parameter(torch.zeros_like(gradient))
            settings = {"momentum": 0.0, "nesterov": False}
            optimizer = NGD([p], lr=1.0, weight_decay=0.0, **settings)
            oracle = Oracle(tuple(gradient.shape), **settings)
            for _ in range(3):
                p.detach().zero_()
                p.grad = gradient.clone()
                optimizer.step()
                assert distance(p.detach(), oracle(gradient)) < 1e-3


@each_of("rows", [64, 80])
def test_dead_columns_do_not_stop_the_directions(rows):
    p = nn.Parameter(torch.zeros(rows, 256))
    optimizer = NGD([p], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    signal = 10 * torch.randn(rows, 5) @ torch.randn(5, 256)
    for _ in range(9):
        p.detach().zero_()
        p.grad = signal + torch.randn(rows, 256)
        p.grad[:, ::4] = 0.0  # those that the first iteration samples
        optimizer.step()
    values = torch.linalg.svdvals(p.detach())
    assert values[0] < 5 * values.median()


def test_what_is_no_matrix_takes_the_step_of_adamw():
    optimizer = create(lr=0.2, adamw_ratio=0.05, betas=(0.8, 0.95), weight_decay=0.1)
    optimizer.add_param_group({"params": weights([(30, 20)]), "ngd": False})
    optimizer.add_param_group({"params": weights([(8, 1, 1)])})
    others = parameters_of(optimizer)[MATRICES:]
    peers = copied(others)
    peer = torch.optim.AdamW(peers, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)
    for t in range(10):
        set_gradients(parameters_of(optimizer), t)
        for p, own in zip(others, peers):
            own.grad = p.grad.clone()
        optimizer.step()
        peer.step()
    assert_same(others, peers, 1e-6)


def test_weight_decay_is_decoupled():
    plain, decayed = (parameters_of(train(create(weight_decay=x), [0])) for x in (0.0, 0.3))
    for p, q, old in zip(plain[:MATRICES], decayed, weights(SHAPES)):
        assert_same(q.detach(), (p - 0.1 * 0.3 * old).detach(), 1e-5)


def test_embeddings_the_classifier_and_positions_are_not_under_ngd():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(9, 4), "conv": nn.Conv2d(3, 4, 3), "mlp": nn.Linear(4, 8)}
    )
    model["norm"], model["tied"] = nn.LayerNorm([4, 5]), nn.Linear(8, 3)
    model["head"] = nn.Linear(8, 3)
    model["head"].weight = model["tied"].weight
    model.register_parameter("pos_embed", nn.Parameter(torch.zeros(5, 4)))
    names = {p: name for name, p in model.named_parameters()}

    groups = ngd_groups(model, 0.1)
    assert sorted(names[p] for g in groups for p in g["params"]) == sorted(names.values())
    under_ngd = {names[p] for g in groups if g["ngd"] for p in g["params"] if p.ndim > 1}
    assert under_ngd == {"conv.weight", "mlp.weight"}


def test_batches_that_step_together_step_as_alone(monkeypatch):
    shapes = [*SHAPES, (50, 64), (70, 64), (90, 300)]
    alone = train(NGD(weights(shapes), lr=0.1), range(9))
    monkeypatch.setattr(ngd, "ALONE_DEVICES", set())
    together = NGD(weights(shapes), lr=0.1)
    assert_same(snapshot(train(together, range(9))), snapshot(alone), 1e-4)
    assert max(map(len, together.batches)) > 1


def test_muon_is_torchs_with_adamw_for_the_rest():
    settings = {"momentum": 0.7, "nesterov": False, "weight_decay": 0.1, "adamw_ratio": 0.2}
    shapes = [(20, 30), (16, 8, 3, 3), (9,)]
    parameters = [
        p.to(memory_format=torch.channels_last) if p.ndim == 4 else p for p in weights(shapes)
    ]
    ours = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = Muon(ours[:2], lr=0.05, betas=(0.8, 0.9), **settings)
    optimizer.add_param_group({"params": ours[2:]})
    matrices = [nn.Parameter(as_matrix(p).clone()) for p in ours[:2]]
    muon = torch.optim.Muon(matrices, 0.05, 0.1, 0.7, False)
    bias = nn.Parameter(ours[2].detach().clone())
    adamw = torch.optim.AdamW([bias], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for t in range(8):
        set_gradients(ours, t)
        for matrix, p in zip(matrices, ours):
            matrix.grad = as_matrix(p.grad).clone()
        bias.grad = ours[2].grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    assert_same([as_matrix(p) for p in ours[:2]], [m.detach() for m in matrices], 0.02)
    assert_same(ours[2].detach(), bias.detach(), 1e-6)


def with_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """A symmetric matrix for each row of eigenvalues (batch, n), float64."""
    generator = torch.Generator().manual_seed(0)
    count, size = eigenvalues.shape
    random = torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(random)[0]
    return (Q * eigenvalues[:, None]) @ Q.mT


@pytest.mark.parametrize("way", ["eigh", "inverses"])
def test_they_have_the_function_of_the_eigenvalues_on_cpus_and_on_gpus(way, monkeypatch):
    limit = 1e-9
    if way == "inverses":
        monkeypatch.setattr(matrix_functions, "EIGH_DEVICES", set())
        limit = MAX_ERROR
    spread, flat = torch.logspace(0, -6, 20, dtype=torch.float64), torch.ones(20).double()
    one = torch.cat([flat[:1], torch.full((19,), 3e-7, dtype=torch.float64)])
    eigenvalues = torch.stack([spread, flat, one, 1e-80 * spread, 1e80 * one])
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
