"""Batch sizes that change: over time by a rule, over workers by their speed; and the gradient noise scale.

    rule = Scheduled(128, at_milestones(2.0, [15, 23]))
    size = on_ladder(rule.next_batch_size(epoch, size), 128, low=128, high=2048, unit=world_size)
    shares = apportion(size, speeds)                  # integers that sum to size, in proportion to samples/s
    trace, square = noise_scale(small, 1 / 32, big, 1 / 128)        # of squared norms of gradients of 32 and 128 samples

Everything here is a pure function or a few plain numbers; batching.py puts it into the training loop.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol

RULES = ("none", "increase", "decrease", "loss", "noise")
LOSS_RULES = ("progress", "score")
LOSS_SHARE = 0.8  # of the score: the rest is time
SMOOTHING = 0.5  # weight of what was known in the noise scale of an epoch


# -------------------------------------------------------------------- sizes


def nearest_batch_size(wanted: float, base: int, low: int, high: int, unit: int = 1) -> int:
    """The size nearest to `wanted`, as a ratio, among base x 2**i and base x 1.5 x 2**i within limits; a multiple of `unit`.

    Few sizes occur, however a rule wanders: each one that is new may have to be compiled.

    Args:
        wanted: samples.
        base: the first batch.
        low, high: the limits; where the ladder has no step between them, the nearer one is taken.
        unit: the number of ranks, so that equal shares are whole.
    """
    octaves = range(math.floor(math.log2(low / base)) - 1, math.ceil(math.log2(high / base)) + 1)
    steps = {
        max(round(base * 2.0**octave * step / unit), 1) * unit
        for octave in octaves
        for step in (1, 1.5)
    }
    steps = {step for step in steps if low <= step <= high} or {
        max(low // unit, 1) * unit,
        max(high // unit, 1) * unit,
    }
    wanted = min(max(wanted, low), high)
    return min(sorted(steps), key=lambda size: abs(math.log(size / wanted)))


def apportion(
    total: int,
    weights: Sequence[float],
    least: int = 0,
    most: Sequence[int] | None = None,
    unit: int = 1,
) -> list[int]:
    """Integers that sum to `total`, in proportion to `weights` as far as the limits allow.

    Args:
        total: to share out.
        weights: a positive number each.
        least: that each gets.
        most: that each can take, or None.
        unit: shares are multiples of it, but for what is left over of the total, which one of them takes.

    Raises:
        ValueError: the limits leave no way.
    """
    lows = [-(-least // unit)] * len(weights)
    highs = [min(limit, total) // unit for limit in most or [total] * len(weights)]
    units, rest = divmod(total, unit)
    if sum(lows) > units or sum(highs) < units or any(low > high for low, high in zip(lows, highs)):
        raise ValueError(
            f"{total} cannot be shared out: at least {least} each, at most {list(most or [])}"
        )
    ideal = [units * weight / sum(weights) for weight in weights]
    factor = _level(
        lambda level: sum(
            _within(level * each, low, high) for each, low, high in zip(ideal, lows, highs)
        ),
        units,
    )
    real = [_within(factor * each, low, high) for each, low, high in zip(ideal, lows, highs)]
    shares = [math.floor(each + 1e-9) for each in real]
    by_need = sorted(range(len(real)), key=lambda i: shares[i] - real[i])
    while sum(shares) < units:
        for i in by_need:
            if sum(shares) < units and shares[i] < highs[i]:
                shares[i] += 1
    wholes = [share * unit for share in shares]
    roomy = [i for i in range(len(wholes)) if most is None or wholes[i] + rest <= most[i]]
    wholes[max(roomy or range(len(wholes)), key=lambda i: real[i])] += rest
    return wholes


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _level(total: Callable[[float], float], wanted: float) -> float:
    """Where a rising function of a positive number reaches `wanted`."""
    low, high = 0.0, 1.0
    while total(high) < wanted - 1e-9 and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < wanted else (low, middle)
    return high


# -------------------------------------------------------------------- over time


class Rule(Protocol):
    """Which batch an epoch should have."""

    def next_batch_size(self, epoch: int, size: int) -> float:
        """Samples of the global batch of `epoch` (0 is the first), the one before having had `size`; once an epoch, in order."""
        ...

    def observe(self, size: int, loss: float, seconds: float, noise: float | None) -> None:
        """What an epoch of batches of `size` brought: training loss, the slowest rank's time, noise scale."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Scheduled:
    """A function of the epoch.

    Args:
        base: the first batch.
        multiple: epoch -> how many times as large.
    """

    def __init__(self, base: int, multiple: Callable[[int], float]) -> None:
        self.base, self.multiple = base, multiple

    def next_batch_size(self, epoch: int, size: int) -> float:
        """The schedule's."""
        return self.base * self.multiple(epoch)

    def observe(self, size: int, loss: float, seconds: float, noise: float | None) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def at_milestones(factor: float, epochs: Sequence[int]) -> Callable[[int], float]:
    """A multiple that is multiplied by `factor` at each of these epochs."""
    return lambda epoch: factor ** bisect_right(sorted(epochs), epoch)


def every_epoch(factor: float) -> Callable[[int], float]:
    """A multiple that is multiplied by `factor` after every epoch."""
    return lambda epoch: factor**epoch


def replacing_decay(schedule: Callable[[float], float]) -> Callable[[int], float]:
    """A batch that grows as the learning rate would fall (Smith et al., arXiv:1711.00489): most so far / now.

    Taken together with a rate that is scaled with the batch, rate / batch goes as it would have under the schedule.

    Args:
        schedule: progress in epochs -> multiple of the learning rate.
    """

    def multiple(epoch: int) -> float:
        most = max(schedule(earlier) for earlier in range(epoch + 1))
        now = schedule(epoch)
        if now >= most:
            return 1.0
        return most / now if now > 0 else math.inf

    return multiple


class ByLoss:
    """By what the last epochs' training losses, or loss and time, did.

    'progress', after Prechelt's training progress (Early Stopping - But When?, 1998): with the losses L of the last k epochs
        P = 1000 (sum L / (k min L) - 1);  P < threshold: factor times as large, else as small.
    'score': with the time T of an epoch
        S = 0.8 L / L' + 0.2 T / T', ' being the epoch before;  Q = 1000 (1 - S)
        Q > threshold: factor times as large;  Q < -threshold: as small;  else as it is.
    Ratios, so that neither the unit of time nor the data set's loss counts. 'score' depends on the clock: no two runs are alike.

    Args:
        kind: one of `LOSS_RULES`.
        factor, threshold: as above.
        window: k.
    """

    def __init__(
        self, kind: str = "progress", factor: float = 2.0, threshold: float = 10.0, window: int = 5
    ) -> None:
        self.kind, self.factor, self.threshold, self.window = kind, factor, threshold, window
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def next_batch_size(self, epoch: int, size: int) -> float:
        """As above; as it was until there are enough epochs."""
        if (
            len(self.losses) < (self.window if self.kind == "progress" else 2)
            or not min(self.losses) > 0
        ):
            return size
        if self.kind == "progress":
            progress = 1000 * (sum(self.losses) / (self.window * min(self.losses)) - 1)
            return size * self.factor if progress < self.threshold else size / self.factor
        loss, time = self.losses[-1] / self.losses[-2], self.seconds[-1] / self.seconds[-2]
        gain = 1000 * (1 - LOSS_SHARE * loss - (1 - LOSS_SHARE) * time)
        return size * self.factor ** ((gain > self.threshold) - (gain < -self.threshold))

    def observe(self, size: int, loss: float, seconds: float, noise: float | None) -> None:
        """Remember."""
        self.losses = [*self.losses, loss][-self.window :]
        self.seconds = [*self.seconds, max(seconds, 1e-9)][-2:]

    def state_dict(self) -> dict[str, Any]:
        """The last epochs."""
        return {"losses": list(self.losses), "seconds": list(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`."""
        self.losses, self.seconds = list(state["losses"]), list(state["seconds"])


class ByNoise:
    """The simple gradient noise scale (arXiv:1812.06162): a larger batch brings less than its size, a smaller one wastes steps.

    Args:
        factor: by which a batch changes at most from one epoch to the next.
    """

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.noise: float | None = None

    def next_batch_size(self, epoch: int, size: int) -> float:
        """The noise scale, as far as one epoch may go."""
        if self.noise is None:
            return size
        return _within(self.noise, size / self.factor, size * self.factor)

    def observe(self, size: int, loss: float, seconds: float, noise: float | None) -> None:
        """Remember the noise scale."""
        self.noise = noise

    def state_dict(self) -> dict[str, Any]:
        """The noise scale."""
        return {"noise": self.noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`."""
        self.noise = state["noise"]


# -------------------------------------------------------------------- the noise scale


def noise_scale(small: float, per_small: float, big: float, per_big: float) -> tuple[float, float]:
    """Estimates of (trace of a sample's gradient covariance, squared norm of the true gradient), both unbiased.

    As E |G_b|**2 = |G|**2 + trace / b for the mean gradient G_b of b samples (arXiv:1812.06162, appendix A), from two sizes; the
    noise scale is their ratio. All arguments are means over the same steps.

    Args:
        small, big: squared norms of the mean gradient of few and of many samples.
        per_small, per_big: 1 / (number of those samples).
    """
    trace = (small - big) / (per_small - per_big)
    return trace, big - trace * per_big


class NoiseScale:
    """Smoothed over the epochs: numerator and denominator each, since the mean of ratios would be biased."""

    def __init__(self) -> None:
        self.trace = self.square = 0.0

    def observe(self, small: float, per_small: float, big: float, per_big: float) -> float | None:
        """The means of an epoch; returns the noise scale, None while the true gradient is not told from zero."""
        trace, square = noise_scale(small, per_small, big, per_big)
        self.trace = SMOOTHING * self.trace + (1 - SMOOTHING) * trace
        self.square = SMOOTHING * self.square + (1 - SMOOTHING) * square
        return max(self.trace, 0.0) / self.square if self.square > 0 else None

    def state_dict(self) -> dict[str, Any]:
        """Two numbers."""
        return {"trace": self.trace, "square": self.square}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`."""
        self.trace, self.square = state["trace"], state["square"]


# -------------------------------------------------------------------- over workers


class WorkerBalancer:
    """Dynamic batch size of each worker (DBS, arXiv:2007.11831): shares in proportion to samples/s.

    Args:
        keep: shares stay unless the slowest rank's step becomes shorter by more than this part: every change may compile anew.
    """

    def __init__(self, keep: float = 0.03) -> None:
        self.keep = keep
        self.speeds: list[float] = []  # samples/s of each rank; empty: not known

    def observe(self, samples: Sequence[float], seconds: Sequence[float]) -> None:
        """What each rank computed in an epoch, and how long it took without waiting for others."""
        self.speeds = (
            [n / s for n, s in zip(samples, seconds)]
            if min(seconds) > 0 and min(samples) > 0
            else []
        )

    def shares(
        self, total: int, now: Sequence[int], least: int, most: Sequence[int] | None = None
    ) -> list[int]:
        """Of a global batch of `total`; `now`: the shares so far, of another total perhaps."""
        if len(self.speeds) != len(now):
            return apportion(total, [1.0] * len(now), least, most)
        unit = 1 << max(0, min(3, math.floor(math.log2(max(total / (32 * len(now)), 1)))))
        try:
            better = apportion(total, self.speeds, least, most, unit)
        except ValueError:
            better = apportion(total, self.speeds, least, most)
        stay = apportion(total, [float(share) for share in now], least, most)
        times = [
            max(share / speed for share, speed in zip(shares, self.speeds))
            for shares in (better, stay)
        ]
        return better if times[0] < (1 - self.keep) * times[1] else stay
