"""The process group: set up from torchrun's environment, with sums and agreements across the ranks.

    with init_world("auto") as world:        # without torchrun one process, which sends nothing
        totals = world.sum(totals)           # on the devices
        folder = world.broadcast(folder)     # between the hosts: any picklable value of rank 0

`World` is the lowest module of the training stack: whoever needs to know its rank takes one.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.device import choose_device
from backends.torch_compat import (
    abort_process_groups,
    gloo_needs_final_barrier,
    set_group_timeouts,
    unavailable_reason,
)
from distributed.averaging import Traffic
from distributed.interface import own_address, use_interface_of
from distributed.worker import end_with_launcher, end_with_sweep, is_restarted
from errors import LINE_LIMIT, InputError, LostPeer, SharedInputError, refused_as

if dist.is_available():
    # The default arguments of its functions are the default group of the time of its import. Were
    # it imported later (the first step of an optimizer of torch's does so), they would keep the
    # group and gloo's threads alive after destroy_process_group(), and such a thread may abort
    # the process while the interpreter ends.
    import torch.distributed.nn.functional  # noqa: F401

READ_SECONDS = 7200.0  # for what one process does for all of a node or of the job: to download
RESTART_SECONDS = 20.0  # in which the processes of a restarted job come back, if they do
LOST_PEER_SIGNS = (  # in messages of gloo, of nccl and of the store in which the ranks meet
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket is not connected",
    "Failed to recv",
    "imed out",
    "timeout",
    "remote process exited",
    "communicator was aborted",
)


def under_torchrun() -> bool:
    """Whether torchrun, or another launcher that sets its environment, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that a process waits for the others, in one collective, before it gives up."""

    start: float = 300.0  # until the first training step is done; and in evaluations and saves
    step: float = 100.0  # in the training steps after that


@dataclass
class World:
    """This process among its peers.

    Attributes:
        rank, size: this process's number and how many processes there are.
        local_rank, local_size: the same on this node.
        device: where this process computes.
        control: a gloo group for agreements between the hosts, which never touch the device; None
            in a single process.
        traffic: of this rank since the epoch began; whoever sends adds to it.
        shares_gpu: whether all processes of a node share one GPU.
        limits: how long processes wait for each other; `time_limit` says which holds now, in
            seconds.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: dist.ProcessGroup | None = None
    traffic: Traffic = Traffic()
    shares_gpu: bool = False
    limits: TimeLimits = TimeLimits()
    time_limit: float = TimeLimits.start

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

    # ---------------------------------------------------------------- between the hosts

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, any picklable object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self.control)
        return box

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

    # ---------------------------------------------------------------- time limits

    @contextlib.contextmanager
    def waiting_at_most(self, seconds: float) -> Iterator[None]:
        """Another time limit within the block, which the ranks leave together; collective."""
        before = self.time_limit
        if self.size == 1 or seconds == before:
            yield
            return
        self.set_time_limit(seconds)
        try:
            yield
            dist.barrier(group=self.control)  # no rank has the old limit while others are inside
        finally:
            self.set_time_limit(before)

    def first_step_done(self) -> None:
        """From now on the limit is that of steps; collective. Only the first call does anything."""
        if self.size == 1 or self.time_limit == self.limits.step:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.control)
        self.set_time_limit(self.limits.step)

    def set_time_limit(self, seconds: float) -> None:
        """Set the time limit of all process groups of this rank."""
        self.time_limit = seconds
        if self.size > 1:
            set_group_timeouts(seconds)


class StopVote:
    """What the rank that wants most wants; agreed a step late, so that asking never waits.

    Call `ask` once a step on every rank; the answer is the same on all of them.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: tuple[dist.Work, Tensor] | None = None

    def ask(self, wish: int) -> int:
        """Hand in this rank's wish, 0 for none; returns the largest one of the vote before.

        The wish must be repeated at each call until the ranks agree.
        """
        if self.world.size == 1:
            return wish
        agreed = self.finish()
        box = torch.tensor(int(wish))
        work = dist.all_reduce(box, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        self.pending = work, box
        return agreed

    def finish(self) -> int:
        """The result of the last vote; afterwards nothing is pending."""
        if self.pending is None:
            return 0
        work, box = self.pending
        self.pending = None
        work.wait()
        return int(box)


# -------------------------------------------------------------------- set-up


def lost_peer_reason(error: RuntimeError, time_limit: float) -> str:
    """Why a collective failed, if it is that another process is gone; otherwise ''."""
    lines = str(error).splitlines()
    # The first such line is the reason; a stack of C++ follows it, or NCCL's advice precedes it.
    found = next((each for each in lines if any(sign in each for sign in LOST_PEER_SIGNS)), "")
    if "imed out" in found or "timeout" in found:
        return f"no answer for {time_limit:g} s, see --timeout"
    return found.rpartition("] ")[2].partition(". ")[0][:LINE_LIMIT]


@contextlib.contextmanager
def init_world(device_name: str = "auto", limits: TimeLimits = TimeLimits()) -> Iterator[World]:
    """The process group of torchrun's environment; without one, a single process.

    Args:
        device_name: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        limits: how long the processes wait for each other.
    Raises:
        InputError: the device is not there, or this torch cannot share it between processes.
        LostPeer: another process has ended or does not answer.
    """
    env = os.environ
    with refused_as("a launcher's variables"):
        local_rank, local_size = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    device = choose_device(device_name, local_rank)
    if not under_torchrun():
        end_with_sweep()
        yield World(device=device, limits=limits)
        return
    end_with_launcher()
    # --device cuda:N puts several processes on one GPU, which NCCL refuses.
    shares_gpu = device.type == "cuda" and local_size > 1 and ":" in device_name
    backend = "nccl" if device.type == "cuda" and not shares_gpu else "gloo"
    if shares_gpu and (reason := unavailable_reason("shared_gpu")):
        raise InputError(f"--device {device_name} of several processes {reason}; use --device auto")
    with refused_as("a launcher's variables"):
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=device,
        shares_gpu=shares_gpu,
        limits=limits,
        time_limit=limits.start,
    )
    has_failed = True
    try:
        _init_process_group(world, backend)
        yield world
        has_failed = False
        if gloo_needs_final_barrier() and world.control is not None:
            dist.barrier(group=world.control)
    except RuntimeError as error:
        reason = lost_peer_reason(error, world.time_limit)
        if reason and world.size > 1:
            raise LostPeer(
                f"rank {world.rank} has lost another process ({reason}); the messages of the "
                "others tell why; after a checkpoint the run can go on with --resume"
            ) from None
        raise
    finally:
        if backend == "nccl" and has_failed and dist.is_initialized():
            # Without a word to the others, who may never answer; when the error is printed.
            atexit.register(abort_process_groups)
        elif dist.is_initialized():
            dist.destroy_process_group()


def _init_process_group(world: World, backend: str) -> None:
    """Connect the ranks, with the default group and that of `control`."""
    timeout = timedelta(seconds=world.limits.start)
    with refused_as("a launcher's variables"):  # MASTER_ADDR and MASTER_PORT
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        backend,
        store=_meet(store, world, backend),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=world.device if backend == "nccl" else None,
    )
    if world.size > 1:
        world.control = dist.new_group(backend="gloo")  # type: ignore[assignment]
        world.set_time_limit(world.limits.start)


def _meet(store: dist.Store, world: World, backend: str) -> dist.Store:
    """Wait for all ranks, choose the interface between the nodes, and return a store of their own.

    torchrun's store holds what earlier starts of the job have left, as the addresses of dead
    processes. So the ranks meet under a name that they have not had before, once each has shown
    that it lives. A node that was lost may come late, from a launcher that was started anew.

    Raises:
        InputError: some processes have a GPU and others have none.
    """
    nodes_differ = world.size > world.local_size
    mine = own_address(os.environ["MASTER_ADDR"]) if nodes_differ else ""
    arrival = f"{backend} {mine} {uuid.uuid4().hex}"
    store.set(f"arrived/{world.rank}", arrival)
    if world.is_main:
        store.set(f"alive/{arrival}", "")
        arrivals = _living_arrivals(store, world)
        backends = ",".join(sorted({each.split()[0] for each in arrivals}))
        for each in arrivals:
            store.set(f"start/{each}", f"{backends} {arrivals[-1]}")
    else:
        store.get(f"seen/{arrival}")
        store.set(f"alive/{arrival}", "")
    start = store.get(f"start/{arrival}").decode()
    if "," in start:
        raise SharedInputError("some processes have a GPU, and others none; give --device cpu")
    if nodes_differ:
        # The first node may know itself by a loopback address alone.
        is_loopback = ipaddress.ip_address(mine.partition("%")[0]).is_loopback
        use_interface_of(own_address(start.split()[2]) if is_loopback else mine)
    return dist.PrefixStore(start, store)


def _living_arrivals(store: dist.Store, world: World) -> list[str]:
    """Wait until each rank has arrived and answers; return what they wrote, in their order."""
    arrivals: dict[str, str] = {}
    keys = [f"arrived/{rank}" for rank in range(world.size)]
    while len(arrivals) < world.size:
        missing = [key for key in keys if key not in arrivals]
        _wait_for_all(store, missing, world.limits.start)
        for key in missing:
            arrivals[key] = store.get(key).decode()
            store.delete_key(key)
            store.set(f"seen/{arrivals[key]}", "")
        alive = {key: f"alive/{each}" for key, each in arrivals.items()}
        with contextlib.suppress(RuntimeError):  # the time is over: some had died before
            store.wait(list(alive.values()), timedelta(seconds=RESTART_SECONDS))
        for key in keys:
            if not store.check([alive[key]]) or store.check([key]):  # or it has come anew
                del arrivals[key]
    return [arrivals[key] for key in keys]


def _wait_for_all(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Wait until a store has all keys, and say so where a restarted job waits for long."""
    if is_restarted():
        with contextlib.suppress(RuntimeError):  # the time is over
            store.wait(keys, timedelta(seconds=min(RESTART_SECONDS, seconds)))
        if not store.check(keys):
            print(f"waiting up to {seconds:g} s for a lost node", file=sys.stderr, flush=True)
    store.wait(keys, timedelta(seconds=seconds))
