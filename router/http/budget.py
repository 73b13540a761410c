"""How many bytes of clients' requests, and of answers that wait for them, are kept at once: in sum, and for each party
(an API key, else an address).

Owns the books: who takes bytes gives them back. Refuses to know what the bytes are. Invariant: what is held is the sum
over the parties, and a party that holds none is not listed.
"""

from __future__ import annotations

from typing import Final

from prompts.errors import RequestError
from router.http.config import HttpLimits
from router.metrics import Metrics

SMALL_BYTES: Final = 16 * 1024
"""What a connection keeps up to this is not counted: connections are, and small requests pass while big ones wait."""


class Budget:
    """Of one process."""

    def __init__(self, limits: HttpLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._parties: dict[str, int] = {}

    def change(self, party: str, before: int, after: int) -> None:
        """`party` keeps `after` bytes where it kept `before`. Raises RequestError, and changes nothing, where that is
        more than a bound allows."""
        added_bytes, total_bytes = after - before, self._metrics.request_buffer_bytes
        tenant_bytes = self._parties.get(party, 0) + added_bytes
        assert tenant_bytes >= 0
        if added_bytes > 0 and tenant_bytes > self._limits.tenant_buffer_bytes_max:
            self._metrics.refused_bytes["party"] += 1
            raise _full(429, "this client has too many bytes of requests in flight")
        if added_bytes > 0 and total_bytes + added_bytes > self._limits.request_buffer_bytes_max:
            self._metrics.refused_bytes["sum"] += 1
            raise _full(503, "the router keeps as many bytes of requests as it may")
        self._metrics.request_buffer_bytes = total_bytes + added_bytes
        if tenant_bytes:
            self._parties[party] = tenant_bytes
        else:
            self._parties.pop(party, None)

    def check_invariants(self) -> None:
        assert self._metrics.request_buffer_bytes == sum(self._parties.values())
        assert all(count > 0 for count in self._parties.values())


def _full(status: int, message: str) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=status)
