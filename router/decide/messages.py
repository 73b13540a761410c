"""What goes into the router's core and what comes out: requests, stimuli's facts, decisions, instructions. Values only.

The core never sees a socket: the HTTP edge turns bytes into these, and performs the instructions it gets back.
All times are seconds of one monotonic clock that the caller owns.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.index.protocol import PromptMemory, Scope


class RouteRequest(msgspec.Struct, eq=False):
    """One request that needs a worker. `model` is the name the client asked for, `scope.model` its base model."""

    request_id: str
    model: str
    scope: Scope
    token_ids: Sequence[int] | None
    """The prompt; None where it could not be tokenised here: then only load decides."""
    prompt_tokens: int
    """Of all its prompts, or an estimate where `token_ids` is None."""
    prompt_count: int = 1
    """Prompts in its body. `token_ids` is the first."""
    longest_prompt_tokens: int = 0
    """Of the longest of its prompts; 0 where there is one, of `prompt_tokens`."""
    is_counted: bool = True
    """False: its prompt was not counted to the end, as it is so long, or has media."""
    media_conversation: int | None = None
    """Digest of how a conversation with media began; None without media. What such a prompt shares with the turn before
    cannot be matched: it is taken to be where that turn was."""
    similar_prompt: PromptMemory | None = None
    """Of a prompt that may begin as this one does."""
    common_tokens: int | None = None
    """Tokens that both are known to begin with; None where they have to be compared."""
    output_tokens_max: int = 0
    """Most tokens that may be generated; 0 where the client does not say. A bound, never an expectation."""
    output_tokens_min: int = 0
    """Fewest tokens that will be generated, where the client forbids an earlier end."""
    is_streaming: bool = True
    """Whether the first token will be seen as it comes; otherwise its time is estimated."""
    priority: int = 0
    """Lower is served earlier, as in vLLM; only the queue looks at it."""
    worker: str | None = None
    """The worker the client pinned the request to, or None."""
    session: str | None = None
    """The conversation it belongs to, of a bounded length, or None. Key of affinity and of the `sticky` policy."""
    parent: str | None = None
    """The session that started this one: its prompts begin alike."""
    is_final: bool = False
    """No request of the session will follow."""
    allowed_workers: frozenset[str] | None = None
    """Workers that may be chosen, as a gateway says; None: all."""
    role: str | None = None
    """Role label a worker must carry, or None for any."""
    deadline_s: float | None = None
    """Absolute time after which a queued request is refused; None takes the queue's default."""
    ttft_s_max: float | None = None
    """The longest predicted wait for its first token with which it is taken; None: the configured one."""
    tenant: str = ""
    """Whose it is: fair turns are between tenants."""
    share: float = 1.0
    """What a turn of its tenant's counts is divided by it."""
    length_keys: list[tuple[str, int | str | None]] | None = None
    """What answers its own will be like, once router/decide/output_lengths.py has worked it out."""

    def replace(self, **changes: Any) -> RouteRequest:
        """The same but for these fields."""
        return msgspec.structs.replace(self, **changes)


class ReportedUsage(msgspec.Struct, frozen=True, gc=False):
    """What the engine's answer said it cost; None where it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class FailureKind(str, enum.Enum):
    """How an attempt ended before its first byte reached the client (STALLED, STREAM: after it)."""

    CONNECT = "connect"
    """Refused, unreachable, name unknown: the worker never saw the request."""
    RESET = "reset"
    """The connection broke before an answer began."""
    TIMEOUT = "timeout"
    """No first byte in time. Held against the worker only where it streams and was silent for everybody meanwhile: a
    client chooses how long a whole answer takes."""
    SERVER_ERROR = "server_error"
    """502 or 503 from the worker."""
    INTERNAL = "internal_error"
    """500: the engine under the server may have died, or this very request makes it fail. Tried once elsewhere; never
    held against the worker, or a client could take all of them out with one request that fails everywhere."""
    LOST = "lost"
    """The worker went down or was removed while it had the request: what it did wrong is on its books already."""
    OVERLOADED = "overloaded"
    """429 from the worker: alive, but full."""
    LOCAL = "local"
    """The router had no descriptor or port left: nobody's fault but its own, and never told to the core."""
    STALLED = "stalled"
    """No byte for too long after the first: as STREAM, and held against the worker as TIMEOUT."""
    STREAM = "stream"
    """The answer broke after its first byte was passed on: nothing can be retried."""


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The price of one worker for one request: six parts, their sum, and what explains them (docs/reference/price.md).
    Seconds unless the name says otherwise."""

    worker: str
    cost: float
    """ttft_s + decode_s + congestion_s + pressure_s + tie_break_s - shared_s; the lowest wins."""
    ttft_s: float
    """Predicted time to the first token: slot_wait_s + slowdown * (queue_s + prefill_s) + tier_load_s."""
    decode_s: float
    """Time of the answer after its first token and what it adds to others there, times `cost.decode_weight`."""
    congestion_s: float
    """Time that the prefill adds to the waits of later requests."""
    pressure_s: float
    """Prefill that will be computed again because the worker lacks room for all prompts that live there."""
    shared_s: float
    """Discount for the part of the prefill that other requests will use."""
    tie_break_s: float
    """Recent utilisation, times `cost.utilisation_weight`."""
    cached_tokens: int
    """Usable cached prefix, requests in flight included."""
    resident_tokens: int
    """Part of the cached prefix that events (or the approximate cache) vouch for now."""
    prefill_s: float
    """Prefill of the uncached tokens on an otherwise idle worker."""
    queue_s: float
    """Prefill that goes first: routed there and not done, or queued in the router."""
    slowdown: float
    """Factor by which running decodes stretch a prefill."""
    slot_wait_s: float
    """Wait for a sequence slot (max_num_seqs), where all are taken."""
    tier_load_s: float
    """Time to fetch the part of the cached prefix that lies on slower tiers."""
    output_tokens: float
    """Expected length of the answer."""
    decode_requests: int
    """Requests that are past their first token there, other routers' and external ones included."""
    external_requests: int
    """Requests that no router sent, as the engine reports, where that is believed."""
    media_cached_tokens: int = 0
    """Tokens of a prompt with media that are taken to be cached where its conversation was before; not in
    `cached_tokens`."""


class Decision(msgspec.Struct, eq=False):
    """Where one attempt of a request goes, and why: a worker, and what its price is made of."""

    request_id: str
    worker: str
    rank: int | None
    """Data-parallel rank whose cache matched best, where the worker has several; else None."""
    attempt: int
    """0 for the first, counted up by retries."""
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_s: float
    terms: Terms
    decided_s: float
    queued_s: float = 0.0
    """How long it was queued."""
    most_cached: Terms | None = None
    """Of the candidate that has most of the prompt cached, where that is more than the worker has."""
    candidates: list[Terms] = []
    """Every candidate's terms, cheapest first; filled only where an explanation was asked for."""
    not_eligible: dict[str, str] = {}
    """worker -> why it was not a candidate; filled with `candidates`."""

    def to_json_fields(self) -> dict[str, Any]:
        """As JSON has it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class Forward(msgspec.Struct, frozen=True):
    """Send the request to the decision's worker now."""

    request_id: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Keep the request; a later instruction will forward or refuse it, by `deadline_s` plus one tick."""

    request_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client with this HTTP status; the core has forgotten the request."""

    request_id: str
    status: int
    code: str
    """Stable machine-readable reason: no_worker, unknown_model, unknown_worker, context_length_exceeded, queue_full,
    too_many_requests, deadline, too_slow, upstream_failed, upstream_overloaded, upstream_timeout."""
    message: str
    retry_after_s: float | None = None
    context_max: int | None = None
    """Of context_length_exceeded: how many tokens a prompt and its answer may have."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died: drop its entries from the index and resynchronise its stream when it returns (the feed's job)."""

    worker_id: str


Instruction = Forward | Enqueue | Refuse | WorkerLost
