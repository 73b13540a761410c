"""What the cache has to tell the world: noted on the step's thread, written out as events on another.

A step notes which nodes changed and takes the notes as `StepEvents`; whoever reads those, the publisher on its own
thread, makes the events. Behind a step that reads a model's weights nothing of a block is in the CPU's caches, so what
is not looked at there is saved. Refuses to know the tree. Invariant: events come in the order of the changes, but for
what left host memory, which may be told before blocks that moved there since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from engine.cache.nodes import Node
from engine.cache.spec import MAMBA, CacheSpec
from events import CPU, GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from events.hashing import unpack_token_ids

STORED, REMOVED, MOVED, GONE = range(4)
"""On the device, from it, from it to the host, from the host."""
Note = tuple[int, int, Any] | None
"""(change, kind, nodes), of MOVED (change, 0, {(kind, node): None}); None: all cleared."""


class EventLog:
    """Notes in the order the changes happened, neighbours of a chain joined, until somebody takes them."""

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self.kinds = [(g.kind, g.sliding_window) for g in spec.groups]
        """(`kv_cache_spec_kind`, sliding window) of each kind of block."""
        if spec.state is not None:
            self.kinds.append((MAMBA, None))
        self.joined = [kind != MAMBA for kind, _ in self.kinds]
        """Whether blocks of a chain go into one event."""
        self._notes: list[Note] = []

    def stored(self, kind: int, node: Node) -> None:
        notes = self._notes
        if notes and self.joined[kind] and (last := notes[-1]) and last[0] == STORED and last[1] == kind:
            nodes = last[2]
            if nodes[-1] is node.parent:
                nodes.append(node)
                return
        notes.append((STORED, kind, [node]))

    def removed(self, kind: int, node: Node) -> None:
        last = self._notes[-1] if self._notes else None
        if last and last[0] == REMOVED and last[1] == kind:
            last[2].append(node)
        else:
            self._notes.append((REMOVED, kind, [node]))

    def moved(self, kind: int, node: Node) -> None:
        last = self._notes[-1] if self._notes else None
        if last is None or last[0] != MOVED:
            last = (MOVED, 0, {})
            self._notes.append(last)
        last[2][kind, node] = None

    def gone(self, kind: int, node: Node) -> None:
        """From the host, to make room for others mostly: so it is told before those, and they in one go."""
        at = len(self._notes)
        if at and (last := self._notes[-1]) and last[0] == MOVED and (kind, node) not in last[2]:
            at -= 1
        last = self._notes[at - 1] if at else None
        if last and last[0] == GONE and last[1] == kind:
            last[2].append(node)
        else:
            self._notes.insert(at, (GONE, kind, [node]))

    def cleared(self) -> None:
        self._notes.append(None)

    def take(self) -> StepEvents | None:
        """What was noted since the last call; None for nothing, as after most steps."""
        notes = self._notes
        if not notes:
            return None
        self._notes = []
        return StepEvents(notes, self)


class StepEvents(Collection[Event]):
    """What a step changed. Its events are made when it is iterated, by whichever thread does."""

    def __init__(self, notes: list[Note], log: EventLog) -> None:
        self._notes = notes
        self._log = log

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._notes)

    def __iter__(self) -> Iterator[Event]:
        return chain.from_iterable(map(self._events, self._notes))

    def __contains__(self, event: object) -> bool:
        return any(event == own for own in self)

    def _events(self, note: Note) -> Iterable[Event]:
        if note is None:
            return (AllBlocksCleared(),)
        change, kind, nodes = note
        if change == STORED:
            return (self._stored(kind, nodes, GPU),)
        if change == MOVED:
            return self._moved(nodes)
        return (_removed(kind, nodes, GPU if change == REMOVED else CPU),)

    def _moved(self, moved: Iterable[tuple[int, Node]]) -> Iterator[Event]:
        """Parents left the device last, and are told first."""
        by_kind: list[list[Node]] = [[] for _ in self._log.kinds]
        for kind, node in moved:
            by_kind[kind].append(node)
        for kind, nodes in enumerate(by_kind):
            run: list[Node] = []
            for node in reversed(nodes):
                if run and not (self._log.joined[kind] and node.parent is run[-1]):
                    yield self._stored(kind, run, CPU)
                    run = []
                run.append(node)
            if run:
                yield self._stored(kind, run, CPU)
        for kind in range(len(by_kind) - 1, -1, -1):
            if by_kind[kind]:
                yield _removed(kind, by_kind[kind], GPU)

    def _stored(self, kind: int, nodes: list[Node], medium: str) -> BlockStored:
        hashes: list[int | bytes] = [node.hash for node in nodes]
        first, (kind_name, window) = nodes[0], self._log.kinds[kind]
        token_ids = unpack_token_ids(b"".join([node.key.packed_tokens for node in nodes]))
        assert len(token_ids) == len(hashes) * self._log.block_size
        return BlockStored(
            hashes,
            None if first.parent is None else first.parent.hash,
            token_ids,
            self._log.block_size,
            None,  # lora_id
            medium,
            first.key.lora_name,
            [node.key.extra_keys for node in nodes],
            kind,
            kind_name,
            window,
        )


def _removed(kind: int, nodes: list[Node], medium: str) -> BlockRemoved:
    return BlockRemoved(block_hashes=[node.hash for node in nodes], medium=medium, group_idx=kind)
