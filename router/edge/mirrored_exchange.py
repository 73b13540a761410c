"""A copy of a request that a balancer or a mesh places: priced, and answered with 204 at once."""

from __future__ import annotations

from typing import Any, Final

from router.decide.messages import Decision, RouteRequest
from router.edge.exchange import Exchange
from router.edge.exchange_services import ExchangeServices
from router.http.connection import Client
from router.http.request import HttpRequest

MIRRORED: Final = "mirrored"
"""Outcome of a copy."""
_NO_CONTENT: Final = b"HTTP/1.1 204 No Content\r\n\r\n"


class MirroredExchange(Exchange):
    """One copy. The core is asked for prices only, so none of its books has the copy."""

    __slots__ = ("asked",)

    def __init__(
        self, proxy: ExchangeServices, client: Client, request: HttpRequest, request_id: str, trace_id: bytes
    ) -> None:
        super().__init__(proxy, client, request, request_id, trace_id)
        self.asked: Any = None
        """What the request asks for, where that could be read."""

    def price(self, asked: Any, route: RouteRequest) -> None:
        """Note what the router would have done, with the terms of every candidate."""
        found = self._services.core.explain(route, self._services.now())
        if isinstance(found, Decision):
            self.asked, self.route, self.decision = asked, route, found

    def answer(self) -> None:
        """Answer 204, whatever could be read of the copy."""
        client, keep_alive = self.client, self.request.keep_alive
        if self._end(MIRRORED):
            client.write(_NO_CONTENT)
            client.finish(keep_alive=keep_alive)

    def refuse(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        """Answer 204: whoever answers the request itself says what is wrong with it."""
        self.answer()
