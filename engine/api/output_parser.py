"""What becomes of the text that one sequence generates: a thought, what is said, the calls; and where it must stop.

Stop strings are looked for in what follows the thought, and not inside of a call, which they would leave half. What
came out after a number of tokens depends on these tokens alone, so an answer goes on at another worker from its tokens.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.api.detokenizer import StopStrings
from engine.api.readers.json_calls import ParameterTypes
from engine.api.reasoning_parser import REASONING_FORMATS, ReasoningParser, ReasoningState, detect_reasoning_format
from engine.api.tool_calls import CALL_FORMATS, ToolCallDelta, ToolCallParser, detect_call_format
from engine.types import SamplingParams
from prompts import ChatTemplate, RequestError


def resolve_formats(calls: str, thought: str, template: ChatTemplate | None) -> tuple[str | None, str | None]:
    """Return the names in CALL_FORMATS and REASONING_FORMATS that two settings select.

    "auto" is what the chat template shows, "none" is None.
    """
    try:
        text = "" if template is None else template.source(has_tools=True)
    except RequestError:  # several, and none is the default
        text = ""
    shown = (detect_call_format(text), detect_reasoning_format(text))
    names = {"auto": None, "none": None}
    return (
        shown[0].name if calls == "auto" and shown[0] is not None else names.get(calls, calls),
        shown[1].name if thought == "auto" and shown[1] is not None else names.get(thought, thought),
    )


class OutputParserConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's answers are to be read."""

    thought: str | None = None
    """A name of REASONING_FORMATS; None: no thought is told apart."""
    place: ReasoningState = "after"
    """Where answers begin."""
    shows_thought: bool = True
    calls: str | None = None
    """A name of CALL_FORMATS; None: calls are text."""
    types: ParameterTypes = {}
    one_call: bool = False
    """More calls than one are not told."""
    must_call: bool = False
    """The answer is calls and nothing else: stop strings mean none of it."""
    is_named: bool = False
    """The function that must be called was named: the answer ends as any other, as with OpenAI."""

    @property
    def marks(self) -> frozenset[str]:
        """Markup that a tokenizer may have as special tokens, and must not leave out."""
        thought = (
            ()
            if self.thought is None
            else (*REASONING_FORMATS[self.thought].opens, *REASONING_FORMATS[self.thought].closes)
        )
        return frozenset((*thought, *(() if self.calls is None else CALL_FORMATS[self.calls].marks)))


@dataclass(slots=True)
class ParsedDelta:
    """What came out."""

    text: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    stop: str | None = None
    """The stop string that was found: nothing may follow."""


class OutputParser:
    """Of one choice."""

    def __init__(self, plan: OutputParserConfig, params: SamplingParams) -> None:
        self.plan = plan
        row = None if plan.calls is None else CALL_FORMATS[plan.calls]
        self._thought = None
        if plan.thought is not None:
            self._thought = ReasoningParser(
                REASONING_FORMATS[plan.thought], plan.place, () if row is None else row.opens
            )
        stops = params.stop if not plan.must_call else ()
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._calls = None if row is None else ToolCallParser(row, plan.types)

    @property
    def thinks(self) -> bool:
        """What was pushed last belongs to a thought."""
        return self._thought is not None and self._thought.place == "inside" and not self._thought.opened

    @property
    def has_called(self) -> bool:
        return self._calls is not None and self._calls.count > 0

    def push(self, piece: str, said: ParsedDelta, *, stops: bool) -> None:
        """The next of the text; what comes out is added to `said`. `stops`: a stop string may end it here."""
        if self._thought is not None:
            thought, piece = self._thought.push(piece)
            said.thought.append(thought)
        self._answer(piece, said, stops)

    def finish(self, said: ParsedDelta) -> None:
        """Nothing follows: what was held back."""
        if self._thought is not None:
            thought, rest = self._thought.release()
            said.thought.append(thought)
            self._answer(rest, said, stops=False)
        if self._stops is not None:
            self._parse(self._stops.release(), said)
        if self._calls is not None:
            self._tell(*self._calls.finish(), said)

    def _answer(self, piece: str, said: ParsedDelta, stops: bool) -> None:
        if self._stops is not None and self._calls is not None and self._calls.in_call:
            piece = self._stops.release() + piece
        elif self._stops is not None and stops:
            piece, said.stop = self._stops.push(piece)
        self._parse(piece, said)

    def _parse(self, piece: str, said: ParsedDelta) -> None:
        if self._calls is None:
            said.text.append(piece)
        elif piece:
            self._tell(*self._calls.push(piece), said)

    def _tell(self, text: str, calls: list[ToolCallDelta], said: ParsedDelta) -> None:
        said.text.append(text)
        said.calls += [call for call in calls if call.index == 0 or not self.plan.one_call]
