"""What a router reads of a request body: the prompt and the few fields that decide where it should go.

Lenient by design: a field of the wrong type reads as absent, because the worker will name the mistake better. Only
bytes that are not a JSON object are refused. A body of 2 KB costs a few microseconds.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from prompts.errors import RequestError
from prompts.schemas import Message, Prompt, decode_json, is_media

Kind = Literal["chat", "completion", "other"]


class RoutingRequest(Struct, kw_only=True, frozen=True):
    """The routing view of a body. `messages` is None where the body has none that could be rendered."""

    kind: Kind
    model: str | None = None
    messages: list[Message] | None = None
    prompt: Prompt | None = None
    tools: list[Message] | None = None
    documents: list[Message] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    reasoning_effort: str | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False
    output_max: int = 0
    """Most tokens the client lets all choices have; 0 where it sets no limit."""
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata_user_id: str | None = None
    """`metadata.user_id`."""
    scores_prompt: bool = False
    """True where every prompt token gets a logprob: engines then compute the whole prompt and reuse nothing of it."""
    has_media: bool = False
    """True where the prompt holds images or other media: only the text before the first can be routed on."""


class _Body(Struct):
    """Every field is Any: nothing a worker might accept is refused here."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    tools: Any = None
    documents: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    reasoning_effort: Any = None
    truncate_prompt_tokens: Any = None
    cache_salt: Any = None
    priority: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    user: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = 0


_OBJECT = re.compile(rb"[ \t\r\n]*\{")
_decoder = msgspec.json.Decoder(_Body)


def parse_routing(path: str, data: bytes) -> RoutingRequest:
    """Read what routing needs of a body sent to `path`. Raises RequestError only where the body is no JSON object."""
    check_object(data)
    body = decode_json(_decoder, data)
    messages = _dicts(body.messages)
    kind: Kind = "other"
    if path.endswith("/chat/completions"):
        kind = "chat"
    elif path.endswith("/completions"):
        kind = "completion"
    limit = _int(body.max_completion_tokens)
    if limit is None:
        limit = _int(body.max_tokens)
    scored = body.top_logprobs if messages else body.logprobs
    return RoutingRequest(
        kind=kind,
        model=_str(body.model),
        messages=messages or None,
        prompt=_prompt(body.prompt),
        tools=_dicts(body.tools),
        documents=_dicts(body.documents),
        chat_template=_str(body.chat_template),
        chat_template_kwargs=body.chat_template_kwargs if isinstance(body.chat_template_kwargs, dict) else None,
        add_generation_prompt=_bool(body.add_generation_prompt),
        continue_final_message=_bool(body.continue_final_message),
        add_special_tokens=_bool(body.add_special_tokens),
        reasoning_effort=_str(body.reasoning_effort),
        truncate_prompt_tokens=_int(body.truncate_prompt_tokens),
        cache_salt=_str(body.cache_salt) or None,
        priority=_int(body.priority) or 0,
        stream=body.stream is True,
        output_max=max(limit or 0, 0) * max(_int(body.n) or 1, 1),
        user=_str(body.user),
        prompt_cache_key=_str(body.prompt_cache_key),
        metadata_user_id=_str(body.metadata.get("user_id")) if isinstance(body.metadata, dict) else None,
        scores_prompt=body.prompt_logprobs is not None or (body.echo is True and _int(scored) is not None),
        has_media=_has_media(messages),
    )


def check_object(data: bytes) -> None:
    """Raises RequestError for what cannot be a JSON object."""
    if _OBJECT.match(data) is None:
        raise RequestError("the body is not valid JSON: expected an object", param=None)


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _int(value: Any) -> int | None:
    return value if type(value) is int else None


def _dicts(value: Any) -> list[Message] | None:
    """A list of objects, or None for anything else."""
    return value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else None


def _prompt(value: Any) -> Prompt | None:
    """One of the four prompt forms, judged by the first item; the tokenizing side checks the rest."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and (type(value[0]) is int or isinstance(value[0], (str, list))):
        return value
    return None


def _has_media(messages: list[Message] | None) -> bool:
    for message in messages or ():
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and is_media(part):
                    return True
    return False
