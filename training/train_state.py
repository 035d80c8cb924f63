"""Everything of a run that a checkpoint holds, each part through the `state_dict` of its owner.

state = trainer.state_dict()           # collective; plain tensors, numbers, lists and dicts
trainer.load_state_dict(state)         # bit for bit on as many ranks; on others parts are merged
trainer.save()                         # collective; last.pt of the run folder, and best.pt
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed import fsdp
from distributed.averaging import Traffic
from distributed.comm_hooks import AllReduceHook
from distributed.world import World
from errors import InputError
from training import checkpoint
from training.batch_sampler import DynamicBatchSampler
from training.checkpoint import load_into, rng_states, set_rng_states, to_cpu
from training.meta_mixup_step import MetaMixupStep
from training.progress import Progress
from training.run_log import RunLog
from training.step_stats import ComputeTimer, StepSums
from training.weight_average import WeightAverage

MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}  # of which ranks keep their own


class TrainState:
    """The state of a run; `Trainer` is the class that has these attributes.

    Attributes:
        model, optimizer, scaler: as the training step uses them; the model is not wrapped for data
            parallelism.
        comm_hook, batches, sums, world: what sends, what comes next, what was added up, and the
            ranks.
        compute_timer, meta_learner, average: None where the run has none.
        replicas_diverge: each rank has weights and optimizer of its own between averagings.
        progress, metadata: what checkpoints hold beside all of that; see `Trainer`.
        log: of the run folder.
        keep: how many checkpoints stay; those before last.pt are last-1.pt, last-2.pt and so on.
        unsaved: of 'last' and 'best', what the last save failed to write; the same on all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    comm_hook: AllReduceHook
    batches: DynamicBatchSampler
    sums: StepSums
    world: World
    compute_timer: ComputeTimer | None
    meta_learner: MetaMixupStep | None
    replicas_diverge: bool
    average: WeightAverage | None
    progress: Progress
    metadata: dict[str, Any]
    log: RunLog
    keep: int
    unsaved: set[str]

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters, in the order in which its state numbers them."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    # ---------------------------------------------------------------- saving

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, complete on rank 0; collective.

        Saving in the middle of an epoch does not change the run: each rank stores BatchNorm
        statistics of its own, and where replicas diverge also weights and optimizer. The entry
        `model`, for inference, holds rank 0's weights, or the whole weights of a sharded model.
        """
        weights, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        meta_learner = self.meta_learner
        if fsdp.is_sharded(self.model):
            weights, optimizer = (
                fsdp.gather(each, keep=self.world.is_main) for each in (weights, optimizer)
            )
        return {
            "model": weights,
            "optimizer": None if self.replicas_diverge else optimizer,
            "optimizer_kind": type(self.optimizer).__name__,
            "hook": self.comm_hook.state_dict(self.parameters),
            "scaler": self.scaler.state_dict(),
            "learner": meta_learner.state_dict() if meta_learner is not None else None,
            "average": self.average.state_dict() if self.average is not None else None,
            "batching": self.batches.state_dict(),
            "ranks": self.world.gather(self._rank_state(weights, optimizer)),
        }

    def _rank_state(self, weights: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
        """What is this rank's own."""
        buffers = [name for name, _ in self.model.named_buffers() if name in weights]
        own_names = weights if self.replicas_diverge else buffers
        timer, meta_learner = self.compute_timer, self.meta_learner
        return {
            "random": rng_states(self.world.device),
            "weights": {name: weights[name].cpu() for name in own_names},
            "average": self.average.own_state() if self.average is not None else {},
            "optimizer": to_cpu(optimizer) if self.replicas_diverge else None,
            "hook": self.comm_hook.rank_state_dict(self.parameters),
            "learner": meta_learner.rank_state_dict() if meta_learner is not None else {},
            "sums": self.sums.values.cpu(),
            "bytes_sent": self.world.traffic.payload,
            "wire_bytes": self.world.traffic.wire,
            "compute_seconds": timer.elapsed() if timer is not None else 0.0,
        }

    # ---------------------------------------------------------------- loading

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`; collective. With another number of ranks their parts are merged.

        Raises:
            InputError: the state does not fit the flags.
        """
        kind, stored_kind = type(self.optimizer).__name__, state["optimizer_kind"]
        if kind != stored_kind:  # torch would take another optimizer's state
            raise InputError(
                f"--resume: the checkpoint's optimizer is {stored_kind}, not {kind}; "
                "use the flags of the first run"
            )
        ranks, weights, optimizer = state["ranks"], state["model"], state["optimizer"]
        average = state.get("average")
        if len(ranks) == self.world.size:
            mine = copy.deepcopy(ranks[self.world.rank])  # so that nothing of it stays in the file
            if average:
                average["weights"] = {**average["weights"], **mine["average"]}
            weights, optimizer = {**weights, **mine["weights"]}, optimizer or mine["optimizer"]
            set_rng_states(mine["random"], self.world.device)
            self.sums.values.copy_(mine["sums"])
            self.world.traffic = Traffic(mine["bytes_sent"], mine.get("wire_bytes", 0.0))
            if self.compute_timer is not None:
                self.compute_timer.seconds = mine["compute_seconds"]
            of_hook = mine["hook"]
        else:
            of_hook = _mean_tensors([rank["hook"] for rank in ranks])
            self.sums.load_merged([rank["sums"] for rank in ranks], self.world)
            if optimizer is None:
                weights = _mean_tensors([rank["weights"] for rank in ranks])
                optimizer = merge_optimizer_states([rank["optimizer"] for rank in ranks])
        self._load_weights(weights, optimizer)
        if self.average is not None and average:
            self.average.load_state_dict(average)
        self.comm_hook.load_state_dict(state["hook"], self.parameters)
        self.comm_hook.load_rank_state_dict(of_hook, self.parameters)
        self.batches.load_state_dict(state["batching"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.meta_learner is not None and state["learner"]:
            load_into(self.meta_learner, state["learner"], "mixing policy")
            parts = [rank["learner"] for rank in ranks]
            if len(ranks) == self.world.size:
                self.meta_learner.load_rank_state_dict(parts[self.world.rank])
            elif self.world.is_main:
                self.meta_learner.load_rank_state_dict(
                    {name: sum(part[name] for part in parts) for name in parts[0]}
                )

    def _load_weights(self, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Load weights and moments, and cut them into shards where the model is sharded."""
        if not fsdp.is_sharded(self.model):
            load_into(self.model, weights, "model")
            # A copy, since torch keeps the tensors themselves.
            load_into(self.optimizer, copy.deepcopy(optimizer), "optimizer")
            return
        own = self.model.state_dict()
        weights = {
            name: fsdp.distribute_like(value, own.get(name, value))
            for name, value in weights.items()
        }
        load_into(self.model, weights, "model")
        parameters = self.parameters
        moments = {
            number: {
                key: fsdp.distribute_like(value, parameters[number])
                for key, value in values.items()
            }
            for number, values in optimizer["state"].items()
            if number < len(parameters)
        }
        load_into(self.optimizer, {**optimizer, "state": moments}, "optimizer")

    # ---------------------------------------------------------------- files

    def save(self, *, previous_best: dict[str, Any] | None = None) -> None:
        """Write last.pt, and before it best.pt if it is the best; collective.

        Where that fails, as on a full disk, it is reported and the run goes on; `unsaved` then
        names the files.

        Args:
            previous_best: the best epoch before, if this one is the best. It becomes that of the
                progress again if best.pt cannot be written, so that a later epoch can be the best.
        """
        is_best = previous_best is not None
        unsaved = {"last", "best"} if is_best else {"last"}
        with self.world.waiting_at_most(self.world.limits.start):
            content = {
                **self.metadata,
                **self.state_dict(),
                "progress": self.progress.state_dict(),
            }
            try:
                if self.world.is_main:
                    if is_best:
                        checkpoint.save(self.log.folder / "best.pt", content)
                        unsaved.discard("best")
                    checkpoint.save_last(self.log.folder, content, keep=self.keep)
                    unsaved.discard("last")
            except OSError as error:
                self.log.info(
                    f"warning: {error}; the previous checkpoint is kept and the run goes on"
                )
            self.unsaved = self.world.broadcast(unsaved)
        if previous_best is not None and "best" in self.unsaved:
            self.progress.best = previous_best

    def settle_files(self, path: Path) -> None:
        """Settle last.pt and best.pt after a resume; collective.

        An older checkpoint takes the name of last.pt, which is damaged. The best epoch is chosen
        anew if best.pt does not hold it: in another run folder, or where best.pt is damaged or of
        an epoch that the lost last.pt had reached.

        Args:
            path: the checkpoint that was loaded, on every rank.
        """
        folder, progress, epoch = self.log.folder, self.progress, self.progress.best["epoch"]
        is_older = checkpoint.OLDER_NAME.fullmatch(path.name)
        if self.world.is_main and is_older and path.resolve().parent == folder.resolve():
            path.replace(folder / "last.pt")
        if self.world.is_main and epoch:
            stored = checkpoint.read_progress(folder / "best.pt")
            if stored is None or stored["best"]["epoch"] != epoch:
                self.log.info(
                    f"best.pt of epoch {epoch} is not in {folder}: "
                    "the best epoch is chosen from here on"
                )
                progress.best = Progress().best
        progress.best = self.world.broadcast(progress.best)


def merge_optimizer_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One optimizer state_dict of those of all ranks, for another number of ranks to go on from.

    Each rank takes it, so that the mean of the ranks' moments stays as it was.
    """
    merged = {}
    for number, first in states[0]["state"].items():
        of_ranks = [state["state"][number] for state in states]
        moments = [{name: each[name] for name in first if name in MOMENTS} for each in of_ranks]
        merged[number] = {**first, **_mean_tensors(moments)}
    return {**states[0], "state": merged}


def _mean_tensors(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the floating tensors of several state_dicts; the others are the first one's."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }
