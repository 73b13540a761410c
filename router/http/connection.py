"""Client connections: one request at a time, in order, with backpressure on answers and deadlines for slow clients.

An `Application` gets each complete request. It answers through the connection, or sets a `Responder` that will.
Invariant: each request of a connection is answered before the next one is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from prompts.errors import RequestError
from router.http.budget import BufferBudget, BufferCharge
from router.http.config import ClientTimeouts, HttpLimits
from router.http.decoding import decode_in_turns, get_body_coding
from router.http.fair_scheduler import FairScheduler
from router.http.local_replies import JSON, Header, build_response_head, list_error_headers, make_crash_error
from router.http.request import HttpRequest, RequestParser
from router.metrics import Metrics

WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Unsent bytes of an answer at which reading from its worker, and of the next request, is paused. Then all unsent bytes
are charged to the budget."""
LINGER_S: Final = 2.0
"""Time for which an early error stays readable while the client is still sending."""
MAX_PIPELINED_BYTES: Final = 64 * 1024
"""Bytes of further requests that are read during an answer; more stays in the kernel's buffer."""
LONG_READ_BYTES: Final = 64 * 1024
"""Size of a read of a body after which other connections get a turn."""


class Responder(Protocol):
    """Interface of the object that answers the current request of a connection."""

    __slots__ = ()

    def on_client_gone(self) -> None:
        """Stop answering, as nobody reads the answer any more."""

    def on_client_paused(self) -> None:
        """Stop writing, as the client reads more slowly. By default nothing is done, as for short answers."""
        return

    def on_client_resumed(self) -> None:
        """Write again."""
        return


class TaskResponder(Responder):
    """Runs a coroutine that prepares or sends an answer. The coroutine is cancelled if the client leaves."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(coroutine)

    def on_client_gone(self) -> None:
        self._task.cancel()


class Client(Protocol):
    """Interface by which an answer is sent to the client of the current request, such as a `ClientConnection`."""

    responder: Responder | None
    has_response_started: bool
    peer: str
    """IP address of the client."""
    cors_headers: bytes
    """Header lines of every answer to the current request."""

    @property
    def tenant(self) -> str: ...

    def write(self, data: bytes) -> None:
        """Send bytes of the answer."""

    def finish(self, *, keep_alive: bool) -> None:
        """End the answer."""

    def crash(self, error: Exception) -> None:
        """End the request because of an exception, which is a fault of the router."""

    def abort_response(self) -> None:
        """Close the connection in the middle of an answer, so that the client sees that it is incomplete."""

    def respond_error(self, error: RequestError) -> None:
        """Answer with an error."""


def cancel_responder(client: Client, place: str, metrics: Metrics) -> None:
    """Tell the responder of a client that the client is gone. If that raises, count a crash at this place."""
    responder, client.responder = client.responder, None
    if responder is None:
        return
    try:
        responder.on_client_gone()
    except Exception as error:  # noqa: BLE001  a boundary
        metrics.record_crash(place, error)


class Application(Protocol):
    """Interface of the server program to which client connections pass their requests."""

    limits: HttpLimits
    budget: BufferBudget
    metrics: Metrics
    scheduler: FairScheduler
    """Gives connections their turns to read long bodies."""
    arrival_scheduler: FairScheduler
    """Gives connections their turns to begin requests."""
    is_ending: bool
    """Whether connections are closed after their next answer, so that clients go to another router."""

    def now(self) -> float:
        """Return the time in seconds of the clock that `ClientConnection.expire` uses."""

    def build_cors_headers(self, request: HttpRequest) -> bytes:
        """Return the CORS header lines of any answer to `request`."""

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Return the tenant that sent `request`, with or without its body. Raises RequestError to refuse it."""

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer an admitted request, now or later."""


class _SendProgress:
    """Finds out when a client last received bytes, so that connections of clients that stopped reading are closed.

    The transport tells only how many bytes are unsent now, so two such numbers are compared.
    """

    __slots__ = ("_received_at_s", "_received_bytes", "written_bytes")

    def __init__(self, now: float) -> None:
        self.written_bytes = 0
        """Bytes of all answers so far."""
        self._received_bytes = 0
        self._received_at_s = now

    def update(self, unsent_bytes: int, now: float) -> float:
        """Return when the client last received bytes, given how many are unsent now. Call it often.

        If nothing is unsent, that is `now`, as the client is not late with anything.
        """
        received_bytes = self.written_bytes - unsent_bytes
        has_progressed = received_bytes != self._received_bytes
        if has_progressed or not unsent_bytes:
            self._received_bytes = received_bytes
            self._received_at_s = now
        return self._received_at_s


class ClientConnection(asyncio.Protocol):
    """TCP connection of one client: reads requests, passes them to the application, and writes the answers.

    An exception in a callback ends only the current request.
    """

    __slots__ = (
        "_app", "_charge", "_has_unread_input", "_is_busy", "_is_handling", "_is_lingering",
        "_is_reading_paused", "_is_writing_paused", "_keep_alive", "_open_connections", "_parser",
        "_queued_request", "_request", "_send_progress", "_transport", "_waiting_since_s", "cors_headers",
        "has_response_started", "peer", "responder",
    )  # fmt: skip

    def __init__(self, app: Application, open_connections: set[ClientConnection]) -> None:
        """Make the connection of a client. `open_connections`: those of the listening address, with this one."""
        self._app = app
        self._open_connections = open_connections
        self._transport: Any = None
        """Transport of asyncio or of uvloop, which have no common type."""
        self.peer = ""
        self._parser = RequestParser(app.limits)
        self._charge = BufferCharge(app.budget)

        # The current request and its answer.
        self._request: HttpRequest | None = None
        """The request, as soon as its head is read. Its path decides the format of an error."""
        self._queued_request: HttpRequest | None = None
        """Request that waits for its turn to start. The connection counts as busy."""
        self._is_busy = False
        """Whether a request is being answered, or waits for its turn."""
        self._is_handling = False
        """Whether requests are started in this call stack. Then the end of an answer does not start the next one."""
        self.responder: Responder | None = None
        """Object that answers the request after `Application.handle` has returned."""
        self.cors_headers = b""
        """Header lines that allow a browser's page to read the answer."""
        self.has_response_started = False
        """Whether bytes of the answer were sent."""

        # Flow control and time limits.
        self._is_reading_paused = False
        self._is_writing_paused = False
        """Whether the client reads more slowly than answers are written. No further request starts meanwhile."""
        self._send_progress = _SendProgress(app.now())
        self._waiting_since_s = self._app.now()
        """Time from which the time limit for the client's next request counts."""

        # The end of the connection.
        self._keep_alive = True
        """Whether further requests of the client are read after the current answer."""
        self._has_unread_input = False
        """Whether the client may still send bytes that will not be read."""
        self._is_lingering = False
        """Whether the last answer is sent, and further input is discarded until the client closes the connection."""

    # From the event loop ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer_address = transport.get_extra_info("peername")
        self.peer = self._charge.tenant = peer_address[0] if isinstance(peer_address, tuple) else ""
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes received from the client, and start the requests that they complete.

        Requests that come during an answer wait, up to a limit of bytes. After the last answer, input is discarded.
        """
        if self._is_lingering:
            self._discard_input(data)
            return
        if not self._is_busy and not self._parser.has_partial_request:
            self._waiting_since_s = self._app.now()  # the time limit of a request starts with its first byte
        try:
            self._parser.feed(data)
            if self._is_busy or self._is_writing_paused:
                self._limit_pipelined_input()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)
            return
        if not self._is_busy and not self._is_writing_paused:
            self._handle_requests(len(data))

    def _discard_input(self, data: bytes) -> None:
        """Discard bytes; after a long read, read on only when other connections had their turn."""
        if len(data) >= LONG_READ_BYTES:
            self._transport.pause_reading()
            self._app.scheduler.schedule(self._resume_discarding)

    def eof_received(self) -> bool:
        self._start_queued_request()
        return False  # a client that stops sending is taken to be gone: see connection_lost

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = self._request = self._queued_request = None
        self._open_connections.discard(self)
        self._cancel_responder()
        self._release_buffers()

    def _release_buffers(self) -> None:
        """Free the buffered body piece by piece, in turns of the event loop, then release its charge."""
        if self._parser.discard_piece():
            self._app.scheduler.schedule(self._release_buffers)
        else:
            self._charge.release()

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        try:
            self._charge_unsent_bytes()
            if self.responder is not None:
                self.responder.on_client_paused()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)

    def resume_writing(self) -> None:
        """Go on with the answer, or start the next request, because the client has read what was written."""
        self._is_writing_paused = False
        self._charge.unsent_response_bytes = 0
        if not self._is_busy and not self._parser.has_partial_request:
            self._waiting_since_s = self._app.now()  # no request was read while writing was paused
        try:
            if self._charge.charged_bytes:
                self._charge_buffered_bytes()
            if self.responder is not None:
                self.responder.on_client_resumed()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)
        was_last_answer = not self._keep_alive and not self._is_busy
        if was_last_answer and not self._is_lingering:
            self._close()
        else:
            self._resume_requests()

    # For whoever answers ------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes of the current answer."""
        self.has_response_started = True
        if self._transport is not None:
            self._send_progress.written_bytes += len(data)
            self._transport.write(data)
            if self._is_writing_paused:
                self._charge_unsent_bytes()

    def finish(self, *, keep_alive: bool) -> None:
        """End the current answer, and begin the next request or close the connection."""
        self.responder = self._request = None
        self._is_busy = False
        self._charge.request_bytes = 0
        if self._charge.charged_bytes:
            self._charge_buffered_bytes()
        self._waiting_since_s = self._app.now()
        if not keep_alive or not self._keep_alive:
            self._close()
        else:
            self._resume_requests()

    def crash(self, error: Exception) -> None:
        """End the current request with an error 500, or by closing the connection, as its responder raised `error`."""
        self._app.metrics.record_crash("client", error)
        self._queued_request = None
        self._cancel_responder()
        if self.has_response_started or not self._is_busy:
            self.abort_response()
        else:
            self.respond_error(make_crash_error())

    def abort_response(self) -> None:
        """Close the connection in the middle of an answer, so that the client sees it is incomplete."""
        self.responder = None
        self._keep_alive = False
        if self._transport is not None:
            self._transport.close()

    def respond(self, status: int, body: bytes, content_type: bytes = JSON, headers: Iterable[Header] = ()) -> None:
        """Answer the current request with a whole body; a HEAD request gets the head only."""
        head = build_response_head(
            status, len(body), content_type, headers, keep_alive=self._keep_alive, extra_lines=self.cors_headers
        )
        is_head_request = self._request is not None and self._request.method == "HEAD"
        self.write(head if is_head_request else head + body)
        self.finish(keep_alive=self._keep_alive)

    def respond_error(self, error: RequestError) -> None:
        body = msgspec.json.encode(error.body("" if self._request is None else self._request.path))
        self.respond(error.status, body, headers=list_error_headers(error))

    @property
    def tenant(self) -> str:
        """Tenant of the current request, as `Application.admit` returned it."""
        return self._charge.tenant

    # For the server -----------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._is_busy

    def expire(self, now: float, timeouts: ClientTimeouts) -> None:
        """Close the connection if the client takes too long to read an answer or to send a request."""
        if self._transport is None:
            return
        last_receipt_s = self._send_progress.update(self._transport.get_write_buffer_size(), now)
        if now - last_receipt_s > timeouts.send_s:
            self._transport.abort()
            return
        if self._is_busy:
            return
        waited_s = now - self._waiting_since_s
        if self._is_lingering:
            if waited_s > LINGER_S:
                self._transport.abort()
        elif not self._parser.has_partial_request:
            if waited_s > timeouts.keep_alive_s:
                self._transport.close()
        elif waited_s > timeouts.request_s:
            message = f"the request was not complete within {timeouts.request_s:g} s"
            self._reject_and_close(RequestError(message, param=None, code="bad_http", status=408))

    def close_when_idle(self) -> None:
        """Close the connection after the current answer."""
        self._keep_alive = False
        if not self._is_busy and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Inside -------------------------------------------------------------------------------------------------------

    def _handle_requests(self, received_bytes: int = 0) -> None:
        """Start requests that are received completely, one after the other, until one is not answered at once.

        If too many requests were started in this turn of the event loop, the next one waits for a later turn.
        `received_bytes`: size of the last read, if any.
        """
        self._is_handling = True
        try:
            while self._can_start_request():
                request = self._parser.next_request()
                if request is None:
                    self._await_more_input(received_bytes)
                    break
                self._charge.request_bytes = request.body_bytes + len(request.headers.raw)
                if not self._app.arrival_scheduler.try_start():
                    self._queue_request(request)
                    break
                self._start_request(request)
        except RequestError as refused:
            self._reject_and_close(refused)
        except Exception as error:  # noqa: BLE001  a boundary: any error ends only this connection
            self.crash(error)
        finally:
            self._is_handling = False

    def _can_start_request(self) -> bool:
        is_open = self._keep_alive and self._transport is not None
        return is_open and not self._is_busy and not self._is_writing_paused

    def _resume_requests(self) -> None:
        """Start the next requests, unless the connection is busy."""
        if self._is_busy or self._is_writing_paused or self._is_handling:
            return
        if self._is_reading_paused or not self._parser.is_empty:
            self._handle_requests()

    def _queue_request(self, request: HttpRequest) -> None:
        """Let a request wait for its turn. Raises RequestError if there is no memory for it."""
        self._charge_buffered_bytes()
        self._is_busy, self._queued_request = True, request
        self._app.arrival_scheduler.schedule(self._start_queued_request, self._charge.tenant)

    def _start_queued_request(self) -> None:
        """Start the request that waited for its turn, if there is one, then those behind it."""
        request, self._queued_request = self._queued_request, None
        if request is None:
            return
        self._is_handling = True
        try:
            self._start_request(request)
        finally:
            self._is_handling = False
        if not self._is_busy:
            self._handle_requests()

    def _start_request(self, request: HttpRequest) -> None:
        """Pass a complete request to the application. A compressed body is decoded before, by a task.

        The connection is busy until the request is answered. If the application or a limit refuses the request, its
        answer is an error.
        """
        self._is_busy = True
        self.has_response_started = False
        if self._app.is_ending:
            request.keep_alive = False  # the client's next request goes to another router
        self._keep_alive = self._keep_alive and request.keep_alive
        try:
            self._set_current_request(request)
            self._admit(request)
            self._charge_buffered_bytes()
            compression = get_body_coding(request) if request.body_bytes else None
            if compression is None:
                self._app.handle(self, request)
            else:
                self.responder = TaskResponder(self._decode_and_handle(request, compression))
        except RequestError as refused:
            self._refuse(refused)
        except Exception as error:  # noqa: BLE001  a boundary: this request fails, the connection lives
            self.crash(error)

    async def _decode_and_handle(self, request: HttpRequest, coding: str) -> None:
        """Decode the body of a request in turns of the event loop, then pass the request to the application."""
        app, charge_body = self._app, partial(self._charge_body, request)
        try:
            await decode_in_turns(request, coding, app.limits.body_bytes_max, app.scheduler, self.tenant, charge_body)
            self.responder = None
            self._charge_body(request, request.body_bytes)
            self._app.handle(self, request)
        except RequestError as error:
            self.responder = None
            self._refuse(error)
        except Exception as error:  # noqa: BLE001  a boundary: this request fails, the connection lives
            self.crash(error)

    def _charge_body(self, request: HttpRequest, body_bytes: int) -> None:
        """Charge the current request with a body of so many bytes. Raises RequestError."""
        self._charge.request_bytes = body_bytes + len(request.headers.raw)
        self._charge_buffered_bytes()

    def _refuse(self, error: RequestError) -> None:
        """Answer the current request with an error."""
        self._cancel_responder()
        self._app.metrics.http_errors[str(error.status)] += 1
        self.respond_error(error)

    def _resume_discarding(self) -> None:
        """Read and drop the rest of a request that was answered with an error."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _admit(self, request: HttpRequest) -> None:
        """Have the application admit a request by its head, and charge the request to its tenant.

        Raises RequestError if the application refuses the request, or if the coding of its body is unknown.
        """
        if request.has_body:
            get_body_coding(request)  # raises the error before the body comes
        tenant = self._app.admit(self, request)
        if tenant != self._charge.tenant:
            self._charge.release()  # the next update charges the bytes to the new tenant
            self._charge.tenant = tenant

    def _charge_buffered_bytes(self) -> None:
        """Charge the buffered bytes to the tenant. Raises RequestError if they are too many."""
        self._charge.update(self._parser.buffered_bytes)

    def _charge_unsent_bytes(self) -> None:
        """Charge unsent bytes of answers to the tenant; without room, close the connection."""
        if self._transport is None or self._transport.is_closing():
            return
        self._charge.unsent_response_bytes = self._transport.get_write_buffer_size()
        try:
            self._charge_buffered_bytes()
        except RequestError as error:
            self._app.metrics.http_errors[str(error.status)] += 1
            self._charge.unsent_response_bytes = 0
            self._keep_alive = False
            self._transport.abort()

    def _await_more_input(self, received_bytes: int) -> None:
        """Read on, because the next request is not complete. Raises RequestError if its head shows that it is refused.

        After a long read of `received_bytes`, other connections get a turn before this one reads on.
        """
        request = self._parser.partial_request
        has_new_head = request is not None and request is not self._request
        if request is not None and has_new_head:
            self._set_current_request(request)
            self._admit(request)
        self._charge_buffered_bytes()
        if self._parser.has_more or received_bytes >= LONG_READ_BYTES:
            self._app.scheduler.schedule(self._resume_requests)
            self._pause_reading()
        elif self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        if has_new_head and self._parser.is_continue_expected:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = True
            self._transport.pause_reading()

    def _set_current_request(self, request: HttpRequest) -> None:
        """Make a request the current one, as soon as its head is read: errors have the format of its API."""
        self._request = request
        self.cors_headers = self._app.build_cors_headers(request)

    def _limit_pipelined_input(self) -> None:
        """Stop reading if the client has sent more than MAX_PIPELINED_BYTES of requests during the current answer.

        If the memory budget has no room for these requests, drop them, and close the connection after the answer.
        """
        try:
            self._charge_buffered_bytes()
        except RequestError:
            self._parser.stop()
            self._keep_alive = False
            self._has_unread_input = True
            self._charge_buffered_bytes()  # less than before, as the dropped requests are not counted any more
        if self._parser.buffered_bytes > MAX_PIPELINED_BYTES:
            self._pause_reading()

    def _cancel_responder(self) -> None:
        cancel_responder(self, "client", self._app.metrics)

    def _reject_and_close(self, error: RequestError) -> None:
        """Answer with `error` and close, because no further request can be read."""
        self._app.metrics.http_errors[str(error.status)] += 1
        if self._parser.partial_request is not None:
            self._set_current_request(self._parser.partial_request)
        self._parser.stop()
        self._release_buffers()
        self._is_busy, self.has_response_started = True, False
        self._keep_alive = False
        self._has_unread_input = True
        self.respond_error(error)

    def _close(self) -> None:
        """Close the connection so that the client can still read the last answer.

        Closing a socket with unread input resets the connection, and the client would lose the answer. So if there may
        be input, only the sending direction is closed. The input is discarded until the client closes the connection,
        for up to LINGER_S.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        can_close_one_direction = transport.get_extra_info("sslcontext") is None  # asyncio cannot with TLS
        may_have_input = self._has_unread_input or self._parser.has_partial_request or self._parser.buffered_bytes
        if not may_have_input or not can_close_one_direction:
            transport.close()
            return
        self._is_lingering = True
        if self._is_reading_paused:
            transport.resume_reading()
        transport.write_eof()
