"""Header blocks: the lines as they were sent, found by name, without those that must not be forwarded.

A proxy reads a handful of headers and forwards the others unchanged. Invariant: a block is a sequence of `name:value
CRLF` lines without folding, without a space before a colon, and without control characters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

TOKEN_PATTERN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_LINES_PATTERN = re.compile(rb"(?:" + TOKEN_PATTERN + rb":[\t -~\x80-\xff]*\r\n)*")
"""Pattern of a block of header lines."""

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


class ProtocolError(Exception):
    """The peer sent something that is not HTTP/1.x, or contradicts itself."""


class HeaderBlock:
    """Headers of an HTTP message, kept as the lines that were sent, so that a proxy can forward them. Immutable."""

    __slots__ = ("lines_by_name", "raw")

    def __init__(self, raw: bytes) -> None:
        """Split a block of header lines. Raises ProtocolError if a line is malformed."""
        if _LINES_PATTERN.fullmatch(raw) is None:
            raise ProtocolError("its head is none of HTTP/1.x")  # without the line, which may hold an API key
        self.raw = raw
        lines = raw.splitlines(keepends=True)
        names = [line.partition(b":")[0].lower() for line in lines]
        self.lines_by_name = dict(zip(names, lines))
        """Lines of each lower-case name, joined; nearly always it is one line."""
        if len(self.lines_by_name) < len(lines):
            self.lines_by_name = _join_lines_of_each_name(names, lines)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[bytes, bytes]]) -> HeaderBlock:
        """Make a block of names and values. Raises ProtocolError if one is malformed."""
        return cls(b"".join([b"%b: %b\r\n" % pair for pair in pairs]))

    def replace(self, name: bytes, value: bytes) -> HeaderBlock:
        """Return a copy of the headers in which `name` (lower-case) has this value only."""
        lines_by_name = {**self.lines_by_name, name: b"%b: %b\r\n" % (name, value)}
        return HeaderBlock(b"".join(lines_by_name.values()))

    def get(self, name: bytes) -> bytes | None:
        """Return the first value of `name` (lower-case) without white space around it; None if there is none."""
        lines = self.lines_by_name.get(name)
        return None if lines is None else lines[len(name) + 1 : lines.index(b"\n")].strip(b" \t\r")

    def get_all(self, name: bytes) -> list[bytes]:
        """Return every value of `name` (lower-case), in order."""
        lines = self.lines_by_name.get(name, b"").splitlines()
        return [line[len(name) + 1 :].strip(b" \t") for line in lines]

    def count(self, name: bytes) -> int:
        """Return the number of lines of `name` (lower-case)."""
        return self.lines_by_name.get(name, b"").count(b"\n")

    def read_connection_options(self) -> set[bytes]:
        """Return the options of all `Connection` headers in lower case: `close`, `keep-alive`, or names of headers."""
        joined_options = b",".join(self.get_all(b"connection")).lower()
        return {option.strip(b" \t") for option in joined_options.split(b",")}

    def join_lines_without(self, names: frozenset[bytes]) -> bytes:
        """Return the lines of all headers, except `names` (lower-case) and those that a `Connection` header names.

        A `Connection` header names the headers that a proxy must not forward. Lines of one name come together.
        """
        if b"connection" in self.lines_by_name:
            names = names | (self.read_connection_options() - _ALWAYS_FORWARDED)
        return b"".join([lines for name, lines in self.lines_by_name.items() if name not in names])


def _join_lines_of_each_name(names: Iterable[bytes], lines: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return the lines of each name. Each line is copied once, however many a hostile client sends."""
    lines_by_name: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for name, line in zip(names, lines):
        lines_by_name[name].append(line)
    return {name: b"".join(lines) for name, lines in lines_by_name.items()}


MAX_LENGTH_DIGITS: Final = 15
"""Most digits of a content-length."""


def parse_framing(headers: HeaderBlock) -> tuple[bool, int | None]:
    """Return whether the body after these headers is chunked, and its length in bytes if the headers tell it.

    This is how the end of a message's body is found (RFC 9112 section 6.3). Raises ProtocolError if the headers could
    be read in two ways.
    """
    length_line = headers.lines_by_name.get(b"content-length")
    if b"transfer-encoding" in headers.lines_by_name:
        transfer_encodings = headers.get_all(b"transfer-encoding")
        if length_line or len(transfer_encodings) != 1 or transfer_encodings[0].lower() != b"chunked":
            raise ProtocolError("transfer-encoding other than a lone chunked")
        return True, None
    if length_line is None:
        return False, None
    digits = length_line[len(b"content-length:") :].strip(b" \t\r\n")
    if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:  # also if there are two lines, which are joined here
        raise ProtocolError("bad content-length: expected one number")
    return False, int(digits)


def wants_keep_alive(headers: HeaderBlock, *, is_http_1_0: bool) -> bool:
    """Return whether the sender of a message wants to use the connection again (RFC 9112 section 9.3)."""
    if b"connection" not in headers.lines_by_name:
        return not is_http_1_0
    options = headers.read_connection_options()
    return b"close" not in options and (b"keep-alive" in options or not is_http_1_0)
