"""The table of docs/architecture.md that says how a block of memory changes: drawn from what the code does."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_history import EngineHistory

from engine.cache.blocks import Block
from engine.cache.device_tier import list_blocks_leaves_first
from engine.cache.kv_cache import KVCache

DOCS = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HISTORY_COUNT = 150
OPERATIONS = ("allocate", "acquire", "attach", "commit", "detach", "release", "evict", "reset")


class BlockState(enum.Enum):
    """Use of a block of memory. docs/architecture.md has the table of its changes."""

    HOLE = "hole"
    """No sequence holds the block, and it is not in the prefix tree."""
    PRIVATE = "private"
    """A sequence holds the block, and it is not in the prefix tree."""
    PENDING = "pending"
    """Sequences hold the block. It is in the prefix tree, but not announced, because a step has yet to compute it."""
    LIVE = "live"
    """Sequences hold the block. It is in the prefix tree, computed and announced."""
    CACHED = "cached"
    """No sequence holds the block. It is in the prefix tree: a prompt can use it until it is evicted."""


def get_state(block: Block) -> BlockState:
    if block.node is None:
        return BlockState.PRIVATE if block.ref_count else BlockState.HOLE
    if block.is_pending:
        return BlockState.PENDING
    return BlockState.LIVE if block.ref_count else BlockState.CACHED


class TransitionRecorder:
    """States of the device's blocks before and after every operation of a cache."""

    def __init__(self) -> None:
        self.next_states: dict[tuple[BlockState, str], set[BlockState]] = defaultdict(set)

    def watch(self, cache: KVCache) -> None:
        pool, tier, tree = cache.pool, cache.device_tier, cache.tree
        for owner, name in ((pool, "acquire"), (pool, "release"), (tier, "commit"), (tier, "detach")):
            self._replace(owner, name, lambda block: [block])
        self._replace(tier, "attach", lambda node, block: [block])
        self._replace(tier, "evict", lambda block: list_blocks_leaves_first(block.node) if block.kind == 0 else [block])
        self._replace(cache, "reset", lambda: [b for node in tree.nodes() for b in node.blocks if b is not None])
        pool._evict_block = tier.evict
        allocate = pool.allocate

        def record_allocate(kind: int) -> Block | None:
            block = allocate(kind)
            if block is not None:
                self.next_states[BlockState.HOLE, "allocate"].add(get_state(block))
            return block

        pool.allocate = record_allocate  # type: ignore[method-assign]

    def _replace(self, owner: Any, name: str, list_blocks: Callable[..., list[Block]]) -> None:
        """Record what an operation does to the blocks that its arguments name."""
        operation = getattr(owner, name)

        def record(*arguments: Any, **options: Any) -> Any:
            states = [(block, get_state(block)) for block in list_blocks(*arguments)]
            result = operation(*arguments, **options)
            for block, state in states:
                self.next_states[state, name].add(get_state(block))
            return result

        setattr(owner, name, record)

    def draw_table(self) -> str:
        """Return the table in Markdown: a row for each state, a column for each operation."""
        rows = [["", *(f"`{operation}`" for operation in OPERATIONS)], ["---"] * (len(OPERATIONS) + 1)]
        for state in BlockState:
            cells = [
                " or ".join(
                    other.value for other in BlockState if other in self.next_states.get((state, operation), ())
                )
                for operation in OPERATIONS
            ]
            rows.append([f"**{state.value}**", *cells])
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_the_table_of_the_docs_is_what_blocks_do() -> None:
    recorder = TransitionRecorder()
    for seed in range(HISTORY_COUNT):
        history = EngineHistory(seed)
        recorder.watch(history._core.scheduler.cache)
        history.play()
    table = recorder.draw_table()
    assert table in DOCS.read_text(), f"docs/architecture.md, The states of a block: expected\n{table}"
