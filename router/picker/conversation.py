"""One request of Envoy's, sans IO: ProcessingRequests in, ProcessingResponses out, in the order that Envoy waits for.

    request headers -> [body ...] -> [trailers] -> (chosen or refused) -> answer's headers -> [body ...] -> [trailers]

How the body comes is the gateway's to say (`protocol_config` of the first message; without one, FULL_DUPLEX_STREAMED):

* FULL_DUPLEX_STREAMED: nothing is answered until the body's end; then the headers, the body again in pieces, trailers.
* BUFFERED: headers are let pass at once, the one message with the body is answered with the choice.
* NONE, STREAMED, BUFFERED_PARTIAL: the choice is made on the headers; what follows passes.

Owns order and framing. Refuses to know workers, prompts, sockets and clocks; it asks its Party. An answer whose request
was never seen (another filter made it) passes. What Envoy must not send raises `OutOfTurn` and changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from prompts.errors import RequestError
from router.http.request import PIECE_BYTES as KEPT_BYTES
from router.http.request import HttpRequest
from router.picker.messages import (
    BUFFERED,
    DUPLEX,
    ENDPOINTS,
    NONE,
    UNREAD,
    Header,
    Request,
    Response,
    destination,
    immediate,
    mutation,
    read_head,
    read_status,
    served,
    streamed,
    subset,
)


class OutOfTurn(Exception):
    """The gateway sent what does not follow from what it sent before."""


class Phase(enum.Enum):
    """How far a request has got."""

    HEAD = "head"
    BODY = "body"
    CHOOSING = "choosing"
    CHOSEN = "chosen"
    ANSWER = "answer"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes."""

    endpoints: Sequence[str]
    """ip:port, the first choice first."""
    headers: Sequence[Header] = ()
    """Set besides, on what the worker gets."""
    removed: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class AnswerBegun:
    """The head of an answer."""

    status: int
    served: str | None
    """The endpoint it came from, where Envoy says."""
    events: bool
    """It is a stream of server-sent events."""


class Party(Protocol):
    """Whom the conversation is about: told as soon as each thing is known."""

    def complete(self, request: HttpRequest) -> None:
        """Choose, now or later: `choose` or `refuse` is called."""

    def keeps(self, size: int) -> None:
        """So many bytes of its body are kept. Raises RequestError where that is too much."""

    def begun(self, answer: AnswerBegun) -> Sequence[Header]:
        """Headers for the client."""

    def content(self, data: bytes) -> None:
        """Of an answer, where its body comes by here."""

    def ended(self) -> None:
        """The whole answer has passed."""


class Conversation:
    """See the module's docstring. `receive` may call the party, which may call `choose` at once."""

    def __init__(self, party: Party, body_bytes_max: int) -> None:
        self._party = party
        self._body_bytes_max = body_bytes_max
        self._out: list[Response] = []
        self._request: HttpRequest | None = None
        self._request_mode = self._response_mode = DUPLEX
        self._pieces: list[bytes] = []
        self._body = bytearray()
        self._size = 0
        self._head_answered = False
        self._trailers = False
        self._given: tuple[bytes, ...] = ()
        """The body as it came."""
        self.phase = Phase.HEAD
        self.hint: list[str] | None = None
        """Endpoints that may be chosen; None: all."""

    @property
    def request(self) -> HttpRequest | None:
        """Its head was read; its body may be to come."""
        return self._request

    @property
    def sees_answer(self) -> bool:
        """Whether the body of the answer comes by here."""
        return bool(self._response_mode != NONE)

    def take(self) -> list[Response]:
        """What is to be sent, once."""
        out, self._out = self._out, []
        return out

    def receive(self, message: Request) -> None:
        """Raises OutOfTurn, or RequestError for what the client did."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            self._head(message)
        elif kind == "request_body":
            self._request_body(message.request_body)
        elif kind == "request_trailers":
            self._request_trailers()
        elif kind == "response_headers":
            self._response_headers(message)
        elif kind == "response_body":
            self._response_body(message.response_body)
        elif kind == "response_trailers":
            self._in(kind, Phase.HEAD, Phase.CHOSEN, Phase.ANSWER)
            self._out.append(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
            self._end()
        else:
            raise OutOfTurn("a message without a request in it")

    # Answers to the request -----------------------------------------------------------------------------------------

    def choose(self, choice: Choice) -> None:
        """Send it there. Must be called once, or `refuse`, after `complete`."""
        request = self._request
        assert self.phase is Phase.CHOOSING, f"chosen while {self.phase.value}"
        assert request is not None
        self.phase = Phase.CHOSEN
        endpoints = ",".join(choice.endpoints)
        set_headers = [(ENDPOINTS.encode(), endpoints.encode()), *choice.headers]
        changed = self._head_answered and request.pieces is not self._given
        if changed and b"content-length" in request.headers:
            set_headers.append((b"content-length", b"%d" % request.body_bytes))
        common = pb.CommonResponse(header_mutation=mutation(set_headers, choice.removed), clear_route_cache=True)
        if not self._head_answered:
            first = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        else:
            if changed:
                common.body_mutation.body = b"".join(request.pieces)
            first = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
        destination(first, endpoints)
        self._out.append(first)
        if self._request_mode == DUPLEX and request.has_body:
            bodies = streamed(request.pieces, ends=not self._trailers)
            self._out += [pb.ProcessingResponse(request_body=body) for body in bodies]
            if self._trailers:
                self._out.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._forget()

    def refuse(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Answer the client ourselves."""
        assert self.phase in (Phase.HEAD, Phase.BODY, Phase.CHOOSING), f"refused while {self.phase.value}"
        self.phase = Phase.OVER
        self._out = [immediate(status, headers, body)]
        self._forget()

    # From Envoy -----------------------------------------------------------------------------------------------------

    def _head(self, message: Request) -> None:
        self._in("request_headers", Phase.HEAD)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self.hint = subset(message)
        request = self._request = read_head(message.request_headers)
        self.phase = Phase.BODY
        if not request.has_body or self._request_mode not in (DUPLEX, BUFFERED):
            request.path = request.path if request.method in ("GET", "HEAD", "DELETE") else UNREAD
            self._complete(request)
        elif self._request_mode == BUFFERED:
            self._head_answered = True
            self._out.append(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))

    def _request_body(self, body: Request) -> None:
        self._in("request_body", Phase.BODY, Phase.CHOSEN, Phase.ANSWER)
        request = self._request
        if self.phase is not Phase.BODY or request is None:
            if self._request_mode in (DUPLEX, BUFFERED):
                raise OutOfTurn("a request's body after its end")
            self._out.append(pb.ProcessingResponse(request_body=pb.BodyResponse()))
            return
        self._size += len(body.body)
        if self._size > self._body_bytes_max:
            raise RequestError(f"request body over {self._body_bytes_max} bytes", param=None, status=413)
        self._body += body.body
        if len(self._body) >= KEPT_BYTES:
            self._pieces.append(bytes(self._body))
            self._body = bytearray()
        self._party.keeps(self._size)
        if body.end_of_stream or body.end_of_stream_without_message or self._request_mode == BUFFERED:
            self._complete(request)

    def _request_trailers(self) -> None:
        self._in("request_trailers", Phase.BODY, Phase.CHOSEN, Phase.ANSWER)
        if self.phase is Phase.BODY and self._request is not None and self._request_mode == DUPLEX:
            self._trailers = True
            self._complete(self._request)
        else:
            self._out.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    def _complete(self, request: HttpRequest) -> None:
        if self._body or not self._pieces:
            self._pieces.append(bytes(self._body))
        self._given = request.pieces = tuple(self._pieces)
        self._pieces, self._body = [], bytearray()
        self.phase = Phase.CHOOSING
        self._party.complete(request)

    def _response_headers(self, message: Request) -> None:
        # In the middle of the request: Envoy or a filter answered by itself.
        self._in("response_headers", Phase.HEAD, Phase.BODY, Phase.CHOOSING, Phase.CHOSEN)
        status, events = read_status(message.response_headers)
        told: Sequence[Header] = ()
        if self.phase is not Phase.HEAD:
            told = self._party.begun(AnswerBegun(status, served(message), events))
        self.phase = Phase.ANSWER
        common = pb.CommonResponse(header_mutation=mutation(told)) if told else None
        self._out.append(pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common)))
        if message.response_headers.end_of_stream:
            self._end()

    def _response_body(self, body: Request) -> None:
        self._in("response_body", Phase.ANSWER)
        ends = body.end_of_stream or body.end_of_stream_without_message
        if body.body:
            self._party.content(body.body)
        if self._response_mode == DUPLEX:
            self._out += [pb.ProcessingResponse(response_body=one) for one in streamed((body.body,), ends)]
        else:
            self._out.append(pb.ProcessingResponse(response_body=pb.BodyResponse()))
        if ends:
            self._end()

    def _end(self) -> None:
        self.phase = Phase.OVER
        self._party.ended()

    def _in(self, what: str, *phases: Phase) -> None:
        if self.phase not in phases:
            raise OutOfTurn(f"{what} while {self.phase.value}")

    def _forget(self) -> None:
        """The body is on its way."""
        self._pieces, self._body, self._given = [], bytearray(), ()
