"""Values in an answer that are no client's to know: where KV lies, which worker computed (prompts/worker_fields.py).

Blanks them out in place, so that the length of an answer stays what its head says. Refuses to know HTTP, and of JSON
all but these keys: a quotation mark in a JSON string is escaped, so no generated text can look like one of them.
"""

from __future__ import annotations

import re
from typing import Final

KEYS: Final = (
    "kv_transfer_params", "ec_transfer_params", "kv_hints", "remote_engine_id", "remote_block_ids", "remote_host",
    "remote_port", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank",
    "disaggregated_params", "worker_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank",
    "decode_dp_rank",
)  # fmt: skip
"""Those that engines answer. `request_id` and the like are the client's own."""
HELD_BYTES_MAX: Final = 64
"""End of a read that may be the beginning of such a key."""
_BEGUN = re.compile(rb'"(?:[a-z_]{0,24}|[a-z_]{1,24}"[ \t]*:?[ \t]*)\Z')
_NUMBER: Final = b"0123456789+-.eE"
_OPENING, _CLOSING, _QUOTE, _BACKSLASH = b"{[", b"}]", ord('"'), ord("\\")


class AnswerFilter:
    """Of one answer, whose content is given to `feed`."""

    __slots__ = ("_depth", "_escaped", "_held", "_in_number", "_in_string", "_is_chunked", "_key")

    def __init__(self, key: re.Pattern[bytes], *, is_chunked: bool = False) -> None:
        """`is_chunked`: what is fed has the chunks of HTTP in it, and a value that is cut by one stays as it is."""
        self._key = key
        self._is_chunked = is_chunked
        self._held = b""
        self._depth = 0
        """Of the value that is being blanked."""
        self._in_string = self._escaped = self._in_number = False

    def feed(self, content: bytes, *, ends: bool) -> bytes:
        """Take the next bytes of the content; return what may be passed on, in all as long as what came."""
        data, self._held = self._held + content, b""
        if not self._blanks and b'"' not in data:
            return data
        out = bytearray()
        at = self._blank(data, 0, out)
        while (found := self._key.search(data, at)) is not None:
            out += data[at : found.end()]
            at = self._blank_value(data, found.end(), out)
            if self._is_chunked and (self._blanks or b"\r" in data[found.end() : at]):
                out[-(at - found.end()) or len(out) :] = data[found.end() : at]
                self._depth, self._in_string, self._escaped, self._in_number = 0, False, False, False
        begun = None if ends or self._blanks else _BEGUN.search(data, max(at, len(data) - HELD_BYTES_MAX))
        end = len(data) if begun is None else begun.start()
        out += data[at:end]
        self._held = data[end:]
        return bytes(out)

    @property
    def _blanks(self) -> bool:
        return bool(self._depth) or self._in_string or self._in_number

    def _blank_value(self, data: bytes, at: int, out: bytearray) -> int:
        """Begin with the first byte of a value, which stays: an empty object, array or text, or 0, is left of it."""
        first = data[at]
        if first in _OPENING:
            self._depth = 1
        elif first == _QUOTE:
            self._in_string = True
        elif first in _NUMBER:
            self._in_number = True
            out += b"0"
            return self._blank(data, at + 1, out)
        else:
            return at  # true, false, null
        out.append(first)
        return self._blank(data, at + 1, out)

    def _blank(self, data: bytes, at: int, out: bytearray) -> int:
        """Blank from there to the end of the value; return where that is."""
        while at < len(data) and self._blanks:
            byte = data[at]
            if self._in_number:
                self._in_number = byte in _NUMBER
                if not self._in_number:
                    break
            elif self._in_string:
                if self._escaped:
                    self._escaped = False
                elif byte == _BACKSLASH:
                    self._escaped = True
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte == _QUOTE:
                self._in_string = True
            else:
                self._depth += (byte in _OPENING) - (byte in _CLOSING)
            out.append(byte if not self._blanks else 0x20)
            at += 1
        return at


def key_pattern(passed: frozenset[str]) -> re.Pattern[bytes] | None:
    """What finds these keys with the first byte of a value behind them, but for those that are `passed`."""
    names = [name for name in KEYS if name not in passed]
    if not names:
        return None
    return re.compile(rb'"(?:%b)"[ \t]*:[ \t]*(?=[^ \t\r\n])' % "|".join(names).encode())
