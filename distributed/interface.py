"""The network interface on which the nodes of a job reach each other.

mine = own_address("node0")          # 10.0.0.2, on the route to node 0
use_interface_of(mine)               # gloo and NCCL announce that interface's address

By themselves gloo announces the address of the host's own name, which is 127.0.1.1 on Debian and
Ubuntu, and NCCL that of the first interface that it finds.
"""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

import torch.distributed as dist

from errors import InputError, refused_as

SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface


def own_address(host: str) -> str:
    """The address of this machine on the route to a host, a name or an address; nothing is sent."""
    routes = []
    for family, kind, *_, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            routes.append(probe.getsockname()[0])
    if not routes:
        raise OSError("no route")
    return routes[0]


def use_interface_of(address: str) -> None:
    """Let gloo and NCCL use the interface that has an address, where the user chose none."""
    if interface := interface_of(address):
        for variable, value in (("GLOO", interface), ("NCCL", f"={interface}")):  # =: exactly this
            name = f"{variable}_SOCKET_IFNAME"
            os.environ[name] = os.environ.get(name) or value


def interface_of(address: str) -> str:
    """The name of the interface that has an address; '' where it is not found."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        lines = Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
        return next((line.split()[-1] for line in lines if int(line[:32], 16) == int(wanted)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(any_socket, SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            if found == wanted.packed:
                return name
    return ""


def check_interfaces(*, is_gpu: bool) -> None:
    """Refuse interfaces of the user for gloo, and of a GPU for NCCL, without an address here."""
    gloo, nccl = (os.environ.get(f"{each}_SOCKET_IFNAME", "") for each in ("GLOO", "NCCL"))
    here, kinds = [name for _, name in socket.if_nameindex()], (RuntimeError,)
    with refused_as(f"GLOO_SOCKET_IFNAME={gloo}, of {', '.join(here)}", kinds):
        for name in filter(None, gloo.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
    wanted = tuple(nccl.removeprefix("=").split(","))  # =: exactly these, ^: any but these
    is_here = [name in wanted if nccl[:1] == "=" else name.startswith(wanted) for name in here]
    if is_gpu and nccl[:1] != "^" and not any(is_here):
        raise InputError(f"NCCL_SOCKET_IFNAME={nccl}: not one of {', '.join(here)}")


def check_port(port: int) -> None:
    """Refuse a port at which this machine cannot listen, as where another process does."""
    kinds = (OSError, OverflowError)
    with refused_as(f"MASTER_PORT={port}: this machine cannot listen there", kinds):
        socket.create_server(("", port)).close()
