"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own. Root on Linux."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
NET = "10.77.0"


def _check_result(result: int, operation: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{operation}: {os.strerror(ctypes.get_errno())}")


def _run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """On entry this thread, and what it starts, is on a bridge of its own with `count` hosts, 10.77.0.1 and on; the
    world outside cannot be reached. On exit the hosts are gone, and this thread stays where it is."""

    def __init__(self, count: int) -> None:
        self.names = [f"bc{os.getpid()}-{i}" for i in range(1, count + 1)]
        self.addresses = [f"{NET}.{i}" for i in range(1, count + 1)]

    def __enter__(self) -> Hosts:
        _check_result(_LIBC.unshare(CLONE_NEWNET), "unshare")
        _run_ip("link", "set", "lo", "up")
        _run_ip("link", "add", "br0", "type", "bridge")
        _run_ip("addr", "add", f"{NET}.254/24", "dev", "br0")
        _run_ip("link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            _run_ip("netns", "add", name)
            _run_ip("link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run_ip("link", "set", f"v{i}", "master", "br0", "up")
            _run_ip("-n", name, "link", "set", "lo", "up")
            _run_ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run_ip("-n", name, "link", "set", "eth0", "up")
            _run_ip("-n", name, "route", "add", "default", "via", f"{NET}.254")
        return self

    @contextmanager
    def enter_namespace(self, host: int) -> Iterator[str]:
        """What this thread starts in the block runs on that host; its address."""
        with (
            open("/proc/thread-self/ns/net") as own_namespace,
            open(f"/run/netns/{self.names[host]}") as host_namespace,
        ):
            _check_result(_LIBC.setns(host_namespace.fileno(), CLONE_NEWNET), "setns")
            try:
                yield self.addresses[host]
            finally:
                _check_result(_LIBC.setns(own_namespace.fileno(), CLONE_NEWNET), "setns")

    def process_ids(self, host: int) -> list[int]:
        """Who runs there."""
        completed = subprocess.run(
            ["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in completed.stdout.split()]

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
