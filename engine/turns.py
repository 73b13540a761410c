"""Whose prompt is computed next.

`arrival`: what was begun first, then who came first. `shortest`: who has the fewest tokens left to compute, begun or
not, which makes the mean wait the shortest; that nobody waits for ever, those who come later count more. The smallest
turn of (priority, left + AGEING * came) goes first, where

    left   tokens of the prompt (and of an answer that is recomputed) that are neither computed nor cached
    came   prompt tokens that this engine had computed in all when the request arrived, or could have: a step in which
           somebody waits for a seat counts as full

A clock is not needed: an engine that computes nothing keeps nobody waiting. What it promises: once `left / AGEING` more
prompt tokens have been computed, nobody who arrives any more goes before a prompt that had `left` tokens left. It waits
no longer than if requests were served in the order of their arrival and it had come that much work later, whatever else
comes. Where all are equally long this is the order of their arrival; where seats are short, nearly: to compute a
long prompt later makes nobody's wait for one shorter.

Owns the order of those who wait, and what is expected to be left of each. That is an estimate, made when a request
comes and again when it is about to be admitted: it orders, and decides nothing else. Refuses to know budgets and seats.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal

from engine.cache.kv_cache import KVCache
from engine.decoding import RequestEntry
from engine.types import Sequence

AGEING = 0.1
"""Of a token computed before a request came, in tokens left."""

PrefillOrder = Literal["shortest", "arrival"]

_turn = attrgetter("turn")


class PrefillTurns:
    """Requests that wait, those whose turn is earlier before the others."""

    def __init__(self, order: PrefillOrder, cache: KVCache) -> None:
        self.shortest = order == "shortest"
        self._passed_tokens = 0
        """Since the start: what steps have computed of prompts, or could have."""
        self._cache = cache
        self._waiting: list[RequestEntry] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestEntry]:
        return iter(self._waiting)

    def __getitem__(self, index: int) -> RequestEntry:
        return self._waiting[index]

    def first(self, count: int) -> list[RequestEntry]:
        """The first so many, or all."""
        return self._waiting[:count]

    def arrive(self, entry: RequestEntry) -> None:
        """A request comes: it waits."""
        entry.came = self._passed_tokens
        self.add(entry)

    def step(self, tokens: int) -> None:
        """A step was planned that computes so many tokens of prompts, or could."""
        self._passed_tokens += tokens

    def add(self, entry: RequestEntry) -> None:
        """A request that has come before waits from now on."""
        self._place(
            entry, len(entry.seq.token_ids) - self._cache.count_cached_tokens(entry.seq) if self.shortest else 0
        )

    def remove(self, entry: RequestEntry) -> None:
        """It waits no more."""
        self._waiting.remove(entry)

    def begun(self, entries: Iterable[RequestEntry]) -> list[RequestEntry]:
        """Prompts that were begun, in their order."""
        entries = list(entries)
        for entry in entries:
            self._set(entry, len(entry.seq.token_ids) - entry.seq.computed_tokens)
        return sorted(entries, key=_turn)

    def goes_back(self, entry: RequestEntry) -> bool:
        """Whether more is left of it than was expected; it has then got its place anew."""
        left = len(entry.seq.token_ids) - self._cache.count_cached_tokens(entry.seq) if self.shortest else 0
        if left <= entry.left:
            return False
        self.remove(entry)
        self._place(entry, left)
        return True

    def compare(self, seq: Sequence, entries: list[RequestEntry]) -> None:
        """What the running `seq` is going to compute need not be computed for those of `entries` that have it too."""
        for entry in entries:
            common = self._cache.plan_shared_prefix(seq, entry.seq)
            left = len(entry.seq.token_ids) - common
            if self.shortest and common and left < entry.left:
                self.remove(entry)
                self._place(entry, left)

    def _place(self, entry: RequestEntry, left: int) -> None:
        self._set(entry, left)
        insort(self._waiting, entry, key=_turn)

    def _set(self, entry: RequestEntry, left: int) -> None:
        entry.left = left
        priority, arrival_s, number = entry.order
        entry.turn = priority, left + AGEING * entry.came if self.shortest else 0.0, arrival_s, number

    def check_invariants(self) -> None:
        assert self._waiting == sorted(self._waiting, key=_turn)
        for entry in self._waiting:
            assert entry.seq not in self._cache
            assert entry.seq.computed_tokens == 0
