"""Dynamic batches: allowed sizes, shares of workers, rules and the gradient noise scale."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dynamic_batch import (
    ByLoss,
    ByNoise,
    NoiseScale,
    Scheduled,
    WorkerBalancer,
    apportion,
    at_milestones,
    every_epoch,
    nearest_batch_size,
    noise_scale,
    replacing_decay,
)
from optimizers.schedules import Schedule

# -------------------------------------------------------------------- sizes


def test_the_nearest_allowed_size_is_taken_by_the_ratio() -> None:
    sizes = [
        nearest_batch_size(target, 128, low=32, high=1024)
        for target in (1, 32, 60, 100, 128, 150, 230, 300, 700, 1e9, math.inf)
    ]
    assert sizes == [32, 32, 64, 96, 128, 128, 256, 256, 768, 1024, 1024]


@pytest.mark.parametrize("base", [96, 128, 130])
def test_few_sizes_are_allowed_all_within_the_limits_and_multiples_of_the_unit(base: int) -> None:
    sizes = {
        nearest_batch_size(target, base, low=50, high=3000, unit=6) for target in range(1, 5000)
    }
    assert len(sizes) <= 13
    assert all(size % 6 == 0 and 50 <= size <= 3000 for size in sizes)


def test_without_an_allowed_size_the_nearer_limit_is_taken() -> None:
    assert [nearest_batch_size(target, 64, low=70, high=90) for target in (1, 75, 85, 1000)] == [
        70,
        70,
        90,
        90,
    ]


@pytest.mark.parametrize("unit", [1, 4])
def test_shares_sum_to_the_total_keep_the_limits_and_are_proportional(unit: int) -> None:
    dice = random.Random(unit)
    limited = 0
    for _ in range(1500):
        ranks, total = dice.randint(1, 9), dice.randint(40, 600)
        weights = [dice.choice([dice.uniform(0.01, 5), 1.0]) for _ in range(ranks)]
        minimum = dice.randint(0, total // ranks // 2)
        limits = [dice.randint(min(total // ranks + unit, total), total) for _ in range(ranks)]
        limits = limits if dice.random() < 0.5 else [total] * ranks
        try:
            shares = apportion(total, weights, minimum=minimum, limits=limits, unit=unit)
        except ValueError:
            assert unit > 1, "without units there is always a way"
            continue
        assert shares == apportion(total, weights, minimum=minimum, limits=limits, unit=unit)
        assert sum(shares) == total
        assert all(minimum <= share <= limit for share, limit in zip(shares, limits))
        assert sum(share % unit > 0 for share in shares) <= 1
        # One level exists at which every share that no limit stops is within a unit of its own.
        slack = [unit + total % unit] * ranks
        above = [(s + d) / w for s, d, w, m in zip(shares, slack, weights, limits) if s + d <= m]
        below = [(s - d) / w for s, d, w in zip(shares, slack, weights) if s - d >= minimum]
        assert max(below, default=0) <= min(above, default=math.inf) + 1e-9
        level = total / sum(weights)
        exact = [level * weight for weight in weights]
        if all(minimum + unit <= e <= m - 2 * unit for e, m in zip(exact, limits)):
            limited += 1
            assert all(abs(s - e) < d for s, e, d in zip(shares, exact, slack))
    assert limited > 100, "some shares that no limit stops"


def test_equal_remainders_go_to_the_first_shares() -> None:
    assert apportion(5, [1.0, 1.0]) == [3, 2]
    assert apportion(191, [3.0, 0.2, 1.0], minimum=25) == [125, 25, 41]
    assert apportion(10, [0.1] * 7) == [2, 2, 2, 1, 1, 1, 1]


def test_limits_settle_shares_and_the_others_split_what_is_left() -> None:
    assert apportion(100, [8.0, 1.0, 1.0], limits=[50, 100, 100]) == [50, 25, 25]
    assert apportion(100, [98.0, 1.0, 1.0], minimum=10) == [80, 10, 10]
    # The upper limit of the first leaves enough for the last to rise above the lower limit.
    assert apportion(100, [90.0, 6.0, 4.0], minimum=20, limits=[40, 100, 100]) == [40, 36, 24]


def test_a_rest_without_space_is_refused() -> None:
    assert apportion(9, [1.0, 1.0], limits=[4, 9], unit=4) == [4, 5]
    with pytest.raises(ValueError, match="cannot be shared out"):
        apportion(10, [1.0, 1.0], limits=[5, 5], unit=4)


def test_shares_are_multiples_of_the_unit_but_for_the_rest() -> None:
    shares = apportion(131, [2.0, 1.0, 1.0], unit=8)
    assert sum(shares) == 131
    assert sorted(share % 8 for share in shares) == [0, 0, 3]
    assert apportion(128, [1.0, 0.5], unit=8) == [88, 40]
    assert apportion(10, [1.0] * 4) == [3, 3, 2, 2]


@pytest.mark.parametrize(("minimum", "limits"), [(6, None), (0, [4, 5])])
def test_limits_that_leave_no_way_are_refused(minimum: int, limits: list[int] | None) -> None:
    with pytest.raises(ValueError, match="cannot be shared out"):
        apportion(10, [1.0, 2.0], minimum=minimum, limits=limits)


# -------------------------------------------------------------------- over time


def walk(rule, losses, size: int = 100, seconds=None, noise=None) -> list[float]:
    """Feed a rule with the losses (times, noise scales) of epochs; return the sizes it asks for."""
    sizes = []
    for epoch, loss in enumerate(losses):
        size = rule.next_batch_size(epoch, size)
        sizes.append(size)
        rule.observe(
            size,
            loss,
            seconds=seconds[epoch] if seconds else 1.0,
            noise=noise[epoch] if noise else None,
        )
    return [*sizes, rule.next_batch_size(len(losses), size)]


def test_schedules_are_functions_of_the_epoch() -> None:
    assert walk(Scheduled(100, at_milestones(2.0, [3, 1])), [1.0] * 4) == [100, 200, 200, 400, 400]
    assert walk(Scheduled(100, at_milestones(0.5, [2])), [1.0] * 2) == [100, 100, 50]
    assert walk(Scheduled(100, every_epoch(1.5)), [1.0] * 2) == [100, 150, 225]


def test_a_batch_instead_of_a_decay_keeps_the_ratio_of_rate_and_batch() -> None:
    schedule = Schedule("step", epochs=9, warmup=2, gamma=0.2, step_size=3)
    multiple = replacing_decay(schedule)
    assert [multiple(epoch) for epoch in range(9)] == pytest.approx([1, 1, 1, 5, 5, 5, 25, 25, 25])
    assert replacing_decay(Schedule("polynomial", epochs=4))(4) == math.inf
    assert [replacing_decay(lambda t: [2.0, 4.0, 1.0][int(t)])(epoch) for epoch in range(3)] == [
        1,
        1,
        4,
    ]
    for epoch in range(9):  # rate = schedule x multiple: constant after the warm-up
        assert schedule(epoch) * multiple(epoch) == pytest.approx(min(1.0, epoch / 2))
    rises_within_the_first_epoch = replacing_decay(lambda t: min(2 * t, 1.0) if t < 1 else 0.5)
    assert rises_within_the_first_epoch(1) == 2


def test_progress_grows_the_batch_on_a_plateau_and_shrinks_it_before() -> None:
    # P = 1000 (sum / (k min) - 1): of 1.0 .9 .8 it is 125, of .5 .5 .499 it is 1.3
    assert walk(
        ByLoss("progress", 2.0, threshold=10.0, window=3), [1.0, 0.9, 0.8, 0.5, 0.5, 0.499]
    )[2:] == [
        100,
        50,
        25,
        12.5,
        25,
    ]
    loss = [1.02, 1.01, 1.0]
    progress = 1000 * (sum(loss) / (3 * min(loss)) - 1)
    for threshold, expected in ((progress + 1e-6, 200), (progress - 1e-6, 50)):
        assert walk(ByLoss("progress", 2.0, threshold=threshold, window=3), loss)[-1] == expected


def test_score_weighs_loss_and_time_against_the_epoch_before() -> None:
    rule = ByLoss("score", 2.0, threshold=10.0)
    # Q = 1000 (1 - .8 L/L' - .2 T/T'): of L/L' = .9 in equal time it is 80, of 1.02 in .9 of the
    # time 4, of .98 in 1.2 of the time -24
    assert walk(rule, [1.0, 0.9, 0.918, 0.89964], seconds=[1.0, 1.0, 0.9, 1.08]) == [
        100,
        100,
        200,
        200,
        100,
    ]


def test_the_noise_scale_is_followed_no_faster_than_by_the_factor() -> None:
    assert walk(ByNoise(2.0), [1.0] * 4, noise=[1000.0, 300.0, 10.0, None]) == [
        100,
        200,
        300,
        150,
        150,
    ]


@pytest.mark.parametrize(
    "make", [lambda: ByLoss("progress", window=3), lambda: ByLoss("score"), lambda: ByNoise()]
)
def test_a_rule_resumes_from_its_state(make) -> None:
    losses, seconds, noise = (
        [1.0, 0.7, 0.69, 0.4, 0.39, 0.388],
        [1, 3, 1, 1, 2, 1],
        [50.0, 70.0, 400.0, 300.0, 80.0, 90.0],
    )
    uninterrupted = make()
    expected = walk(uninterrupted, losses, seconds=seconds, noise=noise)
    first, second = make(), make()
    walk(first, losses[:3], seconds=seconds, noise=noise)
    second.load_state_dict(first.state_dict())
    size = second.next_batch_size(3, expected[2])
    assert size == expected[3]
    second.observe(size, losses[3], seconds=seconds[3], noise=noise[3])
    assert second.next_batch_size(4, size) == expected[4]


# -------------------------------------------------------------------- the noise scale


@pytest.mark.parametrize(("small", "big"), [(1, 8), (16, 64), (32, 64)])
def test_noise_scale_of_a_quadratic_with_known_covariance(small: int, big: int) -> None:
    """Per-sample gradients H (x - x_i) have a known mean and the covariance H C H."""
    generator = torch.Generator().manual_seed(small)
    size = 40
    hessian, spread = torch.linspace(0.1, 2, size).double(), torch.linspace(1, 3, size).double()
    gradient = 0.5 * torch.randn(size, generator=generator, dtype=torch.float64)
    trace = (hessian * spread).square().sum()
    truth = (trace / gradient.square().sum()).item()
    estimate, epochs = NoiseScale(), 12
    scale = None
    for _ in range(epochs):
        sums = torch.zeros(2, dtype=torch.float64)
        steps = 400
        for _ in range(steps):
            noise = (
                hessian * spread * torch.randn(big, size, generator=generator, dtype=torch.float64)
            )
            each = gradient + noise
            sums += torch.stack([each[:small].mean(0).square().sum(), each.mean(0).square().sum()])
        small_square, big_square = (sums / steps).tolist()
        scale = estimate.observe(
            small_square, big_square, inverse_small=1 / small, inverse_big=1 / big
        )
    assert scale == pytest.approx(truth, rel=0.1)


INVERSES = {"inverse_small": 1 / 8, "inverse_big": 1 / 64}


def test_noise_scale_is_exact_for_the_expected_norms() -> None:
    square, trace = 3.0, 50.0
    norms = [square + trace / 8, square + trace / 64]
    assert noise_scale(*norms, **INVERSES) == pytest.approx((trace, square))
    assert NoiseScale().observe(*norms, **INVERSES) == pytest.approx(trace / square)
    # the true gradient cannot be told from zero
    assert NoiseScale().observe(5.0, 0.1, **INVERSES) is None


def test_noise_scale_is_smoothed_and_resumes_from_its_state() -> None:
    first, second = NoiseScale(), NoiseScale()
    first.observe(3 + 50 / 8, 3 + 50 / 64, **INVERSES)
    second.load_state_dict(first.state_dict())
    values = [each.observe(1 + 90 / 8, 1 + 90 / 64, **INVERSES) for each in (first, second)]
    assert values[0] == values[1] == pytest.approx((0.25 * 50 + 0.5 * 90) / (0.25 * 3 + 0.5 * 1))


# -------------------------------------------------------------------- over workers


def balanced_shares(
    speeds: list[float], total: int, epochs: int, overhead: float = 0.0
) -> list[int]:
    """Shares after some epochs on ranks of these speeds (samples/s), with an overhead a step."""
    balancer = WorkerBalancer()
    shares = balancer.shares(total, [total // len(speeds)] * len(speeds), minimum=2)
    for _ in range(epochs):
        balancer.observe(shares, [overhead + share / speed for share, speed in zip(shares, speeds)])
        shares = balancer.shares(total, shares, minimum=2)
    return shares


@pytest.mark.parametrize("total", [32, 64, 128, 1000])
def test_shares_become_proportional_to_the_speeds(total: int) -> None:
    shares = balanced_shares([100.0, 50.0], total, epochs=1)
    slowest = max(shares[0] / 100, shares[1] / 50)
    static, best = total / 2 / 50, total / 150
    assert (static - slowest) / (static - best) >= 0.85
    assert sum(shares) == total


def test_shares_allow_for_the_fixed_part_of_a_step() -> None:
    first, later = (balanced_shares([100.0, 50.0], 256, epochs, overhead=0.5) for epochs in (1, 3))
    times = [
        [0.5 + share / speed for share, speed in zip(shares, (100, 50))]
        for shares in (first, later)
    ]
    assert max(times[1]) <= max(times[0])
    assert max(times[1]) / min(times[1]) < 1.06


def test_shares_are_kept_where_the_gain_is_small() -> None:
    assert balanced_shares([100.0, 96.0], 1000, epochs=3) == [500, 500]
    assert balanced_shares([100.0, 90.0], 1000, epochs=3) == [528, 472]
    balancer = WorkerBalancer()
    balancer.observe([64.0, 64.0], [1.0, 0.0])  # not measured
    assert balancer.shares(128, [64, 64], minimum=2) == [64, 64]
    balancer.observe([64.0, 64.0], [1.0, 2.0])
    # another number of ranks: equal shares until their speeds are measured
    assert balancer.shares(128, [64, 64, 0], minimum=0) == [43, 43, 42]


def test_a_rank_takes_no_more_than_its_limit() -> None:
    balancer = WorkerBalancer()
    balancer.observe([64.0, 64.0], [1.0, 4.0])
    assert balancer.shares(128, [64, 64], minimum=2) == [102, 26]
    assert balancer.shares(128, [64, 64], minimum=2, limits=[80, 128]) == [80, 48]
    assert balancer.shares(4, [2, 2], minimum=2) == [2, 2]
