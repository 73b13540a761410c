"""Parts of a target's state: its capacity, the load that this router sent it, and the load of others.

Plain values, which the tracker and the cache state change. `Target` (router/decide/target.py) derives from them what
the price reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

MAX_NUM_SEQS_PRIOR: Final = 256
"""Assumed `max_num_seqs` of an engine that does not report it; vLLM's default."""
REMAINING_TOKENS_PRIOR: Final = 256.0
"""Tokens that a request is expected to generate on a target to which this router sent none yet."""
REPORT_VALID_S: Final = 15.0
"""Age after which an engine's report of its load is ignored."""
USAGE_TOLERANCE: Final = 0.05
"""Share of the KV memory by which a report may exceed the router's own count: partial blocks, uncounted tokens."""


@dataclass(slots=True, eq=False)
class Capacity:
    """Capacity of an engine: tokens in its KV cache, and sequences that it runs at once (*slots*)."""

    kv_tokens: int | None = None
    """Tokens that the KV cache holds: reported by the worker, else observed; None if neither is known."""
    observed_kv_tokens: int | None = None
    """Tokens that the KV cache holds, as the worker's cache events show; None if they do not."""
    host_tokens: int = 0
    """Tokens that the KV cache in host memory holds besides."""
    max_num_seqs: int = MAX_NUM_SEQS_PRIOR
    """Number of slots: reported by the worker, else the prior."""


@dataclass(slots=True, eq=False)
class Load:
    """Load of a target by this router: sums over its requests in flight, and averages of the last minute."""

    request_count: int = 0
    decode_request_count: int = 0
    decode_context_tokens: int = 0
    """Prompt and output tokens of the decoding requests."""
    pending_prompt_tokens: int = 0
    """Prompt tokens of the requests without a first token."""
    remaining_output_tokens: float = 0.0
    """Expected output tokens of all requests. Generated tokens are not subtracted: only the mean length of answers is
    known, and a long answer is not expected to end earlier than a short one."""
    overdue_output_tokens: int = 0
    """Tokens by which answers are longer than expected. As many more are expected of them, as far as memory goes."""
    mean_remaining_output_tokens: float = REMAINING_TOKENS_PRIOR
    """Expected output tokens of one request; the last value while there is no request."""
    duplicate_prompt_tokens: int = 0
    """Prompt tokens of running requests that need no KV memory, as other running requests have the same ones."""
    idle_prompt_tokens: int = 0
    """Prompt tokens that are likely to be used again, and that no running request here has."""
    incoming_transfers: int = 0
    """Number of transfers of KV to this target that are running."""
    outgoing_transfers: int = 0
    """Number of transfers of KV from this target to others that are running."""
    background_request_count: int = 0
    utilisation_scaled: float = 0.0
    """Prefill seconds sent here per second, averaged over a minute, before decay: for the present value, multiply by
    `LoadTracker.compute_utilisation_decay(now)`."""
    arrivals_scaled: float = 0.0
    """Requests sent here per second, averaged and scaled like `utilisation_scaled`."""
    last_request_end_s: float = -math.inf
    """When a request here ended last."""


@dataclass(slots=True, eq=False)
class RoutedTotals:
    """Totals of the requests that this router sent to a target since the target was added."""

    request_count: int = 0
    predicted_cached_tokens: int = 0
    """Predicted cached tokens of the ended requests for which the engine reported them."""
    reported_cached_tokens: int = 0
    """Cached tokens that the engine reported of these requests."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load that an engine reports of one rank on `/metrics`."""

    running: int
    waiting: int
    usage: float | None = None
    """Share of the KV memory that running sequences hold; None if the engine does not report it."""
    is_asleep: bool = False
    """Whether the engine has released its memory, and the cache with it."""
    received_kv_bytes: float | None = None
    """Bytes of KV that it got from other engines since its start; None if the engine does not report it."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Load that other senders have put on a worker: another router, clients that use no router, or the sum of several.

    *Prefills* are their prompts that have no first token yet. Fields with `_at_s` or `_since_s` are moments on this
    router's clock.
    """

    prefill_s: float = 0.0
    """Time to compute all prefills."""
    prefill_requests: int = 0
    oldest_prefill_s: float = 0.0
    """Time to compute the oldest prefill."""
    oldest_sent_at_s: float = 0.0
    """When the oldest prefill was sent."""
    oldest_since_s: float = -math.inf
    """When the target could begin with the oldest prefill."""
    decode_requests: int = 0
    decode_context_tokens: int = 0
    utilisation: float = 0.0
    """Prefill seconds sent there per second."""
    prefill_rate: float | None = None
    """Seconds a token that the times are computed with; None if they are this router's own."""

    @property
    def request_count(self) -> int:
        return self.prefill_requests + self.decode_requests

    def __bool__(self) -> bool:
        return bool(self.request_count or self.decode_context_tokens)

    def convert_times(self, prefill_rate: float) -> PeerLoad:
        """Return the load with its times as of a worker that takes `prefill_rate` seconds a token."""
        scale = prefill_rate / self.prefill_rate if self.prefill_rate else 1.0
        return replace(
            self,
            prefill_s=scale * self.prefill_s,
            oldest_prefill_s=scale * self.oldest_prefill_s,
            utilisation=scale * self.utilisation,
            prefill_rate=None,
        )


NO_PEER_LOAD: Final = PeerLoad()


def estimate_external_load(
    report: EngineLoad,
    *,
    known_requests: int,
    known_kv_tokens: int,
    capacity: Capacity,
    prompt_s: float,
    prefill_rate: float,
) -> PeerLoad:
    """Return the part of an engine's reported load that comes from clients which use no router.

    It is what the report has beyond `known_requests` and `known_kv_tokens`, which this router and its peers have sent.
    Waiting requests count as external first. Numbers that the engine's slots cannot hold are reduced to those that they
    can: known and external running requests to all slots, waiting requests to two full batches. Each waiting request is
    assumed to take `prompt_s` seconds of prefill, at `prefill_rate` seconds a token.
    """
    slot_count = capacity.max_num_seqs
    external_requests = max(report.running + report.waiting - known_requests, 0)
    external_waiting = min(report.waiting, external_requests)
    free_slots = max(slot_count - known_requests, 0)
    external_running = min(external_requests - external_waiting, free_slots)
    external_waiting = min(external_waiting, 2 * slot_count)
    external_kv_tokens = 0
    if capacity.kv_tokens is not None and report.usage is not None:
        # Partial blocks and tokens that are not counted yet also use memory, so a small excess tells nothing.
        used_tokens = int((report.usage - USAGE_TOLERANCE) * capacity.kv_tokens)
        external_kv_tokens = max(used_tokens - known_kv_tokens, 0)
    return PeerLoad(
        prefill_s=external_waiting * prompt_s,
        prefill_requests=external_waiting,
        oldest_prefill_s=prompt_s,
        oldest_sent_at_s=math.inf,  # unknown: it makes no progress and is never overdue
        decode_requests=external_running,
        decode_context_tokens=external_kv_tokens,
        prefill_rate=prefill_rate,
    )


def merge_peer_loads(loads: Sequence[PeerLoad], prefill_rate: float) -> PeerLoad:
    """Add up the loads of several senders on one worker, with times as of `prefill_rate` seconds a token.

    For example, one sender has two prompts there, the older sent at 10.0 s, and another sender has one that was sent at
    9.5 s. Of these three, the oldest is the one of 9.5 s. The worker computes it only after all earlier prompts of both
    senders have ended: since the later `oldest_since_s`.
    """
    if not loads:
        return NO_PEER_LOAD
    loads = [load.convert_times(prefill_rate) for load in loads]
    prefilling_loads = [load for load in loads if load.prefill_s > 0.0]
    oldest = min(prefilling_loads or loads, key=lambda load: load.oldest_sent_at_s)
    return PeerLoad(
        prefill_s=sum(load.prefill_s for load in prefilling_loads),
        prefill_requests=sum(load.prefill_requests for load in loads),
        oldest_prefill_s=oldest.oldest_prefill_s,
        oldest_sent_at_s=oldest.oldest_sent_at_s,
        oldest_since_s=max(load.oldest_since_s for load in loads),
        decode_requests=sum(load.decode_requests for load in loads),
        decode_context_tokens=sum(load.decode_context_tokens for load in loads),
        utilisation=sum(load.utilisation for load in loads),
    )
