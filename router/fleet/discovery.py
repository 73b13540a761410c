"""Discovery of workers: from a worker's HTTP address to all that the router needs to know of it.

Reads the `--worker` flag and asks the worker over HTTP; router/fleet/worker_responses.py parses the answers. A worker
that names no event source is tried at vLLM's default port. If nothing listens there, its cache is estimated from the
requests that were sent to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import ipaddress
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import msgspec

from events.sources import DEFAULT_PORT, EventSource, make_default_source, parse_endpoint_host
from events.types import DecodeError
from options import ConfigError
from options.addresses import bracket_host, get_default_port
from router.decide.load import EngineLoad
from router.decide.workers import (
    BLOCKCAST,
    DECODE_ROLE,
    KINDS_BY_DIALECT,
    MOONCAKE,
    NIXL,
    NO_TRANSFERS,
    P2P,
    PREFILL_ROLE,
    SGLANG,
    VLLM,
    CacheView,
    ServedModel,
    TransferFacts,
    WorkerSpec,
)
from router.fleet.worker_responses import (
    are_ranks_asleep,
    list_endpoints,
    parse_number,
    read_block_size,
    read_bootstrap,
    read_cache_capacity,
    read_engine,
    read_host_capacity,
    read_loads,
    read_models,
    read_roots,
    read_server_info,
    read_shortest_first,
    read_sources,
    select_metric_lines,
)
from router.http_client import FetchError, fetch

log = logging.getLogger("router")

BODY_BYTES_MAX = 1 << 20
METRICS_BYTES_MAX = 4 << 20
RESOLVE_S_MAX = 5.0
"""Longest resolution of a host name that a worker names."""
NOT_OFFERED = frozenset((404, 405, 410, 501))
"""Statuses by which a worker says that it has no such route; with any other it may have the route later."""


@dataclass(frozen=True, slots=True)
class WorkerFlag:
    """One worker as an operator describes it; values that are given here are not discovered."""

    url: str
    """Empty if another program sends requests to the worker, and asks this router only which one to take."""
    worker_id: str
    events: tuple[str, ...] = ()
    """PUB endpoints, one for each data-parallel rank; empty: discover them."""
    replay: tuple[str, ...] = ()
    topic: str = ""
    no_events: bool = False
    """`events=none`: estimate the cache from the requests that were sent there."""
    roles: frozenset[str] = frozenset()
    kv: str = ""
    """Dialect in which the worker moves KV; empty: as the worker says."""
    bootstrap: str = ""
    """HOST:PORT where other workers meet the worker to get its KV; empty: its host and BOOTSTRAP_PORT."""
    cache_tokens: int | None = None
    max_num_seqs: int | None = None
    """Sequences that the worker runs at once; engines do not publish it."""
    is_shortest_first: bool | None = None
    """`prefill_order=shortest`: whether the shortest prompt is computed first; None: as the worker says."""
    reannounces: bool = False
    """`reannounce=1`: the worker may publish blocks as stored that it has already (EventSource.reannounces)."""
    sends_api_key: bool = True
    """Whether the worker is sent the workers' API key, as for any named at the router's start."""
    model: str = ""
    """Model that the worker serves, if it has no URL to be asked at."""
    root: str = ""
    """Folder, or name on a hub, of the model's tokenizer."""
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Result of one probe of a worker."""

    is_alive: bool
    reason: str = ""
    """Why the worker is not alive."""
    models: tuple[ServedModel, ...] = ()
    sources: tuple[EventSource, ...] = ()
    """Event sources, one for each data-parallel rank; empty: the worker publishes none."""
    cache_tokens: int | None = None
    block_size: int | None = None
    roots: dict[str, str] = field(default_factory=dict)
    """Folder, or name on a hub, from which the worker loaded each model, by model name."""
    engine: str = ""
    host_tokens: int | None = None
    is_shortest_first: bool = False
    is_asleep: bool = False
    transfer: TransferFacts = NO_TRANSFERS


_HOST_LABEL_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""One label of a host's name; with underscores, which names of containers have."""
_ENDPOINT_PATTERN = re.compile(r"tcp://[^\s;,]+:\d{1,5}|(ipc|inproc)://[^\s;,]+")
_WORKER_ID_PATTERN = re.compile(r"[!-~\u00a1-\U0010ffff]{1,255}")
"""Characters of a worker's id, which stands in headers and metrics."""
TEXT_KEYS = (
    "url", "events", "replay", "topic", "id", "roles", "kv", "bootstrap", "prefill_order", "model", "root",
)  # fmt: skip
"""Keys of `--worker` with a text."""
_BOOTSTRAP_PATTERN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,255}):(?P<port>[1-9][0-9]{0,4})")
BOOTSTRAP_PORT = 8998
"""Port where prefill workers of Mooncake and of SGLang are met, unless their operator chose another."""
KV_FLAG_VALUES = tuple(dialect for dialect in KINDS_BY_DIALECT if dialect != BLOCKCAST)
"""Values of `kv=`: dialects of engines that do not say themselves that they move KV."""
_NUMBER_KEYS = ("cache_tokens", "max_num_seqs", "block_size")
_FLAG_KEYS = (*TEXT_KEYS, *_NUMBER_KEYS, "reannounce", "send_key")
"""All keys of `--worker`. `model`, `root` and `block_size` replace `url`."""
EVENTS_FLAG = '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\''
"""Option that makes `vllm serve` or `engine serve` publish events."""


def parse_worker_flag(text: str) -> WorkerFlag:
    """Parse a value of `--worker`; ranks are separated by `;`. Raises ConfigError naming the part that is wrong.

    Forms: `http://host:8000`; or `url=...,events=tcp://...;tcp://...,replay=...,topic=...,id=...,roles=a;b,
    cache_tokens=N,max_num_seqs=N,prefill_order=shortest,reannounce=1`; or `model=...,root=...,block_size=N` in place of
    `url`, if other programs send the requests to the worker.
    """
    value_by_key: dict[str, str] = {}
    if re.match(r"[a-z_]+=", text) is None:
        value_by_key["url"] = text
    else:
        for part in text.split(","):
            key, separator, value = part.partition("=")
            if not separator:
                raise ConfigError(f"worker: got {part!r} in {text!r}, expected key=value")
            if key in value_by_key:
                raise ConfigError(f"worker: {key} is given twice in {text!r}")
            value_by_key[key] = value
    return make_worker_flag(value_by_key)


def is_key_refused(reason: str) -> bool:
    """Return whether `WorkerFacts.reason` says that a worker refused the router's API key."""
    return "answers 401" in reason or "answers 403" in reason


def suggest_remedy(flag: WorkerFlag, reason: str) -> str:
    """Return what an operator can do about a worker that could not be probed for this reason."""
    if is_key_refused(reason):
        return "give the worker's key, --worker-api-key"
    if "certificate" in reason:
        return "name who has signed it, --worker-tls-ca FILE"
    if "disconnected" in reason and flag.url.startswith("http://"):
        return "does it speak HTTPS? Then name it with https://"
    return f"is {flag.url} the address of its OpenAI API, and does it run?"


def make_worker_flag(value_by_key: Mapping[str, str]) -> WorkerFlag:
    """Make a WorkerFlag from the keys and values of `--worker url=...,id=...`. Raises ConfigError.

    A worker without url= is external: it cannot be asked, so that the flag names its model and where its events come.
    """
    is_external = _check_keys(value_by_key)
    _check_values(value_by_key)
    endpoints, replay_endpoints = _split_endpoints(value_by_key)
    if is_external and not endpoints:
        raise ConfigError(f"worker: events={value_by_key['events']!r}, expected an endpoint where there is no url=")
    url = "" if is_external else normalise_url(value_by_key["url"])
    worker_id = value_by_key.get("id") or derive_worker_id(url)
    if _WORKER_ID_PATTERN.fullmatch(worker_id) is None:
        raise ConfigError(f"worker: id={worker_id!r}, expected up to 255 printable characters without spaces")
    cache_tokens, max_num_seqs, block_size = (value_by_key.get(key) for key in _NUMBER_KEYS)
    prefill_order = value_by_key.get("prefill_order")
    return WorkerFlag(
        url=url,
        worker_id=worker_id,
        events=endpoints,
        replay=replay_endpoints,
        topic=value_by_key.get("topic", ""),
        no_events=value_by_key.get("events") == "none",
        roles=frozenset(filter(None, value_by_key.get("roles", "").split(";"))),
        kv=value_by_key.get("kv", ""),
        bootstrap=value_by_key.get("bootstrap", ""),
        cache_tokens=int(cache_tokens) if cache_tokens is not None else None,
        max_num_seqs=int(max_num_seqs) if max_num_seqs is not None else None,
        is_shortest_first=None if prefill_order is None else prefill_order == "shortest",
        reannounces=value_by_key.get("reannounce") == "1",
        sends_api_key=value_by_key.get("send_key", "1") == "1",
        model=value_by_key.get("model", ""),
        root=value_by_key.get("root", ""),
        block_size=int(block_size) if block_size is not None else None,
    )


def _check_keys(value_by_key: Mapping[str, str]) -> bool:
    """Return whether the keys describe a worker without a URL. Raises ConfigError for unknown and missing keys."""
    unknown_key = next((key for key in value_by_key if key not in _FLAG_KEYS), None)
    if unknown_key is not None:
        closest_keys = difflib.get_close_matches(unknown_key, _FLAG_KEYS, 1)
        hint = f", the nearest is {closest_keys[0]}" if closest_keys else ""
        raise ConfigError(f"--worker: unknown key {unknown_key!r}{hint}; expected {', '.join(_FLAG_KEYS)}")
    external_keys = {"model", "root", "block_size"} & value_by_key.keys()
    if external_keys and "url" in value_by_key:
        raise ConfigError(f"worker: {min(external_keys)}= and url=: expected one of them, a worker with a URL is asked")
    required_keys = ("model", "events", "id") if external_keys else ("url",)
    missing_key = next((key for key in required_keys if not value_by_key.get(key)), None)
    if missing_key is not None:
        raise ConfigError(f"worker: {missing_key}= is missing")
    return bool(external_keys)


def _check_values(value_by_key: Mapping[str, str]) -> None:
    """Raise ConfigError for a number, a 0/1 setting, `kv`, `bootstrap` or `prefill_order` with another value."""
    for key in _NUMBER_KEYS:
        value = value_by_key.get(key)
        if value is not None and not parse_number(value):
            raise ConfigError(f"worker: {key}={value!r}, expected a positive number")
    for key in ("reannounce", "send_key"):
        if value_by_key.get(key, "0") not in ("0", "1"):
            raise ConfigError(f"worker: {key}={value_by_key[key]!r}, expected 0 or 1")
    kv = value_by_key.get("kv")
    if kv not in (None, *KV_FLAG_VALUES):
        raise ConfigError(f"worker: kv={kv!r}, expected {' or '.join(KV_FLAG_VALUES)}")
    bootstrap = value_by_key.get("bootstrap")
    address = None if bootstrap is None else _BOOTSTRAP_PATTERN.fullmatch(bootstrap)
    has_address = address is not None and int(address["port"]) <= 65535
    if bootstrap is not None and not (has_address and kv in (MOONCAKE, SGLANG, P2P)):
        raise ConfigError(
            f"worker: bootstrap={bootstrap!r}, expected HOST:PORT with kv={MOONCAKE}, kv={SGLANG} or kv={P2P}"
        )
    if kv == P2P and bootstrap is None:  # a wrong port breaks later pulls from good peers
        raise ConfigError(f"worker: kv={P2P}: expected bootstrap=HOST:PORT, the address of the worker's P2P tier")
    roles = value_by_key.get("roles")
    if kv == SGLANG and roles not in (PREFILL_ROLE, DECODE_ROLE):
        expected = f"roles={PREFILL_ROLE} or roles={DECODE_ROLE}"
        raise ConfigError(f"worker: kv={SGLANG} with roles={roles!r}, expected {expected}")
    prefill_order = value_by_key.get("prefill_order")
    if prefill_order not in (None, "arrival", "shortest"):
        raise ConfigError(f"worker: prefill_order={prefill_order!r}, expected arrival or shortest")


def _split_endpoints(value_by_key: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the event endpoints and the replay endpoints of all ranks. Raises ConfigError."""
    events, replay = value_by_key.get("events", ""), value_by_key.get("replay", "")
    endpoints = () if events in ("", "none") else tuple(events.split(";"))
    replay_endpoints = tuple(replay.split(";")) if replay else ()
    for endpoint in (*endpoints, *replay_endpoints):
        if _ENDPOINT_PATTERN.fullmatch(endpoint) is None:
            raise ConfigError(f"worker: endpoint {endpoint!r}, expected one like tcp://host:5557")
    if replay_endpoints and len(replay_endpoints) != len(endpoints):
        raise ConfigError(f"worker: {len(replay_endpoints)} replay endpoints for {len(endpoints)} event endpoints")
    return endpoints, replay_endpoints


def normalise_url(url: str) -> str:
    """Return a worker's address as `http://host:port`, without a trailing slash or `/v1`. Raises ConfigError."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"worker url: got {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"worker url: got {url!r}, expected http://host:port")
    if parts.username is not None:
        raise ConfigError(f"worker url: got one with a user in it for {parts.hostname!r}, expected http://host:port")
    if not _is_valid_host(parts.hostname) or not url.isprintable() or " " in url:
        raise ConfigError(f"worker url: got {url!r}: nothing can have that address, expected http://host:port")
    host = bracket_host(parts.hostname)
    host_port = host if port is None else f"{host}:{port}"
    return f"{parts.scheme}://{host_port}{parts.path.rstrip('/').removesuffix('/v1')}"


def _is_valid_host(host: str) -> bool:
    """Return whether a text is an IP address or can be a host name. It is not resolved."""
    if ":" in host or host.rpartition(".")[2].isdigit():
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True
    try:
        labels = host.rstrip(".").encode("idna").decode().split(".")
    except UnicodeError:
        return False
    return all(_HOST_LABEL_PATTERN.fullmatch(label) for label in labels)


def derive_worker_id(url: str) -> str:
    """Return the id of a worker without a given one: host:port (and path) of its normalised URL."""
    parts = urlsplit(url)
    port = parts.port or get_default_port(parts.scheme)
    return f"{bracket_host(parts.hostname or '')}:{port}{parts.path}"


def make_configured_sources(flag: WorkerFlag) -> tuple[EventSource, ...]:
    """Return the event sources of an operator's endpoints.

    It is unknown whether they offer snapshots, so other routers are asked for snapshots too.
    """
    return tuple(
        EventSource(
            data_parallel_rank=rank,
            endpoint=endpoint,
            replay_endpoint=flag.replay[rank] if flag.replay else None,
            topic=flag.topic,
        )
        for rank, endpoint in enumerate(flag.events)
    )


def make_worker_spec(flag: WorkerFlag, facts: WorkerFacts) -> WorkerSpec:
    """Return the description of a probed worker for the router's core."""
    return WorkerSpec(
        worker_id=flag.worker_id,
        url=flag.url,
        models=facts.models,
        roles=flag.roles,
        engine=facts.engine,
        ranks=max(1, len(facts.sources)),
        cache_view=CacheView.EVENTS if facts.sources else CacheView.APPROXIMATE,
        cache_tokens=flag.cache_tokens or facts.cache_tokens,
        host_tokens=facts.host_tokens,
        max_num_seqs=flag.max_num_seqs,
        block_size=facts.block_size,
        is_shortest_first=facts.is_shortest_first if flag.is_shortest_first is None else flag.is_shortest_first,
        transfer=facts.transfer,
    )


def make_transfer_facts(
    flag: WorkerFlag, models: Sequence[ServedModel], sources: Sequence[EventSource], block_size: int | None
) -> TransferFacts:
    """Return how a worker moves KV: as its operator says, else as the worker offers.

    Workers of the operator's dialect are taken as compatible if they serve equal models in equal blocks. SGLang's
    decoding workers need not tell their blocks.
    """
    if flag.kv:
        return TransferFacts(
            group=f"{flag.kv} {models[0].base}" + ("" if flag.kv == SGLANG else f" {block_size}"),
            kinds=KINDS_BY_DIALECT[flag.kv],
            can_give=_may_give_kv(flag),
            can_take=DECODE_ROLE in flag.roles or PREFILL_ROLE not in flag.roles,
            dialect=flag.kv,
            address="" if flag.kv == NIXL else flag.bootstrap or _make_bootstrap_address(flag.url),
            needs_partner=flag.kv == SGLANG,
        )
    offer = sources[0].kv_transfer if sources else None
    if offer is None:
        return NO_TRANSFERS
    return TransferFacts(
        group=offer.group,
        kinds=KINDS_BY_DIALECT[BLOCKCAST],
        bytes_per_token=offer.bytes_per_token,
        dialect=BLOCKCAST,
        address=offer.endpoint.removeprefix("tcp://"),
    )


def _may_give_kv(flag: WorkerFlag) -> bool:
    return PREFILL_ROLE in flag.roles or DECODE_ROLE not in flag.roles


def _make_bootstrap_address(url: str) -> str:
    return f"{bracket_host(urlsplit(url).hostname or '')}:{BOOTSTRAP_PORT}"


async def _is_same_host(host: str, worker_host: str) -> bool:
    """Return whether a host is that of a worker: it has the same name, or an IP address in common."""
    if host.lower() == worker_host:
        return True
    return bool(await _resolve_addresses(worker_host) & await _resolve_addresses(host))


async def _resolve_addresses(host: str) -> set[str]:
    """Return the IP addresses of a host; empty if its name cannot be resolved."""
    try:
        address_infos = await asyncio.wait_for(asyncio.get_running_loop().getaddrinfo(host, None), RESOLVE_S_MAX)
    except (OSError, UnicodeError, asyncio.TimeoutError):
        return set()
    return {str(address[0]).partition("%")[0] for *_, address in address_infos}


class Prober:
    """Asks workers over HTTP. Every answer is bounded in time and size, and no fault of a worker raises."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout_s: float = 5.0,
        headers: dict[str, str] | None = None,
        trusts_endpoints: bool = False,
        kv_dialects: Collection[str] = (),
    ):
        """`trusts_endpoints`: workers may name event endpoints on hosts other than their own. `kv_dialects`: those in
        which this router has workers move KV.
        """
        self._kv_dialects = kv_dialects
        self._session = session
        self._trusts_endpoints = trusts_endpoints
        self._timeout_s = timeout_s
        self._headers = headers or {}

    async def check_health(self, flag: WorkerFlag) -> str | None:
        """Return None if `/health` answers 200, else the reason. A worker without a URL is taken as healthy."""
        if not flag.url:
            return None
        try:
            status, _ = await self._get(flag, "/health")
        except FetchError as error:
            return f"/health: {error}"
        return None if status == 200 else f"/health answers {status}"

    async def probe(self, flag: WorkerFlag, previous: WorkerFacts | None = None) -> WorkerFacts:
        """Find out a worker's models, event sources and cache size.

        `previous` is the result of an earlier probe: its event sources stand if the worker is too busy to say.
        """
        if not flag.url:
            roots = {flag.model: flag.root} if flag.root else {}
            sources = await self.discover_sources(flag)
            return WorkerFacts(
                True, "", (ServedModel(flag.model, flag.model),), sources, flag.cache_tokens, flag.block_size, roots
            )
        try:
            status, body = await self._get(flag, "/v1/models")
            if status != 200:
                return WorkerFacts(False, f"/v1/models answers {status}")
            models, roots, engine = read_models(body), read_roots(body), read_engine(body)
            sources = await self.discover_sources(flag, previous)
            metrics = await self._fetch_metrics(flag)
            capacity = read_cache_capacity(metrics, reserved_blocks=int(engine == VLLM)) or await self._fetch_capacity(
                flag
            )
        except (FetchError, DecodeError) as error:
            return WorkerFacts(False, str(error))
        if not models:
            return WorkerFacts(False, "/v1/models lists no model")
        block_size = None
        if sources:
            block_size = sources[0].block_size or read_block_size(metrics)
        # vLLM's label of that name is of its swap space.
        host_tokens = read_host_capacity(metrics) if engine == BLOCKCAST else None
        is_shortest_first = engine == BLOCKCAST and read_shortest_first(metrics)
        is_engine_asleep = are_ranks_asleep(read_loads(metrics, max(1, len(sources)))) is True
        transfer = make_transfer_facts(flag, models, sources, block_size)
        if transfer.dialect not in self._kv_dialects:
            transfer = NO_TRANSFERS
        transfer = await self.name_engines(flag, transfer, max(1, len(sources)))
        return WorkerFacts(
            True,
            "",
            models,
            sources,
            capacity,
            block_size,
            roots,
            engine,
            host_tokens,
            is_shortest_first,
            is_engine_asleep,
            transfer,
        )

    async def fetch_models(self, flag: WorkerFlag) -> tuple[tuple[ServedModel, ...], dict[str, str]]:
        """Return the models that a worker serves, and the root of each. Raises FetchError, DecodeError."""
        if not flag.url:
            return (ServedModel(flag.model, flag.model),), {flag.model: flag.root} if flag.root else {}
        status, body = await self._get(flag, "/v1/models")
        if status != 200:
            raise DecodeError(f"/v1/models answers {status}")
        models = read_models(body)
        if not models:
            raise DecodeError("/v1/models lists no model")
        return models, read_roots(body)

    async def discover_sources(self, flag: WorkerFlag, previous: WorkerFacts | None = None) -> tuple[EventSource, ...]:
        """Return where a worker publishes events; empty if it does not."""
        sources = await self._find_sources(flag, previous)
        if not flag.reannounces:
            return sources
        return tuple(msgspec.structs.replace(source, reannounces=True) for source in sources)

    async def _find_sources(self, flag: WorkerFlag, previous: WorkerFacts | None) -> tuple[EventSource, ...]:
        """Return where a worker publishes its events, one source for each rank; none if it publishes nothing.

        The flag decides if it names events. Else the worker is asked, and if it does not know the question, vLLM's
        default port is used if anything listens there. `previous` is what was learned when the worker joined.
        """
        if flag.no_events:
            return ()
        if flag.events:
            return make_configured_sources(flag)
        status, body = await self._get(flag, "/kv_event_sources")
        if status == 200:
            sources = read_sources(body, flag.url)
            if not self._trusts_endpoints:
                await self._check_hosts(flag, sources)
            return sources
        if status not in NOT_OFFERED and previous is not None and previous.sources:
            return previous.sources  # a worker that is busy or behind a busy proxy publishes where it did
        host = urlsplit(flag.url).hostname or "127.0.0.1"
        return (make_default_source(host, flag.topic),) if await self._is_listening(host, DEFAULT_PORT) else ()

    async def _check_hosts(self, flag: WorkerFlag, sources: tuple[EventSource, ...]) -> None:
        """Raise DecodeError if a worker names an event endpoint on another host.

        The router may reach hosts that the worker may not, so it connects to such an endpoint only if the operator
        allows it.
        """
        worker_host = urlsplit(flag.url).hostname or ""
        own_hosts: set[str] = set()  # the endpoints of many ranks name the same host, which is resolved once
        for source in sources:
            for endpoint in list_endpoints(source):
                host = parse_endpoint_host(endpoint)
                if host in own_hosts:
                    continue
                if host is None or not await _is_same_host(host, worker_host):
                    raise DecodeError(
                        f"/kv_event_sources: rank {source.data_parallel_rank}: {endpoint[:80]!r} is not on "
                        f"{worker_host}, the worker's own host; events=ENDPOINT for this worker, or "
                        "--trust-event-endpoints, allows it"
                    )
                own_hosts.add(host)

    async def fetch_loads(self, flag: WorkerFlag, ranks: int) -> list[EngineLoad | None]:
        """Return the load that each rank reports; None for a rank that reports none."""
        return read_loads(await self._fetch_metrics(flag), ranks)

    async def _fetch_metrics(self, flag: WorkerFlag) -> str:
        """Return the lines of the worker's `/metrics` that are used; empty if there are none."""
        if not flag.url:
            return ""
        try:
            status, body = await self._get(flag, "/metrics", METRICS_BYTES_MAX)
        except FetchError:
            return ""
        metric_chunks = []
        for metric_chunk in select_metric_lines(body if status == 200 else b""):
            metric_chunks.append(metric_chunk)
            await asyncio.sleep(0)
        return b"\n".join(metric_chunks).decode("utf-8", "replace")

    async def _fetch_capacity(self, flag: WorkerFlag) -> int | None:
        status, body = await self._get(flag, "/server_info")
        return read_server_info(body) if status == 200 else None

    async def _get(self, flag: WorkerFlag, path: str, bytes_max: int = BODY_BYTES_MAX) -> tuple[int, bytes]:
        headers = self._headers if flag.sends_api_key else None
        return await fetch(
            self._session, f"{flag.url}{path}", headers=headers, seconds=self._timeout_s, bytes_max=bytes_max
        )

    async def name_engines(self, flag: WorkerFlag, transfer: TransferFacts, rank_count: int) -> TransferFacts:
        """Return the facts of a Mooncake worker with the present names of its engines, and those of others as they are.

        A worker that does not name them gives no KV.
        """
        if transfer.dialect != MOONCAKE or not _may_give_kv(flag):
            return transfer
        try:
            status, body = await fetch(
                self._session, f"http://{transfer.address}/query", seconds=self._timeout_s, bytes_max=BODY_BYTES_MAX
            )
            engine_ids = read_bootstrap(status, body, rank_count)
        except (FetchError, DecodeError) as error:
            if transfer.can_give:
                log.warning("worker %s gives no KV: %s", flag.worker_id, error)
            return dataclasses.replace(transfer, can_give=False, engine_ids=())
        return dataclasses.replace(transfer, can_give=True, engine_ids=engine_ids)

    async def _is_listening(self, host: str, port: int) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), min(1.0, self._timeout_s))
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True
