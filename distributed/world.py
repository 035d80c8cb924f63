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
import json
import math
import os
import socket
import sys
import time
import uuid
from collections import namedtuple
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
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
from distributed.interface import check_interfaces, check_port, own_address, use_interface_of
from distributed.waiting import named_stalls, named_wait, why_unreachable
from distributed.worker import end_with_launcher, end_with_sweep
from errors import LINE_LIMIT, InputError, LostPeer, SharedInputError

if dist.is_available():
    # The default arguments of its functions are the default group of the time of its import. Were
    # it imported later (the first step of an optimizer of torch's does so), they would keep the
    # group and gloo's threads alive after destroy_process_group(), and such a thread may abort
    # the process while the interpreter ends.
    import torch.distributed.nn.functional  # noqa: F401

READ_SECONDS = 7200.0  # for what one process does for all of a node or of the job: to download
JOB_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
MOST_RANKS, MOST_PORTS = 10**6, 2**16 - 1
MOST_NAMED = 8  # ranks in a message
POLL_SECONDS = 0.05
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
    """This process among its peers."""

    rank: int = 0  # this process's number
    size: int = 1  # how many processes there are
    nodes: Sequence[Sequence[int]] = ((0,),)  # the ranks of each node, in ascending order
    core_sharers: int = 1  # how many processes share this one's CPU cores
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # A gloo group between the hosts, which never touches the device; None in a single process.
    control: dist.ProcessGroup | None = None
    traffic: Traffic = Traffic()  # of this rank since the epoch began; whoever sends adds to it
    shares_gpu: bool = False  # all processes of a node share one GPU
    limits: TimeLimits = TimeLimits()  # how long processes wait for each other
    time_limit: float = TimeLimits.start  # which of them holds now, in seconds
    stage: int = 0  # how often this rank has come to where all ranks do; others wait for the last
    told: int = -1  # the last stage that this rank has told the others

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes files and prints."""
        return self.rank == 0

    @property
    def node(self) -> Sequence[int]:
        """The ranks of this node; the first of them does what one process does for all."""
        return next((node for node in self.nodes if self.rank in node), (self.rank,))

    @property
    def local_rank(self) -> int:
        return self.node.index(self.rank)

    @property
    def devices(self) -> int:
        """How many GPUs are in use, or on CPUs how many nodes: what device-hours count."""
        if self.device.type == "cuda" and not self.shares_gpu:
            return self.size
        return len(self.nodes)

    # ---------------------------------------------------------------- on the devices

    def sum(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over the ranks, on every rank; one all-reduce."""
        self.stage += 1
        if self.size > 1:
            dist.all_reduce(values)
        return values

    # ---------------------------------------------------------------- between the hosts

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, any picklable object, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        self.stage += 1
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value, group=self.control)
        return box

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, any picklable object, on every rank."""
        if self.size == 1:
            return value
        self.stage += 1
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, any picklable object, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [value]
        self.stage += 1
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
            self.stage += 1
            dist.barrier(group=self.control)  # no rank has the old limit while others are inside
        finally:
            self.set_time_limit(before)

    def first_step_done(self) -> None:
        """From now on the limit is that of steps; collective. Only the first call does anything."""
        if self.size == 1 or self.time_limit == self.limits.step:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.stage += 1
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
        self.world.stage += 1
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
    rank, size = 0, 1
    sizes = [os.environ.get(name, "") for name in JOB_SIZES]
    started = max(int(text) if text.isdecimal() else 1 for text in sizes)
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        raise InputError("a launcher sets both RANK and WORLD_SIZE, and one is missing here")
    if under_torchrun():
        end_with_launcher()
        size = _number("WORLD_SIZE", 1, MOST_RANKS)
        rank = _number("RANK", 0, size - 1)
    else:
        end_with_sweep()
        if started > 1:
            print(
                f"warning: a launcher started {started} processes without RANK and WORLD_SIZE: "
                "each of them trains alone",
                file=sys.stderr,
            )
    world = World(rank, size, limits=limits, time_limit=limits.start)
    backend, has_failed, ending = "gloo", True, contextlib.ExitStack()
    try:
        has_gpu = device_name != "cpu" and torch.cuda.is_available()
        store = _meet_at_first(world, "cuda" if has_gpu else "cpu") if size > 1 else None
        # A node's launchers, if there are several, may each have GPUs that they count from 0.
        local_rank = _number("LOCAL_RANK", 0, MOST_RANKS, default=str(world.local_rank))
        world.device = choose_device(device_name, local_rank)
        # --device cuda:N puts several processes on one GPU, which NCCL refuses.
        world.shares_gpu = has_gpu and ":" in device_name and len(world.nodes) < size
        if world.shares_gpu and (reason := unavailable_reason("shared_gpu")):
            raise InputError(
                f"--device {device_name} of several processes {reason}; use --device auto"
            )
        if store is not None:
            backend = "nccl" if world.device.type == "cuda" and not world.shares_gpu else "gloo"
            _init_process_group(world, backend, store)
            ending.enter_context(
                named_stalls(partial(_missing_ranks, store, world), math.inf, lambda: world.stage)
            )
        yield world
        has_failed = False
        if gloo_needs_final_barrier() and world.control is not None:
            dist.barrier(group=world.control)
    except RuntimeError as error:
        reason = lost_peer_reason(error, world.time_limit)
        if reason and size > 1:
            raise LostPeer(
                f"rank {world.rank} has lost another process ({reason}); the messages of the "
                "others tell why; after a checkpoint the run can go on with --resume"
            ) from None
        raise
    finally:
        ending.close()
        if backend == "nccl" and has_failed and dist.is_initialized():
            # Without a word to the others, who may never answer; when the error is printed.
            atexit.register(abort_process_groups)
        elif dist.is_initialized():
            dist.destroy_process_group()


def _number(name: str, least: int, most: int, default: str = "") -> int:
    """A launcher's number in the environment; an InputError where it is not from least to most."""
    text = os.environ.get(name, "").strip() or default
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise InputError(f"{name}={text}: a launcher sets a number from {least} to {most}")


def _init_process_group(world: World, backend: str, store: dist.Store) -> None:
    """Connect the ranks, with the default group and that of `control`."""
    with named_wait(lambda: "the processes connect to each other", world.limits.start):
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=world.limits.start),
            device_id=world.device if backend == "nccl" else None,
        )
        world.control = dist.new_group(backend="gloo")  # type: ignore[assignment]
    world.set_time_limit(world.limits.start)


def _meet_at_first(world: World, device_type: str) -> dist.Store:
    """Meet the other ranks at MASTER_ADDR, and return a store that has been given to them alone."""
    check_interfaces(is_gpu=device_type == "cuda")
    host, port = os.environ.get("MASTER_ADDR", "").strip(), _number("MASTER_PORT", 1, MOST_PORTS)
    if not host:
        raise InputError("MASTER_ADDR must name the host of rank 0")
    # torchrun's own process may be the one that has the store.
    is_host = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_host:
        check_port(port)
    missing = set(range(world.size)) if world.is_main else {0}

    def reason() -> str:
        some = f"ranks {sorted(missing)[:MOST_NAMED]} of {world.size} have not come"
        return why_unreachable(host, port) or (some if world.is_main or missing else "")

    with named_wait(reason, world.limits.start):
        while not is_host and why_unreachable(host, port):
            time.sleep(1)  # torch prints much meanwhile
        store = dist.TCPStore(
            "127.0.0.1" if is_host else host,  # whatever its name is elsewhere
            port,
            is_master=is_host,
            timeout=timedelta(seconds=world.limits.start),
            wait_for_workers=False,
        )
        return _meet(store, world, device_type, missing)


# what a rank tells the others when it comes; the file and its token let them see its node
_Arrival = namedtuple("_Arrival", "device_type cores file token host")


def _meet(store: dist.Store, world: World, device_type: str, missing: set[int]) -> dist.Store:
    """Wait for all ranks, find out the nodes and the interface between them.

    torchrun's store holds what earlier starts of the job have left, as the addresses of dead
    processes. So the ranks meet under a name that they have not had before, once each has shown
    that it lives. A node that was lost may come late, from a launcher that was started anew.

    Args:
        missing: the ranks for which this one waits, kept up to date.
    Returns:
        A store of these ranks alone.
    """
    token = uuid.uuid4().hex
    with open(os.memfd_create(token)) as file:
        cores = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        arrival = " ".join(_Arrival(device_type, cores, path, token, socket.gethostname()))
        store.set(f"arrived/{world.rank}", arrival)
        if world.is_main:
            store.set(f"alive/{arrival}", "")
            arrivals = _living_arrivals(store, world, missing)
            store.set(f"all/{token}", json.dumps(arrivals))
            for each in arrivals:
                store.set(f"start/{each}", token)
        else:
            store.get(f"seen/{arrival}")
            missing.clear()  # rank 0 tells who is missing
            store.set(f"alive/{arrival}", "")
        name = store.get(f"start/{arrival}").decode()
        everyone = [_Arrival(*each.split(" ", 4)) for each in json.loads(store.get(f"all/{name}"))]
        if len({each.device_type for each in everyone}) > 1:
            raise SharedInputError("some processes have a GPU, and others none; give --device cpu")
        met = dist.PrefixStore(name, store)
        world.nodes = _find_nodes(met, everyone, world.rank)
    world.core_sharers = sum(everyone[rank].cores == cores for rank in world.node)
    if len(world.nodes) > 1:
        _use_route(met, world)
    return met


def _find_nodes(met: dist.Store, everyone: Sequence[_Arrival], rank: int) -> list[list[int]]:
    """The ranks of each node: those of one host name that can open each other's files.

    A process number means another process, or none, in another container or on another host.
    """

    def is_here(other: _Arrival) -> bool:
        with contextlib.suppress(OSError):
            found = os.readlink(other.file).partition(" ")[0]
            return (found, other.host) == (f"/memfd:{other.token}", everyone[rank].host)
        return False

    first = next(each for each, other in enumerate(everyone) if each == rank or is_here(other))
    met.set(f"first/{rank}", str(first))
    firsts = [int(met.get(f"first/{each}")) for each in range(len(everyone))]
    return [[each for each, of in enumerate(firsts) if of == node] for node in sorted({*firsts})]


def _use_route(met: dist.Store, world: World) -> None:
    """Let gloo and NCCL use the interface on the route to the first node."""
    mine = "127.0.0.1"
    with contextlib.suppress(OSError):  # of a name that the first node itself does not know
        mine = own_address(os.environ["MASTER_ADDR"])
    met.set(f"address/{world.rank}", mine)
    if ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
        # The first node may know itself by a loopback address alone.
        other = next(node for node in world.nodes if node is not world.node)
        mine = own_address(met.get(f"address/{other[0]}").decode())
    use_interface_of(mine)


def _missing_ranks(store: dist.Store, world: World) -> str:
    """The ranks that are behind this one or do not answer, in words.

    Each rank that stands still calls this twice or more, and so tells the others its stage. The
    answer is '' where nobody is behind, or a lower rank, which is as far, reports it.
    """
    here, missing, lost = world.stage, [], "the process where the ranks meet does not answer"
    with contextlib.suppress(RuntimeError):  # the job ends
        with named_wait(lambda: lost, world.time_limit):
            store.check(["stage"])
        if world.told < here:
            store.set(f"stage/{world.rank}", str(here))
            world.told = here
            return ""  # until they have told theirs
        for rank, key in ((rank, f"stage/{rank}") for rank in range(world.size)):
            if not store.check([key]) or int(store.get(key)) < here:
                missing.append(rank)
            elif rank < world.rank:
                return ""
    some = f"for ranks {missing[:MOST_NAMED]} of {world.size}" if missing else ""
    return some and f"rank {world.rank} waits up to {world.time_limit:g} s {some}"


def _living_arrivals(store: dist.Store, world: World, missing: set[int]) -> list[str]:
    """Wait until each rank has arrived and answers; return what they wrote, in their order."""
    arrivals: dict[int, str] = {}
    while missing:
        for rank in sorted(missing):
            if store.check([f"arrived/{rank}"]):
                arrivals[rank] = store.get(f"arrived/{rank}").decode()
                store.delete_key(f"arrived/{rank}")
                store.set(f"seen/{arrivals[rank]}", "")
                missing.discard(rank)
        if missing:
            time.sleep(POLL_SECONDS)
            continue
        alive = {rank: f"alive/{each}" for rank, each in arrivals.items()}
        with contextlib.suppress(RuntimeError):  # the time is over: some had died before
            store.wait(list(alive.values()), timedelta(seconds=RESTART_SECONDS))
        for rank, key in alive.items():
            if not store.check([key]) or store.check([f"arrived/{rank}"]):  # or it came anew
                missing.add(rank)
    return [arrivals[rank] for rank in range(world.size)]
