"""Discovery of workers: asks a worker over HTTP for its models, its event streams, its cache and its load.

router/fleet/worker_responses.py parses the answers. A worker without `/kv_event_sources` is tried at vLLM's default
port. If nothing listens there, its cache is estimated from the requests that were sent to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from events.sources import DEFAULT_PORT, EventSource, make_default_source, parse_endpoint_host
from events.types import DecodeError
from options.addresses import bracket_host
from router.decide.load import EngineLoad
from router.decide.workers import (
    BLOCKCAST,
    DECODE_ROLE,
    KINDS_BY_DIALECT,
    MOONCAKE,
    NIXL,
    NO_TRANSFERS,
    PREFILL_ROLE,
    SGLANG,
    VLLM,
    CacheView,
    ServedModel,
    TransferFacts,
    WorkerSpec,
)
from router.fleet.worker_responses import (
    UNKNOWN_SIZES,
    EngineSizes,
    ModelList,
    are_ranks_asleep,
    list_endpoints,
    read_bootstrap,
    read_engine_sizes,
    read_loads,
    read_models,
    read_publisher,
    read_server_info,
    read_sources,
    select_metric_lines,
)
from router.fleet.worker_settings import WorkerSettings
from router.host_names import HostNames
from router.http_client import FetchError, fetch

log = logging.getLogger("router")

BODY_BYTES_MAX = 1 << 20
METRICS_BYTES_MAX = 4 << 20
BOOTSTRAP_PORT = 8998
"""Port where prefill workers of Mooncake and of SGLang are met, unless their operator chose another."""
NOT_OFFERED = frozenset((404, 405, 410, 501))
"""Statuses by which a worker says that it has no such route; with any other it may have the route later."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Description of a worker, as one probe found it by asking the worker over HTTP."""

    spec: WorkerSpec
    sources: tuple[EventSource, ...] = ()
    """Event sources, one for each data-parallel rank; empty: the worker publishes none."""
    roots: Mapping[str, str] = field(default_factory=dict)
    """Folder, or name on a hub, from which the worker loaded each model, by model name."""
    sizes: EngineSizes = UNKNOWN_SIZES
    """Sizes that the engine told in this probe, or else in an earlier one."""
    engine_ids: tuple[str, ...] | None = None
    """Mooncake's ids of the engines of all ranks, which KV transfers name; empty: there are none; None: unknown."""
    is_asleep: bool | None = field(default=None, compare=False)
    """Whether the engine is in sleep mode; None: the worker does not tell, so nothing is known to have changed."""
    engine_ids_problem: str = field(default="", compare=False)
    """Why Mooncake's bootstrap server did not tell `engine_ids` in this probe; empty: it did, or was not asked."""
    restart_count: int = field(default=0, compare=False)
    """Restarts of the engine that its event streams had shown when the probe began."""
    is_new_engine: bool = field(default=True, compare=False)
    """Whether this is the first probe, or the engine was restarted since the one before."""

    def may_be_same_engine(
        self,
        served: ModelList,
        sources: tuple[EventSource, ...],
        engine_ids: tuple[str, ...] | None,
        restart_count: int = 0,
    ) -> bool:
        """Return whether a later probe, with these results, shows no sign that the engine was restarted.

        If so, these facts still hold where the later probe got no answer. LoRA adapters are not compared, because
        engines load and unload them at run time.
        """
        are_ids_known = self.engine_ids is not None and engine_ids is not None
        if are_ids_known and self.engine_ids != engine_ids:
            return False
        if self.restart_count != restart_count:
            return False
        models = _find_base_models(self.spec.models, self.roots)
        served_models = _find_base_models(served.models, served.roots)
        return self.spec.engine == served.engine and models == served_models and self.sources == sources

    def drop_event_sources(self) -> WorkerFacts:
        """Return these facts without event sources, so that the worker's cache is estimated."""
        spec = dataclasses.replace(self.spec, ranks=1, cache_view=CacheView.APPROXIMATE)
        return dataclasses.replace(self, spec=spec, sources=())


def _find_base_models(models: Sequence[ServedModel], roots: Mapping[str, str]) -> set[tuple[ServedModel, str | None]]:
    """Return the models that are no LoRA adapters, each with the folder or hub name that it was loaded from."""
    return {(model, roots.get(model.name)) for model in models if model.lora is None}


EVENTS_FLAG = '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\''
"""Option that makes `vllm serve` or `engine serve` publish events."""


def is_key_refused(reason: str) -> bool:
    """Return whether the reason of a failed probe is that the worker refused the router's API key."""
    return "answers 401" in reason or "answers 403" in reason


def suggest_remedy(settings: WorkerSettings, reason: str) -> str:
    """Return what an operator can do about a worker that could not be probed for this reason."""
    if is_key_refused(reason):
        return "give the worker's key, --worker-api-key"
    if "mismatch" in reason and "certificate" in reason:
        return "its certificate is for other names: use one of them in the URL"
    if "certificate has expired" in reason or "certificate is not yet valid" in reason:
        return "renew its certificate, or set this machine's clock"
    if "certificate" in reason:
        return "name who has signed it, --worker-tls-ca FILE"
    if "disconnected" in reason and settings.url.startswith("http://"):
        return "does it speak HTTPS? Then name it with https://"
    return f"is {settings.url} the address of its OpenAI API, and does it run?"


def make_configured_sources(settings: WorkerSettings) -> tuple[EventSource, ...]:
    """Return the event sources of an operator's endpoints. Whether they offer snapshots is unknown."""
    return tuple(
        EventSource(
            data_parallel_rank=rank,
            endpoint=endpoint,
            replay_endpoint=settings.replay[rank] if settings.replay else None,
            topic=settings.topic,
        )
        for rank, endpoint in enumerate(settings.events)
    )


def make_transfer_facts(
    settings: WorkerSettings,
    models: Sequence[ServedModel],
    sources: Sequence[EventSource],
    block_size: int | None,
    engine_ids: tuple[str, ...],
) -> TransferFacts:
    """Return how a worker exchanges KV blocks with other workers, such as blocks of prompts that another one computes.

    If the worker's settings name no transfer protocol, the worker's own offer counts: the engine of this
    project sends one with its event sources. Workers with the same `group` can exchange KV. Here, a group has the same
    protocol, model and block size. A worker with one role does one thing: "prefill" gives KV, "decode" takes KV.
    """
    protocol, offer = settings.kv, sources[0].kv_transfer if sources else None
    if not protocol:
        if offer is None:
            return NO_TRANSFERS
        return TransferFacts(
            group=offer.group,
            kinds=KINDS_BY_DIALECT[BLOCKCAST],
            bytes_per_token=offer.bytes_per_token,
            gb_s=offer.gb_s,
            dialect=BLOCKCAST,
            address=offer.endpoint.removeprefix("tcp://"),
        )
    # SGLang's decode workers may not report a block size. Mooncake's requests for KV name the engine that gives it.
    block_text = "" if protocol == SGLANG else f" {block_size}"
    has_required_ids = bool(engine_ids) or protocol != MOONCAKE
    return TransferFacts(
        group=f"{protocol} {models[0].base}{block_text}",
        kinds=KINDS_BY_DIALECT[protocol],
        can_give=_may_give_kv(settings) and has_required_ids,
        can_take=DECODE_ROLE in settings.roles or PREFILL_ROLE not in settings.roles,
        dialect=protocol,
        address="" if protocol == NIXL else _get_bootstrap_address(settings),
        engine_ids=engine_ids,
        needs_partner=protocol == SGLANG,  # a prefill and a decode worker of SGLang serve a request together
    )


def _may_give_kv(settings: WorkerSettings) -> bool:
    return PREFILL_ROLE in settings.roles or DECODE_ROLE not in settings.roles


def _get_bootstrap_address(settings: WorkerSettings) -> str:
    return settings.bootstrap or f"{bracket_host(urlsplit(settings.url).hostname or '')}:{BOOTSTRAP_PORT}"


def _is_refusal(error: FetchError) -> bool:
    """Return whether nothing listens at the address of a request."""
    cause = error.__cause__
    return isinstance(cause, aiohttp.ClientConnectorError) and isinstance(cause.os_error, ConnectionRefusedError)


class _EngineIds(NamedTuple):
    """Names of a worker's engines for Mooncake's transfers, as its bootstrap server tells them in one probe."""

    ids: tuple[str, ...] | None
    """Name for each rank; empty: the worker has none; None: unknown, as no answer came or the server was not asked."""
    problem: str = ""
    """Why the server did not tell the names; empty: it did, or was not asked."""


def _read_engine_ids(bootstrap: asyncio.Future[tuple[int, bytes] | None], rank_count: int) -> _EngineIds:
    """Return the engine ids in the awaited answer of a bootstrap server; none if it is absent or talks nonsense."""
    try:
        answer = bootstrap.result()
        return _EngineIds(None if answer is None else read_bootstrap(*answer, rank_count))
    except DecodeError as error:
        return _EngineIds((), str(error))
    except FetchError as error:
        return _EngineIds(() if _is_refusal(error) else None, str(error))


class _Answers(NamedTuple):
    """Answers of a worker to the questions that a probe asks at once."""

    sources: tuple[EventSource, ...]
    engine_ids: _EngineIds
    metrics: str
    """Lines of `/metrics` that are used; empty if there are none."""


class Prober:
    """HTTP client that asks workers what they are. Every answer is bounded in time and size."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        host_names: HostNames | None = None,
        *,
        timeout_s: float = 5.0,
        headers: dict[str, str] | None = None,
        trusts_endpoints: bool = False,
        kv_dialects: Collection[str] = (),
    ):
        """Prepare to ask workers through `session`.

        `headers`: sent to workers that may get the API key. `trusts_endpoints`: workers may name event endpoints on
        other hosts. `kv_dialects`: KV transfer protocols that this router uses between workers.
        """
        self._session = session
        self.host_names = host_names or HostNames()
        self._timeout_s = timeout_s
        self._headers = headers or {}
        self._trusts_endpoints = trusts_endpoints
        self._kv_dialects = kv_dialects

    async def check_health(self, settings: WorkerSettings) -> str | None:
        """Return None if `/health` answers 200, else the reason. A worker without a URL is taken as healthy."""
        if not settings.url:
            return None
        try:
            status, _ = await self._get(settings, "/health")
        except FetchError as error:
            return f"/health: {error}"
        return None if status == 200 else f"/health answers {status}"

    async def probe(
        self, settings: WorkerSettings, earlier_facts: WorkerFacts | None = None, restart_count: int = 0
    ) -> WorkerFacts:
        """Ask a worker for its models, event sources, cache size and sleep state. Raises FetchError, DecodeError.

        The models are asked for first, so that a worker that hangs costs one connection and one timeout.
        `earlier_facts`: result of the previous probe; facts that the same engine does not report now are taken from it.
        `restart_count`: restarts of the engine that its event streams have shown.
        """
        served = await self.fetch_models(settings)
        earlier_sources = () if earlier_facts is None else earlier_facts.sources
        answers = await self._ask_at_once(settings, served.engine, earlier_sources)
        sources, (engine_ids, ids_problem) = answers.sources, answers.engine_ids
        if ids_problem and (earlier_facts is None or not earlier_facts.engine_ids_problem):
            log.warning("worker %s does not name its engines for KV: %s", settings.worker_id, ids_problem)
        sizes = await self._find_sizes(settings, served.engine, answers.metrics)
        is_asleep = are_ranks_asleep(read_loads(answers.metrics, max(1, len(sources))))

        is_new_engine = earlier_facts is None or not earlier_facts.may_be_same_engine(
            served, sources, engine_ids, restart_count
        )
        if earlier_facts is not None and not is_new_engine:  # fill in what the engine told before, but not this time
            sizes = earlier_facts.sizes if sizes == UNKNOWN_SIZES else sizes
            engine_ids = earlier_facts.engine_ids if engine_ids is None else engine_ids
        elif is_asleep is None:
            is_asleep = False  # a new engine is awake
        return WorkerFacts(
            spec=self._make_spec(settings, served, sources, sizes, engine_ids or ()),
            sources=sources,
            roots=served.roots,
            sizes=sizes,
            engine_ids=engine_ids,
            is_asleep=is_asleep,
            engine_ids_problem=ids_problem,
            restart_count=restart_count,
            is_new_engine=is_new_engine,
        )

    async def _ask_at_once(
        self, settings: WorkerSettings, engine: str, earlier_sources: tuple[EventSource, ...]
    ) -> _Answers:
        """Ask what does not depend on other answers. Raises FetchError, DecodeError if the sources are unknown."""
        sources_task = asyncio.ensure_future(self._find_sources(settings, engine, earlier_sources))
        bootstrap_task = asyncio.ensure_future(self._fetch_bootstrap(settings))
        metrics_task = asyncio.ensure_future(self._fetch_metrics(settings))
        # An exception stays in its task, so that all answers are awaited.
        await asyncio.gather(sources_task, bootstrap_task, metrics_task, return_exceptions=True)
        sources = sources_task.result()  # raises the exception of the task, if it has one
        if settings.reannounces:
            sources = tuple(msgspec.structs.replace(source, reannounces=True) for source in sources)
        return _Answers(sources, _read_engine_ids(bootstrap_task, max(1, len(sources))), metrics_task.result())

    def _make_spec(
        self,
        settings: WorkerSettings,
        served: ModelList,
        sources: tuple[EventSource, ...],
        sizes: EngineSizes,
        engine_ids: tuple[str, ...],
    ) -> WorkerSpec:
        """Return the description of a worker that routing uses: what its operator has set, else what it reports."""
        block_size = settings.block_size
        if sources and block_size is None:  # an estimated cache has blocks of the router's own size
            block_size = sources[0].block_size or sizes.block_size
        transfer = make_transfer_facts(settings, served.models, sources, block_size, engine_ids)
        can_transfer = bool(settings.url) and transfer.dialect in self._kv_dialects
        return WorkerSpec(
            worker_id=settings.worker_id,
            url=settings.url,
            models=served.models,
            roles=settings.roles,
            ranks=max(1, len(sources)),
            engine=served.engine,
            cache_view=CacheView.EVENTS if sources else CacheView.APPROXIMATE,
            cache_tokens=settings.cache_tokens or sizes.cache_tokens,
            host_tokens=sizes.host_tokens,
            max_num_seqs=settings.max_num_seqs or sizes.max_num_seqs,
            step_tokens=sizes.step_tokens,
            block_size=block_size,
            is_shortest_first=sizes.is_shortest_first
            if settings.is_shortest_first is None
            else settings.is_shortest_first,
            transfer=transfer if can_transfer else NO_TRANSFERS,
        )

    async def fetch_models(self, settings: WorkerSettings) -> ModelList:
        """Return the models that a worker serves, at least one. Raises FetchError, DecodeError."""
        if not settings.url:
            roots = {settings.model: settings.root} if settings.root else {}
            return ModelList((ServedModel(settings.model, settings.model),), roots)
        status, body = await self._get(settings, "/v1/models")
        if status != 200:
            raise DecodeError(f"/v1/models answers {status}")
        served = read_models(body)
        if not served.models:
            raise DecodeError("/v1/models lists no model")
        return served

    async def _find_sources(
        self, settings: WorkerSettings, engine: str, known_sources: tuple[EventSource, ...]
    ) -> tuple[EventSource, ...]:
        """Return where a worker publishes its cache events: one source for each rank, none if it publishes nothing.

        The operator's sources are used if there are any, else those that the worker reports, SGLang in `/server_info`.
        Without a report, vLLM's default port is used if something listens there. `known_sources`: result of the last
        call, which is returned again while the worker answers with another error, or the port not at all.
        """
        if settings.no_events:
            return ()
        if settings.events:
            return make_configured_sources(settings)
        status, body = await self._get(settings, "/kv_event_sources")
        has_no_report = status in NOT_OFFERED
        sources = read_sources(body, settings.url) if status == 200 else ()
        if has_no_report and engine not in (VLLM, BLOCKCAST):
            info_status, body = await self._get(settings, "/server_info")
            sources = read_publisher(body, settings.url) if info_status == 200 else ()
            has_no_report = info_status == 200 or info_status in NOT_OFFERED
        if status == 200 or sources:
            if not self._trusts_endpoints:
                await self._check_hosts(settings, sources)
            return sources
        if known_sources and not has_no_report:
            return known_sources  # the worker or its proxy may be busy, so its sources are taken as unchanged
        host = urlsplit(settings.url).hostname or "127.0.0.1"
        is_listening = await self.is_listening(host, DEFAULT_PORT)
        if is_listening is None:  # no reply in time
            return known_sources
        return (make_default_source(host, settings.topic),) if is_listening else ()

    async def _check_hosts(self, settings: WorkerSettings, sources: tuple[EventSource, ...]) -> None:
        """Raise DecodeError if a worker names an event endpoint on another host.

        A worker could make the router connect to hosts that the worker itself cannot reach. So the router does that
        only if the operator allows it.
        """
        worker_host = urlsplit(settings.url).hostname or ""
        own_hosts: set[str] = set()  # the endpoints of many ranks name the same host, which is resolved once
        for source in sources:
            for endpoint in list_endpoints(source):
                host = parse_endpoint_host(endpoint)
                if host in own_hosts:
                    continue
                if host is None or not await self._is_same_host(host, worker_host):
                    raise DecodeError(
                        f"/kv_event_sources: rank {source.data_parallel_rank}: {endpoint[:80]!r} is not on "
                        f"{worker_host}, the worker's own host; events=ENDPOINT for this worker, or "
                        "--trust-event-endpoints, allows it"
                    )
                own_hosts.add(host)

    async def _is_same_host(self, host: str, worker_host: str) -> bool:
        """Return whether a host is the worker's own: both have the same name, or an IP address in common."""
        if host.lower() == worker_host:
            return True
        return bool(await self._resolve_addresses(worker_host) & await self._resolve_addresses(host))

    async def _resolve_addresses(self, host: str) -> set[str]:
        """Return the IP addresses of a host; empty if its name cannot be resolved."""
        try:
            address_infos = await asyncio.wait_for(self.host_names.look_up(host, 0), self._timeout_s)
        except (OSError, UnicodeError, asyncio.TimeoutError):
            return set()
        return {str(address[0]).partition("%")[0] for *_, address in address_infos}

    async def fetch_loads(self, settings: WorkerSettings, ranks: int) -> list[EngineLoad | None]:
        """Return the load that each rank reports; None for a rank that reports none."""
        return read_loads(await self._fetch_metrics(settings), ranks)

    async def _fetch_metrics(self, settings: WorkerSettings) -> str:
        """Return the lines of the worker's `/metrics` that are used; empty if there are none."""
        try:
            status, body = await self._get(settings, "/metrics", METRICS_BYTES_MAX)
        except FetchError:
            return ""
        metric_chunks = []
        for metric_chunk in select_metric_lines(body if status == 200 else b""):
            metric_chunks.append(metric_chunk)
            await asyncio.sleep(0)
        return b"\n".join(metric_chunks).decode("utf-8", "replace")

    async def _find_sizes(self, settings: WorkerSettings, engine: str, metrics: str) -> EngineSizes:
        """Return the sizes that a worker's metrics tell, or else, of SGLang, its `/server_info`."""
        sizes = read_engine_sizes(metrics, reserved_blocks=int(engine == VLLM))  # vLLM keeps a block of each rank
        if engine != BLOCKCAST:  # others cache no prefixes in host memory; vLLM reports its swap space there
            sizes = sizes._replace(host_tokens=None, is_shortest_first=False)
        if sizes.cache_tokens or engine in (VLLM, BLOCKCAST):
            return sizes
        try:
            status, body = await self._get(settings, "/server_info")
            server_info = read_server_info(body) if status == 200 else UNKNOWN_SIZES
        except (FetchError, DecodeError):
            return sizes
        return sizes._replace(
            cache_tokens=server_info.cache_tokens, step_tokens=sizes.step_tokens or server_info.step_tokens
        )

    async def _get(self, settings: WorkerSettings, path: str, bytes_max: int = BODY_BYTES_MAX) -> tuple[int, bytes]:
        """Return the status and the body of an answer; a worker without a URL answers 404. Raises FetchError."""
        if not settings.url:
            return 404, b""
        headers = self._headers if settings.sends_api_key else None
        return await fetch(
            self._session, f"{settings.url}{path}", headers=headers, seconds=self._timeout_s, bytes_max=bytes_max
        )

    async def _fetch_bootstrap(self, settings: WorkerSettings) -> tuple[int, bytes] | None:
        """Return status and body of Mooncake's `GET /query`; None if it gives no KV. Raises FetchError."""
        may_give_through_mooncake = settings.kv == MOONCAKE and bool(settings.url) and _may_give_kv(settings)
        if not may_give_through_mooncake or MOONCAKE not in self._kv_dialects:
            return None
        url = f"http://{_get_bootstrap_address(settings)}/query"
        status, body = await fetch(self._session, url, seconds=self._timeout_s, bytes_max=BODY_BYTES_MAX)
        if status != 200 and status not in NOT_OFFERED:
            raise FetchError(f"/query answers {status}")
        return status, body

    async def is_listening(self, host: str, port: int) -> bool | None:
        """Return whether an address accepts connections; None if that is not known, as no answer came in time."""
        try:
            connected = await asyncio.wait_for(self.host_names.connect(host, port), min(1.0, self._timeout_s))
        except ConnectionRefusedError:
            return False
        except (OSError, asyncio.TimeoutError):
            return None
        connected.close()
        return True
