"""DeMo: against its algorithm in float64 on several ranks; bytes, skipped steps, copies."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from conftest import each_of
from distributed.world import World
from optimizer_cases import copied
from optimizers.demo import DeMo, cosine_transform, largest_divisor

SHAPES = [(12, 4, 3, 3), (10, 26), (7,), (32, 32), (5, 1)]
EXACT = {"wire_dtype": torch.float64}


def parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    weights[0] = weights[0].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(weight.to(dtype)) for weight in weights]


def gradient(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def set_gradients(parameters: list[Tensor], step: int, rank: int) -> None:
    for p, g in zip(parameters, gradient(step, rank)):
        p.grad = g.to(p.dtype)


def train(ours: DeMo, steps: range, rank: int = 0) -> DeMo:
    for step in steps:
        set_gradients([p for group in ours.param_groups for p in group["params"]], step, rank)
        ours.step()
    return ours


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def agree(world: World, mine: list[Tensor]) -> bool:
    """Whether all ranks have these weights."""
    return all(torch.equal(world.sum(p.detach().clone()), p.detach() * world.size) for p in mine)


def naive_transform(chunk: Tensor) -> Tensor:
    """The orthonormal discrete cosine transform of a matrix, term by term."""
    rows, columns = chunk.shape
    out = torch.zeros_like(chunk)
    for u, v in itertools.product(range(rows), range(columns)):
        down = [math.cos(math.pi * (2 * y + 1) * u / (2 * rows)) for y in range(rows)]
        across = [math.cos(math.pi * (2 * x + 1) * v / (2 * columns)) for x in range(columns)]
        scale = math.sqrt((1 if u == 0 else 2) / rows) * math.sqrt((1 if v == 0 else 2) / columns)
        basis = torch.outer(*(torch.tensor(each, dtype=torch.float64) for each in (down, across)))
        out[u, v] = scale * (basis * chunk).sum()
    return out


class Oracle:
    """All ranks' DeMo, parameter by parameter and chunk by chunk, in float64."""

    def __init__(self, size: int, *, lr: float, decay: float, topk: int, chunk: int) -> None:
        self.lr, self.decay, self.topk, self.chunk = lr, decay, topk, chunk
        self.w = [p.detach().clone() for p in parameters()]
        self.m = [[torch.zeros_like(w) for w in self.w] for _ in range(size)]
        self.steps = 0

    def step(self, weight_decay: float) -> None:
        self.steps += 1
        for number, w in enumerate(self.w):
            rows, columns = (1, w.numel()) if w.ndim < 2 else (len(w), w[0].numel())
            height, width = largest_divisor(rows, self.chunk), largest_divisor(columns, self.chunk)
            new = w.reshape(rows, columns).clone() * (1 - self.lr * weight_decay)
            for rank, m in enumerate(self.m):
                m[number] = self.decay * m[number] + gradient(self.steps, rank)[number]
            for y, x in itertools.product(range(0, rows, height), range(0, columns, width)):
                sent: list[dict[int, float]] = []
                for m in self.m:
                    matrix = m[number].reshape(rows, columns).clone()
                    block = matrix[y : y + height, x : x + width]
                    c = naive_transform(block).flatten()
                    largest = sorted(range(len(c)), key=lambda i: -abs(c[i]))[: self.topk]
                    sent.append({i: c[i].item() for i in largest})
                    matrix[y : y + height, x : x + width] -= self.inverse(sent[-1], height, width)
                    m[number] = matrix.view(w.shape)
                places = {i for each in sent for i in each}
                lists = {i: [each[i] for each in sent if i in each] for i in places}
                means = {i: sum(values) / len(values) for i, values in lists.items()}
                step = self.inverse(means, height, width).sign()
                new[y : y + height, x : x + width] -= self.lr * step
            self.w[number] = new.view(w.shape)

    @staticmethod
    def inverse(elements: dict[int, float], height: int, width: int) -> Tensor:
        flat = torch.zeros(height * width, dtype=torch.float64)
        for place, value in elements.items():
            flat[place] = value
        down, across = cosine_transform(height), cosine_transform(width)
        return down.T @ flat.view(height, width) @ across


@each_of("length", [1, 2, 7, 64])
def test_the_cosine_transform_is_orthonormal_and_right(length: int) -> None:
    matrix = cosine_transform(length)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(length, dtype=torch.float64))
    x = torch.randn(length, 3, dtype=torch.float64)
    expected = naive_transform(x) @ cosine_transform(3)
    torch.testing.assert_close(matrix @ x, expected)


def follows_the_oracle(world: World) -> None:
    for topk, chunk in ((1, 64), (5, 8), (1000, 16)):
        mine = parameters()
        ours = DeMo(mine, 0.02, decay=0.9, topk=topk, chunk=chunk, weight_decay=0.1, **EXACT)
        oracle = Oracle(world.size, lr=0.02, decay=0.9, topk=topk, chunk=chunk)
        for step in range(1, 6):
            set_gradients(mine, step, world.rank)
            ours.step()
            oracle.step(weight_decay=0.1)
            for p, w, m in zip(mine, oracle.w, oracle.m[world.rank]):
                torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-10)
                stored = ours.state[p]["momentum_buffer"]
                torch.testing.assert_close(stored, m, rtol=0, atol=1e-10)


def bytes_are_as_documented(world: World) -> None:
    ours = train(DeMo(parameters(torch.float32), topk=4, chunk=16), range(1), world.rank)
    chunks = (12 // 12) * (36 // 12) + 1 * (26 // 13) + 1 + 4  # of 12x12, 10x13, 1x7, 16x16
    assert ours.take_bytes() == 2 + 4 * (4 * chunks + 4)  # and a 5x1, in which 4 of 5 are sent
    assert ours.take_bytes() == 0


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
    assert same(mine, other)


def weights_without_a_gradient_stay_as_they_are(world: World) -> None:
    mine = parameters(torch.float32)
    ours = DeMo(mine, 0.01, topk=3, chunk=8, weight_decay=0.1)
    for step in range(6):
        set_gradients(mine, step, world.rank)
        unused = range(step % 2, len(mine), 2) if step else ()
        for number in range(len(mine)):
            if number in unused or (number < 3 and world.rank):
                mine[number].grad = None
        before = [(p.detach().clone(), copy.deepcopy(ours.state[p])) for p in mine]
        ours.step()
        for number, (p, (weights, state)) in enumerate(zip(mine, before)):
            is_unused = number in unused
            assert torch.equal(p, weights) == is_unused, (step, number)
            for value in state.values():
                assert torch.equal(ours.state[p]["momentum_buffer"], value) or not is_unused
        assert agree(world, mine)


def a_gradient_that_is_missing_on_one_rank_is_zero(world: World) -> None:
    runs = []
    for missing in (True, False):
        mine = parameters(torch.float32)
        ours = DeMo(mine, 0.01, topk=3, chunk=8)
        for step in range(4):
            set_gradients(mine, step, world.rank)
            for p in mine[:3] if world.rank == 0 else ():
                p.grad = None if missing else torch.zeros_like(p)
            ours.step()
        runs.append((mine, ours.take_bytes()))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def what_bf16_leaves_out_stays_in_the_momentum(world: World) -> None:
    mine = parameters(torch.float32)
    # everything is sent, in bf16
    ours = train(DeMo(mine, topk=10_000, decay=1.0), range(1), world.rank)
    for p, g in zip(mine, gradient(0, world.rank)):
        left = ours.state[p]["momentum_buffer"].norm() / g.norm()
        assert 1e-5 < left < 2**-8


def all_of_it(world: World) -> None:
    for body in (
        follows_the_oracle,
        bytes_are_as_documented,
        ranks_stay_together_and_a_bad_step_is_skipped,
        what_bf16_leaves_out_stays_in_the_momentum,
        weights_without_a_gradient_stay_as_they_are,
        a_gradient_that_is_missing_on_one_rank_is_zero,
    ):
        body(world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.process)])
def test_what_ranks_do_together(size: int) -> None:
    ranks.run_ranks(all_of_it if size == 2 else follows_the_oracle, size)


def test_one_process_sends_nothing_and_scaled_or_missing_gradients_are_understood() -> None:
    mine, scaled = parameters(torch.float32), parameters(torch.float32)
    plain, amp = DeMo(mine, 0.01, topk=3), DeMo(scaled, 0.01, topk=3)
    for step in range(3):
        set_gradients(mine, step, 0)
        set_gradients(scaled, step, 0)
        for p in scaled:
            p.grad *= 1024
        if step == 1:
            mine[2].grad = None
            scaled[2].grad = None
        plain.step()
        amp.grad_scale = torch.tensor(1024.0)
        amp.step()
    assert plain.take_bytes() == 0
    assert same(mine, scaled)


@each_of("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_and_a_loaded_state_go_on_alike(way: Any) -> None:
    mine = parameters(torch.float32)
    ours = train(DeMo(mine, 0.01, topk=3, chunk=8), range(1))
    other, third = way(ours), copied(mine)
    loaded = DeMo(third, topk=1, chunk=8)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    for optimizer in (ours, other, loaded):
        train(optimizer, range(1, 2))
    assert same(mine, other.param_groups[0]["params"])
    assert same(mine, third)


def test_a_weight_that_is_frozen_at_first_is_trained_later() -> None:
    mine = parameters()
    ours = DeMo(mine)
    for is_trained in (False, True):
        before = mine[0].detach().clone()
        mine[0].requires_grad_(is_trained)
        set_gradients(mine, 0, 0)
        mine[0].grad = gradient(0, 0)[0] if is_trained else None
        ours.step()
        assert torch.equal(mine[0], before) != is_trained


def test_bad_settings_are_refused() -> None:
    for settings in ({"topk": 0}, {"chunk": 0}, {"chunk": 129}, {"decay": 1.5}, {"lr": -1}):
        with pytest.raises(ValueError, match=f"DeMo: {next(iter(settings))}="):
            DeMo(parameters(), **settings)
