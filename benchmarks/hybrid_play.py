"""A hybrid model's cache, played on names alone: the engine's own (`engine.cache`), with units and checkpoints.

Of each prompt every name is found or computed, one request at a time and in chunks as the scheduler has them; states
are kept where the engine keeps them: where a prompt leaves what is known, at its end and at the ends of long chunks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import cast

import _path  # noqa: F401

from engine.cache.blocks import BlockKey
from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.types import Chunk, Request, SamplingParams, Sequence, StepPlan

CHUNK_TOKENS_MAX = 8192


class HybridCache:
    """Room for `capacity` blocks of `block_tokens`; a state takes as much as `state_blocks` of them."""

    def __init__(self, capacity: int, block_tokens: int, state_blocks: int, *, adaptive: bool) -> None:
        group = GroupSpec(FULL_ATTENTION, layer_indices=(0,), num_kv_heads=1, head_dim=128, dtype_bytes=1)
        state = StateSpec(layer_indices=(1,), state_bytes=state_blocks * block_tokens * group.token_bytes)
        spec = CacheSpec(block_tokens, (group,), state)
        assert spec.blocks_per_unit(0) == state_blocks
        units = max(2, capacity // state_blocks)
        self.cache = KVCache(spec, units, step_tokens_max=CHUNK_TOKENS_MAX, adaptive_eviction=adaptive)
        self._prompt: list[BlockKey] = []
        self.cache._hasher.block_keys = lambda seq, count: self._prompt  # type: ignore[method-assign]
        self._blocks: dict[int, BlockKey] = {}
        self.refused_prompts = 0
        """Prompts that were longer than the whole cache."""

    def serve(self, names: Items[int]) -> int:
        """Serve a prompt that goes on by less than a block; how many of its leading blocks were resumed from."""
        cache, size = self.cache, self.cache.block_size
        blocks = self._blocks
        self._prompt = [blocks.get(n) or blocks.setdefault(n, BlockKey(n, b"", None, None)) for n in names]
        length = size * len(names) + 1
        request = Request(request_id="r", token_ids=[], params=SamplingParams())
        tokens = cast("list[int]", range(length))  # only their number is asked for
        seq = Sequence(request=request, token_ids=tokens, prompt_len=length, arrival_s=0.0)
        if length > cache.token_capacity or not cache.admit(seq):
            self.refused_prompts += 1
            cache.discard_keys(seq)
            return 0
        hit_count = seq.computed_tokens // size
        while seq.computed_tokens < length:
            end = cache.clip_chunk_end(seq, min(length, seq.computed_tokens + CHUNK_TOKENS_MAX))
            has_grown = cache.grow(seq, end)
            assert has_grown, "a request that fits alone did not fit alone"
            plan = StepPlan(chunks=[Chunk(seq, seq.computed_tokens, end, end == length)])
            cache.register_full_blocks(seq, end)
            cache.fill_plan(plan)
            cache.commit(plan.chunks)
        cache.release(seq)
        cache.discard_keys(seq)
        cache.take_events()
        return hit_count
