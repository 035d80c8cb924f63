"""Adam's moments and updates are torch.optim's, by torch's fused kernel and without."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.torch_compat import supports_fused_optimizers
from conftest import each_of
from optimizer_cases import copied
from optimizers import adam
from optimizers.adam import AdamStep, adam_update_, adam_updates

HAS_FUSED = pytest.mark.skipif(
    not supports_fused_optimizers([torch.zeros(1)]), reason="this torch has no such kernel of CPUs"
)
BOTH_WAYS = pytest.mark.parametrize("is_fused", [pytest.param(True, marks=HAS_FUSED), False])
SHAPES = [(40, 64), (7,), (5, 6, 3, 3), ()]


def random_lists(dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Weights, moments and gradients; the weights of a convolution are in channels_last."""
    generator = torch.Generator().manual_seed(5)
    lists = [
        [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(4)
    ]
    lists[2] = [v.abs() for v in lists[2]]
    for tensors in lists:
        tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    return lists


def adam_step(t: int = 3, active: float | None = None, **settings: Any) -> AdamStep:
    settings = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1} | settings
    steps = torch.tensor(t, dtype=torch.float64)
    return AdamStep(
        steps=steps, active=None if active is None else steps.new_tensor(active), **settings
    )


def assert_as_by_torch(lists: list[list[Tensor]], step: AdamStep, tolerance: float) -> None:
    """Updates and moments are those of torch.optim.AdamW in float64, at a rate of 1."""
    wide = [[each.to(torch.float64, copy=True) for each in tensors] for tensors in lists]
    w = copied(wide[0])
    settings = {"betas": step.betas, "eps": step.eps, "weight_decay": step.weight_decay}
    peer = torch.optim.AdamW(w, lr=1.0, foreach=False, **settings)
    for p, m, v, g in zip(w, *wide[1:]):
        peer.state[p] = {"step": step.steps - 1, "exp_avg": m, "exp_avg_sq": v}
        p.grad = g
    peer.step()
    updates = [before - after.detach() for before, after in zip(wide[0], w)]
    adam_update_(*lists[:3], grads=lists[3], adam=step)
    for mine, expected in zip(lists, (updates, *wide[1:3])):
        for one, other in zip(mine, expected):
            torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@BOTH_WAYS
@each_of("active", [None, 1.0])
@each_of(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@each_of(
    ("weight_decay", "t", "betas"),
    [
        (0.01, 1, (0.9, 0.98)),
        (0.0, 7, (0.9, 0.999)),
        (1.0, 900, (0.95, 0.98)),
        (0.1, 3, (0.0, 0.0)),
    ],
)
def test_moments_and_updates_equal_torchs(
    monkeypatch: Any,
    weight_decay: float,
    t: int,
    betas: tuple[float, float],
    dtype: torch.dtype,
    tolerance: float,
    active: float | None,
    is_fused: bool,
) -> None:
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: is_fused)
    step = adam_step(t, active, betas=betas, weight_decay=weight_decay)
    assert_as_by_torch(random_lists(dtype), step, tolerance)


@BOTH_WAYS
def test_a_skipped_step_changes_no_moment_even_the_first(monkeypatch: Any, is_fused: bool) -> None:
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: is_fused)
    w, m, v, grads = random_lists()
    grads[0][3, 5], grads[1][2] = math.inf, math.nan
    before = [each.clone() for each in (*m, *v)]
    adam_update_(w, m, v, grads=grads, adam=adam_step(0, active=0.0))
    assert all(torch.equal(each, other) for each, other in zip((*m, *v), before))
    assert all(each.isfinite().all() for each in w)


@each_of(
    ("positions", "change"),  # of moments and gradients
    [
        ((1, 2, 3), lambda each: each.contiguous() if each.ndim == 4 else each),
        ((1, 2, 3), lambda each: each.T.contiguous().T if each.ndim == 2 else each),
        ((3,), torch.Tensor.double),
    ],
)
def test_tensors_of_another_layout_or_dtype_are_not_read_in_the_order_of_memory(
    positions: tuple[int, ...], change: Callable[[Tensor], Tensor]
) -> None:
    for position in positions:
        lists = random_lists()
        lists[position] = [change(each) for each in lists[position]]
        assert_as_by_torch(lists, adam_step(), 3e-6)


@HAS_FUSED
def test_the_fused_kernel_is_used_where_it_can(monkeypatch: Any) -> None:
    monkeypatch.setattr(adam, "update_moments", None)  # of the other way
    lists = random_lists()
    for tensors in lists:
        tensors.append(torch.ones(4, 3, 1, 1))
    lists[3][-1] = lists[3][-1].to(memory_format=torch.channels_last)  # the same order in memory
    assert lists[3][-1].stride() != lists[0][-1].stride()
    adam_update_(*lists[:3], grads=lists[3], adam=adam_step())


def test_updates_have_the_dtype_and_layout_of_the_moments_and_spare_the_parameters() -> None:
    moments = [torch.ones(5, 6, 3, 3).to(memory_format=torch.channels_last), torch.ones(3)]
    for weight_decay in (0.1, 0.0):
        parameters = [torch.randn(5, 6, 3, 3).bfloat16(), torch.randn(3)]
        if not weight_decay:
            parameters[1][0] = -math.inf  # is not read
        before = [p.clone() for p in parameters]
        m, v, grads = ([each.clone() for each in moments] for _ in range(3))
        step = adam_step(1, betas=(0.5, 0.5), eps=0.0, weight_decay=weight_decay)
        updates = adam_updates(parameters, m, v, grads=grads, adam=step)
        assert all(torch.equal(p, q) for p, q in zip(parameters, before))
        for u, p, moment in zip(updates, parameters, m):
            assert (u.dtype, u.stride()) == (moment.dtype, moment.stride())
            expected = math.sqrt(2) + (weight_decay * p.float() if weight_decay else 0.0)
            torch.testing.assert_close(u, torch.as_tensor(expected).expand(u.shape).contiguous())
