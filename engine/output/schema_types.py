"""Read types, properties and listed values from JSON schemas, for tool calls that are not written in JSON. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Json = Any
ParameterTypes = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool name -> parameter -> JSON types that its schema allows."""
DEPTH_MAX = 8
"""Most nested schemas, and most references in a row, that are followed."""
_BRANCHES = ("anyOf", "oneOf", "allOf")
_JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_TYPE_BY_KEYWORD = {"properties": "object", "additionalProperties": "object", "items": "array", "prefixItems": "array"}


class Property(NamedTuple):
    """One property of an object's schema."""

    name: str
    schema: Json
    is_required: bool


def get_json_type(value: Json) -> str:
    """Return JSON's name for the type of a decoded value."""
    return _JSON_TYPES.get(type(value), "string")


def resolve(schema: Json, root: Json) -> Json:
    """Follow the references of `schema` (`#/$defs/...` in `root`); return None if a reference has no target."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = _resolve_pointer(root, schema["$ref"])
        if not isinstance(target, dict):
            return target
        siblings = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**target, **siblings}
    return None


def _resolve_pointer(root: Json, reference: str) -> Json:
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    value = root
    for part in reference[2:].split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value


def schema_types(schema: Json, root: Json = None) -> tuple[str, ...]:
    """Return the types that a parameter's schema allows, sorted; ("string",) if the schema names none.

    `root`: schema with the definitions that `schema` refers to.
    """
    return tuple(sorted(_collect_types(schema, root, 0))) or ("string",)


def _collect_types(schema: Json, root: Json, depth: int) -> set[str]:
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return set()
    type_names = schema.get("type")
    types = {
        _ALIASES.get(t, t) for t in (type_names if isinstance(type_names, list) else [type_names]) if isinstance(t, str)
    }
    types |= {get_json_type(value) for value in _enum_values(schema) or ()}
    for branch in _BRANCHES:
        for inner in schema[branch] if isinstance(schema.get(branch), list) else ():
            types |= _collect_types(inner, root, depth + 1)
    return types or {kind for keyword, kind in _TYPE_BY_KEYWORD.items() if keyword in schema}


def _enum_values(schema: dict[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def list_values(schema: Json, root: Json, depth: int = 0) -> list[Json] | None:
    """Return the values that a schema lists by `enum`, `const` or branches; None without values, or with objects."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return None
    values = _enum_values(schema)
    if values is None:
        branches = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(branches, list) or not branches:
            return None
        values = []
        for branch in branches:
            inner = list_values(branch, root, depth + 1)
            if inner is None:
                return None
            values += inner
    return None if any(isinstance(value, (dict, list)) for value in values) else values


def get_definitions(schema: Json) -> dict[str, Json]:
    """Return the `$defs` and `definitions` of a schema, by these keywords."""
    if not isinstance(schema, dict):
        return {}
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def list_properties(schema: Json) -> list[Property] | None:
    """Return the properties of an object schema; None if the schema cannot be read as a plain list of properties.

    That is so if it names no properties, or has branches or `patternProperties` besides them. The schema of a property
    also holds the shared definitions, so that its references can be resolved.
    """
    object_schema = resolve(schema, schema)
    if not isinstance(object_schema, dict) or not isinstance(object_schema.get("properties"), dict):
        return None
    if object_schema.get("type", "object") != "object" or {*_BRANCHES, "patternProperties"} & set(object_schema):
        return None
    listed_names = object_schema.get("required")
    required_names = listed_names if isinstance(listed_names, list) else []
    definitions = get_definitions(schema)
    return [
        Property(name, {**definitions, **inner} if isinstance(inner, dict) else inner, name in required_names)
        for name, inner in object_schema["properties"].items()
    ]


def read_parameter_types(tools: list[dict[str, Json]]) -> ParameterTypes:
    """Return the types of the tools' parameters, for call formats without types of their own."""
    functions = [tool.get("function") or {} for tool in tools]
    return {
        function["name"]: read_property_types(function.get("parameters"))
        for function in functions
        if isinstance(function.get("name"), str)
    }


def read_property_types(schema: Json) -> dict[str, tuple[str, ...]]:
    """Return the types of every property that an object's schema names in any of its branches."""
    types: dict[str, set[str]] = {}
    _collect_property_types(schema, schema, 0, types)
    return {name: tuple(sorted(property_types)) or ("string",) for name, property_types in types.items()}


def _collect_property_types(schema: Json, root: Json, depth: int, types: dict[str, set[str]]) -> None:
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return
    properties = schema.get("properties")
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        types.setdefault(name, set()).update(_collect_types(inner, root, 0))
    for branch in _BRANCHES:
        for inner in schema[branch] if isinstance(schema.get(branch), list) else ():
            _collect_property_types(inner, root, depth + 1, types)
