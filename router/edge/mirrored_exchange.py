"""Answer a copy of a request, which another balancer places: the copy is priced, and gets 204."""

from __future__ import annotations

from typing import Final

from prompts.errors import RequestError
from router.decide.messages import Decision, RouteRequest
from router.edge.config import Timeouts
from router.edge.proxy import Exchange, Proxy
from router.edge.request_context import RequestContext
from router.http.connection import Client

MIRRORED: Final = "mirrored"
"""Outcome of a copy."""
_NO_CONTENT: Final = b"HTTP/1.1 204 No Content\r\n\r\n"


class MirroredExchange(Exchange):
    """Answers a copy of a request that another balancer mirrors to compare decisions. No worker gets the copy."""

    __slots__ = ("_proxy", "client", "context")

    def __init__(self, proxy: Proxy, client: Client, context: RequestContext) -> None:
        self._proxy = proxy
        self.client = client
        self.context = context

    def request_worker(self, route: RouteRequest) -> None:
        """Record the decision that the router would have made, with the terms of every candidate, and answer."""
        decision = self._proxy.core.explain(route, self._proxy.now())
        if isinstance(decision, Decision):
            self.context.route, self.context.decision = route, decision
        self.answer()

    def answer(self) -> None:
        """Answer 204, also to an invalid copy: the worker that answers the original reports the error."""
        if self._proxy.end(self.context, MIRRORED):
            self.client.write(_NO_CONTENT)
            self.client.finish(keep_alive=self.context.request.keep_alive)

    def refuse(self, error: RequestError, outcome: str) -> None:
        self.answer()

    def on_client_gone(self) -> None:
        """End the copy, as its client has left."""
        self._proxy.end(self.context, "client_gone")

    def forward(self, decision: Decision) -> None:
        raise AssertionError("a copy is only priced")

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """End a copy if its prompt is not read in time."""
        if now - self.context.started_at_s > timeouts.total_s:
            self.answer()
