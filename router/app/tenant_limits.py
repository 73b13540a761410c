"""Limits and settings of each API key: requests and prompt tokens in flight, priority, share and cache salt.

Without keys nothing is counted. Bytes are limited by router/http/budget.py. Invariant: the sums of a tenant are those
of its requests that have not ended.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from prompts.errors import RequestError
from router.decide.messages import RouteRequest
from router.edge.config import EdgeConfig
from router.edge.request_context import RequestContext
from router.index.protocol import Scope
from router.metrics import Metrics
from router.prompting.sessions import Session

_SALTED_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))
"""Paths of the APIs that have a field `cache_salt`. In other bodies, workers know no such field."""


class _KeySettings(NamedTuple):
    """Settings of one API key."""

    priority_min: int
    share: float = 1.0
    """Share of fair turns."""
    salt: str | None = None


class TenantLimits:
    """Limits the requests and tokens in flight of each API key, and applies the settings of keys to requests."""

    def __init__(self, config: EdgeConfig, metrics: Metrics) -> None:
        """Read the settings of all API keys. A tenant is a key, or without keys a client's address, with no limits."""
        self._metrics = metrics
        self._has_keys = bool(config.api_keys)
        self._requests_max = config.key_requests_max
        self._tokens_max = config.key_tokens_max
        self.requests_in_flight: Counter[str] = Counter()
        self.tokens_in_flight: Counter[str] = Counter()
        self._default_settings = _KeySettings(config.priority_min)
        self._settings_by_tenant: dict[str, _KeySettings] = {}
        priority_min_by_key, share_by_key = config.floors, config.shares
        for number, key in enumerate(config.api_keys):
            self._settings_by_tenant[make_key_name(number)] = _KeySettings(
                priority_min=priority_min_by_key.get(key, config.priority_min),
                share=share_by_key.get(key, 1.0),
                salt=_make_salt(key) if config.tenant_salts else None,
            )

    def check_request_limit(self, tenant: str) -> None:
        """Raise RequestError if a key has too many requests in flight."""
        if self._has_keys and self.requests_in_flight[tenant] >= self._requests_max:
            self._refuse("requests", f"this API key has {self.requests_in_flight[tenant]} requests in flight")

    def add_request(self, context: RequestContext) -> None:
        """Count a request that begins."""
        if self._has_keys:
            self.requests_in_flight[context.tenant] += 1
            context.charged_tokens = 0

    def add_prompt_tokens(self, context: RequestContext, tokens: int) -> None:
        """Count the tokens of a request's prompt. Raises RequestError if its key has too many in flight.

        A key without tokens in flight may send a prompt of any length, which would be refused forever otherwise.
        """
        if context.charged_tokens is None:
            return  # its client left, or there are no keys
        tenant = context.tenant
        if self.tokens_in_flight[tenant] and self.tokens_in_flight[tenant] + tokens > self._tokens_max:
            self._refuse("tokens", f"this API key has prompts of {self.tokens_in_flight[tenant]} tokens in flight")
        self.tokens_in_flight[tenant] += tokens
        context.charged_tokens = tokens

    def remove_request(self, context: RequestContext) -> None:
        """Stop counting a request that ended."""
        if context.charged_tokens is None:
            return
        tenant = context.tenant
        self.requests_in_flight[tenant] -= 1
        self.tokens_in_flight[tenant] -= context.charged_tokens
        context.charged_tokens = None
        if not self.requests_in_flight[tenant]:
            del self.requests_in_flight[tenant]
            del self.tokens_in_flight[tenant]

    def apply_key_settings(self, context: RequestContext, route: RouteRequest) -> dict[str, object]:
        """Apply the settings of a request's API key; return the fields to set in the body that the worker gets.

        Changes `route`, by which the router queues the request and finds its cached blocks. The worker itself uses the
        priority (a key has a smallest number) and the cache salt, with which no two keys share cached blocks.
        """
        tenant, body = context.tenant, context.body
        assert body is not None
        settings = self._settings_by_tenant.get(tenant, self._default_settings)
        body_fields: dict[str, object] = {}
        route.tenant = tenant
        route.share = settings.share
        if self._has_keys:  # so that no two keys share a session
            session = Session(route.session, route.parent).add_tenant(tenant)
            route.session, route.parent = session.name, session.parent_name
        route.priority = max(route.priority, settings.priority_min)
        if body.request.priority < settings.priority_min:
            body_fields["priority"] = settings.priority_min
        if settings.salt is not None and context.request.path in _SALTED_PATHS:
            client_salt = route.scope.salt
            salt = settings.salt if client_salt is None else f"{settings.salt}:{client_salt}"
            body_fields["cache_salt"] = salt
            route.scope = Scope(route.scope.model, salt, route.scope.lora)
        return body_fields

    def check_invariants(self, contexts: Iterable[RequestContext]) -> None:
        """Assert that the sums are those of the requests in flight."""
        counted_contexts = [context for context in contexts if context.charged_tokens is not None]
        request_counts, token_counts = Counter(context.tenant for context in counted_contexts), Counter[str]()
        for context in counted_contexts:
            token_counts[context.tenant] += context.charged_tokens or 0
        assert request_counts == self.requests_in_flight
        assert +token_counts == self.tokens_in_flight

    def _refuse(self, bound: str, message: str) -> None:
        self._metrics.refused_by_key[bound] += 1
        raise RequestError(message, param=None, code="too_many_requests", status=429)


def make_key_name(number: int) -> str:
    """Return the name of the key at this place of the configuration."""
    return f"key {number}"


def _make_salt(key: str) -> str:
    """Return the salt of a key: equal in every router, and without a way back to the key."""
    return hmac.new(key.encode(), b"blockcast cache salt", hashlib.sha256).hexdigest()[:32]
