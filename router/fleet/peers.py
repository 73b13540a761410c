"""Load that several routers before the same workers share with each other.

`PeerLoads` is pure: it turns messages into the tracker's view of other routers, and the tracker's changes into
messages. `PeerSockets` owns one PUB socket and one SUB socket that is connected to every peer.

A message has the whole state of targets, never differences. So a lost one is repaired by the next about the same
target, or by the full message that every router sends once a heartbeat. The load of a router that is silent for
`expire_s` is dropped. A router that restarts has a new epoch, and its messages replace what it sent before.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import msgspec
import zmq

from events.feed_sockets import detect_lost_hosts, receive_frames
from events.frames import MAX_HANDSHAKE_MS, MAX_UNACKNOWLEDGED_MS
from prompts.errors import RequestError
from router.decide.load import PeerLoad
from router.decide.load_tracker import LoadTracker

log = logging.getLogger("router")

TOPIC = b"blockcast-load"
VERSION = 1
MESSAGE_BYTES_MAX = 1 << 20
PEERS_MAX = 64
MESSAGE_FRAMES = 2
"""Frames of a message: the topic and the load. A message with more is malformed."""
TARGETS_MAX = 8192
"""Most targets in the message of one router."""
POLL_BYTES_MAX = 256 << 10
"""Most bytes read at one call of `exchange_loads`; the rest is read at the next."""
KEEPALIVE_S = 1
"""Seconds between two probes of a silent connection to a peer."""
QUEUE_MESSAGES = 64
"""Messages of each peer that wait in the socket."""
IDLE_UTILISATION_MAX = 1e-6

Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
"""Seconds, or seconds per second; finite."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class TargetLoad(msgspec.Struct, array_like=True):
    """Requests that one router has in flight on one target (a worker's rank), as it tells other routers.

    Routers have different clocks, so times are sent as ages: seconds before the message was made.
    """

    target: Name
    prefill_s: Amount
    """Time to compute the prompts of all requests without a first token, except those that wait for KV."""
    oldest_prefill_s: Amount
    """Prefill time of the oldest of these requests."""
    oldest_sent_age_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
    """Time since that request was sent to the target."""
    oldest_since_age_s: Annotated[float, msgspec.Meta(ge=-1e9)]
    """Time since that request became the oldest; infinite if the target was never busy."""
    decode_requests: Count
    decode_context_tokens: Count
    utilisation: Amount
    """Prefill seconds that the router sends to the target, per second."""
    prefill_requests: Count = 0
    prefill_rate: Amount | None = None
    """Seconds a token by which the prefill times were computed."""


class LoadMessage(msgspec.Struct, array_like=True):
    """Load of one router. In a full message, targets without an entry are idle."""

    version: int
    router: Name
    epoch: Name
    seq: int
    is_full: bool
    loads: Annotated[list[TargetLoad], msgspec.Meta(max_length=TARGETS_MAX)]


_PORT = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"


class PeersBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `PUT /peers`: all routers to follow."""

    peers: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=1024, pattern=rf"^tcp://[^\s;,]+:{_PORT}$")]],
        msgspec.Meta(max_length=PEERS_MAX),
    ]


@dataclass(slots=True)
class _Peer:
    epoch: str
    seq: int
    last_message_s: float


_DECODER = msgspec.msgpack.Decoder(LoadMessage)
_ENCODER = msgspec.msgpack.Encoder()


class PeerLoads:
    """Makes the messages that tell other routers this router's load, and applies those that come from them."""

    def __init__(self, tracker: LoadTracker, router: str, *, heartbeat_s: float = 0.5, expire_s: float = 2.0) -> None:
        """`tracker` counts the load. `router`: name of this router, unique among the peers.

        `heartbeat_s`: time between two full messages. `expire_s`: silence after which a router's load is dropped.
        """
        self._tracker = tracker
        self._router = router
        self._heartbeat_s = heartbeat_s
        self._expire_s = expire_s
        self._epoch = uuid.uuid4().hex
        """Name of this run of the router, by which peers notice a restart."""
        self._seq = 0
        self._last_full_s: float | None = None
        """Time of the last full message."""
        self._peers: dict[str, _Peer] = {}
        self._is_own_peer = False
        self.counts = Counter(dict.fromkeys(("sent", "received", "late", "malformed", "expired"), 0))
        """Messages by outcome, for `/metrics`; `expired`: routers that were silent."""

    def next_message(self, now: float) -> bytes | None:
        """Return the message to publish now: load of changed targets (workers' ranks), or of all once a heartbeat."""
        tracker = self._tracker
        is_full = self._last_full_s is None or now - self._last_full_s >= self._heartbeat_s
        if not is_full and not tracker.changed_targets:
            return None
        tracker.advance(now)
        names = list(tracker.targets) if is_full else sorted(tracker.changed_targets)
        tracker.changed_targets.clear()
        loads = [self._make_target_load(name, now) for name in names if name in tracker.targets]
        if is_full:
            self._last_full_s = now
            loads = [load for load in loads if not _is_idle(load)]
        self._seq += 1
        self.counts["sent"] += 1
        message = LoadMessage(VERSION, self._router, self._epoch, self._seq, is_full, loads)
        return _ENCODER.encode(message)

    def apply_message(self, payload: bytes, now: float) -> None:
        """Replace what is known of a peer's load by its message. A malformed message is counted and ignored."""
        try:
            message = _DECODER.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._record_malformed(f"{error}")
            return
        if message.version != VERSION:
            self._record_malformed(f"version {message.version}, expected {VERSION}")
            return
        if message.router == self._router:
            self._ignore_own_message()
            return
        peer = self._peers.get(message.router)
        if peer is None and len(self._peers) >= PEERS_MAX:
            self._record_malformed(f"router {message.router!r} is one more than the {PEERS_MAX} that are followed")
            return
        if peer is not None and peer.epoch == message.epoch and message.seq <= peer.seq:
            self.counts["late"] += 1
            return
        is_first_of_epoch = peer is None or peer.epoch != message.epoch
        self.counts["received"] += 1
        self._peers[message.router] = _Peer(message.epoch, message.seq, now)
        load_by_target = {load.target: _make_peer_load(load, now) for load in message.loads}
        self._tracker.set_peer_loads(message.router, load_by_target, is_full=message.is_full or is_first_of_epoch)

    def expire(self, now: float) -> None:
        """Drop the load of routers that are silent."""
        silent_peers = [name for name, peer in self._peers.items() if now - peer.last_message_s > self._expire_s]
        for name in silent_peers:
            del self._peers[name]
            self._tracker.set_peer_loads(name, {})
            self.counts["expired"] += 1
            log.warning("peer router %s is silent: its load no longer counts", name)

    def _make_target_load(self, name: str, now: float) -> TargetLoad:
        """Return what this router has in flight at a target, as other routers get it: with ages in place of times."""
        load = self._tracker.make_local_load(self._tracker.targets[name], now)
        return TargetLoad(
            target=name,
            prefill_s=load.prefill_s,
            oldest_prefill_s=load.oldest_prefill_s,
            oldest_sent_age_s=now - load.oldest_sent_at_s,
            oldest_since_age_s=now - load.oldest_since_s,
            decode_requests=load.decode_requests,
            decode_context_tokens=load.decode_context_tokens,
            utilisation=load.utilisation,
            prefill_requests=load.prefill_requests,
            prefill_rate=load.prefill_rate,
        )

    def _ignore_own_message(self) -> None:
        """Log once that the peers include this router, as a list that all routers share does."""
        if not self._is_own_peer:
            self._is_own_peer = True
            log.info("one of the peers is this router itself, and is ignored: --peer names the others' --peer-bind")

    def _record_malformed(self, reason: str) -> None:
        if not self.counts["malformed"]:
            log.warning("a message of a peer router is skipped: %s", reason)
        self.counts["malformed"] += 1


def _is_idle(load: TargetLoad) -> bool:
    return not load.prefill_requests and not load.decode_requests and load.utilisation <= IDLE_UTILISATION_MAX


def _make_peer_load(load: TargetLoad, now: float) -> PeerLoad:
    """Return a peer's load on a target as received at `now`: its ages become times on this router's clock."""
    return PeerLoad(
        prefill_s=load.prefill_s,
        prefill_requests=load.prefill_requests,
        oldest_prefill_s=load.oldest_prefill_s,
        oldest_sent_at_s=now - load.oldest_sent_age_s,
        oldest_since_s=now - load.oldest_since_age_s,
        decode_requests=load.decode_requests,
        decode_context_tokens=load.decode_context_tokens,
        utilisation=load.utilisation,
        prefill_rate=load.prefill_rate,
    )


class PeerSockets:
    """ZeroMQ sockets that publish this router's messages and receive those of its peers."""

    def __init__(self, loads: PeerLoads) -> None:
        """Make and configure the sockets, without binding or connecting. `loads` makes and applies the messages."""
        self.loads = loads
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._sub = self._context.socket(zmq.SUB)
        for socket in (self._pub, self._sub):
            socket.linger = 0
            socket.setsockopt(zmq.IPV6, 1)
            detect_lost_hosts(socket, KEEPALIVE_S)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.setsockopt(zmq.HANDSHAKE_IVL, MAX_HANDSHAKE_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        self._pub.setsockopt(zmq.TCP_MAXRT, MAX_UNACKNOWLEDGED_MS)
        self._sub.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._sub.subscribe(TOPIC)
        self.address: str | None = None
        """Endpoint at which messages are published; None before `bind`."""
        self._endpoints: set[str] = set()
        """Endpoints of the peers that are connected."""
        self._frames: list[zmq.Frame] = []
        """Frames of a message that was read in part."""

    def bind(self, endpoint: str) -> None:
        """Publish messages at an endpoint. Raises zmq.ZMQError."""
        self._pub.bind(endpoint)
        # The socket takes IPv6 too, so ZeroMQ shows an address of IPv4 as [::ffff:127.0.0.1].
        self.address = re.sub(r"\[::ffff:([\d.]+)\]", r"\1", self._pub.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, endpoint: str) -> None:
        """Receive a peer's messages from an endpoint. Raises zmq.ZMQError."""
        if endpoint not in self._endpoints:
            self._sub.connect(endpoint)
            self._endpoints.add(endpoint)

    def set_peers(self, body: bytes) -> list[str]:
        """Connect to exactly the routers in the JSON body of `PUT /peers`, and return them. Raises RequestError."""
        try:
            endpoints = set(msgspec.json.decode(body, type=PeersBody).peers)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body: {error}", param="peers") from None
        for endpoint in endpoints - self._endpoints:
            try:
                self.connect(endpoint)
            except zmq.ZMQError as error:
                raise RequestError(f"peers: {endpoint!r}: {error}", param="peers") from None
        for endpoint in self._endpoints - endpoints:
            self._sub.disconnect(endpoint)
        self._endpoints = endpoints
        return sorted(endpoints)

    def exchange_loads(self, now: float, messages_max: int = 1000) -> None:
        """Apply the messages of other routers and publish changes of this router's load, without waiting."""
        received_bytes = 0
        for _ in range(messages_max):
            try:
                receive_frames(self._sub, self._frames, MESSAGE_FRAMES)
            except zmq.Again:
                break
            is_well_framed = len(self._frames) == MESSAGE_FRAMES
            payload = self._frames[-1].bytes if is_well_framed else b""  # an empty message is counted as malformed
            self._frames = []
            self.loads.apply_message(payload, now)
            received_bytes += len(payload)
            if received_bytes > POLL_BYTES_MAX:
                break
        self.loads.expire(now)
        message = self.loads.next_message(now)
        if message is not None:
            self._pub.send_multipart([TOPIC, message], zmq.NOBLOCK)  # a PUB drops rather than waits

    def close(self) -> None:
        self._pub.close()
        self._sub.close()
        self._context.term()
