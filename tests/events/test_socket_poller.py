"""SocketPoller against ZeroMQ's own poll: whatever has something to read is found, and nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from events.loop_thread import SocketPoller


@pytest.fixture
def context() -> Iterator[Any]:
    zmq_context: Any = zmq.Context()
    yield zmq_context
    zmq_context.destroy(linger=0)


def test_it_finds_what_zeromq_s_poll_finds(context: Any) -> None:
    """Messages sent and read in any order and number, sockets that come and go."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    ready = SocketPoller()
    pairs: list[tuple[Any, Any, list[int]]] = []
    for turn in range(1500):
        kind = rng.randrange(8)
        if kind == 0 and len(pairs) < 20:
            ours, peer_socket = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
            ours.bind(f"inproc://{turn}")
            peer_socket.connect(f"inproc://{turn}")
            if rng.random() < 0.5:
                peer_socket.send(b"")  # before it is registered
                pairs.append((ours, peer_socket, [1]))
            else:
                pairs.append((ours, peer_socket, [0]))
            ready.register(ours)
        elif kind == 1 and len(pairs) > 5:
            ours, peer_socket, _ = pairs.pop(rng.randrange(len(pairs)))
            ready.unregister(ours)
            ours.close(0)
            peer_socket.close(0)
        elif kind < 5 and pairs:
            _, peer_socket, count = rng.choice(pairs)
            for _ in range(rng.randrange(1, 4)):
                peer_socket.send(b"")
                count[0] += 1
        _, ready_sockets = ready.poll(0)
        assert set(ready_sockets) == {ours for ours, _, count in pairs if count[0]}
        for ours, _, count in pairs:
            if count[0] and rng.random() < 0.4:
                for _ in range(rng.randrange(1, count[0] + 1)):
                    ours.recv(zmq.NOBLOCK)
                    count[0] -= 1
    ready.close()
    for ours, peer_socket, _ in pairs:
        ours.close(0)
        peer_socket.close(0)


def test_a_bell_is_no_socket(context: Any) -> None:
    ready = SocketPoller()
    out, into = os.pipe()
    ready.watch_descriptor(out)
    assert ready.poll(0) == (False, [])
    os.write(into, b"x")
    assert ready.poll(1000) == (True, [])
    ready.close()
    os.close(out)
    os.close(into)
