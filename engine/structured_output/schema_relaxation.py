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
_FIRST_KEYWORDS = ("type", "properties", "patternProperties", "prefixItems", "required", "items")
"""Keywords that are tried first: they say most."""
_REQUIRED_KEYWORDS = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}
"""Keywords that would say more without those that they are about."""


def relax_schema(schema: Json, check: SchemaCheck, check_inner: SchemaCheck) -> Json:
    """The schema with what can be compiled of it. `check`: of the schema as it stands; `check_inner`: of what is inside
    of its properties."""
    loose_schema = _relax_without_references(schema, check, check_inner)
    for name, parts in _definitions(loose_schema).items():  # compiled only where something refers to them
        if isinstance(parts, dict):
            relaxed_parts = {
                inner: _relax_without_references(part, check_inner, check_inner) for inner, part in parts.items()
            }
            loose_schema = {**loose_schema, name: relaxed_parts}
    if check(loose_schema) is None:
        return loose_schema
    bad_references = {
        ref for ref in _references(loose_schema) if check_inner({**_definitions(loose_schema), "$ref": ref}) is not None
    }
    for candidate in (_without_references(loose_schema, bad_references), _without_references(loose_schema, None)):
        if check(candidate) is None:
            return candidate
    return {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}


def find_unsupported_keyword(schema: Json, check: SchemaCheck, check_inner: SchemaCheck) -> tuple[str, str]:
    """(path of the first keyword that cannot be compiled, why) of a schema that cannot."""
    path = ""
    current_check = check
    while True:
        for step, part in _inner_schemas(schema):
            part_check = (
                _make_property_check(current_check)
                if step.startswith(".properties.") and current_check is not check_inner
                else check_inner
            )
            if part_check(_without_references(part, None)) is not None:
                path = path + step
                schema = part
                current_check = part_check
                break
        else:
            break
    keywords: dict[str, Json] = {}
    for keyword in _ordered_keywords(schema):
        keywords[keyword] = schema[keyword]
        reason = current_check(keywords)
        if reason is not None:
            return f"{path}.{keyword}", reason
    return path, current_check(schema) or "cannot be followed"


def _relax_without_references(schema: Json, check: SchemaCheck, check_inner: SchemaCheck) -> Json:
    """A schema without its references, which may still lead to what cannot be compiled."""
    if check(_without_references(schema, None)) is None:
        return schema
    if not isinstance(schema, dict):
        return {}
    loose_schema = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            is_styled = keyword == "properties" and check is not check_inner
            part_check = _make_property_check(check) if is_styled else check_inner
            loose_schema[keyword] = {
                name: _relax_without_references(part, part_check, check_inner) for name, part in value.items()
            }
        elif keyword in _LISTS and isinstance(value, list):
            loose_schema[keyword] = [_relax_without_references(part, check_inner, check_inner) for part in value]
        elif keyword in _SINGLES and isinstance(value, dict):
            loose_schema[keyword] = _relax_without_references(value, check_inner, check_inner)
    valid_keywords: dict[str, Json] = {}
    for keyword in _ordered_keywords(loose_schema):
        if any(name in loose_schema and name not in valid_keywords for name in _REQUIRED_KEYWORDS.get(keyword, ())):
            continue
        if check(_without_references({**valid_keywords, keyword: loose_schema[keyword]}, None)) is None:
            valid_keywords[keyword] = loose_schema[keyword]
    return valid_keywords


def _make_property_check(check: SchemaCheck) -> SchemaCheck:
    """Return the check of a property's schema, given the check of its object's schema."""

    def check_property(schema: Json) -> str | None:
        return check({"type": "object", "properties": {"v": schema}, "required": ["v"]})

    return check_property


def _ordered_keywords(schema: Json) -> list[str]:
    if not isinstance(schema, dict):
        return []
    first_keywords = [keyword for keyword in _FIRST_KEYWORDS if keyword in schema]
    return [*first_keywords, *(keyword for keyword in schema if keyword not in first_keywords)]


def _inner_schemas(schema: Json) -> Iterator[tuple[str, Json]]:
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
    references = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return references.union(*map(_references, value.values()))


def _without_references(value: Json, references: set[str] | None) -> Json:
    """`which`: those references; None: all."""
    if isinstance(value, list):
        return [_without_references(item, references) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_references(item, references)
        for name, item in value.items()
        if name != "$ref" or (references is not None and item not in references)
    }
