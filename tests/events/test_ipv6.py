"""Publishers and subscribers on hosts that have IPv6 alone, or both."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from events import feed_sockets
from events.config import KVEventsConfig
from events.frames import SNAPSHOT_SEQ
from events.publisher import EventPublisher


@contextlib.contextmanager
def zmq_socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        yield dealer


@pytest.mark.parametrize(
    ("endpoint", "families", "uses_ipv6"),
    [
        ("tcp://six:5557", [socket.AF_INET6], True),
        ("tcp://both:5557", [socket.AF_INET6, socket.AF_INET], False),
        ("tcp://four:5557", [socket.AF_INET], False),
        ("tcp://unknown:5557", None, False),
        ("tcp://[fd00::1]:5557", [socket.AF_INET6], True),
        ("tcp://::1:5557", [socket.AF_INET6], True),
        ("ipc:///tmp/six", [socket.AF_INET6], False),
    ],
)
def test_a_name_that_has_ipv6_alone_is_reached(
    endpoint: str, families: list[int] | None, uses_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ found no address for it, so no events came. A name with both may be a publisher's of IPv4 alone."""

    def look_up(host: str, port: None) -> list[Any]:
        if families is None:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server")
        return [(family, None, None, "", ()) for family in families]

    monkeypatch.setattr(feed_sockets, "getaddrinfo", look_up)
    with zmq_socket() as dealer:
        feed_sockets.allow_ipv6(dealer, endpoint)
        assert dealer.getsockopt(zmq.IPV6) == uses_ipv6


def test_a_silent_name_server_holds_no_stream_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are opened on the thread that reads all events."""
    has_answered = threading.Event()
    monkeypatch.setattr(feed_sockets, "getaddrinfo", lambda *_: [has_answered.wait()][:0])
    with zmq_socket() as dealer:
        feed_sockets.allow_ipv6(dealer, "tcp://six:5557")
        assert dealer.getsockopt(zmq.IPV6) == 0
        assert not has_answered.is_set()
    has_answered.set()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="IPv6"))]
)
def test_a_publisher_at_every_address_is_reached_by_ipv4_and_by_ipv6(host: str) -> None:
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
    )
    publisher = EventPublisher(config)
    try:
        endpoint = publisher.describe_source().replay_endpoint
        assert endpoint is not None
        assert endpoint.startswith("tcp://*:"), "what a router replaces by the worker's host"
        with zmq_socket() as dealer:
            feed_sockets.allow_ipv6(dealer, endpoint.replace("*", host))
            dealer.connect(endpoint.replace("*", host))
            dealer.send_multipart([b"", SNAPSHOT_SEQ.to_bytes(8, "big")])
            assert dealer.poll(20_000)
    finally:
        publisher.close(0)
