"""What a worker's cache will hold once it has taken in every request that was sent to it: the events tell what it holds
now, and the requests ahead of the next one will evict some of that. Pure.

An engine takes requests in as they come, each when there is room for its prompt, looks up its hits at that moment, and
evicts what was used longest ago of what no running request holds. Played here at once, counted in steps of decoding:
where there is no room, the running request that is to end first ends, and the others have grown by then.

Refuses to know what is resident: that is the index's. What is not known here (other routers' requests, what was there
before) is taken for room, so that nothing is called evicted that need not be. Invariants: a piece is held or free,
never both; nothing is free beyond the capacity.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PIECES_FEW, PIECES_MAX, PIECE_TOKENS = 256, 8192, 256
"""A cache is followed in pieces of whole blocks: of one, where it has few of them; else of about so many tokens, or
more where they would be too many."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that has not ended."""

    keys: Sequence[int]
    prompt_tokens: int
    own_tokens: int
    """Of the blocks of its prompt, what is in no piece."""
    start_step: float
    end_step: float
    """When it is expected to end."""
    running: bool = True


class CacheAhead:
    """One cache. A piece is named by the digest of the prompt up to its end."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity_tokens, self._block_tokens = capacity_tokens, block_tokens
        self.chunk_tokens = block_tokens
        while self.chunk_tokens * (PIECES_FEW if self.chunk_tokens < PIECE_TOKENS else PIECES_MAX) < capacity_tokens:
            self.chunk_tokens *= 2
        self._loses = True
        self._held: dict[int, int] = {}
        """piece -> how many running requests have it."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """Pieces that nobody holds, the next to be evicted first."""
        self._sent: dict[str, _Sent] = {}
        self._ends: list[tuple[float, int, str]] = []
        """Heap of (step at which it is expected to end, how many were sent before, request): of those that run, and of
        some that have ended."""
        self._count_sent = 0
        self._running = 0
        self._own_tokens = 0
        self._starts = 0.0
        """Sums over those that run: their `own_tokens`, and the steps they started at."""
        self._step = 0.0
        self._evicts: dict[str, list[int]] = {}
        self._told: set[str] = set()
        """Requests that have evicted something, which the events have told."""
        self.evicted: dict[int, str] = {}
        """piece -> the request that will evict it, or has: until nothing but the events promises what it evicted."""

    def follows(self, capacity_tokens: int, block_tokens: int) -> bool:
        """Whether it is about such a cache."""
        return (self._capacity_tokens, self._block_tokens) == (capacity_tokens, block_tokens)

    def left(self, keys: Sequence[int], cached_tokens: int, resident_tokens: int) -> int:
        """What of the first `cached_tokens` of a prompt with these pieces will be there for it: they are there by
        events (`resident_tokens`), or promised."""
        if self.evicted.keys().isdisjoint(keys):
            return cached_tokens
        for i, key in enumerate(keys):
            start, request_id = i * self.chunk_tokens, self.evicted.get(key)
            if request_id is not None and (start >= resident_tokens or request_id not in self._told):
                return min(cached_tokens, start)
        return cached_tokens

    def sent(
        self,
        request_id: str,
        keys: Sequence[int],
        *,
        prompt_tokens: int,
        cached_tokens: int,
        expected_tokens: float,
        seats: int,
    ) -> None:
        """A prompt of which so much will be cached went there; `seats` run at once."""
        assert request_id not in self._sent
        tokens, chunk = -(-prompt_tokens // self._block_tokens) * self._block_tokens, self.chunk_tokens
        own_tokens = tokens - chunk * len(keys)
        while self._running >= seats or (self._running and self._in_use() + tokens > self._capacity_tokens):
            shared = sum(1 for key in keys if key in self._held)
            if self._running < seats and self._in_use() + tokens - shared * chunk <= self._capacity_tokens:
                break
            self._end_first()
        sent = self._sent[request_id] = _Sent(keys, prompt_tokens, own_tokens, self._step, self._step + expected_tokens)
        self._count_sent += 1
        heapq.heappush(self._ends, (sent.end_step, self._count_sent, request_id))
        self._count(sent, 1)
        self._hold(keys, cached_tokens // chunk)
        gone = self._make_room()
        if gone and self._loses:
            self._evicts[request_id] = gone
            self.evicted.update(dict.fromkeys(gone, request_id))

    def taken_in(self, request_id: str) -> None:
        """It runs, or is over: what it evicted, the events have told."""
        if request_id in self._evicts:
            self._told.add(request_id)

    def settled(self, request_id: str) -> None:
        """It was taken in so long ago that what it evicted is promised no longer, but by who was sent since."""
        self._told.discard(request_id)
        for key in self._evicts.pop(request_id, ()):
            if self.evicted.get(key) == request_id:
                del self.evicted[key]

    def ended(self, request_id: str, answer_tokens: float) -> None:
        """It is over, after so many tokens."""
        self.taken_in(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is not None and sent.running:
            self._step = max(self._step, sent.start_step + answer_tokens)
            self._release(sent, answer_tokens)
            self._make_room()

    def copied(self) -> None:
        """It has slower tiers too: what is evicted is not lost."""
        self._loses = False
        self._forget_evictions()

    def clear(self) -> None:
        """The worker restarted. What was sent is still to end."""
        for sent in self._sent.values():
            sent.running = False
        self._held.clear()
        self._free.clear()
        self._ends.clear()
        self._forget_evictions()
        self._running, self._own_tokens, self._starts = 0, 0, 0.0

    def _forget_evictions(self) -> None:
        self._evicts.clear()
        self._told.clear()
        self.evicted.clear()

    def _in_use(self) -> float:
        """Tokens that running requests hold, with what they have generated by now."""
        grown = self._running * self._step - self._starts
        return len(self._held) * self.chunk_tokens + self._own_tokens + grown

    def _count(self, sent: _Sent, more: int) -> None:
        self._running += more
        self._own_tokens += more * sent.own_tokens
        self._starts = self._starts + more * sent.start_step if self._running else 0.0

    def _hold(self, keys: Sequence[int], hits: int) -> None:
        held, free, evicted, before, since = self._held, self._free, self.evicted, 0, 0
        for i, key in enumerate(keys):
            if evicted:
                evicted.pop(key, None)
            count = held[key] = held.get(key, 0) + 1
            if count > 1:
                before = key
            elif key in free:
                del free[key]
                before = key
            elif i < hits:  # there, and not known here: of the answer to `before`, most likely
                since = since + 1 if i and keys[i - 1] != before else 1
                free.pop(before + since, None)

    def _end_first(self) -> None:
        """And whoever ends in the same step."""
        self._step = max(self._step, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._step:
            sent = self._sent.get(heapq.heappop(self._ends)[2])
            if sent is not None and sent.running:
                self._release(sent, self._step - sent.start_step)

    def _release(self, sent: _Sent, answer_tokens: float) -> None:
        """Its pieces are free, the last first; those of its answer have names of their own, as far as they are full."""
        sent.running = False
        self._count(sent, -1)
        free, held, keys = self._free, self._held, sent.keys
        last = keys[-1] if keys else 0
        for i in range(int(sent.prompt_tokens + answer_tokens) // self.chunk_tokens - len(keys), 0, -1):
            free[last + i] = None
            free.move_to_end(last + i)
        for key in reversed(keys):
            count = held[key] - 1
            if count:
                held[key] = count
            else:
                del held[key]
                free[key] = None

    def _make_room(self) -> list[int]:
        """Evict what is too much; the pieces that went."""
        gone, room = [], (self._capacity_tokens - self._in_use()) // self.chunk_tokens
        while self._free and len(self._free) > room:
            gone.append(self._free.popitem(last=False)[0])
        return gone

    def check_invariants(self, live: set[str]) -> None:
        """Counts agree with what they count; only what is in flight (`live`) is taken for that."""
        running = [sent for sent in self._sent.values() if sent.running]
        assert set(self._sent) <= live
        assert self._running == len(running)
        chunk = self.chunk_tokens
        assert self._own_tokens == sum(sent.own_tokens for sent in running)
        assert abs(self._starts - sum(sent.start_step for sent in running)) < 1e-3
        assert sum(self._held.values()) == sum(len(sent.keys) for sent in running)
        assert not self._held.keys() & self._free.keys()
        held = (len(self._free) + len(self._held)) * chunk + self._own_tokens
        assert not self._free or held <= self._capacity_tokens
        assert all(key in self._evicts[request_id] for key, request_id in self.evicted.items())
        assert self._told <= self._evicts.keys()
