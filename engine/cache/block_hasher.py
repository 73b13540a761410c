"""Hashes the blocks of sequences, each block once in a request's life.

Refuses to know which blocks are cached. Invariant: a sequence has the keys of its leading full blocks. Two blocks with
equal keys have the same KV (`events.hashing`).
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


class CommonPrefix(NamedTuple):
    """Leading blocks that two sequences have in common."""

    block_count: int
    hash: int
    """Hash of the last of these blocks; 0 without any."""


def _make_extra_keys(lora_name: str | None, salt: str | None, *, first: bool) -> ExtraKeys:
    return ExtraKeys(make_hash_keys(lora_name, salt, first), make_wire_keys(lora_name, salt, first))


_NO_EXTRA_KEYS = _make_extra_keys(None, None, first=False)


class BlockHasher:
    """Computes the keys of each sequence's blocks, and keeps them until the request ends."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys_by_sequence: dict[Sequence, list[BlockKey]] = {}

    def compute_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        """Return the keys of at least the first `count` blocks, which must be full. Only new blocks are hashed.

        A hash covers the tokens of the block and of all blocks before it, the LoRA adapter, which changes the KV, and
        the salt, which keeps tenants from sharing KV. The caller must not change the list: later calls extend it.
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
            first_extra = _make_extra_keys(request.lora_name, request.cache_salt, first=hashed_count == 0)
            later_extra = _make_extra_keys(request.lora_name, request.cache_salt, first=False)
        parent_hash = keys[-1].hash if keys else None
        hashes = hash_packed_blocks(parent_hash, packed_tokens, size, first_extra.hashed, later_extra.hashed)
        for index, hash_ in enumerate(hashes):
            block_tokens = packed_tokens[index * packed_size : (index + 1) * packed_size]
            announced_keys = first_extra.announced if index == 0 else later_extra.announced
            keys.append(BlockKey(hash_, block_tokens, announced_keys, request.lora_name))
        return keys

    def find_common_prefix(self, seq: Sequence, other_seq: Sequence) -> CommonPrefix:
        """Return the leading blocks that both sequences have.

        The last token of a sequence is left out, because it must be computed in any case. Equal hashes mean that all
        blocks before are equal, too, so the end of the common prefix is found by bisection.
        """
        max_blocks = min(len(seq.token_ids) - 1, len(other_seq.token_ids) - 1) // self._block_size
        keys, other_keys = self.compute_keys(seq, max_blocks), self.compute_keys(other_seq, max_blocks)
        if not max_blocks or keys[0].hash != other_keys[0].hash:
            return CommonPrefix(0, 0)
        min_blocks = 1
        while min_blocks < max_blocks:
            middle = (min_blocks + max_blocks + 1) // 2
            if keys[middle - 1].hash == other_keys[middle - 1].hash:
                min_blocks = middle
            else:
                max_blocks = middle - 1
        return CommonPrefix(min_blocks, keys[min_blocks - 1].hash)

    def get_computed_keys(self, seq: Sequence) -> Items[BlockKey]:
        """Return the keys of `seq` that earlier calls computed."""
        return self._keys_by_sequence.get(seq, ())

    def discard(self, seq: Sequence) -> None:
        """Forget the keys of a request that has ended."""
        self._keys_by_sequence.pop(seq, None)


class NoBlockKeys(BlockHasher):
    """Null object for a cache without prefix caching: no block has a key."""

    def __init__(self) -> None:
        super().__init__(block_size=1)

    def compute_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        return []
