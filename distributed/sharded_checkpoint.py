"""Checkpoints of sharded models: each rank writes what it holds, in torch's distributed format.

save(folder, model, optimizer, world)      # collective
load(folder, model, optimizer, world)      # collective; on any number of ranks, in shards or whole
weights = load_whole_model(folder)         # the model's state_dict, in one process
"""

from __future__ import annotations

import contextlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed.world import World
from errors import InputError, first_line, last_line

MODEL, OPTIMIZER = "model/", "optimizer/"  # prefixes of names in a sharded checkpoint


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> int:
    """Write a new folder; collective.

    Returns:
        The checksum of its description, on rank 0; each tensor has one of its own in its file.
    Raises:
        OSError: a rank could not write; on every rank.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(
                named_tensors(model, optimizer),
                checkpoint_id=folder,
                process_group=world.control,
                no_dist=world.size == 1,
            )
    # CheckpointException, which gathers several ranks' errors, is no Exception.
    except (Exception, dcp.api.CheckpointException) as error:
        raise OSError(f"{folder} could not be written ({last_line(error)})") from error
    return checksum(folder) if world.is_main else 0


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
        # In place: the targets share memory with model and optimizer.
        alone = world.size == 1
        dcp.load(targets, storage_reader=reader, process_group=world.control, no_dist=alone)


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
    return {name.removeprefix(MODEL): value for name, value in targets.items()}


def checksum(folder: Path) -> int:
    """Checksum of a checkpoint's description."""
    return zlib.crc32((folder / ".metadata").read_bytes())


def find_damage(folder: Path, expected: int) -> str:
    """What is wrong with a folder for which `save` returned this; every file is read."""
    from distributed.shard_reader import ShardReader

    if not folder.is_dir():
        return f"the folder {folder.name} is missing"
    try:
        if checksum(folder) != expected:
            return f"{folder.name}/.metadata does not match its checksum"
        for part in ShardReader(folder).read_metadata().storage_data.values():
            with open(folder / part.relative_path, "rb") as file:
                file.seek(part.offset)
                content = io.BytesIO(file.read(part.length))
            with zipfile.ZipFile(content) as archive:
                if archive.testzip() is not None:
                    return f"{folder.name}/{part.relative_path} does not match its checksums"
    except Exception as error:  # of many types for many kinds of damage
        return f"{folder.name} is damaged: {first_line(error)}"
    return ""


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that is saved, by name; the tensors share memory with model and optimizer."""
    named = {MODEL + name: value for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        named |= {f"{OPTIMIZER}{names[parameter]}/{key}": value for key, value in state.items()}
    return named


def _create_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: set[str]
) -> None:
    """Make the state that a checkpoint holds, filled with zeros."""
    optimizer.state.clear()
    parameters = dict(model.named_parameters())
    for entry in sorted(name for name in stored if name.startswith(OPTIMIZER)):
        name, _, key = entry.removeprefix(OPTIMIZER).rpartition("/")
        if name in parameters:
            like = parameters[name]
            value = torch.zeros((), device=like.device) if key == "step" else torch.zeros_like(like)
            optimizer.state[like][key] = value


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Gives torch.distributed.checkpoint and a reader of the folder to the block.

    Errors in the block become one InputError.
    """
    import torch.distributed.checkpoint as dcp

    from distributed.shard_reader import ShardReader

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is one process
            yield dcp, ShardReader(folder)
    except InputError:
        raise
    # torch's readers raise many types for many kinds of damage; all mean the same to a user.
    except (Exception, dcp.api.CheckpointException) as error:
        raise InputError(
            f"--resume {folder}: missing, damaged or of another model ({last_line(error)}); "
            "start anew"
        ) from None
