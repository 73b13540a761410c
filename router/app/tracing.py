"""OpenTelemetry: a span for each request that is traced, with one for reading the prompt, deciding, and the answer.

The span of a traced request begins when the request is complete, and its id goes to the worker in `traceparent`. The
other spans are made after the request's end, from the times in its context. A thread of the SDK sends the spans.
"""

from __future__ import annotations

import random
import time
from threading import Thread
from typing import Any

from options import ConfigError
from router.decide.messages import Decision, Terms
from router.edge.request_context import PrefillTimes, RequestContext, RequestSpan

TERMS = tuple(name for name in Terms.__struct_fields__ if name not in ("worker", "transfer"))

CLOSE_S_MAX = 3.0


class Tracing:
    """Sends a share of the requests to OpenTelemetry as spans. Call `begin` and `end` with every request."""

    def __init__(self, endpoint: str, share: float, version: str, exporter: Any = None) -> None:
        """Set up OpenTelemetry's SDK, which sends the spans. Raises ConfigError if its packages are missing.

        `endpoint`: URL of OTLP over HTTP; `/v1/traces` is added where it is missing. `share`: share of the requests
        without a `traceparent` header that are traced. `exporter`: takes the spans in place of OTLP.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as missing:
            raise ConfigError(f"--otlp-endpoint: {missing}; install blockcast[otel]") from None
        except ImportError as error:
            raise ConfigError(
                f"--otlp-endpoint: {error}; xds-protos (blockcast[epp]) carries older files of the same names and was "
                "installed last: pip install --force-reinstall --no-deps opentelemetry-proto"
            ) from None
        self._api: Any = trace
        self._propagator = TraceContextTextMapPropagator()
        self._share = share
        if not endpoint.endswith("/v1/traces"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        resource = Resource.create({"service.name": "blockcast-router", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("blockcast.router", version)

    def begin(self, context: RequestContext, now: float) -> RequestSpan | None:
        """Begin the span of a request, which `end` ends; return None if the request is not traced.

        The client's `traceparent` header decides that: if it ends in `-01`, the request is traced, and if it ends in
        `-00`, it is not. Without the header a random share of the requests is traced.
        """
        request, parent_context = context.request, None
        traceparent = request.get_header(b"traceparent")
        if traceparent is not None:
            shortened = traceparent[:512].decode("latin-1")  # OpenTelemetry's SDK would log a longer one
            parent_context = self._propagator.extract({"traceparent": shortened})
        parent = self._api.get_current_span(parent_context).get_span_context()
        is_traced = parent.trace_flags.sampled if parent.is_valid else random.random() < self._share
        if not is_traced:
            return None
        clock_zero_ns = time.time_ns() - int(now * 1e9)  # Unix time at which the process's clock was 0
        span = self._tracer.start_span(
            f"POST {request.path}", context=parent_context, kind=self._api.SpanKind.SERVER,
            start_time=clock_zero_ns + int(context.started_at_s * 1e9),
        )  # fmt: skip
        trace_context = self._api.set_span_in_context(span)
        headers: dict[str, str] = {}
        self._propagator.inject(headers, trace_context)
        if not headers:
            return None  # the variable OTEL_SDK_DISABLED is set: such a span has no id
        return RequestSpan(span, trace_context, clock_zero_ns, headers["traceparent"].encode())

    def end(self, context: RequestContext, now: float) -> None:
        """End the span of a request, with its outcome as attributes, and record its parts as spans of their own."""
        trace = context.span
        if trace is None:
            return
        sent_at_s, first_byte_at_s = context.progress.sent_at_s, context.progress.first_byte_at_s
        if context.decision is not None:
            self._add_decision_span(trace, context, context.decision)
        if context.prefill is not None:
            self._add_prefill_span(trace, context.prefill, now)
        if sent_at_s is not None:
            answer_span = self._start_part(trace, "answer", sent_at_s, kind=self._api.SpanKind.CLIENT)
            if first_byte_at_s is not None:
                answer_span.add_event("first byte", timestamp=trace.to_ns(first_byte_at_s))
            answer_span.end(trace.to_ns(now))
        # All attributes at once, because each call takes the span's lock.
        trace.span.set_attributes(_list_request_attributes(context))
        if not context.outcome.startswith("status_2"):
            trace.span.set_status(self._api.StatusCode.ERROR, context.outcome)
        trace.span.end(trace.to_ns(now))

    def _start_part(self, trace: RequestSpan, name: str, started_at_s: float, **options: Any) -> Any:
        """Return a new span for a part of a request, which began at a time of the process's clock."""
        return self._tracer.start_span(name, trace.trace_context, start_time=trace.to_ns(started_at_s), **options)

    def _add_prefill_span(self, trace: RequestSpan, prefill: PrefillTimes, now: float) -> None:
        attributes = {"blockcast.worker": prefill.worker}
        kind = self._api.SpanKind.CLIENT
        span = self._start_part(trace, "prefill", prefill.started_at_s, attributes=attributes, kind=kind)
        if prefill.ended_at_s is None:
            span.set_status(self._api.StatusCode.ERROR, "no KV came")
        span.end(trace.to_ns(now if prefill.ended_at_s is None else prefill.ended_at_s))

    def _add_decision_span(self, trace: RequestSpan, context: RequestContext, decision: Decision) -> None:
        """Record the time from the request's start to the decision, with the cost terms that are not 0."""
        attributes = {"blockcast.predicted_ttft_seconds": decision.predicted_ttft_s}
        for name in TERMS:
            value = getattr(decision.terms, name)
            if value:
                attributes[f"blockcast.terms.{name}"] = value
        # A request that moved to another worker was decided again after it was sent.
        decided_s = min(decision.decided_s, context.progress.sent_at_s or decision.decided_s)
        span = self._start_part(trace, "read and decide", context.started_at_s, attributes=attributes)
        span.end(trace.to_ns(decided_s))

    def close(self) -> None:
        """Send the spans that were not sent yet, for `CLOSE_S_MAX` at most; the SDK's own bounds are far longer."""
        closing_thread = Thread(target=self._provider.shutdown, daemon=True)
        closing_thread.start()
        closing_thread.join(CLOSE_S_MAX)


def _list_request_attributes(context: RequestContext) -> dict[str, str | int]:
    """Return the attributes for the trace span of a whole request, as far as they are known."""
    route, decision, usage = context.route, context.decision, context.usage
    attributes: dict[str, str | int] = {"blockcast.outcome": context.outcome, "blockcast.request_id": context.name}
    if route is not None:
        attributes["gen_ai.request.model"] = route.model
        attributes["blockcast.prompt_tokens"] = route.prompt_tokens
    if decision is not None:
        attributes["blockcast.worker"] = decision.worker
        attributes["blockcast.attempts"] = decision.attempt + 1
        attributes["blockcast.predicted_cached_tokens"] = decision.predicted_cached_tokens
        if decision.transfer is not None:
            attributes["blockcast.transfer.kind"] = decision.transfer.kind.value
            attributes["blockcast.transfer.source"] = decision.transfer.source
            attributes["blockcast.transfer.tokens"] = decision.transfer.tokens
    if usage is not None and usage.cached_tokens is not None:
        attributes["blockcast.cached_tokens"] = usage.cached_tokens
    return attributes
