"""Working sets: the prompts that each worker's cache should keep. They tell the price where room is short. No I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LIVE_S: Final = 90.0
"""Seconds after its last use in which a prompt is expected to come back. With 300 s, routing is worse than without
working sets."""
CHUNK_TOKENS: Final = 256
"""Tokens of a chunk, the unit in which prompts are compared."""


@dataclass(slots=True, eq=False)
class _CacheUsage:
    """Working set of one target beside the size of its cache."""

    capacity_tokens: int
    idle_chunk_count: int = 0
    """Number of reused chunks that no running request has here."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """Last use of one chunk of a prompt."""

    usage: _CacheUsage
    """Working set of the target to which the chunk was sent last."""
    used_at_s: float
    only_session: str | None
    """The session that used the chunk, if no other did."""
    is_reused: bool = False
    """Whether the chunk was used at least twice."""
    is_running: bool = True
    """Whether a running request has the chunk at that target, in memory that cannot be evicted."""

    @property
    def is_idle(self) -> bool:
        """Whether the chunk counts in `usage`."""
        return self.is_reused and not self.is_running


class WorkingSets:
    """Working set (Denning, 1968) of each worker: prompts that were sent there last, at least twice, and not long ago.

    A prompt that came back is likely to come back again. One that was not seen for `live_s` seconds is likely over.
    So a worker needs room for all prompt tokens that were used before, the last time there and within `live_s`, and
    for all that its running requests hold. If it needs more than its capacity, the prompts that live there evict each
    other in turn, and each is computed again when it returns. That is a cost of sending one more prompt there, beside
    the time of its own prefill.

    A prefix that several prompts share counts once, and only at the worker that got it last.

    Invariants: `_chunks` is in the order of last use. `idle_chunk_count` is the number of idle chunks with that usage.
    `_free_tokens_min` is at most the least room of any worker beside its idle chunks.
    """

    def __init__(self, *, live_s: float = LIVE_S, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens, self._live_s = chunk_tokens, live_s
        self._usage_by_target: dict[str, _CacheUsage] = {}
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        """Chunk key (digest of the prompt up to the end of the chunk) -> its last use, the oldest first."""
        self._free_tokens_min = 0
        self._expired_at_s = 0.0

    # Targets -----------------------------------------------------------------------------------------------------
    def set_capacity(self, target: str, tokens: int | None) -> None:
        """Set the size of a target's cache; None if it is unknown: the cache is then assumed to be large enough."""
        if tokens is None:
            self.clear(target)
            self._usage_by_target.pop(target, None)
        elif target in self._usage_by_target:
            self._usage_by_target[target].capacity_tokens = tokens
        else:
            self._usage_by_target[target] = _CacheUsage(tokens)
        self._update_free_tokens_min()

    def clear(self, target: str) -> None:
        """Forget what was sent to a target, because its worker restarted with an empty cache."""
        usage = self._usage_by_target.get(target)
        if usage is None:
            return
        for key in [key for key, chunk in self._chunks.items() if chunk.usage is usage]:
            del self._chunks[key]
        usage.idle_chunk_count = 0
        self._update_free_tokens_min()

    # Requests ----------------------------------------------------------------------------------------------------
    def add_prompt(self, target: str, keys: Sequence[int], now: float, *, session: str | None = None) -> None:
        """Record that a prompt was sent to a target, where it runs now. `keys` are the keys of the prompt's chunks."""
        usage = self._usage_by_target.get(target)
        if usage is None:
            return
        chunks = self._chunks
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                chunks[key] = _Chunk(usage, now, session)
                continue
            chunk.usage.idle_chunk_count -= chunk.is_idle
            chunk.usage, chunk.used_at_s, chunk.is_reused, chunk.is_running = usage, now, True, True
            if chunk.only_session != session:
                chunk.only_session = None
            chunks.move_to_end(key)

    def end_prompt(self, target: str, keys: Sequence[int]) -> None:
        """Record that no running request at a target has the chunks with these keys any more."""
        usage = self._usage_by_target.get(target)
        if usage is None:
            return
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.usage is usage and chunk.is_running:
                chunk.is_running = False
                usage.idle_chunk_count += chunk.is_reused
        self._free_tokens_min = min(self._free_tokens_min, self._compute_free_tokens(usage))

    def end_session(self, keys: Sequence[int], session: str) -> None:
        """Forget the chunks of a prompt that only this session used, because the session is over."""
        chunks = self._chunks
        for key in keys:
            chunk = chunks.get(key)
            if chunk is not None and chunk.only_session == session:
                chunk.usage.idle_chunk_count -= chunk.is_idle
                del chunks[key]

    # Questions of the price --------------------------------------------------------------------------------------
    def may_overflow(self, tokens: float, now: float) -> bool:
        """Return whether any target may lack room for `tokens` beside its idle chunks; if not, none overflows."""
        if now - self._expired_at_s >= 1.0:
            self._expire(now)
        return tokens > max(self._free_tokens_min, 0) and bool(self._usage_by_target)

    def compute_overflow_shares(
        self,
        targets: Sequence[str],
        cached_shares: Sequence[float],
        held_tokens: Sequence[float],
        keys: Sequence[int],
        tokens: int,
    ) -> list[float]:
        """Return for each target the share (0 to 1) of a prompt that would find no room in its cache.

        `cached_shares` is the share of the prompt that each target has cached and that needs no more room.
        `held_tokens` are those that running requests hold at each target, without the prompt's own."""
        idle_chunk_count_by_usage: Counter[_CacheUsage] = Counter()
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.is_idle:
                idle_chunk_count_by_usage[chunk.usage] += 1
        overflow_shares = []
        for target, cached_share, held in zip(targets, cached_shares, held_tokens):
            usage = self._usage_by_target.get(target)
            if usage is None:
                overflow_shares.append(0.0)
                continue
            idle_tokens = (usage.idle_chunk_count - idle_chunk_count_by_usage[usage]) * self.chunk_tokens
            missing_tokens = idle_tokens + held + tokens - usage.capacity_tokens
            overflow_shares.append(min(max(missing_tokens, 0) / tokens, 1.0 - cached_share))
        return overflow_shares

    def check_invariants(self) -> None:
        """Assert that counts agree with what they count, and that chunks are in the order of last use."""
        idle_counts = Counter(chunk.usage for chunk in self._chunks.values() if chunk.is_idle)
        for name, usage in self._usage_by_target.items():
            idle_count, free_tokens = idle_counts[usage], self._compute_free_tokens(usage)
            assert usage.idle_chunk_count == idle_count, (
                f"{name}: {usage.idle_chunk_count} chunks counted, {idle_count} idle"
            )
            assert self._free_tokens_min <= free_tokens, f"{name}: {free_tokens} free < {self._free_tokens_min}"
        last_use_times_s = [chunk.used_at_s for chunk in self._chunks.values()]
        assert last_use_times_s == sorted(last_use_times_s)
        usages = set(self._usage_by_target.values())
        assert all(chunk.usage in usages for chunk in self._chunks.values())

    def _expire(self, now: float) -> None:
        """Forget the chunks that were not used for `live_s`."""
        self._expired_at_s = now
        oldest_s = now - self._live_s
        chunks = self._chunks
        while chunks:
            key, chunk = next(iter(chunks.items()))
            if chunk.used_at_s >= oldest_s:
                break
            del chunks[key]
            chunk.usage.idle_chunk_count -= chunk.is_idle
        self._update_free_tokens_min()

    def _compute_free_tokens(self, usage: _CacheUsage) -> int:
        return usage.capacity_tokens - usage.idle_chunk_count * self.chunk_tokens

    def _update_free_tokens_min(self) -> None:
        self._free_tokens_min = min(map(self._compute_free_tokens, self._usage_by_target.values()), default=0)
