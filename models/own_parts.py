"""Parts of a run that are the user's own, by name: MODULE:NAME, such as my_nets:build.

build = find("my_nets:build")                     # of the current folder, or installed
model = create_model("my_nets:build", 10, torch.zeros(2, 3, 32, 32), width=64)
"""

import ast
import contextlib
import hashlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from errors import InputError, did_you_mean, first_line

LIBRARIES = ("timm:", "hf:")  # in front of a name of theirs
SOURCES: dict[str, str] = {}
"""Of each module that `find` has imported, the first digits of its source's SHA-256."""


def is_own(name: object) -> bool:
    """Whether a name is that of a part of the user's own."""
    return isinstance(name, str) and ":" in name and not name.startswith(LIBRARIES)


def find(name: str) -> Callable[..., Any]:
    """Import what MODULE:NAME names, from the current folder or an installed package.

    Raises:
        InputError: there is no such module, it cannot be imported, or has no such function.
    """
    module_name, _, attribute = name.partition(":")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    is_new = module_name not in sys.modules
    with _one_line(name, "import"):
        try:
            module = importlib.import_module(module_name)
        except (ModuleNotFoundError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name not in module_name.split("."):
                raise
            raise InputError(
                f"{name}: there is no module {module_name}, neither in {folder} nor installed; "
                "start in its folder, or install it"
            ) from None
    part, file = getattr(module, attribute, None), getattr(module, "__file__", None)
    if not callable(part):
        guess = did_you_mean(attribute, vars(module))
        raise InputError(f"{name}: {file} has no function or class {attribute!r}{guess}")
    if file is not None and os.path.isfile(file) and (is_new or module_name not in SOURCES):
        SOURCES[module_name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:7]
    return part


def versions(*names: str) -> dict[str, str]:
    """The versions of the modules of those parts that are the user's own, by module."""
    modules = {name.partition(":")[0] for name in names if is_own(name)}
    return {module: SOURCES[module] for module in sorted(modules & SOURCES.keys())}


def call(name: str, *given: Any, settings: Mapping[str, Any], **known: Any) -> Any:
    """Call what MODULE:NAME names.

    Args:
        given: its first arguments.
        settings: keyword arguments from the command line; '0.9,0.99' is a tuple.
        known: further ones, of which it gets those that it names.
    Raises:
        InputError: it takes other arguments, or fails; the message has the line.
    """
    part, words = find(name), {key: _plain(value) for key, value in settings.items()}
    with _one_line(name, "tell its parameters"):
        signature = inspect.signature(part)
    own = {key: known[key] for key in known if key in signature.parameters} | words
    try:
        signature.bind(*given, **own)
    except TypeError as error:
        raise InputError(f"{name}{signature}: {first_line(error)}") from None
    with _one_line(name, "make"):
        return part(*given, **own)


def create_model(
    name: str, classes: int, sample: Tensor, *, settings: Mapping[str, Any], **known: Any
) -> nn.Module:
    """Make a classifier of one's own, in training mode, after it has taken a sample.

    Its weights of four axes are in channels_last, as images are.

    Args:
        sample: two inputs.
        settings, known: as of `call`.
    Raises:
        InputError: as of `call`; or it is no module, or returns no logits (2, classes), in
            evaluation or in training.
    """
    model = call(name, classes, settings=settings, **known)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name}: returned {type(model).__name__}, which is no torch.nn.Module")
    doing = f"take an input of {tuple(sample.shape)}"
    if sample.ndim == 4:
        doing += " in channels_last, where .flatten(1) takes what .view does not"
        sample = sample.contiguous(memory_format=torch.channels_last)
        with _one_line(name, "have weights in channels_last"):
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for is_training in (False, True):
        kept = [buffer.clone() for buffer in model.buffers()]  # BatchNorm's statistics
        with _one_line(name, doing), torch.no_grad():
            logits = model.train(is_training)(sample)
            for buffer, value in zip(model.buffers(), kept):
                buffer.copy_(value)
        if getattr(logits, "shape", None) != (2, classes):
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            where = "in training" if is_training else "in evaluation"
            raise InputError(
                f"{name}: returned {found} for two inputs {where}; logits are {(2, classes)}"
            )
    return model


@contextlib.contextmanager
def _one_line(name: str, doing: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a line with its file and line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "<" not in f.filename]
        frames = [f for f in frames if f.filename != __file__]
        top = name.partition(":")[0].partition(".")[0]
        own = [f for f in frames if top in f.filename] or frames
        where = f", {own[-1].filename}, line {own[-1].lineno}" if own else ""
        kind = type(error).__name__
        raise InputError(
            f"{name}: failed to {doing} ({kind}: {first_line(error)}{where})"
        ) from None


def _plain(value: Any) -> Any:
    """A setting of the command line, which has no tuples."""
    if isinstance(value, str) and "," in value:
        with contextlib.suppress(ValueError, SyntaxError):
            return ast.literal_eval(value)
    return value
