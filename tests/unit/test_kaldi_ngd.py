"""KaldiNGD behaves as an optimizer should: bad gradients, plain SGD, settings, validation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resnet50_test
from cli import factory, options
from conftest import each_of
from distributed.world import World
from errors import InputError
from kaldi_ngd_cases import (
    PLAIN,
    SGD,
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
from optimizers.kaldi_ngd import KaldiNGD
from optimizers.param_groups import kaldi_ngd_groups
from trainers import FP32, build_optimizer

pytestmark = pytest.mark.filterwarnings("error")


# ------------------------------------------------------------ bad, missing and zero gradients


@pytest.mark.parametrize("start", [0, 13])
@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 1e30, None], ids=str
)  # the square of 1e30 is not finite
def test_a_bad_gradient_changes_nothing_and_other_parameters_are_updated(
    bad: float | None, start: int
) -> None:
    ill, well = (0, 2, 4), (1, 3, 5, 6, 7)
    optimizer, peer = (train(create_ngd(), range(start)) for _ in range(2))
    before = snapshot(optimizer, ill)
    for t in range(start, 17):
        set_gradients(parameters_of(optimizer), t)
        for p in (parameters_of(optimizer)[number] for number in ill):
            p.grad.view(-1)[1::3] = bad or 0.0
            p.grad = None if bad is None else p.grad
        optimizer.step()
    for (p, state), (old, known) in zip(snapshot(optimizer, ill), before):
        assert_same((p, {name: state[name] for name in known}), (old, known))
        assert all(
            "factor" in name or not value.any()
            for name, value in state.items()
            if name not in known
        )
    assert_same(
        snapshot(optimizer, well), snapshot(train(peer, range(start, 17)), well), 1e-5
    )  # batched with others or alone
    train(optimizer, range(17, 21))
    for (p, state), (old, known) in zip(snapshot(optimizer, ill), before):
        assert p.isfinite().all()
        assert not torch.equal(p, old)
        assert all(value.isfinite().all() and value.any() for value in state.values())
        assert not any(torch.equal(state[name], value) for name, value in known.items())


def test_found_inf_changes_nothing() -> None:
    optimizer = train(create_ngd(), range(5))
    before = snapshot(optimizer)
    optimizer.found_inf = torch.tensor(1.0)  # as step_unless_skipped does
    assert_same(snapshot(train(optimizer, range(5, 9))), before)
    optimizer.found_inf = torch.tensor(0.0)
    assert not any(
        torch.equal(p, old) for p, (old, _) in zip(parameters_of(train(optimizer, [9])), before)
    )


def test_steps_skipped_before_the_first_gradient_do_not_count() -> None:
    optimizer = create_ngd()
    optimizer.found_inf = torch.tensor(1.0)
    train(optimizer, range(3))
    optimizer.found_inf = torch.tensor(0.0)
    assert_same(snapshot(train(optimizer, range(15))), snapshot(train(create_ngd(), range(15))))


def test_a_zero_gradient_leaves_the_estimates_while_momentum_continues() -> None:
    optimizer = train(create_ngd(), range(8))
    before, peer = estimates(optimizer), torch.optim.SGD(weights(), **SGD)
    for p, (old, state) in zip(parameters_of(peer), snapshot(optimizer)):
        p.detach().copy_(old)
        peer.state[p]["momentum_buffer"] = state["momentum_buffer"]
    assert_same(
        parameters_of(train(optimizer, [8, 9], scale=0.0)),
        parameters_of(train(peer, [8, 9], scale=0.0)),
        1e-6,
    )
    assert_same(estimates(optimizer), before)


def test_steps_without_any_gradient_of_a_shape_do_not_count() -> None:
    optimizer, peer = (train(create_ngd(), range(7)) for _ in range(2))
    for t in (50, 51):
        set_gradients(parameters_of(optimizer), t)
        parameters_of(optimizer)[2].grad = None
        optimizer.step()
    assert_same(
        snapshot(train(optimizer, range(7, 16)), [2]),
        snapshot(train(peer, range(7, 16)), [2]),
        1e-5,
    )


# ------------------------------------------------------------ an optimizer like others


@pytest.mark.parametrize(
    "options", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}], ids=str
)
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_parameters_without_preconditioning_take_the_step_of_sgd(
    options: dict[str, Any], decay: float
) -> None:
    bare = [p for number, p in enumerate(weights()) if number in PLAIN]
    optimizer = KaldiNGD(
        [{"params": weights(), "ngd": False}, {"params": bare}],
        lr=0.1,
        weight_decay=decay,
        **options,
    )
    peer = torch.optim.SGD(
        [nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)],
        lr=0.1,
        weight_decay=decay,
        **options,
    )
    assert_same(
        parameters_of(train(optimizer, range(8))), parameters_of(train(peer, range(8))), 1e-6
    )
    assert not estimates(optimizer)


def test_factor_dtype_applies_to_preconditioned_parameters_only() -> None:
    optimizer = KaldiNGD([{"params": weights(), "ngd": False}], **SGD, factor_dtype=torch.bfloat16)
    assert_same(
        parameters_of(train(optimizer, range(5))),
        parameters_of(train(torch.optim.SGD(weights(), **SGD), range(5))),
        1e-6,
    )


def test_empty_parameters_are_left_out() -> None:
    train(KaldiNGD(weights([(0, 3), (4, 3)]), lr=0.1), range(2))


def test_decoupled_decay_shrinks_the_weights_and_no_decay_changes_gradients() -> None:
    shrunk, free, coupled = (
        create_ngd(weight_decay=0.3, decoupled_weight_decay=True),
        create_ngd(weight_decay=0.0),
        create_ngd(weight_decay=0.3),
    )
    before = [p.detach().clone() for p in parameters_of(free)]
    for optimizer in (shrunk, free, coupled):
        gradients = [p.grad.clone() for p in parameters_of(train(optimizer, [0]))]
        set_gradients(parameters_of(optimizer), 0)
        assert_same(gradients, [p.grad for p in parameters_of(optimizer)])
    assert_same(
        parameters_of(shrunk),
        [p - old * 0.1 * 0.3 for p, old in zip(parameters_of(free), before)],
        1e-6,
    )


def test_the_closure_computes_loss_and_gradients() -> None:
    (p,) = weights([(5, 4)])
    optimizer = KaldiNGD([p], lr=0.1, momentum=0.0)

    def closure() -> Tensor:
        loss = p.square().sum() / 2
        loss.backward()
        return loss

    before = p.detach().clone()
    assert optimizer.step(closure).item() == pytest.approx(float(before.square().sum() / 2))
    assert distance(p, before) == pytest.approx(0.1)  # the gradient is p


CHANGES: list[tuple[str, Any]] = [
    ("lr", 0.3),
    ("momentum", 0.5),
    ("momentum", 0.0),
    ("nesterov", True),
    ("weight_decay", 0.2),
]
CHANGES += [
    ("decoupled_weight_decay", True),
    ("alpha", 1.0),
    ("eta", 0.5),
    ("update_period", 1),
    ("update_period", 3),
]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_changed_setting_takes_effect_at_the_next_step(name: str, value: Any) -> None:
    optimizer = train(create_ngd(), range(13))
    old, new = through_a_file(optimizer), through_a_file(optimizer, **{name: value})
    optimizer.param_groups[0][name] = value
    outcome = snapshot(train(optimizer, range(13, 21)))
    assert_same(outcome, snapshot(train(new, range(13, 21))))
    assert not torch.equal(outcome[0][0], parameters_of(train(old, range(13, 21)))[0])


def test_a_scheduler_sets_the_rate() -> None:
    optimizer = create_ngd(lr=0.2)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5)
    assert_same(snapshot(train(optimizer, range(3))), snapshot(train(create_ngd(), range(3))))


WRONG: list[tuple[str, Any]] = [
    ("lr", -0.1),
    ("lr", math.nan),
    ("momentum", -0.1),
    ("momentum", 1.0),
    ("weight_decay", -1e-3),
]
WRONG += [
    ("rank", 0),
    ("alpha", 0.0),
    ("eta", 0.0),
    ("eta", 1.0),
    ("update_period", 0),
    ("max_dim", 0),
]
WRONG += [("factor_dtype", torch.int32), ("nesterov", True)]


@each_of(("name", "value"), WRONG)
def test_a_setting_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"KaldiNGD: {name}="):
        KaldiNGD(weights(), **({"momentum": 0.0} | {name: value}))
    with pytest.raises(ValueError, match=f"KaldiNGD: {name}="):
        KaldiNGD(weights(), momentum=0.0).add_param_group(
            {"params": weights([(3, 3)]), name: value}
        )


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        KaldiNGD(table.parameters()).step()


def test_the_flags_reach_the_optimizer() -> None:
    words = (
        "--optimizer kaldi_ngd --lr 0.3 --weight_decay 0.01 --momentum 0.8 --nesterov "
        "--ngd_rank 7 --ngd_alpha 2 --ngd_eta 0.3 --ngd_period 5"
    )
    args, _ = options.parse(
        resnet50_test.parser(),
        "resnet50_test",
        [*words.split(), "--ngd_max_dim", "99", "--ngd_skip", "0.w"],
    )
    run = factory.Run("x", World(), FP32)
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    optimizer = factory.create_optimizer(args, run, model, resnet50_test.OPTIMIZERS)
    expected = {
        "lr": 0.3,
        "weight_decay": 0.01,
        "momentum": 0.8,
        "nesterov": True,
        "rank": 7,
        "alpha": 2.0,
        "eta": 0.3,
    }
    expected |= {"update_period": 5, "max_dim": 99, "ngd": False}
    assert isinstance(optimizer, KaldiNGD)
    assert {name: optimizer.param_groups[0][name] for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", (0.1, 5e-4)),
        ("--optimizer adamw", (3e-3, 0.05)),
        ("--optimizer kaldi_ngd --lr 1", (1.0, 5e-4)),
    ],
)
def test_rates_default_by_optimizer(words: str, expected: tuple[float, float]) -> None:
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", words.split())
    assert (args.lr, args.weight_decay) == expected


def test_a_resumed_run_keeps_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"optimizer": "ngd", "lr": 0.3, "weight_decay": 0.01, "dataset": "digits"}
    state = {"flags": flags, "file": str(tmp_path / "last.pt"), "progress": {"step": 0}}
    monkeypatch.setattr(options.checkpoint, "load", lambda *_, **__: state)
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", ["--resume", str(tmp_path)])
    assert {name: getattr(args, name) for name in flags} == flags


def test_skip_words_split_the_groups() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4))
    names = {p: name for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, "kaldi_ngd", 0.1, 0.01, rank=7, ngd_skip=["0.w", "1."])
    found = sorted(
        (names[p], g["ngd"], g["weight_decay"], g["rank"])
        for g in optimizer.param_groups
        for p in g["params"]
    )
    skipped = [("0.weight", False, 0.01, 7), ("1.bias", False, 0.0, 7), ("1.weight", False, 0.0, 7)]
    assert found == [
        ("0.bias", True, 0.0, 7),
        *skipped,
        ("2.bias", True, 0.0, 7),
        ("2.weight", True, 0.01, 7),
    ]
    with pytest.raises(InputError, match="nothing"):
        kaldi_ngd_groups(model, 0.01, ["0.w", "nothing"])
