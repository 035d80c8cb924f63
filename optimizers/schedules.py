"""Learning-rate schedules with warm-up, and the scaling of the rate with the batch size.

    schedule = Schedule("cosine", epochs=50, warmup=5)
    factor = schedule(progress=12.5)          # of the base rate, at epoch 12.5

A schedule is a pure function of the progress in epochs and is applied before every optimizer step,
so there is no scheduler state to save: exponential and inverse change at whole epochs, step and
multistep at the given ones, the others in every step.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

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
LARGEST_PEAK = 1e6
SETTINGS = {  # of those that have some beside gamma and milestones
    "step": ("step_size",),
    "polynomial": ("power", "end"),
    "cosine": ("end",),
    "onecycle": ("peak",),
    "cyclic": ("peak", "step_size"),
}
CHANGES = (0.6, 0.8)  # shares of the run before a change of the rate, where none are given
# as of torch.optim.lr_scheduler.OneCycleLR
ONECYCLE_START = 1 / 25  # first rate / peak
ONECYCLE_RISE = 0.3  # share of the run in which the rate rises
ONECYCLE_END = 1e-4  # last rate / first rate


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a multiple of the base rate, after t epochs.

    t is fractional; floor(t) counts whole epochs, and s = (t - warmup) / (epochs - warmup). The
    multiple by name:

        constant     1
        step         gamma ** floor(t / step_size)
        multistep    gamma ** (number of milestones <= t)
        exponential  gamma ** floor(t)
        inverse      1 / (1 + gamma floor(t))
        polynomial   end + (1 - end) (1 - s) ** power
        cosine       end + (1 - end) (1 + cos(pi s)) / 2 (arXiv:1608.03983)
        onecycle     from peak/25 up to peak over 30 % of the run, then down to peak/250,000,
                     along cosines (arXiv:1708.07120)
        cyclic       a triangle between 1 and peak, step_size epochs up and as many down
                     (arXiv:1506.01186)
    """

    name: str  # one of `SCHEDULES`
    epochs: float  # length of the run
    _: KW_ONLY
    warmup: float = 0.0  # epochs of a linear rise from 0 that multiplies the above
    gamma: float = 0.1  # factor of step, multistep, exponential and inverse
    # Epochs, of step and cyclic; None is 60 % of the run, of cyclic half of it.
    step_size: float | None = None
    milestones: Sequence[float] | None = None  # epochs, of multistep; None is 60 % and 80 %
    power: float = 1.0  # exponent of polynomial
    end: float = 0.0  # last multiple of polynomial and cosine
    peak: float = 5.0  # largest multiple of onecycle and cyclic

    def __post_init__(self) -> None:
        for problem, is_wrong in (
            (f"gamma={self.gamma:g} must not be below 0", not self.gamma >= 0),
            (f"step_size={self.step_size} must be above 0", not self._step_size > 0),
            (f"power={self.power} must be above 0", not self.power > 0),
            (f"end={self.end} must be from 0 to 1", not 0 <= self.end <= 1),
            (f"peak={self.peak} must be at least 1", not 1 <= self.peak <= LARGEST_PEAK),
            (
                f"warmup={self.warmup:g} must be within the run of {self.epochs} epochs",
                not 0 <= self.warmup < self.epochs,
            ),
        ):
            if is_wrong:
                raise ValueError(problem)
        try:
            is_moderate = self.gamma <= 1 or self._shape(self.epochs - 1e-6) <= LARGEST_PEAK
        except OverflowError:
            is_moderate = False
        if not is_moderate:
            raise ValueError(f"gamma={self.gamma:g} lets the rate end above {LARGEST_PEAK:g} x lr")

    def __call__(self, progress: float, step: float = 0.0) -> float:
        """Return the multiple of the base rate.

        Args:
            progress: epochs done so far.
            step: length of one step in epochs; the warm-up counts the step that comes next.
        """
        warm = min(1.0, (progress + step) / self.warmup) if self.warmup else 1.0
        return warm * self._shape(progress)

    def is_constant(self) -> bool:
        """Whether the rate stays the same after the warm-up."""
        return len({self._shape(self.epochs * number / 1000) for number in range(1000)}) == 1

    @property
    def _step_size(self) -> float:
        share = 0.5 if self.name == "cyclic" else CHANGES[0]  # up and down
        return share * self.epochs if self.step_size is None else self.step_size

    def _shape(self, progress: float) -> float:
        done = progress + 1e-9  # as a step is no binary fraction of an epoch
        whole = math.floor(done)
        share = min(1.0, max(0.0, (progress - self.warmup) / max(self.epochs - self.warmup, 1e-9)))
        match self.name:
            case "constant":
                return 1.0
            case "step":
                return self.gamma ** (done // self._step_size)
            case "multistep":
                shares = [share * self.epochs for share in CHANGES]
                milestones = shares if self.milestones is None else sorted(self.milestones)
                return self.gamma ** bisect_right(milestones, done)
            case "exponential":
                return self.gamma**whole
            case "inverse":
                return 1 / (1 + self.gamma * whole)
            case "polynomial":
                return self.end + (1 - self.end) * (1 - share) ** self.power
            case "cosine":
                return _half_cosine(1.0, self.end, share)
            case "onecycle":
                return self._one_cycle(share)
            case "cyclic":
                phase = progress / self._step_size % 2
                return 1 + (self.peak - 1) * (phase if phase <= 1 else 2 - phase)
        raise ValueError(f"unknown schedule {self.name}")

    def _one_cycle(self, share: float) -> float:
        start = ONECYCLE_START * self.peak
        if share < ONECYCLE_RISE:
            return _half_cosine(start, self.peak, share / ONECYCLE_RISE)
        fall = (share - ONECYCLE_RISE) / (1 - ONECYCLE_RISE)
        return _half_cosine(self.peak, start * ONECYCLE_END, fall)


def _half_cosine(start: float, end: float, share: float) -> float:
    """Half a cosine wave, from `start` at share 0 to `end` at share 1."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2
