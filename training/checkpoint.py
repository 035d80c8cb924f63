"""Checkpoint files that are complete or not there: written to a temporary file, fsynced, renamed.

    save_last(folder, content, keep=2)
    checkpoint = load(folder, script="resnet50_test")    # last.pt, or the newest not damaged

The content is plain tensors, numbers, strings, lists and dicts only, so that it loads under
weights_only=True.
"""

import contextlib
import copy
import errno
import io
import itertools
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, first_line, last_line
from models.lora import merged
from training.atomic_file import atomic_write

FORMAT_NAME = "faster-training-"
FORMAT = f"{FORMAT_NAME}11"
MAPPED = ("model", "optimizer", "ranks", "average")  # their tensors are read where they are used
PLAIN = (bool, int, float, str, type(None))  # of which torch need not be asked
STATE = (*MAPPED, "optimizer_kind", "hook", "scaler", "learner", "batching")
OLDER_NAME = re.compile(r"last-([1-9][0-9]*)\.pt")  # a checkpoint before last.pt


@dataclass
class Checkpoint:
    """What a file holds."""

    file: Path
    metadata: dict[str, Any]  # plain values: `script`, `flags`, `segments`, `data`, the card's
    progress: dict[str, Any]  # of `Progress.state_dict`
    state: dict[str, Any]  # of `TrainState.state_dict`; the tensors of `MAPPED` stay in the file
    warning: str = ""  # a line, where the file is not the one that was to be read
    # What is not as in the run that wrote it, by the names of flags: [before, now].
    changed: dict[str, list[Any]] = field(default_factory=dict)
    given: Collection[str] = ()  # flags that this start names, with the same values or others

    @property
    def flags(self) -> dict[str, Any]:
        return self.metadata["flags"]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the outputs."""
        return self.metadata["classes"]

    @property
    def splits(self) -> dict[str, Any]:
        """The fingerprint of each split of the data."""
        return self.metadata["data"]["splits"]

    @property
    def temperature(self) -> float:
        """What divides the logits; 1 where there were no validation rows to fit it to."""
        return self.progress.get("temperature", 1.0)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights to use: averaged ones, if the run has them; LoRA is added into them."""
        average = self.state["average"]
        return merged(average["weights"] if average and average["steps"] else self.state["model"])


# -------------------------------------------------------------------- writing


def save_last(folder: Path, state: Mapping[str, Any], *, keep: int) -> None:
    """`save` last.pt; those before it stay as last-1.pt, last-2.pt and so on, `keep` in all."""
    save(folder / "last.pt", state, before_rename=lambda: keep_previous(folder))
    for number, older in enumerate(latest_files(folder)):
        if number >= keep:
            older.unlink(missing_ok=True)


def save(
    path: Path, state: Mapping[str, Any], *, before_rename: Callable[[], None] | None = None
) -> None:
    """Write a checkpoint by `atomic_write`; one that cannot be written is an OSError."""
    try:
        with atomic_write(path, before_rename) as temporary, open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **state}, file)
    # torch's zip writer reports a full disk as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise OSError(f"{path} could not be written ({first_line(error)})") from error


def keep_previous(folder: Path) -> None:
    """Give last.pt a second name, last-1.pt, after the older ones have moved on by one.

    Where the file system has no links, last.pt is missing until a new file takes the name.
    """
    files = latest_files(folder)
    for number, path in reversed(list(enumerate(files))):
        older = folder / f"last-{number + 1}.pt"
        if path.name == "last.pt":
            with contextlib.suppress(OSError):
                os.link(path, older)
                continue
        path.replace(older)


def latest_files(folder: Path) -> list[Path]:
    """last.pt, and the checkpoints before it that are kept; the newest first.

    A number that is missing ends them: what lies beyond is the user's.
    """
    older = (folder / f"last-{number}.pt" for number in itertools.count(1))
    found = [folder / "last.pt", *itertools.takewhile(Path.exists, older)]
    return [path for path in found if path.exists()]


# -------------------------------------------------------------------- reading


def load(path: Path, script: str = "") -> Checkpoint:
    """Read a checkpoint, onto the CPU.

    Of a run folder it is the newest that is not damaged; if that is not last.pt, `warning` says so.
    A file that is named is read or refused.

    The tensors of the entries `MAPPED` stay in the file until they are used, so that a rank reads
    its own part alone; the file may get another name meanwhile.

    Args:
        path: a checkpoint or a run folder.
        script: name of the script that wrote it; '' is any.
    Raises:
        InputError: missing, damaged, not a checkpoint, or another script's.
    """
    damage: list[str] = []
    for file in (latest_files(path) if path.is_dir() else []) or [path]:
        try:
            found = _load_file(file, script)
        except _Damage as error:
            damage.append(f"{file} is damaged ({error})")
            continue
        if path.is_dir() and file.name != "last.pt":
            problem = ", ".join(damage) or f"{path / 'last.pt'} is missing"
            found.warning = (
                f"warning: {problem}; {file} is used instead, which was written after "
                f"{found.progress['epoch']} epochs and {found.progress['step']} steps"
            )
        return found
    raise InputError(f"{', '.join(damage)}; give the run folder, or its best.pt, or start anew")


class _Damage(Exception):
    """A file is not what was written."""


def _load_file(path: Path, script: str) -> Checkpoint:
    """`load` of a file; raises _Damage where it is not what was written."""
    if not path.is_file():
        raise InputError(f"{path}: no such checkpoint; give a run folder or a .pt file")
    if path.suffix in (".onnx", ".pt2", ".safetensors"):
        raise InputError(f"{path}: is an export; give the last.pt or best.pt of its run")
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()  # by its checksums, which torch does not read
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many types for many kinds of damage
        if isinstance(error, OSError) and error.errno != errno.EIO:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        raise _Damage(f"truncated or not a checkpoint: {first_line(error)}") from None
    if changed is not None:
        raise _Damage(f"{changed} in it does not match its checksum")
    written = content.pop("format", None) if isinstance(content, dict) else None
    if written != FORMAT:
        raise InputError(
            f"{path}: not a checkpoint of this version of the project ({written}, not {FORMAT}); "
            "give the last.pt or best.pt of a run folder, or use the commit in its config.json"
        )
    if script and content.get("script", script) != script:
        raise InputError(
            f"{path}: written by {content['script']}.py, not {script}.py; use that one"
        )
    state = {name: content.pop(name, None) for name in STATE}
    state |= {name: copy.deepcopy(state[name]) for name in STATE if name not in MAPPED}
    progress, metadata = content.pop("progress", {}), copy.deepcopy(content)
    return Checkpoint(path, metadata, copy.deepcopy(progress), state)


def read_progress(path: Path) -> dict[str, Any] | None:
    """Where a checkpoint's run was; None where there is no such file, and where it is damaged."""
    try:
        return load(path).progress
    except InputError:
        return None


def load_into(target: Any, state: Mapping[str, Any], what: str) -> None:
    """Call `target.load_state_dict(state)`; messages call the target `what`.

    Raises:
        InputError: the state does not fit, so the flags are not those of the run that wrote it.
    """
    if isinstance(target, nn.Module):
        versioned = target.state_dict()
        versioned.clear()  # but for the versions of its modules, which MNASNet asks for
        versioned.update(state)
        state = versioned
    try:
        target.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"the checkpoint's {what} does not fit the one these flags describe "
            f"({last_line(error)}); use the flags of the first run"
        ) from None


def to_cpu(state: Any) -> Any:
    """Nested dicts and lists with all tensors copied to the CPU, so that views keep no buffer."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {name: to_cpu(value) for name, value in state.items()}
    return [to_cpu(value) for value in state] if isinstance(state, list | tuple) else state


def is_plain(state: Any) -> bool:
    """Whether torch reads it back under weights_only, which it decides by the types."""
    if type(state) in (dict, OrderedDict, list, tuple):
        parts = [*state, *state.values()] if isinstance(state, dict) else state
        return all(map(is_plain, parts))
    if isinstance(state, Tensor) or type(state) in PLAIN:
        return True
    stored = io.BytesIO()
    try:
        torch.save(state, stored)
        torch.load(io.BytesIO(stored.getvalue()), weights_only=True)
    except Exception:  # of many types for many kinds of objects
        return False
    return True


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
