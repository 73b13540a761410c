"""From an eligible pool to a winner: reads the index and the books, prices, applies the configured policy.

Changes nothing but chance and the rotation of ties; the core commits what it decides.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from router.decide.cache_state import CacheState, PromptQuery
from router.decide.config import CoreConfig
from router.decide.messages import Decision, RouteRequest, Terms
from router.decide.output_lengths import OutputLengths
from router.decide.policy import (
    CustomPolicy,
    KvCost,
    choose_least_requests,
    choose_random,
    choose_round_robin,
    choose_sticky,
    estimate_tier_load_s,
    make_sticky_key,
)
from router.decide.registry import WorkerRegistry
from router.decide.shortlist import RIVALS_MIN, LoadOrder
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.index.protocol import HolderId, Match, Scope


class RoutingChoice(msgspec.Struct, eq=False):
    """A priced set of candidates and the winner."""

    cost: KvCost
    winner_index: int
    prompt_query: PromptQuery | None
    resident_tokens: list[int]
    """Tokens of each candidate's h that events (or history) vouch for."""

    @property
    def target(self) -> Target:
        """The winner."""
        return self.cost.targets[self.winner_index]

    @property
    def wait_s(self) -> float:
        """slow * Q of the winner."""
        return self.target.slowdown * self.cost.queue_waits_s[self.winner_index]

    @property
    def queued_ahead_s(self) -> float:
        """Prefill that the router holds for the winner and will send before this request."""
        return 0.0 if self.cost.queued_ahead_s is None else self.cost.queued_ahead_s[self.winner_index]

    @property
    def prefill_s(self) -> float:
        """P of the winner."""
        return self.target.estimate_prefill_s(self.cost.prompt_tokens, self.cost.cached_tokens[self.winner_index])

    @property
    def charge_s(self) -> float:
        """What it takes of the workers: its prefill, and what its answer adds to steps that run anyway."""
        return self.prefill_s + self.target.estimate_added_decode_s(self.cost.prompt_tokens, self.cost.expected_tokens)

    def find_earliest(self) -> tuple[int, float]:
        """(candidate, seconds to its first token there) of the one that is predicted to begin first."""
        ttfts = [(self.cost.make_terms(i, 0).ttft_s, i) for i in range(len(self.cost.targets))]
        ttft_s, i = min(ttfts)
        return i, ttft_s


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
        self._chunk_tokens = config.working_set.chunk_tokens
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
            self._registry.get_load_order(request, candidates, utilisation_decay)
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
        pool = load_order if shortlist is not candidates else None
        choice = self._price_candidates(
            request, prompt_query, shortlist, matches, now, utilisation_decay, queued_s=queued_s, pool=pool
        )
        if queued_ahead_s:
            choice.cost.queued_ahead_s = [queued_ahead_s.get(target.name, 0.0) for target in candidates]
        self._price_media(request, choice, now)
        session_index = self._find_session_candidate(request, shortlist, now) if self._session_affinity else None
        choice.winner_index = (
            self._pick_by_policy(request, shortlist, choice) if session_index is None else session_index
        )
        if load_order is not None:
            computed_tokens = request.prompt_tokens - choice.cost.cached_tokens[choice.winner_index]
            load_order.record_request(request.prompt_tokens, computed_tokens, choice.cost.expected_tokens)
        if explain and pool is not None:
            full_choice = self._price_candidates(
                request, prompt_query, candidates, None, now, utilisation_decay, queued_s=queued_s, pool=pool
            )
            full_choice.cost.congestion = choice.cost.congestion
            full_choice.cost.shared_discount = choice.cost.shared_discount
            full_choice.winner_index = candidates.index(choice.target)
            return full_choice
        return choice

    def _price_candidates(
        self,
        request: RouteRequest,
        prompt_query: PromptQuery | None,
        targets: list[Target],
        matches: dict[HolderId, Match] | None,
        now: float,
        utilisation_decay: float,
        *,
        queued_s: float,
        pool: LoadOrder | None,
    ) -> RoutingChoice:
        """The targets with all that a price of theirs takes; `matches` where they are known. Nothing is chosen yet."""
        tier_load_s = None
        expected_tokens = self._output_lengths.expect(request)
        cached_tokens = resident_tokens = [0] * len(targets)
        if prompt_query is not None:
            hits = self._cache_state.find_cache_hits(prompt_query, targets, matches)
            cached_tokens, resident_tokens = hits.cached_tokens, hits.resident_tokens
            if hits.slower_tier_matches:
                tier_load_s = [0.0] * len(targets)
                for i, match in hits.slower_tier_matches.items():
                    tier_load_s[i] = estimate_tier_load_s(match, self._cost_config) * targets[i].speed.tier_load.factor
        cost = KvCost(
            targets,
            cached_tokens,
            tier_load_s,
            prompt_tokens=request.prompt_tokens,
            expected_tokens=expected_tokens,
            utilisation_decay=utilisation_decay,
            now=now,
            config=self._cost_config,
            queued_s=queued_s,
            pool=pool,
        )
        if prompt_query is not None:
            needed_tokens = prompt_query.prompt_tokens + 0.5 * expected_tokens
            total_step_s = 0.0
            total_single_step_s = 0.0
            total_running_count = 0.0
            for i, target in enumerate(targets):
                total_step_s += target.step_s
                total_single_step_s += target.speed.single_step_s
                total_running_count += target.load.request_count
                if target.free_kv_tokens < needed_tokens:
                    cost.memory_wait_s[i] = self._cache_state.estimate_memory_wait_s(
                        prompt_query, target, needed_tokens
                    )
            lifetime_s = expected_tokens * total_step_s / len(targets)
            delay_ratio = (1.0 + cost.congestion) * (
                max(1.0, total_step_s / total_single_step_s) if total_single_step_s > 0.0 else 1.0
            )
            mean_running_count = (
                total_running_count / len(targets) if pool is None else pool.requests / len(pool.targets)
            )
            cost.shared_prefix_tokens, cost.shared_discount = self._cache_state.estimate_shared_prefix(
                prompt_query, now, lifetime_s, delay_ratio, mean_running_count
            )
            if self._cache_state.working_sets.may_overflow(prompt_query.prompt_tokens, now):
                cost.pressures_s = self._compute_pressures(request, prompt_query, targets, cached_tokens)
        return RoutingChoice(cost, 0, prompt_query, resident_tokens)

    def _pick_by_policy(self, request: RouteRequest, candidates: list[Target], choice: RoutingChoice) -> int:
        policy, cost, resident_tokens = self._policy, choice.cost, choice.resident_tokens
        rotation = self._tie_rotation
        if self.custom_policy is not None:
            index = self.custom_policy.choose(
                request, [cost.make_terms(i, resident_tokens[i]) for i in range(len(candidates))]
            )
            return cost.choose_cheapest(rotation) if index is None else index
        if policy == "kv":
            return cost.choose_cheapest(rotation)
        if policy == "round_robin":
            return choose_round_robin(candidates, rotation)
        if policy == "random":
            return choose_random(candidates, self._rng)
        key = make_sticky_key(request.session, request.token_ids) if policy == "sticky" else None
        if key is not None:
            return choose_sticky(candidates, key)
        return choose_least_requests(candidates, rotation)

    def _compute_pressures(
        self, request: RouteRequest, prompt_query: PromptQuery, candidates: list[Target], cached_tokens: list[int]
    ) -> list[float] | None:
        """Seconds that each candidate will compute again for want of room, over this prompt's further uses."""
        prompt_tokens = request.prompt_tokens
        cached_shares = [tokens / prompt_tokens for tokens in cached_tokens]
        keys = prompt_query.get_chunk_keys(self._chunk_tokens)
        overflows = self._cache_state.working_sets.compute_overflow_shares(
            [t.name for t in candidates], cached_shares, keys, prompt_query.prompt_tokens
        )
        if not any(overflows):
            return None
        expected_reuses = self._cache_state.working_sets.reuse_count
        return [
            expected_reuses * overflow * target.estimate_prefill_s(prompt_tokens, 0)
            for overflow, target in zip(overflows, candidates)
        ]

    def rechoose_behind_queue(self, choice: RoutingChoice, queued_ahead_s: Mapping[str, float]) -> None:
        """Pick anew among the same candidates, now that their place in the queue is known."""
        choice.cost.queued_ahead_s = [queued_ahead_s.get(target.name, 0.0) for target in choice.cost.targets]
        choice.winner_index = choice.cost.choose_cheapest(self._tie_rotation)

    def _price_media(self, request: RouteRequest, choice: RoutingChoice, now: float) -> None:
        """Price what a conversation with media is taken to have where it was before."""
        placement = (
            None
            if request.media_conversation is None
            else self.media_placements.get((request.media_conversation, request.scope), now)
        )
        if placement is None:
            return
        cost = choice.cost
        cost.media_candidate_index = next(
            (i for i, target in enumerate(cost.targets) if target.name == placement.target_name), -1
        )
        cost.media_cached_tokens = min(placement.prompt_tokens, request.prompt_tokens)

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
        cost, winner_index = choice.cost, choice.winner_index
        target = cost.targets[winner_index]
        terms = cost.make_terms(winner_index, choice.resident_tokens[winner_index])
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
        cached_tokens_max = max(cost.cached_tokens)
        if cached_tokens_max > terms.cached_tokens:
            most_cached_index = cost.cached_tokens.index(cached_tokens_max)
            decision.most_cached = cost.make_terms(most_cached_index, choice.resident_tokens[most_cached_index])
        if explain:
            candidate_terms: list[Terms] = [
                cost.make_terms(i, choice.resident_tokens[i]) for i in range(len(cost.targets))
            ]
            decision.candidates = sorted(candidate_terms, key=lambda t: t.cost)
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
