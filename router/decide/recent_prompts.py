"""Prompts that run now or ran lately: what they share, and what each cache should keep of them. No I/O.

A *chunk* is 256 tokens of a prompt. Its key is the digest of the prompt up to the chunk's end. So two prompts with the
same first 600 tokens share exactly their first two keys.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
class _Segment:
    """Consecutive chunks (256 tokens each) that recent prompts have in common: each prompt has all of them, or none.

    For example, a prompt of the chunks A, B, C and another of A, B, D are three segments: A and B, C, D.
    """

    keys: list[int]
    """Keys of the chunks; a key is the digest of all tokens of a prompt up to the chunk's end."""
    target: Target
    """Worker, or rank of one, to which a prompt with the chunks was sent last."""
    used_at_s: float
    """When that prompt was sent, or when `expire` last kept the chunks because a prompt with them still ran."""
    running_counts: dict[Target, int]
    """Number of running prompts that have the chunks, for each target where there are any."""
    only_session: str | None
    """The session that used the chunks, if no other did."""
    is_reused: bool = False
    """Whether the chunks were used at least twice."""

    @property
    def is_idle(self) -> bool:
        """Whether the chunks are likely to be used again at `target`, and no running request holds them there."""
        return self.is_reused and self.target not in self.running_counts


class RecentPrompts:
    """Chunks of the prompts that run now or ran within `recent_s` seconds, as a radix tree of segments.

    The *idle* chunks of a target are its working set (Denning, 1968): chunks that were sent there last, were used at
    least twice, and do not run there now. A target without room for its idle chunks and its running requests evicts
    prompts that are likely to come back.

    A key stands for the whole prompt up to its chunk. So the segment that continues a prompt is found by the prompt's
    next key, without links between segments. Invariant: `_order` is in the order of last use.
    """

    def __init__(self, *, recent_s: float = RECENT_S, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens, self._recent_s = chunk_tokens, recent_s
        self._segments: dict[int, _Segment] = {}
        """Segments by their first key."""
        self._order: OrderedDict[_Segment, None] = OrderedDict()
        """All segments, the least recently used first."""

    # Prompts -----------------------------------------------------------------------------------------------------
    def start_prompt(self, target: Target, keys: Sequence[int], now: float, *, session: str | None = None) -> int:
        """Record that a prompt starts at a target; return how many of its chunks other prompts run there already.

        `keys` are the keys of the prompt's chunks. Chunks that no recent prompt had become a new segment. A segment of
        which the prompt has only a part is split first, and two that are now used by the same prompts are joined.
        """
        duplicate_count, start = 0, 0
        previous_segment: _Segment | None = None
        while start < len(keys):
            segment = self._segments.get(keys[start])
            if segment is None:
                new_keys = self._list_new_keys(keys, start)
                self._add(_Segment(new_keys, target, now, {target: 1}, session))
                start += len(new_keys)
                previous_segment = None
                continue
            segment = self._split(segment, self._count_common(segment, keys, start))
            start += len(segment.keys)
            if target in segment.running_counts:
                duplicate_count += len(segment.keys)
            self._use(segment, target, now, session)
            if previous_segment is None or not self._join(previous_segment, segment):
                previous_segment = segment
        return duplicate_count

    def _list_new_keys(self, keys: Sequence[int], start: int) -> list[int]:
        """Return the keys of a prompt from `start` on, up to the next one with which a known segment begins."""
        end = start + 1
        while end < len(keys) and keys[end] not in self._segments:
            end += 1
        return list(keys[start:end])

    def end_prompt(self, target: Target, keys: Sequence[int]) -> int:
        """Record that a prompt runs no longer; return how many of its chunks other prompts still run at the target.

        The other chunks become idle there (likely to be used again, but not running), if they were used at least twice
        and were sent there last. A segment is a row of chunks that all its prompts have. `keys`: keys of the chunks.
        """
        duplicate_count = 0
        for segment, chunk_count in self._find_segments(keys):
            segment.running_counts[target] -= 1
            if segment.running_counts[target]:
                duplicate_count += chunk_count
                continue
            del segment.running_counts[target]
            if not segment.running_counts:
                segment.running_counts = {}  # a dict that was emptied keeps its memory
            if segment.is_idle and segment.target is target:
                self._change_idle_tokens(segment, 1)
        return duplicate_count

    def end_session(self, keys: Sequence[int], session: str) -> None:
        """Forget the chunks of a prompt that only this session used, because the session is over."""
        for segment, _ in self._find_segments(keys):
            if segment.only_session == session:
                self._forget(segment)

    def clear(self, target: Target) -> None:
        """Forget what was sent to a target last, because its cache is lost. Its prompts may still run."""
        for segment in [segment for segment in self._order if segment.target is target]:
            self._forget(segment)

    def expire(self, now: float) -> None:
        """Forget the chunks that were not used for `recent_s`. Running ones stay, but count as used once."""
        while self._order:
            segment = next(iter(self._order))
            if segment.used_at_s >= now - self._recent_s:
                break
            segment.used_at_s = now
            self._order.move_to_end(segment)
            self._forget(segment)

    # Segments ----------------------------------------------------------------------------------------------------
    def _find_segments(self, keys: Sequence[int]) -> Iterator[tuple[_Segment, int]]:
        """Yield each segment that has chunks of a prompt, in order, with the number of these chunks."""
        start = 0
        while start < len(keys):
            segment = self._segments.get(keys[start])
            if segment is None:  # never seen, or forgotten while chunks after it were not
                start += 1
                continue
            chunk_count = self._count_common(segment, keys, start)
            yield segment, chunk_count
            start += chunk_count

    @staticmethod
    def _count_common(segment: _Segment, keys: Sequence[int], start: int) -> int:
        """Return how many chunks a segment and a prompt have in common, from the prompt's chunk at `start` on."""
        segment_keys = segment.keys
        prompt_keys = keys[start : start + len(segment_keys)]
        if prompt_keys == segment_keys:
            return len(segment_keys)
        return bisect_left(range(len(prompt_keys)), True, key=lambda i: prompt_keys[i] != segment_keys[i])

    def _add(self, segment: _Segment) -> None:
        self._segments[segment.keys[0]] = segment
        self._order[segment] = None

    def _remove(self, segment: _Segment) -> None:
        del self._segments[segment.keys[0]]
        del self._order[segment]

    def _split(self, segment: _Segment, chunk_count: int) -> _Segment:
        """Return a segment of the first `chunk_count` chunks, which are used now; the rest keeps its place in time."""
        if chunk_count == len(segment.keys):
            return segment
        first = replace(segment, keys=segment.keys[:chunk_count], running_counts=dict(segment.running_counts))
        segment.keys = segment.keys[chunk_count:]
        self._segments[segment.keys[0]] = segment
        self._add(first)
        return first

    def _use(self, segment: _Segment, target: Target, now: float, session: str | None) -> None:
        """Record that a prompt with a known segment starts at a target."""
        if segment.is_idle:
            self._change_idle_tokens(segment, -1)
        segment.running_counts[target] = segment.running_counts.get(target, 0) + 1
        segment.target, segment.used_at_s, segment.is_reused = target, now, True
        if segment.only_session != session:
            segment.only_session = None
        self._order.move_to_end(segment)

    def _join(self, first: _Segment, second: _Segment) -> bool:
        """Make one segment of two that a prompt just used one after the other, if they have the same past.

        The prompts that have the second have the first too. So the same prompts run if their numbers are equal.
        """
        if first.only_session != second.only_session or first.running_counts != second.running_counts:
            return False
        self._remove(second)
        first.keys += second.keys
        return True

    def _forget(self, segment: _Segment) -> None:
        """Forget the past uses of a segment, and the segment itself unless it runs."""
        if segment.is_idle:
            self._change_idle_tokens(segment, -1)
        segment.is_reused = False
        if not segment.running_counts:
            self._remove(segment)

    def _change_idle_tokens(self, segment: _Segment, sign: int) -> None:
        segment.target.load.idle_prompt_tokens += sign * len(segment.keys) * self.chunk_tokens

    # Questions of the price --------------------------------------------------------------------------------------
    def count_idle_tokens(self, keys: Sequence[int]) -> Counter[Target]:
        """Return how many tokens of a prompt are in idle chunks, for each target that has any."""
        idle_tokens: Counter[Target] = Counter()
        for segment, chunk_count in self._find_segments(keys):
            if segment.is_idle:
                idle_tokens[segment.target] += chunk_count * self.chunk_tokens
        return idle_tokens

    def count_running_tokens(self, target: Target, keys: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens prompts that run at a target have, in whole chunks."""
        chunk_counts = (n for segment, n in self._find_segments(keys) if target in segment.running_counts)
        return self.chunk_tokens * sum(chunk_counts)

    def find_shared_prefix(self, keys: Sequence[int]) -> tuple[int, dict[Target, int]]:
        """Return how many of a prompt's first tokens at least SHARED_RUNNING_MIN running prompts have.

        Also returns the number of these prompts at each target.
        """
        shared_chunk_count, running_counts = 0, {}
        for segment, chunk_count in self._find_segments(keys):
            if sum(segment.running_counts.values()) < SHARED_RUNNING_MIN:
                break
            shared_chunk_count += chunk_count
            running_counts = segment.running_counts
        return shared_chunk_count * self.chunk_tokens, running_counts

    def check_invariants(self, running_counts: Counter[tuple[int, Target]]) -> None:
        """Assert that all counts agree. `running_counts`: number of running prompts by chunk key and target."""
        segments = list(self._order)
        assert {segment.keys[0]: segment for segment in segments} == self._segments
        keys = [key for segment in segments for key in segment.keys]
        assert len(keys) == len(set(keys)), "a chunk is in two segments"
        stored_counts = {
            (key, target): count
            for segment in segments
            for key in segment.keys
            for target, count in segment.running_counts.items()
        }
        assert stored_counts == running_counts
        for target in {segment.target for segment in segments}:
            idle_chunks = sum(len(segment.keys) for segment in segments if segment.is_idle and segment.target is target)
            assert target.load.idle_prompt_tokens == idle_chunks * self.chunk_tokens
        use_times_s = [segment.used_at_s for segment in segments]
        assert use_times_s == sorted(use_times_s), "the segments are not in the order of last use"
