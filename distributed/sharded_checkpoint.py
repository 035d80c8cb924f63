"""Checkpoints of sharded models: each rank writes what it holds, in torch's distributed format.

save(folder, model, optimizer, world)      # collective
load(folder, model, optimizer, world)      # collective; on any number of ranks, in shards or whole
weights = load_whole_model(folder)         # the model's state_dict, in one process
"""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed.world import World
from errors import DiskFull, InputError, first_line, is_disk_full, last_line

MODEL, OPTIMIZER = "model/", "optimizer/"  # prefixes of names in a sharded checkpoint


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Write a new folder; collective.

    Raises:
        DiskFull, OSError: as of `write`.
    """
    write(folder, named_tensors(model, optimizer), world)


def write(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write a new folder of what `named_tensors` returned, or a copy of it; collective.

    Raises:
        DiskFull: there was no room for it.
        OSError: a rank could not write for another reason.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with _silence():
            dcp.save(
                dict(tensors),
                checkpoint_id=folder,
                process_group=world.control,
                no_dist=world.size == 1,
            )
    # CheckpointException, which gathers several ranks' errors, is no Exception.
    except (Exception, dcp.api.CheckpointException) as error:
        causes: list[BaseException] = [error]
        if isinstance(error, dcp.api.CheckpointException):
            causes += [cause for cause, _ in error.failures.values()]
        kind = DiskFull if any(map(is_disk_full, causes)) else OSError
        raise kind(f"{folder} could not be written ({last_line(error)})") from error


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Inverse of `save`, whatever the numbers of ranks then and now; collective.

    Raises:
        InputError: the folder is missing, damaged, or of another model or optimizer.
    """
    with _reading(folder) as (dcp, reader):
        stored = set(reader.read_metadata().state_dict_metadata)
        _create_optimizer_state(model, optimizer, stored)
        targets = named_tensors(model, optimizer)
        if unmatched := sorted(targets.keys() ^ stored):
            raise InputError(
                f"--resume {folder}: {unmatched[0]} is in the checkpoint or in what these flags "
                "describe, but not in both; use the flags of the first run"
            )
        dcp.load(
            targets,
            storage_reader=reader,
            process_group=world.control,
            no_dist=world.size == 1,
        )
    model.load_state_dict(_without_prefix(targets))


def load_whole_model(folder: Path) -> dict[str, Tensor]:
    """The model's state_dict, put together in this process alone.

    Raises:
        InputError: the folder is missing or damaged.
    """
    with _reading(folder) as (dcp, reader):
        stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
        targets = {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
            for name, tensor in stored.items()
            if name.startswith(MODEL)
        }
        dcp.load(targets, storage_reader=reader, no_dist=True)
    return _without_prefix(targets)


def checksum(folder: Path) -> int:
    """Checksum of a checkpoint's description; each tensor has one of its own in its file."""
    return zlib.crc32((folder / ".metadata").read_bytes())


def find_damage(folder: Path, expected: int | None = None) -> str:
    """What is wrong with a checkpoint; '' if nothing is. Every file is read.

    Args:
        folder: of the checkpoint.
        expected: what `checksum` returned when it was written; None where that is not known.
    """
    from distributed.shard_reader import ShardReader

    if not folder.is_dir():
        return f"the folder {folder.name} is missing"
    try:
        if expected not in (None, checksum(folder)):
            return f"{folder.name}/.metadata does not match its checksum"
        metadata = ShardReader(folder).read_metadata()
        for part in metadata.storage_data.values():
            with open(folder / part.relative_path, "rb") as file:
                file.seek(part.offset)
                content = io.BytesIO(file.read(part.length))
            with zipfile.ZipFile(content) as archive:
                if archive.testzip() is not None:
                    return f"{folder.name}/{part.relative_path} does not match its checksums"
    except Exception as error:  # of many types for many kinds of damage
        return f"{folder.name} is damaged: {first_line(error)}"
    return ""


def next_name(folder: Path) -> str:
    """An unused name for a sharded checkpoint in a run folder: shards-1, shards-2 and so on."""
    names = [old.name.partition("-")[2] for old in folder.glob("shards-*")]
    numbers = [int(name) for name in names if name.isdecimal()]
    return f"shards-{max(numbers, default=0) + 1}"


def delete_others(folder: Path, keep: set[str]) -> None:
    """Delete the sharded checkpoints of a run folder whose names are not in `keep`."""
    for old in folder.glob("shards-*"):
        if old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that is saved, by name; the tensors share memory with model and optimizer."""
    named = {MODEL + name: value for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        named |= {f"{OPTIMIZER}{names[parameter]}/{key}": value for key, value in state.items()}
    return named


def _without_prefix(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors under their own names."""
    model = {name: value for name, value in named.items() if name.startswith(MODEL)}
    return {name.removeprefix(MODEL): value for name, value in model.items()}


def _create_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: set[str]
) -> None:
    """Make the state that a checkpoint holds, filled with zeros."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        prefix = f"{OPTIMIZER}{name}/"
        keys = sorted(name.removeprefix(prefix) for name in stored if name.startswith(prefix))
        for key in keys:
            scalar = torch.zeros((), device=parameter.device)
            value = scalar if key == "step" else torch.zeros_like(parameter)
            optimizer.state[parameter][key] = value


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Gives torch.distributed.checkpoint and a reader of the folder to the block.

    Errors in the block become one InputError.
    """
    import torch.distributed.checkpoint as dcp

    from distributed.shard_reader import ShardReader

    if not folder.is_dir():
        raise InputError(
            f"--resume: the folder {folder} is missing; it belongs to the checkpoint beside it"
        )
    try:
        with _silence():
            yield dcp, ShardReader(folder)
    except InputError:
        raise
    # torch's readers raise many types for many kinds of damage; all mean the same to a user.
    except (Exception, dcp.api.CheckpointException) as error:
        raise InputError(
            f"--resume {folder}: damaged or of another model ({last_line(error)}); start anew"
        ) from None


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress torch's remarks that one process is one process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
