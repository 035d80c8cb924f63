"""KaldiNGD's state and where it runs: resuming, precision, layout, staggering, two ranks."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ranks
from distributed import ddp
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from kaldi_ngd_cases import (
    SGD,
    SHAPES,
    assert_same,
    create_ngd,
    distance,
    estimates,
    parameters_of,
    set_gradients,
    snapshot,
    through_a_file,
    train,
    weights,
)
from optimizers import kaldi_ngd
from optimizers.kaldi_ngd import KaldiNGD
from trainers import build_optimizer

pytestmark = pytest.mark.filterwarnings("error")


# ------------------------------------------------------------ state


WAYS: list[Callable[[KaldiNGD], KaldiNGD]] = [
    through_a_file,
    copy.deepcopy,
    lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
]


@pytest.mark.parametrize("way", WAYS, ids=["file", "deepcopy", "pickle"])
@pytest.mark.parametrize("factor_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_resumed_equals_uninterrupted(
    way: Callable[[KaldiNGD], KaldiNGD], factor_dtype: torch.dtype | None
) -> None:
    for steps in (3, 13):  # in the first ten, in mid-period
        optimizer = train(create_ngd(factor_dtype=factor_dtype), range(steps))
        outcomes = [
            snapshot(train(some, range(steps, steps + 5))) for some in (way(optimizer), optimizer)
        ]
        assert_same(*outcomes)
        assert {value.dtype for value in estimates(optimizer, "factor")} == {torch.float32}
        assert way(optimizer)._step_supports_amp_scaling


def test_bf16_parameters_keep_wide_state_and_follow_fp32_ones() -> None:
    narrow, wide, double = weights(dtype=torch.bfloat16), weights(), weights(dtype=torch.float64)
    optimizer = KaldiNGD([*narrow, *wide, *double], lr=0.1, update_period=1)
    for t in range(15):
        set_gradients(narrow, t)
        for p, q, exact in zip(narrow, wide, double):
            q.grad, exact.grad = p.grad.float(), p.grad.double()
        optimizer.step()
    outcome, count = snapshot(optimizer), len(SHAPES)
    for (p, state), (q, expected), (_, exact) in zip(
        outcome, outcome[count:], outcome[2 * count :]
    ):
        assert distance(p, q) < 1e-2
        assert_same(state, expected, 1e-6)  # dtypes too
        assert {value.dtype for value in exact.values()} == {torch.float64}
    assert_same(snapshot(train(through_a_file(optimizer), [15])), snapshot(train(optimizer, [15])))


def test_factors_in_bf16_give_nearly_the_same_direction() -> None:
    one, other = (
        estimates(train(create_ngd(factor_dtype=dtype), range(15)), "momentum")
        for dtype in (None, torch.bfloat16)
    )
    assert all(distance(narrow, wide) < 2e-2 for narrow, wide in zip(other, one))


def test_what_cannot_be_computed_leaves_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the Cholesky factor of NaN counts as computed."""
    optimizer = train(create_ngd(), range(3))
    before = estimates(optimizer, "axis")
    monkeypatch.setattr(
        torch.linalg,
        "cholesky_ex",
        lambda A: (torch.full_like(A, math.nan), torch.zeros(A.shape[:-2], dtype=torch.int32)),
    )
    train(optimizer, range(3, 6))
    assert_same(estimates(optimizer, "axis"), before)
    assert all(p.isfinite().all() for p in parameters_of(optimizer))


def test_a_parameter_unfrozen_or_added_later_starts_its_own_count() -> None:
    first, late, added = weights()[:3]
    optimizer = train(KaldiNGD([first, late.requires_grad_(False)], **SGD), range(10))
    optimizer.add_param_group({"params": added, "lr": 0.3})
    train(optimizer, range(10, 12))
    late.requires_grad_(True)
    train(optimizer, range(12, 18))
    assert [optimizer.state[p]["step"] for p in parameters_of(optimizer)] == [18, 6, 8]
    one, other = KaldiNGD(weights()[1:2], **SGD), KaldiNGD(weights()[2:3], **(SGD | {"lr": 0.3}))
    for t in range(10, 18):
        set_gradients([first, *parameters_of(one), *parameters_of(other)], t)
        other.step()
        if t >= 12:
            one.step()
    assert_same(snapshot(optimizer, [1, 2]), snapshot(one) + snapshot(other), 1e-6)


def test_a_state_with_eigenvalues_of_the_estimates_goes_on_as_the_same_run() -> None:
    """As checkpoints had it that kept the estimates' eigenvectors and eigenvalues."""
    optimizer = train(create_ngd(), range(12))
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for name in [name for name in entry if name.endswith("_smoothed_floor")]:
            axis, beta = name.removesuffix("_smoothed_floor"), entry.pop(name)
            E, R = torch.linalg.svd(entry[f"{axis}_factor"].double(), full_matrices=False)[1:]
            entry[f"{axis}_factor"] = (E[:, None] * R).float()
            entry[f"{axis}_eigenvalues"] = beta * E**2 / (1 - E**2)
    old = KaldiNGD([nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)], lr=0.1)
    old.load_state_dict(state)
    train(optimizer, range(12, 20))
    train(old, range(12, 20))
    assert_same(parameters_of(old), parameters_of(optimizer), 1e-5)
    assert not estimates(old, "eigenvalues")


# ------------------------------------------------------------ precision, layout, devices


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_scales_away_and_skips(unscale: bool) -> None:
    optimizer, peer = create_ngd(), create_ngd()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(13):
        set_gradients(parameters_of(peer), t)
        if t == 12:
            before, parameters_of(peer)[0].grad[1, 1] = snapshot(optimizer), math.inf
        optimizer.zero_grad(set_to_none=bool(t % 2))
        scaler.scale(
            sum((p * q.grad).sum() for p, q in zip(parameters_of(optimizer), parameters_of(peer)))
        ).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if t < 12:
            peer.step()
    assert_same(before, snapshot(peer), 1e-6)
    assert_same(snapshot(optimizer), before)
    assert {state["step"] for state in optimizer.state.values()} == {
        13
    }  # called all the same: it skips on the device
    assert scaler.get_scale() == 512.0


def test_autocast_and_accumulation_do_not_matter() -> None:
    expected = snapshot(train(create_ngd(), range(12), scale=2.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(snapshot(train(create_ngd(), range(12), scale=2.0)), expected)
    optimizer, source = create_ngd(), weights()
    for t in range(12):
        set_gradients(source, t)
        optimizer.zero_grad(set_to_none=bool(t % 2))
        for _ in range(2):
            sum((p * q.grad).sum() for p, q in zip(parameters_of(optimizer), source)).backward()
        optimizer.step()
    assert_same(snapshot(optimizer), expected)


def test_channels_last_weights_take_the_same_step() -> None:
    shapes = [(20, 10, 3, 3), (10, 3, 9, 9)]
    last = [nn.Parameter(p.detach().to(memory_format=torch.channels_last)) for p in weights(shapes)]
    plain = train(KaldiNGD(weights(shapes), **SGD), range(15))
    assert_same(snapshot(train(KaldiNGD(last, **SGD), range(15))), snapshot(plain), 1e-6)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in last)


@pytest.mark.parametrize(
    ("limit", "expected"), [(1, [1, 1, 1]), (2 * 4 * 30 * 40, [2, 1]), (2**30, [3])]
)
def test_parameters_are_worked_on_together_up_to_a_limit(
    limit: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = train(
        KaldiNGD(weights([(40, 30)] * 3), update_period=1), range(15)
    )  # of period 1, as batches have phases of their own
    monkeypatch.setattr(kaldi_ngd, "CPU_BATCH_BYTES", limit)
    other = train(KaldiNGD(weights([(40, 30)] * 3), update_period=1), range(15))
    assert [len(batch.parameters) for batch in other.schedule.batches[0]] == expected
    assert_same(snapshot(other), snapshot(one), 1e-6)
    assert other.schedule is train(other, [15]).schedule, "made anew at each step"


@pytest.mark.parametrize("period", [1, 3, 4])
def test_each_factor_changes_once_a_period_and_not_all_at_once(period: int) -> None:
    shapes = [(40, 30), (40, 30), (50, 20), (9, 5), (5, 8)]
    optimizer, rows = train(KaldiNGD(weights(shapes), update_period=period), [0]), []
    for t in range(1, 10 + 3 * period):
        before = estimates(optimizer, "factor")
        rows.append(
            [
                not torch.equal(*pair)
                for pair in zip(before, estimates(train(optimizer, [t]), "factor"))
            ]
        )
    first, later = torch.tensor(rows).int().split([9, 3 * period])
    assert first.all()
    assert (later.unfold(0, period, 1).sum(2) == 1).all()
    assert (later.sum(1) > 0).all()  # four batches: some of them at every step


class NoHostReads(TorchDispatchMode):
    """Fails on what waits for a device, or copies to or from one."""

    WAITS = {
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "lift_fresh",
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITS, name
        assert name != "_to_copy" or (kwargs or {}).get("device") in (None, args[0].device), (
            "copied to another device"
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"decoupled_weight_decay": True}], ids=str
)
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    # the second step asks whether the first was skipped
    optimizer = train(create_ngd(**options), [0, 1])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    for t in range(2, 17):
        set_gradients(parameters_of(optimizer), t)
        with NoHostReads():
            optimizer.step()


def one_rank(world: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3),
        nn.ReLU(),
        nn.Conv2d(20, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    optimizer = build_optimizer(model, "kaldi_ngd", lr=0.05, weight_decay=1e-3)
    parallel = ddp.wrap(
        model, world, hook=AllReduceHook(world), sync_batch_norm=False, static_graph=True
    )
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(100):
        x, y = (
            torch.randn(8, 3, 6, 6, generator=generator),
            torch.randint(5, (8,), generator=generator),
        )
        optimizer.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        optimizer.step()
    outcomes = world.gather(snapshot(optimizer))
    if world.is_main:
        assert len(estimates(optimizer)) == 3 * (4 + 4 + 2)
        assert_same(*outcomes)


@pytest.mark.process
def test_two_ranks_stay_bitwise_equal() -> None:
    ranks.run_ranks(one_rank, 2)
