"""Write a format as a grammar in Lark, as llguidance reads it. No I/O.

A format is an object with a `type`, as in xgrammar's structural tags: const_string, json_schema (in the styles json,
qwen_xml and python), regex, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags,
tags_with_separator, escaped_lark (a grammar of a JSON string's text); or grammar, which stands alone. Other types are
refused. Schemas and patterns are checked by the compiler.

Texts that are one token each (`<tool_call>`, `[TOOL_CALLS]`) become tokens of the grammar: models write them so, and no
text of a grammar matches a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.output.json_calls import NAME_PATTERN
from engine.output.schema_types import Property, get_definitions, list_properties, list_values, resolve, schema_types
from engine.output.xml_calls import encode_as_types
from engine.structured_output.constraint import Format, RequestedConstraint
from engine.structured_output.escaped_lark import UnsupportedGrammar, escape_grammar
from prompts import RequestError, bad_value
from prompts.schemas import Json

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,64}"
"""Default white space between two tokens of JSON: one or two spaces, or a line break with an indentation.

JSON sets no bound, but a model that has written many spaces may write nothing else until its end.
"""
FORMATS_MAX = 4096
"""Most formats in one constraint."""
DEPTH_MAX = 64
"""Most formats inside each other."""
_ANY = "/(?s:.*)/"
_PYTHON = {"json_allowed_escapes": 'nrbtf\\"'}
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


def write_lark(constraint: RequestedConstraint, tokens: Mapping[str, int]) -> str:
    """Return the grammar. `tokens`: text -> id of the token that stands for it. Raises RequestError."""
    if constraint.format.get("type") == "grammar":
        return _get_text(constraint.param, constraint.format, "grammar")
    return _LarkWriter(tokens).write(constraint)


class _LarkWriter:
    """Writes one grammar, as rules that refer to each other by name.

    A method `write_x` returns the body of the rule for a format of type x, after adding the rules of the formats inside
    it. For `{"type": "star", "content": {"type": "regex", "pattern": "[0-9]"}}` the rule r0: /[0-9]/ is added, and
    `r0*` is returned. `path`: place of the format in the request, for errors. `depth`: number of formats around it.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        texts = sorted(tokens, key=len, reverse=True)
        self._token_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._rules: list[str] = []
        self._format_count = 0

    def write(self, constraint: RequestedConstraint) -> str:
        start_rule = self._write_format(constraint.param, constraint.format, 0)
        return "\n".join(["%llguidance {}", f"start: {start_rule}", *self._rules]) + "\n"

    def _add_rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _add_terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _write_format(self, path: str, format: Json, depth: int) -> str:
        """Add the rule of a format. Return the rule's name."""
        self._format_count += 1
        if self._format_count > FORMATS_MAX or depth > DEPTH_MAX:
            raise RequestError(f"{path}: too many formats, or too deep in each other", param=path)
        format_type = format.get("type") if isinstance(format, dict) else None
        write = _WRITERS.get(format_type) if isinstance(format_type, str) else None
        if write is None:
            raise bad_value(f"{path}.type", format_type, f"one of {', '.join(_WRITERS)}")
        return self._add_rule(write(self, path, format, depth + 1))

    def _write_text(self, text: str) -> str:
        """Return an expression that matches a text.

        Parts of it that are one added token of the vocabulary become that token: "a<think>" is `"a" <[7]>`, if 7 is the
        id of <think>.
        """
        parts = []
        text_start = 0
        token_matches = () if self._token_pattern is None else self._token_pattern.finditer(text)
        for match in token_matches:
            parts += [_quote(text[text_start : match.start()]), f"<[{self._tokens[match[0]]}]>"]
            text_start = match.end()
        parts.append(_quote(text[text_start:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def write_const_string(self, path: str, format: Format, depth: int) -> str:
        return self._write_text(_get_text(path, format, "value"))

    def write_regex(self, path: str, format: Format, depth: int) -> str:
        return _slash_regex(_get_text(path, format, "pattern"))

    def write_any_text(self, path: str, format: Format, depth: int) -> str:
        return self._write_free_text(path, format)

    def _write_free_text(self, path: str, format: Format) -> str:
        """Return a terminal that matches any text in which none of the format's `excludes` occurs."""
        excluded_texts = format.get("excludes") or []
        if not isinstance(excluded_texts, list) or not all(isinstance(text, str) and text for text in excluded_texts):
            raise bad_value(f"{path}.excludes", excluded_texts, "texts")
        exclusions = [
            f"~/(?s:.*){_escape_literal(text)}(?s:.*)/" for text in excluded_texts if text not in self._tokens
        ]
        return self._add_terminal(" & ".join([_ANY, *exclusions])) if exclusions else _ANY

    def write_escaped_lark(self, path: str, format: Format, depth: int) -> str:
        try:
            return f"%lark {{\n{escape_grammar(_get_text(path, format, 'definition'))}\n}}"
        except UnsupportedGrammar as error:
            message = f"{path}: the grammar of the tool {format.get('tool')!r} cannot be matched: {error}"
            raise RequestError(message, param=path) from None

    def write_json_schema(self, path: str, format: Format, depth: int) -> str:
        """Return an expression of the values that match a schema, as the format's `style` writes them.

        The styles are "json", "qwen_xml" (Qwen3-Coder's parameters) and "python" (the arguments of a call). Clients
        cannot ask for "python".
        """
        schema = format.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise bad_value(f"{path}.json_schema", schema, "a JSON schema")
        whitespace = _get_whitespace(path, format)
        options: dict[str, Any] = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
        if format.get("lenient"):
            options["lenient"] = True
        style = format.get("style", "json")
        if style == "json":
            return _json_directive(schema, options)
        param = format.get("param", path)
        if style == "qwen_xml":
            return self._write_xml(param, schema, options)
        if style == "python":
            return self._write_python(param, schema, options | _PYTHON)
        raise bad_value(f"{path}.style", style, '"json" or "qwen_xml"')

    def write_sequence(self, path: str, format: Format, depth: int) -> str:
        return " ".join(self._write_elements(path, format, "elements", depth))

    def write_or(self, path: str, format: Format, depth: int) -> str:
        elements = _get_list(path, format, "elements")
        if len(elements) > 1 and all(
            _is_plain(element, self._tokens) for element in elements
        ):  # one terminal, however many texts there are
            return self._add_terminal(" | ".join(_quote(element["value"]) for element in elements))
        return " | ".join(self._write_elements(path, format, "elements", depth))

    def _write_elements(self, path: str, format: Format, name: str, depth: int) -> list[str]:
        items = _get_list(path, format, name)
        return [self._write_format(f"{path}.{name}[{i}]", item, depth) for i, item in enumerate(items)]

    def write_repeat(self, path: str, format: Format, depth: int) -> str:
        """Return an expression of a format that comes `min` to `max` times; -1 as `max` means no end."""
        min_count, max_count = format.get("min"), format.get("max")
        for name, value in (("min", min_count), ("max", max_count)):
            if type(value) is not int or not -1 <= value < 2**31:
                raise bad_value(f"{path}.{name}", value, "a count, -1 for no end")
        assert isinstance(min_count, int)
        assert isinstance(max_count, int)
        if min_count < 0 or (max_count != -1 and max_count < max(min_count, 1)):
            raise bad_value(f"{path}.max", max_count, "at least min, and 1")
        upper_bound = "" if max_count == -1 else max_count
        return f"{self.write_content(path, format, depth)}{{{min_count},{upper_bound}}}"

    def write_content(self, path: str, format: Format, depth: int) -> str:
        return self._write_format(f"{path}.content", format.get("content"), depth)

    def write_tag(self, path: str, format: Format, depth: int) -> str:
        return f"{self._write_text(_get_text(path, format, 'begin'))} {self._write_tag_tail(path, format, depth)}"

    def _write_tag_tail(self, path: str, format: Format, depth: int) -> str:
        """Return an expression of a tag's content and its end: `end` is a text, or a list of alternative texts."""
        ends = format.get("end")
        if not isinstance(ends, list) or not ends:
            ends = [ends]
        if not all(isinstance(end, str) for end in ends):
            raise bad_value(f"{path}.end", format.get("end"), "a text, or texts")
        content = format.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._write_text_until(f"{path}.content", content, ends)
        end_expression = " | ".join(map(self._write_text, ends))
        return f"{self._write_format(f'{path}.content', content, depth)} ({end_expression})"

    def _write_text_until(self, path: str, format: Format, ends: list[str]) -> str:
        """Return an expression of any text up to the first of `ends`, and that end.

        A rule that matches any text would go on past an end. Only a `lazy` rule stops at the first match, and it cannot
        have tokens in it. An end with a token needs no lazy rule, because no text matches a special token.
        """
        free = self._write_free_text(path, format)
        texts = [end for end in ends if self._write_text(end) == _quote(end)]
        alternatives = [f"{free} {self._write_text(end)}" for end in ends if end not in texts]
        if texts:
            alternatives.append(self._add_rule(f"{free} ({' | '.join(map(_quote, texts))})", "[lazy]"))
        return f"({' | '.join(alternatives)})"

    def write_triggered_tags(self, path: str, format: Format, depth: int) -> str:
        """Return an expression of free text with tags in it, such as tool calls between <tool_call> marks.

        The text is free until one of the `triggers` comes, such as "<tool_call>". Then one of the `tags` must follow
        that begin with this trigger.
        """
        triggers, tags = _get_list(path, format, "triggers"), _get_list(path, format, "tags")
        if not tags or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise RequestError(f"{path}: expected at least one tag, and triggers that are strings", param=path)
        free_text = self._write_free_text(path, format)
        tag_tails_by_trigger: dict[str, list[str]] = {}
        for number, tag in enumerate(tags):
            tag_path = f"{path}.tags[{number}]"
            begin = _get_text(tag_path, tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise bad_value(f"{tag_path}.begin", begin, f"a text that begins with one of {', '.join(triggers)}")
            tag_tail = f"{self._write_text(begin[len(trigger) :])} {self._write_tag_tail(tag_path, tag, depth)}"
            tag_tails_by_trigger.setdefault(trigger, []).append(self._add_rule(tag_tail))
        alternatives = [
            self._add_rule(f"{self._write_free_text_before(trigger, free_text)} ({' | '.join(tag_tails)})")
            for trigger, tag_tails in tag_tails_by_trigger.items()
        ]
        text_and_tag = self._add_rule(" | ".join(alternatives))
        must_come = format.get("at_least_one")
        if not format.get("stop_after_first"):
            return f"{text_and_tag}{'+' if must_come else '*'} {free_text}"
        return text_and_tag if must_come else f"{text_and_tag} | {free_text}"

    def _write_free_text_before(self, trigger: str, free_text: str) -> str:
        """Return an expression of free text up to the first `trigger`, and the trigger."""
        trigger_expression = self._write_text(trigger)
        is_plain_text = trigger_expression == _quote(trigger)
        expression = f"{free_text} {trigger_expression}"
        return self._add_rule(expression, "[lazy]") if is_plain_text else expression

    def write_tags_with_separator(self, path: str, format: Format, depth: int) -> str:
        tags = self._write_elements(path, format, "tags", depth)
        tag = self._add_rule(" | ".join(tags))
        separator = self._write_text(_get_text(path, format, "separator"))
        tag_list = tag if format.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return tag_list if format.get("at_least_one") else f"({tag_list})?"

    def _write_xml(self, param: str, schema: Json, options: Mapping[str, Any]) -> str:
        """Return an expression of the arguments of a call as Qwen3-Coder writes them, by their schema.

        Each argument is a line `<parameter=NAME>`, its value and a line `</parameter>`. Strings have no quotation
        marks, other values are JSON. `param`: field of the schema, for errors. `options`: llguidance's, for JSON.
        """
        properties = _list_writable_properties(
            param, schema, options, lambda name: _XML_NAME.fullmatch(name) is not None
        )
        if properties is None:  # any parameters
            name = self._add_terminal('/[^>\\n]+/ ">\\n"')
            value = self._add_rule(f"{_ANY} {_quote(_XML_END)}", "[lazy]")
            return f'("<parameter=" {name} {value})*'
        parts = []
        for argument in properties:
            begin = f"<parameter={argument.name}>\n"
            value = self._write_xml_value(argument.schema, schema, options)
            parameter = self._add_rule(f"{_quote(begin)} {value}")
            parts.append(parameter if argument.is_required else f"{parameter}?")
        return " ".join(parts) or '""'

    def _write_xml_value(self, schema: Json, root: Json, options: Mapping[str, Any]) -> str:
        """Return an expression of a parameter's value and its end marker.

        The value is one of those that the schema lists, plain text if it must be a string, or JSON. `root`: schema with
        the definitions that `schema` refers to.
        """
        values = list_values(schema, root)
        if values is not None:
            types = schema_types(schema, root)
            texts = (_write_listed_value(value, types) for value in values)
            return f"({' | '.join(map(self._write_text, texts))}) {_quote(_XML_END)}"
        if schema_types(schema, root) == ("string",) and resolve(schema, root) is not None:
            return self._add_rule(f"{self._write_plain_text(schema, root, 0)} {_quote(_XML_END)}", "[lazy]")
        return f"{self._add_rule(_json_directive(schema, options))} {_quote(_XML_END)}"

    def _write_plain_text(self, schema: Json, root: Json, depth: int) -> str:
        """Return a terminal of the texts that a schema of strings allows, without quotation marks.

        `root`: schema with the definitions that `schema` refers to.
        """
        schema = resolve(schema, root)
        if not isinstance(schema, dict) or depth > DEPTH_MAX:
            return _ANY
        values = list_values(schema, root)
        if values is not None:
            return self._add_terminal(" | ".join(_quote(value) for value in values if isinstance(value, str)))
        parts = []
        min_length, max_length = _get_length(schema.get("minLength")), _get_length(schema.get("maxLength"))
        if min_length is not None or max_length is not None:
            parts.append(f"/(?s:.{{{min_length or 0},{'' if max_length is None else max_length}}})/")
        if isinstance(schema.get("pattern"), str):
            parts.append(_make_search_regex(schema["pattern"]))
        if schema.get("format") in TEXT_FORMATS:
            parts.append(_slash_regex(TEXT_FORMATS[schema["format"]]))
        for name, operator in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
            branches = schema.get(name)
            if isinstance(branches, list) and branches:
                texts = [self._write_plain_text(branch, root, depth + 1) for branch in branches]
                parts.append(self._add_terminal(operator.join(texts)))
        if not parts:
            return _ANY
        return parts[0] if len(parts) == 1 else self._add_terminal(" & ".join(parts))

    def _write_python(self, param: str, schema: Json, options: Mapping[str, Any]) -> str:
        """Return an expression of the arguments of a Python call, such as `a=1, b="x"`. Nested values are JSON."""
        properties = _list_writable_properties(param, schema, options, lambda name: True)
        if properties is None:  # any arguments
            name = self._add_terminal("/[A-Za-z_][A-Za-z_0-9]*/")
            argument = self._add_rule(f'{name} "=" {self._write_python_literal(options)}')
            return f'({argument} (", " {argument})*)?'
        arguments = []
        for property in properties:
            key = property.name if NAME_PATTERN.fullmatch(property.name) else _quote(property.name)
            value = self._write_python_value(property.schema, schema, options, 0)
            arguments.append(self._add_rule(f"{_quote(key + '=')} {value}"))
        return self._join_arguments(arguments, [property.is_required for property in properties])

    def _join_arguments(self, arguments: list[str], is_required: list[bool]) -> str:
        """Return an expression of arguments in their order, of which those that are not required may be missing.

        A comma stands between two arguments, so only the first one that is written has none before it. The expression
        is a choice of that first argument: for `a` (optional), `b` (required) and `c` (optional) it is
        `a ", " b (", " c)? | b (", " c)?`. It ends with the first required argument, which nothing can skip.
        """
        alternatives = []
        tail = '""'  # rule of all arguments after the one at hand, each with its comma
        for argument, must_come in zip(reversed(arguments), reversed(is_required)):
            alternatives.append(f"{argument} {tail}")
            with_comma = f'", " {argument}' if must_come else f'(", " {argument})?'
            tail = self._add_rule(f"{with_comma} {tail}")
        alternatives.reverse()
        if True in is_required:
            return " | ".join(alternatives[: is_required.index(True) + 1])
        return " | ".join([*alternatives, '""'])

    def _write_python_value(self, schema: Json, root: Json, options: Mapping[str, Any], depth: int) -> str:
        """Return an expression of an argument's value: Python's constants, and JSON for all other values.

        `root`: schema with the definitions that `schema` refers to.
        """
        values = list_values(schema, root)
        if values is not None:
            texts = (json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for v in values)
            return f"({' | '.join(map(_quote, texts))})"
        resolved_schema = resolve(schema, root)
        if not isinstance(resolved_schema, dict):
            resolved_schema = schema if isinstance(schema, dict) else {}
        value_type = resolved_schema.get("type")
        if value_type == "boolean":
            return '("True" | "False")'
        if value_type == "null":
            return '"None"'
        keywords = set(resolved_schema) - _ANNOTATIONS
        if not keywords:
            return self._write_python_literal(options)
        branches = resolved_schema.get("anyOf") if keywords == {"anyOf"} else None
        if isinstance(value_type, list) and value_type:
            branches = [{**resolved_schema, "type": branch_type} for branch_type in value_type]
        if isinstance(branches, list) and branches and depth < DEPTH_MAX:
            return f"({' | '.join(self._write_python_value(branch, root, options, depth + 1) for branch in branches)})"
        return self._add_rule(_json_directive({**get_definitions(root), **resolved_schema}, options))

    def _write_python_literal(self, options: Mapping[str, Any]) -> str:
        """Return a rule of any Python literal that JSON can hold."""
        name = f"r{len(self._rules)}"
        plain = _json_directive({"type": ["string", "number"]}, options)
        self._rules.append(
            f'{name}: "True" | "False" | "None" | {name}_plain | "[" ({name} (", " {name})*)? "]" '
            f'| "{{" ({name}_pair (", " {name}_pair)*)? "}}"'
        )
        self._rules.append(f"{name}_plain: {plain}")
        self._rules.append(f'{name}_pair: {name}_key ": " {name}')
        self._rules.append(f"{name}_key: {_json_directive({'type': 'string'}, options)}")
        return name


_WRITERS: dict[str, Callable[[_LarkWriter, str, Format, int], str]] = {
    "const_string": _LarkWriter.write_const_string,
    "json_schema": _LarkWriter.write_json_schema,
    "escaped_lark": _LarkWriter.write_escaped_lark,
    "regex": _LarkWriter.write_regex,
    "any_text": _LarkWriter.write_any_text,
    "sequence": _LarkWriter.write_sequence,
    "or": _LarkWriter.write_or,
    "optional": lambda writer, path, format, depth: writer.write_content(path, format, depth) + "?",
    "star": lambda writer, path, format, depth: writer.write_content(path, format, depth) + "*",
    "plus": lambda writer, path, format, depth: writer.write_content(path, format, depth) + "+",
    "repeat": _LarkWriter.write_repeat,
    "tag": _LarkWriter.write_tag,
    "triggered_tags": _LarkWriter.write_triggered_tags,
    "tags_with_separator": _LarkWriter.write_tags_with_separator,
}


def _get_text(path: str, format: Json, name: str) -> str:
    value = format.get(name) if isinstance(format, dict) else None
    if not isinstance(value, str):
        raise bad_value(f"{path}.{name}", value, "a text")
    return value


def _get_list(path: str, format: Format, name: str) -> list[Json]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise bad_value(f"{path}.{name}", value, "an array that is not empty")
    return value


def _get_whitespace(path: str, format: Format) -> str:
    value = format.get("whitespace_pattern", WHITESPACE)
    if not isinstance(value, str):
        raise bad_value(f"{path}.whitespace_pattern", value, "a regular expression")
    return value


def _json_directive(schema: Json, options: Mapping[str, Any]) -> str:
    """Return an expression of a schema. Our options replace options in the client's schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return "%json " + json.dumps({**schema, "x-guidance": dict(options)})


def _slash_regex(pattern: str) -> str:
    """Return a regular expression between slashes."""
    return "/" + re.sub(r"\\.|/|\n", lambda match: _SLASH_ESCAPES.get(match[0], match[0]), pattern, flags=re.S) + "/"


_SLASH_ESCAPES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def _escape_literal(text: str) -> str:
    """Return a text as part of a regular expression between slashes."""
    return _slash_regex(re.escape(text))[1:-1]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_plain(format: Json, tokens: Mapping[str, int]) -> bool:
    """Return whether a format is a constant text without texts of tokens."""
    value = format.get("value") if isinstance(format, dict) and format.get("type") == "const_string" else None
    return isinstance(value, str) and not any(token in value for token in tokens)


def _list_writable_properties(
    param: str, schema: Json, options: Mapping[str, Any], can_write: Callable[[str], bool]
) -> list[Property] | None:
    """Return the properties that arguments may have; None: any.

    `can_write`: returns whether the markup can hold a property's name. Raises RequestError for the schema of a strict
    tool that only calls in JSON could follow.
    """
    properties = list_properties(schema)
    if properties is not None and all(can_write(property.name) for property in properties):
        return properties
    keywords = set(schema if isinstance(schema, dict) else ()) - _ANNOTATIONS - {"type", "additionalProperties"}
    if properties is None and not keywords:
        return [] if schema.get("additionalProperties") is False else None
    if options.get("lenient"):
        return None
    raise RequestError(
        f"{param}: calls of this model are not JSON and cannot follow this schema, expected an object with properties, "
        'without anyOf, oneOf, allOf and patternProperties; or "strict": false',
        param=param,
    )


def _write_listed_value(value: Json, types: tuple[str, ...]) -> str:
    """Return the text that the parser reads as a listed value: "5" among numbers needs quotation marks."""
    value_json = json.dumps(value, ensure_ascii=False)
    is_plain = isinstance(value, str) and (types == ("string",) or encode_as_types(value, types) == value_json)
    return value if is_plain else value_json


def _get_length(value: Json) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


_ESCAPE = re.compile(r"\\.", re.S)
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)


def _make_search_regex(pattern: str) -> str:
    """Return a regular expression, between slashes, for texts in which a pattern of JSON Schema is found.

    Anchors inside of an alternative stay, and the compiler refuses them.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PATTERN_PARTS.findall(pattern):
        if part == "(":
            depth += 1
        elif part == ")":
            depth -= 1
        if part == "|" and depth == 0:
            alternatives.append([])
        elif part.startswith("["):
            alternatives[-1].append(_ESCAPE.sub(_use_ascii_digits, part))
        else:
            alternatives[-1].append("[0-9]" if part == r"\d" else part)
    return _slash_regex("|".join(map(_anchor_alternative, alternatives)))


def _use_ascii_digits(escape: re.Match[str]) -> str:
    """Return an escape inside of a character class, with ASCII digits for `\\d`, as in JavaScript."""
    return "0-9" if escape[0] == r"\d" else escape[0]


def _anchor_alternative(parts: list[str]) -> str:
    """Return a regular expression that matches a whole text in which the alternative is found."""
    has_start, has_end = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = "".join(parts[has_start : len(parts) - has_end])
    return f"{'' if has_start else '(?s:.*)'}(?:{inner}){'' if has_end else '(?s:.*)'}"
