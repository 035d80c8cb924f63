"""Weights, gradients and optimizer state in shards, a part of each on every rank (FSDP, arXiv:2304.11277; ZeRO, arXiv:1910.02054).

    sharding.shard(model, world, "fsdp")                # before the optimizer is made; in place
    sharding.save(folder, model, optimizer, world)      # collective: each rank writes what it holds
    sharding.load(folder, model, optimizer, world)      # on any number of ranks, in shards or whole
    weights = sharding.whole(folder)                    # the model's state_dict, in one process

Weights are gathered block by block just before they are needed, and again in the backward pass; gradients are averaged into
shards. With 'hsdp' the ranks of a node hold the shards, and every node a copy of them.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError

PARALLEL = ("ddp", "fsdp", "hsdp")
MODEL, OPTIMIZER = "model/", "optimizer/"  # prefixes of names in a sharded checkpoint


def shard(model: nn.Module, world: Any, kind: str, wire: torch.dtype | None = None) -> None:
    """Cut the parameters of `model`, in place: residual blocks (class attribute `residual`) each for itself, then the rest.

    Args:
        model: on its device, before the optimizer is made; its parameters become DTensors in torch's default memory format.
        world: `distributed.World` of several ranks.
        kind: 'fsdp' over all ranks; 'hsdp' within each node, with a copy on every node.
        wire: what gradients are averaged in; None is their own.
    Raises:
        InputError: this torch cannot, or 'hsdp' on one node.
    """
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:
        raise InputError(f"--parallel {kind} needs torch 2.9 or newer, this is {torch.__version__}; use --parallel ddp") from None
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    policy = MixedPrecisionPolicy(reduce_dtype=wire, cast_forward_inputs=False)  # autocast casts: norms stay in fp32
    cut = partial(fully_shard, mesh=device_mesh(world, kind), mp_policy=policy)
    for module in list(model.modules()):
        if getattr(module, "residual", False):
            cut(module)
    cut(model)


def device_mesh(world: Any, kind: str) -> Any:
    """The ranks as a DeviceMesh: a line ('fsdp'), or nodes x ranks of a node ('hsdp')."""
    from torch.distributed.device_mesh import init_device_mesh  # this and torch.distributed.checkpoint load the compiler

    if kind == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    nodes = world.size // world.local_size
    if nodes == 1 or world.size % world.local_size:
        raise InputError("--parallel hsdp: wants several nodes of as many processes each; on one node use --parallel fsdp")
    return init_device_mesh(world.device.type, (nodes, world.local_size), mesh_dim_names=("replicate", "shard"))


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was here."""
    return hasattr(model, "set_requires_gradient_sync")


@contextlib.contextmanager
def gradients_stay(model: nn.Module) -> Iterator[None]:
    """Backward passes within the block add up this rank's own gradients."""
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)  # type: ignore[operator]


def full(tensor: Tensor) -> Tensor:
    """A plain tensor: a sharded one is put together, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def traffic(model: nn.Module) -> tuple[int, int]:
    """Bytes that a rank's micro-batch has in collectives: of weights, and of gradients where they are averaged."""

    def size(module: nn.Module) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

    every, blocks = size(model), sum(size(block) for block in model.modules() if block is not model and is_sharded(block))
    return every + blocks, every  # blocks are gathered again in the backward pass


# -------------------------------------------------------------------- checkpoints


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
            dcp.save(tensors(model, optimizer), checkpoint_id=folder, process_group=world.control, no_dist=world.size == 1)
    except (Exception, dcp.api.CheckpointException) as error:  # the latter, of several ranks, is no Exception
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
        if lacking := sorted(wanted.keys() ^ held):
            raise InputError(
                f"--resume {folder}: {lacking[0]} is in the checkpoint or in what these flags describe, but not in both; "
                "use the flags of the first run"
            )
        dcp.load(wanted, checkpoint_id=folder, process_group=world.control, no_dist=world.size == 1)
    model.load_state_dict({name.removeprefix(MODEL): value for name, value in wanted.items() if name.startswith(MODEL)})


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer, held: set[str]) -> None:
    """Make the optimizer's state that a checkpoint holds, zero as yet: scalars for 'step', else like the parameter."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        prefix = f"{OPTIMIZER}{name}/"
        for key in sorted(name.removeprefix(prefix) for name in held if name.startswith(prefix)):
            scalar = torch.zeros((), device=parameter.device)
            optimizer.state[parameter][key] = scalar if key == "step" else torch.zeros_like(parameter)


def whole(folder: Path) -> dict[str, Tensor]:
    """The model's state_dict, put together in this process alone.

    Raises:
        InputError: missing or damaged.
    """
    with reading(folder) as dcp:
        held: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        found = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in held.items() if name.startswith(MODEL)}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(MODEL): value for name, value in found.items()}


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Any]:
    """Gives torch.distributed.checkpoint; errors of the block become one InputError."""
    import torch.distributed.checkpoint as dcp

    if not folder.is_dir():
        raise InputError(f"--resume: the folder {folder} is missing; it belongs to the checkpoint beside it")
    try:
        with quiet():
            yield dcp
    except InputError:
        raise
    except (
        Exception,
        dcp.api.CheckpointException,
    ) as error:  # torch's readers raise many types for many kinds of damage; all mean the same to a user
        raise InputError(f"--resume {folder}: damaged or of another model ({last_line(error)}); start anew") from None


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


def spread(value: Any, like: Tensor) -> Any:
    """A whole tensor, the same on all ranks, as the shards that `like` has; what is not shaped like it stays as it is."""
    if not hasattr(like, "full_tensor") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def next_name(folder: Path) -> str:
    """A name for a sharded checkpoint in a run folder."""
    return f"shards-{max((int(old.name.partition('-')[2]) for old in folder.glob('shards-*')), default=0) + 1}"


def tidy(folder: Path, keep: set[str]) -> None:
    """Delete the sharded checkpoints of a run folder but those named."""
    for old in folder.glob("shards-*"):
        if old.name not in keep:
            shutil.rmtree(old, ignore_errors=True)
