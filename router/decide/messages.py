"""Values that go into the router's core and come out of it: requests, usage, failures, decisions, instructions.

The core has no sockets: the HTTP edge makes these values from bytes and performs the instructions that it gets back.
All times are seconds of one monotonic clock of the caller.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from router.index.protocol import PreparedPrompt, Scope


class RouteRequest(msgspec.Struct, eq=False):
    """A request for which the router chooses a worker: its prompt, limits and sender."""

    request_id: str
    model: str
    """Model or adapter that the client names."""
    scope: Scope
    """Base model, adapter and cache salt. Only prompts with equal ones share cached KV."""
    token_ids: Sequence[int] | None
    """Token ids of the body's first prompt; None if it was not tokenised, so that only load decides."""
    prompt_tokens: int
    """Number of tokens of all prompts of the body; an estimate where `token_ids` is None."""
    prompt_count: int = 1
    longest_prompt_tokens: int = 0
    """Tokens of the longest prompt; 0 if there is only one."""
    is_counted: bool = True
    """Whether all tokens of the prompts were counted; False for media and very long prompts."""
    media_conversation: int | None = None
    """Digest of the first messages of a conversation with media, such as images; None without media. The worker of the
    previous turn is expected to have the conversation cached."""
    similar_prompt: PreparedPrompt | None = None
    """The conversation's earlier prompt, which may begin with the same tokens."""
    output_tokens_max: int = 0
    """Upper bound of generated tokens; 0 if there is none. Most answers are much shorter."""
    output_tokens_min: int = 0
    """Fewest tokens that will be generated."""
    is_streaming: bool = True
    """Whether the router will see the first token; otherwise the time of the first token is estimated."""
    priority: int = 0
    """Priority in the queue; lower is served earlier, as in vLLM."""
    queue_rank: int = 0
    """Order among queued requests of equal priority, before that of arrival; lower is served earlier."""
    worker: str | None = None
    """Worker that the client asks for, or None."""
    session: str | None = None
    """Conversation of the request, or None. Key of session affinity and of the `sticky` policy."""
    parent: str | None = None
    """Session that started this one. The prompts of both begin alike."""
    is_final: bool = False
    """Whether this is the last request of the session."""
    allowed_workers: frozenset[str] | None = None
    """Workers that a gateway allows; None: all."""
    role: str | None = None
    """Role that the worker must have; None: any."""
    deadline_s: float | None = None
    """Absolute time after which the queued request is refused; None if only the queue's longest wait applies."""
    ttft_s_max: float | None = None
    """Longest accepted predicted time to the first token; None for the configured time."""
    tenant: str = ""
    """API key or address of the client. The queue is fair among tenants."""
    share: float = 1.0
    """Weight of the tenant in the fair queue."""

    def replace(self, **changes: Any) -> RouteRequest:
        """Return a copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class ReportedUsage(msgspec.Struct, frozen=True, gc=False):
    """Usage that the engine reports with an answer; None if it does not report a field."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class FailureKind(str, enum.Enum):
    """How an attempt failed: STALLED and STREAM after its first byte reached the client, LOST at any time.

    The others are failures before that byte.
    """

    CONNECT = "connect"
    """The worker refused the connection, or could not be reached or resolved; it never saw the request."""
    RESET = "reset"
    """The connection broke before an answer began."""
    TIMEOUT = "timeout"
    """No first byte came in time. The failure counts against the worker only for a stream, because the client chooses
    how long a whole answer takes, and only if the worker sent nothing to any client meanwhile."""
    SERVER_ERROR = "server_error"
    """The worker answered 502 or 503."""
    INTERNAL = "internal_error"
    """The worker answered 500: its engine died, or the request makes it fail. The request is tried once elsewhere. The
    failure never counts against the worker: otherwise a request that fails everywhere would disable all workers."""
    NOT_SERVED = "not_served"
    """The worker answered 404: it has no longer the LoRA adapter, or has not the stored response, of the request."""
    LOST = "lost"
    """The worker went down or was removed meanwhile, which was counted already."""
    OVERLOADED = "overloaded"
    """The worker answered 429: it is up and full."""
    SOURCE = "source"
    """The worker that was to compute the prompt failed, and this worker cannot compute it. The failure counts against
    neither: requests to the other worker and health checks show whether it is broken."""
    LOCAL = "local"
    """The router had no file descriptor or port left. The core never sees this failure."""
    STALLED = "stalled"
    """No byte came for too long after the first one. The failure counts against the worker as TIMEOUT does."""
    STREAM = "stream"
    """The answer broke off after its first byte was passed on."""


REFUSALS: Final = frozenset({FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.SERVER_ERROR, FailureKind.RESET})
"""Failures after which the worker is avoided, if another worker then serves the request."""


class TransferKind(str, enum.Enum):
    """How a worker gets KV that it did not compute."""

    PULL = "pull"
    """The worker fetches blocks that the source has cached, before the worker begins."""
    PREFILL = "prefill"
    """The source computes the prompt first, and hands its KV over."""


class Transfer(msgspec.Struct, frozen=True, gc=False):
    """KV of a request that moves to its worker from another worker, and the predicted time for it."""

    kind: TransferKind
    source: str
    """Worker that gives the blocks, or computes the prefill."""
    rank: int | None
    """Data-parallel rank of the source, or None if it has only one."""
    tokens: int
    """Number of tokens to move KV of: those that the source has and the worker lacks."""
    transfer_s: float
    """Time of the transfer alone, without the prefill of the source."""


class Terms(msgspec.Struct, frozen=True, gc=False):
    """Price in seconds of one request at one worker: a sum of six parts, and the figures behind them.

    The worker with the lowest price gets the request. docs/reference/price.md explains the figures.
    """

    worker: str
    cost: float
    """ttft_s + decode_s + congestion_s + pressure_s + tie_break_s - shared_s."""
    ttft_s: float = 0.0
    """Predicted time to first token, without transfers slot_wait_s + slowdown * (queue_s + prefill_s) + tier_load_s."""
    decode_s: float = 0.0
    """Time of the answer after its first token, and the delay of other answers there, times `cost.decode_weight`."""
    congestion_s: float = 0.0
    """Time that the prefill adds to the waits of later requests."""
    pressure_s: float = 0.0
    """Prefill that will be computed again because the worker lacks room for all prompts that live there."""
    shared_s: float = 0.0
    """Discount for the part of the prefill that other requests will use."""
    tie_break_s: float = 0.0
    """Recent utilisation, times `cost.utilisation_weight`."""
    cached_tokens: int = 0
    """Length of the usable cached prefix, including blocks that running requests compute."""
    resident_tokens: int = 0
    """Part of the cached prefix that is in the cache now, by events or by the approximate cache."""
    prefill_s: float = 0.0
    """Prefill of the uncached tokens on an otherwise idle worker, and that of a source as its decodes stretch it."""
    queue_s: float = 0.0
    """Prefill that is done before: of requests routed there, or queued in the router."""
    slowdown: float = 1.0
    """Factor by which running decodes stretch a prefill."""
    slot_wait_s: float = 0.0
    """Wait for a sequence slot (max_num_seqs) if all are in use, or for room in the KV memory."""
    tier_load_s: float = 0.0
    """Time to fetch the part of the cached prefix that lies on slower tiers."""
    output_tokens: float = 0.0
    """Expected length of the answer."""
    decode_requests: int = 0
    """Requests there that are past their first token, including those of other routers and external ones."""
    external_requests: int = 0
    """Requests that no router sent, by the engine's report, if the router relies on it."""
    media_cached_tokens: int = 0
    """Tokens of a prompt with media that are assumed to be cached at the worker of the conversation's last turn. They
    are not part of `cached_tokens`."""
    transfer: Transfer | msgspec.UnsetType = msgspec.UNSET
    """KV that moves to the worker first; absent if the worker computes all missing KV itself."""


NOT_PRICED: Final = Terms(worker="", cost=math.inf)
"""Terms of a worker before it has a price."""


class Decision(msgspec.Struct, eq=False):
    """Worker for one attempt of a request, and the terms of its cost."""

    request_id: str
    worker: str
    rank: int | None
    """Data-parallel rank, or None if the worker has only one."""
    attempt: int
    """Number of attempts that failed before."""
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_s: float
    terms: Terms
    decided_s: float
    queued_s: float = 0.0
    """Time that the request waited in the router's queue."""
    most_cached: Terms | None = None
    """Terms of the candidate with the longest cached prefix, if that is longer than the chosen worker's."""
    candidates: list[Terms] = []
    """Terms of all candidates, the cheapest first; only with an explanation."""
    not_eligible: dict[str, str] = {}
    """worker -> reason why it was no candidate; only with an explanation."""

    @property
    def transfer(self) -> Transfer | None:
        """KV that moves to the worker first; None if the worker computes all that it lacks."""
        return self.terms.transfer or None

    @property
    def is_split(self) -> bool:
        """Whether another worker computes the prompt first.

        Then the cached tokens that an engine reports are the hit of that worker, or all KV that came from it.
        """
        transfer = self.transfer
        return transfer is not None and transfer.kind is TransferKind.PREFILL

    def to_json_fields(self) -> dict[str, Any]:
        """Return the decision as a JSON object."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


class Forward(msgspec.Struct, frozen=True):
    """Send the request to the decision's worker now."""

    request_id: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Keep the request; a later instruction forwards or refuses it, at most one tick after its deadline."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer the client with this HTTP status; the core has forgotten the request."""

    request_id: str
    status: int
    code: str
    """Stable machine-readable reason: no_worker, unknown_model, unknown_role, unknown_worker, context_length_exceeded,
    queue_full, too_many_requests, deadline, too_slow, upstream_failed, upstream_overloaded, upstream_timeout."""
    message: str
    retry_after_s: float | None = None
    context_max: int | None = None
    """Most tokens of a prompt with its answer; set with context_length_exceeded."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Drop the index entries of a worker that died; the feed resynchronises its stream when it returns."""

    worker_id: str


Instruction = Forward | Enqueue | Refuse | WorkerLost
