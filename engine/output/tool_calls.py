"""Tool calls in the text that a model writes: found, told apart from the answer, streamed as they grow.

One machine for all formats: it looks for the marks of a format's row, lets a reader (`engine.output.json_calls`)
have what follows, and gives back as text what turns out to be no call. What it has said after a beginning of the text
depends on that beginning alone, however it was cut. White space beside a call belongs to its markup. Pure.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.output.detokenizer import DelimiterScanner
from engine.output.json_calls import (
    NAME_PATTERN,
    CallReader,
    CallSink,
    JsonObjectCallReader,
    NamedCallReader,
    ParameterTypes,
    ReadStatus,
)
from engine.output.markup_calls import PythonCallReader, XmlCallReader
from engine.output.schema_types import property_types

_SPACE = " \t\r\n"
_FUNCTION_NAME = ""
"""In `ToolCallFormat.readers`: a function's name."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How the models of a family write calls: a region that a mark opens, with one call or several, which a mark may
    close. Calls may stand in an array."""

    name: str
    open_markers: tuple[str, ...]
    readers: Mapping[str, Callable[[CallSink, ParameterTypes], CallReader]]
    """Text that begins a call -> factory of its reader."""
    close_marker: str = ""
    bare_start_chars: str = ""
    """Characters with which an answer opens a region without a mark."""
    template_markers: tuple[str, ...] = ()
    """A chat template that has one of these was made for the format."""
    has_short_ids: bool = False
    """Templates of the family take ids of nine letters and digits only."""

    @property
    def special_markers(self) -> tuple[str, ...]:
        """Its markup that a tokenizer may have as special tokens."""
        return (*self.open_markers, self.close_marker, "[ARGS]", "[CALL_ID]")


def _make_object_reader(sink: CallSink, types: ParameterTypes) -> CallReader:
    return JsonObjectCallReader(sink)


def _make_strict_object_reader(sink: CallSink, types: ParameterTypes) -> CallReader:
    return JsonObjectCallReader(sink, needs_arguments=True)


def _make_named_reader(sink: CallSink, types: ParameterTypes) -> CallReader:
    return NamedCallReader(sink)


def _make_python_reader(sink: CallSink, types: ParameterTypes) -> CallReader:
    return PythonCallReader(sink)


# fmt: off
CALL_FORMATS = {row.name: row for row in (  # those whose templates say more come first: the first that fits is chosen
    ToolCallFormat("qwen3_coder", ("<tool_call>", XmlCallReader.OPEN_MARKER),
                   {XmlCallReader.OPEN_MARKER: XmlCallReader},
                   close_marker="</tool_call>", template_markers=("<function=",)),
    ToolCallFormat("mistral", ("[TOOL_CALLS]",), {"{": _make_object_reader, _FUNCTION_NAME: _make_named_reader},
                   has_short_ids=True, template_markers=("[TOOL_CALLS]",)),
    ToolCallFormat("granite", ("<|tool_call|>", "<tool_call>"), {"{": _make_object_reader},
                   close_marker="</tool_call>", template_markers=("<|tool_call|>", "<|start_of_role|>")),
    ToolCallFormat("hermes", ("<tool_call>",), {"{": _make_object_reader}, close_marker="</tool_call>",
                   template_markers=("<tool_call>",)),
    ToolCallFormat("pythonic", ("<|python_start|>", "<|python_tag|>"), {_FUNCTION_NAME: _make_python_reader},
                   close_marker="<|python_end|>", bare_start_chars="[",
                   template_markers=("func_name1(", "<|python_start|>")),
    ToolCallFormat("llama3_json", ("<|python_tag|>",), {"{": _make_strict_object_reader}, bare_start_chars="{",
                   template_markers=("<|python_tag|>", '"parameters": ')),
)}
# fmt: on
SHORT_ID_CHARS = 9


def detect_call_format(template: str) -> ToolCallFormat | None:
    """The format that a chat template was made for; None where it shows no markup of a call."""
    return next(
        (format for format in CALL_FORMATS.values() if any(marker in template for marker in format.template_markers)),
        None,
    )


def parameter_types(tools: list[dict[str, Any]]) -> ParameterTypes:
    """Return the types of the tools' parameters, for call formats without types of their own."""
    functions = [tool.get("function") or {} for tool in tools]
    return {
        function["name"]: property_types(function.get("parameters"))
        for function in functions
        if isinstance(function.get("name"), str)
    }


@dataclass(slots=True)
class ToolCallDelta:
    """Piece of one tool call; the first has its name and id."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


@dataclass(slots=True)
class _PendingDelta:
    """Piece of one tool call that the current push has completed."""

    index: int
    name: str | None
    arguments: list[str] = field(default_factory=list)


class ToolCallParser:
    """Splits a growing text into what is said and what is called."""

    def __init__(self, format: ToolCallFormat, types: ParameterTypes, make_id: Callable[[], str] | None = None) -> None:
        self._format = format
        self._types = types
        self._make_id = make_id or _make_short_id if format.has_short_ids else make_id or _make_id
        self._scanner = DelimiterScanner(format.open_markers)
        self._step = self._read_text
        self._pending_text = ""
        """The end of what was pushed: it may be the beginning of a mark."""
        self._unconfirmed_markup: list[str] = []
        """Markup of what is not known to be a call yet."""
        self._reader: CallReader | None = None
        self._is_in_array = False
        self._region_has_call = False
        """A call of this region has ended."""
        self._is_at_start = True
        """Nothing but white space has come."""
        self._is_beside_call = False
        """Nothing but white space has come since a call."""
        self._pending_spaces: list[str] = []
        """White space that is said where text follows."""
        self._text_parts: list[str] = []
        self._pending_deltas: list[_PendingDelta] = []
        self.call_count = 0
        """Calls that have been told."""

    @property
    def is_in_call(self) -> bool:
        """A call has been told, and its end has not come."""
        return self._reader is not None and self._reader.has_begun

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take the next of the text: (what is said, what is called)."""
        self._run_steps(self._pending_text + text)
        return self._flush_output()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Nothing follows: what is held back."""
        pending_text, self._pending_text = self._pending_text, ""
        if self._reader is not None and self._reader.has_begun:
            self._reader.finish(pending_text)
            self.add_text("".join(self._unconfirmed_markup))
        elif (
            self._step != self._read_region
            or not self._region_has_call
            or not self._format.close_marker.startswith(pending_text)
        ):
            self.add_text("".join(self._unconfirmed_markup) + pending_text)
        self._unconfirmed_markup = []
        if not self._is_beside_call:
            self._text_parts += self._pending_spaces
        return self._flush_output()

    def _flush_output(self) -> tuple[str, list[ToolCallDelta]]:
        deltas = [
            ToolCallDelta(
                delta.index, "".join(delta.arguments), delta.name, None if delta.name is None else self._make_id()
            )
            for delta in self._pending_deltas
        ]
        text = "".join(self._text_parts)
        self._text_parts, self._pending_deltas = [], []
        return text, deltas

    # What readers tell ----------------------------------------------------------------------------------------------

    def begin_call(self, name: str) -> None:
        self._pending_deltas.append(_PendingDelta(self.call_count, name))
        self.call_count += 1
        self._unconfirmed_markup.clear()
        self._pending_spaces.clear()
        self._is_beside_call = True

    def add_arguments(self, piece: str) -> None:
        if not piece:
            return
        if not self._pending_deltas:
            self._pending_deltas.append(_PendingDelta(self.call_count - 1, None))
        self._pending_deltas[-1].arguments.append(piece)

    def add_text(self, text: str) -> None:
        stripped_text = text.rstrip()
        if stripped_text:
            self._text_parts += [*self._pending_spaces, stripped_text]
            self._pending_spaces = []
            self._is_at_start = self._is_beside_call = False
        if len(text) > len(stripped_text):
            self._pending_spaces.append(text[len(stripped_text) :])

    # Steps: each takes text from `at`, and returns where it stopped. The rest may be the beginning of a mark --------

    def _run_steps(self, text: str) -> None:
        pos = 0
        while pos < len(text):
            previous_position = (pos, self._step)
            pos = self._step(text, pos)
            if (pos, self._step) == previous_position:
                break
        self._pending_text = text[pos:]

    def _read_text(self, text: str, pos: int) -> int:
        if self._is_at_start and self._format.bare_start_chars:
            start = pos
            while pos < len(text) and text[pos] in _SPACE:
                pos += 1
            self.add_text(text[start:pos])
            if pos == len(text):
                return pos
            if text[pos] in self._format.bare_start_chars:
                self._open_region("")
                return pos
        match = self._scanner.find_first(text, pos)
        if match is None:
            end = self._scanner.find_partial(text, pos)
            self.add_text(text[pos:end])
            return end
        start, marker = match
        self.add_text(text[pos:start])
        is_call_start = marker in self._format.readers
        self._open_region("" if is_call_start else marker)
        return start if is_call_start else start + len(marker)

    def _open_region(self, marker: str) -> None:
        self._unconfirmed_markup.append(marker)
        self._is_in_array = self._region_has_call = False
        self._step = self._read_region

    def _read_region(self, text: str, pos: int) -> int:
        """Between calls."""
        start = pos
        while pos < len(text) and (text[pos] in _SPACE or (self._region_has_call and text[pos] in ",;")):
            pos += 1
        self._unconfirmed_markup.append(text[start:pos])
        if pos == len(text):
            return pos
        format = self._format
        for marker in (
            format.close_marker,
            *format.open_markers,
            *(call_start for call_start in format.readers if len(call_start) > 1),
        ):
            if marker and text.startswith(marker, pos):
                return self._read_marker(marker, pos)
            if len(text) - pos < len(marker) and marker.startswith(text[pos:]):
                return pos
        return self._read_region_char(text, pos)

    def _read_marker(self, marker: str, pos: int) -> int:
        if marker in self._format.readers:
            self._start_reader(self._format.readers[marker])
            return pos
        if not self._region_has_call:  # a region without a call is text
            self._revert_to_text()
        self._unconfirmed_markup.clear()
        if marker == self._format.close_marker and self._region_has_call:
            self._step = self._read_text
        elif marker == self._format.close_marker:
            self.add_text(marker)
        else:
            self._open_region(marker)
        return pos + len(marker)

    def _read_region_char(self, text: str, pos: int) -> int:
        """A character that begins no mark."""
        char, readers = text[pos], self._format.readers
        if char == "[" and not self._region_has_call and not self._is_in_array:
            self._is_in_array = True
        elif char == "]" and self._is_in_array and self._region_has_call:
            self._is_in_array = False
            self._unconfirmed_markup.clear()
            return pos + 1
        elif char in readers:
            self._start_reader(readers[char])
            return pos
        elif _FUNCTION_NAME in readers and NAME_PATTERN.match(char):
            self._start_reader(readers[_FUNCTION_NAME])
            return pos
        else:
            self._revert_to_text()
            return pos
        self._unconfirmed_markup.append(char)
        return pos + 1

    def _start_reader(self, make_reader: Callable[[CallSink, ParameterTypes], CallReader]) -> None:
        self._reader = make_reader(self, self._types)
        self._step = self._read_call

    def _read_call(self, text: str, pos: int) -> int:
        assert self._reader is not None
        end = self._reader.read(text, pos)
        if not self._reader.is_emitted:
            self._unconfirmed_markup.append(text[pos:end])
        if self._reader.status is ReadStatus.COMPLETE:
            self._reader = None
            self._unconfirmed_markup.clear()
            self._pending_spaces.clear()
            self._region_has_call = self._is_beside_call = True
            self._step = self._read_region
        elif self._reader.status is ReadStatus.INVALID:
            self._reader = None
            self._revert_to_text()
        return end

    def _revert_to_text(self) -> None:
        self._step = self._read_text
        self._is_at_start = False
        self.add_text("".join(self._unconfirmed_markup))
        self._unconfirmed_markup.clear()


def _make_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _make_short_id() -> str:
    return uuid.uuid4().hex[:SHORT_ID_CHARS]
