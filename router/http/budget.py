"""Memory budget: bytes of requests and unsent answers that are buffered at once, in total and for each tenant.

A tenant is an API key, else an address. Invariant: the total is the sum over the tenants, and a tenant that holds none
is not listed.
"""

from __future__ import annotations

from typing import Final

from prompts.errors import RequestError
from router.http.config import HttpLimits
from router.metrics import Metrics

UNCOUNTED_BYTES: Final = 16 * 1024
"""A connection with no more bytes than these is not counted, so that small requests pass while large ones wait."""


class BufferBudget:
    """Limits the memory for buffered requests and answers, in total and for each tenant, an API key or an address."""

    def __init__(self, limits: HttpLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._bytes_by_tenant: dict[str, int] = {}

    def change(self, tenant: str, old_bytes: int, new_bytes: int) -> None:
        """Replace a reservation of `old_bytes` of a tenant by one of `new_bytes`.

        Raises RequestError, and changes nothing, if the tenant or the process would then hold more than its limit.
        """
        added_bytes = new_bytes - old_bytes
        tenant_bytes = self._bytes_by_tenant.get(tenant, 0) + added_bytes
        total_bytes = self._metrics.request_buffer_bytes + added_bytes
        assert tenant_bytes >= 0
        if added_bytes > 0 and tenant_bytes > self._limits.tenant_buffer_bytes_max:
            self._metrics.refused_bytes["tenant"] += 1
            raise _make_overload_error(429, "this client has too many bytes of requests in flight")
        if added_bytes > 0 and total_bytes > self._limits.request_buffer_bytes_max:
            self._metrics.refused_bytes["sum"] += 1
            raise _make_overload_error(503, "the router keeps as many bytes of requests as it may")
        self._metrics.request_buffer_bytes = total_bytes
        if tenant_bytes:
            self._bytes_by_tenant[tenant] = tenant_bytes
        else:
            self._bytes_by_tenant.pop(tenant, None)

    def check_invariants(self) -> None:
        assert self._metrics.request_buffer_bytes == sum(self._bytes_by_tenant.values())
        assert all(count > 0 for count in self._bytes_by_tenant.values())


class BufferCharge:
    """Share of one client's connection in its tenant's memory budget. Up to UNCOUNTED_BYTES are not charged."""

    __slots__ = ("_budget", "charged_bytes", "request_bytes", "tenant", "unsent_response_bytes")

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.charged_bytes = 0
        self.tenant = ""
        self.request_bytes = 0
        """Buffered bytes of the current request: its head, and its body as far as it was received and decoded."""
        self.unsent_response_bytes = 0
        """Bytes of answers that wait to be sent, as the client reads slowly."""

    def update(self, unparsed_bytes: int = 0) -> None:
        """Charge the bytes that are buffered now, and `unparsed_bytes` of further input.

        Raises RequestError, and changes nothing, if the budget has no room for them.
        """
        buffered_bytes = self.request_bytes + self.unsent_response_bytes + unparsed_bytes
        new_bytes = buffered_bytes if buffered_bytes > UNCOUNTED_BYTES else 0
        if new_bytes != self.charged_bytes:
            self._budget.change(self.tenant, self.charged_bytes, new_bytes)
            self.charged_bytes = new_bytes

    def release(self) -> None:
        """Return all charged bytes to the tenant's budget."""
        if self.charged_bytes:
            self._budget.change(self.tenant, self.charged_bytes, 0)
            self.charged_bytes = 0


def _make_overload_error(status: int, message: str) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=status)
