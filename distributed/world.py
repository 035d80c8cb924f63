"""The process group: set up from torchrun's environment, with sums and agreements across the ranks.

    with init_world("auto") as world:        # without torchrun one process, which sends nothing
        totals = world.sum(totals)           # on the devices
        folder = world.broadcast(folder)     # between the hosts: any picklable value of rank 0

`World` is the lowest module of the training stack: whoever needs to know its rank takes one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends.device import choose_device
from backends.torch_compat import gloo_needs_final_barrier
from distributed.launch import end_with_launcher


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of some ranks, or of all; every rank makes every group, its own or not."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend))


def under_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets its environment, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass
class World:
    """This process among its peers.

    Attributes:
        rank, size: this process's number and how many processes there are.
        local_rank, local_size: the same on this node.
        device: where this process computes.
        control: a gloo group for agreements between the hosts, which never touch the device; None
            in a single process.
        bytes_sent: payload that this rank has put into collectives since the epoch began; whoever
            sends adds to it.
        shares_gpu: whether all processes of a node share one GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = None
    bytes_sent: int = 0
    shares_gpu: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files and prints."""
        return self.rank == 0

    @property
    def devices(self) -> int:
        """How many GPUs are in use, or on CPUs how many nodes: what device-hours count."""
        if self.device.type == "cuda" and not self.shares_gpu:
            return self.size
        return self.size // self.local_size

    # ---------------------------------------------------------------- on the devices

    def sum(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over the ranks, on every rank; one all-reduce."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def average_buffers(self, model: nn.Module) -> None:
        """Replace BatchNorm's running statistics by their mean over the ranks; one all-reduce."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        flat = torch.cat([buffer.flatten().float() for buffer in buffers])
        dist.all_reduce(flat)
        means = (flat / self.size).split([buffer.numel() for buffer in buffers])
        for buffer, mean in zip(buffers, means):
            buffer.copy_(mean.view_as(buffer))

    # ---------------------------------------------------------------- between the hosts

    def max_over_ranks(self, value: int) -> int:
        """The largest value that any rank gave, on every rank."""
        if self.size == 1:
            return value
        box = torch.tensor(value)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return int(box)

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's values in rank order, on every rank; each rank gives as many."""
        box = torch.zeros(self.size, len(values), dtype=torch.float64)
        box[self.rank] = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(box, group=self.control)
        return box.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, any picklable object, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, any picklable object, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.gather_object(value, box if self.is_main else None, dst=0, group=self.control)
        return box if self.is_main else []

    @contextlib.contextmanager
    def local_main_first(self) -> Iterator[None]:
        """Let each node's first process run the block before the others: one download a node."""
        if self.size > 1 and self.local_rank > 0:
            dist.barrier(group=self.control)
        yield
        if self.size > 1 and self.local_rank == 0:
            dist.barrier(group=self.control)

    def node_group(self) -> dist.ProcessGroup | None:
        """The process group of this node's ranks; None where it would be of no use.

        That is where every rank is alone on its node, or where there is only one node. Collective.
        """
        if self.local_size in (1, self.size):
            return None
        starts = range(0, self.size, self.local_size)
        groups = [new_group(list(range(start, start + self.local_size))) for start in starts]
        return groups[self.rank // self.local_size]

    # ---------------------------------------------------------------- bytes that were sent

    def reset_bytes(self) -> None:
        """Begin to count what this rank sends anew."""
        self.bytes_sent = 0

    def state_dict(self) -> dict[str, int]:
        """What this rank has sent in the epoch so far."""
        return {"bytes_sent": self.bytes_sent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned; other keys are ignored."""
        self.bytes_sent = state["bytes_sent"]


class StopVote:
    """Whether any rank wants to stop; agreed a step late, so that asking never waits.

    Call `ask` once a step on every rank; the answer is the same on all of them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: tuple[dist.Work, Tensor] | None = None

    def ask(self, wants_to_stop: bool) -> bool:
        """Hand in this rank's vote; returns whether any rank wanted to stop at the call before."""
        if self.world.size == 1:
            return wants_to_stop
        agreed = self.finish()
        box = torch.tensor(int(wants_to_stop))
        work = dist.all_reduce(box, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self.pending = work, box
        return agreed

    def finish(self) -> bool:
        """The result of the last vote; afterwards nothing is pending."""
        if self.pending is None:
            return False
        work, box = self.pending
        self.pending = None
        work.wait()
        return bool(box)


# -------------------------------------------------------------------- set-up


def choose_collectives(device_name: str, device: torch.device, local_size: int) -> str:
    """The backend of torch.distributed: nccl between GPUs, gloo between CPUs.

    It is gloo as well where --device cuda:N puts several processes on one GPU, which nccl refuses.
    """
    shares_gpu = local_size > 1 and ":" in device_name
    return "nccl" if device.type == "cuda" and not shares_gpu else "gloo"


@contextlib.contextmanager
def init_world(device_name: str = "auto") -> Iterator[World]:
    """The process group of torchrun's environment; without one, a single process.

    Args:
        device_name: 'auto', 'cpu', 'cuda' or 'cuda:N'.
    Raises:
        InputError: the device is not there.
    """
    env = os.environ
    local_rank, local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    device = choose_device(device_name, local_rank)
    if not under_torchrun():
        yield World(device=device)
        return
    end_with_launcher()
    backend = choose_collectives(device_name, device, local_size)
    store, rank, size = next(dist.rendezvous("env://"))
    # A restarted job finds the store of its first start: without a prefix of its own it would read
    # the addresses of dead processes.
    restarts = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"start-{restarts}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=30),
        device_id=device if backend == "nccl" else None,
    )
    try:
        control = new_group(backend="gloo") if size > 1 else None
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local_rank,
            local_size=local_size,
            device=device,
            control=control,
            shares_gpu=device.type == "cuda" and backend == "gloo",
        )
        if gloo_needs_final_barrier() and control is not None:
            dist.barrier(group=control)
    finally:
        dist.destroy_process_group()
