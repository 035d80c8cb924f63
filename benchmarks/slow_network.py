"""Processes on a network of a chosen bandwidth, each in a network namespace of its own.

with slow_network.places("100mbit", ranks=2) as places:         # None: the loopback device
    results = slow_network.run(places, "time_to_target.measure_rank", turns=3, ...)

`run` calls a function of a benchmark as each rank and returns what rank 0 does. The namespaces are
joined by virtual Ethernet devices and a bridge, and deleted when the block ends. They need Linux,
root, and `ip` and `tc` of the package iproute2.
"""

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.device import keep_freed_memory
from distributed.world import init_world
from errors import exit_code

ROOT = Path(__file__).resolve().parents[1]
NET = "10.213.77"  # .1, .2, ...
NETWORKS = {"loopback": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
MAX_PACKET = 32_768  # bytes that TCP hands to the device at once, with 66 bytes of headers each
# Burst of the token bucket: 3 ms and 1 ms at its rate, so that a pause saves up little.
BURST = {"100mbit": "40kb", "1gbit": "160kb"}
TIMEOUT = 1800  # seconds of a run


class Unavailable(Exception):
    """This machine cannot set up such a network; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    prefix: Sequence[str] = ()  # start of its command line
    device: str = ""  # its network device, or '' for torch's choice
    address: str = "127.0.0.1"  # of rank 0


def places(rate: str | None, ranks: int) -> contextlib.AbstractContextManager[list[Place]]:
    """Place ranks on a network of this rate in the notation of tc, or on the loopback device.

    Raises:
        Unavailable: this machine cannot set up such a network.
    """
    return joined(rate, ranks) if rate else contextlib.nullcontext([Place()] * ranks)


@contextlib.contextmanager
def joined(rate: str, ranks: int) -> Iterator[list[Place]]:
    """Place each rank in a namespace of its own that sends at `rate`, in the notation of tc.

    Raises:
        Unavailable: root or a tool is missing.
    """
    hub = f"slamb-{os.getpid()}-hub"
    names = [f"slamb-{os.getpid()}-{rank}" for rank in range(ranks)]
    devices = [f"slamb{os.getpid() % 100_000}v{rank}" for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        for name in [hub, *names]:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)  # which deletes its devices too
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, (name, device) in enumerate(zip(names, devices), 1):
            pair = ["type", "veth", "peer", "name", device, "netns", hub]
            ip("-n", name, "link", "add", device, *pair)
            ip("-n", hub, "link", "set", device, "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{NET}.{number}/24", "dev", device)
            ip("-n", name, "link", "set", device, "gso_max_size", str(MAX_PACKET))
            for each in ("lo", device):
                ip("-n", name, "link", "set", each, "up")
            bucket = ["tbf", "rate", rate, "burst", BURST[rate], "latency", "100ms"]
            execute(["tc", "-n", name, "qdisc", "add", "dev", device, "root", *bucket])
        yield [
            Place(["ip", "netns", "exec", name], device, f"{NET}.1")
            for name, device in zip(names, devices)
        ]


def ip(*arguments: str) -> None:
    execute(["ip", *arguments])


def execute(command: Sequence[str]) -> None:
    """Run a command; raise Unavailable if it is missing or fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)}: {error.stderr.strip()}") from None


@contextlib.contextmanager
def start(places: Sequence[Place], command: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a Python command on each of the places, as torchrun would; at the end none is left.

    What rank 0 prints can be read.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, place in enumerate(places):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_WORLD_SIZE": len(places),
                "MASTER_ADDR": place.address,
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns of addresses without host names
                **({"GLOO_SOCKET_IFNAME": place.device} if place.device else {}),
            }
            started.append(
                subprocess.Popen(
                    [*place.prefix, sys.executable, *command],
                    cwd=ROOT,
                    env={**os.environ, **{name: str(each) for name, each in variables.items()}},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(places: Sequence[Place], call: str, *, timeout: float = TIMEOUT, **given: Any) -> Any:
    """Call a function on each of the places, in a process of one thread.

    Args:
        places: where the ranks run.
        call: MODULE.FUNCTION of this package; called with the `World` and what is given.
        timeout: seconds that it may take.
        given: arguments that JSON can express.

    Returns:
        What it returns on rank 0, as JSON gives it back.

    Raises:
        RuntimeError: a rank failed.
        subprocess.TimeoutExpired: it took too long.
    """
    command = ["-m", "benchmarks.slow_network", call, json.dumps(given)]
    with start(places, command) as ranks:
        printed, _ = ranks[0].communicate(timeout=timeout)
        for process in ranks:
            if process.wait(timeout=60):
                raise RuntimeError(f"exit code {process.returncode}: {call}")
    return json.loads(printed.splitlines()[-1])


def main() -> None:
    """Be one rank of `run`."""
    module, _, name = sys.argv[1].partition(".")
    given: Mapping[str, Any] = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    keep_freed_memory()
    with init_world("cpu") as world:
        function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        result = function(world, **given)
        if world.is_main:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
