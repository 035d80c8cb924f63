"""Checkpoint files that are complete or not there: written to a temporary file, fsynced, renamed.

    save(folder / "last.pt", state)
    state = load(folder / "last.pt", script="resnet50_test")

A state holds plain tensors, numbers, strings, lists and dicts only, so that it loads under
weights_only=True.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from distributed import sharded_checkpoint
from errors import DiskFull, InputError, first_line, is_disk_full
from training.atomic_file import atomic_write, sync_folder

FORMAT_NAME = "faster-training-"
FORMAT = f"{FORMAT_NAME}5"
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
MAPPED = ("model", "optimizer", "ranks", "average")  # their tensors are read where they are used
OLDER_NAME = re.compile(r"last-([1-9][0-9]*)\.pt")  # a checkpoint before last.pt
SHARDS_NAME = re.compile(r"shards-[0-9]+")  # a sharded checkpoint's folder beside the file


class Stateful(Protocol):
    """Something whose state a checkpoint holds."""

    def load_state_dict(self, state: Any, /) -> Any: ...


# -------------------------------------------------------------------- writing


def save(path: Path, state: dict[str, Any], *, keep: int = 1) -> None:
    """Write `state` to last.pt; the previous file stays until the new one is complete on the disk.

    Args:
        path: of last.pt.
        state: what it shall hold.
        keep: how many checkpoints stay: this one, and of those before it the latest as last-1.pt,
            the one before as last-2.pt and so on. Others of such names are deleted.
    Raises:
        DiskFull: there was no room for it; the previous file is untouched.
        OSError: it could not be written for another reason; the previous file is untouched.
    """
    try:
        replacing = atomic_write(path, lambda: keep_previous(path, keep))
        with replacing as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
    # torch's zip writer reports a full disk as RuntimeError.
    except (OSError, RuntimeError) as error:
        kind = DiskFull if is_disk_full(error) else OSError
        raise kind(f"{path} could not be written ({first_line(error)})") from error
    for number, older in older_files(path.parent).items():
        if number >= keep:
            older.unlink(missing_ok=True)


def link_checkpoint(path: Path, name: str) -> None:
    """Give a checkpoint a second name in its folder, by a hard link or else by a copy."""
    _link(path, path.with_name(name))


def _link(path: Path, target: Path) -> None:
    """Let `target` be the same file as `path`, or else a copy."""
    if target.exists() and target.samefile(path):
        return
    target.with_name(target.name + ".part").unlink(missing_ok=True)
    with atomic_write(target) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def keep_previous(path: Path, keep: int) -> None:
    """Give the previous last.pt a second name, last-1.pt, before a new one takes its first name.

    So there is no moment without a complete last.pt. Where that fails, as where a copy instead of a
    link finds no room, the new one takes its name all the same.

    Args:
        path: of last.pt.
        keep: how many checkpoints stay, the new one included.
    """
    if keep == 1 or not path.exists():
        return
    older = older_files(path.parent)
    if 1 in older and older[1].samefile(path):
        return  # a process was killed between the two names
    with contextlib.suppress(OSError):
        for number in range(keep - 1, 1, -1):
            if number - 1 in older:
                older[number - 1].replace(path.with_name(f"last-{number}.pt"))
        _link(path, path.with_name("last-1.pt"))


def older_files(folder: Path) -> dict[int, Path]:
    """The checkpoints before last.pt by their numbers: 1 is the latest of them."""
    named = {path: OLDER_NAME.fullmatch(path.name) for path in folder.glob("last-*.pt")}
    return {int(match[1]): path for path, match in sorted(named.items()) if match}


def latest_files(folder: Path) -> list[Path]:
    """last.pt, and the checkpoints before it that are kept; the newest first."""
    older = older_files(folder)
    files = [folder / "last.pt", *(older[number] for number in sorted(older))]
    return [path for path in files if path.exists()]


def make_last(path: Path) -> None:
    """Let a checkpoint be last.pt of its folder, because the newer ones are damaged or missing.

    Args:
        path: of an older checkpoint, which is renamed; any other file gets a second name.
    """
    match = OLDER_NAME.fullmatch(path.name)
    if match is None:
        link_checkpoint(path, "last.pt")
        return
    path.replace(path.with_name("last.pt"))
    for number, newer in older_files(path.parent).items():
        if number < int(match[1]):
            newer.unlink()
    sync_folder(path.parent)


# -------------------------------------------------------------------- reading


def load(
    path: Path, script: str, *, flag: str = "--resume", metadata: Collection[str] = ()
) -> dict[str, Any]:
    """The state saved at `path`, on the CPU.

    Of a run folder it is the newest checkpoint that is not damaged; if that is not last.pt, the
    entry 'warning' is a line that says so. A file that is named is read or refused.

    The tensors of the entries `MAPPED` stay in the file until they are used, so that where every
    rank has weights of its own, a rank reads no more than those. That the file gets another name
    meanwhile, or its name another file, changes nothing.

    The weights of a sharded checkpoint are left where they are: its entry 'shards' names the
    folder. The entry 'file' is the path that was read.

    Args:
        path: a checkpoint or a run folder.
        script: name of the script that wrote it.
        flag: which asked for it; messages begin with it.
        metadata: names of further entries that the script needs.
    Raises:
        InputError: missing, damaged, incomplete, not a checkpoint, or another script's.
    """
    if not path.is_dir():
        return _load_file(path, script, flag=flag, metadata=metadata)
    damaged: list[DamagedCheckpoint] = []
    for file in latest_files(path) or [path / "last.pt"]:
        try:
            state = _load_file(file, script, flag=flag, metadata=metadata)
        except DamagedCheckpoint as error:
            damaged.append(error)
            continue
        if file.name != "last.pt":
            state["warning"] = _fallback_warning(path, state, damaged)
        return state
    if len(damaged) == 1:
        raise damaged[0]
    names = " and ".join(error.path.name for error in damaged)
    raise InputError(
        f"{flag} {path}: {names} are damaged ({damaged[0].reason}); try best.pt beside them, or "
        "start anew"
    )


def _fallback_warning(
    folder: Path, state: Mapping[str, Any], damaged: Sequence[DamagedCheckpoint]
) -> str:
    """A line that says which checkpoints are damaged, and which one is used."""
    problem = f"{folder / 'last.pt'} is missing"
    if damaged:
        names = " and ".join(str(error.path) for error in damaged)
        verb = "is" if len(damaged) == 1 else "are"
        problem = f"{names} {verb} damaged ({damaged[0].reason})"
    progress = state["progress"]
    return (
        f"warning: {problem}; {state['file']} is used instead, which was written after "
        f"{progress['epoch']} epochs and {progress['step']} steps"
    )


def _load_file(path: Path, script: str, *, flag: str, metadata: Collection[str]) -> dict[str, Any]:
    """`load` of a file."""
    if not path.exists():
        raise InputError(f"{flag} {path}: no such checkpoint; give a run folder or a .pt file")
    try:
        state = _read(path)
    except _Damage as error:
        raise DamagedCheckpoint(path, str(error), flag) from None
    # torch.load raises many types for what it does not know; all mean the same to a user.
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise InputError(
            f"{flag} {path}: cannot be read, or not a checkpoint ({reason}); "
            "give the last.pt or best.pt of a run folder"
        ) from None
    written = str(state.get("format")) if isinstance(state, dict) else ""
    if written.startswith(FORMAT_NAME) and written != FORMAT:
        raise InputError(
            f"{flag} {path}: is of another version of this project ({written}, not {FORMAT}); use "
            "the commit in its config.json, or start anew"
        )
    if written != FORMAT:
        raise InputError(
            f"{flag} {path}: not a checkpoint of this project; "
            "give the last.pt or best.pt of a run folder"
        )
    shards = state.get("shards")
    if shards and not SHARDS_NAME.fullmatch(str(shards)):
        raise InputError(
            f"{flag} {path}: its weights are said to lie in {str(shards)[:80]!r}, "
            "which is not a name such as shards-1; do not use this file"
        )
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
    if problem := _damage_of_shards(path, state):
        raise DamagedCheckpoint(path, problem, flag)
    if shards:
        state["shards"] = str(path.parent / shards)
    state["file"] = str(path)
    return {name: value if name in MAPPED else copied(value) for name, value in state.items()}


class _Damage(Exception):
    """A file is not what was written."""


class DamagedCheckpoint(InputError):
    """A checkpoint is not what was written.

    Args:
        path: of the checkpoint.
        reason: what is wrong with it.
        flag: which asked for it; the message begins with it.
    """

    def __init__(self, path: Path, reason: str, flag: str) -> None:
        self.path, self.reason = path, reason
        others = [file for file in latest_files(path.parent) if file.name != path.name]
        advice = "try best.pt beside it"
        if path.name == "last.pt" and others:
            advice = f"give the folder {path.parent}, which has {others[0].name} as well"
        super().__init__(f"{flag} {path}: damaged ({reason}); {advice}, or start anew")


def _read(path: Path) -> Any:
    """What a file holds; its tensors are mapped into memory, not read.

    torch does not compare a file with the checksums in it, so that is done first.

    Raises:
        _Damage: it is not what was written.
        Exception: of many types, where torch cannot read it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except OSError as error:
        if error.errno == errno.EIO:  # what a disk says of a sector that it cannot read
            raise _Damage(str(error.strerror)) from error
        raise
    except Exception as error:  # of many types for many kinds of damage
        raise _Damage(f"truncated or not a checkpoint: {first_line(error)}") from error
    if changed is not None:
        raise _Damage(f"{changed} in it does not match its checksum")
    return _load_mapped(path)


def _load_mapped(path: Path) -> Any:
    """What torch reads from a file, with the tensors mapped into memory.

    torch maps no file whose name Python does not decode as UTF-8, as in the C locale; the tensors
    of such a file are read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            str(path).encode()
        except UnicodeEncodeError:
            with open(path, "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
        return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)


def _damage_of_shards(path: Path, state: Mapping[str, Any]) -> str:
    """What is wrong with the folder of shards that a checkpoint names; '' if nothing is."""
    name = state.get("shards")
    if not name:
        return ""
    return sharded_checkpoint.find_damage(path.parent / name, state.get("shards_checksum"))


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


def read_progress(path: Path, *, verify: bool = False) -> dict[str, Any] | None:
    """Where a checkpoint's run was, without its tensors; None if there is no such file.

    It is None as well for a file that is damaged, incomplete or not a checkpoint of this project.

    Args:
        path: of the checkpoint.
        verify: read all of it and compare it with its checksums.
    """
    state = read_description(path)
    if not state or missing_entry(state):
        return None
    if verify:
        try:
            _read(path)
        except Exception:  # as in `load`
            return None
        if _damage_of_shards(path, state):
            return None
    return state["progress"]


def read_description(path: Path) -> dict[str, Any]:
    """The entries of a checkpoint, whose tensors are not read and may be damaged.

    They are empty for what is not a checkpoint of this project.
    """
    try:
        state = _load_mapped(path)
    except Exception:  # as in `load`
        return {}
    return state if isinstance(state, dict) and state.get("format") == FORMAT else {}


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
    load_into(optimizer, copied(state), "optimizer")  # torch would keep the tensors themselves
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


def copied(state: Any) -> Any:
    """Nested dicts, lists and tuples with copies of all tensors."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: copied(value) for name, value in state.items()}
    return type(state)(map(copied, state)) if isinstance(state, list | tuple) else state


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
