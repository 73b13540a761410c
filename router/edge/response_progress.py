"""Progress of one answer: its counts and times, and its end, where engines report the usage."""

from __future__ import annotations

import re
from collections import deque
from functools import partial
from typing import Final

import msgspec

from router.decide.messages import ReportedUsage

TAIL_BYTES: Final = 2048
TAIL_READS: Final = 4
"""Reads at the end of an answer that are kept to find its `usage`, with at most TAIL_BYTES of each."""
RESPONSES_PATH: Final = "/v1/responses"
FIRST_BYTES: Final = 2048
"""Least bytes kept of the start of an answer: the event that starts a message may have the only usage of the prompt."""
# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE_PATTERN = re.compile(rb'"usage"\s*:\s*\{')
_FINAL_EVENT = rb"(?:message_stop|response\.(?:completed|incomplete|failed))"
_BLANK_LINE = rb"\n\r?\n\Z"
"""Pattern of the end of an event at the end of the bytes."""
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
_COUNTS_PATTERN = re.compile(
    rb'"((?:prompt|cached|completion|input|cache_read_input|output|cache_creation_input)_tokens)"'
    rb"(?:\s*:\s*(\d{1,9})\s*[,}])?"
)
"""Pattern of a key with its count, which is missing where it has more digits, or where the text may end within them."""
_NO_COUNTS = ReportedUsage()


class ResponseProgress(msgspec.Struct, eq=False):
    """Counts and times of one answer, with its first and last bytes."""

    last_byte_at_s: float = 0.0
    """Time of the last byte from a worker, or of sending the request to it."""
    read_count: int = 0
    """Number of reads that were forwarded, which is about the number of the worker's chunks."""
    has_output: bool = False
    """Whether the current worker has sent a first part of the model's output."""
    first_bytes: bytes = b""
    """First bytes of the answer, with its id."""
    sent_at_s: float | None = None
    """Time at which the current attempt was sent to its worker; None without an attempt."""
    first_byte_at_s: float | None = None
    """Time at which the first byte of the answer arrived from any worker."""
    _last_reads: deque[bytes] = msgspec.field(default_factory=partial(deque, maxlen=TAIL_READS))

    def restart(self) -> None:
        """Reset the counts of the current worker, because another worker continues the answer."""
        self.has_output = False
        self.read_count = 0

    def record_sent(self, now: float) -> None:
        """Record that the request was sent to a worker."""
        self.sent_at_s = self.last_byte_at_s = now

    def record(self, data: bytes, now: float) -> None:
        """Record that `data` was forwarded."""
        self.last_byte_at_s = now
        self.read_count += 1
        if len(self.first_bytes) < FIRST_BYTES:
            self.first_bytes += data[:FIRST_BYTES]
        if data:
            self._last_reads.append(data if len(data) <= TAIL_BYTES else data[-TAIL_BYTES:])

    def record_arrival(self, data: bytes, path: str, now: float) -> bool:
        """Record that content arrived from a worker; return whether it has the first output of the worker's model."""
        if data and self.first_byte_at_s is None:
            self.first_byte_at_s = now
        is_first_output = bool(data) and not self.has_output and self.is_output(data, path)
        self.has_output = self.has_output or is_first_output
        return is_first_output

    @staticmethod
    def is_output(data: bytes, path: str) -> bool:
        """Return whether the bytes have output of the model: streams of the Responses API begin with other events."""
        return path != RESPONSES_PATH or b"response.output" in data or b"event: response." not in data

    def find_reported_usage(self) -> ReportedUsage | None:
        """Return the token counts (`usage`) that the worker reported in its answer; None if it reported none.

        They are at the end of an answer. But streams of Anthropic's Messages API may report the prompt's counts in the
        first event only, and the output tokens in the last one: then both are put together.
        """
        last_usage = find_usage(b"".join(self._last_reads))
        if last_usage is not None and last_usage.prompt_tokens:
            return last_usage
        match = _USAGE_PATTERN.search(self.first_bytes)
        first_usage = None if match is None else _read_usage(self.first_bytes, match.end(), len(self.first_bytes))
        if first_usage is None or not first_usage.prompt_tokens:
            return last_usage
        if last_usage is not None:
            completion_tokens = last_usage.completion_tokens
        elif b'"message_start"' in self.first_bytes:  # this event comes before the answer's tokens
            completion_tokens = None
        else:
            completion_tokens = first_usage.completion_tokens
        return ReportedUsage(first_usage.prompt_tokens, first_usage.cached_tokens, completion_tokens)

    def has_final_event(self, path: str) -> bool:
        """Return whether the last event of a stream was forwarded, by the rules of the API at `path`."""
        tail = b"".join(self._last_reads)
        if _FINAL_EVENT_PATTERN.search(tail) is not None:
            return True
        if path != RESPONSES_PATH or _EVENT_END_PATTERN.search(tail) is None:
            return False
        # The last event of Responses repeats the whole answer, and is the only one that tells usage, after it. All
        # events about the response repeat its tools, whose parameters may have the name `usage`, too.
        usage = find_usage(tail)
        return usage is not None and usage.completion_tokens is not None


def find_usage(tail: bytes) -> ReportedUsage | None:
    """Return the last `usage` object with counts in `tail`, the end of an answer.

    Tools that an answer repeats may have a parameter of this name, which has no counts. None if there is no `usage`.
    """
    usage, end = None, len(tail)
    while usage in (None, _NO_COUNTS) and (position := tail.rfind(b'"usage"', 0, end)) >= 0:
        match = _USAGE_PATTERN.match(tail, position)
        if match is not None:
            usage = _read_usage(tail, match.end(), end)
        end = position
    return usage


def _read_usage(text: bytes, start: int, end: int) -> ReportedUsage:
    """Read the token counts of a `usage` object, by the names of the OpenAI or of the Anthropic API.

    `start`: position in `text` after the object's opening brace. The object ends before `end`. OpenAI's Responses API
    mixes the names: `input_tokens` as Anthropic has, and OpenAI's own `cached_tokens`.
    """
    # Read backwards, so that of equal keys the first one counts: the text after the object may have them too.
    matches = reversed(_COUNTS_PATTERN.findall(text, start, end))
    counts = {key: int(digits) if digits else None for key, digits in matches}
    prompt_tokens, cached_tokens = counts.get(b"prompt_tokens"), counts.get(b"cached_tokens")
    input_tokens, output_tokens = counts.get(b"input_tokens"), counts.get(b"output_tokens")
    completion_tokens = counts.get(b"completion_tokens")
    has_anthropic_names = input_tokens is not None or output_tokens is not None
    if prompt_tokens is not None or not has_anthropic_names:
        return ReportedUsage(prompt_tokens, cached_tokens, completion_tokens)
    cache_read_tokens = counts.get(b"cache_read_input_tokens")
    if input_tokens is not None:  # Anthropic counts only uncached tokens there
        cache_written_tokens = counts.get(b"cache_creation_input_tokens")
        prompt_tokens = input_tokens + (cache_read_tokens or 0) + (cache_written_tokens or 0)
    return ReportedUsage(
        prompt_tokens,
        cached_tokens if cache_read_tokens is None else cache_read_tokens,
        completion_tokens if output_tokens is None else output_tokens,
    )
