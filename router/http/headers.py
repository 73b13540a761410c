"""Header blocks: the lines as they were sent, found by name, without those that must not be forwarded.

A proxy reads a handful of headers and forwards the others unchanged. Invariant: a block is a sequence of `name:value
CRLF` lines that match `LINES_PATTERN`, which both parsers check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

TOKEN_PATTERN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINES_PATTERN = rb"(?:" + TOKEN_PATTERN + rb":[\t -~\x80-\xff]*\r\n)*"
"""Pattern of a whole block: no folding, no space before a colon, no control characters."""

HOP_BY_HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
)
"""Headers about one connection (RFC 9110 section 7.6.1), which are never forwarded."""

_ALWAYS_FORWARDED = frozenset((b"content-length", b"content-type", b"host", b"authorization"))
"""Headers that are forwarded even if `Connection` names them, as they frame or authorise a message."""


class HeaderBlock:
    """Headers as they were sent. Immutable."""

    __slots__ = ("_lines", "first_line_by_name", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._lines = [(line.partition(b":")[0].lower(), line) for line in raw.splitlines(keepends=True)]
        """Name in lower case, and line, of each header."""
        self.first_line_by_name = dict(reversed(self._lines))
        """First line of each name in lower case."""

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[bytes, bytes]]) -> HeaderBlock:
        """Make a block of names and values that a strict parser accepted."""
        return cls(b"".join([b"%b: %b\r\n" % pair for pair in pairs]))

    def get(self, name: bytes) -> bytes | None:
        """Return the first value of `name` (lower-case) without white space around it; None if there is none."""
        line = self.first_line_by_name.get(name)
        return None if line is None else line[len(name) + 1 :].strip(b" \t\r\n")

    def get_all(self, name: bytes) -> list[bytes]:
        """Return every value of `name` (lower-case), in order."""
        return [line[len(name) + 1 :].strip(b" \t\r\n") for line_name, line in self._lines if line_name == name]

    def read_connection_options(self) -> set[bytes]:
        """Return the options of all `Connection` headers in lower case: `close`, `keep-alive`, or names of headers."""
        return {option.strip(b" \t") for option in b",".join(self.get_all(b"connection")).lower().split(b",")}

    def join_lines_without(self, names: frozenset[bytes]) -> bytes:
        """Return the lines of all headers but `names` (lower-case) and those that a `Connection` header names.

        A `Connection` header lists headers that are meant for this connection only.
        """
        if b"connection" in self.first_line_by_name:
            names = names | (self.read_connection_options() - _ALWAYS_FORWARDED)
        return b"".join([line for name, line in self._lines if name not in names])


MAX_LENGTH_DIGITS: Final = 15
"""Most digits of a content-length."""
_LENGTH_PATTERN = re.compile(rb"[0-9]{1,%d}\Z" % MAX_LENGTH_DIGITS)


class ProtocolError(Exception):
    """The peer sent something that is not HTTP/1.x, or contradicts itself."""


def parse_framing(headers: HeaderBlock) -> tuple[bool, int | None]:
    """Return whether a message's body is chunked, and its content-length (RFC 9112 section 6.3).

    Raises `ProtocolError` if the headers could be read in two ways.
    """
    has_length = b"content-length" in headers.first_line_by_name
    if b"transfer-encoding" in headers.first_line_by_name:
        transfer_encodings = headers.get_all(b"transfer-encoding")
        if has_length or len(transfer_encodings) != 1 or transfer_encodings[0].lower() != b"chunked":
            raise ProtocolError("transfer-encoding other than a lone chunked")
        return True, None
    if not has_length:
        return False, None
    content_lengths = headers.get_all(b"content-length")
    if len(content_lengths) != 1 or not _LENGTH_PATTERN.match(content_lengths[0]):
        raise ProtocolError("bad content-length: expected one number")
    return False, int(content_lengths[0])


def wants_keep_alive(headers: HeaderBlock, *, is_http_1_0: bool) -> bool:
    """Return whether the sender of a message wants to use the connection again (RFC 9112 section 9.3)."""
    if b"connection" not in headers.first_line_by_name:
        return not is_http_1_0
    options = headers.read_connection_options()
    return b"close" not in options and (b"keep-alive" in options or not is_http_1_0)
