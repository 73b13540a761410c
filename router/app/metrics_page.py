"""What `/metrics` says, in Prometheus' form. The names are stable and documented in docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.decide.registry import CoreSnapshot
from router.decide.workers import WorkerState
from router.index.protocol import IndexStats
from router.metrics import Metrics
from router.miss_reasons.explanation import GROUPS

PREFIX: Final = "blockcast_router_"

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Values = Mapping[Any, float]
"""Values of the labels, a tuple, or a string where there is one label -> figure."""
Rows = Iterator[tuple[str, str, str, Values]]
"""(name, text, labels, values) of families."""


class CacheCounts(NamedTuple):
    """Counters of a cache, and its memory."""

    hits: int
    misses: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReport:
    """Figures of the page that neither the metrics nor the core nor the index have."""

    tokenize_cpu_s: float
    conversation_cache: CacheCounts
    """Hits and misses are bodies."""
    conversation_checks: int
    conversation_differences: int
    segments: dict[str, CacheCounts]
    """model -> counts of its segment cache. Hits and misses are tokens."""
    large_bodies: dict[str, int]
    """outcome -> bodies given to worker processes."""
    waiting_bytes: int
    """Of large bodies that are not read yet."""
    event_faults: int
    """What raised on the thread that reads events."""
    events_ignored: int
    """Messages of topics that nobody follows."""
    peer_messages: dict[str, int]
    """outcome -> messages of and to other routers."""


def build_page_families(
    metrics: Metrics,
    report: MetricsReport,
    snapshot: CoreSnapshot,
    index: IndexStats,
    starting: Iterable[str],
    unusable: Mapping[str, int],
    events: dict[str, dict[str, int]],
) -> Iterator[Family]:
    """The page. `starting`: workers that were never reached. `unusable`: worker -> questions that brought nothing.
    `events`: worker -> counters of its event streams.
    """
    yield from _build_families(CounterMetricFamily, _iter_counter_rows(metrics, report, snapshot, unusable))
    yield from build_feed_families(events)
    yield from _build_families(GaugeMetricFamily, _iter_gauge_rows(metrics, report, snapshot, index))
    yield from _build_families(GaugeMetricFamily, _iter_worker_rows(snapshot, starting))
    for name, text, histograms in (
        ("request_seconds", "From a complete request to the end of its answer.", metrics.request_s),
        ("time_to_first_byte_seconds", "From a complete request to the answer's first body byte.", metrics.ttft_s),
    ):
        family = HistogramMetricFamily(PREFIX + name, text, labels=["worker", "model", "stream"])
        for labels, labelled_histogram in histograms.by_labels.items():
            family.add_metric(labels, labelled_histogram.buckets(), labelled_histogram.total)
        yield family
    for name, text, histogram in (
        ("routing_seconds", "From a complete request to its dispatch, tokenising included.", metrics.routing_s),
        ("tokenize_seconds", "Time to render and encode a prompt.", metrics.tokenize_s),
    ):
        yield HistogramMetricFamily(PREFIX + name, text, histogram.buckets(), histogram.total)


def _iter_counter_rows(
    metrics: Metrics, report: MetricsReport, snapshot: CoreSnapshot, unusable: Mapping[str, int]
) -> Rows:
    yield "requests", "Requests that ended, by route, model and outcome.", "route model outcome", metrics.requests
    yield "decisions", "Attempts sent to each worker.", "worker", metrics.decisions
    yield "attempt_failures", "Attempts that failed, by worker and kind.", "worker kind", metrics.failures
    text = "Answers that broke off in the middle: continued elsewhere, completed here, or cut."
    yield "broken_streams", text, "outcome", metrics.broken_streams
    yield "http_errors", "Requests refused before routing, by status.", "status", metrics.http_errors
    yield "crashes", "Exceptions that ended a request they should not have.", "where kind", metrics.crashes
    yield "refused_bytes", "Requests refused because too many bytes are kept.", "bound", metrics.refused_bytes
    text = "Requests refused because their API key has too much in flight."
    yield "refused_by_key", text, "bound", metrics.refused_by_key
    yield "key_requests", "Requests of each API key that workers answered.", "key", metrics.key_requests
    text = "Tokens of each API key: prompt, of them cached and computed, and output."
    yield "key_tokens", text, "key kind", metrics.key_tokens
    text = "Requests of the share that is compared, by the reason for most of their lost tokens."
    yield "cache_miss_requests", text, "reason", metrics.cache_miss_requests
    text = "Prompt tokens of the same that had to be computed, by reason and whose doing it is."
    tokens_by_group = {
        (reason, GROUPS.get(reason, "none")): count for reason, count in metrics.cache_miss_tokens.items()
    }
    yield "cache_miss_tokens", text, "reason group", tokens_by_group
    text = (
        "Of requests whose worker says what it reused: prompt tokens, cached at the best worker, predicted, reported."
    )
    yield "reused_tokens", text, "point", metrics.reused_tokens
    yield "core", "Events in the core: routed, queued, refused, retried ...", "event", snapshot.counters
    text = "Probes and checks of a worker that failed, or whose answer could not be used."
    yield "worker_check_failures", text, "worker", unusable
    text = "bodies given to worker processes: read, unread (load decided), refused (no JSON), full, failed."
    yield "large_bodies", text, "outcome", report.large_bodies
    text = "Load messages: sent to other routers, received, late, malformed (or beyond a bound); routers expired."
    yield "peer_messages", text, "outcome", report.peer_messages
    segments = report.segments.items()
    yield (
        "segment_cache_hit_tokens",
        "Prompt tokens found encoded.",
        "model",
        {name: counts.hits for name, counts in segments},
    )
    yield (
        "segment_cache_miss_tokens",
        "Prompt tokens encoded anew.",
        "model",
        {name: counts.misses for name, counts in segments},
    )
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of routed requests, as tokenised here.", metrics.prompt_tokens),
        ("predicted_cached_tokens", "Prompt tokens predicted to be cached.", metrics.predicted_cached_tokens),
        ("reported_prompt_tokens", "Prompt tokens as the workers report them.", metrics.reported_prompt_tokens),
        ("reported_cached_tokens", "Cached prompt tokens as the workers report them.", metrics.reported_cached_tokens),
        ("client_disconnects", "Requests given up by their client.", metrics.client_disconnects),
        ("tokenize_cpu_seconds", "CPU time of rendering and encoding prompts, estimated from one in sixteen.",
         report.tokenize_cpu_s),
        ("conversation_cache_hits", "Bodies from 1 KB on that continue a cached conversation.",
         report.conversation_cache.hits),
        ("conversation_cache_misses", "Bodies from 1 KB on that continue no cached conversation.",
         report.conversation_cache.misses),
        ("conversation_cache_checks", "Continued conversations that were read whole too, one in 64.",
         report.conversation_checks),
        ("conversation_cache_differences", "Checks that found other ids: from then on a model's chats are read whole.",
         report.conversation_differences),
        ("event_faults", "Errors on the thread that reads events; each ended a message or began a stream anew.",
         report.event_faults),
        ("event_messages_ignored", "Event messages of topics that nobody follows.", report.events_ignored),
    ):  # fmt: skip
        yield name, text, "", {(): value}


def build_feed_families(events: dict[str, dict[str, int]]) -> Iterator[Family]:
    """The workers' event streams: worker -> counters."""
    names = sorted({name for counters in events.values() for name in counters})
    rows = ((name, {worker: counters[name] for worker, counters in events.items()}) for name in names)
    texts = ((f"events_{name}", f"{name} of a worker's event streams.", "worker", values) for name, values in rows)
    return _build_families(CounterMetricFamily, texts)


def _iter_gauge_rows(metrics: Metrics, report: MetricsReport, snapshot: CoreSnapshot, index: IndexStats) -> Rows:
    memory_bytes = {name: counts.memory_bytes for name, counts in report.segments.items()}
    yield "segment_cache_bytes", "Memory of encoded segments.", "model", memory_bytes
    for name, text, value in (
        ("request_buffer_bytes", "Bytes of requests kept, each above 16 KiB.", metrics.request_buffer_bytes),
        ("in_flight", "Requests forwarded and not answered to the end.", snapshot.in_flight),
        ("queued", "Requests that wait in the router.", snapshot.queued_requests),
        ("large_bodies_waiting_bytes", "Bytes of large bodies that are not read yet.", report.waiting_bytes),
        ("conversation_cache_bytes", "Memory of cached conversations.", report.conversation_cache.memory_bytes),
        ("index_holders", "Event streams in the index.", index.holders),
        ("index_entries", "(holder, group, block) presences in the index.", index.entries),
        ("index_parked", "Events waiting for their parent block.", index.parked),
        ("index_pins", "Requests counted as cached until their events come.", index.pins),
        ("index_memory_bytes", "Memory of the index.", index.memory_bytes),
    ):
        yield name, text, "", {(): value}


def _iter_worker_rows(snapshot: CoreSnapshot, starting: Iterable[str]) -> Rows:
    workers = snapshot.workers
    state_of = dict.fromkeys(starting, "starting") | {worker.target: worker.state for worker in workers}
    up = {worker_id: float(state == "up") for worker_id, state in state_of.items()}
    yield "worker_up", "1 where the worker takes requests.", "worker", up
    states = {
        (name, possible_state.value): float(possible_state == state)
        for name, state in state_of.items()
        for possible_state in WorkerState
    }
    yield "worker_state", "1 for the state that the worker is in, 0 for the others.", "worker state", states
    for name, text, values in (
        ("prefilling", "Requests without a first token.", {w.target: w.prefilling for w in workers}),
        ("decoding", "Requests past their first token.", {w.target: w.decoding for w in workers}),
        ("queue_seconds", "Estimated prefill routed there and to come.", {w.target: w.queue_s for w in workers}),
        ("utilisation", "Prefill seconds routed there per second.", {w.target: w.utilisation for w in workers}),
        ("alarms", "Alarms of the drift watchdog that are raised.", {w.target: len(w.alarms) for w in workers}),
    ):
        yield f"worker_{name}", text, "worker", values


def _build_families(kind: type[CounterMetricFamily] | type[GaugeMetricFamily], rows: Rows) -> Iterator[Family]:
    for name, text, labels, values in rows:
        family = kind(PREFIX + name, text, labels=labels.split())
        for key, value in values.items():
            family.add_metric((key,) if isinstance(key, str) else key, value)
        yield family


class _Collector:
    """What the text writer asks of a registry."""

    def __init__(self, families: Iterator[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return self._families


def render_metrics(families: Iterator[Family]) -> bytes:
    """Prometheus' text form."""
    scrape: Any = _Collector(families)
    return generate_latest(scrape)
