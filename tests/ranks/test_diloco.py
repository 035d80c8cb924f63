"""DiLoCo: against its algorithm in float64; its bytes, and what stays as it is."""

import itertools

import torch
from torch import Tensor

import ranks
from distributed.diloco import DiLoCo
from distributed.world import World

SHAPES = [(6, 5), (7,), (4, 3, 2, 2), (11,), (2, 2)]


def change(step: int, rank: int) -> list[Tensor]:
    """What a rank's own optimizer adds to the weights in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters() -> list[Tensor]:
    return change(0, 1)


def oracle(size: int, steps: int, every: int) -> list[list[Tensor]]:
    """Every rank's weights."""
    w = [parameters() for _ in range(size)]
    common = parameters()
    momenta = [torch.zeros_like(a) for a in common]
    for step in range(1, steps + 1):
        for rank in range(size):
            for p, added in zip(w[rank], change(step, rank)):
                p += added
        if step % every == 0:
            for number, a in enumerate(common):
                d = sum(a - w[rank][number] for rank in range(size)) / size
                momenta[number] = 0.5 * momenta[number] + d
                a -= 0.7 * (d + 0.5 * momenta[number])
                for rank in range(size):
                    w[rank][number] = a.clone()
    return w


def started(world: World, mine: list[Tensor], every: int, **settings) -> DiLoCo:
    hook = DiLoCo(world, every, **settings)
    hook.start(mine)
    return hook


def train(world: World, hook: DiLoCo, mine: list[Tensor], steps: range) -> None:
    for step in steps:
        for p, added in zip(mine, change(step, world.rank)):
            p += added
        hook.after_step(mine)


def follows_the_oracle(world: World) -> None:
    expected = oracle(world.size, 13, 4)[world.rank]
    for dense_steps in (0, 5):
        mine = parameters()
        before = [p + 1 for p in mine] if dense_steps else mine  # parting is from `mine`
        hook = started(world, before, 4, after=dense_steps, wire_dtype=torch.float64)
        for _ in range(dense_steps):
            hook.after_step(iter(mine))  # as model.parameters() is
        train(world, hook, mine, range(1, 14))
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def its_bytes_are_counted(world: World) -> None:
    mine, before = parameters(), world.traffic.payload
    train(world, started(world, mine, 3), mine, range(1, 8))
    assert world.traffic.payload - before == 2 * 2 * sum(p.numel() for p in mine)  # twice, in bf16


def an_evaluation_in_between_is_an_outer_step(world: World) -> None:
    runs = []
    for every in (2, 50):
        mine = parameters()
        hook = started(world, mine, every, wire_dtype=torch.float64)
        for first in (1, 3):
            train(world, hook, mine, range(first, first + 2))
            for _ in range(2):  # the second time there is nothing new
                hook.sync_replicas(mine)
        runs.append(mine)
    assert all(map(torch.equal, *runs))


def few_bits_add_up_to_the_changes(world: World) -> None:
    """The sum of all that was sent is the sum of the changes, but for what the last one lost."""
    for bits, numbers in ((8, 1), (4, 0.5), (1, 0.125)):
        mine, common = [torch.zeros(64, 64)], [torch.zeros(64, 64)]
        hook = started(world, mine, 1, lr=1.0, momentum=0.0, wire_bits=bits)
        before = world.traffic.payload
        for step in range(1, 9):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            mine[0] += torch.randn(64, 64, generator=generator)
            hook.after_step(mine)
        for step, rank in itertools.product(range(1, 9), range(world.size)):
            generator = torch.Generator().manual_seed(10 * step + rank)
            common[0] += torch.randn(64, 64, generator=generator) / world.size
        assert world.traffic.payload - before == 8 * 64 * (64 * numbers + 2) * (world.size > 1)
        left = hook.averager.mean(hook.errors[0].clone())
        torch.testing.assert_close(mine[0] - left, common[0], rtol=0, atol=1e-4)
        state = hook.state_dict(mine), hook.rank_state_dict(mine)
        other = started(world, mine, 1, wire_bits=bits)
        other.load_state_dict(state[0], mine)
        other.load_rank_state_dict(state[1], mine)
        assert torch.equal(other.errors[0], hook.errors[0])


def what_no_rank_changes_stays_as_it_is(world: World) -> None:
    """As a weight without a gradient, which no optimizer changes."""
    mine = [p.bfloat16() for p in parameters()]
    hook, before = started(world, mine, 2), mine[0].clone()
    for step in range(1, 7):
        for p, added in zip(mine[1:], change(step, world.rank)[1:]):
            p += added.bfloat16()
        hook.after_step(mine)
    assert torch.equal(mine[0], before)


def all_of_it(world: World) -> None:
    follows_the_oracle(world)
    its_bytes_are_counted(world)
    an_evaluation_in_between_is_an_outer_step(world)
    few_bits_add_up_to_the_changes(world)
    what_no_rank_changes_stays_as_it_is(world)


def test_what_ranks_do_together() -> None:
    ranks.run_ranks(all_of_it, 2)
    world = World()  # one process takes outer steps as well
    follows_the_oracle(world)
    assert world.traffic.payload == 0
