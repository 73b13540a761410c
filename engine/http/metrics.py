"""Counters of the HTTP process, and the Prometheus page with vLLM's metric names.

Every token is counted, so counting is cheap: a histogram is a bisect and an addition, and becomes a Prometheus object
only when the page is requested. Metrics of the core come from its last `EngineStats`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from engine.core import EngineStats, SimulationLag
from engine.messages import CoreInfo
from engine.process.client import EngineClient
from engine.transfer.settings import TransferStats
from events.publisher import PublisherStats

# vLLM's buckets.
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_E2E_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))


class Histogram:
    """Counts observations by their size, and sums them. Bucket i holds values above bound i - 1, up to bound i."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of observations up to it) of each bucket, as Prometheus expects."""
        cumulative_count = 0
        bucket_rows: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            cumulative_count += count
            bucket_rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(cumulative_count)))
        return bucket_rows


class ServerMetrics:
    """Counts the requests and tokens of one HTTP process, and measures their times in seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished_sequences: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.error_responses: dict[str, int] = {}
        """HTTP status -> requests answered with an error."""
        self.time_to_first_token = Histogram(_TTFT_BUCKETS)
        self.inter_token_latency = Histogram(_ITL_BUCKETS)
        self.time_per_output_token = Histogram(_ITL_BUCKETS)
        self.e2e_request_latency = Histogram(_E2E_BUCKETS)
        self.request_prompt_tokens = Histogram(_TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram(_TOKEN_BUCKETS)

    def count_error(self, status: int) -> None:
        self.error_responses[str(status)] = self.error_responses.get(str(status), 0) + 1


class RequestClock:
    """Records the times of one HTTP request in the metrics: the first token, gaps between tokens, the end."""

    __slots__ = ("_last_token_s", "_metrics", "_start_s")

    def __init__(self, metrics: ServerMetrics, start_s: float) -> None:
        self._metrics = metrics
        self._start_s = start_s
        self._last_token_s: dict[int, float] = {}

    def record_tokens(self, index: int, count: int, now_s: float) -> None:
        """Record that `count` tokens of choice `index` have arrived."""
        if not count:
            return
        last_token_s = self._last_token_s.get(index)
        if last_token_s is not None:
            self._metrics.inter_token_latency.observe((now_s - last_token_s) / count)
        elif not self._last_token_s:
            self._metrics.time_to_first_token.observe(now_s - self._start_s)
        self._last_token_s[index] = now_s
        self._metrics.generation_tokens += count

    def record_finish(self, reason: str, prompt_tokens: int, completion_tokens: int, now_s: float) -> None:
        """Record that a choice has ended, with its prompt's and its own number of tokens."""
        metrics = self._metrics
        metrics.finished_sequences[reason] = metrics.finished_sequences.get(reason, 0) + 1
        metrics.e2e_request_latency.observe(now_s - self._start_s)
        metrics.request_prompt_tokens.observe(prompt_tokens)
        metrics.request_generation_tokens.observe(completion_tokens)
        if completion_tokens > 1:
            metrics.time_per_output_token.observe((now_s - self._start_s) / completion_tokens)


class MetricsPage:
    """Renders `/metrics`: the counters of the HTTP process, and the core's last report."""

    def __init__(self, metrics: ServerMetrics, client: EngineClient, info: CoreInfo, model_name: str) -> None:
        """`client`: client of the core, which has the core's last reports."""
        self._metrics = metrics
        self._client = client
        self._info = info
        self._labels = {"model_name": model_name, "engine": "0"}

    def render(self) -> bytes:
        registry: Any = self  # `collect` is all that generate_latest needs of a registry
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        client = self._client
        if client.stats is not None:  # else the core has not reported yet
            yield from self._iter_core_metrics(client.stats)
            if client.stats.transfers is not None:
                yield from self._iter_transfer_metrics(client.stats.transfers)
            if client.publisher_stats is not None:
                yield from self._iter_event_metrics(client.publisher_stats)
            if client.simulation_lag is not None:
                yield from self._iter_lag_metrics(client.simulation_lag)
        yield from self._iter_request_metrics()

    def _iter_core_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the metrics of scheduler and cache, with vLLM's names."""
        gauge = partial(self._make_family, GaugeMetricFamily)
        counter = partial(self._make_family, CounterMetricFamily)
        info = self._info
        yield gauge("num_requests_running", "Sequences in the batch of the last step.", stats.running_requests)
        yield gauge("num_requests_waiting", "Sequences waiting to be scheduled.", stats.waiting_requests)
        yield gauge("kv_cache_usage_perc", "KV cache in use by running sequences; 1 is all.", stats.kv_cache_usage)
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_cache_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hits)
        yield gauge("cpu_cache_usage_perc", "Host memory under the cache in use; 1 is all.", stats.host_cache_usage)
        yield counter("host_cache_hits", "Prompt tokens found in host memory.", stats.host_cache_hits)
        yield counter("host_cache_stored_bytes", "Bytes of blocks copied to host memory.", stats.host_stored_bytes)
        text = "Bytes of blocks copied back from host memory."
        yield counter("host_cache_loaded_bytes", text, stats.host_loaded_bytes)
        text = "Seconds of copies to and from host memory for which steps waited."
        yield counter("host_cache_copy_seconds", text, stats.host_copy_s)
        yield counter("num_preemptions", "Sequences preempted to free memory.", stats.preemptions)
        config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "num_cpu_blocks": str(info.num_host_blocks),
            "cache_dtype": info.dtype,
            "enable_prefix_caching": str(info.prefix_caching),
            "prefill_order": info.prefill_order,
            "max_num_seqs": str(info.max_num_seqs),
            "max_num_batched_tokens": str(info.max_num_batched_tokens),
            "engine": "0",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache and the scheduler.", labels=list(config)
        )
        family.add_metric(list(config.values()), 1.0)
        yield family

    def _iter_event_metrics(self, stats: PublisherStats) -> Iterator[Metric]:
        """Yield the metrics of published cache events."""
        for name, text, value in (
            ("batches", "Batches of cache events published.", stats.published_batch_count),
            (
                "batches_dropped",
                "Batches not sent live because the queue was full. Replay has them.",
                stats.unsent_batch_count,
            ),
            ("replays", "Replays sent to subscribers.", stats.replay_count),
            ("snapshots", "Snapshots of the cache sent to subscribers.", stats.snapshot_count),
            ("broken_invariants", "Batches that broke a guarantee of the stream.", stats.broken_invariant_count),
        ):
            yield CounterMetricFamily(f"engine:kv_event_{name}", text, value=value)

    def _iter_transfer_metrics(self, stats: TransferStats) -> Iterator[Metric]:
        """Yield the metrics of blocks that moved between engines."""
        for name, text, value in (
            ("pulls", "Pulls of blocks from peers that have ended.", stats.pulls),
            ("pull_seconds", "Seconds of pulls from peers, waiting included.", stats.pull_s),
            ("pulled_blocks", "Blocks received from peers and stored.", stats.pulled_blocks),
            ("pulled_bytes", "Bytes of blocks received from peers and stored.", stats.pulled_bytes),
            ("missing_blocks", "Blocks that a peer offered and that were not stored.", stats.missing_blocks),
            ("sent_blocks", "Blocks sent to peers.", stats.sent_blocks),
            ("sent_bytes", "Bytes of blocks sent to peers.", stats.sent_bytes),
            ("refused_connections", "Connections of peers that were closed.", stats.refused_connections),
        ):
            yield CounterMetricFamily(f"engine:kv_transfer_{name}", text, value=value)
        failures = CounterMetricFamily(
            "engine:kv_transfer_failures", "Pulls that ended early, by reason.", labels=["reason"]
        )
        for reason, count in stats.failures.items():
            failures.add_metric([reason], count)
        yield failures

    def _iter_lag_metrics(self, lag: SimulationLag) -> Iterator[Metric]:
        """Yield the metrics of a simulation: how late its steps ended."""
        for name, text, value in (
            ("steps", "Steps that were simulated.", lag.step_count),
            ("step_seconds", "Seconds that the simulated steps should have taken.", lag.step_s),
            ("lag_seconds", "Seconds by which simulated steps ended late, in sum.", lag.lag_s),
        ):
            yield CounterMetricFamily(f"engine:simulated_{name}", text, value=value)
        yield GaugeMetricFamily(
            "engine:simulated_lag_seconds_max",
            "Largest number of seconds by which a simulated step ended late.",
            value=lag.lag_s_max,
        )

    def _iter_request_metrics(self) -> Iterator[Metric]:
        """Yield the metrics of HTTP requests, which this process counts itself."""
        metrics = self._metrics
        counter = partial(self._make_family, CounterMetricFamily)
        yield counter("prompt_tokens", "Prompt tokens of accepted requests.", metrics.prompt_tokens)
        yield counter("generation_tokens", "Tokens generated.", metrics.generation_tokens)
        finished_sequences = CounterMetricFamily(
            "vllm:request_success", "Sequences ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in metrics.finished_sequences.items():
            finished_sequences.add_metric([*self._labels.values(), reason], count)
        yield finished_sequences
        errors = CounterMetricFamily("engine:http_errors", "HTTP requests answered with an error.", labels=["status"])
        for status, count in sorted(metrics.error_responses.items()):
            errors.add_metric([status], count)
        yield errors
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Seconds from the request to its first token.",
             metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Seconds between two tokens of a sequence.", metrics.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean seconds for a token, by sequence.",
             metrics.time_per_output_token),
            ("e2e_request_latency_seconds", "Seconds from the request to its end.", metrics.e2e_request_latency),
            ("request_prompt_tokens", "Prompt tokens of a sequence.", metrics.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a sequence.", metrics.request_generation_tokens),
        ):  # fmt: skip
            yield self._make_family(HistogramMetricFamily, name, text, histogram.buckets(), histogram.sum)

    def _make_family(self, family_class: type[Any], name: str, text: str, *figures: object) -> Any:
        """Return a metric of vLLM's. `figures`: its value, or the buckets and the sum of a histogram."""
        family = family_class(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), *figures)
        return family
