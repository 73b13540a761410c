"""From an eligible pool to a winner: reads the index and the books, prices, applies the configured policy.

Changes nothing but chance and the rotation of ties; the core commits what it decides.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from router.decide.config import CoreConfig
from router.decide.history import CHUNK_TOKENS
from router.decide.messages import Decision, RouteRequest, Terms
from router.decide.policy import (
    KvCost,
    choose_least_requests,
    choose_random,
    choose_round_robin,
    choose_sticky,
    load_seconds,
    sticky_key,
)
from router.decide.registry import Registry
from router.decide.sessions import Sessions
from router.decide.target import Target
from router.decide.tracker import LoadTracker
from router.decide.working_set import WorkingSets
from router.index.protocol import PrefixIndex, Prompt, Scope


class AskedPrompt:
    """A request's prompt as the index and the books ask for it: prepared once, cut once."""

    __slots__ = ("_index", "_keys", "ids", "scope")

    def __init__(self, index: PrefixIndex, ids: Prompt, scope: Scope) -> None:
        self._index = index
        self.ids = ids
        self.scope = scope
        self._keys: dict[int, list[int]] = {}

    def keys(self, chunk_tokens: int) -> list[int]:
        """The keys of its chunks of so many tokens."""
        if len(self.ids) <= chunk_tokens:
            return []
        keys = self._keys.get(chunk_tokens)
        if keys is None:
            keys = self._keys[chunk_tokens] = self._index.chunk_keys(self.ids, self.scope, chunk_tokens)
        return keys


class Chosen:
    """A priced set of candidates and the winner."""

    __slots__ = ("cost", "prompt", "resident", "winner")

    def __init__(self, cost: KvCost, winner: int, prompt: AskedPrompt | None, resident: list[int]) -> None:
        self.cost = cost
        self.winner = winner
        self.prompt = prompt
        self.resident = resident
        """Tokens of each candidate's h that events (or history) vouch for."""


class Chooser:
    """Prices candidates and picks one."""

    def __init__(
        self,
        index: PrefixIndex,
        registry: Registry,
        tracker: LoadTracker,
        working_sets: WorkingSets,
        config: CoreConfig,
        rng: random.Random,
    ) -> None:
        self._index = index
        self._registry = registry
        self._tracker = tracker
        self._working_sets = working_sets
        self._config = config
        self._rng = rng
        self._rotation = 0
        self.sessions = Sessions(config.session_ttl_s, config.sessions_max)

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
        peek: bool = False,
    ) -> Chosen:
        """Price the candidates and pick one by the configured policy. `ahead`: seconds held for each target that go
        before this request. `peek`: leave chance as it is."""
        prompt = None
        if request.token_ids is not None:
            prompt = AskedPrompt(self._index, self._index.prepare(request.token_ids), request.scope)
        cached, resident, loads = self._hits(prompt, candidates)
        cost = KvCost(
            candidates,
            cached,
            loads,
            prompt_tokens=request.prompt_tokens,
            utilisation_factor=self._tracker.utilisation_factor(now),
            now=now,
            config=self._config.cost,
            held_s=held_s,
        )
        if ahead:
            cost.ahead = [ahead.get(target.name, 0.0) for target in candidates]
        if prompt is not None and self._working_sets.crowded(len(prompt.ids), now):
            cost.crowding = self._crowding(request, prompt, candidates, cached)
        winner = self._affine(request, candidates, now)
        if winner is None:
            winner = self._by_policy(request, candidates, cost, random.Random(0) if peek else self._rng)
        return Chosen(cost, winner, prompt, resident)

    def _by_policy(self, request: RouteRequest, candidates: list[Target], cost: KvCost, rng: random.Random) -> int:
        policy = self._config.policy
        rotation = self._rotation
        if policy == "kv":
            return cost.choose(rotation)
        if policy == "round_robin":
            return choose_round_robin(candidates, rotation)
        if policy == "random":
            return choose_random(candidates, rng)
        key = sticky_key(request.session, request.token_ids) if policy == "sticky" else None
        if key is not None:
            return choose_sticky(candidates, key)
        return choose_least_requests(candidates, rotation)

    def _crowding(
        self, request: RouteRequest, prompt: AskedPrompt, candidates: list[Target], cached: list[int]
    ) -> list[float] | None:
        """Seconds that each candidate will compute again for want of room, over this prompt's further uses."""
        length = request.prompt_tokens
        shares = [tokens / length for tokens in cached]
        keys = prompt.keys(self._config.working_set.chunk_tokens)
        overflows = self._working_sets.overflows([t.name for t in candidates], shares, keys, len(prompt.ids))
        if not any(overflows):
            return None
        reuse = self._working_sets.reuse
        return [reuse * over * target.prefill_seconds(length, 0) for over, target in zip(overflows, candidates)]

    def choose_again(self, choice: Chosen, ahead: Mapping[str, float]) -> None:
        """Pick anew among the same candidates, now that their place in the held queue is known."""
        choice.cost.ahead = [ahead.get(target.name, 0.0) for target in choice.cost.targets]
        choice.winner = choice.cost.choose(self._rotation)

    def _affine(self, request: RouteRequest, candidates: list[Target], now: float) -> int | None:
        """The candidate this session was sent to before, where affinity is on."""
        if not self._config.session_affinity or request.session is None:
            return None
        name = self.sessions.get(request.session, now)
        if name is None:
            return None
        return next((i for i, target in enumerate(candidates) if target.name == name), None)

    def _hits(
        self, prompt: AskedPrompt | None, candidates: list[Target]
    ) -> tuple[list[int], list[int], list[float] | None]:
        """(h, the part of it that is resident, load seconds or None) of every candidate."""
        if prompt is None:
            nothing = [0] * len(candidates)
            return nothing, nothing, None
        matches = {match.holder: match for match in self._index.match(prompt.ids, prompt.scope)}
        histories = self._registry.histories
        keys = prompt.keys(CHUNK_TOKENS) if histories else []
        cached, resident = [], []
        loads: list[float] | None = None
        for i, target in enumerate(candidates):
            match = matches.get(target.holder)
            if histories and target.name in histories:
                hit = usable = histories[target.name].match(keys)
            elif match is None:
                hit = usable = 0
            else:
                hit, usable = match.pinned_tokens, match.tokens
                if usable != match.gpu_tokens:
                    if loads is None:
                        loads = [0.0] * len(candidates)
                    loads[i] = load_seconds(match, self._config.cost)
            cached.append(hit)
            resident.append(usable)
        return cached, resident, loads

    def decision(
        self,
        request: RouteRequest,
        choice: Chosen,
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
        if explain:
            priced: list[Terms] = [cost.terms(i, choice.resident[i]) for i in range(len(cost.targets))]
            decision.candidates = sorted(priced, key=lambda t: t.cost)
            decision.not_eligible = self._registry.why_not(request)
        return decision
