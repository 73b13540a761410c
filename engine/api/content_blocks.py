"""What one choice says as blocks in their order: thoughts, texts, calls. Two APIs answer in such blocks.

Pure. Invariants: one block is open at a time; a block that was closed grows no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.api.choice import Choice, ChoiceDelta

BlockKind = Literal["thought", "text", "call"]
BlockEvent = tuple[Literal["begins", "grows", "ends"], "ContentBlock", str]
"""What happens to a block; by what it grows."""


@dataclass(slots=True)
class ContentBlock:
    """`index`: its place among the blocks of its answer. `id`, `name`: of a call."""

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All so far; of a call its arguments, as JSON."""
        return "".join(self.texts)


class ContentBlocks:
    """Of one choice, while it grows."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._open: ContentBlock | None = None

    def push(self, piece: ChoiceDelta) -> list[BlockEvent]:
        steps: list[BlockEvent] = []
        if piece.thought:
            self._grow("thought", piece.thought, steps)
        if piece.text:
            self._grow("text", piece.text, steps)
        for call in piece.calls:
            if call.name is not None:
                self._begin(ContentBlock("call", len(self.all), id=call.id or "", name=call.name), steps)
            self._grow("call", call.arguments, steps)
        return steps

    def end(self) -> list[BlockEvent]:
        """Nothing follows. An answer that said nothing has one block of no text: some clients expect one."""
        steps: list[BlockEvent] = []
        if not self.all:
            self._begin(ContentBlock("text", 0), steps)
        self._close(steps)
        return steps

    def _grow(self, kind: BlockKind, text: str, steps: list[BlockEvent]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(ContentBlock(kind, len(self.all)), steps)
        assert self._open is not None
        if text:
            self._open.texts.append(text)
            steps.append(("grows", self._open, text))

    def _begin(self, block: ContentBlock, steps: list[BlockEvent]) -> None:
        self._close(steps)
        self.all.append(block)
        self._open = block
        steps.append(("begins", block, ""))

    def _close(self, steps: list[BlockEvent]) -> None:
        if self._open is not None:
            steps.append(("ends", self._open, ""))
            self._open = None


def blocks_of_choice(choice: Choice) -> list[ContentBlock]:
    """The blocks of a choice that was kept whole."""
    blocks = ContentBlocks()
    blocks.push(ChoiceDelta(choice.text, [], [], thought=choice.thought, calls=choice.calls))
    blocks.end()
    return blocks.all
