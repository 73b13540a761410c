"""One question over HTTP to somebody whose answer may be anything: bounded in time and size, never redirected.

Questions carry keys, so a redirect is an answer like another. Who uses a session of its own opens it with
`auto_decompress=False`, so that the bound is on what is read too. Between two pieces of an answer others get their turn
of the event loop: chunks of a byte come by the thousand, and a stream that has more at hand does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp

READ_BYTES = 16 << 10
"""Of an answer, in one turn: what aiohttp may keep, in a sixteenth as many chunks."""


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
            read_bufsize=READ_BYTES,
        )
        async with asking as answer:
            body = bytearray()
            async for piece in pieces(answer):
                body += piece
                if len(body) > bytes_max:
                    raise Unanswered(f"too large: the answer of {url} has more than {bytes_max} bytes")
            return answer.status, bytes(body)
    except asyncio.TimeoutError:
        raise Unanswered(f"timeout: no answer of {url} within {seconds:g} s") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Its body as it comes. Raises what aiohttp raises."""
    async for piece in answer.content.iter_any():
        yield piece
        await asyncio.sleep(0)
