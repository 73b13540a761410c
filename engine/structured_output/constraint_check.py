"""Compile a constraint before the core gets it, and loosen schemas of tools that the compiler cannot follow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from engine.grammars import GrammarError, GrammarVocabulary, check_grammar
from engine.output.schema_types import get_definitions
from engine.structured_output.constraint import Format, RequestedConstraint
from engine.structured_output.lark import write_lark
from engine.types import Constraint
from prompts import RequestError

LOOSEN_CPU_S_MAX: Final = 0.8
"""CPU time for loosening the schemas of one request property by property; after it, they allow any object."""

FindFault = Callable[[Format], str | None]
"""Returns why a format cannot be compiled; None: it can."""


def check_constraint(vocabulary: GrammarVocabulary, constraint: Constraint) -> Constraint:
    """Return the constraint with a grammar that compiles. May crash or take long, as `check_grammar`.

    If the schema of a tool that is not strict cannot be compiled, each faulty property is only held to its type. For
    every other schema RequestError names the field.
    """
    try:
        try:
            lark = check_grammar(vocabulary, constraint.lark_grammar)
        except GrammarError:
            if not constraint.source_json:
                raise
            lark = check_grammar(vocabulary, _write_loosened_grammar(vocabulary, constraint.source_json))
    except GrammarError as error:
        raise RequestError(f"{constraint.param}: {error}", param=constraint.param) from error
    except RecursionError as error:
        message = f"{constraint.param}: schemas too deep in each other"
        raise RequestError(message, param=constraint.param) from error
    return msgspec.structs.replace(constraint, lark_grammar=lark, source_json=b"")


def _write_loosened_grammar(vocabulary: GrammarVocabulary, source_json: bytes) -> str:
    """Return the grammar of a requested constraint, given as JSON, with schemas that the compiler can follow."""
    constraint = msgspec.json.decode(source_json, type=RequestedConstraint)
    end_s = time.thread_time() + LOOSEN_CPU_S_MAX
    format = _loosen_schemas(constraint.format, _make_fault_finder(vocabulary), end_s)
    return write_lark(RequestedConstraint(constraint.param, format), vocabulary.added_tokens)


def _make_fault_finder(vocabulary: GrammarVocabulary) -> FindFault:
    """Return a function that tries to compile a format, and returns the reason if that fails."""

    def find_fault(format: Format) -> str | None:
        constraint = RequestedConstraint("schema", format)
        try:
            vocabulary.compile(write_lark(constraint, vocabulary.added_tokens)).compute_bitmask()
        except GrammarError as error:
            return str(error)
        return None

    return find_fault


def _loosen_schemas(part: Any, find_fault: FindFault, end_s: float) -> Any:
    """Loosen every schema in a part of a format that cannot be compiled. Raises RequestError if a tool is strict.

    `end_s`: CPU time of this thread from which on a faulty schema allows any object.
    """
    if isinstance(part, list):
        return [_loosen_schemas(item, find_fault, end_s) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") != "json_schema" or "param" not in part:
        return {name: _loosen_schemas(item, find_fault, end_s) for name, item in part.items()}
    fault = find_fault(part)
    if fault is None:
        return part
    if not part.get("lenient"):
        raise RequestError(f"{part['param']}: {fault}", param=part["param"])
    return _loosen_schema(part, find_fault, end_s)


def _loosen_schema(format: Format, find_fault: FindFault, end_s: float) -> Format:
    """Loosen the schema of a tool's arguments property by property; if that fails or takes long, allow any object."""
    schema, any_object = format["json_schema"], {**format, "json_schema": {"type": "object"}}
    if not isinstance(schema.get("properties"), dict):
        return any_object
    properties = {}
    for name, property_schema in schema["properties"].items():
        if time.thread_time() > end_s:
            return any_object
        properties[name] = _loosen_property(format, name, property_schema, find_fault)
    loosened_format = {**format, "json_schema": {**schema, "properties": properties}}
    return loosened_format if find_fault(loosened_format) is None else any_object


def _loosen_property(format: Format, name: str, property_schema: Any, find_fault: FindFault) -> Any:
    """Return a property's schema; if that cannot be compiled, its type alone; else the schema of any value."""
    only_type = {"type": property_schema.get("type")} if isinstance(property_schema, dict) else {}
    definitions = get_definitions(format["json_schema"])
    for candidate in (property_schema, only_type):
        schema = {**definitions, "type": "object", "properties": {name: candidate}, "required": [name]}
        if find_fault({**format, "json_schema": schema}) is None:
            return candidate
    return {}
