"""SLAMB follows its equations on all ranks, and keeps the mean momentum whatever the gradients."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import resnet50_test
import slamb
import slamb_oracle
from cli import factory, options
from distributed.quantization import dequantize, quantize
from distributed.world import World
from optimizers import adam
from optimizers.flat_buffer import FlatLayout, RoundRobin
from optimizers.lamb import LAMB
from slamb import BLOCK, SLAMB, AuthorsSLAMB
from slamb_oracle import SHAPES, Oracle, gradient, start
from trainers import FP32, make_trainer
from training.step_stats import StepSums
from training.train_state import merge_optimizer_states

EXACT = {"wire_dtype": torch.float64}
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
LARGE = [
    elements for elements in map(math.prod, SHAPES) if elements >= SLAMB.default_smallest_large
]
SMALL_ELEMENTS = ELEMENTS - sum(LARGE)
LARGE_ROWS = sum(-(-elements // BLOCK) for elements in LARGE)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(p) for p in start(dtype)]


def set_gradients(mine: list[nn.Parameter], step: int, rank: int) -> None:
    for p, g in zip(mine, gradient(step, rank)):
        p.grad = g.to(p.dtype)


def close(
    mine: list[nn.Parameter], expected: list[torch.Tensor], *, tolerance: float, message: str
) -> None:
    for p, q in zip(mine, expected):
        torch.testing.assert_close(
            p.detach().double(),
            q,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"{message}: {text}",
        )


# ------------------------------------------------------------ units


@pytest.mark.parametrize(
    "shares", [[0.1], [0.3], [0.999], [1.0], [0.5, 0.5, 0.2, 0.1, 0.1, 0.01, 0.7]]
)
def test_round_robin_takes_the_given_share_and_every_unit_has_its_turn(shares: list[float]) -> None:
    order, last = RoundRobin(torch.arange(97), seed=3), [0] * 97
    state = torch.get_rng_state()
    for step in range(1, 400):
        share = shares[step % len(shares)]
        units = order.next_units(share).tolist()
        assert len(units) == len(set(units)) == math.ceil(share * 97 - 1e-9)
        for unit in units:
            last[unit] = step
        assert step - min(last) < math.ceil(1 / min(shares)) or step < math.ceil(1 / min(shares))
    assert torch.equal(torch.get_rng_state(), state)
    assert RoundRobin(torch.arange(97), seed=3).next_units(1.0).tolist() != list(range(97))


def test_views_have_the_memory_format_of_their_tensors() -> None:
    tensors = [
        torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(70),
        torch.randn(6, 4).T,
        torch.tensor(2.0),
    ]
    layout = FlatLayout(tensors, 16)
    buffer = layout.new_buffer()
    for view, tensor in zip(layout.views(buffer), tensors):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(buffer), tensors))
    assert layout.views(buffer)[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        buffer.view(-1)[layout.element_indices()].sort().values,
        torch.cat([t.flatten() for t in tensors]).sort().values,
    )
    sums = layout.sum_per_tensor(buffer.square().sum(1))
    torch.testing.assert_close(sums, torch.stack([t.square().sum() for t in tensors]))
    assert layout.tensor_of_row().tolist() == [
        n for n, count in enumerate(layout.counts) for _ in range(count)
    ]


# ------------------------------------------------------------ in one process


@pytest.mark.parametrize("selection", ["block", "random"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_process_equals_lamb_and_sends_nothing(selection: str, dtype: torch.dtype) -> None:
    one, other = parameters(dtype), parameters(dtype)
    ours, lamb = SLAMB(one, 0.01, selection=selection), LAMB(other, 0.01)
    for step in range(30):
        for mine, optimizer in ((one, ours), (other, lamb)):
            set_gradients(mine, step, 0)
            optimizer.step()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    close(one, [p.detach().double() for p in other], tolerance=tolerance, message="LAMB")
    assert ours.take_bytes() == 0
    assert all(
        ours.state[p]["exp_avg"].dtype == torch.promote_types(dtype, torch.float32) for p in one
    )


def test_one_process_equals_lamb_where_gradients_are_missing_in_turn() -> None:
    for make, selection in itertools.product((SLAMB, AuthorsSLAMB), ("block", "random")):
        one, other = parameters(), parameters()
        ours = make(one, 0.01, selection=selection)
        lamb = LAMB(other, 0.01, adapt=True if make is AuthorsSLAMB else None)
        for step in range(12):
            for mine, optimizer in ((one, ours), (other, lamb)):
                set_gradients(mine, step, 0)
                for number in range(len(SHAPES)):
                    if step == 0 or number % 3 == step % 3:
                        mine[number].grad = None
                optimizer.step()
        weights = [p.detach() for p in other]
        if make is SLAMB:
            close(one, weights, tolerance=1e-12, message="LAMB")
        for p, q in zip(one, other):
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(ours.state[p][name], lamb.state[q][name])
        assert ours.param_groups[0]["steps"] == lamb.param_groups[0]["steps"] == 11


def test_a_torch_without_fused_kernels_for_cpus_takes_the_same_steps(monkeypatch: Any) -> None:
    one, other = parameters(), parameters()
    for mine, fused in ((one, True), (other, False)):
        monkeypatch.setattr(adam, "supports_fused_optimizers", lambda _, fused=fused: fused)
        ours = SLAMB(mine, 0.01)
        for step in range(5):
            set_gradients(mine, step, 0)
            ours.step()
    close(one, [p.detach() for p in other], tolerance=1e-12, message="fused")
    assert not all(torch.equal(p, q) for p, q in zip(one, other))  # they were two ways


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_keeps_every_setting_and_goes_on_alike(copied: Any) -> None:
    settings = {
        "local_steps": 7,
        "outer_momentum": 0.5,
        "outer_lr": 0.7,
        "dense_steps": 3,
        "selection": "random",
        "warmup": [0.5],
        "wire_bits": 4,
    }
    mine = parameters()
    ours = SLAMB(mine, compress_ratio=0.2, amp_scaling=False, wire_dtype=torch.float32, **settings)
    for step in range(3):
        set_gradients(mine, step, 0)
        ours.step()
    other = copied(ours)
    assert {name: getattr(other, name) for name in settings} == settings
    assert other.wire_dtype == torch.float32
    assert not other._step_supports_amp_scaling
    for each in (ours, other):
        each.start_epoch(0)
        assert each.param_groups[0]["compress_ratio"] == 0.5
        weights = each.param_groups[0]["params"]
        set_gradients(weights, 3, 0)
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, other.param_groups[0]["params"]))


def test_one_with_process_groups_of_its_own_says_that_it_cannot_be_copied() -> None:
    ours = SLAMB(parameters())
    ours.averager.group = object()
    with pytest.raises(TypeError, match="use state_dict"):
        pickle.dumps(ours)
    with pytest.raises(ValueError, match="wire_bits=8 is not supported with node_group"):
        SLAMB(parameters(), wire_bits=8, node_group=object())


def test_bad_settings_are_refused() -> None:
    for bad in (
        {"selection": "top"},
        {"wire_bits": 3},
        {"local_steps": 0},
        {"outer_momentum": 1.0},
        {"outer_lr": 0.0},
        {"smallest_large": -1},
        {"compress_ratio": 0.0},
        {"compress_ratio": 1.5},
        {"lr": -1.0},
        {"beta3": 2.0},
    ):
        with pytest.raises(ValueError, match=f"SLAMB: {next(iter(bad))}="):
            SLAMB(parameters(), **bad)


@pytest.mark.parametrize(("name", "bits"), [("fp32", 0), ("int8", 8), ("int4", 4)])
def test_the_format_of_the_flags_reaches_the_optimizer(name: str, bits: int) -> None:
    words = ["--optimizer", "slamb", "--wire_dtype", name]
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", words)
    run = factory.Run("x", World(), FP32)
    ours = factory.create_optimizer(args, run, nn.Linear(3, 4), resnet50_test.OPTIMIZERS)
    assert isinstance(ours, SLAMB)
    assert ours.wire_bits == bits
    assert ours.wire_dtype == (torch.bfloat16 if bits else torch.float32)


# ------------------------------------------------------------ numbers in few bits


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [1, 64, 1000])
def test_numbers_in_few_bits_are_off_by_half_a_scale_at_most(bits: int, length: int) -> None:
    values = torch.randn(length, dtype=torch.float64) * 10.0 ** torch.randint(-4, 4, (length,))
    codes, scales = quantize(values, bits)
    found = dequantize(codes, scales, bits=bits, like=values)
    rows = math.ceil(length / 64)
    assert codes.nbytes == rows * 8 * bits
    steps = scales.double().repeat_interleave(64)[:length]
    assert ((found - values).abs() <= 0.5 * steps).all()
    assert (steps <= 1.01 * values.abs().max() / (127 if bits == 8 else 7)).all()


def test_a_single_bit_is_the_sign_and_the_scale_is_the_mean_size_of_its_row() -> None:
    for length in (1, 2, 64, 66, 1000):
        values = torch.randn(length, dtype=torch.float64)
        codes, scales = quantize(values, 1)
        found = dequantize(codes, scales, bits=1, like=values)
        assert codes.nbytes == math.ceil(length / 64) * 8
        assert torch.equal(found.sign(), values.sign())
        for row, mine in zip(values.split(64), found.split(64)):
            torch.testing.assert_close(
                mine.abs(), row.abs().mean().expand_as(row), rtol=5e-3, atol=0
            )


def test_zeros_that_fill_up_the_rows_of_several_tensors_count_in_no_scale() -> None:
    tensors = [torch.randn(length) for length in (66, 64, 1, 130)]
    padded = [torch.nn.functional.pad(each, (0, -len(each) % 64)) for each in tensors]
    for bits in (8, 4, 1):
        lengths = [len(each) for each in tensors]
        _, together = quantize(torch.cat(padded), bits, lengths=lengths)
        alone = torch.cat([quantize(each, bits)[1] for each in tensors])
        assert torch.equal(together, alone)


def test_rows_of_zeros_stay_zero_and_no_number_hides_that_one_is_not_finite() -> None:
    values = torch.zeros(192)
    values[100] = math.inf
    values[130] = math.nan
    for bits in (8, 4, 1):
        found = dequantize(*quantize(values, bits), bits=bits, like=values)
        assert torch.equal(found[:64], torch.zeros(64))
        assert not found[64:].isfinite().any()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--optimizer slamb", (1.0, 0.0)),
        ("--optimizer slamb --outer_momentum 0.5", (1.0, 0.5)),
        ("--sync diloco", (0.7, 0.9)),
    ],
)
def test_the_flags_of_the_outer_step_have_defaults_of_their_own(
    words: str, expected: tuple[float, float]
) -> None:
    args, _ = options.parse(resnet50_test.parser(), "resnet50_test", words.split())
    assert (args.outer_lr, args.outer_momentum) == expected
    if args.optimizer == "slamb":
        run = factory.Run("x", World(), FP32)
        ours = factory.create_optimizer(args, run, nn.Linear(3, 4), resnet50_test.OPTIMIZERS)
        assert (ours.outer_lr, ours.outer_momentum) == expected


# ------------------------------------------------------------ on ranks

NUM_ORACLE_STEPS = 12  # beyond the dense steps and two averages of the weights


def follows_the_oracle(
    world: Any,
    selection: str,
    *,
    authors: bool,
    k: float,
    bits: int = 0,
    mu: float = 0.0,
    eta: float = 1.0,
) -> None:
    mine = parameters()
    ours = (AuthorsSLAMB if authors else SLAMB)(
        mine,
        0.01,
        compress_ratio=k,
        selection=selection,
        dense_steps=4,
        local_steps=5,
        beta3=0.9,
        wire_bits=bits,
        outer_momentum=mu,
        outer_lr=eta,
        **EXACT,
    )
    settings = {"dense": 4, "local": 5, "beta3": 0.9, "bits": bits, "mu": mu, "eta": eta}
    oracle = Oracle(world.size, k, selection=selection, authors=authors, **settings)
    for step in range(1, NUM_ORACLE_STEPS + 1):
        set_gradients(mine, step, world.rank)
        ours.step()
        oracle.step()
        where = f"{selection}, authors={authors}, k={k}, step {step}"
        close(mine, oracle.w[world.rank], tolerance=1e-8, message=where)
    mean = [sum(m[number] for m in oracle.m) / world.size for number in range(len(SHAPES))]
    dense = [torch.zeros_like(m) for m in mean]
    for step in range(1, NUM_ORACLE_STEPS + 1):
        for number in range(len(SHAPES)):
            g = sum(gradient(step, rank)[number] for rank in range(world.size)) / world.size
            dense[number] = 0.9 * dense[number] + 0.1 * g
    for p, expected, also in zip(mine, dense, mean):
        total = world.sum(ours.state[p]["exp_avg"].clone()) / world.size
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(total, also, rtol=1e-6, atol=1e-12)


def all_oracles(world: Any) -> None:
    follows_the_oracle(world, "block", authors=False, k=0.3, bits=4)
    follows_the_oracle(world, "random", authors=True, k=0.1, mu=0.6, eta=0.8)
    if world.size > 2:
        return
    for selection in ("block", "random"):
        follows_the_oracle(world, selection, authors=True, k=0.3)
        for k in (0.004, 0.3, 1.0):  # 0.004: nothing of some tensors
            follows_the_oracle(world, selection, authors=False, k=k)
        for authors in (True, False):
            follows_the_oracle(world, selection, authors=authors, k=0.3, bits=8)
    for mu, eta in ((0.6, 0.8), (0.6, 1.0), (0.0, 0.8)):
        follows_the_oracle(world, "block", authors=False, k=0.3, mu=mu, eta=eta)


@pytest.mark.parametrize("size", [2, 3])
def test_it_follows_the_equations_and_the_mean_momentum_is_the_dense_one(size: int) -> None:
    ranks.run_ranks(all_oracles, size)


def full_exchange_is_lamb(world: Any) -> None:
    for selection in ("block", "random"):
        mine, other = parameters(torch.float32), parameters(torch.float32)
        ours = SLAMB(
            mine,
            0.01,
            compress_ratio=1.0,
            dense_steps=0,
            selection=selection,
            wire_dtype=torch.float32,
        )
        lamb = LAMB(other, 0.01)
        for step in range(25):
            set_gradients(mine, step, world.rank)
            for p, *all_of_them in zip(
                other, *(gradient(step, rank) for rank in range(world.size))
            ):
                p.grad = (sum(all_of_them) / world.size).float()
            ours.step()
            lamb.step()
            lamb_weights = [p.detach().double() for p in other]
            close(mine, lamb_weights, tolerance=1e-5, message=f"LAMB at step {step}")


def early_updates_are_small(world: Any) -> None:
    for k in (0.1, 0.02):
        mine, other = parameters(torch.float32), parameters(torch.float32)
        ours, lamb = SLAMB(mine, 0.01, compress_ratio=k), LAMB(other, 0.01)
        for step in range(25):
            before = [p.detach().clone() for p in (*mine, *other)]
            set_gradients(mine, step, world.rank)
            for p, *all_of_them in zip(
                other, *(gradient(step, rank) for rank in range(world.size))
            ):
                p.grad = (sum(all_of_them) / world.size).float()
            ours.step()
            lamb.step()
            updates = [(p.detach() - q).abs().max() for p, q in zip((*mine, *other), before)]
            half = len(mine)
            assert max(updates[:half]) < 2 * max(updates[half:]), (k, step)


def bytes_are_as_documented(world: Any) -> None:
    for selection, unit, count in (
        ("block", BLOCK, LARGE_ROWS),
        ("random", 1, ELEMENTS - SMALL_ELEMENTS),
    ):
        for k in (0.01, 0.1, 0.3, 0.6, 0.9):
            mine = parameters(torch.float32)
            ours = SLAMB(mine, compress_ratio=k, dense_steps=1, local_steps=4, selection=selection)
            sent = []
            for step in range(5):
                set_gradients(mine, step, world.rank)
                ours.step()
                sent.append(ours.take_bytes())
            sparse = 2 * (SMALL_ELEMENTS + unit * math.ceil(k * count - 1e-9) + 1)
            assert sent[1] == sent[2] == sent[4] == sparse
            assert sent[3] == sparse + 4 * ELEMENTS
            assert sent[0] == 2 * (SMALL_ELEMENTS + (LARGE_ROWS * BLOCK) + 1)


def rounded_momentum_takes_fewer_bytes(world: Any) -> None:
    for bits in (8, 4):
        for selection in ("block", "random"):
            mine, other = parameters(torch.float32), parameters(torch.float32)
            ours, exact = (
                SLAMB(
                    each,
                    compress_ratio=0.3,
                    dense_steps=1,
                    selection=selection,
                    wire_dtype=torch.float32,
                    wire_bits=wire_bits,
                )
                for each, wire_bits in ((mine, bits), (other, 0))
            )
            dense = [torch.zeros(shape) for shape in SHAPES]
            for step in range(12):
                set_gradients(mine, step, world.rank)
                set_gradients(other, step, world.rank)
                for m, p in zip(dense, mine):
                    m.lerp_(world.sum(p.grad.clone()) / world.size, 0.1)
                exact.step()
                ours.step()
                sent = ours.take_bytes()
            for p, q, begin in zip(mine, other, slamb_oracle.start(torch.float32)):
                assert (p - q).norm() < (0.02 if bits == 8 else 0.3) * (q - begin).norm()
            for p, m in zip(mine, dense):  # nothing is lost of the mean momentum
                total = world.sum(ours.state[p]["exp_avg"].clone()) / world.size
                torch.testing.assert_close(total, m, rtol=1e-4, atol=1e-7)
            units = LARGE_ROWS if selection == "block" else (ELEMENTS - SMALL_ELEMENTS)
            rows = math.ceil(0.3 * units - 1e-9)
            rows = rows if selection == "block" else math.ceil(rows / BLOCK)
            assert sent == 4 * (SMALL_ELEMENTS + 1) + rows * (BLOCK * bits // 8 + 2)


def every_step_averages(world: Any) -> None:
    mine = parameters(torch.float32)
    ours = SLAMB(mine, local_steps=1, dense_steps=0)
    for step in range(3):
        set_gradients(mine, step, world.rank)
        ours.step()
        for p in mine:
            assert torch.equal(world.sum(p.detach().clone()) / world.size, p.detach())


def a_bad_step_on_one_rank_is_skipped_by_all(world: Any, on_device: bool = False) -> None:
    for selection, bits, make in (
        ("block", 0, SLAMB),
        ("random", 0, SLAMB),
        ("block", 8, SLAMB),
        ("block", 0, AuthorsSLAMB),
    ):
        runs = []
        for bad in (True, False):
            mine = parameters(torch.float32)
            ours = make(
                mine,
                compress_ratio=0.2,
                dense_steps=2,
                local_steps=100 if on_device else 5,  # a skipped step may be one of averaging
                selection=selection,
                wire_bits=bits,
            )
            for step in range(9):
                # before dense steps, a sparse one and an averaging
                if bad and step in (0, 1, 4, 5):
                    set_gradients(mine, 50 + step, world.rank)
                    before = [p.detach().clone() for p in mine]
                    moments = [
                        ours.state[p][name].clone()
                        for p in mine
                        for name in ("exp_avg", "exp_avg_sq")
                        if ours.state[p]
                    ]
                    overflow = world.rank == step % world.size
                    if overflow:
                        mine[step % 3].grad.view(-1)[3] = math.inf
                    ours.found_inf = torch.tensor(float(overflow))
                    ours.step()
                    assert ours.skipped == 1
                    assert all(torch.equal(p, q) for p, q in zip(mine, before))
                    now = [ours.state[p][name] for p in mine for name in ("exp_avg", "exp_avg_sq")]
                    assert all(torch.equal(p, q) for p, q in zip(now, moments))
                    if on_device:  # where the units of this step miss their turn
                        continue
                set_gradients(mine, step, world.rank)
                ours.found_inf = torch.tensor(0.0)
                ours.step()
                assert ours.skipped == 0
            runs.append([p.detach().clone() for p in mine])
        if on_device:
            assert all(p.isfinite().all() for run in runs for p in run)
        else:
            assert all(torch.equal(p, q) for p, q in zip(*runs))


def a_bad_step_is_skipped_where_the_host_does_not_learn_of_it(world: Any) -> None:
    with mock.patch.object(slamb, "_is_decided_on_device", return_value=True):
        a_bad_step_on_one_rank_is_skipped_by_all(world, on_device=True)
        follows_the_oracle(world, "block", authors=False, k=0.3)
        follows_the_oracle(world, "random", authors=True, k=0.3)


def the_plain_kernels_follow_the_oracle(world: Any) -> None:
    with mock.patch.object(adam, "supports_fused_optimizers", return_value=False):
        follows_the_oracle(world, "block", authors=False, k=0.3)
        follows_the_oracle(world, "random", authors=False, k=0.3)


def dtypes_may_differ_within_a_group(world: Any) -> None:
    for make, selection in itertools.product((SLAMB, AuthorsSLAMB), ("block", "random")):
        runs = []
        for mixed in (True, False):
            dtypes = [torch.float32 if mixed and p.ndim < 2 else torch.float64 for p in start()]
            mine = [nn.Parameter(p.to(dtype)) for p, dtype in zip(start(), dtypes)]
            ours = make(mine, selection=selection, dense_steps=2, wire_dtype=torch.float64)
            for step in range(6):
                set_gradients(mine, step, world.rank)
                ours.step()
            runs.append([p.detach().double() for p in mine])
            assert [p.dtype for p in mine] == dtypes
        close(runs[0], runs[1], tolerance=1e-5, message=f"{make}, {selection}")


def missing_gradients_are_zeros(world: Any) -> None:
    runs = []
    for missing in (True, False):
        mine = parameters(torch.float32)
        ours = SLAMB(mine, dense_steps=2)
        for step in range(5):
            set_gradients(mine, step, world.rank)
            if world.rank == 0:
                for number in (0, 2, 3):
                    mine[number].grad = None if missing else torch.zeros_like(mine[number])
            ours.step()
        runs.append([p.detach().clone() for p in mine])
    assert all(torch.equal(p, q) for p, q in zip(*runs))


def weights_without_a_gradient_stay_as_they_are(world: Any, on_device: bool = False) -> None:
    """Two heads are used in turn, and some of their gradients are there on rank 0 alone."""
    for make, settings in (
        (SLAMB, {"dense_steps": 100}),
        (SLAMB, {"dense_steps": 0}),
        (SLAMB, {"dense_steps": 0, "selection": "random"}),
        (SLAMB, {"dense_steps": 0, "wire_bits": 8}),
        (AuthorsSLAMB, {}),
    ):
        mine = parameters(torch.float32)
        ours = make(mine, 0.01, compress_ratio=0.3, local_steps=100, **settings)
        for step in range(8):
            set_gradients(mine, step, world.rank)
            unused = range(step % 2, len(mine), 2) if step else ()
            for number in range(len(mine)):
                if number in unused or (number < 3 and world.rank):
                    mine[number].grad = None
            before = [(p.detach().clone(), copy.deepcopy(ours.state[p])) for p in mine]
            ours.step()
            for number, (p, (weights, state)) in enumerate(zip(mine, before)):
                is_unused = number in unused
                assert torch.equal(p, weights) == is_unused, (make, settings, step, number)
                for name, value in state.items():
                    assert torch.equal(ours.state[p][name], value) or not is_unused, name
            if make is SLAMB:  # of small tensors the gradients are averaged
                for p in (mine[2], mine[5]):
                    assert torch.equal(world.sum(p.detach().clone()), p.detach() * world.size)
            sent = ours.take_bytes()
        if make is SLAMB:  # every step sends as much, but for 2 bytes for each weight
            set_gradients(mine, 8, world.rank)
            ours.step()
            saved = 0 if on_device else 2 * len(mine)
            assert ours.take_bytes() == sent - saved, "no flags where no gradient is missing"


def weights_without_a_gradient_stay_where_the_host_does_not_learn_of_it(world: Any) -> None:
    with mock.patch.object(slamb, "_is_decided_on_device", return_value=True):
        weights_without_a_gradient_stay_as_they_are(world, on_device=True)


def unused_weights_stay_when_the_ranks_meet(world: Any) -> None:
    for settings, dtype in itertools.product(
        ({}, {"outer_momentum": 0.5}), (torch.float32, torch.bfloat16)
    ):
        mine = parameters(dtype)
        ours = SLAMB(mine, 0.1, local_steps=2, **settings)
        for step in range(6):
            set_gradients(mine, step, world.rank)
            if step > 1:
                mine[0].grad = mine[2].grad = None
            if step == 2:
                before = [mine[number].detach().clone() for number in (0, 2)]
            ours.step()
        assert torch.equal(mine[0], before[0])
        assert torch.equal(mine[2], before[1])


def groups_have_their_own_settings(world: Any) -> None:
    for bits in (0, 8):
        mine = parameters(torch.float32)
        groups = [
            {"params": mine[:2], "lr": 0.0},
            {"params": mine[2:4], "compress_ratio": 1.0},
            {"params": mine[4:], "weight_decay": 0.0},
        ]
        ours = SLAMB(groups, dense_steps=0, wire_bits=bits)
        before = [p.detach().clone() for p in mine]
        for step in range(3):
            set_gradients(mine, step, world.rank)
            ours.step()
        changed = [not torch.equal(p, q) for p, q in zip(mine, before)]
        assert changed == [False, False, True, True, True, True]
        for p in mine[2:]:  # k = 1, or small: exchanged whole
            assert torch.equal(world.sum(p.detach().clone()), p.detach() * world.size)
        counts = [group["calls"] for group in ours.state_dict()["param_groups"]]
        assert counts == [3, 3, 3]


def frozen_and_empty_groups_are_no_hindrance(world: Any) -> None:
    for settings in ({}, {"outer_momentum": 0.5, "local_steps": 1}):
        mine = parameters(torch.float32)
        frozen = [p.requires_grad_(False) for p in mine[:2]]
        groups = [{"params": []}, {"params": frozen}, {"params": [nn.Parameter(torch.ones(4, 0))]}]
        ours = SLAMB(groups, **settings)
        ours.step()
        assert ours.skipped == 0
        ours.add_param_group({"params": mine[2:]})
        set_gradients(mine, 0, world.rank)
        for p in frozen:
            p.grad = None
        ours.step()
        ours.average_weights()
        moved = [not torch.equal(p, q) for p, q in zip(mine, start(torch.float32))]
        assert moved == [False] * 2 + [True] * 4


def a_resumed_run_equals_the_uninterrupted_one(world: Any) -> None:
    for selection, mu, dtype in (
        ("block", 0.0, torch.float32),
        ("random", 0.0, torch.float32),
        ("block", 0.5, torch.float32),
        ("block", 0.5, torch.bfloat16),
    ):
        settings = {
            "compress_ratio": 0.2,
            "dense_steps": 4,
            "local_steps": 5,
            "selection": selection,
            "outer_momentum": mu,
        }
        for at in (2, 7):
            mine = parameters(dtype)
            ours = SLAMB(mine, **settings)
            for step in range(12):
                if step == at:
                    file = io.BytesIO()
                    torch.save(ours.state_dict(), file)
                    other = [nn.Parameter(p.detach().clone()) for p in mine]
                set_gradients(mine, step, world.rank)
                ours.step()
            file.seek(0)
            theirs = SLAMB(other, **settings)
            theirs.load_state_dict(torch.load(file, weights_only=True))
            pickled = pickle.loads(pickle.dumps(theirs))
            for resumed in (theirs, pickled):
                weights = resumed.param_groups[0]["params"]
                for step in range(at, 12):
                    set_gradients(weights, step, world.rank)
                    resumed.step()
                assert all(torch.equal(p, q) for p, q in zip(mine, weights))


def outer_steps_bring_the_weights_together(world: Any) -> None:
    """Also where the outer momentum is new in a run whose ranks have parted."""
    mine = parameters(torch.float32)
    ours = SLAMB(mine, dense_steps=0, local_steps=4)
    for step in range(10):
        if step == 6:
            state = ours.state_dict()
            ours = SLAMB(mine, dense_steps=0, local_steps=4, outer_momentum=0.5)
            ours.load_state_dict(state)
        set_gradients(mine, step, world.rank)
        ours.take_bytes()
        ours.step()
        agree = all(torch.equal(world.sum(p.detach().clone()) / world.size, p) for p in mine)
        assert agree == (step in (3, 7))
        sent = ours.take_bytes()
        if step == 5:
            sparse = sent
        elif step == 7:
            assert sent == sparse + 2 * ELEMENTS


def outer_steps_that_were_left_out_leave_nothing(world: Any) -> None:
    """A run that went on without an outer step begins it anew."""
    mine = parameters(torch.float32)
    state = SLAMB(mine).state_dict()
    for mu in (0.5, 0.0, 0.5):
        ours = SLAMB(mine, dense_steps=0, local_steps=3, outer_momentum=mu)
        ours.load_state_dict(state)
        for step in range(4):
            set_gradients(mine, step, world.rank)
            ours.step()
        state = ours.state_dict()
        assert all(("common" in of_p) == (mu > 0) for of_p in state["state"].values())


def weights_in_bf16_agree_after_an_outer_step(world: Any) -> None:
    """Though the weights on which the ranks agreed are kept in fp32."""
    mine = parameters(torch.bfloat16)
    ours = SLAMB(mine, 0.1, dense_steps=0, local_steps=3, outer_momentum=0.5)
    for step in range(6):
        set_gradients(mine, step, world.rank)
        ours.step()
    for p in mine:
        common = ours.state[p]["common"]
        assert common.dtype == torch.float32
        assert torch.equal(common.bfloat16(), p)
        assert torch.equal(world.sum(p.detach().float()) / world.size, p.float())
        assert not torch.equal(common, p.float())


def ranks_that_begin_apart_agree_after_an_outer_step(world: Any) -> None:
    mine = [nn.Parameter(p.detach() + world.rank) for p in parameters(torch.float32)]
    ours = SLAMB(mine, local_steps=2, outer_momentum=0.5)
    for step in range(2):
        set_gradients(mine, step, world.rank)
        ours.step()
    for p in mine:
        assert torch.equal(world.sum(p.detach().clone()) / world.size, p)


def merged_states_keep_the_mean_momentum(world: Any) -> None:
    for selection in ("block", "random"):
        mine = parameters(torch.float32)
        ours = SLAMB(mine, dense_steps=2, selection=selection)
        for step in range(7):
            set_gradients(mine, step, world.rank)
            ours.step()
        momenta = [world.sum(ours.state[p]["exp_avg"].clone()) / world.size for p in mine]
        box: list[Any] = [None] * world.size
        dist.all_gather_object(box, ours.state_dict())
        assert not torch.equal(box[0]["state"][0]["exp_avg"], box[1]["state"][0]["exp_avg"])
        for number_of_ranks in (4, 1):  # each of them takes the merged state
            other = SLAMB(parameters(torch.float32), selection=selection)
            other.load_state_dict(merge_optimizer_states(box))
            for p, expected in zip(other.param_groups[0]["params"], momenta):
                total = (
                    sum(other.state[p]["exp_avg"] for _ in range(number_of_ranks)) / number_of_ranks
                )
                torch.testing.assert_close(total, expected)
            assert other.param_groups[0]["calls"] == 7


def the_step_clips_by_the_global_norm_and_counts_skips(world: Any) -> None:
    for clip in (0.0, 0.05):
        mine = parameters(torch.float32)
        model = nn.ParameterList(mine)
        ours = SLAMB(model.parameters(), dense_steps=1, wire_dtype=torch.float32)
        trainer = make_trainer(model, ours, world, max_grad_norm=clip)
        trainer.wrap_model()
        assert trainer.parallel_model is model
        of_step = StepSums(torch.device("cpu"))
        of_step.samples.fill_(4.0)
        set_gradients(mine, 0, world.rank)
        norm = torch.stack([p.grad.square().sum() for p in mine]).sum()
        norm = (world.sum(norm) / world.size).sqrt()
        own = [p.grad.clone() for p in mine]
        trainer.optimizer_step(of_step)
        factor = min(1.0, clip / norm.item()) if clip else 1.0
        expected = [world.sum(0.1 * factor * g) / world.size for g in own]
        for p, m in zip(mine, expected):
            torch.testing.assert_close(ours.state[p]["exp_avg"], m, rtol=1e-4, atol=1e-9)
        assert world.bytes_sent > 0
        for bad_rank in range(world.size):
            before = [p.detach().clone() for p in mine]
            set_gradients(mine, 1, world.rank)
            if world.rank == bad_rank:
                mine[0].grad[0, 0, 0, 0] = math.nan
            trainer.optimizer_step(of_step)
            assert all(torch.equal(p, q) for p, q in zip(mine, before))
            assert trainer.sums.skipped == bad_rank + 1
            assert trainer.sums.samples == 4
        trainer.sync_replicas()
        for p in mine:
            torch.testing.assert_close(world.sum(p.detach().clone()), p.detach() * world.size)


def the_ratio_is_warmed_up_by_epochs(world: Any) -> None:
    groups = [{"params": parameters()[:1]}, {"params": parameters()[3:4], "compress_ratio": 0.3}]
    ours = SLAMB(groups, warmup=[0.5, 0.2])
    seen = []
    for epoch in (0, 1, 2, 1):
        ours.start_epoch(epoch)
        seen.append([group["compress_ratio"] for group in ours.param_groups])
    assert seen == [[0.5, 0.5], [0.2, 0.3], [0.1, 0.3], [0.2, 0.3]]
    ours.add_param_group({"params": parameters()[1:2]})  # which is warmed up as well
    ours.start_epoch(0)
    assert ours.param_groups[2]["compress_ratio"] == 0.5
    ours.start_epoch(2)
    assert ours.param_groups[2]["compress_ratio"] == 0.1


def averaged_gradients_are_warned_of(world: Any) -> None:
    generator = torch.Generator().manual_seed(world.rank)
    for is_wrapped in (True, False):
        model = nn.Linear(100, 100)
        parallel = DistributedDataParallel(model) if is_wrapped else model
        ours = SLAMB(model.parameters())
        messages = []
        for step in range(4):
            ours.zero_grad()
            loss = parallel(torch.randn(2, 100, generator=generator)).square().sum()
            (loss * (step > 0)).backward()  # the gradients of the first step are zero
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours.step()
            messages.append([str(warning.message) for warning in caught])
            ours.load_state_dict(ours.state_dict())  # the buffers are created anew
            assert ours.take_bytes() == 2 * (1 + 100 + 157 * BLOCK)
        if is_wrapped:
            assert [len(each) for each in messages] == [0, 1, 0, 0]
            assert "do not wrap the model in DistributedDataParallel" in messages[1][0]
        else:
            assert messages == [[], [], [], []]


def all_small_ones(world: Any) -> None:
    for body in (
        full_exchange_is_lamb,
        early_updates_are_small,
        bytes_are_as_documented,
        rounded_momentum_takes_fewer_bytes,
        every_step_averages,
        a_bad_step_on_one_rank_is_skipped_by_all,
        a_bad_step_is_skipped_where_the_host_does_not_learn_of_it,
        the_plain_kernels_follow_the_oracle,
        dtypes_may_differ_within_a_group,
        missing_gradients_are_zeros,
        weights_without_a_gradient_stay_as_they_are,
        weights_without_a_gradient_stay_where_the_host_does_not_learn_of_it,
        unused_weights_stay_when_the_ranks_meet,
        frozen_and_empty_groups_are_no_hindrance,
        groups_have_their_own_settings,
        a_resumed_run_equals_the_uninterrupted_one,
        outer_steps_bring_the_weights_together,
        outer_steps_that_were_left_out_leave_nothing,
        weights_in_bf16_agree_after_an_outer_step,
        ranks_that_begin_apart_agree_after_an_outer_step,
        merged_states_keep_the_mean_momentum,
        the_step_clips_by_the_global_norm_and_counts_skips,
        the_ratio_is_warmed_up_by_epochs,
        averaged_gradients_are_warned_of,
    ):
        state = torch.get_rng_state()
        body(world)
        if body is not averaged_gradients_are_warned_of:  # it creates a model
            assert torch.equal(torch.get_rng_state(), state), "the random state is left alone"


def test_what_ranks_do_together() -> None:
    ranks.run_ranks(all_small_ones, 2)


def nodes_take_the_place_of_ranks(world: Any) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    node, plain = world.rank // 2, slamb_oracle.gradient

    def of_node(step: int, node: int) -> list[torch.Tensor]:
        return [
            (one + other) / 2
            for one, other in zip(plain(step, 2 * node), plain(step, 2 * node + 1))
        ]

    slamb_oracle.gradient = of_node  # in this process, which ends with this function
    for selection, mu in (("block", 0.0), ("random", 0.0), ("block", 0.6)):
        mine = parameters()
        ours = SLAMB(
            mine,
            0.01,
            node_group=groups[node],
            selection=selection,
            dense_steps=3,
            local_steps=6,
            outer_momentum=mu,
            **EXACT,
        )
        alone = Oracle(2, 0.1, selection=selection, authors=False, dense=3, local=6, mu=mu)
        for step in range(1, 15):
            for p, g in zip(mine, plain(step, world.rank)):
                p.grad = g
            ours.step()
            alone.step()
            close(mine, alone.w[node], tolerance=1e-8, message=f"{selection}, step {step}")


@pytest.mark.process
def test_node_groups_reduce_densely_inside_and_sparsely_between() -> None:
    ranks.run_ranks(nodes_take_the_place_of_ranks, 4)
