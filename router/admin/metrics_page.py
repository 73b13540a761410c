"""The page `/metrics`, in Prometheus' text format. docs/reference/metrics.md lists the names, which are stable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from options.metrics import TEXT_FORMAT, Family, Row, build_families, make_total, render_metrics
from router.admin.workers import describe_kv_groups
from router.decide.registry import CoreSnapshot
from router.decide.workers import DECODE_ROLE, PREFILL_ROLE, Worker, WorkerState
from router.edge.proxy import Proxy
from router.fleet.index_feed import IndexFeed
from router.fleet.membership import Fleet
from router.http.routes import CachedPage, Response, Routes
from router.metrics import Metrics
from router.miss_reasons.explanation import GROUPS
from router.prompting.prompt_reader import PromptReader
from router.prompting.prompt_worker_pool import PromptWorkerPool

NAME_PREFIX: Final = "blockcast_router_"


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The Prometheus page `/metrics` of one router, made from the parts of the router that count things."""

    proxy: Proxy
    prompt_reader: PromptReader
    worker_pool: PromptWorkerPool
    fleet: Fleet
    feed: IndexFeed
    """Reader of the workers' events, which fills the index."""
    count_peer_messages: Callable[[], Mapping[str, int]] = dict
    """Returns the messages to and from other routers, by outcome."""

    def register(self, routes: Routes) -> None:
        """Serve the page."""
        routes.add("GET", "/metrics", CachedPage(self._render, self.proxy.now), public=True)

    def _render(self) -> Response:
        return Response(render_metrics(build_page_families(self)), content_type=TEXT_FORMAT.encode())


def build_page_families(page: MetricsPage) -> Iterator[Family]:
    """Yield all metric families of the page `/metrics`, with the figures of this moment."""
    proxy = page.proxy
    metrics, snapshot = proxy.metrics, proxy.core.snapshot(proxy.now())
    metrics.flush_ended()
    yield from build_families(CounterMetricFamily, _list_request_counters(metrics), NAME_PREFIX)
    yield from build_families(CounterMetricFamily, _list_component_counters(page, snapshot), NAME_PREFIX)
    yield from build_feed_families(page.feed.sum_counters())
    yield from build_families(GaugeMetricFamily, _list_gauges(page, snapshot), NAME_PREFIX)
    yield from build_families(GaugeMetricFamily, _list_worker_gauges(page, snapshot), NAME_PREFIX)
    yield from build_families(HistogramMetricFamily, _list_histograms(metrics), NAME_PREFIX)


def build_feed_families(feed_counters: Mapping[str, Mapping[str, int]]) -> Iterator[Family]:
    """Yield the metric families of the workers' event streams. `feed_counters`: counters by name, by worker id."""
    rows = []
    for name in sorted({name for counters in feed_counters.values() for name in counters}):
        count_by_worker = {worker_id: counters[name] for worker_id, counters in feed_counters.items()}
        rows.append(Row(f"events_{name}", f"{name} of a worker's event streams.", count_by_worker, ("worker",)))
    return build_families(CounterMetricFamily, rows, NAME_PREFIX)


# fmt: off
def _list_request_counters(metrics: Metrics) -> list[Row]:
    """Return the counters of requests, of the attempts to serve them, and of their tokens, as rows of `/metrics`."""
    tokens_by_group = {
        (reason, GROUPS.get(reason, "none")): tokens for reason, tokens in metrics.cache_miss_tokens.items()
    }
    return [
        Row("requests", "Requests that ended, by route, model and outcome.",
            metrics.requests, ("route", "model", "outcome")),
        Row("decisions", "Ended requests, by the worker chosen last.", metrics.decisions, ("worker",)),
        Row("attempt_failures", "Attempts that failed, by worker and kind of failure.",
            metrics.failures, ("worker", "kind")),
        Row("broken_streams", "Answers that broke off in the middle: continued elsewhere, completed here, or cut.",
            metrics.broken_streams, ("outcome",)),
        Row("kv_transfers", "Requests for which KV was to move between workers, by kind and outcome.",
            metrics.transfers.outcomes, ("kind", "outcome")),
        Row("kv_transfer_planned_tokens", "Tokens of which KV was to move between workers.",
            metrics.transfers.planned_tokens, ("kind",)),
        Row("kv_transfer_planned_bytes", "Bytes of these tokens, for workers that tell how many bytes a token has.",
            metrics.transfers.planned_bytes, ("kind",)),
        Row("http_errors", "Requests refused before routing, by status.", metrics.http_errors, ("status",)),
        Row("crashes", "Unexpected exceptions that were caught.", metrics.crashes, ("where", "kind")),
        Row("refused_bytes", "Requests refused because too many bytes wait.", metrics.refused_bytes, ("bound",)),
        Row("refused_by_key", "Requests refused because their API key has too much in flight.",
            metrics.refused_by_key, ("bound",)),
        Row("key_requests", "Requests of each API key that workers answered.", metrics.key_requests, ("key",)),
        Row("key_tokens", "Tokens of each API key: prompt, of them cached and computed, and output.",
            metrics.key_tokens, ("key", "kind")),
        Row("cache_miss_requests", "Requests of compared conversations, by the reason for most of their lost tokens.",
            metrics.cache_miss_requests, ("reason",)),
        Row("cache_miss_tokens",
            "Prompt tokens of compared conversations that had to be computed, by reason and group.",
            tokens_by_group, ("reason", "group")),
        Row("reused_tokens",
            "Tokens of requests with reported reuse: of the prompt, cached at the best worker, predicted, reported.",
            metrics.reused_tokens, ("point",)),
        make_total("prompt_tokens", "Prompt tokens of routed requests, as tokenised here.", metrics.prompt_tokens),
        make_total("predicted_cached_tokens", "Prompt tokens predicted to be cached.",
                   metrics.predicted_cached_tokens),
        make_total("reported_prompt_tokens", "Prompt tokens as the workers report them.",
                   metrics.reported_prompt_tokens),
        make_total("reported_cached_tokens", "Cached prompt tokens as the workers report them.",
                   metrics.reported_cached_tokens),
        make_total("client_disconnects", "Requests that their client left early.", metrics.client_disconnects),
    ]


def _list_component_counters(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the counters that parts of the router keep themselves: core, fleet, prompt reader and event feed."""
    conversations, events = page.prompt_reader.conversations, page.feed.events
    received_bytes_by_target = {
        row["target"]: row["engine_load"].received_kv_bytes
        for row in snapshot.workers
        if row["engine_load"] is not None and row["engine_load"].received_kv_bytes is not None
    }
    return [
        Row("kv_transfer_received_bytes", "Bytes of KV from other workers, as the worker reports them.",
            received_bytes_by_target, ("worker",)),
        Row("core", "Events in the core: routed, queued, refused, retried ...", snapshot.counters, ("event",)),
        Row("worker_check_failures", "Probes and checks of a worker that failed, or got an unusable answer.",
            page.fleet.failed_checks, ("worker",)),
        Row("large_bodies", "Large bodies given to helper processes, by outcome.",
            page.worker_pool.counts, ("outcome",)),
        Row("peer_messages", "Messages between routers, by outcome.", page.count_peer_messages(), ("outcome",)),
        make_total("tokenize_cpu_seconds", "CPU seconds of rendering and encoding prompts.",
                   page.prompt_reader.cpu_s + page.worker_pool.cpu_s),
        make_total("conversation_cache_hits", "Bodies from 1 KB on that continue a cached conversation.",
                   conversations.cache.hits),
        make_total("conversation_cache_misses", "Bodies from 1 KB on that continue no cached conversation.",
                   conversations.cache.misses),
        make_total("conversation_cache_checks", "Continued conversations that were read whole too, one in 64.",
                   conversations.check_count),
        make_total("conversation_cache_differences",
                   "Checks that found other token ids; the model's chats are then read whole.",
                   conversations.difference_count),
        make_total("event_faults",
                   "Errors on the thread that reads events; each ended a message or began a stream anew.",
                   events.fault_count),
        make_total("event_messages_ignored", "Event messages of topics that no worker has.",
                   events.ignored_message_count),
    ]


def _list_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges of the whole router: memory, requests in flight, and the size of the prefix index."""
    index = page.proxy.core.index.stats()
    return [
        make_total("request_buffer_bytes", "Bytes of requests and of unread answers; small ones do not count.",
                   page.proxy.metrics.request_buffer_bytes),
        make_total("in_flight", "Requests forwarded and not answered to the end.", snapshot.in_flight),
        make_total("queued", "Requests that wait in the router.", snapshot.queued_requests),
        make_total("large_bodies_waiting_bytes", "Bytes of large bodies that are not read yet.",
                   page.worker_pool.waiting_bytes),
        make_total("conversation_cache_bytes", "Bytes of memory of cached conversations.",
                   page.prompt_reader.conversations.cache.used_bytes),
        make_total("index_holders", "Event streams in the index.", index.holders),
        make_total("index_entries", "Blocks in the index, counted once for each worker and cache group.",
                   index.entries),
        make_total("index_parked", "Events waiting for their parent block.", index.parked),
        make_total("index_pins", "Prompts that count as cached until their events come.", index.pins),
        make_total("index_memory_bytes", "Bytes of memory of the index.", index.memory_bytes),
    ]


def _list_worker_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges that have one value for each worker, and one that has a value for each group that moves KV.

    A `Row` is a gauge: name, help text, values by label, names of the labels. A worker with data-parallel ranks has a
    value for each rank, as each is a target of its own.
    """
    states = snapshot.workers
    alarm_counts = {state["target"]: len(state["alarms"]) for state in states}

    def make_gauge(name: str, help_text: str, field: str) -> Row:
        return Row(name, help_text, {state["target"]: state[field] for state in states}, ("worker",))

    return [
        _make_missing_roles_gauge(page.proxy.core.workers.values()),
        *_list_state_gauges(page, snapshot),
        make_gauge("worker_prefilling", "Requests at the worker without a first token.", "prefilling"),
        make_gauge("worker_decoding", "Requests at the worker past their first token.", "decoding"),
        make_gauge("worker_queue_seconds", "Predicted seconds of prefill that the worker still has to do.", "queue_s"),
        make_gauge("worker_utilisation", "Seconds of prefill sent to the worker, per second.", "utilisation"),
        Row("worker_event_lag_seconds", "Seconds from the making of a worker's last batch of events until it counted.",
            page.feed.list_event_lags(), ("worker",)),
        Row("worker_alarms", "Alarms that are raised for the worker.", alarm_counts, ("worker",)),
    ]
# fmt: on


def _make_missing_roles_gauge(workers: Iterable[Worker]) -> Row:
    """Return the gauge that shows which groups of workers cannot move KV, as no worker has one of the two roles."""
    is_missing: dict[tuple[str, str], float] = {}
    for group in describe_kv_groups(workers):
        is_missing[group["group"], PREFILL_ROLE] = float(not group["sources"])
        is_missing[group["group"], DECODE_ROLE] = float(not group["destinations"])
    help_text = "1 where no worker of a group gives KV (prefill), or none takes it (decode)."
    return Row("kv_role_missing", help_text, is_missing, ("group", "role"))


def _list_state_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges that show the state of each worker. A worker that was never reached is starting."""
    state_by_worker = dict.fromkeys(page.fleet.list_starting_reasons(), "starting")
    state_by_worker |= {row["target"]: row["state"] for row in snapshot.workers}
    up_workers = {worker: float(state == "up") for worker, state in state_by_worker.items()}
    states = {
        (worker, possible_state.value): float(possible_state == state)
        for worker, state in state_by_worker.items()
        for possible_state in WorkerState
    }
    return [
        Row("worker_up", "1 where the worker takes requests.", up_workers, ("worker",)),
        Row("worker_state", "1 for the state that the worker is in, 0 for the others.", states, ("worker", "state")),
    ]


def _list_histograms(metrics: Metrics) -> list[Row]:
    answer_labels = ("worker", "model", "stream")
    return [
        Row("request_seconds", "Seconds from a complete request to the end of its answer.",
            metrics.request_s.by_labels, answer_labels),
        Row("time_to_first_byte_seconds", "Seconds from a complete request to the first byte of the answer's body.",
            metrics.ttft_s.by_labels, answer_labels),
        Row("prefill_leg_seconds", "Seconds of prefills at one worker for answers that another worker decodes.",
            metrics.transfers.prefill_s.by_labels, ("worker",)),
        make_total("routing_seconds", "Seconds that the router adds: from a complete request to its dispatch.",
                   metrics.routing_s),
        make_total("tokenize_seconds", "Seconds to render and encode a prompt.", metrics.tokenize_s),
    ]  # fmt: skip
