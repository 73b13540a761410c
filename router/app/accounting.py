"""Count and log requests when they end."""

from __future__ import annotations

import logging
import random
from typing import Any

from prompts.routing import API_KIND_BY_PATH
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext

log = logging.getLogger("router")


class RequestAccounting:
    """Counts ended requests in the metrics of a proxy, and logs a share of them."""

    def __init__(self, proxy: Proxy, *, log_share: float = 0.0) -> None:
        """`log_share`: share of requests that are logged."""
        self._proxy = proxy
        self._has_keys = bool(proxy.config.api_keys)
        self._log_share = log_share

    def record_ended_request(self, context: RequestContext) -> None:
        """Count a request that ended, and log it if it is drawn."""
        now = self._proxy.now()
        if self._has_keys:
            self._count_tokens_by_key(context)
        self._count_request(context, now)
        if self._log_share and (self._log_share >= 1 or random.random() < self._log_share):
            fields = _make_log_fields(context, now)
            log.info("request %s", " ".join(f"{k}={v}" for k, v in fields.items()), extra={"fields": fields})

    def _count_request(self, context: RequestContext, now: float) -> None:
        """Add an ended request to the metrics: its times, and its tokens if it was sent to a worker."""
        metrics = self._proxy.metrics
        route, decision, usage = context.route, context.decision, context.usage
        path = context.request.path
        labelled_metrics = metrics.get_ended(
            path=path if path in API_KIND_BY_PATH else "other",
            model=self._find_model_label(context),
            outcome=context.outcome,
            worker="" if decision is None else decision.worker,
            stream="true" if context.is_streaming else "false",
        )
        labelled_metrics.count += 1
        labelled_metrics.request_s.observe(now - context.started_at_s)
        if context.ttft_s is not None:
            labelled_metrics.ttft_s.observe(context.ttft_s)
        if route is None or decision is None:
            return
        metrics.routing_s.observe(decision.decided_s - context.started_at_s)
        if route.token_ids is not None:
            metrics.prompt_tokens += route.prompt_tokens
            metrics.predicted_cached_tokens += decision.predicted_cached_tokens
        if usage is not None:
            metrics.reported_prompt_tokens += usage.prompt_tokens or 0
            metrics.reported_cached_tokens += usage.cached_tokens or 0

    def _find_model_label(self, context: RequestContext) -> str:
        """Return the model of a request; "unknown" if none is served by this name, which a client may have made up."""
        route = context.route
        if route is None:
            return "unknown"
        is_served = context.decision is not None or self._proxy.core.resolve_model(route.model) is not None
        return route.model if is_served else "unknown"

    def _count_tokens_by_key(self, context: RequestContext) -> None:
        """Add the tokens of an answered request to the metrics of its API key, unless the answer is an error.

        The worker reports the numbers in its `usage`. If it does not, the router's own numbers are used, with each
        chunk of a stream as one output token.
        """
        route, decision, usage = context.route, context.decision, context.usage
        if route is None or decision is None or context.ttft_s is None:
            return
        is_error = context.outcome.startswith("status_") and context.outcome != "status_200"
        if is_error:
            return
        if usage is not None and usage.prompt_tokens is not None and usage.completion_tokens is not None:
            prompt_tokens = usage.prompt_tokens
            cached_tokens = usage.cached_tokens or 0
            output_tokens = usage.completion_tokens
        else:
            prompt_tokens = route.prompt_tokens
            cached_tokens = decision.predicted_cached_tokens
            output_tokens = context.progress.read_count if route.is_streaming else 0
        key, tokens = context.tenant, self._proxy.metrics.key_tokens
        self._proxy.metrics.key_requests[key] += 1
        tokens[key, "prompt"] += prompt_tokens
        tokens[key, "cached"] += cached_tokens
        tokens[key, "computed"] += max(0, prompt_tokens - cached_tokens)
        tokens[key, "output"] += output_tokens


def _make_log_fields(context: RequestContext, now: float) -> dict[str, Any]:
    """Return the fields of the log line about an ended request, without those that are unknown."""
    route, decision, usage = context.route, context.decision, context.usage
    fields: dict[str, Any] = {
        "request_id": context.name,
        "path": context.request.path,
        "outcome": context.outcome,
        "seconds": round(now - context.started_at_s, 4),
    }
    if context.ttft_s is not None:
        fields["first_byte_seconds"] = round(context.ttft_s, 4)
    if route is not None:
        fields |= {"model": route.model, "prompt_tokens": route.prompt_tokens, "stream": route.is_streaming}
    if decision is not None:
        fields |= {
            "worker": decision.worker,
            "attempt": decision.attempt,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "predicted_ttft_seconds": round(decision.predicted_ttft_s, 4),
        }
        if decision.transfer is not None:
            fields |= {"kv_transfer": decision.transfer.kind.value, "kv_source": decision.transfer.source}
    if context.prefill is not None and context.prefill.ended_at_s is not None:
        fields["prefill_seconds"] = round(context.prefill.ended_at_s - context.prefill.started_at_s, 4)
    if usage is not None and usage.cached_tokens is not None:
        fields["cached_tokens"] = usage.cached_tokens
    return fields
