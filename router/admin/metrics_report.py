"""All figures that `/metrics` shows, collected from the parts of the router."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.admin.workers import describe_kv_groups
from router.decide.registry import CoreSnapshot
from router.edge.proxy import Proxy
from router.fleet.feed import IndexFeed
from router.fleet.members import Fleet
from router.index.protocol import IndexStats
from router.metrics import Metrics
from router.prompting.conversation_reader import ConversationReader
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.reader import PromptReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReport:
    """Figures of one moment."""

    metrics: Metrics
    core: CoreSnapshot
    kv_groups: Sequence[Mapping[str, Any]]
    """Groups of workers that move KV, as `GET /workers` shows them."""
    index: IndexStats
    starting_workers: Collection[str]
    """Ids of workers that were never reached."""
    failed_checks: Mapping[str, int]
    """Worker id -> failed probes and health checks."""
    feed_counters: Mapping[str, Mapping[str, int]]
    """Worker id -> counters of its event streams, by their names."""
    feed_fault_count: int
    """Exceptions on the thread that reads events."""
    ignored_event_count: int
    """Event messages of topics that belong to no worker."""
    peer_messages: Mapping[str, int]
    """Outcome -> messages to and from other routers."""
    tokenize_cpu_s: float
    conversations: ConversationReader
    large_bodies: Mapping[str, int]
    """Outcome -> bodies read by worker processes."""
    waiting_bytes: int
    """Bytes of large bodies that wait for a worker process."""


class MetricsCollector:
    """Gathers the figures of the page `/metrics` from the parts of one router that count them."""

    def __init__(
        self,
        proxy: Proxy,
        prompt_reader: PromptReader,
        worker_pool: PromptWorkerPool,
        fleet: Fleet,
        feed: IndexFeed,
        count_peer_messages: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`feed`: reader of the workers' events, which fills the index.

        `count_peer_messages`: returns the messages to and from other routers, by outcome. The default returns an empty
        dict, for a router without others.
        """
        self._proxy = proxy
        self._prompt_reader = prompt_reader
        self._worker_pool = worker_pool
        self._fleet = fleet
        self._feed = feed
        self._count_peer_messages = count_peer_messages

    def collect(self) -> MetricsReport:
        """Return the figures of this moment."""
        core, metrics = self._proxy.core, self._proxy.metrics
        prompt_reader, worker_pool = self._prompt_reader, self._worker_pool
        metrics.flush_ended()
        return MetricsReport(
            metrics=metrics,
            core=core.snapshot(self._proxy.now()),
            kv_groups=describe_kv_groups(core.workers.values()),
            index=core.index.stats(),
            starting_workers=self._fleet.list_starting_reasons(),
            failed_checks=self._fleet.failed_checks,
            feed_counters=self._feed.sum_counters(),
            feed_fault_count=self._feed.events.fault_count,
            ignored_event_count=self._feed.events.ignored_message_count,
            peer_messages=self._count_peer_messages(),
            tokenize_cpu_s=prompt_reader.cpu_s + worker_pool.cpu_s,
            conversations=prompt_reader.conversations,
            large_bodies=worker_pool.counts,
            waiting_bytes=worker_pool.waiting_bytes,
        )
