"""LAMB and LARS equal timm's and their equations; skipped steps change nothing; fp16 norms hold."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from conftest import each_of
from ngd import NGD
from optimizers.base import tensor_norms
from optimizers.lamb import LAMB
from optimizers.lars import LARS
from slamb import SLAMB

timm_optim = pytest.importorskip("timm.optim", reason="pip install timm")

SHAPES = [(16, 3, 3, 3), (16,), (8, 16), (8,), (5, 4, 3)]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def follow(
    ours: torch.optim.Optimizer,
    theirs: Any,
    one: list[nn.Parameter],
    other: list[nn.Parameter],
    **close: float,
) -> None:
    for step in range(25):
        for parameters in (one, other):
            set_gradients(parameters, step, scale=10 ** (step % 4 - 2))
        ours.step()
        theirs.step()
        for p, q in zip(one, other):
            torch.testing.assert_close(
                p.double(), q.double(), **(close or {"rtol": 1e-5, "atol": 1e-6})
            )


@each_of("decay", [0.0, 0.02])
def test_lamb_equals_timm(decay: float) -> None:
    one, other = weights(), weights()
    settings = {"lr": 0.01, "weight_decay": decay}
    peer = timm_optim.Lamb(other, **settings, always_adapt=True, max_grad_norm=None)
    follow(LAMB(one, **settings, adapt=True), peer, one, other)


@each_of("decay", [0.0, 0.02])
@each_of(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@each_of("clip", [False, True])
def test_lars_equals_timm(decay: float, momentum: float, nesterov: bool, clip: bool) -> None:
    one, other = weights(), weights()
    ours = LARS(
        one,
        lr=0.3,
        momentum=momentum,
        weight_decay=decay,
        nesterov=nesterov,
        trust_coefficient=0.02,
        clip=clip,
        adapt=True,
    )
    options = {"nesterov": nesterov, "trust_coeff": 0.02, "trust_clip": clip, "always_adapt": True}
    follow(ours, timm_optim.Lars(other, 0.3, momentum, weight_decay=decay, **options), one, other)


class Equations:
    """Both algorithms as their module docstrings write them, in float64."""

    def __init__(self, parameters: list[nn.Parameter], name: str) -> None:
        self.parameters, self.name, self.t = parameters, name, 0
        self.m = [torch.zeros_like(p) for p in parameters]
        self.v = [torch.zeros_like(p) for p in parameters]

    def step(self) -> None:
        self.t += 1
        for w, m, v in zip(self.parameters, self.m, self.v):
            g, size, adapts = w.grad, w.detach().norm(), w.ndim > 1
            if self.name == "lars":
                trust = 0.02 * size / (g.norm() + 1e-4 * size + 1e-8) if adapts else 1
                m.copy_(0.9 * m + trust * (g + 1e-4 * w))
                w.data -= 0.3 * m
            else:
                m.copy_(0.9 * m + 0.1 * g)
                v.copy_(0.99 * v + 0.01 * g**2)
                u = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.99**self.t)).sqrt() + 1e-6) + 0.03 * w
                w.data -= 0.01 * (size / u.norm() if adapts else 1) * u


def make(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "lars":
        return LARS(parameters, 0.3, weight_decay=1e-4, trust_coefficient=0.02)
    return LAMB(parameters, 0.01, betas=(0.9, 0.99), weight_decay=0.03)


NAMES = each_of("name", ["lamb", "lars"])


@NAMES
def test_the_equations_hold_in_float64(name: str) -> None:
    one, other = weights(torch.float64), weights(torch.float64)
    follow(make(name, one), Equations(other, name), one, other, rtol=1e-12, atol=1e-12)


@NAMES
def test_layers_without_weights_or_gradients_take_a_ratio_of_one(name: str) -> None:
    p, still = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = make(name, [p, still])
    p.grad, still.grad = torch.ones(4, 3), torch.zeros(4, 3)
    optimizer.step()
    assert p.isfinite().all()
    assert (p < 0).all()
    assert still.isfinite().all()


@NAMES
@each_of("bad", [math.nan, math.inf])
def test_a_skipped_step_changes_nothing_even_the_first(name: str, bad: float) -> None:
    one, other = weights(), weights()
    ours, plain = make(name, one), make(name, other)
    for step in range(6):
        set_gradients(one, step, scale=64.0)
        skip = step in (0, 3)
        if skip:
            one[2].grad[0, 0] = bad
        else:
            set_gradients(other, step)
            plain.step()
        ours.found_inf, ours.grad_scale = torch.tensor(float(skip)), torch.tensor(64.0)
        ours.step()
        assert all(torch.equal(p, q) for p, q in zip(one, other)), step


@NAMES
def test_fp16_weights_have_fp32_norms_and_state(name: str) -> None:
    """2,000 weights of 2,000 have a norm of 89,443, which fp16 does not reach."""
    p = nn.Parameter(torch.full((40, 50), 2000.0, dtype=torch.float16))
    assert not torch.isfinite(p.detach().norm()) or abs(p.detach().norm().item() - 89443) > 100
    assert tensor_norms([p.detach()]).item() == pytest.approx(2000 * math.sqrt(2000))
    wide = nn.Parameter(p.detach().float())
    one, other = make(name, [p]), make(name, [wide])
    for q in (p, wide):
        q.grad = torch.full_like(q, 0.5)
    one.step()
    other.step()
    torch.testing.assert_close(p.float(), wide.detach(), rtol=1e-3, atol=0)
    assert (p != 2000).all()
    assert all(value.dtype == torch.float32 for value in one.state[p].values())


@NAMES
@each_of("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_from_its_state(name: str, dtype: torch.dtype) -> None:
    one = weights(dtype)
    ours = make(name, one)
    for step in range(3):
        set_gradients(one, step)
        ours.step()
    other = copy.deepcopy(one)
    theirs = make(name, other)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    for step in range(3, 6):
        for parameters, optimizer in ((one, ours), (other, theirs)):
            set_gradients(parameters, step)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(one, other))


@NAMES
def test_groups_have_their_own_settings_and_missing_gradients_are_left_out(name: str) -> None:
    p, q, none = (nn.Parameter(torch.ones(3, 3)) for _ in range(3))
    optimizer = make(name, [{"params": [p, none]}, {"params": [q], "lr": 0.0}])
    p.grad = q.grad = torch.eye(3)
    optimizer.step()
    assert (p != 1).any()
    assert (q == 1).all()
    assert (none == 1).all()
    assert not optimizer.state[none]
    for bad in ({"lr": -1.0}, {"weight_decay": -1.0}, {"eps": -1.0}):
        with pytest.raises(ValueError, match="is out of its range"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **bad})


@each_of("make", [LAMB, LARS, NGD, SLAMB])
@each_of("bad", [False, True])
def test_without_amp_scaling_a_grad_scaler_unscales_and_skips_itself(make, bad: bool) -> None:
    """So that Lightning clips gradients: it refuses optimizers that scale by themselves."""
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(6, 5, generator=generator) for _ in range(4)]
    outcomes = []
    for amp_scaling in (True, False):
        weights = nn.Parameter(torch.ones(6, 5))
        optimizer = make([weights], lr=0.1, amp_scaling=amp_scaling)
        assert optimizer._step_supports_amp_scaling == amp_scaling
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, gradient in enumerate(gradients):
            factor = math.inf if bad and number == 2 else 1.0
            optimizer.zero_grad()
            scaler.scale((weights * gradient * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        outcomes.append(weights.detach())
    torch.testing.assert_close(*outcomes)
    assert not torch.equal(outcomes[0], torch.ones(6, 5))
