"""One tool call out of the text that follows its opening: what every reader does, and those of calls in JSON.

A reader takes the text as it comes and tells a `CallSink` the function's name as soon as it is sure that this is a
call, then the arguments piece by piece, line breaks in their strings as escapes. Before that moment it may find that
the text is none (`INVALID`); what it took is then text again. After it, what was told stays told: arguments that are no
JSON reach the client as they were written.
Every reader looks at a character once. Pure.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Protocol

import msgspec

MAX_NAME_CHARS = 256
ParameterTypes = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Tool name -> parameter -> JSON types that its schema allows."""
_SPACE = " \t\r\n"
NAME_PATTERN = re.compile(r"[\w.\-/$:@]+")
_ESCAPE_BY_CONTROL_CHAR = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
"""Characters that JSON's strings hold as escapes only. Models write line breaks into them all the same."""


class ReadStatus(enum.Enum):
    INCOMPLETE = 0
    COMPLETE = 1
    INVALID = 2
    """The character at which `read` stopped cannot follow: it was not taken."""


class CallSink(Protocol):
    def begin_call(self, name: str) -> None:
        """This is a call of that function."""

    def add_arguments(self, piece: str) -> None:
        """The next of the arguments' JSON."""

    def add_text(self, text: str) -> None:
        """Text that belongs to no call."""


class CallReader:
    """`status`: how far the call was read; `has_begun`: the sink has the call's name; `is_emitted`: the sink has what
    the last `read` took, so that it need not be text again."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self.status = ReadStatus.INCOMPLETE
        self.has_begun = False

    @property
    def is_emitted(self) -> bool:
        return self.has_begun

    def read(self, text: str, position: int) -> int:
        """Take text from `position`; where it stopped. What is left while MORE may be the beginning of a mark: it comes
        again with more behind it."""
        while position < len(text) and self.status is ReadStatus.INCOMPLETE:
            end = self._read_part(text, position)
            if end is None:
                break
            position = end
        return position

    def _read_part(self, text: str, position: int) -> int | None:
        """Take the next part of a text that is not empty; its end, or None where nothing can be taken yet."""
        raise NotImplementedError

    def _begin_call(self, name: str) -> None:
        self.has_begun = True
        self._sink.begin_call(name)

    def finish(self, remaining_text: str) -> None:
        """Nothing follows; `remaining_text` was not read. Only where the call has begun."""


class JsonValueScanner:
    """Finds the end of one JSON value: follows strings and nesting, and checks nothing else."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "_is_scalar", "is_complete")
    _NESTING_PATTERN = re.compile(r'["{}\[\]]')
    _STRING_PATTERN = re.compile(r'["\\\x00-\x1f]')
    _SCALAR_END_PATTERN = re.compile(r"[,}\]\s]")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = self._is_scalar = False
        self.is_complete = False

    def read(self, text: str, position: int) -> tuple[int, str]:
        """Return the end of what of `text[at:]` belongs to the value, and that as JSON: with control characters in
        strings escaped. The value's first character is the first that is read."""
        json_parts: list[str] = []
        while position < len(text) and not self.is_complete:
            position, piece = self._read_next(text, position)
            json_parts.append(piece)
        return position, "".join(json_parts)

    def _read_next(self, text: str, position: int) -> tuple[int, str]:
        if self._is_scalar:
            return self._read_scalar(text, position)
        if self._is_escaped:
            self._is_escaped = False
            return position + 1, _ESCAPE_BY_CONTROL_CHAR[text[position]][1:] if text[
                position
            ] in _ESCAPE_BY_CONTROL_CHAR else text[position]  # its backslash is written
        match = (self._STRING_PATTERN if self._is_in_string else self._NESTING_PATTERN).search(text, position)
        if self._depth == 0 and not self._is_in_string and (match is None or match.start() != position):
            self._is_scalar = True
            return self._read_scalar(text, position)
        if match is None:
            return len(text), text[position:]
        if match[0] in _ESCAPE_BY_CONTROL_CHAR:
            return match.end(), text[position : match.start()] + _ESCAPE_BY_CONTROL_CHAR[match[0]]
        self._track_nesting(match[0])
        self.is_complete = self._depth <= 0 and not self._is_in_string
        return match.end(), text[position : match.end()]

    def _track_nesting(self, char: str) -> None:
        if self._is_in_string:
            self._is_escaped = char == "\\"
            self._is_in_string = self._is_escaped
        elif char == '"':
            self._is_in_string = True
        else:
            self._depth += 1 if char in "{[" else -1

    def _read_scalar(self, text: str, position: int) -> tuple[int, str]:
        match = self._SCALAR_END_PATTERN.search(text, position)
        self.is_complete = match is not None
        end = len(text) if match is None else match.start()
        return end, text[position:end]


def escape_control_chars(text: str) -> str:
    """A JSON value as its model wrote it, with control characters in strings escaped."""
    text = text.strip(_SPACE)
    end, valid = JsonValueScanner().read(text, 0)
    return valid + text[end:]


class JsonObjectCallReader(CallReader):
    """`{"name": "f", "arguments": {...}}`, in any order; `parameters` is another name for the arguments."""

    _ARGUMENT_KEYS = ("arguments", "parameters")
    _KNOWN_KEYS = ("name", *_ARGUMENT_KEYS, "id", "type")

    def __init__(self, sink: CallSink, *, needs_arguments: bool = False) -> None:
        super().__init__(sink)
        self._needs_arguments = needs_arguments
        self._seen_keys: set[str] = set()
        self._expected_token = "{"
        self._value_scanner: JsonValueScanner | None = None
        self._value_parts: list[str] = []
        self._is_streaming_arguments = False
        self._key: str | None = None
        self._name = ""
        self._arguments_json: str | None = None
        self._is_emitted = False

    @property
    def is_emitted(self) -> bool:
        return self._is_emitted

    def read(self, text: str, position: int) -> int:
        self._is_emitted = self._is_streaming_arguments
        while position < len(text) and self.status is ReadStatus.INCOMPLETE:
            if self._value_scanner is not None:
                end, piece = self._value_scanner.read(text, position)
                if not self._is_streaming_arguments:
                    self._value_parts.append(piece)
                else:
                    self._sink.add_arguments(piece)
                    self._is_streaming_arguments = not self._value_scanner.is_complete
                    if self._value_scanner.is_complete:
                        self._value_scanner = None
                        return end
                position = end
                if self._value_scanner.is_complete:
                    self._value_scanner = None
                    self._end_value()
                continue
            char = text[position]
            if char not in _SPACE and not self._accept_char(char):
                self.status = ReadStatus.INVALID
                return position
            if self._value_scanner is None:  # its first character is its own
                position += 1
        return position

    def _accept_char(self, char: str) -> bool:
        """Take a character of the object itself; whether it may stand there."""
        if self._expected_token == "{" and char == "{":
            self._expected_token = "first key"
        elif self._expected_token in ("first key", "key") and char == '"':
            self._expected_token = ":"
            self._key = None
            self._value_scanner = JsonValueScanner()
        elif self._expected_token == ":" and char == ":":
            self._expected_token = "value"
        elif self._expected_token == "value" and char not in ",:}]":
            self._expected_token = ","
            self._value_scanner = JsonValueScanner()
            if self._key in self._ARGUMENT_KEYS and self._name and char == "{":
                self._begin_call(self._name)
                self._is_streaming_arguments = True
        elif self._expected_token == "," and char == ",":
            self._expected_token = "key"
        elif self._expected_token in (",", "first key") and char == "}":
            return self._finish_call()
        else:
            return False
        return True

    def _end_value(self) -> None:
        value_json = "".join(self._value_parts)
        self._value_parts = []
        if self._key in self._ARGUMENT_KEYS:
            self._arguments_json = value_json
        elif self._key == "name":
            self._name = _decode_string(value_json) or ""
            self.status = self.status if self._name else ReadStatus.INVALID
        elif self._key is None:
            self._key = _decode_string(value_json) or ""
            is_valid_key = self._key in self._KNOWN_KEYS and self._key not in self._seen_keys
            self._seen_keys |= {self._key} if self._key not in self._ARGUMENT_KEYS else set(self._ARGUMENT_KEYS)
            self.status = self.status if is_valid_key else ReadStatus.INVALID

    def _finish_call(self) -> bool:
        if not self.has_begun:
            arguments = _complete_arguments(self._arguments_json, self._needs_arguments)
            if not self._name or arguments is None:
                return False
            self._begin_call(self._name)
            self._sink.add_arguments(arguments)
        self.status = ReadStatus.COMPLETE
        return True

    def _begin_call(self, name: str) -> None:
        self._is_emitted = True
        super()._begin_call(name)


class NamedCallReader(CallReader):
    """`f{...}` or `f[ARGS]{...}`."""

    _ARGUMENTS_MARKER, _ID_MARKER = "[ARGS]", "[CALL_ID]"

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink)
        self._name = ""
        self._name_parts: list[str] = []
        self._has_id = False
        self._arguments_scanner: JsonValueScanner | None = None

    def _read_part(self, text: str, position: int) -> int | None:
        if self._arguments_scanner is None:
            return self._read_head(text, position)
        end, piece = self._arguments_scanner.read(text, position)
        self._sink.add_arguments(piece)
        if self._arguments_scanner.is_complete:
            self.status = ReadStatus.COMPLETE
        return end

    def _read_head(self, text: str, position: int) -> int | None:
        """Read the text before the arguments; None where the remaining text may be the beginning of a marker."""
        name = None if self._name else NAME_PATTERN.match(text, position)
        if name is not None:
            self._name_parts.append(name[0])
            if sum(map(len, self._name_parts)) > MAX_NAME_CHARS:
                self.status = ReadStatus.INVALID
            return name.end()
        if text[position] in _SPACE:
            self._name = self._name or "".join(self._name_parts)
            return position + 1
        if text[position] == "{":
            self._arguments_scanner = JsonValueScanner()
            self._name = self._name or "".join(self._name_parts)
            self._begin_call(self._name)
            return position
        lookahead = text[position : position + len(self._ID_MARKER)]
        for marker in (self._ARGUMENTS_MARKER, self._ID_MARKER):
            if lookahead.startswith(marker):
                self._name = self._name or "".join(self._name_parts)
                self._has_id = marker == self._ID_MARKER
                return position + len(marker)
            if marker.startswith(lookahead):
                return None
        if self._has_id and (
            match := NAME_PATTERN.match(text, position)
        ):  # an id that the model gave: clients get ours
            return match.end()
        self.status = ReadStatus.INVALID
        return position


def _decode_string(value_json: str) -> str | None:
    try:
        return msgspec.json.decode(value_json, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _complete_arguments(value_json: str | None, is_required: bool) -> str | None:
    """The arguments of a call that is complete, as an object's JSON; None where they are no object."""
    if value_json is None:
        return None if is_required else "{}"
    if value_json == "null":
        return "{}"
    if value_json.startswith('"'):  # JSON in a string
        value_json = escape_control_chars(_decode_string(value_json) or "")
    try:
        return value_json if isinstance(msgspec.json.decode(value_json), dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
