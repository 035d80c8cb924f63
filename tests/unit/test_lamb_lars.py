"""LAMB and LARS equal timm's; the norms of fp16 weights are taken in fp32."""

import torch
from timm import optim as timm_optim
from torch import nn

from conftest import each_of
from optimizer_cases import Shapes, set_gradients, weights
from optimizers.lamb import LAMB
from optimizers.lars import LARS

SHAPES: Shapes = [(16, 3, 3, 3), (8, 16), (5, 4, 3), (16,), (8,)]
MATRICES = 3  # alone they are decayed and have a trust ratio


def groups(parameters: list[nn.Parameter], decay: float) -> list:
    """As the entry scripts make them; timm has trust ratios where there is weight decay."""
    matrices, others = parameters[:MATRICES], parameters[MATRICES:]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def follow(ours, theirs, one: list[nn.Parameter], other: list[nn.Parameter]) -> None:
    for step in range(25):
        for parameters in (one, other):
            set_gradients(parameters, step, scale=10 ** (step % 4 - 2))
        ours.step()
        theirs.step()
        for p, q in zip(one, other):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-11)


@each_of("is_fused", [None, False])  # the patch stays for the cases that follow
@each_of("decay", [0.02, 1.0])
def test_lamb_equals_timm(decay, is_fused, monkeypatch):
    if is_fused is False:
        monkeypatch.setattr("optimizers.adam.supports_fused_optimizers", lambda _: False)
    one, other = (weights(SHAPES, torch.float64) for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.8, 0.99)}
    peer = timm_optim.Lamb(groups(other, decay), **settings, max_grad_norm=None)
    follow(LAMB(groups(one, decay), **settings), peer, one, other)


@each_of(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@each_of("clip", [False, True])
def test_lars_equals_timm(momentum, nesterov, clip):
    one, other = (weights(SHAPES, torch.float64) for _ in range(2))
    settings = {"lr": 0.3, "momentum": momentum, "nesterov": nesterov}
    peer = timm_optim.Lars(groups(other, 0.02), **settings, trust_coeff=0.02, trust_clip=clip)
    ours = LARS(groups(one, 0.02), **settings, trust_coefficient=0.02, clip=clip)
    follow(ours, peer, one, other)


@each_of("make", [LAMB, LARS])
def test_layers_without_weights_or_gradients_take_a_ratio_of_one(make):
    p, still = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = make([p, still], weight_decay=0.01)
    p.grad, still.grad = torch.ones(4, 3), torch.zeros(4, 3)
    optimizer.step()
    assert p.isfinite().all()
    assert (p < 0).all()
    assert still.isfinite().all()
