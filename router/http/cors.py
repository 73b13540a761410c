"""Cross-origin requests: which origins may call this API, and the headers that tell browsers so. No I/O.

A browser asks first (`OPTIONS`, without a key) and shows a page only the answers that name its origin (Fetch, section
3.3). Pages send keys themselves, so no cookie is ever allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from router.http.request import HttpRequest

ANY_ORIGIN: Final = b"*"
USUAL_HEADERS: Final = b"authorization, content-type, x-api-key"
"""Headers that are allowed to a request that names none."""
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
"""All CORS headers of answers. Those of a worker are removed, as a browser refuses an answer that has them twice."""


class CorsPolicy:
    """Decides which web pages may call this API from a browser, and builds the response headers that say so (CORS)."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def build_header_lines(self, request: HttpRequest, methods: Iterable[str] = ()) -> bytes:
        """Return the CORS header lines of the answer to a request. They allow nothing to an unknown origin.

        A browser first asks by an OPTIONS request what is allowed. Only that answer names `methods`, those of the path.
        """
        origin = request.get_header(b"origin")
        allows_any = ANY_ORIGIN in self._origins
        if origin is None or not (allows_any or origin.lower() in self._origins):
            return b"vary: origin\r\n"
        header_lines = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % (ANY_ORIGIN if allows_any else origin)
        header_lines += b"access-control-expose-headers: %b\r\n" % EXPOSED_HEADERS
        if request.method == "OPTIONS":
            allowed_methods = ", ".join(sorted(methods)).encode()
            allowed_headers = request.get_header(b"access-control-request-headers") or USUAL_HEADERS
            header_lines += b"access-control-allow-methods: %b\r\n" % allowed_methods
            header_lines += b"access-control-allow-headers: %b\r\n" % allowed_headers
            header_lines += b"access-control-max-age: %d\r\n" % MAX_AGE_S
        return header_lines
