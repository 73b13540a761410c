"""The name our engine gives a block: a 64-bit hash chained over everything that decides whether its KV can be reused.

Owns the byte layout that is hashed (docs/adr/0001 tells why 64 bits are enough) and the extra keys of a request.
Refuses to know blocks, pools and devices. Invariant: two blocks with the same (parent, tokens, keys) have the same
name on every machine and in every version; the golden vectors of the tests hold this.

The bytes under one hash are `parent u64 | token count u32 | token ids u32 ... | (key length u32 | key utf-8) ...`,
all little-endian. Both counts are there so that no two different inputs have the same bytes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NewType

from xxhash import xxh3_64_intdigest

BlockHash = NewType("BlockHash", int)
"""Hash of a block: unsigned, 64 bits."""

ROOT_HASH: BlockHash = BlockHash(xxh3_64_intdigest(b"blockcast block hash, version 1"))
"""Parent hash of a prompt's first block. Never on the wire: there the parent is nil."""

_TOKEN_BYTES = 4


def _encode_uint32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian uint32. Raises ValueError for an id outside [0, 2^32)."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        id_array = token_ids
    else:
        try:
            id_array = array("I", token_ids)
        except OverflowError as error:
            raise ValueError(f"token ids must be in [0, 2^32): {error}") from error
    if sys.byteorder == "big":
        id_array = id_array[:]
        id_array.byteswap()
    return id_array.tobytes()


def unpack_token_ids(packed_ids: bytes) -> list[int]:
    """Unpack the token ids that `pack_token_ids` packed."""
    token_ids = array("I", packed_ids)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


def _pack_keys(extra_keys: tuple[str, ...]) -> bytes:
    if not extra_keys:
        return b""
    encoded_keys = [key.encode() for key in extra_keys]
    return b"".join(_encode_uint32(len(key)) + key for key in encoded_keys)


def hash_blocks(
    parent: int | None,
    token_ids: Sequence[int],
    block_size: int,
    first_keys: tuple[str, ...] = (),
    other_keys: tuple[str, ...] = (),
) -> list[BlockHash]:
    """Hash the full blocks of token ids, as `hash_packed_blocks` does."""
    return hash_packed_blocks(parent, pack_token_ids(token_ids), block_size, first_keys, other_keys)


def hash_packed_blocks(
    parent: int | None,
    packed_ids: bytes,
    block_size: int,
    first_keys: tuple[str, ...] = (),
    other_keys: tuple[str, ...] = (),
) -> list[BlockHash]:
    """Return the hashes of the full blocks of token ids that `pack_token_ids` packed; a partial last block has none.

    Each hash covers the hash of the block before. `parent` is the hash of the block before the first one; None at the
    start of a prompt. `first_keys` are the extra keys of the first block, `other_keys` those of the others.
    """
    block_bytes = block_size * _TOKEN_BYTES
    packed_block_size = _encode_uint32(block_size)
    packed_keys = _pack_keys(first_keys)
    other_packed_keys = _pack_keys(other_keys)
    block_hash: int = ROOT_HASH if parent is None else parent
    hashes: list[BlockHash] = []
    for start_byte in range(0, len(packed_ids) - block_bytes + 1, block_bytes):
        packed_parent = block_hash.to_bytes(8, "little")
        packed_tokens = packed_ids[start_byte : start_byte + block_bytes]
        block_hash = xxh3_64_intdigest(packed_parent + packed_block_size + packed_tokens + packed_keys)
        hashes.append(BlockHash(block_hash))
        packed_keys = other_packed_keys
    return hashes


def make_hash_keys(lora_name: str | None, cache_salt: str | None, is_first_block: bool) -> tuple[str, ...]:
    """Return the `extra_keys` of a request's block: a salt and a LoRA of the same spelling stay different."""
    keys = () if lora_name is None else ("lora:" + lora_name,)
    return (*keys, "salt:" + cache_salt) if is_first_block and cache_salt is not None else keys


def make_wire_keys(lora_name: str | None, cache_salt: str | None, is_first_block: bool) -> tuple[str, ...] | None:
    """Return `BlockStored.extra_keys` of a block as vLLM writes it: bare names, None for nothing."""
    keys = () if lora_name is None else (lora_name,)
    keys = (*keys, cache_salt) if is_first_block and cache_salt is not None else keys
    return keys or None
