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

NAME_CHARS_MAX = 256
ParameterTypes = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Of each tool's parameters: the JSON types that its schema allows."""
_SPACE = " \t\r\n"
NAME = re.compile(r"[\w.\-/$:@]+")
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
"""Characters that JSON's strings hold as escapes only. Models write line breaks into them all the same."""


class ReadStatus(enum.Enum):
    MORE = 0
    DONE = 1
    INVALID = 2
    """The character at which `read` stopped cannot follow: it was not taken."""


class CallSink(Protocol):
    def begin(self, name: str) -> None:
        """This is a call of that function."""

    def arguments(self, piece: str) -> None:
        """The next of the arguments' JSON."""

    def say(self, text: str) -> None:
        """Text that belongs to no call."""


class CallReader:
    """`status` says where it stands; `begun` whether the call has been told; `told` whether what the last `read` took
    has been, so that it need not be text again."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self.status = ReadStatus.MORE
        self.begun = False

    @property
    def told(self) -> bool:
        return self.begun

    def read(self, text: str, at: int) -> int:
        """Take text from `at`; where it stopped. What is left while MORE may be the beginning of a mark: it comes again
        with more behind it."""
        while at < len(text) and self.status is ReadStatus.MORE:
            end = self._take(text, at)
            if end is None:
                break
            at = end
        return at

    def _take(self, text: str, at: int) -> int | None:
        """Take the next part of a text that is not empty; its end, or None where nothing can be taken yet."""
        raise NotImplementedError

    def _begin(self, name: str) -> None:
        self.begun = True
        self._sink.begin(name)

    def finish(self, rest: str) -> None:
        """Nothing follows; `rest` was left. Only where the call has been told."""


class JsonValueScanner:
    """Where one JSON value ends: knows strings and nesting, and takes on trust what is between them."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")
    _NESTED = re.compile(r'["{}\[\]]')
    _IN_STRING = re.compile(r'["\\\x00-\x1f]')
    _AFTER_SCALAR = re.compile(r"[,}\]\s]")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._scalar = False
        self.done = False

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Return the end of what of `text[at:]` belongs to the value, and that as JSON: with control characters in
        strings escaped. The value's first character is the first that is read."""
        valid: list[str] = []
        while at < len(text) and not self.done:
            at, piece = self._next(text, at)
            valid.append(piece)
        return at, "".join(valid)

    def _next(self, text: str, at: int) -> tuple[int, str]:
        if self._scalar:
            return self._read_scalar(text, at)
        if self._escaped:
            self._escaped = False
            return at + 1, _CONTROLS[text[at]][1:] if text[at] in _CONTROLS else text[at]  # its backslash is written
        found = (self._IN_STRING if self._in_string else self._NESTED).search(text, at)
        if self._depth == 0 and not self._in_string and (found is None or found.start() != at):
            self._scalar = True
            return self._read_scalar(text, at)
        if found is None:
            return len(text), text[at:]
        if found[0] in _CONTROLS:
            return found.end(), text[at : found.start()] + _CONTROLS[found[0]]
        self._take(found[0])
        self.done = self._depth <= 0 and not self._in_string
        return found.end(), text[at : found.end()]

    def _take(self, char: str) -> None:
        if self._in_string:
            self._escaped = char == "\\"
            self._in_string = self._escaped
        elif char == '"':
            self._in_string = True
        else:
            self._depth += 1 if char in "{[" else -1

    def _read_scalar(self, text: str, at: int) -> tuple[int, str]:
        found = self._AFTER_SCALAR.search(text, at)
        self.done = found is not None
        end = len(text) if found is None else found.start()
        return end, text[at:end]


def with_escapes(text: str) -> str:
    """A JSON value as its model wrote it, with control characters in strings escaped."""
    text = text.strip(_SPACE)
    end, valid = JsonValueScanner().read(text, 0)
    return valid + text[end:]


class JsonObjectCallReader(CallReader):
    """`{"name": "f", "arguments": {...}}`, in any order; `parameters` is another name for the arguments."""

    _ARGUMENTS = ("arguments", "parameters")
    _KEYS = ("name", *_ARGUMENTS, "id", "type")

    def __init__(self, sink: CallSink, *, needs_arguments: bool = False) -> None:
        super().__init__(sink)
        self._needs_arguments = needs_arguments
        self._seen: set[str] = set()
        self._expects = "{"
        self._value: JsonValueScanner | None = None
        self._raw: list[str] = []
        self._streams = False
        self._key: str | None = None
        self._name = ""
        self._arguments: str | None = None
        self._told = False

    @property
    def told(self) -> bool:
        return self._told

    def read(self, text: str, at: int) -> int:
        self._told = self._streams
        while at < len(text) and self.status is ReadStatus.MORE:
            if self._value is not None:
                end, piece = self._value.read(text, at)
                if not self._streams:
                    self._raw.append(piece)
                else:
                    self._sink.arguments(piece)
                    self._streams = not self._value.done
                    if self._value.done:
                        self._value = None
                        return end
                at = end
                if self._value.done:
                    self._value = None
                    self._end_value()
                continue
            char = text[at]
            if char not in _SPACE and not self._fits(char):
                self.status = ReadStatus.INVALID
                return at
            if self._value is None:  # its first character is its own
                at += 1
        return at

    def _fits(self, char: str) -> bool:
        """Take a character of the object itself; whether it may stand there."""
        if self._expects == "{" and char == "{":
            self._expects = "first key"
        elif self._expects in ("first key", "key") and char == '"':
            self._expects = ":"
            self._key = None
            self._value = JsonValueScanner()
        elif self._expects == ":" and char == ":":
            self._expects = "value"
        elif self._expects == "value" and char not in ",:}]":
            self._expects = ","
            self._value = JsonValueScanner()
            if self._key in self._ARGUMENTS and self._name and char == "{":
                self._begin(self._name)
                self._streams = True
        elif self._expects == "," and char == ",":
            self._expects = "key"
        elif self._expects in (",", "first key") and char == "}":
            return self._end()
        else:
            return False
        return True

    def _end_value(self) -> None:
        raw = "".join(self._raw)
        self._raw = []
        if self._key in self._ARGUMENTS:
            self._arguments = raw
        elif self._key == "name":
            self._name = _json_string(raw) or ""
            self.status = self.status if self._name else ReadStatus.INVALID
        elif self._key is None:
            self._key = _json_string(raw) or ""
            fits = self._key in self._KEYS and self._key not in self._seen
            self._seen |= {self._key} if self._key not in self._ARGUMENTS else set(self._ARGUMENTS)
            self.status = self.status if fits else ReadStatus.INVALID

    def _end(self) -> bool:
        if not self.begun:
            arguments = _whole_arguments(self._arguments, self._needs_arguments)
            if not self._name or arguments is None:
                return False
            self._begin(self._name)
            self._sink.arguments(arguments)
        self.status = ReadStatus.DONE
        return True

    def _begin(self, name: str) -> None:
        self._told = True
        super()._begin(name)


class NamedCallReader(CallReader):
    """`f{...}` or `f[ARGS]{...}`."""

    _ARGS, _ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink)
        self._name = ""
        self._parts: list[str] = []
        self._has_id = False
        self._value: JsonValueScanner | None = None

    def _take(self, text: str, at: int) -> int | None:
        if self._value is None:
            return self._head(text, at)
        end, piece = self._value.read(text, at)
        self._sink.arguments(piece)
        if self._value.done:
            self.status = ReadStatus.DONE
        return end

    def _head(self, text: str, at: int) -> int | None:
        """What stands before the arguments; None where the rest may be the beginning of a mark."""
        name = None if self._name else NAME.match(text, at)
        if name is not None:
            self._parts.append(name[0])
            if sum(map(len, self._parts)) > NAME_CHARS_MAX:
                self.status = ReadStatus.INVALID
            return name.end()
        if text[at] in _SPACE:
            self._name = self._name or "".join(self._parts)
            return at + 1
        if text[at] == "{":
            self._value = JsonValueScanner()
            self._name = self._name or "".join(self._parts)
            self._begin(self._name)
            return at
        rest = text[at : at + len(self._ID)]
        for mark in (self._ARGS, self._ID):
            if rest.startswith(mark):
                self._name = self._name or "".join(self._parts)
                self._has_id = mark == self._ID
                return at + len(mark)
            if mark.startswith(rest):
                return None
        if self._has_id and (found := NAME.match(text, at)):  # an id that the model gave: clients get ours
            return found.end()
        self.status = ReadStatus.INVALID
        return at


def _json_string(raw: str) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _whole_arguments(raw: str | None, needed: bool) -> str | None:
    """The arguments of a call that is complete, as an object's JSON; None where they are no object."""
    if raw is None:
        return None if needed else "{}"
    if raw == "null":
        return "{}"
    if raw.startswith('"'):  # JSON in a string
        raw = with_escapes(_json_string(raw) or "")
    try:
        return raw if isinstance(msgspec.json.decode(raw), dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
