"""What data parallelism sends: compressed, a step late or only now and then; and its bytes."""

import copy
import itertools
import math
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ranks
from distributed.averaging import RankAverager, Traffic
from distributed.comm_hooks import AllReduceHook, LocalSGD, RoundedGradients
from distributed.diloco import DiLoCo
from distributed.world import World
from errors import InputError
from slamb_oracle import rounded
from trainers import flat, make_trainer


def network() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 4)
    return nn.Sequential(*layers)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 40, generator=generator), torch.randint(4, (8,), generator=generator)


def trainer_of(world: World, hook: AllReduceHook, *, micro_batches: int = 1, clip: float = 0):
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"comm_hook": hook, "accumulation_steps": micro_batches, "max_grad_norm": clip}
    trainer = make_trainer(model, sgd, world, **options)
    trainer.wrap_model()
    return trainer


def gradient(model: nn.Module, step: int, rank: int) -> Tensor:
    """That of a rank's own loss at these weights."""
    x, y = batch(step, rank)
    loss = F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def assert_ranks_agree(world: World, trainer) -> None:
    weights = flat(trainer.parallel.parameters)
    assert torch.equal(world.sum(weights.clone()), weights * world.size)


def the_wire_has_what_it_says(world: World) -> None:
    for name, tolerance in (("none", 1e-6), ("bf16", 0.02), ("fp16", 2e-3)):
        hook = AllReduceHook(world, name)
        trainer = trainer_of(world, hook)
        before, world.traffic = flat(trainer.parallel.parameters), Traffic()
        gradients = [gradient(trainer.model, 0, rank) for rank in range(world.size)]
        expected = -0.5 * sum(gradients) / world.size
        trainer.train_step(*batch(0, world.rank))
        moved = flat(trainer.parallel.parameters) - before
        assert (moved - expected).norm() < tolerance * expected.norm(), name
        assert world.traffic.payload == len(before) * (4 if name == "none" else 2)
        assert_ranks_agree(world, trainer)


def few_bits_follow_the_equations(world: World) -> None:
    for name, bits in (("int8", 8), ("int4", 4), ("sign", 1)):
        model, hook = network().double(), RoundedGradients(world, name)
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parallel.register_comm_hook(None, hook.run)
        parameters = list(model.parameters())
        sizes = [p.numel() for p in parameters]
        errors = [[torch.zeros(size) for size in sizes] for _ in range(world.size)]
        for step in range(6):
            gradients = [gradient(model, step, rank).split(sizes) for rank in range(world.size)]
            model.zero_grad()
            world.traffic = Traffic()
            x, y = batch(step, world.rank)
            F.cross_entropy(parallel(x.double()), y).backward()
            for number, p in enumerate(parameters):
                sent = [each[number] for each in gradients]
                if p.numel() < 1024:
                    sent = [each.bfloat16().double() for each in sent]
                else:
                    for rank in range(world.size):
                        corrected = sent[rank] + errors[rank][number]
                        sent[rank] = rounded(corrected, bits)
                        errors[rank][number] = corrected - sent[rank]
                    kept = hook.errors[p].flatten()
                    torch.testing.assert_close(kept, errors[world.rank][number])
                torch.testing.assert_close(p.grad.flatten(), sum(sent) / world.size)
            rows = math.ceil(40 * 60 / 64) + math.ceil(60 * 50 / 64)
            assert world.traffic.payload == rows * (64 * bits // 8 + 2) + 2 * (60 + 50 + 4 * 50 + 4)
            with torch.no_grad():
                for p in parameters:
                    p -= 0.5 * p.grad


def local_steps_average_weights_now_and_then(world: World) -> None:
    trainer = trainer_of(world, LocalSGD(world, every=3, after=2), clip=1)
    for number in range(1, 13):
        world.traffic = Traffic()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
            trainer.train_step(*batch(number, world.rank))
        weights = flat(trainer.parallel.parameters)
        mean = world.sum(weights.clone()) / world.size
        averaged = number <= 2 or (number - 2) % 3 == 0
        assert torch.allclose(weights, mean, atol=1e-6) == averaged, number
        assert world.traffic.payload == (4 * len(weights) if averaged else 0), number
        assert sent.called == averaged, "a step alone waits for nobody"
    trainer.parallel.sync_replicas(trainer.statistics())
    torch.testing.assert_close(flat(trainer.parallel.parameters), mean)


def training_goes_on_after_a_bad_step_which_all_skip(world: World) -> None:
    """But for ranks that train apart, of which it is the one that has it."""
    for hook in (
        AllReduceHook(world),
        LocalSGD(world, every=3),
        *(RoundedGradients(world, name) for name in ("int8", "int4", "sign")),
    ):
        trainer = trainer_of(world, hook)
        losses = []
        for number in range(42):
            x, y = batch(0, world.rank)
            trainer.sums.values.zero_()
            trainer.train_step(x * (math.nan if number == 6 and world.rank == 1 else 1), y)
            is_skipped = number == 6 and (world.rank == 1 or not hook.replicas_diverge)
            assert trainer.sums.skipped == is_skipped
            assert trainer.sums.samples == 0 or not is_skipped
            losses.append(trainer.sums.loss.item())
        assert losses[-1] < losses[5] / 2
        assert_ranks_agree(world, trainer)


def a_run_goes_on_with_another_hook(world: World) -> None:
    """Whatever the ranks did before: they agree at the next step, or at the next outer one."""
    hooks = (AllReduceHook, partial(LocalSGD, every=3), partial(DiLoCo, every=3))
    for before, after in itertools.product(hooks, repeat=2):
        trainer, other = (trainer_of(world, hook(world)) for hook in (before, after))
        for number in range(4):
            trainer.train_step(*batch(number, world.rank))
        state = world.broadcast(trainer.parts.state_dict())
        other.parts.load_state_dict(copy.deepcopy(state))
        weights, expected = (world.sum(flat(each.parallel.parameters)) for each in (other, trainer))
        torch.testing.assert_close(weights, expected)
        agreed = False
        for number in range(4, 9 if other.parallel.replicas_diverge else 5):  # the sixth is outer
            other.train_step(*batch(number, world.rank))
            hook = other.comm_hook
            if not other.parallel.replicas_diverge or hook.met == hook.steps:
                assert_ranks_agree(world, other)
                agreed = True
        assert agreed


# -------------------------------------------------------------------- DiLoCo in float64

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


def bytes_of_diloco_are_counted(world: World) -> None:
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
    hook = started(world, mine, 3, after=1)
    met = []
    for step in range(1, 9):
        train(world, hook, mine, range(step, step + 1))
        if step == 3:
            hook.sync_replicas(mine)
        met.append(hook.met)
    assert met == [1, 1, 3, 3, 3, 6, 6, 6]  # the next one is three steps later
    with pytest.raises(InputError, match="the first 1 steps, which cannot become 30"):
        started(world, mine, 3, after=30).load_state_dict(hook.state_dict(mine), mine)


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
        rounded = RoundedGradients(world, "int8")
        rounded.load_rank_state_dict(hook.rank_state_dict(mine), mine)
        assert not rounded.errors, "these are errors of changes, not of gradients"


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
    the_wire_has_what_it_says(world)
    few_bits_follow_the_equations(world)
    local_steps_average_weights_now_and_then(world)
    training_goes_on_after_a_bad_step_which_all_skip(world)
    a_run_goes_on_with_another_hook(world)
    follows_the_oracle(world)
    bytes_of_diloco_are_counted(world)
    an_evaluation_in_between_is_an_outer_step(world)
    few_bits_add_up_to_the_changes(world)
    what_no_rank_changes_stays_as_it_is(world)


def test_what_ranks_send_each_other() -> None:
    ranks.run_ranks(all_of_it, 2)
    world = World()  # one process takes outer steps as well
    follows_the_oracle(world)
    assert world.traffic.payload == 0


def test_four_ranks_send_more_of_what_is_gathered_than_of_what_is_reduced(monkeypatch):
    monkeypatch.setattr(RankAverager, "size", 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: None)
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, lambda everything, mine: None, raising=False)
    averager = RankAverager()
    averager.mean(torch.zeros(10))
    assert averager.take_traffic() == Traffic(40, 2 * 3 / 4 * 40)
    averager.gather([torch.zeros(10)])
    assert averager.take_traffic() == Traffic(40, 3 * 40)
