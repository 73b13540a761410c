"""How much of a JSON schema a compiler follows: what to leave out of one that may be followed in part, and what to
name of one that may not. Pure: the compiler is a function.

Schemas made by generators have one odd keyword among many: bounds of 64-bit numbers, a pattern with look-around.
Every part of a schema is compiled by itself and without its references, the inner ones first: so the fault is found
where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = Any
SchemaCheck = Callable[[Json], str | None]
"""Says why a schema cannot be compiled; None: it can."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_FIRST = ("type", "properties", "patternProperties", "prefixItems", "required", "items")
"""Keywords that are tried first: they say most."""
_NEEDS = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}
"""Keywords that would say more without those that they are about."""


def relax_schema(schema: Json, refused: SchemaCheck, refused_inside: SchemaCheck) -> Json:
    """The schema with what can be compiled of it. `refused`: of the schema as it stands; `refused_inside`: of what is
    inside of its properties."""
    loose = _loosen(schema, refused, refused_inside)
    for name, parts in _definitions(loose).items():  # compiled only where something refers to them
        if isinstance(parts, dict):
            told = {inner: _loosen(part, refused_inside, refused_inside) for inner, part in parts.items()}
            loose = {**loose, name: told}
    if refused(loose) is None:
        return loose
    bad = {ref for ref in _references(loose) if refused_inside({**_definitions(loose), "$ref": ref}) is not None}
    for candidate in (_without_references(loose, bad), _without_references(loose, None)):
        if refused(candidate) is None:
            return candidate
    return {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}


def find_unsupported_keyword(schema: Json, refused: SchemaCheck, refused_inside: SchemaCheck) -> tuple[str, str]:
    """(path of the first keyword that cannot be compiled, why) of a schema that cannot."""
    path = ""
    where, inner = refused, refused_inside
    while True:
        for step, part in _parts(schema):
            test = _of_property(where) if step.startswith(".properties.") and where is not inner else inner
            if test(_without_references(part, None)) is not None:
                path, schema, where = path + step, part, test if test is not inner else inner
                break
        else:
            break
    said: dict[str, Json] = {}
    for keyword in _in_order(schema):
        said[keyword] = schema[keyword]
        reason = where(said)
        if reason is not None:
            return f"{path}.{keyword}", reason
    return path, where(schema) or "cannot be followed"


def _loosen(schema: Json, refused: SchemaCheck, refused_inside: SchemaCheck) -> Json:
    """A schema without its references, which may still lead to what cannot be compiled."""
    if refused(_without_references(schema, None)) is None:
        return schema
    if not isinstance(schema, dict):
        return {}
    inner = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            is_styled = keyword == "properties" and refused is not refused_inside
            test = _of_property(refused) if is_styled else refused_inside
            inner[keyword] = {name: _loosen(part, test, refused_inside) for name, part in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            inner[keyword] = [_loosen(part, refused_inside, refused_inside) for part in value]
        elif keyword in _SINGLES and isinstance(value, dict):
            inner[keyword] = _loosen(value, refused_inside, refused_inside)
    kept: dict[str, Json] = {}
    for keyword in _in_order(inner):
        if any(name in inner and name not in kept for name in _NEEDS.get(keyword, ())):
            continue
        if refused(_without_references({**kept, keyword: inner[keyword]}, None)) is None:
            kept[keyword] = inner[keyword]
    return kept


def _of_property(refused: SchemaCheck) -> SchemaCheck:
    """Of a schema that is a property's of one that `refused` knows to judge."""

    def of_property(schema: Json) -> str | None:
        return refused({"type": "object", "properties": {"v": schema}, "required": ["v"]})

    return of_property


def _in_order(schema: Json) -> list[str]:
    if not isinstance(schema, dict):
        return []
    first = [keyword for keyword in _FIRST if keyword in schema]
    return [*first, *(keyword for keyword in schema if keyword not in first)]


def _parts(schema: Json) -> Iterator[tuple[str, Json]]:
    """(path, schema) of what is directly inside of a schema."""
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if keyword in _MAPS and isinstance(value, dict):
            yield from ((f".{keyword}.{name}", part) for name, part in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((f".{keyword}[{number}]", part) for number, part in enumerate(value))
        elif keyword in _SINGLES and isinstance(value, dict):
            yield f".{keyword}", value


def _definitions(schema: Json) -> dict[str, Json]:
    if not isinstance(schema, dict):
        return {}
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _references(value: Json) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_references, value))
    if not isinstance(value, dict):
        return set()
    own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return own.union(*map(_references, value.values()))


def _without_references(value: Json, which: set[str] | None) -> Json:
    """`which`: those references; None: all."""
    if isinstance(value, list):
        return [_without_references(item, which) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_references(item, which)
        for name, item in value.items()
        if name != "$ref" or (which is not None and item not in which)
    }
