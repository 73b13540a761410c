"""Build the heads that are forwarded, of a request to its worker and of an answer to the client.

Decides which headers are removed and which are added; all others are forwarded as they came. Pure: bytes in, bytes out.
"""

from __future__ import annotations

from prompts.worker_fields import WORKER_HEADERS
from router.decide.messages import Decision
from router.edge.request_context import RequestContext
from router.edge.upstream import Endpoint
from router.http.cors import CORS_HEADERS
from router.http.headers import HOP_BY_HOP
from router.http.response import ResponseHead
from router.prompting.body_fields import Body

_REQUEST_HEADERS_REMOVED = frozenset((
    *HOP_BY_HOP, b"host", b"accept-encoding", b"content-encoding", b"content-length", b"expect", b"x-request-id",
    b"x-blockcast-explain", *(name.encode() for name in WORKER_HEADERS),
))  # fmt: skip
"""Headers of requests that are never forwarded. `accept-encoding` is one of them: answers are read for usage and
tokens, so they must not be compressed."""
RANK_HEADER = "x-data-parallel-rank"
_KEY_HEADERS, _TRACE_HEADERS = frozenset({b"authorization", b"x-api-key"}), frozenset({b"traceparent"})
_REMOVED_HEADERS = {
    (False, False): _REQUEST_HEADERS_REMOVED,
    (False, True): _REQUEST_HEADERS_REMOVED | _TRACE_HEADERS,
    (True, False): _REQUEST_HEADERS_REMOVED | _KEY_HEADERS,
    (True, True): _REQUEST_HEADERS_REMOVED | _KEY_HEADERS | _TRACE_HEADERS,
}
"""Removed headers, by whether the client's API key is replaced, and whether its `traceparent` is."""
_RESPONSE_HEADERS_REMOVED = frozenset((
    *HOP_BY_HOP, b"content-length", b"x-request-id", b"x-blockcast-worker", b"x-blockcast-predicted-cached-tokens",
))  # fmt: skip


def build_request_head(
    context: RequestContext,
    endpoint: Endpoint,
    body: Body,
    *,
    path: bytes | None,
    authorization: bytes | None,
    rank: int | None,
    allowed_headers: frozenset[str],
) -> bytes:
    """Return the request line and the headers with which a client's request is forwarded to the worker at `endpoint`.

    `path`: path and query; None: the client's. `authorization`: replaces the client's keys; empty: send no key; None:
    forward the client's. `rank`: data-parallel rank that answers. `allowed_headers`: internal headers of workers that
    clients may set. `body` is not included.
    """
    request, traceparent = context.request, None if context.span is None else context.span.traceparent
    replaces_key, replaces_trace = authorization is not None, traceparent is not None
    removed_headers = _REMOVED_HEADERS[replaces_key, replaces_trace]
    if allowed_headers:
        removed_headers -= {name.encode() for name in allowed_headers if rank is None or name != RANK_HEADER}
    added_lines = b""
    if traceparent is not None:
        added_lines += b"traceparent: %b\r\n" % traceparent
    if authorization:
        added_lines += b"authorization: %b\r\n" % authorization
    if rank is not None:
        added_lines += b"x-data-parallel-rank: %d\r\n" % rank
    body_bytes = len(body[0]) if len(body) == 1 else sum(map(len, body))
    if body_bytes or request.method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        added_lines += b"content-length: %d\r\n" % body_bytes
    return b"%b %b%b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n%b%b\r\n" % (
        request.method.encode(), endpoint.path_prefix, request.target if path is None else path,
        endpoint.authority, context.trace_id, request.headers.join_lines_without(removed_headers), added_lines,
    )  # fmt: skip


def build_response_head(
    head: ResponseHead,
    trace_id: bytes,
    decision: Decision | None,
    *,
    is_chunked: bool,
    keep_alive: bool,
    cors_headers: bytes = b"",
) -> bytes:
    """Return the status line and the headers for the client, made from the head of a worker's response.

    `trace_id` is sent as x-request-id. A `decision` adds headers with the worker and the predicted cached tokens.
    `is_chunked`: whether the client gets the body in chunks. `cors_headers`: header lines that replace the
    worker's CORS headers.
    """
    added_lines = b"x-request-id: %b\r\n" % trace_id
    if decision is not None:
        added_lines += b"x-blockcast-worker: %b\r\nx-blockcast-predicted-cached-tokens: %d\r\n" % (
            decision.worker.encode(), decision.predicted_cached_tokens,
        )  # fmt: skip
    framing_line = b""
    if is_chunked:
        framing_line = b"transfer-encoding: chunked\r\n"
    elif head.content_length is not None:
        framing_line = b"content-length: %d\r\n" % head.content_length
    connection_line = b"" if keep_alive else b"connection: close\r\n"
    removed_headers = _RESPONSE_HEADERS_REMOVED | CORS_HEADERS if cors_headers else _RESPONSE_HEADERS_REMOVED
    return b"HTTP/1.1 %b\r\n%b%b%b%b%b\r\n" % (
        head.status_and_reason, added_lines, head.headers.join_lines_without(removed_headers), cors_headers,
        framing_line, connection_line,
    )  # fmt: skip
