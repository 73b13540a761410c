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


class ResponseRedactor(msgspec.Struct, eq=False):
    """Hides the values of internal fields in one answer, and keeps its length.

    An answer arrives in parts that may cut a key or a value anywhere. So a possible beginning of a key at the end of a
    part waits in `_pending`, and the state of an unfinished value is kept until the next part.
    """

    key_pattern: re.Pattern[bytes]
    is_chunked: bool = False
    """Whether the bytes include the framing of chunks. A value that is cut by a chunk is not blanked."""
    _pending: bytes = b""
    _is_blanking: bool = False
    """Whether the next byte belongs to a value that is being blanked."""
    _depth: int = 0
    """Number of open objects and arrays in the value that is being blanked."""
    _is_in_string: bool = False
    _is_escaped: bool = False  # the byte before was a backslash
    _is_in_number: bool = False

    def feed(self, content: bytes, *, ends: bool) -> bytes:
        """Take the next part of the answer, and return the bytes that can be forwarded to the client now.

        `ends`: no further bytes follow, so nothing is held back as the possible beginning of a key.
        """
        data = self._pending + content if self._pending else content
        if self._is_blanking or self.key_pattern.search(data) is not None:
            return self._blank_values(data, ends=ends)
        if ends or data[-1:] not in _KEY_START_ENDS:  # as nearly always
            self._pending = b""
            return data
        end = _end_before_key(data, 0)
        self._pending = data[end:]
        return data[:end]

    def _blank_values(self, data: bytes, *, ends: bool) -> bytes:
        """Return `data`, a part of the answer, with spaces in place of the values of internal fields.

        Bytes at the end that may begin the name of such a field are held back for the next part, unless `ends`.
        """
        out = bytearray()
        position = self._blank(data, 0, out) if self._is_blanking else 0
        while (match := self.key_pattern.search(data, position)) is not None:
            value_start = match.end()
            out += data[position:value_start]
            blanked_value = bytearray()
            position = self._blank_value(data, value_start, blanked_value)
            value = data[value_start:position]
            is_cut_by_chunk = self.is_chunked and (self._is_blanking or b"\r" in value)
            if is_cut_by_chunk:  # the size of the next chunk would be blanked too: the value stays
                self._is_blanking = False
                self._is_escaped = False
                out += value
            else:
                out += blanked_value
        end = len(data) if ends or self._is_blanking else _end_before_key(data, position)
        self._pending = data[end:]
        out += data[position:end]
        return bytes(out)

    def _blank_value(self, data: bytes, position: int, out: bytearray) -> int:
        """Append the JSON value at `position` to `out`, with spaces for its content; return the position after it.

        `"10.0.0.7"` becomes `"        "`, `{"port": 7}` becomes `{         }`, and 5100 becomes `0   `. true, false and
        null stay, as they tell nothing. The value may end in a later part of the answer, where `_blank` continues.
        """
        first_byte = data[position]
        self._depth = 1 if first_byte in _OPENING else 0
        self._is_in_string = first_byte == _QUOTE
        self._is_in_number = first_byte in _NUMBER
        self._is_blanking = self._depth > 0 or self._is_in_string or self._is_in_number
        if not self._is_blanking:
            return position  # true, false, null
        out.append(ord("0") if self._is_in_number else first_byte)
        return self._blank(data, position + 1, out)

    def _blank(self, data: bytes, position: int, out: bytearray) -> int:
        """Append a space to `out` for each further byte of a JSON value, and its closing byte; return the end position.

        The value began before `position`, perhaps in an earlier part of the answer. If it does not end in `data`, the
        end of `data` is returned, and `_is_blanking` stays set for the next part.
        """
        if self._is_in_number:
            end = len(data) - len(data[position:].lstrip(_NUMBER))
            out += b" " * (end - position)
            self._is_blanking = end == len(data)  # then the next part of the answer may have more digits
            self._is_in_number = self._is_blanking
            return end
        while position < len(data) and self._is_blanking:
            byte = data[position]
            self._update_nesting(byte)
            self._is_blanking = self._is_in_string or self._depth > 0
            out.append(_SPACE if self._is_blanking else byte)
            position += 1
        return position

    def _update_nesting(self, byte: int) -> None:
        """Record whether a byte opens or closes a string, an object or an array."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped, self._is_in_string = byte == _BACKSLASH, byte != _QUOTE
        elif byte == _QUOTE:
            self._is_in_string = True
        elif byte in _OPENING:
            self._depth += 1
        elif byte in _CLOSING:
            self._depth -= 1


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
