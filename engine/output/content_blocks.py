"""Split a choice into blocks of reasoning, text and tool calls, in their order, for two of the APIs. No I/O.

Invariants: at most one block is open; a block that was stopped does not grow.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.output.choice import Choice
from engine.output.custom_input import CustomInputDecoder
from engine.output.delta_builder import ChoiceDelta

BlockKind = Literal["reasoning", "text", "call", "custom_call"]
"""A custom call has free text as its input, which the model writes inside of JSON."""


@dataclass(slots=True)
class ContentBlock:
    """One block of an answer: a stretch of reasoning, of text, or a tool call."""

    kind: BlockKind
    index: int
    """Position among the blocks of the answer."""
    id: str = ""
    """Id of a tool call; empty for other blocks."""
    name: str = ""
    """Name of the called function; empty for other blocks."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """JSON of the logprobs of the text's tokens, which a formatter adds if the request asks for them."""

    @property
    def text(self) -> str:
        """Text so far; for a call, the JSON of its arguments; for a custom call, its input."""
        return "".join(self.texts)


class BlockEvent(NamedTuple):
    """A change of one block."""

    action: Literal["start", "delta", "stop"]
    block: ContentBlock
    text: str = ""
    """Text that a delta adds."""


class ContentBlocks:
    """Splits a growing answer into blocks of one kind each, and reports how the blocks change.

    A delta with reasoning and a delta with text give the events: start of block 0, its delta, its stop, start of block
    1, its delta. `finish` stops block 1.
    """

    def __init__(self, custom_tools: Collection[str] = ()) -> None:
        """`custom_tools`: names of the tools whose calls are custom calls."""
        self.blocks: list[ContentBlock] = []
        self._custom_tools = custom_tools
        self._open_block: ContentBlock | None = None
        self._input_decoder = CustomInputDecoder()
        """Decoder of the last custom call's input."""
        self._events: list[BlockEvent] = []
        """Events that `push` or `finish` is about to return."""

    def push(self, delta: ChoiceDelta) -> list[BlockEvent]:
        """Add the next piece of an answer, and return the block events that it causes, in order.

        Only the first piece of a tool call has a name. A piece without a name continues the call that is open, so it
        comes before new reasoning and text. Calls that begin in this delta come last.
        """
        for call in delta.tool_calls:
            continues_open_call = call.name is None
            if continues_open_call:
                self._append_text(call.arguments)
        if delta.reasoning:
            self._continue_block("reasoning", delta.reasoning)
        if delta.text:
            self._continue_block("text", delta.text)
        for call in delta.tool_calls:
            if call.name is not None:
                kind: BlockKind = "custom_call" if call.name in self._custom_tools else "call"
                self._start_block(kind, call.id or "", call.name)
                self._append_text(call.arguments)
        return self._take_events()

    def finish(self) -> list[BlockEvent]:
        """Stop the last block. An empty answer has one empty block of text, because some clients expect one."""
        if not self.blocks:
            self._start_block("text")
        self._stop_block()
        return self._take_events()

    def add_whole_choice(self, choice: Choice) -> None:
        """Add a choice that collected its whole text, and stop the last block."""
        self.push(ChoiceDelta(choice.text, choice.reasoning, choice.tool_calls))
        self.finish()

    def _take_events(self) -> list[BlockEvent]:
        events, self._events = self._events, []
        return events

    def _continue_block(self, kind: BlockKind, text: str) -> None:
        """Append text to the open block, or to a new one if that is of another kind."""
        if self._open_block is None or self._open_block.kind != kind:
            self._start_block(kind)
        self._append_text(text)

    def _append_text(self, text: str) -> None:
        """Append text to the open block. Of a custom call, only the decoded input is appended."""
        block = self._open_block
        assert block is not None, "the first piece of a call has its name"
        self._add_delta(block, self._input_decoder.push(text) if block.kind == "custom_call" else text)

    def _add_delta(self, block: ContentBlock, text: str) -> None:
        if text:
            block.texts.append(text)
            self._events.append(BlockEvent("delta", block, text))

    def _start_block(self, kind: BlockKind, id: str = "", name: str = "") -> None:
        self._stop_block()
        self._open_block = ContentBlock(kind, len(self.blocks), id, name)
        self.blocks.append(self._open_block)
        if kind == "custom_call":
            self._input_decoder = CustomInputDecoder()
        self._events.append(BlockEvent("start", self._open_block))

    def _stop_block(self) -> None:
        block, self._open_block = self._open_block, None
        if block is not None:
            if block.kind == "custom_call":
                self._add_delta(block, self._input_decoder.finish())
            self._events.append(BlockEvent("stop", block))
