"""The network interface between the nodes is that of the route, unless the user chose one."""

import contextlib
import os
import sys

import pytest

from distributed.interface import check_interfaces, interface_of, own_address, use_interface_of
from errors import InputError


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_the_interface_of_the_route_is_used_unless_the_user_chose_one(monkeypatch):
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == "", "an address of documentation, RFC 5737"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    use_interface_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for chosen, is_wrong in (("=lo", 0), ("l", 0), ("^lo", 0), ("=l", 1), ("eth77", 1)):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
        check_interfaces(is_gpu=False)
        with pytest.raises(InputError) if is_wrong else contextlib.nullcontext():
            check_interfaces(is_gpu=True)
