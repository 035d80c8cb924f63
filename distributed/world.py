"""The process group: set-up from torchrun's environment, DistributedDataParallel, sums and agreements across ranks.

with distributed.world(device_type) as world:        # world size 1 without torchrun: everything works, sends nothing
    model = distributed.wrap(model, world, ...)
    totals = world.sum(totals)

python distributed.py --nproc_per_node=4 resnet50_test.py --bs 256      torchrun, with the project's exit codes
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends import torch_compat
from backends.device import choose_device


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher that sets its environment) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass
class World:
    """This process among its peers. `control` is a gloo group for host-side agreements that never touch the device.

    `shares_gpu`: the processes of a node share a GPU.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Any = None
    bytes_sent: int = 0
    shares_gpu: bool = False

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that writes."""
        return self.rank == 0

    @property
    def devices(self) -> int:
        """GPUs in use; on CPUs, nodes: what device-hours count."""
        return (
            self.size
            if self.device.type == "cuda" and not self.shares_gpu
            else self.size // self.local_size
        )

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the ranks, on every rank; one all-reduce, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max_over_ranks(self, value: int) -> int:
        """The largest value any rank gave, on every rank (host side)."""
        if self.size == 1:
            return value
        box = torch.tensor(value)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return int(box)

    def all_gather(self, values: list[float]) -> list[list[float]]:
        """Every rank's values, on every rank (host side)."""
        box = torch.zeros(self.size, len(values), dtype=torch.float64)
        box[self.rank] = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(box, group=self.control)
        return box.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on rank 0, in rank order; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.gather_object(value, box if self.is_main else None, dst=0, group=self.control)
        return box if self.is_main else []

    def node_group(self) -> Any:
        """The process group of this node's ranks; None where every rank is alone on its node, or there is one node."""
        if self.size == self.local_size or self.local_size == 1:
            return None
        groups = [
            dist.new_group(list(range(start, start + self.local_size)))
            for start in range(0, self.size, self.local_size)
        ]
        return groups[self.rank // self.local_size]

    @contextlib.contextmanager
    def local_main_first(self) -> Iterator[None]:
        """The block runs on the first process of each node before the others: one download, not one a process."""
        if self.size > 1 and self.local_rank > 0:
            dist.barrier(group=self.control)
        yield
        if self.size > 1 and self.local_rank == 0:
            dist.barrier(group=self.control)

    def average_buffers(self, model: nn.Module) -> None:
        """Make BatchNorm statistics the mean over the ranks, in place; one all-reduce."""
        floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not floats:
            return
        flat = torch.cat([buffer.flatten().float() for buffer in floats])
        dist.all_reduce(flat)
        for buffer, mean in zip(
            floats, (flat / self.size).split([buffer.numel() for buffer in floats])
        ):
            buffer.copy_(mean.view_as(buffer))


class Vote:
    """Whether any rank wants to stop, agreed one step late so that asking never waits for the network.

    Call `ask` once a step on every rank; the answer is the same on all of them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: tuple[Any, Tensor] | None = None

    def ask(self, wish: bool) -> bool:
        """Put in this rank's wish; True once any rank's wish of the call before was True."""
        if self.world.size == 1:
            return wish
        agreed = self.finish()
        box = torch.tensor(int(wish))
        self.pending = (
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self.world.control, async_op=True),
            box,
        )
        return agreed

    def finish(self) -> bool:
        """The answer to the last call; leaves nothing pending."""
        if self.pending is None:
            return False
        work, box = self.pending
        self.pending = None
        work.wait()
        return bool(box)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted in the list instead of ending the process; a second Ctrl-C ends it at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if (
            number == signal.SIGINT and caught and not under_torchrun()
        ):  # torchrun repeats the terminal's Ctrl-C
            raise KeyboardInterrupt
        caught.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def collectives(device_name: str, device: torch.device, local_size: int) -> str:
    """nccl between GPUs; gloo between CPUs, and where --device cuda:N puts a node's processes on one GPU, which nccl refuses."""
    shared = local_size > 1 and ":" in device_name
    return "nccl" if device.type == "cuda" and not shared else "gloo"


@contextlib.contextmanager
def init_world(device_name: str = "auto") -> Iterator[World]:
    """The process group of torchrun's environment, torn down on the way out; world size 1 without one.

    Raises:
        InputError: the device is not there.
    """
    env = os.environ
    local_rank, local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    device = choose_device(device_name, local_rank)
    if not under_torchrun():
        yield World(device=device)
        return
    backend = collectives(device_name, device, local_size)
    store, rank, size = next(dist.rendezvous("env://"))
    # A restarted job finds the store of its first start: without a name of its own it would read dead processes' addresses.
    store = dist.PrefixStore(f"start-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    device_id = device if backend == "nccl" else None
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(minutes=30),
        device_id=device_id,
    )
    try:
        control = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        shares_gpu = device.type == "cuda" and backend == "gloo"
        yield World(
            dist.get_rank(),
            dist.get_world_size(),
            local_rank,
            local_size,
            device,
            control,
            shares_gpu=shares_gpu,
        )
        if torch_compat.gloo_needs_final_barrier() and control is not None:
            dist.barrier(group=control)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
