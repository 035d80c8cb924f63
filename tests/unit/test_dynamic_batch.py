"""Dynamic batches: allowed sizes, shares of workers, rules and the gradient noise scale."""

import math
import random

import pytest

from conftest import each_of
from dynamic_batch import (
    ByLoss,
    ByNoise,
    NoiseScale,
    Rule,
    Scheduled,
    WorkerBalancer,
    apportion,
    at_milestones,
    nearest_batch_size,
    replacing_decay,
    schedule_growth,
)
from optimizers.schedules import Schedule


def test_the_nearest_allowed_size_is_taken_by_the_ratio():
    sizes = [
        nearest_batch_size(target, 128, low=32, high=1024)
        for target in (1, 32, 60, 100, 128, 150, 230, 300, 700, 1e9, math.inf)
    ]
    assert sizes == [32, 32, 64, 96, 128, 128, 256, 256, 768, 1024, 1024]
    for high in (256, 4096):  # the first batch is a limit, and no multiple of three ranks
        assert nearest_batch_size(256, 256, low=256, high=high, unit=3) == 255


@each_of("base", [96, 128, 130])
def test_few_sizes_are_allowed_all_within_the_limits_and_multiples_of_the_unit(base):
    targets = range(1, 5000)
    sizes = {nearest_batch_size(each, base, low=50, high=3000, unit=6) for each in targets}
    assert len(sizes) <= 13
    assert all(size % 6 == 0 and 50 <= size <= 3000 for size in sizes)


def test_shares_sum_to_the_total_keep_the_minimum_and_are_proportional():
    dice = random.Random(1)
    for _ in range(1500):
        ranks, total = dice.randint(1, 9), dice.randint(40, 600)
        weights = [dice.choice([dice.uniform(0.01, 5), 1.0]) for _ in range(ranks)]
        minimum = dice.randint(0, total // ranks // 2)
        shares = apportion(total, weights, minimum=minimum)
        assert sum(shares) == total
        assert min(shares) >= minimum
        # One level exists at which every share above the minimum is within one of its own.
        above = [(share + 1) / weight for share, weight in zip(shares, weights)]
        below = [(s - 1) / w for s, w in zip(shares, weights) if s > minimum]
        assert max(below, default=0) <= min(above) + 1e-9


def test_remainders_go_to_the_first_shares_and_a_minimum_must_fit():
    assert apportion(5, [1.0, 1.0]) == [3, 2]
    with pytest.raises(ValueError, match="cannot be shared out"):
        apportion(10, [1.0, 1.0], minimum=6)


def walk(rule: Rule, losses: list[float], seconds=None, noise=None) -> list[float]:
    """Feed a rule with the losses (times, noise scales) of epochs; return the sizes it asks for."""
    size, sizes = 100, []
    for epoch, loss in enumerate(losses):
        size = rule.next_batch_size(epoch, size)
        sizes.append(size)
        time = seconds[epoch] if seconds else 1.0
        rule.observe(size, loss, seconds=time, noise=noise[epoch] if noise else None)
    return [*sizes, rule.next_batch_size(len(losses), size)]


def test_schedules_are_functions_of_the_epoch():
    assert walk(Scheduled(100, at_milestones(2.0, [3, 1])), [1.0] * 4) == [100, 200, 200, 400, 400]
    growth = schedule_growth(None, epochs=7, lr_schedule=float, grows=True)
    assert [growth(epoch) for epoch in range(7)] == [1, 1, 1, 1, 2, 2, 4]


def test_a_batch_instead_of_a_decay_keeps_the_ratio_of_rate_and_batch():
    schedule = Schedule("step", epochs=9, warmup=2, gamma=0.2, step_size=3)
    multiple = replacing_decay(schedule)
    assert [multiple(epoch) for epoch in range(9)] == pytest.approx([1, 1, 1, 5, 5, 5, 25, 25, 25])
    assert replacing_decay(Schedule("polynomial", epochs=4))(4) == math.inf
    falls_and_rises = replacing_decay(lambda t: [2.0, 4.0, 1.0][int(t)])
    assert [falls_and_rises(epoch) for epoch in range(3)] == [1, 1, 4]
    for epoch in range(9):  # rate = schedule x multiple: constant after the warm-up
        assert schedule(epoch) * multiple(epoch) == pytest.approx(min(1.0, epoch / 2))


def test_progress_grows_the_batch_on_a_plateau_and_shrinks_it_before():
    # P = 1000 (sum / (k min) - 1): of 1.0 .9 .8 it is 125, of .5 .5 .499 it is 1.3
    rule = ByLoss("progress", 2.0, threshold=10.0, window=3)
    sizes = walk(rule, [1.0, 0.9, 0.8, 0.5, 0.5, 0.499])
    assert sizes[2:] == [100, 50, 25, 12.5, 25]
    rule = ByLoss("progress", 2.0, threshold=10.0, window=2)
    assert walk(rule, [1.0, math.nan, 1.0])[-1] == 200  # a plateau of the two losses there are
    loss = [1.02, 1.01, 1.0]
    progress = 1000 * (sum(loss) / (3 * min(loss)) - 1)
    for threshold, expected in ((progress + 1e-6, 200), (progress - 1e-6, 50)):
        rule = ByLoss("progress", 2.0, threshold=threshold, window=3)
        assert walk(rule, loss)[-1] == expected


def test_score_weighs_loss_and_time_against_the_epoch_before():
    rule = ByLoss("score", 2.0, threshold=10.0)
    # Q = 1000 (1 - .8 L/L' - .2 T/T'): of L/L' = .9 in equal time it is 80, of 1.02 in .9 of the
    # time 4, of .98 in 1.2 of the time -24
    sizes = walk(rule, [1.0, 0.9, 0.918, 0.89964], seconds=[1.0, 1.0, 0.9, 1.08])
    assert sizes == [100, 100, 200, 200, 100]


def test_the_noise_scale_is_followed_no_faster_than_by_the_factor():
    sizes = walk(ByNoise(2.0), [1.0] * 4, noise=[math.inf, 300.0, 10.0, None])
    assert sizes == [100, 200, 300, 150, 150]


INVERSES = {"inverse_small": 1 / 8, "inverse_big": 1 / 64}


def test_noise_scale_is_exact_for_the_expected_norms_and_smoothed():
    def norms(square: float, trace: float) -> list[float]:
        return [square + trace / 8, square + trace / 64]

    first, second = NoiseScale(), NoiseScale()
    assert first.observe(*norms(3.0, 50.0), **INVERSES) == pytest.approx(50 / 3)
    second.load_state_dict(first.state_dict())
    assert second.observe(math.inf, math.inf, **INVERSES) is None, "it leaves no trace"
    values = [each.observe(*norms(1.0, 90.0), **INVERSES) for each in (first, second)]
    assert values[0] == values[1] == pytest.approx((0.25 * 50 + 0.5 * 90) / (0.25 * 3 + 0.5 * 1))
    # the true gradient cannot be told from zero
    assert NoiseScale().observe(5.0, 0.1, **INVERSES) == math.inf
    assert NoiseScale().observe(0.0, 0.0, **INVERSES) is None


def balanced_shares(speed: float, total: int, epochs: int, overhead: float = 0.0) -> list[int]:
    """Shares after some epochs on ranks of 100 and `speed` samples/s, with an overhead a step."""
    balancer, shares = WorkerBalancer(), [total // 2, total // 2]
    for _ in range(epochs):
        balancer.observe(shares, step_seconds(shares, speed, overhead))
        shares = balancer.shares(total, shares, minimum=2)
    return shares


def step_seconds(shares: list[int], speed: float, overhead: float) -> list[float]:
    return [overhead + shares[0] / 100, overhead + shares[1] / speed]


def test_shares_allow_for_the_fixed_part_of_a_step():
    first, later = (
        step_seconds(balanced_shares(50.0, 256, epochs, overhead=0.5), 50.0, 0.5)
        for epochs in (1, 3)
    )
    assert max(later) <= max(first)
    assert max(later) / min(later) < 1.06


def test_shares_are_kept_where_the_gain_is_small():
    assert balanced_shares(96.0, 1000, epochs=3) == [500, 500]
    assert balanced_shares(90.0, 1000, epochs=3) == [526, 474]
    balancer = WorkerBalancer()
    balancer.observe([64.0, 64.0], [1.0, 0.0])  # not measured
    assert balancer.shares(128, [64, 64], minimum=2) == [64, 64]
    balancer.observe([64.0, 64.0], [1.0, 2.0])
    # another number of ranks: equal shares until their speeds are measured
    assert balancer.shares(128, [64, 64, 0], minimum=0) == [43, 43, 42]


def test_a_rank_takes_no_less_than_the_minimum():
    balancer = WorkerBalancer()
    balancer.observe([64.0, 64.0], [1.0, 4.0])
    assert balancer.shares(128, [64, 64], minimum=2) == [102, 26]
    assert balancer.shares(4, [2, 2], minimum=2) == [2, 2]
