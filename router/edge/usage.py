"""What an answer cost, as the engine says at its end. Reads bytes of any framing; keeps none."""

from __future__ import annotations

import re

from router.decide.messages import ReportedUsage
from router.http.headers import number_at

# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_SPACE = frozenset(b" \t\r\n")
_DIGITS_MAX = 9
"""A count of more digits is not believed."""


def find_usage(tail: bytes) -> ReportedUsage | None:
    """The last `usage` object that begins in `tail`, the end of an answer; None where there is none."""
    at = tail.rfind(b'"usage"')
    while at >= 0:
        begin = at + 9
        if tail[at + 7 : begin] != b":{":
            found = _USAGE.match(tail, at)
            if found is None:
                at = tail.rfind(b'"usage"', 0, at)
                continue
            begin = found.end()
        return ReportedUsage(
            _count(tail, begin, b'"prompt_tokens"'),
            _count(tail, begin, b'"cached_tokens"'),
            _count(tail, begin, b'"completion_tokens"'),
        )
    return None


def _count(tail: bytes, at: int, key: bytes) -> int | None:
    """The whole number that `key` has after `at`; None where it has none, or where `tail` may have cut it off."""
    at = tail.find(key, at)
    if at < 0:
        return None
    at = _skip(tail, at + len(key))
    if at >= len(tail) or tail[at] != 58:  # a colon
        return None
    at = _skip(tail, at + 1)
    end, value = number_at(tail, at)
    after = _skip(tail, end)
    if not 0 < end - at <= _DIGITS_MAX or after >= len(tail) or tail[after] not in b",}":
        return None
    return value


def _skip(tail: bytes, at: int) -> int:
    """Where the white space at `at` ends."""
    while at < len(tail) and tail[at] in _SPACE:
        at += 1
    return at
