"""The approximate cache of a worker that publishes no events: what was sent there, least recently used first out.

Prompts are cut into chunks of `chunk_tokens`; a chunk's key is the digest of everything up to its end
(`PrefixIndex.chunk_keys`), so a key stands for a whole prefix. Bounded by the worker's advertised capacity. Pure; one
instance a target.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CHUNK_TOKENS = 64


class HistoryCache:
    """Which chunks a worker probably still holds. A chunk evicted before its children leaves them unreachable, and they
    age out in turn; touching a prompt from its end to its start makes the deepest chunks the oldest."""

    def __init__(self, capacity_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens = chunk_tokens
        self.capacity = max(1, capacity_tokens // chunk_tokens)
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def match(self, keys: Sequence[int]) -> int:
        """Tokens of the longest known prefix."""
        chunks = self._chunks
        for i, key in enumerate(keys):
            if key not in chunks:
                return i * self.chunk_tokens
        return len(keys) * self.chunk_tokens

    def insert(self, keys: Sequence[int]) -> None:
        """The prompt was sent there: its chunks are now the most recently used."""
        chunks = self._chunks
        for key in reversed(keys):
            chunks[key] = None
            chunks.move_to_end(key)
        while len(chunks) > self.capacity:
            chunks.popitem(last=False)

    def clear(self) -> None:
        """The worker restarted."""
        self._chunks.clear()
