"""A naive model of the cache's memory: bytes, labels and sets, recomputed from scratch at every question.

It knows the page arithmetic (unit, sub-block, bytes) but none of the pool's structures, and so can be believed.
"""

from __future__ import annotations

from collections import Counter

from engine.cache.blocks import Node
from engine.cache.kv_cache import KVCache
from engine.cache.spec import CacheSpec
from engine.types import CopyDirection, Sequence, StepPlan
from events.hashing import unpack_token_ids


class Memory:
    """Byte ranges of units and what they hold; writing a range wipes whatever overlaps it.

    A state is a tuple of the tokens it has seen, a KV block a list with such a tuple a position.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.contents: dict[int, dict[tuple[int, int], object]] = {}

    def span(self, kind: int, block: int) -> tuple[int, tuple[int, int]]:
        if kind == len(self.spec.groups):
            assert self.spec.state is not None
            return block, (0, self.spec.state.state_bytes)
        size = self.spec.block_bytes(kind)
        unit, slot = divmod(block, self.spec.unit_bytes // size)
        return unit, (slot * size, (slot + 1) * size)

    def write(self, kind: int, block: int, content: object) -> None:
        unit, (start, end) = self.span(kind, block)
        assert end <= self.spec.unit_bytes
        ranges = self.contents.setdefault(unit, {})
        for other in [r for r in ranges if r[0] < end and start < r[1]]:
            del ranges[other]
        ranges[start, end] = content

    def read(self, kind: int, block: int) -> object:
        unit, span = self.span(kind, block)
        return self.contents.get(unit, {}).get(span)


class NaiveCache:
    """Running sequences, what their blocks must hold, and what a pool of this size must be able to give."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.spec = cache.spec
        self.memory = Memory(cache.spec)
        self.host = Memory(cache.spec)
        self.state_kind = len(self.spec.groups)
        self.pinned_blocks: set[tuple[int, int]] = set()
        """(kind, block) held by the step being planned; once it is over, only table entries count."""
        self.computed_nodes: dict[tuple[int, int], Node] = {}
        """(kind, hash) of everything computed that either memory had at the last check, or a reset or failure since."""
        self.had_room = False
        """Whether host memory had room then for all that the device could hand down."""

    # ------------------------------------------------------------------ computing

    def execute(self, plan: StepPlan) -> None:
        """Do what a device would: moves, restores, resets; then write all chunks; then copy checkpoints."""
        state = self.state_kind
        memories = {CopyDirection.WITHIN_DEVICE: (self.memory,) * 2, CopyDirection.TO_HOST: (self.memory, self.host),
                    CopyDirection.FROM_HOST: (self.host, self.memory)}  # fmt: skip
        for kind, source, destination, way in plan.block_copies:
            read_memory, write_memory = memories[way]
            write_memory.write(kind, destination, read_memory.read(kind, source))
        for unit in plan.state_resets:
            self.memory.write(state, unit, ())
        size = self.spec.block_size
        for chunk in plan.chunks:
            tokens = chunk.seq.token_ids
            for group in range(state):
                for index in range(chunk.start // size, -(-chunk.end // size)):
                    block = chunk.seq.block_tables[group][index]
                    start, end = max(chunk.start, index * size), min(chunk.end, (index + 1) * size)
                    old = self.memory.read(group, block)
                    slots = list(old) if isinstance(old, list) else [None] * size
                    for position in range(start, end):
                        slots[position % size] = tuple(tokens[: position + 1])
                    self.memory.write(group, block, slots)
            if chunk.seq.state_unit is not None:
                before = self.memory.read(state, chunk.seq.state_unit)
                assert before == tuple(tokens[: chunk.start]), f"state of {before} resumed at {chunk.start}"
                self.memory.write(state, chunk.seq.state_unit, tuple(tokens[: chunk.end]))
        for chunk in plan.chunks:
            self.check_readable(chunk.seq, chunk.start, chunk.end)
        for kind, source, destination, _ in plan.state_checkpoints:
            assert kind == state
            self.memory.write(state, destination, self.memory.read(state, source))

    def check_readable(self, seq: Sequence, start: int, end: int) -> None:
        """Everything that queries at [start, end) look at holds the KV of exactly this prefix."""
        size = self.spec.block_size
        for group, spec in enumerate(self.spec.groups):
            first = 0 if spec.sliding_window is None else max(0, start - spec.sliding_window + 1)
            for position in range(first, end):
                slots = self.memory.read(group, seq.block_tables[group][position // size])
                assert isinstance(slots, list), f"group {group}: position {position} was overwritten"
                assert slots[position % size] == tuple(seq.token_ids[: position + 1]), f"foreign KV at {position}"

    def check_cached(self) -> None:
        """Every named block, held or not, has the bytes of its prefix, wherever moves and merges brought it."""
        size = self.spec.block_size
        seen_hashes: set[int] = set()
        seen_blocks: set[tuple[int, int, bool]] = set()
        for node in self.cache.tree.nodes():
            assert node.hash not in seen_hashes
            seen_hashes.add(node.hash)
            packed_ids = b""
            at = node
            while at is not None:
                packed_ids = at.key.packed_tokens + packed_ids
                at = at.parent  # type: ignore[assignment]
            prefix = tuple(unpack_token_ids(packed_ids))
            tiers = [(kind, block, False) for kind, block in enumerate(node.blocks)]
            tiers += [(kind, block, True) for kind, block in enumerate(node.host_blocks)]
            for kind, block, on_host in tiers:
                if block is None or block.is_pending:
                    continue
                number = block.unit.index if kind == self.state_kind else block.id
                assert (kind, number, on_host) not in seen_blocks, "two hashes on one block"
                seen_blocks.add((kind, number, on_host))
                content = (self.host if on_host else self.memory).read(kind, number)
                start = len(prefix) - size
                expected_content = prefix if kind == self.state_kind else [prefix[: start + i + 1] for i in range(size)]
                assert content == expected_content, f"block {number} of kind {kind} does not hold what its hash says"

    def check_kept(self) -> None:
        """Nothing computed loses its last copy while host memory has room, but a state that a deeper one replaced."""
        now = {
            (kind, node.hash): node
            for node in self.cache.tree.nodes()
            for blocks in (node.blocks, node.host_blocks)
            for kind, block in enumerate(blocks)
            if block is not None and not block.is_pending
        }
        lost_keys = self.computed_nodes.keys() - now.keys()
        if self.had_room and lost_keys:
            replaced_keys = set[int]()
            for (kind, _), node in now.items():
                while kind == self.state_kind and node.parent is not None:
                    node = node.parent
                    replaced_keys.add(node.hash)
            for kind, hash_ in lost_keys:
                assert kind == self.state_kind, f"a block of kind {kind} is nowhere"
                assert hash_ in replaced_keys, "a state is nowhere"
        self.computed_nodes = now
        self.had_room = self.cache.host_tier.pool.free_units >= 2 * len(self.cache.pool.units)

    def forget(self) -> None:
        """A reset or a failed step may lose anything."""
        self.computed_nodes = {}

    # ------------------------------------------------------------------ capacity

    def live(self) -> list[set[int]]:
        """Blocks of every kind that somebody needs, read off the tables."""
        size = self.spec.block_size
        blocks_in_use: list[set[int]] = [set() for _ in range(self.state_kind + (self.spec.state is not None))]
        for seq in self.cache._blocks_by_sequence:
            for group, table in enumerate(seq.block_tables):
                window = self.spec.groups[group].sliding_window
                first = 0 if window is None else max(0, seq.computed_tokens - window + 1) // size
                blocks_in_use[group].update(table[first:])
            if seq.state_unit is not None:
                blocks_in_use[self.state_kind].add(seq.state_unit)
        for kind, block in self.pinned_blocks:
            blocks_in_use[kind].add(block)
        return blocks_in_use

    def has_room(self, extra_blocks: list[int]) -> bool:
        """Whether `more[k]` blocks of every kind fit beside the live ones, with all else gone and all packed."""
        units = 0
        for kind, blocks in enumerate(self.live()):
            per_unit = 1 if kind == self.state_kind else self.spec.blocks_per_unit(kind)
            units += -(-(len(blocks) + extra_blocks[kind]) // per_unit)
        return units <= len(self.cache.pool.units)

    def demand(self, blocks: int, step_tokens_max: int) -> list[int]:
        """Blocks of every kind that a sequence of `blocks` holds at most while it computes so many tokens a step."""
        size = self.spec.block_size
        step = -(-step_tokens_max // size) + 1
        windows = [group.sliding_window for group in self.spec.groups]
        counts = [blocks if w is None else min(blocks, -(-(w - 1) // size) + step) for w in windows]
        return [*counts, 1] if self.spec.state is not None else counts

    # ------------------------------------------------------------------ structure

    def check_structure(self) -> None:
        """Units hold one kind; references are table entries; nothing overlaps."""
        pool = self.cache.pool
        kinds_of_unit: dict[int, set[int]] = {}
        references: Counter[tuple[int, int]] = Counter()
        for seq in self.cache._blocks_by_sequence:
            size = self.spec.block_size
            for group, table in enumerate(seq.block_tables):
                window = self.spec.groups[group].sliding_window
                first = 0 if window is None else max(0, seq.computed_tokens - window + 1) // size
                for block in table[first:]:
                    references[group, block] += 1
            if seq.state_unit is not None:
                references[self.state_kind, seq.state_unit] += 1
        for kind, block in references:
            per_unit = 1 if kind == self.state_kind else self.spec.blocks_per_unit(kind)
            kinds_of_unit.setdefault(block // per_unit, set()).add(kind)
        for node in self.cache.tree.nodes():
            assert node.parent is None or node.parent.has_computed(0) or node.parent.has_host_block(0), "prefix closure"
            assert node.has_computed(0) or node.has_host_block(0), "prefix closure"
            if any(node.blocks):
                assert node.has_computed(0), "prefix closure of the device"
                assert node.parent is None or node.parent.has_computed(0), "prefix closure of the device"
            for kind, block_of_kind in enumerate(node.blocks):
                if block_of_kind is not None:
                    kinds_of_unit.setdefault(block_of_kind.unit.index, set()).add(kind)
        assert all(len(kinds) == 1 for kinds in kinds_of_unit.values()), "a unit of two kinds"
        for unit in pool.units:
            assert (unit.kind is None) == (unit.index not in kinds_of_unit), (
                f"unit {unit.index} is lost or claimed twice"
            )
            for block in unit.blocks:
                number = unit.index if unit.kind == self.state_kind else block.id
                reference_count = references[block.kind, number]
                assert block.ref_count == reference_count, f"{block!r}: {reference_count} table entries"
