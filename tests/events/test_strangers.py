"""Who speaks to a port of ours and is no publisher, follower or peer: the connection ends before it has cost much."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from events.config import KVEventsConfig
from events.feed_sockets import MAX_MESSAGE_BYTES, BoundSubscription
from events.frames import MAX_REQUEST_BYTES
from events.publisher import EventPublisher
from router.fleet import peers

GREETING = b"\xff" + b"\0" * 7 + b"\x01\x7f\x03\x00NULL" + b"\0" * 48


@contextlib.contextmanager
def _publisher(socket_name: str) -> Iterator[str]:
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    publisher = EventPublisher(config)
    try:
        source = publisher.describe_source()
        yield str(source.replay_endpoint if socket_name == "replay" else source.endpoint)
    finally:
        publisher.close()


@contextlib.contextmanager
def _bound_feed() -> Iterator[str]:
    context: zmq.Context[Any] = zmq.Context()
    bound = BoundSubscription(context, "tcp://127.0.0.1:*", lambda topic: None)
    try:
        yield cast(bytes, bound.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
    finally:
        bound.close()
        context.term()


@contextlib.contextmanager
def _peer() -> Iterator[str]:
    mine = peers.PeerSockets(cast(Any, None))
    mine.bind("tcp://127.0.0.1:*")
    try:
        yield str(mine.address)
    finally:
        mine.close()


PORTS: dict[str, tuple[Callable[[], Any], bytes, int]] = {
    "events": (lambda: _publisher("events"), b"SUB", MAX_REQUEST_BYTES),
    "replays": (lambda: _publisher("replay"), b"DEALER", MAX_REQUEST_BYTES),
    "bound feed": (_bound_feed, b"PUB", MAX_MESSAGE_BYTES),
    "peers": (_peer, b"SUB", peers.MESSAGE_BYTES_MAX),
}
"""What listens, what connects to it, and how many bytes its message may have."""


def _connect(endpoint: str) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    client.settimeout(20)
    return client


def _is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("greeting", [b"", GREETING[:10], GREETING])
@pytest.mark.parametrize("name", PORTS)
def test_who_does_not_say_what_it_is_has_its_connection_closed(
    name: str, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("events.publisher", "events.feed_sockets", "router.fleet.peers"):
        monkeypatch.setattr(importlib.import_module(module), "MAX_HANDSHAKE_MS", 200)
    with PORTS[name][0]() as endpoint, _connect(endpoint) as client:
        client.sendall(greeting)
        assert _is_closed(client)


@pytest.mark.parametrize("name", PORTS)
def test_a_message_that_is_too_long_ends_its_connection_before_it_has_come(name: str) -> None:
    listens, kind, bytes_max = PORTS[name]
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    with listens() as endpoint, _connect(endpoint) as client:
        client.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
        client.sendall(b"\x02" + struct.pack(">Q", bytes_max + 1) + b"\x01begun")
        assert _is_closed(client)


@pytest.mark.parametrize("listener", ["events", "replays", "peers"])
def test_the_kernel_closes_a_connection_whose_other_end_acknowledges_nothing(listener: str) -> None:
    """A subscriber on a host that is gone kept up to 100,000 messages in the publisher's queue for 15 minutes."""
    open_port, _, _ = PORTS[listener]
    with open_port() as endpoint, _connect(endpoint) as client:
        assert client.recv(1) == GREETING[:1]  # so the connection is accepted
        accepted = _find_other_end(client)
        with accepted:
            assert 0 < accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 120_000


def _find_other_end(client: socket.socket) -> socket.socket:
    """Return a duplicate of the accepted socket of a connection, both ends of which are in this process."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            is_socket = os.readlink(entry).startswith("socket:")
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if not is_socket:
            continue
        other_end = socket.socket(fileno=os.dup(int(entry.name)))
        with contextlib.suppress(OSError):  # not connected
            peer = other_end.getpeername()
            if isinstance(peer, tuple) and peer[1] == client.getsockname()[1]:
                return other_end
        other_end.close()
    raise AssertionError("the connection is not in this process")
