"""Plans for one request in which KV moves, few enough to be priced beside the plans in which none does."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

from router.decide.messages import Transfer, TransferKind
from router.decide.price import Candidate, RequestFacts, TransferPlan
from router.decide.target import Target
from router.decide.transfers.links import TransferLinks
from router.decide.workers import may_transfer
from router.index.protocol import HolderId, Match

SOURCES_MAX: Final = 2
"""Sources that plans are made with for each destination: the best that it can get KV from."""
SHORTLIST_MAX: Final = 4
"""Targets of one request that are looked at as sources, and as destinations."""


def find_best_sources(sources: Sequence[Target], matches: Mapping[HolderId, Match]) -> list[Candidate]:
    """Return the targets with the longest cached prefixes, the longest first."""
    cached_sources = [
        Candidate(target, matches[target.holder].tokens) for target in sources if target.holder in matches
    ]
    return heapq.nlargest(
        SHORTLIST_MAX,
        cached_sources,
        key=lambda source: (source.cached_tokens, -source.target.load.outgoing_transfers),
    )


def find_least_busy(sources: Sequence[Target], now: float) -> list[Target]:
    """Return the targets that can compute a prompt for another and would begin first, or interrupt fewest answers."""
    return heapq.nsmallest(
        SHORTLIST_MAX,
        (target for target in sources if target.can_prefill_for_others),
        key=lambda target: (
            target.slot_wait_s + target.slowdown * target.estimate_queue_s(now),
            target.load.decode_request_count + target.peer_load.decode_requests,
        ),
    )


def compute_pull_share(shared_tokens: int, source: Candidate, links: TransferLinks, now: float) -> float:
    """Return the time to pull a prefix that requests share, as a share of its prefill, at most 1.

    What later requests can pull, they need not find computed: a further copy saves them the pull alone.
    """
    target = source.target
    if TransferKind.PULL not in target.transfer_facts.kinds or not 0 < shared_tokens <= source.cached_tokens:
        return 1.0
    transfer_s = links.estimate(target, None, shared_tokens, now).total_s
    return min(1.0, transfer_s / target.estimate_prefill_s(shared_tokens, 0))


class TransferPlanner:
    """Makes the plans of one request: candidates with a transfer, from priced candidates without one."""

    def __init__(self, links: TransferLinks, facts: RequestFacts, *, uses_paused_pairs: bool = False) -> None:
        """Plan a request with these facts. `uses_paused_pairs`: also for pairs of targets that are avoided now."""
        self._links, self._prompt_tokens, self._now = links, facts.prompt_tokens, facts.now
        self._uses_paused_pairs = uses_paused_pairs

    def plan_pulls(self, candidates: Sequence[Candidate], sources: Sequence[Candidate]) -> list[Candidate]:
        """Return plans in which a target pulls blocks that a source has cached. `sources`: the best first."""
        if not sources:
            return []
        longest_tokens = sources[0].cached_tokens
        shorter_candidates = [candidate for candidate in candidates if candidate.cached_tokens < longest_tokens]
        return self._plan(TransferKind.PULL, shorter_candidates, sources)

    def plan_prefills(self, candidates: Sequence[Candidate], priced_sources: Sequence[Candidate]) -> list[Candidate]:
        """Return plans in which a source computes the prompt, and another target the answer."""
        sources = sorted(priced_sources, key=lambda source: source.terms.cost)
        return self._plan(TransferKind.PREFILL, candidates, sources)

    def _plan(
        self, kind: TransferKind, candidates: Sequence[Candidate], sources: Sequence[Candidate]
    ) -> list[Candidate]:
        """Return plans for the best `candidates`, each with the first SOURCES_MAX sources that may send it KV."""
        destinations = [candidate for candidate in candidates if candidate.target.transfer_facts.can_take]
        plans: list[Candidate] = []
        for destination in heapq.nsmallest(SHORTLIST_MAX, destinations, key=_compute_cost_without_prefill):
            possible_plans = (self._plan_transfer(kind, destination, source) for source in sources)
            plans += islice(filter(None, possible_plans), SOURCES_MAX)
        return plans

    def _plan_transfer(self, kind: TransferKind, destination: Candidate, source: Candidate) -> Candidate | None:
        """Return the plan in which KV moves from a source; None if the two do not fit, or are avoided as a pair."""
        sender, receiver = source.target, destination.target
        if kind is TransferKind.PULL:
            sent_tokens, tier_load_s = source.cached_tokens, destination.tier_load_s
            if sent_tokens <= destination.cached_tokens:
                return None
        else:
            sent_tokens, tier_load_s = self._prompt_tokens, 0.0
        if sender is receiver or not may_transfer(sender.transfer_facts, receiver.transfer_facts, kind):
            return None
        if not self._uses_paused_pairs and self._links.is_paused(sender.name, receiver.name, self._now):
            return None
        moved_tokens = sent_tokens - destination.resident_tokens
        transfer_s = self._links.estimate(sender, receiver, moved_tokens, self._now).total_s
        transfer = Transfer(kind, sender.worker_id, sender.rank, moved_tokens, transfer_s)
        arriving_tokens = min(sent_tokens, self._prompt_tokens - 1)  # the last token is always computed
        return msgspec.structs.replace(
            destination,
            cached_tokens=source.cached_tokens,
            tier_load_s=tier_load_s,
            plan=TransferPlan(transfer, source, arriving_tokens),
        )


def _compute_cost_without_prefill(candidate: Candidate) -> float:
    terms = candidate.terms
    return terms.cost - terms.congestion_s - terms.slowdown * terms.prefill_s
