"""A header block as one piece of bytes: looked into by search, passed on by cutting out what must not be.

A proxy reads a handful of headers and forwards the rest unchanged, so nothing here takes the block apart into a list.
Invariant: a block is a sequence of `name:value CRLF` lines that match `LINES`, which both parsers see to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
LINES = rb"(?:" + TOKEN + rb":[\t -~\x80-\xff]*\r\n)*"
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
"""Headers that speak about one connection (RFC 9110 section 7.6.1) and are never passed on."""

_PLAIN_OPTIONS = frozenset((b"keep-alive", b"close", b""))
_NEVER_DROPPED = frozenset((b"content-length", b"content-type", b"host", b"authorization"))
"""What frames or authorises a message is not cut out because a `Connection` header names it."""


class HeaderBlock:
    """Headers as they were sent, names in any case. Immutable; what was looked up once is remembered."""

    __slots__ = ("_dropped", "_kept", "_left", "_lower", "_values", "raw", "told")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._values: dict[bytes, bytes | None] = {}
        self._kept: dict[Dropping, bytes] = {}
        self._dropped: Dropping | None = None
        self._left = b""
        """What `_dropped`, the last that was asked for, leaves."""
        self.told: Any = None
        """What its first reader made of it: heads are repeated, and so is what they ask for."""
        self._lower = b"\n" + raw.lower()  # so that every line starts after a line feed

    @classmethod
    def of(cls, pairs: Iterable[tuple[bytes, bytes]]) -> HeaderBlock:
        """From names and values that a strict parser accepted."""
        return cls(b"".join([b"%b: %b\r\n" % pair for pair in pairs]))

    def __contains__(self, name: bytes) -> bool:
        return b"\n" + name + b":" in self._lower

    def get(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower-case), without the white space around it; None where there is none."""
        values = self._values
        if name in values:
            return values[name]
        value = None
        at = self._lower.find(b"\n" + name + b":")
        if at >= 0:
            start = at + len(name) + 1
            value = self.raw[start : self.raw.index(b"\r", start)].strip(b" \t")
        values[name] = value
        return value

    def all(self, name: bytes) -> list[bytes]:
        """Every value of `name` (lower-case), in order."""
        found = []
        start_of_line = b"\n" + name + b":"
        at = self._lower.find(start_of_line)
        while at >= 0:
            start = at + len(name) + 1
            found.append(self.raw[start : self.raw.index(b"\r", start)].strip(b" \t"))
            at = self._lower.find(start_of_line, start)
        return found

    def without(self, dropped: Dropping) -> bytes:
        """The lines that `dropped` does not name, nor a `Connection` header here."""
        if dropped is self._dropped:
            return self._left
        known = self._kept.get(dropped)
        if known is None:
            known = self._kept[dropped] = self._without(dropped)
        self._dropped, self._left = dropped, known
        return known

    def _without(self, dropped: Dropping) -> bytes:
        names = dropped.names
        connection = self.get(b"connection")
        if connection is not None and (connection.lower() not in _PLAIN_OPTIONS or len(self.all(b"connection")) > 1):
            values = b",".join(self.all(b"connection")).lower().split(b",")
            names = names | ({value.strip(b" \t") for value in values} - _PLAIN_OPTIONS - _NEVER_DROPPED)
        lines = self.raw.splitlines(keepends=True)
        return b"".join([line for line in lines if line.partition(b":")[0].lower() not in names])


class Dropping:
    """Names of headers that are not passed on. Make few, once: every block remembers what is left of it for each, by
    the object."""

    __slots__ = ("names",)

    def __init__(self, names: Iterable[bytes]) -> None:
        self.names = frozenset(names)


DIGITS_MAX: Final = 15
"""Of a content-length. Every place that reads one goes by this bound: two bounds are two lengths of one message."""
CONTENT_LENGTH = re.compile(rb"(?mi)^content-length:[ \t]*([0-9]{1,%d})[ \t]*\r\n" % DIGITS_MAX)
_DIGITS = re.compile(rb"[0-9]{1,%d}\Z" % DIGITS_MAX)
TEMPLATE_BYTES_MAX: Final = 4096
"""A longer head is not remembered: connections are many, and most of them idle."""
HEADS_MAX: Final = 8
"""Heads that are known on every connection."""
T = TypeVar("T")


class ProtocolError(Exception):
    """Somebody sent what is not HTTP/1.x, or what contradicts itself."""


def framing(headers: HeaderBlock) -> tuple[bool, int | None]:
    """(whether the body is chunked, its content-length) as a message states it (RFC 9112 section 6.3).

    Raises `ProtocolError` where it could be read in two ways.
    """
    lengths = headers.all(b"content-length")
    encodings = headers.all(b"transfer-encoding")
    if encodings:
        if lengths or len(encodings) != 1 or encodings[0].lower() != b"chunked":
            raise ProtocolError("transfer-encoding other than a lone chunked")
        return True, None
    if not lengths:
        return False, None
    if len(lengths) != 1 or not _DIGITS.match(lengths[0]):
        raise ProtocolError(f"bad content-length {lengths[0][:40]!r}")
    return False, int(lengths[0])


class Template(Generic[T]):
    """A head and what was read from it, to recognise the next one at sight.

    Clients and workers repeat their heads but for the content-length. Two heads that are equal, digits of that length
    aside, mean the same.
    """

    __slots__ = ("_prefix", "_suffix", "value")

    def __init__(self, head: bytes, value: T, length: int | None) -> None:
        """`head` runs to its empty line, and `framing` read `length` in it."""
        self._prefix, self.value = head, value
        self._suffix: bytes | None = None
        if length is not None:
            start = head.lower().index(b"\ncontent-length:") + 16
            while head[start] in b" \t":
                start += 1
            end, found = number_at(head, start)
            assert found == length
            self._prefix, self._suffix = head[:start], head[end:]

    def match(self, data: bytes, start: int = 0) -> tuple[int, int | None] | None:
        """(where the head at `start` ends, its content-length) if it is the same head, else None."""
        prefix, suffix = self._prefix, self._suffix
        at = start + len(prefix)
        if data[start:at] != prefix:  # `startswith` takes its arguments from a tuple, four times a request
            return None
        if suffix is None:
            return at, None
        end, length = number_at(data, at)
        after = end + len(suffix)
        if end == at or data[end:after] != suffix:
            return None
        return after, length


class Heads(Generic[T]):
    """The last heads of all connections, the newest first: who comes again by another connection sends the same one."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: list[Template[T]] = []

    def find(self, data: bytes, start: int = 0) -> Template[T] | None:
        """The one that `data` has at `start`."""
        kept = self._kept
        for i, template in enumerate(kept):
            if template.match(data, start) is not None:
                if i:
                    del kept[i]
                    kept.insert(0, template)
                return template
        return None

    def keep(self, head: bytes, value: T, length: int | None) -> Template[T] | None:
        """See Template; None where it is too long to be remembered."""
        if len(head) > TEMPLATE_BYTES_MAX:
            return None
        template = Template(head, value, length)
        self._kept.insert(0, template)
        del self._kept[HEADS_MAX:]
        return template


def number_at(data: bytes, at: int) -> tuple[int, int]:
    """(where it ends, its value) of the decimal number of up to `DIGITS_MAX` digits at `at`; (at, 0) without one."""
    end, value = at, 0
    stop = min(len(data), at + DIGITS_MAX)
    while end < stop:
        digit = data[end] - 48
        if digit < 0 or digit > 9:
            break
        value = value * 10 + digit
        end += 1
    return end, value
