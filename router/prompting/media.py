"""Conversations with media, which cannot be matched block by block: what tells one from others. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import xxhash

from prompts.anthropic import CountRequest
from prompts.responses import ResponsesRequest
from prompts.routing import RoutingRequest
from prompts.schemas import MEDIA_PARTS
from router.prompting.encode import CHARS_PER_TOKEN

MEDIA_TOKENS = 1000
"""Taken for an image's, or another medium's, share of a prompt. An estimate, for prices only."""
_KINDS = MEDIA_PARTS | {"document"}
_MEDIA_MARKERS = (b"image", b"audio", b"video", b"file", b"document")
_VOLATILE_FIELDS = frozenset(("cache_control", "id", "status"))
"""Of a part: what clients change from turn to turn."""


class MediaPrompt(NamedTuple):
    """A chat with media."""

    conversation_digest: int
    """Digest of its first messages, up to the first of its user: the same in all turns of it."""
    tokens: int
    """That the whole prompt may have."""


def read_media(request: RoutingRequest, body: bytes) -> MediaPrompt | None:
    """Read a chat's media; None where it has none."""
    messages = _messages(request, body)
    chars, count = 0, 0
    for part in _parts(messages):
        if isinstance(part, str):
            chars += len(part)
        elif part.get("type") in _KINDS or "image_url" in part:
            count += 1
        else:
            chars += sum(len(text) for text in part.values() if isinstance(text, str))
    if not count:
        return None
    return MediaPrompt(_digest_opening(messages), chars // CHARS_PER_TOKEN + MEDIA_TOKENS * count)


def _messages(request: RoutingRequest, body: bytes) -> list[Any]:
    """As JSON has them, the system's first; none where there can be no media."""
    source = request.source
    if source is None:
        return list(request.messages or ()) if request.has_media else []
    if not any(marker in body for marker in _MEDIA_MARKERS):
        return []
    first: Any
    messages: Any
    if isinstance(source, ResponsesRequest):
        first, messages = source.instructions, source.input if isinstance(source.input, list) else []
    else:
        assert isinstance(source, CountRequest)
        first, messages = source.system, source.messages
    result: list[Any] = msgspec.to_builtins([{"role": "system", "content": first}, *messages])
    return result


def _parts(value: Any) -> Iterator[Any]:
    """Texts and parts of messages, also those inside of tool results."""
    for message in value:
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("content"), list):
                    yield from _parts([part])
                elif isinstance(part, (dict, str)):
                    yield part


def _digest_opening(messages: list[Any]) -> int:
    users = (i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user")
    first = messages[: next(users, 0) + 1]
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(_without_volatile_fields(first)))


def _without_volatile_fields(value: Any) -> Any:
    """A value without what clients change from turn to turn."""
    if isinstance(value, dict):
        return {
            name: _without_volatile_fields(item)
            for name, item in value.items()
            if name not in _VOLATILE_FIELDS and item is not None
        }
    return [_without_volatile_fields(item) for item in value] if isinstance(value, list) else value
