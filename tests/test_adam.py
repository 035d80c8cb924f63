"""Adam's moments and updates are those of their equations, by torch's fused kernel and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import adam
from optimizers.adam import AdamStep, copies_of, fused_update_

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
        first, second = (1 - b1**t, 1 - b2**t) if step.debias else (1.0, 1.0)
        u = m / first / ((v / second).sqrt() + step.eps) + step.weight_decay * w
        for results_of_kind, each in zip(results, (u, m, v)):
            results_of_kind.append(each)
    return results


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("active", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("weight_decay", "t", "betas", "debias"),
    [
        (0.01, 1, (0.9, 0.98), True),
        (0.0, 7, (0.9, 0.999), True),
        (1.0, 900, (0.95, 0.98), True),
        (0.1, 3, (0.0, 0.0), True),
        (0.1, 3, (0.9, 0.99), False),
    ],
)
def test_moments_and_updates_follow_their_equations(
    monkeypatch: Any,
    weight_decay: float,
    t: int,
    betas: tuple[float, float],
    debias: bool,
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
        debias=debias,
    )
    lists = random_lists(dtype)
    expected = exact(lists, step)
    w, m, v, grads = lists
    fused_update_(w, m, v, grads=grads, adam=step)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6}[dtype]
    for mine, right in zip((w, m, v), expected):
        for each, other in zip(mine, right):
            torch.testing.assert_close(each.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_skipped_step_changes_no_moment_even_the_first(monkeypatch: Any, is_fused: bool) -> None:
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: is_fused)
    w, m, v, grads = random_lists(torch.float32)
    grads[0][3, 5], grads[1][2] = math.inf, math.nan
    before = [each.clone() for each in (*m, *v)]
    none = torch.zeros((), dtype=torch.float64)
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01, steps=none, active=none)
    fused_update_(w, m, v, grads=grads, adam=step)
    assert all(torch.equal(each, other) for each, other in zip((*m, *v), before))
    assert all(each.isfinite().all() for each in w)


def test_tensors_of_another_layout_or_dtype_are_not_read_in_the_order_of_memory() -> None:
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, steps=torch.tensor(3.0))
    for change in (
        lambda g: g.contiguous() if g.ndim == 4 else g,  # not as the weights lie
        lambda g: g.T.contiguous().T if g.ndim == 2 else g,
        lambda g: g.double(),
    ):
        lists = random_lists(torch.float32)
        lists[3] = [change(g) for g in lists[3]]
        expected = exact(lists, step)
        w, m, v, grads = lists
        fused_update_(w, m, v, grads=grads, adam=step)
        for each, other in zip((*w, *m, *v), (p for of_kind in expected for p in of_kind)):
            torch.testing.assert_close(each.double(), other, rtol=3e-6, atol=3e-6)


def test_the_fused_kernel_is_used_where_it_can(monkeypatch: Any) -> None:
    monkeypatch.setattr(adam, "update_moments", None)  # of the other way
    w, m, v, grads = random_lists(torch.float32)
    step = AdamStep(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, steps=torch.tensor(3.0))
    fused_update_(w, m, v, grads=grads, adam=step)


def test_copies_have_the_dtype_and_layout_of_the_states() -> None:
    parameters = [torch.randn(5, 6, 3, 3).bfloat16(), torch.randn(3)]
    states = [torch.zeros(5, 6, 3, 3).to(memory_format=torch.channels_last), torch.zeros(3)]
    copies = copies_of(parameters, like=states)
    for copied, parameter, state in zip(copies, parameters, states):
        assert torch.equal(copied, parameter.to(copied.dtype))
        assert (copied.dtype, copied.stride()) == (state.dtype, state.stride())
        assert copied.data_ptr() != parameter.data_ptr()
