"""Who may use the admin routes: a key everywhere but on a Unix socket, and nothing that a web page could send. And
whose a client's request is, by its API key.

A page in a browser on the operator's machine can reach loopback; so a key is not all: a request with another site's
Origin, with a Host that only a name server knows, or with a body that is not declared as JSON is refused too.
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
"""Raises RequestError where a request may not use the admin routes of the address that it came to."""


class AdminGuard:
    """The rules of one process."""

    def __init__(self, key: str, hosts: Iterable[str]) -> None:
        """`hosts`: names by which the admin routes are reached, besides addresses and localhost."""
        self._key = key.encode()
        self._hosts = frozenset(host.lower() for host in hosts) | {"localhost"}

    def check_on_admin_address(self, connection: ClientConnection, request: HttpRequest) -> None:
        """The address that serves nothing else."""
        self._check(request)

    def check_on_loopback(self, connection: ClientConnection, request: HttpRequest) -> None:
        """The main address where there is no other: for this very machine, and not by way of a proxy on it."""
        if not connection.peer.startswith(LOOPBACK) or any(request.get_header(name) for name in PROXY_HEADERS):
            raise _forbidden_error(f"{request.path} is served on the admin address only, or to loopback")
        self._check(request)

    def refuse(self, connection: ClientConnection, request: HttpRequest) -> None:
        """The main address where there is another for these routes."""
        raise _forbidden_error(f"{request.path} is served on the admin address only")

    def _check(self, request: HttpRequest) -> None:
        if not hmac.compare_digest(bearer_token(request), self._key):
            raise RequestError(
                "the admin key is needed: Authorization: Bearer KEY", param=None, code="invalid_api_key", status=401,
            )  # fmt: skip
        host = (request.get_header(b"host") or b"").decode("latin-1").lower()
        if not self._is_own_host(host):
            raise _forbidden_error("the Host header names none of this router's hosts; --admin-host NAME makes it one")
        origin = request.get_header(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            raise _forbidden_error("pages of other sites may not use the admin routes")
        kind = (request.get_header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if request.has_body and kind != b"application/json":
            raise RequestError("the body has to be declared as application/json", param=None, status=415)

    def _is_own_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class ApiKeys:
    """The keys of clients."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def find_tenant(self, client: Client, request: HttpRequest) -> str:
        """Return whose a request is: the name of its key, or its client's address where there are no keys. Raises
        RequestError where it brings none of the keys. Every key is compared, each in constant time."""
        if not self._keys:
            return client.peer
        token = bearer_token(request) or (request.get_header(b"x-api-key") or b"").strip()
        matches = [make_key_name(number) for number, key in enumerate(self._keys) if hmac.compare_digest(token, key)]
        if not matches:
            raise RequestError(
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", param=None,
                code="invalid_api_key", status=401,
            )  # fmt: skip
        return matches[0]


def allow_all(connection: ClientConnection, request: HttpRequest) -> None:
    """A Unix socket: who can open it is the file system's to say."""


def bearer_token(request: HttpRequest) -> bytes:
    """The key that a request brings; empty where there is none."""
    scheme, _, token = (request.get_header(b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _forbidden_error(message: str) -> RequestError:
    return RequestError(message, param=None, code="forbidden", status=403)
