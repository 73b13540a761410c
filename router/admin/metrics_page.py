"""The page `/metrics`, in Prometheus' text format. docs/reference/metrics.md lists the names, which are stable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.admin.workers import describe_kv_groups
from router.decide.registry import CoreSnapshot
from router.decide.workers import DECODE_ROLE, PREFILL_ROLE, WorkerState
from router.edge.proxy import Proxy
from router.fleet.feed import IndexFeed
from router.fleet.members import Fleet
from router.http.routes import CachedPage, Response, Routes
from router.metrics import Metrics
from router.miss_reasons.explanation import GROUPS
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.reader import PromptReader

NAME_PREFIX: Final = "blockcast_router_"
TEXT_FORMAT: Final = b"text/plain; version=0.0.4; charset=utf-8"

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Row(NamedTuple):
    """One counter or gauge: its name, its help text, and a figure for each combination of labels."""

    name: str
    help_text: str
    values: Mapping[Any, float]
    """Figures by the values of their labels. The key is a tuple, or a string if there is one label."""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The page `/metrics` of one router, and the parts of the router that count what the page shows."""

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
        return Response(render_metrics(build_page_families(self)), content_type=TEXT_FORMAT)


def build_page_families(page: MetricsPage) -> Iterator[Family]:
    """Yield all metric families of the page `/metrics`, with the figures of this moment."""
    proxy = page.proxy
    metrics, snapshot = proxy.metrics, proxy.core.snapshot(proxy.now())
    metrics.flush_ended()
    yield from _build_families(CounterMetricFamily, _list_request_counters(metrics))
    yield from _build_families(CounterMetricFamily, _list_room_counters(page, snapshot))
    yield from build_feed_families(page.feed.sum_counters())
    yield from _build_families(GaugeMetricFamily, _list_gauges(page, snapshot))
    yield from _build_families(GaugeMetricFamily, _list_worker_gauges(page, snapshot))
    yield from _build_histogram_families(metrics)


def build_feed_families(feed_counters: Mapping[str, Mapping[str, int]]) -> Iterator[Family]:
    """Yield the metric families of the workers' event streams. `feed_counters`: counters by name, by worker id."""
    names = sorted({name for counters in feed_counters.values() for name in counters})
    rows = (
        Row(
            f"events_{name}",
            f"{name} of a worker's event streams.",
            {worker_id: counters[name] for worker_id, counters in feed_counters.items()},
            ("worker",),
        )
        for name in names
    )
    return _build_families(CounterMetricFamily, rows)


# fmt: off
def _list_request_counters(metrics: Metrics) -> list[Row]:
    """Return the counters of requests, attempts and their tokens."""
    tokens_by_group = {
        (reason, GROUPS.get(reason, "none")): tokens for reason, tokens in metrics.cache_miss_tokens.items()
    }
    return [
        Row("requests", "Requests that ended, by route, model and outcome.",
            metrics.requests, ("route", "model", "outcome")),
        Row("decisions", "Attempts sent to each worker.", metrics.decisions, ("worker",)),
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
        Row("crashes", "Unexpected exceptions that ended a request.", metrics.crashes, ("where", "kind")),
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
        _total("prompt_tokens", "Prompt tokens of routed requests, as tokenised here.", metrics.prompt_tokens),
        _total("predicted_cached_tokens", "Prompt tokens predicted to be cached.", metrics.predicted_cached_tokens),
        _total("reported_prompt_tokens", "Prompt tokens as the workers report them.", metrics.reported_prompt_tokens),
        _total("reported_cached_tokens", "Cached prompt tokens as the workers report them.",
               metrics.reported_cached_tokens),
        _total("client_disconnects", "Requests that their client left early.", metrics.client_disconnects),
    ]


def _list_room_counters(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the counters that are kept outside `Metrics`: by the core, the fleet, the prompt reader and the feed."""
    conversations, events = page.prompt_reader.conversations, page.feed.events
    received_bytes_by_target = {
        row.target: row.engine_load.received_kv_bytes
        for row in snapshot.workers
        if row.engine_load is not None and row.engine_load.received_kv_bytes is not None
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
        _total("tokenize_cpu_seconds", "CPU seconds of rendering and encoding prompts.",
               page.prompt_reader.cpu_s + page.worker_pool.cpu_s),
        _total("conversation_cache_hits", "Bodies from 1 KB on that continue a cached conversation.",
               conversations.cache.hits),
        _total("conversation_cache_misses", "Bodies from 1 KB on that continue no cached conversation.",
               conversations.cache.misses),
        _total("conversation_cache_checks", "Continued conversations that were read whole too, one in 64.",
               conversations.check_count),
        _total("conversation_cache_differences",
               "Checks that found other token ids; the model's chats are then read whole.",
               conversations.difference_count),
        _total("event_faults", "Errors on the thread that reads events; each ended a message or began a stream anew.",
               events.fault_count),
        _total("event_messages_ignored", "Event messages of topics that no worker has.", events.ignored_message_count),
    ]


def _list_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges of the whole router."""
    index = page.proxy.core.index.stats()
    return [
        _total("request_buffer_bytes", "Bytes of requests and of unread answers; small ones do not count.",
               page.proxy.metrics.request_buffer_bytes),
        _total("in_flight", "Requests forwarded and not answered to the end.", snapshot.in_flight),
        _total("queued", "Requests that wait in the router.", snapshot.queued_requests),
        _total("large_bodies_waiting_bytes", "Bytes of large bodies that are not read yet.",
               page.worker_pool.waiting_bytes),
        _total("conversation_cache_bytes", "Bytes of memory of cached conversations.",
               page.prompt_reader.conversations.cache.used_bytes),
        _total("index_holders", "Event streams in the index.", index.holders),
        _total("index_entries", "Blocks in the index, counted once for each worker and cache group.", index.entries),
        _total("index_parked", "Events waiting for their parent block.", index.parked),
        _total("index_pins", "Prompts that count as cached until their events come.", index.pins),
        _total("index_memory_bytes", "Bytes of memory of the index.", index.memory_bytes),
    ]


def _list_worker_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges of each worker, and of each group of workers that move KV between them."""
    rows, worker = snapshot.workers, ("worker",)
    missing_roles = {
        (group["group"], role): float(not group[workers_field])
        for group in describe_kv_groups(page.proxy.core.workers.values())
        for role, workers_field in ((PREFILL_ROLE, "sources"), (DECODE_ROLE, "destinations"))
    }
    return [
        Row("kv_role_missing", "1 where no worker of a group gives KV (prefill), or none takes it (decode).",
            missing_roles, ("group", "role")),
        *_list_state_gauges(page, snapshot),
        Row("worker_prefilling", "Requests at the worker without a first token.",
            {row.target: row.prefilling for row in rows}, worker),
        Row("worker_decoding", "Requests at the worker past their first token.",
            {row.target: row.decoding for row in rows}, worker),
        Row("worker_queue_seconds", "Predicted seconds of prefill that the worker still has to do.",
            {row.target: row.queue_s for row in rows}, worker),
        Row("worker_utilisation", "Seconds of prefill sent to the worker, per second.",
            {row.target: row.utilisation for row in rows}, worker),
        Row("worker_event_lag_seconds", "Seconds from the making of a worker's last batch of events until it counted.",
            page.feed.list_event_lags(), worker),
        Row("worker_alarms", "Alarms that are raised for the worker.",
            {row.target: len(row.alarms) for row in rows}, worker),
    ]
# fmt: on


def _list_state_gauges(page: MetricsPage, snapshot: CoreSnapshot) -> list[Row]:
    """Return the gauges that show the state of each worker. A worker that was never reached is starting."""
    state_by_worker = dict.fromkeys(page.fleet.list_starting_reasons(), "starting")
    state_by_worker |= {row.target: row.state for row in snapshot.workers}
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


def _total(name: str, help_text: str, value: float) -> Row:
    """Return the row of a metric without labels."""
    return Row(name, help_text, {(): value})


def _build_families(
    family_type: type[CounterMetricFamily] | type[GaugeMetricFamily], rows: Iterable[Row]
) -> Iterator[Family]:
    for row in rows:
        family = family_type(NAME_PREFIX + row.name, row.help_text, labels=row.labels)
        for label_values, value in row.values.items():
            family.add_metric((label_values,) if isinstance(label_values, str) else label_values, value)
        yield family


def _build_histogram_families(metrics: Metrics) -> Iterator[Family]:
    """Yield the histograms of times."""
    answer_labels = ["worker", "model", "stream"]
    for name, help_text, histogram_by_labels, labels in (
        ("request_seconds", "Seconds from a complete request to the end of its answer.",
         metrics.request_s.by_labels, answer_labels),
        ("time_to_first_byte_seconds", "Seconds from a complete request to the first byte of the answer's body.",
         metrics.ttft_s.by_labels, answer_labels),
        ("prefill_leg_seconds", "Seconds of prefills at one worker for answers that another worker decodes.",
         metrics.transfers.prefill_s.by_labels, ["worker"]),
        ("routing_seconds", "Seconds that the router adds: from a complete request to its dispatch.",
         {(): metrics.routing_s}, []),
        ("tokenize_seconds", "Seconds to render and encode a prompt.", {(): metrics.tokenize_s}, []),
    ):  # fmt: skip
        family = HistogramMetricFamily(NAME_PREFIX + name, help_text, labels=labels)
        for label_values, histogram in histogram_by_labels.items():
            family.add_metric(label_values, histogram.buckets(), histogram.total)
        yield family


def render_metrics(families: Iterator[Family]) -> bytes:
    """Write families in Prometheus' text format."""
    registry: Any = SimpleNamespace(collect=lambda: families)  # all that the text writer uses of a registry
    return generate_latest(registry)
