"""Tool calls that are not JSON: XML, whose values take the type of the tool's schema, and Python. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.api.call_readers import NAME, NAME_CHARS_MAX, CallReader, Sink, Status, Types
from engine.api.detokenizer import Marks


class XmlCall(CallReader):
    """`<function=f>` with `<parameter=p>value</parameter>`s: values are JSON where the tool's schema asks for it."""

    OPENS = "<function="
    _PARAMETER, _VALUE_ENDS, _ENDS = "<parameter=", "</parameter>", "</function>"
    _NAME_ENDS = re.compile(r"[<>\n]")
    _BETWEEN = Marks((_PARAMETER, _ENDS, "</tool_call>"))
    _IN_VALUE = Marks((_VALUE_ENDS, _PARAMETER, _ENDS))

    def __init__(self, sink: Sink, types: Types) -> None:
        super().__init__(sink)
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
            self.status = Status.BAD
            return end
        if found is None:
            return end
        name = "".join(self._name).strip()
        if not name:
            self.status = Status.BAD
            return end
        self._own_types = self._types.get(name, {})
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


class PythonCall(CallReader):
    """`f(a=1, b="x")`: told when it is whole, as only then Python's own parser can say that it is one."""

    _ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]"), "": re.compile(r"""["'()\[\]{}]""")}
    """What a string of such quotation marks, or the code outside of one, is searched for."""
    _ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\x00"})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._source: list[str] = []
        self._in_name = True
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _take(self, text: str, at: int) -> int:
        return self._head(text, at) if self._in_name else self._body(text, at)

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
        self._begin(called[0])
        self._sink.arguments(called[1])
        self.status = Status.DONE
        return at + 1


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
