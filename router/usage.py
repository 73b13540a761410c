"""What an answer cost, as the engine says at its end. Reads bytes of any framing; keeps none."""

from __future__ import annotations

import re

from router.messages import Usage

# A quotation mark inside a JSON string is escaped, so generated text can never look like this key.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_USAGE_FIELDS = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,9})\s*[,}]')


def find_usage(tail: bytes) -> Usage | None:
    """The last `usage` object that begins in `tail`, the end of an answer; None where there is none."""
    at = tail.rfind(b'"usage"')
    while at >= 0:
        begin = _USAGE.match(tail, at)
        if begin is not None:
            found = {name: int(value) for name, value in _USAGE_FIELDS.findall(tail, begin.end())}
            return Usage(found.get(b"prompt_tokens"), found.get(b"cached_tokens"), found.get(b"completion_tokens"))
        at = tail.rfind(b'"usage"', 0, at)
    return None
