"""Read Envoy's ProcessingRequests and build ProcessingResponses. No I/O.

Has the names of the Endpoint Picker Protocol (Gateway API Inference Extension), and validates headers: no known HTTP
parser has checked them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from prompts.errors import RequestError
from router.http.headers import TOKEN_PATTERN, HeaderBlock
from router.http.request import HttpRequest

DESTINATION_HEADER = "x-gateway-destination-endpoint"
SERVED_ENDPOINT_FIELD = "x-gateway-destination-endpoint-served"
LOAD_BALANCER_METADATA = "envoy.lb"
SUBSET_HINT_METADATA, SUBSET_HINT_FIELD = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
EXT_PROC_ATTRIBUTES, UPSTREAM_ADDRESS_ATTRIBUTE = "envoy.filters.http.ext_proc", "upstream.address"
"""Attribute with the worker that answered, where Envoy's configuration asks for it."""
OBJECTIVE_HEADER = b"x-gateway-inference-objective"
FAIRNESS_HEADER = b"x-gateway-inference-fairness-id"
MODEL_REWRITE_HEADER = b"x-gateway-model-name-rewrite"
PIECE_BYTES = 62_000
"""Most bytes of a body that Envoy accepts in one message."""
UNREAD_BODY_PATH = ""
"""Path that replaces the real one where the body is not seen, so that only load decides."""

Request = Any
"""A ProcessingRequest or a message in it: generated classes have no types."""
Response = Any
Header = tuple[bytes, bytes]

_mode = processing_mode_pb2.ProcessingMode.BodySendMode
NONE, STREAMED, BUFFERED, DUPLEX = (
    _mode.Value(name) for name in ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")
)
_METHOD_PATTERN = re.compile(rb"[A-Z]{1,20}")
_PATH_PATTERN = re.compile(rb"/[!-~]*|\*")
_NAME_PATTERN = re.compile(TOKEN_PATTERN)
_VALUE_PATTERN = re.compile(rb"[\t -~\x80-\xff]*")
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def read_head(headers: Any) -> HttpRequest:
    """Convert Envoy's message about the head of a request (HttpHeaders) to a request, yet without its body.

    HTTP/2 has the method and the path in the pseudo-headers `:method` and `:path`. Raises RequestError if the head is
    malformed.
    """
    pseudo_headers: dict[str, bytes] = {}
    pairs: list[Header] = []
    for name, value in _iter_headers(headers):
        if name.startswith(":"):
            pseudo_headers[name] = value
            continue
        is_valid = _NAME_PATTERN.fullmatch(name.encode()) and _VALUE_PATTERN.fullmatch(value)
        if not is_valid:
            raise _make_bad_request_error(f"a malformed header: {name[:80]!r}")
        pairs.append((name.encode(), value))
    method, target = pseudo_headers.get(":method", b""), pseudo_headers.get(":path", b"")
    if _METHOD_PATTERN.fullmatch(method) is None or _PATH_PATTERN.fullmatch(target) is None:
        raise _make_bad_request_error(f"{method[:20]!r} {target[:80]!r} is not a method and a path")
    path = target.partition(b"?")[0].decode("ascii")
    request = HttpRequest(method.decode(), target, path, HeaderBlock.from_pairs(pairs))
    request.has_body = not headers.end_of_stream
    return request


def read_status(headers: Any) -> int:
    """Return the status of an answer; 0 if it has none."""
    status = next((value for name, value in _iter_headers(headers) if name == ":status"), b"")
    return int(status) if status.isdigit() and len(status) == 3 else 0


def read_subset_hint(message: Request) -> list[str] | None:
    """Return the endpoints that may be chosen; None if the gateway does not restrict them."""
    if not message.HasField("metadata_context"):
        return None
    hints = message.metadata_context.filter_metadata.get(SUBSET_HINT_METADATA)
    if hints is None or SUBSET_HINT_FIELD not in hints.fields:
        return None
    value = hints.fields[SUBSET_HINT_FIELD]
    if value.WhichOneof("kind") == "list_value":
        return [item.string_value.strip() for item in value.list_value.values]
    return [text.strip() for text in value.string_value.split(",") if text.strip()]


def read_served_endpoint(message: Request) -> str | None:
    """Return the endpoint that answered; None if Envoy does not tell."""
    metadata = message.metadata_context.filter_metadata.get(LOAD_BALANCER_METADATA)
    if metadata is not None and SERVED_ENDPOINT_FIELD in metadata.fields:
        return str(metadata.fields[SERVED_ENDPOINT_FIELD].string_value) or None
    attributes = message.attributes.get(EXT_PROC_ATTRIBUTES)
    if attributes is not None and UPSTREAM_ADDRESS_ATTRIBUTE in attributes.fields:
        return str(attributes.fields[UPSTREAM_ADDRESS_ATTRIBUTE].string_value) or None
    return None


def build_header_mutation(set_headers: Iterable[Header], removed_headers: Iterable[str] = ()) -> Any:
    """Build a mutation that replaces and removes headers."""
    options = [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name.decode("ascii"), raw_value=value), append_action=_OVERWRITE
        )
        for name, value in set_headers
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=list(removed_headers))


def set_destination_metadata(response: Response, endpoints: str) -> None:
    """Set the endpoints in the metadata, where load balancing policies look for them."""
    response.dynamic_metadata.update({LOAD_BALANCER_METADATA: {DESTINATION_HEADER: endpoints}})


def split_body(pieces: Iterable[bytes], ends: bool) -> Iterator[Any]:
    """Yield a body as BodyResponses of at most PIECE_BYTES. `ends`: no trailers follow the last one."""
    slices = [piece[start : start + PIECE_BYTES] for piece in pieces for start in range(0, len(piece), PIECE_BYTES)]
    for number, slice_bytes in enumerate(slices or [b""], 1):
        streamed_response = pb.StreamedBodyResponse(body=slice_bytes, end_of_stream=ends and number >= len(slices))
        yield pb.BodyResponse(
            response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed_response))
        )


def build_immediate_response(status: int, headers: Iterable[Header], body: bytes) -> Response:
    """Build an answer of the router, which replaces a worker's."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status={"code": status}, headers=build_header_mutation(headers), body=body
        )
    )


def _iter_headers(headers: Any) -> Iterator[tuple[str, bytes]]:
    for header in headers.headers.headers:
        yield header.key.lower(), (header.raw_value or header.value.encode()).strip(b" \t")


def _make_bad_request_error(message: str) -> RequestError:
    return RequestError(message, param=None, code="bad_http", status=400)
