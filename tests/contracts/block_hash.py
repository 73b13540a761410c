"""The definition of a block's hash, for one block; `events.hashing` hashes the blocks of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from events.hashing import ROOT_HASH, BlockHash, pack_token_ids


def hash_block(parent: int | None, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> BlockHash:
    """The hash of the block that holds `token_ids` after the block named `parent` (None: at the start of a prompt)."""
    parts = [(ROOT_HASH if parent is None else parent).to_bytes(8, "little"), len(token_ids).to_bytes(4, "little")]
    parts.append(pack_token_ids(token_ids))
    for key in extra_keys:
        parts += [len(key.encode()).to_bytes(4, "little"), key.encode()]
    return BlockHash(xxh3_64_intdigest(b"".join(parts)))
