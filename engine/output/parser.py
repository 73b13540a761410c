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
    ReasoningFormat,
    ReasoningState,
    ToolCallFormat,
)
from engine.output.growing_text import SPACE, DelimiterScanner, GrowingText, Steps
from engine.output.json_calls import NAME_PATTERN, CallReader
from engine.output.schema_types import ParameterTypes
from engine.output.stop_strings import StopStrings
from engine.types import SamplingParams

SPACES_MAX = 64
"""Most white space before a marker that opens reasoning."""


class OutputParserConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Says how the answers of one request are parsed, and which parts of them the client gets."""

    reasoning_format: str | None = None
    """Name in REASONING_FORMATS; None: reasoning is text."""
    initial_state: ReasoningState = "after"
    """Reasoning state at the beginning of an answer."""
    shows_reasoning: bool = True
    call_format: str | None = None
    """Name in CALL_FORMATS; None: calls are text."""
    parameter_types: ParameterTypes = {}
    single_call: bool = False
    """Calls after the first are dropped."""
    requires_call: bool = False
    """The answer is calls and nothing else, so stop strings do not apply."""
    names_function: bool = False
    """The request names the function to call: the finish reason is that of an answer without calls, as with OpenAI."""

    @property
    def special_markers(self) -> frozenset[str]:
        """Markup that stays in the text although a tokenizer may have it as special tokens."""
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
        """Begin before the first text. `params` has the stop strings, which do not apply if a call is required."""
        self.config = config
        self.stop_string: str | None = None
        """Stop string that ended the text."""
        self._call_format = None if config.call_format is None else CALL_FORMATS[config.call_format]
        reasoning_format = None if config.reasoning_format is None else REASONING_FORMATS[config.reasoning_format]
        open_markers: tuple[str, ...] = ()
        has_short_ids = False
        if self._call_format is not None:
            open_markers, has_short_ids = self._call_format.open_markers, self._call_format.has_short_ids
        self._open_markers = DelimiterScanner(open_markers)
        stops = () if config.requires_call else params.stop
        self._stop_strings = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._source = GrowingText()
        self._delta = DeltaBuilder(has_short_ids=has_short_ids)
        self._reasoning_state: ReasoningState = "after" if reasoning_format is None else config.initial_state
        self._reasoning_has_just_opened = False
        self._steps = self._read_output(reasoning_format)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that was pushed last belongs to reasoning."""
        return self._reasoning_state == "inside" and not self._reasoning_has_just_opened

    @property
    def has_tool_calls(self) -> bool:
        return self._delta.call_count > 0

    def push(self, text: str, *, may_stop: bool) -> None:
        """Parse the next text. `may_stop`: whether a stop string may end the answer here, which min_tokens delays."""
        self._reasoning_has_just_opened = False
        if not self._has_reasoning_ended():
            self._advance(text)
            if not self._has_reasoning_ended():
                return
            text = self._source.take_all()
        if self._stop_strings is not None and self._delta.is_in_call:
            text = self._stop_strings.flush() + text
        elif self._stop_strings is not None:
            text, self.stop_string = self._stop_strings.push(text, may_stop=may_stop)
        self._advance(text)

    def finish(self) -> None:
        """Parse the end of the text. What looked like the beginning of a marker or of a stop string is text."""
        if not self._has_reasoning_ended():
            self._source.is_complete = True
            next(self._steps)
        elif self._stop_strings is not None:
            self._advance(self._stop_strings.flush())
        self._source.is_complete = True
        next(self._steps, None)
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

    def _advance(self, text: str) -> None:
        """Give the parser more text, and let it read until it needs yet more."""
        self._source.push(text)
        next(self._steps)

    def _read_output(self, reasoning_format: ReasoningFormat | None) -> Steps[None]:
        """Read the whole answer: reasoning, then text and calls in turn. Yields once when the reasoning has ended."""
        if reasoning_format is not None and self._reasoning_state != "after":
            yield from self._read_reasoning(reasoning_format)
            self._reasoning_state = "after"
            yield
        if self._call_format is None:
            while True:
                self._delta.add_plain_text(self._source.take_all())
                if self._source.is_complete:
                    return
                yield
        while (yield from self._read_text(self._call_format)):
            yield from self._read_region(self._call_format)

    # Reasoning --------------------------------------------------------------------------------------------------------

    def _read_reasoning(self, reasoning_format: ReasoningFormat) -> Steps[None]:
        """Take the reasoning with its markers, up to its end. Takes nothing if the answer begins without reasoning.

        In some formats a tool call ends the reasoning, too. The call's marker is left to `_read_text`.
        """
        source = self._source
        has_open_marker = yield from self._read_open_marker(reasoning_format)
        if has_open_marker:
            self._reasoning_state = "inside"
            self._reasoning_has_just_opened = True
        elif self._reasoning_state == "before":
            return
        has_call_end = reasoning_format.ends_at_call
        call_markers = self._call_format.open_markers if has_call_end and self._call_format is not None else ()
        end_markers = DelimiterScanner((*reasoning_format.close_markers, *call_markers))
        marker = yield from end_markers.take_until(source, self._delta.add_reasoning)
        if not marker:
            self._delta.add_reasoning(source.take_all())
        elif marker not in call_markers:
            source.take(source.position + len(marker))

    def _read_open_marker(self, reasoning_format: ReasoningFormat) -> Steps[bool]:
        """Take white space and the marker that opens reasoning. Returns False, and takes nothing, for any other text.

        The marker may come in pieces. With "<think>" as the marker, "<thi" is waited for, and "<the" is other text.
        """
        source = self._source
        while True:
            text = source.text.lstrip()
            space_chars = len(source.text) - len(text)
            if space_chars > SPACES_MAX:
                return False
            for marker in reasoning_format.open_markers:
                if text.startswith(marker):
                    source.take(space_chars + len(marker))
                    return True
            if not any(marker.startswith(text) for marker in reasoning_format.open_markers):
                return False
            if not (yield from source.wait_for_more()):
                return False

    # Text and tool calls ----------------------------------------------------------------------------------------------

    def _read_text(self, call_format: ToolCallFormat) -> Steps[bool]:
        """Take text of the answer up to a marker that may begin a tool call, and return True; False at the text's end.

        From the marker on, the source also keeps a copy of what is taken: if no call follows the marker, that is added
        to the answer's text after all.
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
        marker = yield from self._open_markers.take_until(source, delta.add_text)
        if not marker:
            delta.add_text(source.take_all())
            return False
        source.start_holding()
        if marker not in call_format.readers:  # a marker that begins the call itself is left for the call's reader
            source.take(source.position + len(marker))
        return True

    def _read_region(self, format: ToolCallFormat) -> Steps[None]:
        """Read a region: tool calls and the markup around them, up to the first text that is neither.

        Examples are `<tool_call>{"name": "f"}</tool_call>` and `[f(a=1), g()]`. The source keeps a copy of what was
        taken since the last call. If no call follows, that was no markup, and is added to the answer's text.
        """
        source = self._source
        has_call = is_in_array = False
        while True:
            char = yield from source.peek_after_spaces(SPACE + ",;" if has_call else SPACE)
            marker = yield from source.peek_any(format.region_markers)
            if marker and marker not in format.readers:  # it closes the region, or opens another one
                self._take_region_marker(marker, format, has_call=has_call)
                if marker == format.close_marker:
                    return
                has_call = is_in_array = False
            elif has_call and self._ends_within(format.close_marker):  # the answer was cut in its last marker
                source.stop_holding()
                source.take_all()
                return
            elif char == "[" and not has_call and not is_in_array:
                is_in_array = True
                source.take(source.position + 1)
            elif char == "]" and has_call and is_in_array:
                is_in_array = False
                source.take(source.position + 1)
                source.start_holding()
            else:
                read_call = _select_reader(format, marker, char)
                if read_call is None or not (yield from read_call(source, self._delta, self.config.parameter_types)):
                    self._revert_to_text()
                    return
                self._delta.end_call()
                source.start_holding()
                has_call = True

    def _take_region_marker(self, marker: str, format: ToolCallFormat, *, has_call: bool) -> None:
        """Take the marker that closes a region, or that opens another one. A region without a call becomes text."""
        source = self._source
        if not has_call:
            self._revert_to_text()
        if marker != format.close_marker:
            source.start_holding()
            source.take(source.position + len(marker))
            return
        source.stop_holding()
        close_marker = source.take(source.position + len(marker))
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


def _select_reader(format: ToolCallFormat, marker: str, next_char: str) -> CallReader | None:
    """Return the reader of the call that begins with `marker`, or with a character; None if no call begins so."""
    if marker:
        return format.readers[marker]
    if next_char and next_char in format.readers:
        return format.readers[next_char]
    begins_name = NAME_PATTERN.match(next_char) is not None
    return format.readers.get(FUNCTION_NAME) if begins_name else None
