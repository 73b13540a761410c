"""What a user says first, as a name of a conversation that has none: the same in all of its turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import xxhash

from prompts.responses import ResponsesRequest
from prompts.routing import RoutingRequest

DIGESTED_CHARS: Final = 256


def digest_first_user_message(request: RoutingRequest) -> int:
    """Digest what the user of a body said first."""
    content: Any = request.prompt
    source = request.source
    if isinstance(source, ResponsesRequest):
        content = source.input if isinstance(source.input, str) else _first_user_content(source.input)
    elif source is not None:
        content = _first_user_content(source.messages)
    elif request.messages is not None:
        content = _first_user_content(request.messages)
    if isinstance(content, list):
        content = repr(content[:16])
    return digest_name(content[:DIGESTED_CHARS] if isinstance(content, str) else repr(None))


def digest_name(name: str) -> int:
    """Digest a name to 32 bits."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def _first_user_content(messages: Sequence[Any]) -> Any:
    """Return the text, or its first part, of the first message that is not the system's."""
    for message in messages:
        if _get_field(message, "role") not in ("system", "developer"):
            content = _get_field(message, "content")
            if isinstance(content, list) and content:
                return _get_field(content[0], "text") or content
            return content
    return None


def _get_field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
