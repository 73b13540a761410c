"""Requests that decode together: what stays the same from step to step while the same requests decode.

Most steps decode one token for each of the same requests. What such a step needs of them is put together once. So a
step looks only at requests that need a new block, fill a block, or reach their longest length. Without this class a
step of 256 sequences takes twice as long to plan and to apply (0.2 ms more). Knows no cache and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.request_entry import RequestEntry
from engine.types import Chunk, DecodedTokens, LazyDecodeChunks


class DecodeBatch:
    """Requests of two plans in a row that decode one token of each request and nothing else.

    The batch is valid until a different plan is made, or a request ends.
    """

    def __init__(self, entries: list[RequestEntry]) -> None:
        self.entries = entries
        self._sequences = [entry.seq for entry in entries]
        self._request_ids = [entry.request_id for entry in entries]
        self._token_lists = [seq.token_ids for seq in self._sequences]
        self._stop_token_ids = frozenset().union(*{entry.stop_token_ids for entry in entries})
        self._first_step_starts = [seq.computed_tokens for seq in self._sequences]
        """Position that the first step of this batch computes, for each sequence."""
        self._steps_made = 0
        self.entries_to_grow: list[RequestEntry] = []
        """Requests that filled a block in the last step and need another one for the next step, in order."""
        self._entries_to_check: dict[int, list[RequestEntry]] = {}
        """Number of a step -> requests that fill a block or end in that step, in order."""
        self._next_check_length = (
            len(self._token_lists[0]) - 1 + min(e.length_max - len(e.seq.token_ids) for e in entries)
        )
        """Number of tokens of the first sequence from which the next token may end some request by its length."""
        for entry in entries:
            if entry.seq.computed_tokens > entry.next_check_position:
                self.entries_to_grow.append(entry)
            else:
                self._schedule_check(entry)

    def finish_growing(self) -> list[RequestEntry]:
        """Record that `entries_to_grow` have their block. Returns the requests that fill a block, or end, next."""
        grown_entries, self.entries_to_grow = self.entries_to_grow, []
        for entry in grown_entries:
            self._schedule_check(entry)
        return self._entries_to_check.get(self._steps_made, [])

    def make_chunks(self, *, token_on_device: bool) -> Items[Chunk]:
        """Return the chunks of the next step. `token_on_device`: as in Chunk."""
        self.entries_to_grow = self._entries_to_check.pop(self._steps_made, [])
        step_index, self._steps_made = self._steps_made, self._steps_made + 1
        if token_on_device:
            return LazyDecodeChunks(self._sequences, self._first_step_starts, step_index)
        starts = zip(self._sequences, self._first_step_starts)
        return [Chunk(seq, start + step_index, start + step_index + 1, True) for seq, start in starts]

    def _schedule_check(self, entry: RequestEntry) -> None:
        step_number = self._steps_made + entry.next_check_position - entry.seq.computed_tokens
        self._entries_to_check.setdefault(step_number, []).append(entry)

    def append_tokens(self, new_token_ids: list[int]) -> DecodedTokens | None:
        """Append one token to each sequence. None, and nothing appended, if a token may end a request."""
        if len(self._token_lists[0]) >= self._next_check_length or not self._stop_token_ids.isdisjoint(new_token_ids):
            return None
        for token_ids, token in zip(self._token_lists, new_token_ids):
            token_ids.append(token)
        return DecodedTokens(self._request_ids, new_token_ids)
