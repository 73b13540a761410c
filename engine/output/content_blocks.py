"""Split a choice into blocks of reasoning, text and tool calls, in their order, for two of the APIs. No I/O.

Invariants: at most one block is open; a block that was stopped does not grow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.output.choice import Choice
from engine.output.delta_builder import ChoiceDelta

BlockKind = Literal["reasoning", "text", "call"]


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
        """Text so far; for a call, the JSON of its arguments."""
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

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self._current_block: ContentBlock | None = None

    def push(self, delta: ChoiceDelta) -> list[BlockEvent]:
        """Add a delta, and return the changes of the blocks, in the order in which they happen.

        Only the first piece of a tool call has a name. So pieces without a name continue the open call, which ends
        before the delta's reasoning and text. Calls that begin in this delta come after these.
        """
        events: list[BlockEvent] = []
        continued_calls = [call for call in delta.tool_calls if call.name is None]
        for call in continued_calls:
            self._append_text("call", call.arguments, events)
        if delta.reasoning:
            self._append_text("reasoning", delta.reasoning, events)
        if delta.text:
            self._append_text("text", delta.text, events)
        for call in delta.tool_calls:
            if call.name is not None:
                self._start_block(ContentBlock("call", len(self.blocks), id=call.id or "", name=call.name), events)
                self._append_text("call", call.arguments, events)
        return events

    def finish(self) -> list[BlockEvent]:
        """Stop the last block. An empty answer has one empty block of text, because some clients expect one."""
        events: list[BlockEvent] = []
        if not self.blocks:
            self._start_block(ContentBlock("text", 0), events)
        self._stop_block(events)
        return events

    def _append_text(self, kind: BlockKind, text: str, events: list[BlockEvent]) -> None:
        if self._current_block is None or self._current_block.kind != kind:
            self._start_block(ContentBlock(kind, len(self.blocks)), events)
        assert self._current_block is not None
        if text:
            self._current_block.texts.append(text)
            events.append(BlockEvent("delta", self._current_block, text))

    def _start_block(self, block: ContentBlock, events: list[BlockEvent]) -> None:
        self._stop_block(events)
        self.blocks.append(block)
        self._current_block = block
        events.append(BlockEvent("start", block))

    def _stop_block(self, events: list[BlockEvent]) -> None:
        if self._current_block is not None:
            events.append(BlockEvent("stop", self._current_block))
            self._current_block = None


def make_blocks_of_choice(choice: Choice) -> list[ContentBlock]:
    """Return the blocks of a choice that collected its whole text."""
    blocks = ContentBlocks()
    blocks.push(ChoiceDelta(choice.text, choice.reasoning, choice.tool_calls))
    blocks.finish()
    return blocks.blocks
