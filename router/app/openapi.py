"""`GET /openapi.json`: what the router itself accepts and answers. Bodies of `/v1` are the workers' business: only what
routing reads of them is described, and every other field passes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from prompts import openapi
from prompts.openapi import Operation
from prompts.schemas import TokenIdField

_NonEmpty = Annotated[str, Meta(min_length=1)]
_Ids = Annotated[list[TokenIdField], Meta(min_length=1)]
_Positive = Annotated[int, Meta(ge=1)]
_Object = dict[str, Any]


class RoutedMessage(Struct):
    role: Literal["system", "user", "assistant"]
    content: str


class _Routed(Struct, kw_only=True):
    model: str | UnsetType = UNSET
    stream: bool | UnsetType = UNSET
    max_tokens: _Positive | UnsetType = UNSET
    n: _Positive | UnsetType = UNSET
    user: str | UnsetType = UNSET
    cache_salt: _NonEmpty | UnsetType = UNSET
    priority: int | UnsetType = UNSET


class Chat(_Routed, kw_only=True):
    messages: Annotated[list[RoutedMessage], Meta(min_length=1)]


class Completion(_Routed, kw_only=True):
    prompt: _NonEmpty | _Ids


class Messages(Struct, kw_only=True):
    messages: Annotated[list[RoutedMessage], Meta(min_length=1)]
    max_tokens: _Positive
    model: str | UnsetType = UNSET
    stream: bool | UnsetType = UNSET
    cache_salt: _NonEmpty | UnsetType = UNSET


class Responses(_Routed, kw_only=True):
    input: _NonEmpty | Annotated[list[RoutedMessage], Meta(min_length=1)]


class Worker(Struct, forbid_unknown_fields=True):
    url: str
    id: str | UnsetType = UNSET
    events: str | UnsetType = UNSET
    replay: str | UnsetType = UNSET
    topic: str | UnsetType = UNSET
    roles: str | UnsetType = UNSET
    cache_tokens: _Positive | UnsetType = UNSET
    seats: _Positive | UnsetType = UNSET
    reannounce: Literal[0, 1] | UnsetType = UNSET
    send_key: Literal[0, 1] | UnsetType = UNSET


class Switch(Struct):
    on: bool | UnsetType = UNSET


_OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Chat completion, by the worker that will answer soonest", Chat, _Object,
              streams=True),
    Operation("post", "/v1/completions", "Completion, by the worker that will answer soonest", Completion, _Object,
              streams=True),
    Operation("post", "/v1/messages", "Anthropic's Messages, by the worker that will answer soonest", Messages, _Object,
              streams=True),
    Operation("post", "/v1/responses", "OpenAI's Responses, by the worker that will answer soonest", Responses, _Object,
              streams=True),
    Operation("get", "/v1/models", "Models of all workers", None, _Object, is_open=True),
    Operation("get", "/health", "Whether a worker is up", None, _Object, is_open=True),
    Operation("get", "/livez", "Whether this process answers", None, _Object, is_open=True),
    Operation("get", "/readyz", "Whether requests had better come here", None, _Object, is_open=True),
    Operation("get", "/version", "Version", None, _Object, is_open=True),
    Operation("get", "/metrics", "Prometheus metrics", None, str, is_open=True),
    Operation("get", "/openapi.json", "This document", None, _Object, is_open=True),
    Operation("post", "/route", "Where a request would go, and why", Chat, _Object),
    Operation("get", "/workers", "Everything known of each worker", None, _Object),
    Operation("post", "/workers", "Add a worker", Worker, _Object, status=201),
    Operation("delete", "/workers/{worker_id}", "Remove a worker", None, _Object),
    Operation("post", "/workers/{worker_id}/drain", "Give a worker no new requests, or some again", Switch, _Object,
              may_lack_body=True),
    Operation("get", "/dashboard", "The live page", None, str, text_type="text/html"),
)  # fmt: skip


def document(version: str) -> bytes:
    """The document, encoded. What is not open needs a key where the router has any."""
    return msgspec.json.encode(openapi.document("Blockcast router", version, _OPERATIONS, [{}, {"key": []}]))
