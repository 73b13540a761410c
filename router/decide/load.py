"""Parts of a worker's state: what it has room for, what this router sent it, and what others have there.

Plain values: the tracker and the cache state change them, and a `Target` (router/decide/target.py) derives from them
what the price reads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from router.index.protocol import Tally

MAX_NUM_SEQS_PRIOR: Final = 256
"""Assumed `max_num_seqs` of an engine that does not report it; vLLM's default."""
REMAINING_TOKENS_PRIOR: Final = 256.0
"""Tokens that a request of another router is expected to generate, before this router sent any."""
SLOT_WAIT_RATIO, SLOT_VOTES = 4.0, 8
"""A wait of so many times the expected one is a wait for a slot, if so many in a row agree."""

REPORT_VALID_S: Final = 15.0
"""A report of an engine that is older does not count."""
USAGE_TOLERANCE: Final = 0.05
"""Share of the KV memory that may differ: blocks that are not full, answers that are not yet counted."""


@dataclass(slots=True, eq=False)
class Capacity:
    """What an engine has room for: tokens in its KV cache, and sequences that run at once."""

    kv_tokens: int | None = None
    """Tokens that the KV cache holds: reported by the worker, else seen in its events; None where neither is known."""
    observed_kv_tokens: int | None = None
    """Tokens that the KV cache holds, as the worker's events show it."""
    max_num_seqs: int = MAX_NUM_SEQS_PRIOR
    """Sequences that run at once: reported, or learned, or as many as is usual."""
    has_reported_max_num_seqs: bool = False
    _slot_count_votes: deque[int] = field(default_factory=lambda: deque(maxlen=SLOT_VOTES))
    """Requests that decoded beside the last requests that seemed to wait for a slot."""

    def learn_max_num_seqs(self, decode_request_count: int, *, has_waited_for_slot: bool) -> None:
        """Learn from a first token that came while so many requests decoded. `has_waited_for_slot`: the request waited
        far longer than its prefill takes, and began just as another one ended. Where that happens one after the other,
        always beside as many others, those are all slots."""
        if self.has_reported_max_num_seqs:
            return
        votes = self._slot_count_votes
        if decode_request_count > self.max_num_seqs:
            self.max_num_seqs = max(MAX_NUM_SEQS_PRIOR, 2 * decode_request_count)  # what was known was wrong
            votes.clear()
        if has_waited_for_slot:
            votes.append(decode_request_count)
            votes_max = max(votes)
            if len(votes) == SLOT_VOTES and votes_max - min(votes) <= max(1, votes_max // 32):
                self.max_num_seqs = votes_max


@dataclass(slots=True, eq=False)
class Load:
    """Requests that this router has in flight on a target, and sums over them."""

    request_count: int = 0
    decode_request_count: int = 0
    decode_context_tokens: int = 0
    """Prompt and output tokens of the decoding requests."""
    pending_prompt_tokens: int = 0
    """Prompt tokens of the requests without a first token."""
    remaining_output_tokens: float = 0.0
    """Expected output tokens of all requests. Tokens that were generated already are not taken off: of a length only
    the mean is known, so that what was said makes no answer shorter."""
    mean_remaining_output_tokens: float = REMAINING_TOKENS_PRIOR
    """Expected output tokens of one request; while none of ours is here, as when there last was one."""
    running_chunk_counts: Tally | None = None
    """Chunks of running prompts, once the cache state knows the target."""
    duplicate_prompt_tokens: int = 0
    """Tokens of running prompts that are in the KV cache once for several requests, all but once."""
    background_request_count: int = 0
    utilisation_scaled: float = 0.0
    """Prefill seconds routed here per second, averaged over a minute, times the tracker's decay."""
    arrivals_scaled: float = 0.0
    """Requests routed here per second, averaged and scaled like `utilisation_scaled`."""
    last_request_end_s: float = -math.inf
    routed_requests: int = 0
    """Requests sent here since the target was added."""
    predicted_cached_tokens: int = 0
    """Cached tokens of their prompts, as predicted."""
    reported_cached_tokens: int = 0
    """Cached tokens of their prompts, as the engine reported."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of one rank on `/metrics`."""

    running: int
    waiting: int
    usage: float | None = None
    """Share of the KV memory that running sequences hold; None where it does not say."""
    is_asleep: bool = False
    """It has given its memory back, and the cache in it."""


@dataclass(frozen=True, slots=True)
class ExternalLoad:
    """What an engine's report has beyond the requests of this router and its peers."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    report: EngineLoad | None = None
    reported_s: float = -math.inf

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting or self.kv_tokens)


NO_EXTERNAL_LOAD: Final = ExternalLoad()


def estimate_external_load(
    report: EngineLoad, now: float, *, known_requests: int, known_kv_tokens: int, capacity: Capacity
) -> ExternalLoad:
    """Return what a report has beyond what is known: the load is the larger of the two. No engine runs more sequences
    than it has seats: one that says so is taken to be full."""
    external_requests = max(report.running + report.waiting - known_requests, 0)
    waiting = min(report.waiting, external_requests)
    seats = capacity.max_num_seqs
    kv_tokens = 0
    if capacity.kv_tokens is not None and report.usage is not None:
        kv_tokens = max(int((report.usage - USAGE_TOLERANCE) * capacity.kv_tokens) - known_kv_tokens, 0)
    return ExternalLoad(
        running=min(external_requests - waiting, max(seats - known_requests, 0)),
        waiting=min(waiting, 2 * seats),
        kv_tokens=kv_tokens,
        report=report,
        reported_s=now,
    )


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """What others have in flight on a target: one router's part, as it tells its peers, or the sum of several. Times
    are on the receiver's clock."""

    prefill_s: float = 0.0
    prefill_requests: int = 0
    oldest_prefill_s: float = 0.0
    oldest_routed_s: float = 0.0
    oldest_prefill_since_s: float = -math.inf
    decode_requests: int = 0
    decode_context_tokens: int = 0
    utilisation: float = 0.0
    updated_s: float = 0.0
    prefill_rate: float | None = None
    """Seconds a token that its seconds were predicted with, where the router told: two routers may have learned
    differently so far."""


NO_PEER_LOAD: Final = PeerLoad()


def merge_peer_loads(loads: Sequence[PeerLoad], prefill_rate: float) -> PeerLoad:
    """Add up several routers' parts, in this router's seconds: work, not time, is what another one can tell."""
    if not loads:
        return NO_PEER_LOAD
    scales = [prefill_rate / load.prefill_rate if load.prefill_rate else 1.0 for load in loads]
    busy_loads = [(load, scale) for load, scale in zip(loads, scales) if load.prefill_s > 0.0]
    oldest_load, oldest_scale = min(busy_loads or [(loads[0], 1.0)], key=lambda pair: pair[0].oldest_routed_s)
    return PeerLoad(
        prefill_s=sum(load.prefill_s * scale for load, scale in busy_loads),
        prefill_requests=sum(load.prefill_requests for load in loads),
        oldest_prefill_s=oldest_load.oldest_prefill_s * oldest_scale,
        oldest_routed_s=oldest_load.oldest_routed_s,
        oldest_prefill_since_s=max(load.oldest_prefill_since_s for load in loads),
        decode_requests=sum(load.decode_requests for load in loads),
        decode_context_tokens=sum(load.decode_context_tokens for load in loads),
        utilisation=sum(load.utilisation * scale for load, scale in zip(loads, scales)),
        updated_s=min(load.updated_s for load in loads),
    )
