"""What the cache has to tell the world: noted on the step's thread, written out as events on another.

A step notes which nodes changed and takes the notes as `StepEvents`; whoever reads those, the publisher on its own
thread, makes the events. Behind a step that reads a model's weights nothing of a block is in the CPU's caches, so what
is not looked at there is saved. Refuses to know the tree. Invariant: events come in the order of the changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.cache.nodes import Node
from engine.cache.spec import MAMBA, CacheSpec
from events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from events.hashing import unpack_token_ids

Note = tuple[bool, int, list[Node]] | None
"""(stored?, kind, nodes); None: all cleared."""


class EventLog:
    """Notes in the order the changes happened, neighbours of a chain joined, until somebody takes them."""

    def __init__(self, spec: CacheSpec) -> None:
        self.block_size = spec.block_size
        self.kinds = [(g.kind, g.sliding_window) for g in spec.groups]
        """(`kv_cache_spec_kind`, sliding window) of each kind of block."""
        if spec.state is not None:
            self.kinds.append((MAMBA, None))
        self._joined = [kind != MAMBA for kind, _ in self.kinds]
        """Whether blocks of a chain go into one event."""
        self._notes: list[Note] = []

    def stored(self, kind: int, node: Node) -> None:
        notes = self._notes
        if notes and self._joined[kind] and (last := notes[-1]) and last[0] and last[1] == kind:
            nodes = last[2]
            if nodes[-1] is node.parent:
                nodes.append(node)
                return
        notes.append((True, kind, [node]))

    def removed(self, kind: int, node: Node) -> None:
        last = self._notes[-1] if self._notes else None
        if last and not last[0] and last[1] == kind:
            last[2].append(node)
        else:
            self._notes.append((False, kind, [node]))

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
        return len(self._notes)

    def __iter__(self) -> Iterator[Event]:
        return map(self._event, self._notes)

    def __contains__(self, event: object) -> bool:
        return any(event == own for own in self)

    def _event(self, note: Note) -> Event:
        if note is None:
            return AllBlocksCleared()
        stored, kind, nodes = note
        hashes: list[int | bytes] = [node.hash for node in nodes]
        if not stored:
            return BlockRemoved(block_hashes=hashes, medium=GPU, group_idx=kind)
        first, (kind_name, window) = nodes[0], self._log.kinds[kind]
        token_ids = unpack_token_ids(b"".join([node.name.packed for node in nodes]))
        assert len(token_ids) == len(hashes) * self._log.block_size
        return BlockStored(
            hashes,
            None if first.parent is None else first.parent.hash,
            token_ids,
            self._log.block_size,
            None,  # lora_id
            GPU,
            first.name.lora_name,
            [node.name.extra_keys for node in nodes],
            kind,
            kind_name,
            window,
        )
