"""An OpenAPI 3.1 document from a list of operations; its schemas come from the msgspec types of bodies and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

_REF = "#/components/schemas/{name}"


class ErrorBody(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(Struct, frozen=True):
    """What `RequestError.body` makes."""

    error: ErrorBody


class AnthropicFault(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorAnswer(Struct, frozen=True, tag_field="type", tag="error"):
    """The same under `/v1/messages`."""

    error: AnthropicFault


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    """`{name}` stands for a parameter: a string that is not empty; told are those that stand in a path as they are."""
    summary: str
    request: Any = None
    """Type of the body; a tuple where it may be of several."""
    answer: Any = None
    """Type of a JSON answer; str: text; None: an empty body."""
    errors: tuple[int, ...] | None = None
    """The statuses of its errors; None: any."""
    streams: bool = False
    is_open: bool = False
    """Needs no API key."""
    status: int = 200
    text_type: str = "text/plain"
    may_lack_body: bool = False


def document(
    title: str, version: str, operations: Sequence[Operation], security: list[dict[str, list[str]]] | None
) -> dict[str, Any]:
    """The document. `security`: what an operation that is not open needs, of the scheme `key`; None: nothing."""
    types = [
        ErrorAnswer,
        AnthropicErrorAnswer,
        *(t for op in operations for t in (*_bodies(op), op.answer) if t not in (None, str)),
    ]
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = {str: {"type": "string"}, **dict(zip(types, schemas))}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, schema_of, security)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if security is not None:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return made


def _bodies(operation: Operation) -> tuple[Any, ...]:
    if operation.request is None:
        return ()
    return operation.request if isinstance(operation.request, tuple) else (operation.request,)


def _describe(
    operation: Operation, schema_of: dict[Any, Any], security: list[dict[str, list[str]]] | None
) -> dict[str, Any]:
    guarded = security is not None and not operation.is_open
    done: dict[str, Any] = {"description": "Done"}
    if operation.answer is not None:
        media = operation.text_type if operation.answer is str else "application/json"
        done["content"] = {media: {"schema": schema_of[operation.answer]}}
    if operation.streams:
        done["content"]["text/event-stream"] = {}
    fault = AnthropicErrorAnswer if operation.path.startswith("/v1/messages") else ErrorAnswer
    error = {"description": "Error", "content": {"application/json": {"schema": schema_of[fault]}}}
    statuses = ["default"] if operation.errors is None else sorted({*operation.errors, *((401,) if guarded else ())})
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            str(operation.status): done,
            **{str(status): error for status in statuses},
        },
    }
    if bodies := _bodies(operation):
        forms = [schema_of[body] for body in bodies]
        content = {"application/json": {"schema": forms[0] if len(forms) == 1 else {"anyOf": forms}}}
        described["requestBody"] = {"required": not operation.may_lack_body, "content": content}
    named = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if named:
        schema = {
            "type": "string",
            "pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$",
            "description": "Others percent-encoded.",
        }
        described["parameters"] = [{"name": n, "in": "path", "required": True, "schema": schema} for n in named]
    if guarded:
        described["security"] = security
    return described
