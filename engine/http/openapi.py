"""`/openapi.json`: what the server takes and answers, made from the structs that read and write the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api.bodies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    ErrorAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
)
from engine.config import __version__
from engine.http.openapi_bodies import narrow
from engine.http.routes import DetokenizeBody, TokenizeChat, TokenizePrompt
from events.sources import EventSource, GroupInfo
from prompts import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    summary: str
    request: Any = None
    """Type of the body; a tuple where it may be of several."""
    answer: Any = None
    """Type of a JSON answer; str: text; None: an empty body."""
    stream: Any = None
    """Type of an SSE chunk where the operation can stream."""
    errors: tuple[int, ...] = ()
    is_open: bool = False
    """Needs no API key."""


def _completion_body() -> Any:
    """CompletionRequest with `prompt` left open: msgspec cannot tell lists apart by their items."""
    members: list[Any] = [("prompt", Any)]
    for member in msgspec.structs.fields(CompletionRequest):
        if member.name != "prompt":
            members.append((member.name, member.type, member.default))
    return msgspec.defstruct("CompletionRequest", members, kw_only=True)


_COMPLETION_BODY = _completion_body()
_GENERATES = (400, 404, 408, 413, 429, 500, 503, 504)
_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Continue a conversation", ChatRequest, ChatCompletion, ChatChunk,
               _GENERATES),
    _Operation("post", "/v1/completions", "Continue texts or token ids", _COMPLETION_BODY, Completion, Completion,
               _GENERATES),
    _Operation("get", "/v1/models", "The served names of the model", answer=ModelList),
    _Operation("get", "/v1/models/{model}", "One served name", answer=ModelCard, errors=(404,)),
    _Operation("post", "/tokenize", "Ids of a text or a conversation", (TokenizePrompt, TokenizeChat),
               TokenizeAnswer, errors=(400, 404, 408, 413)),
    _Operation("post", "/detokenize", "Text of token ids", DetokenizeBody, DetokenizeAnswer,
               errors=(400, 404, 408, 413)),
    _Operation("post", "/reset_prefix_cache", "Forget all cached prefixes and announce it", errors=(503,)),
    _Operation("get", "/kv_event_sources", "Where the cache events are published", answer=dict[str, EventSource],
               is_open=True),
    _Operation("get", "/kv_cache/groups", "The cache's groups", answer=list[GroupInfo], is_open=True),
    _Operation("get", "/health", "200 while new requests are taken", errors=(503,), is_open=True),
    _Operation("get", "/ping", "As /health", errors=(503,), is_open=True),
    _Operation("post", "/ping", "As /health", errors=(503,), is_open=True),
    _Operation("get", "/version", "The engine's version", answer=dict[str, str], is_open=True),
    _Operation("get", "/metrics", "Prometheus metrics under vLLM's names", answer=str, is_open=True),
    _Operation("get", "/openapi.json", "This document", answer=dict[str, Any], is_open=True),
)  # fmt: skip


def document(has_keys: bool) -> bytes:
    """The OpenAPI 3.1 document, encoded. `has_keys`: most operations need an API key."""
    types = [t for op in _OPERATIONS for t in (*_bodies(op), op.answer, op.stream) if t is not None]
    types = [ErrorAnswer, *dict.fromkeys(types)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas))
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of, has_keys)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Blockcast engine", "version": __version__},
        "paths": paths,
        "components": {"schemas": narrow(components)},
    }
    if has_keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(made)


def _describe(operation: _Operation, schema_of: dict[Any, Any], has_keys: bool) -> dict[str, Any]:
    guarded = has_keys and not operation.is_open
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {"200": _success(operation, schema_of)},
    }
    for status in _statuses(operation, guarded):
        described["responses"][str(status)] = {
            "description": "Error",
            "content": {"application/json": {"schema": schema_of[ErrorAnswer]}},
        }
    if operation.request is not None:
        forms = [schema_of[body] for body in _bodies(operation)]
        body = {"application/json": {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
        described["requestBody"] = {"required": True, "content": body}
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if guarded:
        described["security"] = [{"key": []}]
    return described


def _bodies(operation: _Operation) -> tuple[Any, ...]:
    if operation.request is None:
        return ()
    return operation.request if isinstance(operation.request, tuple) else (operation.request,)


def _statuses(operation: _Operation, guarded: bool) -> Sequence[int]:
    return sorted({*operation.errors, *((401,) if guarded else ())})


def _success(operation: _Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": "Done"}
    if operation.answer is str:
        described["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif operation.answer is not None:
        described["content"] = {"application/json": {"schema": schema_of[operation.answer]}}
    if operation.stream is not None:
        described["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return described
