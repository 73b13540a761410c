"""A naive index and a random world of engines for it: the oracle of the lockstep tests.

The model keeps, for each holder, how often each (group, tier, block) is resident, a block being its whole token prefix
and where it starts, and finds the usable prefix by trying every length from the longest down. It knows the truth about
every name, so it has no parents, no parking and no digests that could be wrong.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from events.types import AllBlocksCleared, BlockRemoved, BlockStored, Event

Prefix = tuple[int, ...]
MEDIA_TIERS = ("GPU", "CPU", "STORAGE", "REMOTE")


@dataclass(frozen=True)
class GroupSpec:
    idx: int | None
    kind: str | None
    size: int
    window: int | None = None


@dataclass
class ModelHolder:
    """Ground truth of one worker."""

    specs: tuple[GroupSpec, ...]
    resident: Counter[tuple[int | None, str, Prefix, int]] = field(default_factory=Counter)
    spoken: set[int | None] = field(default_factory=set)

    def store(self, spec: GroupSpec, tier: str, prefix: Prefix, size: int) -> None:
        self.resident[spec.idx, tier, prefix, size] += 1

    def remove(self, spec: GroupSpec, tier: str, prefix: Prefix, size: int) -> None:
        key = (spec.idx, tier, prefix, size)
        if self.resident[key]:
            self.resident[key] -= 1

    def clear(self) -> None:
        self.resident.clear()

    def restart(self) -> None:
        self.resident.clear()
        self.spoken.clear()

    def usable(self, prompt: Prefix, tiers: tuple[str, ...] = MEDIA_TIERS) -> int:
        """Largest p <= len(prompt) - 1 at which every group that has spoken can resume, by brute force."""
        specs = [spec for spec in self.specs if spec.idx in self.spoken]
        if not specs:
            return 0
        for p in range(len(prompt) - 1, 0, -1):
            boundary = any(self._has(spec, prompt[:p], size, tiers) for spec in specs for size in self._sizes(spec))
            if boundary and all(self._resumes(spec, prompt[:p], tiers) for spec in specs):
                return p
        return 0

    def _has(self, spec: GroupSpec, prefix: Prefix, size: int, tiers: tuple[str, ...]) -> bool:
        return any(self.resident[spec.idx, tier, prefix, size] > 0 for tier in tiers)

    def _sizes(self, spec: GroupSpec) -> set[int]:
        return {size for (idx, _, _, size), copies in self.resident.items() if idx == spec.idx and copies}

    def _resumes(self, spec: GroupSpec, prefix: Prefix, tiers: tuple[str, ...]) -> bool:
        p = len(prefix)
        if spec.kind == "mamba":
            return any(self._has(spec, prefix, size, tiers) for size in self._sizes(spec))
        if spec.kind == "sliding_window":
            assert spec.window is not None
            return self._covers(spec, prefix, max(0, p - spec.window + 1), tiers)
        if spec.kind == "chunked_local_attention":
            assert spec.window is not None
            return self._covers(spec, prefix, p // spec.window * spec.window, tiers)
        return self._covers(spec, prefix, 0, tiers)

    def _covers(self, spec: GroupSpec, prefix: Prefix, first: int, tiers: tuple[str, ...]) -> bool:
        """Do blocks that end at len(prefix) and follow on each other reach back to `first`?"""
        if len(prefix) <= first:
            return True
        return any(
            size <= len(prefix)
            and self._has(spec, prefix, size, tiers)
            and self._covers(spec, prefix[: len(prefix) - size], first, tiers)
            for size in self._sizes(spec)
        )


class World:
    """Turns small random numbers into events, and tells the model the truth about them."""

    def __init__(self, specs: tuple[GroupSpec, ...], named_by_bytes: bool = False) -> None:
        self.model = ModelHolder(specs)
        self.full = next(spec for spec in specs if spec.kind in (None, "full_attention"))
        self._names: dict[tuple[Prefix, int], int] = {}
        self._bytes = named_by_bytes
        # Where one group cuts prompts in several ways, a prefix can be covered by other blocks than a run's parent, and
        # a run whose parent is gone is not to be placed by anybody: there, runs follow blocks that are resident.
        self._mixed = len({spec.size for spec in specs if spec.idx == self.full.idx}) > 1

    def _resident(self, prefix: Prefix, size: int) -> bool:
        return any(copies for (_, _, held, n), copies in self.model.resident.items() if (held, n) == (prefix, size))

    def name(self, prefix: Prefix, size: int) -> Any:
        """Opaque, stable, unique. One name per (prefix, block length), shared by the groups, as in vLLM."""
        number = self._names.setdefault((prefix, size), len(self._names) * 7919 + 1)
        return number.to_bytes(32, "big") if self._bytes else (number << 40 | number) & (1 << 64) - 1

    def store(self, spec: GroupSpec, tier: str, prompt: Prefix, first: int, count: int) -> list[Event]:
        """Blocks [first, first + count) of the prompt, cut into the group's size.

        Other groups speak after full attention has: without it nobody can tell where their blocks stand.
        """
        size = spec.size
        if spec.idx != self.full.idx and self.full.idx not in self.model.spoken:
            return []
        if self._mixed and not self._resident(prompt[: first * size], size):
            first = 0
        ends = [end for end in range((first + 1) * size, (first + count) * size + 1, size) if end <= len(prompt)]
        if not ends:
            return []
        self.model.spoken.add(spec.idx)
        for end in ends:
            self.model.store(spec, tier, prompt[:end], size)
        start = ends[0] - size
        parent = self.name(prompt[:start], size) if start else None
        names = [self.name(prompt[:end], size) for end in ends]
        return [self._event(spec, tier, names, parent, prompt[start : ends[-1]])]

    def store_sparse(self, spec: GroupSpec, tier: str, prompt: Prefix, mask: int) -> list[Event]:
        """The whole prompt's tokens, but only some of its blocks: what vLLM does for windows and states.

        Only where full attention spells the same names out; otherwise nobody could know which blocks they are.
        """
        size = spec.size
        if self.full.idx not in self.model.spoken or self.full.size != size or spec.idx == self.full.idx:
            return []
        ends = list(range(size, len(prompt) + 1, size))
        kept = [end for i, end in enumerate(ends) if mask >> i & 1]
        if not ends or len(kept) == len(ends):
            return []
        self.model.spoken.add(spec.idx)
        for end in kept:
            self.model.store(spec, tier, prompt[:end], size)
        return [self._event(spec, tier, [self.name(prompt[:end], size) for end in kept], None, prompt[: ends[-1]])]

    def remove(self, spec: GroupSpec, tier: str, prompt: Prefix, block: int) -> list[Event]:
        end = (block + 1) * spec.size
        if end > len(prompt):
            return []
        self.model.remove(spec, tier, prompt[:end], spec.size)
        return [BlockRemoved([self.name(prompt[:end], spec.size)], tier, spec.idx)]

    def clear(self) -> list[Event]:
        self.model.clear()
        return [AllBlocksCleared()]

    def _event(self, spec: GroupSpec, tier: str, names: list[Any], parent: Any, tokens: Prefix) -> BlockStored:
        return BlockStored(
            names, parent, list(tokens), spec.size, None, tier, None,
            group_idx=spec.idx, kv_cache_spec_kind=spec.kind, kv_cache_spec_sliding_window=spec.window,
        )  # fmt: skip
