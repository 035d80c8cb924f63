"""Checkpoints that are whole or not there: written aside, flushed to the disk, then renamed.

    checkpoint.save(folder / "last.pt", state)
    state = checkpoint.load(folder / "last.pt", script="resnet50_test")

A state holds plain tensors, numbers, strings, lists and dicts only, so that it loads under weights_only=True.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from errors import InputError

FORMAT = "faster-training-3"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`; the previous file stays until the new one is complete on the disk.

    Raises:
        OSError: it could not be written (a full disk); the previous file is untouched and nothing is left aside.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch's zip writer reports a full disk as RuntimeError
        part.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({first_line(error)})") from error


def link_checkpoint(path: Path, name: str) -> None:
    """Give the checkpoint a second name in its folder, without writing it again where the file system can link."""
    part = path.with_name(name + ".part")
    part.unlink(missing_ok=True)
    try:
        os.link(path, part)
    except OSError:
        try:
            shutil.copyfile(path, part)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    part.replace(path.with_name(name))


def load(path: Path, script: str) -> dict[str, Any]:
    """The state saved at `path`, on the CPU; weights in shards are left where they are, its 'shards' names the folder.

    Args:
        path: a checkpoint, or a run folder (then its last.pt).
        script: name of the script that wrote it.
    Raises:
        InputError: missing, truncated, not a checkpoint, or another script's.
    """
    path = path / "last.pt" if path.is_dir() else path
    if not path.exists():
        raise InputError(
            f"--resume {path}: no such checkpoint; give a run folder or a .pt file, or leave --resume out"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types for many kinds of damage; all mean the same to a user
        raise InputError(
            f"--resume {path}: truncated or not a checkpoint ({first_line(error)}); try best.pt beside it, or start anew"
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(
            f"--resume {path}: not a checkpoint of this project; give the last.pt or best.pt of a run folder"
        )
    if state.get("shards"):
        state["shards"] = str(path.parent / state["shards"])
    if state["script"] != script:
        raise InputError(
            f"--resume {path}: written by {state['script']}.py, not {script}.py; resume it with its own script"
        )
    return state


def load_into(target: Any, state: dict[str, Any], what: str) -> None:
    """`target.load_state_dict(state)`; InputError where the checkpoint does not fit the flags."""
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"--resume: the checkpoint's {what} does not fit the one these flags describe ({first_line(error)}); "
            "use the flags of the first run"
        ) from None


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_into`, and InputError where the state is that of another kind of optimizer, which torch takes without a word."""
    wanted = [set(group) for group in optimizer.param_groups]
    load_into(optimizer, state, "optimizer")
    for names, group in zip(wanted, optimizer.param_groups):
        if reason := sorted(names - group.keys()):
            raise InputError(
                f"--resume: the checkpoint's optimizer has no {reason[0]}, so it is not the {type(optimizer).__name__} that "
                "these flags describe; use the flags of the first run"
            )


def to_cpu(state: Any) -> Any:
    """Nested dicts and lists with all tensors copied to the CPU, so that ranks can send them to each other."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: to_cpu(value) for name, value in state.items()}
    return [to_cpu(value) for value in state] if isinstance(state, list | tuple) else state


def mean(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of the floating tensors of several state_dicts; the others are the first one's."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The random states of torch on the CPU and on this process's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Undo to `rng_states`."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, at most 160 characters."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
