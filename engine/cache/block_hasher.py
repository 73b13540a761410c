"""Hashes the blocks of sequences, each block once in a request's life. `events.hashing` defines the hash."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Items

from engine.cache.blocks import BlockKey
from engine.types import Sequence
from events.hashing import hash_packed_blocks, make_hash_keys, make_wire_keys, pack_token_ids


class BlockHasher:
    """Computes the prefix cache keys of each sequence's blocks, once, and keeps them until the request ends."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys_by_sequence: dict[Sequence, list[BlockKey]] = {}

    def compute_keys(self, seq: Sequence, count: int) -> list[BlockKey]:
        """Return the prefix cache keys of at least the first `count` blocks of a sequence, which must be full.

        A key's hash covers the tokens of the block and of all blocks before it, the LoRA adapter, and the salt, which
        keeps tenants from sharing KV. Only blocks that no earlier call hashed are hashed. The caller must not change
        the list, because later calls extend it.
        """
        keys = self._keys_by_sequence.setdefault(seq, [])
        hashed_count = len(keys)
        if count <= hashed_count:
            return keys
        size, lora_name, salt = self._block_size, seq.request.lora_name, seq.request.cache_salt
        packed_tokens = pack_token_ids(seq.token_ids[hashed_count * size : count * size])
        packed_block_bytes = len(packed_tokens) // (count - hashed_count)
        is_first_block = hashed_count == 0  # only the first block of a sequence has the salt among its keys
        hashes = hash_packed_blocks(
            keys[-1].hash if keys else None,
            packed_tokens,
            size,
            make_hash_keys(lora_name, salt, is_first_block),
            make_hash_keys(lora_name, salt, False),
        )
        extra_keys = make_wire_keys(lora_name, salt, is_first_block)
        later_extra_keys = make_wire_keys(lora_name, salt, False)
        for index, hash_ in enumerate(hashes):
            block_tokens = packed_tokens[index * packed_block_bytes : (index + 1) * packed_block_bytes]
            keys.append(BlockKey(hash_, block_tokens, extra_keys, lora_name))
            extra_keys = later_extra_keys
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
