"""What answers must match, as the core gets it: compiled once, schemas followed as far as the compiler can."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from engine.api.constraint import Format, RequestedConstraint
from engine.api.lark import write_lark
from engine.api.schemas.relaxation import SchemaCheck, find_unsupported_keyword, relax_schema
from engine.grammars import GrammarError, GrammarVocabulary, check
from engine.types import Constraint
from prompts import RequestError

TRIES_MAX = 500
TRIES_S_MAX = 0.8
"""Schemas that are compiled, and CPU time of the thread, to find out what cannot be followed of one request."""
PATH_CHARS_MAX = 200
"""Of the place in a schema that an error names."""
_STYLED = ("qwen_xml", "python")


def check_constraint(words: GrammarVocabulary, constraint: Constraint) -> Constraint:
    """The constraint as it is to be compiled. May crash, or take long, as `check`.

    Schemas that need not be followed in every word (tools that are not strict) lose what cannot be compiled. Raises
    RequestError, for others with the name of the keyword.
    """
    try:
        try:
            lark = check(words, constraint.lark)
        except GrammarError:
            if not constraint.source:
                raise
            asked = msgspec.json.decode(constraint.source, type=RequestedConstraint)
            lark = check(words, write_lark(_followed(asked, words), words.added_tokens))
    except GrammarError as error:
        raise RequestError(f"{constraint.param}: {error}", param=constraint.param) from error
    except RecursionError as error:
        message = f"{constraint.param}: schemas too deep in each other"
        raise RequestError(message, param=constraint.param) from error
    return msgspec.structs.replace(constraint, lark=lark, source=b"")


def _followed(asked: RequestedConstraint, words: GrammarVocabulary) -> RequestedConstraint:
    refusal = _BudgetedCompiler(words)

    def follow(value: Any) -> Any:
        if isinstance(value, list):
            return [follow(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "json_schema" and "json_schema" in value:
            return _follow_schema(value, asked.param, refusal)
        return {name: follow(item) for name, item in value.items()}

    return RequestedConstraint(asked.param, follow(asked.format))


def _follow_schema(format: Format, param: str, refusal: _BudgetedCompiler) -> Format:
    schema = format["json_schema"]
    styled, plain = refusal.of(format), refusal.of({**format, "style": "json"})
    refused = styled if format.get("style") in _STYLED else plain
    if refused(schema) is None:
        return format
    if format.get("lenient"):
        return {**format, "json_schema": relax_schema(schema, refused, plain)}
    path, reason = find_unsupported_keyword(schema, refused, plain)
    shown = path if len(path) <= PATH_CHARS_MAX else f"...{path[-PATH_CHARS_MAX:]}"
    where = f"{format.get('param', param)}{shown}"
    raise RequestError(f"{where}: {reason}", param=where)


class _BudgetedCompiler:
    """Says whether schemas compile, for so long."""

    def __init__(self, words: GrammarVocabulary) -> None:
        self._words = words
        self._tries = 0
        self._begin_s = time.thread_time()

    def of(self, format: Format) -> SchemaCheck:
        """Judges schemas that stand in such a format."""

        def refused(schema: Any) -> str | None:
            self._tries += 1
            if self._tries > TRIES_MAX or time.thread_time() - self._begin_s > TRIES_S_MAX:
                return "too large to find out what of it can be followed"
            asked = RequestedConstraint("schema", {**format, "json_schema": schema})
            try:
                self._words.compile(write_lark(asked, self._words.added_tokens)).compute_bitmask()
            except GrammarError as error:
                return str(error)
            except RequestError as error:
                return error.message
            return None

        return refused
