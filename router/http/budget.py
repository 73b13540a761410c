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
"""Bytes of a connection that are not counted, so that small requests pass while large ones wait."""


class BufferBudget:
    """Memory for requests and answers in this process, in total and by tenant."""

    def __init__(self, limits: HttpLimits, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._bytes_by_tenant: dict[str, int] = {}

    def change(self, tenant: str, old_bytes: int, new_bytes: int) -> None:
        """Change the bytes that a tenant holds from `old_bytes` to `new_bytes`.

        Raises RequestError, and changes nothing, if that is more than the bound of the tenant or of the process.
        """
        added_bytes, total_bytes = new_bytes - old_bytes, self._metrics.request_buffer_bytes
        tenant_bytes = self._bytes_by_tenant.get(tenant, 0) + added_bytes
        assert tenant_bytes >= 0
        if added_bytes > 0 and tenant_bytes > self._limits.tenant_buffer_bytes_max:
            self._metrics.refused_bytes["tenant"] += 1
            raise _make_overload_error(429, "this client has too many bytes of requests in flight")
        if added_bytes > 0 and total_bytes + added_bytes > self._limits.request_buffer_bytes_max:
            self._metrics.refused_bytes["sum"] += 1
            raise _make_overload_error(503, "the router keeps as many bytes of requests as it may")
        self._metrics.request_buffer_bytes = total_bytes + added_bytes
        if tenant_bytes:
            self._bytes_by_tenant[tenant] = tenant_bytes
        else:
            self._bytes_by_tenant.pop(tenant, None)

    def check_invariants(self) -> None:
        assert self._metrics.request_buffer_bytes == sum(self._bytes_by_tenant.values())
        assert all(count > 0 for count in self._bytes_by_tenant.values())


def _make_overload_error(status: int, message: str) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=status)
