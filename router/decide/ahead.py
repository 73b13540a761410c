"""What a worker's cache will hold once it has taken in every request that was sent to it: the events tell what it holds
now, and the requests ahead of the next one will evict some of that. Pure.

An engine takes requests in as they come, each when there is room for its prompt, looks up its hits at that moment, and
evicts what was used longest ago of what no running request holds. Played here at once, counted in steps of decoding:
where there is no room, the running request that is to end first ends, and the others have grown by then. Where they
grow beyond the cache before that, the one taken in last is preempted: it waits, before all others, until another ends.

Refuses to know what is resident: that is the index's. What is not known here (other routers' requests, what was there
before) is taken for room, so that nothing is called evicted that need not be. Invariants: a piece is held or free,
never both; nothing is free beyond the capacity; nobody is preempted while nobody runs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

PIECES_FEW, PIECES_MAX, PIECE_TOKENS = 256, 8192, 256
"""A cache is followed in pieces of whole blocks: of one, where it has few of them; else of about so many tokens, or
more where they would be too many."""
ENDS_SPARE = 64
"""Expected ends of requests that run no longer, beside one for each that runs, before they are sorted out."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that has not ended."""

    request_id: str
    keys: Sequence[int]
    prompt_tokens: int
    own_tokens: int
    """Of the blocks of its prompt, what is in no piece."""
    tokens: float
    """Of its answer, expected."""
    said_tokens: float = 0.0
    """Of them, when it was taken in: some, where it had been preempted."""
    start_step: float = 0.0
    """When it would have been taken in, had it never been preempted."""

    @property
    def end_step(self) -> float:
        return self.start_step + self.tokens


def _chunk_tokens(capacity_tokens: int, block_tokens: int) -> int:
    chunk_tokens = block_tokens
    while chunk_tokens * (PIECES_FEW if chunk_tokens < PIECE_TOKENS else PIECES_MAX) < capacity_tokens:
        chunk_tokens *= 2
    return chunk_tokens


class CacheAhead:
    """One cache. A piece is named by the digest of the prompt up to its end."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self._capacity_tokens, self._block_tokens = capacity_tokens, block_tokens
        self.chunk_tokens = _chunk_tokens(capacity_tokens, block_tokens)
        self._loses = True
        self._held: dict[int, int] = {}
        """piece -> how many running requests have it."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """Pieces that nobody holds, the next to be evicted first."""
        self._sent: dict[str, _Sent] = {}
        self._ends: list[tuple[float, int, str]] = []
        """Heap of (step at which it is expected to end, how many were taken in before, request): of those that run, and
        of some that do no longer (ENDS_SPARE): where there is always room, none of them is ever reached."""
        self._count_taken = 0
        self._runs: dict[str, _Sent] = {}
        """Those that run, as they were taken in."""
        self._preempted: list[_Sent] = []
        """The next to be taken in again last."""
        self._own_tokens = 0
        self._gone: list[int] = []
        """What went since something was sent last."""
        self._starts = 0.0
        """Sums over those that run: their `own_tokens`, and the steps they started at."""
        self._step = 0.0
        self._evicts: dict[str, list[int]] = {}
        self._told: set[str] = set()
        """Requests that have evicted something, which the events have told."""
        self.evicted: dict[int, str] = {}
        """piece -> the request that will evict it, or has: until nothing but the events promises what it evicted."""

    def resize(self, capacity_tokens: int, block_tokens: int) -> bool:
        """It holds so much, as is known now. False where it has to be followed from the start: in other
        pieces, or as it is smaller."""
        chunk_tokens = _chunk_tokens(capacity_tokens, block_tokens)
        as_before = (self.chunk_tokens, self._block_tokens) == (chunk_tokens, block_tokens)
        if not as_before or capacity_tokens < self._capacity_tokens:
            return False
        self._capacity_tokens = capacity_tokens
        return True

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

    def make_way(self, keys: Sequence[int], *, prompt_tokens: int, cached_tokens: int, seats: int) -> int:
        """Such a prompt is about to be sent there: what of its first `cached_tokens` is left when it is taken in, as
        those that run have grown until then."""
        self._play_on(keys, prompt_tokens, seats)
        if self._gone and self._loses:
            lost = set(self._gone) - self._free.keys() - self._held.keys()
            for i, key in enumerate(keys[: -(-cached_tokens // self.chunk_tokens)]):
                if key in lost:
                    return i * self.chunk_tokens
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
        self._play_on(keys, prompt_tokens, seats)
        own_tokens = self._in_blocks(prompt_tokens) - self.chunk_tokens * len(keys)
        self._sent[request_id] = sent = _Sent(request_id, keys, prompt_tokens, own_tokens, expected_tokens)
        self._take_in(sent, cached_tokens // self.chunk_tokens)
        self._make_room()
        gone = [key for key in self._gone if key not in self._held and key not in self._free]
        self._gone.clear()
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
        if sent is None:
            return
        if request_id in self._runs:
            self._step = max(self._step, sent.start_step + answer_tokens)
            self._release(sent, answer_tokens)
            self._resume()
            gone = len(self._gone)
            self._make_room()
            del self._gone[gone:]
        elif sent in self._preempted:
            self._preempted.remove(sent)

    def copied(self) -> None:
        """It has slower tiers too: what is evicted is not lost."""
        self._loses = False
        self._forget_evictions()

    def clear(self) -> None:
        """The worker restarted. What was sent is still to end."""
        self._runs.clear()
        self._preempted.clear()
        self._gone.clear()
        self._held.clear()
        self._free.clear()
        self._ends.clear()
        self._forget_evictions()
        self._own_tokens, self._starts = 0, 0.0

    def _forget_evictions(self) -> None:
        self._evicts.clear()
        self._told.clear()
        self.evicted.clear()

    def _in_use(self) -> float:
        """Tokens that running requests hold, with what they have generated by now."""
        grown = len(self._runs) * self._step - self._starts
        return len(self._held) * self.chunk_tokens + self._own_tokens + grown

    def _has_room(self, tokens: float, keys: Sequence[int], seats: int) -> bool:
        """Whether one of so many tokens can be taken in now. Where nobody runs it can."""
        if not self._runs or len(self._runs) >= seats:
            return not self._runs
        over = self._in_use() + tokens - self._capacity_tokens
        return over <= 0 or over <= self.chunk_tokens * sum(1 for key in keys if key in self._held)

    def _take_in(self, sent: _Sent, hits: int) -> None:
        """It runs from now on."""
        sent.start_step = self._step - sent.said_tokens
        self._runs[sent.request_id] = sent
        self._own_tokens += sent.own_tokens
        self._starts += sent.start_step
        self._count_taken += 1
        heapq.heappush(self._ends, (sent.end_step, self._count_taken, sent.request_id))
        if len(self._ends) > 2 * len(self._runs) + ENDS_SPARE:
            self._ends = [end for end in self._ends if self._is_due(end)]
            heapq.heapify(self._ends)
        self._hold(sent.keys, hits)
        for key in self._answer_keys(sent, sent.said_tokens):
            self._free.pop(key, None)

    def _is_due(self, end: tuple[float, int, str]) -> bool:
        """It runs, and is expected to end then."""
        sent = self._runs.get(end[2])
        return sent is not None and sent.end_step == end[0]

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

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens) * self._block_tokens

    def _play_on(self, keys: Sequence[int], prompt_tokens: int, seats: int) -> None:
        """Until such a prompt is taken in."""
        tokens = self._in_blocks(prompt_tokens)
        while self._preempted or not self._has_room(tokens, keys, seats):
            self._go_on()

    def _go_on(self) -> None:
        """Until somebody ends, and whoever ends in the same step; or one has to be preempted, as all have grown."""
        runs, ends = self._runs, self._ends
        while not self._is_due(ends[0]):
            heapq.heappop(ends)
        full_step = self._step + (self._capacity_tokens - self._in_use()) / len(runs)
        if len(runs) > 1 and full_step < ends[0][0]:
            self._step = max(self._step, full_step)
            self._make_room()
            last = next(reversed(runs.values()))
            last.said_tokens = self._step - last.start_step
            self._release(last, last.said_tokens)
            self._preempted.append(last)
            return
        self._step = max(self._step, ends[0][0])
        self._make_room()
        while ends and ends[0][0] <= self._step:
            end_step, _, request_id = heapq.heappop(ends)
            if (sent := runs.get(request_id)) is not None and sent.end_step == end_step:
                self._release(sent, sent.tokens)
        self._resume()
        self._make_room()

    def _resume(self) -> None:
        """Who was preempted is taken in again, as far as there is room for what it has and a block more."""
        while self._preempted:
            sent = self._preempted[-1]
            tokens = sent.own_tokens + self.chunk_tokens * len(sent.keys) + sent.said_tokens + self._block_tokens
            if not self._has_room(tokens, sent.keys, len(self._runs) + 1):
                break
            self._take_in(self._preempted.pop(), 0)

    def _answer_keys(self, sent: _Sent, answer_tokens: float) -> range:
        """The pieces of its answer, as far as they are full, have names of their own."""
        last = sent.keys[-1] if sent.keys else 0
        return range(last + 1, last + 1 + int(sent.prompt_tokens + answer_tokens) // self.chunk_tokens - len(sent.keys))

    def _release(self, sent: _Sent, answer_tokens: float) -> None:
        """Its pieces are free, the last first."""
        del self._runs[sent.request_id]
        self._own_tokens -= sent.own_tokens
        self._starts = self._starts - sent.start_step if self._runs else 0.0
        free, held = self._free, self._held
        for key in reversed(self._answer_keys(sent, answer_tokens)):
            free[key] = None
            free.move_to_end(key)
        for key in reversed(sent.keys):
            count = held[key] - 1
            if count:
                held[key] = count
            else:
                del held[key]
                free[key] = None

    def _make_room(self) -> None:
        """Evict what is too much."""
        room = (self._capacity_tokens - self._in_use()) // self.chunk_tokens
        while self._free and len(self._free) > room:
            self._gone.append(self._free.popitem(last=False)[0])

    def check_invariants(self, live: set[str]) -> None:
        """Counts agree with what they count; only what is in flight (`live`) is taken for that."""
        running = self._runs.values()
        assert set(self._sent) <= live
        assert self._runs.keys() <= self._sent.keys()
        assert not self._preempted or self._runs
        assert not self._runs.keys() & {sent.request_id for sent in self._preempted}
        chunk = self.chunk_tokens
        assert self._own_tokens == sum(sent.own_tokens for sent in running)
        assert abs(self._starts - sum(sent.start_step for sent in running)) < 1e-3
        assert sum(self._held.values()) == sum(len(sent.keys) for sent in running)
        assert not self._held.keys() & self._free.keys()
        held = (len(self._free) + len(self._held)) * chunk + self._own_tokens
        assert not self._free or held <= self._capacity_tokens
        assert all(key in self._evicts[request_id] for key, request_id in self.evicted.items())
        assert self._told <= self._evicts.keys()
