"""What is said of a request that ended: counters for `/metrics`, fields for the log."""

from __future__ import annotations

import logging

from prompts.routing import API_KIND_BY_PATH
from router.decide.core import RouterCore
from router.decide.workers import Worker, WorkerState
from router.edge.request_context import RequestContext
from router.metrics import Metrics

log = logging.getLogger("router")


def count_ended_request(core: RouterCore, metrics: Metrics, context: RequestContext, now: float) -> None:
    """Add a request that ended to the counters."""
    path = context.request.path if context.request.path in API_KIND_BY_PATH else "other"
    route, decision, usage = context.route, context.decision, context.usage
    # Names that clients make up must not become labels.
    model, worker = "unknown", ""
    if decision is not None:
        worker = decision.worker
    if route is not None and (worker or core.resolve_model(route.model) is not None):
        model = route.model
    stream = "true" if route is not None and route.is_streaming else "false"
    ended_requests = metrics.get_ended(path, model, context.outcome, worker, stream)
    ended_requests.count += 1
    ended_requests.request_s.observe(now - context.started_at_s)
    if context.progress.first_byte_at_s is not None:
        ended_requests.ttft_s.observe(context.progress.first_byte_at_s - context.started_at_s)
    if context.outcome == "client_gone":
        metrics.client_disconnects += 1
    if route is None or decision is None:
        return
    metrics.routing_s.observe(decision.decided_s - context.started_at_s)
    if route.token_ids is not None:
        metrics.prompt_tokens += route.prompt_tokens
        metrics.predicted_cached_tokens += decision.predicted_cached_tokens
    if usage is not None:
        metrics.reported_prompt_tokens += usage.prompt_tokens or 0
        metrics.reported_cached_tokens += usage.cached_tokens or 0


def count_tokens_of_key(metrics: Metrics, context: RequestContext) -> None:
    """Add the tokens of a request that a worker answered to the counters of its API key. Where the worker does not say
    how many it used, the router's own figures count."""
    route, decision, usage = context.route, context.decision, context.usage
    if route is None or decision is None or context.progress.first_byte_at_s is None:
        return
    if context.outcome.startswith("status_") and context.outcome != "status_200":
        return
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        prompt_tokens, cached_tokens = route.prompt_tokens, decision.predicted_cached_tokens
        output_tokens = context.progress.read_count if route.is_streaming else 0
    else:
        prompt_tokens = usage.prompt_tokens
        cached_tokens = usage.cached_tokens or 0
        output_tokens = usage.completion_tokens
    key, tokens = context.tenant, metrics.key_tokens
    metrics.key_requests[key] += 1
    tokens[key, "prompt"] += prompt_tokens
    tokens[key, "cached"] += cached_tokens
    tokens[key, "computed"] += max(0, prompt_tokens - cached_tokens)
    tokens[key, "output"] += output_tokens


def log_state_change(worker: Worker, previous_state: WorkerState | None) -> None:
    """One line for each change of a worker's state."""
    level = logging.WARNING if worker.state is WorkerState.DOWN else logging.INFO
    previous_name = "new" if previous_state is None else previous_state.value
    why = f": {worker.state_reason}" if worker.state_reason else ""
    log.log(level, "worker %s: %s -> %s%s", worker.worker_id, previous_name, worker.state.value, why)


def make_log_fields(context: RequestContext, now: float) -> dict[str, object]:
    """What the log says of a request."""
    route, decision, usage = context.route, context.decision, context.usage
    fields: dict[str, object] = {
        "request_id": context.name,
        "path": context.request.path,
        "outcome": context.outcome,
        "seconds": round(now - context.started_at_s, 4),
    }
    if context.progress.first_byte_at_s is not None:
        fields["first_byte_seconds"] = round(context.progress.first_byte_at_s - context.started_at_s, 4)
    if route is not None:
        fields |= {"model": route.model, "prompt_tokens": route.prompt_tokens, "stream": route.is_streaming}
    if decision is not None:
        fields |= {
            "worker": decision.worker,
            "attempt": decision.attempt,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "predicted_ttft_seconds": round(decision.predicted_ttft_s, 4),
        }
    if usage is not None and usage.cached_tokens is not None:
        fields["cached_tokens"] = usage.cached_tokens
    return fields
