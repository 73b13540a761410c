"""Record the requests that `router shadow` sees: blocks, times, and the worker, which is found by a cache that grew.

Invariant: `requests` is in the order of arrival, each with a worker. Requests without one are only counted.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from urllib.parse import urlsplit

import msgspec
import xxhash

from prompts.tokenizer import ID_TYPE
from router.decide.core import RouterCore
from router.decide.messages import Decision, RouteRequest
from router.decide.workers import WorkerSpec
from router.edge.mirrored_exchange import MIRRORED
from router.edge.request_context import RequestContext
from router.shadow.config import ShadowConfig
from router.shadow.observed_request import ObservedRequest, RecordedPrompt, RecordedPrompts
from router.shadow.replay import ObservedEngine
from router.shadow.request_log import LogLine

BLOCK_TOKENS = 16
"""Tokens in a block if no worker reports its block size."""
OPEN_MAX = 2_000
"""Most requests that wait to be attributed to a worker."""
SEARCH_S, SEARCH_SHARE = 0.02, 0.1
"""Time between two searches for a request's worker: at least so long, and this share of the request's age."""
SETTLED_S = 3.0
"""Time after which a request's prompt is in a cache, or never will be."""


@dataclass(slots=True, eq=False)
class UnplacedRequest:
    """A request that is not yet attributed to a worker."""

    observed: ObservedRequest
    context: RequestContext
    route: RouteRequest
    decision: Decision
    """Decision of the router, with the price of each worker at the arrival."""
    full_block_tokens: int
    """Tokens of the prompt's full blocks, which will be in the cache of its worker."""
    cached_tokens_at_arrival: dict[str, int]
    """Target -> tokens of the prompt that its cache had at the arrival."""
    next_search_s: float


@dataclass(slots=True)
class Recorder:
    """Records the requests that `router shadow` sees, and finds out which worker answered each."""

    core: RouterCore
    config: ShadowConfig
    now: Callable[[], float]
    on_placed: Callable[[RequestContext, Decision], None]
    """Called with each copy for which a worker was found, and the decision that would have sent it there."""
    requests: list[ObservedRequest] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by outcome: placed, unplaced, unread, failed; `dropped` ones were placed, and are not compared."""
    block_tokens: int = 0
    """Tokens in a block; 0 before the first request."""
    _unplaced_by_serial: dict[int, UnplacedRequest] = field(default_factory=dict)
    """Requests without a worker yet, by their serial numbers."""
    _serials: count[int] = field(default_factory=count)
    _earlier_prompts: RecordedPrompts = field(init=False)

    def __post_init__(self) -> None:
        self._earlier_prompts = RecordedPrompts(self.config.requests_max)

    def record_copy(self, context: RequestContext) -> None:
        """Record the copy of a request, which another load balancer has sent to a worker.

        The copy does not tell which worker answers the original. That worker is found later, when its KV cache has the
        blocks of the prompt.
        """
        route, decision = context.route, context.decision
        if route is None or route.token_ids is None or decision is None:
            self.counts["unread"] += 1
            return
        if context.outcome != MIRRORED:
            self.counts["failed"] += 1
            return
        observed = self._observe(route, context.started_at_s)
        cached_tokens = {costs.worker: costs.resident_tokens for costs in decision.candidates}
        self._find_worker_of_predecessor(observed.continues, cached_tokens)
        if len(self._unplaced_by_serial) >= OPEN_MAX:
            self.counts["unplaced"] += 1
            return
        self._unplaced_by_serial[observed.serial] = UnplacedRequest(
            observed,
            context,
            route,
            decision,
            full_block_tokens=(route.prompt_tokens - 1) // self.block_tokens * self.block_tokens,
            cached_tokens_at_arrival=cached_tokens,
            next_search_s=self.now(),
        )

    def find_workers(self, now: float) -> None:
        """Find out which workers answered the copied requests, and give up after `placed_s`. Call every tick.

        A request was answered by the worker with a KV cache that has gained the prompt's blocks. If no cache has gained
        them after SETTLED_S, it was the worker that had all blocks before.
        """
        for request in list(self._unplaced_by_serial.values()):
            if now < request.next_search_s:
                continue
            age_s = now - request.observed.arrival_s
            worker_with_new_blocks = self._find_worker_by_grown_cache(request, self._count_cached_tokens(request.route))
            worker_with_all_blocks = self._find_worker_by_full_cache(request) if age_s > SETTLED_S else None
            if worker_with_new_blocks is not None:
                self._record_found(request, worker_with_new_blocks, now)
            elif worker_with_all_blocks is not None:
                request.observed.worker = worker_with_all_blocks
                self._store(request.observed)
            elif age_s > self.config.placed_s:
                self.counts["unplaced"] += 1
            else:
                request.next_search_s = now + max(SEARCH_S, SEARCH_SHARE * age_s)
                continue
            del self._unplaced_by_serial[request.observed.serial]

    def _count_cached_tokens(self, route: RouteRequest) -> dict[str, int]:
        matches = self.core.index.match(route.token_ids or (), route.scope)
        tokens_by_holder = {match.holder: match.tokens for match in matches}
        return {name: tokens_by_holder.get(target.holder, 0) for name, target in self.core.tracker.targets.items()}

    def engines(self) -> list[ObservedEngine]:
        """Return the workers of all recorded requests, and all others that are known now."""
        engines = [self._describe_engine(worker.spec) for worker in self.core.workers.values()]
        removed_ids = {request.worker for request in self.requests} - {engine.name for engine in engines}
        return engines + [ObservedEngine(name) for name in sorted(removed_ids)]

    def _describe_engine(self, spec: WorkerSpec) -> ObservedEngine:
        """Return a worker with its cache size as it reports it, or else as its events showed it."""
        cache_tokens = spec.cache_tokens
        if cache_tokens is None:
            targets = self.core.registry.get_targets(spec.worker_id)
            cache_tokens = sum(target.capacity.observed_kv_tokens or 0 for target in targets) or None
        return ObservedEngine(spec.worker_id, cache_tokens, spec.max_num_seqs, spec.is_shortest_first, spec.step_tokens)

    def record_logged(self, line: LogLine, route: RouteRequest) -> None:
        """Record a request of a log, or only count it if its prompt was not read or its worker is not known."""
        worker = self._find_logged_worker(line.worker)
        if worker is None or route.token_ids is None:
            self.counts["unplaced" if worker is None else "unread"] += 1
            return
        at_s = line.arrived_s if line.arrived_s is not None else float(len(self.requests))
        request = self._observe(route, at_s)
        request.worker, request.cached_tokens, request.output_tokens = worker, line.cached_tokens, line.output_tokens
        request.first_token_s = None if line.ttft_s is None else at_s + line.ttft_s
        request.end_s = None if line.latency_s is None else at_s + line.latency_s
        self._store(request)

    def _find_logged_worker(self, name: str | None) -> str | None:
        """Return the id of the worker that a log names by its id or address; None if the router has no such worker.

        If the log names none, the workers take turns.
        """
        workers = self.core.workers
        if name is None:
            turn = self.counts["dealt"]
            self.counts["dealt"] += 1
            return sorted(workers)[turn % len(workers)] if workers else None
        if name in workers:
            return name
        address = urlsplit(name).netloc or name
        named_ids = (worker.worker_id for worker in workers.values() if urlsplit(worker.spec.url).netloc == address)
        return next(named_ids, None)

    def _find_worker_of_predecessor(self, serial: int | None, cached_tokens: Mapping[str, int]) -> None:
        """Search for the worker that answered a conversation's last turn, when the next turn comes.

        Later the search could fail, as the cache to which the next turn goes has both turns then. `serial`: number of
        the last turn. `cached_tokens`: tokens of the next turn's prompt in the cache of each worker.
        """
        request = None if serial is None else self._unplaced_by_serial.get(serial)
        worker = None if request is None else self._find_worker_by_grown_cache(request, cached_tokens)
        if request is not None and worker is not None:
            del self._unplaced_by_serial[request.observed.serial]
            self._record_found(request, worker, self.now())

    def _find_worker_by_grown_cache(self, request: UnplacedRequest, cached_tokens: Mapping[str, int]) -> str | None:
        """Find the worker that answered a request: its cache has gained the prompt since the request arrived.

        `cached_tokens`: tokens of the prompt in the cache of each worker now. A cache has gained the prompt if it has
        all full blocks now, and lacked some at the arrival. Return the worker that gained most tokens; None if there is
        none, or two gained equally many.
        """
        workers_by_gained_tokens: defaultdict[int, list[str]] = defaultdict(list)
        for target in self.core.tracker.targets.values():
            tokens_before = request.cached_tokens_at_arrival.get(target.name, 0)
            tokens_now = min(cached_tokens.get(target.name, 0), request.observed.prompt_tokens)
            has_gained_prompt = tokens_before < request.full_block_tokens <= tokens_now
            if has_gained_prompt:
                workers_by_gained_tokens[tokens_now - tokens_before].append(target.worker_id)
        workers = workers_by_gained_tokens[max(workers_by_gained_tokens, default=0)]
        return workers[0] if len(workers) == 1 else None

    def _find_worker_by_full_cache(self, request: UnplacedRequest) -> str | None:
        """Return the only worker that had the whole prompt cached at the arrival of the copy; None for several."""
        targets = self.core.tracker.targets
        workers = {
            targets[name].worker_id
            for name, tokens in request.cached_tokens_at_arrival.items()
            if tokens >= request.full_block_tokens > 0 and name in targets
        }
        return workers.pop() if len(workers) == 1 else None

    def _record_found(self, request: UnplacedRequest, worker: str, now: float) -> None:
        """Record a copy for which a worker was found. Its first token counts as generated now."""
        observed, decision = request.observed, make_decision_for_worker(worker, request.decision)
        if decision is None:
            self.counts["unplaced"] += 1
            return
        observed.worker, observed.first_token_s = worker, now
        observed.cached_tokens = decision.predicted_cached_tokens
        self._store(observed)
        self.on_placed(request.context, decision)

    def _store(self, request: ObservedRequest) -> None:
        """Add a request to `requests`, and drop the oldest one if there are too many."""
        insort(self.requests, request, key=lambda recorded: recorded.arrival_s)
        self.counts["placed"] += 1
        if len(self.requests) > self.config.requests_max:
            del self.requests[0]
            self.counts["dropped"] += 1

    def _observe(self, route: RouteRequest, at_s: float) -> ObservedRequest:
        """Describe a request that arrived: digests of its prompt's blocks, and the request that it continues."""
        if not self.block_tokens:
            block_sizes = [worker.spec.block_size for worker in self.core.workers.values() if worker.spec.block_size]
            self.block_tokens = max(block_sizes, default=BLOCK_TOKENS)
        token_ids = array(ID_TYPE, route.token_ids or ())
        prompt = RecordedPrompt(next(self._serials), len(token_ids), xxhash.xxh3_64_intdigest(token_ids.tobytes()))
        # The index gives no key to a prompt's last token, which engines always compute. So one token is added.
        padded_ids = array(ID_TYPE, [*token_ids, 0])
        block_ids = array("Q", self.core.index.chunk_keys(padded_ids.tobytes(), route.scope, self.block_tokens))
        full_block_count, partial_block_tokens = divmod(prompt.tokens, self.block_tokens)
        if partial_block_tokens:
            block_ids.append(prompt.digest)
        continued_serial = self._earlier_prompts.find_continued(block_ids, partial(_begins_with, token_ids))
        self._earlier_prompts.add(prompt, block_ids, full_block_count)
        return ObservedRequest(
            prompt.serial, at_s, block_ids, prompt.tokens, worker="", continues=continued_serial, user=route.session
        )  # the worker is found later


def _begins_with(tokens: array[int], earlier: RecordedPrompt) -> bool:
    """Return whether a prompt begins with all of an earlier one, and is longer."""
    if earlier.tokens >= len(tokens):
        return False
    return xxhash.xxh3_64_intdigest(memoryview(tokens)[: earlier.tokens].tobytes()) == earlier.digest


def make_decision_for_worker(worker: str, arrival_decision: Decision) -> Decision | None:
    """Return what `arrival_decision` would have been if it had chosen `worker`; None if the worker was no candidate.

    Of several data-parallel ranks, which are called WORKER#RANK, the one with most of the prompt cached counts.
    """
    candidates = arrival_decision.candidates
    worker_costs = [costs for costs in candidates if worker in (costs.worker, costs.worker.rpartition("#")[0])]
    if not worker_costs:
        return None
    costs = max(worker_costs, key=lambda candidate: candidate.cached_tokens)
    most_cached = max(candidates, key=lambda candidate: candidate.cached_tokens)
    return msgspec.structs.replace(
        arrival_decision,
        worker=worker,
        rank=None,
        attempt=0,
        terms=costs,
        predicted_cached_tokens=costs.cached_tokens,
        predicted_ttft_s=costs.ttft_s,
        most_cached=most_cached if most_cached.cached_tokens > costs.cached_tokens else None,
    )
