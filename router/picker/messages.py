"""Envoy's messages as values: what is read out of a ProcessingRequest, and how answers are written.

Pure. Owns the protocol's names (Endpoint Picker Protocol of the Gateway API Inference Extension) and the validation of
headers: what comes over gRPC has passed no HTTP parser that we know of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from prompts.errors import RequestError
from router.http.headers import TOKEN, HeaderBlock
from router.http.request import HttpRequest

ENDPOINTS = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
LB = "envoy.lb"
HINTS, HINT = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
ATTRIBUTES, UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
"""Where Envoy says which worker served, if its configuration asks for the attribute."""
OBJECTIVE = b"x-gateway-inference-objective"
FAIRNESS = b"x-gateway-inference-fairness-id"
REWRITE = b"x-gateway-model-name-rewrite"
PIECE_BYTES = 62_000
"""Of a body in one message: Envoy takes no more."""
UNREAD = ""
"""Path of a request whose body is not seen: only load decides."""

Request = Any
"""A ProcessingRequest: generated classes have no types."""
Response = Any
Header = tuple[bytes, bytes]

_mode = processing_mode_pb2.ProcessingMode.BodySendMode
NONE, STREAMED, BUFFERED, DUPLEX = (
    _mode.Value(name) for name in ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")
)
_METHOD = re.compile(rb"[A-Z]{1,20}")
_PATH = re.compile(rb"/[!-~]*|\*")
_NAME = re.compile(TOKEN)
_VALUE = re.compile(rb"[\t -~\x80-\xff]*")
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def read_head(headers: Any) -> HttpRequest:
    """The request that an HttpHeaders message describes, without its body. Raises RequestError."""
    pseudo: dict[str, bytes] = {}
    pairs: list[Header] = []
    for name, value in _pairs(headers):
        if name.startswith(":"):
            pseudo[name] = value
        else:
            pairs.append((name.encode(), value))
    method, target = pseudo.get(":method", b""), pseudo.get(":path", b"")
    if _METHOD.fullmatch(method) is None or _PATH.fullmatch(target) is None:
        raise _bad(f"{method[:20]!r} {target[:80]!r} is no request")
    if any(_NAME.fullmatch(name) is None or _VALUE.fullmatch(value) is None for name, value in pairs):
        raise _bad("a header that is none")
    path = target.partition(b"?")[0].decode("ascii")
    request = HttpRequest(method.decode(), target, path, HeaderBlock.from_pairs(pairs))
    request.has_body = not headers.end_of_stream
    return request


def read_status(headers: Any) -> tuple[int, bool]:
    """(status, whether it is a stream of events) of an answer's HttpHeaders; status 0 where there is none."""
    status, events = 0, False
    for name, value in _pairs(headers):
        if name == ":status" and value.isdigit() and len(value) == 3:
            status = int(value)
        elif name == "content-type":
            events = b"event-stream" in value
    return status, events


def read_subset_hint(message: Request) -> list[str] | None:
    """The endpoints that may be picked; None where the gateway does not say."""
    if not message.HasField("metadata_context"):
        return None
    hints = message.metadata_context.filter_metadata.get(HINTS)
    if hints is None or HINT not in hints.fields:
        return None
    value = hints.fields[HINT]
    if value.WhichOneof("kind") == "list_value":
        return [item.string_value.strip() for item in value.list_value.values]
    return [text.strip() for text in value.string_value.split(",") if text.strip()]


def read_served_endpoint(message: Request) -> str | None:
    """The endpoint that answered, where Envoy says."""
    metadata = message.metadata_context.filter_metadata.get(LB)
    if metadata is not None and SERVED in metadata.fields:
        return str(metadata.fields[SERVED].string_value) or None
    attributes = message.attributes.get(ATTRIBUTES)
    if attributes is not None and UPSTREAM in attributes.fields:
        return str(attributes.fields[UPSTREAM].string_value) or None
    return None


def build_header_mutation(set_headers: Iterable[Header], removed_headers: Iterable[str] = ()) -> Any:
    """Each header set replaces what was there."""
    options = [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name.decode("ascii"), raw_value=value), append_action=_OVERWRITE
        )
        for name, value in set_headers
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=list(removed_headers))


def set_destination_metadata(response: Response, endpoints: str) -> None:
    """Say it in the metadata too, where load balancing policies look."""
    response.dynamic_metadata.update({LB: {ENDPOINTS: endpoints}})


def split_body(pieces: Iterable[bytes], ends: bool) -> Iterator[Any]:
    """A body as BodyResponses of at most PIECE_BYTES; the last says that it is, unless trailers follow."""
    slices = [piece[at : at + PIECE_BYTES] for piece in pieces for at in range(0, len(piece), PIECE_BYTES)]
    for number, slice_bytes in enumerate(slices or [b""], 1):
        streamed_response = pb.StreamedBodyResponse(body=slice_bytes, end_of_stream=ends and number >= len(slices))
        yield pb.BodyResponse(
            response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=streamed_response))
        )


def build_immediate_response(status: int, headers: Iterable[Header], body: bytes) -> Response:
    """An answer of our own instead of a worker's."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status={"code": status}, headers=build_header_mutation(headers), body=body
        )
    )


def _pairs(headers: Any) -> Iterator[tuple[str, bytes]]:
    for header in headers.headers.headers:
        yield header.key.lower(), (header.raw_value or header.value.encode()).strip(b" \t")


def _bad(message: str) -> RequestError:
    return RequestError(message, param=None, code="bad_http", status=400)
