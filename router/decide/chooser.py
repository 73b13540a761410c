"""From an eligible pool to a winner: reads the index and the books, prices, applies the configured policy.

Changes nothing but chance and the rotation of ties; the core commits what it decides.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from router.decide.cache_state import CacheState, PromptQuery
from router.decide.config import CoreConfig
from router.decide.messages import Decision, RouteRequest, Terms
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
    CacheFacts,
    PoolLoad,
    PricedRequest,
    compute_congestion,
    price_worker,
    sum_loads,
)
from router.decide.registry import WorkerRegistry
from router.decide.shortlist import RIVALS_MIN
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.index.protocol import HolderId, Match, Scope


class RoutingChoice(msgspec.Struct, eq=False):
    """The prices of all candidates and the winner."""

    targets: Sequence[Target]
    terms: list[Terms]
    cache_facts: list[CacheFacts]
    winner_index: int
    request: PricedRequest
    prompt_query: PromptQuery | None

    @property
    def target(self) -> Target:
        """The winner."""
        return self.targets[self.winner_index]

    @property
    def winner(self) -> Terms:
        """The winner's price."""
        return self.terms[self.winner_index]

    @property
    def wait_s(self) -> float:
        """Time until the winner has computed what was routed there."""
        return self.target.slowdown * self.target.estimate_queue_s(self.request.now)

    @property
    def queued_ahead_s(self) -> float:
        """Prefill that the router holds for the winner and will send before this request."""
        return self.cache_facts[self.winner_index].queued_ahead_s

    @property
    def charge_s(self) -> float:
        """What the request takes of the workers: its prefill, and what its answer adds to steps that run anyway."""
        return self.winner.prefill_s + self.target.estimate_added_decode_s(
            self.request.prompt_tokens, self.request.output_tokens
        )


class Chooser:
    """Prices candidates and picks one."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        cache_state: CacheState,
        output_lengths: OutputLengths,
        config: CoreConfig,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._tracker = tracker
        self._cache_state = cache_state
        self._output_lengths = output_lengths
        self._cost_config, self._policy, self._session_affinity = config.cost, config.policy, config.session_affinity
        self._uses_shortlist = config.policy == "kv" and config.policy_function is None and not config.session_affinity
        self._rng = rng
        self._tie_rotation = 0
        self.custom_policy = CustomPolicy(config.policy_function) if config.policy_function is not None else None
        self.session_targets = SessionTargets(config.session_ttl_s, config.sessions_max)
        self.media_placements = MediaPlacements(config.session_ttl_s, config.sessions_max)

    def advance_tie_rotation(self) -> None:
        """A choice was committed: the next tie goes to the next in turn."""
        self._tie_rotation += 1

    def choose(
        self,
        request: RouteRequest,
        candidates: list[Target],
        now: float,
        *,
        queued_ahead_s: Mapping[str, float] | None = None,
        queued_s: float = 0.0,
        explain: bool = False,
    ) -> RoutingChoice:
        """Price the candidates, of a large pool those that may win, and pick one by the configured policy.
        `queued_ahead_s`: seconds queued for each target that go before this request. `explain`: price all, whoever may
        win."""
        prompt_query, matches, shortlist = None, None, candidates
        utilisation_decay = self._tracker.compute_utilisation_decay(now)
        uses_shortlist = self._uses_shortlist and request.media_conversation is None
        load_order = (
            self._registry.get_load_order(request, candidates, utilisation_decay, now)
            if uses_shortlist and not (queued_ahead_s or queued_s)
            else None
        )
        if request.token_ids is not None:
            prompt_query = self._cache_state.prepare_query(
                request.token_ids, request.scope, request.prompt_tokens, request.similar_prompt, request.common_tokens
            )
            if load_order is not None:
                shortlist, matches = self._cache_state.make_shortlist(prompt_query, load_order) or (candidates, None)
        elif load_order is not None:
            shortlist = [load_order.targets[holder] for holder in load_order.holders[:RIVALS_MIN]]
        pool_load = load_order.pool_load if load_order is not None else sum_loads(candidates)
        priced_request = self._describe_request(
            request, prompt_query, shortlist, pool_load, now, utilisation_decay, queued_s
        )
        choice = self._price_candidates(request, priced_request, prompt_query, shortlist, matches, queued_ahead_s)
        session_index = self._find_session_candidate(request, shortlist, now) if self._session_affinity else None
        choice.winner_index = (
            self._pick_by_policy(request, shortlist, choice) if session_index is None else session_index
        )
        if load_order is not None:
            computed_tokens = request.prompt_tokens - choice.winner.cached_tokens
            load_order.record_request(request.prompt_tokens, computed_tokens, priced_request.output_tokens)
        if explain and shortlist is not candidates:
            full_choice = self._price_candidates(
                request, priced_request, prompt_query, candidates, None, queued_ahead_s
            )
            full_choice.winner_index = candidates.index(choice.target)
            return full_choice
        return choice

    def _describe_request(
        self,
        request: RouteRequest,
        prompt_query: PromptQuery | None,
        targets: list[Target],
        pool_load: PoolLoad,
        now: float,
        utilisation_decay: float,
        queued_s: float,
    ) -> PricedRequest:
        """What all prices of a request have in common."""
        shortest_wait_s, total_step_s = math.inf, 0.0
        for target in targets:
            total_step_s += target.step_s
            wait_s = target.slowdown * target.estimate_queue_s(now)
            if wait_s < shortest_wait_s:
                shortest_wait_s = wait_s
        priced_request = PricedRequest(
            now,
            request.prompt_tokens,
            self._output_lengths.expect(request),
            utilisation_decay,
            compute_congestion(pool_load, shortest_wait_s, queued_s, utilisation_decay, self._cost_config),
        )
        if prompt_query is not None:
            step_s = total_step_s / len(targets)
            priced_request.shared_tokens, priced_request.shared_share = self._cache_state.estimate_shared_prefix(
                prompt_query, priced_request.output_tokens * step_s
            )
        return priced_request

    def _price_candidates(
        self,
        request: RouteRequest,
        priced_request: PricedRequest,
        prompt_query: PromptQuery | None,
        targets: list[Target],
        matches: dict[HolderId, Match] | None,
        queued_ahead_s: Mapping[str, float] | None,
    ) -> RoutingChoice:
        """Price all targets; `matches` where they are known. Nothing is chosen yet."""
        if prompt_query is None:
            cache_facts = [CacheFacts() for _ in targets]
        else:
            cache_facts = self._gather_cache_facts(request, priced_request, prompt_query, targets, matches)
        if queued_ahead_s:
            for target, facts in zip(targets, cache_facts):
                facts.queued_ahead_s = queued_ahead_s.get(target.name, 0.0)
        self._place_media(request, targets, cache_facts, priced_request.now)
        config = self._cost_config
        terms = [price_worker(target, priced_request, facts, config) for target, facts in zip(targets, cache_facts)]
        return RoutingChoice(targets, terms, cache_facts, 0, priced_request, prompt_query)

    def _gather_cache_facts(
        self,
        request: RouteRequest,
        priced_request: PricedRequest,
        prompt_query: PromptQuery,
        targets: list[Target],
        matches: dict[HolderId, Match] | None,
    ) -> list[CacheFacts]:
        """What each target's cache has of a prompt, and has room for."""
        cache_facts = self._cache_state.find_cache_hits(prompt_query, targets, matches)
        if self._cache_state.working_sets.may_overflow(prompt_query.prompt_tokens, priced_request.now):
            self._add_pressures(prompt_query, targets, cache_facts)
        return cache_facts

    def _pick_by_policy(self, request: RouteRequest, candidates: list[Target], choice: RoutingChoice) -> int:
        policy, rotation = self._policy, self._tie_rotation
        if self.custom_policy is not None:
            index = self.custom_policy.choose(request, choice.terms)
            return choose_cheapest(choice.terms, rotation) if index is None else index
        if policy == "kv":
            return choose_cheapest(choice.terms, rotation)
        if policy == "round_robin":
            return choose_round_robin(candidates, rotation)
        if policy == "random":
            return choose_random(candidates, self._rng)
        key = make_sticky_key(request.session, request.token_ids) if policy == "sticky" else None
        if key is not None:
            return choose_sticky(candidates, key)
        return choose_least_requests(candidates, rotation)

    def _add_pressures(self, prompt_query: PromptQuery, targets: list[Target], cache_facts: list[CacheFacts]) -> None:
        """Seconds that each target will compute again for want of room, over this prompt's further uses."""
        prompt_tokens = prompt_query.prompt_tokens
        overflows = self._cache_state.working_sets.compute_overflow_shares(
            [target.name for target in targets],
            [facts.cached_tokens / prompt_tokens for facts in cache_facts],
            prompt_query.get_chunk_keys(self._cache_state.working_sets.chunk_tokens),
            prompt_tokens,
        )
        expected_reuses = self._cache_state.working_sets.reuse_count
        for overflow, target, facts in zip(overflows, targets, cache_facts):
            facts.pressure_s = expected_reuses * overflow * target.estimate_prefill_s(prompt_tokens, 0)

    def rechoose_behind_queue(self, choice: RoutingChoice, queued_ahead_s: Mapping[str, float]) -> None:
        """Pick anew among the same candidates, now that their place in the queue is known."""
        for i, (target, facts) in enumerate(zip(choice.targets, choice.cache_facts)):
            facts.queued_ahead_s = queued_ahead_s.get(target.name, 0.0)
            choice.terms[i] = price_worker(target, choice.request, facts, self._cost_config)
        choice.winner_index = choose_cheapest(choice.terms, self._tie_rotation)

    def _place_media(
        self, request: RouteRequest, targets: list[Target], cache_facts: list[CacheFacts], now: float
    ) -> None:
        """A conversation with media is taken to have its last prompt cached where it was before."""
        if request.media_conversation is None:
            return
        placement = self.media_placements.get((request.media_conversation, request.scope), now)
        if placement is None:
            return
        for target, facts in zip(targets, cache_facts):
            if target.name == placement.target_name:
                facts.media_cached_tokens = min(placement.prompt_tokens, request.prompt_tokens)

    def _find_session_candidate(self, request: RouteRequest, candidates: list[Target], now: float) -> int | None:
        """The candidate this session, or else the one that started it, was sent to before, where affinity is on."""
        if request.session is None:
            return None
        target_name = self.session_targets.get(request.session, now)
        if target_name is None and request.parent is not None:
            target_name = self.session_targets.get(request.parent, now)
        if target_name is None:
            return None
        return next((i for i, target in enumerate(candidates) if target.name == target_name), None)

    def make_decision(
        self,
        request: RouteRequest,
        choice: RoutingChoice,
        now: float,
        *,
        explain: bool,
        attempt: int = 0,
        waited_s: float = 0.0,
    ) -> Decision:
        """The choice as a value, with every candidate's terms where an explanation was asked for."""
        target, terms = choice.target, choice.winner
        decision = Decision(
            request_id=request.request_id,
            worker=target.worker_id,
            rank=target.rank,
            attempt=attempt,
            prompt_tokens=request.prompt_tokens,
            predicted_cached_tokens=terms.cached_tokens,
            predicted_ttft_s=terms.ttft_s,
            terms=terms,
            decided_s=now,
            queued_s=waited_s,
        )
        most_cached = max(choice.terms, key=lambda candidate: candidate.cached_tokens)
        if most_cached.cached_tokens > terms.cached_tokens:
            decision.most_cached = most_cached
        if explain:
            decision.candidates = sorted(choice.terms, key=lambda candidate: candidate.cost)
            decision.not_eligible = self._registry.find_ineligibility_reasons(request)
        return decision


class MediaPlacement(NamedTuple):
    """Where the last turn of a conversation with media went."""

    target_name: str
    prompt_tokens: int
    """Of that turn's prompt, as estimated."""
    last_used_s: float


@dataclass(slots=True)
class MediaPlacements:
    """(how a conversation began, its scope) -> its home. Bounded in number, oldest use first out."""

    ttl_s: float
    max_placements: int
    placements: OrderedDict[tuple[int, Scope], MediaPlacement] = field(default_factory=OrderedDict)

    def get(self, key: tuple[int, Scope], now: float) -> MediaPlacement | None:
        """The conversation's home, unless it was used too long ago."""
        placement = self.placements.get(key)
        return placement if placement is not None and now - placement.last_used_s <= self.ttl_s else None

    def put(self, key: tuple[int, Scope], placement: MediaPlacement) -> None:
        """A turn of the conversation was sent."""
        self.placements[key] = placement
        self.placements.move_to_end(key)
        while len(self.placements) > self.max_placements:
            self.placements.popitem(last=False)


@dataclass(slots=True)
class SessionTargets:
    """session -> (target it was sent to last, last use). Bounded in number, oldest use first out."""

    ttl_s: float
    max_sessions: int
    targets: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)

    def get(self, session: str, now: float) -> str | None:
        """The session's worker, unless it was used too long ago."""
        entry = self.targets.get(session)
        return entry[0] if entry is not None and now - entry[1] <= self.ttl_s else None

    def forget(self, session: str) -> None:
        """It is over."""
        self.targets.pop(session, None)

    def put(self, session: str, target_name: str, now: float) -> None:
        """The session was sent to a worker."""
        self.targets[session] = (target_name, now)
        self.targets.move_to_end(session)
        while len(self.targets) > self.max_sessions:
            self.targets.popitem(last=False)
