"""Receiving the body of a request, which may be late, compressed or cut off."""

from __future__ import annotations

import asyncio

from aiohttp import web

from engine.http.state import STATE
from prompts import RequestError
from prompts.errors import format_value


async def receive_body(request: web.Request) -> bytes:
    """Return the body of a request. Raises RequestError if it cannot be read.

    The status is 408 if the body is late, 400 if the client disconnects, and 415 for a compressed body, because a few
    compressed bytes may become gigabytes.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise RequestError(f"Content-Encoding: got {format_value(encoding)}, expected none", status=415)
    has_arrived = not request.can_read_body or request.content.is_eof()
    if has_arrived:
        return await request.read()
    timeout_s = request.app[STATE].config.body_timeout_s
    try:
        return await asyncio.wait_for(request.read(), timeout_s)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {timeout_s:.0f} s"
        raise RequestError(message, code="request_timeout", status=408) from None
    except ConnectionError:
        raise RequestError("the client left before its request was complete") from None
