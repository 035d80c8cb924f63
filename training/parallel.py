"""What ranks share in training, and when: gradients, shards of all tensors, or an optimizer's own.

    parallel = choose_parallel(model, optimizer, AllReduceHook(world))
    parallel.wrap(accumulates=False)              # before the first step
    parallel.sync_next(True)                      # before each micro-batch
    parallel.module(inputs)
    parallel.finish_step(skip)                    # after the optimizer's step
    parallel.sync_replicas(statistics)            # before an evaluation

The training loop asks nothing else of the ranks. One rank alone is no special case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from backends.torch_compat import ddp_buffer_arguments
from distributed import fsdp
from distributed.averaging import RankAverager, average_tensors
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from optimizers.base import CommunicatingOptimizer, global_norm

BUCKET_MIB = 25  # of gradients in one all-reduce


class Parallel:
    """Nothing but BatchNorm's statistics is shared; the base class of the three forms."""

    replicas_diverge = False  # whether weights and optimizer differ between the ranks at times
    skips_apart = False  # whether a rank may skip a step that another one takes
    passes_communicate = False  # whether all ranks must do the same number of passes

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.module = model  # what forward and backward passes go through, wrapped or not
        # In the order in which the optimizer's state numbers them.
        self.parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        # Called with each bucket of this rank's own gradients before it is sent.
        self.observers: list[Callable[[dist.GradBucket], None]] = []

    def wrap(self, *, accumulates: bool, varies: bool = False) -> None:
        """Prepare passes, while weights are alike; collective.

        Args:
            accumulates: whether a step may have several.
            varies: whether one may use other parameters of the model than another.
        """

    def sync_next(self, is_last: bool) -> None:
        """Let the next passes share gradients if `is_last`: if those are complete after them."""

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the Euclidean norm () of the gradients that this rank's optimizer steps along."""
        return global_norm(gradients)

    def clipping_norm(self, norm: Tensor) -> Tensor:
        """Return what gradients are clipped by, of what `norm` returned."""
        return norm

    def finish_step(self, skip: Tensor) -> Tensor:
        """End an optimizer step; return whether it was skipped, (), of which `skip` is a guess."""
        return skip

    def sync_replicas(self, statistics: Sequence[Tensor]) -> None:
        """Give all ranks the same weights, and the mean of statistics; collective."""
        average_tensors(statistics, RankAverager())

    def start_epoch(self, epoch: int) -> None:
        """Apply what is scheduled by epochs, counted from 0."""

    def epoch_metrics(self) -> dict[str, float]:
        return {}

    def whole_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state_dicts of model and optimizer; collective.

        The tensors are whole on rank 0. On other ranks they may be None where all have the same.
        """
        return self.model.state_dict(), self.optimizer.state_dict()

    def own_part(
        self, weights: dict[str, Any], moments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what this rank's model and optimizer load of `whole_state`."""
        return weights, copy.deepcopy(moments)  # torch keeps the tensors of an optimizer themselves

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside model and optimizer, alike on all ranks."""
        return {}

    def rank_state_dict(self) -> dict[str, Tensor]:
        """Return what it needs of this rank; for other numbers of ranks the mean is taken."""
        return {}

    def load_state_dicts(self, state: dict[str, Any], rank_state: dict[str, Tensor]) -> None:
        """Load what the two returned, after model and optimizer have been loaded; collective."""


class AllReduce(Parallel):
    """Gradients, or weights, are sent by a hook of DistributedDataParallel."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, hook: AllReduceHook
    ) -> None:
        super().__init__(model, optimizer, hook.world)
        self.hook, self.observers = hook, hook.observers
        self.replicas_diverge = self.skips_apart = hook.replicas_diverge

    def wrap(self, *, accumulates: bool, varies: bool = False) -> None:
        """Wrap the model, so that the all-reduce of buckets overlaps the backward pass."""
        if self.world.size > 1:
            wrapped = DistributedDataParallel(
                self.model,
                gradient_as_bucket_view=True,
                # torch's reducer cannot know that the same parameters get a gradient in every
                # backward pass, and accumulate gradients (pytorch #143580).
                static_graph=not accumulates and not varies,
                find_unused_parameters=varies,
                bucket_cap_mb=BUCKET_MIB,
                **ddp_buffer_arguments(),  # type: ignore[arg-type]
            )
            wrapped.register_comm_hook(None, self.hook.run)
            self.module = wrapped
        self.hook.start(self.parameters)

    def sync_next(self, is_last: bool) -> None:
        if isinstance(self.module, DistributedDataParallel):
            self.module.require_backward_grad_sync = is_last

    def finish_step(self, skip: Tensor) -> Tensor:
        self.hook.after_step(self.parameters)
        return skip

    def sync_replicas(self, statistics: Sequence[Tensor]) -> None:
        super().sync_replicas(statistics)
        self.hook.sync_replicas(self.parameters)

    def state_dict(self) -> dict[str, Any]:
        return self.hook.state_dict(self.parameters)

    def rank_state_dict(self) -> dict[str, Tensor]:
        return self.hook.rank_state_dict(self.parameters)

    def load_state_dicts(self, state: dict[str, Any], rank_state: dict[str, Tensor]) -> None:
        self.hook.load_state_dict(state, self.parameters)
        self.hook.load_rank_state_dict(rank_state, self.parameters)


class Sharded(Parallel):
    """A model that `fsdp.shard` has cut, with an optimizer of its shards; no bytes are counted."""

    passes_communicate = True

    def sync_next(self, is_last: bool) -> None:
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return super().norm(gradients).full_tensor()  # type: ignore[attr-defined]

    def whole_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        weights, moments = super().whole_state()
        keep = self.world.is_main
        return fsdp.gather(weights, keep=keep), fsdp.gather(moments, keep=keep)

    def own_part(
        self, weights: dict[str, Any], moments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        own, parameters = self.model.state_dict(), dict(enumerate(self.parameters))
        shards = {
            name: fsdp.distribute_like(value, own.get(name, value))
            for name, value in weights.items()
        }
        state = {
            number: {
                name: fsdp.distribute_like(value, parameters[number])
                for name, value in values.items()
            }
            for number, values in moments["state"].items()
            if number in parameters
        }
        return shards, {**moments, "state": state}


class OwnExchange(Parallel):
    """An optimizer that communicates by itself, and takes each rank's own gradients."""

    replicas_diverge = True
    optimizer: CommunicatingOptimizer

    def clipping_norm(self, norm: Tensor) -> Tensor:
        """Return the root of the mean square over the ranks."""
        return (self.world.sum(norm.square()) / self.world.size).sqrt()

    def finish_step(self, skip: Tensor) -> Tensor:
        self.world.traffic += self.optimizer.take_traffic()
        return self.optimizer.skipped > 0

    def sync_replicas(self, statistics: Sequence[Tensor]) -> None:
        super().sync_replicas(statistics)
        self.optimizer.average_weights()
        self.world.traffic += self.optimizer.take_traffic()

    def start_epoch(self, epoch: int) -> None:
        self.optimizer.start_epoch(epoch)

    def epoch_metrics(self) -> dict[str, float]:
        return self.optimizer.epoch_metrics()


def choose_parallel(
    model: nn.Module, optimizer: torch.optim.Optimizer, hook: AllReduceHook
) -> Parallel:
    """Return the form that model and optimizer are made for; the hook is of the first one."""
    if isinstance(optimizer, CommunicatingOptimizer):
        return OwnExchange(model, optimizer, hook.world)
    if fsdp.is_sharded(model):
        return Sharded(model, optimizer, hook.world)
    return AllReduce(model, optimizer, hook)
