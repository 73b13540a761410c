"""What one API key may have of the router at once, and what keeps its prompts apart from those of the others.

Owns the requests and prompt tokens in flight of each key (bytes are router/http/budget.py's), the priorities that it
may ask for, and its salt. Without keys nothing is kept: only `--max-in-flight` bounds what comes. Invariant: a
tenant's sums are those of its requests that have not ended.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter

from prompts.errors import RequestError
from router.app.request_reader import RequestIntent
from router.counters import Metrics
from router.edge.config import EdgeConfig

_SALTED = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))
"""Routes whose bodies take a `cache_salt`."""


class Tenants:
    """All keys of one process."""

    def __init__(self, config: EdgeConfig, metrics: Metrics) -> None:
        names = {key: name_of(number) for number, key in enumerate(config.api_keys)}
        self._metrics = metrics
        self._requests_max = config.key_requests_max
        self._tokens_max = config.key_tokens_max
        self._priority_min = config.priority_min
        self._floors = {names[key]: floor for key, floor in config.floors.items() if key in names}
        self.shares = {names[key]: share for key, share in config.shares.items() if key in names}
        """Of fair turns, where it is not 1."""
        self._salts = {name: _salt(key) for key, name in names.items()} if config.tenant_salts else {}
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._flights: dict[str, tuple[str, int]] = {}
        """request id -> (tenant, prompt tokens)."""
        self._are_keys = bool(names)

    def check(self, tenant: str) -> None:
        """Raises RequestError where a key has too many requests."""
        if self._are_keys and self.requests[tenant] >= self._requests_max:
            self._refuse("requests", f"this API key has {self.requests[tenant]} requests in flight")

    def enter(self, tenant: str, request_id: str) -> None:
        """A request begins."""
        if self._are_keys:
            self.requests[tenant] += 1
            self._flights[request_id] = (tenant, 0)

    def weigh(self, request_id: str, tokens: int) -> None:
        """Its prompt was read. Raises RequestError where its key has too many tokens in flight."""
        known = self._flights.get(request_id)
        if known is None:
            return  # its client left, or there are no keys
        tenant = known[0]
        if self.tokens[tenant] and self.tokens[tenant] + tokens > self._tokens_max:
            self._refuse("tokens", f"this API key has prompts of {self.tokens[tenant]} tokens in flight")
        self.tokens[tenant] += tokens
        self._flights[request_id] = (tenant, tokens)

    def leave(self, request_id: str) -> None:
        """A request ended."""
        known = self._flights.pop(request_id, None)
        if known is None:
            return
        tenant, tokens = known
        for sums, amount in ((self.requests, 1), (self.tokens, tokens)):
            sums[tenant] -= amount
            if not sums[tenant]:
                del sums[tenant]

    def apply(self, tenant: str, path: str, asked: RequestIntent) -> dict[str, object]:
        """Give a request its key's name of its session, its key's salt, and no more priority than its key may ask for.
        Return the fields of its body that say so to the worker."""
        if self._are_keys:
            asked.session = asked.session.of_tenant(tenant)
        floor, salt = self._floors.get(tenant, self._priority_min), self._salts.get(tenant)
        if salt is None and asked.priority >= floor and asked.body_request.priority >= floor:
            return {}
        fields: dict[str, object] = {}
        if asked.body_request.priority < floor:
            fields["priority"] = floor
        asked.priority = max(asked.priority, floor)
        if salt is not None and path in _SALTED:
            given = asked.body_request.cache_salt
            fields["cache_salt"] = salt = salt if given is None else f"{salt}:{given}"
            asked.body_request = asked.body_request.replaced(cache_salt=salt)
        return fields

    def check_invariants(self) -> None:
        requests = Counter(tenant for tenant, _ in self._flights.values())
        tokens: Counter[str] = Counter()
        for tenant, amount in self._flights.values():
            tokens[tenant] += amount
        assert requests == self.requests
        assert +tokens == self.tokens

    def _refuse(self, bound: str, message: str) -> None:
        self._metrics.refused_by_key[bound] += 1
        raise RequestError(message, param=None, code="too_many_requests", status=429)


def name_of(number: int) -> str:
    """What the key in this place of the configuration is called."""
    return f"key {number}"


def _salt(key: str) -> str:
    """The same in every router, and nothing that leads back to the key."""
    return hmac.new(key.encode(), b"blockcast cache salt", hashlib.sha256).hexdigest()[:32]
