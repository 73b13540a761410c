"""Names of sequences' blocks: each is hashed once in a request's life.

Refuses to know what is cached under a name. Invariant: the names of a sequence are those of its leading full blocks,
and hash everything that decides whether their KV can be reused (`events.hashing`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.cache.nodes import BlockKey
from engine.types import Sequence
from events.hashing import chain_hashes, hash_keys, pack_token_ids, wire_keys

Keys = tuple[tuple[str, ...], tuple[str, ...] | None]
"""(what is hashed, what is announced) of a block besides its tokens."""


def _keys(lora_name: str | None, salt: str | None, *, first: bool) -> Keys:
    return hash_keys(lora_name, salt, first), wire_keys(lora_name, salt, first)


_BARE = _keys(None, None, first=False)


class BlockHasher:
    """What the blocks of each sequence are called."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[Sequence, list[BlockKey]] = {}

    def of(self, seq: Sequence, count: int) -> list[BlockKey]:
        """Names of at least the first `count` blocks."""
        names = self._names.get(seq)
        if names is None:
            names = self._names[seq] = []
        known, size, request = len(names), self._block_size, seq.request
        if count <= known:
            return names
        lora, salt = request.lora_name, request.cache_salt
        packed = pack_token_ids(seq.token_ids[known * size : count * size])
        stride = len(packed) // (count - known)
        first = others = _BARE
        if lora is not None or salt is not None:
            first, others = _keys(lora, salt, first=not known), _keys(lora, salt, first=False)
        parent = names[-1].hash if names else None
        for index, hash_ in enumerate(chain_hashes(parent, packed, size, first[0], others[0])):
            keys = others[1] if index else first[1]
            names.append(BlockKey(hash_, packed[index * stride : (index + 1) * stride], keys, lora))
        return names

    def known(self, seq: Sequence) -> Items[BlockKey]:
        """Names that were asked for before."""
        return self._names.get(seq, ())

    def forget(self, seq: Sequence) -> None:
        """Drop what is remembered of a request that is gone for good."""
        self._names.pop(seq, None)
