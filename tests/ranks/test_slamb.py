"""SLAMB follows its equations on all ranks, and keeps the mean momentum whatever the gradients."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import slamb
from cli import factory
from cli.data import Run
from conftest import each_of, parsed
from distributed.quantization import dequantize, quantize
from distributed.world import World
from optimizer_cases import assert_same, copied, parameters_of, snapshot
from optimizers import adam
from optimizers.flat_buffer import next_units, shuffled
from optimizers.lamb import LAMB
from slamb import BLOCK, SLAMB, SMALLEST_LARGE
from slamb_oracle import SHAPES, Oracle, gradient, start
from trainers import FP32, make_trainer
from training.step_stats import StepSums
from training.train_state import merge_optimizer_states

ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
LARGE = [n for n in map(math.prod, SHAPES) if n >= SMALLEST_LARGE]
SMALL_ELEMENTS = ELEMENTS - sum(LARGE)
LARGE_ROWS = sum(-(-elements // BLOCK) for elements in LARGE)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(p) for p in start(dtype)]


def set_gradients(mine: list[nn.Parameter], step: int, rank: int) -> None:
    for p, g in zip(mine, gradient(step, rank)):
        p.grad = g.to(p.dtype)


def train(ours: SLAMB, steps: range, rank: int = 0) -> SLAMB:
    for step in steps:
        set_gradients(parameters_of(ours), step, rank)
        ours.step()
    return ours


def same(one: list, other: list) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def agree(world: World, mine: list[nn.Parameter]) -> bool:
    """Whether all ranks have these weights."""
    return all(torch.equal(world.sum(p.detach().clone()) / world.size, p) for p in mine)


def is_as_before(p: Tensor, state: dict[str, Tensor], before: tuple[Tensor, dict]) -> bool:
    """Whether a weight, and all that its state held, are those of a snapshot."""
    weights, values = before
    return torch.equal(p, weights) and all(torch.equal(state[n], values[n]) for n in values)


# ------------------------------------------------------------ units


@each_of("shares", [[0.1], [0.3], [0.999], [1.0], [0.5, 0.5, 0.2, 0.1, 0.1, 0.01, 0.7]])
def test_a_step_takes_the_given_share_and_every_unit_has_its_turn(shares):
    state = torch.get_rng_state()
    order, last, cursor = shuffled(torch.arange(97), seed=3), [0] * 97, 0
    assert order.tolist() != list(range(97))
    for step in range(1, 400):
        share = shares[step % len(shares)]
        units = next_units(order, cursor, share).tolist()
        cursor = (cursor + len(units)) % 97
        assert len(units) == len(set(units)) == math.ceil(share * 97 - 1e-9)
        for unit in units:
            last[unit] = step
        assert step - min(last) < math.ceil(1 / min(shares)) or step < math.ceil(1 / min(shares))
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------ in one process


@each_of(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_one_process_equals_lamb_and_sends_nothing(dtype, tolerance):
    one, other = parameters(dtype), parameters(dtype)
    ours, lamb = SLAMB(one, 0.01), LAMB(other, 0.01)
    for step in range(20):
        for mine, optimizer in ((one, ours), (other, lamb)):
            set_gradients(mine, step, 0)
            for number in range(len(SHAPES)):  # all are missing at first, and then each in turn
                if step == 0 or (step > 10 and number % 3 == step % 3):
                    mine[number].grad = None
            optimizer.step()
    assert_same(one, other, tolerance)
    for p, q in zip(one, other):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[p][name], lamb.state[q][name])
        assert ours.state[p]["exp_avg"].dtype == torch.promote_types(dtype, torch.float32)
    assert ours.param_groups[0]["steps"] == lamb.param_groups[0]["steps"] == 19
    assert ours.take_traffic().payload == 0


@each_of(("name", "bits"), [("fp32", 0), ("int4", 4)])
def test_the_format_of_the_flags_reaches_the_optimizer(name, bits):
    flags = "--optimizer slamb --compress_warmup 0.7 0.3 --wire_dtype"
    args = parsed("images", flags, name)
    run = Run("x", World(), FP32)
    ours = factory.create_optimizer(args, run, nn.Linear(3, 4))
    assert (ours.wire_bits, ours.wire_dtype == torch.float32) == (bits, not bits)
    assert ours.warmup == [0.7, 0.3]


def test_the_ratio_is_warmed_up_by_epochs():
    groups = [{"params": parameters()[:1]}, {"params": parameters()[3:4], "compress_ratio": 0.3}]
    ours, seen = SLAMB(groups, warmup=[0.5, 0.2]), []
    ours.add_param_group({"params": parameters()[1:2]})  # which is warmed up as well
    for epoch in (0, 1, 2, 1):
        ours.start_epoch(epoch)
        seen.append([group["compress_ratio"] for group in ours.param_groups])
    assert seen == [[0.5, 0.5, 0.5], [0.2, 0.3, 0.2], [0.1, 0.3, 0.1], [0.2, 0.3, 0.2]]


# ------------------------------------------------------------ numbers in few bits


@each_of("bits", [8, 4, 1])
def test_zeros_count_in_no_scale_and_what_is_not_finite_shows(bits):
    tensors = [torch.randn(length) for length in (66, 64, 1, 130)]
    _, together = quantize(tensors, bits)
    assert torch.equal(together, torch.cat([quantize([each], bits)[1] for each in tensors]))
    values = torch.zeros(192)
    values[100], values[130] = math.inf, math.nan
    (found,) = dequantize(*quantize([values], bits), bits=bits, like=[values])
    assert torch.equal(found[:64], torch.zeros(64))
    assert not found[64:].isfinite().any()


# ------------------------------------------------------------ the equations, on ranks

STEPS = 12  # beyond the dense steps and two averages of the weights
OF_TWO = [  # 0.004: nothing of some tensors
    *({"k": k} for k in (0.004, 0.3, 1.0)),
    {"k": 0.3, "bits": 8},
]
OF_THREE = [{"k": 0.3, "bits": 4}, {"k": 0.1, "most": 0.3}]


def expectations(settings: list, size: int) -> list:
    """What the oracle has after STEPS with each of the settings, which are among its values."""
    dense = [torch.zeros_like(p) for p in start()]
    for step in range(1, STEPS + 1):
        for m, *of_ranks in zip(dense, *(gradient(step, rank) for rank in range(size))):
            m.lerp_(sum(of_ranks) / size, 0.1)
    cases = []
    for each in settings:
        oracle = Oracle(size, **each, dense=4, local=5, beta3=0.9)
        for _ in range(STEPS):
            oracle.step()
        cases.append({**each, "weights": oracle.w, "momentum": dense})
    return cases


def follows_the_oracle(world: World, case: dict) -> None:
    """The weights are the oracle's; the mean momentum is that of the mean gradients."""
    mine = parameters()
    settings = {"dense_steps": 4, "local_steps": 5, "beta3": 0.9, "wire_dtype": torch.float64}
    settings |= {"compress_ratio": case["k"], "wire_bits": case.get("bits", 0)}
    with mock.patch.object(slamb, "LARGEST_TRUST", case.get("most", slamb.LARGEST_TRUST)):
        ours = train(SLAMB(mine, 0.01, **settings), range(1, STEPS + 1), world.rank)
    assert_same([p.detach() for p in mine], [w[world.rank] for w in case["weights"]], 1e-8)
    for p, expected in zip(mine, case["momentum"]):
        total = world.sum(ours.state[p]["exp_avg"].clone()) / world.size
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-12)


def all_oracles(world: World, file) -> None:
    cases = torch.load(file)
    for case in cases:
        follows_the_oracle(world, case)
    if world.size == 2:
        with mock.patch.object(slamb, "_is_decided_on_device", return_value=True):
            follows_the_oracle(world, cases[1])
        with mock.patch.object(adam, "supports_fused_optimizers", return_value=False):
            follows_the_oracle(world, cases[1])


@pytest.mark.parametrize(("size", "settings"), [(2, OF_TWO), (3, OF_THREE)])
def test_it_follows_the_equations_and_the_mean_momentum_is_the_dense_one(size, settings, tmp_path):
    torch.save(expectations(settings, size), tmp_path / "expected.pt")
    ranks.run_ranks(all_oracles, size, tmp_path / "expected.pt")


# ------------------------------------------------------------ what ranks do together


def bytes_are_as_documented(world: World) -> None:
    for k, bits in itertools.product((0.01, 0.3, 0.9), (0, 8, 4)):
        mine, sent = parameters(torch.float32), []
        ours = SLAMB(mine, dense_steps=1, local_steps=4, compress_ratio=k, wire_bits=bits)
        for step in range(5):
            train(ours, range(step, step + 1), world.rank)
            sent.append(ours.take_traffic().payload)
            assert agree(world, mine) == (step in (0, 3))
        large = math.ceil(k * LARGE_ROWS - 1e-9) * (BLOCK * bits // 8 + 2 if bits else 2 * BLOCK)
        sparse = 2 * (SMALL_ELEMENTS + 1) + large
        assert sent[1] == sent[2] == sent[4] == sparse
        assert sent[3] == sparse + 4 * ELEMENTS
        assert sent[0] == 2 * (SMALL_ELEMENTS + LARGE_ROWS * BLOCK + 1)


def a_bad_step_on_one_rank_is_skipped_by_all(world: World, on_device: bool = False) -> None:
    for bits in (0, 8):
        settings = {"compress_ratio": 0.2, "dense_steps": 2, "wire_bits": bits}
        settings |= {"local_steps": 100 if on_device else 5}
        mine = parameters(torch.float32)
        ours = SLAMB(mine, **settings)
        for step in range(9):
            ours.found_inf = torch.tensor(0.0)
            if step in (0, 1, 4, 5):  # before dense steps, a sparse one and an averaging
                set_gradients(mine, 50 + step, world.rank)
                before = snapshot(ours)
                overflow = world.rank == step % world.size
                if overflow:
                    mine[step % 3].grad.view(-1)[3] = math.inf
                ours.found_inf = torch.tensor(float(overflow))
                ours.step()
                assert ours.skipped == 1
                assert all(is_as_before(p, ours.state[p], b) for p, b in zip(mine, before))
                ours.found_inf = torch.tensor(0.0)
                if on_device:  # where the units of this step miss their turn
                    continue
            train(ours, range(step, step + 1), world.rank)
            assert ours.skipped == 0
        assert all(p.isfinite().all() for p in mine)
        plain = parameters(torch.float32)
        if not on_device:
            train(SLAMB(plain, **settings), range(9), world.rank)
            assert same(mine, plain)


def a_missing_gradient_is_zero(world: World, on_device: bool = False) -> None:
    """Where all are missing, the weight stays.

    Two heads are used in turn, and some of their gradients are there on rank 0 alone.
    """
    ways = [{"dense_steps": 100}, {}, {"wire_bits": 8}]
    runs = []
    for settings, is_missing in itertools.product(ways, (True, False)):
        settings = {"dense_steps": 0, "compress_ratio": 0.3, "local_steps": 100, **settings}
        mine = parameters(torch.float32)
        ours = SLAMB(mine, 0.01, **settings)
        for step in range(8):
            set_gradients(mine, step, world.rank)
            unused = range(step % 2, len(mine), 2) if step else ()
            for number, p in enumerate(mine):
                if number in unused or (is_missing and number < 3 and world.rank):
                    p.grad = None
                elif number < 3 and world.rank:
                    p.grad.zero_()
            before = snapshot(ours)
            ours.step()
            stay = [is_as_before(p, ours.state[p], b) for p, b in zip(mine, before)]
            assert stay == [number in unused for number in range(len(mine))], (settings, step)
            assert agree(world, [mine[2], mine[5]])  # small ones, whose gradients are averaged
            sent = ours.take_traffic().payload
        runs.append(copied(mine))
        train(ours, range(8, 9), world.rank)  # it sends as much, but for 2 bytes for each weight
        saved = 0 if on_device else 2 * len(mine)
        assert ours.take_traffic().payload == sent - saved, "no flags where no gradient is missing"
    assert all(map(same, runs[::2], runs[1::2]))


def it_is_the_same_where_the_host_does_not_learn_of_it(world: World) -> None:
    with mock.patch.object(slamb, "_is_decided_on_device", return_value=True):
        a_bad_step_on_one_rank_is_skipped_by_all(world, on_device=True)
        a_missing_gradient_is_zero(world, True)


def groups_have_their_own_settings(world: World) -> None:
    for bits in (0, 8):
        mine = parameters(torch.float32)
        groups = [
            {"params": mine[:2], "lr": 0.0},
            {"params": mine[2:4], "compress_ratio": 1.0},
            {"params": mine[4:], "weight_decay": 0.0},
        ]
        ours = train(SLAMB(groups, dense_steps=0, wire_bits=bits), range(3), world.rank)
        changed = [not torch.equal(p, q) for p, q in zip(mine, start(torch.float32))]
        assert changed == [False, False, True, True, True, True]
        assert agree(world, mine[2:])  # k = 1, or small: exchanged whole
        counts = [group["calls"] for group in ours.state_dict()["param_groups"]]
        assert counts == [3, 3, 3]


def merged_states_keep_the_mean_momentum(world: World) -> None:
    mine = parameters(torch.float32)
    ours = train(SLAMB(mine, dense_steps=2), range(7), world.rank)
    momenta = [world.sum(ours.state[p]["exp_avg"].clone()) / world.size for p in mine]
    box = [None] * world.size
    dist.all_gather_object(box, ours.state_dict())
    assert not torch.equal(box[0]["state"][0]["exp_avg"], box[1]["state"][0]["exp_avg"])
    other = SLAMB(parameters(torch.float32))
    other.load_state_dict(merge_optimizer_states(box))
    for p, expected in zip(other.param_groups[0]["params"], momenta):
        torch.testing.assert_close(other.state[p]["exp_avg"], expected)
    assert other.param_groups[0]["calls"] == 7


def test_moments_of_any_name_are_merged_also_of_ranks_that_have_none():
    def state(value: float) -> dict[str, Any]:
        tensors = {"momentum": torch.full((2,), value), "directions": torch.full((2, 2), value)}
        return {"state": {0: {**tensors, "step": torch.tensor(value)}}, "param_groups": []}

    none = {"state": {}, "param_groups": []}
    merged = merge_optimizer_states([none, state(1.0), state(3.0)])["state"][0]
    assert merged["momentum"].tolist() == [2.0, 2.0]
    assert (merged["directions"] == 1).all()
    assert merged["step"] == 1


def the_step_clips_by_the_global_norm(world: World) -> None:
    for clip in (0.0, 0.05, 1e3):
        mine = parameters(torch.float32)
        model = nn.ParameterList(mine)
        ours = SLAMB(model.parameters(), dense_steps=1, wire_dtype=torch.float32)
        trainer = make_trainer(model, ours, world, max_grad_norm=clip)
        trainer.wrap_model()
        assert trainer.parallel.module is model
        set_gradients(mine, 0, world.rank)
        norm = torch.stack([p.grad.square().sum() for p in mine]).sum()
        norm = (world.sum(norm) / world.size).sqrt().item()
        factor = min(1.0, clip / norm) if clip else 1.0
        expected = [world.sum(0.1 * factor * p.grad) / world.size for p in mine]
        trainer.optimizer_step(StepSums(torch.device("cpu")))
        for p, m in zip(mine, expected):
            torch.testing.assert_close(ours.state[p]["exp_avg"], m, rtol=1e-4, atol=1e-9)
        train(ours, range(1, 2), world.rank)
        assert not agree(world, mine)
        trainer.parallel.sync_replicas(trainer.statistics())
        assert agree(world, mine)


def all_small_ones(world: World) -> None:
    state = torch.get_rng_state()
    bytes_are_as_documented(world)
    a_bad_step_on_one_rank_is_skipped_by_all(world)
    a_missing_gradient_is_zero(world)
    it_is_the_same_where_the_host_does_not_learn_of_it(world)
    groups_have_their_own_settings(world)
    merged_states_keep_the_mean_momentum(world)
    the_step_clips_by_the_global_norm(world)
    assert torch.equal(torch.get_rng_state(), state), "the random state is left alone"


def test_what_ranks_do_together():
    ranks.run_ranks(all_small_ones, 2)
