"""What `/metrics` says, in Prometheus' form. The names are stable and documented in docs/operations.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.app.siblings import Report, WorkerSums
from router.counters import Metrics
from router.decide.status import CoreSnapshot
from router.index.protocol import IndexStats

PREFIX = "blockcast_router_"

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def counted_families(metrics: Metrics) -> Iterator[Family]:
    """What the byte path counted."""
    yield _counter(
        "requests", "Requests that ended, by route, model and outcome.", ("route", "model", "outcome"),
        metrics.requests.items(),
    )  # fmt: skip
    yield _counter("decisions", "Attempts sent to each worker.", ("worker",), _keyed(metrics.decisions))
    yield _counter(
        "attempt_failures", "Attempts that failed, by worker and kind.", ("worker", "kind"), metrics.failures.items()
    )
    yield _counter(
        "http_errors", "Requests refused before routing, by status.", ("status",), _keyed(metrics.http_errors)
    )
    yield _counter(
        "crashes", "Exceptions that ended a request they should not have.", ("where", "kind"), metrics.crashes.items()
    )
    yield GaugeMetricFamily(PREFIX + "held_bytes", "Bytes of requests kept, each above 16 KiB.", metrics.held_bytes)
    yield _counter(
        "refused_bytes", "Requests refused because too many bytes are kept.", ("bound",), _keyed(metrics.refused_bytes)
    )
    yield _counter(
        "refused_by_key", "Requests refused because their API key has too much in flight.", ("bound",),
        _keyed(metrics.refused_by_key),
    )  # fmt: skip
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of routed requests, as tokenised here.", metrics.prompt_tokens),
        ("predicted_cached_tokens", "Prompt tokens predicted to be cached.", metrics.predicted_cached_tokens),
        ("reported_prompt_tokens", "Prompt tokens as the workers report them.", metrics.reported_prompt_tokens),
        ("reported_cached_tokens", "Cached prompt tokens as the workers report them.", metrics.reported_cached_tokens),
        ("client_disconnects", "Requests given up by their client.", metrics.client_disconnects),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value)
    for name, text, histogram in (
        ("request_seconds", "From a complete request to the end of its answer.", metrics.request_s),
        ("time_to_first_byte_seconds", "From a complete request to the answer's first body byte.", metrics.ttft_s),
        ("routing_seconds", "From a complete request to its dispatch, tokenising included.", metrics.routing_s),
        ("tokenize_seconds", "Time to render and encode a prompt.", metrics.tokenize_s),
    ):
        yield HistogramMetricFamily(PREFIX + name, text, histogram.buckets(), histogram.total)


def core_families(
    snapshot: CoreSnapshot, report: Report, index: IndexStats, starting: Iterable[str]
) -> Iterator[Family]:
    """What the core and the index know at the time of a scrape; `report` has the sums over processes; `starting` are
    workers that were never reached."""
    yield GaugeMetricFamily(PREFIX + "in_flight", "Requests forwarded and not answered to the end.", report.in_flight)
    yield GaugeMetricFamily(PREFIX + "held", "Requests waiting in the reordering queue.", report.held)
    yield _counter(
        "core", "Events in the core: routed, held, refused, retried ...", ("event",), report.counters.items()
    )
    up = GaugeMetricFamily(PREFIX + "worker_up", "1 where the worker takes requests.", labels=("worker", "state"))
    prefilling = GaugeMetricFamily(PREFIX + "worker_prefilling", "Requests without a first token.", labels=("worker",))
    decoding = GaugeMetricFamily(PREFIX + "worker_decoding", "Requests past their first token.", labels=("worker",))
    queue = GaugeMetricFamily(
        PREFIX + "worker_queue_seconds", "Estimated prefill routed there and to come.", labels=("worker",)
    )
    busy = GaugeMetricFamily(
        PREFIX + "worker_utilisation", "Prefill seconds routed there per second.", labels=("worker",)
    )
    alarms = GaugeMetricFamily(
        PREFIX + "worker_alarms", "Alarms of the drift watchdog that are raised.", labels=("worker",)
    )
    for worker in snapshot.workers:
        name = (worker.target,)
        sums = report.workers.get(worker.target, WorkerSums())
        up.add_metric((worker.target, worker.state), 1.0 if worker.state == "up" else 0.0)
        prefilling.add_metric(name, sums.prefilling)
        decoding.add_metric(name, sums.decoding)
        queue.add_metric(name, worker.queue_s)
        busy.add_metric(name, worker.utilisation)
        alarms.add_metric(name, len(worker.alarms))
    for worker_id in starting:
        up.add_metric((worker_id, "starting"), 0.0)
    yield from (up, prefilling, decoding, queue, busy, alarms)
    for gauge, text, value in (
        ("index_holders", "Event streams in the index.", index.holders),
        ("index_entries", "(holder, group, block) presences in the index.", index.entries),
        ("index_parked", "Events waiting for their parent block.", index.parked),
        ("index_pins", "Requests counted as cached until their events come.", index.pins),
        ("index_memory_bytes", "Memory of the index.", index.memory_bytes),
    ):
        yield GaugeMetricFamily(PREFIX + gauge, text, value)


def fleet_families(unusable: Mapping[str, int]) -> Iterator[Family]:
    """What asking the workers came to."""
    text = "Probes and checks of a worker that failed, or whose answer could not be used."
    yield _counter("worker_check_failures", text, ("worker",), unusable.items())


def prompt_families(report: Report) -> Iterator[Family]:
    """Tokenising: CPU time, and each model's segment cache."""
    text = "CPU time of rendering and encoding prompts, estimated from one in sixteen."
    yield CounterMetricFamily(PREFIX + "tokenize_cpu_seconds", text, report.tokenize_cpu_s)
    text = "Bodies given to helper processes: read, unread (load decided), refused (no JSON), full, failed."
    yield _counter("large_bodies", text, ("outcome",), report.large_bodies.items())
    text = "Bytes of large bodies that are not read yet."
    yield GaugeMetricFamily(PREFIX + "large_bodies_waiting_bytes", text, report.waiting_bytes)
    hits = CounterMetricFamily(PREFIX + "segment_cache_hit_tokens", "Prompt tokens found encoded.", labels=("model",))
    misses = CounterMetricFamily(PREFIX + "segment_cache_miss_tokens", "Prompt tokens encoded anew.", labels=("model",))
    used = GaugeMetricFamily(PREFIX + "segment_cache_bytes", "Memory of encoded segments.", labels=("model",))
    for model, (hit_tokens, miss_tokens, used_bytes) in report.segments.items():
        hits.add_metric((model,), hit_tokens)
        misses.add_metric((model,), miss_tokens)
        used.add_metric((model,), used_bytes)
    yield from (hits, misses, used)


def feed_families(totals: dict[str, dict[str, int]]) -> Iterator[Family]:
    """The workers' event streams: worker -> counters."""
    names = sorted({name for counters in totals.values() for name in counters})
    for name in names:
        yield _counter(
            f"events_{name}", f"{name} of a worker's event streams.", ("worker",),
            [((worker,), counters[name]) for worker, counters in totals.items()],
        )  # fmt: skip


class _Scrape:
    """What the text writer asks of a registry. No class of prometheus-client's stands below it: this module is compiled
    where that package need not be installed, and a compiled class over an unknown base is undefined."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Any]:
        return self._collect()


def render(families: Callable[[], Iterable[Family]]) -> bytes:
    """Prometheus' text form."""
    scrape: Any = _Scrape(families)
    return generate_latest(scrape)


def _keyed(counter: Counter[str]) -> Iterable[tuple[tuple[str], int]]:
    return (((key,), value) for key, value in counter.items())


def _counter(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[Any, float]]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in values:
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family
