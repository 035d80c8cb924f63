"""Schedules equal torch's; warm-up, batch scaling, groups, and steps skipped on the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as peers

import resnet50_test
from cli import options
from conftest import each_of
from models.transformer import Transformer
from optimizer_cases import snapshot
from optimizers.param_groups import decay_groups
from optimizers.schedules import Schedule, scale_lr
from resnet50_test import OPTIMIZERS
from trainers import build_optimizer

EPOCHS, STEPS = 12, 10  # of the run; steps in an epoch
TOTAL = EPOCHS * STEPS
PEERS: dict[str, tuple[Callable[[torch.optim.Optimizer], peers.LRScheduler], dict]] = {
    "step": (lambda o: peers.StepLR(o, 3, gamma=0.3), {"step_size": 3}),
    "multistep": (
        lambda o: peers.MultiStepLR(o, [2, 5, 11], gamma=0.3),
        {"milestones": [11, 2, 5]},
    ),
    "exponential": (lambda o: peers.ExponentialLR(o, gamma=0.3), {}),
    "inverse": (lambda o: peers.LambdaLR(o, lambda epoch: 1 / (1 + 0.3 * epoch)), {}),
    "polynomial": (lambda o: peers.PolynomialLR(o, TOTAL, power=1.7), {"power": 1.7}),
    "cosine": (lambda o: peers.CosineAnnealingLR(o, TOTAL, eta_min=0.05), {"end": 0.05}),
    # torch ends OneCycleLR on the last step, ours right after it: torch's has one step more, and a
    # rise of the same length
    "onecycle": (
        lambda o: peers.OneCycleLR(
            o, 7.0, TOTAL + 1, pct_start=(0.3 * TOTAL + 1) / (TOTAL + 1), cycle_momentum=False
        ),
        {"peak": 7.0},
    ),
    "cyclic": (
        lambda o: peers.CyclicLR(o, 1.0, 7.0, step_size_up=2 * STEPS, cycle_momentum=False),
        {"peak": 7.0, "step_size": 2},
    ),
}
BY_EPOCH = ("step", "multistep", "exponential", "inverse")  # change at whole epochs only

HERE = [name for name in OPTIMIZERS if not name.startswith("apex")]  # apex has tests of its own


def rates(peer: Callable[[torch.optim.Optimizer], peers.LRScheduler], count: int) -> list[float]:
    """The rates torch's scheduler gives to `count` steps of an optimizer of rate 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, seen = peer(optimizer), []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@each_of("name", PEERS)
def test_a_schedule_equals_torchs(name: str) -> None:
    peer, settings = PEERS[name]
    ours = Schedule(name, EPOCHS, gamma=0.3, **settings)
    found = [ours(epoch + step * (1 / STEPS)) for epoch in range(EPOCHS) for step in range(STEPS)]
    if name in BY_EPOCH:
        expected = [rate for rate in rates(peer, EPOCHS) for _ in range(STEPS)]
    else:
        expected = rates(peer, TOTAL)
    assert found == pytest.approx(expected, abs=1e-9)


@each_of("steps", [1, 7, 49, 390])  # 49 * (1 / 49) < 1
def test_whole_epochs_are_counted_right_where_a_step_is_no_binary_fraction(steps: int) -> None:
    ours = Schedule("exponential", 100, gamma=0.5)
    for epoch in range(100):
        assert ours(epoch) == 0.5**epoch
        assert ours((epoch * steps + steps) * (1 / steps)) == 0.5 ** (epoch + 1)


@each_of(("warmup", "steps"), [(1, 10), (2, 7), (0.5, 30), (5, 391)])
def test_warmup_rises_linearly_and_ends_at_one(warmup: float, steps: int) -> None:
    ours, rise = Schedule("constant", EPOCHS, warmup=warmup), round(warmup * steps)
    factors = [ours(k // steps + k % steps * (1 / steps), 1 / steps) for k in range(rise + 3)]
    assert factors == pytest.approx([min(1.0, (k + 1) / rise) for k in range(rise + 3)], abs=1e-12)
    assert factors[rise:] == [1.0] * 3


@each_of(("name", "end"), [("polynomial", 0.1), ("cosine", 0.1), ("onecycle", 3 / 250_000)])
def test_shape_begins_after_the_warmup_and_ends_with_the_run(name: str, end: float) -> None:
    warm = Schedule(name, 12, warmup=4, end=0.1, peak=3.0)
    plain = Schedule(name, 8, end=0.1, peak=3.0)
    for t in (0, 1.5, 4, 8):
        assert warm(4 + t) == pytest.approx(plain(t))
    assert warm(12) == pytest.approx(end)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="sinus"):
        Schedule("sinus", 3)(0)


@each_of(("rule", "expected"), [("none", 0.1), ("linear", 0.8), ("sqrt", 0.1 * math.sqrt(8))])
def test_learning_rate_scales_with_the_batch(rule: str, expected: float) -> None:
    assert scale_lr(0.1, rule, batch_size=1024, base_batch_size=128) == pytest.approx(expected)
    assert scale_lr(0.1, rule, batch_size=128, base_batch_size=128) == pytest.approx(0.1)


def test_decay_groups_hold_each_trained_parameter_once_and_decay_matrices_but_positions() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model.append(Transformer(50, 3, width=8, depth=1, heads=2, mlp_width=8, max_len=16))
    model[2].weight = model[1].weight  # tied
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1 and p is not model[3].positions]
    held = {group["weight_decay"]: group["params"] for group in decay_groups(model, 0.1)}
    assert [id(p) for p in held[0.1]] == [id(p) for p in matrices]
    assert sorted(map(id, held[0.1] + held[0.0])) == sorted(map(id, trained))


@each_of("name", HERE)
def test_optimizer_descends(name: str) -> None:
    weight = nn.Linear(5, 1)
    nn.init.constant_(weight.weight, 0.5)  # steps of LARS and LAMB are in proportion to the weights
    own = {"trust_coefficient": 1.0} if name == "lars" else {}
    optimizer = build_optimizer(weight, name, lr=0.05, weight_decay=1e-3, **own)
    x, losses = torch.randn(64, 5), []
    for _ in range(100):
        loss = (weight(x) - x.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 4


def weight(*shape: int, **settings: bool) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape), **settings)


@each_of("name", HERE)
def test_unusual_groups_and_parameters_are_taken_as_by_torch(name: str) -> None:
    frozen = weight(4, 3, requires_grad=False)
    for groups in (
        [{"params": []}, {"params": [weight(4, 3)]}, {"params": []}],
        [{"params": []}],
        [{"params": [weight(4, 0, 3), weight(0, 5), weight(0), weight(4, 3)]}],
        [{"params": [weight(4, 0, 3)]}],
        [{"params": [weight(), weight(1, 1), weight(4, 3)]}],
        [{"params": [frozen]}, {"params": [frozen.clone().requires_grad_(False)]}],
        [{"params": [weight(2, 3, 2, 1, 2), weight(9, 8).detach().T[::2].requires_grad_()]}],
    ):
        optimizer = OPTIMIZERS[name].make(groups, lr=0.1)
        for _ in range(2):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for p in parameters:
                p.grad = torch.ones_like(p) if p.requires_grad else None
            before = [p.detach().clone() for p in parameters]
            optimizer.step()
            for p, old in zip(parameters, before):
                assert torch.equal(p, old) == (p.grad is None or p.numel() == 0)
                assert p.isfinite().all()
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
            torch.testing.assert_close(optimizer.state_dict(), state)
            optimizer.add_param_group({"params": [weight(5, 6)]})


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@each_of("name", HERE)
def test_parameters_and_gradients_of_another_kind_are_refused_in_one_line(name: str) -> None:
    make, is_torchs = OPTIMIZERS[name].make, name in ("sgd", "adamw")
    complex_one, twice = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)), weight(4, 3)
    for bad in [] if is_torchs else ([complex_one], [twice, twice]):
        with pytest.raises(ValueError, match="complex parameters|in the same group twice"):
            make([{"params": bad}], lr=0.1)
        optimizer = make([{"params": [weight(4, 3)]}], lr=0.1)
        with pytest.raises(ValueError, match="complex parameters|in the same group twice"):
            optimizer.add_param_group({"params": bad})
        assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = make([{"params": list(embedding.parameters())}], lr=0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    if name != "sgd":
        with pytest.raises(RuntimeError, match="sparse gradients"):
            optimizer.step()


@each_of("name", HERE)
def test_weights_without_a_gradient_stay_as_they_are(name: str) -> None:
    mine = [weight(*shape) for shape in ((40, 60), (40, 60), (7,), (7,), (), (3, 3))]
    optimizer = OPTIMIZERS[name].make([{"params": mine, "weight_decay": 0.1}], lr=0.01)
    for step in range(6):
        unused = range(step % 2, len(mine), 2) if step else range(4, 6)
        for number, p in enumerate(mine):
            p.grad = None if number in unused else torch.randn_like(p)
        before = snapshot(optimizer)
        optimizer.step()
        for number, (p, (weights, state)) in enumerate(zip(mine, before)):
            assert torch.equal(p, weights) == (number in unused), (step, number)
            if number in unused and "momentum_buffer" in state:
                assert torch.equal(optimizer.state[p]["momentum_buffer"], state["momentum_buffer"])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN, so that reading one shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned_memory")
@each_of(
    "settings", [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {}]
)
@each_of("skipped", [(0,), (0, 1), (1,)])
def test_skipped_steps_leave_no_trace(settings: dict, skipped: tuple[int, ...]) -> None:
    name = "sgd" if settings else "adamw"
    gradients = [torch.randn(4, 3) for _ in range(4)]

    def train(skips: bool) -> tuple[Tensor, dict]:
        model = nn.Linear(3, 4, bias=False)
        nn.init.ones_(model.weight)
        optimizer = build_optimizer(model, name, lr=0.1, weight_decay=0.01, **settings)
        for number, gradient in enumerate(gradients):
            bad = number in skipped
            if bad and not skips:
                continue
            model.weight.grad = torch.full_like(gradient, math.nan) if bad else gradient.clone()
            optimizer.found_inf = torch.tensor(float(bad))  # as step_unless_skipped does
            optimizer.step()
        return model.weight.detach(), optimizer.state_dict()["state"]

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)


@each_of(
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
