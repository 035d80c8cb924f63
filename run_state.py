"""What a checkpoint holds of the training step: weights, optimizer, batches, and what is each rank's own.

state = run_state.gather(step, batching)            # collective; plain tensors, numbers, lists and dicts
run_state.restore(step, batching, state)            # on as many ranks bit for bit, on others as near as can be
"""

from __future__ import annotations

from typing import Any

import checkpoint
from batching import Batching
from slamb import merge
from step import SKIPPED, Step


def gather(step: Step, batching: Batching) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0.

    Saving in mid-epoch leaves the run as it is: each rank's BatchNorm statistics, and where the ranks are apart its weights and
    optimizer, are kept as they are; the entry `model`, for inference, holds rank 0's.
    """
    weights, optimizer = step.model.state_dict(), step.optimizer.state_dict()
    buffers = [name for name, _ in step.model.named_buffers() if name in weights]
    mine = {
        "random": checkpoint.random_states(step.world.device),
        "weights": {name: weights[name].cpu() for name in (weights if step.apart else buffers)},
        "optimizer": checkpoint.on_cpu(optimizer) if step.apart else None,
        "sums": step.sums.cpu(),
        "bytes_sent": step.world.bytes_sent,
        "compute_seconds": step.watch.so_far() if step.watch is not None else 0.0,
    }
    return {
        "model": weights,
        "optimizer": None if step.apart else optimizer,
        "hook": step.hook.state_dict(step.parameters),
        "scaler": step.scaler.state_dict(),
        "learner": step.learner.state_dict() if step.learner is not None else None,
        "batching": batching.state_dict(),
        "ranks": step.world.gather(mine),
    }


def restore(step: Step, batching: Batching, state: dict[str, Any]) -> None:
    """Undo to `gather`. At another world size the ranks' parts are merged."""
    ranks, weights, optimizer = state["ranks"], state["model"], state["optimizer"]
    same_world = len(ranks) == step.world.size
    if same_world:
        mine = ranks[step.world.rank]
        weights, optimizer = {**weights, **mine["weights"]}, optimizer or mine["optimizer"]
        checkpoint.set_random_states(mine["random"], step.world.device)
        step.sums.copy_(mine["sums"])
        step.world.bytes_sent = mine["bytes_sent"]
        if step.watch is not None:
            step.watch.seconds = mine["compute_seconds"]
    else:
        step.sums.copy_(ranks[0]["sums"])
        step.sums[:SKIPPED] = sum(rank["sums"][:SKIPPED] for rank in ranks) if step.world.first else 0
        if optimizer is None:
            weights = checkpoint.mean([rank["weights"] for rank in ranks])
            optimizer = merge([rank["optimizer"] for rank in ranks])
    checkpoint.load_into(step.model, weights, "model")
    checkpoint.load_optimizer(step.optimizer, optimizer)
    step.hook.load_state_dict(state["hook"], step.parameters)
    batching.load_state_dict(state["batching"])
    if step.scaler.is_enabled() and state["scaler"]:
        step.scaler.load_state_dict(state["scaler"])
    if step.learner is not None and state["learner"]:
        checkpoint.load_into(step.learner, state["learner"], "mixing policy")
