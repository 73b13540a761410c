"""Everything the edge knows of one request, from its complete head to the last byte of its answer.

Owns no behaviour: the reader, the exchange and the core's instructions fill a context, and metrics, logs, traces, miss
reasons and limits read it. The core keeps its own record of a request in flight, under the same `request_id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.edge.response_progress import ResponseProgress
from router.edge.routing_headers import ResolvedModel, RoutingHeaders
from router.http.request import HttpRequest
from router.prompting.read_body import ReadBody

if TYPE_CHECKING:
    from router.edge.continuation import StreamContinuation
    from router.edge.pending_comparison import PendingComparison
    from router.miss_reasons.analyzer import AnalyzedRequest


class RequestContext:
    """One request and what became of it."""

    __slots__ = (
        "body",
        "charged_tokens",
        "continuation",
        "decision",
        "headers",
        "is_done",
        "is_logged",
        "miss_analysis",
        "model",
        "outcome",
        "progress",
        "request",
        "request_id",
        "route",
        "span",
        "started_at_s",
        "tenant",
        "trace_id",
        "usage",
    )  # fmt: skip

    def __init__(
        self, request: HttpRequest, tenant: str, started_at_s: float, request_id: str = "", trace_id: bytes = b""
    ) -> None:
        self.request = request
        self.tenant = tenant
        """API key's name, or the client's address where there are no keys."""
        self.request_id = request_id
        """Unique in this process: the core's name for the request."""
        self.trace_id = trace_id
        """`x-request-id`: the client's where it sent one."""
        self.span: tuple[Any, bytes] | None = None
        """The tracer's own record, and the `traceparent` for the worker; None where the request is not traced."""
        self.started_at_s = started_at_s
        self.headers: RoutingHeaders | None = None
        """What the client asks of the router, once the body was read."""
        self.model: ResolvedModel | None = None
        """The model that the client names, once the body was read."""
        self.body: ReadBody[ResolvedModel] | None = None
        """The body as it was read, until the request is placed."""
        self.charged_tokens: int | None = None
        """Prompt tokens counted in flight for the tenant; None while the request is not counted."""
        self.route: RouteRequest | None = None
        """What the core was asked, once the prompt was read."""
        self.is_logged = False
        """Decisions are logged with every candidate's terms."""
        self.decision: Decision | None = None
        """The latest decision: that of the running attempt."""
        self.progress = ResponseProgress(started_at_s)
        self.continuation: StreamContinuation | None = None
        """What the answer needs to go on at another worker; None where it cannot."""
        self.usage: ReportedUsage | None = None
        self.outcome = ""
        """How the request ended, for metrics and logs."""
        self.is_done = False
        self.miss_analysis: PendingComparison | AnalyzedRequest | None = None
        """The comparison of its prompt before the first byte, the reasons of its miss from then on; None where the
        request is not compared."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the complete request to the first byte of its answer; None before that byte."""
        first_byte_at_s = self.progress.first_byte_at_s
        return None if first_byte_at_s is None else first_byte_at_s - self.started_at_s

    def is_wanted(self) -> bool:
        """Whether somebody waits for the answer."""
        return not self.is_done

    @property
    def name(self) -> str:
        """The id that clients, logs and traces know the request by."""
        return self.trace_id.decode("latin-1")

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer: as the worker says, else of a stream as many as there were chunks."""
        if self.usage is not None and self.usage.completion_tokens is not None:
            return self.usage.completion_tokens
        return self.progress.read_count if self.is_streaming else 0

    @property
    def is_streaming(self) -> bool:
        """Whether the first token is seen as it comes."""
        return self.route is not None and self.route.is_streaming
