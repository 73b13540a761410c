"""Plans for one request in which KV moves, few enough to be priced beside the plans in which none does."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from router.decide.messages import Transfer, TransferKind
from router.decide.price import Candidate, TransferPlan
from router.decide.target import Target
from router.decide.transfers.links import TransferLinks
from router.decide.workers import may_transfer
from router.index.protocol import HolderId, Match

SOURCES_MAX: Final = 2
"""Sources that plans are made with for each destination: the best that it can get KV from."""
SHORTLIST_MAX: Final = 4
"""Targets of one request that are looked at as sources, and as destinations."""


def find_best_sources(sources: Sequence[Target], matches: Mapping[HolderId, Match]) -> dict[Target, int]:
    """Return the targets with the longest cached prefixes, the best first, each with the tokens of its prefix."""
    cached_tokens = {target: matches[target.holder].tokens for target in sources if target.holder in matches}
    best_sources = heapq.nlargest(
        SHORTLIST_MAX, cached_tokens, key=lambda target: (cached_tokens[target], -target.load.outgoing_transfers)
    )
    return {target: cached_tokens[target] for target in best_sources}


def can_prefill(target: Target) -> bool:
    """Return whether a target may compute prompts for others."""
    return target.can_prefill_for_others and TransferKind.PREFILL in target.transfer_facts.kinds


def find_least_busy(sources: Sequence[Target], now: float) -> list[Target]:
    """Return the targets that can compute a prompt for another and would begin first, or interrupt fewest answers."""
    return heapq.nsmallest(
        SHORTLIST_MAX,
        (target for target in sources if can_prefill(target)),
        key=lambda target: (
            target.slot_wait_s + target.slowdown * target.estimate_queue_s(now),
            target.load.decode_request_count + target.peer_load.decode_requests,
        ),
    )


def compute_pull_share(shared_tokens: int, best_tokens: int, source: Target, links: TransferLinks, now: float) -> float:
    """Return the time to pull a prefix that requests share, as a share of its prefill, at most 1.

    What later requests can pull, they need not find computed: a further copy saves them the pull alone. `best_tokens`:
    cached prefix of the source.
    """
    if TransferKind.PULL not in source.transfer_facts.kinds or not 0 < shared_tokens <= best_tokens:
        return 1.0
    transfer_s = links.estimate(source, None, shared_tokens, now).total_s
    return min(1.0, transfer_s / source.estimate_prefill_s(shared_tokens, 0))


class TransferPlanner:
    """Makes the plans of one request: candidates with a transfer, from priced candidates without one."""

    def __init__(
        self, links: TransferLinks, prompt_tokens: int, now: float, *, uses_paused_pairs: bool = False
    ) -> None:
        """Plan a request at `now`. `uses_paused_pairs`: also between targets where a transfer failed lately."""
        self._links, self._prompt_tokens, self._now = links, prompt_tokens, now
        self._uses_paused_pairs = uses_paused_pairs

    def plan_pulls(self, candidates: Sequence[Candidate], sources: Mapping[Target, int]) -> list[Candidate]:
        """Return the plans in which a target pulls blocks that another one, a source, has cached.

        `sources`: the best first, each with the number of prompt tokens that it has cached.
        """
        longest_tokens = max(sources.values(), default=0)
        shorter_candidates = [candidate for candidate in candidates if candidate.cached_tokens < longest_tokens]
        plans: list[Candidate] = []
        for destination in self._find_destinations(shorter_candidates):
            pulls = (self._plan_pull(destination, source, tokens) for source, tokens in sources.items())
            plans += islice(filter(None, pulls), SOURCES_MAX)
        return plans

    def _plan_pull(self, destination: Candidate, source: Target, source_tokens: int) -> Candidate | None:
        """Return the plan in which a target pulls from a source that has `source_tokens` cached; None if it cannot."""
        if source_tokens <= destination.cached_tokens:
            return None
        moved_tokens = source_tokens - destination.resident_tokens
        transfer = self._make_transfer(TransferKind.PULL, source, destination.target, moved_tokens)
        if transfer is None:
            return None
        return msgspec.structs.replace(
            destination,
            cached_tokens=source_tokens,
            plan=TransferPlan(transfer, source, arriving_tokens=source_tokens, arrival_s=transfer.transfer_s),
        )

    def plan_prefills(self, candidates: Sequence[Candidate], priced_sources: Sequence[Candidate]) -> list[Candidate]:
        """Return plans in which one target, the source, computes the prompt, and another one the answer.

        Each of the best `candidates` for the answer gets plans with its SOURCES_MAX cheapest sources.
        """
        sources = sorted(priced_sources, key=lambda source: source.terms.cost)
        plans: list[Candidate] = []
        for destination in self._find_destinations(candidates):
            prefills = (self._plan_prefill(destination, source) for source in sources)
            plans += islice(filter(None, prefills), SOURCES_MAX)
        return plans

    def _plan_prefill(self, destination: Candidate, source: Candidate) -> Candidate | None:
        """Return the plan in which a source computes the prompt for a target; None if they do not fit."""
        moved_tokens = self._prompt_tokens - destination.resident_tokens
        transfer = self._make_transfer(TransferKind.PREFILL, source.target, destination.target, moved_tokens)
        if transfer is None:
            return None
        plan = TransferPlan(
            transfer,
            source.target,
            arriving_tokens=self._prompt_tokens - 1,
            arrival_s=source.terms.ttft_s + transfer.transfer_s,
            source_terms=source.terms,
        )
        return msgspec.structs.replace(destination, cached_tokens=source.cached_tokens, tier_load_s=0.0, plan=plan)

    def _find_destinations(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with the lowest prices besides the prefill."""

        def compute_other_cost(candidate: Candidate) -> float:
            terms = candidate.terms
            return terms.cost - terms.congestion_s - terms.slowdown * terms.prefill_s

        takers = (candidate for candidate in candidates if candidate.target.transfer_facts.can_take)
        return heapq.nsmallest(SHORTLIST_MAX, takers, key=compute_other_cost)

    def _make_transfer(self, kind: TransferKind, source: Target, target: Target, tokens: int) -> Transfer | None:
        """Return the transfer of some tokens between two targets; None if they do not fit or are avoided as a pair."""
        if source is target or not may_transfer(source.transfer_facts, target.transfer_facts, kind):
            return None
        if not self._uses_paused_pairs and self._links.is_paused(source.name, target.name, self._now):
            return None
        transfer_s = self._links.estimate(source, target, tokens, self._now).total_s
        return Transfer(kind, source.worker_id, source.rank, tokens, transfer_s)
