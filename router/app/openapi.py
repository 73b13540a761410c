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
    model: str | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    max_tokens: _Positive | UnsetType | None = UNSET
    n: _Positive | UnsetType | None = UNSET
    user: str | UnsetType | None = UNSET
    cache_salt: _NonEmpty | UnsetType | None = UNSET
    priority: int | UnsetType | None = UNSET


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
    url: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    events: str | UnsetType = UNSET
    replay: str | UnsetType = UNSET
    topic: str | UnsetType = UNSET
    roles: str | UnsetType = UNSET
    cache_tokens: _Positive | UnsetType = UNSET
    seats: _Positive | UnsetType = UNSET
    prefill_order: Literal["arrival", "shortest"] | UnsetType = UNSET
    reannounce: Literal[0, 1] | UnsetType = UNSET
    send_key: Literal[0, 1] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    root: str | UnsetType = UNSET
    block_size: _Positive | UnsetType = UNSET


_NAME = "[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
_HOST = rf"{_NAME}(\.{_NAME}){{0,3}}"
_ENDPOINT = rf"tcp://{_HOST}:[1-9][0-9]{{0,3}}"


def _string(pattern: str, text: str) -> Any:
    """Told and not held: the parser of addresses takes more, and says better what is wrong."""
    return Annotated[str, Meta(description=text, extra_json_schema={"pattern": f"^({pattern})$"})]


_ADDRESS = _string(rf"https?://{_HOST}(:[1-9][0-9]{{0,3}})?", "http://host:port; an IP address will do")
_FIELDS: dict[str, Any] = {
    "id": _string("[!-~]{0,255}", "up to 255 printable characters without spaces"),
    "events": _string(f"none|{_ENDPOINT}|", "those of several ranks stand between semicolons"),
    "replay": _string(f"{_ENDPOINT}|", "as many as `events`, or none"),
}


def _worker(name: str, required: tuple[str, ...], *without: str) -> type[Struct]:
    """What `Worker` takes, narrowed to a form in which the fields agree."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = [("url", _ADDRESS)]
    fields += [(name, _FIELDS[name]) for name in required]
    for field in msgspec.structs.fields(Worker)[1:]:
        if field.name not in (*required, *without):
            fields.append((field.name, _FIELDS.get(field.name, field.type), UNSET))
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, kw_only=True)


_FIELDS_OF_ONE = _worker("NewWorker", (), "replay")
_FIELDS["events"] = _FIELDS["replay"]
_ADDED = (_FIELDS_OF_ONE, _worker("NewWorkerWithReplay", ("events", "replay")))


class Named(Struct):
    worker_id: _NonEmpty


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
    Operation("get", "/v1/models/{model}", "One of them", None, _Object, is_open=True),
    Operation("get", "/health", "Whether a worker is up", None, _Object, is_open=True),
    Operation("get", "/livez", "Whether this process answers", None, _Object, is_open=True),
    Operation("get", "/readyz", "Whether requests had better come here", None, _Object, is_open=True),
    Operation("get", "/version", "Version", None, _Object, is_open=True),
    Operation("get", "/metrics", "Prometheus metrics", None, str, is_open=True),
    Operation("get", "/openapi.json", "This document", None, _Object, is_open=True),
    Operation("post", "/route", "Where a request would go, and why", Chat, _Object),
    Operation("get", "/requests/{request_id}", "Why a prompt was not cached", None, _Object),
    Operation("get", "/workers", "Everything known of each worker", None, _Object),
    Operation("post", "/workers", "Add a worker", _ADDED, _Object, status=201),
    Operation("delete", "/workers", "Remove the worker of a URL or an id", Named, _Object),
    Operation("delete", "/workers/{worker_id}", "Remove a worker", None, _Object),
    Operation("post", "/workers/{worker_id}/drain", "Give a worker no new requests, or some again", Switch, _Object,
              may_lack_body=True),
    Operation("get", "/dashboard", "The live page", None, str, text_type="text/html"),
)  # fmt: skip


def document(version: str) -> bytes:
    """The document, encoded. What is not open needs a key where the router has any."""
    return msgspec.json.encode(openapi.document("Blockcast router", version, _OPERATIONS, [{}, {"key": []}]))
