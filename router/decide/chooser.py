"""Chooser: prices the eligible targets of a request and picks one by the configured policy.

Choosing counts no request, and draws from the random generator. The placer commits the choice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from options.bounded_dict import BoundedDict
from router.decide.cache_state import CacheState
from router.decide.config import CoreConfig
from router.decide.messages import RouteRequest, TransferKind
from router.decide.output_lengths import OutputLengths
from router.decide.policy import (
    CustomPolicy,
    choose_cheapest,
    choose_least_requests,
    choose_random,
    choose_round_robin,
    choose_sticky,
    make_sticky_key,
)
from router.decide.price import (
    Candidate,
    RequestFacts,
    TransferPlan,
    compute_congestion,
    find_shortest_wait_s,
    price_worker,
    sum_loads,
)
from router.decide.registry import WorkerRegistry
from router.decide.shortlist import LoadOrder
from router.decide.target import PromptQuery, Target
from router.decide.tracker import LoadTracker
from router.decide.transfers.links import TransferLinks
from router.decide.transfers.plans import (
    TransferPlanner,
    can_prefill,
    compute_pull_share,
    find_best_sources,
    find_least_busy,
)
from router.decide.workers import may_transfer
from router.index.protocol import HolderId, Match, Scope

Key = TypeVar("Key", bound=Hashable)


class RoutingChoice(msgspec.Struct, eq=False):
    """Priced candidates of a request, and the one that was chosen.

    A candidate is a target (a worker or a rank of one), possibly with a plan to move KV there from another target.
    """

    request: RouteRequest
    candidates: list[Candidate]
    winner: Candidate
    request_facts: RequestFacts
    prompt_query: PromptQuery | None

    def find_candidate(self, target: Target, plan: TransferPlan | None) -> Candidate:
        """Return the candidate with this target and plan."""
        return next(candidate for candidate in self.candidates if candidate.target is target and candidate.plan is plan)

    def find_earliest(self) -> Candidate:
        """Return the candidate with the earliest first token, of those that can serve the request."""
        able_candidates = (candidate for candidate in self.candidates if not candidate.is_missing_source)
        return min(able_candidates, key=lambda candidate: candidate.terms.ttft_s)

    def find_most_cached(self) -> Candidate:
        """Return the candidate with the longest cached prefix, without a transfer; the winner if none has a longer."""
        alone = (candidate for candidate in self.candidates if candidate.plan is None)
        return max([self.winner, *alone], key=lambda candidate: candidate.cached_tokens)

    @property
    def wait_s(self) -> float:
        """Seconds until the prefill can begin: the target computes earlier prompts first."""
        target, plan = self.winner.target, self.winner.plan
        wait_s = target.slowdown * target.estimate_queue_s(self.request_facts.now)
        if plan is None or plan.source_terms is None:
            return wait_s
        source_terms = plan.source_terms  # price of the prefill at another target, which computes the prompt
        source_wait_s = source_terms.ttft_s - source_terms.slowdown * source_terms.prefill_s
        return max(wait_s, source_wait_s)

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
        output_lengths: OutputLengths,
        links: TransferLinks,
        config: CoreConfig,
        rng: random.Random,
    ) -> None:
        """Make a chooser that reads these parts of the router's core, and changes none of them but `rng`."""
        self._registry = registry
        self._tracker = tracker
        self._cache_state = cache_state
        self._output_lengths = output_lengths
        self._links = links
        self._rng = rng

        self._cost_config = config.cost
        self._policy = config.policy
        self._session_affinity = config.session_affinity
        self.custom_policy = CustomPolicy(config.policy_function) if config.policy_function is not None else None
        has_other_rule = self.custom_policy is not None or config.session_affinity
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
        queued_ahead_s: Mapping[str, float] | None = None,
        queued_s: float = 0.0,
        explain: bool = False,
        excluded_sources: frozenset[str] = frozenset(),
    ) -> RoutingChoice:
        """Price the ways to serve a request and pick one by the configured policy.

        `targets`: workers that may answer; `explain` prices all of them even in a large pool. `excluded_sources`: names
        of workers from which no KV is moved to them. `queued_s`: seconds of prefill that wait in the router's queue;
        `queued_ahead_s`: the part of it that will be sent before this request, by target.
        """
        # Which targets may win, and from which others they could get KV.
        prompt = self._cache_state.prepare_query(request)
        output_tokens = self._output_lengths.estimate_length(request)
        decay = self._tracker.compute_utilisation_decay(now)
        facts = RequestFacts(now, request.prompt_tokens, output_tokens, decay)
        load_order: LoadOrder | None = None  # of a large pool; it accounts for neither media nor the router's queue
        has_media_or_queue = request.media_conversation is not None or bool(queued_ahead_s or queued_s)
        if self._chooses_by_price and not has_media_or_queue:
            load_order = self._registry.get_load_order(request, targets, decay, now)
        sources = self._find_sources(request, excluded_sources)
        shortlist, matches = self._cache_state.make_shortlist(targets, prompt, load_order, sources)
        best_sources = find_best_sources(sources, matches)

        # The prices, and the winner.
        facts.can_move_prefill = any(map(can_prefill, sources))
        pool_load = sum_loads(targets) if load_order is None else load_order.pool_load
        shortest_wait_s = find_shortest_wait_s(shortlist, now)
        facts.congestion = compute_congestion(pool_load, shortest_wait_s, queued_s, decay, self._cost_config)
        if prompt is not None:
            self._add_shared_prefix(facts, prompt, shortlist, best_sources)
        choice = self._price_targets(request, facts, prompt, shortlist, matches, queued_ahead_s)
        plans = self._plan_transfers(choice, sources, best_sources, matches) if sources else []
        self._add_plans(choice, plans)
        choice.winner = self._pick_winner(choice)
        return self._explain(choice, targets, plans) if explain and shortlist is not targets else choice

    def _explain(self, choice: RoutingChoice, targets: list[Target], plans: list[Candidate]) -> RoutingChoice:
        """Return the same choice, with the prices also of the targets that are not on the shortlist."""
        prompt, matches = choice.prompt_query, self._cache_state.match(choice.prompt_query)
        explained_choice = self._price_targets(choice.request, choice.request_facts, prompt, targets, matches)
        self._add_plans(explained_choice, plans)
        explained_choice.winner = explained_choice.find_candidate(choice.winner.target, choice.winner.plan)
        return explained_choice

    def _find_sources(self, request: RouteRequest, excluded_sources: frozenset[str]) -> list[Target]:
        """Return the targets that KV of a request may be moved from.

        There is none if the index does not know the whole prompt, or if another policy than the price decides.
        """
        is_whole_prompt_known = request.media_conversation is None and request.prompt_count == 1
        if not self._chooses_by_price or request.token_ids is None or not is_whole_prompt_known:
            return []
        return self._registry.find_sources(request, excluded_sources)

    def _plan_transfers(
        self,
        choice: RoutingChoice,
        sources: list[Target],
        best_sources: dict[Target, int],
        matches: dict[HolderId, Match],
    ) -> list[Candidate]:
        """Return the ways to serve a request in which one target sends KV to another one that answers.

        Either the answering target pulls a cached prefix from one of `best_sources`, each with the length of its own.
        Or one of `sources` computes the whole prompt first. `matches`: cached prefixes by the prefix index.
        """
        planner = self._make_planner(choice)
        plans = planner.plan_pulls(choice.candidates, best_sources)
        if choice.request_facts.can_move_prefill:
            least_busy = find_least_busy(sources, choice.request_facts.now)
            prefillers = list(dict.fromkeys([*least_busy, *filter(can_prefill, best_sources)]))
            priced_prefillers = self._price_prefills(choice, prefillers, matches)
            plans += planner.plan_prefills(choice.candidates, priced_prefillers)
        return plans

    def _make_planner(self, choice: RoutingChoice) -> TransferPlanner:
        facts = choice.request_facts
        return TransferPlanner(self._links, facts.prompt_tokens, facts.now)

    def _price_prefills(
        self, choice: RoutingChoice, targets: list[Target], matches: dict[HolderId, Match]
    ) -> list[Candidate]:
        """Price targets for only the prefill of a request, which another target will answer."""
        prompt_query, now = choice.prompt_query, choice.request_facts.now
        if prompt_query is None:
            candidates = [Candidate(target) for target in targets]
        else:
            candidates = self._cache_state.find_cache_hits(prompt_query, targets, matches, now)
        request_facts = msgspec.structs.replace(choice.request_facts, output_tokens=0.0)
        self._price(candidates, request_facts)
        return candidates

    def _add_plans(self, choice: RoutingChoice, plans: list[Candidate]) -> None:
        """Add the plans and their prices to a choice, and remove the targets that can serve nothing without a partner.

        Some engines need a partner that computes the prompt, as SGLang's with a role do.
        """
        if not plans:
            return
        self._price(plans, choice.request_facts)
        alone = [candidate for candidate in choice.candidates if not candidate.is_missing_source]
        choice.candidates = [*alone, *plans]

    def add_missing_source(self, choice: RoutingChoice, excluded_sources: frozenset[str]) -> bool:
        """Complete a choice whose winner cannot compute the prompt: add the source, a worker that sends it the KV.

        Changes `choice.winner` to the same worker with the source, and returns True. Returns False if no worker can be
        the source. The source is the cheapest of the least busy workers. Those that failed this request before
        (`excluded_sources`), or whose transfers to the winner failed lately, are used only if there are no others.
        """
        request, decoder, now = choice.request, choice.winner.target, choice.request_facts.now
        sources = self._find_partners(request, decoder, excluded_sources)
        if not sources:
            sources = self._find_partners(request, decoder, excluded_sources=frozenset())
        working_sources = [source for source in sources if not self._links.is_paused(source.name, decoder.name, now)]
        least_busy_sources = find_least_busy(working_sources or sources, now)
        priced_sources = self._price_prefills(choice, least_busy_sources, matches={})  # cached prefixes do not count
        plans = self._make_planner(choice).plan_prefills([choice.winner], priced_sources, uses_paused_pairs=True)
        if not plans:
            return False
        cheapest_plan = plans[0]
        self._add_plans(choice, [cheapest_plan])
        choice.winner = cheapest_plan
        return True

    def _find_partners(self, request: RouteRequest, target: Target, excluded_sources: frozenset[str]) -> list[Target]:
        """Return the targets that may compute a prompt for a target. Those of other engines are no partners."""
        sources = self._registry.find_sources(request, excluded_sources)
        return [
            source
            for source in sources
            if may_transfer(source.transfer_facts, target.transfer_facts, TransferKind.PREFILL)
        ]

    def _add_shared_prefix(
        self, facts: RequestFacts, prompt: PromptQuery, targets: list[Target], best_sources: dict[Target, int]
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
            source, cached_tokens = next(iter(best_sources.items()))
            shared_tokens = facts.shared_tokens
            facts.copy_reuse_share *= compute_pull_share(shared_tokens, cached_tokens, source, self._links, facts.now)

    def _price_targets(
        self,
        request: RouteRequest,
        facts: RequestFacts,
        prompt: PromptQuery | None,
        targets: list[Target],
        matches: dict[HolderId, Match],
        queued_ahead_s: Mapping[str, float] | None = None,
    ) -> RoutingChoice:
        """Return the priced targets of a request, each serving it without KV from others; the caller picks the winner.

        `matches`: cached prefixes of the prompt by the prefix index. `queued_ahead_s`: prefill seconds by target that
        the router's queue will send before this request.
        """
        if prompt is None:
            candidates = [Candidate(target) for target in targets]
        else:
            candidates = self._cache_state.find_cache_hits(prompt, targets, matches, facts.now)
            self._cache_state.add_memory_costs(prompt, facts.output_tokens, candidates, facts.now)
            # While speeds are unknown and a worker is idle, no request waits for a prefix that is still being computed.
            if self._chooses_by_price and _has_unmeasured_idle_target(targets):
                for candidate in candidates:
                    candidate.cached_tokens = candidate.resident_tokens
        if request.media_conversation is not None:
            self._add_media_hits(request, candidates, facts.now)
        self._price(candidates, facts, queued_ahead_s)
        return RoutingChoice(request, candidates, candidates[0], facts, prompt)

    def _price(
        self,
        candidates: list[Candidate],
        request_facts: RequestFacts,
        queued_ahead_s: Mapping[str, float] | None = None,
    ) -> None:
        """Set the prices of candidates. `queued_ahead_s`: prefill that the queue will send before, by target."""
        for candidate in candidates:
            if queued_ahead_s is not None:
                candidate.queued_ahead_s = queued_ahead_s.get(candidate.target.name, 0.0)
            candidate.terms = price_worker(candidate, request_facts, self._cost_config)

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
        return candidates[self._apply_policy(request, [candidate.target for candidate in candidates])]

    def _pick_cheapest(self, candidates: list[Candidate]) -> Candidate:
        return candidates[choose_cheapest([candidate.terms.cost for candidate in candidates], self.tie_rotation)]

    def _apply_policy(self, request: RouteRequest, targets: list[Target]) -> int:
        """Return the index of the target that a policy without prices takes."""
        rotation = self.tie_rotation
        if self._policy == "round_robin":
            return choose_round_robin(targets, rotation)
        if self._policy == "random":
            return choose_random(targets, self._rng)
        sticky_key = make_sticky_key(request.session, request.token_ids) if self._policy == "sticky" else None
        if sticky_key is not None:
            return choose_sticky(targets, sticky_key)
        return choose_least_requests(targets, rotation)

    def _find_session_candidate(
        self, request: RouteRequest, candidates: list[Candidate], now: float
    ) -> Candidate | None:
        """Return the candidate that the session was sent to last, or else its parent session."""
        if request.session is None:
            return None
        placement = self._find_recent(self.session_placements, request.session, now)
        if placement is None and request.parent is not None:
            placement = self._find_recent(self.session_placements, request.parent, now)
        if placement is None:
            return None
        return next((candidate for candidate in candidates if candidate.target.name == placement.target_name), None)

    def _add_media_hits(self, request: RouteRequest, candidates: list[Candidate], now: float) -> None:
        """Assume that the last prompt of a conversation with media is cached at the target that got it."""
        assert request.media_conversation is not None
        placement = self._find_recent(self.media_placements, (request.media_conversation, request.scope), now)
        if placement is None:
            return
        for candidate in candidates:
            if candidate.target.name == placement.target_name:
                candidate.media_cached_tokens = min(placement.prompt_tokens, request.prompt_tokens)

    def _find_recent(self, placements: BoundedDict[Key, Placement], key: Key, now: float) -> Placement | None:
        """Return the placement under a key, unless it is older than `session_ttl_s`."""
        placement = placements.get(key)
        return placement if placement is not None and now - placement.placed_at_s <= self._placement_ttl_s else None

    def rechoose_behind_queue(self, choice: RoutingChoice, queued_ahead_s: Mapping[str, float]) -> None:
        """Price the candidates again and pick one, now that the request's place in the queue is known."""
        self._price(choice.candidates, choice.request_facts, queued_ahead_s)
        choice.winner = self._pick_winner(choice)

    def commit(self, choice: RoutingChoice, now: float) -> None:
        """Record that a request is sent to the winner of a choice. Later ties, sessions and conversations need that."""
        self.tie_rotation += 1
        request = choice.request
        placement = Placement(choice.winner.target.name, request.prompt_tokens, now)
        if self._session_affinity and request.session is not None:
            self.session_placements[request.session] = placement
        if request.media_conversation is not None:
            self.media_placements[request.media_conversation, request.scope] = placement


def _has_unmeasured_idle_target(targets: Sequence[Target]) -> bool:
    """Return whether a target has nothing to prefill, and nothing is known of the speed of the pool of all targets."""
    if not targets[0].speed.pool.is_unmeasured:
        return False
    has_answered = any(target.load.last_request_end_s > -math.inf for target in targets)
    return not has_answered and not all(target.prefill_queue.requests for target in targets)
