"""The client of one request that comes in a gRPC stream of Envoy.

Connects the ext_proc stream with the exchange, and charges the bytes of the body. router/picker/server.py knows gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from prompts.errors import RequestError
from router.http.budget import BufferBudget, BufferCharge
from router.http.config import HttpLimits
from router.http.connection import Responder, cancel_responder
from router.http.decoding import BodyDecoder, DecodingTask, get_body_coding
from router.http.fair_scheduler import FairScheduler
from router.http.local_replies import JSON, Header, build_refusal, iter_error_headers
from router.http.request import HttpRequest
from router.picker.ext_proc_stream import Choice, ExtProcStream, Phase
from router.picker.messages import FAIRNESS_HEADER, OBJECTIVE_HEADER, Request
from router.picker.pick_exchange import PickExchange

if TYPE_CHECKING:
    from router.picker.pick_exchange import PickerState

NAME_BYTES_MAX = 256


class PickerApplication(Protocol):
    """Application behind the picker (router/app/picker_app.py)."""

    limits: HttpLimits
    budget: BufferBudget
    scheduler: FairScheduler

    def pick(self, client: PickerClient, request: HttpRequest) -> None:
        """Place a request, now or later. Raises RequestError."""

    def record_rejection(self, status: int) -> None: ...

    def record_crash(self, place: str, error: Exception) -> None: ...


class PickerClient:
    """Client side of one request, which Envoy describes in messages of a gRPC stream.

    To the exchange, which answers the request, it is what a connection to a client is in `router run`. Call `receive`
    with each message, await `decision_made` while `stream` is choosing, and send what `stream.pop_responses` returns.
    """

    def __init__(self, app: PickerApplication, picker_state: PickerState, peer: str) -> None:
        """`peer`: address of the Envoy that sent the request."""
        self._app = app
        self.picker_state = picker_state
        self.peer = peer
        self.tenant = peer
        """Tenant by the request's API key; the address until the key is checked."""
        self.responder: Responder | None = None
        self.has_response_started = False
        self.cors_headers = b""
        self._pick: PickExchange | None = None
        self._path = ""
        self._charge = BufferCharge(app.budget)
        self.stream = ExtProcStream(self, app.limits.body_bytes_max)
        self.decision_made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a worker is chosen, or the request is refused or abandoned."""
        self.is_abandoned = False
        self.objective: str | None = None
        """Objective in the gateway's header, which selects a priority; None without the header."""
        self.fairness_id = ""

    def receive(self, message: Request) -> None:
        """Process a message of Envoy. Raises UnexpectedMessage. A request that is refused gets an error response."""
        try:
            self.stream.receive(message)
        except RequestError as refused:
            self._refuse(refused)

    def close(self) -> None:
        """End the request, as the stream has ended."""
        try:
            pick = self._pick
            self._pick = None
            if pick is not None and not pick.context.is_done:
                pick.stream_closed()
        except Exception as error:  # noqa: BLE001  a boundary
            self._app.record_crash("picker", error)
        self._cancel_responder()
        self._charge.release()

    def _client_address(self) -> str:
        """Return the client's address from the gateway's header, or else the gateway's own address."""
        request = self.stream.request
        forwarded_for = None if request is None else request.get_header(b"x-forwarded-for")
        return (forwarded_for or b"").rpartition(b",")[2].strip()[:64].decode("latin-1") or self.peer

    def request_complete(self, request: HttpRequest) -> None:
        """Decode the body if it is compressed, then have a worker picked."""
        self._path = request.path
        self.peer = self._client_address()
        self.objective = _decode_name(request.get_header(OBJECTIVE_HEADER))
        self.fairness_id = _decode_name(request.get_header(FAIRNESS_HEADER)) or ""
        with self._answer_errors():
            coding = get_body_coding(request) if request.body_bytes else None
            if coding is None:
                self._app.pick(self, request)
            else:
                self._decode(request, BodyDecoder(request.pieces, coding, self._app.limits.body_bytes_max))

    def _decode(self, request: HttpRequest, decoder: BodyDecoder) -> None:
        """Decode a body in turns of the event loop, then have a worker picked. The decoded bytes are charged too."""
        encoded_bytes = request.body_bytes

        def on_decoded(decode_error: RequestError | None) -> None:
            self.responder = None
            with self._answer_errors():
                if decode_error is not None:
                    raise decode_error
                self._app.pick(self, request)

        def charge_decoded_bytes(decoded_bytes: int) -> None:
            self.charge_body_bytes(encoded_bytes + decoded_bytes)

        tenant = self._charge.tenant or self._client_address()
        self.responder = DecodingTask(request, decoder, self._app.scheduler, tenant, charge_decoded_bytes, on_decoded)

    @contextmanager
    def _answer_errors(self) -> Iterator[None]:
        """Answer an error in the request, or a fault of the router, by which this request alone fails."""
        try:
            yield
        except RequestError as refused:
            self._refuse(refused)
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)

    def _refuse(self, error: RequestError) -> None:
        """Count and answer an error in the request itself."""
        self._app.record_rejection(error.status)
        self._cancel_responder()
        self.respond_error(error)

    def attach_pick(self, pick: PickExchange) -> None:
        """Set the exchange of this request."""
        self._pick = pick

    def charge_body_bytes(self, body_bytes: int) -> None:
        """Charge the body to the client's address, as its API key is not known yet. Raises RequestError."""
        self._charge.tenant = self._charge.tenant or self._client_address()
        self._charge.request_bytes = body_bytes
        self._charge.update()

    def response_started(self, status: int, served_by: str | None) -> Sequence[Header]:
        if self.stream.phase is not Phase.CHOSEN or self._pick is None:
            self._cancel_responder()  # Envoy answered before a worker got the request
            return ()
        return self._pick.response_started(status, served_by)

    def response_content(self, data: bytes) -> None:
        if self._pick is not None:
            self._pick.response_content(data)

    def response_ended(self) -> None:
        if self._pick is not None:
            self._pick.complete_response()

    def send_choice(self, choice: Choice) -> None:
        if self.stream.phase is Phase.CHOOSING:
            self.stream.choose(choice)
            self._signal_decision()

    def respond_error(self, error: RequestError, headers: Collection[Header] = ()) -> None:
        """Have Envoy answer with an error, unless it has sent the request to a worker already."""
        if self.stream.phase in (Phase.CHOSEN, Phase.ANSWER, Phase.OVER):
            return
        self.responder = None
        fields = [(b"content-type", JSON), *headers, *iter_error_headers(error, headers)]
        self.stream.refuse(error.status, fields, msgspec.json.encode(error.body(self._path)))
        self._signal_decision()

    def refuse(
        self, status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None = None
    ) -> None:
        self.respond_error(*build_refusal(status, code, message, retry_after_s, param=param))

    def crash(self, error: Exception) -> None:
        self._app.record_crash("picker", error)
        self._cancel_responder()
        self.refuse(500, "internal_error", "the router failed to answer; its log says why", None)

    def abandon(self) -> None:
        """End the stream to Envoy, because the request has taken too long."""
        self.is_abandoned = True
        self._cancel_responder()
        self._signal_decision()

    def abort_response(self) -> None:
        self.abandon()

    def write(self, data: bytes) -> None:
        raise AssertionError("Envoy carries the bytes")

    def finish(self, *, keep_alive: bool) -> None:
        self.responder = None

    def _signal_decision(self) -> None:
        if not self.decision_made.done():
            self.decision_made.set_result(None)

    def _cancel_responder(self) -> None:
        cancel_responder(self, "picker", self._app.record_crash)


def _decode_name(value: bytes | None) -> str | None:
    return value[:NAME_BYTES_MAX].decode("utf-8", "replace") if value else None
