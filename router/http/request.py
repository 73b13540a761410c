"""Bytes of one client connection -> complete HTTP/1.1 requests. Sans-IO: no socket, no clock, no routing.

Owns the syntax and the bounds of what a client may send. Knows nothing of OpenAI and answers nothing itself: what
cannot be read becomes a `BadRequest` that carries the status to answer with, after which the connection must close.

Invariants:
* A request leaves only when its body is complete, so whoever forwards it states the length anew: a message whose
  length could be read in two ways (RFC 9112 section 6.3: both framings, two lengths, a folded header, an odd chunk
  size) never reaches a worker.
* Head and body are bounded while they arrive, not after.

The usual request, complete in one read and without anything remarkable in its head, is recognised by one strict
pattern; everything else, and every mistake, goes through llhttp. What the pattern accepts, llhttp accepts with the same
meaning.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

import httptools

from router.http.headers import LINES, HeaderBlock, Template

_USUAL = re.compile(rb"(POST|GET|DELETE|HEAD) (/[!-~]*) HTTP/1\.1\r\n(" + LINES + rb")\r\n")
_REMARKABLE = re.compile(
    rb"\n(?:transfer-encoding|expect|upgrade|connection:(?! *(?:keep-alive|close)\r))", re.IGNORECASE
)
_LENGTH = re.compile(rb"(?:0|[1-9][0-9]{0,15})\Z")

PIPELINED_MAX = 64
"""Requests that one read may complete; a client that sends more before it reads an answer is cut off."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may send, in bytes."""

    head_bytes_max: int = 64 * 1024
    headers_max: int = 128
    body_bytes_max: int = 64 * 1024 * 1024


class BadRequest(Exception):
    """The client broke HTTP or a bound: answer `status` and close."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class HttpRequest:
    """One complete request."""

    __slots__ = ("body", "headers", "http_1_0", "keep_alive", "method", "path", "target")

    def __init__(self, method: str, target: bytes, path: str, headers: HeaderBlock) -> None:
        self.method = method
        self.target = target
        """Path and query as sent; what is forwarded."""
        self.path = path
        self.headers = headers
        """The length in them may be another request's: what counts is `len(body)`."""
        self.body = b""
        self.keep_alive = True
        self.http_1_0 = False

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (lower-case), or None."""
        return self.headers.get(name)


class RequestParser:
    """Feed bytes, take requests. One instance a connection; unusable after `BadRequest`."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_current",
        "_done",
        "_expects_continue",
        "_failure",
        "_head_bytes",
        "_headers",
        "_limits",
        "_parser",
        "_target",
        "_template",
        "_upgrade_left",
    )

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._done: deque[HttpRequest] = deque()
        self._failure: BadRequest | None = None
        self._upgrade_left = 0
        self._template: Template[HttpRequest] | None = None
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._current: HttpRequest | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._expects_continue = False

    @property
    def midway(self) -> bool:
        """Part of a request has arrived, and not all of it."""
        return self._current is not None or self._head_bytes > 0

    @property
    def pending(self) -> bool:
        """A complete request waits in `pop()`."""
        return bool(self._done)

    def take_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body that is to come; True at most once."""
        wants = self._expects_continue and self._current is not None and self._body_bytes == 0
        self._expects_continue = False
        return wants

    def feed(self, data: bytes) -> None:
        """Read on. Complete requests wait in `pop()`. Raises `BadRequest`, also for requests that came before it."""
        if self._upgrade_left:
            data = self._read_upgrade_body(data)
            if not data:
                return
        if self._current is None:
            if self._head_bytes == 0 and self._take_usual(data):
                return
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError:
            if self._failure is None:
                raise
            raise self._failure from None
        except httptools.HttpParserError as error:
            raise BadRequest(400, f"malformed HTTP request: {error}") from None
        if self._current is None and self._head_bytes > self._limits.head_bytes_max:
            raise BadRequest(431, f"request head over {self._limits.head_bytes_max} bytes")

    def pop(self) -> HttpRequest | None:
        """The oldest complete request that was not taken yet."""
        return self._done.popleft() if self._done else None

    def _take_usual(self, data: bytes) -> bool:
        """Take `data` if it is exactly one request of the usual kind."""
        template = self._template
        found = template.match(data) if template is not None else None
        if found is None:
            template = self._learn(data)
            found = template.match(data) if template is not None else None
        if template is None or found is None:
            return False
        end, length = found
        size = len(data) - end
        if size != (length or 0) or size > self._limits.body_bytes_max or len(self._done) >= PIPELINED_MAX:
            return False
        known = template.value
        request = HttpRequest(known.method, known.target, known.path, known.headers)
        request.keep_alive = known.keep_alive
        request.body = data[end:]
        self._done.append(request)
        return True

    def _learn(self, data: bytes) -> Template[HttpRequest] | None:
        """The template of the head that `data` begins with, if it is of the usual kind."""
        found = _USUAL.match(data)
        if found is None:
            return None
        end = found.end()
        headers = HeaderBlock(found[3])
        lengths = headers.all(b"content-length")
        if (
            end > self._limits.head_bytes_max
            or len(lengths) > 1
            or (lengths and not _LENGTH.match(lengths[0]))
            or len(headers.all(b"host")) != 1
            or headers.raw.count(b"\n") > self._limits.headers_max
            or _REMARKABLE.search(data, 0, end) is not None
        ):
            return None
        request = HttpRequest(found[1].decode(), found[2], _path(found[2]), headers)
        request.keep_alive = (headers.get(b"connection") or b"").lower() != b"close"
        self._template = Template(data[:end], request)
        return self._template

    # httptools calls these while it reads.

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if len(headers) >= self._limits.headers_max:
            if self._current is not None:
                return  # trailers are dropped with the chunked framing they came in
            self._fail(431, f"more than {self._limits.headers_max} headers")
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        limits = self._limits
        headers = self._headers
        method = parser.get_method().decode("latin-1")
        request = HttpRequest(method, self._target, _path(self._target), HeaderBlock.of(headers))
        request.keep_alive = parser.should_keep_alive()
        version = parser.get_http_version()
        request.http_1_0 = version == "1.0"
        if version not in ("1.1", "1.0"):
            self._fail(505, f"HTTP/{version} is not spoken here")
        if len(self._target) + sum(len(name) + len(value) for name, value in headers) > limits.head_bytes_max:
            self._fail(431, f"request head over {limits.head_bytes_max} bytes")
        hosts = 0
        for name, value in headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                if int(value) > limits.body_bytes_max:
                    self._fail(413, f"request body over {limits.body_bytes_max} bytes")
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    self._fail(501, "transfer-encoding: only chunked is understood")
                if request.http_1_0:
                    self._fail(400, "transfer-encoding in an HTTP/1.0 request")
            elif name == b"expect":
                if value.strip().lower() != b"100-continue":
                    self._fail(417, "expect: only 100-continue is understood")
                self._expects_continue = not request.http_1_0
        if hosts > 1 or (hosts == 0 and not request.http_1_0):
            self._fail(400, "exactly one Host header is needed")
        if not self._target.startswith(b"/") and self._target != b"*":
            self._fail(400, "the request target must be a path")
        self._current = request

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes_max:
            self._fail(413, f"request body over {self._limits.body_bytes_max} bytes")
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = self._current
        assert request is not None
        if self._parser.should_upgrade() and self._declared_length(request):
            return  # the parser takes the body for another protocol's; _ignore_upgrade reads it
        self._complete(request)

    def _complete(self, request: HttpRequest) -> None:
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        if len(self._done) >= PIPELINED_MAX:
            self._fail(400, f"more than {PIPELINED_MAX} requests sent ahead of their answers")
        self._done.append(request)
        self._reset()

    def _fail(self, status: int, message: str) -> None:
        self._failure = BadRequest(status, message)
        raise self._failure

    def _declared_length(self, request: HttpRequest) -> int:
        if request.header(b"transfer-encoding") is not None:
            self._fail(400, "a chunked body with an Upgrade offer")
        return int(request.header(b"content-length") or 0)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 after an `Upgrade` offer, which RFC 9110 section 7.8 lets a server ignore.

        Java's client and `curl --http2` offer h2c with ordinary requests, and the parser stops there.
        """
        self._parser = httptools.HttpRequestParser(self)
        request = self._current
        if request is None:  # no body: it is complete already
            taken = self._done[-1]
            if taken.method == "CONNECT":
                raise BadRequest(405, "CONNECT is not served")
        else:
            self._upgrade_left = self._declared_length(request)
            rest = self._read_upgrade_body(rest)
        if rest:
            self.feed(rest)

    def _read_upgrade_body(self, data: bytes) -> bytes:
        part = data[: self._upgrade_left]
        self._upgrade_left -= len(part)
        try:
            if part:
                self.on_body(part)
            if self._upgrade_left == 0 and self._current is not None:
                self._complete(self._current)
        except BadRequest as error:
            raise BadRequest(error.status, error.message) from None
        return data[len(part) :]


def _path(target: bytes) -> str:
    return target.partition(b"?")[0].decode("latin-1")
