"""What each worker's cache is needed for, so that the price can tell where a prompt would find no room. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LIVE_S: Final = 90.0
"""Seconds within which a prompt is expected to come back; 300 are worse than no working set at all."""
CHUNK_TOKENS: Final = 256
"""Prompts are compared in pieces of so many tokens."""
REUSE_MAX: Final = 5.0
"""Most times that a computed token is taken to be used again."""
REUSE_REQUESTS: Final = 500.0
"""Requests over which those times are averaged."""


@dataclass(slots=True, eq=False)
class _TargetUsage:
    """One target."""

    capacity_tokens: int
    reused_chunks: int = 0
    """Chunks that live there and were used before."""


class WorkingSets:
    """What each worker's cache is needed for: the prompts sent there last, twice at least, and not long ago (the
    working set of Denning, 1968).

    A prompt that came back is likely to come back again, longer; one that was not seen for a while is likely over. So
    the need of a worker is the number of prompt tokens that were used before and whose last use, within `live_s`, was
    there. Where it exceeds the capacity, prompts that live there push each other out in turn, and each return computes
    again what the other took: what a new prompt costs its neighbours is not in its own prefill time.

    Shared prefixes count once, and only where they were used last: a session that moves takes its need along. Nothing
    is assumed of an engine but that it keeps what was used last. Invariants: the chunks are in the order of their last
    use; a target's `reused_chunks` is the number of chunks that live there and were used before;
    `_free_tokens_min` is at most the least of capacity - need.
    """

    def __init__(self, *, live_s: float = LIVE_S, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens, self._live_s = chunk_tokens, live_s
        self._decay = 1.0 - 1.0 / REUSE_REQUESTS
        self._usages: dict[str, _TargetUsage] = {}
        self._chunks: OrderedDict[int, tuple[_TargetUsage, float, bool, str | None]] = OrderedDict()
        """key -> (where it was used last, when, whether it counts: it was used before, the only session that ever used
        it), oldest first."""
        self._free_tokens_min = 0
        self._expired_at_s = 0.0
        self._reused_tokens = 0.0
        self._computed_tokens = 0.0

    # Targets -----------------------------------------------------------------------------------------------------
    def set_capacity(self, target: str, tokens: int | None) -> None:
        """How much the target's cache holds; None where that is not known: it is then taken to be always enough."""
        if tokens is None:
            self.clear(target)
            self._usages.pop(target, None)
        elif target in self._usages:
            self._usages[target].capacity_tokens = tokens
        else:
            self._usages[target] = _TargetUsage(tokens)
        self._update_free_tokens_min()

    def clear(self, target: str) -> None:
        """The worker restarted: nothing is cached there any more."""
        usage = self._usages.get(target)
        if usage is None:
            return
        for key in [key for key, (chunk_usage, *_) in self._chunks.items() if chunk_usage is usage]:
            del self._chunks[key]
        usage.reused_chunks = 0
        self._update_free_tokens_min()

    # What is sent ------------------------------------------------------------------------------------------------
    def add_prompt(
        self,
        target: str,
        keys: Sequence[int],
        tokens: int,
        now: float,
        *,
        cached_share: float,
        session: str | None = None,
    ) -> None:
        """A prompt of so many tokens, of a session, went to the target, where `cached_share` (0 to 1) was cached."""
        usage = self._usages.get(target)
        if usage is None:
            return
        decay = self._decay
        self._reused_tokens = self._reused_tokens * decay + tokens * cached_share
        self._computed_tokens = self._computed_tokens * decay + tokens * (1.0 - cached_share)
        chunks = self._chunks
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                chunks[key] = (usage, now, False, session)
                continue
            if chunk[2]:
                chunk[0].reused_chunks -= 1
            usage.reused_chunks += 1
            chunks[key] = (usage, now, True, session if session == chunk[3] else None)
            chunks.move_to_end(key)
        self._free_tokens_min = min(self._free_tokens_min, self._compute_free_tokens(usage))

    def end_session(self, keys: Sequence[int], session: str) -> None:
        """The session is over: the chunks that nobody else ever used are needed no more."""
        chunks = self._chunks
        for key in keys:
            chunk = chunks.get(key)
            if chunk is not None and chunk[3] == session:
                chunk[0].reused_chunks -= chunk[2]
                del chunks[key]

    @property
    def reuse_count(self) -> float:
        """How many times a computed token is used again, as far as lately seen, at most `REUSE_MAX`."""
        return min(self._reused_tokens / max(self._computed_tokens, 1.0), REUSE_MAX)

    # What the price asks -----------------------------------------------------------------------------------------
    def may_overflow(self, tokens: int, now: float) -> bool:
        """Whether any target may lack room for a prompt of so many tokens: if not, `overflows` is all zero."""
        if now - self._expired_at_s >= 1.0:
            self._expire(now)
        return tokens > self._free_tokens_min and bool(self._usages)

    def compute_overflow_shares(
        self, targets: Sequence[str], cached_shares: Sequence[float], keys: Sequence[int], tokens: int
    ) -> list[float]:
        """For each target, what share of this prompt would find no room if it lived there: 0 is all has, 1 none. What
        is cached there now (`cached_shares`, 0 to 1) has found room."""
        prompt_chunks: Counter[int] = Counter()
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk[2]:
                prompt_chunks[id(chunk[0])] += 1
        overflows = []
        for target, cached_share in zip(targets, cached_shares):
            usage = self._usages.get(target)
            if usage is None or not tokens:
                overflows.append(0.0)
                continue
            other_tokens = (usage.reused_chunks - prompt_chunks[id(usage)]) * self.chunk_tokens
            overflow = max(other_tokens + tokens - usage.capacity_tokens, 0) / tokens
            overflows.append(min(overflow, 1.0 - cached_share))
        return overflows

    def check_invariants(self) -> None:
        """Counts agree with what they count; times are in order."""
        for name, usage in self._usages.items():
            reused_count = sum(
                1 for chunk_usage, _, is_reused, _ in self._chunks.values() if chunk_usage is usage and is_reused
            )
            assert usage.reused_chunks == reused_count, (
                f"{name}: {usage.reused_chunks} chunks counted, {reused_count} live"
            )
            assert self._free_tokens_min <= self._compute_free_tokens(usage), (
                f"{name}: spare {self._compute_free_tokens(usage)} < {self._free_tokens_min}"
            )
        last_use_times_s = [used_at_s for _, used_at_s, _, _ in self._chunks.values()]
        assert last_use_times_s == sorted(last_use_times_s)
        assert all(
            any(chunk_usage is usage for usage in self._usages.values()) for chunk_usage, *_ in self._chunks.values()
        )

    def _expire(self, now: float) -> None:
        self._expired_at_s = now
        oldest_s = now - self._live_s
        chunks = self._chunks
        while chunks:
            key, (usage, used_at_s, is_reused, _) = next(iter(chunks.items()))
            if used_at_s >= oldest_s:
                break
            del chunks[key]
            usage.reused_chunks -= is_reused
        self._update_free_tokens_min()

    def _compute_free_tokens(self, usage: _TargetUsage) -> int:
        return usage.capacity_tokens - usage.reused_chunks * self.chunk_tokens

    def _update_free_tokens_min(self) -> None:
        self._free_tokens_min = min(map(self._compute_free_tokens, self._usages.values()), default=0)
