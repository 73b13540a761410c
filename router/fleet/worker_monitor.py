"""One worker of a router: probed until it answers, then checked for as long as it is a worker.

A monitor turns what the prober finds into calls of the core (add, up, down) and of the event feed (follow). Failures of
requests go to the core directly, and only hasten the next check here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from events.types import DecodeError
from options.background_tasks import BackgroundTasks
from router.decide.core import RouterCore
from router.decide.messages import FailureKind, Instruction
from router.decide.workers import WorkerSpec, find_base_conflict
from router.fleet.config import FleetConfig
from router.fleet.index_feed import IndexFeed, PeerSnapshot
from router.fleet.peer_snapshots import PeerClient
from router.fleet.prober import EVENTS_FLAG, Prober, WorkerFacts, suggest_remedy
from router.fleet.retries import double_pause, run_forever, run_with_timeout
from router.fleet.worker_checkpoints import WorkerCheckpoints
from router.fleet.worker_responses import are_ranks_asleep
from router.fleet.worker_settings import WorkerSettings
from router.http_client import FetchError

log = logging.getLogger("router")

TRAFFIC_ONLY_RECOVERY = frozenset(
    f"{kind.value} failure"
    for kind in (FailureKind.TIMEOUT, FailureKind.STALLED, FailureKind.SERVER_ERROR, FailureKind.STREAM)
)
"""Reasons for which a worker is broken although its `/health` may answer; only a successful request ends them."""
REASON_CHARS_MAX = 300
"""Longest text of a worker that is written to the log and to `/workers`."""
JOIN_SNAPSHOTS_S_MAX = 10.0
"""Longest wait for other routers' snapshots before a new worker joins; after that, missing ones are asked for again."""
BLOCKS_MAX_DEFAULT = 1 << 22
"""Blocks that a rank may announce if its worker does not say how much its cache holds."""
BLOCKS_MIN, BLOCKS_FACTOR, BLOCK_TOKENS = 1 << 16, 16, 16
"""Terms of `compute_max_blocks`: fixed part, factor of the blocks in the cache, and largest size of a block."""


@dataclass(slots=True)
class FleetContext:
    """Parts of the router that the monitors of all workers use, and data about all workers."""

    core: RouterCore
    """Routes requests to the workers that monitors register."""
    prober: Prober
    """Asks workers over HTTP."""
    feed: IndexFeed
    """Reads the workers' cache events."""
    checkpoints: WorkerCheckpoints
    peers: PeerClient
    """Other routers, which may have copies of a worker's index."""
    perform: Callable[[Iterable[Instruction]], None]
    """Executes instructions of the core."""
    config: FleetConfig
    now: Callable[[], float]
    """Monotonic clock."""
    monitors: dict[str, WorkerMonitor] = field(default_factory=dict)
    """Monitor of each worker, by worker id."""
    failed_checks: Counter[str] = field(default_factory=Counter)
    """Failed checks and probes by worker id, for `/metrics`."""
    background: BackgroundTasks = field(default_factory=BackgroundTasks)


@dataclass(slots=True)
class _PollTimes:
    """Times at which a worker was asked, or may be asked again, and pauses that double while there is no success."""

    probed_s: float = -math.inf
    """Time when the worker was last asked for all its facts."""
    load_poll_due_s: float = 0.0
    """Time from which the worker may be asked for its load."""
    peer_poll_due_s: float = 0.0
    """Time from which other routers may be asked for cached blocks of the worker that this router's index lacks."""
    peer_pause_s: float = 0.0
    """Pause between two such requests to other routers."""
    starting_pause_s: float = 0.0
    """Pause between two probes until the worker is reached."""


@dataclass(slots=True)
class _KubernetesReadiness:
    """Lists of Kubernetes that say that a worker is not ready, and whether this drained the worker."""

    unready_lists: set[str] = field(default_factory=set)
    """Names of the Services and pools."""
    is_drain_cause: bool = False
    """Whether the worker was drained for this, and no operator drained it or took it back since."""


class WorkerMonitor:
    """A worker that this router was told of, and the task that checks it.

    A *probe* asks the worker for all its facts, such as its models, until it is reached. A *check* only asks whether it
    is healthy.
    """

    def __init__(self, settings: WorkerSettings, origin: str, fleet: FleetContext) -> None:
        """`settings`: as a `--worker` option has them. `origin`: the list that names the worker."""
        self.settings = settings
        self.worker_id = settings.worker_id
        self.origins = {origin}
        """Lists that name the worker: `operator`, `file`, a host name or an object of Kubernetes."""
        self.configured_s = fleet.now()
        """Time when a list first named the worker with these settings."""
        self._fleet = fleet
        self.readiness = _KubernetesReadiness()

        # The task that probes and checks the worker
        self.task: asyncio.Task[None] | None = None
        self.wake = asyncio.Event()
        """Set to have the worker checked now."""
        self.poll_times = _PollTimes()
        self.problem = ""
        """Why the last check or probe failed; empty if it did not."""
        self.consecutive_failures = 0
        """Checks that failed in a row, or probes if the worker was never reached."""

        # Facts about the worker
        self.facts: WorkerFacts | None = None
        """Result of the last successful probe; None: the worker was never reached."""
        self.has_too_many_streams = False
        """Whether the worker has more event streams than this router can follow, so that none is followed."""
        self.engine_restarts = 0
        """Restarts of the worker's engine that its event streams have shown."""
        self.cache_clears_at_sleep = 0
        """Number of cleared caches that the worker had published when its engine last fell asleep or woke."""

    # Life of the monitor ------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Probe and check the worker from now on."""
        self.task = self._fleet.background.start(run_forever(self._follow_worker, self._record_fault))

    def cancel(self) -> None:
        """End the task, and drop the reference to it: task and monitor would keep each other alive."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    @property
    def starting_reason(self) -> str:
        """Why a worker that was never reached is not available."""
        if not self.problem:
            return "not tried yet"
        pause_s = self.poll_times.starting_pause_s
        return f"{self.problem} (tried {self.consecutive_failures} times, again every {pause_s:g} s)"

    def is_watched(self) -> bool:
        """Return whether the worker was neither removed nor given other settings, by which another monitor has it."""
        return self._fleet.monitors.get(self.worker_id) is self

    @property
    def _is_down(self) -> bool:
        """Whether the worker was reached and is down."""
        worker = self._fleet.core.workers.get(self.worker_id)
        return worker is not None and worker.is_down

    def record_readiness(self, origin: str, *, is_ready: bool) -> None:
        """Record whether a Kubernetes Service or pool (`origin`) reports the worker as ready, and drain or resume it.

        A worker that is drained gets no new requests. It is drained when the first of its Services or pools reports it
        as not ready, and resumed when all report it as ready again. If an operator drains or resumes the worker
        meanwhile, it stays so.
        """
        core, readiness = self._fleet.core, self.readiness
        was_ready = not readiness.unready_lists
        if is_ready:
            readiness.unready_lists.discard(origin)
        else:
            readiness.unready_lists.add(origin)
        is_ready_everywhere = not readiness.unready_lists
        must_drain = was_ready and not is_ready_everywhere and not core.workers[self.worker_id].is_drained
        must_resume = is_ready_everywhere and readiness.is_drain_cause
        if must_drain or must_resume:
            readiness.is_drain_cause = must_drain
            reason = f"not ready in Kubernetes ({origin})"
            now = self._fleet.now()
            self._fleet.perform(core.set_draining(self.worker_id, now, is_draining=must_drain, reason=reason))

    # Checks ------------------------------------------------------------------------------------------------------
    async def _follow_worker(self) -> None:
        """Probe the worker until it answers, then check it again and again."""
        while self.facts is None and not await self.probe_and_register():
            if await self._pause(self.poll_times.starting_pause_s):
                self.poll_times.starting_pause_s = 0.0
        while True:
            await self._check_worker()

    async def _check_worker(self) -> None:
        """Pause, then check the worker's health, and ask it for what may have changed: models, sizes and load."""
        fleet, was_down = self._fleet, self._is_down
        pause_s = fleet.config.starting_s if was_down else fleet.config.health_s
        is_suspected = await self._pause(pause_s)  # a failed request ends the pause early
        started_s = fleet.now()
        problem = await fleet.prober.check_health(self.settings)
        if problem is not None:
            self._record_failed_check(problem, started_s, is_suspected=is_suspected)
            return
        self.consecutive_failures = 0
        if not was_down:
            self.problem = ""
        if was_down or is_suspected or fleet.now() - self.poll_times.probed_s >= fleet.config.sources_s:
            await self.probe_and_register()
        else:
            await self.poll_models()
        fleet.background.start(self.fetch_missing_snapshots())
        if fleet.now() >= self.poll_times.load_poll_due_s:
            self.poll_times.load_poll_due_s = math.inf  # not again before this poll has ended
            fleet.background.start(self._poll_load())

    async def _pause(self, seconds: float) -> bool:
        """Sleep, and return True at once if the worker is to be checked now."""
        await run_with_timeout(seconds, self.wake.wait())
        is_woken = self.wake.is_set()
        if is_woken:
            await asyncio.sleep(0.05)  # a burst of failures asks once
            self.wake.clear()
        return is_woken

    def _record_problem(self, problem: str) -> None:
        """Count a failed check or probe, and keep the reason for `/workers`."""
        self.problem = problem[:REASON_CHARS_MAX]
        if self.is_watched():
            self._fleet.failed_checks[self.worker_id] += 1

    def _record_fault(self, error: Exception) -> None:
        """Record a fault of the router that ended the task of the worker, and log it if it is a new one."""
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        if reason != self.problem:
            log.error("worker %s cannot be followed: %s", self.worker_id, reason, exc_info=error)
        self._record_problem(reason)

    def _record_failed_check(self, problem: str, started_s: float, *, is_suspected: bool) -> None:
        """Count a failed check; mark the worker as down after one if a request failed too, else after several."""
        fleet = self._fleet
        self._record_problem(problem)
        self.consecutive_failures += 1
        if is_suspected or self.consecutive_failures >= fleet.config.failures_to_down:
            self._mark_down(self.problem, started_s)

    def _mark_down(self, reason: str, started_s: float) -> None:
        """Mark the worker as down. No request tries it before the next check, which may last as long as this one."""
        fleet = self._fleet
        now = fleet.now()
        pause_s = fleet.config.starting_s + 2 * (now - started_s)
        fleet.perform(fleet.core.mark_worker_down(self.worker_id, now, reason, pause_s))

    async def poll_models(self) -> None:
        """Ask the worker for its models, and probe it anew if they changed: LoRA adapters, or another process."""
        try:
            model_list = await self._fleet.prober.fetch_models(self.settings)
        except (FetchError, DecodeError) as error:
            self._record_problem(str(error))
            return
        facts = self.facts
        if facts is not None and (set(model_list.models), model_list.roots) != (set(facts.spec.models), facts.roots):
            log.info("worker %s serves other models than before", self.worker_id)
            await self.probe_and_register()

    async def _poll_load(self) -> None:
        """Read the load of the worker's ranks from its `/metrics`, and set the time of the next reading."""
        fleet = self._fleet
        in_flight = fleet.core.count_in_flight_by_rank(self.worker_id)
        try:
            loads = await fleet.prober.fetch_loads(self.settings, len(in_flight))
            fleet.core.record_engine_load(self.worker_id, loads, in_flight, fleet.now())
            is_asleep = are_ranks_asleep(loads)
            if is_asleep is not None:
                self._set_asleep(is_asleep=is_asleep)
        finally:
            self.poll_times.load_poll_due_s = fleet.now() + fleet.config.loads_s

    def _set_asleep(self, *, is_asleep: bool) -> None:
        """Record whether the worker's engine is in sleep mode, and clear its blocks in the index.

        A sleeping engine has lost its cache, and publishes that in its first step after it wakes. If that was read
        before the engine was found awake, the blocks in the index are new ones and stay.
        """
        fleet = self._fleet
        worker = fleet.core.workers.get(self.worker_id)
        if worker is not None and worker.is_asleep is not is_asleep:
            clear_count = fleet.feed.count_clears(self.worker_id)
            if is_asleep or clear_count == self.cache_clears_at_sleep:
                fleet.feed.clear_worker(self.worker_id)
            self.cache_clears_at_sleep = clear_count
            fleet.perform(fleet.core.set_asleep(self.worker_id, fleet.now(), is_asleep=is_asleep))

    async def fetch_missing_snapshots(self) -> None:
        """Copy the cached blocks of the worker that this router's index lacks from other routers, if it is time to.

        Blocks are missing if events were lost. The pause between two requests doubles while some are.
        """
        fleet, times = self._fleet, self.poll_times
        if self.facts is None or fleet.now() < times.peer_poll_due_s:
            return
        first_batch_by_rank = fleet.feed.find_incomplete_ranks(self.worker_id)
        if not first_batch_by_rank:
            times.peer_pause_s = 0.0
            return
        times.peer_poll_due_s = math.inf  # not again before the routers have answered
        try:
            sources = self.facts.sources
            snapshots = await fleet.peers.fetch_snapshots(self.worker_id, sources, only_before=first_batch_by_rank)
            for rank, snapshot in snapshots.items():
                fleet.feed.resume(self.worker_id, rank, snapshot)
        finally:
            times.peer_pause_s = double_pause(times.peer_pause_s, fleet.config.peers_s, fleet.config.peers_s_max)
            times.peer_poll_due_s = fleet.now() + times.peer_pause_s

    # Probes ------------------------------------------------------------------------------------------------------
    async def probe_and_register(self) -> bool:
        """Ask the worker for all its facts, and register it for routing if it was down or its facts have changed.

        Return False if the worker does not answer yet, or was removed meanwhile.
        """
        fleet, earlier_facts, was_down = self._fleet, self.facts, self._is_down
        self.poll_times.probed_s = fleet.now()
        try:
            facts = await fleet.prober.probe(self.settings, earlier_facts, self.engine_restarts)
        except (FetchError, DecodeError) as error:
            was_up = earlier_facts is not None and not was_down
            self._record_failed_probe(str(error)[:REASON_CHARS_MAX], was_up=was_up)
            return False
        self.problem = ""
        self.consecutive_failures = 0

        if not self.is_watched():  # else the tokenizers would remember a worker that is gone
            return False
        is_restarted = was_down or facts.is_new_engine or earlier_facts is None
        await fleet.checkpoints.update(
            self.settings, facts, is_restarted=is_restarted, has_changed=facts != earlier_facts
        )
        snapshots = {}
        if self.worker_id not in fleet.core.workers:
            fetching = fleet.peers.fetch_snapshots(self.worker_id, facts.sources)
            snapshots = await run_with_timeout(JOIN_SNAPSHOTS_S_MAX, fetching) or {}
        if not self.is_watched():
            return False
        self._use_facts(facts, snapshots, was_down=was_down)
        return True

    def _record_failed_probe(self, reason: str, *, was_up: bool) -> None:
        """Record why a probe failed. A worker that was up stays up, and one that was down gets no request to try it.

        If the worker was never reached, the pause before the next probe grows. A reason of a new kind is logged.
        """
        if was_up:
            self._record_problem(reason)
            return
        if self.facts is not None:
            self._mark_down(reason, self.poll_times.probed_s)
        is_new_kind = reason.partition(":")[0] != self.problem.partition(":")[0]
        if is_new_kind:
            remedy = suggest_remedy(self.settings, reason)
            log.warning("worker %s does not answer yet: %s: %s", self.worker_id, reason, remedy)
            self.poll_times.starting_pause_s = 0.0  # the worker makes progress, so it may answer soon
        self._record_problem(reason)
        self.consecutive_failures += 1
        config, times = self._fleet.config, self.poll_times
        times.starting_pause_s = double_pause(times.starting_pause_s, config.starting_s, config.starting_s_max)

    def _use_facts(self, facts: WorkerFacts, snapshots: Mapping[int, PeerSnapshot], *, was_down: bool) -> None:
        """Keep the facts of a probe, and register the worker if it was down or these are others than before."""
        free_stream_count = self._fleet.feed.count_free_streams(self.worker_id)
        has_too_many_streams = len(facts.sources) > free_stream_count
        if has_too_many_streams and not self.has_too_many_streams:
            log.warning(
                "worker %s has %d event streams, and there is room for %d: its cache is estimated",
                self.worker_id, len(facts.sources), free_stream_count,
            )  # fmt: skip
        is_changed = facts != self.facts or has_too_many_streams != self.has_too_many_streams
        self.facts, self.has_too_many_streams = facts, has_too_many_streams
        if was_down or is_changed:
            self._register(facts.drop_event_sources() if has_too_many_streams else facts, snapshots)
        if facts.is_asleep is not None:
            self._set_asleep(is_asleep=facts.is_asleep)

    def _register(self, facts: WorkerFacts, snapshots: Mapping[int, PeerSnapshot]) -> None:
        """Tell the core and the feed about the worker. `snapshots`: its cached blocks as others know them, by rank."""
        fleet, spec = self._fleet, facts.spec
        is_new = self.worker_id not in fleet.core.workers
        worker = fleet.core.add_worker(spec, fleet.now(), is_up=True)
        blocks_max = compute_max_blocks(spec)
        fleet.feed.follow_worker(self.worker_id, facts.sources, worker.holders, snapshots, blocks_max=blocks_max)
        if worker.health_reason not in TRAFFIC_ONLY_RECOVERY:
            fleet.perform(fleet.core.mark_worker_up(self.worker_id, fleet.now()))
        if not worker.is_down:
            self._log_joined(facts, is_new=is_new)

    def _log_joined(self, facts: WorkerFacts, *, is_new: bool) -> None:
        """Log what the worker serves, and warn if a new one publishes no events without being told so."""
        events = f"events from {facts.sources[0].endpoint}" if facts.sources else "no events"
        model_names = ", ".join(model.name for model in facts.spec.models)
        log.info("worker %s serves %s, %s", self.worker_id, model_names, events)
        if conflict := find_base_conflict(facts.spec, self._fleet.core.workers.values()):
            log.warning("worker %s: %s", self.worker_id, conflict)
        is_known_to_lack_events = self.settings.no_events or self.has_too_many_streams
        if is_new and not facts.sources and not is_known_to_lack_events:
            log.warning(
                "worker %s publishes no events, so its cache is estimated from the requests sent to it: start it with "
                "%s, name its events with --worker url=%s,events=tcp://HOST:PORT, or say events=none",
                self.worker_id, EVENTS_FLAG, self.settings.url,
            )  # fmt: skip


def compute_max_blocks(spec: WorkerSpec) -> int:
    """Return how many blocks a rank of this worker may announce: many times those that fit into its caches."""
    if spec.cache_tokens is None:
        return BLOCKS_MAX_DEFAULT
    tokens = spec.cache_tokens + (spec.host_tokens or 0)
    per_rank = tokens // (min(spec.block_size or BLOCK_TOKENS, BLOCK_TOKENS) * spec.ranks)
    return BLOCKS_MIN + BLOCKS_FACTOR * per_rank
