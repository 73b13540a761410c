"""Reader of one tool call in XML, whose values take the type of the tool's schema. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.output.delta_builder import DeltaBuilder
from engine.output.growing_text import SPACE, DelimiterScanner, GrowingText, Steps
from engine.output.json_calls import MAX_NAME_CHARS, escape_control_chars
from engine.output.python_calls import encode_json, parse_literal
from engine.output.schema_types import ParameterTypes, get_json_type
from prompts.chat_completions import decode_or_none

FUNCTION_MARKER = "<function="
_PARAMETER_MARKER, _VALUE_END_MARKER, _END_MARKER = "<parameter=", "</parameter>", "</function>"
_REGION_END_MARKER = "</tool_call>"
_NAME_END_PATTERN, _PARAMETER_NAME_END_PATTERN = re.compile(r"[<>\n]"), re.compile(">")
_NON_SPACE_PATTERN = re.compile(f"[^{SPACE}]")
_MARKER_SCANNER = DelimiterScanner((_PARAMETER_MARKER, _END_MARKER, _REGION_END_MARKER))
_VALUE_SCANNER = DelimiterScanner((_VALUE_END_MARKER, _PARAMETER_MARKER, _END_MARKER))
_FOLLOWING_MARKERS = {
    _VALUE_END_MARKER: (_PARAMETER_MARKER, _END_MARKER, _REGION_END_MARKER),
    _END_MARKER: (_REGION_END_MARKER, "<tool_call>", FUNCTION_MARKER),
}
"""Marker -> texts. The marker ends a value only if one of them follows, after white space, or if the text ends."""


def read_xml_call(source: GrowingText, delta: DeltaBuilder, types: ParameterTypes) -> Steps[bool]:
    """Read a tool call such as `<function=f><parameter=p>1</parameter></function>`, and add it to `delta` as JSON.

    Returns False if the text is no complete call of a tool in `types`, the JSON types of each tool's parameters.
    """
    source.take_chars(len(FUNCTION_MARKER))
    name_text, is_complete = yield from _read_name(source)
    name = name_text.strip()
    if not is_complete or name not in types:
        return False
    source.stop_holding()  # the text is a call, so no copy of it is needed
    source.take_chars(1)
    delta.begin_call(name)
    is_complete = yield from _XmlArguments(source, delta, types[name]).read()
    return is_complete


def _read_name(source: GrowingText) -> Steps[tuple[str, bool]]:
    """Take the name before a ">". Return it, and whether the ">" comes next."""
    name = ""
    while (yield from source.peek()):
        match = _NAME_END_PATTERN.search(source.text, source.position)
        name += source.take_to(len(source.text) if match is None else match.start())
        if match is not None or len(name) > MAX_NAME_CHARS:
            return name, match is not None and match[0] == ">" and len(name) <= MAX_NAME_CHARS
    return name, False


class _XmlArguments:
    """Reads the parameters of one call, such as `<parameter=city>Rome</parameter>`, and adds them to the delta as JSON.

    The answer's text grows while the model writes it. So the methods are generators, which yield when they need more.
    """

    def __init__(self, source: GrowingText, delta: DeltaBuilder, types: Mapping[str, tuple[str, ...]]) -> None:
        self._source = source
        self._delta = delta
        self._types_by_parameter = types
        self._seen_parameters: set[str] = set()

    def read(self) -> Steps[bool]:
        """Take the parameters and the end of the call. Returns False if the text ends before."""
        source = self._source
        has_ended = False
        while not has_ended:
            marker = yield from _MARKER_SCANNER.take_until(source, self._delta.add_text)
            if not marker:
                source.take_all()  # the beginning of a marker
                return False
            if marker != _REGION_END_MARKER:  # which belongs to the text around the call
                source.take_chars(len(marker))
            if marker == _PARAMETER_MARKER:
                marker = yield from self._read_parameters()
                if not marker:
                    return False
            has_ended = marker != _VALUE_END_MARKER
        self._delta.add_arguments("}" if self._seen_parameters else "{}")
        return True

    def _read_parameters(self) -> Steps[str]:
        """Read the name and the value of a parameter, after its `<parameter=`. Add both to the JSON of the arguments.

        If `</parameter>` is missing, the next parameter is read, too: `city>Rome<parameter=days>3</parameter>` is two
        parameters. Returns the marker that ended the last value, `</parameter>` or `</function>`; an empty string if
        the text has ended.
        """
        name = yield from self._read_parameter_name()
        if name is None:
            return ""
        source, value = self._source, self._open_value(name)
        while marker := (yield from _VALUE_SCANNER.take_until(source, value.append)):
            source.take_chars(len(marker))
            if marker == _PARAMETER_MARKER:
                value = yield from self._read_next_parameter(value)
            elif (yield from self._end_value_if_complete(marker, value)):
                return marker
        value.append(source.take_all())
        value.leave_open()
        return ""

    def _read_parameter_name(self) -> Steps[str | None]:
        """Take a name and its ">". Return it; None if the text ends within."""
        source, parts = self._source, list[str]()
        if (yield from source.take_until(_PARAMETER_NAME_END_PATTERN, parts.append)):
            source.take_chars(1)
            return "".join(parts).strip()
        self._delta.add_text(_PARAMETER_MARKER + "".join(parts))
        return None

    def _open_value(self, parameter: str) -> _ParameterValue:
        """Add the beginning of a parameter to the JSON of the arguments. Return the value that is to be read."""
        self._delta.add_arguments((", " if self._seen_parameters else "{") + encode_json(parameter) + ": ")
        self._seen_parameters.add(parameter)
        return _ParameterValue(self._delta, self._types_by_parameter.get(parameter, ("string",)))

    def _read_next_parameter(self, value: _ParameterValue) -> Steps[_ParameterValue]:
        """Decide whether a `<parameter=` within a value begins the next parameter. Return the value to read now.

        A new value begins if the marker is followed by the name of a parameter that has no value yet. Otherwise the
        marker is text of the current `value`, which is returned.
        """
        name_text, is_complete = yield from _read_name(self._source)
        name = name_text.strip()
        is_unknown = bool(self._types_by_parameter) and name not in self._types_by_parameter
        is_text = not is_complete or is_unknown or name in self._seen_parameters
        if is_text:
            value.append(_PARAMETER_MARKER + name_text)
            return value
        self._source.take_chars(1)
        value.end()
        return self._open_value(name)

    def _end_value_if_complete(self, marker: str, value: _ParameterValue) -> Steps[bool]:
        """End the value if `marker`, which was just read, really is its end. Return whether the value has ended.

        A value may be code that contains such markup. So `</parameter>` ends it only before another marker, such as
        `</function>`, or at the end of the text, perhaps after white space. Else the marker is text of the value.
        """
        source = self._source
        spaces: list[str] = []
        yield from source.take_until(_NON_SPACE_PATTERN, spaces.append)
        following_markers = _FOLLOWING_MARKERS[marker]
        following_marker = yield from source.peek_any(following_markers)
        is_cut_off = not following_marker and source.may_become_any(following_markers)
        if is_cut_off:
            source.take_all()  # nothing, or the beginning of a marker
        if following_marker or is_cut_off:
            value.end()
            return True
        value.append(marker + "".join(spaces))
        return False


class _ParameterValue:
    """Converts the text of one XML parameter of a tool call to JSON, while the model writes it.

    A string is passed on to `delta` in pieces. Another type is passed on at its end, when its text can be parsed.
    """

    def __init__(self, delta: DeltaBuilder, types: tuple[str, ...]) -> None:
        """`types`: JSON types that the tool's schema allows."""
        self._delta = delta
        self._types = types
        self._is_string = types == ("string",)
        self._parts: list[str] = []
        self._is_at_start = True
        self._pending_newline = ""
        if self._is_string:
            delta.add_arguments('"')

    def append(self, piece: str) -> None:
        """Append text. One line break at its start and one at its end are markup, and left out."""
        if self._is_at_start and piece:
            self._is_at_start = False
            piece = piece.removeprefix("\n")
        if not piece:
            return
        piece = self._pending_newline + piece
        self._pending_newline = "\n" if piece.endswith("\n") else ""
        piece = piece.removesuffix("\n")
        if self._is_string:
            self._delta.add_arguments(encode_json(piece)[1:-1])
        else:
            self._parts.append(piece)

    def end(self) -> None:
        """Pass on the end of a string, or the whole value of another type."""
        self._delta.add_arguments('"' if self._is_string else encode_as_types("".join(self._parts), self._types))

    def leave_open(self) -> None:
        """Pass on a value that the end of the answer cut off, as the model wrote it."""
        if self._is_string:
            self._delta.add_arguments(encode_json(self._pending_newline)[1:-1])
        else:
            self._delta.add_arguments("".join(self._parts) + self._pending_newline)


def encode_as_types(value: str, types: tuple[str, ...]) -> str:
    """Convert the text of a tool call's parameter to JSON. `types`: JSON types that the tool's schema allows.

    With integers and strings allowed, the text 5 becomes 5, and five becomes "five". Python's constants, lists and
    dictionaries of an allowed type are converted, too. JSON of a type that is not allowed becomes a string only if
    strings are allowed, any other text in any case.
    """
    text = value.strip()
    lowered_text = text.lower()
    if "null" in types and (lowered_text == "null" or text == "None"):
        return "null"
    allows_number = "integer" in types or "number" in types
    boolean_texts = ("true", "false") if allows_number else ("true", "false", "1", "0")  # 1 and 0 may be numbers
    if "boolean" in types and lowered_text in boolean_texts:
        return "true" if lowered_text in ("true", "1") else "false"
    type_and_json = _decode_value(text, types)
    if type_and_json is None:
        return encode_json(value)
    type_name, value_json = type_and_json
    is_allowed = type_name in types or (allows_number and type_name in ("integer", "number"))
    must_be_string = not is_allowed and "string" in types
    return encode_json(value) if must_be_string else value_json


def _decode_value(text: str, types: tuple[str, ...]) -> tuple[str, str] | None:
    """Return (type, JSON) of a value that is JSON, or a Python literal of one of `types`; None if it is neither."""
    value_json = escape_control_chars(text)
    value = decode_or_none(value_json)
    if value is not None or value_json == "null":
        return get_json_type(value), value_json
    if text[:1] in ("{", "["):
        literal = parse_literal(text)
        if literal is not None and get_json_type(literal.value) in types:
            return get_json_type(literal.value), literal.json
    return None
