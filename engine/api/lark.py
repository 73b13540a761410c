"""A format as a grammar in Lark, as llguidance reads it.

A format is an object with a `type`, xgrammar's structural tags: const_string, json_schema (in the styles json, qwen_xml
and python), regex, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags, tags_with_separator,
escaped_lark (a grammar of a JSON string's text); and alone, grammar. Others are refused. Whether a schema or a pattern
is one is for the compiler to say. Pure.

Tokens that stand for a text of their own (`<tool_call>`, `[TOOL_CALLS]`) are in the grammar as tokens: models write
them so, and no text in a grammar matches one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from engine.api.constraint import Format, RequestedConstraint, requested_constraint, scripted_constraint
from engine.api.escaped_lark import UnsupportedGrammar, escape_grammar
from engine.api.params import ModelLimits
from engine.api.readers.json_calls import NAME
from engine.api.readers.markup_calls import encode_as_types
from engine.api.schemas.inspection import Property, listed_values, properties_of, resolve, schema_types
from engine.grammars import added_tokens
from engine.types import Constraint
from prompts import ChatRequest, CompletionRequest, RequestError, Tokenizer, bad_value
from prompts.responses import ShownTool
from prompts.schemas import Json

WHITESPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,64}"
"""What may stand between two tokens of JSON, where nobody says otherwise: one space or two, or a line's end and an
indentation. JSON has no bound, but a model that once writes many spaces may write nothing else until the end."""
FORMATS_MAX = 4096
"""Formats inside each other and side by side that one may have."""
DEPTH_MAX = 64
_ANY = "/(?s:.*)/"
_PYTHON = {"json_allowed_escapes": 'nrbtf\\"'}
"""Of a JSON string: then Python reads it alike."""
_XML_NAME = re.compile(r"(?! )[^<>\n]+(?<! )")
_XML_END = "\n</parameter>\n"
_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
                    "deprecated", "readOnly", "writeOnly"))  # fmt: skip
"""Keywords of a JSON schema that no value can break."""
_DATE, _TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""`format` of a text that stands without quotation marks -> its shape. Others are followed in JSON only."""


def build_constraint(
    body: ChatRequest | CompletionRequest,
    tokenizer: Tokenizer,
    limits: ModelLimits,
    thought: tuple[int | None, int | None] = (None, None),
    grammars: Mapping[str, ShownTool] = MappingProxyType({}),
) -> Constraint | None:
    """What the answer to a body must match; None: it is free. Raises RequestError.

    `thought`: as in Constraint, the token that opens one and the one that ends it.
    `grammars`: as in `requested_constraint`.
    """
    asked = requested_constraint(body, limits.calls, grammars)
    if limits.script and isinstance(body, ChatRequest) and (asked is None or asked.param == "tools"):
        asked = scripted_constraint(body, limits.script, limits.calls, grammars)
    if asked is None:
        return None
    if limits.unconstrained is not None:
        raise RequestError(f"{asked.param}: {limits.unconstrained}", param=asked.param)
    lark = write_lark(asked, added_tokens(tokenizer))
    return Constraint(lark, asked.param, msgspec.json.encode(asked), *thought)


def write_lark(asked: RequestedConstraint, tokens: Mapping[str, int]) -> str:
    """The grammar. `tokens`: texts that are one token each, and that token. Raises RequestError."""
    if asked.format.get("type") == "grammar":
        return _text(asked.param, asked.format, "grammar")
    return _LarkWriter(tokens).write(asked)


class _LarkWriter:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        texts = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._rules: list[str] = []
        self._formats = 0

    def write(self, asked: RequestedConstraint) -> str:
        start = self._format(asked.param, asked.format, 0)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _format(self, where: str, format: Json, depth: int) -> str:
        """An expression of rules' names."""
        self._formats += 1
        if self._formats > FORMATS_MAX or depth > DEPTH_MAX:
            raise RequestError(f"{where}: too many formats, or too deep in each other", param=where)
        kind = format.get("type") if isinstance(format, dict) else None
        write = _WRITERS.get(kind) if isinstance(kind, str) else None
        if write is None:
            raise bad_value(f"{where}.type", kind, f"one of {', '.join(_WRITERS)}")
        return self._rule(write(self, where, format, depth + 1))

    def _const(self, text: str) -> str:
        """This text: what stands for a token is one."""
        parts = []
        at = 0
        for found in self._cut.finditer(text) if self._cut is not None else ():
            parts += [_quoted(text[at : found.start()]), f"<[{self._tokens[found[0]]}]>"]
            at = found.end()
        parts.append(_quoted(text[at:]))
        return " ".join(part for part in parts if part != '""') or '""'

    def const_string(self, where: str, format: Format, depth: int) -> str:
        return self._const(_text(where, format, "value"))

    def regex(self, where: str, format: Format, depth: int) -> str:
        return _regex(_text(where, format, "pattern"))

    def any_text(self, where: str, format: Format, depth: int) -> str:
        return self._free(where, format)

    def _free(self, where: str, format: Format) -> str:
        """Any text without what it excludes."""
        excluded = format.get("excludes") or []
        if not isinstance(excluded, list) or not all(isinstance(text, str) and text for text in excluded):
            raise bad_value(f"{where}.excludes", excluded, "texts")
        without = [f"~/(?s:.*){_literal(text)}(?s:.*)/" for text in excluded if text not in self._tokens]
        return self._terminal(" & ".join([_ANY, *without])) if without else _ANY

    def escaped_lark(self, where: str, format: Format, depth: int) -> str:
        try:
            return f"%lark {{\n{escape_grammar(_text(where, format, 'definition'))}\n}}"
        except UnsupportedGrammar as error:
            message = f"{where}: the grammar of the tool {format.get('tool')!r} cannot be matched: {error}"
            raise RequestError(message, param=where) from None

    def json_schema(self, where: str, format: Format, depth: int) -> str:
        schema = format.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise bad_value(f"{where}.json_schema", schema, "a JSON schema")
        options: dict[str, Any] = {"whitespace_pattern": _whitespace(where, format)}
        if not options["whitespace_pattern"]:
            options = {"whitespace_flexible": False}
        if format.get("lenient"):
            options["lenient"] = True
        style = format.get("style", "json")
        if style == "json":
            return _json(schema, options)
        param = format.get("param", where)
        if style == "qwen_xml":
            return self._xml(param, schema, options)
        if style == "python":
            return self._python(param, schema, options | _PYTHON)
        raise bad_value(f"{where}.style", style, '"json" or "qwen_xml"')

    def sequence(self, where: str, format: Format, depth: int) -> str:
        return " ".join(self._inner(where, format, "elements", depth))

    def or_(self, where: str, format: Format, depth: int) -> str:
        elements = _list(where, format, "elements")
        if len(elements) > 1 and all(_is_plain(one, self._tokens) for one in elements):  # one terminal, however many
            return self._terminal(" | ".join(_quoted(one["value"]) for one in elements))
        return " | ".join(self._inner(where, format, "elements", depth))

    def _inner(self, where: str, format: Format, name: str, depth: int) -> list[str]:
        items = _list(where, format, name)
        return [self._format(f"{where}.{name}[{i}]", item, depth) for i, item in enumerate(items)]

    def optional(self, where: str, format: Format, depth: int) -> str:
        return self._content(where, format, depth) + "?"

    def star(self, where: str, format: Format, depth: int) -> str:
        return self._content(where, format, depth) + "*"

    def plus(self, where: str, format: Format, depth: int) -> str:
        return self._content(where, format, depth) + "+"

    def repeat(self, where: str, format: Format, depth: int) -> str:
        least, most = format.get("min"), format.get("max")
        for name, value in (("min", least), ("max", most)):
            if type(value) is not int or not -1 <= value < 2**31:
                raise bad_value(f"{where}.{name}", value, "a count, -1 for no end")
        assert isinstance(least, int)
        assert isinstance(most, int)
        if least < 0 or (most != -1 and most < max(least, 1)):
            raise bad_value(f"{where}.max", most, "at least min, and 1")
        return f"{self._content(where, format, depth)}{{{least},{'' if most == -1 else most}}}"

    def _content(self, where: str, format: Format, depth: int) -> str:
        return self._format(f"{where}.content", format.get("content"), depth)

    def tag(self, where: str, format: Format, depth: int) -> str:
        return f"{self._const(_text(where, format, 'begin'))} {self._rest(where, format, depth)}"

    def _rest(self, where: str, format: Format, depth: int) -> str:
        """A tag's content and end."""
        ends = format.get("end")
        ends = ends if isinstance(ends, list) and ends else [ends]
        if not all(isinstance(end, str) for end in ends):
            raise bad_value(f"{where}.end", format.get("end"), "a text, or texts")
        content = format.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._until(f"{where}.content", content, ends)
        expression = " | ".join(map(self._const, ends))
        return f"{self._format(f'{where}.content', content, depth)} ({expression})"

    def _until(self, where: str, format: Format, ends: list[str]) -> str:
        """Any text up to the first of these."""
        free = self._free(where, format)
        texts = [end for end in ends if self._const(end) == _quoted(end)]
        found = [f"{free} {self._const(end)}" for end in ends if end not in texts]
        if texts:
            found.append(self._rule(f"{free} ({' | '.join(map(_quoted, texts))})", "[lazy]"))
        return f"({' | '.join(found)})"

    def triggered_tags(self, where: str, format: Format, depth: int) -> str:
        triggers, tags = _list(where, format, "triggers"), _list(where, format, "tags")
        if not tags or not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise RequestError(f"{where}: expected tags, and triggers that are texts", param=where)
        free = self._free(where, format)
        by_trigger: dict[str, list[str]] = {}
        for number, tag in enumerate(tags):
            at = f"{where}.tags[{number}]"
            begin = _text(at, tag, "begin")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise bad_value(f"{at}.begin", begin, f"a text that begins with one of {', '.join(triggers)}")
            rest = f"{self._const(begin[len(trigger) :])} {self._rest(at, tag, depth)}"
            by_trigger.setdefault(trigger, []).append(self._rule(rest))
        found = []
        for trigger, rests in by_trigger.items():
            token = self._const(trigger) != _quoted(trigger)
            head = f"{free} {self._const(trigger)}" if token else self._rule(f"{free} {_quoted(trigger)}", "[lazy]")
            found.append(self._rule(f"{head} ({' | '.join(rests)})"))
        calls = self._rule(" | ".join(found))
        if format.get("stop_after_first"):
            return calls if format.get("at_least_one") else f"{calls} | {free}"
        return f"{calls}{'+' if format.get('at_least_one') else '*'} {free}"

    def tags_with_separator(self, where: str, format: Format, depth: int) -> str:
        tags = self._inner(where, format, "tags", depth)
        if not tags:
            raise bad_value(f"{where}.tags", [], "at least one tag")
        one = self._rule(" | ".join(tags))
        separator = self._const(_text(where, format, "separator"))
        many = one if format.get("stop_after_first") else f"{one} ({separator} {one})*"
        return many if format.get("at_least_one") else f"({many})?"

    def _xml(self, param: str, schema: Json, options: Mapping[str, Any]) -> str:
        """Qwen3-Coder's parameters: strings as they are, everything else as JSON."""
        found = _properties(param, schema, options, lambda name: _XML_NAME.fullmatch(name) is not None)
        if found is None:
            name = self._terminal('/[^>\\n]+/ ">\\n"')
            free = self._rule(f"{_ANY} {_quoted(_XML_END)}", "[lazy]")
            return f'("<parameter=" {name} {free})*'
        parts = []
        for one in found:
            value = self._xml_value(one.schema, schema, options)
            parameter = self._rule(f"{_quoted(f'<parameter={one.name}>' + chr(10))} {value}")
            parts.append(parameter if one.is_required else f"{parameter}?")
        return " ".join(parts) or '""'

    def _xml_value(self, schema: Json, root: Json, options: Mapping[str, Any]) -> str:
        """A value and the mark at its end. Its reader takes it as text where `schema_types` has only strings."""
        values = listed_values(schema, root)
        if values is not None:
            types = schema_types(schema, root)
            texts = (_xml_text(value, types) for value in values)
            return f"({' | '.join(map(self._const, texts))}) {_quoted(_XML_END)}"
        if schema_types(schema, root) == ("string",) and resolve(schema, root) is not None:
            return self._rule(f"{self._plain_text(schema, root, 0)} {_quoted(_XML_END)}", "[lazy]")
        return f"{self._rule(_json(schema, options))} {_quoted(_XML_END)}"

    def _plain_text(self, schema: Json, root: Json, depth: int) -> str:
        """A terminal of the texts that a schema of strings allows, without quotation marks."""
        schema = resolve(schema, root)
        if not isinstance(schema, dict) or depth > DEPTH_MAX:
            return _ANY
        values = listed_values(schema, root)
        if values is not None:
            return self._terminal(" | ".join(_quoted(value) for value in values if isinstance(value, str)))
        least, most = (_length(schema.get(name)) for name in ("minLength", "maxLength"))
        parts = [] if least is most is None else [f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"]
        if isinstance(schema.get("pattern"), str):
            parts.append(_search(schema["pattern"]))
        if schema.get("format") in TEXT_FORMATS:
            parts.append(_regex(TEXT_FORMATS[schema["format"]]))
        for name, operator in (("anyOf", " | "), ("oneOf", " | "), ("allOf", " & ")):
            branches = schema.get(name)
            if isinstance(branches, list) and branches:
                texts = [self._plain_text(branch, root, depth + 1) for branch in branches]
                parts.append(self._terminal(operator.join(texts)))
        if len(parts) > 1:
            return self._terminal(" & ".join(parts))
        return parts[0] if parts else _ANY

    def _python(self, param: str, schema: Json, options: Mapping[str, Any]) -> str:
        """Arguments by name, as literals of Python. Those inside of others are JSON, which their reader takes too."""
        found = _properties(param, schema, options, lambda name: True)
        if found is None:
            name = self._terminal("/[A-Za-z_][A-Za-z_0-9]*/")
            free = self._rule(f'{name} "=" {self._python_any(options)}')
            return f'({free} (", " {free})*)?'
        parts = []
        for one in found:
            key = one.name if NAME.fullmatch(one.name) else _quoted(one.name)
            parts.append(self._rule(f"{_quoted(key + '=')} {self._python_value(one.schema, schema, options, 0)}"))
        rests = ['""']
        """Of the arguments from each on, behind another one; the last first."""
        for part, one in zip(reversed(parts), reversed(found)):
            rests.append(self._rule(f'", " {part} {rests[-1]}' if one.is_required else f'(", " {part})? {rests[-1]}'))
        behind = rests[-2::-1]
        firsts = [f"{part} {rest}" for part, rest in zip(parts, behind)]
        needed = [i for i, one in enumerate(found) if one.is_required]
        return " | ".join(firsts[: needed[0] + 1] if needed else [*firsts, '""'])

    def _python_value(self, schema: Json, root: Json, options: Mapping[str, Any], depth: int) -> str:
        values = listed_values(schema, root)
        if values is not None:
            texts = (json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for v in values)
            return f"({' | '.join(map(_quoted, texts))})"
        found = resolve(schema, root)
        found = found if isinstance(found, dict) else schema if isinstance(schema, dict) else {}
        kind = found.get("type")
        if kind == "boolean":
            return '("True" | "False")'
        if kind == "null":
            return '"None"'
        said = set(found) - _NOTES
        if not said:
            return self._python_any(options)
        branches = found.get("anyOf") if said == {"anyOf"} else None
        if isinstance(kind, list) and kind:
            branches = [{**found, "type": one} for one in kind]
        if isinstance(branches, list) and branches and depth < DEPTH_MAX:
            return f"({' | '.join(self._python_value(one, root, options, depth + 1) for one in branches)})"
        return self._rule(_json({**_definitions(root), **found}, options))

    def _python_any(self, options: Mapping[str, Any]) -> str:
        """Any literal."""
        name = f"r{len(self._rules)}"
        plain = _json({"type": ["string", "number"]}, options)
        self._rules.append(
            f'{name}: "True" | "False" | "None" | {name}_plain | "[" ({name} (", " {name})*)? "]" '
            f'| "{{" ({name}_pair (", " {name}_pair)*)? "}}"'
        )
        self._rules.append(f"{name}_plain: {plain}")
        self._rules.append(f'{name}_pair: {name}_key ": " {name}')
        self._rules.append(f"{name}_key: {_json({'type': 'string'}, options)}")
        return name


_WRITERS: dict[str, Callable[[_LarkWriter, str, Format, int], str]] = {
    "const_string": _LarkWriter.const_string,
    "json_schema": _LarkWriter.json_schema,
    "escaped_lark": _LarkWriter.escaped_lark,
    "regex": _LarkWriter.regex,
    "any_text": _LarkWriter.any_text,
    "sequence": _LarkWriter.sequence,
    "or": _LarkWriter.or_,
    "optional": _LarkWriter.optional,
    "star": _LarkWriter.star,
    "plus": _LarkWriter.plus,
    "repeat": _LarkWriter.repeat,
    "tag": _LarkWriter.tag,
    "triggered_tags": _LarkWriter.triggered_tags,
    "tags_with_separator": _LarkWriter.tags_with_separator,
}


def _text(where: str, format: Json, name: str) -> str:
    value = format.get(name) if isinstance(format, dict) else None
    if not isinstance(value, str):
        raise bad_value(f"{where}.{name}", value, "a text")
    return value


def _list(where: str, format: Format, name: str) -> list[Json]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise bad_value(f"{where}.{name}", value, "an array that is not empty")
    return value


def _whitespace(where: str, format: Format) -> str:
    value = format.get("whitespace_pattern", WHITESPACE)
    if not isinstance(value, str):
        raise bad_value(f"{where}.whitespace_pattern", value, "a regular expression")
    return value


def _json(schema: Json, options: Mapping[str, Any]) -> str:
    """Of the options that a schema may hold itself none is the client's."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return "%json " + json.dumps({**schema, "x-guidance": dict(options)})


def _regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: _IN_SLASHES.get(found[0], found[0]), pattern, flags=re.S) + "/"


_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def _literal(text: str) -> str:
    """A text inside of a regular expression between slashes."""
    return _regex(re.escape(text))[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_plain(format: Json, tokens: Mapping[str, int]) -> bool:
    """Whether it is a text in which nothing is a token of its own."""
    value = format.get("value") if isinstance(format, dict) and format.get("type") == "const_string" else None
    return isinstance(value, str) and not any(token in value for token in tokens)


def _properties(
    param: str, schema: Json, options: Mapping[str, Any], can_write: Callable[[str], bool]
) -> list[Property] | None:
    """The properties of arguments that are written one by one; None: any. `can_write`: whether the markup has a way to
    write a property's name. Raises RequestError for a schema that only JSON could follow and that must be followed."""
    found = properties_of(schema)
    if found is not None and all(can_write(one.name) for one in found):
        return found
    said = set(schema if isinstance(schema, dict) else ()) - _NOTES - {"type", "additionalProperties"}
    if found is None and not said:
        return [] if schema.get("additionalProperties") is False else None
    if options.get("lenient"):
        return None
    raise RequestError(
        f"{param}: calls of this model are not JSON and cannot follow this schema, expected an object with properties, "
        'without anyOf, oneOf, allOf and patternProperties; or "strict": false',
        param=param,
    )


def _definitions(root: Json) -> dict[str, Json]:
    names = ("$defs", "definitions")
    return {name: root[name] for name in names if name in root} if isinstance(root, dict) else {}


def _xml_text(value: Json, types: tuple[str, ...]) -> str:
    """How a listed value is written so that its reader finds that value: "5" among numbers needs quotation marks."""
    encoded = json.dumps(value, ensure_ascii=False)
    is_plain = isinstance(value, str) and (types == ("string",) or encode_as_types(value, types) == encoded)
    return value if is_plain else encoded


def _length(value: Json) -> int | None:
    return value if type(value) is int and 0 <= value < 2**31 else None


_DIGITS = {r"\d": "[0-9]"}
_ESCAPE = re.compile(r"\\.", re.S)
_PATTERN_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.S)


def _search(pattern: str) -> str:
    """What a text must be for a pattern of JSON Schema to be found in it, as a regular expression between slashes.

    Anchors elsewhere than at the beginning and the end of an alternative stay: the compiler refuses them.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PATTERN_PARTS.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(_ESCAPE.sub(_class_escape, part) if part[0] == "[" else _DIGITS.get(part, part))
    return _regex("|".join(map(_anchored, alternatives)))


def _class_escape(found: re.Match[str]) -> str:
    """An escape inside of a class of characters: digits are those of ASCII, as in JavaScript."""
    return "0-9" if found[0] == r"\d" else found[0]


def _anchored(parts: list[str]) -> str:
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = "".join(parts[begins : len(parts) - ends])
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
