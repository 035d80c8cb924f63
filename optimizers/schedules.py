"""Optimizer, learning-rate schedule, warm-up and batch-size scaling, built by name.

    optimizer = build_optimizer(model, "sgd", lr=0.1, weight_decay=5e-4, momentum=0.9)
    schedule = Schedule("cosine", epochs=50, warmup=5)
    factor = schedule(progress=12.5)          # the learning rate at epoch 12.5, as a multiple of --lr

A schedule is a pure function of the progress in epochs and is applied before every optimizer step, so there is no
scheduler state to save and no unit to get wrong: step, multistep, exponential and inverse change at whole epochs,
the others within an epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

SCHEDULES = (
    "constant",
    "step",
    "multistep",
    "exponential",
    "inverse",
    "polynomial",
    "cosine",
    "onecycle",
    "cyclic",
)
ONECYCLE_START, ONECYCLE_RISE = (
    1 / 25,
    0.3,
)  # as torch.optim.lr_scheduler.OneCycleLR: first rate / peak, share of the rise
ONECYCLE_END = 1e-4  # last rate / first rate


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a multiple of --lr, after t epochs (t is fractional; floor(t) counts whole epochs).

    Attributes:
        name: one of `SCHEDULES`:
            constant     1
            step         gamma ** (floor(t) // step_size)
            multistep    gamma ** (number of milestones <= floor(t))
            exponential  gamma ** floor(t)
            inverse      1 / (1 + gamma floor(t))
            polynomial   end + (1 - end) (1 - s) ** power
            cosine       end + (1 - end) (1 + cos(pi s)) / 2                                   (arXiv:1608.03983)
            onecycle     peak/25 up to peak over 30 % of the run, then down to peak/250,000, cosine (arXiv:1708.07120)
            cyclic       triangle between 1 and peak, step_size epochs up and as many down       (arXiv:1506.01186)
          with s = (t - warmup) / (epochs - warmup).
        epochs: length of the run.
        warmup: epochs of linear rise from 0 that multiply the above.
        gamma, step_size (epochs), milestones (epochs), power, end, peak: as used above.
    """

    name: str
    epochs: float
    warmup: float = 0.0
    gamma: float = 0.1
    step_size: int = 30
    milestones: Sequence[int] = ()
    power: float = 1.0
    end: float = 0.0
    peak: float = 5.0

    def __call__(self, progress: float, step: float = 0.0) -> float:
        """Multiple of --lr after `progress` epochs; `step` is one step in epochs: the rise counts the step about to be done."""
        warm = min(1.0, (progress + step) / self.warmup) if self.warmup else 1.0
        return warm * self._shape(progress)

    def _shape(self, progress: float) -> float:
        whole = math.floor(progress + 1e-9)
        share = min(1.0, max(0.0, (progress - self.warmup) / max(self.epochs - self.warmup, 1e-9)))
        match self.name:
            case "constant":
                return 1.0
            case "step":
                return self.gamma ** (whole // self.step_size)
            case "multistep":
                return self.gamma ** bisect_right(sorted(self.milestones), whole)
            case "exponential":
                return self.gamma**whole
            case "inverse":
                return 1 / (1 + self.gamma * whole)
            case "polynomial":
                return self.end + (1 - self.end) * (1 - share) ** self.power
            case "cosine":
                return cosine(1.0, self.end, share)
            case "onecycle":
                start = ONECYCLE_START * self.peak
                if share < ONECYCLE_RISE:
                    return cosine(start, self.peak, share / ONECYCLE_RISE)
                return cosine(
                    self.peak, start * ONECYCLE_END, (share - ONECYCLE_RISE) / (1 - ONECYCLE_RISE)
                )
            case "cyclic":
                phase = progress / self.step_size % 2
                return 1 + (self.peak - 1) * (phase if phase <= 1 else 2 - phase)
        raise ValueError(f"unknown schedule {self.name}")


def cosine(start: float, end: float, share: float) -> float:
    """Half a cosine wave from `start` (share 0) to `end` (share 1)."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def scale_lr(lr: float, rule: str, batch_size: int, base: int) -> float:
    """The learning rate for a global batch of `batch_size` samples, when `lr` was tuned for `base`.

    'linear': Goyal et al., arXiv:1706.02677; 'sqrt': Krizhevsky, arXiv:1404.5997; 'none': as given.
    """
    ratio = batch_size / base
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]
