"""Prediction of what each target's cache will have of a prompt.

A prompt that was sent to a target counts as cached there at once. Where the target sends events, the prompt is
**pinned** in the index while its request runs and for a grace period after, until the events have come. A target
without events has an **approximate cache**: an LRU of the prompts sent there, with the advertised capacity.
`RecentPrompts` says what running prompts share, and whether a target has room for the prompts that will be used again.

Invariants: a request has at most one pin; no pin outlives its grace or its holder.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from options.bounded_dict import BoundedDict
from router.decide.config import CoreConfig
from router.decide.messages import RouteRequest
from router.decide.price import Candidate, estimate_tier_load_s
from router.decide.recent_prompts import RecentPrompts
from router.decide.shortlist import RIVALS_MIN, LoadOrder
from router.decide.target import InFlightRequest, PromptQuery, Target
from router.decide.workers import CacheView, WorkerSpec
from router.index.protocol import HolderId, Match, PinId, PrefixIndex

SHARED_COPY_S: Final = 15.0
"""Time for which later requests are expected to use one more copy of a shared prefix."""
LIFETIME_S_MIN: Final = 1e-3
"""Least expected duration of a request."""
CHUNK_TOKENS: Final = 64
"""Tokens of a chunk of an approximate cache."""
CLEARED_WORKERS_MAX: Final = 1000
APPROXIMATE_CACHE_TOKENS: Final = 500_000
"""Assumed cache capacity of a worker without events that does not report it."""


class GracePin(msgspec.Struct, frozen=True, eq=False):
    """Pin of an ended request, until its events have surely come."""

    release_s: float
    holder: HolderId
    pin: PinId


class CacheState:
    """Predicts what the targets have cached: the prefixes in the index, and those of running prompts.

    Prompts that begin alike are routed to one target, which then computes their common prefix only once. So the prefix
    of a running prompt counts before its events arrive.
    """

    def __init__(self, index: PrefixIndex, config: CoreConfig, recent_prompts: RecentPrompts) -> None:
        """Begin without targets, which are workers or data-parallel ranks of workers.

        `index`: prefixes that the workers have cached, by their events. `recent_prompts`: prompts that run or ran
        lately. The prompt of an ended request counts as cached for `config.pin_grace_s` more, until its events come.
        """
        self._index = index
        self._cost_config = config.cost
        self._pin_grace_s = config.pin_grace_s
        self.recent_prompts = recent_prompts
        self._chunk_tokens = recent_prompts.chunk_tokens
        self._approximate_caches: dict[str, ApproximateCache] = {}
        """target name -> approximate cache, for targets without events."""
        self._grace_pins: deque[GracePin] = deque()
        """Pins of ended requests, the first to be released first."""
        self.cleared_at_s: BoundedDict[str, float] = BoundedDict(CLEARED_WORKERS_MAX)
        """worker -> when the whole cache of the worker, or of one of its ranks, was last lost. Removed workers stay, up
        to CLEARED_WORKERS_MAX workers."""

    # Targets -----------------------------------------------------------------------------------------------------
    def add_target(self, target: Target, spec: WorkerSpec) -> None:
        """Add a target, or update the capacity of its approximate cache, if its worker sends no events."""
        if spec.cache_view is CacheView.APPROXIMATE:
            approximate_cache = self._approximate_caches.setdefault(target.name, ApproximateCache(0))
            approximate_cache.set_capacity((spec.cache_tokens or APPROXIMATE_CACHE_TOKENS) // spec.ranks)

    def remove_target(self, target: Target) -> None:
        """Forget a target. Its pins end with its holder in the index."""
        self.recent_prompts.clear(target)
        self._approximate_caches.pop(target.name, None)

    def clear_target(self, target: Target, in_flight: Sequence[InFlightRequest], at_s: float) -> None:
        """Forget everything that a target had cached at `at_s`. `in_flight`: its requests that were sent before."""
        self.cleared_at_s[target.worker_id] = at_s
        self.recent_prompts.clear(target)
        approximate_cache = self._approximate_caches.get(target.name)
        if approximate_cache is not None:
            approximate_cache.clear()
        # Release its pins: of ended requests in their grace period, and of those in flight.
        for grace_pin in self._grace_pins:
            if grace_pin.holder == target.holder:
                self._index.unpin(grace_pin.pin)
        self._grace_pins = deque(grace_pin for grace_pin in self._grace_pins if grace_pin.holder != target.holder)
        for request in in_flight:
            if request.pin is not None:
                self._index.unpin(request.pin)
                request.pin = None

    # A request's life --------------------------------------------------------------------------------------------
    def prepare_query(self, request: RouteRequest) -> PromptQuery | None:
        """Return a request's prompt, prepared for the methods below; None if it was not tokenised."""
        if request.token_ids is None:
            return None
        prepared_ids = self._index.prepare(request.token_ids, request.similar_prompt)
        return PromptQuery(self._index, prepared_ids, request.scope, request.prompt_tokens)

    def knows_all_prefixes(self, prompt: PromptQuery | None) -> bool:
        """Return whether the index knows the cached prefix of a prompt at every target: no cache is approximate."""
        return prompt is None or not self._approximate_caches

    def match(self, prompt: PromptQuery | None, order: LoadOrder | None = None) -> dict[HolderId, Match]:
        """Return what each holder in the index matches of a prompt; nothing if the prompt was not tokenised.

        `order`: match its targets only, and none of which RIVALS_MIN others have less load and as long a prefix.
        """
        if prompt is None:
            return {}
        options = () if order is None else (order.holders, RIVALS_MIN)
        return {match.holder: match for match in self._index.match(prompt.prepared_ids, prompt.scope, *options)}

    def find_cache_hits(
        self, prompt: PromptQuery | None, targets: Sequence[Target], matches: dict[HolderId, Match], now: float
    ) -> list[Candidate]:
        """Return a candidate for each target, with the length of the prompt's prefix that is cached there.

        `resident_tokens` are cached now, by the worker's events. `cached_tokens` also has what requests in flight will
        have computed. For a worker without events, one estimate serves as both. `matches`: what the prefix index finds
        of the prompt at each target. Nothing is cached of a prompt that was not tokenised.
        """
        approximate_caches = self._approximate_caches
        keys = prompt.get_chunk_keys(CHUNK_TOKENS) if prompt is not None and approximate_caches else []
        candidates = []
        for target in targets:
            candidate = Candidate(target)
            candidates.append(candidate)
            if approximate_caches and target.name in approximate_caches:
                candidate.cached_tokens = approximate_caches[target.name].count_cached_tokens(keys)
                candidate.resident_tokens = candidate.cached_tokens
                continue
            match = matches.get(target.holder)
            if match is None:
                continue
            candidate.cached_tokens, candidate.resident_tokens = match.pinned_tokens, match.tokens
            if match.tokens != match.gpu_tokens:  # a part is in slower memory, such as the host's
                learned_factor = target.speed.tier_load.get(now)
                candidate.tier_load_s = learned_factor * estimate_tier_load_s(match, self._cost_config)
        return candidates

    def add_request(
        self, request: InFlightRequest, prompt: PromptQuery, now: float, *, session: str | None = None
    ) -> None:
        """Record the prompt of a request that is sent to a target, so that it counts as cached there.

        If the request waits for KV from another worker, it counts once `pin` is called, when that KV has come.
        `session`: conversation of the request, if it has one.
        """
        target = request.target
        keys = prompt.get_chunk_keys(self._chunk_tokens)
        shared_count = self.recent_prompts.start_prompt(target, keys, now, session=session)
        self._change_duplicate_count(target, shared_count)
        request.prompt = prompt
        approximate_cache = self._approximate_caches.get(target.name)
        if approximate_cache is not None:  # the worker sends no events about its cache
            approximate_cache.insert(prompt.get_chunk_keys(CHUNK_TOKENS))
        elif not request.is_waiting_for_kv:
            self.pin(request)

    def pin(self, request: InFlightRequest) -> None:
        """Count the prompt of a request in flight, if it was read, as cached at its target."""
        prompt = request.prompt
        if prompt is not None:
            request.pin = self._index.pin(request.target.holder, prompt.prepared_ids, prompt.scope)

    def end_request(
        self, request: InFlightRequest, now: float, *, is_computed: bool, ended_session: str | None = None
    ) -> None:
        """Record that a request no longer runs, so that its prompt counts as cached only by the worker's events.

        Until then its pin counted the prompt as cached. If the prompt was computed (`is_computed`), the pin is kept for
        a grace period, as the events are on their way. `ended_session`: conversation that ends with this request.
        """
        if request.prompt is None:
            return
        target, pin = request.target, request.pin
        keys = request.prompt.get_chunk_keys(self._chunk_tokens)
        shared_count = self.recent_prompts.end_prompt(target, keys)
        self._change_duplicate_count(target, -shared_count)
        if ended_session is not None:
            self.recent_prompts.end_session(keys, ended_session)
        request.prompt, request.pin = None, None  # frees memory: others may hold the request for some time
        if pin is None:
            return
        if is_computed:
            self._grace_pins.append(GracePin(now + self._pin_grace_s, target.holder, pin))
        else:
            self._index.unpin(pin)

    def _change_duplicate_count(self, target: Target, chunk_count: int) -> None:
        """Change how many duplicates a target has: chunks of prompts running there that another one has, too.

        The KV memory holds a chunk once. If three prompts begin with the same 10 chunks, 20 are duplicates, and free.
        """
        target.load.duplicate_prompt_tokens += self._chunk_tokens * chunk_count
        target.free_kv_tokens += self._chunk_tokens * chunk_count

    def estimate_shared_prefix(self, prompt: PromptQuery, lifetime_s: float) -> tuple[int, float]:
        """Return how many of a prompt's first tokens running requests share, and how far one more copy serves others.

        For example, 20 requests with that prefix run on one target for `lifetime_s` = 10 s each. So 30 requests with it
        will arrive within SHARED_COPY_S = 15 s (Little's law). A copy on a second target serves half of them, 15, and
        this request: 15/16 of its use are by others.
        """
        keys = prompt.get_chunk_keys(self._chunk_tokens)
        shared_tokens, prompts_by_target = self.recent_prompts.find_shared_prefix(keys)
        if not shared_tokens:
            return 0, 0.0
        running_count, copy_count = sum(prompts_by_target.values()), len(prompts_by_target)
        later_requests = running_count * SHARED_COPY_S / max(lifetime_s, LIFETIME_S_MIN)
        later_requests_per_copy = later_requests / (copy_count + 1)
        return shared_tokens, later_requests_per_copy / (later_requests_per_copy + 1.0)

    def add_memory_costs(
        self, prompt: PromptQuery, output_tokens: float, candidates: Sequence[Candidate], now: float
    ) -> None:
        """Set what a request costs in time at targets that lack room for it in their KV memory.

        The request waits until memory is free, `memory_wait_s`. It also evicts cached prompts that are likely to be
        used again, the idle tokens: `pressure_s` is the time to compute them again.
        """
        self.recent_prompts.expire(now)
        needed_tokens = prompt.prompt_tokens + output_tokens
        full_candidates = [
            candidate
            for candidate in candidates
            if needed_tokens + candidate.target.load.idle_prompt_tokens > candidate.target.free_kv_tokens
        ]
        if not full_candidates:
            return
        keys = prompt.get_chunk_keys(self._chunk_tokens)
        idle_tokens_by_target = self.recent_prompts.count_idle_tokens(keys)
        for candidate in full_candidates:
            target = candidate.target
            running_tokens = self.recent_prompts.count_running_tokens(target, keys)
            present_tokens = running_tokens + idle_tokens_by_target[target]
            candidate.memory_wait_s = target.estimate_memory_wait_s(needed_tokens - running_tokens)
            candidate.pressure_s = self.estimate_pressure_s(candidate, prompt.prompt_tokens, present_tokens)

    def estimate_pressure_s(self, candidate: Candidate, prompt_tokens: int, present_tokens: int) -> float:
        """Return the prefill that a target will compute again, as a prompt evicts others that will be used again.

        For example, 4,000 tokens are free and 3,000 idle. A prompt of 2,000 tokens has room for a half, so that it
        evicts half of its length. `present_tokens`: its tokens that running requests or idle chunks have already.
        """
        target = candidate.target
        room_tokens = target.free_kv_tokens + target.capacity.host_tokens - target.load.idle_prompt_tokens
        evicted_tokens = min(prompt_tokens - present_tokens - room_tokens, prompt_tokens - candidate.cached_tokens)
        if evicted_tokens <= 0.0:
            return 0.0
        return evicted_tokens / prompt_tokens * target.estimate_prefill_s(prompt_tokens, 0)

    def release_expired_pins(self, now: float) -> None:
        """Release the pins at the end of their grace period."""
        while self._grace_pins and self._grace_pins[0].release_s <= now:
            self._index.unpin(self._grace_pins.popleft().pin)

    def next_release_s(self) -> float | None:
        """Return when the next pin is to be released; None if there is none."""
        return self._grace_pins[0].release_s if self._grace_pins else None

    def check_invariants(self, requests: Collection[InFlightRequest]) -> None:
        """Assert that pins end in order and that all counts of chunks equal those over `requests`, now in flight."""
        release_times_s = [grace_pin.release_s for grace_pin in self._grace_pins]
        assert release_times_s == sorted(release_times_s)
        chunk_counts = Counter(
            (key, request.target)
            for request in requests
            if request.prompt is not None
            for key in request.prompt.get_chunk_keys(self._chunk_tokens)
        )
        self.recent_prompts.check_invariants(chunk_counts)
        duplicate_counts: Counter[Target] = Counter()
        for (_, target), count in chunk_counts.items():
            duplicate_counts[target] += count - 1
        for target in {request.target for request in requests}:
            assert target.load.duplicate_prompt_tokens == self._chunk_tokens * duplicate_counts[target]


class ApproximateCache:
    """Estimate of what a worker without cache events has cached: an LRU of the prompts that were sent there.

    Prompts are compared in chunks of `chunk_tokens` tokens. A chunk's key is the digest of the prompt up to its end. A
    prompt's last chunks count as the least recently used, so that they are evicted before the chunks that they need.
    """

    def __init__(self, capacity_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.chunk_tokens = chunk_tokens
        self.set_capacity(capacity_tokens)
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def set_capacity(self, capacity_tokens: int) -> None:
        """Set how many tokens the cache holds; chunks over that are evicted with the next prompt."""
        self.max_chunks = max(1, capacity_tokens // self.chunk_tokens)

    def count_cached_tokens(self, keys: Sequence[int]) -> int:
        """Return the tokens of the longest cached prefix of a prompt with these chunk keys."""
        for i, key in enumerate(keys):
            if key not in self._chunks:
                return i * self.chunk_tokens
        return len(keys) * self.chunk_tokens

    def insert(self, keys: Sequence[int]) -> None:
        """Make the chunks of a sent prompt the most recently used ones, and evict chunks over the capacity."""
        chunks = self._chunks
        for key in reversed(keys):
            chunks[key] = None
            chunks.move_to_end(key)
        while len(chunks) > self.max_chunks:
            chunks.popitem(last=False)

    def clear(self) -> None:
        """Forget all chunks after the worker has lost its cache."""
        self._chunks.clear()
