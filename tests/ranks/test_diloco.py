"""DiLoCo: against its algorithm in float64; its bytes, and what stays as it is."""

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


def an_average_in_between_leaves_the_mean_change_of_given_steps(world: World) -> None:
    """Those of an optimizer are not given: its gradients are those of the mean from then on."""
    runs = []
    for averaged in (True, False):
        mine = parameters()
        hook = started(world, mine, 4, wire_dtype=torch.float64)
        train(world, hook, mine, range(1, 3))
        if averaged:
            hook.sync_replicas(mine)
        train(world, hook, mine, range(3, 9))
        runs.append(mine)
    torch.testing.assert_close(*runs, rtol=0, atol=1e-12)


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
    an_average_in_between_leaves_the_mean_change_of_given_steps(world)
    what_no_rank_changes_stays_as_it_is(world)


def test_what_ranks_do_together() -> None:
    ranks.run_ranks(all_of_it, 2)
    world = World()  # one process takes outer steps as well
    follows_the_oracle(world)
    assert world.traffic.payload == 0
