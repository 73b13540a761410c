"""The client of one request that comes in a gRPC stream of Envoy, and what all such requests share.

Connects the ext_proc stream with the exchange, and charges the bytes of the body. router/picker/server.py knows gRPC.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from prompts.errors import RequestError
from router.edge.proxy import Proxy
from router.http.budget import BufferCharge
from router.http.connection import Client, Responder, TaskResponder, cancel_responder
from router.http.decoding import decode_in_turns, get_body_coding
from router.http.fair_scheduler import FairScheduler
from router.http.local_replies import JSON, list_error_headers, make_crash_error
from router.http.request import HttpRequest
from router.picker.config import PickerConfig
from router.picker.endpoint_map import EndpointMap
from router.picker.ext_proc_stream import Choice, ExtProcStream, Phase
from router.picker.messages import Request


class Picker:
    """State that all requests of the endpoint picker, the gRPC service that Envoy asks for workers, have in common."""

    def __init__(
        self,
        proxy: Proxy,
        config: PickerConfig,
        endpoints: EndpointMap,
        *,
        find_tenant: Callable[[Client, HttpRequest], str],
        dispatch: Callable[[Client, HttpRequest], None],
    ) -> None:
        """Make the state of a picker that has no requests yet.

        `find_tenant` returns the tenant by the request's API key. `dispatch` reads a request and has a worker chosen,
        now or later. Both raise RequestError.
        """
        self.proxy = proxy
        self.config = config
        self.endpoints = endpoints
        self.find_tenant = find_tenant
        self.dispatch = dispatch
        self.priorities = config.priorities
        """Priority of requests by the name of their objective."""
        self.scheduler = FairScheduler()
        """Shares the event loop among requests with compressed bodies."""
        self.in_flight_counts: Counter[str] = Counter()
        """Requests in flight by fairness id."""


class PickerClient:
    """Client of one request, for which Envoy asks for a worker in a gRPC stream.

    Envoy describes the request message by message, and is told the chosen worker, or an error. It sends the request to
    that worker by itself. Call `receive` with each message, await `decision_made` while `stream` is choosing, and send
    what `stream.pop_responses` returns.
    """

    # The exchange asks this of every client. Here Envoy sends the answer, and adds the headers of CORS.
    has_response_started = False
    cors_headers = b""

    def __init__(self, picker: Picker, peer: str) -> None:
        """Make the client of one request before its first message. `peer`: address of the Envoy that sends it."""
        self.picker = picker
        self.stream = ExtProcStream(self, picker.proxy.config.limits.body_bytes_max)
        """Envoy's messages about the request, and the replies to Envoy."""
        self.peer = peer
        """Address of Envoy; once the request is complete, that of Envoy's client."""
        self.tenant = peer
        """Name of the request's API key, or its address without keys; Envoy's address until the key is checked."""
        self._path = ""
        """Path of the complete request, which decides the format of errors."""
        self._charge = BufferCharge(picker.proxy.budget)
        """Bytes of the request's body, which count against the router's limit."""
        self.responder: Responder | None = None
        """Object to tell if the request is given up: the task that decodes its body, and then the exchange."""
        self.decision_made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a worker is chosen, or the request is refused or aborted."""
        self.is_aborted = False
        """Whether the request has taken too long, so that the stream ends without a choice or the end of the answer."""

    def receive(self, message: Request) -> None:
        """Process a message of Envoy. Raises UnexpectedMessage. A request that is refused gets an error response."""
        try:
            self.stream.receive(message)
        except RequestError as refused:
            self._refuse(refused)

    def close(self) -> None:
        """End the request, as the stream has ended."""
        self.request_cancelled()
        self.stream.close()
        self._charge.release()

    def _client_address(self) -> str:
        """Return the client's address from the gateway's header, or else the gateway's own address."""
        request = self.stream.request
        forwarded_for = None if request is None else request.get_header(b"x-forwarded-for")
        return (forwarded_for or b"").rpartition(b",")[2].strip()[:64].decode("latin-1") or self.peer

    # From the stream --------------------------------------------------------------------------------------------------

    def request_cancelled(self) -> None:
        """Have no worker picked any more, as Envoy answers the request itself, or has ended its stream."""
        cancel_responder(self, "picker", self.picker.proxy.metrics)

    def request_complete(self, request: HttpRequest) -> None:
        """Decode the body if it is compressed, then have a worker picked."""
        self._path = request.path
        self.peer = self._client_address()
        with self._answer_errors():
            coding = get_body_coding(request) if request.body_bytes else None
            if coding is None:
                self._dispatch(request)
            else:
                self.responder = TaskResponder(self._decode(request, coding))

    async def _decode(self, request: HttpRequest, coding: str) -> None:
        """Decode a body in turns of the event loop, then have a worker picked."""
        bytes_max, scheduler = self.picker.proxy.config.limits.body_bytes_max, self.picker.scheduler
        tenant = self._charge.tenant or self._client_address()
        with self._answer_errors():
            await decode_in_turns(request, coding, bytes_max, scheduler, tenant, self.charge_body_bytes)
            self.responder = None
            self._dispatch(request)

    def _dispatch(self, request: HttpRequest) -> None:
        """Have a worker picked, now or later. Raises RequestError."""
        self.tenant = self.picker.find_tenant(self, request)
        self.picker.dispatch(self, request)

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
        self.picker.proxy.metrics.http_errors[str(error.status)] += 1
        self.request_cancelled()
        self.respond_error(error)

    def charge_body_bytes(self, body_bytes: int) -> None:
        """Charge the body to the client's address, as its API key is not known yet. Raises RequestError."""
        self._charge.tenant = self._charge.tenant or self._client_address()
        self._charge.request_bytes = body_bytes
        self._charge.update()

    # From the exchange ------------------------------------------------------------------------------------------------

    def send_choice(self, choice: Choice) -> None:
        """Tell Envoy the chosen endpoints."""
        if self.stream.phase is Phase.CHOOSING:
            self.stream.choose(choice)
            self._signal_decision()

    def respond_error(self, error: RequestError) -> None:
        """Have Envoy answer with an error, unless it has sent the request to a worker already."""
        if self.stream.phase in (Phase.CHOSEN, Phase.ANSWER, Phase.OVER):
            return
        self.responder = None
        headers = [(b"content-type", JSON), *list_error_headers(error)]
        self.stream.refuse(error.status, headers, msgspec.json.encode(error.body(self._path)))
        self._signal_decision()

    def crash(self, error: Exception) -> None:
        self.picker.proxy.metrics.record_crash("picker", error)
        self.request_cancelled()
        self.respond_error(make_crash_error())

    def abort_response(self) -> None:
        """End the stream to Envoy, because the request has taken too long."""
        self.is_aborted = True
        self.request_cancelled()
        self._signal_decision()

    def write(self, data: bytes) -> None:
        raise AssertionError("Envoy carries the bytes")

    def finish(self, *, keep_alive: bool) -> None:
        self.responder = None

    def _signal_decision(self) -> None:
        if not self.decision_made.done():
            self.decision_made.set_result(None)
