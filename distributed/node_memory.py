"""Memory that the processes of a node share: what each would hold is there once.

memory = node_memory(world, 10_000 * 32 * 32 * 3)      # uint8; every process may write its part
raise_together(world, "")                              # by now all have
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from distributed.agreement import raise_together
from distributed.world import World


def node_memory(world: World, num_bytes: int) -> Tensor:
    """Memory of zeros that the processes of this node share; collective.

    It is a file without a name, which the system frees with the last process that maps it, however
    that one ends.

    Args:
        world: the ranks.
        num_bytes: the node's first process decides; nodes may differ.
    Returns:
        (num_bytes,) uint8.
    """
    path, file = "", -1
    if world.local_rank == 0:
        file = os.memfd_create("node_memory")
        os.truncate(file, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
    path, num_bytes = world.all_gather_objects((path, num_bytes))[world.rank - world.local_rank]
    memory = torch.empty(0, dtype=torch.uint8)
    if num_bytes:
        memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    raise_together(world, "")  # all have it: the first one may close its file
    if file >= 0:
        os.close(file)
    return memory
