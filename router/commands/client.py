"""Client of a router for operators' commands: one question over HTTP, with the admin key and TLS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import click

from options import ConfigError
from options.tls import make_client_context
from router.http_client import FetchError, fetch, make_key_headers

MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Address, key and TLS files by which a router is asked."""

    url: str
    admin_key: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None

    def fetch_json(self, path: str, *, timeout_s: float) -> tuple[int, Any]:
        """Return (status, JSON) of a GET. Raises click.ClickException."""
        try:
            context = make_client_context(self.tls_cert, self.tls_key, self.tls_ca, "--tls")
        except ConfigError as error:
            raise click.UsageError(str(error)) from None

        async def request() -> tuple[int, bytes]:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context), auto_decompress=False
            ) as session:
                return await fetch(
                    session,
                    f"{self.url.rstrip('/')}{path}",
                    headers=make_key_headers(self.admin_key),
                    seconds=timeout_s,
                    bytes_max=MAX_ANSWER_BYTES,
                )

        try:
            status, answer = asyncio.run(request())
        except FetchError as error:
            raise click.ClickException(
                f"{self.url}: {error}: is this the address of the router's admin routes, and does it run?"
            ) from None
        if status in (401, 403):
            raise click.ClickException(f"{self.url} answers {status}: give the admin key, --key")
        try:
            return status, json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise click.ClickException(f"{self.url}{path} answers {status} and no JSON: {error}") from None


def add_router_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument URL and the options of the client; `command` gets them as `router`."""

    @wraps(command)
    def run(
        url: str, key: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, **options: Any
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise click.ClickException(f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        command(AdminClient(url, key, tls_ca, tls_cert, tls_key), **options)

    file_type = click.Path(dir_okay=False)
    for option in (
        click.option("--tls-key", type=file_type, metavar="FILE", help="Private key (PEM) of --tls-cert."),
        click.option(
            "--tls-cert", type=file_type, metavar="FILE", help="Certificate (PEM) shown to a router that requires one."
        ),
        click.option(
            "--tls-ca",
            type=file_type,
            metavar="FILE",
            help="Authorities (PEM) of an https:// router. [default: the system's]",
        ),
        click.option(
            "--key", envvar="ROUTER_ADMIN_API_KEY", help="Admin key of the router; ROUTER_ADMIN_API_KEY sets it too."
        ),
        click.argument("url", default="http://127.0.0.1:8080"),
    ):
        run = option(run)
    return run
