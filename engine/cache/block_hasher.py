"""Hashes the blocks of sequences, each block once in a request's life. `events.hashing` defines the hash."""

from __future__ import annotations

from bisect import bisect_left

from engine.types import BlockKey, Sequence
from events.hashing import hash_packed_blocks, make_hash_keys, make_wire_keys, pack_token_ids


def compute_keys(seq: Sequence, count: int, block_size: int) -> list[BlockKey]:
    """Return the prefix cache keys of at least the first `count` blocks of a sequence, which must be full.

    A key's hash covers the tokens of the block and of all blocks before it, the LoRA adapter, and the salt, which keeps
    tenants from sharing KV. Only blocks that no earlier call hashed are hashed. The caller must not change the list,
    which is `seq.block_keys`, because later calls extend it.
    """
    keys = seq.block_keys
    hashed_count = len(keys)
    if count <= hashed_count:
        return keys
    lora_name, salt = seq.request.lora_name, seq.request.cache_salt
    packed_tokens = pack_token_ids(seq.token_ids[hashed_count * block_size : count * block_size])
    packed_block_bytes = len(packed_tokens) // (count - hashed_count)
    is_first_block = hashed_count == 0  # only the first block of a sequence has the salt among its keys
    hashes = hash_packed_blocks(
        keys[-1].hash if keys else None,
        packed_tokens,
        block_size,
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


def count_common_blocks(seq: Sequence, other_seq: Sequence, block_size: int) -> int:
    """Return the number of leading blocks that two sequences have in common.

    The last token of a sequence is left out, because it must be computed in any case. Equal hashes mean that all blocks
    before are equal, too, so the end of the common prefix is found by bisection.
    """
    max_blocks = min(len(seq.token_ids) - 1, len(other_seq.token_ids) - 1) // block_size
    keys, other_keys = (compute_keys(either_seq, max_blocks, block_size) for either_seq in (seq, other_seq))
    return bisect_left(range(max_blocks), True, key=lambda index: keys[index].hash != other_keys[index].hash)
