"""Hashes the blocks of sequences, each block once in a request's life.

Refuses to know which blocks are cached. Invariant: a sequence has the keys of its leading full blocks. Two blocks with
equal keys have the same KV (`events.hashing`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items

from engine.cache.blocks import BlockKey
from engine.types import Sequence
from events.hashing import hash_packed_blocks, make_hash_keys, make_wire_keys, pack_token_ids


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
        size, lora_name, salt = self._block_size, seq.request.lora_name, seq.request.cache_salt
        is_start = hashed_count == 0
        packed_tokens = pack_token_ids(seq.token_ids[hashed_count * size : count * size])
        packed_size = len(packed_tokens) // (count - hashed_count)
        hashes = hash_packed_blocks(
            keys[-1].hash if keys else None,
            packed_tokens,
            size,
            make_hash_keys(lora_name, salt, is_start),
            make_hash_keys(lora_name, salt, False),
        )
        first_keys, later_keys = make_wire_keys(lora_name, salt, is_start), make_wire_keys(lora_name, salt, False)
        for index, hash_ in enumerate(hashes):
            block_tokens = packed_tokens[index * packed_size : (index + 1) * packed_size]
            keys.append(BlockKey(hash_, block_tokens, later_keys if index else first_keys, lora_name))
        return keys

    def count_common_blocks(self, seq: Sequence, other_seq: Sequence) -> int:
        """Return the number of leading blocks that two sequences have in common.

        The last token of a sequence is left out, because it must be computed in any case. Equal hashes mean that all
        blocks before are equal, too, so the end of the common prefix is found by bisection.
        """
        max_blocks = min(len(seq.token_ids) - 1, len(other_seq.token_ids) - 1) // self._block_size
        keys, other_keys = self.compute_keys(seq, max_blocks), self.compute_keys(other_seq, max_blocks)
        return bisect_left(range(max_blocks), True, key=lambda index: keys[index].hash != other_keys[index].hash)

    def get_computed_keys(self, seq: Sequence) -> Items[BlockKey]:
        """Return the keys of `seq` that earlier calls computed."""
        return self._keys_by_sequence.get(seq, ())

    def discard(self, seq: Sequence) -> None:
        """Forget the keys of a request that has ended."""
        self._keys_by_sequence.pop(seq, None)
