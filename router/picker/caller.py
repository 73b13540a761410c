"""What stands where a client's connection stands in `router run`: one gRPC stream of Envoy's, for one request.

Owns the way between conversation and exchange, the bytes booked, and the future that the stream waits on. Refuses to
know gRPC (router/picker/server.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from prompts.errors import RequestError
from router.http.budget import UNCOUNTED_BYTES, Budget
from router.http.config import HttpLimits
from router.http.connection import Responder
from router.http.decoding import BodyDecoder, DecodingTask, body_coding
from router.http.fair_scheduler import FairScheduler
from router.http.local_replies import JSON, Header, error_headers, refusal
from router.http.request import HttpRequest
from router.picker.conversation import AnswerBegun, Choice, Conversation, Phase
from router.picker.messages import FAIRNESS, OBJECTIVE, Request, Response
from router.picker.pick import Pick

if TYPE_CHECKING:
    from router.picker.pick import Picking

NAME_BYTES_MAX = 256


class PickerApplication(Protocol):
    """router/app/server.py is it."""

    limits: HttpLimits
    budget: Budget
    scheduler: FairScheduler

    def pick(self, caller: Caller, request: HttpRequest) -> None:
        """Find a worker, now or later. Raises RequestError."""

    def record_rejection(self, status: int) -> None: ...

    def record_crash(self, place: str, error: Exception) -> None: ...


class Caller:
    """One request. `receive` what Envoy sends; while `waits`, wait for `decided`; send what `take` gives."""

    def __init__(self, app: PickerApplication, picking: Picking, peer: str) -> None:
        self._app = app
        self.picking = picking
        self.peer = self.tenant = peer
        self.responder: Responder | None = None
        self.has_response_started = False
        self.cors_headers = b""
        self._pick: Pick | None = None
        self._path = ""
        self._held = 0
        self._booked = ""
        """On whom."""
        self._conversation = Conversation(self, app.limits.body_bytes_max)
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.abandoned = False
        self.objective: str | None = None
        self.fairness = ""

    @property
    def waits(self) -> bool:
        """The next thing to happen is not Envoy's."""
        return self._conversation.phase is Phase.CHOOSING

    @property
    def over(self) -> bool:
        return self._conversation.phase is Phase.OVER

    @property
    def sees_answer(self) -> bool:
        return self._conversation.sees_answer

    @property
    def hint(self) -> list[str] | None:
        return self._conversation.hint

    def take(self) -> list[Response]:
        return self._conversation.take()

    def receive(self, message: Request) -> None:
        """Raises OutOfTurn. Whatever else goes wrong ends this request alone."""
        try:
            self._conversation.receive(message)
        except RequestError as refused:
            self._app.record_rejection(refused.status)
            self._cancel_responder()
            self.respond_error(refused)

    def closed(self) -> None:
        """Envoy asks no more, or cannot be told any more."""
        try:
            pick, self._pick = self._pick, None
            if pick is not None and not pick.done:
                pick.left()
        except Exception as error:  # noqa: BLE001  a boundary
            self._app.record_crash("picker", error)
        self._cancel_responder()
        if self._held:
            self._app.budget.change(self._booked, self._held, 0)
            self._held = 0

    # The conversation's party ---------------------------------------------------------------------------------------

    def _client(self) -> str:
        """As the gateway says, which is one peer for all of them."""
        request = self._conversation.request
        told = None if request is None else request.header(b"x-forwarded-for")
        return (told or b"").rpartition(b",")[2].strip()[:64].decode("latin-1") or self.peer

    def complete(self, request: HttpRequest) -> None:
        self._path, self.peer = request.path, self._client()
        self.objective = _text(request.header(OBJECTIVE))
        self.fairness = _text(request.header(FAIRNESS)) or ""
        try:
            coding = body_coding(request) if request.body_bytes else None
            if coding is None:
                self._app.pick(self, request)
            else:
                self._decode(request, BodyDecoder(request.pieces, coding, self._app.limits.body_bytes_max))
        except RequestError as refused:
            self._refuse(refused)
        except Exception as error:  # noqa: BLE001  a boundary: this request fails
            self.crash(error)

    def _decode(self, request: HttpRequest, decoder: BodyDecoder) -> None:
        encoded_bytes = request.body_bytes

        def then(refused: RequestError | None) -> None:
            self.responder = None
            try:
                if refused is not None:
                    raise refused
                self._app.pick(self, request)
            except RequestError as error:
                self._refuse(error)
            except Exception as error:  # noqa: BLE001  a boundary: this request fails
                self.crash(error)

        def hold(decoded_bytes: int) -> None:
            self.keeps(encoded_bytes + decoded_bytes)

        self.responder = DecodingTask(request, decoder, self._app.scheduler, self._booked or self._client(), hold, then)

    def _refuse(self, error: RequestError) -> None:
        self._app.record_rejection(error.status)
        self._cancel_responder()
        self.respond_error(error)

    def opened(self, pick: Pick) -> None:
        """The exchange of this request."""
        self._pick = pick

    def keeps(self, size: int) -> None:
        kept = size if size > UNCOUNTED_BYTES else 0
        if kept != self._held:
            self._booked = self._booked or self._client()
            self._app.budget.change(self._booked, self._held, kept)
            self._held = kept

    def begun(self, answer: AnswerBegun) -> Sequence[Header]:
        if self._conversation.phase is not Phase.CHOSEN or self._pick is None:
            self._cancel_responder()  # answered by Envoy before it was sent anywhere
            return ()
        return self._pick.begun(answer)

    def content(self, data: bytes) -> None:
        if self._pick is not None:
            self._pick.content(data)

    def ended(self) -> None:
        if self._pick is not None:
            self._pick.completed()

    # The exchange's client ------------------------------------------------------------------------------------------

    def chosen(self, choice: Choice) -> None:
        if self._conversation.phase is Phase.CHOOSING:
            self._conversation.choose(choice)
            self._decide()

    def respond_error(self, error: RequestError, headers: Collection[Header] = ()) -> None:
        if self._conversation.phase in (Phase.CHOSEN, Phase.ANSWER, Phase.OVER):
            return  # Envoy has gone on with it
        self.responder = None
        fields = [(b"content-type", JSON), *headers, *error_headers(error, headers)]
        self._conversation.refuse(error.status, fields, msgspec.json.encode(error.body(self._path)))
        self._decide()

    def refuse(
        self, status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None = None
    ) -> None:
        self.respond_error(*refusal(status, code, message, retry_after_s, param=param))

    def crash(self, error: Exception) -> None:
        self._app.record_crash("picker", error)
        self._cancel_responder()
        self.refuse(500, "internal_error", "the router failed to answer; its log says why", None)

    def abandon(self) -> None:
        """It has taken too long."""
        self.abandoned = True
        self._cancel_responder()
        self._decide()

    def abort_response(self) -> None:
        self.abandon()

    def write(self, data: bytes) -> None:
        raise AssertionError("Envoy carries the bytes")

    def finish(self, *, keep_alive: bool) -> None:
        self.responder = None

    def _decide(self) -> None:
        if not self.decided.done():
            self.decided.set_result(None)

    def _cancel_responder(self) -> None:
        work, self.responder = self.responder, None
        if work is None:
            return
        try:
            work.client_gone()
        except Exception as error:  # noqa: BLE001  a boundary
            self._app.record_crash("picker", error)


def _text(value: bytes | None) -> str | None:
    return value[:NAME_BYTES_MAX].decode("utf-8", "replace") if value else None
