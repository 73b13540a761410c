"""Readers of one tool call in JSON, and of JSON values in growing text. No I/O.

A reader is a generator: it yields when it needs text that the model has not written yet. As soon as the text is
certainly a call, it adds the call's name to the delta, and then the arguments as they arrive. If the text is no call,
it returns False, and the source still holds a copy of the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.output.delta_builder import DeltaBuilder
from engine.output.growing_text import SPACE, GrowingText, Steps
from engine.output.schema_types import ParameterTypes
from prompts.chat_completions import decode_or_none

MAX_NAME_CHARS = 256
NAME_PATTERN = re.compile(r"[\w.\-/$:@]+")
CallReader = Callable[[GrowingText, DeltaBuilder, ParameterTypes], Steps[bool]]
"""Reads one call from held text and adds the call to the delta. Returns whether a complete call was read."""

_ESCAPE_BY_CONTROL_CHAR = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
"""Escape of each control character. JSON forbids raw control characters in strings, but models write line breaks."""
_NESTING_PATTERN = re.compile(r'["{}\[\]]')
_STRING_PATTERN = re.compile(r'["\\\x00-\x1f]')
_SCALAR_END_PATTERN = re.compile(r"[,}\]\s]")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENT_KEYS, "id", "type")
ARGUMENTS_MARKER, ID_MARKER = "[ARGS]", "[CALL_ID]"


# Values ---------------------------------------------------------------------------------------------------------------


def read_json_value(source: GrowingText, emit: Callable[[str], None]) -> Steps[bool]:
    """Read one JSON value from text that is still being generated, and emit it in pieces as it arrives.

    Only quotes and brackets are looked at, to find where the value ends; its syntax is not checked. Control characters
    in strings are escaped. Yields whenever more text is needed. Returns False if the text ends within the value.
    """
    first_char = yield from source.peek()
    is_scalar = _NESTING_PATTERN.match(first_char) is None  # a number, true, false or null
    if is_scalar:
        end_char = yield from source.take_until(_SCALAR_END_PATTERN, emit)
        return end_char != ""
    open_brackets = 0
    while char := (yield from source.take_until(_NESTING_PATTERN, emit)):
        emit(source.take_chars(1))
        if char == '"':
            is_complete = yield from _read_string_end(source, emit)
            if not is_complete:
                return False
        else:
            open_brackets += 1 if char in "{[" else -1
        if open_brackets <= 0:
            return True
    return False


def _read_string_end(source: GrowingText, emit: Callable[[str], None]) -> Steps[bool]:
    """Read a JSON string after its opening quotation mark, and emit it in pieces as it arrives.

    Raw control characters, which JSON forbids, are escaped. Yields whenever more text is needed. Returns False if the
    text ends within the string.
    """
    while char := (yield from source.take_until(_STRING_PATTERN, emit)):
        source.take_chars(1)
        emit(_ESCAPE_BY_CONTROL_CHAR.get(char, char))
        if char == '"':
            return True
        if char == "\\":
            escaped_char = yield from source.peek()
            source.take_chars(len(escaped_char))
            escape = _ESCAPE_BY_CONTROL_CHAR.get(escaped_char)
            emit(escaped_char if escape is None else escape[1:])  # the escape's backslash was already emitted
    return False


def _collect_json_value(source: GrowingText) -> Steps[str | None]:
    """Read one JSON value and return its text; None if the source ends within the value."""
    parts: list[str] = []
    is_complete = yield from read_json_value(source, parts.append)
    return "".join(parts) if is_complete else None


def escape_control_chars(text: str) -> str:
    """Return the text of a JSON value from a model, with control characters in its strings escaped."""
    source = GrowingText(text.strip(SPACE), is_complete=True)
    parts: list[str] = []
    for _ in read_json_value(source, parts.append):
        raise AssertionError("the text is complete")
    return "".join(parts) + source.take_all()


# Calls ----------------------------------------------------------------------------------------------------------------


def read_object_call(
    source: GrowingText, delta: DeltaBuilder, types: ParameterTypes, *, needs_arguments: bool = False
) -> Steps[bool]:
    """Read a call `{"name": "f", "arguments": {...}}`, with its keys in any order. "parameters" means "arguments".

    `needs_arguments`: an object without arguments is no call.
    """
    return _ObjectCall(source, delta).read(needs_arguments=needs_arguments)


class _ObjectCall:
    """Reads a call that is one JSON object, such as `{"name": "f", "arguments": {"a": 1}}`.

    The arguments are passed on as they arrive, once the name is known. The methods are generators, which yield when
    they need more of the text that the model writes.
    """

    def __init__(self, source: GrowingText, delta: DeltaBuilder) -> None:
        self._source = source
        self._delta = delta
        self._name = ""
        self._arguments_json: str | None = None
        """Arguments that came before the name, or that are not an object."""
        self._seen_keys: set[str] = set()

    def read(self, *, needs_arguments: bool) -> Steps[bool]:
        """Read the object from "{" to "}", and add the call to the delta. Return False if the object is no call."""
        source = self._source
        separator = source.take_chars(1)
        while separator in ("{", ","):
            next_char = yield from source.peek_after_spaces()
            if next_char != '"' or not (yield from self._read_member()):
                return False
            separator = yield from source.peek_after_spaces()
            if separator == ",":
                source.take_chars(1)
        if separator != "}":
            return False
        were_arguments_streamed = self._delta.is_in_call
        if not were_arguments_streamed:
            arguments = _complete_arguments(self._arguments_json, is_required=needs_arguments)
            if not self._name or arguments is None:
                return False
            self._delta.begin_call(self._name)
            self._delta.add_arguments(arguments)
        source.take_chars(1)
        return True

    def _read_member(self) -> Steps[bool]:
        """Read one `"key": value` of the object. Return False if the object cannot be a tool call.

        It cannot if a key is unknown or comes twice, or if a value is missing or cut off. Arguments after the name are
        added to the delta as they arrive.
        """
        source = self._source
        key_json = yield from _collect_json_value(source)
        key = None if key_json is None else decode_or_none(key_json)
        if key not in _CALL_KEYS or key in self._seen_keys:
            return False
        is_arguments = key in _ARGUMENT_KEYS
        self._seen_keys.update(_ARGUMENT_KEYS if is_arguments else (key,))
        next_char = yield from source.peek_after_spaces()
        if next_char != ":":
            return False
        source.take_chars(1)
        first_char = yield from source.peek_after_spaces()
        is_value_missing = first_char in ("", *",:}]")
        if is_value_missing:
            return False
        if is_arguments and self._name and first_char == "{":
            source.stop_holding()
            self._delta.begin_call(self._name)
            is_complete = yield from read_json_value(source, self._delta.add_arguments)
            source.start_holding()  # the text after the arguments may be no part of the call
            return is_complete
        value_json = yield from _collect_json_value(source)
        if value_json is None:
            return False
        if is_arguments:
            self._arguments_json = value_json
        elif key == "name":
            name = decode_or_none(value_json)
            self._name = name if isinstance(name, str) else ""
            return bool(self._name)
        return True


def read_name(source: GrowingText) -> Steps[str | None]:
    """Read the name of a function, which may be empty. Return None if the name is too long."""
    name = ""
    while (yield from source.peek()):
        match = NAME_PATTERN.match(source.text, source.position)
        if match is None:
            break
        name += source.take_to(match.end())
        if len(name) > MAX_NAME_CHARS:
            return None
    return name


def read_named_call(source: GrowingText, delta: DeltaBuilder, types: ParameterTypes) -> Steps[bool]:
    """Read a call `f{...}`, `f[ARGS]{...}` or `f[CALL_ID]id[ARGS]{...}`, and add it to the delta.

    Markers may come in any order. The model's call id is skipped, because the engine gives each call an id of its own.
    Returns whether the call is complete.
    """
    name = yield from read_name(source)
    if name is None or not (yield from _skip_markers(source)):
        return False
    source.stop_holding()
    delta.begin_call(name)
    return (yield from read_json_value(source, delta.add_arguments))


def _skip_markers(source: GrowingText) -> Steps[bool]:
    """Skip what stands between a call's name and its arguments, such as `[CALL_ID]id[ARGS]` before `{"a": 1}`.

    Returns whether the "{" of the arguments comes next. Yields whenever more text is needed.
    """
    expects_id = False
    while True:
        char = yield from source.peek()
        if not char or char == "{":
            return char == "{"
        id_match = NAME_PATTERN.match(source.text, source.position)
        if id_match is not None and expects_id:
            source.take_to(id_match.end())
        elif char in SPACE:
            source.take_spaces()
        else:
            marker = yield from source.peek_any((ARGUMENTS_MARKER, ID_MARKER))
            if not marker:
                return False
            expects_id = marker == ID_MARKER
            source.take_chars(len(marker))


def _complete_arguments(value_json: str | None, *, is_required: bool) -> str | None:
    """Return a tool call's arguments as the JSON text of an object; None if they are not an object.

    `value_json`: JSON that the model wrote as the arguments, which may be an object within a string; None: it wrote no
    arguments. `is_required`: a call without arguments is no call.
    """
    if value_json is None:
        return None if is_required else "{}"
    if value_json == "null":
        return "{}"
    if value_json.startswith('"'):  # an object within a string
        value_json = escape_control_chars(decode_or_none(value_json) or "")
    return value_json if isinstance(decode_or_none(value_json), dict) else None
