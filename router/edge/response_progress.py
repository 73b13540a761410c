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
RESPONSES_PATH: Final = "/v1/responses"
FIRST_BYTES: Final = 2048
"""Holds the event that starts a message, whose usage may be all that is told of the prompt."""
# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE_PATTERN = re.compile(rb'"usage"\s*:\s*\{')
_FINAL_EVENT = rb"(?:message_stop|response\.(?:completed|incomplete|failed))"
_BLANK_LINE = rb"\n\r?\n(?:\r\n)?\Z"
"""The end of an event that is the end of what came, with the end of its chunk."""
_EVENT_END_PATTERN = re.compile(_BLANK_LINE)
_FINAL_EVENT_PATTERN = re.compile(
    rb"(?:\A|\n)(?:data: ?\[DONE\][\r\n]*\Z|(?:event: ?"
    + _FINAL_EVENT
    + rb'\r?\ndata:|data: ?\{"type": ?"'
    + _FINAL_EVENT
    + rb'")[^\n]*'
    + _BLANK_LINE
    + rb")"
)
_OPENAI_COUNT_KEYS = (b'"prompt_tokens"', b'"cached_tokens"', b'"completion_tokens"')
_ANTHROPIC_COUNT_KEYS = (
    b'"input_tokens"',
    b'"cache_read_input_tokens"',
    b'"output_tokens"',
    b'"cache_creation_input_tokens"',
)
"""Of Anthropic's Messages, whose first does not hold the second and the last."""
_COUNT_PATTERN = re.compile(rb"\s*:\s*(\d{1,9})\s*[,}]")
"""A count of more digits is not believed."""


class ResponseProgress:
    """Counts, times and both ends of one answer."""

    __slots__ = (
        "_tail", "first_byte_at_s", "first_bytes", "has_started", "last_byte_at_s", "read_count", "sent_at_s",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self._tail: deque[bytes] = deque(maxlen=TAIL_READS)
        self.read_count = 0
        """Reads that were passed on: about as many as there were chunks."""
        self.has_started = False
        """The worker that is at it has begun to speak."""
        self.first_bytes = b""
        """Of the answer: its name is there."""
        self.sent_at_s: float | None = None
        """When the running attempt was sent to its worker; None while none is."""
        self.first_byte_at_s: float | None = None
        """When the first byte of the answer came from any worker."""
        self.last_byte_at_s = now

    def restart(self) -> None:
        """Another worker goes on with the answer."""
        self.has_started, self.read_count = False, 0

    def record(self, data: bytes, now: float) -> None:
        """The exchange passed on `data`."""
        self.last_byte_at_s = now
        self.read_count += 1
        if len(self.first_bytes) < FIRST_BYTES:
            self.first_bytes += data[:FIRST_BYTES]
        if data:
            self._tail.append(data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:])

    @staticmethod
    def is_output(data: bytes, path: str) -> bool:
        """Whether the model has begun: a stream of Responses begins with events that say only that it was asked."""
        return path != RESPONSES_PATH or b"response.output" in data or b"event: response." not in data

    def find_reported_usage(self) -> ReportedUsage | None:
        """Return what the answer cost, as its end says, or of its prompt as its beginning says: Messages may tell that
        once, in the event that starts the message."""
        last_usage = find_usage(b"".join(self._tail))
        if last_usage is not None and last_usage.prompt_tokens:
            return last_usage
        match = _USAGE_PATTERN.search(self.first_bytes)
        first_usage = None if match is None else _read_usage(self.first_bytes, match.end())
        if first_usage is None or not first_usage.prompt_tokens:
            return last_usage
        is_start = b'"message_start"' in self.first_bytes  # what it says of the answer is not the end of it
        completion_tokens = (
            last_usage.completion_tokens
            if last_usage is not None
            else None
            if is_start
            else first_usage.completion_tokens
        )
        return ReportedUsage(first_usage.prompt_tokens, first_usage.cached_tokens, completion_tokens)

    def has_final_event(self, path: str) -> bool:
        """Whether the last event of a stream to a request for `path` was passed on, by its API's rules."""
        tail = b"".join(self._tail)
        if _FINAL_EVENT_PATTERN.search(tail) is not None:
            return True
        # The last event of Responses repeats the whole answer, and is the only one that tells usage, at its end.
        return path == RESPONSES_PATH and _EVENT_END_PATTERN.search(tail) is not None and find_usage(tail) is not None


def find_usage(tail: bytes) -> ReportedUsage | None:
    """The last `usage` object that begins in `tail`, the end of an answer; None where there is none."""
    position = tail.rfind(b'"usage"')
    while position >= 0 and (match := _USAGE_PATTERN.match(tail, position)) is None:
        position = tail.rfind(b'"usage"', 0, position)
    return None if position < 0 or match is None else _read_usage(tail, match.end())


def _read_usage(text: bytes, start: int) -> ReportedUsage:
    """The `usage` object that has its first key from `start` on."""
    prompt_tokens, cached_tokens, completion_tokens = [_read_count(text, start, key) for key in _OPENAI_COUNT_KEYS]
    if prompt_tokens is None:
        uncached_tokens, cache_read_tokens, output_tokens, cache_written_tokens = [
            _read_count(text, start, key) for key in _ANTHROPIC_COUNT_KEYS
        ]
        if uncached_tokens is not None or output_tokens is not None:
            prompt_total = (
                None
                if uncached_tokens is None
                else uncached_tokens + (cache_read_tokens or 0) + (cache_written_tokens or 0)
            )
            return ReportedUsage(
                prompt_total,
                cached_tokens if cache_read_tokens is None else cache_read_tokens,
                completion_tokens if output_tokens is None else output_tokens,
            )
    return ReportedUsage(prompt_tokens, cached_tokens, completion_tokens)


def _read_count(tail: bytes, position: int, key: bytes) -> int | None:
    """The whole number that `key` has after `at`; None where it has none, or where `tail` may have cut it off."""
    position = tail.find(key, position)
    match = _COUNT_PATTERN.match(tail, position + len(key)) if position >= 0 else None
    return int(match[1]) if match is not None else None
