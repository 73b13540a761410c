"""The middle of streams, relayed natively (edge/native/relay.hpp): a chunk costs one read and one write, no Python.

Owns which exchanges are relayed. Refuses to begin or end an answer: an exchange hands a stream over once its head and
first bytes have passed, and has it back for everything that is not an ordinary chunk. Where the native part is missing
(no compiler, not Linux) there is no StreamRelay, and exchanges do all of it themselves, with the same bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

try:
    from router.edge._relay import BLOCKED, ENDED, READ, Relay, find_usage
except ImportError:
    _FOUND = False
else:
    _FOUND = True

if TYPE_CHECKING:
    from router.edge._relay import Tokens

log = logging.getLogger("router")

native_usage: Callable[[bytes], tuple[int | None, int | None, int | None] | None] | None = None
"""What the end of an answer says of its cost; None where the native part is missing."""
if _FOUND:
    native_usage = find_usage


class Relayed(Protocol):
    """An exchange, while its stream is here."""

    def unread(self, data: bytes) -> None:
        """Bytes that are not an ordinary middle: read them yourself, from where the body stands."""

    def unwritten(self, data: bytes) -> None:
        """Bytes that were read and followed, and did not fit into the client's socket."""

    def ended(self) -> None:
        """The worker's connection ended or failed; reading it again will tell how."""

    def crash(self, error: Exception) -> None:
        """One of these raised."""


class StreamRelay:
    """The streams of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._native = Relay()
        self._streams: dict[int, Relayed] = {}
        loop.add_reader(self._native.fileno(), self._run)

    def add(self, exchange: Relayed, upstream: int, client: int, left: int, tokens: Tokens | None) -> int:
        """Take a stream over: the sockets' numbers, and where its body stands (ChunkedBody.left). Its name here.

        `tokens`: to be noted on the way.

        Raises OSError where no further sockets can be opened.
        """
        stream = self._native.add(upstream, client, left, tokens)
        self._streams[stream] = exchange
        return stream

    def take(self, stream: int) -> tuple[int, int, float, list[bytes]]:
        """Give a stream back: (left, reads, time of the last, the ends of the last few)."""
        del self._streams[stream]
        state = self._native.take(stream)
        assert state is not None
        return state

    def seen(self, stream: int) -> tuple[int, float]:
        """(reads so far, time of the last)."""
        state = self._native.seen(stream)
        assert state is not None
        return state

    def __len__(self) -> int:
        return len(self._streams)

    def _run(self) -> None:
        for stream, why, data in self._native.run():
            exchange = self._streams.get(stream)
            if exchange is None:
                continue  # ended by what was done about one before it
            try:
                if why == READ:
                    exchange.unread(data)
                elif why == BLOCKED:
                    exchange.unwritten(data)
                else:
                    assert why == ENDED
                    exchange.ended()
            except Exception as error:  # noqa: BLE001  a boundary
                exchange.crash(error)


def make_relay(loop: asyncio.AbstractEventLoop) -> StreamRelay | None:
    """None where the native part was not built, or there are no file descriptors left for it."""
    if not _FOUND:
        return None
    try:
        return StreamRelay(loop)
    except OSError as error:
        log.warning("streams are relayed in Python: %s", error)
        return None
