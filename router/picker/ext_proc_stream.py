"""The ext_proc stream of one request: ProcessingRequests in, ProcessingResponses out, in the order that Envoy expects.

    request headers -> [body ...] -> [trailers] -> (chosen or refused) -> answer's headers -> [body ...] -> [trailers]

The gateway decides how the body comes (`protocol_config` of the first message; without one, FULL_DUPLEX_STREAMED):

* FULL_DUPLEX_STREAMED: nothing is answered until the body's end; then the headers, the body again in pieces, trailers.
* BUFFERED: the headers pass at once; the one message with the body is answered with the choice.
* NONE, STREAMED, BUFFERED_PARTIAL: the choice is made on the headers; what follows passes.

An `ExtProcHandler` makes the choice. An answer without a request, which another filter made, passes. A message that
Envoy must not send raises `UnexpectedMessage` and changes nothing. No I/O, no clock."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from prompts.errors import RequestError
from router.http.body_pieces import BodyPieces
from router.http.request import HttpRequest
from router.picker.messages import (
    BUFFERED,
    DESTINATION_HEADER,
    DUPLEX,
    NONE,
    UNREAD_BODY_PATH,
    Header,
    Request,
    Response,
    build_header_mutation,
    build_immediate_response,
    read_head,
    read_served_endpoint,
    read_status,
    read_subset_hint,
    set_destination_metadata,
    split_body,
)


class UnexpectedMessage(Exception):
    """The gateway sent a message that is not allowed in this phase."""


class Phase(enum.Enum):
    """Phase of a request."""

    HEAD = "head"
    BODY = "body"
    CHOOSING = "choosing"
    CHOSEN = "chosen"
    ANSWER = "answer"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Choice:
    """The endpoints that a request is sent to, and changes of its headers."""

    endpoints: Sequence[str]
    """Endpoints `ip:port`: the chosen one, then fallbacks in their order."""
    set_headers: Sequence[Header] = ()
    removed_headers: Sequence[str] = ()


class AnswerReader(Protocol):
    """Interface of the object that an `ExtProcStream` tells of the answer of the chosen endpoint."""

    def response_started(self, status: int, served_by: str | None) -> Sequence[Header]:
        """Return headers for the client. `served_by`: endpoint that answers; None if Envoy does not tell."""

    def response_content(self, data: bytes) -> None:
        """Take bytes of the answer's body. Not called if Envoy does not send the body."""

    def response_ended(self) -> None:
        """Handle the end of the answer."""


class ExtProcHandler(Protocol):
    """Interface of the object that chooses an endpoint for the request of an `ExtProcStream`."""

    def request_complete(self, request: HttpRequest) -> None:
        """Choose an endpoint, now or later, by `choose` or `refuse` of the stream."""

    def request_cancelled(self) -> None:
        """Choose no endpoint any more: Envoy, or another of its filters, answers the request itself."""

    def charge_body_bytes(self, size: int) -> None:
        """Charge the bytes of the body that are kept. Raises RequestError if they are too many."""


class ExtProcStream:
    """State of the ext_proc stream of one request.

    Pass each message of Envoy to `receive`, which calls the handler. The handler calls `choose` or `refuse`, at once or
    later. Then send what `pop_responses` returns. The answer is shown to `answer_reader`.
    """

    def __init__(self, handler: ExtProcHandler, body_bytes_max: int) -> None:
        """Make a stream before its first message. `handler` chooses the endpoint.

        `body_bytes_max`: a longer body of a request is refused.
        """
        self._handler = handler
        self.answer_reader: AnswerReader | None = None
        """Set once somebody answers the request; None if nobody is told of the answer."""
        self._body_bytes_max = body_bytes_max
        self._responses: list[Response] = []
        """Messages for Envoy that are not sent yet."""
        self.phase = Phase.HEAD
        # How Envoy sends the bodies of the request and of the response.
        self._request_mode = DUPLEX
        self._response_mode = DUPLEX

        self.request: HttpRequest | None = None
        """The request, with its head and maybe not all of its body; None before the head."""
        self.allowed_endpoints: list[str] | None = None
        """Endpoints that may be chosen; None for all."""
        self._is_head_answered = False
        """Whether Envoy was told to go on after the head, before a worker was chosen."""
        self._body = BodyPieces()
        """Body of the request, as far as it has come."""
        self._original_pieces: tuple[bytes, ...] = ()
        """Body of the complete request, before the handler changed it."""
        self._has_trailers = False

    @property
    def sees_response_body(self) -> bool:
        """Whether Envoy sends the body of the answer."""
        return bool(self._response_mode != NONE)

    def pop_responses(self) -> list[Response]:
        """Return the messages to send, and forget them."""
        responses, self._responses = self._responses, []
        return responses

    def receive(self, message: Request) -> None:
        """Process a message of Envoy about a part of the request or of its response.

        Raises UnexpectedMessage for a fault of Envoy, and RequestError for one of the client.
        """
        message_kind = message.WhichOneof("request")
        if message_kind == "request_headers":
            self._handle_request_headers(message)
        elif message_kind == "request_body":
            self._handle_request_body(message.request_body)
        elif message_kind == "request_trailers":
            self._handle_request_trailers()
        elif message_kind == "response_headers":
            self._handle_response_headers(message)
        elif message_kind == "response_body":
            self._handle_response_body(message.response_body)
        elif message_kind == "response_trailers":
            self._expect_phase(message_kind, Phase.HEAD, Phase.CHOSEN, Phase.ANSWER)
            self._responses.append(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
            self._end()
        else:
            raise UnexpectedMessage("a message without a request in it")

    def choose(self, choice: Choice) -> None:
        """Tell Envoy the endpoint that was chosen for the complete request.

        If Envoy streamed the request's body to the router, the body is sent back.
        """
        request = self.request
        assert self.phase is Phase.CHOOSING, f"chosen while {self.phase.value}"
        assert request is not None
        self.phase = Phase.CHOSEN
        self._responses.append(self._build_choice_response(request, choice))
        is_body_streamed = self._request_mode == DUPLEX and request.has_body
        if is_body_streamed:
            for body in split_body(request.pieces, ends=not self._has_trailers):
                self._responses.append(pb.ProcessingResponse(request_body=body))
            if self._has_trailers:
                self._responses.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._release_body()

    def _build_choice_response(self, request: HttpRequest, choice: Choice) -> Response:
        """Return the message that has Envoy send the request to the chosen endpoints, with the changed headers.

        The message replies to the head of the request. If Envoy buffers bodies, the head was answered already to get
        the body. Then the message replies to the body, and contains the new body if the router changed it.
        """
        endpoints = ",".join(choice.endpoints)
        set_headers = [(DESTINATION_HEADER.encode(), endpoints.encode()), *choice.set_headers]
        has_new_body = self._is_head_answered and request.pieces is not self._original_pieces
        if has_new_body and b"content-length" in request.headers.lines_by_name:
            set_headers.append((b"content-length", b"%d" % request.body_bytes))
        common_response = pb.CommonResponse(
            header_mutation=build_header_mutation(set_headers, choice.removed_headers), clear_route_cache=True
        )
        if has_new_body:
            common_response.body_mutation.body = b"".join(request.pieces)
        if self._is_head_answered:
            response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common_response))
        else:
            response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common_response))
        set_destination_metadata(response, endpoints)
        return response

    def refuse(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Answer the client instead of a worker."""
        assert self.phase in (Phase.HEAD, Phase.BODY, Phase.CHOOSING), f"refused while {self.phase.value}"
        self.phase = Phase.OVER
        self._responses = [build_immediate_response(status, headers, body)]
        self._release_body()

    def close(self) -> None:
        """Forget the request, as its handler refers to this stream: the cycle lives until a full collection."""
        self.phase, self.request, self.answer_reader, self._responses = Phase.OVER, None, None, []
        self._release_body()

    def _handle_request_headers(self, message: Request) -> None:
        """Read the head of the request, and choose an endpoint by it unless Envoy sends a body first."""
        self._expect_phase("request_headers", Phase.HEAD)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self.allowed_endpoints = read_subset_hint(message)
        request = read_head(message.request_headers)
        self.request = request
        self.phase = Phase.BODY
        sees_body = request.has_body and self._request_mode in (DUPLEX, BUFFERED)
        if not sees_body:
            if request.method not in ("GET", "HEAD", "DELETE"):
                request.path = UNREAD_BODY_PATH
            self._complete(request)
        elif self._request_mode == BUFFERED:
            self._is_head_answered = True
            self._responses.append(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))

    def _handle_request_body(self, body: Request) -> None:
        """Store a part of the request's body. Once the body is complete, have the handler choose an endpoint.

        `body`: an `HttpBody` message of Envoy. Raises RequestError for a body that is too long.
        """
        self._expect_phase("request_body", Phase.BODY, Phase.CHOSEN, Phase.ANSWER)
        if self.phase is not Phase.BODY:  # the choice was made by the head alone, so the body passes
            if self._request_mode in (DUPLEX, BUFFERED):  # then the choice waited for the whole body
                raise UnexpectedMessage("a request's body after its end")
            self._responses.append(pb.ProcessingResponse(request_body=pb.BodyResponse()))
            return
        assert self.request is not None
        body_bytes = self._body.byte_count + len(body.body)
        if body_bytes > self._body_bytes_max:
            raise RequestError(f"request body over {self._body_bytes_max} bytes", param=None, status=413)
        self._body.append(body.body)
        self._handler.charge_body_bytes(body_bytes)
        is_last = body.end_of_stream or body.end_of_stream_without_message
        if is_last or self._request_mode == BUFFERED:  # a buffered body comes in one message
            self._complete(self.request)

    def _handle_request_trailers(self) -> None:
        self._expect_phase("request_trailers", Phase.BODY, Phase.CHOSEN, Phase.ANSWER)
        if self.phase is Phase.BODY and self.request is not None and self._request_mode == DUPLEX:
            self._has_trailers = True
            self._complete(self.request)
        else:
            self._responses.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    def _complete(self, request: HttpRequest) -> None:
        """Hand the complete request to the handler, which chooses."""
        self._original_pieces = request.pieces = self._body.to_tuple()
        self._body = BodyPieces()
        self.phase = Phase.CHOOSING
        self._handler.request_complete(request)

    def _handle_response_headers(self, message: Request) -> None:
        """Tell `answer_reader` that the response begins, and add its headers for the client to the response.

        A response may come before an endpoint is chosen, if Envoy or one of its filters answers by itself.
        """
        self._expect_phase("response_headers", Phase.HEAD, Phase.BODY, Phase.CHOOSING, Phase.CHOSEN)
        common_response = None
        if self.phase is not Phase.CHOSEN:
            self._handler.request_cancelled()
        elif self.answer_reader is not None:
            status, served_by = read_status(message.response_headers), read_served_endpoint(message)
            client_headers = self.answer_reader.response_started(status, served_by)
            if client_headers:
                common_response = pb.CommonResponse(header_mutation=build_header_mutation(client_headers))
        self.phase = Phase.ANSWER
        self._responses.append(pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common_response)))
        if message.response_headers.end_of_stream:
            self._end()

    def _handle_response_body(self, body: Request) -> None:
        """Show `answer_reader` a part of the answer's body, and return it to Envoy unchanged."""
        self._expect_phase("response_body", Phase.ANSWER)
        is_last = body.end_of_stream or body.end_of_stream_without_message
        if body.body and self.answer_reader is not None:
            self.answer_reader.response_content(body.body)
        if self._response_mode == DUPLEX:
            self._responses += [
                pb.ProcessingResponse(response_body=chunk) for chunk in split_body((body.body,), is_last)
            ]
        else:
            self._responses.append(pb.ProcessingResponse(response_body=pb.BodyResponse()))
        if is_last:
            self._end()

    def _end(self) -> None:
        self.phase = Phase.OVER
        if self.answer_reader is not None:
            self.answer_reader.response_ended()

    def _expect_phase(self, message_kind: str, *phases: Phase) -> None:
        if self.phase not in phases:
            raise UnexpectedMessage(f"{message_kind} while {self.phase.value}")

    def _release_body(self) -> None:
        """Forget the body, which was sent."""
        self._body, self._original_pieces = BodyPieces(), ()
