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
        self._current_block: ContentBlock | None = None
        self._input_decoder = CustomInputDecoder()
        """Decoder of the last custom call's input."""

    def push(self, delta: ChoiceDelta) -> list[BlockEvent]:
        """Add the next piece of an answer, and return the block events that it causes, in order.

        Only the first piece of a tool call has a name. A piece without a name continues the call that is open, so it
        comes before new reasoning and text. Calls that begin in this delta come last.
        """
        events: list[BlockEvent] = []
        for call in delta.tool_calls:
            continues_open_call = call.name is None
            if continues_open_call:
                self._append_text(call.arguments, events)
        if delta.reasoning:
            self._continue_block("reasoning", delta.reasoning, events)
        if delta.text:
            self._continue_block("text", delta.text, events)
        for call in delta.tool_calls:
            if call.name is not None:
                kind: BlockKind = "custom_call" if call.name in self._custom_tools else "call"
                self._start_block(ContentBlock(kind, len(self.blocks), id=call.id or "", name=call.name), events)
                self._append_text(call.arguments, events)
        return events

    def finish(self) -> list[BlockEvent]:
        """Stop the last block. An empty answer has one empty block of text, because some clients expect one."""
        events: list[BlockEvent] = []
        if not self.blocks:
            self._start_block(ContentBlock("text", 0), events)
        self._stop_block(events)
        return events

    def add_whole_choice(self, choice: Choice) -> None:
        """Add a choice that collected its whole text, and stop the last block."""
        self.push(ChoiceDelta(choice.text, choice.reasoning, choice.tool_calls))
        self.finish()

    def _continue_block(self, kind: BlockKind, text: str, events: list[BlockEvent]) -> None:
        """Append text to the open block, or to a new one if that is of another kind."""
        if self._current_block is None or self._current_block.kind != kind:
            self._start_block(ContentBlock(kind, len(self.blocks)), events)
        self._append_text(text, events)

    def _append_text(self, text: str, events: list[BlockEvent]) -> None:
        """Append text to the open block. Of a custom call, only the decoded input is appended."""
        block = self._current_block
        assert block is not None, "the first piece of a call has its name"
        self._add_delta(block, self._input_decoder.push(text) if block.kind == "custom_call" else text, events)

    def _add_delta(self, block: ContentBlock, text: str, events: list[BlockEvent]) -> None:
        """Append text to a block, unless it is empty, and report it."""
        if text:
            block.texts.append(text)
            events.append(BlockEvent("delta", block, text))

    def _start_block(self, block: ContentBlock, events: list[BlockEvent]) -> None:
        self._stop_block(events)
        self.blocks.append(block)
        self._current_block = block
        if block.kind == "custom_call":
            self._input_decoder = CustomInputDecoder()
        events.append(BlockEvent("start", block))

    def _stop_block(self, events: list[BlockEvent]) -> None:
        block = self._current_block
        if block is None:
            return
        if block.kind == "custom_call":
            self._add_delta(block, self._input_decoder.finish(), events)
        events.append(BlockEvent("stop", block))
        self._current_block = None
