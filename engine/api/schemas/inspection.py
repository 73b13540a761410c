"""What a JSON schema says of types, properties and listed values, for markup that is not JSON. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

Json = Any
DEPTH_MAX = 8
"""Schemas inside each other, and references behind each other, that are looked through."""
_BRANCHES = ("anyOf", "oneOf", "allOf")
_TYPE_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_TYPE_BY_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}


class Property(NamedTuple):
    """One property of an object's schema."""

    name: str
    schema: Json
    is_required: bool


def type_of(value: Json) -> str:
    """JSON's name for the type of a decoded value."""
    return _TYPE_OF.get(type(value), "string")


def resolve(schema: Json, root: Json) -> Json:
    """Follow references (`#/$defs/...`) inside of `root`; None where one leads nowhere or in a circle."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        referred = _at_pointer(root, schema["$ref"])
        if not isinstance(referred, dict):
            return referred
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**referred, **beside}
    return None


def _at_pointer(root: Json, reference: str) -> Json:
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    found = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def schema_types(schema: Json, root: Json = None) -> tuple[str, ...]:
    """The types that a parameter's schema allows, sorted; a string where it names none. `root`: holds what the schema
    refers to."""
    return tuple(sorted(_types(schema, root, 0))) or ("string",)


def _types(schema: Json, root: Json, depth: int) -> set[str]:
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return set()
    named = schema.get("type")
    found = {_ALIASES.get(t, t) for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}
    found |= {type_of(value) for value in _own_values(schema) or ()}
    for branch in _BRANCHES:
        for inner in schema[branch] if isinstance(schema.get(branch), list) else ():
            found |= _types(inner, root, depth + 1)
    return found or {kind for keyword, kind in _TYPE_BY_KEYWORD.items() if keyword in schema}


def _own_values(schema: dict[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def listed_values(schema: Json, root: Json, depth: int = 0) -> list[Json] | None:
    """The values that a schema lists (`enum`, `const`, or branches that do), where none of them holds others."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return None
    values = _own_values(schema)
    if values is None:
        branches = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(branches, list) or not branches:
            return None
        values = []
        for branch in branches:
            inner = listed_values(branch, root, depth + 1)
            if inner is None:
                return None
            values += inner
    return None if any(isinstance(value, (dict, list)) for value in values) else values


def properties_of(schema: Json) -> list[Property] | None:
    """The properties of an object's schema, each with what it may refer to; None where the schema says more, or
    nothing."""
    found = resolve(schema, schema)
    if not isinstance(found, dict) or not isinstance(found.get("properties"), dict):
        return None
    if found.get("type", "object") != "object" or {*_BRANCHES, "patternProperties"} & set(found):
        return None
    required = found.get("required")
    required = required if isinstance(required, list) else []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        Property(name, {**shared, **inner} if isinstance(inner, dict) else inner, name in required)
        for name, inner in found["properties"].items()
    ]


def property_types(schema: Json) -> dict[str, tuple[str, ...]]:
    """The types of every property that an object's schema names, in whatever branch."""
    types: dict[str, set[str]] = {}
    _add_property_types(schema, schema, 0, types)
    return {name: tuple(sorted(found)) or ("string",) for name, found in types.items()}


def _add_property_types(schema: Json, root: Json, depth: int, types: dict[str, set[str]]) -> None:
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        types.setdefault(name, set()).update(_types(inner, root, 0))
    for branch in _BRANCHES:
        for inner in schema[branch] if isinstance(schema.get(branch), list) else ():
            _add_property_types(inner, root, depth + 1, types)
