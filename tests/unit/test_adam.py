"""Adam's moments and updates are those of their equations, by torch's fused kernel and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.torch_compat import supports_fused_optimizers
from conftest import each_of
from optimizers import adam
from optimizers.adam import AdamStep, adam_update_, adam_updates

HAS_FUSED = pytest.mark.skipif(
    not supports_fused_optimizers([torch.zeros(1)]), reason="this torch has no such kernel of CPUs"
)
BOTH_WAYS = pytest.mark.parametrize("is_fused", [pytest.param(True, marks=HAS_FUSED), False])
SHAPES = [(40, 64), (7,), (5, 6, 3, 3), ()]


def random_lists(dtype: torch.dtype) -> list[list[Tensor]]:
    """Weights, moments and gradients; the weights of a convolution are in channels_last."""
    generator = torch.Generator().manual_seed(5)
    lists = [
        [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(4)
    ]
    lists[2] = [v.abs() for v in lists[2]]
    for tensors in lists:
        tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    return lists


def exact(lists: list[list[Tensor]], step: AdamStep) -> list[list[Tensor]]:
    """Updates and moments in float64."""
    (b1, b2), t = step.betas, step.steps
    results: list[list[Tensor]] = [[], [], []]
    for w, m, v, g in zip(*([each.double() for each in tensors] for tensors in lists)):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g.square()
        first, second = 1 - b1**t, 1 - b2**t
        u = m / first / ((v / second).sqrt() + step.eps) + step.weight_decay * w
        for results_of_kind, each in zip(results, (u, m, v)):
            results_of_kind.append(each)
    return results


@BOTH_WAYS
@each_of("active", [None, 1.0])
@each_of("dtype", [torch.float64, torch.float32])
@each_of(
    ("weight_decay", "t", "betas"),
    [
        (0.01, 1, (0.9, 0.98)),
        (0.0, 7, (0.9, 0.999)),
        (1.0, 900, (0.95, 0.98)),
        (0.1, 3, (0.0, 0.0)),
    ],
)
def test_moments_and_updates_follow_their_equations(
    monkeypatch: Any,
    weight_decay: float,
    t: int,
    betas: tuple[float, float],
    dtype: torch.dtype,
    active: float | None,
    is_fused: bool,
) -> None:
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: is_fused)
    step = AdamStep(
        betas=betas,
        eps=1e-6,
        weight_decay=weight_decay,
        steps=torch.tensor(t, dtype=torch.float64),
        active=None if active is None else torch.tensor(active, dtype=torch.float64),
    )
    lists = random_lists(dtype)
    expected = exact(lists, step)
    w, m, v, grads = lists
    adam_update_(w, m, v, grads=grads, adam=step)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6}[dtype]
    for mine, right in zip((w, m, v), expected):
        for each, other in zip(mine, right):
            torch.testing.assert_close(each.double(), other, rtol=tolerance, atol=tolerance)


@BOTH_WAYS
def test_a_skipped_step_changes_no_moment_even_the_first(monkeypatch: Any, is_fused: bool) -> None:
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: is_fused)
    w, m, v, grads = random_lists(torch.float32)
    grads[0][3, 5], grads[1][2] = math.inf, math.nan
    before = [each.clone() for each in (*m, *v)]
    none = torch.zeros((), dtype=torch.float64)
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01, steps=none, active=none)
    adam_update_(w, m, v, grads=grads, adam=step)
    assert all(torch.equal(each, other) for each, other in zip((*m, *v), before))
    assert all(each.isfinite().all() for each in w)


def test_tensors_of_another_layout_or_dtype_are_not_read_in_the_order_of_memory() -> None:
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, steps=torch.tensor(3.0))
    for position in (1, 2, 3):  # of moments and gradients
        for change in (
            lambda each: each.contiguous() if each.ndim == 4 else each,  # not as the weights lie
            lambda each: each.T.contiguous().T if each.ndim == 2 else each,
            lambda each: each.double(),
        ):
            lists = random_lists(torch.float32)
            lists[position] = [change(each) for each in lists[position]]
            if lists[position][0].dtype == torch.float64 and position < 3:
                continue  # states have one dtype
            expected = exact(lists, step)
            w, m, v, grads = lists
            adam_update_(w, m, v, grads=grads, adam=step)
            for each, other in zip((*w, *m, *v), (p for of_kind in expected for p in of_kind)):
                torch.testing.assert_close(each.double(), other, rtol=3e-6, atol=3e-6)


@HAS_FUSED
def test_the_fused_kernel_is_used_where_it_can(monkeypatch: Any) -> None:
    monkeypatch.setattr(adam, "update_moments", None)  # of the other way
    w, m, v, grads = random_lists(torch.float32)
    for tensors in (w, m, v, grads):
        tensors.append(torch.ones(4, 3, 1, 1))
    grads[-1] = grads[-1].to(memory_format=torch.channels_last)  # in memory this is the same order
    assert grads[-1].stride() != w[-1].stride()
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, steps=torch.tensor(3.0))
    adam_update_(w, m, v, grads=grads, adam=step)


def test_updates_have_the_dtype_and_layout_of_the_moments_and_spare_the_parameters() -> None:
    moments = [torch.ones(5, 6, 3, 3).to(memory_format=torch.channels_last), torch.ones(3)]
    for weight_decay in (0.1, 0.0):
        parameters = [torch.randn(5, 6, 3, 3).bfloat16(), torch.randn(3)]
        if not weight_decay:
            parameters[1][0] = -math.inf  # is not read
        before = [p.clone() for p in parameters]
        m, v, grads = ([each.clone() for each in moments] for _ in range(3))
        step = AdamStep(
            betas=(0.5, 0.5), eps=0.0, weight_decay=weight_decay, steps=torch.tensor(1.0)
        )
        updates = adam_updates(parameters, m, v, grads=grads, adam=step)
        assert all(torch.equal(p, q) for p, q in zip(parameters, before))
        for u, p, moment in zip(updates, parameters, m):
            assert (u.dtype, u.stride()) == (moment.dtype, moment.stride())
            expected = math.sqrt(2) + (weight_decay * p.float() if weight_decay else 0.0)
            torch.testing.assert_close(u, torch.as_tensor(expected).expand(u.shape).contiguous())
