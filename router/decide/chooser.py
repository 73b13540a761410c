"""Chooser: prices the eligible targets of a request and picks one by the configured policy.

Choosing counts no request, and draws from the random generator. The placer commits the choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from options.bounded_dict import BoundedDict
from router.decide.cache_state import CacheState
from router.decide.config import CoreConfig
from router.decide.learning.output_lengths import OutputLengths
from router.decide.load_tracker import LoadTracker
from router.decide.messages import RouteRequest, TransferKind
from router.decide.policy import CustomPolicy, choose_cheapest, choose_without_price
from router.decide.price import (
    Candidate,
    RequestFacts,
    compute_congestion,
    find_shortest_wait_s,
    price_worker,
    sum_loads,
)
from router.decide.registry import WorkerRegistry
from router.decide.shortlist import LoadOrder
from router.decide.target import PromptQuery, Target
from router.decide.transfers.links import TransferLinks
from router.decide.transfers.plans import (
    TransferPlanner,
    compute_pull_share,
    find_best_sources,
    find_least_busy,
)
from router.decide.workers import may_transfer
from router.index.protocol import HolderId, Match, Scope


class RoutingChoice(msgspec.Struct, eq=False):
    """Priced candidates of a request, and the one that was chosen."""

    request: RouteRequest
    candidates: list[Candidate]
    winner: Candidate
    request_facts: RequestFacts
    prompt_query: PromptQuery | None
    matches: dict[HolderId, Match]
    """Cached prefixes of the prompt by the prefix index."""

    def find_earliest(self) -> Candidate:
        """Return the candidate with the earliest first token, of those that can serve the request."""
        return min(_drop_missing_source(self.candidates), key=lambda candidate: candidate.terms.ttft_s)

    def find_most_cached(self) -> Candidate:
        """Return the candidate with the longest cached prefix, without a transfer; the winner if none has a longer."""
        alone = (candidate for candidate in self.candidates if candidate.plan is None)
        return max([self.winner, *alone], key=lambda candidate: candidate.cached_tokens)

    @property
    def wait_s(self) -> float:
        """Seconds until the prefill can begin: the target computes earlier prompts first."""
        target, plan = self.winner.target, self.winner.plan
        wait_s = target.slowdown * target.estimate_queue_s(self.request_facts.now)
        if plan is None:
            return wait_s
        source_terms = plan.source.terms
        return max(wait_s, source_terms.ttft_s - source_terms.slowdown * source_terms.prefill_s)

    @property
    def charge_s(self) -> float:
        """Worker time that the tenant is charged for: the prefill, and what the answer adds to the decode steps."""
        facts = self.request_facts
        decode_s = self.winner.target.estimate_added_decode_s(facts.prompt_tokens, facts.output_tokens)
        return self.winner.terms.prefill_s + decode_s


class Placement(NamedTuple):
    """Target that a session or conversation was sent to last."""

    target_name: str
    prompt_tokens: int
    """Length of the prompt that was sent there, estimated if it has media."""
    placed_at_s: float


class Chooser:
    """Chooses the worker for a request: the cheapest by its price, or the one that another policy names.

    The price is the expected time of the request on a worker, with what it costs the other requests there.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        cache_state: CacheState,
        links: TransferLinks,
        config: CoreConfig,
        rng: random.Random,
    ) -> None:
        """Make a chooser for `config.policy`; the policy "kv", the default, takes the cheapest worker.

        `registry` has the workers, `tracker` their load, `cache_state` what they have cached, and `links` the speed of
        transfers between them. The chooser changes none of them, and draws from `rng`.
        """
        self._output_lengths = OutputLengths()
        self._registry = registry
        self._tracker = tracker
        self._cache_state = cache_state
        self._links = links
        self._rng = rng

        self._cost_config = config.cost
        self._policy = config.policy
        self._session_affinity = config.session_affinity
        self.custom_policy = CustomPolicy(config.policy_function) if config.policy_function is not None else None
        has_other_rule = self.custom_policy is not None or config.session_affinity  # which comes before the price
        self._chooses_by_price = config.policy == "kv" and not has_other_rule

        self.tie_rotation = 0
        """Number of choices that were committed; the next tie is won by the next candidate in turn."""
        self._placement_ttl_s = config.session_ttl_s
        self.session_placements: BoundedDict[str, Placement] = BoundedDict(config.sessions_max)
        """Last placement of each session, for session affinity."""
        self.media_placements: BoundedDict[tuple[int, Scope], Placement] = BoundedDict(config.sessions_max)
        """Last placement of each conversation with media, by the digest of its first messages."""

    def choose(
        self,
        request: RouteRequest,
        targets: list[Target],
        now: float,
        *,
        queued_ahead_s: Mapping[str, float],
        queued_s: float = 0.0,
        explain: bool = False,
        excluded_sources: frozenset[str] = frozenset(),
    ) -> RoutingChoice:
        """Price the ways to serve a request and pick one by the configured policy.

        `targets`: workers that may answer; `explain` prices all of them even in a large pool. `excluded_sources`: names
        of workers from which no KV is moved to them. `queued_s`: seconds of prefill that wait in the router's queue;
        `queued_ahead_s`: the part of it that will be sent before this request, by target. If the winner is missing a
        source, there is no worker that could compute the prompt for it.
        """
        # The targets that may win, those that could send them KV, and what each has cached of the prompt.
        prompt = self._cache_state.prepare_query(request)
        decay = self._tracker.compute_utilisation_decay(now)
        load_order: LoadOrder | None = None  # of a large pool; it accounts for neither media nor the router's queue
        has_media_or_queue = request.media_conversation is not None or bool(queued_ahead_s or queued_s)
        if self._chooses_by_price and not has_media_or_queue and self._cache_state.knows_all_prefixes(prompt):
            load_order = self._registry.get_load_order(request, targets, decay, now)
        sources = self._find_sources(request, excluded_sources)
        shortlist, matches = targets, self._cache_state.match(prompt, load_order)
        if load_order is not None:
            shortlist = load_order.list_rivals(matches)
            # A source may be none of the matched targets, or may compute the prompt because it is idle.
            if any(source.can_prefill_for_others or source.holder not in load_order.targets for source in sources):
                matches = self._cache_state.match(prompt)
        best_sources = find_best_sources(sources, matches)

        # Values that all prices depend on.
        output_tokens = self._output_lengths.estimate_length(request)
        pool_load = sum_loads(targets) if load_order is None else load_order.pool_load
        shortest_wait_s = find_shortest_wait_s(shortlist, now)
        congestion = compute_congestion(pool_load, shortest_wait_s, queued_s, decay, self._cost_config)
        facts = RequestFacts(now, request.prompt_tokens, output_tokens, decay, congestion)
        facts.can_move_prefill = any(source.can_prefill_for_others for source in sources)
        if prompt is not None:
            self._add_shared_prefix(facts, prompt, shortlist, best_sources)

        # The prices, and the winner.
        candidates = self._price_targets(request, facts, prompt, shortlist, matches, queued_ahead_s)
        choice = RoutingChoice(request, candidates, candidates[0], facts, prompt, matches)
        if sources:
            self._add_transfers(choice, sources, best_sources)
        choice.winner = self._pick_winner(choice)
        if choice.winner.is_missing_source:
            self._add_missing_source(choice, excluded_sources)
        if explain and load_order is not None:
            other_targets = [target for target in targets if target not in shortlist]
            matches = self._cache_state.match(prompt)
            other_candidates = self._price_targets(request, facts, prompt, other_targets, matches, queued_ahead_s)
            choice.candidates += _drop_missing_source(other_candidates)
        return choice

    def _find_sources(self, request: RouteRequest, excluded_sources: frozenset[str]) -> list[Target]:
        """Return the targets that KV of a request may be moved from.

        There is none if the index does not know the whole prompt, or if another policy than the price decides.
        """
        is_whole_prompt_known = request.media_conversation is None and request.prompt_count == 1
        if not self._chooses_by_price or request.token_ids is None or not is_whole_prompt_known:
            return []
        return self._registry.find_sources(request, excluded_sources)

    def _add_transfers(self, choice: RoutingChoice, sources: list[Target], best_sources: list[Candidate]) -> None:
        """Add the ways to serve a request in which one target sends KV to another one that answers.

        Either the answering target pulls a cached prefix from one of `best_sources`, or one of `sources` computes the
        whole prompt first.
        """
        facts = choice.request_facts
        planner = TransferPlanner(self._links, facts)
        plans = planner.plan_pulls(choice.candidates, best_sources)
        if facts.can_move_prefill:
            least_busy = find_least_busy(sources, facts.now)
            best_prefillers = [source.target for source in best_sources if source.target.can_prefill_for_others]
            prefillers = list(dict.fromkeys([*least_busy, *best_prefillers]))
            plans += planner.plan_prefills(choice.candidates, self._price_prefills(choice, prefillers))
        self._add_plans(choice, plans)

    def _add_plans(self, choice: RoutingChoice, plans: list[Candidate]) -> None:
        """Add priced plans to a choice, if there are any. Then targets that need a partner are no candidates alone."""
        if plans:
            self._price(plans, choice.request_facts)
            choice.candidates = [*_drop_missing_source(choice.candidates), *plans]

    def _price_prefills(self, choice: RoutingChoice, targets: list[Target]) -> list[Candidate]:
        """Price targets for only the prefill of a request, which another target will answer."""
        facts = choice.request_facts
        candidates = self._cache_state.find_cache_hits(choice.prompt_query, targets, choice.matches, facts.now)
        self._price(candidates, msgspec.structs.replace(facts, output_tokens=0.0))
        return candidates

    def _add_missing_source(self, choice: RoutingChoice, excluded_sources: frozenset[str]) -> None:
        """Choose the worker that computes the prompt for a winner which cannot do that, as decode workers cannot.

        That worker, the source, sends the KV to the winner. It is the cheapest of the least busy ones. Workers that
        failed this request before, or a transfer to the winner lately, are used only if there are no others.
        """
        decoder, facts = choice.winner.target, choice.request_facts
        sources = [
            source
            for source in self._registry.find_sources(choice.request, excluded_workers=frozenset())
            if may_transfer(source.transfer_facts, decoder.transfer_facts, TransferKind.PREFILL)
        ]
        sources = [source for source in sources if source.worker_id not in excluded_sources] or sources
        links, now = self._links, facts.now
        usable_sources = [s for s in sources if not links.is_paused(s.name, decoder.name, now)] or sources
        priced_sources = self._price_prefills(choice, find_least_busy(usable_sources, now))
        planner = TransferPlanner(self._links, facts, uses_paused_pairs=True)
        plans = planner.plan_prefills([choice.winner], priced_sources)
        if plans:
            choice.winner = plans[0]
            self._add_plans(choice, [choice.winner])

    def _add_shared_prefix(
        self, facts: RequestFacts, prompt: PromptQuery, targets: list[Target], best_sources: list[Candidate]
    ) -> None:
        """Set how long a prefix running requests share with the prompt, and how much later requests will use a copy.

        Later requests that can pull the prefix from the best source would save only the time of that pull by the copy.
        """
        total_step_s = 0.0
        for target in targets:
            total_step_s += target.step_s
        answer_s = facts.output_tokens * (total_step_s / len(targets))
        facts.shared_tokens, facts.copy_reuse_share = self._cache_state.estimate_shared_prefix(prompt, answer_s)
        if best_sources:
            facts.copy_reuse_share *= compute_pull_share(facts.shared_tokens, best_sources[0], self._links, facts.now)

    def _price_targets(
        self,
        request: RouteRequest,
        facts: RequestFacts,
        prompt: PromptQuery | None,
        targets: list[Target],
        matches: dict[HolderId, Match],
        queued_ahead_s: Mapping[str, float],
    ) -> list[Candidate]:
        """Return the priced targets of a request, each serving it without KV from others.

        `matches`: cached prefixes of the prompt by the prefix index. `queued_ahead_s`: prefill seconds by target that
        the router's queue will send before this request.
        """
        candidates = self._cache_state.find_cache_hits(prompt, targets, matches, facts.now)
        if prompt is not None:
            self._cache_state.add_memory_costs(prompt, facts.output_tokens, candidates, facts.now)
            # While speeds are unknown and a worker is idle, no request waits for a prefix that is still being computed.
            if self._chooses_by_price and _has_unmeasured_idle_target(targets):
                for candidate in candidates:
                    candidate.cached_tokens = candidate.resident_tokens
        if request.media_conversation is not None:
            self._add_media_hits(request, candidates, facts.now)
        if queued_ahead_s:
            for candidate in candidates:
                candidate.queued_ahead_s = queued_ahead_s.get(candidate.target.name, 0.0)
        self._price(candidates, facts)
        return candidates

    def _price(self, candidates: list[Candidate], facts: RequestFacts) -> None:
        for candidate in candidates:
            candidate.terms = price_worker(candidate, facts, self._cost_config)

    def _pick_winner(self, choice: RoutingChoice) -> Candidate:
        """Return the candidate that session affinity or else the policy takes."""
        request, candidates = choice.request, choice.candidates
        if self._session_affinity:
            session_candidate = self._find_session_candidate(request, candidates, choice.request_facts.now)
            if session_candidate is not None:
                return session_candidate
        if self.custom_policy is not None:
            index = self.custom_policy.choose(request, [candidate.terms for candidate in candidates])
            return self._pick_cheapest(candidates) if index is None else candidates[index]
        if self._policy == "kv":
            return self._pick_cheapest(candidates)
        targets = [candidate.target for candidate in candidates]
        return candidates[choose_without_price(self._policy, request, targets, self.tie_rotation, self._rng)]

    def _pick_cheapest(self, candidates: list[Candidate]) -> Candidate:
        return candidates[choose_cheapest([candidate.terms.cost for candidate in candidates], self.tie_rotation)]

    def _find_session_candidate(
        self, request: RouteRequest, candidates: list[Candidate], now: float
    ) -> Candidate | None:
        """Return the candidate that the session was sent to last, or else its parent session."""
        if request.session is None:
            return None
        placement = self._drop_old(self.session_placements.get(request.session), now)
        if placement is None and request.parent is not None:
            placement = self._drop_old(self.session_placements.get(request.parent), now)
        if placement is None:
            return None
        return next((candidate for candidate in candidates if candidate.target.name == placement.target_name), None)

    def _add_media_hits(self, request: RouteRequest, candidates: list[Candidate], now: float) -> None:
        """Assume that the last prompt of a conversation with media is cached at the target that got it."""
        assert request.media_conversation is not None
        key = (request.media_conversation, request.scope)
        placement = self._drop_old(self.media_placements.get(key), now)
        if placement is None:
            return
        for candidate in candidates:
            if candidate.target.name == placement.target_name:
                candidate.media_cached_tokens = min(placement.prompt_tokens, request.prompt_tokens)

    def _drop_old(self, placement: Placement | None, now: float) -> Placement | None:
        """Return a placement, or None if it is older than `session_ttl_s`."""
        return placement if placement is not None and now - placement.placed_at_s <= self._placement_ttl_s else None

    def commit(self, choice: RoutingChoice, now: float) -> None:
        """Record that a request is sent to the winner of a choice. Later ties, sessions and conversations need that."""
        self.tie_rotation += 1
        request = choice.request
        placement = Placement(choice.winner.target.name, request.prompt_tokens, now)
        if self._session_affinity and request.session is not None:
            self.session_placements[request.session] = placement
        if request.media_conversation is not None:
            self.media_placements[request.media_conversation, request.scope] = placement

    def record_answer(self, request: RouteRequest, output_tokens: int) -> None:
        """Learn from a whole answer how long answers are."""
        self._output_lengths.record_length(request, output_tokens)

    def end_session(self, request: RouteRequest) -> None:
        """Forget the session of a request, where the request says that it is the session's last."""
        if request.is_final and request.session is not None:
            self.session_placements.pop(request.session, None)
            self._output_lengths.forget_session(request)


def _drop_missing_source(candidates: list[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if not candidate.is_missing_source]


def _has_unmeasured_idle_target(targets: Sequence[Target]) -> bool:
    """Return whether a target has nothing to prefill, and nothing is known of the speed of the pool of all targets."""
    if not targets[0].speed.pool.is_unmeasured:
        return False
    has_answered = any(target.load.last_request_end_s > -math.inf for target in targets)
    return not has_answered and not all(target.prefill_queue.requests for target in targets)
