"""Tables of the formats in which families of models write reasoning and tool calls. No I/O.

A new format needs a row here and a test. A new way to write a call also needs a reader like those of
`engine.output.json_calls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.output.json_calls import (
    ARGUMENTS_MARKER,
    ID_MARKER,
    CallReader,
    read_named_call,
    read_object_call,
    read_object_call_with_arguments,
)
from engine.output.python_calls import read_python_call
from engine.output.xml_calls import FUNCTION_MARKER, read_xml_call
from prompts import ChatTemplate, RequestError, Tokenizer

ReasoningState = Literal["before", "inside", "after"]
"""Position in a text: reasoning may begin, has begun, or has ended (or never was)."""
FUNCTION_NAME = ""
"""In `ToolCallFormat.readers`: the first character of a function's name begins a call."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the models of a family write reasoning, which comes once, at the beginning of an answer."""

    name: str
    open_markers: tuple[str, ...]
    close_markers: tuple[str, ...]
    starts_inside: bool = False
    """Whether answers begin with reasoning even without an opening marker."""
    ends_at_call: bool = False
    """Whether a tool call also ends the reasoning."""
    template_markers: tuple[str, ...] = ()
    """A chat template that contains one of these texts is meant for this format."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How the models of a family write tool calls.

    A marker opens a region of one or more calls, which may be an array. Another marker may close the region.
    """

    name: str
    open_markers: tuple[str, ...]
    readers: Mapping[str, CallReader]
    """Reader of a call, by the text that a call begins with."""
    close_marker: str = ""
    bare_start_chars: str = ""
    """An answer that begins with one of these characters opens a region without a marker."""
    template_markers: tuple[str, ...] = ()
    """A chat template that contains one of these texts is meant for this format."""
    has_short_ids: bool = False
    """Whether templates of the family accept only call ids of nine alphanumeric characters."""

    @property
    def special_markers(self) -> tuple[str, ...]:
        """Markers that may be special tokens of a tokenizer."""
        return (*self.open_markers, self.close_marker, ARGUMENTS_MARKER, ID_MARKER)

    @property
    def region_markers(self) -> tuple[str, ...]:
        """Markers and beginnings of calls that may occur in a region, without beginnings of one character."""
        call_starts = [call_start for call_start in self.readers if len(call_start) > 1]
        return tuple(marker for marker in (self.close_marker, *self.open_markers, *call_starts) if marker)


# fmt: off
REASONING_FORMATS = {row.name: row for row in (  # the first that fits a template is chosen
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), ends_at_call=True, template_markers=("[THINK]",)),
    ReasoningFormat("granite", ("Here is my thought process:", "Here's my thought process:"),
                    ("Here is my response:", "Here's my response:"), template_markers=("my thought process",)),
    ReasoningFormat("qwen3", ("<think>",), ("</think>",), ends_at_call=True, template_markers=("<think>",)),
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), starts_inside=True, template_markers=("</think>",)),
)}
CALL_FORMATS = {row.name: row for row in (  # the first that fits a template is chosen, so more markup comes first
    ToolCallFormat("qwen3_coder", ("<tool_call>", FUNCTION_MARKER), {FUNCTION_MARKER: read_xml_call},
                   close_marker="</tool_call>", template_markers=(FUNCTION_MARKER,)),
    ToolCallFormat("mistral", ("[TOOL_CALLS]",), {"{": read_object_call, FUNCTION_NAME: read_named_call},
                   has_short_ids=True, template_markers=("[TOOL_CALLS]",)),
    ToolCallFormat("granite", ("<|tool_call|>", "<tool_call>"), {"{": read_object_call},
                   close_marker="</tool_call>", template_markers=("<|tool_call|>", "<|start_of_role|>")),
    ToolCallFormat("hermes", ("<tool_call>",), {"{": read_object_call}, close_marker="</tool_call>",
                   template_markers=("<tool_call>",)),
    ToolCallFormat("pythonic", ("<|python_start|>", "<|python_tag|>"), {FUNCTION_NAME: read_python_call},
                   close_marker="<|python_end|>", bare_start_chars="[",
                   template_markers=("func_name1(", "<|python_start|>")),
    ToolCallFormat("llama3_json", ("<|python_tag|>",), {"{": read_object_call_with_arguments}, bare_start_chars="{",
                   template_markers=("<|python_tag|>", '"parameters": ')),
)}
# fmt: on


def resolve_formats(
    call_setting: str, reasoning_setting: str, template: ChatTemplate | None
) -> tuple[str | None, str | None]:
    """Return the names of the formats in which a model writes tool calls and reasoning, in this order.

    A setting is the name of a format, "none", or "auto": the first format whose markers occur in the chat template.
    None as a result means that calls, or reasoning, are left in the text.
    """
    try:
        template_text = "" if template is None else template.select_source(has_tools=True)
    except RequestError:  # the template has several variants and no default
        template_text = ""
    return (
        _resolve_format(call_setting, CALL_FORMATS, template_text),
        _resolve_format(reasoning_setting, REASONING_FORMATS, template_text),
    )


def _resolve_format(
    setting: str, formats: Mapping[str, ToolCallFormat] | Mapping[str, ReasoningFormat], template_text: str
) -> str | None:
    if setting == "auto":
        return detect_format(formats, template_text)
    return None if setting == "none" else setting


def detect_format(
    formats: Mapping[str, ToolCallFormat] | Mapping[str, ReasoningFormat], template_text: str
) -> str | None:
    """Return the name of the first format of which a marker occurs in a chat template; None if none does."""
    for name, format in formats.items():
        if any(marker in template_text for marker in format.template_markers):
            return name
    return None


def initial_reasoning_state(format: ReasoningFormat, prompt: str, continued_text: str | None) -> ReasoningState:
    """Return whether an answer begins before, inside or after reasoning.

    A prompt that ends with "<think>" has opened the reasoning: the answer begins inside.

    `prompt`: at least the end of the prompt. `continued_text`: text of the message that the answer continues, if any.
    """
    if continued_text:
        open_position = max(continued_text.rfind(marker) for marker in format.open_markers)
        close_position = max(continued_text.rfind(marker) for marker in format.close_markers)
        is_open = open_position > close_position or (format.starts_inside and close_position < 0)
        return "inside" if is_open else "after"
    end = prompt.rstrip()
    if end.endswith(format.close_markers):
        return "after"
    return "inside" if format.starts_inside or end.endswith(format.open_markers) else "before"


def find_reasoning_end_token(format: ReasoningFormat, state: ReasoningState, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends the reasoning of an answer that begins in `state`.

    A constraint binds an answer only after this token. None: no reasoning comes, or its end is several tokens.
    """
    if state == "after":
        return None
    end_ids = map(tokenizer.token_to_id, format.close_markers)
    return next((token_id for token_id in end_ids if token_id is not None), None)
