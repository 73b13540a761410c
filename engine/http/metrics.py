"""Counters of the HTTP process, and the Prometheus page with vLLM's metric names.

Every token is counted, so counting is cheap: a histogram is a bisect and an addition, and becomes a Prometheus object
only when the page is requested. Metrics of the core come from its last `EngineStats`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engine.core import EngineStats, SimulationLag
from engine.core_messages import CoreInfo
from engine.process.client import EngineClient
from engine.transfer.interface import TransferStats
from events.publisher import PublisherStats
from options.metrics import Family, Histogram, Row, build_families, make_total

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


class ServerMetrics:
    """Counters and histograms of the requests that one HTTP process answers, for `/metrics`. Times are in seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished_sequences: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.error_responses: Counter[str] = Counter()
        """HTTP status, such as "404" -> number of requests answered with it."""
        self.time_to_first_token = Histogram(_TTFT_BUCKETS)
        self.inter_token_latency = Histogram(_ITL_BUCKETS)
        self.time_per_output_token = Histogram(_ITL_BUCKETS)
        self.request_queue_time = Histogram(_E2E_BUCKETS)
        self.request_prefill_time = Histogram(_E2E_BUCKETS)
        self.request_decode_time = Histogram(_E2E_BUCKETS)
        self.e2e_request_latency = Histogram(_E2E_BUCKETS)
        self.request_prompt_tokens = Histogram(_TOKEN_BUCKETS)
        self.request_generation_tokens = Histogram(_TOKEN_BUCKETS)


class RequestClock:
    """Records the times of one request in the metrics: in the queue, to the first token, between tokens, and in all.

    A request may ask for several answers, its choices.
    """

    __slots__ = ("_first_token_s_by_choice", "_last_token_s_by_choice", "_metrics", "_start_s", "_token_counts")

    def __init__(self, metrics: ServerMetrics, start_s: float) -> None:
        self._metrics = metrics
        self._start_s = start_s
        self._first_token_s_by_choice: dict[int, float] = {}
        self._last_token_s_by_choice: dict[int, float] = {}
        self._token_counts: Counter[int] = Counter()
        """Tokens that have arrived, by choice. Those with which another engine began an answer do not count."""

    def record_queue_time(self, queue_s: float, now_s: float) -> None:
        """Record that the first output of a choice has arrived, which waited `queue_s` seconds before its prefill."""
        self._metrics.request_queue_time.observe(queue_s)
        self._metrics.request_prefill_time.observe(max(0.0, now_s - self._start_s - queue_s))

    def record_tokens(self, choice_index: int, count: int, now_s: float) -> None:
        """Record that `count` tokens of a choice have arrived."""
        if not count:
            return
        last_token_s = self._last_token_s_by_choice.get(choice_index)
        if last_token_s is not None:
            self._metrics.inter_token_latency.observe((now_s - last_token_s) / count)
        else:
            if not self._first_token_s_by_choice:
                self._metrics.time_to_first_token.observe(now_s - self._start_s)
            self._first_token_s_by_choice[choice_index] = now_s
        self._last_token_s_by_choice[choice_index] = now_s
        self._metrics.generation_tokens += count
        self._token_counts[choice_index] += count

    def record_finish(self, choice_index: int, reason: str, prompt_tokens: int, now_s: float) -> None:
        """Record that a choice has ended, for a finish reason such as "stop"."""
        metrics, completion_tokens = self._metrics, self._token_counts[choice_index]
        metrics.finished_sequences[reason] = metrics.finished_sequences.get(reason, 0) + 1
        metrics.e2e_request_latency.observe(now_s - self._start_s)
        metrics.request_prompt_tokens.observe(prompt_tokens)
        metrics.request_generation_tokens.observe(completion_tokens)
        if completion_tokens > 1:
            decode_s = now_s - self._first_token_s_by_choice[choice_index]
            metrics.request_decode_time.observe(decode_s)
            metrics.time_per_output_token.observe(decode_s / (completion_tokens - 1))


def collect_families(metrics: ServerMetrics, client: EngineClient, info: CoreInfo, model_name: str) -> Iterator[Family]:
    """Yield all Prometheus metrics of `/metrics`: those of the HTTP process, and those that the engine core reports.

    Metrics that vLLM has, too, have its names and its labels.
    """
    labels = {"model_name": model_name, "engine": "0"}
    stats = client.stats
    if stats is not None:  # else the core has not reported yet
        yield from build_families(GaugeMetricFamily, _list_core_gauges(stats), "vllm:", labels)
        yield from build_families(GaugeMetricFamily, [_make_config_row(info)], "vllm:")
        yield from build_families(CounterMetricFamily, _list_core_counters(stats), "vllm:", labels)
        if stats.transfers is not None:
            yield from build_families(CounterMetricFamily, _list_transfer_counters(stats.transfers), "engine:")
        if client.publisher_stats is not None:
            yield from build_families(CounterMetricFamily, _list_event_counters(client.publisher_stats), "engine:")
        if client.simulation_lag is not None:
            yield from _iter_lag_families(client.simulation_lag)
    yield from build_families(CounterMetricFamily, _list_request_counters(metrics), "vllm:", labels)
    errors = Row("http_errors", "HTTP requests answered with an error.", metrics.error_responses, ("status",))
    yield from build_families(CounterMetricFamily, [errors], "engine:")
    yield from build_families(HistogramMetricFamily, _list_request_histograms(metrics), "vllm:", labels)


# fmt: off
def _list_core_gauges(stats: EngineStats) -> list[Row]:
    return [
        make_total("num_requests_running", "Sequences that run, and hold blocks of the cache.", stats.running_requests),
        make_total("num_requests_waiting", "Sequences waiting to be scheduled.", stats.waiting_requests),
        make_total("kv_cache_usage_perc", "KV cache in use by running sequences; 1 is all.", stats.kv_cache_usage),
        make_total("cpu_cache_usage_perc", "Host memory under the cache in use; 1 is all.",
                   stats.host_memory.used_share),
    ]


def _list_core_counters(stats: EngineStats) -> list[Row]:
    return [
        make_total("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.totals.prompt_tokens),
        make_total("prefix_cache_hits", "Prompt tokens found in the cache.", stats.totals.prefix_hit_tokens),
        make_total("host_cache_hits", "Prompt tokens found in host memory.", stats.totals.host_hit_tokens),
        make_total("host_cache_stored_bytes", "Bytes of blocks copied to host memory.", stats.host_memory.stored_bytes),
        make_total("host_cache_loaded_bytes", "Bytes of blocks copied back from host memory.",
                   stats.host_memory.loaded_bytes),
        make_total("host_cache_copy_seconds", "Seconds of copies to and from host memory for which steps waited.",
                   stats.host_copy_s),
        make_total("num_preemptions", "Sequences preempted to free memory.", stats.totals.preemptions),
    ]
# fmt: on


def _make_config_row(info: CoreInfo) -> Row:
    """Return vLLM's metric `cache_config_info`: its labels tell routers how this engine is configured."""
    value_by_label = {
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
    help_text = "Configuration of the KV cache and the scheduler."
    return Row("cache_config_info", help_text, {tuple(value_by_label.values()): 1.0}, tuple(value_by_label))


# fmt: off
def _list_event_counters(stats: PublisherStats) -> list[Row]:
    """Return the counters of published cache events."""
    return [
        make_total("kv_event_batches", "Batches of cache events published.", stats.published_batch_count),
        make_total("kv_event_batches_dropped", "Batches not sent live because the queue was full. Replay has them.",
                   stats.unsent_batch_count),
        make_total("kv_event_replays", "Replays sent to subscribers.", stats.replay_count),
        make_total("kv_event_snapshots", "Snapshots of the cache sent to subscribers.", stats.snapshot_count),
        make_total("kv_event_broken_invariants", "Batches that broke a guarantee of the stream.",
                   stats.broken_invariant_count),
    ]


def _list_transfer_counters(stats: TransferStats) -> list[Row]:
    """Return the counters of KV cache blocks that were pulled from other engines, or sent to them."""
    return [
        make_total("kv_transfer_pulls", "Pulls of blocks from peers that have ended.", stats.pulls),
        make_total("kv_transfer_pull_seconds", "Seconds of pulls from peers, waiting included.", stats.pull_s),
        make_total("kv_transfer_pulled_blocks", "Blocks received from peers and stored.", stats.pulled_blocks),
        make_total("kv_transfer_pulled_bytes", "Bytes of blocks received from peers and stored.", stats.pulled_bytes),
        make_total("kv_transfer_missing_blocks", "Blocks that a peer offered and that were not stored.",
                   stats.missing_blocks),
        make_total("kv_transfer_sent_blocks", "Blocks sent to peers.", stats.sent_blocks),
        make_total("kv_transfer_sent_bytes", "Bytes of blocks sent to peers.", stats.sent_bytes),
        make_total("kv_transfer_refused_connections", "Connections of peers that were closed.",
                   stats.refused_connections),
        Row("kv_transfer_failures", "Pulls that ended early, by reason.", stats.failures, ("reason",)),
    ]


def _iter_lag_families(lag: SimulationLag) -> Iterator[Family]:
    """Yield the metrics of a simulation: how late its steps ended."""
    counters = [
        make_total("steps", "Steps that were simulated.", lag.step_count),
        make_total("step_seconds", "Seconds that the simulated steps should have taken.", lag.step_s),
        make_total("lag_seconds", "Seconds by which simulated steps ended late, in sum.", lag.lag_s),
    ]
    longest = make_total("lag_seconds_max", "Largest number of seconds by which a simulated step ended late.",
                         lag.lag_s_max)
    yield from build_families(CounterMetricFamily, counters, "engine:simulated_")
    yield from build_families(GaugeMetricFamily, [longest], "engine:simulated_")


def _list_request_counters(metrics: ServerMetrics) -> list[Row]:
    return [
        make_total("prompt_tokens", "Prompt tokens of accepted requests.", metrics.prompt_tokens),
        make_total("generation_tokens", "Tokens generated.", metrics.generation_tokens),
        Row("request_success", "Sequences ended, by reason.", metrics.finished_sequences, ("finished_reason",)),
    ]


def _list_request_histograms(metrics: ServerMetrics) -> list[Row]:
    return [
        make_total("time_to_first_token_seconds", "Seconds from the request to its first token.",
                   metrics.time_to_first_token),
        make_total("inter_token_latency_seconds", "Seconds between two tokens of a sequence.",
                   metrics.inter_token_latency),
        make_total("request_time_per_output_token_seconds", "Mean seconds between the tokens of a sequence.",
                   metrics.time_per_output_token),
        make_total("request_queue_time_seconds", "Seconds that a sequence waited before its first step.",
                   metrics.request_queue_time),
        make_total("request_prefill_time_seconds", "Seconds from the first step of a sequence to its first token.",
                   metrics.request_prefill_time),
        make_total("request_decode_time_seconds", "Seconds from the first token of a sequence to its last.",
                   metrics.request_decode_time),
        make_total("e2e_request_latency_seconds", "Seconds from the request to its end.", metrics.e2e_request_latency),
        make_total("request_prompt_tokens", "Prompt tokens of a sequence.", metrics.request_prompt_tokens),
        make_total("request_generation_tokens", "Generated tokens of a sequence.", metrics.request_generation_tokens),
    ]
# fmt: on
