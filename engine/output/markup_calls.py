"""Tool calls that are not JSON: XML, whose values take the type of the tool's schema, and Python. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from engine.output.detokenizer import DelimiterScanner
from engine.output.json_calls import (
    MAX_NAME_CHARS,
    NAME_PATTERN,
    CallReader,
    CallSink,
    ParameterTypes,
    ReadStatus,
    escape_control_chars,
)
from engine.output.schema_types import type_of

_SPACE = " \t\r\n"


class XmlCallReader(CallReader):
    """`<function=f>` with `<parameter=p>value</parameter>`s: values are JSON where the tool's schema asks for it.

    A value may hold markup itself. A mark ends it only where what follows says so: `</parameter>` before another mark,
    `</function>` before the end of the call's region, `<parameter=` with a name of the tool's that has no value yet.
    A function that is not among the tools is text.
    """

    OPEN_MARKER = "<function="
    _PARAMETER_MARKER, _VALUE_END_MARKER, _END_MARKER = "<parameter=", "</parameter>", "</function>"
    _NAME_END_PATTERN = re.compile(r"[<>\n]")
    _MARKER_SCANNER = DelimiterScanner((_PARAMETER_MARKER, _END_MARKER, "</tool_call>"))
    _VALUE_SCANNER = DelimiterScanner((_VALUE_END_MARKER, _PARAMETER_MARKER, _END_MARKER))
    _FOLLOWING_MARKERS = {
        _VALUE_END_MARKER: (_PARAMETER_MARKER, _END_MARKER, "</tool_call>"),
        _END_MARKER: ("</tool_call>", "<tool_call>", OPEN_MARKER),
    }
    """Marker -> texts, one of which must follow it behind white space (or the answer's end) for it to end a value."""

    def __init__(self, sink: CallSink, types: ParameterTypes) -> None:
        super().__init__(sink)
        self._types_by_function = types
        self._read_step = self._read_open_marker
        self._name_parts: list[str] = []
        self._types_by_parameter: Mapping[str, tuple[str, ...]] = {}
        self._parameter_parts: list[str] = []
        self._seen_parameters: set[str] = set()
        """Names of the parameters that have come."""
        self._value_types: tuple[str, ...] = ()
        self._value_parts: list[str] = []
        self._pending_newline = ""
        self._is_at_value_start = False
        self._marker = ""
        self._text_after_marker: list[str] = []
        """Text since `_marker`, which may belong to the value."""

    def _read_part(self, text: str, position: int) -> int | None:
        step = self._read_step
        end = step(text, position)
        return None if end == position and self._read_step == step else end

    def _read_open_marker(self, text: str, position: int) -> int:
        self._read_step = self._read_name
        return position + len(self.OPEN_MARKER)

    def _read_name(self, text: str, position: int) -> int:
        match = self._NAME_END_PATTERN.search(text, position)
        end = len(text) if match is None else match.start()
        self._name_parts.append(text[position:end])
        if (match is not None and match[0] != ">") or sum(map(len, self._name_parts)) > MAX_NAME_CHARS:
            self.status = ReadStatus.INVALID
            return end
        if match is None:
            return end
        name = "".join(self._name_parts).strip()
        if name not in self._types_by_function:
            self.status = ReadStatus.INVALID
            return end
        self._types_by_parameter = self._types_by_function[name]
        self._begin_call(name)
        self._read_step = self._read_between_parameters
        return end + 1

    def _read_between_parameters(self, text: str, position: int) -> int:
        match = self._MARKER_SCANNER.find_first(text, position)
        if match is None:
            end = self._MARKER_SCANNER.find_partial(text, position)
            self._sink.add_text(text[position:end])
            return end
        start, marker = match
        self._sink.add_text(text[position:start])
        if marker == self._PARAMETER_MARKER:
            self._read_step, self._parameter_parts = self._read_parameter_name, []
            return start + len(marker)
        self._finish_call()
        return start + (len(marker) if marker == self._END_MARKER else 0)

    def _read_parameter_name(self, text: str, position: int) -> int:
        end = text.find(">", position)
        self._parameter_parts.append(text[position:] if end < 0 else text[position:end])
        if end < 0:
            return len(text)
        self._open_value("".join(self._parameter_parts).strip())
        return end + 1

    def _open_value(self, key: str) -> None:
        self._sink.add_arguments((", " if self._seen_parameters else "{") + _encode_json_string(key) + ": ")
        self._seen_parameters.add(key)
        self._value_types = self._types_by_parameter.get(key, ("string",))
        self._read_step, self._value_parts, self._pending_newline = self._read_value, [], ""
        if self._value_types == ("string",):
            self._sink.add_arguments('"')
        self._is_at_value_start = True

    def _read_value(self, text: str, position: int) -> int:
        match = self._VALUE_SCANNER.find_first(text, position)
        end = self._VALUE_SCANNER.find_partial(text, position) if match is None else match[0]
        self._append_value(text[position:end])
        if match is None:
            return end
        self._marker, self._text_after_marker = match[1], []
        self._read_step = (
            self._read_next_parameter_name if self._marker == self._PARAMETER_MARKER else self._read_after_marker
        )
        return end + len(self._marker)

    def _read_next_parameter_name(self, text: str, position: int) -> int:
        """Read the name in a mark that opens the next parameter, or is part of this one's value."""
        match = self._NAME_END_PATTERN.search(text, position)
        end = len(text) if match is None else match.start()
        self._text_after_marker.append(text[position:end])
        if sum(map(len, self._text_after_marker)) > MAX_NAME_CHARS or (match is not None and match[0] != ">"):
            self._resume_value()
        elif match is not None:
            key = "".join(self._text_after_marker).strip()
            if key in self._seen_parameters or (self._types_by_parameter and key not in self._types_by_parameter):
                self._resume_value()
            else:
                self._end_value()
                self._open_value(key)
                end += 1
        return end

    def _read_after_marker(self, text: str, position: int) -> int:
        """Find out by what follows a mark whether it ends the value."""
        end = position
        while end < len(text) and text[end] in _SPACE:
            end += 1
        self._text_after_marker.append(text[position:end])
        if end == len(text):
            return end
        for marker in self._FOLLOWING_MARKERS[self._marker]:
            if text.startswith(marker, end):
                self._end_value_at_marker()
                return end
            if len(text) - end < len(marker) and marker.startswith(text[end:]):
                return end
        self._resume_value()
        return end

    def _end_value_at_marker(self) -> None:
        self._end_value()
        self._read_step = self._read_between_parameters
        if self._marker == self._END_MARKER:
            self._finish_call()

    def _resume_value(self) -> None:
        self._read_step = self._read_value
        self._append_value(self._marker + "".join(self._text_after_marker))

    def _append_value(self, piece: str) -> None:
        """One line break after the opening and one before the end are the markup's."""
        if not piece:
            return
        if self._is_at_value_start:
            self._is_at_value_start = False
            piece = piece.removeprefix("\n")
            if not piece:
                return
        piece = self._pending_newline + piece
        self._pending_newline = "\n" if piece.endswith("\n") else ""
        piece = piece.removesuffix("\n")
        if self._value_types == ("string",):
            self._sink.add_arguments(_encode_json_string(piece)[1:-1])
        else:
            self._value_parts.append(piece)

    def _end_value(self) -> None:
        if self._value_types == ("string",):
            self._sink.add_arguments('"')
        else:
            self._sink.add_arguments(encode_as_types("".join(self._value_parts), self._value_types))

    def _finish_call(self) -> None:
        self._sink.add_arguments("}" if self._seen_parameters else "{}")
        self.status = ReadStatus.COMPLETE

    def finish(self, remaining_text: str) -> None:
        """Handle the end of the text within a call: complete a value that a marker ended, leave others open."""
        if self._read_step == self._read_after_marker:
            self._end_value_at_marker()
            return
        if self._read_step == self._read_next_parameter_name:
            self._resume_value()
        if self._read_step == self._read_value:
            self._append_value(remaining_text)
            if self._value_types != ("string",):
                self._sink.add_arguments("".join(self._value_parts) + self._pending_newline)
            elif self._pending_newline:
                self._sink.add_arguments("\\n")
        elif self._read_step == self._read_parameter_name:
            self._sink.add_text(self._PARAMETER_MARKER + "".join(self._parameter_parts) + remaining_text)
        # else `remaining_text` is the beginning of a mark


class PythonCallReader(CallReader):
    """`f(a=1, b="x")`: told when it is whole, as only then Python's own parser can say that its values are literals.

    Names need not be Python's: `from` and `user-id` are common ones. A name with other characters stands in quotes.
    """

    _PUNCTUATION_PATTERN_BY_QUOTE = {
        '"': re.compile(r'["\\]'),
        "'": re.compile(r"['\\]"),
        "": re.compile(r"""["'()\[\]{},=]"""),
    }
    """Quotation mark ("" outside of strings) -> characters that matter there."""
    _ESCAPE_TABLE = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"})

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink)
        self._name_parts: list[str] = []
        self._is_in_name = True
        self._depth = 0
        self._open_quote = ""
        self._is_escaped = False
        self._argument_name: str | None = None
        """Name of the argument that is being read, once its `=` has come."""
        self._source_parts: list[str] = []
        """Text of that argument behind its `=`; before an `=`, all of its text."""
        self._argument_sources: list[tuple[str | None, str]] = []

    def _read_part(self, text: str, position: int) -> int:
        return self._read_head(text, position) if self._is_in_name else self._read_body(text, position)

    def _read_head(self, text: str, position: int) -> int:
        match = NAME_PATTERN.match(text, position)
        if match is not None:
            self._name_parts.append(match[0])
            if sum(map(len, self._name_parts)) > MAX_NAME_CHARS:
                self.status = ReadStatus.INVALID
            return match.end()
        if text[position] != "(":
            self.status = ReadStatus.INVALID
            return position
        self._is_in_name = False
        self._depth = 1
        return position + 1

    def _read_body(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            self._source_parts.append(text[position])
            return position + 1
        match = self._PUNCTUATION_PATTERN_BY_QUOTE[self._open_quote].search(text, position)
        end = len(text) if match is None else match.start()
        piece = text[position:end]  # a line break in a string is none to Python's parser, but is to a model
        self._source_parts.append(piece.translate(self._ESCAPE_TABLE) if self._open_quote else piece)
        if match is None:
            return end
        return self._read_punctuation(match[0], end)

    def _read_punctuation(self, char: str, position: int) -> int:
        if self._open_quote:
            self._is_escaped = char == "\\"
            self._open_quote = self._open_quote if self._is_escaped else ""
        elif char in "\"'":
            self._open_quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth == 0:
                return self._finish_call(char, position)
        elif self._depth == 1 and char == ",":
            self._end_argument()
            return position + 1
        elif self._depth == 1 and char == "=" and self._argument_name is None:
            self._argument_name, self._source_parts = "".join(self._source_parts), []
            return position + 1
        self._source_parts.append(char)
        return position + 1

    def _end_argument(self) -> None:
        self._argument_sources.append((self._argument_name, "".join(self._source_parts)))
        self._argument_name, self._source_parts = None, []

    def _finish_call(self, char: str, position: int) -> int:
        self._end_argument()
        if (
            self._argument_sources[-1][0] is None and not self._argument_sources[-1][1].strip()
        ):  # f(), or a comma at the end
            self._argument_sources.pop()
        arguments = _encode_arguments(self._argument_sources) if char == ")" else None
        if arguments is None:
            self.status = ReadStatus.INVALID
            return position
        self._begin_call("".join(self._name_parts))
        self._sink.add_arguments(arguments)
        self.status = ReadStatus.COMPLETE
        return position + 1


def _encode_json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Values of a schema's type ------------------------------------------------------------------------------------------


def encode_as_types(value: str, types: tuple[str, ...]) -> str:
    """A parameter's text as JSON of one of its types; as a string where it is none of them."""
    text = value.strip()
    lowered_text = text.lower()
    if (lowered_text == "null" or text == "None") and "null" in types:
        return "null"
    allows_number = not {"integer", "number"}.isdisjoint(types)
    if "boolean" in types and lowered_text in (("true", "false") if allows_number else ("true", "false", "1", "0")):
        return "true" if lowered_text in ("true", "1") else "false"
    type_and_json = _decode_value(text, types)
    if type_and_json is None:
        return _encode_json_string(value)
    type_name, text = type_and_json
    is_allowed = type_name in types or (allows_number and type_name in ("integer", "number"))
    return text if is_allowed or "string" not in types else _encode_json_string(value)


def _decode_value(text: str, types: tuple[str, ...]) -> tuple[str, str] | None:
    """(type, JSON) of a value that is JSON, or a literal of Python that may be one; None where it is neither."""
    value_json = escape_control_chars(text)
    try:
        return type_of(msgspec.json.decode(value_json)), value_json
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    if text[:1] in ("{", "["):
        value = _parse_literal(text)
        if value is not None and type_of(value.value) in types:
            return type_of(value.value), value.json
    return None


# A call in Python ---------------------------------------------------------------------------------------------------


class _JsonConstants(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value_by_name = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(value_by_name[node.id]), node) if node.id in value_by_name else node


class _Literal(NamedTuple):
    value: Any
    json: str


def _parse_literal(source: str) -> _Literal | None:
    """The value of a literal that JSON can say; None where the source is no such literal."""
    if not source.strip():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know
            tree = ast.parse(f"({source}\n)", mode="eval").body
        value = ast.literal_eval(_JsonConstants().visit(tree))
        value_json = json.dumps(value, ensure_ascii=False, allow_nan=False)
        value_json.encode()  # half a character cannot be sent
        return _Literal(value, value_json)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _encode_arguments(argument_sources: list[tuple[str | None, str]]) -> str | None:
    """The JSON of arguments by name, each a source of a name and of a value; None where one of them is neither."""
    json_by_name: dict[str, str] = {}
    for key_source, value_source in argument_sources:
        key = None if key_source is None else _parse_key(key_source.strip())
        value = _parse_literal(value_source)
        if key is None or value is None or key in json_by_name:
            return None
        json_by_name[key] = value.json
    return "{" + ", ".join(f"{_encode_json_string(key)}: {value}" for key, value in json_by_name.items()) + "}"


def _parse_key(source: str) -> str | None:
    if NAME_PATTERN.fullmatch(source):
        return source
    value = _parse_literal(source) if source[:1] in ("'", '"') else None
    return value.value if value is not None and isinstance(value.value, str) else None
