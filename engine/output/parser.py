"""Split the generated text of one sequence into reasoning, text and tool calls, and find where it must stop. No I/O.

The output after a number of tokens depends on these tokens alone, so another worker can continue an answer from its
tokens.
"""

from __future__ import annotations

import msgspec

from engine.output.delta_builder import ChoiceDelta, DeltaBuilder
from engine.output.formats import (
    CALL_FORMATS,
    FUNCTION_NAME,
    REASONING_FORMATS,
    ReasoningState,
    ToolCallFormat,
)
from engine.output.growing_text import SPACE, DelimiterScanner, GrowingText, Steps
from engine.output.json_calls import NAME_PATTERN
from engine.output.schema_types import ParameterTypes
from engine.output.stop_strings import StopStrings
from engine.types import SamplingParams

SPACES_MAX = 64
"""Most white space before a marker that opens reasoning."""


class OutputParserConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the parser that splits the generated text of a request into reasoning, text and tool calls."""

    reasoning_format: str | None = None
    """Name of the format in which the model writes reasoning, such as "qwen3"; None: reasoning is left in the text."""
    initial_state: ReasoningState = "after"
    """Whether the answer begins before, inside or after its reasoning."""
    shows_reasoning: bool = True
    call_format: str | None = None
    """Name of the format in which the model writes tool calls; None: calls are left in the text."""
    parameter_types: ParameterTypes = {}
    """JSON types of the tools' parameters, for call formats that write values without types."""
    single_call: bool = False
    """Whether tool calls after the first are dropped."""
    requires_call: bool = False
    """Whether the answer must be tool calls and nothing else. Stop strings do not apply then."""
    names_function: bool = False
    """Whether the request names the function to call. The finish reason is then not "tool_calls", as with OpenAI."""

    @property
    def special_markers(self) -> frozenset[str]:
        """Markup that detokenization must not drop, although a tokenizer may have it as special tokens."""
        markers: list[str] = []
        if self.reasoning_format is not None:
            reasoning_format = REASONING_FORMATS[self.reasoning_format]
            markers += [*reasoning_format.open_markers, *reasoning_format.close_markers]
        if self.call_format is not None:
            markers += CALL_FORMATS[self.call_format].special_markers
        return frozenset(markers)


class OutputParser:
    """Splits the generated text of one sequence into reasoning, text and tool calls, as it grows.

    Reasoning comes first. Stop strings apply after it, and outside of calls. The `_read_*` methods are generators: each
    yields when it needs text that the model has not written yet, and goes on at the same place after the next `push`.
    """

    def __init__(self, config: OutputParserConfig, params: SamplingParams) -> None:
        """Create the parser of one sequence. `params` has the stop strings, which end the answer."""
        self.config = config
        self.stop_string: str | None = None
        """Stop string that ended the text."""
        stops = () if config.requires_call else params.stop
        self._stop_strings = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._source = GrowingText()

        call_format = None if config.call_format is None else CALL_FORMATS[config.call_format]
        self._call_format = call_format
        self._call_scanner = DelimiterScanner(() if call_format is None else call_format.open_markers)
        self._delta = DeltaBuilder(has_short_ids=call_format is not None and call_format.has_short_ids)

        self._reasoning_state: ReasoningState = "after" if config.reasoning_format is None else config.initial_state
        self._reasoning_has_just_opened = False
        self._reasoning_steps = self._read_reasoning()
        self._answer_steps = self._read_answer()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that was pushed last belongs to reasoning."""
        return self._reasoning_state == "inside" and not self._reasoning_has_just_opened

    @property
    def has_tool_calls(self) -> bool:
        return self._delta.call_count > 0

    def push(self, text: str, *, may_stop: bool) -> None:
        """Parse the next piece of the text, and add what it says to the delta.

        Of the piece "true.</think>Yes", the reader of reasoning takes "true.", and the reader of the answer gets "Yes".
        `may_stop`: whether a stop string may end the answer here, which min_tokens delays.
        """
        self._reasoning_has_just_opened = False
        if not self._has_reasoning_ended():
            self._source.push(text)
            next(self._reasoning_steps, None)  # the reader goes on where it waited for text
            if not self._has_reasoning_ended():
                return
            text = self._source.take_all()
        self._push_answer(self._cut_at_stop_string(text, may_stop=may_stop))

    def _push_answer(self, text: str) -> None:
        """Have the reader of the answer go on with its next text."""
        self._source.push(text)
        next(self._answer_steps)

    def _cut_at_stop_string(self, text: str, *, may_stop: bool) -> str:
        """Return the next text of the answer up to its stop string, and without an end that may begin one.

        That end is held back until more text has come: "E" may become "END". A tool call has no stop strings, so what
        was held back before it is returned at once.
        """
        if self._stop_strings is None:
            return text
        if self._delta.is_in_call:
            return self._stop_strings.flush() + text
        text, self.stop_string = self._stop_strings.push(text, may_stop=may_stop)
        return text

    def finish(self) -> None:
        """Parse the end of the text. What looked like the beginning of a marker or of a stop string is text."""
        if not self._has_reasoning_ended():
            self._source.is_complete = True
            next(self._reasoning_steps, None)
        elif self._stop_strings is not None:
            self._push_answer(self._stop_strings.flush())
        self._source.is_complete = True
        next(self._answer_steps, None)
        self._delta.finish()

    def build_delta(self) -> ChoiceDelta:
        """Return the text, reasoning and calls since the last call, as far as the client gets them."""
        delta = self._delta.build()
        if not self.config.shows_reasoning:
            delta.reasoning = ""
        if self.config.single_call:
            delta.tool_calls = [call for call in delta.tool_calls if call.index == 0]
        return delta

    def _has_reasoning_ended(self) -> bool:
        return self._reasoning_state == "after"

    # Reasoning --------------------------------------------------------------------------------------------------------

    def _read_reasoning(self) -> Steps[None]:
        """Read the reasoning, such as `<think>...</think>`, if the answer begins with it. Its markers are dropped.

        In some formats a tool call ends the reasoning, too. The marker that opens the call is not taken then.
        """
        assert self.config.reasoning_format is not None, "without a format, an answer begins after its reasoning"
        reasoning_format = REASONING_FORMATS[self.config.reasoning_format]
        has_open_marker = yield from self._read_open_marker(reasoning_format.open_markers)
        if has_open_marker:
            self._reasoning_state = "inside"
            self._reasoning_has_just_opened = True
        if self._reasoning_state == "inside":
            call_markers: tuple[str, ...] = ()
            if reasoning_format.ends_at_call and self._call_format is not None:
                call_markers = self._call_format.open_markers
            end_scanner = DelimiterScanner((*reasoning_format.close_markers, *call_markers))
            end_marker = yield from end_scanner.take_until(self._source, self._delta.add_reasoning)
            if not end_marker:
                self._delta.add_reasoning(self._source.take_all())
            elif end_marker not in call_markers:
                self._source.take_chars(len(end_marker))
        self._reasoning_state = "after"

    def _read_open_marker(self, open_markers: tuple[str, ...]) -> Steps[bool]:
        """Take the marker that opens reasoning, and white space before it. Return False, and take nothing, without one.

        The marker may come in pieces: after "<thi", this yields until more text has come; after "<the", it returns
        False.
        """
        source = self._source
        while True:
            text = source.text.lstrip()
            space_chars = len(source.text) - len(text)
            if space_chars > SPACES_MAX:
                return False
            for marker in open_markers:
                if text.startswith(marker):
                    source.take_to(space_chars + len(marker))
                    return True
            may_become_marker = any(marker.startswith(text) for marker in open_markers)
            if not may_become_marker or not (yield from source.wait_for_more()):
                return False

    # Text and tool calls ----------------------------------------------------------------------------------------------

    def _read_answer(self) -> Steps[None]:
        """Read what follows the reasoning: text and calls in turn."""
        while self._call_format is None:
            self._delta.add_plain_text(self._source.take_all())
            if self._source.is_complete:
                return
            yield
        while (yield from self._read_text(self._call_format)):
            yield from self._read_calls(self._call_format)

    def _read_text(self, call_format: ToolCallFormat) -> Steps[bool]:
        """Read plain text up to a marker that may open a tool call. Return False if the text ends without one.

        From the marker on, `source` holds a copy of all that is taken. If no call follows, the copy becomes text after
        all.
        """
        source, delta = self._source, self._delta
        # In some formats an answer may begin with a call without any marker, such as `{"name": "f"}`.
        while delta.is_at_start and call_format.bare_start_chars:
            delta.add_text(source.take_spaces())
            char = yield from source.peek()
            if char and char in call_format.bare_start_chars:
                source.start_holding()
                return True
            if not char or char not in SPACE:
                break
        marker = yield from self._call_scanner.take_until(source, delta.add_text)
        if not marker:
            delta.add_text(source.take_all())
            return False
        source.start_holding()
        if marker not in call_format.readers:  # a marker that begins the call itself is left for the call's reader
            source.take_chars(len(marker))
        return True

    def _read_calls(self, format: ToolCallFormat) -> Steps[None]:
        """Read consecutive tool calls and the markup around them, up to the first text that is neither.

        Examples are `<tool_call>{"name": "f"}</tool_call>` and `[f(a=1), g()]`. `source` holds a copy of what was taken
        since the last call. If no call follows, the copy becomes text.
        """
        source = self._source
        has_call = False
        is_in_array = False
        while True:
            separators = SPACE + ",;" if has_call else SPACE
            char = yield from source.peek_after_spaces(separators)
            marker = yield from source.peek_any(format.call_markers)
            is_call_marker = marker != "" and marker not in format.readers
            if is_call_marker:  # it closes the calls, or opens further ones
                self._take_call_marker(marker, format, has_call=has_call)
                if marker == format.close_marker:
                    return
                has_call = False
                is_in_array = False
            elif has_call and self._ends_within(format.close_marker):  # the answer was cut in its last marker
                source.stop_holding()
                source.take_all()
                return
            elif char == "[" and not has_call and not is_in_array:
                is_in_array = True
                source.take_chars(1)
            elif char == "]" and has_call and is_in_array:
                is_in_array = False
                source.take_chars(1)
                source.start_holding()
            else:
                is_call = yield from self._read_call(format, marker, char)
                if not is_call:
                    self._revert_to_text()
                    return
                has_call = True

    def _read_call(self, format: ToolCallFormat, marker: str, next_char: str) -> Steps[bool]:
        """Read one tool call, which begins with `marker` or `next_char`. Return False if the text is no call."""
        call_start = marker or next_char
        if call_start not in format.readers and NAME_PATTERN.match(next_char):
            call_start = FUNCTION_NAME
        if not next_char or call_start not in format.readers:
            return False
        is_call = yield from format.readers[call_start](self._source, self._delta, self.config.parameter_types)
        if is_call:
            self._delta.end_call()
            self._source.start_holding()
        return is_call

    def _take_call_marker(self, marker: str, format: ToolCallFormat, *, has_call: bool) -> None:
        """Take the marker that closes a group of calls, or opens another one. Markup without a call becomes text."""
        source = self._source
        if not has_call:
            self._revert_to_text()
        if marker != format.close_marker:
            source.start_holding()
            source.take_chars(len(marker))
            return
        source.stop_holding()
        close_marker = source.take_chars(len(marker))
        if not has_call:
            self._delta.add_text(close_marker)

    def _ends_within(self, marker: str) -> bool:
        """Return whether the whole text ends with the beginning of a marker, or with nothing more."""
        return self._source.is_complete and marker.startswith(self._source.text[self._source.position :])

    def _revert_to_text(self) -> None:
        """Make text of the held markup, because no call follows it."""
        self._delta.end_call()
        self._delta.is_at_start = False
        self._delta.add_text(self._source.stop_holding())
