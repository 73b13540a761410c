"""The simulated workers: our engine's real cache, scheduler and core on a fake device; and a vLLM-like one.

Both say what is really resident (`usable`), which is what the index is held to.
"""

from __future__ import annotations

import random
from collections import Counter

from block_hash import hash_block
from fake_device import FakeDevice

from engine.cache.kv_cache import KVCache
from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec
from engine.core import EngineCore
from engine.scheduler import RequestRefusedError, Scheduler, SchedulerConfig
from engine.types import Request, SamplingParams, Sequence
from events import AllBlocksCleared, BlockRemoved, BlockStored, Event

BLOCK = 4
PROMPTS = 12
Prompt = tuple[tuple[int, ...], str | None]


def draw_prompt(rng: random.Random) -> Prompt:
    """Token ids and salt; few enough families that prefixes are shared, block boundaries hit and missed."""
    family = rng.randrange(4)
    length = rng.randrange(1, 10 * BLOCK)
    fork = rng.randrange(length + 1)
    shared_ids = [family * 7 + i for i in range(fork)]
    own_ids = [1000 + rng.randrange(2) for _ in range(length - fork)]
    return tuple(shared_ids + own_ids), "salt" if rng.random() < 0.15 else None


def fork_rng(rng: random.Random) -> random.Random:
    """A draw that leaves those to come as they are: seeds go on meaning what they meant."""
    return random.Random(repr(rng.getstate()[1][-1]) + repr(rng.getstate()[1][0]))


class OurWorker:
    """`engine serve` without the model: real pool, prefix tree, scheduler and core."""

    snapshots = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        window = rng.choice([None, None, 2 * BLOCK, 3 * BLOCK - 1])
        groups = [GroupSpec(FULL_ATTENTION, (0,), 1, 1, 1)]
        if window is not None:
            groups.append(GroupSpec(SLIDING_WINDOW, (1,), 1, 1, 1, window))
        self._cache = KVCache(
            CacheSpec(BLOCK, tuple(groups)),
            rng.choice([24, 48]),
            step_tokens_max=16,
            adaptive_eviction=fork_rng(rng).random() < 0.5,
            host_unit_count=rng.choice([0, 0, 6, 60]),
        )
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
        self._events: list[Event] = []
        device = FakeDevice(BLOCK, [group.sliding_window for group in groups])
        self._core = EngineCore(Scheduler(config, self._cache), device, self._events.extend)
        self._running: list[str] = []
        self._count = 0

    def act(self, now: float) -> list[Event]:
        """A moment of service; returns what it announces."""
        rng = self._rng
        if rng.random() < 0.4:
            token_ids, salt = draw_prompt(rng)
            self._count += 1
            params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True)
            request = Request(request_id=str(self._count), token_ids=list(token_ids), params=params, cache_salt=salt)
            try:
                self._core.add(request, now)
                self._running.append(request.request_id)
            except RequestRefusedError:
                pass  # longer than this small cache can ever hold
        if self._running and rng.random() < 0.05:
            self._core.abort([rng.choice(self._running)])
        if rng.random() < 0.01:
            self._core.reset_prefix_cache()
        self._core.step(now)
        events, self._events[:] = list(self._events), []
        return events

    def finish(self, now: float) -> list[list[Event]]:
        """Serve what is left, step by step."""
        batches = []
        while self._core.has_work:
            self._core.step(now)
            batches.append(list(self._events))
            self._events.clear()
        return batches

    def usable(self, prompt: Prompt) -> int:
        """Tokens of the prompt that a request would find cached right now: the engine's own lookup."""
        params = SamplingParams()
        request = Request(request_id="probe", token_ids=list(prompt[0]), params=params, cache_salt=prompt[1])
        probe = Sequence(request, list(prompt[0]), len(prompt[0]), 0.0)
        cached_tokens = self._cache.count_cached_tokens(probe)
        self._cache.forget_match(probe)
        return cached_tokens

    def resident_count(self) -> int:
        """(group, block) presences."""
        nodes = self._cache.tree.nodes()
        blocks = (block for node in nodes for block in (*node.blocks, *(node.host_blocks or ())))
        return sum(block is not None and not block.is_pending for block in blocks)


class ForeignWorker:
    """A vLLM-like producer: a hash may be stored twice, each copy is removed by itself, holes occur, no snapshots.

    One with an offloading connector has copies in host memory too, which come and go by themselves.
    """

    snapshots = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._media = fork_rng(rng).choice([("GPU",), ("GPU",), ("GPU", "CPU")])
        self._copies: Counter[tuple[tuple[Prompt, int], str]] = Counter()
        self._names: dict[tuple[Prompt, int], int] = {}

    def act(self, now: float) -> list[Event]:
        rng = self._rng
        events: list[Event] = []
        for _ in range(rng.randrange(3)):
            choice = rng.random()
            if choice < 0.6:
                events += self._store(draw_prompt(rng))
            elif choice < 0.98 and self._copies:
                events.append(self._remove(rng.choice(sorted(self._copies, key=repr))))
            elif choice > 0.99:
                self._copies.clear()
                events.append(AllBlocksCleared())
        return events

    def finish(self, now: float) -> list[list[Event]]:
        return []

    def usable(self, prompt: Prompt) -> int:
        count = 0
        while (count + 1) * BLOCK < len(prompt[0]):
            key = self._key(prompt, count + 1)
            if not any((key, medium) in self._copies for medium in self._media):
                break
            count += 1
        return count * BLOCK

    def resident_count(self) -> int:
        return len(self._copies)

    def _key(self, prompt: Prompt, blocks: int) -> tuple[Prompt, int]:
        return (prompt[0][: blocks * BLOCK], prompt[1]), blocks

    def _store(self, prompt: Prompt) -> list[Event]:
        """Announce the whole prompt or, where a prefix is resident, sometimes only what follows it."""
        total, medium = len(prompt[0]) // BLOCK, fork_rng(self._rng).choice(self._media)
        first = 0
        if self._rng.random() < 0.7:
            first = min(total, self.usable((*prompt[:1], prompt[1])) // BLOCK)
        hashes = []
        for index in range(total):
            key = self._key(prompt, index + 1)
            parent = hashes[-1] if hashes else None
            keys = (prompt[1],) if prompt[1] and index == 0 else ()
            hashes.append(hash_block(parent, prompt[0][index * BLOCK : (index + 1) * BLOCK], keys))
            self._names[key] = hashes[-1]
        if first >= total:
            return []
        for index in range(first, total):
            self._copies[self._key(prompt, index + 1), medium] += 1
        extra = [(prompt[1],) if prompt[1] and index == 0 else None for index in range(first, total)]
        return [
            BlockStored(
                block_hashes=list(hashes[first:]),
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=list(prompt[0][first * BLOCK : total * BLOCK]),
                block_size=BLOCK,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=extra,
                group_idx=0,
                kv_cache_spec_kind=FULL_ATTENTION,
            )
        ]

    def _remove(self, copy: tuple[tuple[Prompt, int], str]) -> Event:
        self._copies[copy] -= 1
        if not self._copies[copy]:
            del self._copies[copy]
        key, medium = copy
        return BlockRemoved(block_hashes=[self._names[key]], medium=medium, group_idx=0)


Worker = OurWorker | ForeignWorker
