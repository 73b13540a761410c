"""Plans for one request in which KV moves, few enough to be priced beside the plans in which none does."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from router.decide.messages import Terms, Transfer, TransferKind
from router.decide.price import CandidateFacts
from router.decide.target import Target
from router.decide.transfers.links import TransferLinks
from router.decide.workers import TransferFacts
from router.index.protocol import HolderId, Match

SOURCES_MAX: Final = 2
"""Sources of one request that plans are made with: those with the longest cached prefix."""
DESTINATIONS_MAX: Final = 4
"""Targets of one request that plans are made with: those with the lowest price besides the prefill."""


class Plan(NamedTuple):
    """A target, and what is cached there after the transfer."""

    target: Target
    facts: CandidateFacts
    source: Target


class PricedTarget(NamedTuple):
    """A target, its facts and its price where no KV moves."""

    target: Target
    facts: CandidateFacts
    terms: Terms


def may_transfer(source: TransferFacts, destination: TransferFacts, kind: TransferKind) -> bool:
    """Return whether KV may move between two workers."""
    is_same_group = bool(source.group) and source.group == destination.group
    return is_same_group and kind in source.kinds & destination.kinds and source.can_give and destination.can_take


def find_best_sources(sources: Sequence[Target], matches: Mapping[HolderId, Match]) -> list[Target]:
    """Return the targets with the longest cached prefix, the best first."""
    return heapq.nlargest(
        SOURCES_MAX,
        (target for target in sources if target.holder in matches),
        key=lambda target: (matches[target.holder].tokens, -target.load.outgoing_transfers),
    )


def compute_pull_share(shared_tokens: int, best_tokens: int, source: Target, links: TransferLinks) -> float:
    """Return the time to pull a prefix that requests share, as a share of its prefill, at most 1.

    What later requests can pull, they need not find computed: a further copy saves them the pull alone. `best_tokens`:
    cached prefix of the source.
    """
    if not 0 < shared_tokens <= best_tokens:
        return 1.0
    byte_count = shared_tokens * source.transfer_facts.bytes_per_token
    transfer_s = links.estimate_transfer_s(source.name, "", byte_count, source.load.outgoing_transfers)
    return min(1.0, transfer_s / source.estimate_prefill_s(shared_tokens, 0))


def plan_pulls(
    priced_targets: Sequence[PricedTarget],
    best_sources: Sequence[Target],
    matches: Mapping[HolderId, Match],
    links: TransferLinks,
    congestion: float,
    now: float,
) -> list[Plan]:
    """Return the plans in which a target pulls blocks that another one has cached."""
    longest_tokens = matches[best_sources[0].holder].tokens
    destinations = heapq.nsmallest(
        DESTINATIONS_MAX,
        (priced for priced in priced_targets if priced.facts.cached_tokens < longest_tokens),
        key=lambda priced: priced.terms.cost - (1.0 + congestion) * priced.terms.slowdown * priced.terms.prefill_s,
    )
    plans = []
    for target, facts, _ in destinations:
        for source in best_sources:
            source_tokens = matches[source.holder].tokens
            if source is target or source_tokens <= facts.cached_tokens:
                continue
            if not may_transfer(source.transfer_facts, target.transfer_facts, TransferKind.PULL):
                continue
            if links.is_paused(source.name, target.name, now):
                continue
            moved_tokens = source_tokens - facts.resident_tokens
            transfer_s = links.estimate_transfer_s(
                source.name,
                target.name,
                moved_tokens * source.transfer_facts.bytes_per_token,
                max(source.load.outgoing_transfers, target.load.incoming_transfers),
            )
            transfer = Transfer(TransferKind.PULL, source.worker_id, source.rank, moved_tokens, transfer_s)
            new_facts = msgspec.structs.replace(
                facts, cached_tokens=source_tokens, transfer=transfer, arrival_s=transfer_s
            )
            plans.append(Plan(target, new_facts, source))
    return plans
