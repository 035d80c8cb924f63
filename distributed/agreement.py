"""What the processes of a job must have in common, and what one of them finds out for all.

    check_equal(world, {"the rate": 0.1, "the commit": "31dfeba"}, advice="start all alike")
    folder = on_main(world, make_folder)          # rank 0 makes it; an error there ends all ranks
    with local_main_first(world):                 # one download a node
        download()
    texts = once_a_node(world, read)              # one process of a node reads
    memory = node_memory(world, 32 * 32 * 10_000)  # one array of bytes a node

Processes that disagree would train different models without a word, or wait for each other until
a time limit ends them. All functions here are collective: every rank calls them.
"""

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from distributed.world import READ_SECONDS, World
from errors import InputError, SharedInputError

Result = TypeVar("Result")
LONGEST_VALUE = 60  # characters of a value in a message


def check_equal(world: World, values: Mapping[str, Any], *, advice: str) -> None:
    """Check that all ranks have the same values, which are named as in a message.

    Raises:
        InputError: some rank has another value than rank 0; on every rank, with the same advice.
    """
    texts = {name: str(value) for name, value in values.items()}
    first, *others = world.all_gather(texts)
    for rank, theirs in enumerate(others, start=1):
        for name in {**first, **theirs}:
            expected, found = (each.get(name, "nothing") for each in (first, theirs))
            if found != expected:
                same = len(os.path.commonprefix([expected, found]))
                shown = slice(max(0, same - LONGEST_VALUE // 2), same + LONGEST_VALUE // 2)
                expected, found = expected[shown], found[shown]
                raise SharedInputError(
                    f"the processes do not agree: {name} is {expected} on rank 0 and {found} on "
                    f"rank {rank}; {advice}"
                )


def report_restart(world: World, epoch: int) -> None:
    """Say on rank 0 that torchrun restarted the job, and from which epoch it goes on."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if world.is_main and count not in ("", "0"):
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"restart {count} of {most}, from epoch {epoch}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def raise_together(world: World) -> Iterator[None]:
    """Raise the InputError of the first rank whose block raises one on all ranks."""
    problem = ""
    try:
        yield
    except InputError as error:
        problem = str(error)
    for found in world.all_gather(problem):
        if found:
            raise SharedInputError(found)


def on_main(world: World, action: Callable[[], Result]) -> Result:
    """Do something on rank 0; each rank gets its result, which can be pickled, or InputError."""
    if world.size == 1:
        return action()
    with raise_together(world):
        result = action() if world.is_main else None
    return world.broadcast(result)


@contextlib.contextmanager
def local_main_first(world: World) -> Iterator[None]:
    """Let rank 0, then each node's first process run the block before the others.

    So a node downloads once, and nodes that share a disk do so together. Every rank raises an
    InputError of any rank, so that none waits for another.
    """
    with world.waiting_at_most(READ_SECONDS):
        for turn in ("main", "first", "other"):
            with raise_together(world):
                if turn == ("main" if world.is_main else "other" if world.local_rank else "first"):
                    yield


def node_memory(world: World, num_bytes: int) -> Tensor:
    """Memory of zeros that the processes of a node share: (num_bytes,) uint8.

    It is a file without a name, which goes with the last process that has it. The number of bytes
    is that of the node's first process.
    """
    if world.size == 1:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    with open(os.memfd_create("node_memory"), "r+b") as file:
        file.truncate(num_bytes)
        own = f"/proc/{os.getpid()}/fd/{file.fileno()}", num_bytes
        path, size = world.all_gather(own)[world.node[0]]
        memory = torch.empty(0, dtype=torch.uint8)
        if size:
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        world.all_gather(None)  # all have it, and the first process may close it
    return memory


def once_a_node(world: World, action: Callable[[], Result]) -> Result:
    """Do something on each node's first process, and give its result to the others of the node.

    The result can be pickled. Without Linux's /proc every process does it.
    """
    with tempfile.TemporaryFile() as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        first_path = world.all_gather(path)[world.node[0]]
        with local_main_first(world):
            if world.local_rank > 0:
                with contextlib.suppress(OSError), open(first_path, "rb") as first_file:
                    return pickle.load(first_file)
            result = action()
            if len(world.node) > 1:
                pickle.dump(result, file)
                file.flush()
            return result
