"""Whose prompt is computed next.

`arrival`: what was begun first, then who came first. `shortest`: who has the fewest tokens left to compute, begun or
not, which makes the mean wait the shortest; that nobody waits for ever, those who come later count more. The smallest
turn of (priority, tokens_remaining + AGEING * arrival_work) goes first, where

    tokens_remaining   tokens of the prompt (and of an answer that is recomputed) that are neither computed nor cached
    arrival_work       prompt tokens that this engine had computed in all when the request arrived, or could have: a
                       step in which somebody waits for a seat counts as full

A clock is not needed: an engine that computes nothing keeps nobody waiting. What it promises: once
`tokens_remaining / AGEING` more prompt tokens have been computed, nobody who arrives any more goes before a prompt that
had `tokens_remaining` tokens left. It waits no longer than if requests were served in the order of their arrival and it
had come that much work later, whatever else comes. Where all are equally long this is the order of their arrival; where
seats are short, nearly: to compute a long prompt later makes nobody's wait for one shorter.

Owns the order of those who wait, and what is expected to be left of each. That is an estimate, made when a request
comes and again when it is about to be admitted: it orders, and decides nothing else. Refuses to know budgets and seats.
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
"""Of a token computed before a request came, in tokens left."""

PrefillOrder = Literal["shortest", "arrival"]

_sort_key = attrgetter("sort_key")


class PrefillQueue:
    """Requests that wait, those whose turn is earlier before the others."""

    def __init__(self, order: PrefillOrder, cache: KVCache) -> None:
        self.is_shortest_first = order == "shortest"
        self._prefill_work_tokens = 0
        """Since the start: what steps have computed of prompts, or could have."""
        self._cache = cache
        self._entries: list[RequestEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> RequestEntry:
        return self._entries[index]

    def first_entries(self, count: int) -> list[RequestEntry]:
        """The first so many, or all."""
        return self._entries[:count]

    def add_arrival(self, entry: RequestEntry) -> None:
        """A request comes: it waits."""
        entry.arrival_work = self._prefill_work_tokens
        self.add(entry)

    def add_work(self, tokens: int) -> None:
        """A step was planned that computes so many tokens of prompts, or could."""
        self._prefill_work_tokens += tokens

    def add(self, entry: RequestEntry) -> None:
        """A request that has come before waits from now on."""
        self._insert(
            entry,
            len(entry.seq.token_ids) - self._cache.count_cached_tokens(entry.seq) if self.is_shortest_first else 0,
        )

    def remove(self, entry: RequestEntry) -> None:
        """It waits no more."""
        self._entries.remove(entry)

    def sort_started(self, entries: Iterable[RequestEntry]) -> list[RequestEntry]:
        """Prompts that were begun, in their order."""
        entries = list(entries)
        for entry in entries:
            self._set_sort_key(entry, len(entry.seq.token_ids) - entry.seq.computed_tokens)
        return sorted(entries, key=_sort_key)

    def requeue_if_longer(self, entry: RequestEntry) -> bool:
        """Whether more is left of it than was expected; it has then got its place anew."""
        tokens_remaining = (
            len(entry.seq.token_ids) - self._cache.count_cached_tokens(entry.seq) if self.is_shortest_first else 0
        )
        if tokens_remaining <= entry.tokens_remaining:
            return False
        self.remove(entry)
        self._insert(entry, tokens_remaining)
        return True

    def discount_shared_prefix(self, seq: Sequence, entries: list[RequestEntry]) -> None:
        """What the running `seq` is going to compute need not be computed for those of `entries` that have it too."""
        for entry in entries:
            shared_tokens = self._cache.plan_shared_prefix(seq, entry.seq)
            tokens_remaining = len(entry.seq.token_ids) - shared_tokens
            if self.is_shortest_first and shared_tokens and tokens_remaining < entry.tokens_remaining:
                self.remove(entry)
                self._insert(entry, tokens_remaining)

    def _insert(self, entry: RequestEntry, tokens_remaining: int) -> None:
        self._set_sort_key(entry, tokens_remaining)
        insort(self._entries, entry, key=_sort_key)

    def _set_sort_key(self, entry: RequestEntry, tokens_remaining: int) -> None:
        entry.tokens_remaining = tokens_remaining
        priority, arrival_s, arrival_number = entry.arrival_order
        entry.sort_key = (
            priority,
            tokens_remaining + AGEING * entry.arrival_work if self.is_shortest_first else 0.0,
            arrival_s,
            arrival_number,
        )

    def check_invariants(self) -> None:
        assert self._entries == sorted(self._entries, key=_sort_key)
        for entry in self._entries:
            assert entry.seq not in self._cache
            assert entry.seq.computed_tokens == 0
