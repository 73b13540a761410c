"""API keys of clients and of the operator."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from prompts import RequestError


class ApiKeys:
    """Checks the API keys of requests: clients' keys, and the operator's key for routes that change the engine.

    Without any keys, everybody may call every route.
    """

    def __init__(self, client_keys: Sequence[str], admin_key: str | None) -> None:
        self._client_keys = [key.encode() for key in client_keys]
        self._admin_keys = [] if admin_key is None else [admin_key.encode()]

    def check_client(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError 401 unless the headers of a request have a client's key."""
        if self._client_keys and not _has_key(headers, self._client_keys):
            message = "Incorrect or missing API key: expected the header Authorization: Bearer KEY, or x-api-key: KEY"
            raise RequestError(message, code="invalid_api_key", status=401)

    def get_tenant(self, headers: Mapping[str, str], address: str | None) -> str:
        """Return what tells clients apart, for fair turns: the key, or the network address if there are no keys."""
        return _read_token(headers) if self._client_keys else address or ""

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError 401 unless the headers have the operator's key.

        If only clients' keys are configured, no key opens the operator's routes, and the status is 403.
        """
        if not self._admin_keys and self._client_keys:
            message = "an operator's route, which no client's key opens: start the engine with --admin-api-key"
            raise RequestError(message, code="forbidden", status=403)
        if self._admin_keys and not _has_key(headers, self._admin_keys):
            message = (
                "Incorrect or missing admin key: expected the header Authorization: Bearer KEY with the key of "
                "--admin-api-key"
            )
            raise RequestError(message, code="invalid_api_key", status=401)


def _has_key(headers: Mapping[str, str], keys: Sequence[bytes]) -> bool:
    """Return whether the token of a request is one of the keys."""
    token = _read_token(headers).encode()
    matches = [hmac.compare_digest(token, key) for key in keys]  # all, so that time reveals nothing
    return any(matches)


def _read_token(headers: Mapping[str, str]) -> str:
    """Return the bearer token of a request, or Anthropic's header if there is none."""
    scheme, _, credentials = headers.get("Authorization", "").partition(" ")
    token = credentials if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return token.strip()
