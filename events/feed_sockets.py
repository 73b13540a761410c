"""What the feed keeps for one stream, the SUB socket that one or many of them come on, and the DEALER that asks.

Owns how these sockets are set up and watched. Refuses to know when; that is feed.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from events.frames import request_frames
from events.stream import StreamState
from events.stream_types import StreamConfig

_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class StreamSource:
    """Where one stream is found. `stream_id` is the caller's name for it."""

    stream_id: str
    endpoint: str
    """Address to subscribe to; for publishers that connect to us, where we bind."""
    replay_endpoint: str | None = None
    topic: str | None = None
    """Take only this topic; None or empty: whatever comes."""
    config: StreamConfig = field(default_factory=StreamConfig)
    resume: tuple[int, int] | None = None


class FollowedStream:
    """A stream and its request under way. Its SUB socket belongs to a Subscription."""

    def __init__(self, source: StreamSource) -> None:
        self.source = source
        can_ask = source.config.can_ask and source.replay_endpoint is not None
        config = StreamConfig(**{**source.config.__dict__, "can_ask": can_ask})
        self.state = StreamState(config, source.resume)
        self.topic = (source.topic or "").encode()
        """Of the last live message; replies of older vLLM carry none."""
        self.dealer: Socket | None = None
        self.request_id = 0


class Subscription:
    """One SUB socket with its monitor. `connect`ed ones carry one stream; bound ones a stream a topic."""

    def __init__(self, context: Context, topic: str | None, bind: bool, hwm: int) -> None:
        self.socket: Socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvhwm = hwm
        self.socket.subscribe(topic or "")
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self.monitor: Socket = self.socket.get_monitor_socket(_MONITORED)
        self.bound = bind
        self.stream: FollowedStream | None = None
        self.accept: Callable[[str], StreamSource | None] | None = None
        self.by_topic: dict[bytes, FollowedStream | None] = {}
        self.connections: dict[bytes, int] = {}
        """Bound: topic -> descriptor of the connection its last message came on."""

    def open(self, endpoint: str) -> None:
        """Raises zmq.ZMQError, after closing everything, if the address cannot be used."""
        if "[" in endpoint or "::" in endpoint:
            self.socket.setsockopt(zmq.IPV6, 1)
        try:
            if self.bound:
                self.socket.bind(endpoint)
            else:
                self.socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def streams(self) -> list[FollowedStream]:
        if self.stream is not None:
            return [self.stream]
        return [stream for stream in self.by_topic.values() if stream is not None]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def ask(context: Context, endpoint: str, start_seq: int) -> Socket:
    """A socket on which the batches from `start_seq` on will come. Raises zmq.ZMQError for an unusable address."""
    dealer: Socket = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.rcvhwm = 0  # vLLM's ROUTER drops what a slow peer does not take
    if "[" in endpoint:
        dealer.setsockopt(zmq.IPV6, 1)
    try:
        dealer.connect(endpoint)
    except zmq.ZMQError:
        dealer.close(0)
        raise
    dealer.send_multipart(request_frames(start_seq))
    return dealer
