"""What goes into the router's core and what comes out: requests, stimuli's facts, decisions, instructions. Values only.

The core never sees a socket: the HTTP edge turns bytes into these, and performs the instructions it gets back.
All times are seconds of one monotonic clock that the caller owns.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from router.decide.route import Decision as Decision
from router.decide.route import Forward as Forward
from router.decide.route import RouteRequest as RouteRequest


class ReportedUsage(msgspec.Struct, frozen=True, gc=False):
    """What the engine's answer said it cost; None where it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class FailureKind(str, enum.Enum):
    """How an attempt ended before its first byte reached the client (STREAM: after it)."""

    CONNECT = "connect"
    """Refused, unreachable, name unknown: the worker never saw the request."""
    RESET = "reset"
    """The connection broke before an answer began."""
    TIMEOUT = "timeout"
    """No first byte in time."""
    SERVER_ERROR = "server_error"
    """502 or 503 from the worker."""
    INTERNAL = "internal_error"
    """500: the engine under the server may have died, or this very request makes it fail. Tried once elsewhere; never
    held against the worker, or a client could take all of them out with one request that fails everywhere."""
    OVERLOADED = "overloaded"
    """429 from the worker: alive, but full."""
    LOCAL = "local"
    """The router had no descriptor or port left: nobody's fault but its own, and never told to the core."""
    STREAM = "stream"
    """The answer broke after its first byte was passed on: nothing can be retried."""


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What one candidate's price is made of; docs/routing.md's symbols. Seconds unless the name says tokens."""

    worker: str
    cached_tokens: int
    """h: usable cached prefix, requests in flight included."""
    resident_tokens: int
    """What events (or the approximate index) vouch for now: of h, and of what will be evicted."""
    prefill_s: float
    """P: uncached prefill on an otherwise idle worker."""
    queue_s: float
    """Q: prefill routed there before and not yet done."""
    held_s: float
    """Prefill that the router holds for it and will send before this request."""
    slow: float
    """Factor by which running decodes stretch a prefill."""
    load_s: float
    """Time to fetch the part of h that lies on slower tiers."""
    crowding_s: float
    """What will be computed again because the worker lacks room for all that lives there."""
    utilisation: float
    """U: prefill seconds routed there per second, averaged over a minute."""
    beta: float
    decode_requests: int
    ttft_s: float
    """The prediction: slow * (Q + held + P) + seat + memory + load."""
    cost: float
    """The price; the lowest wins."""
    output_tokens: float = 0.0
    """What is expected of the answer."""
    seat_s: float = 0.0
    """Wait for a seat, where all are taken."""
    evicted_tokens: int = 0
    """Prefix that is there, or promised, and that the requests ahead will have evicted: not in h."""
    memory_s: float = 0.0
    """Wait for KV memory, where running requests hold too much of it."""
    decode_s: float = 0.0
    """The rest of the answer there, and what it costs the answers beside it; counts `decode_weight` times."""
    rest_s: float = 0.0
    """Until the step that runs ends: a prompt begins with the next."""
    hot_s: float = 0.0
    """The part of `prefill_s` that is laid to others who run now and begin alike: the price is without it."""
    stall_s: float = 0.0
    """For how long those who decode there stand still, all together, while this request's share of what several begin
    with is computed once more; counts `decode_weight` times."""
    overtaken_s: float = 0.0
    """What those that wait there, and have more left, wait longer for this prompt, all together: where its engine takes
    who has the least left first. They are not in `queue_s`."""
    others_requests: int = 0
    """Requests there that no router of ours sent, as its engine says, where that is believed; among `decode_requests`,
    and those that wait in `queue_s`."""


@dataclass(frozen=True, slots=True)
class Hold:
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


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died: drop its entries from the index and resynchronise its stream when it returns (the feed's job)."""

    worker_id: str


Instruction = Forward | Hold | Refuse | WorkerLost
