"""A request that somebody else places: passed on to one balancer, or a copy that nobody answers. Nothing is decided.

Owns how the core hears of it. At its arrival the core prices every worker, so that what was known then can be set
beside where it went; when the answer tells who gave it, the books follow. Rules:

* What the core would refuse, and what cannot be read here, is passed on all the same.
* Nothing is repeated, nothing goes on elsewhere: what the balancer says is what the client gets.
"""

from __future__ import annotations

from typing import Any, Final

from router.decide.messages import Decision, FailureKind, RouteRequest, Terms
from router.edge.carrier import RETRYABLE, Carrier
from router.edge.exchange import Exchange
from router.http.connection import Client
from router.http.request import HttpRequest
from router.http.response import ResponseHead

MIRRORED: Final = "mirrored"
"""Outcome of a copy."""
_OWN = frozenset(("bad_gateway", "overloaded", "timeout"))
"""Codes of what ends a request here; the others are the core's."""
_NO_CONTENT: Final = b"HTTP/1.1 204 No Content\r\n\r\n"


class Passed(Exchange):
    """One request to the balancer."""

    __slots__ = ("asked", "placed", "priced")

    def __init__(self, proxy: Carrier, client: Client, request: HttpRequest, request_id: str, trace_id: bytes) -> None:
        super().__init__(proxy, client, request, request_id, trace_id)
        self.asked: Any = None
        """What it asks for, where that could be read."""
        self.priced: Decision | None = None
        """What the router would have done, with the terms of every candidate at its arrival."""
        self.placed = False
        """The answer told who gave it: `decision` is about that worker, as it was at the arrival."""

    def asks(self, route: RouteRequest) -> None:
        """Price it before its own load is on the books."""
        found = self._proxy.core.explain(route, self._proxy.now())
        self.priced = found if isinstance(found, Decision) else None

    def forward(self, decision: Decision) -> None:
        """Pass it on, the first time; later the books have followed to who served it."""
        decision.rank = None  # the balancer's choice
        first = self.decision is None
        self.decision = decision
        if first:
            self._start(decision)

    def refuse(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        """End with an error of our own; what the core refuses is passed on."""
        if code in _OWN:
            super().refuse(status, code, message, retry_after_s)
        elif self.decision is None:
            self.pass_on()

    def pass_on(self) -> None:
        """Without the core knowing of it."""
        self.decision = nowhere(self.request_id)
        self._start(self.decision)

    def _accept_head(self, head: ResponseHead) -> bytes | None:
        server = self._proxy.served_by(head)
        if self.in_core and (server is None or head.status in RETRYABLE):
            self._forget_in_core(None)
        elif self.in_core and server is not None:
            self._follow(server)
        return super()._accept_head(head)

    def _follow(self, server: str) -> None:
        """The balancer sent it there: so do the books."""
        proxy, route = self._proxy, self.route
        assert route is not None
        if self.decision is not None and self.decision.worker != server:
            self.route = route.replaced(worker=server, subset=None)
            # OVERLOADED is the failure that nobody is blamed for.
            proxy.perform(proxy.core.failed(self.request_id, FailureKind.OVERLOADED, proxy.now(), self.route))
        decision = self.decision
        if decision is None or decision.worker != server or not as_priced(decision, self.priced):
            self._forget_in_core(None)
        else:
            self.placed = True

    def _attempt_failed(self, kind: FailureKind, reason: str) -> None:
        self.sent_s = None
        self._proxy.attempt_failed(None, kind, f"the balancer: {reason}")
        self._forget_in_core(None)
        super().refuse(502, "bad_gateway", f"the balancer did not answer: {reason}")


class Mirrored(Passed):
    """A copy of a request that goes to somebody else: priced, answered with 204 at once."""

    __slots__ = ()

    def _start(self, decision: Decision) -> None:
        client, keep_alive = self.client, self.request.keep_alive
        if self._end(MIRRORED):
            self._let_go()
            client.write(_NO_CONTENT)
            client.finish(keep_alive=keep_alive)


def as_priced(decision: Decision, priced: Decision | None) -> bool:
    """Make it tell what was known of its worker, and of the best one, at the arrival; False where nothing was. Later
    the prompt's own blocks are in its worker's cache."""
    own = None if priced is None else terms_of(priced, decision.worker)
    if priced is None or own is None:
        return False
    decision.terms, decision.decided_s, decision.attempt = own, priced.decided_s, 0
    decision.predicted_cached_tokens, decision.predicted_ttft_s = own.cached_tokens, own.ttft_s
    most = max(priced.candidates, key=lambda terms: terms.cached_tokens)
    decision.best = most if most.cached_tokens > own.cached_tokens else None
    decision.candidates = priced.candidates
    return True


def terms_of(priced: Decision, worker: str) -> Terms | None:
    """Of that rank of a worker which has most of the prompt; None where it was no candidate."""
    own = [t for t in priced.candidates if t.worker == worker or t.worker.rpartition("#")[0] == worker]
    return max(own, key=lambda terms: terms.cached_tokens, default=None)


def nowhere(request_id: str) -> Decision:
    """Of a request that the core knows nothing of."""
    terms = Terms("", 0, 0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
    return Decision(request_id, "", None, 0, 0, 0, 0.0, terms, 0.0)
