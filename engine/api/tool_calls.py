"""Tool calls in the text that a model writes: found, told apart from the answer, streamed as they grow.

One machine for all formats: it looks for the marks of a format's row, lets a reader (`engine.api.readers`)
have what follows, and gives back as text what turns out to be no call. What it has said after a beginning of the text
depends on that beginning alone, however it was cut. White space beside a call belongs to its markup. Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.api.detokenizer import DelimiterScanner
from engine.api.readers.json_calls import (
    NAME,
    CallReader,
    CallSink,
    JsonObjectCallReader,
    NamedCallReader,
    ParameterTypes,
    ReadStatus,
)
from engine.api.readers.markup_calls import PythonCallReader, XmlCallReader
from engine.api.schemas.inspection import property_types

_SPACE = " \t\r\n"
_NAMED = ""
"""In `Format.begins`: a function's name."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How the models of a family write calls: a region that a mark opens, with one call or several, which a mark may
    close. Calls may stand in an array."""

    name: str
    opens: tuple[str, ...]
    begins: Mapping[str, Callable[[CallSink, ParameterTypes], CallReader]]
    """What a call begins with -> its reader."""
    close: str = ""
    bare: str = ""
    """Characters with which an answer opens a region without a mark."""
    in_template: tuple[str, ...] = ()
    """A chat template that has one of these was made for the format."""
    short_ids: bool = False
    """Templates of the family take ids of nine letters and digits only."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Its markup that a tokenizer may have as special tokens."""
        return (*self.opens, self.close, "[ARGS]", "[CALL_ID]")


def _object(sink: CallSink, types: ParameterTypes) -> CallReader:
    return JsonObjectCallReader(sink)


def _object_with_arguments(sink: CallSink, types: ParameterTypes) -> CallReader:
    return JsonObjectCallReader(sink, needs_arguments=True)


def _named(sink: CallSink, types: ParameterTypes) -> CallReader:
    return NamedCallReader(sink)


def _python(sink: CallSink, types: ParameterTypes) -> CallReader:
    return PythonCallReader(sink)


# fmt: off
CALL_FORMATS = {row.name: row for row in (  # those whose templates say more come first: the first that fits is chosen
    ToolCallFormat("qwen3_coder", ("<tool_call>", XmlCallReader.OPENS), {XmlCallReader.OPENS: XmlCallReader},
                   close="</tool_call>", in_template=("<function=",)),
    ToolCallFormat("mistral", ("[TOOL_CALLS]",), {"{": _object, _NAMED: _named}, short_ids=True,
                   in_template=("[TOOL_CALLS]",)),
    ToolCallFormat("granite", ("<|tool_call|>", "<tool_call>"), {"{": _object}, close="</tool_call>",
                   in_template=("<|tool_call|>", "<|start_of_role|>")),
    ToolCallFormat("hermes", ("<tool_call>",), {"{": _object}, close="</tool_call>", in_template=("<tool_call>",)),
    ToolCallFormat("pythonic", ("<|python_start|>", "<|python_tag|>"), {_NAMED: _python}, close="<|python_end|>",
                   bare="[", in_template=("func_name1(", "<|python_start|>")),
    ToolCallFormat("llama3_json", ("<|python_tag|>",), {"{": _object_with_arguments}, bare="{",
                   in_template=("<|python_tag|>", '"parameters": ')),
)}
# fmt: on
SHORT_ID_CHARS = 9


def detect_call_format(template: str) -> ToolCallFormat | None:
    """The format that a chat template was made for; None where it shows no markup of a call."""
    return next((row for row in CALL_FORMATS.values() if any(mark in template for mark in row.in_template)), None)


def parameter_types(tools: list[dict[str, Any]]) -> ParameterTypes:
    """What a reader of a format that has no types of its own must know of the tools."""
    functions = [tool.get("function") or {} for tool in tools]
    return {
        function["name"]: property_types(function.get("parameters"))
        for function in functions
        if isinstance(function.get("name"), str)
    }


@dataclass(slots=True)
class ToolCallDelta:
    """What was told of one call: its first piece has its name and id."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


@dataclass(slots=True)
class _PendingDelta:
    """Of one call, what this push told."""

    index: int
    name: str | None
    arguments: list[str] = field(default_factory=list)


class ToolCallParser:
    """Splits a growing text into what is said and what is called."""

    def __init__(self, row: ToolCallFormat, types: ParameterTypes, new_id: Callable[[], str] | None = None) -> None:
        self._format = row
        self._types = types
        self._new_id = new_id or _short_id if row.short_ids else new_id or _id
        self._marks = DelimiterScanner(row.opens)
        self._step = self._answer
        self._left = ""
        """The end of what was pushed: it may be the beginning of a mark."""
        self._back: list[str] = []
        """Markup of what is not known to be a call yet."""
        self._reader: CallReader | None = None
        self._in_array = False
        self._called = False
        """A call of this region has ended."""
        self._fresh = True
        """Nothing but white space has come."""
        self._beside_call = False
        """Nothing but white space has come since a call."""
        self._spaces: list[str] = []
        """White space that is said where text follows."""
        self._said: list[str] = []
        self._growing: list[_PendingDelta] = []
        self.count = 0
        """Calls that have been told."""

    @property
    def in_call(self) -> bool:
        """A call has been told, and its end has not come."""
        return self._reader is not None and self._reader.begun

    def push(self, piece: str) -> tuple[str, list[ToolCallDelta]]:
        """Take the next of the text: (what is said, what is called)."""
        self._read(self._left + piece)
        return self._take()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Nothing follows: what is held back."""
        left, self._left = self._left, ""
        if self._reader is not None and self._reader.begun:
            self._reader.finish(left)
            self.say("".join(self._back))
        elif self._step != self._region or not self._called or not self._format.close.startswith(left):
            self.say("".join(self._back) + left)
        self._back = []
        if not self._beside_call:
            self._said += self._spaces
        return self._take()

    def _take(self) -> tuple[str, list[ToolCallDelta]]:
        pieces = [
            ToolCallDelta(one.index, "".join(one.arguments), one.name, None if one.name is None else self._new_id())
            for one in self._growing
        ]
        said = "".join(self._said)
        self._said, self._growing = [], []
        return said, pieces

    # What readers tell ----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        self._growing.append(_PendingDelta(self.count, name))
        self.count += 1
        self._back.clear()
        self._spaces.clear()
        self._beside_call = True

    def arguments(self, piece: str) -> None:
        if not piece:
            return
        if not self._growing:
            self._growing.append(_PendingDelta(self.count - 1, None))
        self._growing[-1].arguments.append(piece)

    def say(self, text: str) -> None:
        spoken = text.rstrip()
        if spoken:
            self._said += [*self._spaces, spoken]
            self._spaces = []
            self._fresh = self._beside_call = False
        if len(text) > len(spoken):
            self._spaces.append(text[len(spoken) :])

    # Steps: each takes text from `at`, and returns where it stopped. The rest may be the beginning of a mark --------

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text):
            before = (at, self._step)
            at = self._step(text, at)
            if (at, self._step) == before:
                break
        self._left = text[at:]

    def _answer(self, text: str, at: int) -> int:
        if self._fresh and self._format.bare:
            start = at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self.say(text[start:at])
            if at == len(text):
                return at
            if text[at] in self._format.bare:
                self._open("")
                return at
        found = self._marks.first(text, at)
        if found is None:
            end = self._marks.tail(text, at)
            self.say(text[at:end])
            return end
        start, mark = found
        self.say(text[at:start])
        begins = mark in self._format.begins
        self._open("" if begins else mark)
        return start if begins else start + len(mark)

    def _open(self, mark: str) -> None:
        self._back.append(mark)
        self._in_array = self._called = False
        self._step = self._region

    def _region(self, text: str, at: int) -> int:
        """Between calls."""
        start = at
        while at < len(text) and (text[at] in _SPACE or (self._called and text[at] in ",;")):
            at += 1
        self._back.append(text[start:at])
        if at == len(text):
            return at
        row = self._format
        for mark in (row.close, *row.opens, *(begin for begin in row.begins if len(begin) > 1)):
            if mark and text.startswith(mark, at):
                return self._mark(mark, at)
            if len(text) - at < len(mark) and mark.startswith(text[at:]):
                return at
        return self._first_of(text, at)

    def _mark(self, mark: str, at: int) -> int:
        if mark in self._format.begins:
            self._begin_reader(self._format.begins[mark])
            return at
        if not self._called:  # a region without a call is text
            self._give_back()
        self._back.clear()
        if mark == self._format.close and self._called:
            self._step = self._answer
        elif mark == self._format.close:
            self.say(mark)
        else:
            self._open(mark)
        return at + len(mark)

    def _first_of(self, text: str, at: int) -> int:
        """A character that begins no mark."""
        char, begins = text[at], self._format.begins
        if char == "[" and not self._called and not self._in_array:
            self._in_array = True
        elif char == "]" and self._in_array and self._called:
            self._in_array = False
            self._back.clear()
            return at + 1
        elif char in begins:
            self._begin_reader(begins[char])
            return at
        elif _NAMED in begins and NAME.match(char):
            self._begin_reader(begins[_NAMED])
            return at
        else:
            self._give_back()
            return at
        self._back.append(char)
        return at + 1

    def _begin_reader(self, make: Callable[[CallSink, ParameterTypes], CallReader]) -> None:
        self._reader = make(self, self._types)
        self._step = self._call

    def _call(self, text: str, at: int) -> int:
        assert self._reader is not None
        end = self._reader.read(text, at)
        if not self._reader.told:
            self._back.append(text[at:end])
        if self._reader.status is ReadStatus.DONE:
            self._reader = None
            self._back.clear()
            self._spaces.clear()
            self._called = self._beside_call = True
            self._step = self._region
        elif self._reader.status is ReadStatus.INVALID:
            self._reader = None
            self._give_back()
        return end

    def _give_back(self) -> None:
        self._step = self._answer
        self._fresh = False
        self.say("".join(self._back))
        self._back.clear()


def _id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _short_id() -> str:
    return uuid.uuid4().hex[:SHORT_ID_CHARS]
