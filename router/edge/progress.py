"""How far an answer has got.

Owns the counts, the time of the last byte, and the end of the answer, where engines tell its usage. Refuses to know
requests, the core and clients.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from router.decide.messages import ReportedUsage

TAIL_BYTES: Final = 2048
TAIL_READS: Final = 4
"""How much of the end of an answer is kept to find its `usage`: so many reads, so much of each."""
BEGINNING_BYTES: Final = 512
# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_COUNTS = (b'"prompt_tokens"', b'"cached_tokens"', b'"completion_tokens"')
_OTHER_COUNTS = (b'"input_tokens"', b'"cache_read_input_tokens"', b'"output_tokens"', b'"cache_creation_input_tokens"')
"""Of Anthropic's Messages, whose first does not hold the second and the last."""
_NUMBER = re.compile(rb"\s*:\s*(\d{1,9})\s*[,}]")
"""A count of more digits is not believed."""


class Progress:
    """Of one answer."""

    __slots__ = ("_tail", "began", "beginning", "last_byte_s", "reads")

    def __init__(self, now: float) -> None:
        self._tail: deque[bytes] = deque(maxlen=TAIL_READS)
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
        if data:
            self._tail.append(data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:])

    def usage(self) -> ReportedUsage | None:
        """What the answer cost, as its end says."""
        return find_usage(b"".join(self._tail))


def find_usage(tail: bytes) -> ReportedUsage | None:
    """The last `usage` object that begins in `tail`, the end of an answer; None where there is none."""
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
