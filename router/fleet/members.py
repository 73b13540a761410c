"""The workers of a router: probed until they answer, checked while they serve, added and removed at run time.

There is one task for each worker. It turns what the prober finds into calls of the core (add, up, down) and of the
event feed (follow, forget). Failures of requests go to the core directly, and only hasten the next check here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from events.types import DecodeError
from options import ConfigError
from prompts.tokenizer import Checkpoint, find_checkpoint
from router.decide.core import RouterCore
from router.decide.messages import FailureKind, Instruction
from router.decide.workers import Worker, WorkerSpec, find_base_conflict
from router.fleet.config import FleetConfig
from router.fleet.discovery import EVENTS_FLAG, Prober, WorkerFacts, suggest_remedy
from router.fleet.fact_queue import CacheCleared, CapacityObserved, EngineRestarted, StreamLost, WorkerFact
from router.fleet.feed import IndexFeed, PeerSnapshot
from router.fleet.kubernetes import KubernetesSource, watch_kubernetes
from router.fleet.peer_snapshots import PeerClient
from router.fleet.worker_flag import WorkerFlag, parse_worker_flag, parse_worker_settings
from router.fleet.worker_lists import read_workers_file, watch_file, watch_host_name
from router.fleet.worker_responses import are_ranks_asleep
from router.http_client import FetchError
from router.prompting.model_tokenizers import ModelTokenizers

log = logging.getLogger("router")

_Result = TypeVar("_Result")

TRAFFIC_ONLY_RECOVERY = frozenset(
    f"{kind.value} failure"
    for kind in (FailureKind.TIMEOUT, FailureKind.STALLED, FailureKind.SERVER_ERROR, FailureKind.STREAM)
)
"""Reasons for which a worker is broken although its `/health` may answer; only a successful request ends them."""
RESTART_S = 1.0
RESTART_S_MAX = 60.0
"""Longest pause of `run_forever`; the pause doubles from RESTART_S on."""
GOOD_WORK_S = 10.0
"""Time after which the end of some work is no reason for a long pause: balancers cut each watch after 20 s or more."""
DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER = 1.0, 0.01
"""Shortest time between two searches for unknown models: the longer of a fixed one and one for each worker."""
DISCOVERY_WAIT_S_MAX, DISCOVERY_POLL_S = 2.0, 0.02
"""Longest time that a client waits for such a search, and the pause between two looks at its result."""
STARTING_S_MAX = 1800.0
"""Time in which a new worker may load its model: as long as `fleet` gives a program to start."""
CONCURRENT_POLLS_MAX = 32
"""Workers that are asked for their models at once."""
REASON_CHARS_MAX = 300
"""Longest text of a worker that is written to the log and to `/workers`."""
TOKENIZER_S_MAX = 60.0
JOIN_SNAPSHOTS_S_MAX = 10.0
"""Longest wait for other routers' snapshots before a new worker joins; after that, missing ones are asked for again."""
BLOCKS_MAX_DEFAULT = 1 << 22
"""Blocks that a rank may announce if its worker does not say how much its cache holds."""
BLOCKS_MIN, BLOCKS_FACTOR, BLOCK_TOKENS = 1 << 16, 16, 16
"""Terms of `compute_max_blocks`: fixed part, factor of the blocks in the cache, and largest size of a block."""


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


@dataclass(slots=True)
class _Member:
    """State of one worker that this router was told of, whether the worker was reached yet or not."""

    flag: WorkerFlag
    """Settings of the worker, as a `--worker` option has them."""
    origins: set[str]
    """Lists that name the worker: `operator`, `file`, a host name or an object of Kubernetes."""
    configured_s: float = 0.0
    """Time when a list first named the worker with these settings."""
    task: asyncio.Task[None] | None = None
    """Task that probes and checks the worker."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have the worker checked now."""
    poll_times: _PollTimes = field(default_factory=_PollTimes)
    readiness: _KubernetesReadiness = field(default_factory=_KubernetesReadiness)

    problem: str = ""
    """Why the last check or probe failed; empty if it did not."""
    consecutive_failures: int = 0
    """Checks that failed in a row, or probes if the worker was never reached."""

    facts: WorkerFacts | None = None
    """Result of the last successful probe; None: the worker was never reached."""
    checkpoint_by_model: dict[str, Checkpoint] = field(default_factory=dict)
    """Base models' files on this machine, as they were when the worker was found, had restarted, or they came here."""
    has_too_many_streams: bool = False
    """Whether the worker has more event streams than can be followed."""
    engine_restarts: int = 0
    """Restarts of the worker's engine that its event streams have shown."""
    cache_clears_at_sleep: int = 0
    """Number of cleared caches that the worker had published when its engine was last found to fall asleep or wake."""

    def cancel(self) -> None:
        """End the task, and drop the reference to it: task and member would keep each other alive."""
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


class Fleet:
    """All workers of this router: adds and removes them, and has one task for each that probes and checks it."""

    def __init__(
        self,
        core: RouterCore,
        prober: Prober,
        feed: IndexFeed,
        tokenizers: ModelTokenizers,
        perform: Callable[[Iterable[Instruction]], None],
        config: FleetConfig,
        *,
        now: Callable[[], float],
        peers: PeerClient,
    ) -> None:
        """Begin without workers.

        `core` routes, `prober` asks workers over HTTP, and `feed` reads their cache events. `perform` executes the
        core's instructions. `now`: monotonic clock. `peers`: routers that may have copies of a worker's index.
        """
        self._core = core
        self._prober = prober
        self._feed = feed
        self._tokenizers = tokenizers
        self._perform = perform
        self._config = config
        self._now = now
        self._peers = peers

        self._members: dict[str, _Member] = {}
        """Workers by id."""
        self._unread_origins: set[str] = set()
        """Host names and objects of Kubernetes that were not read yet."""
        self._discovery: asyncio.Task[None] | None = None
        """Task that asks all workers which models they serve."""
        self._discovered_s = -math.inf
        """Time when the last such task ended."""
        self._background: set[asyncio.Task[None]] = set()
        """Other running tasks, kept here so that they are not collected."""
        self.failed_checks: Counter[str] = Counter()
        """Failed checks and probes by worker, for `/metrics`."""

    def add(self, settings: dict[str, Any]) -> str:
        """Add a worker from a JSON object with the keys of `--worker` and return its id. Raises ConfigError."""
        flag = parse_worker_settings(settings)
        self.watch(flag, origin="operator")
        return flag.worker_id

    def watch(self, flag: WorkerFlag, *, origin: str) -> None:
        """Start to probe a worker that the list `origin` names. It replaces one with the same id and other settings."""
        existing = self._members.get(flag.worker_id)
        if existing is not None and existing.flag == flag:
            existing.origins.add(origin)
            worker = self._core.workers.get(flag.worker_id)
            if worker is None or worker.is_down:
                existing.wake.set()  # whoever names the worker expects it to be there
            return
        member = _Member(flag, {origin}, self._now())
        if existing is not None:
            existing.cancel()
            if existing.flag.url != flag.url:
                self._tokenizers.remove_worker(existing.flag.url)
            member.readiness = existing.readiness
        self._members[flag.worker_id] = member
        following = run_forever(partial(self._follow_worker, member), partial(self._record_fault, member))
        member.task = asyncio.get_running_loop().create_task(following)

    def _record_problem(self, member: _Member, problem: str) -> None:
        """Count a failed check or probe of a worker, and keep the reason for `/workers`."""
        member.problem = problem[:REASON_CHARS_MAX]
        if self._members.get(member.flag.worker_id) is member:
            self.failed_checks[member.flag.worker_id] += 1

    def remove(self, worker_id: str) -> None:
        """Forget a worker, if it is there. Its running answers are not cut off."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        member.cancel()
        self.failed_checks.pop(worker_id, None)
        self._tokenizers.remove_worker(member.flag.url)
        self._feed.forget(worker_id)
        self._perform(self._core.remove_worker(worker_id, self._now()))

    async def discover_model(self, model: str) -> int:
        """Ask all workers for a model that none is known to serve; wait for one that has it, or all, for a while.

        Return the number of workers that may still be loading it. Clients that ask at the same time share one search.
        After a search there is a pause, because clients may ask for any name.
        """
        if self._discovery is None or self._discovery.done():
            pause_s = max(DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER * len(self._members))
            if self._now() - self._discovered_s >= pause_s:
                self._discovery = self._spawn(self._poll_all_models())
        search = self._discovery
        deadline_s = self._now() + DISCOVERY_WAIT_S_MAX
        while search is not None and not search.done():
            if self._now() >= deadline_s or self._core.registry.is_model_known(model):
                break
            await asyncio.wait({search}, timeout=DISCOVERY_POLL_S)
        return self._count_starting_workers()

    def _count_starting_workers(self) -> int:
        """Return how many workers may still be loading a model: new ones, or all while none was ever reached."""
        reached_workers = self._core.workers
        unreached = [member for worker_id, member in self._members.items() if worker_id not in reached_workers]
        if not reached_workers:
            return len(unreached)
        return sum(self._now() - member.configured_s <= STARTING_S_MAX for member in unreached)

    def drain(self, worker_id: str, *, is_draining: bool) -> None:
        """Stop or resume new requests to a known worker, as an operator says."""
        if worker_id in self._members:
            self._members[worker_id].readiness.is_drain_cause = False
        self._perform(self._core.set_draining(worker_id, self._now(), is_draining=is_draining))

    def check_soon(self, worker_id: str) -> None:
        """Check a worker now, because a request to it failed or its event stream broke."""
        member = self._members.get(worker_id)
        if member is not None:
            member.wake.set()

    def apply_fact(self, fact: WorkerFact) -> None:
        """Pass on to the core what the event feed learned about a worker."""
        match fact:
            case CacheCleared(worker_id, rank, at_s):
                self._core.clear_worker_cache(worker_id, at_s, rank)
            case CapacityObserved(worker_id, rank, tokens):
                self._core.record_cache_capacity(worker_id, rank, tokens)
            case StreamLost(worker_id):
                self.check_soon(worker_id)
            case EngineRestarted(worker_id):
                if worker_id in self._members:
                    self._members[worker_id].engine_restarts += 1

    async def close(self) -> None:
        tasks = [*self._background, *(member.task for member in self._members.values() if member.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def describe_events(self, worker_id: str) -> dict[str, Any]:
        """Return the state of a worker's event streams, for `/workers`."""
        member = self._members.get(worker_id)
        details = self._feed.describe_streams(worker_id)
        if member is not None and member.problem:
            details["problem"] = member.problem
        return details

    def may_receive_api_key(self, worker_id: str) -> bool:
        """Return whether a worker may be sent the workers' API key."""
        member = self._members.get(worker_id)
        return member is not None and member.flag.sends_api_key

    def list_starting_reasons(self) -> dict[str, str]:
        """Return why each worker that was never reached is not available, by its id."""
        return {
            worker_id: member.starting_reason
            for worker_id, member in self._members.items()
            if worker_id not in self._core.workers
        }

    def has_unprobed_worker(self) -> bool:
        """Return whether some worker's first probe has not ended yet, or a list of workers was not read yet."""
        return bool(self._unread_origins) or any(
            member.facts is None and not member.consecutive_failures and not member.problem
            for member in self._members.values()
        )

    def follow_file(self, path: Path) -> None:
        """Add the workers in a file of `--worker` lines, and follow its changes. Raises ConfigError."""
        self._update_origin("file", read_workers_file(path))
        self._spawn(run_forever(lambda: watch_file(path, partial(self._update_origin, "file")), _report_list_error))

    def follow_name(self, flag: WorkerFlag) -> None:
        """Add a worker for each address that the host of `flag` resolves to, and follow changes."""
        origin = f"dns {flag.url}"
        self._unread_origins.add(origin)
        update = partial(self._update_origin, origin)
        host_names, every_s = self._prober.host_names, self._config.names_s
        self._spawn(run_forever(lambda: watch_host_name(host_names, flag, every_s, update), _report_list_error))

    def follow_kubernetes(self, source: KubernetesSource) -> None:
        """Add the endpoints of a Service or InferencePool, and follow changes. Unready ones get no new requests."""
        self._unread_origins.add(str(source))
        apply_endpoints = partial(self._apply_endpoints, str(source))
        self._spawn(run_forever(lambda: watch_kubernetes(source, apply_endpoints), _report_list_error))

    def _apply_endpoints(self, origin: str, is_ready_by_address: Mapping[str, bool]) -> None:
        """Add and remove workers so that they are the endpoints that Kubernetes lists; drain those that are not ready.

        `origin`: name of the Service or pool. `is_ready_by_address`: all its endpoints, as HOST:PORT. An endpoint is
        added as a worker when it is ready for the first time.
        """
        workers = self._core.workers
        is_ready_by_flag = {
            parse_worker_flag(f"http://{address}"): is_ready for address, is_ready in is_ready_by_address.items()
        }
        listed_flags = [flag for flag, is_ready in is_ready_by_flag.items() if is_ready or flag.worker_id in workers]
        self._update_origin(origin, listed_flags)
        unready_ids = {flag.worker_id for flag, is_ready in is_ready_by_flag.items() if not is_ready}
        for worker_id, member in self._members.items():
            if worker_id in workers:
                self._record_readiness(member, origin, is_ready=worker_id not in unready_ids)

    def _record_readiness(self, member: _Member, origin: str, *, is_ready: bool) -> None:
        """Record whether a Kubernetes Service or pool (`origin`) reports a worker as ready, and drain or resume it.

        A worker that is drained gets no new requests. It is drained when the first of its Services or pools reports it
        as not ready, and resumed when all report it as ready again. If an operator drains or resumes the worker
        meanwhile, it stays so.
        """
        worker_id = member.flag.worker_id
        readiness = member.readiness
        was_ready = not readiness.unready_lists
        if is_ready:
            readiness.unready_lists.discard(origin)
        else:
            readiness.unready_lists.add(origin)
        is_ready_everywhere = not readiness.unready_lists
        is_drained = self._core.workers[worker_id].is_drained
        must_drain = was_ready and not is_ready_everywhere and not is_drained
        must_resume = is_ready_everywhere and readiness.is_drain_cause
        if must_drain or must_resume:
            readiness.is_drain_cause = must_drain
            reason = f"not ready in Kubernetes ({origin})"
            self._perform(self._core.set_draining(worker_id, self._now(), is_draining=must_drain, reason=reason))

    def _update_origin(self, origin: str, flags: list[WorkerFlag]) -> None:
        """Watch the workers of a list, and remove those that only `origin` has named and names no more."""
        self._unread_origins.discard(origin)
        listed_ids = {flag.worker_id for flag in flags}
        for worker_id, member in list(self._members.items()):
            if origin in member.origins and worker_id not in listed_ids:
                member.origins.discard(origin)
                if not member.origins:
                    log.info("worker %s left %s", worker_id, origin)
                    self.remove(worker_id)
        for flag in flags:
            listed = self._members.get(flag.worker_id)
            if listed is None or origin not in listed.origins or listed.flag != flag:
                self.watch(flag, origin=origin)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a background task until `close`. If it raises, the error is logged."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_report_crash)
        return task

    def _record_fault(self, member: _Member, error: Exception) -> None:
        """Record a fault of the router that ended the task of a worker, and log it if it is a new one."""
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        if reason != member.problem:
            log.error("worker %s cannot be followed: %s", member.flag.worker_id, reason, exc_info=error)
        self._record_problem(member, reason)

    async def _follow_worker(self, member: _Member) -> None:
        """Probe a worker until it answers, then check it again and again."""
        while member.facts is None and not await self._probe_and_register(member):
            if await self._pause(member, member.poll_times.starting_pause_s):
                member.poll_times.starting_pause_s = 0.0
        while True:
            await self._check_worker(member)

    async def _check_worker(self, member: _Member) -> None:
        """Pause, then check a worker's health, and ask it for what may have changed: models, sizes and load."""
        worker = self._core.workers.get(member.flag.worker_id)
        was_down = worker is not None and worker.is_down
        pause_s = self._config.starting_s if was_down else self._config.health_s
        is_suspected = await self._pause(member, pause_s)  # a failed request ends the pause early
        problem = await self._prober.check_health(member.flag)
        if problem is not None:
            self._record_failed_check(member, problem, is_suspected=is_suspected)
            return
        member.consecutive_failures = 0
        if not was_down:
            member.problem = ""
        if was_down or is_suspected or self._now() - member.poll_times.probed_s >= self._config.sources_s:
            await self._probe_and_register(member)
        else:
            await self._poll_models(member)
        self._spawn(self._fetch_missing_snapshots(member))
        if self._now() >= member.poll_times.load_poll_due_s:
            member.poll_times.load_poll_due_s = math.inf  # not again before this poll has ended
            self._spawn(self._poll_load(member))

    async def _fetch_missing_snapshots(self, member: _Member) -> None:
        """Copy the cached blocks of a worker that this router's index lacks from other routers, if it is time to.

        Blocks are missing if events were lost. The pause between two requests doubles while some are.
        """
        times = member.poll_times
        if member.facts is None or self._now() < times.peer_poll_due_s:
            return
        worker_id = member.flag.worker_id
        first_batch_by_rank = self._feed.find_incomplete_ranks(worker_id)
        if not first_batch_by_rank:
            times.peer_pause_s = 0.0
            return
        times.peer_poll_due_s = math.inf  # not again before the routers have answered
        try:
            sources = member.facts.sources
            snapshots = await self._peers.fetch_snapshots(worker_id, sources, only_before=first_batch_by_rank)
            for rank, snapshot in snapshots.items():
                self._feed.resume(worker_id, rank, snapshot)
        finally:
            times.peer_pause_s = _next_pause(times.peer_pause_s, self._config.peers_s, self._config.peers_s_max)
            times.peer_poll_due_s = self._now() + times.peer_pause_s

    async def _poll_load(self, member: _Member) -> None:
        """Read the load of a worker's ranks from its `/metrics` for the core, and set the time of the next reading."""
        worker_id = member.flag.worker_id
        in_flight = self._core.count_in_flight_by_rank(worker_id)
        try:
            loads = await self._prober.fetch_loads(member.flag, len(in_flight))
            self._core.record_engine_load(worker_id, loads, in_flight, self._now())
            is_asleep = are_ranks_asleep(loads)
            if is_asleep is not None:
                self._set_asleep(member, is_asleep=is_asleep)
        finally:
            member.poll_times.load_poll_due_s = self._now() + self._config.loads_s

    def _set_asleep(self, member: _Member, *, is_asleep: bool) -> None:
        """Record whether a worker's engine is in sleep mode, and clear its blocks in the index.

        A sleeping engine has lost its cache, and publishes that in its first step after it wakes. If that was read
        before the engine was found awake, the blocks in the index are new ones and stay.
        """
        worker_id = member.flag.worker_id
        worker = self._core.workers.get(worker_id)
        if worker is not None and worker.is_asleep is not is_asleep:
            clear_count = self._feed.count_clears(worker_id)
            if is_asleep or clear_count == member.cache_clears_at_sleep:
                self._feed.clear_worker(worker_id)
            member.cache_clears_at_sleep = clear_count
            self._perform(self._core.set_asleep(worker_id, self._now(), is_asleep=is_asleep))

    async def _poll_all_models(self) -> None:
        """Ask all workers which models they serve."""
        try:
            slots = asyncio.Semaphore(CONCURRENT_POLLS_MAX)

            async def poll(member: _Member) -> None:
                async with slots:
                    await self._poll_models(member)

            await asyncio.gather(*(poll(member) for member in list(self._members.values()) if member.facts is not None))
        finally:
            self._discovered_s = self._now()

    async def _poll_models(self, member: _Member) -> None:
        """Ask a worker for its models, and probe it anew if they changed: LoRA adapters, or another process."""
        try:
            model_list = await self._prober.fetch_models(member.flag)
        except (FetchError, DecodeError) as error:
            self._record_problem(member, str(error))
            return
        facts = member.facts
        if facts is not None and (set(model_list.models), model_list.roots) != (set(facts.spec.models), facts.roots):
            log.info("worker %s serves other models than before", member.flag.worker_id)
            await self._probe_and_register(member)

    async def _probe_and_register(self, member: _Member) -> bool:
        """Ask a worker for all its facts, and register it for routing if it was down or its facts have changed.

        Return False if the worker does not answer yet, or was removed meanwhile.
        """
        worker_id, earlier_facts = member.flag.worker_id, member.facts
        worker = self._core.workers.get(worker_id)
        was_down = worker is not None and worker.is_down
        member.poll_times.probed_s = self._now()
        try:
            facts = await self._prober.probe(member.flag, earlier_facts, member.engine_restarts)
        except (FetchError, DecodeError) as error:
            was_up = earlier_facts is not None and not was_down
            self._record_failed_probe(member, str(error)[:REASON_CHARS_MAX], was_up=was_up)
            return False
        member.problem = ""
        member.consecutive_failures = 0

        is_restarted = was_down or facts.is_new_engine
        if is_restarted:
            member.checkpoint_by_model = {}
        member.checkpoint_by_model |= _find_checkpoints(facts, member.checkpoint_by_model)
        has_new_tokenizer = self._forget_replaced_tokenizers(member, facts)
        if has_new_tokenizer or is_restarted or facts != earlier_facts:
            await self._read_tokenizers(member, facts)
        is_new = worker_id not in self._core.workers
        snapshots = await self._fetch_snapshots(facts) if is_new else {}
        if self._members.get(worker_id) is not member:
            return False

        had_too_many_streams = member.has_too_many_streams
        usable_facts = self._limit_streams(member, facts)
        if was_down or facts != member.facts or member.has_too_many_streams != had_too_many_streams:
            worker = self._register(usable_facts, snapshots)
            if not worker.is_down:
                self._log_joined(member, usable_facts, is_new=is_new)
        member.facts = facts
        if facts.is_asleep is not None:
            self._set_asleep(member, is_asleep=facts.is_asleep)
        return True

    async def _fetch_snapshots(self, facts: WorkerFacts) -> Mapping[int, PeerSnapshot]:
        """Return what other routers know of a worker's cached blocks, by rank; empty if they do not answer in time."""
        fetching = self._peers.fetch_snapshots(facts.spec.worker_id, facts.sources)
        return await _run_with_timeout(JOIN_SNAPSHOTS_S_MAX, fetching) or {}

    def _record_failed_probe(self, member: _Member, reason: str, *, was_up: bool) -> None:
        """Record why a probe failed. A worker that was up stays up, and one that was down gets no request to try it.

        If the worker was never reached, the pause before the next probe grows. A reason of a new kind is logged.
        """
        if was_up:
            self._record_problem(member, reason)
            return
        if member.facts is not None:
            self._perform(self._core.mark_worker_down(member.flag.worker_id, self._now(), reason))
        is_new_kind = reason.partition(":")[0] != member.problem.partition(":")[0]
        if is_new_kind:
            remedy = suggest_remedy(member.flag, reason)
            log.warning("worker %s does not answer yet: %s: %s", member.flag.worker_id, reason, remedy)
            member.poll_times.starting_pause_s = 0.0  # the worker makes progress, so it may answer soon
        self._record_problem(member, reason)
        member.consecutive_failures += 1
        config, times = self._config, member.poll_times
        times.starting_pause_s = _next_pause(times.starting_pause_s, config.starting_s, config.starting_s_max)

    def _limit_streams(self, member: _Member, facts: WorkerFacts) -> WorkerFacts:
        """Return the facts of a worker, without its event streams if there are more than can be followed."""
        free_stream_count = self._feed.count_free_streams(member.flag.worker_id)
        had_too_many_streams = member.has_too_many_streams
        member.has_too_many_streams = len(facts.sources) > free_stream_count
        if not member.has_too_many_streams:
            return facts
        if not had_too_many_streams:
            log.warning(
                "worker %s has %d event streams, and there is room for %d: it is routed by history",
                member.flag.worker_id, len(facts.sources), free_stream_count,
            )  # fmt: skip
        return facts.drop_event_sources()

    def _log_joined(self, member: _Member, facts: WorkerFacts, *, is_new: bool) -> None:
        """Log what a worker serves, and warn if a new one publishes no events without being told so."""
        events = f"events from {facts.sources[0].endpoint}" if facts.sources else "no events"
        model_names = ", ".join(model.name for model in facts.spec.models)
        log.info("worker %s serves %s, %s", member.flag.worker_id, model_names, events)
        if conflict := find_base_conflict(facts.spec, self._core.workers.values()):
            log.warning("worker %s: %s", member.flag.worker_id, conflict)
        is_known_to_lack_events = member.flag.no_events or member.has_too_many_streams
        if is_new and not facts.sources and not is_known_to_lack_events:
            log.warning(
                "worker %s publishes no events, so its cache is estimated from the requests sent to it: start it with "
                "%s, name its events with --worker url=%s,events=tcp://HOST:PORT, or say events=none",
                member.flag.worker_id, EVENTS_FLAG, member.flag.url,
            )  # fmt: skip

    def _register(self, facts: WorkerFacts, snapshots: Mapping[int, PeerSnapshot]) -> Worker:
        """Tell the core and the feed about a worker that has answered its probe. `snapshots`: by rank."""
        spec = facts.spec
        worker = self._core.add_worker(spec, self._now(), is_up=True)
        blocks_max = compute_max_blocks(spec)
        self._feed.follow_worker(spec.worker_id, facts.sources, worker.holders, snapshots, blocks_max=blocks_max)
        if worker.health_reason not in TRAFFIC_ONLY_RECOVERY:
            self._perform(self._core.mark_worker_up(spec.worker_id, self._now()))
        return worker

    def _forget_replaced_tokenizers(self, member: _Member, facts: WorkerFacts) -> bool:
        """Forget the tokenizer of each model that this worker loaded from another checkpoint; return whether any was.

        A model keeps its name when its workers restart with another checkpoint, or with new files in its folder. The
        tokenizer stays while another worker uses the old files, or if the new ones are not on this machine (any more).
        """
        is_replaced = False
        for base, checkpoint in member.checkpoint_by_model.items():
            if not self._tokenizers.is_replaced(base, checkpoint) or self._is_loaded_elsewhere(base, member):
                continue
            if find_checkpoint(facts.roots.get(base, checkpoint.folder)) == checkpoint:
                is_replaced = True
                self._tokenizers.forget(base)
        return is_replaced

    def _is_loaded_elsewhere(self, base: str, member: _Member) -> bool:
        """Return whether a worker that is up, other than `member`, has the tokenizer that is loaded here."""
        workers = self._core.workers
        return any(
            other is not member
            and base in other.checkpoint_by_model
            and not self._tokenizers.is_replaced(base, other.checkpoint_by_model[base])
            and worker_id in workers
            and not workers[worker_id].is_down
            for worker_id, other in self._members.items()
        )

    async def _read_tokenizers(self, member: _Member, facts: WorkerFacts) -> None:
        """Load the tokenizers of the worker's models before it gets its first request."""
        for base in sorted({model.base for model in facts.spec.models}):
            await _run_with_timeout(
                TOKENIZER_S_MAX, self._tokenizers.discover(base, facts.roots.get(base), member.flag)
            )

    def _record_failed_check(self, member: _Member, problem: str, *, is_suspected: bool) -> None:
        """Count a failed check; mark the worker as down after one if a request failed too, else after several."""
        self._record_problem(member, problem)
        member.consecutive_failures += 1
        if is_suspected or member.consecutive_failures >= self._config.failures_to_down:
            self._perform(self._core.mark_worker_down(member.flag.worker_id, self._now(), member.problem))

    async def _pause(self, member: _Member, seconds: float) -> bool:
        """Sleep, and return True at once if the worker is to be checked now."""
        await _run_with_timeout(seconds, member.wake.wait())
        is_woken = member.wake.is_set()
        if is_woken:
            await asyncio.sleep(0.05)  # a burst of failures asks once
            member.wake.clear()
        return is_woken


def compute_max_blocks(spec: WorkerSpec) -> int:
    """Return how many blocks a rank of this worker may announce: many times those that fit into its caches."""
    if spec.cache_tokens is None:
        return BLOCKS_MAX_DEFAULT
    tokens = spec.cache_tokens + (spec.host_tokens or 0)
    per_rank = tokens // (min(spec.block_size or BLOCK_TOKENS, BLOCK_TOKENS) * spec.ranks)
    return BLOCKS_MIN + BLOCKS_FACTOR * per_rank


def _find_checkpoints(facts: WorkerFacts, known_models: Collection[str] = ()) -> dict[str, Checkpoint]:
    """Return the files of a worker's base models, as they are now, for models that are not known and are here."""
    checkpoints = {}
    for base in ({model.base for model in facts.spec.models} & set(facts.roots)).difference(known_models):
        if (checkpoint := find_checkpoint(facts.roots[base])) is not None:
            checkpoints[base] = checkpoint
    return checkpoints


async def _run_with_timeout(seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Await `work`, but no longer than `seconds`; return its result, or None if it took longer.

    Up to Python 3.11, `asyncio.wait_for` loses a cancellation that comes when the work is done, and the task of a
    removed worker would run for ever.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    return task.result() if task.done() else None


async def run_forever(work: Callable[[], Coroutine[Any, Any, None]], report_error: Callable[[Exception], None]) -> None:
    """Call `work` again and again, with a pause after each time it ends or raises an error, which is reported.

    The pause doubles, unless the work went well for GOOD_WORK_S.
    """
    pause_s = 0.0
    while True:
        started_s = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001  a boundary
            report_error(error)
        if time.monotonic() - started_s > GOOD_WORK_S:
            pause_s = 0.0
        pause_s = _next_pause(pause_s, RESTART_S, RESTART_S_MAX)
        await asyncio.sleep(pause_s)


def _report_list_error(error: Exception) -> None:
    """Log why a list of workers is followed no more; it will be tried again."""
    is_fault = not isinstance(error, (ConfigError, FetchError))
    log.error("%s; the workers stay as they are, and it is tried again", error, exc_info=error if is_fault else None)


def _next_pause(pause_s: float, first_s: float, max_s: float) -> float:
    """Return twice the last pause, between `first_s` and `max_s`."""
    return min(max(2 * pause_s, first_s), max_s)


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the watch over a worker ended by a fault of the router", exc_info=error)
