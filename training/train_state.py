"""Everything of a run that a checkpoint holds, each part through the `state_dict` of its owner.

state = state_dict(trainer)            # collective; plain tensors, numbers, lists and dicts
load_state_dict(trainer, state)        # bit for bit with the same flags on as many ranks
save(trainer)                          # collective; last.pt of the run folder, and best.pt
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from distributed import fsdp
from distributed.agreement import on_main
from distributed.averaging import Traffic
from errors import InputError
from training import checkpoint
from training.checkpoint import load_into, rng_states, set_rng_states, to_cpu
from training.progress import Progress
from training.weight_average import OWN_BUFFERS, WeightAverage

if TYPE_CHECKING:
    from training.trainer import Trainer

MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}  # of which ranks keep their own


# -------------------------------------------------------------------- saving


def state_dict(trainer: Trainer) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0; collective.

    Saving in the middle of an epoch does not change the run: each rank stores BatchNorm statistics
    of its own, and where replicas diverge also weights and optimizer. The entry `model`, for
    inference, holds rank 0's weights, or the whole weights of a sharded model.
    """
    weights, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    meta_learner = trainer.meta_learner
    if fsdp.is_sharded(trainer.model):
        weights, optimizer = (
            fsdp.gather(each, keep=trainer.world.is_main) for each in (weights, optimizer)
        )
    return {
        "model": weights,
        "optimizer": None if trainer.replicas_diverge else optimizer,
        "optimizer_kind": type(trainer.optimizer).__name__,
        "hook": trainer.comm_hook.state_dict(trainer.parameters),
        "scaler": trainer.scaler.state_dict(),
        "learner": meta_learner.state_dict() if meta_learner is not None else None,
        "average": trainer.average.state_dict() if trainer.average is not None else None,
        "batching": trainer.batches.state_dict(),
        "ranks": trainer.world.gather(_rank_state(trainer, weights, optimizer)),
    }


def _rank_state(
    trainer: Trainer, weights: dict[str, Any], optimizer: dict[str, Any]
) -> dict[str, Any]:
    """What is this rank's own."""
    own = "" if trainer.replicas_diverge else OWN_BUFFERS  # every name ends with ""
    timer, meta_learner = trainer.compute_timer, trainer.meta_learner
    return {
        "random": rng_states(trainer.world.device),
        "weights": {name: value.cpu() for name, value in weights.items() if name.endswith(own)},
        "average": trainer.average.own_state() if trainer.average is not None else {},
        "optimizer": to_cpu(optimizer) if trainer.replicas_diverge else None,
        "hook": trainer.comm_hook.rank_state_dict(trainer.parameters),
        "learner": meta_learner.rank_state_dict() if meta_learner is not None else {},
        "sums": trainer.sums.values.cpu(),
        "bytes_sent": trainer.world.traffic.payload,
        "wire_bytes": trainer.world.traffic.wire,
        "compute_seconds": timer.elapsed() if timer is not None else 0.0,
        "scaler": trainer.scaler.state_dict(),
    }


# -------------------------------------------------------------------- loading


def load_state_dict(trainer: Trainer, state: dict[str, Any]) -> None:
    """Inverse of `state_dict`; collective.

    The parts of ranks are merged for another number of them, and where replicas diverge no more.

    Raises:
        InputError: the state does not fit the flags.
    """
    kind, stored_kind = type(trainer.optimizer).__name__, state["optimizer_kind"]
    if kind != stored_kind:  # torch would take another optimizer's state
        raise InputError(
            f"--resume: the checkpoint's optimizer is {stored_kind}, not {kind}; "
            "use the flags of the first run"
        )
    ranks, weights, optimizer = state["ranks"], state["model"], state["optimizer"]
    average, scaler = state["average"], state["scaler"]
    come_together = optimizer is None and not trainer.replicas_diverge
    if len(ranks) == trainer.world.size and not come_together:
        mine = copy.deepcopy(ranks[trainer.world.rank])  # so that nothing of it stays in the file
        if average:
            average["weights"] = {**average["weights"], **mine["average"]}
        weights, optimizer = {**weights, **mine["weights"]}, optimizer or mine["optimizer"]
        set_rng_states(mine["random"], trainer.world.device)
        trainer.sums.values.copy_(mine["sums"])
        trainer.world.traffic = Traffic(mine["bytes_sent"], mine["wire_bytes"])
        if trainer.compute_timer is not None:
            trainer.compute_timer.seconds = mine["compute_seconds"]
            trainer.compute_timer.spans.clear()
        of_hook, scaler = mine["hook"], mine["scaler"]
    else:
        of_hook = _mean_tensors([rank["hook"] for rank in ranks])
        trainer.sums.load_merged([rank["sums"] for rank in ranks], trainer.world)
        if optimizer is None:
            weights = _mean_tensors([rank["weights"] for rank in ranks])
            optimizer = merge_optimizer_states([rank["optimizer"] for rank in ranks])
    _load_weights(trainer, weights, optimizer)
    if trainer.average is not None and average:
        trainer.average.load_state_dict(average)
    elif trainer.average is not None:  # --ema is new; what it has by now may not be finite
        trainer.average = WeightAverage(trainer.model, trainer.average.decay)
    trainer.comm_hook.load_state_dict(state["hook"], trainer.parameters)
    trainer.comm_hook.load_rank_state_dict(of_hook, trainer.parameters)
    trainer.batches.load_state_dict(state["batching"])
    if trainer.scaler.is_enabled() and scaler:
        trainer.scaler.load_state_dict(scaler)
    if trainer.meta_learner is not None and state["learner"]:
        load_into(trainer.meta_learner, state["learner"], "mixing policy")
        trainer.batches.order.until = trainer.meta_learner.until
        parts = [rank["learner"] for rank in ranks]
        if len(ranks) == trainer.world.size:
            trainer.meta_learner.load_rank_state_dict(parts[trainer.world.rank])
        elif trainer.world.is_main:
            trainer.meta_learner.load_rank_state_dict(
                {name: sum(part[name] for part in parts) for name in parts[0]}
            )


def _load_weights(trainer: Trainer, weights: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Load weights and moments, and cut them into shards where the model is sharded."""
    if not fsdp.is_sharded(trainer.model):
        load_into(trainer.model, weights, "model")
        # A copy, since torch keeps the tensors themselves.
        _load_optimizer(trainer.optimizer, copy.deepcopy(optimizer))
        return
    own = trainer.model.state_dict()
    weights = {
        name: fsdp.distribute_like(value, own.get(name, value)) for name, value in weights.items()
    }
    load_into(trainer.model, weights, "model")
    parameters = trainer.parameters
    moments = {
        number: {
            key: fsdp.distribute_like(value, parameters[number]) for key, value in values.items()
        }
        for number, values in optimizer["state"].items()
        if number < len(parameters)
    }
    _load_optimizer(trainer.optimizer, {**optimizer, "state": moments})


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments, counters and the last rate; all other settings stay those of the flags."""
    names = {*optimizer.defaults, "lr_scale"} - {"lr"}
    settings = [{name: g[name] for name in names if name in g} for g in optimizer.param_groups]
    load_into(optimizer, state, "optimizer")
    for group, own in zip(optimizer.param_groups, settings):
        group.update(own)


# -------------------------------------------------------------------- files


def save(trainer: Trainer, *, previous_best: dict[str, Any] | None = None) -> None:
    """Write last.pt, and before it best.pt if it is the best; collective.

    Where that fails, as on a full disk, it is reported and the run goes on; `trainer.unsaved` then
    names the files.

    Args:
        previous_best: the best epoch before, if this one is the best. It becomes that of the
            progress again if best.pt cannot be written, so that a later epoch can be the best.
    Raises:
        InputError: as of `renew_folder`.
    """
    is_best = previous_best is not None
    with trainer.world.waiting_at_most(trainer.world.limits.start):
        if not is_best:
            renew_folder(trainer)
        content = {
            **trainer.metadata,
            **state_dict(trainer),
            "progress": trainer.progress.state_dict(),
        }

        def write() -> set[str]:
            unsaved, folder = {"last", *(["best"] if is_best else [])}, trainer.log.folder
            try:
                if is_best:
                    checkpoint.save(folder / "best.pt", content)
                    unsaved.discard("best")
                checkpoint.save_last(folder, content, keep=trainer.config.keep)
                unsaved.discard("last")
            except OSError as error:
                is_kept = bool(checkpoint.latest_files(folder))
                kept = "the previous checkpoint is kept" if is_kept else "no checkpoint is left"
                trainer.log.info(f"warning: {error}; {kept} and the run goes on")
            return unsaved

        trainer.unsaved = on_main(trainer.world, write)
    if previous_best is not None and "best" in trainer.unsaved:
        trainer.progress.best = previous_best


def renew_folder(trainer: Trainer) -> None:
    """Make the run folder again if it is gone, and choose the best epoch from here on; collective.

    Raises:
        InputError: another run has taken the folder's name.
    """
    rows = trainer.progress.rows
    if on_main(trainer.world, lambda: trainer.log.make_again(rows)):
        _settle_best(trainer)


def settle_files(trainer: Trainer, path: Path) -> None:
    """Settle last.pt and best.pt after a resume; collective.

    An older checkpoint takes the name of last.pt, which is damaged. The best epoch is chosen
    anew if best.pt does not hold it: in another run folder, or where best.pt is damaged or of
    an epoch that the lost last.pt had reached.

    Args:
        path: the checkpoint that was loaded, on every rank.
    """
    folder = trainer.log.folder
    is_older = checkpoint.OLDER_NAME.fullmatch(path.name)
    if trainer.world.is_main and is_older and path.resolve().parent == folder.resolve():
        path.replace(folder / "last.pt")
    _settle_best(trainer)


def _settle_best(trainer: Trainer) -> None:
    """Choose the best epoch from here on if best.pt does not hold it; collective."""
    folder, progress, epoch = trainer.log.folder, trainer.progress, trainer.progress.best["epoch"]
    if trainer.world.is_main and epoch:
        stored = checkpoint.read_progress(folder / "best.pt")
        if stored is None or stored["best"]["epoch"] != epoch:
            trainer.log.info(
                f"best.pt of epoch {epoch} is not in {folder}: "
                "the best epoch is chosen from here on"
            )
            progress.best, progress.since = Progress().best, len(progress.rows)
    progress.best, progress.since = trainer.world.broadcast((progress.best, progress.since))


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
