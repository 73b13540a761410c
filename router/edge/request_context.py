"""All facts about one request at the edge, from its complete head to the last byte of its answer.

The reader and the exchange fill a context; metrics, logs, traces, miss reasons and limits read it. The core keeps its
own record of a request in flight, under the same `request_id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.edge.response_progress import ResponseProgress
from router.edge.routing_headers import ResolvedModel, RoutingHeaders
from router.http.request import HttpRequest
from router.prompting.parsed_body import ParsedBody

if TYPE_CHECKING:
    from router.edge.continuation import StreamContinuation
    from router.miss_reasons.analyzer import AnalyzedRequest
    from router.miss_reasons.prompt_history import AnalyzedPrompt


@dataclass(slots=True)
class PrefillTimes:
    """When another worker computed the prompt of a request."""

    worker: str
    started_at_s: float
    ended_at_s: float | None = None
    """Time of its complete answer; None if it failed or has not ended."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were cached there, as the worker reports them."""
    is_dropped: bool = False
    """Whether the request's own worker had to compute the prompt after all."""


class RequestSpan(NamedTuple):
    """The span of a traced request, from which its parts are recorded when the request has ended."""

    span: Any
    """Object of OpenTelemetry's SDK, which has no type here as the package is optional."""
    trace_context: Any
    """OpenTelemetry's context of the span, in which spans of its parts are made."""
    clock_zero_ns: int
    """Nanoseconds since 1970 at which the process's clock was 0."""
    traceparent: bytes
    """Header by which the worker continues the trace."""

    def to_ns(self, moment_s: float) -> int:
        """Return the nanoseconds since 1970 of a time of the process's clock."""
        return self.clock_zero_ns + int(moment_s * 1e9)


class MissAnalysis(msgspec.Struct, eq=False):
    """Analysis of why parts of a request's prompt were not cached at its worker."""

    prompt: AnalyzedPrompt | None = None
    """Prompt that is to be compared with the last one of its conversation; None if it is not, or was compared."""
    result: AnalyzedRequest | None = None
    """Result of the analysis; None until the model's first output."""


class RequestContext(msgspec.Struct, eq=False):
    """One request and its outcome."""

    request: HttpRequest
    tenant: str
    """Name of the API key, or address of the client if there are no keys."""
    started_at_s: float
    request_id: str = ""
    """Id of the request in the core, unique in this process."""
    trace_id: bytes = b""
    """Value of `x-request-id`, which the client may have sent."""
    span: RequestSpan | None = None
    """Span of the request; None if the request is not traced."""
    headers: RoutingHeaders | None = None
    """Routing headers; None until the body was read."""
    model: ResolvedModel | None = None
    """Model that the client names; None until the body was read."""
    body: ParsedBody | None = None
    """Body of the request, from its reading until the request is placed."""
    charged_tokens: int | None = None
    """Prompt tokens counted in flight for the tenant; None while the request is not counted."""
    route: RouteRequest | None = None
    """Request to the core; None until the prompt was read."""
    is_logged: bool = False
    """Whether decisions are logged with the terms of every candidate."""
    decision: Decision | None = None
    """Decision of the latest attempt."""
    prefill: PrefillTimes | None = None
    """The latest prefill at another worker; None if there was none."""
    progress: ResponseProgress = msgspec.field(default_factory=ResponseProgress)
    continuation: StreamContinuation | None = None
    """State for continuing the answer at another worker; None if that is impossible."""
    usage: ReportedUsage | None = None
    """Token counts as the workers report them; None until `read_usage`, and if they report none."""
    outcome: str = ""
    """How the request ended, as metrics and logs name it; empty until then."""
    is_done: bool = False
    miss_analysis: MissAnalysis = msgspec.field(default_factory=MissAnalysis)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the complete request to the first byte of its answer; None before that byte."""
        first_byte_at_s = self.progress.first_byte_at_s
        return None if first_byte_at_s is None else first_byte_at_s - self.started_at_s

    def read_usage(self) -> None:
        """Read the token counts that the worker reports at the end of its answer.

        If another worker computed the prompt, that worker's cached tokens count: the last worker may take all KV that
        came from there for cached.
        """
        self.usage = usage = self.progress.find_reported_usage()
        prefill, decision = self.prefill, self.decision
        if usage is None or prefill is None or decision is None:
            return
        if decision.is_split and not prefill.is_dropped:
            self.usage = ReportedUsage(usage.prompt_tokens, prefill.cached_tokens, usage.completion_tokens)

    def is_wanted(self) -> bool:
        """Return whether a client waits for the answer."""
        return not self.is_done

    @property
    def name(self) -> str:
        """The id that clients, logs and traces know the request by."""
        return self.trace_id.decode("latin-1")

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer as the worker reports them; else the number of chunks of a stream, or 0."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.progress.read_count if self.is_streaming else 0

    @property
    def is_streaming(self) -> bool:
        """Whether the answer is a stream, so that its first token is seen when it is generated."""
        return self.route is not None and self.route.is_streaming
