"""What will be found in each worker's cache: by its events, by what was promised to it, and by what it has room for.

A prompt that was sent to a worker counts as cached there at once. With events, it is **pinned** in the index until they
came: as long as the request lives, and for a grace period after its end, as the answer races the events. Without
events, what was sent is all that is known: an **approximate cache**, least recently used first out, at the advertised
capacity. Where the capacity is known, `WorkingSets` says whether there is room for a prompt that wants to come back.

Refuses to know load and prices. Invariants: a request has at most one pin; no pin outlives its grace or its holder.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec

from router.decide.config import CoreConfig
from router.decide.price import CandidateFacts, estimate_tier_load_s
from router.decide.shortlist import RIVALS_MIN, LoadOrder
from router.decide.target import Target
from router.decide.workers import CacheView, WorkerSpec
from router.decide.working_set import WorkingSets
from router.index.protocol import HolderId, Match, PinId, PrefixIndex, PreparedPrompt, PromptMemory, Scope

SHARED_RUNNING_MIN: Final = 2
"""So many running requests with one beginning make it hot."""
SHARED_COPY_S: Final = 15.0
"""A copy of it is good for so long."""
LIFETIME_S_MIN: Final = 1e-3
"""Shortest lifetime of a request, where nothing is said."""
CHUNK_TOKENS: Final = 64
"""Histories are kept in chunks of so many tokens."""
CLEARED_WORKERS_MAX: Final = 1000
APPROXIMATE_CACHE_TOKENS: Final = 500_000
"""Tokens that the cache of a worker without events is taken to hold, where the worker does not tell its capacity."""


class RunningPrompt(msgspec.Struct, eq=False):
    """The prompt of a request in flight, where it was sent. The core's record of the request holds it."""

    target: Target
    query: PromptQuery
    chunk_keys: Sequence[int]
    pin: PinId | None = None
    """The promise in the index that its prefix will be cached there; None where the target sends no events, or where
    the promise is void."""


class GracePin(NamedTuple):
    """A pin of an ended request."""

    release_s: float
    holder: HolderId
    pin: PinId


class PromptQuery(msgspec.Struct, eq=False):
    """A request's prompt as the index and the books ask for it: prepared once, cut once."""

    index: PrefixIndex
    prepared_ids: PreparedPrompt
    scope: Scope
    prompt_tokens: int
    """Its length."""
    _keys: dict[int, list[int]] = {}

    def get_chunk_keys(self, chunk_tokens: int) -> list[int]:
        """The keys of its chunks of so many tokens, each the digest of everything up to the chunk's end."""
        if self.prompt_tokens <= chunk_tokens:
            return []
        keys = self._keys.get(chunk_tokens)
        if keys is None:
            keys = self._keys[chunk_tokens] = self.index.chunk_keys(self.prepared_ids, self.scope, chunk_tokens)
        return keys


class CacheState:
    """What counts as cached where. One a core."""

    def __init__(self, index: PrefixIndex, config: CoreConfig, working_sets: WorkingSets) -> None:
        self._index = index
        self._pin_grace_s, self._cost_config = config.pin_grace_s, config.cost
        self.working_sets = working_sets
        self._chunk_tokens = working_sets.chunk_tokens
        self._approximate_caches: dict[str, ApproximateCache] = {}
        """target name -> approximate cache, for targets without events."""
        self._running_chunks = index.tally()
        """How many of them have each."""
        self._running_chunk_targets = index.tally()
        """On how many targets they run."""
        self._grace_pins: deque[GracePin] = deque()
        """In the order of release."""
        self.cleared_at_s: OrderedDict[str, float] = OrderedDict()
        """worker -> when the cache of a rank was last forgotten as a whole; the last CLEARED_WORKERS_MAX workers, those
        that left included."""

    # Targets -----------------------------------------------------------------------------------------------------
    def add_target(self, target: Target, spec: WorkerSpec) -> None:
        """A target is new, or more is known of its worker."""
        if target.load.running_chunk_counts is None:
            target.load.running_chunk_counts = self._index.tally()
        cache_tokens = spec.cache_tokens
        target.capacity.kv_tokens = (
            target.capacity.observed_kv_tokens if cache_tokens is None else cache_tokens // spec.ranks
        )
        target.recompute_decode_load()
        host_tokens = (spec.host_tokens or 0) // spec.ranks
        self.working_sets.set_capacity(
            target.name, target.capacity.kv_tokens and target.capacity.kv_tokens + host_tokens
        )
        if spec.max_num_seqs is not None:
            target.capacity.max_num_seqs, target.capacity.has_reported_max_num_seqs = spec.max_num_seqs, True
        if target.prefill_queue.is_shortest_first is not spec.is_shortest_first:
            target.prefill_queue.is_shortest_first = spec.is_shortest_first
            target.recompute_queue()
        if spec.cache_view is CacheView.APPROXIMATE and target.name not in self._approximate_caches:
            self._approximate_caches[target.name] = ApproximateCache(
                (cache_tokens or APPROXIMATE_CACHE_TOKENS) // spec.ranks
            )

    def remove_target(self, target: Target) -> None:
        """Forget a target. Its pins end with its holder in the index."""
        self.working_sets.set_capacity(target.name, None)
        self._approximate_caches.pop(target.name, None)

    def clear_target(self, target: Target, running_prompts: Sequence[RunningPrompt], at_s: float) -> None:
        """Nothing is cached there any more at `at_s`, and what is computed there of these prompts, which were sent
        before, will not be found."""
        self.cleared_at_s[target.worker_id] = at_s
        self.cleared_at_s.move_to_end(target.worker_id)
        if len(self.cleared_at_s) > CLEARED_WORKERS_MAX:
            self.cleared_at_s.popitem(last=False)
        self.working_sets.clear(target.name)
        approximate_cache = self._approximate_caches.get(target.name)
        if approximate_cache is not None:
            approximate_cache.clear()
        for grace_pin in self._grace_pins:
            if grace_pin.holder == target.holder:
                self._index.unpin(grace_pin.pin)
        self._grace_pins = deque(grace_pin for grace_pin in self._grace_pins if grace_pin.holder != target.holder)
        for running_prompt in running_prompts:
            if running_prompt.pin is not None:
                self._index.unpin(running_prompt.pin)
                running_prompt.pin = None

    # A request's life --------------------------------------------------------------------------------------------
    def prepare_query(
        self,
        ids: Sequence[int],
        scope: Scope,
        tokens: int,
        similar_prompt: PromptMemory | None = None,
        common_tokens: int | None = None,
    ) -> PromptQuery:
        """Prepare a prompt of so many tokens for the questions below. `similar_prompt`: of one that may begin alike,
        `common_tokens`: with so many tokens, where that is known."""
        return PromptQuery(self._index, self._index.prepare(ids, similar_prompt, common_tokens), scope, tokens)

    def make_shortlist(
        self, prompt: PromptQuery, order: LoadOrder
    ) -> tuple[list[Target], dict[HolderId, Match]] | None:
        """Those of the order that RIVALS_MIN others do not beat in load and prefix, and what they match; None where a
        prefix is known by an approximate cache and not by the index."""
        if self._approximate_caches:
            return None
        index_matches = self._index.match(prompt.prepared_ids, prompt.scope, order.holders, RIVALS_MIN)
        matches = {match.holder: match for match in index_matches}
        holders = dict.fromkeys([*order.holders[:RIVALS_MIN], *matches])
        return [order.targets[holder] for holder in holders], matches

    def find_cache_hits(
        self, prompt: PromptQuery, candidates: Sequence[Target], matches: dict[HolderId, Match] | None = None
    ) -> list[CandidateFacts]:
        """What of the prompt every candidate will have cached. `matches`: where they are known already."""
        if matches is None:
            matches = {match.holder: match for match in self._index.match(prompt.prepared_ids, prompt.scope)}
        approximate_caches = self._approximate_caches
        keys = prompt.get_chunk_keys(CHUNK_TOKENS) if approximate_caches else []
        hits = []
        for target in candidates:
            match = matches.get(target.holder)
            if approximate_caches and target.name in approximate_caches:
                cached_tokens = approximate_caches[target.name].count_cached_tokens(keys)
                hits.append(CandidateFacts(cached_tokens, cached_tokens))
            elif match is None:
                hits.append(CandidateFacts())
            else:
                facts = CandidateFacts(match.pinned_tokens, match.tokens)
                if match.tokens != match.gpu_tokens:
                    facts.tier_load_s = estimate_tier_load_s(match, self._cost_config) * target.speed.tier_load.factor
                hits.append(facts)
        return hits

    def add_request(
        self, target: Target, prompt: PromptQuery, now: float, *, cached_tokens: int, session: str | None = None
    ) -> RunningPrompt:
        """A prompt of a session, of which so many tokens will be cached there, went to the target. The result is what
        `end_request` takes."""
        running_prompt = RunningPrompt(target, prompt, prompt.get_chunk_keys(self._chunk_tokens))
        approximate_cache = self._approximate_caches.get(target.name)
        if approximate_cache is not None:
            approximate_cache.insert(prompt.get_chunk_keys(CHUNK_TOKENS))
        else:
            running_prompt.pin = self._index.pin(target.holder, prompt.prepared_ids, prompt.scope)
        keys = running_prompt.chunk_keys
        cached_share = cached_tokens / max(prompt.prompt_tokens, 1)
        self.working_sets.add_prompt(
            target.name, keys, prompt.prompt_tokens, now, cached_share=cached_share, session=session
        )
        assert target.load.running_chunk_counts is not None
        duplicates = self._running_chunks.enter(keys, target.load.running_chunk_counts, self._running_chunk_targets)
        self._add_duplicate_chunks(target, duplicates)
        return running_prompt

    def end_request(
        self, running_prompt: RunningPrompt, now: float, *, is_computed: bool, ended_session: str | None = None
    ) -> None:
        """The attempt is over, and with it the session `ended_session`. What was not computed is promised no longer; of
        the rest the events are coming."""
        target, keys = running_prompt.target, running_prompt.chunk_keys
        assert target.load.running_chunk_counts is not None
        duplicates = self._running_chunks.leave(keys, target.load.running_chunk_counts, self._running_chunk_targets)
        self._add_duplicate_chunks(target, -duplicates)
        if ended_session is not None:
            self.working_sets.end_session(running_prompt.chunk_keys, ended_session)
        if running_prompt.pin is None:
            return
        if is_computed:
            release_s = now + self._pin_grace_s
            self._grace_pins.append(GracePin(release_s, running_prompt.target.holder, running_prompt.pin))
        else:
            self._index.unpin(running_prompt.pin)

    def _add_duplicate_chunks(self, target: Target, chunk_count: int) -> None:
        """Count chunks of running prompts that the target's KV cache holds once for several requests."""
        target.load.duplicate_prompt_tokens += self._chunk_tokens * chunk_count
        target.free_kv_tokens += self._chunk_tokens * chunk_count

    def estimate_shared_prefix(self, prompt: PromptQuery, lifetime_s: float) -> tuple[int, float]:
        """Return (tokens of the prompt's prefix that SHARED_RUNNING_MIN or more running requests have too, share of one
        more copy of it that is for later requests). Where n of them run for `lifetime_s` each, n / lifetime_s come in a
        second (Little's law). Those that come in SHARED_COPY_S are shared among the targets on which they run and the
        one more; if k come there, this request is one of k + 1."""
        keys = prompt.get_chunk_keys(self._chunk_tokens)
        chunk_count = self._running_chunks.leading(keys, SHARED_RUNNING_MIN)
        if not chunk_count:
            return 0, 0.0
        last_key = keys[chunk_count - 1]
        running_count, target_count = self._running_chunks.count(last_key), self._running_chunk_targets.count(last_key)
        arrivals = running_count * SHARED_COPY_S / max(lifetime_s, LIFETIME_S_MIN)
        sharing_requests = arrivals / (target_count + 1)
        return chunk_count * self._chunk_tokens, sharing_requests / (sharing_requests + 1.0)

    def release_expired_pins(self, now: float) -> None:
        """Release what has outlived its grace."""
        while self._grace_pins and self._grace_pins[0].release_s <= now:
            self._index.unpin(self._grace_pins.popleft().pin)

    def next_release_s(self) -> float | None:
        """When `tick` has something to do."""
        return self._grace_pins[0].release_s if self._grace_pins else None

    def check_invariants(self, running_prompts: Collection[RunningPrompt]) -> None:
        """Assert that pins end in order and that all counts equal those over `running_prompts`."""
        release_times_s = [entry.release_s for entry in self._grace_pins]
        assert release_times_s == sorted(release_times_s)
        chunk_counts = []
        for target in {running.target for running in running_prompts}:  # a target's name may come back
            assert target.load.running_chunk_counts is not None
            chunk_counts.append(target.load.running_chunk_counts.counts())
            duplicates = sum(count - 1 for count in chunk_counts[-1].values())
            assert target.load.duplicate_prompt_tokens == self._chunk_tokens * duplicates
        assert self._running_chunks.counts() == Counter(key for prompt in running_prompts for key in prompt.chunk_keys)
        assert self._running_chunk_targets.counts() == Counter(key for chunks in chunk_counts for key in chunks)
        self.working_sets.check_invariants()


class ApproximateCache:
    """Which chunks a worker without events probably holds. A key stands for a whole prefix: a chunk evicted before its
    children leaves them unreachable, and they age out in turn; touching a prompt from its end to its start makes
    the deepest chunks the oldest."""

    def __init__(self, capacity_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens = chunk_tokens
        self.max_chunks = max(1, capacity_tokens // chunk_tokens)
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def count_cached_tokens(self, keys: Sequence[int]) -> int:
        """Tokens of the longest known prefix."""
        for i, key in enumerate(keys):
            if key not in self._chunks:
                return i * self.chunk_tokens
        return len(keys) * self.chunk_tokens

    def insert(self, keys: Sequence[int]) -> None:
        """The prompt was sent there: its chunks are now the most recently used."""
        chunks = self._chunks
        for key in reversed(keys):
            chunks[key] = None
            chunks.move_to_end(key)
        while len(chunks) > self.max_chunks:
            chunks.popitem(last=False)

    def clear(self) -> None:
        """The worker restarted."""
        self._chunks.clear()
