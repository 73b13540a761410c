"""The order in which prompts are computed.

`arrival`: prompts that were begun go first, then the others in the order of their arrival. `shortest`: the prompt with
the fewest tokens left goes first, begun or not, which makes the mean wait the shortest. Later requests count as longer,
so that no request waits forever. The request with the smallest (priority, tokens_remaining + AGEING * arrival_work)
goes first, where

    tokens_remaining   tokens of the prompt (and of an answer that is recomputed) that are neither computed nor cached
    arrival_work       prompt tokens that the engine had computed in all when the request arrived, or could have
                       computed: a step counts as full if a request waits only because `max_num_seqs` are running

No clock is needed, because an engine that computes nothing lets no request wait. The order keeps a promise: once
`tokens_remaining / AGEING` more prompt tokens have been computed, no new request goes before a prompt that had
`tokens_remaining` tokens left. Requests of equal length are served in the order of their arrival.

Owns the order of waiting requests, and the estimate of each request's remaining tokens. The estimate is made when a
request arrives, and again when it is about to be admitted. It is used for the order alone. Refuses to know budgets.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal

from engine.cache.kv_cache import KVCache
from engine.request_entry import RequestEntry
from engine.types import Sequence

AGEING = 0.1
"""A request counts as longer by this many tokens for each prompt token that was computed before its arrival."""

PrefillOrder = Literal["shortest", "arrival"]

_sort_key = attrgetter("sort_key")


class PrefillQueue:
    """Holds the waiting requests in the order in which they are to be admitted."""

    def __init__(self, order: PrefillOrder, cache: KVCache) -> None:
        self.is_shortest_first = order == "shortest"
        self._prefill_work_tokens = 0
        """Prompt tokens that steps have computed since the start, or could have computed."""
        self._cache = cache
        self._entries: list[RequestEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> RequestEntry:
        return self._entries[index]

    def add_arrival(self, entry: RequestEntry) -> None:
        """Add a request that has just arrived."""
        entry.arrival_work = self._prefill_work_tokens
        self.add(entry)

    def add_work(self, tokens: int) -> None:
        """Count the prompt tokens that a step computes, or could compute."""
        self._prefill_work_tokens += tokens

    def add(self, entry: RequestEntry) -> None:
        """Add a request that arrived earlier."""
        self._insert(entry, self._estimate_tokens_remaining(entry))

    def remove(self, entry: RequestEntry) -> None:
        self._entries.remove(entry)

    def sort_started(self, entries: Iterable[RequestEntry]) -> list[RequestEntry]:
        """Return requests with a begun prompt in the order in which they are to be continued."""
        entries = list(entries)
        for entry in entries:
            self._set_sort_key(entry, len(entry.seq.token_ids) - entry.seq.computed_tokens)
        return sorted(entries, key=_sort_key)

    def requeue_if_longer(self, entry: RequestEntry) -> bool:
        """Move a request back in the queue if it has more tokens left than expected. Returns whether it moved."""
        tokens_remaining = self._estimate_tokens_remaining(entry)
        if tokens_remaining <= entry.tokens_remaining:
            return False
        self.remove(entry)
        self._insert(entry, tokens_remaining)
        return True

    def discount_shared_prefix(self, seq: Sequence, entries: list[RequestEntry]) -> None:
        """Move waiting `entries` forward if the running `seq` is going to compute a prefix of their prompts.

        These requests then have fewer tokens to compute, so the order `shortest` puts them earlier.
        """
        for entry in entries:
            shared_tokens = self._cache.plan_shared_prefix(seq, entry.seq)
            tokens_remaining = len(entry.seq.token_ids) - shared_tokens
            is_shorter = shared_tokens > 0 and tokens_remaining < entry.tokens_remaining
            if self.is_shortest_first and is_shorter:
                self.remove(entry)
                self._insert(entry, tokens_remaining)

    def _estimate_tokens_remaining(self, entry: RequestEntry) -> int:
        """Return the tokens of a waiting request beyond its cached prefix; 0 if the order ignores them."""
        if not self.is_shortest_first:
            return 0
        return len(entry.seq.token_ids) - self._cache.count_cached_tokens(entry.seq)

    def _insert(self, entry: RequestEntry, tokens_remaining: int) -> None:
        self._set_sort_key(entry, tokens_remaining)
        insort(self._entries, entry, key=_sort_key)

    def _set_sort_key(self, entry: RequestEntry, tokens_remaining: int) -> None:
        """Set the sort key of a request: priority, then tokens left if the shortest goes first, then arrival.

        A later request counts as longer, so that none waits forever. With AGEING 0.1, a request with 500 tokens left
        that came after 10,000 computed tokens counts as 1,500 tokens.
        """
        entry.tokens_remaining = tokens_remaining
        priority, arrival_s, arrival_number = entry.arrival_order
        aged_tokens = tokens_remaining + AGEING * entry.arrival_work if self.is_shortest_first else 0.0
        entry.sort_key = (priority, aged_tokens, arrival_s, arrival_number)

    def check_invariants(self) -> None:
        assert self._entries == sorted(self._entries, key=_sort_key)
        for entry in self._entries:
            assert entry.seq not in self._cache
            assert entry.seq.computed_tokens == 0
