"""Which worker holds a stored response: it alone can go on from it, show it or cancel it.

Owns the names, the newest STORED_MAX of them. Refuses to know what a response says. Pure.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from router.edge.exchange import RESPONSES_PATH, Exchange
from router.http.request import HttpRequest

STORED_MAX: Final = 100_000
NAME_CHARS_MAX: Final = 256
_NAME = re.compile(rb'"id"\s*:\s*"([!-~]{1,%d}?)"' % NAME_CHARS_MAX)


class StoredResponses:
    """Of this router."""

    def __init__(self, count_max: int = STORED_MAX) -> None:
        self._count_max = count_max
        self._workers: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record_exchange(self, exchange: Exchange) -> None:
        """Note what an exchange that ended has stored, if it was one that stores."""
        request, decision = exchange.request, exchange.decision
        if request.path != RESPONSES_PATH or decision is None or not exchange.outcome.startswith("status_200"):
            return
        match = _NAME.search(exchange.progress.first_bytes)
        if match is not None:
            self.record(match[1].decode(), decision.worker)

    def record(self, name: str, worker: str) -> None:
        self._workers[name] = worker
        self._workers.move_to_end(name)
        if len(self._workers) > self._count_max:
            self._workers.popitem(last=False)

    def worker_for(self, request: HttpRequest, previous: str | None) -> str | None:
        """The worker that this request has to go to; None where any will do, or none is known. `previous`: the response
        that it goes on from."""
        if request.path.startswith(RESPONSES_PATH + "/"):
            previous = request.path[len(RESPONSES_PATH) + 1 :].partition("/")[0]
        return None if previous is None else self._workers.get(previous)
