"""Schedules equal torch's; warm-up, batch scaling, groups; and what every optimizer does."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as peers

import ngd
from backends.torch_compat import supports_fused_optimizers
from cli import factory, options
from cli.data import Run
from cli.optimizers import OPTIMIZERS
from conftest import each_of, parsed
from distributed.world import World
from models.transformer import Transformer
from optimizer_cases import (
    Shapes,
    assert_same,
    correlated,
    distance,
    parameters_of,
    set_gradients,
    snapshot,
    through_a_file,
    train,
    weights,
)
from optimizers import adam, kaldi_ngd
from optimizers.base import step_unless_skipped
from optimizers.param_groups import decay_groups
from optimizers.schedules import Schedule
from trainers import FP32

EPOCHS, STEPS = 12, 10  # of the run; steps in an epoch
TOTAL = EPOCHS * STEPS
# torch ends OneCycleLR on the last step, ours right after it: torch's has one step more, and a rise
# of the same length
ONE_CYCLE = {"total_steps": TOTAL + 1, "pct_start": (0.3 * TOTAL + 1) / (TOTAL + 1)}
ONE_CYCLE |= {"cycle_momentum": False}
PEERS: dict[str, tuple[Callable[[torch.optim.Optimizer], peers.LRScheduler], dict]] = {
    "step": (lambda o: peers.StepLR(o, 3, gamma=0.3), {"step_size": 3}),
    "multistep": (lambda o: peers.MultiStepLR(o, [2, 5], gamma=0.3), {"milestones": [5, 2]}),
    "exponential": (lambda o: peers.ExponentialLR(o, gamma=0.3), {}),
    "inverse": (lambda o: peers.LambdaLR(o, lambda epoch: 1 / (1 + 0.3 * epoch)), {}),
    "polynomial": (lambda o: peers.PolynomialLR(o, TOTAL, power=1.7), {"power": 1.7}),
    "cosine": (lambda o: peers.CosineAnnealingLR(o, TOTAL, eta_min=0.05), {"end": 0.05}),
    "onecycle": (lambda o: peers.OneCycleLR(o, 7.0, **ONE_CYCLE), {"peak": 7.0}),
    "cyclic": (
        lambda o: peers.CyclicLR(o, 1.0, 7.0, step_size_up=2 * STEPS, cycle_momentum=False),
        {"peak": 7.0, "step_size": 2},
    ),
}

OURS = ["ngd", "kaldi_ngd", "lamb", "lars", "slamb"]
EVERY_STEP = {"kaldi_ngd": {"update_period": 1}}  # whose periods count skipped steps as well
# two alike, a convolution, biases, a scalar, three axes
SHAPES: Shapes = [(40, 30), (40, 30), (20, 10, 3, 3), (7,), (7,), (), (80, 20, 4)]


def create(name: str, parameters=None, **settings) -> torch.optim.Optimizer:
    """An optimizer of these parameters, or of some of every shape."""
    groups = [{"params": weights(SHAPES) if parameters is None else parameters}]
    return OPTIMIZERS[name].make(groups, **({"lr": 0.01} | settings))


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
def test_a_schedule_equals_torchs(name):
    peer, settings = PEERS[name]
    ours = Schedule(name, EPOCHS, gamma=0.3, **settings)
    found = [ours(epoch + step * (1 / STEPS)) for epoch in range(EPOCHS) for step in range(STEPS)]
    if name in ("step", "multistep", "exponential", "inverse"):  # change at whole epochs only
        expected = [rate for rate in rates(peer, EPOCHS) for _ in range(STEPS)]
    else:
        expected = rates(peer, TOTAL)
    assert found == pytest.approx(expected, abs=1e-9)


@each_of("name", ["step", "multistep", "cyclic"])
def test_the_rate_falls_within_a_run_of_any_length(name):
    for epochs in (1, 2, 4, 50):
        args = parsed("images", f"--lr_schedule {name} --epochs {epochs}")
        factors = [options.create_lr_schedule(args)(epochs * k / 20) for k in range(20)]
        assert factors[-1] < max(factors)
    assert not options.create_lr_schedule(args).is_constant()
    assert Schedule(name, 2, milestones=[30], step_size=30).is_constant() == (name != "cyclic")


@each_of("steps", [1, 7, 49, 390])  # 49 * (1 / 49) < 1
def test_whole_epochs_are_counted_right_where_a_step_is_no_binary_fraction(steps):
    ours = Schedule("exponential", 100, gamma=0.5)
    for epoch in range(100):
        assert ours(epoch) == 0.5**epoch
        assert ours((epoch * steps + steps) * (1 / steps)) == 0.5 ** (epoch + 1)


@each_of(("warmup", "steps"), [(1, 10), (2, 7), (0.5, 30), (5, 391)])
def test_warmup_rises_linearly_and_ends_at_one(warmup, steps):
    ours, rise = Schedule("constant", EPOCHS, warmup=warmup), round(warmup * steps)
    factors = [ours(k // steps + k % steps * (1 / steps), 1 / steps) for k in range(rise + 3)]
    assert factors == pytest.approx([min(1.0, (k + 1) / rise) for k in range(rise + 3)], abs=1e-12)
    assert factors[rise:] == [1.0] * 3


@each_of("wrong", [{name: math.nan} for name in ("warmup", "power", "step_size")] + [{"gamma": -1}])
def test_a_rate_does_not_fall_below_zero(wrong):
    with pytest.raises(ValueError, match=str(*wrong)):
        Schedule("exponential", EPOCHS, **wrong)


@each_of(("name", "end"), [("polynomial", 0.1), ("cosine", 0.1), ("onecycle", 3 / 250_000)])
def test_shape_begins_after_the_warmup_and_ends_with_the_run(name, end):
    warm = Schedule(name, 12, warmup=4, end=0.1, peak=3.0)
    plain = Schedule(name, 8, end=0.1, peak=3.0)
    for t in (0, 1.5, 4, 8):
        assert warm(4 + t) == pytest.approx(plain(t))
    assert warm(12) == pytest.approx(end)


def test_the_flags_scale_the_rate_and_leave_the_classifier_to_adamw():
    run, model = Run("x", World(), FP32), nn.Linear(3, 4)
    for rule, factor in (("none", 1), ("linear", 8), ("sqrt", 8**0.5)):
        args = parsed("images", f"--lr 0.1 --bs 1024 --base_bs 128 --lr_scaling {rule}")
        ours = factory.create_optimizer(args, run, model)
        assert ours.defaults["lr"] == pytest.approx(0.1 * factor)
        assert not any(group["ngd"] for group in ours.param_groups)


def test_decay_groups_hold_each_trained_parameter_once_and_decay_matrices_but_positions():
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model.append(Transformer(50, 3, width=8, depth=1, heads=2, mlp_width=8, max_len=16))
    model[2].weight = model[1].weight  # tied
    model.extend([nn.LayerNorm([2, 3]), nn.MultiheadAttention(4, 2, add_bias_kv=True)])
    model.register_parameter("post_mix", weight(4, 4))
    model.register_parameter("layer_scale", weight(4, 1, 1))  # as of ConvNeXt
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = {model[3].positions, *model[4].parameters(), model[5].bias_k, model[5].bias_v}
    kept.add(model.layer_scale)
    matrices = [p for p in trained if p.ndim > 1 and p not in kept]
    held = {group["weight_decay"]: group["params"] for group in decay_groups(model, 0.1)}
    assert [id(p) for p in held[0.1]] == [id(p) for p in matrices]
    assert sorted(map(id, held[0.1] + held[0.0])) == sorted(map(id, trained))


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@each_of("name", OPTIMIZERS)
def test_unusual_groups_and_parameters_are_taken_as_by_torch(name):
    frozen = weight(4, 3).requires_grad_(False)
    for groups in (
        [[], [weight(4, 3)], []],
        [[weight(4, 0, 3), weight(0, 5), weight(0), weight(4, 3)]],
        [[weight(), weight(1, 1), weight(4, 3)]],
        [[frozen], [frozen.clone()]],
        [[weight(2, 3, 2, 1, 2), weight(9, 8).detach().T[::2].requires_grad_()]],
    ):
        optimizer = OPTIMIZERS[name].make([{"params": each} for each in groups], lr=0.1)
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


@each_of("name", OPTIMIZERS)
def test_weights_without_a_gradient_stay_as_they_are(name):
    mine = [weight(*shape) for shape in ((40, 60), (40, 60), (7,), (7,), (), (3, 3))]
    optimizer = OPTIMIZERS[name].make([{"params": mine, "weight_decay": 0.1}], lr=0.01)
    for step in range(6):
        unused = range(step % 2, len(mine), 2) if step else range(4, 6)
        for number, p in enumerate(mine):
            p.grad = None if number in unused else torch.randn_like(p)
        before = snapshot(optimizer)
        optimizer.step()
        for number, (p, (old, state)) in enumerate(zip(mine, before)):
            assert torch.equal(p, old) == (number in unused), (step, number)
            if number in unused and "momentum_buffer" in state:
                assert torch.equal(optimizer.state[p]["momentum_buffer"], state["momentum_buffer"])


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN, so that reading one shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned_memory")
@each_of("name", OPTIMIZERS)
@each_of("skipped", [(0, 1), (1, 9)])
@each_of("is_fused", [True, False])
def test_skipped_steps_leave_no_trace(name, skipped, is_fused, monkeypatch):
    supported = supports_fused_optimizers
    monkeypatch.setattr(adam, "supports_fused_optimizers", lambda w: is_fused and supported(w))
    optimizer, peer = (create(name, **EVERY_STEP.get(name, {})) for _ in range(2))
    for t in range(12):
        if t in skipped:
            set_gradients(parameters_of(optimizer), 99 + t)
            for p, bad in zip(parameters_of(optimizer), (math.inf, math.nan, math.inf)):
                p.grad.view(-1)[::3] = bad
            before = snapshot(optimizer)
            step_unless_skipped(optimizer, torch.tensor(True))
            assert getattr(optimizer, "found_inf", None) is None  # of the next step
            for (p, state), (old, known) in zip(snapshot(optimizer), before):
                assert_same([p, {key: state[key] for key in known}], [old, known])
        for each in (optimizer, peer):
            set_gradients(parameters_of(each), t)
            step_unless_skipped(each, torch.tensor(False))
    if name == "kaldi_ngd" and 0 in skipped:  # which would have learned more from the first one
        states = [state for _, state in snapshot(optimizer)]
        assert all(v.any() for state in states for key, v in state.items() if key.endswith("_K"))
    else:
        assert_same(snapshot(optimizer), snapshot(peer))


def test_a_step_that_does_not_read_whether_it_is_skipped_is_not_called():
    class Plain(torch.optim.Optimizer):
        def step(self):
            self.param_groups[0]["params"][0].data.fill_(math.nan)

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = Plain([weight], {"fused": True})
    for skip in (True, False):
        step_unless_skipped(optimizer, torch.tensor(skip))
        assert weight.isnan().any() != skip


@each_of("name", OURS)
@each_of("bad", [False, True])
def test_a_grad_scaler_unscales_and_skips(name, bad):
    """Or does so itself, where it is told to: Lightning refuses to clip gradients otherwise."""
    outcomes = []
    for way in ("unscaled before", "on the device", "by hand", "by the scaler"):
        settings = EVERY_STEP.get(name, {})
        optimizer = create(name, **settings)
        optimizer._step_supports_amp_scaling = way != "by the scaler"
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=way != "unscaled before")
        for t in range(12):
            set_gradients(parameters_of(optimizer), t)
            gradients = [p.grad for p in parameters_of(optimizer)]
            is_bad = bad and t == 2
            if is_bad and not scaler.is_enabled():
                continue
            optimizer.zero_grad(set_to_none=bool(t % 2))
            factor = math.inf if is_bad else 1.0
            pairs = zip(parameters_of(optimizer), gradients)
            scaler.scale(sum((p * grad * factor).sum() for p, grad in pairs)).backward()
            if way == "by hand":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        outcomes.append(snapshot(optimizer))
    for outcome in outcomes[1:]:
        for (p, state), (q, expected) in zip(outcome, outcomes[0]):
            assert_same(p, q, 1e-5)
            assert_same(state, expected, 1e-5)
    optimizer.zero_grad()
    optimizer.found_inf = 0  # of a GradScaler that has found no gradient
    optimizer.step()


@each_of("name", OURS)
def test_a_parameter_that_moves_into_another_group_has_its_rate(name):
    groups = [{"params": weights([(4, 3), (4, 3)]), "lr": 0.0}, {"params": weights([(4, 3)])}]
    optimizer = train(OPTIMIZERS[name].make(groups, lr=0.1), range(2))
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, moved)
    before = moved.detach().clone()
    train(optimizer, range(2, 4))
    assert not torch.equal(moved, before)


WAYS = [through_a_file, copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]


@each_of("name", OPTIMIZERS)
@each_of("way", WAYS)
@each_of("steps", [0, 13])
@each_of("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_or_copied_one_goes_on_bit_for_bit(name, way, steps, dtype):
    optimizer = train(create(name, weights(SHAPES, dtype)), range(steps))
    other, later = way(optimizer), range(steps, steps + 5)
    assert_same(snapshot(train(other, later)), snapshot(train(optimizer, later)))
    if name in OURS:
        values = [value for _, state in snapshot(other) for value in state.values()]
        assert all(value.dtype in (torch.float32, torch.float64) for value in values)


@each_of("name", OPTIMIZERS)
def test_channels_last_and_batches_of_any_size_take_the_same_step(name, monkeypatch):
    """Also with the state of a run in another memory format."""
    shapes = [(20, 10, 3, 3), (10, 3, 9, 9), (20, 10, 3, 3)]
    plain = train(create(name, weights(shapes)), range(6))
    last = [nn.Parameter(p.to(memory_format=torch.channels_last)) for p in parameters_of(plain)]
    resumed = create(name, last)
    resumed.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(plain, range(6, 10))  # from the tenth step on KaldiNGD's batches take turns
    with monkeypatch.context() as patch:
        patch.setattr(ngd, "CPU_BATCH_BYTES", 1)
        patch.setattr(kaldi_ngd, "BATCH_BYTES", 1)
        train(resumed, range(6, 10))
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in last)
    # Muon's polynomial is in bf16
    tolerance = 0.02 if name == "muon" else 1e-5
    for p, q in zip(last, parameters_of(plain)):
        assert_same(p.detach().contiguous(), q.detach(), tolerance)


@each_of("name", ["ngd", "kaldi_ngd"])
def test_a_new_rank_holds_from_the_next_step(name):
    optimizer = train(create(name), range(3))
    for group in optimizer.param_groups:
        group["rank"] = 2
    peer = train(create(name, rank=2), range(6))
    new, old = (parameters_of(each)[0] for each in (peer, optimizer))
    train(optimizer, range(3, 6))
    key = "directions" if name == "ngd" else "axis1_R"
    assert optimizer.state[old][key].shape == (2, 30)
    if name == "ngd":  # whose mean of the gradients stays
        assert_same(*(o.state[p]["momentum_buffer"] for o, p in ((optimizer, old), (peer, new))))


@each_of("name", OURS)
def test_a_users_hooks_at_loading_have_the_last_word(name):
    first, second = train(create(name), range(3)), create(name)
    zeros = {"state": {0: {"mine": torch.zeros(3, dtype=torch.float64)}}}
    second.register_load_state_dict_pre_hook(lambda _, state: {**state, **zeros})
    second.register_load_state_dict_post_hook(lambda own: own.param_groups[0].update(lr=7.0))
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(list(second.state.values()), [zeros["state"][0]])
    assert second.param_groups[0]["lr"] == 7.0


@each_of("name", ["ngd", "kaldi_ngd"])
def test_a_parameter_that_gets_gradients_later_is_trained_as_from_its_start(name):
    optimizer, peer = (create(name, **EVERY_STEP.get(name, {})) for _ in range(2))
    late = (1, 2, 4)
    for t in range(18):
        set_gradients(parameters_of(optimizer), t)
        if t < 6:
            for number in late:
                parameters_of(optimizer)[number].grad = None
        step_unless_skipped(optimizer, torch.tensor(t in (1, 2)))  # before they appear
    train(peer, range(6, 18))
    for number in late:
        one, other = parameters_of(optimizer)[number], parameters_of(peer)[number]
        assert_same(one.detach(), other.detach(), 1e-5)


@each_of("name", ["ngd", "kaldi_ngd"])
@each_of("scale", [1e-7, 1e3])
def test_the_step_does_not_depend_on_the_scale_of_the_gradient(name, scale):
    shapes = [(40, 30), (20, 10, 3, 3)]
    one, other = (create(name, weights(shapes), weight_decay=0.0) for _ in range(2))
    for step in zip(*(correlated(shape, 20, decay=1.0) for shape in shapes)):
        for p, q, gradient in zip(parameters_of(one), parameters_of(other), step):
            p.grad, q.grad = gradient.float(), gradient.float() * scale
        one.step()
        other.step()
    for p, q in zip(parameters_of(one), parameters_of(other)):
        if name == "kaldi_ngd":  # whose step is as long as the gradient
            p, q = one.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"] / scale
        assert distance(p, q) < 1e-4


@each_of("lr", [0.01, [0.01]])
@each_of("name", OURS)
def test_a_closure_and_a_rate_in_a_tensor_take_the_same_step(name, lr):
    optimizer, peer = create(name, lr=torch.tensor(lr)), create(name)

    def closure() -> float:
        set_gradients(parameters_of(optimizer), 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert_same(snapshot(optimizer), snapshot(train(peer, [0])), 1e-6)
    halves = [torch.nn.Parameter(torch.zeros(shape).bfloat16()) for shape in ((4, 4), (3,), ())]
    optimizer = create(name, halves, lr=torch.tensor(lr))
    set_gradients(halves, 0)
    optimizer.step()
    assert all(p.isfinite().all() for p in halves)
    assert halves[1].any() or name == "lars", "LARS moves no weights of zeros"


MOMENTUM = {"momentum": 1.0}
OUT_OF_RANGE = {
    "ngd": {"rank": 0, "adamw_ratio": -1.0, "betas": (0.9, 1.0), "eps": -1.0, **MOMENTUM},
    "kaldi_ngd": {"rank": 2.5, "alpha": 0.0, "eta": 1.0, "update_period": 0, **MOMENTUM},
    "lamb": {"eps": -1.0, "betas": (0.9,)},
    "lars": MOMENTUM,
    "slamb": {"wire_bits": 3, "local_steps": 0, "compress_ratio": 1.5, "eps": 0},
    "muon": {"lr": "0.1", **MOMENTUM},
}


@each_of("name", OUT_OF_RANGE)
def test_a_setting_out_of_range_is_refused(name):
    optimizer = create(name, [weight(3, 3)])
    settings = {"lr": math.nan, "weight_decay": -0.1, **OUT_OF_RANGE[name]}
    for setting, value in settings.items():
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__}: {setting}="):
            create(name, [weight(3, 3)], **{setting: value})
    with pytest.raises(ValueError, match="complex"):
        optimizer.add_param_group({"params": [torch.zeros(3, 3, dtype=torch.complex64)]})
    [parameter] = parameters_of(optimizer)  # of one group
    parameter.grad = torch.zeros_like(parameter).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    parameter.grad = parameter.grad.to_dense()
    lost = mock.patch.object(optimizer, "_apply_step", side_effect=RuntimeError("a lost peer"))
    with lost, pytest.raises(RuntimeError, match="a lost peer"):
        optimizer.step()
