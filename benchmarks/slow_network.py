"""Processes on a network of a chosen bandwidth, each in a network namespace of its own.

with slow_network.joined("100mbit", ranks=2) as places:         # or slow_network.loopback(ranks=2)
    results = slow_network.run(places, ["-m", "benchmarks.two_ranks", "resnet110"])

`run` returns the JSON that rank 0 prints last. The namespaces are joined by virtual Ethernet
devices and a bridge, and deleted when the block ends. Needs Linux, root, and `ip` and `tc` of the
package iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NET = "10.213.77"  # .1, .2, ...
MAX_PACKET = 32_768  # bytes that TCP hands to the device at once, with 66 bytes of headers each
# Burst of the token bucket: 3 ms and 1 ms at its rate, so that a pause saves up little.
BURST = {"100mbit": "40kb", "1gbit": "160kb"}
TIMEOUT = 1800  # seconds of a run


class Unavailable(Exception):
    """This machine cannot set up such a network; the message says why."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        prefix: start of its command line.
        device: its network device.
        address: address of rank 0.
    """

    prefix: Sequence[str]
    device: str
    address: str


@contextlib.contextmanager
def loopback(ranks: int = 2) -> Iterator[list[Place]]:
    """Place all ranks in one new namespace, or without the permission for that in the current one.

    Raises:
        Unavailable: the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise Unavailable("bytes are counted from Linux's /proc/net/dev")
    name = f"slamb-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except Unavailable:
        yield [Place([], "lo", "127.0.0.1")] * ranks
        return
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield [Place(["ip", "netns", "exec", name], "lo", "127.0.0.1")] * ranks
    finally:
        ip("netns", "delete", name)


@contextlib.contextmanager
def joined(rate: str, ranks: int = 2) -> Iterator[list[Place]]:
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
            call(["tc", "-n", name, "qdisc", "add", "dev", device, "root", *bucket])
        yield [
            Place(["ip", "netns", "exec", name], device, f"{NET}.1")
            for name, device in zip(names, devices)
        ]


def ip(*arguments: str) -> None:
    call(["ip", *arguments])


def call(command: Sequence[str]) -> None:
    """Run a command; raise Unavailable if it is missing or fails."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{' '.join(command)}: {error.stderr.strip()}") from None


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_rank(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """Return the environment of a rank as torchrun would set it."""
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns of addresses without host names
        "MASTER_ADDR": address,
        **{name: str(value) for name, value in ranks.items()},
    }


def run(
    places: Sequence[Place], command: Sequence[str], *, timeout: float = TIMEOUT
) -> dict[str, Any]:
    """Run a Python command on each of the places, as torchrun would start it.

    Args:
        places: where the ranks run; the name of a rank's device is appended to its command.
        command: arguments of the Python interpreter.
        timeout: seconds that it may take.

    Returns:
        The JSON that rank 0 prints last.

    Raises:
        RuntimeError: a rank failed.
        subprocess.TimeoutExpired: it took too long.
    """
    port = free_port()
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, place in enumerate(places):
            environment = as_rank(rank, len(places), place.address, port) | {
                "GLOO_SOCKET_IFNAME": place.device
            }
            line = [*place.prefix, sys.executable, *command, place.device]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            started.append(
                subprocess.Popen(line, cwd=ROOT, env=environment, stdout=output, text=True)
            )
        printed, _ = started[0].communicate(timeout=timeout)
        for process in started:
            if process.wait(timeout=60):
                raise RuntimeError(f"exit code {process.returncode}: {' '.join(command)}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    return json.loads(printed.splitlines()[-1])
