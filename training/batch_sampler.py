"""Which rows each rank takes in each step, and how large the next epoch's batches are.

    rule = Scheduled(256, at_milestones(2.0, [15, 23]))
    sampler = DynamicBatchSampler(len(dataset), 256, rule=rule, high=4096)
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in range(30):
        for step, (x, y) in enumerate(loader):
            loss = sampler.loss_weight(step) * criterion(model(x), y)
            ...
        sampler.end_epoch(mean_loss, seconds)

The rules themselves are in dynamic_batch.py. The training loop of this project takes the same
object by `plan`, `start_epoch` and `end_epoch`.
"""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils import data

import dynamic_batch
from distributed.world import World
from dynamic_batch import NoiseScale, Rule, WorkerBalancer
from input_pipeline.sampler import Sampler, batch_sizes, row_owners

MIN_RANK_ROWS = 2  # rows of a rank in a step: BatchNorm needs two


class RankBatch(NamedTuple):
    """A step of one rank."""

    rows: Tensor  # (n,) the row numbers it takes
    weight: float  # of its mean loss in the mean over the ranks: share x ranks / global batch
    samples: int  # rows of all ranks


class DynamicBatchSampler(data.Sampler[list[int]]):
    """The batches of a run, for `DataLoader(batch_sampler=...)`; every rank computes the same.

    Iterating yields this rank's rows of each step of the current epoch. Every row comes once an
    epoch, whether the size changes or not, and no batch is smaller than half of the size; see
    `input_pipeline.sampler.batch_sizes`. The order is a function of (seed, epoch). With `labels` an
    epoch has as many rows, of each class equally many.

    With a data loader of its own, a loop has three duties: multiply each loss by `loss_weight`,
    since the ranks' shares may differ; multiply the learning rate by `lr_factor` where `lr_power`
    is given; and call `end_epoch` after each epoch.

    Args:
        rows: of the training set.
        batch_size: samples of the first global batch, that is of all ranks.
        rule: how the size changes over time, one of dynamic_batch.py, or None.
        low: samples of a rule's smallest global batch; None is a sixteenth of `batch_size`, but at
            least two samples for each rank.
        high: samples of its largest one; None is sixteen times `batch_size`, or all rows.
        lr_power: the learning rate is to be multiplied by (size / batch_size) ** lr_power.
        balancer: how a batch is shared out among the ranks, or None for equal shares.
        seed: of the order of the rows.
        lengths: (rows,) number of tokens of each sample, so that batches hold rows of similar
            length; None where all are equally long.
        labels: (rows,) class numbers, to draw each class equally often; None to take each row once.
        held_out, until: rows that come in no epoch before the one of number `until`.
        world: the ranks; None is those of torch's default process group, or this process alone.
            They exchange a few numbers in `end_epoch`.

    Raises:
        ValueError: the training set has fewer rows than a batch, or a limit excludes the other.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        *,
        rule: Rule | None = None,
        low: int | None = None,
        high: int | None = None,
        lr_power: float = 0.0,
        balancer: WorkerBalancer | None = None,
        seed: int = 0,
        lengths: Tensor | None = None,
        labels: Tensor | None = None,
        held_out: Tensor | None = None,
        until: int = 0,
        world: World | None = None,
    ) -> None:
        self.world = this_world() if world is None else world
        self.order = Sampler(
            rows, seed, lengths=lengths, labels=labels, held_out=held_out, until=until
        )
        self.decided = 0  # the epoch, counted from 1, that size and shares are for
        rows = self.rows_in_epoch
        self.base = batch_size
        self.rule, self.lr_power, self.balancer = rule, lr_power, balancer
        if not 0 < batch_size <= rows:
            raise ValueError(
                f"a global batch of {batch_size} samples must be from 1 to the {rows} rows; give "
                "a smaller one, such as an eighth of the rows"
            )
        fewest = min(MIN_RANK_ROWS * self.world.size, batch_size)
        self.low = max(batch_size // 16, fewest) if low is None else low
        self.high = min(16 * batch_size if high is None else high, rows)
        if not self.world.size <= self.low <= self.high:
            raise ValueError(
                f"low={self.low} must be at least the number of ranks, {self.world.size}, and at "
                f"most high={self.high}"
            )
        self.noise = NoiseScale()
        self.noise_scale: float | None = None
        self.size = batch_size
        self.shares = dynamic_batch.apportion(batch_size, [1.0] * self.world.size)
        self.first_step = 0  # of the next iteration
        self.weights: list[float] = []  # of the steps of the last iteration

    # ---------------------------------------------------------------- for a data loader

    def __iter__(self) -> Iterator[list[int]]:
        epoch = max(self.decided - 1, 0)
        self.start_epoch(epoch)
        plan = self.plan(epoch, self.first_step)
        self.weights = [batch.weight for batch in plan]
        return iter([batch.rows.tolist() for batch in plan])

    def __len__(self) -> int:
        """The number of steps of the next iteration."""
        self.start_epoch(max(self.decided - 1, 0))
        return self.steps() - self.first_step

    def loss_weight(self, step: int) -> float:
        """The factor of this rank's mean loss, of which the ranks then take the mean.

        It is 1 unless the ranks' shares differ; `step` is that of `enumerate(loader)`.
        """
        return self.weights[step]

    # ---------------------------------------------------------------- sizes

    @property
    def rows_in_epoch(self) -> int:
        return self.order.rows_of(max(self.decided - 1, 0))

    @property
    def changes(self) -> bool:
        """Whether the batch size or the ranks' shares of it change during the run."""
        return self.rule is not None or self.balancer is not None

    @property
    def largest_share(self) -> int:
        """Rows of one rank in a step at most, as long as shares are equal."""
        largest = max(self._sizes(self.high if self.rule is not None else self.base))
        return -(-largest // self.world.size)

    @property
    def lr_factor(self) -> float:
        """The factor by which the batch size changes the learning rate."""
        self.start_epoch(max(self.decided - 1, 0))
        return (self.size / self.base) ** self.lr_power

    # ---------------------------------------------------------------- an epoch

    def start_epoch(self, epoch: int) -> None:
        """Decide the batch size of an epoch, counted from 0, once."""
        if self.decided >= epoch + 1:
            return
        if self.rule is not None:
            self.size = self._nearest(self.rule.next_batch_size(epoch, self.size))
        self.shares = self.share_out(self.size)
        self.decided = epoch + 1

    def _nearest(self, target: float) -> int:
        """The batch size nearest to a target that the limits and the ranks allow."""
        return dynamic_batch.nearest_batch_size(
            target, self.base, low=self.low, high=self.high, unit=self.world.size
        )

    def share_out(self, size: int) -> list[int]:
        if self.balancer is None:
            return dynamic_batch.apportion(size, [1.0] * self.world.size)
        minimum = min(MIN_RANK_ROWS, size // self.world.size)
        return self.balancer.shares(size, self.shares, minimum=minimum)

    def _sizes(self, size: int) -> list[int]:
        """The sizes of the global batches of an epoch of batches of `size` rows."""
        return batch_sizes(self.rows_in_epoch, size, smallest=MIN_RANK_ROWS * self.world.size)

    def steps(self) -> int:
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
        loss: float,
        seconds: float,
        *,
        compute_seconds: float | None = None,
        noise: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Learn from the epoch that is over and decide the next one's batch size; collective.

        Args:
            loss: its mean training loss; that of rank 0 counts.
            seconds: this rank's time for all steps.
            compute_seconds: the same without waiting for other ranks, for the balancer.
            noise: the arguments of `NoiseScale.observe`, if they were measured.
        Returns:
            What the epoch's row in metrics.jsonl says of its batches.
        """
        row: dict[str, Any] = {}
        compute_seconds = seconds if compute_seconds is None else compute_seconds
        of_ranks = [[loss, seconds, compute_seconds, *(noise or {}).values()]]
        if self.changes or noise is not None:
            of_ranks = self.world.all_gather(of_ranks[0])
        losses, times, computed, *columns = zip(*of_ranks)
        if noise is not None:
            means = (statistics.fmean(each) if len({*each}) > 1 else each[0] for each in columns)
            row["noise_scale"] = self.noise_scale = self.noise.observe(**dict(zip(noise, means)))
        if self.rule is not None:
            slowest = max(times)
            self.rule.observe(self.size, losses[0], seconds=slowest, noise=self.noise_scale)
        if self.balancer is not None:
            shares = [self._shares_of(size) for size in self._sizes(self.size)]
            samples = [sum(mine) for mine in zip(*shares)]
            self.balancer.observe(samples, computed)
            speeds = [round(speed, 2) for speed in self.balancer.speeds]
            row |= {"shares": list(self.shares), "worker_samples_per_second": speeds}
        self.first_step = 0
        self.start_epoch(max(self.decided, 1))
        return row

    # ---------------------------------------------------------------- in a checkpoint

    def state_dict(self, steps_done: int = 0) -> dict[str, Any]:
        """Plain values, the same on all ranks.

        Args:
            steps_done: of the last iteration, as `enumerate(loader)` counts; a resumed run begins
                with the step after them. A data loader reads ahead, so only the loop can know.
        """
        rule = self.rule
        return {
            "rows": len(self.order),
            "first_step": self.first_step + steps_done,
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
        rule, stored_rule = self.rule, state["rule"]
        if rule is not None and stored_rule.get("kind") == type(rule).__name__:
            rule.load_state_dict(stored_rule)
        same_ranks = state["base"] == self.base and len(state["shares"]) == self.world.size
        if rule is None:
            self.size = self.base
        elif isinstance(rule, dynamic_batch.Scheduled):  # a function of the epoch alone
            self.size = self._nearest(rule.next_batch_size(max(self.decided - 1, 0), self.size))
        elif same_ranks and self.low <= state["size"] <= self.high:
            self.size = state["size"]
        else:
            self.size = self._nearest(self.base * state["size"] / state["base"])
        self.shares = dynamic_batch.apportion(self.size, [1.0] * self.world.size)
        if same_ranks and self.balancer is not None:
            self.balancer.load_state_dict(state)
            same_size = sum(state["shares"]) == self.size
            self.shares = list(state["shares"]) if same_size else self.share_out(self.size)
        same_rows = state.get("rows", len(self.order)) == len(self.order)  # else an epoch anew
        self.first_step = state.get("first_step", 0) * state["size"] // self.size * same_rows


def this_world() -> World:
    """The ranks of torch's default process group, or this process alone; collective."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return World()
    control = dist.new_group(backend="gloo")
    return World(dist.get_rank(), dist.get_world_size(), control=control)  # type: ignore[arg-type]
