"""Decoding of compressed request bodies (`content-encoding`), in slices, within the bounds of any body.

Each slice is one turn of the event loop, and its output is charged before the next one is decoded. Workers get the
decoded body without `content-encoding`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from prompts.errors import RequestError, bad_value
from router.http.body_pieces import BodyPieces
from router.http.fair_scheduler import FairScheduler
from router.http.request import HttpRequest

try:
    from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # from Python 3.14 on
except ImportError:
    try:
        from backports import zstd  # type: ignore[import-not-found, import-untyped, attr-defined, unused-ignore]
    except ImportError:  # an installation without the extra `router`
        zstd = None

INPUT_SLICE_BYTES: Final = 64 << 10
OUTPUT_SLICE_BYTES: Final = 256 << 10
"""Most bytes read and produced in one turn; they take about a millisecond."""
MAX_MEMBERS: Final = 64
"""Most members of a gzip body, or frames of a zstd body; clients send one."""
ZSTD_WINDOW_LOG: Final = 23
"""Largest window of zstd, as a power of two: RFC 9659 limits HTTP to 8 MiB."""
_IDENTITY: Final = b"identity"


class _ZstdDecoder:
    """Adapter that gives the decoder of one zstd frame the interface of zlib's decoders."""

    def __init__(self) -> None:
        self._frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})
        self.unconsumed_tail = b""
        """Always empty, because the decoder keeps unread input itself."""

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._frame.decompress(data, max_length))


class _DeflateDecoder:
    """Decoder of `content-encoding: deflate`, with the interface of zlib's decoders.

    The standard means zlib's format, but some clients send raw deflate. The first bytes show which format it is.
    """

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()
        self._is_first_read = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Decode at most `max_length` bytes. Raises zlib.error if `data` has neither format."""
        try:
            return self._stream.decompress(data, max_length)
        except zlib.error:
            if not self._is_first_read:
                raise
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)  # raw deflate
            return self._stream.decompress(data, max_length)
        finally:
            self._is_first_read = False


_DECODER_BY_CODING: Final[dict[str, Callable[[], Any]]] = {
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "deflate": _DeflateDecoder,
} | ({} if zstd is None else {"zstd": _ZstdDecoder})
_DECODING_ERRORS: Final = (zlib.error, EOFError) if zstd is None else (zlib.error, EOFError, zstd.ZstdError)


def get_body_coding(request: HttpRequest) -> str | None:
    """Return how a body is compressed; None if it is not. Raises RequestError if it cannot be decoded."""
    if b"content-encoding" not in request.headers.lines_by_name:
        return None
    coding_header = b",".join(request.headers.get_all(b"content-encoding")).strip().lower()
    coding = coding_header.removeprefix(b"x-").decode("latin-1")
    if coding_header in (b"", _IDENTITY):
        return None
    if coding not in _DECODER_BY_CODING:
        accepted_codings = ", ".join(_DECODER_BY_CODING)
        value, expectation = coding_header.decode("latin-1"), accepted_codings.replace(", ", " or ")
        message = bad_value("content-encoding", value, expectation).message
        headers = ((b"accept-encoding", accepted_codings.encode()),)
        raise RequestError(message, code="unsupported_content_encoding", status=415, headers=headers)
    return coding


class BodyDecoder:
    """Decoder of one compressed body. Call `decode_slice` until it returns True, then read `pieces`. Sans-IO."""

    def __init__(self, pieces: Sequence[bytes], coding: str, max_bytes: int) -> None:
        self._coding = coding
        self._max_bytes = max_bytes
        self._input = _iter_slices(pieces)
        self._stream = _DECODER_BY_CODING[coding]()
        self._member_count = 1
        self._unconsumed = b""
        """Input that the stream has not taken."""
        self._body = BodyPieces()
        self.decoded_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes that the decoder keeps besides its input."""
        return self.decoded_bytes + (1 << ZSTD_WINDOW_LOG if self._coding == "zstd" else 0)

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """Pieces of the body as far as it is decoded, at least one."""
        return self._body.to_tuple()

    def decode_slice(self) -> bool:
        """Decode the next slice; return whether the whole body is decoded. Raises RequestError if it is malformed."""
        data = self._unconsumed or next(self._input, b"")
        try:
            output = self._stream.decompress(data, OUTPUT_SLICE_BYTES)
        except _DECODING_ERRORS as error:
            raise self._make_decode_error(str(error)) from None
        self._unconsumed = self._stream.unconsumed_tail
        self._append_output(output)
        if self._stream.eof:
            has_next_member = self._start_next_member()
            return not has_next_member
        if not data and not output:
            raise self._make_decode_error("the compressed body ends too early")
        return False

    def _append_output(self, output: bytes) -> None:
        """Append decoded bytes to the body. Raises RequestError if it is too long."""
        self.decoded_bytes += len(output)
        if self.decoded_bytes > self._max_bytes:
            message = f"request body over {self._max_bytes} bytes, decoded"
            raise RequestError(message, param=None, code="bad_http", status=413)
        self._body.append(output)

    def _start_next_member(self) -> bool:
        """Start to decode the next gzip member or zstd frame; return False if there is no further input."""
        self._unconsumed = self._stream.unused_data or next(self._input, b"")
        if not self._unconsumed:
            return False
        if self._coding == "deflate" or self._member_count == MAX_MEMBERS:
            raise self._make_decode_error("something follows its end")
        self._member_count += 1
        self._stream = _DECODER_BY_CODING[self._coding]()
        return True

    def _make_decode_error(self, reason: str) -> RequestError:
        return RequestError(f"the body is no {self._coding}, as content-encoding says: {reason}", param=None)


async def decode_in_turns(
    request: HttpRequest,
    coding: str,
    bytes_max: int,
    scheduler: FairScheduler,
    tenant: str,
    charge_bytes: Callable[[int], None],
) -> None:
    """Decode the compressed body of a request in slices, so that other requests are served between them.

    `charge_bytes` charges the bytes of the body, both encoded and decoded, to the tenant. It raises RequestError if
    they are too many. A malformed body raises RequestError, too, and one with more than `bytes_max` decoded bytes.
    """
    decoder, encoded_bytes = BodyDecoder(request.pieces, coding, bytes_max), request.body_bytes
    is_done = False
    while not is_done:
        await scheduler.take_turn(tenant)
        is_done = decoder.decode_slice()
        charge_bytes(encoded_bytes + (decoder.decoded_bytes if is_done else decoder.buffered_bytes))
    request.pieces = decoder.pieces
    request.is_decoded = True


def _iter_slices(pieces: Sequence[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), INPUT_SLICE_BYTES):
            yield piece[start : start + INPUT_SLICE_BYTES]
