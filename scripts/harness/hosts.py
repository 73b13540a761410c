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


def _done(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """On entry this thread, and what it starts, is on a bridge of its own with `count` hosts, 10.77.0.1 and on; the
    world outside cannot be reached. On exit the hosts are gone, and this thread stays where it is."""

    def __init__(self, count: int) -> None:
        self.names = [f"bc{os.getpid()}-{i}" for i in range(1, count + 1)]
        self.addresses = [f"{NET}.{i}" for i in range(1, count + 1)]

    def __enter__(self) -> Hosts:
        _done(_LIBC.unshare(CLONE_NEWNET), "unshare")
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "br0", "type", "bridge")
        _ip("addr", "add", f"{NET}.254/24", "dev", "br0")
        _ip("link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            _ip("netns", "add", name)
            _ip("link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"v{i}", "master", "br0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "route", "add", "default", "via", f"{NET}.254")
        return self

    @contextmanager
    def on(self, host: int) -> Iterator[str]:
        """What this thread starts in the block runs on that host; its address."""
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.names[host]}") as there:
            _done(_LIBC.setns(there.fileno(), CLONE_NEWNET), "setns")
            try:
                yield self.addresses[host]
            finally:
                _done(_LIBC.setns(here.fileno(), CLONE_NEWNET), "setns")

    def processes(self, host: int) -> list[int]:
        """Who runs there."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
