"""Subscriber for scripts: `for item in Subscriber(sources): ...` follows the cache events of workers.

A bounded queue joins the feed's thread and the iterating one. A consumer that is too slow fills the queue, and then
ZeroMQ's queue. Messages that ZeroMQ drops show as a gap and are replayed.
"""

from __future__ import annotations

import contextlib
import queue
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

from events.codec import decode_batch
from events.feed import EventFeed
from events.feed_sockets import StreamSource
from events.sources import EventSource, make_default_source, parse_sources
from events.stream_buffers import digest_payload
from events.stream_types import Apply, Instruction, MalformedMessage, Origin, StreamPosition
from events.types import DecodedBatch, DecodeError


@dataclass(frozen=True)
class Message:
    """One batch, in order. `seq` is None for a chunk of a snapshot."""

    stream_id: str
    topic: bytes
    seq: int | None
    payload: bytes
    origin: Origin
    decoded_batch: DecodedBatch

    @property
    def position(self) -> StreamPosition | None:
        """Position to pass as `StreamSource.resume_position` to continue after this message; None for a chunk."""
        return None if self.seq is None else StreamPosition(self.seq, digest_payload(self.payload))


@dataclass(frozen=True)
class Notice:
    """Event of a stream other than a batch. After a Clear, earlier batches are void."""

    stream_id: str
    content: Instruction


Item: TypeAlias = Message | Notice


class Subscriber:
    """Iterator over the batches and notices of streams of KV cache events, until `close`. Also a context manager."""

    def __init__(self, sources: Iterable[StreamSource], max_queued_items: int = 10_000) -> None:
        """Follow `sources`. When `max_queued_items` wait, no more messages are read."""
        self._queue: queue.Queue[tuple[str, Instruction, bytes]] = queue.Queue(max_queued_items)
        self._is_closed = False
        self.feed = EventFeed(self.handle)
        self.feed.start()
        for source in sources:
            self.feed.add(source)

    def get(self, timeout_s: float | None = None) -> Item | None:
        """Return the next batch or notice; None if none comes within `timeout_s`. Without it, wait for ever.

        A batch that cannot be decoded is returned as a notice of a malformed message.
        """
        try:
            stream_id, instruction, topic = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not isinstance(instruction, Apply):
            return Notice(stream_id, instruction)
        try:
            decoded_batch = decode_batch(instruction.payload)
        except DecodeError as error:
            return Notice(stream_id, MalformedMessage(f"seq {instruction.seq}: {error}"))
        return Message(stream_id, topic, instruction.seq, instruction.payload, instruction.origin, decoded_batch)

    def __iter__(self) -> Iterator[Item]:
        while not self._is_closed:
            item = self.get(timeout_s=0.5)
            if item is not None:
                yield item

    def close(self) -> None:
        self._is_closed = True
        self.feed.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The feed's thread

    def handle(self, stream_id: str, instruction: Instruction, topic: bytes) -> None:
        """Queue a batch or a notice as soon as the queue has room."""
        while not self._is_closed:
            with contextlib.suppress(queue.Full):
                self._queue.put((stream_id, instruction, topic), timeout=0.1)
                return


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opener that ignores the proxies of the environment, as workers are on the same network."""


def discover(worker_url: str, timeout_s: float = 5.0) -> list[EventSource]:
    """Ask a worker where it publishes its events; a worker without `GET /kv_event_sources` has vLLM's default address.

    Raises DecodeError for a wrong URL or a malformed answer, and OSError if the worker cannot be reached.
    """
    if urlsplit(worker_url).scheme not in ("http", "https"):
        raise DecodeError(f"worker {worker_url!r}: expected an http:// or https:// URL")
    try:
        with _OPENER.open(worker_url.rstrip("/") + "/kv_event_sources", timeout=timeout_s) as response:
            body: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (404, 405):
                return [make_default_source(urlsplit(worker_url).hostname or "127.0.0.1")]
            raise DecodeError(f"{error.url} answered {error.code} {error.reason}") from error
    return parse_sources(body, worker_url)
