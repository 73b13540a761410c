"""What `/metrics` says: counters as plain numbers while serving, Prometheus' form only when somebody scrapes.

The names below are stable and documented in docs/operations.md. An update costs a dict access and an addition, so the
byte path may call it for every request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.messages import Decision, FailureKind
from router.siblings import Report, WorkerSums
from router.status import CoreSnapshot
from router.view import IndexStats

PREFIX = "blockcast_router_"
LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OVERHEAD_BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Histogram:
    """Cumulative on export, plain counts while observing."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count) pairs, the last bound infinite."""
        out: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts):
            running += count
            out.append((bound, float(running)))
        return out


COUNTED = (
    "requests",
    "decisions",
    "failures",
    "prompt_tokens",
    "predicted_cached_tokens",
    "reported_prompt_tokens",
    "reported_cached_tokens",
    "client_disconnects",
    "http_errors",
    "request_s",
    "ttft_s",
    "routing_s",
    "tokenize_s",
)
"""The attributes of Metrics."""


class Metrics:
    """The numbers of one process."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """(route, model, outcome) of every request that ended."""
        self.decisions: Counter[str] = Counter()
        self.failures: Counter[tuple[str, str]] = Counter()
        self.prompt_tokens = 0
        self.predicted_cached_tokens = 0
        self.reported_prompt_tokens = 0
        self.reported_cached_tokens = 0
        self.client_disconnects = 0
        self.http_errors: Counter[str] = Counter()
        self.request_s = Histogram(LATENCY_BOUNDS_S)
        self.ttft_s = Histogram(LATENCY_BOUNDS_S)
        self.routing_s = Histogram(OVERHEAD_BOUNDS_S)
        self.tokenize_s = Histogram(OVERHEAD_BOUNDS_S)

    def dump(self) -> dict[str, Any]:
        """As JSON can carry it, for another process to `absorb`."""
        values: dict[str, Any] = {}
        for name in COUNTED:
            value = getattr(self, name)
            if isinstance(value, Counter):
                values[name] = [[list(key) if isinstance(key, tuple) else key, count] for key, count in value.items()]
            elif isinstance(value, Histogram):
                values[name] = [value.counts, value.total]
            else:
                values[name] = value
        return values

    def absorb(self, dump: dict[str, Any]) -> None:
        """Add what another process counted."""
        for name in COUNTED:
            value, other = getattr(self, name), dump[name]
            if isinstance(value, Counter):
                for key, count in other:
                    value[tuple(key) if isinstance(key, list) else key] += count
            elif isinstance(value, Histogram):
                value.counts = [mine + theirs for mine, theirs in zip(value.counts, other[0])]
                value.total += other[1]
            else:
                setattr(self, name, value + other)

    def keep_workers(self, known: Container[str]) -> None:
        """Drop the counts of workers that are known no more: addresses come and go for as long as the router runs."""
        for worker_id in [worker_id for worker_id in self.decisions if worker_id not in known]:
            del self.decisions[worker_id]
        for key in [key for key in self.failures if key[0] and key[0] not in known]:
            del self.failures[key]

    def attempt_failed(self, decision: Decision | None, kind: FailureKind) -> None:
        self.failures[decision.worker if decision else "", kind.value] += 1

    def families(self) -> Iterator[Family]:
        """What the byte path counted."""
        yield _counter(
            "requests", "Requests that ended, by route, model and outcome.", ("route", "model", "outcome"),
            self.requests.items(),
        )  # fmt: skip
        yield _counter("decisions", "Attempts sent to each worker.", ("worker",), _keyed(self.decisions))
        yield _counter(
            "attempt_failures", "Attempts that failed, by worker and kind.", ("worker", "kind"), self.failures.items()
        )
        yield _counter(
            "http_errors", "Requests refused before routing, by status.", ("status",), _keyed(self.http_errors)
        )
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of routed requests, as tokenised here.", self.prompt_tokens),
            ("predicted_cached_tokens", "Prompt tokens predicted to be cached.", self.predicted_cached_tokens),
            ("reported_prompt_tokens", "Prompt tokens as the workers report them.", self.reported_prompt_tokens),
            ("reported_cached_tokens", "Cached prompt tokens as the workers report them.", self.reported_cached_tokens),
            ("client_disconnects", "Requests given up by their client.", self.client_disconnects),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value)
        for name, text, histogram in (
            ("request_seconds", "From a complete request to the end of its answer.", self.request_s),
            ("time_to_first_byte_seconds", "From a complete request to the answer's first body byte.", self.ttft_s),
            ("routing_seconds", "From a complete request to its dispatch, tokenising included.", self.routing_s),
            ("tokenize_seconds", "Time to render and encode a prompt.", self.tokenize_s),
        ):
            yield HistogramMetricFamily(PREFIX + name, text, histogram.buckets(), histogram.total)


def core_families(snapshot: CoreSnapshot, report: Report, index: IndexStats) -> Iterator[Family]:
    """What the core and the index know at the time of a scrape; `report` has the sums over processes."""
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
    yield from (up, prefilling, decoding, queue, busy, alarms)
    for gauge, text, value in (
        ("index_holders", "Event streams in the index.", index.holders),
        ("index_entries", "(holder, group, block) presences in the index.", index.entries),
        ("index_parked", "Events waiting for their parent block.", index.parked),
        ("index_pins", "Requests counted as cached until their events come.", index.pins),
        ("index_memory_bytes", "Memory of the index.", index.memory_bytes),
    ):
        yield GaugeMetricFamily(PREFIX + gauge, text, value)


def prompt_families(report: Report) -> Iterator[Family]:
    """Tokenising: CPU time, and each model's segment cache."""
    text = "CPU time of rendering and encoding prompts, estimated from one in sixteen."
    yield CounterMetricFamily(PREFIX + "tokenize_cpu_seconds", text, report.tokenize_cpu_s)
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
