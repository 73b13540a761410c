"""A new router takes over from the one that runs: its listening sockets, its workers, what it knows of their caches.

`--hand-over PATH` is a Unix socket, for this user alone. Whoever starts with a PATH on which somebody answers is the
heir: it is given the listening sockets themselves (one queue of connections, so none is lost), the admin key, the
workers that were added while the router ran, and the seed of its digests; it asks for snapshots at PATH.http, and
begins to accept when it knows what its predecessor knows. Then it says so, and the predecessor stops accepting and ends
what it has. An heir that dies before changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from router.fleet.discovery import WorkerFlag

log = logging.getLogger("router")

VERSION = 1
WILL_BYTES_MAX = 16 << 20
SOCKETS_MAX = 64
ANSWER_S_MAX = 10.0
AGAIN_S = 0.1


class Will(msgspec.Struct):
    """What the heir is told, with the sockets."""

    version: int
    seed: int
    admin_key: str
    sockets: list[str]
    """`main` or `admin`, in the order in which they are passed."""
    workers: list[WorkerFlag]
    """Those of operators, wherever they were named."""
    drained: list[str]
    loads: list[str] = []
    """Where the router that runs tells what it, and those beside it, have in flight: it counts until that ends."""


def http_path(path: Path) -> Path:
    return path.with_name(path.name + ".http")


class Predecessor:
    """The router that runs, seen from the heir. `will` and `sockets` are the heir's."""

    def __init__(self, line: socket.socket, will: Will, sockets: list[socket.socket]) -> None:
        self._line = line
        self.will = will
        self.sockets = sockets

    @classmethod
    def find(cls, path: Path) -> Predecessor | None:
        """None where nobody answers. Raises OSError where the answer cannot be used."""
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(ANSWER_S_MAX)
        try:
            line.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            line.close()
            return None
        first, fds, _, _ = socket.recv_fds(line, 8, SOCKETS_MAX)
        sockets = [socket.socket(fileno=fd) for fd in fds]
        try:
            size = int.from_bytes(first, "big")
            if len(first) != 8 or size > WILL_BYTES_MAX:
                raise OSError(f"--hand-over {path}: another program answers there")
            body = b""
            while len(body) < size and (piece := line.recv(size - len(body))):
                body += piece
            will = msgspec.json.decode(body, type=Will)
        except msgspec.MsgspecError as error:
            raise OSError(f"--hand-over {path}: another program answers there: {error}") from error
        if will.version != VERSION or len(will.sockets) != len(sockets):
            raise OSError(f"--hand-over {path}: the router there is of another version and cannot be taken over from")
        return cls(line, will, sockets)

    def of(self, name: str) -> list[socket.socket]:
        return [sock for kind, sock in zip(self.will.sockets, self.sockets) if kind == name]

    async def take(self) -> None:
        """Both accept now: let the predecessor stop. Where it has died, it accepts nothing either."""
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        try:
            await loop.sock_sendall(self._line, b"taken\n")
            await asyncio.wait_for(loop.sock_recv(self._line, 16), ANSWER_S_MAX)
        except (OSError, asyncio.TimeoutError) as error:
            log.warning("the router that was taken over from did not say goodbye: %s", error)
        finally:
            self._line.close()


class HandOver:
    """The side of the router that runs: offers everything to whoever may connect, one heir at a time."""

    def __init__(self, path: Path, will: Callable[[], tuple[Will, list[Any]]], leave: Callable[[], None]) -> None:
        """`will`: what an heir is told and the sockets that it is given. `leave`: stop accepting and end; called when
        an heir has taken over."""
        self._path = path
        self._will, self._leave = will, leave
        self._task: asyncio.Task[None] | None = None
        self._listener = socket.socket(socket.AF_UNIX)

    def start(self) -> None:
        """Raises OSError."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(before)
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._listener.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, _ = await loop.sock_accept(self._listener)
                with line:
                    if await self._offer(line):
                        return
            except Exception as error:  # noqa: BLE001  a boundary: whatever it was, the next heir is heard
                log.warning("nothing was handed over; this one goes on: %s: %s", type(error).__name__, error)
                await asyncio.sleep(AGAIN_S)

    async def _offer(self, line: socket.socket) -> bool:
        """True where an heir has taken over."""
        loop = asyncio.get_running_loop()
        will, sockets = self._will()
        body = msgspec.json.encode(will)
        line.setblocking(True)  # some hundred bytes into an empty buffer
        line.settimeout(ANSWER_S_MAX)
        socket.send_fds(line, [len(body).to_bytes(8, "big")], [sock.fileno() for sock in sockets])
        line.setblocking(False)
        await loop.sock_sendall(line, body)
        log.info("a new router begins to take over")
        said = await loop.sock_recv(line, 16)
        if said != b"taken\n":
            log.warning("the new router has gone; this one goes on")
            return False
        self._path.unlink(missing_ok=True)
        http_path(self._path).unlink(missing_ok=True)
        self._leave()
        with contextlib.suppress(OSError):
            await loop.sock_sendall(line, b"goodbye\n")
        return True
