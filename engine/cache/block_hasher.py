"""Hashes the blocks of sequences, each block once in a request's life. A block's key (`BlockKey`) is its name.

Refuses to know what is cached under a name. Invariant: a sequence has the keys of its leading full blocks. Equal keys
mean that one's KV can be used for the other (`events.hashing`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from engine.cache.blocks import BlockKey
from engine.types import Sequence
from events.hashing import hash_packed_blocks, make_hash_keys, make_wire_keys, pack_token_ids


class ExtraKeys(NamedTuple):
    """Keys that identify a block besides its tokens: as they are hashed, and as events announce them."""

    hashed: tuple[str, ...]
    announced: tuple[str, ...] | None


def _extra_keys(lora_name: str | None, salt: str | None, *, first: bool) -> ExtraKeys:
    return ExtraKeys(make_hash_keys(lora_name, salt, first), make_wire_keys(lora_name, salt, first))


_NO_EXTRA_KEYS = _extra_keys(None, None, first=False)


class BlockHasher:
    """Computes and keeps the keys of each sequence's blocks."""

    names_blocks = True
    """Whether blocks get keys at all."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys_by_sequence: dict[Sequence, list[BlockKey]] = {}

    def block_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        """Return the keys of at least the first `count` blocks, which must be full. Only new blocks are hashed.

        A hash covers the block's tokens and the hash of the block before it, so it stands for the whole prefix. A LoRA
        adapter or a salt is hashed, too, as the same tokens have other KV there, or are not to be shared. The list is
        the hasher's own; it grows with later calls.
        """
        keys = self._keys_by_sequence.setdefault(seq, [])
        hashed_count = len(keys)
        if count <= hashed_count:
            return keys
        request, size = seq.request, self._block_size
        packed_tokens = pack_token_ids(seq.token_ids[hashed_count * size : count * size])
        packed_size = len(packed_tokens) // (count - hashed_count)
        first_extra = later_extra = _NO_EXTRA_KEYS
        if request.lora_name is not None or request.cache_salt is not None:
            first_extra = _extra_keys(request.lora_name, request.cache_salt, first=hashed_count == 0)
            later_extra = _extra_keys(request.lora_name, request.cache_salt, first=False)
        parent_hash = keys[-1].hash if keys else None
        hashes = hash_packed_blocks(parent_hash, packed_tokens, size, first_extra.hashed, later_extra.hashed)
        for index, hash_ in enumerate(hashes):
            block_tokens = packed_tokens[index * packed_size : (index + 1) * packed_size]
            announced_keys = first_extra.announced if index == 0 else later_extra.announced
            keys.append(BlockKey(hash_, block_tokens, announced_keys, request.lora_name))
        return keys

    def find_common_prefix(self, seq: Sequence, other_seq: Sequence) -> tuple[int, int]:
        """Return (number of leading blocks that both have, hash of the last of them); (0, 0) without a common block.

        Each sequence keeps at least one token to compute. A hash covers all blocks before it, so the end of the common
        prefix is found by bisection.
        """
        max_blocks = min(len(seq.token_ids) - 1, len(other_seq.token_ids) - 1) // self._block_size
        keys, other_keys = self.block_keys(seq, max_blocks), self.block_keys(other_seq, max_blocks)
        if not max_blocks or keys[0].hash != other_keys[0].hash:
            return 0, 0
        min_blocks = 1
        while min_blocks < max_blocks:
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
    """Null object for a cache without prefix caching: no block has a key."""

    names_blocks = False

    def __init__(self) -> None:
        super().__init__(block_size=1)

    def block_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        return []
