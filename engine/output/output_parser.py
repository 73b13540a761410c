"""Split the generated text of one sequence into reasoning, text and tool calls, and find where it must stop. Pure.

Stop strings count behind the reasoning and outside of calls, which they would cut in half. The result after a number of
tokens depends on these tokens alone, so another worker can continue an answer from its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.output.detokenizer import StopStrings
from engine.output.json_calls import ParameterTypes
from engine.output.reasoning_parser import REASONING_FORMATS, ReasoningParser, ReasoningState, detect_reasoning_format
from engine.output.tool_calls import CALL_FORMATS, ToolCallDelta, ToolCallParser, detect_call_format
from engine.types import SamplingParams
from prompts import ChatTemplate, RequestError


def resolve_formats(
    call_setting: str, reasoning_setting: str, template: ChatTemplate | None
) -> tuple[str | None, str | None]:
    """Return the names in CALL_FORMATS and REASONING_FORMATS that two settings select.

    "auto" is what the chat template shows, "none" is None.
    """
    try:
        text = "" if template is None else template.select_source(has_tools=True)
    except RequestError:  # several, and none is the default
        text = ""
    template_formats = (detect_call_format(text), detect_reasoning_format(text))
    names = {"auto": None, "none": None}
    return (
        template_formats[0].name
        if call_setting == "auto" and template_formats[0] is not None
        else names.get(call_setting, call_setting),
        template_formats[1].name
        if reasoning_setting == "auto" and template_formats[1] is not None
        else names.get(reasoning_setting, reasoning_setting),
    )


class OutputParserConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's answers are to be read."""

    reasoning_format: str | None = None
    """Name in REASONING_FORMATS; None: reasoning is not told from text."""
    initial_state: ReasoningState = "after"
    """Reasoning state at the beginning of an answer."""
    shows_reasoning: bool = True
    call_format: str | None = None
    """Name in CALL_FORMATS; None: calls are text."""
    parameter_types: ParameterTypes = {}
    single_call: bool = False
    """Calls after the first are dropped."""
    requires_call: bool = False
    """The answer is calls and nothing else: stop strings mean none of it."""
    names_function: bool = False
    """The function that must be called was named: the answer ends as any other, as with OpenAI."""

    @property
    def special_markers(self) -> frozenset[str]:
        """Markup that a tokenizer may have as special tokens, and must not leave out."""
        reasoning_markers = (
            ()
            if self.reasoning_format is None
            else (
                *REASONING_FORMATS[self.reasoning_format].open_markers,
                *REASONING_FORMATS[self.reasoning_format].close_markers,
            )
        )
        return frozenset(
            (*reasoning_markers, *(() if self.call_format is None else CALL_FORMATS[self.call_format].special_markers))
        )


@dataclass(slots=True)
class ParsedDelta:
    """Text, reasoning and calls that one push has completed."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    stop_string: str | None = None
    """Stop string that ended the answer."""


class OutputParser:
    """Parses the generated text of one choice."""

    def __init__(self, config: OutputParserConfig, params: SamplingParams) -> None:
        self.config = config
        call_format = None if config.call_format is None else CALL_FORMATS[config.call_format]
        self._reasoning_parser = None
        if config.reasoning_format is not None:
            self._reasoning_parser = ReasoningParser(
                REASONING_FORMATS[config.reasoning_format],
                config.initial_state,
                () if call_format is None else call_format.open_markers,
            )
        stops = params.stop if not config.requires_call else ()
        self._stop_strings = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._call_parser = None if call_format is None else ToolCallParser(call_format, config.parameter_types)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that was pushed last belongs to reasoning."""
        return (
            self._reasoning_parser is not None
            and self._reasoning_parser.state == "inside"
            and not self._reasoning_parser.has_just_opened
        )

    @property
    def has_tool_calls(self) -> bool:
        return self._call_parser is not None and self._call_parser.call_count > 0

    def push(self, text: str, delta: ParsedDelta, *, may_stop: bool) -> None:
        """Parse the next text and add what comes out to `delta`. `may_stop`: a stop string may end it here."""
        if self._reasoning_parser is not None:
            reasoning, text = self._reasoning_parser.push(text)
            delta.reasoning.append(reasoning)
        self._push_answer(text, delta, may_stop)

    def finish(self, delta: ParsedDelta) -> None:
        """Nothing follows: what was held back."""
        if self._reasoning_parser is not None:
            reasoning, text = self._reasoning_parser.flush()
            delta.reasoning.append(reasoning)
            self._push_answer(text, delta, may_stop=False)
        if self._stop_strings is not None:
            self._parse_calls(self._stop_strings.flush(), delta)
        if self._call_parser is not None:
            self._emit(*self._call_parser.finish(), delta)

    def _push_answer(self, text: str, delta: ParsedDelta, may_stop: bool) -> None:
        if self._stop_strings is not None and self._call_parser is not None and self._call_parser.is_in_call:
            text = self._stop_strings.flush() + text
        elif self._stop_strings is not None and may_stop:
            text, delta.stop_string = self._stop_strings.push(text)
        self._parse_calls(text, delta)

    def _parse_calls(self, text: str, delta: ParsedDelta) -> None:
        if self._call_parser is None:
            delta.text.append(text)
        elif text:
            self._emit(*self._call_parser.push(text), delta)

    def _emit(self, text: str, calls: list[ToolCallDelta], delta: ParsedDelta) -> None:
        delta.text.append(text)
        delta.calls += [call for call in calls if call.index == 0 or not self.config.single_call]
