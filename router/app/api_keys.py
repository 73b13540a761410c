"""Check the keys of requests: the admin key of this router, and the API keys of clients.

A web page in a browser on the operator's machine can send requests to loopback. So admin routes refuse requests with
the Origin of another site, with an unknown host name, or with a body that is not declared as JSON, also with the key.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from prompts.errors import RequestError
from router.app.tenant_limits import make_key_name
from router.http.connection import Client, ClientConnection
from router.http.request import HttpRequest

LOOPBACK = ("127.", "::1", "::ffff:127.")
PROXY_HEADERS = (b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via")

Guard = Callable[[ClientConnection, HttpRequest], None]
"""Checks a request for an admin route of one address. Raises RequestError if it is refused."""


class AdminGuard:
    """Lets only the operator use the router's admin routes. Each check raises RequestError if it refuses a request."""

    def __init__(self, key: str, hosts: Iterable[str]) -> None:
        """`hosts`: host names under which the admin routes may be requested, besides IP addresses and localhost."""
        self._key = key.encode()
        self._hosts = frozenset(host.lower() for host in hosts) | {"localhost"}

    def check_from_loopback(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Check a request on the main address: it has to come from this machine, and not through a proxy."""
        if not connection.peer.startswith(LOOPBACK) or any(request.get_header(name) for name in PROXY_HEADERS):
            raise _make_forbidden_error(f"{request.path} is served on the admin address only, or to loopback")
        self.check(connection, request)

    def refuse(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Refuse every request for an admin route: the main address serves none if there is an admin address."""
        raise _make_forbidden_error(f"{request.path} is served on the admin address only")

    def check(self, connection: ClientConnection, request: HttpRequest) -> None:
        """Check the admin key, and that no web page of another site sends the request. Raises RequestError."""
        if not hmac.compare_digest(read_bearer_token(request), self._key):
            message = (
                "the admin key is needed: Authorization: Bearer KEY, with the key that the router printed at its "
                "start, or that of --admin-api-key"
            )
            raise RequestError(message, param=None, code="invalid_api_key", status=401)
        host = (request.get_header(b"host") or b"").decode("latin-1").lower()
        if not self._is_own_host(host):
            raise _make_forbidden_error(
                "the Host header names none of this router's hosts; --admin-host NAME makes it one"
            )
        origin = request.get_header(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            raise _make_forbidden_error("pages of other sites may not use the admin routes")
        # A browser sends JSON to another site only if that site allows it.
        content_type = (request.get_header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if request.has_body and content_type != b"application/json":
            raise RequestError("the body needs the header Content-Type: application/json", param=None, status=415)

    def _is_own_host(self, host: str) -> bool:
        """Return whether a Host header names this router: by an allowed name, or by any IP address.

        A web page reaches this address under a name of its own, which its DNS server gives the router's address. So
        other names are refused. An IP address in the Host header is the one that was connected to.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class ApiKeys:
    """Checks the API keys of clients, and finds the tenant to whom a key belongs."""

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys`: the valid keys; none if clients need no key."""
        self._keys = [key.encode() for key in keys]

    def find_tenant(self, client: Client, request: HttpRequest) -> str:
        """Return the name of a request's API key, or the client's address without keys. Raises RequestError."""
        if not self._keys:
            return client.peer
        client_key = read_bearer_token(request) or (request.get_header(b"x-api-key") or b"").strip()
        # All keys are compared, each in constant time, so that the time shows nothing about the keys.
        matching_numbers = [number for number, key in enumerate(self._keys) if hmac.compare_digest(client_key, key)]
        if not matching_numbers:
            message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
            raise RequestError(message, param=None, code="invalid_api_key", status=401)
        return make_key_name(matching_numbers[0])


def read_bearer_token(request: HttpRequest) -> bytes:
    """Return the bearer token of a request; empty if there is none."""
    scheme, _, token = (request.get_header(b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _make_forbidden_error(message: str) -> RequestError:
    return RequestError(message, param=None, code="forbidden", status=403)
