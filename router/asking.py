"""One question over HTTP to somebody whose answer may be anything: bounded in time and size, never redirected.

Questions carry keys, so a redirect is an answer like another. Who uses a session of its own opens it with
`auto_decompress=False`, so that the bound is on what is read too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp


class Unanswered(Exception):
    """No answer, or none within the bounds; the message says what came instead."""


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    *,
    seconds: float,
    bytes_max: int,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    data: bytes | None = None,
) -> tuple[int, bytes]:
    """(status, body). Raises Unanswered, and nothing else."""
    try:
        asking = session.request(
            method,
            url,
            data=data,
            headers={"Accept-Encoding": "identity", **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=seconds),
            allow_redirects=False,
        )
        async with asking as answer:
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > bytes_max:
                    raise Unanswered(f"too large: the answer of {url} has more than {bytes_max} bytes")
            return answer.status, bytes(body)
    except asyncio.TimeoutError:
        raise Unanswered(f"timeout: no answer of {url} within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error
