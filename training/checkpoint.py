"""Checkpoint files that are complete or not there: written to a temporary file, fsynced, renamed.

    save(folder / "last.pt", state)
    state = load(folder / "last.pt", script="resnet50_test")

A state holds plain tensors, numbers, strings, lists and dicts only, so that it loads under
weights_only=True.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from errors import InputError, first_line
from training.atomic_file import atomic_write

FORMAT = "faster-training-3"
ENTRIES: dict[str, type | tuple[type, ...]] = {  # of every checkpoint, by their kinds
    "flags": dict,
    "progress": dict,
    "classes": (list, tuple),
    "model": dict,
    "optimizer": (dict, type(None)),
    "optimizer_kind": str,
    "hook": object,
    "scaler": dict,
    "learner": (dict, type(None)),
    "batching": dict,
    "ranks": list,
}
NESTED_ENTRIES = {  # that the entries above hold at least
    "flags": ("dataset",),
    "progress": ("epoch", "step", "best"),
    "batching": ("size",),
}
SHARDS_NAME = re.compile(r"shards-[0-9]+")  # a sharded checkpoint's folder beside the file


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def load_state_dict(self, state: Any, /) -> Any: ...


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to `path`; the previous file stays until the new one is complete on the disk.

    Raises:
        OSError: it could not be written, as on a full disk; the previous file is untouched.
    """
    try:
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
    except (
        OSError,
        RuntimeError,
    ) as error:  # torch's zip writer reports a full disk as RuntimeError
        raise OSError(f"{path} could not be written ({first_line(error)})") from error


def link_checkpoint(path: Path, name: str) -> None:
    """Give a checkpoint a second name in its folder, by a hard link or else by a copy."""
    target = path.with_name(name)
    target.with_name(name + ".part").unlink(missing_ok=True)
    with atomic_write(target) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def load(
    path: Path, script: str, *, flag: str = "--resume", metadata: Collection[str] = ()
) -> dict[str, Any]:
    """The state saved at `path`, on the CPU.

    The weights of a sharded checkpoint are left where they are: its entry 'shards' names the
    folder. The entry 'file' is the path that was read.

    Args:
        path: a checkpoint, or a run folder (then its last.pt).
        script: name of the script that wrote it.
        flag: which asked for it; messages begin with it.
        metadata: names of further entries that the script needs.
    Raises:
        InputError: missing, truncated, incomplete, not a checkpoint, or another script's.
    """
    path = path / "last.pt" if path.is_dir() else path
    if not path.exists():
        raise InputError(f"{flag} {path}: no such checkpoint; give a run folder or a .pt file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    # torch.load raises many types for many kinds of damage; all mean the same to a user.
    except Exception as error:
        raise InputError(
            f"{flag} {path}: truncated or not a checkpoint ({first_line(error)}); "
            "try best.pt beside it, or start anew"
        ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(
            f"{flag} {path}: not a checkpoint of this project; "
            "give the last.pt or best.pt of a run folder"
        )
    if state.get("shards"):
        if not SHARDS_NAME.fullmatch(str(state["shards"])):
            raise InputError(
                f"{flag} {path}: its weights are said to lie in {str(state['shards'])[:80]!r}, "
                "which is not a name such as shards-1; do not use this file"
            )
        state["shards"] = str(path.parent / state["shards"])
    state["file"] = str(path)
    if state.get("script", script) != script:
        raise InputError(
            f"{flag} {path}: written by {state['script']}.py, not {script}.py; "
            "use it with its own script"
        )
    if problem := missing_entry(state, metadata):
        raise InputError(
            f"{flag} {path}: the checkpoint is incomplete ({problem}); "
            "try the other .pt file beside it, or start anew"
        )
    return state


def missing_entry(state: Mapping[str, Any], metadata: Collection[str] = ()) -> str:
    """What a checkpoint lacks, for example 'it has no progress', or '' if it is complete.

    Args:
        state: what the file holds.
        metadata: names of entries that it must have beside those of every checkpoint.
    """
    for name in ("script", *ENTRIES, *metadata):
        if name not in state:
            return f"it has no {name}"
    for name, kinds in ENTRIES.items():
        if not isinstance(state[name], kinds):
            return f"the type of its {name} is {type(state[name]).__name__}"
    for name, nested in NESTED_ENTRIES.items():
        for key in nested:
            if key not in state[name]:
                return f"there is no {key} in its {name}"
    return ""


def read_progress(path: Path) -> dict[str, Any] | None:
    """Where a checkpoint's run was, without reading its tensors; None if there is no such file.

    It is None as well for a file that is damaged, incomplete or not a checkpoint of this project.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # as in `load`
        return None
    is_ours = isinstance(state, dict) and state.get("format") == FORMAT
    return state["progress"] if is_ours and not missing_entry(state) else None


def load_into(
    target: Stateful, state: dict[str, Any], what: str, *, flag: str = "--resume"
) -> None:
    """Call `target.load_state_dict(state)`.

    Args:
        target: a model, an optimizer, ...
        state: its state in the checkpoint.
        what: its name in messages.
        flag: which asked for the checkpoint; messages begin with it.
    Raises:
        InputError: the state does not fit, so the flags are not those of the run that wrote it.
    """
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        # The first line of torch's message is a heading where it lists several differences.
        lines = str(error).strip().splitlines()
        is_heading = len(lines) > 1 and lines[0].endswith(":")
        reason = first_line(ValueError(lines[1])) if is_heading else first_line(error)
        raise InputError(
            f"{flag}: the checkpoint's {what} does not fit the one these flags describe "
            f"({reason}); use the flags of the first run"
        ) from None


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_into` for an optimizer; torch alone would take another optimizer's state.

    Raises:
        InputError: the state is that of another optimizer.
    """
    # Its hyper-parameters; some optimizers add other entries to a group at the first step.
    expected = [group.keys() & optimizer.defaults.keys() for group in optimizer.param_groups]
    load_into(optimizer, state, "optimizer")
    for names, group in zip(expected, optimizer.param_groups):
        if missing := sorted(names - group.keys()):
            raise InputError(
                f"--resume: the checkpoint's optimizer has no {missing[0]}, so it is not the "
                f"{type(optimizer).__name__} that these flags describe; "
                "use the flags of the first run"
            )


def to_cpu(state: Any) -> Any:
    """Nested dicts and lists with all tensors copied to the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {name: to_cpu(value) for name, value in state.items()}
    return [to_cpu(value) for value in state] if isinstance(state, list | tuple) else state


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's random generators on the CPU and on this process's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `rng_states` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
