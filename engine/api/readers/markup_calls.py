"""Tool calls that are not JSON: XML, whose values take the type of the tool's schema, and Python. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from engine.api.detokenizer import DelimiterScanner
from engine.api.readers.json_calls import (
    NAME,
    NAME_CHARS_MAX,
    CallReader,
    CallSink,
    ParameterTypes,
    ReadStatus,
    with_escapes,
)
from engine.api.schemas.inspection import type_of

_SPACE = " \t\r\n"


class XmlCallReader(CallReader):
    """`<function=f>` with `<parameter=p>value</parameter>`s: values are JSON where the tool's schema asks for it.

    A value may hold markup itself. A mark ends it only where what follows says so: `</parameter>` before another mark,
    `</function>` before the end of the call's region, `<parameter=` with a name of the tool's that has no value yet.
    A function that is not among the tools is text.
    """

    OPENS = "<function="
    _PARAMETER, _VALUE_ENDS, _ENDS = "<parameter=", "</parameter>", "</function>"
    _NAME_ENDS = re.compile(r"[<>\n]")
    _BETWEEN = DelimiterScanner((_PARAMETER, _ENDS, "</tool_call>"))
    _IN_VALUE = DelimiterScanner((_VALUE_ENDS, _PARAMETER, _ENDS))
    _FOLLOWS = {_VALUE_ENDS: (_PARAMETER, _ENDS, "</tool_call>"), _ENDS: ("</tool_call>", "<tool_call>", OPENS)}
    """What must follow a mark, behind white space, for the mark to end a value; the end of the answer does too."""

    def __init__(self, sink: CallSink, types: ParameterTypes) -> None:
        super().__init__(sink)
        self._types = types
        self._step = self._open
        self._name: list[str] = []
        self._own_types: Mapping[str, tuple[str, ...]] = {}
        self._key: list[str] = []
        self._keys: set[str] = set()
        """Names of the parameters that have come."""
        self._wanted: tuple[str, ...] = ()
        self._value: list[str] = []
        self._newline = ""
        self._fresh = False
        self._mark = ""
        self._held: list[str] = []
        """What came since `_mark`, which may belong to the value."""

    def _take(self, text: str, at: int) -> int | None:
        step = self._step
        end = step(text, at)
        return None if end == at and self._step == step else end

    def _open(self, text: str, at: int) -> int:
        self._step = self._in_name
        return at + len(self.OPENS)

    def _in_name(self, text: str, at: int) -> int:
        found = self._NAME_ENDS.search(text, at)
        end = len(text) if found is None else found.start()
        self._name.append(text[at:end])
        if (found is not None and found[0] != ">") or sum(map(len, self._name)) > NAME_CHARS_MAX:
            self.status = ReadStatus.INVALID
            return end
        if found is None:
            return end
        name = "".join(self._name).strip()
        if name not in self._types:
            self.status = ReadStatus.INVALID
            return end
        self._own_types = self._types[name]
        self._begin(name)
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
        self._open_value("".join(self._key).strip())
        return end + 1

    def _open_value(self, key: str) -> None:
        self._sink.arguments((", " if self._keys else "{") + _quoted(key) + ": ")
        self._keys.add(key)
        self._wanted = self._own_types.get(key, ("string",))
        self._step, self._value, self._newline = self._in_value, [], ""
        if self._wanted == ("string",):
            self._sink.arguments('"')
        self._fresh = True

    def _in_value(self, text: str, at: int) -> int:
        found = self._IN_VALUE.first(text, at)
        end = self._IN_VALUE.tail(text, at) if found is None else found[0]
        self._more_value(text[at:end])
        if found is None:
            return end
        self._mark, self._held = found[1], []
        self._step = self._in_next_key if self._mark == self._PARAMETER else self._behind_mark
        return end + len(self._mark)

    def _in_next_key(self, text: str, at: int) -> int:
        """Read the name in a mark that opens the next parameter, or is part of this one's value."""
        found = self._NAME_ENDS.search(text, at)
        end = len(text) if found is None else found.start()
        self._held.append(text[at:end])
        if sum(map(len, self._held)) > NAME_CHARS_MAX or (found is not None and found[0] != ">"):
            self._go_on_with_value()
        elif found is not None:
            key = "".join(self._held).strip()
            if key in self._keys or (self._own_types and key not in self._own_types):
                self._go_on_with_value()
            else:
                self._end_value()
                self._open_value(key)
                end += 1
        return end

    def _behind_mark(self, text: str, at: int) -> int:
        """Find out by what follows a mark whether it ends the value."""
        end = at
        while end < len(text) and text[end] in _SPACE:
            end += 1
        self._held.append(text[at:end])
        if end == len(text):
            return end
        for mark in self._FOLLOWS[self._mark]:
            if text.startswith(mark, end):
                self._end_at_mark()
                return end
            if len(text) - end < len(mark) and mark.startswith(text[end:]):
                return end
        self._go_on_with_value()
        return end

    def _end_at_mark(self) -> None:
        self._end_value()
        self._step = self._between
        if self._mark == self._ENDS:
            self._close()

    def _go_on_with_value(self) -> None:
        self._step = self._in_value
        self._more_value(self._mark + "".join(self._held))

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
        self._sink.arguments("}" if self._keys else "{}")
        self.status = ReadStatus.DONE

    def finish(self, rest: str) -> None:
        """A call that was cut: its arguments stay as open as they are."""
        if self._step == self._behind_mark:
            self._end_at_mark()
            return
        if self._step == self._in_next_key:
            self._go_on_with_value()
        if self._step == self._in_value:
            self._more_value(rest)
            if self._wanted != ("string",):
                self._sink.arguments("".join(self._value) + self._newline)
            elif self._newline:
                self._sink.arguments("\\n")
        elif self._step == self._in_key:
            self._sink.say(self._PARAMETER + "".join(self._key) + rest)
        # else `rest` is the beginning of a mark


class PythonCallReader(CallReader):
    """`f(a=1, b="x")`: told when it is whole, as only then Python's own parser can say that its values are literals.

    Names need not be Python's: `from` and `user-id` are common ones. A name with other characters stands in quotes.
    """

    _ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]"), "": re.compile(r"""["'()\[\]{},=]""")}
    """What a string of such quotation marks, or the code outside of one, is searched for."""
    _ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"})

    def __init__(self, sink: CallSink) -> None:
        super().__init__(sink)
        self._name: list[str] = []
        self._in_name = True
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._key: str | None = None
        """What stands before the `=` of the argument that is read, once that has come."""
        self._source: list[str] = []
        """Of that argument, what came behind its `=`; before that, all of it."""
        self._arguments: list[tuple[str | None, str]] = []

    def _take(self, text: str, at: int) -> int:
        return self._head(text, at) if self._in_name else self._body(text, at)

    def _head(self, text: str, at: int) -> int:
        found = NAME.match(text, at)
        if found is not None:
            self._name.append(found[0])
            if sum(map(len, self._name)) > NAME_CHARS_MAX:
                self.status = ReadStatus.INVALID
            return found.end()
        if text[at] != "(":
            self.status = ReadStatus.INVALID
            return at
        self._in_name = False
        self._depth = 1
        return at + 1

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
        return self._mark(found[0], end)

    def _mark(self, char: str, at: int) -> int:
        if self._quote:
            self._escaped = char == "\\"
            self._quote = self._quote if self._escaped else ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth == 0:
                return self._end(char, at)
        elif self._depth == 1 and char == ",":
            self._end_argument()
            return at + 1
        elif self._depth == 1 and char == "=" and self._key is None:
            self._key, self._source = "".join(self._source), []
            return at + 1
        self._source.append(char)
        return at + 1

    def _end_argument(self) -> None:
        self._arguments.append((self._key, "".join(self._source)))
        self._key, self._source = None, []

    def _end(self, char: str, at: int) -> int:
        self._end_argument()
        if self._arguments[-1][0] is None and not self._arguments[-1][1].strip():  # f(), or a comma at the end
            self._arguments.pop()
        arguments = _python_arguments(self._arguments) if char == ")" else None
        if arguments is None:
            self.status = ReadStatus.INVALID
            return at
        self._begin("".join(self._name))
        self._sink.arguments(arguments)
        self.status = ReadStatus.DONE
        return at + 1


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Values of a schema's type ------------------------------------------------------------------------------------------


def as_json(value: str, types: tuple[str, ...]) -> str:
    """A parameter's text as JSON of one of its types; as a string where it is none of them."""
    text = value.strip()
    told = text.lower()
    if (told == "null" or text == "None") and "null" in types:
        return "null"
    numbers = not {"integer", "number"}.isdisjoint(types)
    if "boolean" in types and told in (("true", "false") if numbers else ("true", "false", "1", "0")):
        return "true" if told in ("true", "1") else "false"
    found = _decoded(text, types)
    if found is None:
        return _quoted(value)
    kind, text = found
    fits = kind in types or (numbers and kind in ("integer", "number"))
    return text if fits or "string" not in types else _quoted(value)


def _decoded(text: str, types: tuple[str, ...]) -> tuple[str, str] | None:
    """(type, JSON) of a value that is JSON, or a literal of Python that may be one; None where it is neither."""
    valid = with_escapes(text)
    try:
        return type_of(msgspec.json.decode(valid)), valid
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    if text[:1] in ("{", "["):
        value = _python_value(text)
        if value is not None and type_of(value.decoded) in types:
            return type_of(value.decoded), value.json
    return None


# A call in Python ---------------------------------------------------------------------------------------------------


class _Names(ast.NodeTransformer):
    """JSON's names for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(values[node.id]), node) if node.id in values else node


class _Literal(NamedTuple):
    decoded: Any
    json: str


def _python_value(source: str) -> _Literal | None:
    """The value of a literal that JSON can say; None where the source is no such literal."""
    if not source.strip():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know
            tree = ast.parse(f"({source}\n)", mode="eval").body
        decoded = ast.literal_eval(_Names().visit(tree))
        encoded = json.dumps(decoded, ensure_ascii=False, allow_nan=False)
        encoded.encode()  # half a character cannot be sent
        return _Literal(decoded, encoded)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_arguments(sources: list[tuple[str | None, str]]) -> str | None:
    """The JSON of arguments by name, each a source of a name and of a value; None where one of them is neither."""
    arguments: dict[str, str] = {}
    for key_source, value_source in sources:
        key = None if key_source is None else _python_key(key_source.strip())
        value = _python_value(value_source)
        if key is None or value is None or key in arguments:
            return None
        arguments[key] = value.json
    return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in arguments.items()) + "}"


def _python_key(source: str) -> str | None:
    if NAME.fullmatch(source):
        return source
    value = _python_value(source) if source[:1] in ("'", '"') else None
    return value.decoded if value is not None and isinstance(value.decoded, str) else None
