"""Client connections: requests in order, one at a time, answers with backpressure, deadlines for slow senders.

Owns the sockets of clients. Refuses to know what a request means: an `Application` gets each complete one and answers
through the connection, or hangs a `Work` on it that does. Invariant: requests of one connection are answered in the
order they came, each before the next is handed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

import msgspec

from prompts.errors import RequestError
from router.http.answers import JSON, Header, answer_head, error_headers, refusal
from router.http.budget import SMALL_BYTES, Budget
from router.http.config import ClientTimeouts, HttpLimits
from router.http.decoding import BodyDecoder, Decoding, body_coding
from router.http.fair_scheduler import FairScheduler
from router.http.request import BadRequest, HttpRequest, RequestParser

WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Answer bytes that wait for a slow client before its worker, and what the client asks next, are not read any more.
What waits beyond this is booked in the budget."""
LINGER_S: Final = 2.0
"""How long an early error stays readable while the client is still sending."""
AHEAD_BYTES_MAX: Final = 64 * 1024
"""Sent ahead of an answer; with more, what a client sends waits in the kernel's buffer."""
TURN_REQUESTS: Final = 16
"""Answered at once before others get their turn."""
LONG_READ_BYTES: Final = 64 * 1024
"""After a read of so much of a body others get their turn: a loop reads on as long as bytes come."""


class Work(Protocol):
    """What answers the current request of a connection."""

    def client_gone(self) -> None: ...

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...


class Client(Protocol):
    """Where an answer goes: a `ClientConnection`, or what stands for one."""

    work: Work | None
    answering: bool
    peer: str
    cors_headers: bytes
    """Lines that every answer to the current request has."""

    @property
    def party(self) -> str: ...

    def write(self, data: bytes) -> None: ...

    def finish(self, *, keep_alive: bool) -> None: ...

    def crash(self, error: Exception) -> None: ...

    def cut(self) -> None: ...

    def respond_error(self, error: RequestError, headers: Collection[Header] = ()) -> None: ...

    def refuse(
        self, status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None = None
    ) -> None: ...


class Application(Protocol):
    limits: HttpLimits
    budget: Budget
    scheduler: FairScheduler
    """Of what is long."""
    arrival_scheduler: FairScheduler
    """Of requests that begin."""

    def now(self) -> float:
        """Seconds of the clock whose times `ClientConnection.expire` is given."""

    def cors_headers(self, request: HttpRequest) -> bytes:
        """Header lines of whatever answer `request` gets."""

    def admit(self, connection: ClientConnection, request: HttpRequest) -> str:
        """Who sent `request`, of which only the head need be there. Raises RequestError where it will not be served."""

    def handle(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Answer `request`, which was admitted, now or later."""

    def rejected(self, status: int) -> None:
        """A connection sent what is no request."""

    def crashed(self, where: str, error: Exception) -> None:
        """Something raised that must not: count and log it. What it was about is ended by the caller."""


class ClientConnection(asyncio.Protocol):
    """One client's TCP connection. Its callbacks are a boundary: what raises behind one ends the current request."""

    __slots__ = (
        "_app", "_body_bytes", "_busy", "_head_only", "_held", "_keep_alive", "_lingers", "_parser", "_party",
        "_path", "_paused_reading", "_paused_writing", "_registry", "_since_s", "_stepping", "_taken_bytes",
        "_taken_s", "_transport", "_unread", "_unsent_bytes", "_waiting", "_written_bytes", "answering", "cors_headers",
        "peer", "tls", "work",
    )  # fmt: skip

    def __init__(self, app: Application, registry: set[ClientConnection]) -> None:
        self._app = app
        self._registry = registry
        self._parser = RequestParser(app.limits)
        self._transport: Any = None
        """An asyncio transport, or uvloop's, which is none by its type."""
        self.work: Work | None = None
        """Set by whoever answers later than `handle`."""
        self.peer = ""
        self.cors_headers = b""
        self.tls = False
        self._busy = False
        self._body_bytes = 0
        """Of the current request, its headers too."""
        self._party = ""
        """Whom what is kept here is booked on."""
        self._held = 0
        """Bytes booked."""
        self.answering = False
        """Bytes of the current answer were sent."""
        self._head_only = False
        """The current request is a HEAD."""
        self._path = ""
        """Of the current request: its API says what an error looks like."""
        self._stepping = False
        self._keep_alive = True
        self._paused_reading = False
        self._paused_writing = False
        """The client reads slower than it is answered: no further request of it is begun."""
        self._unsent_bytes = 0
        """Bytes of answers that wait for the client, while writing is paused."""
        self._written_bytes = 0
        """Bytes of all answers so far."""
        self._taken_bytes = 0
        """Bytes of `_written_bytes` that had left the write buffer at the last sweep."""
        self._taken_s = self._app.now()
        """When bytes were last seen to leave the write buffer, or the buffer was empty."""
        self._unread = False
        """The client may still be sending what will not be read."""
        self._lingers = False
        self._waiting: HttpRequest | None = None
        """For its turn to begin; the connection is busy with it."""
        self._since_s = self._app.now()

    # From the event loop ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("peername")
        self.peer = self._party = peer[0] if isinstance(peer, tuple) else ""
        self.tls = transport.get_extra_info("sslcontext") is not None
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            if len(data) >= LONG_READ_BYTES:
                self._transport.pause_reading()
                self._app.scheduler.schedule(self._read_on)
            return
        if not self._busy and not self._parser.has_partial_request:
            self._since_s = self._app.now()
        try:
            self._parser.feed(data)
            if self._busy or self._paused_writing:
                self._wait_ahead()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)
            return
        if not self._busy and not self._paused_writing:
            self._step(len(data))

    def eof_received(self) -> bool:
        self._take_turn()
        return False  # a client that stops sending is taken to be gone: see connection_lost

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = self._waiting = None
        self._registry.discard(self)
        self._drop_work()
        self._forget()

    def _forget(self) -> None:
        if self._parser.free_piece():
            self._app.scheduler.schedule(self._forget)
        elif self._held:
            self._app.budget.change(self._party, self._held, 0)
            self._held = 0

    def pause_writing(self) -> None:
        self._paused_writing = True
        try:
            self._hold_answer()
            if self.work is not None:
                self.work.client_paused()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)

    def resume_writing(self) -> None:
        self._paused_writing = False
        self._unsent_bytes = 0
        if not self._busy and not self._parser.has_partial_request:
            self._since_s = self._app.now()  # what it asked meanwhile begins to be read now
        try:
            if self._held:
                self._hold()
            if self.work is not None:
                self.work.client_resumed()
        except Exception as error:  # noqa: BLE001  a boundary
            self.crash(error)
        self._step_if_due()

    # For whoever answers ------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes of the current answer."""
        self.answering = True
        if self._transport is not None:
            self._written_bytes += len(data)
            self._transport.write(data)
            if self._paused_writing:
                self._hold_answer()

    def finish(self, *, keep_alive: bool) -> None:
        """The current answer is complete."""
        self.work = None
        self._busy = False
        self._body_bytes = 0
        if self._held:
            self._hold()
        self._since_s = self._app.now()
        if not keep_alive or not self._keep_alive:
            self._close()
        else:
            self._step_if_due()

    def crash(self, error: Exception) -> None:
        """What answers the current request raised `error`: end that request, and nothing else."""
        self._app.crashed("client", error)
        self._waiting = None
        self._drop_work()
        if self.answering or not self._busy:
            self.cut()
        else:
            self.refuse(500, "internal_error", "the router failed to answer; its log says why", None)

    def cut(self) -> None:
        """Break off in the middle of an answer. Its missing end tells the client that it is incomplete."""
        self.work = None
        self._keep_alive = False
        if self._transport is not None:
            self._transport.close()

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON,
        headers: Iterable[Header] = (),
        *,
        keep_alive: bool = True,
    ) -> None:
        """Answer the current request at once."""
        keep_alive = keep_alive and self._keep_alive
        head = answer_head(status, len(body), content_type, headers, keep_alive=keep_alive, more=self.cors_headers)
        self.write(head if self._head_only else head + body)
        self.finish(keep_alive=keep_alive)

    def respond_error(self, error: RequestError, headers: Collection[Header] = ()) -> None:
        body = msgspec.json.encode(error.body(self._path))
        self.respond(error.status, body, headers=[*headers, *error_headers(error, headers)])

    def refuse(
        self, status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None = None
    ) -> None:
        """Answer with an error of the router's own. `param`: the field of the body that it is about."""
        self.respond_error(*refusal(status, code, message, retry_after_s, param=param))

    @property
    def party(self) -> str:
        """Whose the current request is, as `Application.admit` said."""
        return self._party

    # For the server -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._busy

    def expire(self, now: float, timeouts: ClientTimeouts) -> None:
        """Close what waits too long for its client."""
        if self._transport is None:
            return
        if now - self._last_taken(now) > timeouts.send_s:
            self._transport.abort()
            return
        waited = now - self._since_s
        if self._busy:
            return
        if self._lingers:
            if waited > LINGER_S:
                self._transport.abort()
        elif self._parser.has_partial_request:
            if waited > timeouts.request_s:
                message = f"the request was not complete within {timeouts.request_s:g} s"
                self._reject(RequestError(message, param=None, code="bad_http", status=408))
        elif waited > timeouts.keep_alive_s:
            self._transport.close()

    def close_when_idle(self) -> None:
        """Shutting down: no further request."""
        self._keep_alive = False
        if not self._busy and self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # Inside -------------------------------------------------------------------------------------------------------

    def _step(self, received: int = 0) -> None:
        """Hand over complete requests until one is answered later. `received`: bytes of the read that this is for."""
        self._stepping = True
        try:
            for _ in range(TURN_REQUESTS):
                if self._busy or self._paused_writing or self._transport is None or not self._keep_alive:
                    break
                request = self._parser.next_request()
                if request is None:
                    self._wait_for_more(received)
                    break
                if not self._app.arrival_scheduler.try_start():
                    self._wait_for_turn(request)
                    break
                self._begin(request)
            else:
                self._app.scheduler.schedule(self._go_on)
        except BadRequest as bad:
            self._reject(RequestError(bad.message, param=None, code="bad_http", status=bad.status))
        except RequestError as refused:
            self._reject(refused)
        except Exception as error:  # noqa: BLE001  a boundary: whatever it is, this connection ends with it
            self.crash(error)
        finally:
            self._stepping = False

    def _step_if_due(self) -> None:
        """Go on with what the client asked next, if it may be begun."""
        if self._busy or self._paused_writing or self._stepping:
            return
        if self._paused_reading or not self._parser.is_empty:
            self._step()

    def _wait_for_turn(self, request: HttpRequest) -> None:
        """Many begin at once. Raises RequestError where there is no room to keep it."""
        self._body_bytes = request.body_bytes + len(request.headers.raw)
        self._hold()
        self._busy, self._waiting = True, request
        self._app.arrival_scheduler.schedule(self._take_turn, self._party)

    def _take_turn(self) -> None:
        request, self._waiting = self._waiting, None
        if request is None:
            return
        self._stepping = True
        try:
            self._begin(request)
        finally:
            self._stepping = False
        if not self._busy:
            self._step()

    def _begin(self, request: HttpRequest) -> None:
        self._busy = True
        self.answering = False
        self._head_only, self._path = request.method == "HEAD", request.path
        self.cors_headers = self._app.cors_headers(request)
        if not request.keep_alive:
            self._keep_alive = False
        self._body_bytes = request.body_bytes + len(request.headers.raw)
        try:
            self._admit(request)
            self._hold()
            coding = body_coding(request) if request.body_bytes else None
            if coding is None:
                self._app.handle(self, request)
            else:
                self._decode(request, BodyDecoder(request.pieces, coding, self._app.limits.body_bytes_max))
        except RequestError as refused:
            self._refuse(refused)
        except Exception as error:  # noqa: BLE001  a boundary: this request fails, the connection lives
            self.crash(error)

    def _decode(self, request: HttpRequest, decoder: BodyDecoder) -> None:
        """Hand over the request once its body is decoded."""
        encoded_bytes = self._body_bytes

        def hold(decoded_bytes: int) -> None:
            self._body_bytes = encoded_bytes + decoded_bytes
            self._hold()

        def then(refused: RequestError | None) -> None:
            self.work = None
            self._body_bytes = request.body_bytes + len(request.headers.raw)
            try:
                if refused is not None:
                    raise refused
                self._hold()
                self._app.handle(self, request)
            except RequestError as error:
                self._refuse(error)
            except Exception as error:  # noqa: BLE001  a boundary: this request fails, the connection lives
                self.crash(error)

        self.work = Decoding(request, decoder, self._app.scheduler, self._party, hold, then)

    def _refuse(self, error: RequestError) -> None:
        """Answer the current request with an error."""
        self._drop_work()
        self._app.rejected(error.status)
        self.respond_error(error)

    def _go_on(self) -> None:
        self._step_if_due()

    def _read_on(self) -> None:
        """What is sent after an early error: to be read and dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _admit(self, request: HttpRequest) -> None:
        """Raises RequestError for what would not be served, as soon as its head is there."""
        if request.has_body:
            body_coding(request)
        party = self._app.admit(self, request)
        if party != self._party:
            held, self._held = self._held, 0
            self._app.budget.change(self._party, held, 0)
            self._party = party

    def _hold(self) -> None:
        """Book what is kept for this client. Raises RequestError where that is too much."""
        kept = self._body_bytes + self._parser.buffered_bytes + self._unsent_bytes
        if kept <= SMALL_BYTES:
            if not self._held:
                return
            kept = 0
        if kept != self._held:
            self._app.budget.change(self._party, self._held, kept)
            self._held = kept

    def _hold_answer(self) -> None:
        """Book the bytes of answers that wait for the client. Without room for them the connection is broken off."""
        if self._transport is None or self._transport.is_closing():
            return
        self._unsent_bytes = self._transport.get_write_buffer_size()
        try:
            self._hold()
        except RequestError as refused:
            self._app.rejected(refused.status)
            self._unsent_bytes = 0
            self._keep_alive = False
            self._transport.abort()

    def _last_taken(self, now: float) -> float:
        """When the client last took bytes of an answer; `now` if none wait."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        taken = self._written_bytes - waiting
        if not waiting or taken != self._taken_bytes:
            self._taken_bytes, self._taken_s = taken, now
        return self._taken_s

    def _wait_for_more(self, received: int) -> None:
        """Of a request that has begun. Raises RequestError where there is no use in waiting."""
        begun = self._parser.pop_partial_request()
        if begun is not None:
            self._head_only, self._path = begun.method == "HEAD", begun.path
            self.cors_headers = self._app.cors_headers(begun)
            self._admit(begun)
        self._hold()
        transport = self._transport
        if self._parser.has_more or received >= LONG_READ_BYTES:
            self._app.scheduler.schedule(self._go_on)
            if not self._paused_reading:
                self._paused_reading = True
                transport.pause_reading()
        elif self._paused_reading:
            self._paused_reading = False
            transport.resume_reading()
        if self._parser.pop_expect_continue():
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _wait_ahead(self) -> None:
        """Of what is sent ahead of an answer: keep a little, or nothing where that would be too much."""
        try:
            self._hold()
        except RequestError:
            self._parser.stop()
            self._keep_alive = False
            self._unread = True
            self._hold()
        if self._parser.buffered_bytes > AHEAD_BYTES_MAX and not self._paused_reading and self._transport is not None:
            self._paused_reading = True
            self._transport.pause_reading()

    def _drop_work(self) -> None:
        """Tell whoever answers that the client does not wait for it any more."""
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work.client_gone()
        except Exception as error:  # noqa: BLE001  a boundary
            self._app.crashed("client", error)

    def _reject(self, error: RequestError) -> None:
        """What was sent is no request, or one that will not be read to its end: say so and close."""
        self._app.rejected(error.status)
        self._parser.stop()
        self._forget()
        self._busy, self.answering = True, False
        self._keep_alive = False
        self._unread = True
        self.respond_error(error)

    def _close(self) -> None:
        """Close after the answer was read. Closing with unread input would reset the connection under it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self.tls or not (self._unread or self._parser.has_partial_request or self._parser.buffered_bytes):
            transport.close()
            return
        self._lingers = True
        if self._paused_reading:
            transport.resume_reading()
        transport.write_eof()
