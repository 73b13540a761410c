"""Sockets whose other end is on a machine that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from engine.http.server import bind
from options.system import probe_silent_connections
from router.http.config import ClientTimeouts
from router.http.listener import Listener

pytestmark = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")


def read_limits(connection: socket.socket) -> tuple[int, int]:
    """Return whether a silent connection is probed, and the milliseconds after which it is closed."""
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


@contextlib.contextmanager
def accepting(listener: socket.socket) -> Iterator[socket.socket]:
    """Connect to a listening socket; the connection that it accepted."""
    with socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            yield connection


@pytest.mark.parametrize(("seconds", "milliseconds"), [(None, 0), (0.001, 30_000), (90.0, 90_000), (1e9, 2**31 - 1)])
def test_a_listening_socket_passes_its_limits_on(seconds: float | None, milliseconds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe_silent_connections(listener, seconds)
        with accepting(listener) as connection:
            assert read_limits(connection) == (1, milliseconds)


def test_an_engine_notices_a_client_whose_machine_is_gone() -> None:
    """It computed answers to their end, and the kernel tried to send them for a quarter of an hour."""
    with bind("127.0.0.1", 0, 120.0) as listener:
        listener.listen()
        with accepting(listener) as connection:
            assert read_limits(connection) == (1, 120_000)


def test_a_router_notices_a_client_whose_machine_is_gone() -> None:
    async def run() -> tuple[int, int]:
        app: Any = type("App", (), {"now": lambda self: 0.0, "limits": None, "budget": None})()
        listener = Listener(app, ClientTimeouts(send_s=77.0), 8)
        await listener.bind("127.0.0.1", 0, None)
        sockets = listener._server.sockets
        limits = {read_limits(listening_socket) for listening_socket in sockets}
        listener.stop_listening()
        (only_limits,) = limits
        return only_limits

    assert asyncio.run(run()) == (1, 77_000)
