"""TODO."""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError

# -------------------------------------------------------------------- checkpoints

MODEL, OPTIMIZER = "model/", "optimizer/"  # prefixes of names in a sharded checkpoint


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Everything that is saved, by name: those of the model and of the optimizer share memory with it."""
    found = {MODEL + name: value for name, value in model.state_dict().items()}
    if optimizer is not None:
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            found |= {f"{OPTIMIZER}{names[parameter]}/{key}": value for key, value in state.items()}
    return found


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: Any) -> None:
    """Write a new folder; collective.

    Raises:
        OSError: a rank could not write.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with quiet():
            dcp.save(
                tensors(model, optimizer),
                checkpoint_id=folder,
                process_group=world.control,
                no_dist=world.size == 1,
            )
    except (
        Exception,
        dcp.api.CheckpointException,
    ) as error:  # the latter, of several ranks, is no Exception
        raise OSError(f"{folder} could not be written ({last_line(error)})") from error


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: Any) -> None:
    """Undo to `save`, whatever the numbers of ranks then and now; collective.

    Raises:
        InputError: missing, damaged, or of another model or optimizer.
    """
    with reading(folder) as dcp:
        held = set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)
        make_state(model, optimizer, held)
        wanted = tensors(model, optimizer)
        if reason := sorted(wanted.keys() ^ held):
            raise InputError(
                f"--resume {folder}: {reason[0]} is in the checkpoint or in what these flags describe, but not in both; "
                "use the flags of the first run"
            )
        dcp.load(wanted, checkpoint_id=folder, process_group=world.control, no_dist=world.size == 1)
    model.load_state_dict(
        {
            name.removeprefix(MODEL): value
            for name, value in wanted.items()
            if name.startswith(MODEL)
        }
    )


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer, held: set[str]) -> None:
    """Make the optimizer's state that a checkpoint holds, zero as yet: scalars for 'step', else like the parameter."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        prefix = f"{OPTIMIZER}{name}/"
        for key in sorted(name.removeprefix(prefix) for name in held if name.startswith(prefix)):
            scalar = torch.zeros((), device=parameter.device)
            optimizer.state[parameter][key] = (
                scalar if key == "step" else torch.zeros_like(parameter)
            )


def whole(folder: Path) -> dict[str, Tensor]:
    """The model's state_dict, put together in this process alone.

    Raises:
        InputError: missing or damaged.
    """
    with reading(folder) as dcp:
        held: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        found = {
            name: torch.empty(of.size, dtype=of.properties.dtype)
            for name, of in held.items()
            if name.startswith(MODEL)
        }
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(MODEL): value for name, value in found.items()}


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Any]:
    """Gives torch.distributed.checkpoint; errors of the block become one InputError."""
    import torch.distributed.checkpoint as dcp

    if not folder.is_dir():
        raise InputError(
            f"--resume: the folder {folder} is missing; it belongs to the checkpoint beside it"
        )
    try:
        with quiet():
            yield dcp
    except InputError:
        raise
    except (
        Exception,
        dcp.api.CheckpointException,
    ) as error:  # torch's readers raise many types for many kinds of damage; all mean the same to a user
        raise InputError(
            f"--resume {folder}: damaged or of another model ({last_line(error)}); start anew"
        ) from None


def last_line(error: BaseException) -> str:
    """The last line of an exception's text, where several ranks' tracebacks end; at most 160 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:160]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks that one process is one process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def next_name(folder: Path) -> str:
    """A name for a sharded checkpoint in a run folder."""
    return f"shards-{max((int(old.name.partition('-')[2]) for old in folder.glob('shards-*')), default=0) + 1}"


def tidy(folder: Path, keep: set[str]) -> None:
    """Delete the sharded checkpoints of a run folder but those named."""
    for old in folder.glob("shards-*"):
        if old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)
