"""DiLoCo: against its algorithm in float64; its bytes, its fragments, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import ranks
from distributed.diloco import DiLoCo, split_evenly
from distributed.world import World

SHAPES = [(6, 5), (7,), (4, 3, 2, 2), (11,), (2, 2)]


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def change(step: int, rank: int) -> list[Tensor]:
    """What a rank's own optimizer adds to the weights in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def oracle(ranks: int, steps: int, *, every: int, parts: list[int]) -> list[list[Tensor]]:
    """Every rank's weights after so many steps.

    Args:
        ranks: how many there are.
        steps: to be done.
        every: H.
        parts: of each parameter, the steps, modulo H, after which it takes its outer step.
    """
    w = [parameters() for _ in range(ranks)]
    common = parameters()
    momenta = [torch.zeros_like(a) for a in common]
    for step in range(1, steps + 1):
        for rank in range(ranks):
            for p, added in zip(w[rank], change(step, rank)):
                p += added
        for number, a in enumerate(common):
            if step % every == parts[number]:
                d = sum(a - w[rank][number] for rank in range(ranks)) / ranks
                momenta[number] = 0.9 * momenta[number] + d
                a -= 0.7 * (d + 0.9 * momenta[number])
                for rank in range(ranks):
                    w[rank][number] = a.clone()
    return w


def train(world: World, hook: DiLoCo, mine: list[Tensor], *, first: int, last: int) -> None:
    for step in range(first, last + 1):
        for p, added in zip(mine, change(step, world.rank)):
            p += added
        hook.after_step(mine)


def follows_the_oracle(world: World) -> None:
    for fragments, parts in ((1, [0] * 5), (2, [2, 2, 2, 0, 0]), (99, None)):
        mine = parameters()
        hook = DiLoCo(world, 4, fragments=fragments, wire_dtype=torch.float64)
        hook.start(mine)
        if parts is None:  # a fragment of each parameter: their turns are spread over the H steps
            assert len(hook.outer_steps) == len(SHAPES)
            parts = [(number + 1) * 4 // 5 % 4 for number in range(5)]
        train(world, hook, mine, first=1, last=13)
        expected = oracle(world.size, 13, every=4, parts=parts)[world.rank]
        for p, w in zip(mine, expected):
            torch.testing.assert_close(p, w, rtol=0, atol=1e-12)


def its_bytes_are_counted(world: World) -> None:
    mine = parameters()
    hook = DiLoCo(world, 3)
    hook.start(mine)
    elements = sum(p.numel() for p in mine)
    for step in range(1, 8):
        world.bytes_sent = 0
        train(world, hook, mine, first=step, last=step)
        assert world.bytes_sent == (2 * elements if step % 3 == 0 else 0)


def it_parts_after_the_dense_steps(world: World) -> None:
    mine = parameters()
    hook = DiLoCo(world, 3, after=2, wire_dtype=torch.float64)
    hook.start(mine)
    together = [copy.deepcopy(change(step, 0)) for step in (1, 2)]
    for added in together:  # while gradients are averaged, weights are the same on all ranks
        for p, each in zip(mine, added):
            p += each
        hook.after_step(mine)
    before = copy.deepcopy(mine)
    train(world, hook, mine, first=3, last=5)
    for number, p in enumerate(mine):
        moves = [
            sum(change(step, rank)[number] for step in (3, 4, 5)) for rank in range(world.size)
        ]
        expected = before[number] + 0.7 * 1.9 * sum(moves) / world.size
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-12)


def an_average_in_between_leaves_the_mean_change_of_given_steps(world: World) -> None:
    """Those of an optimizer are not given: its gradients are those of the mean from then on."""
    runs = []
    for averaged in (True, False):
        mine = parameters()
        hook = DiLoCo(world, 4, wire_dtype=torch.float64)
        hook.start(mine)
        train(world, hook, mine, first=1, last=2)
        if averaged:
            hook.sync_replicas(mine)
        train(world, hook, mine, first=3, last=8)
        runs.append(mine)
    for p, q in zip(*runs):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def what_no_rank_changes_stays_as_it_is(world: World) -> None:
    """As a weight without a gradient, which no optimizer changes."""
    for dtype in (torch.float64, torch.bfloat16):
        mine = [p.to(dtype) for p in parameters()]
        hook = DiLoCo(world, 2)
        hook.start(mine)
        for step in range(1, 7):
            if step == 3:
                before = mine[0].clone()
            for number, (p, added) in enumerate(zip(mine, change(step, world.rank))):
                if number > 0 or step < 3:
                    p += added.to(dtype)
            hook.after_step(mine)
        assert torch.equal(mine[0], before)


def it_goes_on_from_its_state(world: World) -> None:
    mine = parameters()
    hook = DiLoCo(world, 4)
    hook.start(mine)
    train(world, hook, mine, first=1, last=6)
    theirs = copy.deepcopy(mine)
    state = copy.deepcopy(hook.state_dict(mine))
    other = DiLoCo(world, 4)
    other.start(parameters())
    other.load_state_dict(state, theirs)
    for each, own in ((hook, mine), (other, theirs)):
        train(world, each, own, first=7, last=13)
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs))


def all_of_it(world: World) -> None:
    for body in (
        follows_the_oracle,
        its_bytes_are_counted,
        it_parts_after_the_dense_steps,
        an_average_in_between_leaves_the_mean_change_of_given_steps,
        what_no_rank_changes_stays_as_it_is,
        it_goes_on_from_its_state,
    ):
        body(world)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.process)])
def test_what_ranks_do_together(size: int) -> None:
    ranks.run_ranks(all_of_it, size)


def test_one_process_takes_outer_steps_as_well() -> None:
    world, mine = World(), parameters()
    hook = DiLoCo(world, 4, wire_dtype=torch.float64)
    hook.start(mine)
    train(world, hook, mine, first=1, last=9)
    for p, w in zip(mine, oracle(1, 9, every=4, parts=[0] * 5)[0]):
        torch.testing.assert_close(p, w, rtol=0, atol=1e-12)
    assert world.bytes_sent == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9])
def test_fragments_keep_the_order_and_are_about_equal(parts: int) -> None:
    tensors = [torch.zeros(size) for size in (10, 90, 40, 60, 100)]
    split = split_evenly(tensors, parts)
    flat = [tensor for part in split for tensor in part]
    assert [id(tensor) for tensor in flat] == [id(tensor) for tensor in tensors]
    assert all(split)
    sizes = [sum(tensor.numel() for tensor in part) for part in split]
    assert max(sizes) <= 300 / min(parts, 5) + 100
