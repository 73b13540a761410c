"""The engine's own cache (`engine.cache`), played on names of blocks alone.

Every name of a prompt is found or computed, in chunks as the scheduler has them. In a hybrid model's cache, states are
kept where the engine keeps them: where a prompt leaves what is known, at its end and at the ends of long chunks.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import cast

import _path  # noqa: F401

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec
from engine.types import BlockKey, Chunk, Request, SamplingParams, Sequence, StepPlan

CHUNK_TOKENS_MAX = 8192


class PlayedCache:
    """Room for `capacity` blocks of `block_tokens`. In a hybrid model, a state takes as much as `state_blocks` of them.

    Without `state_blocks` the model has no states.
    """

    def __init__(self, capacity: int, block_tokens: int, state_blocks: int | None = None, *, adaptive: bool) -> None:
        group = GroupSpec(FULL_ATTENTION, layer_indices=(0,), num_kv_heads=1, head_dim=128, dtype_bytes=1)
        state = None
        if state_blocks is not None:
            state = StateSpec(layer_indices=(1,), state_bytes=state_blocks * block_tokens * group.token_bytes)
        spec = CacheSpec(block_tokens, (group,), state)
        assert spec.blocks_per_unit(0) == (state_blocks or 1)
        units = max(2, capacity // (state_blocks or 1))
        self.cache = KVCache(spec, units, step_tokens_max=CHUNK_TOKENS_MAX, adaptive_eviction=adaptive)
        self._key_by_name: dict[int, BlockKey] = {}
        self._running: dict[int, Sequence] = {}
        """Running prompts by their last name, oldest first."""
        self.refused_prompts = 0
        """Prompts that were longer than the whole cache."""

    @property
    def names(self) -> Collection[int]:
        """Names of the blocks that are cached or held."""
        return self.cache.tree._node_by_hash

    def serve(self, names: Items[int]) -> int:
        """Serve a prompt, with no other beside it; return how many of its leading blocks were found."""
        hit_count = self.start(names)
        self.finish(names)
        return hit_count

    def start(self, names: Items[int]) -> int:
        """Compute a prompt that goes on by less than a block after `names`, and hold its blocks.

        Returns how many of its leading blocks were found. Without room for it, the oldest running prompt ends first.
        """
        cache, size = self.cache, self.cache.block_size
        length = size * len(names) + 1
        request = Request(request_id="r", token_ids=[], params=SamplingParams())
        tokens = cast("list[int]", range(length))  # only their number is asked for
        seq = Sequence(request=request, token_ids=tokens, prompt_len=length, arrival_s=0.0)
        if length > cache.token_capacity:
            self.refused_prompts += 1
            return 0
        keys = self._key_by_name
        seq.block_keys = [keys.get(name) or keys.setdefault(name, BlockKey(name, b"", None, None)) for name in names]
        while not cache.admit(seq):
            self._release(next(iter(self._running)))
        self._running[names[-1]] = seq
        hit_count = seq.computed_tokens // size
        while seq.computed_tokens < length:
            end = cache.clip_chunk_end(seq, min(length, seq.computed_tokens + CHUNK_TOKENS_MAX))
            has_grown = cache.grow(seq, end)
            assert has_grown, "admitted without room"
            plan = StepPlan(chunks=[Chunk(seq, seq.computed_tokens, end, end == length)])
            cache.register_full_blocks(seq, end)
            cache.fill_plan(plan)
            cache.commit(plan.chunks)
        cache.take_events()
        return hit_count

    def finish(self, names: Items[int]) -> None:
        """End a prompt, whose blocks may be evicted from now on."""
        if names[-1] in self._running:
            self._release(names[-1])

    def _release(self, last_name: int) -> None:
        seq = self._running.pop(last_name)
        self.cache.release(seq)
        self.cache.forget_match(seq)
        self.cache.take_events()
