"""The requests that wait, run, or have ended while a step with them is out.

A request that ends while a step with it is out keeps its blocks, which other requests of the step may share, until the
last of these steps is applied. Refuses to know budgets, and which request runs next.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass

from engine.cache.kv_cache import KVCache
from engine.prefill_queue import PrefillQueue
from engine.request_entry import RequestEntry
from engine.types import FinishReason, Sequence, SequenceOutput


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    """Of these, from host memory."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0

    def add_prompt(self, seq: Sequence, sign: int = 1) -> None:
        """A prompt was admitted for the first time, or (`sign` -1) was not after all."""
        self.prefix_queried_tokens += sign * seq.prompt_len
        self.prefix_hit_tokens += sign * seq.cached_tokens
        self.host_hit_tokens += sign * seq.host_tokens
        self.prompt_tokens += sign * seq.prompt_len


class ActiveRequests:
    """Requests by their state. A request is in the queue of those that wait, or in `running` while it holds blocks."""

    def __init__(self, cache: KVCache, waiting: PrefillQueue, totals: SchedulerTotals) -> None:
        self._cache = cache
        self._waiting = waiting
        self.totals = totals
        self.running: list[RequestEntry] = []
        """Ordered by (priority, arrival)."""
        self.ended_sequences: set[Sequence] = set()
        """Sequences of the entries that have ended and are not gone."""
        self._entry_by_id: dict[str, RequestEntry] = {}
        """Requests that have not ended."""
        self._entries_in_flight: deque[list[RequestEntry]] = deque()
        """Requests of each step that is out, oldest first."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entry_by_id

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._entry_by_id)

    def is_out(self, entry: RequestEntry) -> bool:
        """Whether a step with the request is out."""
        return any(entry in entries for entries in self._entries_in_flight)

    # ------------------------------------------------------------------ between waiting and running

    def add(self, entry: RequestEntry) -> None:
        """A request comes: it waits."""
        self._entry_by_id[entry.request_id] = entry
        self._waiting.add_arrival(entry)

    def start(self, entry: RequestEntry) -> None:
        """A waiting request was admitted to the cache: it runs."""
        self._waiting.remove(entry)
        insort(self.running, entry)
        if not entry.seq.preemptions:
            entry.seq.cached_tokens = entry.seq.computed_tokens
            self.totals.add_prompt(entry.seq)

    def preempt(self, entry: RequestEntry) -> None:
        """A running request gives up its blocks, most of which stay cached, and waits again."""
        self.running.remove(entry)
        self._cache.release(entry.seq)
        entry.seq.preemptions += 1
        entry.next_check_position = 0
        entry.prompt_logprobs.clear()
        self.totals.preemptions += 1
        self._waiting.add(entry)

    def undo_unexecuted_step(self, entry: RequestEntry, start: int) -> None:
        """A step from position `start` was planned and never computed: as if it had not been, if it was the first."""
        seq = entry.seq
        is_first_admission = not seq.preemptions and start == seq.cached_tokens
        self.preempt(entry)
        if is_first_admission:
            self.totals.preemptions -= 1
            seq.preemptions = 0
            self.totals.add_prompt(seq, -1)

    # ------------------------------------------------------------------ the end of a request

    def take(self, request_id: str) -> RequestEntry | None:
        """Forget the id of a request that ends; None where it is not known (any more)."""
        return self._entry_by_id.pop(request_id, None)

    def end(self, entry: RequestEntry) -> None:
        """Take a request out, once no step with it is out."""
        if self.is_out(entry):
            entry.has_ended, entry.next_check_position = True, 0
            self.ended_sequences.add(entry.seq)
            self._cache.cancel_loads(entry.seq)
        else:
            self.remove(entry)

    def remove(self, entry: RequestEntry) -> None:
        """Take a request out of the queue it is in and give its blocks back."""
        self.ended_sequences.discard(entry.seq)
        if entry.seq in self._cache:
            self.running.remove(entry)
            self._cache.release(entry.seq)
        else:
            self._waiting.remove(entry)
        self._cache.discard_keys(entry.seq)

    def make_error_output(self, entry: RequestEntry, message: str) -> SequenceOutput:
        """Forget the id of a request, and return its last output."""
        del self._entry_by_id[entry.request_id]
        return SequenceOutput(
            request_id=entry.request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=message
        )

    # ------------------------------------------------------------------ steps

    def mark_planned(self, entries: list[RequestEntry]) -> None:
        """A step with these requests is out."""
        self._entries_in_flight.append(entries)

    def mark_applied(self) -> None:
        """The oldest step that is out was applied."""
        self._entries_in_flight.popleft()

    def mark_all_failed(self) -> None:
        """None of the steps that are out will be applied."""
        self._entries_in_flight.clear()

    # ------------------------------------------------------------------ proof

    def check_invariants(self) -> None:
        assert self.running == sorted(self.running)
        assert len(self.running) + len(self._waiting) == len(self._entry_by_id) + len(self.ended_sequences)
        for entry in self.running:
            assert entry.seq in self._cache
            assert (entry.seq in self.ended_sequences) == entry.has_ended
            assert entry.next_check_position < len(entry.seq.block_tables[0]) * self._cache.block_size
