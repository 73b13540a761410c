"""`GET /openapi.json`: what the router itself accepts and answers. Bodies of `/v1` are the workers' business: only what
routing reads of them is described, and every other field passes."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
OBJECT: Schema = {"type": "object"}
WORKER_ID: Schema = {"name": "worker_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
SHARED_FIELDS: Schema = {
    "model": {"type": "string"},
    "stream": {"type": "boolean"},
    "max_tokens": {"type": "integer", "minimum": 1},
    "n": {"type": "integer", "minimum": 1},
    "user": {"type": "string"},
    "cache_salt": {"type": "string", "minLength": 1},
    "priority": {"type": "integer"},
}
CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        **SHARED_FIELDS,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
            },
        },
    },
}
COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        **SHARED_FIELDS,
        "prompt": {
            "oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}},
            ]
        },
    },
}
WORKER: Schema = {
    "type": "object",
    "required": ["url"],
    "properties": {
        "url": {"type": "string"},
        "id": {"type": "string"},
        "events": {"type": "string"},
        "replay": {"type": "string"},
        "topic": {"type": "string"},
        "roles": {"type": "string"},
        "cache_tokens": {"type": "integer", "minimum": 1},
        "reannounce": {"type": "integer", "enum": [0, 1]},
    },
    "additionalProperties": False,
}


def document(version: str) -> Schema:
    """The OpenAPI 3.1 document."""
    chat = _operation("Chat completion, by the worker that will answer soonest", OBJECT, body=CHAT, stream=True)
    completion = _operation("Completion, by the worker that will answer soonest", OBJECT, body=COMPLETION, stream=True)
    switch: Schema = {"type": "object", "properties": {"on": {"type": "boolean"}}}
    drain = _operation(
        "Give a worker no new requests, or some again", OBJECT, parameters=[WORKER_ID], body=switch, body_required=False
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Blockcast router", "version": version},
        "paths": {
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": completion},
            "/v1/models": {"get": _operation("Models of all workers", OBJECT)},
            "/health": {"get": _operation("Whether a worker is up", OBJECT)},
            "/version": {"get": _operation("Version", OBJECT)},
            "/metrics": {"get": _operation("Prometheus metrics", {"type": "string"}, media="text/plain")},
            "/openapi.json": {"get": _operation("This document", OBJECT)},
            "/route": {"post": _operation("Where a request would go, and why", OBJECT, body=CHAT)},
            "/workers": {
                "get": _operation("Everything known of each worker", OBJECT),
                "post": _operation("Add a worker", OBJECT, body=WORKER, status="201"),
            },
            "/workers/{worker_id}": {"delete": _operation("Remove a worker", OBJECT, parameters=[WORKER_ID])},
            "/workers/{worker_id}/drain": {"post": drain},
            "/dashboard": {"get": _operation("The live page", {"type": "string"}, media="text/html")},
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(
    summary: str,
    answer: Schema,
    *,
    body: Schema | None = None,
    body_required: bool = True,
    parameters: list[Schema] | None = None,
    status: str = "200",
    media: str = "application/json",
    stream: bool = False,
) -> Schema:
    content: Schema = {media: {"schema": answer}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
    errors = {"description": "An error in OpenAI's form", "content": {"application/json": {"schema": ERROR}}}
    operation: Schema = {
        "summary": summary,
        "responses": {status: {"description": "Done", "content": content}, "default": errors},
    }
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": body_required, "content": {"application/json": {"schema": body}}}
    return operation
