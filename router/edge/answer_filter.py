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
_BEGUN_ENDS: Final = b'"abcdefghijklmnopqrstuvwxyz_: \t'
"""Last bytes of what `_BEGUN` finds: a whole event ends with none of them."""
_NUMBER: Final = b"0123456789+-.eE"
_OPENING, _CLOSING, _QUOTE, _BACKSLASH = b"{[", b"}]", ord('"'), ord("\\")


class AnswerFilter:
    """Of one answer, whose content is given to `feed`."""

    __slots__ = ("_blanks", "_depth", "_escaped", "_held", "_in_number", "_in_string", "_is_chunked", "_key")

    def __init__(self, key: re.Pattern[bytes], *, is_chunked: bool = False) -> None:
        """`is_chunked`: what is fed has the chunks of HTTP in it, and a value that is cut by one stays as it is."""
        self._key = key
        self._is_chunked = is_chunked
        self._held = b""
        self._blanks = False
        """The next byte belongs to a value that is being blanked."""
        self._depth = 0
        """Of the value that is being blanked."""
        self._in_string = self._escaped = self._in_number = False

    def feed(self, content: bytes, *, ends: bool) -> bytes:
        """Take the next bytes of the content; return what may be passed on, in all as long as what came."""
        data, out = self._held + content, bytearray()
        at = self._blank(data, 0, out) if self._blanks else 0
        while (found := self._key.search(data, at)) is not None:
            out += data[at : found.end()]
            at = self._blank_value(data, found.end(), out)
            if self._is_chunked and (self._blanks or b"\r" in data[found.end() : at]):
                out[-(at - found.end()) or len(out) :] = data[found.end() : at]
                self._blanks = self._escaped = False
        end = len(data) if ends or self._blanks else _end_before_key(data, at)
        self._held = data[end:]
        if at == 0 and end == len(data):  # as nearly always
            return data
        out += data[at:end]
        return bytes(out)

    def _blank_value(self, data: bytes, at: int, out: bytearray) -> int:
        """Begin with the first byte of a value, which stays: an empty object, array or text, or 0, is left of it."""
        first = data[at]
        self._depth, self._in_string, self._in_number = int(first in _OPENING), first == _QUOTE, first in _NUMBER
        self._blanks = bool(self._depth) or self._in_string or self._in_number
        if not self._blanks:
            return at  # true, false, null
        out.append(ord("0") if self._in_number else first)
        return self._blank(data, at + 1, out)

    def _blank(self, data: bytes, at: int, out: bytearray) -> int:
        """Blank from there to the end of the value; return where that is."""
        while at < len(data) and self._blanks:
            byte = data[at]
            if self._in_number:
                self._in_number = self._blanks = byte in _NUMBER
                if not self._blanks:
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
            self._blanks = bool(self._depth) or self._in_string or self._in_number
            out.append(byte if not self._blanks else 0x20)
            at += 1
        return at


def _end_before_key(data: bytes, start: int) -> int:
    """Return where a key begins that may go on in the next read; the end of `data` where none does."""
    if data[-1:] not in _BEGUN_ENDS:
        return len(data)
    begun = _BEGUN.search(data, max(start, len(data) - HELD_BYTES_MAX))
    return len(data) if begun is None else begun.start()


def key_pattern(passed: frozenset[str]) -> re.Pattern[bytes] | None:
    """What finds these keys with the first byte of a value behind them, but for those that are `passed`."""
    names = [name for name in KEYS if name not in passed]
    if not names:
        return None
    # Most keys of an answer begin with another letter, which is looked at once and not for every name.
    letters = "".join(sorted({name[0] for name in names}))
    return re.compile(rb'"(?=[%b])(?:%b)"[ \t]*:[ \t]*(?=[^ \t\r\n])' % (letters.encode(), "|".join(names).encode()))
