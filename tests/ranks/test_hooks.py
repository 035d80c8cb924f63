"""What data parallelism sends: compressed, a step late or only now and then; and its bytes."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fake_cuda
import ranks
import resnet50_test
from backends.precision import Precision
from cli import options
from cli.factory import create_comm_hook
from distributed.averaging import RankAverager
from distributed.comm_hooks import (
    WIRE_DTYPES,
    AllReduceHook,
    DelayedAllReduce,
    LocalSGD,
    RoundedGradients,
)
from distributed.world import World
from errors import InputError
from trainers import make_trainer
from training.trainer import Trainer

FP32 = Precision("fp32", "cpu")


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 4)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 40, generator=generator), torch.randint(4, (8,), generator=generator)


def trainer_of(
    world: Any,
    hook: AllReduceHook,
    model: nn.Module | None = None,
    static: bool = True,
) -> Trainer:
    model = model or network()
    trainer = make_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        world,
        comm_hook=hook,
        accumulation_steps=1 if static else 2,
    )
    trainer.wrap_model()
    return trainer


def mean_gradients(model: nn.Module, step: int, size: int) -> list[torch.Tensor]:
    """The mean over the ranks of the gradients at these weights."""
    copied = copy.deepcopy(model)
    for rank in range(size):
        x, y = batch(step, rank)
        (F.cross_entropy(copied(x), y) / size).backward()
    return [p.grad for p in copied.parameters()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def the_wire_has_what_it_says(world: Any) -> None:
    for name, tolerance in (("none", 1e-6), ("bf16", 0.02), ("fp16", 2e-3)):
        trainer = trainer_of(world, AllReduceHook(world, name))
        world.bytes_sent = 0
        expected = [
            p.detach() - 0.5 * g
            for p, g in zip(
                trainer.model.parameters(), mean_gradients(trainer.model, 0, world.size)
            )
        ]
        before = flat(trainer.model)
        trainer.train_step(*batch(0, world.rank))
        moved, right = (
            flat(trainer.model) - before,
            torch.cat([p.flatten() for p in expected]) - before,
        )
        assert (moved - right).norm() < tolerance * right.norm(), name
        assert world.bytes_sent == flat(trainer.model).numel() * (4 if name == "none" else 2)
        assert torch.equal(world.sum(flat(trainer.model)), flat(trainer.model) * world.size)


def power_sgd_sends_little_and_descends(world: Any) -> None:
    trainer = trainer_of(world, AllReduceHook(world, "powersgd", rank=2))
    sent, losses = [], []
    for _ in range(30):
        world.bytes_sent = 0
        trainer.sums.values.zero_()
        trainer.train_step(*batch(0, world.rank))
        sent.append(world.bytes_sent)
        losses.append(trainer.sums.loss.item())
    whole = 4 * flat(trainer.model).numel()
    assert sent[0] == whole
    # two columns of P and Q for each large matrix; the small one and the vectors as they are
    assert sent[-1] == 4 * (2 * (40 + 60) + 2 * (60 + 50) + 60 + 50 + 4 + 50 * 4)
    assert losses[-1] < losses[0] / 2
    assert torch.equal(world.sum(flat(trainer.model)), flat(trainer.model) * world.size)


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """What is sent of a gradient: whole multiples of a scale, or signs, for each 64 elements."""
    flat, most = values.flatten().clone(), 2 ** (bits - 1) - 1
    for row in flat.split(64):
        if bits == 1:
            scale = row.abs().mean().bfloat16().double()
            row.copy_(torch.where(row >= 0, scale, -scale))
        else:
            scale = (row.abs().max() / most).bfloat16().double()
            row.copy_((row / scale).round().clamp(-most, most) * scale)
    return flat.view(values.shape)


def few_bits_follow_the_equations(world: Any) -> None:
    for name, bits in (("int8", 8), ("int4", 4), ("sign", 1)):
        model, hook = network().double(), RoundedGradients(world, name)
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parallel.register_comm_hook(None, hook.run)
        parameters = list(model.parameters())
        errors = [[torch.zeros_like(p) for p in parameters] for _ in range(world.size)]
        for step in range(6):
            gradients = []
            for rank in range(world.size):
                x, y = batch(step, rank)
                loss = F.cross_entropy(model(x.double()), y)
                gradients.append(torch.autograd.grad(loss, parameters))
            model.zero_grad()
            world.bytes_sent = 0
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
                    torch.testing.assert_close(hook.errors[p], errors[world.rank][number])
                torch.testing.assert_close(p.grad, sum(sent) / world.size)
            rows = math.ceil(40 * 60 / 64) + math.ceil(60 * 50 / 64)
            assert world.bytes_sent == rows * (64 * bits // 8 + 2) + 2 * (60 + 50 + 4 * 50 + 4)
            with torch.no_grad():
                for p in parameters:
                    p -= 0.5 * p.grad


def few_bits_go_on_from_their_state(world: Any) -> None:
    trainer = trainer_of(world, RoundedGradients(world, "sign"))
    for number in range(4):
        trainer.train_step(*batch(number, world.rank))
    hook = trainer.comm_hook
    state = hook.rank_state_dict(trainer.parameters)
    assert len(state) == 2
    models = [copy.deepcopy(trainer.model) for _ in range(2)]
    resumed, fresh = (
        trainer_of(world, RoundedGradients(world, "sign"), model=model) for model in models
    )
    resumed.comm_hook.load_rank_state_dict(state, resumed.parameters)
    for number in range(4, 7):
        for each in (trainer, resumed, fresh):
            each.train_step(*batch(number, world.rank))
    assert torch.equal(flat(trainer.model), flat(resumed.model))
    assert not torch.equal(flat(trainer.model), flat(fresh.model))
    assert torch.equal(world.sum(flat(trainer.model)), flat(trainer.model) * world.size)


def a_lagged_step_takes_the_gradient_before(world: Any) -> None:
    for static in (True, False):
        trainer = trainer_of(world, DelayedAllReduce(world), static=static)
        expected, last = flat(trainer.model), None
        for number in range(6):
            gradients = mean_gradients(trainer.model, number, world.size)
            trainer.train_step(*batch(number, world.rank))
            if last is not None:
                expected = expected - 0.5 * last
            torch.testing.assert_close(flat(trainer.model), expected, rtol=1e-5, atol=1e-6)
            last = torch.cat([g.flatten() for g in gradients])
        assert torch.equal(world.sum(flat(trainer.model)), flat(trainer.model) * world.size)
        # the gradient under way goes on in another process
        state = trainer.comm_hook.state_dict(trainer.parameters)
        other = trainer_of(
            world, DelayedAllReduce(world), model=copy.deepcopy(trainer.model), static=static
        )
        other.comm_hook.load_state_dict(state, other.parameters)
        for number in (6, 7):
            for each in (trainer, other):
                each.train_step(*batch(number, world.rank))
        assert torch.equal(flat(trainer.model), flat(other.model))
    world.bytes_sent = 0
    half = trainer_of(world, DelayedAllReduce(world, "bf16"))
    half.train_step(*batch(0, world.rank))
    assert world.bytes_sent == 2 * flat(half.model).numel()


def local_steps_average_weights_now_and_then(world: Any) -> None:
    trainer = trainer_of(world, LocalSGD(world, every=3, after=2))
    for number in range(1, 13):
        world.bytes_sent = 0
        trainer.train_step(*batch(number, world.rank))
        together = torch.allclose(
            world.sum(flat(trainer.model)), flat(trainer.model) * world.size, atol=1e-6
        )
        averaged = number > 2 and (number - 2) % 3 == 0
        assert together == (number <= 2 or averaged), number
        whole = 4 * flat(trainer.model).numel()
        assert world.bytes_sent == (whole if number <= 2 or averaged else 0), number
    own = flat(trainer.model).clone()
    mean = world.sum(own.clone()) / world.size
    assert not torch.equal(own, mean)
    trainer.sync_replicas()
    torch.testing.assert_close(flat(trainer.model), mean)
    state = trainer.comm_hook.state_dict(trainer.parameters)
    other = LocalSGD(world, every=3, after=2)
    other.load_state_dict(state, [])
    assert other.steps == 12


def a_bad_step_is_skipped_by_all_of_them(world: Any) -> None:
    for hook in (DelayedAllReduce(world), LocalSGD(world, every=3)):
        trainer = trainer_of(world, hook)
        trainer.train_step(*batch(0, world.rank))
        x, y = batch(1, world.rank)
        trainer.train_step(
            x * (math.nan if world.rank == 1 else 1), y
        )  # of the lagged ones, this comes with the next step
        trainer.train_step(*batch(2, world.rank))
        assert trainer.sums.skipped == 1
        assert trainer.sums.samples in (8, 16)
        assert flat(trainer.model).isfinite().all()


def error_feedback_goes_on_after_a_bad_step(world: Any) -> None:
    for hook in (
        AllReduceHook(world, "powersgd", rank=2),
        RoundedGradients(world, "int8"),
        RoundedGradients(world, "int4"),
        RoundedGradients(world, "sign"),
    ):
        trainer = trainer_of(world, hook)
        losses = []
        for number in range(40):
            x, y = batch(0, world.rank)
            trainer.sums.values.zero_()
            trainer.train_step(x * (math.nan if number == 6 and world.rank == 1 else 1), y)
            assert trainer.sums.skipped == (number == 6)
            losses.append(trainer.sums.loss.item())
        assert losses[-1] < losses[5] / 2
        assert torch.equal(world.sum(flat(trainer.model)), flat(trainer.model) * world.size)


def all_of_it(world: Any) -> None:
    for body in (
        the_wire_has_what_it_says,
        power_sgd_sends_little_and_descends,
        a_lagged_step_takes_the_gradient_before,
        local_steps_average_weights_now_and_then,
        a_bad_step_is_skipped_by_all_of_them,
        few_bits_follow_the_equations,
        few_bits_go_on_from_their_state,
        error_feedback_goes_on_after_a_bad_step,
    ):
        body(world)


@pytest.mark.process
def test_what_ranks_send_each_other() -> None:
    ranks.run_ranks(all_of_it, 2)


class Bucket:
    """A bucket of gradients, as DistributedDataParallel hands them to a hook."""

    def __init__(self, parameters: list[torch.Tensor], values: torch.Tensor) -> None:
        self.members, self.flat = parameters, values.clone()

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> list[torch.Tensor]:
        return self.members

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([p.numel() for p in self.members])
        return [part.view(p.shape) for part, p in zip(parts, self.members)]


NEEDS_FAKE_RANKS = pytest.mark.skipif(
    bool(fake_cuda.unavailable_reason()), reason=fake_cuda.unavailable_reason()
)


@NEEDS_FAKE_RANKS
def test_what_is_sent_is_a_share_of_the_mean_and_its_bytes_are_those_of_its_dtype() -> None:
    parameters = [torch.zeros(3, 4), torch.zeros(5)]
    first, second = torch.arange(17.0), torch.ones(17)
    with fake_cuda.fake_world(2) as world:  # whose sums are those of rank 0 alone
        for name, size in (("none", 4), ("bf16", 2), ("fp16", 2)):
            world.bytes_sent = 0
            hook = AllReduceHook(world, name)
            hook.run(None, Bucket(parameters, first))
            assert world.bytes_sent == 17 * size
            world.bytes_sent = 0
            lagged = DelayedAllReduce(world, name)
            lagged.run(None, Bucket(parameters, first))
            bucket = Bucket(parameters, second)
            lagged.run(None, bucket)
            assert torch.equal(bucket.flat, first / 2)
            assert world.bytes_sent == 2 * 17 * size


def test_what_rounding_has_left_goes_on_from_a_state() -> None:
    parameters = [torch.zeros(40, 30), torch.zeros(33, 32), torch.zeros(5)]
    generator = torch.Generator().manual_seed(0)
    for name in ("int8", "int4", "sign"):
        values = [torch.randn(1200 + 1056 + 5, generator=generator) for _ in range(2)]
        hooks = [RoundedGradients(World(), name) for _ in range(3)]
        hooks[0].run(None, Bucket(parameters, values[0]))
        hooks[1].load_rank_state_dict(hooks[0].rank_state_dict(parameters), parameters)
        received = []
        for hook in hooks:
            bucket = Bucket(parameters, values[1])
            hook.run(None, bucket)
            received.append(bucket.flat)
        assert torch.equal(received[0], received[1])
        assert not torch.equal(received[0], received[2])


def test_signs_have_the_mean_size_of_a_row_that_is_not_full() -> None:
    parameters = [torch.zeros(41, 25), torch.zeros(33, 32)]  # 1025 elements: one in the last row
    bucket = Bucket(parameters, torch.ones(1025 + 1056))
    RoundedGradients(World(), "sign").run(None, bucket)
    assert torch.equal(bucket.flat, torch.ones(1025 + 1056))


@NEEDS_FAKE_RANKS
def test_a_mean_across_nodes_is_divided_by_the_number_of_nodes(monkeypatch) -> None:
    averager = RankAverager(None, None)
    averager.size, averager.local_size, averager.nodes = 6, 2, 3

    def gather(everything: torch.Tensor, mine: torch.Tensor, group: object) -> None:
        everything.copy_(torch.cat([mine, mine]))

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values, group: values.mul_(3))
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    assert torch.equal(averager.mean_across(torch.full((5,), 7.0)), torch.full((5,), 7.0))


@pytest.mark.parametrize("words", ["--grad_compress int4", "--grad_compress sign", "--sync lag"])
def test_gradients_kept_for_later_are_refused_with_a_loss_scale(words: str) -> None:
    args, _ = options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, words.split())
    run = SimpleNamespace(precision=Precision("fp16", "cpu", torch.float16), world=World())
    with pytest.raises(InputError, match=f"{words} is not supported with fp16"):
        create_comm_hook(args, run)
    run.precision = Precision("bf16", "cpu", torch.bfloat16)
    create_comm_hook(args, run)


@pytest.mark.parametrize(
    "words",
    [
        "--sync lag --grad_compress powersgd",
        "--sync lag --grad_compress sign",
        "--optimizer slamb --grad_compress int4",
        "--sync local --grad_compress bf16",
        "--sync lag --optimizer slamb",
        "--sync diloco --optimizer demo",
        "--sync diloco --grad_compress bf16",
        "--optimizer slamb --grad_compress fp16",
    ],
)
def test_what_does_not_go_together_is_refused(words: str) -> None:
    with pytest.raises(InputError, match="--(sync|grad_compress)"):
        options.parse(resnet50_test.parser(), resnet50_test.SCRIPT, words.split())


def waiting_for_the_work_gives_the_mean_as_well(world: Any) -> None:
    for name, tolerance in (("none", 1e-6), ("bf16", 0.02), ("fp16", 2e-3)):
        dtype = WIRE_DTYPES.get(name, torch.float32)
        buffer = torch.arange(5.0) + world.rank
        AllReduceHook(world, name)._all_reduce_now(buffer, dtype)
        torch.testing.assert_close(buffer, torch.arange(5.0) + 0.5, rtol=tolerance, atol=0)


def test_waiting_for_the_work_gives_the_mean_as_well():
    ranks.run_ranks(waiting_for_the_work_gives_the_mean_as_well, 2)
