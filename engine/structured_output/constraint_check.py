"""Compile a constraint before the core gets it, and loosen schemas of tools that the compiler cannot follow."""

from __future__ import annotations

import time
from typing import Any, Final

from engine.grammar_compiler import GrammarError, GrammarVocabulary, check_grammar
from engine.output.schema_types import get_definitions
from engine.structured_output.constraint import EncodedConstraint, Format, RequestedConstraint
from engine.structured_output.lark import write_lark
from prompts import field_error

GRAMMAR_CHARS_MAX: Final = 1 << 20
LOOSEN_CPU_S_MAX: Final = 0.8
"""CPU time for loosening the schemas of one request property by property; after it, they allow any object."""


def check_constraint(vocabulary: GrammarVocabulary, constraint: EncodedConstraint) -> str:
    """Return the grammar, in Lark, that a request's answer must match. The grammar was compiled once, as a trial.

    Raises RequestError if it cannot be compiled. Writing and compiling may crash or take long, so call this in a
    process that may be killed.
    """
    try:
        return _write_compilable_grammar(vocabulary, constraint.decode())
    except GrammarError as error:
        raise field_error(constraint.param, str(error)) from error
    except RecursionError as error:
        raise field_error(constraint.param, "schemas too deep in each other") from error


def _write_compilable_grammar(vocabulary: GrammarVocabulary, requested: RequestedConstraint) -> str:
    """Return the grammar of a format. If it does not compile, tools that are not strict get schemas that allow more.

    Raises GrammarError if it does not compile even then, and RequestError.
    """
    try:
        return _check_format(vocabulary, requested)
    except GrammarError:
        format = _SchemaLoosener(vocabulary).loosen_all(requested.format)
        return _check_format(vocabulary, RequestedConstraint(requested.param, format))


def _check_format(vocabulary: GrammarVocabulary, requested: RequestedConstraint) -> str:
    """Write the grammar of a format, and compile it. Return it in Lark. Raises GrammarError, RequestError."""
    grammar_text = write_lark(requested, vocabulary.added_tokens)
    if len(grammar_text) > GRAMMAR_CHARS_MAX:
        raise field_error(requested.param, f"too long, expected at most {GRAMMAR_CHARS_MAX} characters")
    return check_grammar(vocabulary, grammar_text)


class _SchemaLoosener:
    """Replaces JSON schemas of tools that the grammar compiler does not support by schemas that allow more."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._deadline_cpu_s = time.thread_time() + LOOSEN_CPU_S_MAX
        """CPU time of this thread after which any object is allowed, without further trials."""

    def loosen_all(self, format_part: Any) -> Any:
        """Return an output format, or a part of one, in which every schema of a tool can be compiled.

        Formats are JSON with other formats inside. Raises RequestError for a faulty schema of a strict tool.
        """
        if isinstance(format_part, list):
            return [self.loosen_all(item) for item in format_part]
        if not isinstance(format_part, dict):
            return format_part
        is_tool_schema = format_part.get("type") == "json_schema" and "param" in format_part
        if is_tool_schema:
            return self._loosen_if_faulty(format_part)
        return {name: self.loosen_all(item) for name, item in format_part.items()}

    def _loosen_if_faulty(self, format: Format) -> Format:
        fault = self._find_fault(format)
        if fault is None:
            return format
        is_strict = not format.get("lenient")
        if is_strict:
            raise field_error(format["param"], fault)
        return self._loosen_schema(format)

    def _find_fault(self, format: Format) -> str | None:
        """Return the reason why a format cannot be compiled; None: it can."""
        lark = write_lark(RequestedConstraint("schema", format), self._vocabulary.added_tokens)
        try:
            self._vocabulary.compile(lark).compute_bitmask()
        except GrammarError as error:
            return str(error)
        return None

    def _loosen_schema(self, format: Format) -> Format:
        """Loosen the schema of a tool's arguments property by property; if that fails or is slow, allow any object."""
        schema, any_object = format["json_schema"], {**format, "json_schema": {"type": "object"}}
        if not isinstance(schema.get("properties"), dict):
            return any_object
        properties = {}
        for name, property_schema in schema["properties"].items():
            if time.thread_time() > self._deadline_cpu_s:
                return any_object
            properties[name] = self._loosen_property(format, name, property_schema)
        loosened_format = {**format, "json_schema": {**schema, "properties": properties}}
        return loosened_format if self._find_fault(loosened_format) is None else any_object

    def _loosen_property(self, format: Format, name: str, property_schema: Any) -> Any:
        """Return a property's schema; if that cannot be compiled, its type alone; else the schema of any value."""
        only_type = {"type": property_schema.get("type")} if isinstance(property_schema, dict) else {}
        definitions = get_definitions(format["json_schema"])
        for candidate in (property_schema, only_type):
            schema = {**definitions, "type": "object", "properties": {name: candidate}, "required": [name]}
            if self._find_fault({**format, "json_schema": schema}) is None:
                return candidate
        return {}
