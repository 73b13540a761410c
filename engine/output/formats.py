"""Tables of the formats in which families of models write reasoning and tool calls. No I/O.

A new format needs a row here and a test. A new way to write a call also needs a reader like those of
`engine.output.json_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from engine.output.json_calls import (
    ARGUMENTS_MARKER,
    ID_MARKER,
    NAME_PATTERN,
    CallReader,
    read_named_call,
    read_object_call,
)
from engine.output.python_calls import read_python_call
from engine.output.xml_calls import FUNCTION_MARKER, read_xml_call
from prompts import ChatTemplate, RequestError

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
class ToolMarkup:
    """Exact text of tool calls, for grammars that force calls to a tool's JSON schema."""

    begin: str
    """Text of a call before its arguments, with NAME for the function's name."""
    end: str
    """Text of a call after its arguments."""
    trigger: str
    """Text that begins calls, and occurs in no other text."""
    style: Literal["json", "qwen_xml", "python"] = "json"
    """How arguments are written. In JSON, the function's name is a JSON string, too."""
    name_pattern: re.Pattern[str] = re.compile(r"(?s:.+)")
    """Function names that this markup can hold."""
    calls_begin: str = ""
    """Text before all calls of an answer."""
    separator: str = ""
    """Text between two calls."""
    calls_end: str = ""
    """Text after all calls."""


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes tool calls: the parser finds them by markers, and grammars force exact markup.

    An example is `<tool_call>{"name": "f"}</tool_call>`: an opening marker, one call or several ones, a closing marker.
    """

    name: str
    open_markers: tuple[str, ...]
    readers: Mapping[str, CallReader]
    """Text with which a call begins, such as "{" -> function that parses such a call."""
    markup: ToolMarkup
    close_marker: str = ""
    """Marker after the calls; empty if the format has none."""
    bare_start_chars: str = ""
    """Characters that begin a call without a marker if they are the first ones of an answer."""
    template_markers: tuple[str, ...] = ()
    """Texts that show, in a model's chat template, that the model writes this format."""
    has_short_ids: bool = False
    """Whether the family's chat templates accept only call ids of nine letters and digits."""

    @property
    def special_markers(self) -> tuple[str, ...]:
        """Markup that may be special tokens of a tokenizer, and that detokenization must not drop."""
        return (*self.open_markers, self.close_marker, ARGUMENTS_MARKER, ID_MARKER)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Texts of several characters that may follow an opening marker or a call: markers and beginnings of calls."""
        call_starts = [call_start for call_start in self.readers if len(call_start) > 1]
        markers = (self.close_marker, *self.open_markers, *call_starts)
        return tuple(marker for marker in markers if marker)


_JSON_BEGIN = '{"name": NAME, "arguments": '

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
                   ToolMarkup("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "<tool_call>", "qwen_xml",
                              re.compile(r"(?! )[^<>\n]+(?<! )"), separator="\n"),
                   close_marker="</tool_call>", template_markers=(FUNCTION_MARKER,)),
    ToolCallFormat("mistral", ("[TOOL_CALLS]",), {"{": read_object_call, FUNCTION_NAME: read_named_call},
                   ToolMarkup(_JSON_BEGIN, "}", "[TOOL_CALLS]", calls_begin="[TOOL_CALLS][", separator=", ",
                              calls_end="]"),
                   has_short_ids=True, template_markers=("[TOOL_CALLS]",)),
    ToolCallFormat("granite", ("<|tool_call|>", "<tool_call>"), {"{": read_object_call},
                   ToolMarkup(_JSON_BEGIN, "}", "<|tool_call|>", calls_begin="<|tool_call|>[", separator=", ",
                              calls_end="]"),
                   close_marker="</tool_call>", template_markers=("<|tool_call|>", "<|start_of_role|>")),
    ToolCallFormat("hermes", ("<tool_call>",), {"{": read_object_call},
                   ToolMarkup(f"<tool_call>\n{_JSON_BEGIN}", "}\n</tool_call>", "<tool_call>", separator="\n"),
                   close_marker="</tool_call>", template_markers=("<tool_call>",)),
    ToolCallFormat("pythonic", ("<|python_start|>", "<|python_tag|>"), {FUNCTION_NAME: read_python_call},
                   ToolMarkup("NAME(", ")", "[", "python", NAME_PATTERN, calls_begin="[", separator=", ",
                              calls_end="]"),
                   close_marker="<|python_end|>", bare_start_chars="[",
                   template_markers=("func_name1(", "<|python_start|>")),
    ToolCallFormat("llama3_json", ("<|python_tag|>",), {"{": partial(read_object_call, needs_arguments=True)},
                   ToolMarkup('{"name": NAME, "parameters": ', "}", '{"name": ', separator="; "),
                   bare_start_chars="{", template_markers=("<|python_tag|>", '"parameters": ')),
)}
# fmt: on


def resolve_formats(
    call_setting: str, reasoning_setting: str, template: ChatTemplate | None
) -> tuple[str | None, str | None]:
    """Return the name of a model's tool call format, and of its reasoning format.

    A setting is the name of a format, "none", or "auto" for the first format whose markers occur in the chat template.
    A result is None if there is no format: tool calls, or reasoning, are then left in the text.
    """
    try:
        template_text = "" if template is None else template.select_source(has_tools=True)
    except RequestError:  # the template has several variants and no default
        template_text = ""
    call_format = choose_format(call_setting, CALL_FORMATS, template_text)
    reasoning_format = choose_format(reasoning_setting, REASONING_FORMATS, template_text)
    return call_format, reasoning_format


def choose_format(
    setting: str, formats: Mapping[str, ToolCallFormat] | Mapping[str, ReasoningFormat], template_text: str
) -> str | None:
    """Return the name of the format that a setting chooses, by the chat template for "auto"; None if there is none."""
    if setting != "auto":
        return None if setting == "none" else setting
    for name, format in formats.items():
        if any(marker in template_text for marker in format.template_markers):
            return name
    return None


def initial_reasoning_state(format: ReasoningFormat, prompt: str, continued_text: str | None) -> ReasoningState:
    """Return whether an answer begins before, inside or after its reasoning, by the text that comes before the answer.

    For example, a chat template may end the prompt with "<think>": the answer then begins inside.

    `prompt`: at least the end of the prompt. `continued_text`: text of the message that the answer continues, if any.
    """
    if continued_text:
        open_position = max(continued_text.rfind(marker) for marker in format.open_markers)
        close_position = max(continued_text.rfind(marker) for marker in format.close_markers)
        was_opened = open_position > close_position
        was_never_closed = close_position < 0
        return "inside" if was_opened or (format.starts_inside and was_never_closed) else "after"
    prompt_end = prompt.rstrip()
    if prompt_end.endswith(format.close_markers):
        return "after"
    if prompt_end.endswith(format.open_markers) or format.starts_inside:
        return "inside"
    return "before"
