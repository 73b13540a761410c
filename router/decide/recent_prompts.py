"""Prompts that run now or ran lately: what they share, and what each cache should keep of them. No I/O.

A *chunk* is 256 tokens of a prompt. Its key is the digest of the prompt up to the chunk's end. So two prompts with the
same first 600 tokens share exactly their first two keys, and a binary search finds the last shared one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from router.decide.target import Target

CHUNK_TOKENS: Final = 256
"""Tokens of a chunk, the unit in which prompts are compared."""
RECENT_S: Final = 90.0
"""Seconds after its last use in which a prompt is expected to come back. With 300 s, routing is worse than without the
idle chunks."""
SHARED_RUNNING_MIN: Final = 2
"""Running requests that must have a prefix in common before it counts as shared."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of one or several prompts."""

    target: Target
    """Target to which the chunk was sent last."""
    used_at_s: float
    running_counts: dict[Target, int]
    """Number of running prompts that have the chunk, for each target where there are any."""
    only_session: str | None
    """The session that used the chunk, if no other did."""
    is_reused: bool = False
    """Whether the chunk was used at least twice."""

    @property
    def is_idle(self) -> bool:
        """Whether the target should keep the chunk in memory that is not held by a running request."""
        return self.is_reused and self.target not in self.running_counts


class RecentPrompts:
    """Chunks of the prompts that run now or ran within `recent_s` seconds.

    The *idle* chunks of a target are its working set (Denning, 1968): they were sent there last, were used at least
    twice, and do not run there now. A prompt that came back is likely to come back again; one that was not seen for
    `recent_s` seconds is likely over. If a target lacks room for its idle chunks and for all that its running requests
    hold, the prompts that live there evict each other in turn, and each is computed again when it returns.

    A prefix that several prompts share counts once, and is idle only at the target that got it last.

    Invariants: `_chunks` is in the order of last use. The load of a target counts the tokens of its idle chunks.
    """

    def __init__(self, *, recent_s: float = RECENT_S, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens, self._recent_s = chunk_tokens, recent_s
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        """Chunks by key, the least recently used first."""

    # Prompts -----------------------------------------------------------------------------------------------------
    def start_prompt(self, target: Target, keys: Sequence[int], now: float, *, session: str | None = None) -> int:
        """Record that a prompt starts at a target; return how many of its chunks other prompts run there already.

        `keys` are the keys of the prompt's chunks.
        """
        duplicate_count = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._chunks[key] = _Chunk(target, now, {target: 1}, session)
                continue
            if chunk.is_idle:
                chunk.target.load.idle_prompt_tokens -= self.chunk_tokens
            running_count = chunk.running_counts.get(target, 0)
            chunk.running_counts[target] = running_count + 1
            if running_count:
                duplicate_count += 1
            chunk.target, chunk.used_at_s, chunk.is_reused = target, now, True
            if chunk.only_session != session:
                chunk.only_session = None
            self._chunks.move_to_end(key)
        return duplicate_count

    def end_prompt(self, target: Target, keys: Sequence[int]) -> int:
        """Record that a prompt runs no longer; return how many of its chunks other prompts still run at the target."""
        duplicate_count = 0
        for key in keys:
            chunk = self._chunks[key]
            running_count = chunk.running_counts[target]
            if running_count > 1:
                chunk.running_counts[target] = running_count - 1
                duplicate_count += 1
                continue
            del chunk.running_counts[target]
            if not chunk.running_counts:
                chunk.running_counts = {}  # a dict that was emptied keeps its memory
            if chunk.is_reused and chunk.target is target:
                target.load.idle_prompt_tokens += self.chunk_tokens
        return duplicate_count

    def end_session(self, keys: Sequence[int], session: str) -> None:
        """Forget the chunks of a prompt that only this session used, because the session is over."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.only_session == session:
                self._forget(key, chunk)

    def clear(self, target: Target) -> None:
        """Forget what was sent to a target last, because its cache is lost. Its prompts may still run."""
        for key, chunk in [(key, chunk) for key, chunk in self._chunks.items() if chunk.target is target]:
            self._forget(key, chunk)

    def expire(self, now: float) -> None:
        """Forget the chunks that were not used for `recent_s`. Running ones stay, but count as used once."""
        while self._chunks:
            key, chunk = next(iter(self._chunks.items()))
            if chunk.used_at_s >= now - self._recent_s:
                break
            chunk.used_at_s = now
            self._chunks.move_to_end(key)
            self._forget(key, chunk)

    def _forget(self, key: int, chunk: _Chunk) -> None:
        """Forget the past uses of a chunk, and the chunk itself unless it runs."""
        if chunk.is_idle:
            chunk.target.load.idle_prompt_tokens -= self.chunk_tokens
        chunk.is_reused = False
        if not chunk.running_counts:
            del self._chunks[key]

    # Questions of the price --------------------------------------------------------------------------------------
    def count_idle_tokens(self, keys: Sequence[int]) -> Counter[Target]:
        """Return how many tokens of a prompt are in idle chunks, for each target that has any."""
        chunks = (self._chunks.get(key) for key in keys)
        idle_counts = Counter(chunk.target for chunk in chunks if chunk is not None and chunk.is_idle)
        return Counter({target: count * self.chunk_tokens for target, count in idle_counts.items()})

    def count_running_tokens(self, target: Target, keys: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens prompts that run at a target have, in whole chunks."""

        def is_missing(key: int) -> bool:
            chunk = self._chunks.get(key)
            return chunk is None or target not in chunk.running_counts

        return self.chunk_tokens * bisect_left(keys, True, key=is_missing)

    def find_shared_prefix(self, keys: Sequence[int]) -> tuple[int, dict[Target, int]]:
        """Return how many of a prompt's first tokens at least SHARED_RUNNING_MIN running prompts have.

        Also returns the number of these prompts at each target.
        """

        def is_unshared(key: int) -> bool:
            chunk = self._chunks.get(key)
            return chunk is None or sum(chunk.running_counts.values()) < SHARED_RUNNING_MIN

        if not keys or is_unshared(keys[0]):
            return 0, {}
        chunk_count = bisect_left(keys, True, lo=1, key=is_unshared)
        return chunk_count * self.chunk_tokens, self._chunks[keys[chunk_count - 1]].running_counts

    def check_invariants(self, running_counts: Counter[tuple[int, Target]]) -> None:
        """Assert that all counts agree. `running_counts`: number of running prompts by chunk key and target."""
        counts = {(key, target): n for key, chunk in self._chunks.items() for target, n in chunk.running_counts.items()}
        assert counts == running_counts
        idle_counts = Counter(chunk.target for chunk in self._chunks.values() if chunk.is_idle)
        for target in {chunk.target for chunk in self._chunks.values()}:
            assert target.load.idle_prompt_tokens == idle_counts[target] * self.chunk_tokens
        last_use_times_s = [chunk.used_at_s for chunk in self._chunks.values()]
        assert last_use_times_s == sorted(last_use_times_s)
