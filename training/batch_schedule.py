"""Which rows every rank takes in every step of an epoch, and how large the next epoch's batches are.

batching = Batching(world, sampler, base=256)                                       # the same for ever
batching = Batching(world, sampler, base=256, change=Change(rule, low=256, high=4096), balance=Balance())
for rows, weight, samples in batching.plan(epoch, done=0): ...
batching.end_epoch(epoch, loss, seconds, compute_seconds, noise)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

import dynamic_batch
from distributed.world import World
from dynamic_batch import NoiseScale, Rule, WorkerBalancer
from input_pipeline import sampler
from input_pipeline.sampler import Sampler

LEAST = 2  # rows of a rank: BatchNorm wants two
NOISE_LIMIT = 2.0  # noise scales: such a batch brings two thirds of the most that a step can (arXiv:1812.06162, equation 2.6)


class RankBatch(NamedTuple):
    """A step of one rank: its rows, what its mean loss counts beside the other ranks', and the rows of all ranks."""

    rows: Tensor
    weight: float
    samples: int


@dataclass(frozen=True)
class BatchSizePolicy:
    """A batch that changes from epoch to epoch.

    Attributes:
        rule: which batch it wants.
        low, high: its limits, global.
        power: the learning rate is multiplied by (batch / first batch) ** power.
    """

    rule: Rule
    low: int
    high: int
    power: float = 0.0


class BatchSchedule:
    """The batches of a run; every rank computes the same.

    Without `change` and `balance` an epoch has whole batches only, and the few rows left over wait for another epoch's order; with
    either, every row comes once an epoch, in a smaller last batch where need be.

    Args:
        world: the ranks.
        order: of the rows.
        base: the first global batch.
        change: over time, or None.
        balance: over workers, or None.
    """

    def __init__(
        self,
        world: World,
        order: Sampler,
        base: int,
        change: BatchSizePolicy | None = None,
        balance: WorkerBalancer | None = None,
    ) -> None:
        self.world, self.order, self.base, self.change, self.balance = (
            world,
            order,
            base,
            change,
            balance,
        )
        self.noise = NoiseScale()
        self.noise_scale: float | None = None
        self.advised = False
        self.most: list[int] | None = None
        self.size = base
        self.shares = self.equal()
        self.decided = 0  # the epoch that size and shares are for

    @property
    def whole(self) -> bool:
        """Whether every row comes in every epoch."""
        return self.change is not None or self.balance is not None

    @property
    def largest_share(self) -> int:
        """Rows of one rank in a step at most, while shares are equal."""
        return -(-(self.change.high if self.change else self.base) // self.world.size)

    @property
    def lr_factor(self) -> float:
        """Multiple of the learning rate."""
        return (self.size / self.base) ** self.change.power if self.change else 1.0

    def equal(self) -> list[int]:
        """Shares of `size`."""
        return dynamic_batch.apportion(self.size, [1.0] * self.world.size)

    def limit(self, micro_batch: int | None) -> None:
        """Tell how many rows fit this rank's memory at once (None: all); shares keep to it while that is possible."""
        mine = float(micro_batch or self.largest_share * self.world.size)
        limits = [int(limit) for [limit] in self.world.all_gather([mine])]
        self.most = limits if min(limits) < self.largest_share else None

    # ---------------------------------------------------------------- an epoch

    def start_epoch(self, epoch: int) -> None:
        """Settle the batch of an epoch, once."""
        if self.decided >= epoch + 1:
            return
        if self.change is not None:
            unit = self.world.size
            wanted = self.change.rule.next_batch_size(epoch, self.size)
            self.size = dynamic_batch.nearest_batch_size(
                wanted, self.base, low=self.change.low, high=self.change.high, unit=unit
            )
        self.shares = self.divide(self.size)
        self.decided = epoch + 1

    def divide(self, size: int) -> list[int]:
        """A batch among the ranks; below the rows of one micro-batch of each where that is possible, else of two, and so on."""
        if self.balance is None:
            return dynamic_batch.apportion(size, [1.0] * self.world.size)
        most, parts = self.most, 1
        while most is not None and parts * sum(most) < size:
            parts += 1
        limits = [parts * limit for limit in most] if most is not None else None
        return self.balance.shares(size, self.shares, least=LEAST, most=limits)

    def batches(self, epoch: int) -> list[Tensor]:
        """Global."""
        if self.whole:
            return self.order.whole_epoch(epoch, self.size, LEAST * self.world.size)
        return list(self.order.epoch(epoch, self.size))

    def steps(self) -> int:
        """Of this epoch."""
        full, rest = divmod(len(self.order), self.size)
        return full + (self.whole and rest >= LEAST * self.world.size)

    def plan(self, epoch: int, done: int) -> list[RankBatch]:
        """This rank's part of the steps from number `done` on.

        The average over the ranks of weight x mean loss is the mean loss of the global batch, whatever the shares.
        """
        owners: dict[int, tuple[Tensor, float]] = {}
        parts = []
        for batch in self.batches(epoch)[done:]:
            size = len(batch)
            if size not in owners:
                shares = self.shares
                if size != self.size:
                    shares = dynamic_batch.apportion(
                        size,
                        [float(share) for share in shares],
                        least=min(LEAST, size // self.world.size),
                    )
                places = sampler.row_owners(shares) == self.world.rank
                owners[size] = (
                    places.nonzero().flatten(),
                    shares[self.world.rank] * self.world.size / size,
                )
            places, weight = owners[size]
            parts.append(RankBatch(batch[places], weight, size))
        return parts

    def end_epoch(
        self,
        epoch: int,
        loss: float,
        seconds: float,
        compute: float,
        noise: tuple[float, ...] | None,
    ) -> dict[str, Any]:
        """Learn from an epoch and settle the next; returns what the epoch's row should say of it.

        Args:
            epoch: that is over.
            loss: of training, its mean.
            seconds, compute: this rank's time for all steps, and without waiting for others.
            noise: what `NoiseScale.learn` takes, or None.
        """
        row: dict[str, Any] = {}
        if noise is not None:
            small, inverse_small, big, inverse_big = noise
            row["noise_scale"] = self.noise_scale = self.noise.observe(
                small, big, inverse_small=inverse_small, inverse_big=inverse_big
            )
        if self.change is not None or self.balance is not None:
            times = self.world.all_gather([seconds, compute])
            if self.change is not None:
                self.change.rule.observe(
                    self.size,
                    loss,
                    seconds=max(pair[0] for pair in times),
                    noise=self.noise_scale,
                )
            if self.balance is not None:
                self.balance.observe(
                    [share * self.steps() for share in self.shares], [pair[1] for pair in times]
                )
                row |= {
                    "shares": list(self.shares),
                    "worker_samples_per_second": [round(s, 2) for s in self.balance.speeds],
                }
        self.start_epoch(epoch + 1)
        return row

    def advice(self, batch: int) -> str:
        """A line, once, where batches have become larger than the noise scale: they add samples, not progress."""
        if self.advised or self.noise_scale is None or batch <= NOISE_LIMIT * self.noise_scale:
            return ""
        self.advised = True
        return (
            f"advice: a batch of {batch} is large for a gradient noise scale of {self.noise_scale:.0f}: a smaller one would make "
            "about as much progress a step; see --dynamic_batch noise"
        )

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        return {
            "base": self.base,
            "size": self.size,
            "shares": list(self.shares),
            "decided": self.decided,
            "speeds": list(self.balance.speeds) if self.balance else [],
            "rule": {"kind": type(self.change.rule).__name__, **self.change.rule.state_dict()}
            if self.change
            else {},
            "noise": self.noise.state_dict(),
            "noise_scale": self.noise_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo to `state_dict`; with other ranks, first batch or rule as near as can be, in equal shares until measured."""
        self.noise.load_state_dict(state["noise"])
        self.noise_scale, self.decided = state["noise_scale"], state["decided"]
        if self.change is not None and state["rule"].get("kind") == type(self.change.rule).__name__:
            self.change.rule.load_state_dict(state["rule"])
        same_ranks = state["base"] == self.base and len(state["shares"]) == self.world.size
        if self.change is None:
            self.size = self.base
        elif same_ranks:
            self.size = state["size"]
        else:
            wanted = self.base * state["size"] / state["base"]
            self.size = dynamic_batch.nearest_batch_size(
                wanted,
                self.base,
                low=self.change.low,
                high=self.change.high,
                unit=self.world.size,
            )
        self.shares = self.equal()
        if same_ranks and self.balance is not None:
            self.balance.speeds = list(state["speeds"])
            self.shares = (
                list(state["shares"])
                if sum(state["shares"]) == self.size
                else self.divide(self.size)
            )
