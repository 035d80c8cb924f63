"""Everything of a run that a checkpoint holds, each part through the `state_dict` of its owner.

parts = TrainState(world, parallel=parallel, batches=batches, sums=sums, scaler=scaler)
state = parts.state_dict()            # collective; plain tensors, numbers, lists and dicts
parts.load_state_dict(state)          # bit for bit with the same flags on as many ranks
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from distributed.averaging import Traffic
from distributed.world import World
from errors import InputError
from training.batch_sampler import DynamicBatchSampler
from training.checkpoint import is_plain, load_into, rng_states, set_rng_states, to_cpu
from training.meta_learner import MetaLearner
from training.parallel import Parallel
from training.step_stats import ComputeTimer, StepSums
from training.weight_average import OWN_BUFFERS, WeightAverage

BASES = ("directions", "axis")  # how states of NGD and KaldiNGD begin that have no mean


@dataclass(frozen=True, eq=False)
class TrainState:
    """The parts of a run that have a state, beside its progress."""

    world: World  # random states and traffic of each rank
    _: KW_ONLY
    parallel: Parallel  # with model and optimizer
    batches: DynamicBatchSampler
    sums: StepSums
    scaler: Any  # of the loss
    average: WeightAverage | None = None
    meta_learner: MetaLearner | None = None
    compute_timer: ComputeTimer | None = None

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks, complete on rank 0; collective.

        Saving in the middle of an epoch does not change the run: each rank stores BatchNorm
        statistics of its own, and where replicas diverge also weights and optimizer. The entry
        `model`, for inference, holds rank 0's weights, or the whole weights of a sharded model.
        """
        parallel, meta_learner = self.parallel, self.meta_learner
        weights, moments = parallel.whole_state()
        moments = _plain_moments(moments)
        return {
            "model": weights,
            "optimizer": None if parallel.replicas_diverge else moments,
            "optimizer_kind": type(parallel.optimizer).__name__,
            "hook": parallel.state_dict(),
            "scaler": self.scaler.state_dict(),
            "learner": meta_learner.state_dict() if meta_learner is not None else None,
            "average": self.average.state_dict() if self.average is not None else None,
            "batching": self.batches.state_dict(),
            "ranks": self.world.gather(self._rank_state(weights, moments)),
        }

    def shown_state(self) -> dict[str, Any]:
        """Return a copy of the weights that inference takes, complete on rank 0; collective."""
        average = self.average.state_dict() if self.average is not None else None
        return to_cpu({"model": self.parallel.whole_state()[0], "average": average})

    def _rank_state(self, weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
        diverge, timer = self.parallel.replicas_diverge, self.compute_timer
        meta_learner = self.meta_learner
        own = "" if diverge else OWN_BUFFERS  # every name ends with ""
        return {
            "random": rng_states(self.world.device),
            "weights": {name: value.cpu() for name, value in weights.items() if name.endswith(own)},
            "average": self.average.own_state() if self.average is not None else {},
            "optimizer": to_cpu(moments) if diverge else None,
            "hook": self.parallel.rank_state_dict(),
            "learner": meta_learner.rank_state_dict() if meta_learner is not None else {},
            "sums": self.sums.values.cpu(),
            "bytes_sent": self.world.traffic.payload,
            "wire_bytes": self.world.traffic.wire,
            "compute_seconds": timer.elapsed() if timer is not None else 0.0,
            "scaler": self.scaler.state_dict(),
        }

    # ---------------------------------------------------------------- loading

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; collective.

        The parts of ranks are merged for another number of them, and where replicas diverge no
        more. A state that does not fit the flags is refused.
        """
        kind, stored_kind = type(self.parallel.optimizer).__name__, state["optimizer_kind"]
        if kind != stored_kind:  # torch would take another optimizer's state
            raise InputError(
                f"the checkpoint's optimizer is {stored_kind}, not {kind}; "
                "use the flags of the first run"
            )
        if not has_moments(state):
            raise InputError(
                f"the checkpoint lacks the state of {kind}, which torch does not read back; its "
                "weights do for another use, but the run cannot go on"
            )
        ranks, weights, moments = state["ranks"], state["model"], state["optimizer"]
        average, scaler = state["average"], state["scaler"]
        come_together = moments is None and not self.parallel.replicas_diverge
        if len(ranks) == self.world.size and not come_together:
            mine = copy.deepcopy(ranks[self.world.rank])  # so that nothing of it stays in the file
            if average:
                average["weights"] = {**average["weights"], **mine["average"]}
            weights, moments = {**weights, **mine["weights"]}, moments or mine["optimizer"]
            set_rng_states(mine["random"], self.world.device)
            self.sums.values.copy_(mine["sums"])
            self.world.traffic = Traffic(mine["bytes_sent"], mine["wire_bytes"])
            if self.compute_timer is not None:
                self.compute_timer.go_on(mine["compute_seconds"])
            of_hook, scaler = mine["hook"], mine["scaler"]
        else:
            of_hook = _mean_tensors([rank["hook"] for rank in ranks])
            self.sums.load_merged([rank["sums"] for rank in ranks], self.world)
            weights = {**weights, **_mean_tensors([rank["weights"] for rank in ranks])}
            if average:
                own = _mean_tensors([rank["average"] for rank in ranks])
                average["weights"] = {**average["weights"], **own}
            if moments is None:
                moments = merge_optimizer_states([rank["optimizer"] for rank in ranks])
        weights, moments = self.parallel.own_part(weights, moments)
        load_into(self.parallel.model, weights, "model")
        _load_optimizer(self.parallel.optimizer, moments)
        if self.average is not None and average:
            self.average.load_state_dict(average)
        elif self.average is not None:  # it is new; what it has by now may not be finite
            self.average.start(self.parallel.model)
        self.parallel.load_state_dicts(state["hook"], of_hook)
        self.batches.load_state_dict(state["batching"])
        if self.scaler.is_enabled() and scaler:
            self.scaler.load_state_dict(scaler)
        if self.meta_learner is not None and state["learner"]:
            load_into(self.meta_learner, state["learner"], "mixing policy")
            self.batches.order.until = self.meta_learner.until
            parts = [rank["learner"] for rank in ranks]
            if len(ranks) == self.world.size:
                self.meta_learner.load_rank_state_dict(parts[self.world.rank])
            elif self.world.is_main:
                self.meta_learner.load_rank_state_dict(
                    {name: sum(part[name] for part in parts) for name in parts[0]}
                )


def has_moments(state: Mapping[str, Any]) -> bool:
    """Whether a run can go on from what `TrainState.state_dict` returned."""
    return (state["optimizer"] or state["ranks"][0]["optimizer"]).get("state", {}) is not None


def _plain_moments(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state_dict without what torch does not read back under weights_only.

    Settings that are objects stay those of the flags. Where moments, or what else an optimizer of
    somebody's own has, are objects, there is no state: None.
    """
    rest = {name: value for name, value in state.items() if name != "param_groups"}
    if not is_plain(rest):
        return {"state": None}
    if "param_groups" not in state:  # as of one that wraps another
        return rest
    groups = [{k: v for k, v in group.items() if is_plain(v)} for group in state["param_groups"]]
    return {**rest, "param_groups": groups}


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments, counters and the last rate; all other settings stay those of the flags."""
    names = optimizer.defaults.keys() - {"lr"}
    settings = [
        {name: value for name, value in group.items() if name in names or not is_plain(value)}
        for group in optimizer.param_groups
    ]
    load_into(optimizer, state, "optimizer")
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


def merge_optimizer_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer state_dict of those of all ranks, for another number of ranks to go on from.

    Each rank takes it, so that the mean of the ranks' moments, tensors of any name, stays as it
    was. A rank that skipped all steps has none.
    """
    merged = {}
    for number in sorted({number for state in states for number in state["state"]}):
        first, *others = (each["state"][number] for each in states if number in each["state"])
        moments = {
            name: value
            for name, value in first.items()
            if isinstance(value, Tensor) and value.ndim and not name.startswith(BASES)
        }
        merged[number] = {**first, **_mean_tensors([moments, *others])}
    return {**states[0], "state": merged}


def _mean_tensors(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the floating tensors of several state_dicts; the others are the first one's."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
