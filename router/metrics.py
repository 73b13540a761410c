"""Counters that requests update, as plain numbers: an update costs a dict access and an addition.

router/admin/metrics_page.py writes the counters in the format of Prometheus.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Literal

from options.metrics import Histogram

log = logging.getLogger("router")

CRASH_LOG_S = 10.0
"""Least time between two log lines about one kind of crash at one place. So clients cannot fill the disk with them."""
TransferOutcome = Literal[
    "started", "unreachable", "lost", "timeout", "error", "refused", "bad_answer", "late", "local"
]  # fmt: skip
"""Outcome of a transfer. "refused": the request is wrong, or cannot be split. "late": the source may have freed the KV.
"local": the router's machine had no socket or memory for a connection to the source.

The core counts pulls that never arrived.
"""
LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OVERHEAD_BOUNDS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)


class Histograms:
    """One histogram for each combination of label values that was observed."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.by_labels: dict[tuple[str, ...], Histogram] = {}

    def get(self, labels: tuple[str, ...]) -> Histogram:
        histogram = self.by_labels.get(labels)
        if histogram is None:
            histogram = self.by_labels[labels] = Histogram(self._bounds)
        return histogram


class EndedRequests:
    """Number and times of requests that ended in the same way."""

    def __init__(self, request_s: Histogram, ttft_s: Histogram) -> None:
        self.request_s = request_s
        self.ttft_s = ttft_s
        self.count = 0


class TransferMetrics:
    """Transfers of KV between workers."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, TransferOutcome]] = Counter()
        """Number of transfers by kind and outcome."""
        self.planned_tokens: Counter[str] = Counter()
        """Kind -> tokens of which KV was to move."""
        self.planned_bytes: Counter[str] = Counter()
        """Kind -> bytes of these tokens, if the source tells how many a token has."""
        self.prefill_s = Histograms(LATENCY_BOUNDS_S)
        """Seconds of prefills for answers of other workers, by (worker,)."""

    def group_by_kind(self) -> dict[str, dict[str, int]]:
        """Return kind -> outcome -> number of transfers."""
        counts: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in self.outcomes.items():
            counts.setdefault(kind, {})[outcome] = count
        return counts


@dataclass(slots=True, eq=False)
class Metrics:
    """The numbers of this router."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(route, model, outcome) of every request that ended."""
    decisions: Counter[str] = field(default_factory=Counter)
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken_streams: Counter[str] = field(default_factory=Counter)
    """Answers that broke off in the middle: continued by another worker, completed here, or cut."""
    transfers: TransferMetrics = field(default_factory=TransferMetrics)
    prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    reported_prompt_tokens: int = 0
    reported_cached_tokens: int = 0
    cache_miss_requests: Counter[str] = field(default_factory=Counter)
    """reason (router/miss_reasons/explanation.py) -> requests that were compared."""
    cache_miss_tokens: Counter[str] = field(default_factory=Counter)
    """reason -> prompt tokens that had to be computed."""
    reused_tokens: Counter[str] = field(default_factory=Counter)
    """prompt, best, chosen, reported -> tokens of requests with a usage report."""
    http_errors: Counter[str] = field(default_factory=Counter)
    crashes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(boundary, type of the exception) -> unexpected exceptions that were caught there."""
    request_buffer_bytes: int = 0
    """Bytes of requests and of unread answers (router/http/budget.py)."""
    refused_bytes: Counter[str] = field(default_factory=Counter)
    refused_by_key: Counter[str] = field(default_factory=Counter)
    """bound -> requests that would have exceeded it."""
    key_requests: Counter[str] = field(default_factory=Counter)
    """API key's name -> requests that workers answered."""
    key_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(API key's name, kind) -> tokens of answered requests; the kinds are prompt, cached, computed, output."""
    request_s: Histograms = field(default_factory=lambda: Histograms(LATENCY_BOUNDS_S))
    ttft_s: Histograms = field(default_factory=lambda: Histograms(LATENCY_BOUNDS_S))
    """(worker, model, is it a stream?) of requests that were answered; the worker is "" where none was chosen."""
    routing_s: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BOUNDS_S))
    tokenize_s: Histogram = field(default_factory=lambda: Histogram(OVERHEAD_BOUNDS_S))
    _crash_logged_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _ended: dict[tuple[str, str, str, str, str], EndedRequests] = field(default_factory=dict)
    """(route, model, outcome, worker, is it a stream?) -> requests that `requests` and `decisions` do not count yet."""

    def get_ended(self, path: str, model: str, outcome: str, worker: str, stream: str) -> EndedRequests:
        """Return the counts of requests that ended this way; the worker is "" if none was chosen."""
        key = path, model, outcome, worker, stream
        ended = self._ended.get(key)
        if ended is None:
            labels = worker, model, stream
            ended = self._ended[key] = EndedRequests(self.request_s.get(labels), self.ttft_s.get(labels))
        return ended

    @property
    def client_disconnects(self) -> int:
        """Requests that their client left early."""
        self.flush_ended()
        return sum(count for (_, _, outcome), count in self.requests.items() if outcome == "client_gone")

    def flush_ended(self) -> None:
        """Bring `requests` and `decisions` up to date."""
        for (path, model, outcome, worker, _), ends in self._ended.items():
            self.requests[path, model, outcome] += ends.count
            if worker:
                self.decisions[worker] += ends.count
            ends.count = 0

    def retain_workers(self, worker_ids: Container[str]) -> None:
        """Drop the counts of workers that are known no more: addresses come and go for as long as the router runs."""
        self.flush_ended()
        for ended_key in [key for key in self._ended if key[3] and key[3] not in worker_ids]:
            del self._ended[ended_key]
        for worker_id in [worker_id for worker_id in self.decisions if worker_id not in worker_ids]:
            del self.decisions[worker_id]
        for key in [key for key in self.failures if key[0] and key[0] not in worker_ids]:
            del self.failures[key]
        for histograms in (self.request_s, self.ttft_s, self.transfers.prefill_s):
            for labels in [labels for labels in histograms.by_labels if labels[0] and labels[0] not in worker_ids]:
                del histograms.by_labels[labels]

    def record_crash(self, boundary: str, error: Exception) -> None:
        """Something raised at a boundary; what it was about has been ended, the rest goes on."""
        key = boundary, type(error).__name__
        self.crashes[key] += 1
        now = time.monotonic()
        if now - self._crash_logged_s.get(key, -CRASH_LOG_S) >= CRASH_LOG_S:
            self._crash_logged_s[key] = now
            log.error("%s: %s (%d so far)", boundary, error, self.crashes[key], exc_info=error)

    def record_attempt_failure(self, worker: str, kind: str) -> None:
        self.failures[worker, kind] += 1
