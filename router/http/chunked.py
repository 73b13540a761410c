"""Find the end of a chunked body (RFC 9112 section 7.1), of a request or an answer. Sans-IO, one pass.

Strict: a size is plain hexadecimal, a line ends in CRLF and holds nothing that another reader could take for a line's
end. Invariant: the reader's state depends on the bytes fed so far, not on how they were cut.
"""

from __future__ import annotations

import re
from typing import Final

from router.http.headers import TOKEN_PATTERN, ProtocolError

MAX_LINE_BYTES: Final = 1024
"""Longest chunk-size line with its extensions, and longest trailer line."""
MAX_TRAILER_BYTES: Final = 64 * 1024
"""Most bytes of all trailer lines; they follow the content, so no reader of the content needs more."""
BETWEEN_CHUNKS: Final = -1
"""Value of `remaining_bytes` when a size line or a trailer line comes next."""

_EXTENSION = rb";" + TOKEN_PATTERN + rb"(?:=(?:" + TOKEN_PATTERN + rb'|"[ !#-\[\]-~]*"))?'
_SIZE_LINE_PATTERN = re.compile(rb"([0-9A-Fa-f]{1,12})(?:" + _EXTENSION + rb")*\r\n")
_TRAILER_PATTERN = re.compile(
    rb"(?i)(?!content-length:|transfer-encoding:)" + TOKEN_PATTERN + rb":[\t -~\x80-\xff]*\r\n\Z"
)


LAST_CHUNK: Final = b"0\r\n\r\n"


def encode_chunk(content: bytes) -> bytes:
    """Return a chunk of a chunked body; no bytes if there is no content, as an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(content), content) if content else b""


class BodyTooLarge(Exception):
    """The body has more content than its bound allows."""


class ChunkedBody:
    """Parser of one chunked body: takes its content out of the chunks, and finds its end.

    Trailers are checked and dropped, as recipients may do (RFC 9112 section 7.1.2).
    """

    __slots__ = (
        "_content_bytes", "_framing_bytes", "_is_in_trailers", "_max_content_bytes", "_max_framing_bytes",
        "_partial_line", "_trailer_bytes", "is_complete", "remaining_bytes",
    )  # fmt: skip

    def __init__(self, max_content_bytes: int | None = None, max_framing_bytes: int = 0) -> None:
        """Make a parser for one body; without `max_content_bytes` its size is not limited.

        More content raises BodyTooLarge. The framing (chunk sizes, extensions, trailers) may be `max_framing_bytes`
        longer than the content; more of it raises ProtocolError.
        """
        self._max_content_bytes = max_content_bytes
        self._max_framing_bytes = max_framing_bytes
        self._content_bytes = 0
        """Content bytes announced by the chunk sizes read so far."""
        self._framing_bytes = 0
        self.is_complete = False

        self.remaining_bytes = BETWEEN_CHUNKS
        """Content bytes of the current chunk that have not arrived.

        0: the line end after the content comes next. BETWEEN_CHUNKS: a size line or a trailer line comes next.
        """
        self._partial_line = b""
        """Start of a size line, chunk end or trailer line that was split between reads."""
        self._is_in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Parse the next bytes of a connection; return the content in them, and the bytes after the end of the body.

        Raises ProtocolError for malformed framing, and BodyTooLarge.
        """
        contents: list[bytes] = []
        position, data_end = 0, len(data)
        while position < data_end and not self.is_complete:
            if self.remaining_bytes == BETWEEN_CHUNKS and not self._partial_line and not self._is_in_trailers:
                position = self._read_complete_chunks(data, position, contents)
                if position == data_end:
                    break
            if self.remaining_bytes > 0:
                content = data[position : position + self.remaining_bytes]
                contents.append(content)
                self.remaining_bytes -= len(content)
                position += len(content)
            else:
                position = self._read_framing(data, position)
        return b"".join(contents), data[position:]

    def _read_complete_chunks(self, data: bytes, position: int, contents: list[bytes]) -> int:
        """Read the chunks that `data` holds completely, from `position` on, and return the position after them.

        This is the fast path, as most chunks come whole. It leaves the rest to `_read_framing`: the last chunk, a chunk
        that continues in the next read, and malformed lines.
        """
        while position < len(data):
            size_match = _SIZE_LINE_PATTERN.match(data, position, position + MAX_LINE_BYTES)
            if size_match is None:
                break
            chunk_bytes = int(size_match[1], 16)
            content_start = size_match.end()
            content_end = content_start + chunk_bytes
            if chunk_bytes == 0 or not data.startswith(b"\r\n", content_end):
                break
            contents.append(data[content_start:content_end])
            if self._max_content_bytes is not None:
                self._check_sizes(chunk_bytes, content_start - position + 2)
            position = content_end + 2
        return position

    def _check_sizes(self, content_bytes: int, framing_bytes: int) -> None:
        """Count bytes of content and framing that were read. Raises BodyTooLarge or ProtocolError for too many."""
        self._content_bytes += content_bytes
        self._framing_bytes += framing_bytes
        if self._content_bytes > (self._max_content_bytes or 0):
            raise BodyTooLarge
        if self._framing_bytes > self._max_framing_bytes + self._content_bytes:
            raise ProtocolError("a chunked body of more framing than content")

    def _read_framing(self, data: bytes, position: int) -> int:
        """Read a line of the framing from `position` on, or as much of it as has come; return the position after it."""
        line_end = data.find(b"\n", position, position + MAX_LINE_BYTES)
        if line_end < 0:
            self._partial_line += data[position : position + MAX_LINE_BYTES + 1]
            if len(self._partial_line) > MAX_LINE_BYTES:
                raise ProtocolError("chunk header too long")
            return len(data)
        line = self._partial_line + data[position : line_end + 1]
        self._partial_line = b""
        self._read_line(line)
        return line_end + 1

    def _read_line(self, line: bytes) -> None:
        """Read a complete line of the framing: a chunk's size, a trailer, or the line end after a chunk's content."""
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolError("chunk header too long")
        chunk_bytes = 0
        if self.remaining_bytes == 0:  # the content of a chunk came before
            if line != b"\r\n":
                raise ProtocolError(f"chunk longer than its size: {line[:40]!r}")
            self.remaining_bytes = BETWEEN_CHUNKS
        elif self._is_in_trailers:
            self._read_trailer(line)
        else:
            chunk_bytes = self._read_size(line)
        if self._max_content_bytes is not None:
            self._check_sizes(chunk_bytes, len(line))

    def _read_size(self, line: bytes) -> int:
        """Read the line before a chunk, and return the chunk's size: 0 for the last chunk, before the trailers."""
        match = _SIZE_LINE_PATTERN.fullmatch(line)
        if match is None:
            raise ProtocolError(f"bad chunk size {line[:40]!r}")
        chunk_bytes = int(match[1], 16)
        if chunk_bytes:
            self.remaining_bytes = chunk_bytes
        else:
            self._is_in_trailers = True
        return chunk_bytes

    def _read_trailer(self, line: bytes) -> None:
        """Check a line after the last chunk. An empty line ends the body."""
        self.is_complete = line == b"\r\n"
        if not self.is_complete and not _TRAILER_PATTERN.match(line):
            raise ProtocolError(f"bad trailer in a chunked body: {line[:40]!r}")
        self._trailer_bytes += len(line)
        if self._trailer_bytes > MAX_TRAILER_BYTES:
            raise ProtocolError("trailers too long")

    def finish(self) -> None:
        """End the body because the connection ended. Raises `ProtocolError` if the body is incomplete."""
        if not self.is_complete:
            raise ProtocolError("connection closed inside a chunked body")
