"""DeMo: against its algorithm in float64 on several ranks; bytes, skipped steps, copies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import ranks
from distributed.world import World
from optimizer_cases import assert_same, parameters_of, snapshot
from optimizers.demo import DeMo, cosine_transform, largest_divisor

SHAPES = [(12, 4, 3, 3), (10, 26), (7,), (32, 32), (5, 1)]
LR, DECAY, WEIGHT_DECAY = 0.02, 0.9, 0.1


def gradient(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    weights = gradient(-1, 0)
    weights[0] = weights[0].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(weight.to(dtype)) for weight in weights]


def set_gradients(parameters: list[Tensor], step: int, rank: int) -> None:
    for p, g in zip(parameters, gradient(step, rank)):
        p.grad = g.to(p.dtype)


def train(ours: DeMo, steps: range, rank: int = 0) -> DeMo:
    for step in steps:
        set_gradients(parameters_of(ours), step, rank)
        ours.step()
    return ours


def agree(world: World, mine: list[Tensor]) -> bool:
    """Whether all ranks have these weights."""
    return all(torch.equal(world.sum(p.detach().clone()), p.detach() * world.size) for p in mine)


def naive_transform(length: int) -> Tensor:
    """The orthonormal matrix of the discrete cosine transform, term by term."""
    matrix = torch.empty(length, length, dtype=torch.float64)
    for u, y in itertools.product(range(length), repeat=2):
        scale = math.sqrt((1 if u == 0 else 2) / length)
        matrix[u, y] = scale * math.cos(math.pi * (2 * y + 1) * u / (2 * length))
    return matrix


class Oracle:
    """All ranks' DeMo, weight by weight as matrices, chunk by chunk, in float64."""

    def __init__(self, size: int, topk: int, chunk: int) -> None:
        self.topk, self.chunk, self.steps = topk, chunk, 0
        self.w = [matrix(p.detach()).clone() for p in parameters()]
        self.m = [[torch.zeros_like(w) for w in self.w] for _ in range(size)]

    def step(self) -> None:
        self.steps += 1
        for rank, momenta in enumerate(self.m):
            for m, g in zip(momenta, gradient(self.steps, rank)):
                m.mul_(DECAY).add_(matrix(g))
        for w, *momenta in zip(self.w, *self.m):
            w *= 1 - LR * WEIGHT_DECAY
            height, width = (largest_divisor(length, self.chunk) for length in w.shape)
            down, across = naive_transform(height), naive_transform(width)
            back, forth = cosine_transform(height).T, cosine_transform(width)  # of the same zeros
            for y, x in itertools.product(*map(range, (0, 0), w.shape, (height, width))):
                block, sent = (slice(y, y + height), slice(x, x + width)), []
                for m in momenta:
                    c = down @ m[block] @ across.T
                    least = c.abs().flatten().sort().values[-self.topk :][0]
                    sent.append(torch.where(c.abs() >= least, c, 0.0))
                    m[block] -= back @ sent[-1] @ forth
                mean = sum(sent) / sum(q != 0 for q in sent).clamp(min=1)
                w[block] -= LR * (back @ mean @ forth).sign()


def matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(1 if tensor.ndim < 2 else len(tensor), -1)


def follows_the_oracle(world: World) -> None:
    settings = {"decay": DECAY, "weight_decay": WEIGHT_DECAY, "wire_dtype": torch.float64}
    for topk, chunk in ((1, 64), (5, 8), (1000, 16)):
        mine, oracle = parameters(), Oracle(world.size, topk, chunk)
        ours = DeMo(mine, LR, topk=topk, chunk=chunk, **settings)
        for step in range(1, 6):
            train(ours, range(step, step + 1), world.rank)
            oracle.step()
            momenta = [matrix(ours.state[p]["momentum_buffer"]) for p in mine]
            assert_same([matrix(p.detach()) for p in mine], oracle.w, 1e-10)
            assert_same(momenta, oracle.m[world.rank], 1e-10)


def bytes_are_as_documented(world: World) -> None:
    ours = train(DeMo(parameters(torch.float32), topk=4, chunk=16), range(1), world.rank)
    chunks = (12 // 12) * (36 // 12) + 1 * (26 // 13) + 1 + 4  # of 12x12, 10x13, 1x7, 16x16
    assert ours.take_bytes() == 2 + 4 * (4 * chunks + 4)  # and a 5x1, in which 4 of 5 are sent


def ranks_stay_together_and_a_bad_step_is_skipped(world: World) -> None:
    mine, other = parameters(torch.float32), parameters(torch.float32)
    ours = DeMo(mine, 0.01, topk=3, chunk=8)
    for step in range(6):
        if step in (0, 3):
            set_gradients(mine, 50 + step, world.rank)
            overflow = world.rank == step % world.size
            if overflow:
                mine[step % 3].grad.view(-1)[3] = math.inf
            ours.found_inf = torch.tensor(float(overflow))
            ours.step()
            assert ours.skipped == 1
            ours.found_inf = torch.tensor(0.0)
        train(ours, range(step, step + 1), world.rank)
        assert ours.skipped == 0
        assert agree(world, mine)
    train(DeMo(other, 0.01, topk=3, chunk=8), range(6), world.rank)
    assert_same(mine, other)


def a_gradient_that_is_missing_is_zero_and_where_all_are_the_weight_stays(world: World) -> None:
    runs = []
    for stand_in in (lambda p: None, torch.zeros_like):
        mine = parameters(torch.float32)
        ours = DeMo(mine, 0.01, topk=3, chunk=8, weight_decay=0.1)
        for step in range(6):
            set_gradients(mine, step, world.rank)
            for p in mine[:3] if world.rank else []:
                p.grad = stand_in(p)
            unused = range(step % 2, len(mine), 2) if step else ()
            for number in unused:
                mine[number].grad = None
            before = snapshot(ours)
            ours.step()
            for number, (p, (weights, state)) in enumerate(zip(mine, before)):
                assert torch.equal(p, weights) == (number in unused), (step, number)
                if number in unused:
                    assert_same(ours.state[p], state)
            assert agree(world, mine)
        runs.append((mine, ours.take_bytes()))
    (missing, sent), (zeros, other_sent) = runs
    assert_same(missing, zeros)
    assert sent == other_sent


def what_bf16_leaves_out_stays_in_the_momentum(world: World) -> None:
    mine = parameters(torch.float32)
    ours = train(DeMo(mine, topk=10_000, decay=1.0), range(1), world.rank)  # sends everything
    for p, g in zip(mine, gradient(0, world.rank)):
        left = ours.state[p]["momentum_buffer"].norm() / g.norm()
        assert 1e-5 < left < 2**-8


def all_of_it(world: World) -> None:
    follows_the_oracle(world)
    bytes_are_as_documented(world)
    ranks_stay_together_and_a_bad_step_is_skipped(world)
    what_bf16_leaves_out_stays_in_the_momentum(world)
    a_gradient_that_is_missing_is_zero_and_where_all_are_the_weight_stays(world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.process)])
def test_what_ranks_do_together(size: int) -> None:
    ranks.run_ranks(all_of_it if size == 2 else follows_the_oracle, size)


def test_one_process_sends_nothing_and_divides_gradients_by_their_scale() -> None:
    mine, scaled = parameters(torch.float32), parameters(torch.float32)
    plain, amp = train(DeMo(mine, 0.01, topk=3), range(3)), DeMo(scaled, 0.01, topk=3)
    amp.grad_scale = torch.tensor(1024.0)
    for step in range(3):
        set_gradients(scaled, step, 0)
        for p in scaled:
            p.grad *= 1024
        amp.step()
    assert plain.take_bytes() == 0
    assert_same(mine, scaled)


def test_bad_settings_are_refused() -> None:
    for settings in ({"topk": 0}, {"chunk": 0}, {"chunk": 129}, {"decay": 1.5}, {"lr": -1}):
        with pytest.raises(ValueError, match=f"DeMo: {next(iter(settings))}="):
            DeMo(parameters(), **settings)
