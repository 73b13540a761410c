"""What decides where a body goes, told without reading the rest of it. Pure.

Apart from router/prompting/encode.py, which is compiled where msgspec's structures cannot be.
"""

from __future__ import annotations

from typing import Any

import msgspec

from prompts.routing import check_object
from prompts.schemas import decode_json

NAME_BYTES_MAX = 4096


class _Envelope(msgspec.Struct):
    """The fields that decide where a request goes, unread: of everything else only the syntax is looked at."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    cache_salt: msgspec.Raw = msgspec.Raw(b"null")
    priority: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")
    user: msgspec.Raw = msgspec.Raw(b"null")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"null")
    metadata: msgspec.Raw = msgspec.Raw(b"null")
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw(b"null")
    previous_response_id: msgspec.Raw = msgspec.Raw(b"null")


_envelopes = msgspec.json.Decoder(_Envelope)


def envelope(body: bytes) -> dict[str, Any]:
    """What `RoutingRequest` needs before the prompt is read, and whether there are `messages`. Builds nothing of the
    rest. Raises RequestError where the body is no JSON object."""
    check_object(body)
    fields = decode_json(_envelopes, body)
    model, salt, priority = _value(fields.model), _value(fields.cache_salt), _value(fields.priority)
    user, keep = _value(fields.user), _value(fields.truncate_prompt_tokens)
    cache_key, metadata = _value(fields.prompt_cache_key), _value(fields.metadata)
    previous = _value(fields.previous_response_id)
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    return {
        "model": model if isinstance(model, str) else None,
        "cache_salt": (salt if isinstance(salt, str) else None) or None,
        "priority": priority if type(priority) is int and -(2**63) <= priority < 2**63 else 0,
        "stream": bytes(fields.stream) == b"true",
        "user": user if isinstance(user, str) else None,
        "prompt_cache_key": cache_key if isinstance(cache_key, str) else None,
        "metadata_user_id": user_id if isinstance(user_id, str) else None,
        "truncate_prompt_tokens": keep if type(keep) is int and -(2**63) <= keep < 2**63 else None,
        "stored": previous if isinstance(previous, str) else None,
        "chats": bytes(memoryview(fields.messages)[:1]) == b"[",
    }


def _value(raw: msgspec.Raw) -> Any:
    """A small value; a long one comes back cut, as the text that it is: nobody has such a name."""
    data = bytes(memoryview(raw)[: NAME_BYTES_MAX + 1])
    return msgspec.json.decode(raw) if len(data) <= NAME_BYTES_MAX else data.decode("utf-8", "replace")
