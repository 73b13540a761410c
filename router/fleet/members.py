"""The list of workers as it is lived: probed until they answer, watched while they serve, changed at run time.

Owns one task a worker. Turns what the prober sees into calls of the core (added, up, down) and of the event feed
(follow, forget). Refuses to know requests: failures seen by traffic go to the core directly; here they only hasten the
next check of the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from events.types import DecodeError, EventsError
from options import ConfigError, Flag, Seconds, Size
from router.decide.core import RouterCore
from router.decide.messages import FailureKind, Instruction
from router.decide.workers import WorkerSpec
from router.fleet.discovery import (
    EVENTS_FLAG,
    Prober,
    WorkerFacts,
    WorkerFlag,
    make_worker_flag,
    make_worker_spec,
    parse_worker_flag,
    suggest_remedy,
)
from router.fleet.fact_queue import CacheCleared, CapacityObserved, StreamLost, WorkerFact
from router.fleet.feed import IndexFeed, PeerSnapshot
from router.fleet.kubernetes import KubernetesSource, watch_kubernetes
from router.fleet.peer_snapshots import PeerClient
from router.fleet.worker_lists import read_workers_file, watch_file, watch_name
from router.fleet.worker_responses import is_asleep
from router.http_client import FetchError
from router.prompting.reader import PromptReader

log = logging.getLogger("router")

TRAFFIC_ONLY_RECOVERY = frozenset(
    f"{kind.value} failure"
    for kind in (FailureKind.TIMEOUT, FailureKind.STALLED, FailureKind.SERVER_ERROR, FailureKind.STREAM)
)
"""Reasons of a broken worker whose `/health` may well answer all the time: only a request that succeeds cures it."""
RESTART_S = 1.0
RESTART_S_MAX = 60.0
"""After a fault of our own in a worker's watch, or in following a list: doubles up to the second."""
LOADS_S_MAX = 60.0
DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER = 1.0, 0.01
"""Between two looks for models that nobody is known to serve, the longer of the two: of all workers and of each."""
DISCOVERY_WAIT_S_MAX, DISCOVERY_POLL_S = 2.0, 0.02
"""How long a client waits for such a look, and the pauses in which it sees whether its model came."""
CONCURRENT_POLLS_MAX = 32
"""Workers that are asked at once."""
REASON_CHARS_MAX = 300
"""What a worker says goes into the log and `/workers` up to here."""
TOKENIZER_S_MAX = 60.0
BLOCKS_MAX_DEFAULT = 1 << 22
"""Blocks of a rank whose worker does not tell how much it holds."""
BLOCKS_MIN, BLOCKS_FACTOR, BLOCK_TOKENS = 1 << 16, 16, 16
"""Else so many, and so many times those of its cache, of so many tokens at the most."""


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """How often workers are looked at."""

    health_s: Annotated[Seconds, Flag("--health-interval"), "Time between two health checks of a worker."] = 2.0
    sources_s: Annotated[Seconds, "Time between two requests for a worker's event sources."] = 10.0
    """A new epoch means that it restarted."""
    loads_s: Annotated[Seconds, "Time between two readings of a worker's load in its /metrics."] = 4.0
    """Doubles up to a minute while it says nothing."""
    starting_s: Annotated[Seconds, "Time between two checks of a worker that is down or was never reached."] = 0.5
    starting_s_max: Annotated[Seconds, "The pause before a worker that was never reached doubles up to this."] = 5.0
    failures_to_down: Annotated[
        int, Meta(ge=1, le=10**9), "Failed health checks in a row after which a worker is down."
    ] = 2
    """Traffic's own failures do so at once."""
    trust_event_endpoints: Annotated[
        bool,
        Flag("--trust-event-endpoints/--no-trust-event-endpoints"),
        "Follow event endpoints that workers name on other hosts, and ipc:// ones.",
    ] = False
    streams_max: Annotated[
        int,
        Meta(ge=1, le=10**6),
        "Most event streams of all workers, as far as file descriptors allow.",
        "The cache of a worker with further streams is estimated from the requests sent to it.",
    ] = 16_384
    index_mb: Annotated[
        Annotated[int, Meta(ge=1, le=10**6, title="MIB"), Size(1 << 20)],
        Flag("--index-memory"),
        "Largest size of the index of all workers' blocks.",
        "Beyond it the worker that announced the most, for the size of its cache, is dropped from the index.",
    ] = 8192
    names_s: Annotated[Seconds, "Time between two resolutions of host names of many workers."] = 10.0
    peers_s: Annotated[Seconds, "Pause before other routers are asked for a snapshot again; doubles."] = 10.0
    peers_s_max: Annotated[Seconds, "Longest pause between such requests."] = 600.0


@dataclass(slots=True)
class _Member:
    flag: WorkerFlag
    origin: str
    """Who asked for it: `operator`, `file`, or the name it was resolved from."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it looked at now."""
    task: asyncio.Task[None] | None = None
    facts: WorkerFacts | None = None
    problem: str = ""
    failures: int = 0
    """Checks, or probes before it was ever reached, that failed in a row."""
    starting_pause_s: float = 0.0
    peers_from_s: float = 0.0
    """When other routers may be asked for what this one lacks."""
    peers_pause_s: float = 0.0
    loads_from_s: float = 0.0
    """When it may be asked for its load again."""
    loads_pause_s: float = 0.0
    lacks_room: bool = False
    """It has more event streams than can be followed."""
    restart_s: float = 0.0
    """The pause after the last fault of its watch."""

    def cancel(self) -> None:
        task, self.task = self.task, None  # which would keep both until the collector looks at what is old
        if task is not None:
            task.cancel()

    @property
    def starting_reason(self) -> str:
        """Why a worker that was never reached is not there."""
        if not self.problem:
            return "not tried yet"
        return f"{self.problem} (tried {self.failures} times, again every {self.starting_pause_s:g} s)"


class Fleet:
    """All workers of this process."""

    def __init__(
        self,
        core: RouterCore,
        prober: Prober,
        feed: IndexFeed,
        prompts: PromptReader,
        perform: Callable[[Iterable[Instruction]], None],
        config: FleetConfig,
        *,
        now: Callable[[], float],
        peers: PeerClient | None = None,
    ) -> None:
        """`peers`: other routers, to start from what they know of a worker's cache."""
        self._core = core
        self._peers = peers
        self._prober = prober
        self._feed = feed
        self._prompts = prompts
        self._perform = perform
        self._config = config
        self._now = now
        self._members: dict[str, _Member] = {}
        self._closed = False
        self._discovery: asyncio.Task[None] | None = None
        """Asks all workers which models they serve."""
        self._discovered_s = -math.inf
        self._background: set[asyncio.Task[None]] = set()
        self.failed_checks: Counter[str] = Counter()
        """worker -> checks and probes that failed: for `/metrics`."""

    # Changes ------------------------------------------------------------------------------------------------------

    async def add(self, settings: dict[str, Any]) -> str:
        """Add a worker from `{"url": ..., "events": ..., "replay": ..., ...}`; its id. Raises ConfigError."""
        invalid_key = next((key for key, value in settings.items() if not isinstance(value, (str, int))), None)
        if invalid_key is not None:
            raise ConfigError(f"worker: {invalid_key} is {settings[invalid_key]!r}, expected a string")
        flag = make_worker_flag({"send_key": "0", **{key: str(value) for key, value in settings.items()}})
        self.watch(flag, origin="operator")
        return flag.worker_id

    def watch(self, flag: WorkerFlag, *, origin: str) -> None:
        """Start to probe a worker. One with the same id is replaced where its flags differ."""
        existing = self._members.get(flag.worker_id)
        if existing is not None:
            if existing.flag == flag:
                existing.wake.set()  # whoever names it again expects it to be there
                return
            existing.cancel()
        member = _Member(flag, origin)
        self._members[flag.worker_id] = member
        self._start(member)

    def _start(self, member: _Member) -> None:
        if self._members.get(member.flag.worker_id) is not member:
            return
        member.task = asyncio.get_running_loop().create_task(self._run(member))

        def restart_after_fault(task: asyncio.Task[None]) -> None:
            if task.cancelled() or self._closed or (error := task.exception()) is None:
                return
            reason = f"{type(error).__name__}: {error}"[:REASON_CHARS_MAX]
            if reason != member.problem:
                log.error("worker %s cannot be followed: %s", member.flag.worker_id, reason, exc_info=error)
            member.problem = reason
            self.failed_checks[member.flag.worker_id] += 1
            member.restart_s = _next_pause(member.restart_s, RESTART_S, RESTART_S_MAX)
            asyncio.get_running_loop().call_later(member.restart_s, self._start, member)

        member.task.add_done_callback(restart_after_fault)

    async def remove(self, worker_id: str) -> None:
        """Forget a worker; what it is answering goes on. One that is not known is forgotten already."""
        member = self._members.pop(worker_id, None)
        if member is None:
            return
        member.cancel()
        self.failed_checks.pop(worker_id, None)
        self._prompts.forget_worker(member.flag.url)
        self._feed.forget(worker_id)
        self._perform(self._core.remove_worker(worker_id, self._now()))

    async def discover_model(self, model: str) -> None:
        """A client asks for a model that nobody serves: ask all workers now, and wait for it. Those who ask meanwhile
        share one look, and after one there is none for a while: names come from clients."""
        discovery = self._discovery
        if discovery is None or discovery.done():
            if self._now() - self._discovered_s < max(
                DISCOVERY_PAUSE_S, DISCOVERY_PAUSE_S_PER_WORKER * len(self._members)
            ):
                return
            discovery = self._discovery = self._spawn(self._poll_all_models())
        deadline_s = self._now() + DISCOVERY_WAIT_S_MAX
        while not discovery.done() and self._now() < deadline_s and not self._core.registry.is_model_known(model):
            await asyncio.wait({discovery}, timeout=DISCOVERY_POLL_S)

    async def drain(self, worker_id: str, *, on: bool) -> None:
        self._perform(self._core.set_draining(worker_id, self._now(), is_draining=on))

    def check_soon(self, worker_id: str) -> None:
        """Traffic to this worker failed, or its stream broke off: check it now."""
        member = self._members.get(worker_id)
        if member is not None:
            member.wake.set()

    def apply_fact(self, fact: WorkerFact) -> None:
        """Tell the core what the feed learned of a worker."""
        match fact:
            case CacheCleared(worker_id, rank, at_s):
                self._core.clear_worker_cache(worker_id, at_s, rank)
            case CapacityObserved(worker_id, rank, tokens):
                self._core.record_cache_capacity(worker_id, rank, tokens)
            case StreamLost(worker_id):
                self.check_soon(worker_id)

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._background, *(member.task for member in self._members.values() if member.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def details(self, worker_id: str) -> dict[str, Any]:
        """What is known of a worker's events, for `/workers`."""
        member = self._members.get(worker_id)
        details = self._feed.describe_streams(worker_id)
        if member is not None and member.problem:
            details["problem"] = member.problem
        return details

    def may_receive_api_key(self, worker_id: str) -> bool:
        """Whether it may be sent the workers' API key."""
        member = self._members.get(worker_id)
        return member is not None and member.flag.sends_api_key

    def starting_reasons(self) -> dict[str, str]:
        """Workers that were never reached: id -> why not."""
        return {key: m.starting_reason for key, m in self._members.items() if key not in self._core.workers}

    def has_untried(self) -> bool:
        """Whether there are workers whose first answer, or the lack of one, is awaited."""
        return any(
            member.facts is None and not member.failures and not member.problem for member in self._members.values()
        )

    # Where workers come from --------------------------------------------------------------------------------------

    def follow_file(self, path: Path) -> None:
        """Keep to a file of `--worker` lines: what it adds is added, what it drops is removed. Raises ConfigError."""
        self._update_origin("file", read_workers_file(path))
        self._spawn(self._watch_forever(lambda: watch_file(path, partial(self._update_origin, "file"))))

    def follow_name(self, flag: WorkerFlag) -> None:
        """Keep to the addresses that the host of `flag` resolves to, one worker each."""
        origin = f"dns {urlsplit(flag.url).hostname}"
        update = partial(self._update_origin, origin)
        self._spawn(self._watch_forever(lambda: watch_name(flag, self._config.names_s, update)))

    def follow_kubernetes(self, source: KubernetesSource) -> None:
        """Keep to the endpoints of a Service or of an InferencePool. Those that are not ready get nothing new."""
        origin = f"{source.kind} {source.name}"
        drained_ids: set[str] = set()

        def apply_readiness(addresses: Mapping[str, bool]) -> None:
            flags = {address: parse_worker_flag(f"http://{address}") for address in addresses}
            workers = self._core.workers
            self._update_origin(origin, [f for at, f in flags.items() if addresses[at] or f.worker_id in workers])
            for address, flag in flags.items():
                worker_id, is_ready = flag.worker_id, addresses[address]
                if worker_id in workers and is_ready == (worker_id in drained_ids):
                    (drained_ids.discard if is_ready else drained_ids.add)(worker_id)
                    self._perform(self._core.set_draining(worker_id, self._now(), is_draining=not is_ready))
            drained_ids.intersection_update(flag.worker_id for flag in flags.values())

        self._spawn(self._watch_forever(lambda: watch_kubernetes(source, apply_readiness)))

    async def _watch_forever(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Follow a list for as long as the router runs."""
        pause_s = 0.0
        while True:
            try:
                await watch()
            except ConfigError as error:
                log.error("%s; it is tried again", error)
            except Exception:
                log.exception("a list of workers could not be followed; it is looked at again")
            pause_s = _next_pause(pause_s, RESTART_S, RESTART_S_MAX)
            await asyncio.sleep(pause_s)

    def _update_origin(self, origin: str, flags: list[WorkerFlag]) -> None:
        """What came from `origin` before and is not among `flags` leaves."""
        listed_ids = {flag.worker_id for flag in flags}
        for worker_id in [key for key, member in self._members.items() if member.origin == origin]:
            if worker_id not in listed_ids:
                log.info("worker %s left %s", worker_id, origin)
                self._spawn(self.remove(worker_id))
        for flag in flags:
            self.watch(flag, origin=origin)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_report_crash)
        return task

    # One worker ---------------------------------------------------------------------------------------------------

    async def _run(self, member: _Member) -> None:
        """Probe until it answers, then check it for as long as it is ours."""
        while not await self._join(member):
            if await self._pause(member, member.starting_pause_s):
                member.starting_pause_s = 0.0
        sources_polled_s = self._now()
        while True:
            worker = self._core.workers.get(member.flag.worker_id)
            was_down = worker is not None and worker.is_down
            is_suspected = await self._pause(member, self._config.starting_s if was_down else self._config.health_s)
            problem = await self._prober.check_health(member.flag)
            if problem is not None:
                self._record_failed_check(member, problem, is_suspected=is_suspected)
                continue
            member.failures, member.problem = 0, ""
            if not was_down:
                await self._poll_models(member)
            if was_down or is_suspected or self._now() - sources_polled_s >= self._config.sources_s:
                sources_polled_s = self._now()
                await self._poll_sources(member, was_down=was_down)
            await self._fetch_missing_snapshots(member)
            if self._now() >= member.loads_from_s:
                member.loads_from_s = math.inf  # until it is answered, which may take longer than the next look
                self._spawn(self._poll_load(member))

    async def _fetch_missing_snapshots(self, member: _Member) -> None:
        """Take from other routers what a gap or a reconnect made this one forget."""
        if (
            self._peers is None
            or not self._peers.has_peers
            or member.facts is None
            or self._now() < member.peers_from_s
        ):
            return
        worker_id = member.flag.worker_id
        missing_from = self._feed.find_incomplete_ranks(worker_id)
        if not missing_from:
            member.peers_pause_s = 0.0
            return
        snapshots = await self._peers.fetch_snapshots(worker_id, member.facts.sources, only_before=missing_from)
        for rank, snapshot in snapshots.items():
            self._feed.resume(worker_id, rank, snapshot)
        member.peers_pause_s = _next_pause(member.peers_pause_s, self._config.peers_s, self._config.peers_s_max)
        member.peers_from_s = self._now() + member.peers_pause_s

    async def _poll_load(self, member: _Member) -> None:
        """What does the worker itself say that it has to do?"""
        worker_id, is_silent = member.flag.worker_id, True
        in_flight = self._core.count_in_flight_by_rank(worker_id)
        try:
            loads = await self._prober.fetch_loads(member.flag, len(in_flight))
            self._core.record_engine_load(worker_id, loads, in_flight, self._now())
            is_engine_asleep = is_asleep(loads)
            is_silent = is_engine_asleep is None
            if is_engine_asleep is not None:
                self._set_asleep(worker_id, asleep=is_engine_asleep)
        finally:
            member.loads_pause_s = (
                _next_pause(member.loads_pause_s, self._config.loads_s, LOADS_S_MAX) if is_silent else 0.0
            )
            member.loads_from_s = self._now() + max(self._config.loads_s, member.loads_pause_s)

    def _set_asleep(self, worker_id: str, *, asleep: bool) -> None:
        """An engine that sleeps has lost its cache, and tells so with its first step afterwards at the earliest."""
        worker = self._core.workers.get(worker_id)
        if worker is not None and worker.is_asleep is not asleep:
            self._feed.clear_worker(worker_id)
            self._perform(self._core.set_asleep(worker_id, self._now(), is_asleep=asleep))

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
        """Does the worker serve other models than before? Adapters are loaded while it runs, and another process may
        have taken its place."""
        try:
            models, roots = await self._prober.fetch_models(member.flag)
        except (FetchError, DecodeError) as error:
            member.problem = str(error)[:REASON_CHARS_MAX]
            self.failed_checks[member.flag.worker_id] += 1
            return
        facts = member.facts
        if facts is not None and (set(models), roots) != (set(facts.models), facts.roots):
            log.info("worker %s serves other models than before", member.flag.worker_id)
            await self._join(member)

    async def _join(self, member: _Member) -> bool:
        """Learn what the worker is and register it; False where it does not answer yet."""
        facts = await self._prober.probe(member.flag, member.facts)
        if not facts.is_alive:
            reason = facts.reason[:REASON_CHARS_MAX]
            if reason.partition(":")[0] != member.problem.partition(":")[0]:
                log.warning(
                    "worker %s does not answer yet: %s: %s",
                    member.flag.worker_id, reason, suggest_remedy(member.flag, reason),
                )  # fmt: skip
                member.starting_pause_s = 0.0  # something moved: look again soon
            member.problem = reason
            self.failed_checks[member.flag.worker_id] += 1
            member.failures += 1
            longest_s = self._config.starting_s_max
            member.starting_pause_s = _next_pause(member.starting_pause_s, self._config.starting_s, longest_s)
            return False
        member.problem, member.failures = "", 0
        await self._read_tokenizers(member, facts)
        is_new = member.flag.worker_id not in self._core.workers
        snapshots = (
            await self._peers.fetch_snapshots(member.flag.worker_id, facts.sources) if is_new and self._peers else {}
        )
        if self._members.get(member.flag.worker_id) is not member:
            return False  # it was removed meanwhile
        stream_room = self._feed.count_free_streams(member.flag.worker_id)
        if len(facts.sources) > stream_room:
            if not member.lacks_room:
                log.warning(
                    "worker %s has %d event streams, and there is room for %d: it is routed by history",
                    member.flag.worker_id, len(facts.sources), stream_room,
                )  # fmt: skip
            facts = replace(facts, sources=())
            member.lacks_room = True
        else:
            member.lacks_room = False
        self._register(member, facts, snapshots)
        member.restart_s = 0.0
        log.info(
            "worker %s serves %s, %s", member.flag.worker_id, ", ".join(model.name for model in facts.models),
            f"events from {facts.sources[0].endpoint}" if facts.sources else "no events",
        )  # fmt: skip
        if is_new and not (facts.sources or member.flag.no_events or member.lacks_room):
            log.warning(
                "worker %s publishes no events, so its cache is estimated from the requests sent to it: start it with "
                "%s, name its events with --worker url=%s,events=tcp://HOST:PORT, or say events=none",
                member.flag.worker_id, EVENTS_FLAG, member.flag.url,
            )  # fmt: skip
        return True

    def _register(self, member: _Member, facts: WorkerFacts, snapshots: Mapping[int, PeerSnapshot]) -> None:
        spec = make_worker_spec(member.flag, facts)
        worker = self._core.add_worker(spec, self._now(), is_up=True)
        member.facts = facts
        self._feed.follow(spec.worker_id, facts.sources, worker.holders, snapshots, blocks_max=blocks_max(spec))
        if worker.health_reason not in TRAFFIC_ONLY_RECOVERY:
            self._perform(self._core.mark_worker_up(spec.worker_id, self._now()))
        self._set_asleep(spec.worker_id, asleep=facts.is_asleep)

    async def _read_tokenizers(self, member: _Member, facts: WorkerFacts) -> None:
        """Load what the worker's models are tokenised with before it gets its first request."""
        for base in sorted({model.base for model in facts.models}):
            await _run_with_timeout(
                TOKENIZER_S_MAX, self._prompts.discover_tokenizer(base, facts.roots.get(base), member.flag)
            )

    async def _poll_sources(self, member: _Member, *, was_down: bool) -> None:
        """Another start, other models, other sources? Take over what changed."""
        if was_down:
            await self._join(member)
            return
        try:
            sources = await self._prober.discover_sources(member.flag, member.facts)
        except (FetchError, EventsError, ConfigError) as error:
            member.problem = f"event sources: {error}"[:REASON_CHARS_MAX]
            self.failed_checks[member.flag.worker_id] += 1
            return
        if member.facts is not None and sources != member.facts.sources:
            log.info("worker %s publishes elsewhere or was restarted", member.flag.worker_id)
            await self._join(member)

    def _record_failed_check(self, member: _Member, problem: str, *, is_suspected: bool) -> None:
        """A check failed. After a failure seen by traffic, one is enough."""
        member.problem = problem[:REASON_CHARS_MAX]
        member.failures += 1
        self.failed_checks[member.flag.worker_id] += 1
        if is_suspected or member.failures >= self._config.failures_to_down:
            self._perform(self._core.mark_worker_down(member.flag.worker_id, self._now(), member.problem))

    async def _pause(self, member: _Member, seconds: float) -> bool:
        """Sleep, unless traffic to the worker fails or its stream breaks off: True then."""
        await _run_with_timeout(seconds, member.wake.wait())
        is_woken = member.wake.is_set()
        if is_woken:
            await asyncio.sleep(0.05)  # a burst of failures asks once
            member.wake.clear()
        return is_woken


def blocks_max(spec: WorkerSpec) -> int:
    """How many blocks a rank of this worker may announce: many times those of its cache, as blocks may be small, in
    several groups, and in memory or storage besides."""
    if spec.cache_tokens is None:
        return BLOCKS_MAX_DEFAULT
    tokens = spec.cache_tokens + (spec.host_tokens or 0)
    per_rank = tokens // (min(spec.block_size or BLOCK_TOKENS, BLOCK_TOKENS) * spec.ranks)
    return BLOCKS_MIN + BLOCKS_FACTOR * per_rank


async def _run_with_timeout(seconds: float, work: Coroutine[Any, Any, object]) -> None:
    """Do `work`, but not for longer. A cancellation always gets through: up to Python 3.11 `asyncio.wait_for` loses one
    that comes in the moment in which the work is done, and then a worker would be watched for ever."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        task.cancel()
    if task.done():
        task.result()


def _next_pause(pause_s: float, first_s: float, max_s: float) -> float:
    """The pause after one of `pause_s` that did not help."""
    return min(max(2 * pause_s, first_s), max_s)


def _report_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the watch over a worker ended by a fault of the router", exc_info=error)
