"""What a checkpoint holds of the training step: weights, optimizer, batches, and what is each rank's own.

state = run_state.gather(step, batching)            # collective; plain tensors, numbers, lists and dicts
run_state.restore(step, batching, state)            # on as many ranks bit for bit, on others as near as can be
keeper = Keeper(step, batching, log, header)        # last.pt and best.pt of a run folder
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from distributed import fsdp, sharded_checkpoint
from errors import InputError
from training import checkpoint
from training.batch_schedule import BatchSchedule
from training.run_log import RunLog
from training.step import SKIPPED, Step


def gather(step: Step, batching: BatchSchedule) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0.

    Saving in mid-epoch leaves the run as it is: each rank's BatchNorm statistics, and where the ranks are apart its weights and
    optimizer, are kept as they are; the entry `model`, for inference, holds rank 0's.
    """
    weights, optimizer = step.model.state_dict(), step.optimizer.state_dict()
    in_shards = fsdp.is_sharded(step.model)  # then `sharding.save` writes both
    buffers = [name for name, _ in step.model.named_buffers() if name in weights]
    mine = {
        "random": checkpoint.rng_states(step.world.device),
        "weights": {
            name: weights[name].cpu() for name in (weights if step.replicas_diverge else buffers)
        },
        "optimizer": checkpoint.to_cpu(optimizer) if step.replicas_diverge else None,
        "sums": step.sums.cpu(),
        "bytes_sent": step.world.bytes_sent,
        "compute_seconds": step.watch.so_far() if step.watch is not None else 0.0,
    }
    return {
        "model": {} if in_shards else weights,
        "optimizer": None if step.replicas_diverge or in_shards else optimizer,
        "optimizer_kind": type(step.optimizer).__name__,
        "hook": step.hook.state_dict(step.parameters),
        "scaler": step.scaler.state_dict(),
        "learner": step.learner.state_dict() if step.learner is not None else None,
        "batching": batching.state_dict(),
        "ranks": step.world.gather(mine),
    }


def restore(step: Step, batching: BatchSchedule, state: dict[str, Any]) -> None:
    """Undo to `gather`. At another world size the ranks' parts are merged."""
    ranks, weights, optimizer = state["ranks"], state["model"], state["optimizer"]
    same_world = len(ranks) == step.world.size
    if same_world:
        mine = ranks[step.world.rank]
        weights, optimizer = {**weights, **mine["weights"]}, optimizer or mine["optimizer"]
        checkpoint.set_rng_states(mine["random"], step.world.device)
        step.sums.copy_(mine["sums"])
        step.world.bytes_sent = mine["bytes_sent"]
        if step.watch is not None:
            step.watch.seconds = mine["compute_seconds"]
    else:
        step.sums.copy_(ranks[0]["sums"])
        step.sums[:SKIPPED] = (
            sum(rank["sums"][:SKIPPED] for rank in ranks) if step.world.is_main else 0
        )
        if optimizer is None and not state.get("shards"):
            weights = checkpoint.mean([rank["weights"] for rank in ranks])
            optimizer = merge([rank["optimizer"] for rank in ranks])
    if state.get("shards"):
        if (kind := type(step.optimizer).__name__) != state["optimizer_kind"]:
            raise InputError(
                f"--resume: the checkpoint's optimizer is {state['optimizer_kind']}, not {kind}; use the flags of the first run"
            )
        sharded_checkpoint.load(Path(state["shards"]), step.model, step.optimizer, step.world)
        step.model.load_state_dict(weights, strict=False)  # this rank's buffers
    else:
        load_whole(step, weights, optimizer)
    step.moved()
    step.hook.load_state_dict(state["hook"], step.parameters)
    batching.load_state_dict(state["batching"])
    if step.scaler.is_enabled() and state["scaler"]:
        step.scaler.load_state_dict(state["scaler"])
    if step.learner is not None and state["learner"]:
        checkpoint.load_into(step.learner, state["learner"], "mixing policy")


def load_whole(step: Step, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Load what is in one piece, into shards where the step has them."""
    own = step.model.state_dict()
    weights = {name: fsdp.spread(value, own.get(name, value)) for name, value in weights.items()}
    checkpoint.load_into(step.model, weights, "model")
    moments = {
        number: {key: fsdp.spread(value, step.parameters[number]) for key, value in moments.items()}
        for number, moments in optimizer["state"].items()
        if number < len(step.parameters)
    }
    checkpoint.load_optimizer(
        step.optimizer,
        {**optimizer, "state": moments} if fsdp.is_sharded(step.model) else optimizer,
    )


class CheckpointManager:
    """Writes last.pt and best.pt of a run folder, and beside them the weights that are in shards.

    Args:
        step, batching: whose state it is.
        log: the run folder and the console.
        header: plain values at the top of every checkpoint (script, flags, what inference needs).
    """

    def __init__(
        self, step: Step, batching: BatchSchedule, log: RunLog, metadata: dict[str, Any]
    ) -> None:
        self.step, self.batching, self.log, self.metadata = step, batching, log, metadata
        self.shards: dict[str, str] = {}  # of 'last' and 'best': the folder's name

    def save(self, progress: dict[str, Any], best: bool = False) -> None:
        """Write last.pt (and best.pt); a full disk is reported, the previous file kept, and the run goes on. Collective."""
        world, folder, step = self.step.world, self.log.folder, self.step
        shards = (
            world.broadcast(sharded_checkpoint.next_name(folder))
            if fsdp.is_sharded(step.model)
            else ""
        )
        state = {
            **self.metadata,
            **gather(step, self.batching),
            "progress": progress,
            "shards": shards,
        }
        try:
            if shards:
                sharded_checkpoint.save(folder / shards, step.model, step.optimizer, world)
            if not world.is_main:
                return
            checkpoint.save(folder / "last.pt", state)
            self.shards["last"] = shards
            if best:
                checkpoint.link_checkpoint(folder / "last.pt", "best.pt")
                self.shards["best"] = shards
        except OSError as error:
            self.log.info(f"warning: {error}; the previous checkpoint is kept and the run goes on")
        if world.is_main:
            sharded_checkpoint.tidy(folder, set(self.shards.values()))

    def restore(self, state: dict[str, Any]) -> None:
        """Undo to `save`, but for the progress."""
        restore(self.step, self.batching, state)
        folder = self.log.folder
        if self.step.world.is_main and any(folder.glob("shards-*")):
            for path in (folder / "last.pt", folder / "best.pt"):
                if path.exists():
                    self.shards[path.stem] = Path(
                        checkpoint.load(path, self.metadata["script"]).get("shards", "")
                    ).name

    def load_last(self) -> dict[str, Any]:
        """The state in last.pt."""
        return checkpoint.load(self.log.folder / "last.pt", self.metadata["script"])


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state_dict of those of all ranks, for another number of ranks: each takes it, and mean moments stay as they were."""
    merged = {
        **states[0],
        "state": {number: dict(values) for number, values in states[0]["state"].items()},
    }
    for number, values in merged["state"].items():
        for name in values.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
            values[name] = torch.stack([state["state"][number][name] for state in states]).mean(0)
    return merged
