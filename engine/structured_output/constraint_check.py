"""Compile a constraint before the core gets it, and relax schemas that the compiler cannot follow."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from engine.grammars import GrammarError, GrammarVocabulary, check_grammar
from engine.structured_output.constraint import Format, RequestedConstraint
from engine.structured_output.lark import write_lark
from engine.structured_output.schema_relaxation import SchemaCheck, SchemaRelaxer, UnsupportedKeyword
from engine.types import Constraint
from prompts import RequestError

TRIES_MAX = 500
TRIES_S_MAX = 0.8
"""CPU time for finding the keywords of one request that cannot be compiled; TRIES_MAX bounds the compiled schemas."""
PATH_CHARS_MAX = 200
"""Longest path in a schema that an error names."""
_MARKUP_STYLES = ("qwen_xml", "python")


def check_constraint(vocabulary: GrammarVocabulary, constraint: Constraint) -> Constraint:
    """Return the constraint with a grammar that compiles. May crash or take long, as `check_grammar`.

    Schemas of tools that are not strict lose the keywords that cannot be compiled. For all others RequestError names
    the keyword.
    """
    try:
        try:
            lark = check_grammar(vocabulary, constraint.lark_grammar)
        except GrammarError:
            if not constraint.source_json:
                raise
            spec = msgspec.json.decode(constraint.source_json, type=RequestedConstraint)
            lark = check_grammar(vocabulary, write_lark(_relax_constraint(spec, vocabulary), vocabulary.added_tokens))
    except GrammarError as error:
        raise RequestError(f"{constraint.param}: {error}", param=constraint.param) from error
    except RecursionError as error:
        message = f"{constraint.param}: schemas too deep in each other"
        raise RequestError(message, param=constraint.param) from error
    return msgspec.structs.replace(constraint, lark_grammar=lark, source_json=b"")


def _relax_constraint(spec: RequestedConstraint, vocabulary: GrammarVocabulary) -> RequestedConstraint:
    """Return the constraint with schemas that compile. Raises RequestError for a strict schema that does not."""
    compiler = _BudgetedCompiler(vocabulary)
    return RequestedConstraint(spec.param, _relax_schemas(spec.format, spec.param, compiler))


def _relax_schemas(value: Any, param: str, compiler: _BudgetedCompiler) -> Any:
    """Relax every schema in a format, or in a part of one. `param`: field that an error names."""
    if isinstance(value, list):
        return [_relax_schemas(item, param, compiler) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and "json_schema" in value:
        return _relax_format(value, param, compiler)
    return {name: _relax_schemas(item, param, compiler) for name, item in value.items()}


def _relax_format(format: Format, param: str, compiler: _BudgetedCompiler) -> Format:
    """Relax the schema of one format."""
    schema = format["json_schema"]
    check_styled, check_json = compiler.make_check(format), compiler.make_check({**format, "style": "json"})
    check = check_styled if format.get("style") in _MARKUP_STYLES else check_json
    if check(schema) is None:
        return format
    relaxer = SchemaRelaxer(check, check_json, is_strict=not format.get("lenient"))
    try:
        return {**format, "json_schema": relaxer.relax(schema)}
    except UnsupportedKeyword as error:
        short_path = error.path if len(error.path) <= PATH_CHARS_MAX else f"...{error.path[-PATH_CHARS_MAX:]}"
        keyword_path = f"{format.get('param', param)}{short_path}"
        raise RequestError(f"{keyword_path}: {error.reason}", param=keyword_path) from None


class _BudgetedCompiler:
    """Compiles schemas until the budget of one request is spent."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._try_count = 0
        self._begin_s = time.thread_time()

    def make_check(self, format: Format) -> SchemaCheck:
        """Return a function that says why a schema cannot be compiled as part of `format`; None: it can."""

        def check_schema(schema: Any) -> str | None:
            self._try_count += 1
            if self._try_count > TRIES_MAX or time.thread_time() - self._begin_s > TRIES_S_MAX:
                return "too large to find out what of it can be followed"
            constraint = RequestedConstraint("schema", {**format, "json_schema": schema})
            try:
                self._vocabulary.compile(write_lark(constraint, self._vocabulary.added_tokens)).compute_bitmask()
            except GrammarError as error:
                return str(error)
            except RequestError as error:
                return error.message
            return None

        return check_schema
