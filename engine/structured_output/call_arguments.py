"""Write the arguments of a call as a grammar in Lark, for models whose calls are not JSON. No I/O.

Qwen3-Coder writes arguments as XML, other models as those of a Python call. The grammar follows the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.output.json_calls import NAME_PATTERN
from engine.output.schema_types import Property, get_definitions, list_properties, list_values, resolve, schema_types
from engine.output.xml_calls import encode_as_types
from engine.structured_output.lark_rules import ANY_TEXT, GrammarRules, json_directive, quote, slash_regex
from prompts import field_error
from prompts.chat_completions import Json

SCHEMA_DEPTH_MAX = 64
"""Most schemas inside each other that are followed. Deeper ones allow any value of their type."""
PYTHON_OPTIONS = {"json_allowed_escapes": 'nrbtf\\"'}
"""Option of llguidance: escapes of JSON strings that mean the same in Python."""
_XML_NAME = re.compile(r"(?! )[^<>\n]+(?<! )")
_XML_END = "\n</parameter>\n"
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs",
                          "definitions", "deprecated", "readOnly", "writeOnly"))  # fmt: skip
"""Keywords of a JSON schema that restrict no value."""
_DATE, _TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""`format` of a string schema -> its regular expression, for strings without quotation marks."""


class ArgumentWriter:
    """Writes the arguments that one schema allows, as expressions of a grammar."""

    def __init__(self, rules: GrammarRules, param: str, schema: Json, options: Mapping[str, Any]) -> None:
        """`rules`: rules of the grammar, to which those of the arguments are added.

        `schema`: schema of all arguments together, with its definitions. `param`: its field in the request, for errors.
        `options`: llguidance's options for values in JSON.
        """
        self._rules = rules
        self._param = param
        self._root = schema
        self._options = options

    def write_xml(self) -> str:
        """Return a grammar expression for the arguments of a tool call, as Qwen3-Coder writes them.

        Each argument is a line `<parameter=NAME>`, its value and a line `</parameter>`. Strings have no quotation
        marks, other values are JSON. For a required `city` and an optional `days`, the expression is `r1 r2?`, and rule
        r1 is the argument `city`.
        """
        arguments = self._list_writable_properties(lambda name: _XML_NAME.fullmatch(name) is not None)
        if arguments is None:  # the schema allows any
            name_end = self._rules.add_terminal('/[^>\\n]+/ ">\\n"')
            value = self._rules.add_rule(f"{ANY_TEXT} {quote(_XML_END)}", "[lazy]")
            return f'("<parameter=" {name_end} {value})*'
        expressions = []
        for argument in arguments:
            begin = quote(f"<parameter={argument.name}>\n")
            rule_name = self._rules.add_rule(f"{begin} {self._write_xml_value(argument.schema)}")
            expressions.append(rule_name if argument.is_required else f"{rule_name}?")
        no_arguments = '""'
        return " ".join(expressions) or no_arguments

    def _write_xml_value(self, schema: Json) -> str:
        """Return an expression of a parameter's value (a listed value, plain text or JSON) and its end marker."""
        values = list_values(schema, self._root)
        if values is not None:
            types = schema_types(schema, self._root)
            texts = (_write_listed_value(value, types) for value in values)
            return f"({' | '.join(map(self._rules.write_text, texts))}) {quote(_XML_END)}"
        if schema_types(schema, self._root) == ("string",) and resolve(schema, self._root) is not None:
            return self._rules.add_rule(f"{self._write_plain_text(schema, 0)} {quote(_XML_END)}", "[lazy]")
        return f"{self._write_json(schema)} {quote(_XML_END)}"

    def _write_plain_text(self, schema: Json, depth: int) -> str:
        """Return a grammar terminal for the texts that a schema of strings allows, without quotation marks.

        A text must satisfy all keywords: the length, `pattern`, `format` and the branches of `anyOf` and the like.
        `depth`: number of schemas around this one.
        """
        schema = resolve(schema, self._root)
        if not isinstance(schema, dict) or depth > SCHEMA_DEPTH_MAX:
            return ANY_TEXT
        values = list_values(schema, self._root)
        if values is not None:
            return self._rules.add_terminal(" | ".join(quote(value) for value in values if isinstance(value, str)))
        terminals = []
        min_length, max_length = _get_length(schema.get("minLength")), _get_length(schema.get("maxLength"))
        if min_length is not None or max_length is not None:
            terminals.append(f"/(?s:.{{{min_length or 0},{'' if max_length is None else max_length}}})/")
        if isinstance(schema.get("pattern"), str):
            terminals.append(_make_search_regex(schema["pattern"]))
        text_format = schema.get("format")
        if isinstance(text_format, str) and text_format in TEXT_FORMATS:
            terminals.append(slash_regex(TEXT_FORMATS[text_format]))
        for keyword, operator in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
            branches = schema.get(keyword)
            if isinstance(branches, list) and branches:
                branch_terminals = [self._write_plain_text(branch, depth + 1) for branch in branches]
                terminals.append(self._rules.add_terminal(operator.join(branch_terminals)))
        if not terminals:
            return ANY_TEXT
        return terminals[0] if len(terminals) == 1 else self._rules.add_terminal(" & ".join(terminals))

    def write_python(self) -> str:
        """Return an expression of the arguments of a Python call, such as `a=1, b="x"`. Nested values are JSON."""
        properties = self._list_writable_properties(lambda name: True)
        if properties is None:  # any arguments
            name = self._rules.add_terminal("/[A-Za-z_][A-Za-z_0-9]*/")
            argument = self._rules.add_rule(f'{name} "=" {self._write_python_literal()}')
            return f'({argument} (", " {argument})*)?'
        arguments = []
        for property in properties:
            key = property.name if NAME_PATTERN.fullmatch(property.name) else quote(property.name)
            value = self._write_python_value(property.schema, 0)
            arguments.append(self._rules.add_rule(f"{quote(key + '=')} {value}"))
        return self._join_arguments(arguments, [property.is_required for property in properties])

    def _join_arguments(self, arguments: list[str], is_required: list[bool]) -> str:
        """Return a grammar expression for arguments with commas between them, where optional ones may be missing.

        There is one alternative for each argument that may come first. For `a` (optional), `b` (required) and `c`
        (optional), the expression is `a ", " b (", " c)? | b (", " c)?`: `c` cannot come first.
        """
        alternatives = []
        tail = '""'  # the arguments after the current one, each with a comma before it
        for argument, must_come in zip(reversed(arguments), reversed(is_required)):
            alternatives.append(f"{argument} {tail}")
            with_comma = f'", " {argument}' if must_come else f'(", " {argument})?'
            tail = self._rules.add_rule(f"{with_comma} {tail}")
        alternatives.reverse()
        if True in is_required:
            first_required = is_required.index(True)
            return " | ".join(alternatives[: first_required + 1])
        no_arguments = '""'
        return " | ".join([*alternatives, no_arguments])

    def _write_python_value(self, schema: Json, depth: int) -> str:
        """Return a grammar expression for the value of an argument in a Python call, by its JSON schema.

        Constants are Python's (`True`, `None`), other values are JSON. `depth`: number of schemas around this one.
        """
        values = list_values(schema, self._root)
        if values is not None:
            texts = (json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for v in values)
            return f"({' | '.join(map(quote, texts))})"
        resolved_schema = resolve(schema, self._root)
        if isinstance(resolved_schema, dict):
            schema = resolved_schema
        elif not isinstance(schema, dict):  # a boolean
            schema = {}
        value_type = schema.get("type")
        if value_type == "boolean":
            return '("True" | "False")'
        if value_type == "null":
            return '"None"'
        restricts_nothing = set(schema) <= _ANNOTATIONS
        if restricts_nothing:
            return self._write_python_literal()
        branches = _list_branches(schema)
        if branches and depth < SCHEMA_DEPTH_MAX:
            alternatives = [self._write_python_value(branch, depth + 1) for branch in branches]
            return f"({' | '.join(alternatives)})"
        return self._write_json(schema)

    def _write_json(self, schema: Json) -> str:
        """Return a rule of the JSON that matches a schema, which gets the definitions that it may refer to."""
        if isinstance(schema, dict):
            schema = {**get_definitions(self._root), **schema}
        return self._rules.add_rule(json_directive(schema, self._options))

    def _write_python_literal(self) -> str:
        """Return a rule of any Python literal that JSON can hold."""
        name = f"r{len(self._rules.lines)}"
        plain = json_directive({"type": ["string", "number"]}, self._options)
        self._rules.lines.append(
            f'{name}: "True" | "False" | "None" | {name}_plain | "[" ({name} (", " {name})*)? "]" '
            f'| "{{" ({name}_pair (", " {name}_pair)*)? "}}"'
        )
        self._rules.lines.append(f"{name}_plain: {plain}")
        self._rules.lines.append(f'{name}_pair: {name}_key ": " {name}')
        self._rules.lines.append(f"{name}_key: {json_directive({'type': 'string'}, self._options)}")
        return name

    def _list_writable_properties(self, can_write: Callable[[str], bool]) -> list[Property] | None:
        """Return the arguments that the schema names; None if a call may have any arguments.

        `can_write`: returns whether the model's markup can hold a name. Raises RequestError if the tool is strict and
        its schema cannot be followed by calls in this markup.
        """
        properties = list_properties(self._root)
        if properties is not None and all(can_write(property.name) for property in properties):
            return properties
        schema = self._root if isinstance(self._root, dict) else {}
        keywords = set(schema) - _ANNOTATIONS - {"type", "additionalProperties"}
        restricts_nothing = properties is None and not keywords
        if restricts_nothing:
            return [] if schema.get("additionalProperties") is False else None
        if self._options.get("lenient"):  # the tool is not strict
            return None
        raise field_error(
            self._param,
            "calls of this model are not JSON and cannot follow this schema, expected an object with properties, "
            'without anyOf, oneOf, allOf and patternProperties; or "strict": false',
        )


def _list_branches(schema: dict[str, Any]) -> list[Json]:
    """Return the schemas of which a value must match one, if a schema is no more than a choice; else an empty list.

    `{"type": ["integer", "null"], "minimum": 1}` has the branches `{"type": "integer", "minimum": 1}` and
    `{"type": "null", "minimum": 1}`. The branches of a schema with `anyOf` alone are those that it lists.
    """
    types, any_of = schema.get("type"), schema.get("anyOf")
    if isinstance(types, list):
        return [{**schema, "type": branch_type} for branch_type in types]
    has_only_any_of = set(schema) - _ANNOTATIONS == {"anyOf"}
    return any_of if has_only_any_of and isinstance(any_of, list) else []


def _write_listed_value(value: Json, types: tuple[str, ...]) -> str:
    """Return the text that the parser reads as a listed value: "5" among numbers needs quotation marks."""
    value_json = json.dumps(value, ensure_ascii=False)
    is_plain = isinstance(value, str) and (types == ("string",) or encode_as_types(value, types) == value_json)
    return value if is_plain else value_json


def _get_length(value: Json) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)


def _make_search_regex(pattern: str) -> str:
    """Return a terminal of Lark, /REGEX/, for the texts that a `pattern` of JSON Schema allows.

    A pattern may be found anywhere in a text, and a terminal must match the whole text. So each alternative without
    "^" may have any text before it, and each without "$" any text after it: "^a$|b" allows "a", and texts with a "b".
    Other anchors remain in the terminal: llguidance, which compiles the grammar, raises an error for them.
    """
    return slash_regex("|".join(map(_anchor_alternative, _split_alternatives(pattern))))


def _split_alternatives(pattern: str) -> list[list[str]]:
    """Split a regular expression at each "|" outside of parentheses, and each alternative into its parts.

    Parts are characters, escapes and classes: "a|[b-d]$" gives [["a"], ["[b-d]", "$"]]. `\\d` becomes [0-9], its
    meaning in JavaScript, whose patterns JSON Schema uses.
    """
    alternatives: list[list[str]] = [[]]
    open_parentheses = 0
    for part in _PATTERN_PARTS.findall(pattern):
        if part == "(":
            open_parentheses += 1
        elif part == ")":
            open_parentheses -= 1
        if part == "|" and open_parentheses == 0:
            alternatives.append([])
            continue
        if part == r"\d":
            part = "[0-9]"
        elif part.startswith("["):
            part = re.sub(r"\\.", lambda escape: "0-9" if escape[0] == r"\d" else escape[0], part)
        alternatives[-1].append(part)
    return alternatives


def _anchor_alternative(parts: list[str]) -> str:
    """Return a regular expression that matches every whole text in which the alternative is found."""
    has_start, has_end = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = "".join(parts[has_start : len(parts) - has_end])
    return f"{'' if has_start else '(?s:.*)'}(?:{inner}){'' if has_end else '(?s:.*)'}"
