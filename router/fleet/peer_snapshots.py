"""A router that lacks the past of a stream takes what another one knows: at its start, and after a gap or a reconnect
that the worker's replay does not cover. For workers that offer no snapshot of their own.

Owns the two routes (`GET /peer`, `GET /peer/WORKER%23RANK`), their bodies, and the asking. A snapshot is the index's
dump of one stream with the place in the stream it is true for: (seq, digest of that batch). It is applied before the
stream is followed, and the stream then resumes from that place, which the worker's own replay has to confirm byte for
byte; where it does not, everything is forgotten and the ring is replayed. So a peer that is behind, or that follows
another worker of the same name, costs a request and never a false hit. A worker without replay cannot confirm anything:
its snapshot is not asked for. Dumps hold digests, so a router takes its peer's digest seed when it starts.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

import aiohttp
import msgspec

from events.sources import EventSource
from prompts.errors import RequestError
from router.fleet.feed import SNAPSHOT_S_MAX, SNAPSHOT_VERSION, PeerSnapshot
from router.fleet.worker_responses import parse_number
from router.http.request import HttpRequest
from router.http.routes import Response
from router.http_client import FetchError, fetch

log = logging.getLogger("router")

SEED_S_MAX = 3.0
SEED_BYTES_MAX = 65536
SNAPSHOT_BYTES_MAX = 1 << 30
MSGPACK = b"application/msgpack"


class _NoRedirectHandler(urllib.request.HTTPRedirectHandler):
    """A key goes to whom the operator named, and nowhere else."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirectHandler())


class _SeedBody(msgspec.Struct):
    version: int
    seed: int


SnapshotSource = Callable[[str, int], "PeerSnapshot | None"]
"""(worker, rank) -> what is known; None: nothing that could be proven. May take seconds."""


class PeerRoutes:
    """The serving side. Both routes tell what is cached: they are for the admin address."""

    def __init__(self, seed: int, dump: SnapshotSource, outcomes: Counter[str] | None = None) -> None:
        """`outcomes`: counts snapshot_served and snapshot_refused (nothing that could be proven, or too large)."""
        self._seed = seed
        self._dump = dump
        self._outcomes: Counter[str] = Counter() if outcomes is None else outcomes
        self._lock = asyncio.Lock()

    def get_seed(self, request: HttpRequest, _: str) -> Response:
        """GET /peer: the seed of this router's digests."""
        return Response(msgspec.json.encode(_SeedBody(SNAPSHOT_VERSION, self._seed)))

    async def get_snapshot(self, request: HttpRequest, argument: str) -> Response:
        """GET /peer/WORKER%23RANK: a PeerSnapshot."""
        worker, _, rank = argument.rpartition("#")
        if not worker or parse_number(rank) is None:
            raise RequestError(f"/peer/{argument}: expected WORKER#RANK, # as %23", param=None, status=400)
        async with self._lock:
            snapshot = await asyncio.get_running_loop().run_in_executor(None, self._dump, worker, int(rank))
        if snapshot is not None and sum(map(len, snapshot.chunks)) > SNAPSHOT_BYTES_MAX - 4096:
            snapshot = None  # nobody would read it
        self._outcomes["snapshot_refused" if snapshot is None else "snapshot_served"] += 1
        if snapshot is None:
            raise RequestError(
                f"no snapshot of {argument}: unknown, or not in step with it",
                param=None,
                code="no_snapshot",
                status=404,
            )
        return Response(msgspec.msgpack.encode(snapshot), content_type=MSGPACK)


def fetch_seed(urls: Iterable[str], key: str | None = None) -> tuple[int | None, list[str]]:
    """The digest seed of the first router that answers at one of `urls`, and the URLs of all that have it. `key`: of
    their admin routes.

    (None, []) where nobody answers. Waits up to SEED_S_MAX for each.
    """
    seed: int | None = None
    matching_urls: list[str] = []
    for url in urls:
        try:
            request = urllib.request.Request(f"{url.rstrip('/')}/peer", headers=_key_header(key))
            with _OPENER.open(request, timeout=SEED_S_MAX) as response:
                answer = msgspec.json.decode(response.read(SEED_BYTES_MAX), type=_SeedBody)
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            log.warning(
                "--snapshot-from %s: no router answers there, nothing is copied from it: %s",
                url,
                getattr(error, "reason", error),
            )
            continue
        if answer.version == SNAPSHOT_VERSION and seed in (None, answer.seed):
            seed = answer.seed
            matching_urls.append(url.rstrip("/"))
    return seed, matching_urls


def _key_header(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class PeerClient:
    """The asking side. `urls`: routers of the same seed, asked in turn. A peer's fault never raises."""

    def __init__(self, session: aiohttp.ClientSession, urls: Iterable[str], key: str | None = None) -> None:
        self.outcomes: Counter[str] = Counter()
        """snapshot_taken, snapshot_older, snapshot_malformed, snapshot_unanswered (also too large)."""
        self._headers = _key_header(key)
        self._session = session
        self._urls = list(urls)

    @property
    def has_peers(self) -> bool:
        return bool(self._urls)

    async def fetch_snapshots(
        self, worker_id: str, sources: Iterable[EventSource], only_before: Mapping[int, int] | None = None
    ) -> dict[int, PeerSnapshot]:
        """Rank -> what a peer knows, for the streams that can confirm it and that offer no snapshot themselves.

        `only_before`: only these ranks, and only what goes back further than the batch given for each.
        """
        snapshots: dict[int, PeerSnapshot] = {}
        for rank, source in enumerate(sources):
            if (
                source.snapshot
                or source.replay_endpoint is None
                or (only_before is not None and rank not in only_before)
            ):
                continue
            for url in self._urls:
                body = await self._get(f"{url}/peer/{quote(f'{worker_id}#{rank}', safe='')}")
                try:
                    snapshot = msgspec.msgpack.decode(body, type=PeerSnapshot) if body is not None else None
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    log.warning("peer router %s: %s", url, error)
                    self.outcomes["snapshot_malformed"] += 1
                    continue
                if snapshot is None:
                    self.outcomes["snapshot_unanswered"] += 1
                    continue
                if snapshot.version != SNAPSHOT_VERSION or (
                    only_before is not None and snapshot.complete_from >= only_before[rank]
                ):
                    self.outcomes["snapshot_older"] += 1
                else:
                    snapshots[rank] = snapshot
                    self.outcomes["snapshot_taken"] += 1
                    log.info("worker %s rank %d: starting from %s, batch %d", worker_id, rank, url, snapshot.seq)
                    break
        return snapshots

    async def _get(self, url: str) -> bytes | None:
        try:
            status, body = await fetch(
                self._session, url, headers=self._headers, seconds=SNAPSHOT_S_MAX, bytes_max=SNAPSHOT_BYTES_MAX
            )
        except FetchError as error:
            log.info("peer router: %s", error)
            return None
        return body if status == 200 else None
