"""How far an answer has got, whether the exchange relays it or the native relay does.

Owns the counts, the time of the last byte, the end of the answer (where engines tell its usage), and the dealings with
the native relay. Refuses to know requests, the core and clients.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from router.decide.messages import ReportedUsage
from router.edge.relay import Relayed, StreamRelay, native_usage
from router.edge.upstream import UpstreamConnection
from router.http.chunked import ChunkedBody
from router.http.response import Body

if TYPE_CHECKING:
    from router.edge._relay import Tokens

TAIL_BYTES: Final = 2048
TAIL_READS: Final = 4
"""How much of the end of an answer is kept to find its `usage`: so many reads, so much of each."""
BEGINNING_BYTES: Final = 512
PYTHON_READS: Final = 2
"""Reads of a stream before it is handed to the native relay: an answer of one or two is not worth it."""
STINT_READS: Final = 16
"""A stream that came back after fewer (its worker splits lines, or its client is slow) stays for as many."""
# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_COUNTS = (b'"prompt_tokens"', b'"cached_tokens"', b'"completion_tokens"')
_OTHER_COUNTS = (b'"input_tokens"', b'"cache_read_input_tokens"', b'"output_tokens"', b'"cache_creation_input_tokens"')
"""Of Anthropic's Messages, whose first does not hold the second and the last."""
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})\s*[,}]")
"""A count of more digits is not believed."""


class Progress:
    """Of one answer."""

    __slots__ = (
        "_before",
        "_native",
        "_stream",
        "_tail",
        "_wanted_reads",
        "began",
        "beginning",
        "last_byte_s",
        "reads",
    )

    def __init__(self, native: StreamRelay | None, now: float) -> None:
        self._native = native
        self._stream = 0
        """Its name in the native relay while that has the stream, else 0."""
        self._before = 0
        """`reads` when it was handed over."""
        self._wanted_reads = PYTHON_READS
        """Not to be handed over before."""
        self._tail: list[bytes] = []
        self.reads = 0
        """Reads that were passed on: about as many as there were chunks."""
        self.began = False
        """The worker that is at it has begun to speak."""
        self.beginning = b""
        """Of the answer: its name is there."""
        self.last_byte_s = now

    def begin_again(self) -> None:
        """Another worker goes on with the answer."""
        self.began, self.reads = False, 0

    def note(self, data: bytes, now: float) -> None:
        """The exchange passed on `data`."""
        self.last_byte_s = now
        self.reads += 1
        if len(self.beginning) < BEGINNING_BYTES:
            self.beginning += data[:BEGINNING_BYTES]
        self._tail.append(data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:])
        if len(self._tail) > TAIL_READS:
            del self._tail[0]

    def usage(self) -> ReportedUsage | None:
        """What the answer cost, as its end says."""
        return find_usage(self._tail[0] if len(self._tail) == 1 else b"".join(self._tail))

    @property
    def may_leave(self) -> bool:
        """Whether it is time to try `hand_over`."""
        return self._native is not None and self.reads >= self._wanted_reads

    def hand_over(
        self, exchange: Relayed, connection: UpstreamConnection, client: int, body: Body, tokens: Tokens | None
    ) -> None:
        """Let the native relay go on, if this is the middle of a chunked body and both ends are plain sockets.

        `client` is the socket's number; -1 where it is not to be written past its connection.
        """
        native, upstream = self._native, connection.plain_socket()
        if native is None or client < 0 or upstream < 0 or not isinstance(body, ChunkedBody) or not body.in_the_middle:
            return
        try:
            self._stream = native.add(exchange, upstream, client, body.left, tokens)
        except OSError:
            return  # no file descriptors left
        self._before = self.reads
        connection.pause_reading()

    def take_back(self, connection: UpstreamConnection | None, body: Body | None) -> None:
        """The native relay has the stream no more, if it had it: the exchange goes on from where it got to."""
        if not self._stream or self._native is None:
            return
        left, reads, last_s, tail = self._native.take(self._stream)
        self._stream = 0
        self.reads = self._before + reads
        if reads < STINT_READS:
            self._wanted_reads = self.reads + STINT_READS
        self.last_byte_s = max(self.last_byte_s, last_s)
        self._tail = [*self._tail, *tail][-TAIL_READS:]
        if isinstance(body, ChunkedBody):
            body.left = left
        if connection is not None:
            connection.resume_reading()

    def catch_up(self) -> bool:
        """Ask the native relay, if it has the stream, how far it has got; whether it has got any further."""
        if not self._stream or self._native is None:
            return False
        reads, last_s = self._native.seen(self._stream)
        self.last_byte_s = max(self.last_byte_s, last_s)
        further = self._before + reads != self.reads
        self.reads = self._before + reads
        return further


def find_usage(tail: bytes) -> ReportedUsage | None:
    """The last `usage` object that begins in `tail`, the end of an answer; None where there is none."""
    if native_usage is None:
        return python_usage(tail)
    found = native_usage(tail)
    return None if found is None else ReportedUsage(found[0], found[1], found[2])


def python_usage(tail: bytes) -> ReportedUsage | None:
    """The same, where the native part is missing."""
    at = tail.rfind(b'"usage"')
    while at >= 0 and (found := _USAGE.match(tail, at)) is None:
        at = tail.rfind(b'"usage"', 0, at)
    if at < 0 or found is None:
        return None
    end = found.end()
    prompt, cached, completion = [_count(tail, end, key) for key in _COUNTS]
    if prompt is None:
        new, read, said, kept = [_count(tail, end, key) for key in _OTHER_COUNTS]
        if new is not None:
            return ReportedUsage(new + (read or 0) + (kept or 0), cached if read is None else read, said)
    return ReportedUsage(prompt, cached, completion)


def _count(tail: bytes, at: int, key: bytes) -> int | None:
    """The whole number that `key` has after `at`; None where it has none, or where `tail` may have cut it off."""
    at = tail.find(key, at)
    found = _NUMBER.match(tail, at + len(key)) if at >= 0 else None
    return int(found[1]) if found is not None else None
