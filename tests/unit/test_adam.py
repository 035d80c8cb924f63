"""Adam's updates by torch's fused kernel and without; test_lamb_lars.py has the mathematics."""

import math

import pytest
import torch

from backends.torch_compat import supports_fused_optimizers
from optimizers import adam
from optimizers.adam import AdamStep, adam_update_

HAS_FUSED = pytest.mark.skipif(
    not supports_fused_optimizers([torch.zeros(1)]), reason="this torch has no such kernel of CPUs"
)
SHAPES = [(40, 64), (7,), (5, 6, 3, 3), ()]


def random_lists(dtype: torch.dtype = torch.float32) -> list:
    """Weights, moments and gradients; the weights of a convolution are in channels_last."""
    generator = torch.Generator().manual_seed(5)
    lists = [
        [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES] for _ in range(4)
    ]
    lists[2] = [v.abs() for v in lists[2]]
    for tensors in lists:
        tensors[2] = tensors[2].to(memory_format=torch.channels_last)
    return lists


def adam_step(t: int = 3, active: float | None = None, **settings) -> AdamStep:
    settings = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1} | settings
    steps = torch.tensor(t, dtype=torch.float64)
    return AdamStep(
        steps=steps, active=None if active is None else steps.new_tensor(active), **settings
    )


def test_a_skipped_step_changes_no_moment_even_the_first(monkeypatch):
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _: False)
    w, m, v, grads = random_lists()
    grads[0][3, 5], grads[1][2] = math.inf, math.nan
    before = [each.clone() for each in (*m, *v)]
    adam_update_(w, m, v, grads=grads, adam=adam_step(0, active=0.0))
    assert all(torch.equal(each, other) for each, other in zip((*m, *v), before))
    assert all(each.isfinite().all() for each in w)


@HAS_FUSED
def test_the_fused_kernel_is_used_where_it_can(monkeypatch):
    monkeypatch.setattr(adam, "update_moments", None)  # of the other way
    lists = random_lists()
    for tensors in lists:
        tensors.append(torch.ones(4, 3, 1, 1))
    lists[3][-1] = lists[3][-1].to(memory_format=torch.channels_last)  # the same order in memory
    assert lists[3][-1].stride() != lists[0][-1].stride()
    adam_update_(*lists[:3], grads=lists[3], adam=adam_step())
