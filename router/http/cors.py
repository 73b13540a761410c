"""Cross-origin requests: which origins may call this API, and the headers that tell browsers so. No I/O.

A browser asks first (`OPTIONS`, without a key) and shows a page only the answers that name its origin (Fetch, section
3.3). Pages send keys themselves, so no cookie is ever allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from router.http.request import HttpRequest

ANY_ORIGIN: Final = b"*"
MAX_AGE_S: Final = 600
"""Time for which a browser may remember what it was allowed."""
EXPOSED_HEADERS: Final = b"x-request-id, x-blockcast-worker, x-blockcast-predicted-cached-tokens, retry-after"
CORS_HEADERS: Final = frozenset((
    b"access-control-allow-credentials",
    b"access-control-allow-headers",
    b"access-control-allow-methods",
    b"access-control-allow-origin",
    b"access-control-expose-headers",
    b"access-control-max-age",
))  # fmt: skip
"""Headers that only one server of an answer may set."""


class CorsPolicy:
    """Origins that are allowed; none by default."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def build_header_lines(self, request: HttpRequest, methods: Iterable[str] = ()) -> bytes:
        """Return the header lines of an answer; empty if the origin of its request is not allowed.

        `methods` are those of the path, for a request that asks what is allowed.
        """
        if not self._origins:
            return b""
        origin = request.get_header(b"origin")
        if origin is None or not (ANY_ORIGIN in self._origins or origin.lower() in self._origins):
            return b"vary: origin\r\n"
        template = b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: %b\r\n"
        header_lines = template % (ANY_ORIGIN if ANY_ORIGIN in self._origins else origin, EXPOSED_HEADERS)
        if request.method != "OPTIONS":
            return header_lines
        requested_headers = (
            request.get_header(b"access-control-request-headers") or b"authorization, content-type, x-api-key"
        )
        return header_lines + b"access-control-allow-methods: %b\r\naccess-control-allow-headers: %b\r\n" % (
            ", ".join(sorted(methods)).encode(), requested_headers,
        ) + b"access-control-max-age: %d\r\n" % MAX_AGE_S  # fmt: skip
