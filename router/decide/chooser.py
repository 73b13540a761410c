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
    load_seconds,
    sticky_key,
)
from router.decide.registry import WorkerRegistry
from router.decide.shortlist import KEEP, LoadOrder
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.index.protocol import HolderId, Match, Scope


class RoutingChoice(msgspec.Struct, eq=False):
    """A priced set of candidates and the winner."""

    cost: KvCost
    winner: int
    prompt: PromptQuery | None
    resident: list[int]
    """Tokens of each candidate's h that events (or history) vouch for."""

    @property
    def target(self) -> Target:
        """The winner."""
        return self.cost.targets[self.winner]

    @property
    def wait_s(self) -> float:
        """slow * Q of the winner."""
        return self.target.slow * self.cost.waits[self.winner]

    @property
    def held_s(self) -> float:
        """Prefill that the router holds for the winner and will send before this request."""
        return 0.0 if self.cost.ahead is None else self.cost.ahead[self.winner]

    @property
    def prefill_s(self) -> float:
        """P of the winner."""
        return self.target.prefill_seconds(self.cost.prompt_tokens, self.cost.cached[self.winner])

    @property
    def charge_s(self) -> float:
        """What it takes of the workers: its prefill, and what its answer adds to steps that run anyway."""
        return self.prefill_s + self.target.added_seconds(self.cost.prompt_tokens, self.cost.expected_tokens)

    def soonest(self) -> tuple[int, float]:
        """(candidate, seconds to its first token there) of the one that is predicted to begin first."""
        found = [(self.cost.terms(i, 0).ttft_s, i) for i in range(len(self.cost.targets))]
        ttft_s, i = min(found)
        return i, ttft_s


class Chooser:
    """Prices candidates and picks one."""

    def __init__(
        self,
        registry: WorkerRegistry,
        tracker: LoadTracker,
        book: CacheState,
        lengths: OutputLengths,
        config: CoreConfig,
        rng: random.Random,
    ) -> None:
        self._registry = registry
        self._tracker = tracker
        self._book = book
        self._lengths = lengths
        self._cost, self._policy, self._affinity = config.cost, config.policy, config.session_affinity
        self._chunk_tokens = config.working_set.chunk_tokens
        self._shortens = config.policy == "kv" and config.policy_function is None and not config.session_affinity
        self._rng = rng
        self._rotation = 0
        self.own = CustomPolicy(config.policy_function) if config.policy_function is not None else None
        self.sessions = SessionTargets(config.session_ttl_s, config.sessions_max)
        self.homes = MediaPlacements(config.session_ttl_s, config.sessions_max)

    def rotate(self) -> None:
        """A choice was committed: the next tie goes to the next in turn."""
        self._rotation += 1

    def choose(
        self,
        request: RouteRequest,
        candidates: list[Target],
        now: float,
        *,
        ahead: Mapping[str, float] | None = None,
        held_s: float = 0.0,
        explain: bool = False,
    ) -> RoutingChoice:
        """Price the candidates, of a large pool those that may win, and pick one by the configured policy. `ahead`:
        seconds held for each target that go before this request. `explain`: price all, whoever may win."""
        prompt, matches, few = None, None, candidates
        factor = self._tracker.utilisation_factor(now)
        shortens = self._shortens and request.home is None
        order = self._registry.order(request, candidates, factor) if shortens and not (ahead or held_s) else None
        if request.token_ids is not None:
            prompt = self._book.ask(
                request.token_ids, request.scope, request.prompt_tokens, request.like, request.alike
            )
            if order is not None:
                few, matches = self._book.shortlist(prompt, order) or (candidates, None)
        elif order is not None:
            few = [order.targets[holder] for holder in order.holders[:KEEP]]
        pool = order if few is not candidates else None
        chosen = self._price(request, prompt, few, matches, now, factor, held_s=held_s, pool=pool)
        if ahead:
            chosen.cost.ahead = [ahead.get(target.name, 0.0) for target in candidates]
        promised = chosen.cost.cached
        if few[0].speeds.silent and not all(target.prefills for target in few):
            # Nobody knows yet how long those will take who only promise a beginning, and somebody has nothing to do.
            chosen.cost.cached = chosen.resident[:]
        self._find_home(request, chosen, now)
        winner = self._affine(request, few, now) if self._affinity else None
        chosen.winner = self._by_policy(request, few, chosen) if winner is None else winner
        chosen.cost.cached[chosen.winner] = promised[chosen.winner]
        if order is not None:
            computed_tokens = request.prompt_tokens - chosen.cost.cached[chosen.winner]
            order.asked(request.prompt_tokens, computed_tokens, chosen.cost.expected_tokens)
        if explain and pool is not None:
            whole = self._price(request, prompt, candidates, None, now, factor, held_s=held_s, pool=pool)
            whole.cost.beta, whole.cost.hot_share = chosen.cost.beta, chosen.cost.hot_share
            whole.winner = candidates.index(chosen.target)
            return whole
        return chosen

    def _price(
        self,
        request: RouteRequest,
        prompt: PromptQuery | None,
        targets: list[Target],
        matches: dict[HolderId, Match] | None,
        now: float,
        factor: float,
        *,
        held_s: float,
        pool: LoadOrder | None,
    ) -> RoutingChoice:
        """The targets with all that a price of theirs takes; `matches` where they are known. Nothing is chosen yet."""
        loads = None
        expected_tokens = self._lengths.expect(request)
        cached = resident = [0] * len(targets)
        if prompt is not None:
            hits = self._book.hits(prompt, targets, matches)
            cached, resident = hits.cached, hits.resident
            if hits.slower:
                loads = [0.0] * len(targets)
                for i, match in hits.slower.items():
                    loads[i] = load_seconds(match, self._cost) * targets[i].load.factor
        cost = KvCost(
            targets,
            cached,
            loads,
            prompt_tokens=request.prompt_tokens,
            expected_tokens=expected_tokens,
            utilisation_factor=factor,
            now=now,
            config=self._cost,
            held_s=held_s,
            pool=pool,
        )
        if prompt is not None:
            needed, steps_s, alone_s, requests = prompt.tokens + 0.5 * expected_tokens, 0.0, 0.0, 0.0
            for i, target in enumerate(targets):
                steps_s += target.step_now_s
                alone_s += target.alone_s
                requests += target.requests
                if target.room_tokens < needed:
                    cost.memory[i] = self._book.memory_seconds(prompt, target, needed)
            life_s = expected_tokens * steps_s / len(targets)
            delay = (1.0 + cost.beta) * (max(1.0, steps_s / alone_s) if alone_s > 0.0 else 1.0)
            fair = requests / len(targets) if pool is None else pool.requests / len(pool.targets)
            cost.hot_tokens, cost.hot_share = self._book.hot(prompt, now, life_s, delay, fair)
            if self._book.working_sets.crowded(prompt.tokens, now):
                cost.crowding = self._crowding(request, prompt, targets, cached)
        return RoutingChoice(cost, 0, prompt, resident)

    def _by_policy(self, request: RouteRequest, candidates: list[Target], chosen: RoutingChoice) -> int:
        policy, cost, resident = self._policy, chosen.cost, chosen.resident
        rotation = self._rotation
        if self.own is not None:
            own = self.own.choose(request, [cost.terms(i, resident[i]) for i in range(len(candidates))])
            return cost.choose(rotation) if own is None else own
        if policy == "kv":
            return cost.choose(rotation)
        if policy == "round_robin":
            return choose_round_robin(candidates, rotation)
        if policy == "random":
            return choose_random(candidates, self._rng)
        key = sticky_key(request.session, request.token_ids) if policy == "sticky" else None
        if key is not None:
            return choose_sticky(candidates, key)
        return choose_least_requests(candidates, rotation)

    def _crowding(
        self, request: RouteRequest, prompt: PromptQuery, candidates: list[Target], cached: list[int]
    ) -> list[float] | None:
        """Seconds that each candidate will compute again for want of room, over this prompt's further uses."""
        length = request.prompt_tokens
        shares = [tokens / length for tokens in cached]
        keys = prompt.keys(self._chunk_tokens)
        overflows = self._book.working_sets.overflows([t.name for t in candidates], shares, keys, prompt.tokens)
        if not any(overflows):
            return None
        reuse = self._book.working_sets.reuse
        return [reuse * over * target.prefill_seconds(length, 0) for over, target in zip(overflows, candidates)]

    def choose_again(self, choice: RoutingChoice, ahead: Mapping[str, float]) -> None:
        """Pick anew among the same candidates, now that their place in the held queue is known."""
        choice.cost.ahead = [ahead.get(target.name, 0.0) for target in choice.cost.targets]
        choice.winner = choice.cost.choose(self._rotation)

    def _find_home(self, request: RouteRequest, chosen: RoutingChoice, now: float) -> None:
        """Price what a conversation with media is taken to have where it was before."""
        home = None if request.home is None else self.homes.get((request.home, request.scope), now)
        if home is None:
            return
        cost = chosen.cost
        cost.home = next((i for i, target in enumerate(cost.targets) if target.name == home.target), -1)
        cost.home_tokens = min(home.tokens, request.prompt_tokens)

    def _affine(self, request: RouteRequest, candidates: list[Target], now: float) -> int | None:
        """The candidate this session, or else the one that started it, was sent to before, where affinity is on."""
        if request.session is None:
            return None
        name = self.sessions.get(request.session, now)
        if name is None and request.parent is not None:
            name = self.sessions.get(request.parent, now)
        if name is None:
            return None
        return next((i for i, target in enumerate(candidates) if target.name == name), None)

    def decision(
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
        cost, winner = choice.cost, choice.winner
        target = cost.targets[winner]
        terms = cost.terms(winner, choice.resident[winner])
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
            waited_s=waited_s,
        )
        most = max(cost.cached)
        if most > terms.cached_tokens:
            best = cost.cached.index(most)
            decision.best = cost.terms(best, choice.resident[best])
        if explain:
            priced: list[Terms] = [cost.terms(i, choice.resident[i]) for i in range(len(cost.targets))]
            decision.candidates = sorted(priced, key=lambda t: t.cost)
            decision.not_eligible = self._registry.why_not(request)
        return decision


class MediaPlacement(NamedTuple):
    """Where the last turn of a conversation with media went."""

    target: str
    tokens: int
    """Of that turn's prompt, as estimated."""
    used_s: float


@dataclass(slots=True)
class MediaPlacements:
    """(how a conversation began, its scope) -> its home. Bounded in number, oldest use first out."""

    ttl_s: float
    size_max: int
    known: OrderedDict[tuple[int, Scope], MediaPlacement] = field(default_factory=OrderedDict)

    def get(self, key: tuple[int, Scope], now: float) -> MediaPlacement | None:
        """The conversation's home, unless it was used too long ago."""
        home = self.known.get(key)
        return home if home is not None and now - home.used_s <= self.ttl_s else None

    def put(self, key: tuple[int, Scope], home: MediaPlacement) -> None:
        """A turn of the conversation was sent."""
        self.known[key] = home
        self.known.move_to_end(key)
        while len(self.known) > self.size_max:
            self.known.popitem(last=False)


@dataclass(slots=True)
class SessionTargets:
    """session -> (target it was sent to last, last use). Bounded in number, oldest use first out."""

    ttl_s: float
    size_max: int
    known: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)

    def get(self, session: str, now: float) -> str | None:
        """The session's worker, unless it was used too long ago."""
        entry = self.known.get(session)
        return entry[0] if entry is not None and now - entry[1] <= self.ttl_s else None

    def forget(self, session: str) -> None:
        """It is over."""
        self.known.pop(session, None)

    def put(self, session: str, worker_id: str, now: float) -> None:
        """The session was sent to a worker."""
        self.known[session] = (worker_id, now)
        self.known.move_to_end(session)
        while len(self.known) > self.size_max:
            self.known.popitem(last=False)
