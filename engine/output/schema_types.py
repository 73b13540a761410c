"""Read types, properties and listed values from JSON schemas, for tool calls that are not written in JSON. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Json = Any
ParameterTypes = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool name -> parameter -> JSON types that its schema allows."""
DEPTH_MAX = 8
"""Most nested schemas, and most references in a row, that are followed."""
SCHEMAS_MAX = 20_000
"""Most schemas that are read for the types of all tools of a request; 20,000 take some 0.1 s."""
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
    return tuple(sorted(_collect_types(schema, root, iter(range(SCHEMAS_MAX))))) or ("string",)


def _collect_types(schema: Json, root: Json, budget: Iterator[int]) -> set[str]:
    """Return the JSON types that a JSON schema allows, such as {"integer", "null"}; an empty set if it allows all.

    Types come from `type`, and from the values in `enum` or `const`, of the schema and its branches. Without these, a
    keyword of one type decides: `properties` belongs to objects. `root`: schema with the definitions that `schema`
    refers to. `budget`: see `_iter_branches`.
    """
    types: set[str] = set()
    for branch in _iter_branches(schema, root, budget):
        declared_types = branch.get("type")
        if not isinstance(declared_types, list):
            declared_types = [declared_types]
        own_types = {_ALIASES.get(name, name) for name in declared_types if isinstance(name, str)}
        own_types |= {get_json_type(value) for value in _enum_values(branch) or ()}
        types |= own_types or {type_name for keyword, type_name in _TYPE_BY_KEYWORD.items() if keyword in branch}
    return types


def _iter_branches(schema: Json, root: Json, budget: Iterator[int]) -> Iterator[dict[str, Json]]:
    """Yield a schema and all schemas in its `anyOf`, `oneOf` and `allOf`, with references followed.

    Schemas may refer to each other in circles, and many times to the same one. So each list of schemas is read once.
    `budget`: gives a number for each schema that may still be read; the others are left out.
    """
    pending_schemas = [schema]
    read_lists: set[int] = set()
    while pending_schemas and next(budget, None) is not None:
        branch = resolve(pending_schemas.pop(), root)
        if isinstance(branch, dict):
            yield branch
            for branches in map(branch.get, _BRANCHES):
                if isinstance(branches, list) and id(branches) not in read_lists:
                    read_lists.add(id(branches))
                    pending_schemas += branches


def _enum_values(schema: dict[str, Json]) -> list[Json] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def list_values(schema: Json, root: Json, depth: int = 0) -> list[Json] | None:
    """Return the values that a JSON schema lists by `enum` or `const`, or in each branch of `anyOf` or `oneOf`.

    Returns None if the schema lists no values, or if one of them is an object or an array. `root`: schema with the
    definitions that `schema` refers to. `depth`: number of schemas around this one, which is bounded.
    """
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return None
    values = _enum_values(schema)
    branches = schema.get("anyOf", schema.get("oneOf"))
    if values is None and isinstance(branches, list) and branches:
        values = []
        for branch in branches:
            branch_values = list_values(branch, root, depth + 1)
            if branch_values is None:
                return None
            values += branch_values
    if values is None:
        return None
    has_nested_value = any(isinstance(value, (dict, list)) for value in values)
    return None if has_nested_value else values


def get_definitions(schema: Json) -> dict[str, Json]:
    """Return the `$defs` and `definitions` of a schema, by these keywords."""
    if not isinstance(schema, dict):
        return {}
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def list_properties(schema: Json) -> list[Property] | None:
    """Return the properties of an object's JSON schema; None if the schema has no complete list of them.

    A list is not complete beside `anyOf`, `oneOf`, `allOf` or `patternProperties`.
    """
    object_schema = resolve(schema, schema)
    if not isinstance(object_schema, dict) or not isinstance(object_schema.get("properties"), dict):
        return None
    if object_schema.get("type", "object") != "object" or {*_BRANCHES, "patternProperties"} & set(object_schema):
        return None
    required_names = object_schema.get("required")
    if not isinstance(required_names, list):
        required_names = []
    properties = object_schema["properties"].items()
    return [Property(name, inner, is_required=name in required_names) for name, inner in properties]


def read_parameter_types(tools: list[dict[str, Json]]) -> ParameterTypes:
    """Return the types of the tools' parameters, for call formats without types of their own."""
    functions = [tool.get("function") or {} for tool in tools]
    budget = iter(range(SCHEMAS_MAX))
    return {
        function["name"]: _read_property_types(function.get("parameters"), budget)
        for function in functions
        if isinstance(function.get("name"), str)
    }


def _read_property_types(schema: Json, budget: Iterator[int]) -> dict[str, tuple[str, ...]]:
    """Return the types of every property that an object's schema names in any of its branches."""
    types: dict[str, set[str]] = {}
    for branch in _iter_branches(schema, schema, budget):
        properties = branch.get("properties")
        if isinstance(properties, dict):
            for name, property_schema in properties.items():
                types.setdefault(name, set()).update(_collect_types(property_schema, schema, budget))
    return {name: tuple(sorted(property_types)) or ("string",) for name, property_types in types.items()}
