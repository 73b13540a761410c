"""Requests that decode together: what is the same in every step while the same ones come.

Most steps decode a token for each of the same requests. What such a step needs of them is put together once. So most
steps look only at requests that need a block or finish one. Knows no cache and no budget.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.request_entry import RequestEntry
from engine.types import Chunk, DecodedTokens, LazyDecodeChunks


class DecodeBatch:
    """Those of two plans in a row, the last that were made, which have a decode of each and nothing else.

    Good until anything but the next such plan is made, or one of them goes.
    """

    def __init__(self, entries: list[RequestEntry]) -> None:
        self.entries = entries
        self._sequences = [entry.seq for entry in entries]
        self._request_ids = [entry.request_id for entry in entries]
        self._token_lists = [seq.token_ids for seq in self._sequences]
        self._stop_token_ids = frozenset().union(*{entry.stop_token_ids for entry in entries})
        self._first_step_starts = [seq.computed_tokens for seq in self._sequences]
        """Of their chunks in the first of its steps."""
        self._steps_made = 0
        self.entries_to_grow: list[RequestEntry] = []
        """Requests that need a block for the next step, in order: they filled one in the last."""
        self._entries_to_check: dict[int, list[RequestEntry]] = {}
        """Requests that fill a block or end, in order, by the number of the step."""
        self._next_check_length = (
            len(self._token_lists[0]) - 1 + min(e.length_max - len(e.seq.token_ids) for e in entries)
        )
        """While the first sequence has fewer tokens than this, no request ends with one token more."""
        for entry in entries:
            if entry.seq.computed_tokens > entry.next_check_position:
                self.entries_to_grow.append(entry)
            else:
                self._schedule_check(entry)

    def finish_growing(self) -> list[RequestEntry]:
        """Those that need a block have it now. Who fills one in the next step, or ends."""
        grown_entries, self.entries_to_grow = self.entries_to_grow, []
        for entry in grown_entries:
            self._schedule_check(entry)
        return self._entries_to_check.get(self._steps_made, [])

    def make_chunks(self, *, token_on_device: bool) -> Items[Chunk]:
        """Chunks of the next step. `token_on_device`: as in Chunk."""
        self.entries_to_grow = self._entries_to_check.pop(self._steps_made, [])
        step_index, self._steps_made = self._steps_made, self._steps_made + 1
        if token_on_device:
            return LazyDecodeChunks(self._sequences, self._first_step_starts, step_index)
        starts = zip(self._sequences, self._first_step_starts)
        return [Chunk(seq, start + step_index, start + step_index + 1, True) for seq, start in starts]

    def _schedule_check(self, entry: RequestEntry) -> None:
        self._entries_to_check.setdefault(
            self._steps_made + entry.next_check_position - entry.seq.computed_tokens, []
        ).append(entry)

    def append_tokens(self, new_token_ids: list[int]) -> DecodedTokens | None:
        """Append a token to each, where none of them ends with that; None, and nothing done, where one may."""
        if len(self._token_lists[0]) >= self._next_check_length or not self._stop_token_ids.isdisjoint(new_token_ids):
            return None
        for token_ids, token in zip(self._token_lists, new_token_ids):
            token_ids.append(token)
        return DecodedTokens(self._request_ids, new_token_ids)
