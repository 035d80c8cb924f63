"""Batches and steps: every sample once and with equal weight; the noise scale; resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ranks
import resnet50_test
from backends.precision import Precision
from benchmarks.trainers import open_script
from cli import factory, options
from conftest import each_of
from distributed.world import World
from dynamic_batch import ByLoss, ByNoise, Scheduled, WorkerBalancer, at_milestones, every_epoch
from input_pipeline.sampler import Sampler, rank_share, row_owners
from trainers import NoData, build_optimizer, make_trainer
from training.batch_sampler import DynamicBatchSampler
from training.micro_batches import MicroBatches
from training.progress import Progress
from training.step_stats import squared_norm
from training.trainer import Trainer

FP32 = Precision("fp32", "cpu")


class Alike(World):
    """A rank of several whose host-side sums are made here, from what each would give."""

    def all_gather(self, values: list[float]) -> list[list[float]]:
        return self.given if hasattr(self, "given") else [values] * self.size


def make(
    rank: int, size: int, rows: int = 1003, base: int = 60, lengths: Tensor | None = None, **options
) -> DynamicBatchSampler:
    world = Alike(rank, size)
    return DynamicBatchSampler(rows, base, seed=3, lengths=lengths, world=world, **options)


# -------------------------------------------------------------------- rows


def test_owners_are_as_many_as_their_shares_and_spread_evenly() -> None:
    ranks_ = row_owners([40, 20, 4])
    assert ranks_.bincount().tolist() == [40, 20, 4]
    for start in range(0, 64, 16):
        assert ranks_[start : start + 16].bincount(minlength=3).tolist() == [10, 5, 1]
    for size in (1, 2, 5):
        assert torch.equal(row_owners([6] * size), torch.arange(6 * size) % size)


@each_of("lengths", [None, torch.arange(1003) % 97 + 1], ids=["plain", "lengths"])
@each_of("shares", [[60], [30, 30], [43, 17], [20, 30, 2, 8]])
@each_of("rows", [1003, 960, 961])
@each_of("balanced", [False, True])
def test_every_row_comes_once_over_all_ranks_whatever_the_shares(
    shares, lengths, rows, balanced
) -> None:
    seen, steps, weights = [], set(), 0.0
    for rank in range(len(shares)):
        batching = make(
            rank,
            len(shares),
            rows,
            lengths=lengths[:rows] if lengths is not None else None,
            balancer=WorkerBalancer() if balanced else None,
        )
        batching.start_epoch(4)
        batching.shares = shares
        plan = batching.plan(4, 0)
        steps.add(len(plan))
        assert len(plan) == batching.steps()
        assert sum(part.samples for part in plan) == rows
        assert min(part.samples for part in plan) >= 30
        assert all(
            len(part.rows) == round(part.weight * part.samples / len(shares)) >= 1 for part in plan
        )
        seen += [part.rows for part in plan]
        weights += plan[-1].weight
        assert [part.rows.tolist() for part in batching.plan(4, 5)] == [
            part.rows.tolist() for part in plan[5:]
        ]
    assert len(steps) == 1
    assert weights == pytest.approx(len(shares))
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(rows))


def test_full_batches_of_equal_shares_are_cut_alike_for_every_number_of_ranks() -> None:
    whole = Sampler(1003, 3).epoch(1, [60] * 16)
    for rank in range(2):
        batching = make(rank, 2)
        batching.start_epoch(1)
        plan = batching.plan(1, 0)
        assert batching.steps() == len(plan) == 17
        assert [part.samples for part in plan] == [60] * 16 + [43]
        assert {part.weight for part in plan[:-1]} == {1.0}
        assert all(
            torch.equal(part.rows, rank_share(batch, rank, world_size=2))
            for part, batch in zip(plan, whole)
        )
        assert plan[-1].weight == pytest.approx((44, 42)[rank] / 43)


def test_the_batch_follows_its_rule_and_the_rate_the_batch() -> None:
    rule = Scheduled(60, at_milestones(2.0, [1, 2, 3]))
    batching = make(0, 1, rule=rule, low=60, high=250, lr_power=0.5)
    sizes, factors = [], []
    for epoch in range(4):
        batching.start_epoch(epoch)
        sizes.append(batching.size)
        factors.append(batching.lr_factor)
        batching.end_epoch(1.0, 1.0)
    assert sizes == [60, 120, 240, 240]
    assert factors == pytest.approx([1, 2**0.5, 2, 2])


def test_the_slowest_rank_s_time_counts() -> None:
    batching = make(0, 2, rule=ByLoss("score"), low=60, high=960)
    batching.world.given = [[1.0, 1.0], [3.0, 1.0]]
    batching.end_epoch(1.0, 1.0)
    assert batching.rule.seconds == [3.0]


def test_micro_batches_of_a_small_batch_keep_two_rows_where_memory_allows() -> None:
    micro_batches = MicroBatches(accumulation_steps=4)
    assert [micro_batches.number(rows) for rows in (1, 2, 3, 4, 6, 8, 9)] == [1, 1, 1, 2, 3, 4, 4]
    sizes = [len(labels) for _, labels in micro_batches.split(torch.zeros(9, 3), torch.zeros(9))]
    assert sizes == [3, 2, 2, 2]
    assert MicroBatches(4, limit=1).number(3) == 3  # the memory's limit comes first
    assert MicroBatches(1, limit=3).number_on_all_ranks(7, 2) == 2  # shares of 4 and 3


# -------------------------------------------------------------------- equal weight a sample


def image_model(norm: bool = False) -> nn.Module:
    torch.manual_seed(5)
    first = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16)) if norm else nn.Linear(12, 16)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(16, 4)).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 12, generator=generator, dtype=torch.float64), torch.randint(
        4, (rows,), generator=generator
    )


def trainer_of(model: nn.Module, world: World, **options) -> Trainer:
    return make_trainer(model, build_optimizer(model, "sgd", 0.1), world, **options)


def noise_sums(trainer: Trainer) -> list[float]:
    sums = trainer.sums
    squares = sums.small_square, sums.inverse_small, sums.big_square, sums.inverse_big
    return [each.item() for each in squares]


def unequal_shares_have_the_gradient_of_the_whole_batch(world: World) -> None:
    inputs, labels = batch(41)
    alone = image_model()
    F.cross_entropy(alone(inputs), labels).backward()
    for shares in ([30, 11], [2, 39]) if world.size == 2 else ([20, 16, 5],):
        for micro_batch in (None, 7):
            model = image_model()
            trainer = trainer_of(model, world, micro_batch_size=micro_batch)
            trainer.wrap_model()
            mine = row_owners(shares) == world.rank
            trainer.forward_backward(
                trainer.parallel_model,
                inputs[mine],
                labels[mine],
                shares[world.rank] * world.size / 41,
            )
            for expected, given in zip(alone.parameters(), model.parameters()):
                torch.testing.assert_close(given.grad, expected.grad, rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------- the noise scale


def gradient_square(rows: Tensor) -> float:
    inputs, labels = batch(40)
    model = image_model()
    F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
    return squared_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize(("accumulate", "first"), [(1, 20), (4, 10)])
def test_noise_is_measured_between_a_micro_batch_and_the_batch(accumulate: int, first: int) -> None:
    trainer = trainer_of(
        image_model(), World(), accumulation_steps=accumulate, measure_noise_scale=True
    )  # one process takes two micro-batches for it
    trainer.train_step(*batch(40))
    expected = [
        gradient_square(torch.arange(first)),
        1 / first,
        gradient_square(torch.arange(40)),
        1 / 40,
    ]
    assert noise_sums(trainer) == pytest.approx(expected, rel=1e-5)


def noise_is_measured_between_a_rank_and_all(world: World) -> None:
    inputs, labels = batch(40)
    shares = [28, 12]
    trainer = trainer_of(image_model(), world, micro_batch_size=6, measure_noise_scale=True)
    trainer.wrap_model()
    for micro_batch in (
        6,
        None,
    ):  # what is left over from steps with micro-batches does not count in those without
        trainer.micro_batches.limit = micro_batch
        mine = (row_owners(shares) == world.rank).nonzero().flatten()
        for _ in range(2):  # what the first left behind does not count
            trainer.model.load_state_dict(image_model().state_dict())
            trainer.sums.values.zero_()
            trainer.train_step(inputs[mine], labels[mine], shares[world.rank] * 2 / 40)
        rows = (
            mine if micro_batch is None else mine[: -(-len(mine) // -(-len(mine) // micro_batch))]
        )
        expected = [gradient_square(rows), 1 / len(rows), gradient_square(torch.arange(40)), 1 / 40]
        assert noise_sums(trainer) == pytest.approx(expected, rel=1e-5)


def test_a_loss_scale_leaves_the_noise_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Precision("fp16", "cpu", torch.float16)
    found = []
    for precision in (FP32, scaled):
        model = image_model().float()
        trainer = trainer_of(model, World(), precision=precision, measure_noise_scale=True)
        inputs, labels = batch(40)
        trainer.train_step(inputs.float(), labels)
        small, _, big, _ = noise_sums(trainer)
        found.append(torch.tensor([small, big]))
    assert trainer.scaler.get_scale() > 1
    torch.testing.assert_close(*found, rtol=2e-2, atol=0)


# -------------------------------------------------------------------- compute time


def a_slow_rank_is_seen_to_be_slow(world: World) -> None:
    """Rank 1 takes longer over its batch; rank 0, which waits for it, is not taken for slow."""
    import time

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.06 if world.rank else 0.01)
            return x

    model = nn.Sequential(Slow(), image_model())
    trainer = trainer_of(model, world, time_compute=True)
    trainer.wrap_model()
    trainer.train_step(*batch(8))
    trainer.compute_timer.take_seconds()
    trainer.compute_timer.start()
    started = time.perf_counter()
    for _ in range(5):
        trainer.train_step(*batch(8))
    taken, computed = time.perf_counter() - started, trainer.compute_timer.take_seconds()
    assert taken >= 0.3
    assert (computed >= 0.29) if world.rank else (0.05 <= computed < 0.2)


BODIES = [
    unequal_shares_have_the_gradient_of_the_whole_batch,
    noise_is_measured_between_a_rank_and_all,
    a_slow_rank_is_seen_to_be_slow,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_two_ranks(body) -> None:
    ranks.run_ranks(body, 2)


@pytest.mark.process
def test_three_ranks() -> None:
    ranks.run_ranks(unequal_shares_have_the_gradient_of_the_whole_batch, 3)


# -------------------------------------------------------------------- in a loop of one's own


def loader_of(sampler: DynamicBatchSampler, rows: int, workers: int = 0) -> DataLoader:
    data = TensorDataset(torch.arange(rows))
    return DataLoader(data, batch_sampler=sampler, num_workers=workers)


def test_a_data_loader_takes_every_row_once_and_batches_grow_between_epochs() -> None:
    sampler = DynamicBatchSampler(1000, 64, rule=Scheduled(64, at_milestones(2.0, [1, 2])))
    for epoch, (size, steps) in enumerate(((64, 16), (128, 8), (256, 4))):
        loader = loader_of(sampler, 1000, workers=epoch % 2)
        batches = [rows for (rows,) in loader]
        assert len(batches) == len(loader) == steps
        assert len(batches[0]) == sampler.size == size
        assert torch.equal(torch.cat(batches).sort().values, torch.arange(1000))
        assert all(sampler.loss_weight(step) == 1 for step in range(steps))
        sampler.end_epoch(1.0, 1.0)


def test_the_mean_of_weighted_losses_is_that_of_the_whole_batch() -> None:
    losses = torch.rand(1003)
    plans = []
    for rank in range(2):
        sampler = make(rank, 2, balancer=WorkerBalancer())
        sampler.balancer.observe([50, 50], [1.0, 4.0])
        plans.append((sampler, list(sampler)))
    for step, rows in enumerate(zip(*(batches for _, batches in plans))):
        weighted = [
            sampler.loss_weight(step) * losses[own].mean() for (sampler, _), own in zip(plans, rows)
        ]
        assert len(rows[0]) > 2 * len(rows[1])
        whole = losses[rows[0] + rows[1]].mean()
        torch.testing.assert_close(sum(weighted) / 2, whole)


def test_a_loop_goes_on_in_the_middle_of_an_epoch() -> None:
    def new() -> DynamicBatchSampler:
        return DynamicBatchSampler(1000, 64, rule=ByLoss(window=2), seed=5)

    whole, cut = new(), new()
    for sampler in (whole, cut):
        for loss in (2.0, 1.0):
            list(sampler)
            sampler.end_epoch(loss, 1.0)
    batches = list(whole)
    resumed = new()
    resumed.load_state_dict(cut.state_dict(steps_done=3))
    assert len(resumed) == len(batches) - 3
    assert list(resumed) == batches[3:]
    for sampler in (whole, resumed):
        sampler.end_epoch(0.5, 1.0)
    assert whole.size == resumed.size != 64
    assert list(resumed) == list(whole)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=11 must be from 1 to the 10 rows"):
        DynamicBatchSampler(10, 11)
    with pytest.raises(ValueError, match="low=9 must be at least the number of ranks, 1, and at"):
        DynamicBatchSampler(10, 5, low=9, high=8)


def ranks_of_torch_share_the_rows(world: World) -> None:
    rule = ByLoss("score")
    sampler = DynamicBatchSampler(1001, 64, rule=rule, balancer=WorkerBalancer())
    mine = torch.zeros(1001, dtype=torch.long)
    for rows in sampler:
        mine[rows] += 1
    assert torch.equal(world.sum(mine), torch.ones_like(mine))
    sampler.end_epoch(1.0, 1.0 + world.rank, compute_seconds=1.0 + 2 * world.rank)
    assert rule.seconds == [2.0]
    assert sampler.shares[0] > 2 * sampler.shares[1]


def test_the_ranks_are_those_of_torch() -> None:
    ranks.run_ranks(ranks_of_torch_share_the_rows, 2)


# -------------------------------------------------------------------- going on


def test_a_run_goes_on_with_the_size_and_shares_it_had() -> None:
    def new(size: int = 2, base: int = 60) -> DynamicBatchSampler:
        balancer = WorkerBalancer()
        return make(0, size, base=base, rule=ByNoise(2.0), low=60, high=960, balancer=balancer)

    first = new()
    first.start_epoch(0)
    first.world.given = [[1.0, 1.0], [1.0, 3.0]]
    noise = {
        "small_square": 3 + 500 / 30,
        "inverse_small": 1 / 30,
        "big_square": 3 + 500 / 60,
        "inverse_big": 1 / 60,
    }
    epoch = {"loss": 1.0, "seconds": 1.0, "compute_seconds": 1.0, "noise": noise}
    row = first.end_epoch(**epoch)
    speed = (16 * 30 + 21) / 3  # of 1003 rows rank 0 takes 502 and rank 1 takes 501
    assert row["shares"] == [30, 30]
    assert row["noise_scale"] == pytest.approx(500 / 3)
    assert row["worker_samples_per_second"] == pytest.approx([502, speed])
    assert first.size == 120
    assert first.shares == [90, 30]
    second = new()
    second.load_state_dict(first.state_dict())
    for batching in (first, second):
        batching.start_epoch(1)
        batching.world.given = [[1.0, 1.0], [1.0, 1.0]]
    assert [part.rows.tolist() for part in first.plan(1, 3)] == [
        part.rows.tolist() for part in second.plan(1, 3)
    ]
    assert first.end_epoch(**epoch) == second.end_epoch(**epoch)
    assert (first.size, first.shares) == (second.size, second.shares)
    fewer = new(size=1, base=30)  # a rank has stopped: its batch goes, the rest grows as before
    fewer.load_state_dict(first.state_dict())
    assert (fewer.size, fewer.shares) == (first.size // 2, [first.size // 2])
    plain = make(0, 2)  # the rule is taken away, or another one
    plain.load_state_dict(first.state_dict())
    assert (plain.size, plain.shares) == (60, [30, 30])
    other = make(0, 2, rule=ByLoss(), low=60, high=960)
    other.load_state_dict(first.state_dict())
    assert (other.size, other.shares) == (first.size, [first.size // 2] * 2)
    more = new(size=3, base=90)
    more.load_state_dict(first.state_dict())
    assert more.shares == [more.size // 3] * 3


def test_the_limit_of_memory_holds_while_it_can() -> None:
    batching = make(0, 2, balancer=WorkerBalancer(), base=100)
    batching.world.given = [[60.0], [100.0]]
    batching.limit(60)
    assert (
        batching.memory_limits is None
    )  # an equal share fits anyway, and a larger one in two parts
    batching.world.given = [[40.0], [100.0]]
    batching.limit(40)
    batching.balancer.observe([50, 50], [1.0, 4.0])
    assert batching.share_out(100) == [40, 60]
    batching.world.given = [[40.0], [20.0]]
    batching.limit(40)
    assert batching.share_out(100) == [
        80,
        20,
    ]  # 60 at once are too few for 100: two micro-batches, limits of 80 and 40


@pytest.mark.parametrize("growth", [1.07, 1.4])
def test_a_compiled_model_is_not_compiled_anew_for_every_size(growth: float) -> None:
    torch._dynamo.reset()
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    model = image_model()
    trainer = trainer_of(model, World(), micro_batch_size=60)
    model.compile(backend=backend)
    batching = make(0, 1, rule=Scheduled(60, every_epoch(growth)), low=60, high=480)
    sizes = set()
    for epoch in range(30):
        batching.start_epoch(epoch)
        for part in batching.plan(epoch, 0)[:2]:
            trainer.train_step(*batch(len(part.rows)))
        sizes.add(batching.size)
        batching.end_epoch(1.0, 1.0)
    assert len(sizes) >= 5
    assert len(compiled) <= 3
    torch._dynamo.reset()


def batching_of(words: str, world: World, rows: int = 8000) -> DynamicBatchSampler:
    """What the flags build."""
    args, _ = options.parse(
        resnet50_test.parser(), resnet50_test.SCRIPT, ["--bs", "32", *words.split()]
    )
    data = factory.Data(Rows(rows), {}, {})
    return factory.create_batch_sampler(
        args, factory.Run("x", world, FP32), data, resnet50_test.BATCH_RULES
    )


class Rows(NoData):
    """A data set of so many rows, which nothing is read from."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows


@pytest.mark.parametrize(
    ("words", "low", "high", "power", "sizes"),
    [
        ("increase --epochs 8", 64, 1000, 0.0, [64, 64, 64, 64, 128, 128, 256, 256]),
        (
            "increase --epochs 4 --batch_growth 4 --max_bs 512 --dynamic_lr linear",
            64,
            512,
            1.0,
            [64, 256, 512, 512],
        ),
        (
            "decrease --epochs 4 --batch_milestones 1 2 --batch_factor 4 --min_bs 8 "
            "--dynamic_lr sqrt",
            8,
            64,
            0.5,
            [64, 16, 8, 8],
        ),
        (
            "increase --epochs 4 --replace_decay --lr_schedule step --step_size 1",
            64,
            1000,
            1.0,
            [64, 768, 768, 768],
        ),
    ],
)
def test_the_flags_build_the_schedule(
    words: str, low: int, high: int, power: float, sizes: list[int]
) -> None:
    batching = batching_of(f"--dynamic_batch {words}", Alike(0, 2))
    assert (batching.low, batching.high, batching.lr_power) == (low, high, power)
    found = []
    for epoch in range(len(sizes)):
        batching.start_epoch(epoch)
        found.append(batching.size)
    assert found == sizes


def test_the_flags_build_the_rules_and_the_balance() -> None:
    words = (
        "--dynamic_batch loss --loss_rule score --loss_window 7 --loss_threshold 3 --batch_factor 3"
    )
    rule = batching_of(words, World()).rule
    assert (rule.kind, rule.window, rule.threshold, rule.factor) == ("score", 7, 3.0, 3.0)
    assert isinstance(batching_of("--dynamic_batch noise", World()).rule, ByNoise)
    assert batching_of("--balance_workers", World()).balancer is None  # alone
    assert batching_of("--balance_workers", World(0, 2)).changes
    assert not batching_of("", World(0, 2)).changes


@pytest.mark.parametrize(
    ("words", "size", "micro_batch", "accumulate"),
    [
        ("", 2, None, 1),
        ("--accumulate 4", 2, None, 4),
        ("--dynamic_batch increase", 2, 32, 1),
        ("--dynamic_batch increase --accumulate 4", 2, 32, 1),
        ("--dynamic_batch increase --micro_bs 50", 2, 50, 1),
        ("--balance_workers", 2, 64, 1),
        ("--noise_scale", 1, None, 2),
    ],
)
def test_the_flags_say_how_many_samples_are_taken_at_once(
    words: str, size: int, micro_batch: int | None, accumulate: int
) -> None:
    args, _ = options.parse(
        resnet50_test.parser(), resnet50_test.SCRIPT, ["--bs", "32", *words.split()]
    )
    run, model = factory.Run("x", World(0, size), FP32), image_model()
    config = factory.create_trainer_config(
        args, run, batching_of(words, run.world), long_run_hint=""
    )
    trainer = make_trainer(model, build_optimizer(model, "sgd", 0.1), run.world, **vars(config))
    assert (trainer.micro_batches.limit, trainer.micro_batches.accumulation_steps) == (
        micro_batch,
        accumulate,
    )
    assert (trainer.compute_timer is not None) == ("balance" in words)
    assert (trainer.noise_meter is not None) == ("noise" in words)


def test_a_batch_beyond_the_noise_is_told_once() -> None:
    batching = make(0, 1)
    assert batching.advice(10**6) == ""
    batching.noise_scale = 100.0
    assert batching.advice(200) == ""
    assert "noise scale of 100" in batching.advice(201)
    assert batching.advice(10**6) == ""


def test_an_epoch_goes_on_at_the_same_place_in_batches_of_another_size() -> None:
    progress = Progress(step_in_epoch=30)
    progress.rescale_epoch(64, 128)
    assert progress.step_in_epoch == 15


def test_weights_are_the_same_on_every_rank_and_dropout_is_not(here) -> None:
    words = "--dataset digits --arch resnet8 --subset 0.05 --bs 32 --threads 1 --out".split()
    weights, drawn = [], []
    for rank in (0, 1):
        world = World(rank=rank)  # each waits for no other one
        opened = open_script(resnet50_test, [*words, f"run-{rank}"], world)
        weights.append(opened.trainer.model.fc.weight)
        drawn.append(torch.rand(3))
    assert torch.equal(*weights)
    assert not torch.equal(*drawn)


DIGITS = "--dataset digits --arch resnet8 --bs 32 --lr 0.05 --epochs 4 --threads 1 --warmup 1"
DIGITS = f"{DIGITS} --lr_schedule step --step_size 2".split()


@pytest.mark.process
def test_ranks_are_balanced_while_one_is_slow_and_go_on_as_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ranks.torchrun(
        "resnet50_test.py",
        *DIGITS,
        "--balance_workers",
        "--dynamic_batch",
        "increase",
        "--out",
        run,
    )
    ranks.finish(ranks.start(command, tmp_path, NGPU="2"), tmp_path)
    rows = ranks.metrics(run)
    assert [row["samples"] for row in rows] == [1437 * epoch for epoch in range(1, 5)]
    assert all(sum(row["shares"]) == row["batch_size"] for row in rows)
    ranks.finish(
        ranks.start(ranks.script("resnet50_test.py", "--resume", run, "--epochs", "5"), tmp_path),
        tmp_path,
    )
    rows = ranks.metrics(run)
    assert [row["world_size"] for row in rows] == [2, 2, 2, 2, 1]
    assert rows[-1]["batch_size"] < rows[-2]["batch_size"]
