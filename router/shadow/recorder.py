"""Record each request that `router shadow` sees: its blocks, its times, and its worker, found by a cache that grew.

Owns the window of requests that are compared. Refuses to know where requests come from and how they are compared.
Invariant: `requests` is in the order of arrival, each with a worker; requests that could not be placed are counted.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec
import xxhash

from prompts.tokenizer import ID_TYPE
from router.decide.core import RouterCore
from router.decide.messages import Decision, RouteRequest
from router.edge.mirrored_exchange import MIRRORED
from router.edge.request_context import RequestContext
from router.shadow.config import ShadowConfig
from router.shadow.observed_request import ObservedRequest, PrefixLinks, PromptEnd
from router.shadow.replay import ObservedEngine
from router.shadow.request_log import LogLine

BLOCK_TOKENS = 16
"""Block size where no worker reports one."""
OPEN_MAX = 2_000
"""Most requests that wait to be attributed to a worker."""
LOOK_S, LOOK_SHARE = 0.02, 0.1
"""Time between two searches for a request's worker: at least so long, and this share of the request's age."""
SETTLED_S = 3.0
"""Time after which a request's prompt is in a cache, or never will be."""

Note = Callable[[RequestContext, Decision], None]


@dataclass(slots=True, eq=False)
class UnplacedRequest:
    """A request that is not yet attributed to a worker."""

    seen: ObservedRequest
    context: RequestContext
    """The copy, as it was read and priced."""
    route: RouteRequest
    goal: int
    """Tokens of the prompt that the right worker's cache will hold."""
    held: dict[str, int]
    """target -> tokens of the prompt that it held at the arrival."""
    next_s: float


@dataclass(slots=True)
class Recorder:
    """Records requests and finds their workers. One a process."""

    core: RouterCore
    config: ShadowConfig
    now: Callable[[], float]
    on_placed: Note
    """Told of each copy that was placed, as it was priced, for the reasons of its miss."""
    requests: list[ObservedRequest] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """placed, unplaced, unread, failed, dropped from the window."""
    block: int = 0
    _open: dict[int, UnplacedRequest] = field(default_factory=dict)
    """serial -> request."""
    _serials: count[int] = field(default_factory=count)
    _links: PrefixLinks | None = None

    def record_copy(self, context: RequestContext) -> None:
        """A copy was answered."""
        route, decision = context.route, context.decision
        if route is None or route.token_ids is None or decision is None:
            self.counts["unread"] += 1
            return
        if context.outcome != MIRRORED:
            self.counts["failed"] += 1
            return
        observed = self._observe(route, context.started_at_s)
        cached_tokens = {terms.worker: terms.resident_tokens for terms in decision.candidates}
        self._place_predecessor(observed.continues, cached_tokens)
        if len(self._open) >= OPEN_MAX:
            self.counts["unplaced"] += 1
        else:
            goal = (route.prompt_tokens - 1) // self.block * self.block
            self._open[observed.serial] = UnplacedRequest(observed, context, route, goal, cached_tokens, self.now())

    def place_open_requests(self, now: float) -> None:
        """Find out where open requests went. Call every tick."""
        targets = self.core.tracker.targets
        for request in list(self._open.values()):
            if now < request.next_s:
                continue
            matches = {
                m.holder: m.tokens for m in self.core.index.match(request.route.token_ids or (), request.route.scope)
            }
            worker = self._find_grown_cache(
                request, {name: matches.get(target.holder, 0) for name, target in targets.items()}
            )
            holder = self._holder(request) if now - request.seen.arrival_s > SETTLED_S else None
            if worker is not None:
                self._record_placed(request, worker, now)
            elif holder is not None:
                request.seen.worker = holder
                self._store(request.seen)
            elif now - request.seen.arrival_s > self.config.placed_s:
                self.counts["unplaced"] += 1
            else:
                request.next_s = now + max(LOOK_S, LOOK_SHARE * (now - request.seen.arrival_s))
                continue
            del self._open[request.seen.serial]

    def engines(self) -> list[ObservedEngine]:
        """Return the workers of all recorded requests, with their sizes where these are known."""
        worker_ids = {request.worker for request in self.requests}
        specs = [worker.spec for worker in self.core.workers.values()]
        engines = [
            ObservedEngine(
                s.worker_id, self._cache_tokens(s.worker_id, s.cache_tokens), s.max_num_seqs, s.is_shortest_first
            )
            for s in specs
        ]
        removed_ids = worker_ids - {engine.name for engine in engines}
        return engines + [ObservedEngine(name) for name in sorted(removed_ids)]

    def _cache_tokens(self, worker_id: str, declared_tokens: int | None) -> int | None:
        if declared_tokens is not None:
            return declared_tokens
        target_tokens = [target.capacity.observed_kv_tokens for target in self.core.registry.get_targets(worker_id)]
        return sum(tokens or 0 for tokens in target_tokens) or None

    def record_logged(self, line: LogLine, route: RouteRequest, worker: str) -> None:
        """Record a request of a log, which was answered by `worker`."""
        at_s = line.at if line.at is not None else float(len(self.requests))
        request = self._observe(route, at_s)
        request.worker, request.cached_tokens, request.output_tokens = worker, line.cached_tokens, line.output_tokens
        request.first_token_s = None if line.ttft_s is None else at_s + line.ttft_s
        request.end_s = None if line.seconds is None else at_s + line.seconds
        self._store(request)

    # Where it went --------------------------------------------------------------------------------------------------

    def _place_predecessor(self, earlier: int | None, cached_tokens: Mapping[str, int]) -> None:
        """Attribute the `earlier` turn now that the next one came, by what caches hold of it: later, the cache that
        this turn goes to may hold both."""
        request = None if earlier is None else self._open.get(earlier)
        worker = None if request is None else self._find_grown_cache(request, cached_tokens)
        if request is not None and worker is not None:
            del self._open[request.seen.serial]
            self._record_placed(request, worker, self.now())

    def _find_grown_cache(self, request: UnplacedRequest, cached_tokens: Mapping[str, int]) -> str | None:
        """Return the worker with the whole prompt in a cache that had less; of several the one that grew most."""
        candidates = []
        for target in self.core.tracker.targets.values():
            had = request.held.get(target.name, 0)
            has = min(cached_tokens.get(target.name, 0), request.seen.prompt_tokens)
            if request.goal and has >= request.goal > had:
                candidates.append((has - had, target.worker_id))
        if not candidates:
            return None
        largest_growth = max(growth for growth, _ in candidates)
        best = [worker for growth, worker in candidates if growth == largest_growth]
        return best[0] if len(best) == 1 else None

    def _holder(self, request: UnplacedRequest) -> str | None:
        """The only worker that had the whole prompt when its copy came: all of it from before, or its answer had begun
        by then. How much was cached is not known."""
        targets = self.core.tracker.targets
        full = [name for name, tokens in request.held.items() if tokens >= request.goal > 0 and name in targets]
        workers = {targets[name].worker_id for name in full}
        return workers.pop() if len(workers) == 1 else None

    def _record_placed(self, request: UnplacedRequest, worker: str, now: float) -> None:
        context = request.context
        decision = None if context.decision is None else decision_for_worker(worker, context.decision)
        if decision is None:
            self.counts["unplaced"] += 1
            return
        request.seen.worker = worker
        request.seen.first_token_s = now
        request.seen.cached_tokens = decision.predicted_cached_tokens
        self._store(request.seen)
        self.on_placed(context, decision)

    def _store(self, request: ObservedRequest) -> None:
        insort(self.requests, request, key=lambda one: one.arrival_s)
        self.counts["placed"] += 1
        if len(self.requests) > self.config.requests_max:
            del self.requests[0]
            self.counts["dropped"] += 1

    # What it asked --------------------------------------------------------------------------------------------------

    def _observe(self, route: RouteRequest, at_s: float) -> ObservedRequest:
        if not self.block:
            block_sizes = [worker.spec.block_size for worker in self.core.workers.values() if worker.spec.block_size]
            self.block = max(block_sizes, default=BLOCK_TOKENS)
            self._links = PrefixLinks(self.config.requests_max)
        assert self._links is not None
        tokens = array(ID_TYPE, route.token_ids or ())
        size, block = len(tokens), self.block
        # One token more: digests go up to the last but one.
        keys = self.core.index.chunk_keys(array(ID_TYPE, [*tokens, 0]).tobytes(), route.scope, block)
        prompt_digest = xxhash.xxh3_64_intdigest(tokens.tobytes())
        ids = array("Q", keys if size % block == 0 else [*keys, prompt_digest])
        serial = next(self._serials)
        observed = ObservedRequest(serial, at_s, ids, size, "", user=route.session)
        observed.continues = self._links.follow(
            PromptEnd(serial, size, prompt_digest), ids, size // block, partial(_begins_with, tokens)
        )
        return observed


def _begins_with(tokens: array[int], earlier: PromptEnd) -> bool:
    """Whether a prompt begins with all of an earlier one, and goes on."""
    if earlier.tokens >= len(tokens):
        return False
    return xxhash.xxh3_64_intdigest(memoryview(tokens)[: earlier.tokens].tobytes()) == earlier.digest


def decision_for_worker(worker: str, arrival_decision: Decision) -> Decision | None:
    """Return the decision that sends a request to `worker` on the terms of its arrival; None where the worker was no
    candidate. Of several ranks the one counts that has most of the prompt cached."""
    worker_terms = [
        terms for terms in arrival_decision.candidates if worker in (terms.worker, terms.worker.rpartition("#")[0])
    ]
    if not worker_terms:
        return None
    terms, most_cached_terms = (
        max(candidates, key=lambda candidate: candidate.cached_tokens)
        for candidates in (worker_terms, arrival_decision.candidates)
    )
    return msgspec.structs.replace(
        arrival_decision,
        worker=worker,
        rank=None,
        attempt=0,
        terms=terms,
        predicted_cached_tokens=terms.cached_tokens,
        predicted_ttft_s=terms.ttft_s,
        most_cached=most_cached_terms if most_cached_terms.cached_tokens > terms.cached_tokens else None,
    )
