"""Conversations with images or other media, which cannot be matched to cached blocks by token ids. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import xxhash

from prompts.chat_completions import is_media
from prompts.responses import ResponsesRequest
from prompts.routing import RoutingRequest
from router.prompting.encode import CHARS_PER_TOKEN

TOKENS_PER_MEDIUM = 1000
"""Tokens counted for an image or another medium. An estimate, for prices only."""
_MEDIA_MARKERS = (b"image", b"audio", b"video", b"file", b"document")
_VOLATILE_FIELDS = frozenset(("cache_control", "id", "status"))
"""Fields of a part that clients change from turn to turn."""
_DEPTH_MAX = 16
"""Deepest list or object in which these fields are left out; a part of a tool's result has a depth of 5."""


class MediaPrompt(NamedTuple):
    """A chat with media."""

    conversation_digest: int
    """Digest of the messages up to the first of the user, which all turns of a conversation share."""
    estimated_tokens: int
    """Estimated tokens of the whole prompt."""


def read_media(request: RoutingRequest, body: bytes) -> MediaPrompt | None:
    """Return a digest that names a chat's conversation, and its estimated tokens; None if the chat has no media."""
    if not _may_have_media(request, body):
        return None
    messages = _list_messages(request)
    parts = list(_iter_parts(messages))
    medium_count = sum(map(_is_medium, parts))
    if medium_count == 0:
        return None
    char_count = sum(map(_count_chars, parts))
    estimated_tokens = char_count // CHARS_PER_TOKEN + TOKENS_PER_MEDIUM * medium_count
    user_indices = (
        i for i, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"
    )
    opening_messages = messages[: next(user_indices, 0) + 1]
    digest = xxhash.xxh3_64_intdigest(msgspec.json.encode(_strip_volatile_fields(opening_messages)))
    return MediaPrompt(digest, estimated_tokens)


def _is_medium(part: Any) -> bool:
    return isinstance(part, dict) and (is_media(part) or part.get("type") == "document" or "image_url" in part)


def _count_chars(part: Any) -> int:
    """Return the characters of a text, or of all texts of a part; 0 for a medium, which is counted by itself."""
    if isinstance(part, str):
        return len(part)
    return 0 if _is_medium(part) else sum(len(text) for text in part.values() if isinstance(text, str))


def _may_have_media(request: RoutingRequest, body: bytes) -> bool:
    """Return False if a body certainly has no media. This is quicker than converting its messages."""
    if request.source is None:  # no body of the Messages or Responses API
        return request.has_media
    return any(marker in body for marker in _MEDIA_MARKERS)


def _list_messages(request: RoutingRequest) -> list[Any]:
    """Return the messages of a body as JSON values, the system prompt first."""
    source = request.source
    if source is None:
        return list(request.messages or ())
    system_prompt: Any
    messages: Any
    if isinstance(source, ResponsesRequest):
        system_prompt = source.instructions
        messages = source.input if isinstance(source.input, list) else []
    else:
        system_prompt, messages = source.system, source.messages
    return list(msgspec.to_builtins([{"role": "system", "content": system_prompt}, *messages]))


def _iter_parts(value: Any) -> Iterator[Any]:
    """Yield texts and parts of messages, also those inside of tool results."""
    for message in value:
        content = message.get("content") if isinstance(message, dict) else message
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("content"), list):
                    yield from _iter_parts([part])
                elif isinstance(part, (dict, str)):
                    yield part


def _strip_volatile_fields(value: Any, depth: int = 0) -> Any:
    """Return a value without the fields that clients change from turn to turn, down to _DEPTH_MAX."""
    if depth > _DEPTH_MAX:
        return value
    if isinstance(value, dict):
        return {
            name: _strip_volatile_fields(item, depth + 1)
            for name, item in value.items()
            if name not in _VOLATILE_FIELDS and item is not None
        }
    return [_strip_volatile_fields(item, depth + 1) for item in value] if isinstance(value, list) else value
