"""One tool call out of the text that follows its opening, in each of the ways in which models write one.

A reader takes the text as it comes and tells a `Sink` the function's name as soon as it is sure that this is a call,
then the arguments piece by piece. Before that moment it may find that the text is none (`BAD`); what it took is then
text again. After it, what was told stays told: arguments that are no JSON reach the client as they were written.
Every reader looks at a character once. Pure.
"""

from __future__ import annotations

import ast
import enum
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from engine.api.detokenizer import Marks

NAME_CHARS_MAX = 256
Types = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Of each tool's parameters: the JSON types that its schema allows."""
_SPACE = " \t\r\n"
NAME = re.compile(r"[\w.\-/]+")


class Status(enum.Enum):
    MORE = 0
    DONE = 1
    BAD = 2
    """The character at which `read` stopped cannot follow: it was not taken."""


class Sink(Protocol):
    def begin(self, name: str) -> None:
        """This is a call of that function."""

    def arguments(self, piece: str) -> None:
        """The next of the arguments' JSON."""

    def say(self, text: str) -> None:
        """Text that belongs to no call."""


class Reader(Protocol):
    """`status` says where it stands; `begun` whether the call has been told; `told` whether what the last `read` took
    has been, so that it need not be text again."""

    status: Status
    begun: bool

    @property
    def told(self) -> bool: ...

    def read(self, text: str, at: int) -> int:
        """Take text from `at`; where it stopped. What is left while MORE may be the beginning of a mark: it comes again
        with more behind it."""

    def finish(self, rest: str) -> None:
        """Nothing follows; `rest` was left. Only where the call has been told."""


class JsonValue:
    """Where one JSON value ends: knows strings and nesting, and takes on trust what is between them."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")
    _NESTED = re.compile(r'["{}\[\]]')
    _IN_STRING = re.compile(r'["\\]')
    _AFTER_SCALAR = re.compile(r"[,}\]\s]")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self._scalar = False
        self.done = False

    def read(self, text: str, at: int) -> int:
        """The end of what of `text[at:]` belongs to the value, whose first character is the first that is read."""
        if self._scalar:
            return self._read_scalar(text, at)
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (self._IN_STRING if self._in_string else self._NESTED).search(text, at)
            if self._depth == 0 and not self._in_string and (found is None or found.start() != at):
                self._scalar = True
                return self._read_scalar(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._take(found[0])
            if self._depth <= 0 and not self._in_string:
                self.done = True
                return at
        return at

    def _take(self, char: str) -> None:
        if self._in_string:
            self._escaped = char == "\\"
            self._in_string = self._escaped
        elif char == '"':
            self._in_string = True
        else:
            self._depth += 1 if char in "{[" else -1

    def _read_scalar(self, text: str, at: int) -> int:
        found = self._AFTER_SCALAR.search(text, at)
        self.done = found is not None
        return len(text) if found is None else found.start()


class ObjectCall:
    """`{"name": "f", "arguments": {...}}`, in any order; `parameters` is another name for the arguments."""

    _ARGUMENTS = ("arguments", "parameters")
    _KEYS = ("name", *_ARGUMENTS, "id", "type")

    def __init__(self, sink: Sink, *, needs_arguments: bool = False) -> None:
        self._sink = sink
        self._needs_arguments = needs_arguments
        self._seen: set[str] = set()
        self._expects = "{"
        self._value: JsonValue | None = None
        self._raw: list[str] = []
        self._streams = False
        self._key: str | None = None
        self._name = ""
        self._arguments: str | None = None
        self.status = Status.MORE
        self.begun = self.told = False

    def read(self, text: str, at: int) -> int:
        self.told = self._streams
        while at < len(text) and self.status is Status.MORE:
            if self._value is not None:
                end = self._value.read(text, at)
                if not self._streams:
                    self._raw.append(text[at:end])
                else:
                    self._sink.arguments(text[at:end])
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
                self.status = Status.BAD
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
            self._value = JsonValue()
        elif self._expects == ":" and char == ":":
            self._expects = "value"
        elif self._expects == "value" and char not in ",:}]":
            self._expects = ","
            self._value = JsonValue()
            if self._key in self._ARGUMENTS and self._name and char == "{":
                self._begin()
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
            self.status = self.status if self._name else Status.BAD
        elif self._key is None:
            self._key = _json_string(raw) or ""
            fits = self._key in self._KEYS and self._key not in self._seen
            self._seen |= {self._key} if self._key not in self._ARGUMENTS else set(self._ARGUMENTS)
            self.status = self.status if fits else Status.BAD

    def _end(self) -> bool:
        if not self.begun:
            arguments = _whole_arguments(self._arguments, self._needs_arguments)
            if not self._name or arguments is None:
                return False
            self._begin()
            self._sink.arguments(arguments)
        self.status = Status.DONE
        return True

    def _begin(self) -> None:
        self.begun = self.told = True
        self._sink.begin(self._name)

    def finish(self, rest: str) -> None:
        pass


class NamedCall:
    """`f{...}` or `f[ARGS]{...}`."""

    _ARGS, _ID = "[ARGS]", "[CALL_ID]"

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._name = ""
        self._parts: list[str] = []
        self._has_id = False
        self._value: JsonValue | None = None
        self.status = Status.MORE
        self.begun = False

    @property
    def told(self) -> bool:
        return self.begun

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.status is Status.MORE:
            if self._value is not None:
                end = self._value.read(text, at)
                self._sink.arguments(text[at:end])
                if self._value.done:
                    self.status = Status.DONE
                return end
            taken = self._head(text, at)
            if taken is None:
                return at
            at = taken
        return at

    def _head(self, text: str, at: int) -> int | None:
        """What stands before the arguments; None where the rest may be the beginning of a mark."""
        name = None if self._name else NAME.match(text, at)
        if name is not None:
            self._parts.append(name[0])
            if sum(map(len, self._parts)) > NAME_CHARS_MAX:
                self.status = Status.BAD
            return name.end()
        if text[at] in _SPACE:
            self._name = self._name or "".join(self._parts)
            return at + 1
        if text[at] == "{":
            self._value = JsonValue()
            self._name = self._name or "".join(self._parts)
            self.begun = True
            self._sink.begin(self._name)
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
        self.status = Status.BAD
        return at

    def finish(self, rest: str) -> None:
        pass


class XmlCall:
    """`<function=f>` with `<parameter=p>value</parameter>`s: values are JSON where the tool's schema asks for it."""

    OPENS = "<function="
    _PARAMETER, _VALUE_ENDS, _ENDS = "<parameter=", "</parameter>", "</function>"
    _NAME_ENDS = re.compile(r"[<>\n]")
    _BETWEEN = Marks((_PARAMETER, _ENDS, "</tool_call>"))
    _IN_VALUE = Marks((_VALUE_ENDS, _PARAMETER, _ENDS))

    def __init__(self, sink: Sink, types: Types) -> None:
        self._sink = sink
        self._types = types
        self._step = self._open
        self._name: list[str] = []
        self._own_types: Mapping[str, tuple[str, ...]] = {}
        self._key: list[str] = []
        self._count = 0
        self._wanted: tuple[str, ...] = ()
        self._value: list[str] = []
        self._newline = ""
        self._fresh = False
        self.status = Status.MORE
        self.begun = False

    @property
    def told(self) -> bool:
        return self.begun

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.status is Status.MORE:
            before = (at, self._step)
            at = self._step(text, at)
            if (at, self._step) == before:
                break
        return at

    def _open(self, text: str, at: int) -> int:
        self._step = self._in_name
        return at + len(self.OPENS)

    def _in_name(self, text: str, at: int) -> int:
        found = self._NAME_ENDS.search(text, at)
        end = len(text) if found is None else found.start()
        self._name.append(text[at:end])
        if (found is not None and found[0] != ">") or sum(map(len, self._name)) > NAME_CHARS_MAX:
            self.status = Status.BAD
            return end
        if found is None:
            return end
        name = "".join(self._name).strip()
        if not name:
            self.status = Status.BAD
            return end
        self._own_types = self._types.get(name, {})
        self.begun = True
        self._sink.begin(name)
        self._step = self._between
        return end + 1

    def _between(self, text: str, at: int) -> int:
        found = self._BETWEEN.first(text, at)
        if found is None:
            end = self._BETWEEN.tail(text, at)
            self._sink.say(text[at:end])
            return end
        start, mark = found
        self._sink.say(text[at:start])
        if mark == self._PARAMETER:
            self._step, self._key = self._in_key, []
            return start + len(mark)
        self._close()
        return start + (len(mark) if mark == self._ENDS else 0)

    def _in_key(self, text: str, at: int) -> int:
        end = text.find(">", at)
        self._key.append(text[at:] if end < 0 else text[at:end])
        if end < 0:
            return len(text)
        key = "".join(self._key).strip()
        self._sink.arguments(("{" if self._count == 0 else ", ") + _quoted(key) + ": ")
        self._count += 1
        self._wanted = self._own_types.get(key, ("string",))
        self._step, self._value, self._newline = self._in_value, [], ""
        if self._wanted == ("string",):
            self._sink.arguments('"')
        self._fresh = True
        return end + 1

    def _in_value(self, text: str, at: int) -> int:
        found = self._IN_VALUE.first(text, at)
        end = self._IN_VALUE.tail(text, at) if found is None else found[0]
        self._more_value(text[at:end])
        if found is None:
            return end
        self._end_value()
        self._step = self._between
        return end + (len(found[1]) if found[1] == self._VALUE_ENDS else 0)

    def _more_value(self, piece: str) -> None:
        """One line break after the opening and one before the end are the markup's."""
        if not piece:
            return
        if self._fresh:
            self._fresh = False
            piece = piece.removeprefix("\n")
            if not piece:
                return
        piece = self._newline + piece
        self._newline = "\n" if piece.endswith("\n") else ""
        piece = piece.removesuffix("\n")
        if self._wanted == ("string",):
            self._sink.arguments(_quoted(piece)[1:-1])
        else:
            self._value.append(piece)

    def _end_value(self) -> None:
        if self._wanted == ("string",):
            self._sink.arguments('"')
        else:
            self._sink.arguments(as_json("".join(self._value), self._wanted))

    def _close(self) -> None:
        self._sink.arguments("}" if self._count else "{}")
        self.status = Status.DONE

    def finish(self, rest: str) -> None:
        """A call that was cut: its arguments stay as open as they are."""
        if self._step == self._in_value:
            self._more_value(rest)
            if self._wanted != ("string",):
                self._sink.arguments("".join(self._value) + self._newline)
            elif self._newline:
                self._sink.arguments("\\n")
        elif self._step == self._in_key:
            self._sink.say(self._PARAMETER + "".join(self._key) + rest)
        # else `rest` is the beginning of a mark


class PythonCall:
    """`f(a=1, b="x")`: told when it is whole, as only then Python's own parser can say that it is one."""

    _ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]"), "": re.compile(r"""["'()\[\]{}]""")}
    """What a string of such quotation marks, or the code outside of one, is searched for."""
    _ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"})

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._source: list[str] = []
        self._in_name = True
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.status = Status.MORE
        self.begun = False

    @property
    def told(self) -> bool:
        return self.begun

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.status is Status.MORE:
            at = self._head(text, at) if self._in_name else self._body(text, at)
        return at

    def _head(self, text: str, at: int) -> int:
        found = NAME.match(text, at)
        if found is not None:
            self._source.append(found[0])
            if sum(map(len, self._source)) > NAME_CHARS_MAX:
                self.status = Status.BAD
            return found.end()
        if text[at] != "(":
            self.status = Status.BAD
            return at
        self._in_name = False
        return at

    def _body(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._source.append(text[at])
            return at + 1
        found = self._ENDS[self._quote].search(text, at)
        end = len(text) if found is None else found.start()
        piece = text[at:end]  # a line break in a string is none to Python's parser, but is to a model
        self._source.append(piece.translate(self._ESCAPES) if self._quote else piece)
        if found is None:
            return end
        char = found[0]
        self._source.append(char)
        if self._quote:
            self._escaped = char == "\\"
            self._quote = self._quote if self._escaped else ""
        elif char in "\"'":
            self._quote = char
        else:
            self._depth += 1 if char in "([{" else -1
            if self._depth == 0:
                return self._end(end)
        return end + 1

    def _end(self, at: int) -> int:
        called = _python_call("".join(self._source))
        if called is None:
            self.status = Status.BAD
            self._source.pop()
            return at
        self.begun = True
        self._sink.begin(called[0])
        self._sink.arguments(called[1])
        self.status = Status.DONE
        return at + 1

    def finish(self, rest: str) -> None:
        pass


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
        raw = _json_string(raw) or ""
    try:
        return raw if isinstance(msgspec.json.decode(raw), dict) else None
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Values of a schema's type ------------------------------------------------------------------------------------------


def schema_types(schema: Any) -> tuple[str, ...]:
    """The types that a parameter's schema allows, sorted; a string where it names none."""
    return tuple(sorted(_types(schema, 0))) or ("string",)


def _types(schema: Any, depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > 8:
        return set()
    named = schema.get("type")
    found = {_ALIASES.get(t, t) for t in (named if isinstance(named, list) else [named]) if isinstance(t, str)}
    for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
        found.add(_TYPE_OF.get(type(value), "string"))
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema[name] if isinstance(schema.get(name), list) else ():
            found |= _types(one, depth + 1)
    return found


_TYPE_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}


def as_json(value: str, types: tuple[str, ...]) -> str:
    """A parameter's text as JSON of one of its types; as a string where it is none of them."""
    text = value.strip()
    told = text.lower()
    if told == "null" and "null" in types:
        return told
    numbers = not {"integer", "number"}.isdisjoint(types)
    if "boolean" in types and told in (("true", "false") if numbers else ("true", "false", "1", "0")):
        return "true" if told in ("true", "1") else "false"
    try:
        kind = _TYPE_OF.get(type(msgspec.json.decode(text)), "string")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _quoted(value)
    fits = kind in types or (numbers and kind in ("integer", "number"))
    return text if fits or "string" not in types else _quoted(value)


# A call in Python ---------------------------------------------------------------------------------------------------


class _Names(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(values[node.id]), node) if node.id in values else node


def _python_call(source: str) -> tuple[str, str] | None:
    """(name, arguments as JSON) of a call with literal keyword arguments; None where it is no such call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know
            call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            return None
        arguments = {str(k.arg): ast.literal_eval(_Names().visit(k.value)) for k in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
