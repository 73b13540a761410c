"""HTTP requests to servers that are not trusted: bounded in time and in size, never redirected.

Requests carry keys, so a redirect is returned like any other response. Other tasks run between two chunks of a
response: chunks of one byte come by the thousand, and a stream that has more at hand does not wait.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
from aiohttp.helpers import is_ip_address

from router.host_names import HostNames

READ_BYTES = 16 << 10
"""Bytes of a response that aiohttp buffers at most: a sixteenth as many chunks as with its default."""


class FetchError(Exception):
    """No response, or none within the bounds; the message says what came instead."""


def open_session(
    tls: ssl.SSLContext | None, requests_max: int = 0, host_names: HostNames | None = None
) -> aiohttp.ClientSession:
    """Return a session for `fetch`. Requests beyond `requests_max` wait for others to end; 0: there is no limit.

    A response is not decompressed, because it may be many times larger than what was received. Its cookies are dropped:
    those of a hostile server would be kept without bound, and sent back to it.
    """
    resolver = host_names or HostNames()
    connector = aiohttp.TCPConnector(ssl=tls or True, limit=requests_max, resolver=resolver, use_dns_cache=False)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


async def fetch(
    session: aiohttp.ClientSession,
    url: str,
    *,
    seconds: float,
    bytes_max: int,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
) -> tuple[int, bytes]:
    """Send one HTTP request without following redirects, and return the status and the body of the answer.

    Raises FetchError if there is no answer, if the whole exchange takes longer than `seconds`, or if the body is longer
    than `bytes_max`. Answers with an error status are returned, too. A host that is given by name is looked up for each
    request, because the name may have moved to another machine while the old one still answers.
    """
    all_headers = {"Accept-Encoding": "identity", **(headers or {})}
    try:
        if not is_ip_address(urlsplit(url).hostname):
            all_headers["Connection"] = "close"
        request = session.request(
            method,
            url,
            data=data,
            headers=all_headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
            read_bufsize=READ_BYTES,
        )
        async with request as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > bytes_max:
                    raise FetchError(f"too large: the answer of {url} has more than {bytes_max} bytes")
                await asyncio.sleep(0)  # so that a long body does not keep the event loop from other tasks
            return response.status, bytes(body)
    except asyncio.TimeoutError:
        raise FetchError(f"timeout: no answer of {url} within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FetchError(_describe_error(error)) from error


def _describe_error(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        number = error.os_error.errno or 0
        return f"cannot connect: {os.strerror(number) if number > 0 else error.os_error.strerror}"
    return f"{type(error).__name__}: {error}"


def make_key_headers(key: str | None) -> dict[str, str]:
    """Return the headers that carry an API key; none without a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
