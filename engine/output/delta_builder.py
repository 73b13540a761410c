"""Collect answer text, reasoning and tool calls as a parser finds them, and make deltas of them. No I/O."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import msgspec

from engine.types import TokenLogprobs

SHORT_ID_CHARS = 9


@dataclass(slots=True)
class ToolCallDelta:
    """Piece of one tool call; the first piece has the call's name and id."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


class ChoiceDelta(msgspec.Struct, gc=False):
    """New part of an answer, as a stream sends it: text, reasoning, pieces of tool calls, tokens and logprobs.

    Text that may become a stop string or markup is held back, so the tokens may be ahead of the text.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    """At most one piece of each tool call."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """Logprobs of `token_ids`, which a formatter removes once it has formatted them."""
    prompt_logprobs: list[TokenLogprobs | None] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    should_abort: bool = False
    """Whether the caller must abort the sequence: a stop string ended the answer, but the engine core still runs it."""


@dataclass(slots=True)
class _PendingCall:
    """Piece of one tool call, whose arguments still grow."""

    index: int
    name: str | None
    arguments: list[str] = field(default_factory=list)


class DeltaBuilder:
    """Collects what a parser finds in one sequence, until the next delta is built.

    White space beside a call is part of the call's markup and left out.
    """

    def __init__(self, *, has_short_ids: bool = False) -> None:
        """Create an empty builder. `has_short_ids`: tool call ids have nine characters, as Mistral's templates need."""
        self._has_short_ids = has_short_ids

        # Content for the next delta.
        self._texts: list[str] = []
        self._reasoning_texts: list[str] = []
        self._pending_calls: list[_PendingCall] = []
        self._pending_spaces: list[str] = []
        """White space at the end of the text, which is dropped if a tool call, or the end after one, follows."""
        self._texts_in_call: list[str] = []
        """Text that came within a tool call. It is added after the call, because clients end a call at text."""

        # Position in the answer.
        self.call_count = 0
        self.is_in_call = False
        self.is_at_start = True
        """Whether no text but white space has come."""
        self._follows_call = False
        """Whether nothing but white space has come since a call began or ended."""

    def add_reasoning(self, text: str) -> None:
        self._reasoning_texts.append(text)

    def add_plain_text(self, text: str) -> None:
        """Add text of an answer that cannot have calls: all white space stays."""
        self._texts.append(text)

    def add_text(self, text: str) -> None:
        """Add text of an answer that may have calls."""
        if self.is_in_call:
            self._texts_in_call.append(text)
            return
        stripped_text = text.rstrip()
        if stripped_text:
            self._texts += [*self._pending_spaces, stripped_text]
            self._pending_spaces = []
            self.is_at_start = self._follows_call = False
        if len(text) > len(stripped_text):
            self._pending_spaces.append(text[len(stripped_text) :])

    def begin_call(self, name: str) -> None:
        """Begin a call of the function `name`."""
        self._pending_calls.append(_PendingCall(self.call_count, name))
        self.call_count += 1
        self.is_in_call = True
        self._leave_out_spaces()

    def add_arguments(self, json_piece: str) -> None:
        """Add the next characters of the JSON of the current call's arguments."""
        if not json_piece:
            return
        if not self._pending_calls:
            self._pending_calls.append(_PendingCall(self.call_count - 1, None))
        self._pending_calls[-1].arguments.append(json_piece)

    def end_call(self) -> None:
        """End the open call, if there is one, complete or not."""
        if self.is_in_call:
            self.is_in_call = False
            self._leave_out_spaces()
            inner_text, self._texts_in_call = "".join(self._texts_in_call), []
            self.add_text(inner_text.rstrip())

    def finish(self) -> None:
        """End the text: white space at its end is text, unless a call stands before it."""
        if not self._follows_call:
            self._texts += self._pending_spaces
        self._pending_spaces = []

    def build(self) -> ChoiceDelta:
        """Return the text, reasoning and calls since the last call. The first piece of a call gets the call's id."""
        calls = []
        for call in self._pending_calls:
            call_id = None if call.name is None else self._make_call_id()
            calls.append(ToolCallDelta(call.index, "".join(call.arguments), call.name, call_id))
        delta = ChoiceDelta("".join(self._texts), "".join(self._reasoning_texts), calls)
        self._texts, self._reasoning_texts, self._pending_calls = [], [], []
        return delta

    def _leave_out_spaces(self) -> None:
        self._pending_spaces = []
        self._follows_call = True

    def _make_call_id(self) -> str:
        hex_id = uuid.uuid4().hex
        return hex_id[:SHORT_ID_CHARS] if self._has_short_ids else f"chatcmpl-tool-{hex_id}"
