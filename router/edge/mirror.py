"""Copies of requests for a new version of a model: sent like any other, and their answers dropped.

Owns how many are in flight. Refuses to know who is to be sent a copy (router/sharing/names.py). No copy delays what it
is a copy of: it is made in a later turn of the loop, and what is too much, or too long, is not copied but counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

from prompts.errors import RequestError
from router.http.answers import Header
from router.http.connection import Client, Work
from router.http.request import HttpRequest

MIRROR: Final = "mirror"
"""Whose requests copies are."""


class Nobody:
    """Stands where a client would: drops what it is told."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        """`ended`: called once, with the outcome."""
        self.work: Work | None = None
        self.answering = False
        self.peer = self.party = MIRROR
        self._ended = ended
        self._over = False

    def _end(self, outcome: str) -> None:
        if not self._over:
            self._over, self.work = True, None
            self._ended(outcome)

    def write(self, data: bytes) -> None:
        self.answering = True

    def plain_socket(self) -> int:
        return -1

    def finish(self, *, keep_alive: bool) -> None:
        self._end("answered")

    def cut(self) -> None:
        self._end("failed")

    def crash(self, error: Exception) -> None:
        self._end("failed")

    def respond_error(self, error: RequestError, headers: Collection[Header] = ()) -> None:
        self._end("failed")

    def refuse(
        self, status: int, code: str, message: str, retry_after_s: float | None, *, param: str | None = None
    ) -> None:
        self._end("failed")


class Mirror:
    """All copies of one process."""

    def __init__(
        self, serve: Callable[[Client, HttpRequest], None], requests_max: int, bytes_max: int, counts: Counter[str]
    ) -> None:
        """`serve`: route and send a request for a client. `counts`: outcome -> copies."""
        self._serve = serve
        self._requests_max, self._bytes_max = requests_max, bytes_max
        self._counts = counts
        self.in_flight = 0

    def copy(self, request: HttpRequest, pieces: tuple[bytes, ...]) -> None:
        """Send `request` with another body, later."""
        if self.in_flight >= self._requests_max or sum(map(len, pieces)) > self._bytes_max:
            self._counts["dropped"] += 1
            return
        self.in_flight += 1
        copied = HttpRequest(request.method, request.target, request.path, request.headers)
        copied.pieces, copied.has_body = pieces, request.has_body
        asyncio.get_running_loop().call_soon(self._send, copied)

    def _send(self, request: HttpRequest) -> None:
        nobody = Nobody(self._ended)
        try:
            self._serve(nobody, request)
        except RequestError as refused:
            nobody.respond_error(refused)
        except Exception as error:  # noqa: BLE001  a boundary: of a request that nobody waits for
            nobody.crash(error)

    def _ended(self, outcome: str) -> None:
        self.in_flight -= 1
        self._counts[outcome] += 1
