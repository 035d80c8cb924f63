"""Batches and steps: every sample once and with equal weight; the noise scale; resuming."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ranks
import resnet50_test
from backends.precision import Precision
from benchmarks.trainers import open_script
from conftest import each_of, run
from distributed.world import World
from dynamic_batch import ByLoss, ByNoise, Scheduled, WorkerBalancer, at_milestones
from input_pipeline.sampler import batch_sizes, row_owners
from trainers import FP32, trainer_of
from training import step_stats
from training.batch_sampler import DynamicBatchSampler, RankBatch
from training.losses import CrossEntropy
from training.micro_batches import MicroBatches
from training.step_stats import squared_norm


class Alike(World):
    """A rank of several whose host-side sums are made here, from what each would give."""

    def all_gather(self, values: list[float]) -> list[list[float]]:
        return self.given if hasattr(self, "given") else [values] * self.size


def make(rank: int, size: int, rows: int = 1003, base: int = 60, **options) -> DynamicBatchSampler:
    return DynamicBatchSampler(rows, base, seed=3, world=Alike(rank, size), **options)


def rows_of(sampler: DynamicBatchSampler, epoch: int, done: int = 0) -> list[list[int]]:
    return [part.rows.tolist() for part in sampler.plan(epoch, done)]


# -------------------------------------------------------------------- rows


@each_of("with_lengths", [False, True])
@each_of("shares", [[60], [43, 17], [20, 30, 2, 8]])
@each_of("rows", [1003, 960, 961])
def test_every_row_comes_once_over_all_ranks_whatever_the_shares(shares, with_lengths, rows):
    lengths = torch.arange(rows) % 97 + 1 if with_lengths else None
    seen, steps, weights = [], set(), 0.0
    for rank in range(len(shares)):
        batching = make(rank, len(shares), rows, lengths=lengths, balancer=WorkerBalancer())
        batching.start_epoch(4)
        batching.shares = shares
        plan = batching.plan(4, 0)
        steps |= {len(plan), batching.steps()}
        sizes = batch_sizes(rows, 60, smallest=2 * len(shares))
        assert sorted((part.samples for part in plan), reverse=True) == sizes
        for part in plan:
            assert len(part.rows) == round(part.weight * part.samples / len(shares)) >= 1
        seen += [part.rows for part in plan]
        weights += plan[-1].weight
        assert rows_of(batching, 4, 5) == rows_of(batching, 4)[5:]
    assert len(steps) == 1
    assert weights == pytest.approx(len(shares))
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(rows))


def test_micro_batches_of_a_small_batch_keep_two_rows_where_memory_allows():
    micro_batches = MicroBatches(accumulation_steps=4)
    assert [micro_batches.number(rows) for rows in (1, 2, 3, 4, 6, 8, 9)] == [1, 1, 1, 2, 3, 4, 4]
    sizes = [len(labels) for _, labels in micro_batches.split(torch.zeros(9, 3), torch.zeros(9))]
    assert sizes == [3, 2, 2, 2]
    assert MicroBatches(4, limit=1).number(3) == 3  # the memory's limit comes first
    assert MicroBatches(1, limit=3).number_on_all_ranks(7, 2) == 2  # shares of 4 and 3


# -------------------------------------------------------------------- equal weight a sample


def image_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (rows,), generator=generator)


def noise_sums(trainer) -> list[float]:
    names = "small_square inverse_small big_square inverse_big".split()
    return [getattr(trainer.sums, name).item() for name in names]


def unequal_shares_have_the_gradient_of_the_whole_batch(world: World) -> None:
    """Also with weights of the classes, of which the mean is over the rows."""
    inputs, labels = batch(41)
    weights = torch.tensor([0.1, 0.5, 1.0, 5.0]).double()
    for loss_fn, (shares, micro_batch) in itertools.product(
        (CrossEntropy(), CrossEntropy(0.1, weights)),
        (([30, 11], None), ([30, 11], 7), ([2, 39], None), ([2, 39], 7)),
    ):
        alone, model = image_model(), image_model()
        settings = {"weight": loss_fn.class_weights, "label_smoothing": loss_fn.label_smoothing}
        loss = F.cross_entropy(alone(inputs), labels, reduction="sum", **settings) / 41
        loss.backward()
        trainer = trainer_of(model, world, micro_batch_size=micro_batch, loss_fn=loss_fn)
        mine, weight = row_owners(shares) == world.rank, shares[world.rank] * 2 / 41
        for _ in range(2):  # the second backward of a static graph takes another path
            model.zero_grad(set_to_none=True)
            trainer.forward_backward(trainer.parallel.module, inputs[mine], labels[mine], weight)
            for expected, given in zip(alone.parameters(), model.parameters()):
                torch.testing.assert_close(given.grad, expected.grad, rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------- the noise scale


def noise_between(rows: Tensor) -> object:
    """The sums of one step whose few samples are these rows, and whose many are all 40."""
    inputs, labels = batch(40)
    sums = []
    for each in (rows, torch.arange(40)):
        model = image_model()
        F.cross_entropy(model(inputs[each]), labels[each]).backward()
        sums += [squared_norm([p.grad for p in model.parameters()]).item(), 1 / len(each)]
    return pytest.approx(sums, rel=1e-5)


@each_of(("accumulate", "first"), [(1, 20), (4, 10)])  # one process takes two micro-batches for it
def test_noise_is_measured_between_a_micro_batch_and_the_batch(accumulate, first):
    options = {"accumulation_steps": accumulate, "measure_noise_scale": True}
    trainer = trainer_of(image_model(), World(), **options)
    trainer.train_step(*batch(40))
    assert noise_sums(trainer) == noise_between(torch.arange(first))


def test_a_batch_too_small_for_two_micro_batches_measures_no_noise():
    trainer = trainer_of(image_model(), World(), measure_noise_scale=True)
    trainer.train_step(*batch(3))
    assert noise_sums(trainer) == [0, 0, 0, 0]
    assert trainer.noise_meter.means(trainer.sums.read(), 1) is None


def noise_is_measured_between_a_rank_and_all(world: World) -> None:
    inputs, labels = batch(40)
    shares = [28, 12]
    mine = (row_owners(shares) == world.rank).nonzero().flatten()
    trainer = trainer_of(image_model(), world, micro_batch_size=6, measure_noise_scale=True)
    for limit in (6, None):  # what steps with micro-batches left does not count in those without
        trainer.micro_batches.limit = limit
        for _ in range(2):  # nor does what the first step left in the second
            trainer.model.load_state_dict(image_model().state_dict())
            trainer.sums.values.zero_()
            planned = RankBatch(mine, shares[world.rank] * 2 / 40, 40)
            trainer.train_step(inputs[mine], labels[mine], planned)
        parts = 1 if limit is None else -(-len(mine) // limit)
        assert noise_sums(trainer) == noise_between(mine[: -(-len(mine) // parts)])


def test_a_loss_scale_leaves_the_noise_as_it_is():
    found = []
    for precision in (FP32, Precision("fp16", "cpu", torch.float16)):
        model, (inputs, labels) = image_model().float(), batch(40)
        trainer = trainer_of(model, World(), precision=precision, measure_noise_scale=True)
        trainer.train_step(inputs.float(), labels)
        found.append(noise_sums(trainer))
    assert trainer.scaler.get_scale() > 1
    assert found[0] == pytest.approx(found[1], rel=2e-2)


# -------------------------------------------------------------------- compute time


def a_slow_rank_is_seen_to_be_slow(world: World) -> None:
    """The clock goes on while it computes, and while gradients are waited for, which is no work."""
    clock = SimpleNamespace(seconds=0.0, perf_counter=lambda: clock.seconds)

    def take(seconds: float) -> None:
        clock.seconds += seconds

    model = image_model()
    model.register_forward_pre_hook(lambda *_: take(6.0 if world.rank else 1.0))
    with mock.patch.object(step_stats, "time", clock):
        trainer = trainer_of(model, world, time_compute=True)
        timer = trainer.compute_timer
        stop = timer.stop
        timer.stop = lambda: (take(100.0), stop())
        for _ in range(5):
            trainer.train_step(*batch(8))
        assert timer.take_seconds() == (30.0 if world.rank else 5.0)


# -------------------------------------------------------------------- in a loop of one's own


def test_a_data_loader_takes_every_row_once_and_batches_grow_between_epochs():
    rule = Scheduled(64, at_milestones(2.0, [0, 1]))
    sampler = DynamicBatchSampler(1000, 64, rule=rule, lr_power=1.0)
    data = TensorDataset(torch.arange(1000))
    for epoch, (size, steps) in enumerate(((128, 8), (256, 4), (256, 4))):
        assert sampler.lr_factor == size / 64
        loader = DataLoader(data, batch_sampler=sampler, num_workers=epoch % 2)
        batches = [rows for (rows,) in loader]
        assert len(batches) == len(loader) == steps
        assert len(batches[0]) == sampler.size == size
        assert torch.equal(torch.cat(batches).sort().values, torch.arange(1000))
        assert all(sampler.loss_weight(step) == 1 for step in range(steps))
        sampler.end_epoch(1.0, 1.0)
    other = DynamicBatchSampler(1000, 64, rule=Scheduled(64, at_milestones(8.0, [3])))
    other.load_state_dict(sampler.state_dict())
    assert other.size == 512, "another schedule holds from the epoch that comes"


def test_a_loop_goes_on_in_the_middle_of_an_epoch():
    whole, resumed = (
        DynamicBatchSampler(1000, 64, rule=ByLoss(window=2), seed=5) for _ in range(2)
    )
    for loss in (2.0, 1.0):
        list(whole)
        whole.end_epoch(loss, 1.0)
    state = whole.state_dict(steps_done=3)
    batches = list(whole)
    resumed.load_state_dict(state)
    assert len(resumed) == len(batches) - 3
    assert list(resumed) == batches[3:]
    again = DynamicBatchSampler(1000, 64, rule=ByLoss(window=2), seed=5)
    again.load_state_dict(resumed.state_dict(steps_done=2))
    assert list(again) == batches[5:], "the second time in one epoch"
    smaller = DynamicBatchSampler(1000, 16)
    smaller.load_state_dict(state)
    assert len(smaller) == 63 - 3 * whole.size // 16, "after as many rows"
    for sampler in (whole, resumed):
        sampler.end_epoch(0.5, 1.0)
    assert whole.size == resumed.size != 64
    assert list(resumed) == list(whole)


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="11 samples must be from 1 to the 10 rows"):
        DynamicBatchSampler(10, 11)
    with pytest.raises(ValueError, match="low=9 must be at least the number of ranks, 1, and at"):
        DynamicBatchSampler(10, 5, low=9, high=8)
    assert DynamicBatchSampler(10, 5, high=64).high == 10


def ranks_of_torch_share_the_rows(world: World) -> None:
    rule = ByLoss("score")
    sampler = DynamicBatchSampler(1001, 64, rule=rule, balancer=WorkerBalancer())
    mine = torch.zeros(1001, dtype=torch.long)
    for step, rows in enumerate(sampler):
        mine[rows] += 1
        together = world.sum(torch.tensor(len(rows))).item()
        assert sampler.loss_weight(step) == pytest.approx(len(rows) * world.size / together)
    assert torch.equal(world.sum(mine), torch.ones_like(mine))
    sampler.end_epoch(1.0, 1.0 + world.rank, compute_seconds=1.0 + 2 * world.rank)
    assert rule.seconds == [2.0]
    assert sampler.shares[0] > 2 * sampler.shares[1]
    sampler, squares = DynamicBatchSampler(100, 20), {"small_square": 2.0 + world.rank}
    squares |= {"big_square": 1.8, "inverse_small": 0.1, "inverse_big": 0.05}
    sampler.end_epoch(1.0, 1.0, noise=squares)
    assert len({*world.all_gather(sampler.state_dict()["noise_scale"])}) == 1


def all_of_it(world: World) -> None:
    unequal_shares_have_the_gradient_of_the_whole_batch(world)
    noise_is_measured_between_a_rank_and_all(world)
    a_slow_rank_is_seen_to_be_slow(world)
    ranks_of_torch_share_the_rows(world)


def test_two_ranks():
    ranks.run_ranks(all_of_it, 2)


# -------------------------------------------------------------------- going on


def test_a_run_goes_on_with_the_size_and_shares_it_had():
    def new(size: int = 2, base: int = 60, rule: object = None) -> DynamicBatchSampler:
        more = {"rule": rule or ByNoise(2.0), "balancer": WorkerBalancer()}
        return make(0, size, base=base, low=60, high=960, **more)

    def resumed(sampler: DynamicBatchSampler) -> DynamicBatchSampler:
        sampler.load_state_dict(first.state_dict())
        return sampler

    first = new()
    first.start_epoch(0)
    noise = {"small_square": 3 + 500 / 30, "inverse_small": 1 / 30}
    noise |= {"big_square": 3 + 500 / 60, "inverse_big": 1 / 60}
    square, *others = noise.values()
    first.world.given = [[1.0, 1.0, 1.0, square + 9, *others], [1.0, 1.0, 3.0, square - 9, *others]]
    epoch = {"loss": 1.0, "seconds": 1.0, "compute_seconds": 1.0}
    epoch["noise"] = {**noise, "small_square": square + 9}  # of this rank
    row = first.end_epoch(**epoch)
    assert row["shares"] == [30, 30]
    assert row["noise_scale"] == pytest.approx(500 / 3)
    assert row["worker_samples_per_second"] == pytest.approx([502, 501 / 3])  # of 1,003 rows
    assert (first.size, first.shares) == (120, [90, 30])
    second = resumed(new())
    for batching in (first, second):
        batching.start_epoch(1)
        batching.world.given = [[1.0, 1.0, 1.0, *noise.values()]] * 2
    assert rows_of(first, 1, 3) == rows_of(second, 1, 3)
    assert first.end_epoch(**epoch) == second.end_epoch(**epoch)
    assert (first.size, first.shares) == (second.size, second.shares)
    plain, other = resumed(make(0, 2)), resumed(new(rule=ByLoss()))
    assert (plain.size, plain.shares) == (60, [30, 30]), "the rule is taken away"
    assert (other.size, other.shares) == (first.size, first.shares), "another rule"
    more = resumed(new(size=3, base=90))
    assert more.shares == [more.size // 3] * 3


GROW = "increase --batch_milestones 1 2 --max_bs 128 --batch_args lr=linear"
SHRINK = "decrease --batch_milestones 1 2 --batch_args factor=4 --batch_args lr=sqrt --min_bs 8"
REPLACE = "increase --replace_decay --max_bs 256 --lr_schedule step --step_size 1 --gamma 0.5"


@each_of(
    ("words", "sizes", "rates"),
    [
        (GROW, [64, 128, 128], [0.1, 0.2, 0.2]),
        (SHRINK, [64, 16, 8], [0.1, 0.05, 0.1 / 8**0.5]),
        (REPLACE, [64, 128, 256], [0.1, 0.1, 0.1]),
    ],
)
def test_the_flags_choose_the_sizes_and_rates(words, sizes, rates, here):
    flags = "--dataset digits --arch resnet8 --subset 0.4 --bs 64 --lr 0.1 --epochs 3 --threads 1"
    flags = f"{flags} --warmup 0 --lr_schedule constant --dynamic_batch {words}"
    out = here / words.split()[-1]
    run("images", flags, "--out", out)
    rows = ranks.metrics(out)
    assert [row["batch_size"] for row in rows] == sizes
    assert [row["lr"] for row in rows] == pytest.approx(rates)


def test_weights_are_the_same_on_every_rank_and_dropout_is_not(here):
    words = "--dataset digits --arch resnet8 --subset 0.05 --bs 32 --threads 1 --out".split()
    weights, drawn = [], []
    for rank in (0, 1):  # each waits for no other one
        opened = open_script(resnet50_test, [*words, f"run-{rank}"], World(rank=rank))
        weights.append(opened.trainer.model.fc.weight)
        drawn.append(torch.rand(3))
    assert torch.equal(*weights)
    assert not torch.equal(*drawn)
