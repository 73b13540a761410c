"""Headers by which a client controls routing, and the model that its request names."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from prompts.errors import bad_value
from router.http.request import HttpRequest
from router.prompting.encode import NAME_BYTES_MAX
from router.prompting.sessions import NameByMeaning, SessionNames

_HEADER_NAMES: Final = frozenset(
    b"x-blockcast-" + name for name in (b"priority", b"deadline-ms", b"ttft-ms", b"worker", b"role", b"explain")
)
_MS_OF_DAY: Final = 86_400_000


class RoutingHeaders(msgspec.Struct, eq=False):
    """HTTP headers by which a client controls the routing of its request."""

    model: str | None = None
    """Model that replaces the one in the body."""
    session: NameByMeaning = msgspec.field(default_factory=dict)
    """Names in headers: of the session, its agent, and what started them; and whether this is its last request."""
    priority: int | None = None
    """Priority that replaces the one in the body."""
    deadline_ms: int | None = None
    """Longest time that the request may wait in the router."""
    ttft_ms: int | None = None
    """Longest predicted time to first token with which the request is accepted."""
    worker: str | None = None
    """Id of the only worker that may answer."""
    role: str | None = None
    """Role of the workers that may answer, such as `prefill`."""
    wants_explanation: bool = False
    """Whether the client asks why its prompt was not cached."""


def read_routing_headers(
    request: HttpRequest, session_names: SessionNames, model_header: bytes | None
) -> RoutingHeaders:
    """Read the headers by which a client controls routing. Raises RequestError for a value that cannot be read.

    `session_names`: headers that name sessions. `model_header`: the one by which a gateway names the model.
    """
    headers, header_names = RoutingHeaders(), request.headers.lines_by_name
    model = None if model_header is None else request.get_header(model_header)
    if model:
        headers.model = model[:NAME_BYTES_MAX].decode("utf-8", "replace")
    has_session_headers = not session_names.header_names.isdisjoint(header_names)
    if has_session_headers:
        headers.session = session_names.read_headers(request.headers.get)
    has_routing_headers = not _HEADER_NAMES.isdisjoint(header_names)
    if has_routing_headers:
        headers.priority = _parse_integer_header(request, b"x-blockcast-priority", -(2**31), 2**31 - 1)
        headers.deadline_ms = _parse_integer_header(request, b"x-blockcast-deadline-ms", 1, _MS_OF_DAY)
        headers.ttft_ms = _parse_integer_header(request, b"x-blockcast-ttft-ms", 1, _MS_OF_DAY)
        headers.worker = _decode_header(request.get_header(b"x-blockcast-worker"))
        headers.role = _decode_header(request.get_header(b"x-blockcast-role"))
        headers.wants_explanation = _parse_integer_header(request, b"x-blockcast-explain", 0, 1) == 1
    return headers


class ResolvedModel(msgspec.Struct, frozen=True, gc=False):
    """The model that a request names, as workers serve it."""

    name: str
    base_model: str
    lora: str | None = None
    tokens_max: int | None = None
    """Longest context in tokens; None if it is unknown."""
    is_renamed: bool = False
    """Whether the request names a model, and its body has another one or none."""


def _parse_integer_header(request: HttpRequest, name: bytes, low: int, high: int) -> int | None:
    value = request.get_header(name)
    if value is None:
        return None
    if re.fullmatch(rb"-?[0-9]{1,10}", value) is None or not low <= int(value) <= high:
        raise bad_value(name.decode(), value.decode("latin-1"), f"an integer from {low} to {high}")
    return int(value)


def _decode_header(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value else None
