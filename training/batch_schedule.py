"""Which rows each rank takes in each step, and how large the next epoch's batches are.

    batches = BatchSchedule(world, sampler, base=256)            # the same batch size throughout
    policy = BatchSizePolicy(rule, low=256, high=4096)
    batches = BatchSchedule(world, sampler, base=256, policy=policy, balancer=WorkerBalancer())
    for rows, weight, samples in batches.plan(epoch, done=0): ...
    batches.end_epoch(epoch, loss=loss, seconds=seconds, compute_seconds=compute, noise=None)

The rules themselves are in dynamic_batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

import dynamic_batch
from distributed.world import World
from dynamic_batch import NoiseScale, Rule, WorkerBalancer
from input_pipeline.sampler import Sampler, batch_sizes, row_owners

MIN_RANK_ROWS = 2  # rows of a rank in a step: BatchNorm needs two
# A batch of two noise scales brings two thirds of the most that a step can (arXiv:1812.06162, eq.
# 2.6).
NOISE_LIMIT = 2.0


class RankBatch(NamedTuple):
    """A step of one rank.

    Attributes:
        rows: (n,) the row numbers it takes.
        weight: of this rank's mean loss in the mean over the ranks.
        samples: rows of all ranks.
    """

    rows: Tensor
    weight: float
    samples: int


@dataclass(frozen=True)
class BatchSizePolicy:
    """A batch size that changes from epoch to epoch.

    Attributes:
        rule: which batch size it asks for.
        low, high: the limits, in samples over all ranks.
        lr_power: the learning rate is multiplied by (batch / first batch) ** lr_power.
    """

    rule: Rule
    low: int
    high: int
    lr_power: float = 0.0


class BatchSchedule:
    """The batches of a run; every rank computes the same.

    Every row comes once an epoch, whether the size changes or not, and no batch is smaller than
    half of the size; see `input_pipeline.sampler.batch_sizes`.

    Args:
        world: the ranks.
        order: the order of the rows.
        base: the first global batch size.
        policy: how the size changes over time, or None.
        balancer: how it is shared out among the ranks, or None for equal shares.
    """

    def __init__(
        self,
        world: World,
        order: Sampler,
        *,
        base: int,
        policy: BatchSizePolicy | None = None,
        balancer: WorkerBalancer | None = None,
    ) -> None:
        self.world, self.order, self.base = world, order, base
        self.policy, self.balancer = policy, balancer
        self.noise = NoiseScale()
        self.noise_scale: float | None = None
        self.advised = False
        self.memory_limits: list[int] | None = None  # rows that fit each rank's memory at once
        self.size = base
        self.shares = dynamic_batch.apportion(base, [1.0] * world.size)
        self.decided = 0  # the epoch, counted from 1, that size and shares are for

    @property
    def changes(self) -> bool:
        """Whether the batch size or the ranks' shares of it change during the run."""
        return self.policy is not None or self.balancer is not None

    @property
    def largest_share(self) -> int:
        """Rows of one rank in a step at most, as long as shares are equal."""
        largest = max(self._sizes(self.policy.high if self.policy else self.base))
        return -(-largest // self.world.size)

    @property
    def lr_factor(self) -> float:
        """The factor by which the batch size changes the learning rate."""
        return (self.size / self.base) ** self.policy.lr_power if self.policy else 1.0

    def limit(self, micro_batch: int | None) -> None:
        """Tell how many rows fit this rank's memory at once (None: all). Collective.

        Shares keep to it as long as that is possible.
        """
        mine = float(micro_batch or self.largest_share * self.world.size)
        limits = [int(limit) for [limit] in self.world.all_gather([mine])]
        self.memory_limits = limits if min(limits) < self.largest_share else None

    # ---------------------------------------------------------------- an epoch

    def start_epoch(self, epoch: int) -> None:
        """Decide the batch size of an epoch, counted from 0, once."""
        if self.decided >= epoch + 1:
            return
        if self.policy is not None:
            self.size = self._nearest(
                self.policy, self.policy.rule.next_batch_size(epoch, self.size)
            )
        self.shares = self.share_out(self.size)
        self.decided = epoch + 1

    def _nearest(self, policy: BatchSizePolicy, target: float) -> int:
        """The batch size nearest to a target that the policy's limits and the ranks allow."""
        return dynamic_batch.nearest_batch_size(
            target, self.base, low=policy.low, high=policy.high, unit=self.world.size
        )

    def share_out(self, size: int) -> list[int]:
        """A batch among the ranks.

        Shares stay below the rows of one micro-batch of each rank where that is possible, else of
        two, and so on.
        """
        if self.balancer is None:
            return dynamic_batch.apportion(size, [1.0] * self.world.size)
        limits, parts = self.memory_limits, 1
        if limits is not None:
            while parts * sum(limits) < size:
                parts += 1
            limits = [parts * limit for limit in limits]
        return self.balancer.shares(size, self.shares, minimum=MIN_RANK_ROWS, limits=limits)

    def _sizes(self, size: int) -> list[int]:
        """The sizes of the global batches of an epoch of batches of `size` rows."""
        return batch_sizes(len(self.order), size, smallest=MIN_RANK_ROWS * self.world.size)

    def steps(self) -> int:
        """The number of steps in this epoch."""
        return len(self._sizes(self.size))

    def plan(self, epoch: int, done: int) -> list[RankBatch]:
        """This rank's part of the steps of an epoch, beginning with step number `done`.

        The average over the ranks of weight x mean loss is the mean loss of the global batch,
        whatever the shares.
        """
        places_of: dict[int, tuple[Tensor, float]] = {}  # by the size of the global batch
        plan = []
        for batch in self.order.epoch(epoch, self._sizes(self.size))[done:]:
            size = len(batch)
            if size not in places_of:
                shares = self._shares_of(size)
                places = (row_owners(shares) == self.world.rank).nonzero().flatten()
                weight = shares[self.world.rank] * self.world.size / size
                places_of[size] = places, weight
            places, weight = places_of[size]
            plan.append(RankBatch(batch[places], weight, size))
        return plan

    def _shares_of(self, size: int) -> list[int]:
        """The shares of a batch, which may be smaller than the others at the end of an epoch."""
        if size == self.size:
            return self.shares
        minimum = min(MIN_RANK_ROWS, size // self.world.size)
        return dynamic_batch.apportion(
            size, [float(share) for share in self.shares], minimum=minimum
        )

    def end_epoch(
        self,
        epoch: int,
        *,
        loss: float,
        seconds: float,
        compute_seconds: float,
        noise: Mapping[str, float] | None,
    ) -> dict[str, Any]:
        """Learn from an epoch and decide the next one's batch size; collective.

        Args:
            epoch: the one that is over, counted from 0.
            loss: its mean training loss.
            seconds, compute_seconds: this rank's time for all steps, and without waiting for
                others.
            noise: the arguments of `NoiseScale.observe`, or None where they were not measured.
        Returns:
            What the epoch's row in metrics.jsonl says of its batches.
        """
        row: dict[str, Any] = {}
        if noise is not None:
            row["noise_scale"] = self.noise_scale = self.noise.observe(**noise)
        if self.changes:
            times = self.world.all_gather([seconds, compute_seconds])
            if self.policy is not None:
                slowest = max(seconds for seconds, _ in times)
                self.policy.rule.observe(self.size, loss, seconds=slowest, noise=self.noise_scale)
            if self.balancer is not None:
                shares = [self._shares_of(size) for size in self._sizes(self.size)]
                samples = [sum(mine) for mine in zip(*shares)]
                self.balancer.observe(samples, [compute for _, compute in times])
                speeds = [round(speed, 2) for speed in self.balancer.speeds]
                row |= {"shares": list(self.shares), "worker_samples_per_second": speeds}
        self.start_epoch(epoch + 1)
        return row

    def advice(self, batch_size: int) -> str:
        """A line, once, where batches have become much larger than the noise scale; else ''."""
        if self.advised or self.noise_scale is None or batch_size <= NOISE_LIMIT * self.noise_scale:
            return ""
        self.advised = True
        return (
            f"advice: a batch of {batch_size} is large for a gradient noise scale of "
            f"{self.noise_scale:.0f}: a smaller one would make about as much progress a step; "
            "see --dynamic_batch noise"
        )

    # ---------------------------------------------------------------- in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        rule = self.policy.rule if self.policy else None
        return {
            "base": self.base,
            "size": self.size,
            "shares": list(self.shares),
            "decided": self.decided,
            **(self.balancer.state_dict() if self.balancer else {"speeds": []}),
            "rule": {"kind": type(rule).__name__, **rule.state_dict()} if rule else {},
            "noise": self.noise.state_dict(),
            "noise_scale": self.noise_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        With other ranks or another first batch, the size is scaled and shares are equal until the
        ranks' speeds are measured again; another rule starts without a memory.
        """
        self.noise.load_state_dict(state["noise"])
        self.noise_scale, self.decided = state["noise_scale"], state["decided"]
        policy, stored_rule = self.policy, state["rule"]
        if policy is not None and stored_rule.get("kind") == type(policy.rule).__name__:
            policy.rule.load_state_dict(stored_rule)
        same_ranks = state["base"] == self.base and len(state["shares"]) == self.world.size
        if policy is None:
            self.size = self.base
        elif same_ranks:
            self.size = state["size"]
        else:
            self.size = self._nearest(policy, self.base * state["size"] / state["base"])
        self.shares = dynamic_batch.apportion(self.size, [1.0] * self.world.size)
        if same_ranks and self.balancer is not None:
            self.balancer.load_state_dict(state)
            same_size = sum(state["shares"]) == self.size
            self.shares = list(state["shares"]) if same_size else self.share_out(self.size)
