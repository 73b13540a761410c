"""Hashes the blocks of sequences, each block once in a request's life. A block's key (`BlockKey`) is its name.

Refuses to know what is cached under a name. Invariant: a sequence has the keys of its leading full blocks. Equal keys
mean that one's KV can be used for the other (`events.hashing`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.cache.blocks import BlockKey
from engine.types import Sequence
from events.hashing import hash_packed_blocks, make_hash_keys, make_wire_keys, pack_token_ids

ExtraKeys = tuple[tuple[str, ...], tuple[str, ...] | None]
"""(keys that are hashed, keys that events announce) of a block, besides its tokens."""


def _extra_keys(lora_name: str | None, salt: str | None, *, first: bool) -> ExtraKeys:
    return make_hash_keys(lora_name, salt, first), make_wire_keys(lora_name, salt, first)


_NO_EXTRA_KEYS = _extra_keys(None, None, first=False)


class BlockHasher:
    """The keys of each sequence's blocks."""

    names_blocks = True
    """Whether blocks get keys at all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys_by_sequence: dict[Sequence, list[BlockKey]] = {}

    def block_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        """Return the keys of at least the first `count` blocks, which must be full."""
        keys = self._keys_by_sequence.get(seq)
        if keys is None:
            keys = self._keys_by_sequence[seq] = []
        hashed_count, size, request = len(keys), self._block_size, seq.request
        if count <= hashed_count:
            return keys
        lora, salt = request.lora_name, request.cache_salt
        packed_tokens = pack_token_ids(seq.token_ids[hashed_count * size : count * size])
        stride = len(packed_tokens) // (count - hashed_count)
        first_extra = later_extra = _NO_EXTRA_KEYS
        if lora is not None or salt is not None:
            first_extra = _extra_keys(lora, salt, first=not hashed_count)
            later_extra = _extra_keys(lora, salt, first=False)
        parent = keys[-1].hash if keys else None
        for index, hash_ in enumerate(hash_packed_blocks(parent, packed_tokens, size, first_extra[0], later_extra[0])):
            announced_keys = later_extra[1] if index else first_extra[1]
            keys.append(BlockKey(hash_, packed_tokens[index * stride : (index + 1) * stride], announced_keys, lora))
        return keys

    def find_common_prefix(self, seq: Sequence, other_seq: Sequence) -> tuple[int, int]:
        """Return (number of leading blocks that both have, hash of the last of them).

        Each sequence keeps at least one token to compute. (0, 0): no common block.
        """
        max_blocks = min(len(seq.token_ids) - 1, len(other_seq.token_ids) - 1) // self._block_size
        keys, other_keys = self.block_keys(seq, max_blocks), self.block_keys(other_seq, max_blocks)
        if not max_blocks or keys[0].hash != other_keys[0].hash:
            return 0, 0
        min_blocks = 1
        while min_blocks < max_blocks:  # hashes are chained: equal at one block means equal up to it
            middle = (min_blocks + max_blocks + 1) // 2
            if keys[middle - 1].hash == other_keys[middle - 1].hash:
                min_blocks = middle
            else:
                max_blocks = middle - 1
        return min_blocks, keys[min_blocks - 1].hash

    def hashed_keys(self, seq: Sequence) -> Items[BlockKey]:
        """Return the keys that were computed before."""
        return self._keys_by_sequence.get(seq, ())

    def discard(self, seq: Sequence) -> None:
        """Forget the keys of a request that has ended."""
        self._keys_by_sequence.pop(seq, None)


class NoNames(BlockHasher):
    """Hasher of a cache without prefix caching: no block has a key."""

    names_blocks = False

    def __init__(self) -> None:
        super().__init__(block_size=1)

    def block_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        return []
