"""Reader of one tool call in Python, and Python literals as JSON. No I/O."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

from engine.output.delta_builder import DeltaBuilder
from engine.output.growing_text import GrowingText, Steps
from engine.output.json_calls import NAME_PATTERN, read_name
from engine.output.schema_types import ParameterTypes

_PUNCTUATION_PATTERN_BY_QUOTE = {
    '"': re.compile(r'["\\]'),
    "'": re.compile(r"['\\]"),
    "": re.compile(r"""["'()\[\]{},=]"""),
}
"""Quotation mark ("" outside of strings) -> characters that matter there."""
_STRING_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"})
"""Characters that models write into strings, and Python's parser refuses there."""


class _Argument(NamedTuple):
    name: str | None
    """Source of the name; None: the argument has no "="."""
    value: str
    """Source of the value."""


def read_python_call(source: GrowingText, delta: DeltaBuilder, types: ParameterTypes) -> Steps[bool]:
    """Read a tool call in Python's syntax, such as `f(a=1, b="x")`, and add it to `delta`. Return False for other text.

    Argument names need not be valid in Python: models write `from` and `user-id`, too. The arguments are added all at
    once, because Python's parser needs the whole call. Yields whenever more text is needed.
    """
    name = yield from read_name(source)
    if name is None:
        return False
    next_char = yield from source.peek()
    if next_char != "(":
        return False
    source.take_chars(1)
    arguments = yield from _read_arguments(source)
    if arguments is None:
        return False
    arguments_json = _encode_arguments(arguments)
    if arguments_json is None:
        return False
    source.stop_holding()  # the text is a call, so no copy of it is needed
    delta.begin_call(name)
    delta.add_arguments(arguments_json)
    return True


def _read_arguments(source: GrowingText) -> Steps[list[_Argument] | None]:
    """Take the arguments of a call, such as `a=1, b=[2, 3])`, up to the parenthesis that ends them.

    They are split at commas and "=" outside of strings and inner brackets, and parsed later. Returns None if another
    bracket ends them.
    """
    arguments: list[_Argument] = []
    name: str | None = None
    parts: list[str] = []  # of the current name or value
    quote = ""
    open_brackets = 1

    def add_text(text: str) -> None:
        parts.append(text.translate(_STRING_ESCAPES) if quote else text)

    while char := (yield from source.take_until(_PUNCTUATION_PATTERN_BY_QUOTE[quote], add_text)):
        source.take_chars(1)
        if char == "\\":
            escaped_char = yield from source.peek()
            char += source.take_chars(len(escaped_char))
        elif char in "\"'":
            quote = "" if quote else char
        elif char in "([{":
            open_brackets += 1
        elif char in ")]}":
            open_brackets -= 1
        if open_brackets == 0 or (open_brackets == 1 and char == ","):
            arguments.append(_Argument(name, "".join(parts)))
            name, parts = None, []
            if open_brackets == 0:
                return arguments if char == ")" else None
        elif open_brackets == 1 and char == "=" and name is None:
            name, parts = "".join(parts), []
        else:
            parts.append(char)
    return None


def _encode_arguments(arguments: list[_Argument]) -> str | None:
    """Return arguments as a JSON object; None if one of them has no name, or no value that JSON can hold."""
    if arguments[-1].name is None and not arguments[-1].value.strip():  # f(), or a comma at the end
        arguments = arguments[:-1]
    json_by_name: dict[str, str] = {}
    for argument in arguments:
        name = None if argument.name is None else _parse_name(argument.name.strip())
        literal = parse_literal(argument.value)
        if name is None or literal is None or name in json_by_name:
            return None
        json_by_name[name] = literal.json
    return "{" + ", ".join(f"{encode_json(name)}: {value}" for name, value in json_by_name.items()) + "}"


def _parse_name(source: str) -> str | None:
    """Return the name of an argument, which may stand in quotes; None if the text is no name."""
    if NAME_PATTERN.fullmatch(source):
        return source
    literal = parse_literal(source) if source[:1] in ("'", '"') else None
    return literal.value if literal is not None and isinstance(literal.value, str) else None


# Literals -------------------------------------------------------------------------------------------------------------


class Literal(NamedTuple):
    """Value of a Python literal, and its JSON."""

    value: Any
    json: str


class _JsonConstants(ast.NodeTransformer):
    """Replaces JSON's names of constants by the constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value_by_name = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(value_by_name[node.id]), node) if node.id in value_by_name else node


def parse_literal(source: str) -> Literal | None:
    """Parse a Python literal, such as `{"a": [1, True]}`. JSON's `true`, `false` and `null` are accepted, too.

    Returns None if the text is no literal, or if JSON cannot express its value.
    """
    if not source.strip():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escapes such as \d
            tree = ast.parse(f"({source}\n)", mode="eval").body
        value = ast.literal_eval(_JsonConstants().visit(tree))
        value_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
        value_json.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
        return Literal(value, value_json)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def encode_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
