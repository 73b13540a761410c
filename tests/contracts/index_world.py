"""A random world of engines for the index: turns small random numbers into the events that a worker would send.

It keeps what is resident, for each (group, tier, block), a block being its whole token prefix and its length, so that
what it says is what an engine could say.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from events.types import AllBlocksCleared, BlockRemoved, BlockStored, Event
from router.index.protocol import DumpPart, HolderId, PrefixIndex

Prefix = tuple[int, ...]


def dump(index: PrefixIndex, holder: HolderId) -> list[DumpPart]:
    """All of what a holder holds."""
    dumping, parts = index.begin_dump(holder), list[DumpPart]()
    while (slice_parts := dumping.step()) is not None:
        parts += slice_parts
    return parts


@dataclass(frozen=True)
class GroupSpec:
    idx: int | None
    kind: str | None
    size: int
    window: int | None = None


class World:
    """Events of one worker whose cache groups are `specs`."""

    def __init__(self, specs: tuple[GroupSpec, ...], named_by_bytes: bool = False) -> None:
        self.specs = specs
        self.resident: Counter[tuple[int | None, str, Prefix, int]] = Counter()
        self.announced_groups: set[int | None] = set()
        self.full = next(spec for spec in specs if spec.kind in (None, "full_attention"))
        self._names: dict[tuple[Prefix, int], int] = {}
        self._names_are_bytes = named_by_bytes
        # Where one group cuts prompts in several ways, a prefix can be covered by other blocks than a run's parent, and
        # a run whose parent is gone is not to be placed by anybody: there, runs follow blocks that are resident.
        self._has_mixed_sizes = len({spec.size for spec in specs if spec.idx == self.full.idx}) > 1

    def _resident(self, prefix: Prefix, size: int) -> bool:
        return any(
            copies
            for (_, _, resident_prefix, resident_size), copies in self.resident.items()
            if (resident_prefix, resident_size) == (prefix, size)
        )

    def name(self, prefix: Prefix, size: int) -> Any:
        """Opaque, stable, unique. One name per (prefix, block length), shared by the groups, as in vLLM."""
        number = self._names.setdefault((prefix, size), len(self._names) * 7919 + 1)
        return number.to_bytes(32, "big") if self._names_are_bytes else (number << 40 | number) & (1 << 64) - 1

    def store(self, spec: GroupSpec, tier: str, prompt: Prefix, first: int, count: int) -> list[Event]:
        """Blocks [first, first + count) of the prompt, cut into the group's size.

        Other groups speak after full attention has: without it nobody can tell where their blocks stand.
        """
        size = spec.size
        if spec.idx != self.full.idx and self.full.idx not in self.announced_groups:
            return []
        if self._has_mixed_sizes and not self._resident(prompt[: first * size], size):
            first = 0
        ends = [end for end in range((first + 1) * size, (first + count) * size + 1, size) if end <= len(prompt)]
        if not ends:
            return []
        self.announced_groups.add(spec.idx)
        for end in ends:
            self.resident[spec.idx, tier, prompt[:end], size] += 1
        start = ends[0] - size
        parent = self.name(prompt[:start], size) if start else None
        names = [self.name(prompt[:end], size) for end in ends]
        return [self._event(spec, tier, names, parent, prompt[start : ends[-1]])]

    def store_sparse(self, spec: GroupSpec, tier: str, prompt: Prefix, mask: int) -> list[Event]:
        """The whole prompt's tokens, but only some of its blocks: what vLLM does for windows and states.

        Only where full attention spells the same names out; otherwise nobody could know which blocks they are.
        """
        size = spec.size
        if self.full.idx not in self.announced_groups or self.full.size != size or spec.idx == self.full.idx:
            return []
        ends = list(range(size, len(prompt) + 1, size))
        stored_ends = [end for i, end in enumerate(ends) if mask >> i & 1]
        if not ends or len(stored_ends) == len(ends):
            return []
        self.announced_groups.add(spec.idx)
        for end in stored_ends:
            self.resident[spec.idx, tier, prompt[:end], size] += 1
        return [
            self._event(spec, tier, [self.name(prompt[:end], size) for end in stored_ends], None, prompt[: ends[-1]])
        ]

    def store_without_group(self, spec: GroupSpec, tier: str, prompt: Prefix, count: int, foreign: bool) -> list[Event]:
        """The prompt's first blocks, of no group: what LMCache's connector sends, under `foreign` names of its own."""
        ends = [end for end in range(spec.size, count * spec.size + 1, spec.size) if end <= len(prompt)]
        names = [self.name((-1, *prompt[:end]) if foreign else prompt[:end], spec.size) for end in ends]
        tokens = list(prompt[: ends[-1]]) if ends else []
        return [BlockStored(names, None, tokens, spec.size, None, tier, None)] if ends else []

    def store_bare(self, spec: GroupSpec, tier: str, prompt: Prefix, mask: int) -> list[Event]:
        """Names without tokens: what vLLM's offloading sends, with and without the group and the size."""
        ends = [end for i, end in enumerate(range(spec.size, len(prompt) + 1, spec.size)) if mask >> i & 1]
        names = [self.name(prompt[:end], spec.size) for end in ends]
        size, group = (spec.size if mask & 256 else 0), (spec.idx if mask & 512 else None)
        return [BlockStored(names, None, [], size, None, tier, None, group_idx=group)]

    def store_partial(self, spec: GroupSpec, tier: str, prompt: Prefix, block: int, skipped_count: int) -> list[Event]:
        """A block that is not full: one token, and `skipped` before it, behind the last full one (vLLM)."""
        start = block * spec.size
        end = start + skipped_count + 1
        if end > len(prompt):
            return []
        event = self._event(
            spec, tier, [self.name(prompt[:end], 1)], self.name((-2, *prompt[:end]), 1), prompt[end - 1 : end]
        )
        event.block_size = 1
        event.skipped_parent_block_hash = self.name(prompt[:start], spec.size) if start else None
        event.skipped_token_ids = list(prompt[start : end - 1])
        return [event]

    def remove_without_group(self, spec: GroupSpec, tier: str, prompt: Prefix, block: int) -> list[Event]:
        return [BlockRemoved([self.name(prompt[: (block + 1) * spec.size], spec.size)], tier, None)]

    def remove(self, spec: GroupSpec, tier: str, prompt: Prefix, block: int) -> list[Event]:
        end = (block + 1) * spec.size
        if end > len(prompt):
            return []
        self.resident -= Counter([(spec.idx, tier, prompt[:end], spec.size)])
        return [BlockRemoved([self.name(prompt[:end], spec.size)], tier, spec.idx)]

    def clear(self) -> list[Event]:
        self.resident.clear()
        return [AllBlocksCleared()]

    def _event(self, spec: GroupSpec, tier: str, names: list[Any], parent: Any, tokens: Prefix) -> BlockStored:
        return BlockStored(
            names, parent, list(tokens), spec.size, None, tier, None,
            group_idx=spec.idx, kv_cache_spec_kind=spec.kind, kv_cache_spec_sliding_window=spec.window,
        )  # fmt: skip
