"""Batch sizes that change: over time by a rule, and over workers by their speed.

    rule = Scheduled(128, at_milestones(2.0, [15, 23]))
    target = rule.next_batch_size(epoch, size)
    size = nearest_batch_size(target, 128, low=128, high=2048, unit=world_size)
    shares = apportion(size, speeds)      # integers that sum to size, in proportion to samples/s

Rules follow the epoch (`Scheduled`), the training loss (`ByLoss`) or the gradient noise scale
(`ByNoise`). Everything in this file is a pure function or a few plain numbers.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from typing import Any

LOSS_RULES = ("progress", "score")  # of ByLoss
LOSS_SHARE = 0.8  # weight of the loss in 'score'; the rest is the weight of the time
JUST_BEFORE = 1e-6  # epochs
SMOOTHING = 0.5  # weight of earlier epochs in the noise scale
SMALLEST_FACTOR = 1.25  # of a change: sizes are 1, 1.5, 2, 3 ... times the first
MIN_GAIN = 0.03  # share of a step that other shares of the workers must save


# -------------------------------------------------------------------- sizes and shares


def nearest_batch_size(target: float, base: int, *, low: int, high: int, unit: int = 1) -> int:
    """Return the allowed batch size nearest to a target, by their ratio.

    Allowed are base 2**i and 1.5 base 2**i, rounded to multiples of `unit`, within the limits. Few
    sizes occur in this way, however a rule fluctuates: each new one may have to be compiled.

    Args:
        target: samples; it may be infinite.
        base: samples of the first batch.
        low: smallest batch; or, where it is below that, the rounded base.
        high: largest batch. Where no allowed size lies between the limits, the nearer one is taken.
        unit: number of ranks, so that equal shares are integers.
    """
    if low <= base:
        low = min(low, max(round(base / unit), 1) * unit)
    lowest = math.floor(math.log2(low / base)) - 1
    exponents = range(lowest, math.ceil(math.log2(high / base)) + 1)
    grid = (base * 2.0**exponent * factor for exponent in exponents for factor in (1, 1.5))
    sizes = [max(round(size / unit), 1) * unit for size in grid]
    sizes = [size for size in sizes if low <= size <= high]
    if not sizes:
        sizes = [max(limit // unit, 1) * unit for limit in (low, high)]
    target = min(max(target, low), high)
    return min(sizes, key=lambda size: abs(math.log(size / target)))


def apportion(total: int, weights: Sequence[float], *, minimum: int = 0) -> list[int]:
    """Split a total into integers in proportion to weights, by largest remainders.

    Exact shares below the minimum become the minimum; the others split the rest. All are rounded
    down. The units that remain go one each to the largest remainders, of equal ones to the first.

    Args:
        total: a non-negative integer.
        weights: a positive number for each share.
        minimum: of all shares.

    Returns:
        As many integers as there are weights; their sum is `total`.

    Raises:
        ValueError: the total is too small for the minimum.
    """
    if minimum * len(weights) > total:
        raise ValueError(f"{total} cannot be shared out: at least {minimum} each")
    exact = _proportions(total, [Fraction(weight) for weight in weights], lowest=minimum)
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _proportions(total: int, weights: Sequence[Fraction], *, lowest: int) -> list[Fraction]:
    """Split a total exactly in proportion to weights, with at least `lowest` for each."""
    at_lowest: set[int] = set()
    while True:
        others = [i for i in range(len(weights)) if i not in at_lowest]
        left = Fraction(total - lowest * len(at_lowest))
        level = left / sum(weights[i] for i in others) if others else Fraction(0)
        below = {i for i in others if level * weights[i] < lowest}
        if not below:
            return [max(level * weight, Fraction(lowest)) for weight in weights]
        at_lowest |= below


# -------------------------------------------------------------------- over time


class Memory:
    """What remembers something from epoch to epoch, in attributes that a checkpoint keeps."""

    remembered: Sequence[str] = ()  # their names

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.remembered:
            setattr(self, name, state[name])


class Rule(Memory):
    """Decides the batch size of each epoch."""

    def next_batch_size(self, epoch: int, size: int) -> float:
        """Return the number of samples that the global batch of an epoch should have.

        It is called once an epoch, in order.

        Args:
            epoch: 0 is the first.
            size: samples of the global batch of the epoch before.
        """
        raise NotImplementedError

    def observe(self, size: int, loss: float, *, seconds: float, noise: float | None) -> None:
        """Take note of an epoch.

        Args:
            size: samples of its global batches.
            loss: mean training loss.
            seconds: time of the slowest rank.
            noise: gradient noise scale in samples, if it is known.
        """


@dataclass(eq=False)
class Scheduled(Rule):
    """The batch size is a function of the epoch: base x multiple(epoch)."""

    base: int  # samples of the first batch
    multiple: Callable[[int], float]  # maps an epoch to the factor; see the functions below

    def next_batch_size(self, epoch: int, size: int) -> float:
        return self.base * self.multiple(epoch)


def at_milestones(factor: float, epochs: Sequence[int]) -> Callable[[int], float]:
    """Return the multiple factor ** (number of milestones up to the epoch).

    Args:
        factor: of the batch at each milestone; below 1 the batch shrinks.
        epochs: the milestones, in any order.
    """
    milestones = sorted(epochs)
    return lambda epoch: factor ** bisect_right(milestones, epoch)


def schedule_growth(
    milestones: Sequence[int] | None,
    *,
    epochs: int,
    lr_schedule: Callable[[float], float],
    grows: bool,
    factor: float = 2.0,
    replace_decay: bool = False,
) -> Callable[[int], float]:
    """The multiple of increase and decrease.

    Args:
        milestones: epochs at which the batch changes; None is one half and three quarters of the
            run.
        epochs: length of the run.
        lr_schedule: maps the progress in epochs to the multiple of the learning rate.
        grows: whether the batch grows.
        factor: of a change at a milestone, above 1.
        replace_decay: the batch grows where `lr_schedule` would fall, in place of milestones.
    Raises:
        ValueError: the factor is not above 1, or two settings say when the batch changes.
    """
    if not factor > 1:
        raise ValueError("factor must be above 1")
    if milestones is not None and replace_decay:
        raise ValueError("milestones and replace_decay both say when the batch changes; choose one")
    if replace_decay:
        return replacing_decay(lr_schedule)
    default = [-(-epochs // 2), -(-3 * epochs // 4)]
    return at_milestones(factor if grows else 1 / factor, milestones or default)


def batch_limits(
    base: int, *, low: int | None, high: int | None, smallest: int, rows: int, shrinks: bool
) -> tuple[int, int]:
    """The smallest and the largest global batch of a run.

    Args:
        base: samples of the first batch.
        low, high: the limits that were asked for; None is a sixteenth of the base where the batch
            shrinks, and sixteen times the base, but at most an eighth of the rows, where it does
            not. The base is the other limit.
        smallest: samples that a batch needs.
        rows: of the training set.
    Raises:
        ValueError: the limits exclude each other.
    """
    if isinstance(low, float) or isinstance(high, float):
        raise ValueError("min and max must be whole numbers of samples")
    if low is None:
        low = max(base // 16, smallest) if shrinks else base
    if high is None:
        high = base if shrinks else min(16 * base, max(rows // 8, base))
    if not smallest <= low <= high <= rows:
        raise ValueError(
            f"batches from {low} to {high} samples; min must be at least {smallest} and at most "
            f"max, and that at most the {rows} training samples"
        )
    return low, high


def lr_power(lr: str = "none", *, replace_decay: bool = False) -> float:
    """The power of the batch with which the learning rate changes.

    Args:
        lr: 'none', 'linear' or 'sqrt'.
        replace_decay: as of `schedule_growth`: the batch takes over what the rate would do.
    Raises:
        ValueError: it is another word, or there is a second scaling.
    """
    powers = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
    if lr not in powers:
        raise ValueError(f"lr={lr} must be none, linear or sqrt")
    if replace_decay and lr != "none":
        raise ValueError("lr: replace_decay scales the rate itself; leave it out")
    return 1.0 if replace_decay else powers[lr]


def replacing_decay(schedule: Callable[[float], float]) -> Callable[[int], float]:
    """Return a multiple that grows as a learning rate would decay (Smith et al., arXiv:1711.00489).

    The multiple of epoch t is max_{s <= t} schedule(s) / schedule(t), and 1 while the schedule
    rises. The maximum is over the beginnings and the ends of the epochs, so that a warm-up within
    the first epoch counts. If the learning rate is multiplied by schedule x multiple, rate / batch
    decays as it would under the schedule alone.

    Args:
        schedule: maps the progress in epochs to the multiple of the learning rate.
    """

    def multiple(epoch: int) -> float:
        ends = [earlier - JUST_BEFORE for earlier in range(1, epoch + 1)]
        largest = max(schedule(earlier) for earlier in [*range(epoch + 1), *ends])
        now = schedule(epoch)
        if now >= largest:
            return 1.0
        return largest / now if now > 0 else math.inf

    return multiple


@dataclass(eq=False)
class ByLoss(Rule):
    """The batch size follows the training loss of the last epochs, or loss and time.

    'progress' is the training progress of Prechelt (Early Stopping - But When?, 1998). With the
    losses L_1 .. L_k of the last k epochs

        P = 1000 (sum_i L_i / (k min_i L_i) - 1)

    the batch is multiplied by `factor` if P < threshold, on a plateau, and divided by it otherwise.

    'score' compares loss L and time T of the last epoch with L' and T' of the epoch before:

        Q = 1000 (1 - 0.8 L / L' - 0.2 T / T')

    The batch is multiplied by `factor` if Q > threshold, divided by it if Q < -threshold, and kept
    otherwise. Since Q depends on the clock, two runs are never alike.

    Both are made of ratios, so that neither the unit of time nor the scale of the loss counts.
    Until there are enough epochs the batch is kept.

    """

    remembered = ("losses", "seconds")

    kind: str = "progress"  # one of `LOSS_RULES`
    factor: float = 2.0  # by which the batch changes
    _: KW_ONLY
    threshold: float = 10.0  # of P or Q
    window: int = 5  # k, in epochs

    def __post_init__(self) -> None:
        if self.kind not in LOSS_RULES:
            raise ValueError(f"kind={self.kind} must be one of {', '.join(LOSS_RULES)}")
        if not (self.factor >= SMALLEST_FACTOR and self.threshold >= 0 and self.window >= 2):
            raise ValueError(
                "factor must be at least 1.25, threshold at least 0, window at least 2"
            )
        self.losses: list[float] = []  # of the last `window` epochs
        self.seconds: list[float] = []  # of the last two epochs

    def next_batch_size(self, epoch: int, size: int) -> float:
        needed, losses = self.window if self.kind == "progress" else 2, self.losses[-self.window :]
        if len(losses) < needed or not min(losses) > 0:
            return size
        if self.kind == "progress":
            progress = 1000 * (sum(losses) / (self.window * min(losses)) - 1)
            return size * self.factor if progress < self.threshold else size / self.factor
        loss = losses[-1] / losses[-2]
        time = self.seconds[-1] / self.seconds[-2]
        score = 1000 * (1 - LOSS_SHARE * loss - (1 - LOSS_SHARE) * time)
        return size * self.factor ** ((score > self.threshold) - (score < -self.threshold))

    def observe(self, size: int, loss: float, *, seconds: float, noise: float | None) -> None:
        if not math.isfinite(loss):  # no step of the epoch was finite
            return
        self.losses = [*self.losses, loss][-self.window :]
        self.seconds = [*self.seconds, max(seconds, 1e-9)][-2:]


@dataclass(eq=False)
class ByNoise(Rule):
    """The batch size follows the gradient noise scale B_simple (arXiv:1812.06162, equation 2.9).

    B_simple = tr(Sigma) / |G|**2, where G and Sigma are mean and covariance of a sample's gradient.
    A larger batch makes less progress than its size suggests, and a smaller one needs more steps.
    The size is B_simple, clamped to [size / factor, size x factor] of the epoch before.

    """

    remembered = ("noise",)

    # By which the batch changes at most from one epoch to the next, before it is rounded to 1, 1.5,
    # 2, 3, ... times the first one.
    factor: float = 2.0

    def __post_init__(self) -> None:
        if not self.factor >= SMALLEST_FACTOR:
            raise ValueError(f"factor={self.factor} must be at least {SMALLEST_FACTOR}")
        self.noise: float | None = None

    def next_batch_size(self, epoch: int, size: int) -> float:
        if self.noise is None:
            return size
        return min(max(self.noise, size / self.factor), size * self.factor)

    def observe(self, size: int, loss: float, *, seconds: float, noise: float | None) -> None:
        self.noise = noise


RULES = {
    "none": None,
    "increase": Scheduled,
    "decrease": Scheduled,
    "loss": ByLoss,
    "noise": ByNoise,
}
"""How the batch size of the next epoch is chosen, by the name of the rule."""


# -------------------------------------------------------------------- the noise scale


class NoiseScale(Memory):
    """Estimate of the gradient noise scale, smoothed over the epochs.

    The mean gradient G_b of b samples has E |G_b|**2 = |G|**2 + tr(Sigma) / b (arXiv:1812.06162,
    appendix A). Two batch sizes give two equations for tr(Sigma) and |G|**2, whose ratio is the
    noise scale. Each of the two is an exponential moving average, since the mean of their ratios
    would be biased.
    """

    remembered = ("trace", "square")

    def __init__(self) -> None:
        self.trace = 0.0  # of the covariance of a sample's gradient
        self.square = 0.0  # squared norm of the true gradient

    def observe(
        self, small_square: float, big_square: float, *, inverse_small: float, inverse_big: float
    ) -> float | None:
        """Take note of an epoch; all arguments are means over its steps.

        Args:
            small_square: squared norm of the mean gradient of few samples.
            big_square: squared norm of the mean gradient of many samples.
            inverse_small: 1 / (number of the few samples).
            inverse_big: 1 / (number of the many samples).

        Returns:
            The noise scale in samples, infinite while the true gradient cannot be told from zero;
            None where no noise is seen. An epoch without finite gradients leaves no trace.
        """
        trace = (small_square - big_square) / (inverse_small - inverse_big)
        square = big_square - trace * inverse_big
        if not math.isfinite(trace + square):
            return None
        self.trace = SMOOTHING * self.trace + (1 - SMOOTHING) * trace
        self.square = SMOOTHING * self.square + (1 - SMOOTHING) * square
        if self.square > 0:
            return max(self.trace, 0.0) / self.square
        return math.inf if self.trace > 0 else None


# -------------------------------------------------------------------- over workers


class WorkerBalancer(Memory):
    """Dynamic batch size of each worker (DBS, arXiv:2007.11831).

    The share of rank i is batch x speed_i / sum_j speed_j. Speeds are samples/s of the last epoch,
    without the time in which a rank waits for others. Shares are kept unless the step of the
    slowest rank becomes shorter by more than `MIN_GAIN`, since every new size may have to be
    compiled.
    """

    remembered = ("speeds",)

    def __init__(self) -> None:
        self.speeds: list[float] = []  # samples/s of each rank; empty while they are not known

    def observe(self, samples: Sequence[float], seconds: Sequence[float]) -> None:
        """Take note of an epoch.

        Args:
            samples: that each rank computed.
            seconds: that each rank needed, without waiting for others.
        """
        is_measured = min(seconds) > 0 and min(samples) > 0
        self.speeds = [n / s for n, s in zip(samples, seconds)] if is_measured else []

    def shares(self, total: int, current: Sequence[int], *, minimum: int) -> list[int]:
        """Split a global batch among the ranks.

        Args:
            total: samples of the global batch.
            current: share of each rank until now, perhaps of another total.
            minimum: samples that every rank gets.

        Returns:
            The share of each rank in samples.

        Raises:
            ValueError: the batch is too small for the minimum.
        """
        ranks = len(current)
        if len(self.speeds) != ranks:
            return apportion(total, [1.0] * ranks, minimum=minimum)
        balanced = apportion(total, self.speeds, minimum=minimum)
        kept = apportion(total, [float(share) for share in current], minimum=minimum)
        if self._step_seconds(balanced) < (1 - MIN_GAIN) * self._step_seconds(kept):
            return balanced
        return kept

    def _step_seconds(self, shares: Sequence[int]) -> float:
        """Predict the time of a step, that of the slowest rank."""
        return max(share / speed for share, speed in zip(shares, self.speeds))
