"""Bodies of requests that look at or change the router."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from prompts.errors import RequestError

BODY_BYTES_MAX: Final = 64 << 10
"""Longest body: it is decoded on the event loop, where all requests wait for it."""


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a body that is a JSON object. Raises RequestError."""
    if len(body) > BODY_BYTES_MAX:
        raise RequestError(f"the body has {len(body)} bytes: expected at most {BODY_BYTES_MAX}", param=None, status=413)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", param=None) from None
    if not isinstance(fields, dict):
        raise RequestError("the body is not valid JSON: expected an object", param=None)
    return fields
