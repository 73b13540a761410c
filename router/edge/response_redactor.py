"""Blank the values of internal fields in answers, such as the place of KV blocks (prompts/worker_fields.py).

The length of an answer stays as its head says. Fields are found by a pattern: a quotation mark in a JSON string is
escaped, so generated text cannot look like one of them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

REDACTED_KEYS: Final = (
    "kv_transfer_params", "ec_transfer_params", "kv_hints", "remote_engine_id", "remote_block_ids", "remote_host",
    "remote_port", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank", "routed_dp_rank",
    "disaggregated_params", "worker_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank",
    "decode_dp_rank",
)  # fmt: skip
"""Internal fields in the answers of engines. `request_id` is not one: it may be the client's."""
KEY_START_BYTES_MAX: Final = 64
"""Longest end of a part of an answer that may be the beginning of an internal key."""
_KEY_START_PATTERN = re.compile(rb'"(?:[a-z_]{0,24}|[a-z_]{1,24}"[ \t]*:?[ \t]*)\Z')
_KEY_START_ENDS: Final = frozenset(b"%c" % byte for byte in b'"abcdefghijklmnopqrstuvwxyz_: \t')
"""Last bytes of the matches of `_KEY_START_PATTERN`: a whole event ends with none of them."""
_NUMBER: Final = b"0123456789+-.eE"
_OPENING, _CLOSING, _QUOTE, _BACKSLASH, _SPACE = b"{[", b"}]", ord('"'), ord("\\"), ord(" ")


class _BlankedValue(msgspec.Struct, eq=False):
    """Replaces a JSON value by spaces: a string, a number, an object or an array.

    The value may come in parts, so its place in the value is kept: `{"po` and `rt": 7}` become `{   ` and `      }`.
    """

    is_number: bool
    is_in_string: bool
    """Whether the next byte is inside of a string, where brackets mean nothing."""
    depth: int
    """Number of open objects and arrays."""
    is_after_backslash: bool = False
    is_finished: bool = False

    def blank(self, data: bytes, start: int, out: bytearray) -> int:
        """Append a space to `out` for each byte of the value from `start` on, and its closing byte; return its end.

        The caller has written the value's first byte. If `data` ends before the value, the value is not finished.
        """
        if self.is_number:
            end = len(data) - len(data[start:].lstrip(_NUMBER))
            out += b" " * (end - start)
            self.is_finished = end < len(data)  # else the next part of the answer may have more digits
            return end
        position = start
        while position < len(data) and not self.is_finished:
            byte = data[position]
            self._update_nesting(byte)
            self.is_finished = not self.is_in_string and self.depth == 0
            out.append(byte if self.is_finished else _SPACE)
            position += 1
        return position

    def _update_nesting(self, byte: int) -> None:
        """Record whether a byte opens or closes a string, an object or an array."""
        if self.is_after_backslash:
            self.is_after_backslash = False
        elif self.is_in_string:
            self.is_after_backslash = byte == _BACKSLASH
            self.is_in_string = byte != _QUOTE
        elif byte == _QUOTE:
            self.is_in_string = True
        elif byte in _OPENING:
            self.depth += 1
        elif byte in _CLOSING:
            self.depth -= 1


class ResponseRedactor(msgspec.Struct, eq=False):
    """Hides the values of internal fields in one answer, which arrives in parts, and keeps the answer's length."""

    key_pattern: re.Pattern[bytes]
    _held_back: bytes = b""
    """End of the last part that may be the beginning of an internal key."""
    _unfinished_value: _BlankedValue | None = None
    """Internal value that continues in the next part."""

    def feed(self, content: bytes, *, ends: bool) -> bytes:
        """Take the next part of the answer, and return the bytes that can be forwarded to the client now.

        `ends`: no further bytes follow, so nothing is held back as the possible beginning of a key.
        """
        data = self._held_back + content if self._held_back else content
        if self._unfinished_value is not None or self.key_pattern.search(data) is not None:
            return self._blank_values(data, ends=ends)
        if ends or data[-1:] not in _KEY_START_ENDS:  # as nearly always
            self._held_back = b""
            return data
        end = _end_before_key(data, 0)
        self._held_back = data[end:]
        return data[:end]

    def _blank_values(self, data: bytes, *, ends: bool) -> bytes:
        """Return `data`, a part of the answer, with spaces in place of the values of internal fields.

        Bytes at the end that may begin the name of such a field are held back for the next part, unless `ends`.
        """
        out = bytearray()
        position = 0
        if self._unfinished_value is not None:
            position = self._unfinished_value.blank(data, 0, out)
            if self._unfinished_value.is_finished:
                self._unfinished_value = None
        while (key := self.key_pattern.search(data, position)) is not None:
            out += data[position : key.end()]
            position = self._blank_value(data, key.end(), out)
        end = len(data) if ends or self._unfinished_value is not None else _end_before_key(data, position)
        self._held_back = data[end:]
        out += data[position:end]
        return bytes(out)

    def _blank_value(self, data: bytes, start: int, out: bytearray) -> int:
        """Append the JSON value at `start` to `out`, with spaces for its content; return the position after it.

        `"10.0.0.7"` becomes `"        "`, `{"port": 7}` becomes `{         }`, and 5100 becomes `0   `. true, false and
        null stay, as they tell nothing.
        """
        first_byte = data[start]
        is_number, is_string, is_container = first_byte in _NUMBER, first_byte == _QUOTE, first_byte in _OPENING
        if not (is_number or is_string or is_container):
            return start  # true, false, null
        value = _BlankedValue(is_number=is_number, is_in_string=is_string, depth=int(is_container))
        out.append(ord("0") if is_number else first_byte)
        end = value.blank(data, start + 1, out)
        if not value.is_finished:
            self._unfinished_value = value
        return end


def _end_before_key(data: bytes, start: int) -> int:
    """Return the end of `data`, or the start of an internal key that may go on in the next part of the answer."""
    key_start = _KEY_START_PATTERN.search(data, max(start, len(data) - KEY_START_BYTES_MAX))
    return len(data) if key_start is None else key_start.start()


def build_key_pattern(allowed_fields: frozenset[str]) -> re.Pattern[bytes] | None:
    """Build the pattern of internal fields but `allowed_fields`, up to the value. Return None if all are allowed."""
    names = [name for name in REDACTED_KEYS if name not in allowed_fields]
    if not names:
        return None
    # Each name has an underscore, and few other keys of an answer do: the search stops only there, then looks back.
    pattern = "|".join(f'{name.partition("_")[2]}(?<="{name})' for name in names)
    return re.compile(rb'_(?:%b)"[ \t]*:[ \t]*(?=[^ \t\r\n])' % pattern.encode())
