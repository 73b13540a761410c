"""The load of the index benchmark: what workers announce and what is asked.

A block has 16 tokens, ids uniform over 2^17 (the size of today's vocabularies: the worst case for a msgpack reader, as
ids need two or four bytes by chance). Payloads are vLLM's map events with every field it sends for full attention.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

BLOCK_TOKENS = 16
VOCABULARY = 1 << 17
CHAIN_BLOCKS = 64
"""Blocks of one prompt; the batches of a prompt follow each other by parent hash."""

_ENCODE = msgspec.msgpack.Encoder().encode


def tokens(rng: random.Random, count: int) -> list[int]:
    return [word & (VOCABULARY - 1) for word in array("I", rng.randbytes(4 * count))]


def names(rng: random.Random, count: int) -> list[int]:
    return array("Q", rng.randbytes(8 * count)).tolist()


def stored(block_names: list[int], parent: int | None, token_ids: list[int]) -> bytes:
    """One batch with one run of blocks."""
    event = {
        "type": "BlockStored",
        "block_hashes": block_names,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(block_names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return _ENCODE([1795230670.15, [event], 0])


def batches(seed: int, blocks: int, per_batch: int, streams: int) -> Iterator[tuple[int, bytes]]:
    """(stream, payload) of `blocks` distinct blocks; the streams take turns, each with chains of CHAIN_BLOCKS."""
    rng = random.Random(seed)
    parent: list[int | None] = [None] * streams
    length = [0] * streams
    for at in range(blocks // per_batch):
        stream = at % streams
        if length[stream] >= CHAIN_BLOCKS:
            parent[stream], length[stream] = None, 0
        run = names(rng, per_batch)
        yield stream, stored(run, parent[stream], tokens(rng, per_batch * BLOCK_TOKENS))
        parent[stream] = run[-1]
        length[stream] += per_batch


@dataclass(frozen=True)
class Prompt:
    """A prompt of whole blocks, one token more, and the payload that announces it."""

    token_ids: list[int]
    names: list[int]
    payload: bytes


def prompt(rng: random.Random, blocks: int) -> Prompt:
    token_ids = tokens(rng, blocks * BLOCK_TOKENS + 1)
    block_names = names(rng, blocks)
    return Prompt(token_ids, block_names, stored(block_names, None, token_ids[:-1]))


def asked(rng: random.Random, held: Prompt, hit: str) -> list[int]:
    """A prompt of the same length of which all, the first half or nothing is held."""
    if hit == "full":
        return held.token_ids
    keep = len(held.token_ids) // 2 if hit == "half" else 0
    return held.token_ids[:keep] + tokens(rng, len(held.token_ids) - keep)


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
