"""Bytes of a body that arrives in parts, in pieces, so that a long body is never copied as a whole."""

from __future__ import annotations

from typing import Final

PIECE_BYTES: Final = 1 << 20
"""Least size of the pieces in which a long body is kept and forwarded, but for the last one."""


class BodyPieces:
    """Bytes of an HTTP body received so far, kept as pieces of about PIECE_BYTES, so that a long body is not copied."""

    __slots__ = ("complete", "growing")

    def __init__(self) -> None:
        self.complete: list[bytes] = []
        """Pieces to which no more bytes are added."""
        self.growing = bytearray()
        """Last piece."""

    @property
    def byte_count(self) -> int:
        """Number of bytes received so far."""
        return sum(map(len, self.complete)) + len(self.growing)

    def append(self, data: bytes) -> None:
        """Add the next bytes of the body, and begin a new piece if the last one is large enough."""
        self.growing += data
        if len(self.growing) >= PIECE_BYTES:
            self.complete.append(bytes(self.growing))
            self.growing = bytearray()

    def to_tuple(self) -> tuple[bytes, ...]:
        """Return the pieces, at least one."""
        if self.complete and not self.growing:
            return tuple(self.complete)
        return (*self.complete, bytes(self.growing))
