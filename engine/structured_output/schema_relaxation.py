"""Relax JSON schemas that a compiler cannot follow, or name the keyword that it cannot follow. No I/O.

Schemas made by generators have one odd keyword among many: bounds of 64-bit numbers, a pattern with look-around.
Every part of a schema is compiled by itself and without its references, inner parts first: so the fault is found
where it is. The compiler is a function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.output.schema_types import get_definitions

Json = Any
SchemaCheck = Callable[[Json], str | None]
"""Returns why a schema cannot be compiled; None if it can."""
_KEYWORDS_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_KEYWORDS_OF_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_KEYWORDS_OF_ONE_SCHEMA = ("items", "additionalProperties")
_FIRST_KEYWORDS = ("type", "properties", "patternProperties", "prefixItems", "required", "items")
"""Keywords that are tried first, because they say most."""
_DEPENDENCIES = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}
"""Keyword -> keywords without which it would forbid more."""


class UnsupportedKeyword(ValueError):
    """A keyword that the compiler cannot follow, in a schema that must be followed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class SchemaRelaxer:
    """Leaves out of schemas what a compiler cannot follow."""

    def __init__(self, check: SchemaCheck, check_inner: SchemaCheck, *, is_strict: bool) -> None:
        """`check`: of a whole schema; `check_inner`: of schemas inside of its properties.

        `is_strict`: nothing may be left out; `relax` raises UnsupportedKeyword.
        """
        self._check = check
        self._check_inner = check_inner
        self._is_strict = is_strict

    def relax(self, schema: Json) -> Json:
        """Return the schema with as much of it as can be compiled."""
        relaxed_schema = self._relax_part("", schema, self._check)
        for keyword, named_schemas in get_definitions(relaxed_schema).items():
            if isinstance(named_schemas, dict):  # the compiler reads definitions only where something refers to them
                relaxed_schemas = {
                    name: self._relax_part(f".{keyword}.{name}", part, self._check_inner)
                    for name, part in named_schemas.items()
                }
                relaxed_schema = {**relaxed_schema, keyword: relaxed_schemas}
        if self._check(relaxed_schema) is None:
            return relaxed_schema
        if self._is_strict:
            raise self._find_unsupported_reference(schema)
        definitions = get_definitions(relaxed_schema)
        bad_references = {
            reference
            for reference in _find_references(relaxed_schema)
            if self._check_inner({**definitions, "$ref": reference}) is not None
        }
        for removed_references in (bad_references, None):
            candidate = _without_references(relaxed_schema, removed_references)
            if self._check(candidate) is None:
                return candidate
        return {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}

    def _relax_part(self, path: str, schema: Json, check: SchemaCheck) -> Json:
        """Relax the schema at `path`. Its references stay, though they may lead to what cannot be compiled."""
        reason = check(_without_references(schema, None))
        if reason is None:
            return schema
        if not isinstance(schema, dict):
            self._leave_out(path, reason)
            return {}
        inner_schemas = {
            keyword: self._relax_keyword(f"{path}.{keyword}", keyword, value, check)
            for keyword, value in schema.items()
        }
        valid_keywords: dict[str, Json] = {}
        for keyword in _order_keywords(inner_schemas):
            dependencies = _DEPENDENCIES.get(keyword, ())
            if any(name in inner_schemas and name not in valid_keywords for name in dependencies):
                continue
            candidate = {**valid_keywords, keyword: inner_schemas[keyword]}
            reason = check(_without_references(candidate, None))
            if reason is None:
                valid_keywords = candidate
            else:
                self._leave_out(f"{path}.{keyword}", reason)
        return valid_keywords

    def _relax_keyword(self, path: str, keyword: str, value: Json, check: SchemaCheck) -> Json:
        """Relax the schemas that are the value of one keyword."""
        if keyword in _KEYWORDS_OF_NAMED_SCHEMAS and isinstance(value, dict):
            is_whole = check is not self._check_inner
            part_check = _make_property_check(check) if keyword == "properties" and is_whole else self._check_inner
            return {name: self._relax_part(f"{path}.{name}", part, part_check) for name, part in value.items()}
        if keyword in _KEYWORDS_OF_SCHEMA_LISTS and isinstance(value, list):
            return [self._relax_part(f"{path}[{index}]", part, self._check_inner) for index, part in enumerate(value)]
        if keyword in _KEYWORDS_OF_ONE_SCHEMA and isinstance(value, dict):
            return self._relax_part(path, value, self._check_inner)
        return value

    def _leave_out(self, path: str, reason: str) -> None:
        if self._is_strict:
            raise UnsupportedKeyword(path, reason)

    def _find_unsupported_reference(self, schema: Json) -> UnsupportedKeyword:
        """Name the first keyword of a schema which can be compiled without its references only."""
        keywords: dict[str, Json] = {}
        for keyword in _order_keywords(schema if isinstance(schema, dict) else {}):
            keywords[keyword] = schema[keyword]
            reason = self._check(keywords)
            if reason is not None:
                return UnsupportedKeyword(f".{keyword}", reason)
        return UnsupportedKeyword("", "cannot be followed")


def _make_property_check(check: SchemaCheck) -> SchemaCheck:
    """Return the check of a property's schema, given the check of its object's schema."""

    def check_property(schema: Json) -> str | None:
        return check({"type": "object", "properties": {"v": schema}, "required": ["v"]})

    return check_property


def _order_keywords(schema: dict[str, Json]) -> list[str]:
    first_keywords = [keyword for keyword in _FIRST_KEYWORDS if keyword in schema]
    return [*first_keywords, *(keyword for keyword in schema if keyword not in first_keywords)]


def _find_references(value: Json) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_find_references, value))
    if not isinstance(value, dict):
        return set()
    references = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
    return references.union(*map(_find_references, value.values()))


def _without_references(value: Json, references: set[str] | None) -> Json:
    """Return a schema without these references; None: without all references."""
    if isinstance(value, list):
        return [_without_references(item, references) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_references(item, references)
        for name, item in value.items()
        if name != "$ref" or (references is not None and item not in references)
    }
