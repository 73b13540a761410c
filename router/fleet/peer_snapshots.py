"""Snapshots of event streams that one router takes from another, at its start and after events were lost.

A snapshot is the index's dump of one stream, with its position: the number and digest of the last batch. The stream
resumes from that position, which the worker's replay must confirm byte for byte; if it does not, the snapshot is
dropped and the replay buffer is read. So a peer that is behind costs a request and never a false hit. Workers without
replay, and workers that offer snapshots of their own, are left out.

Dumps hold digests of token ids, so a router takes the digest seed of its peer when it starts.
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
from router.fleet.index_feed import SNAPSHOT_S_MAX, SNAPSHOT_VERSION, PeerSnapshot, can_use_peer_snapshot
from router.fleet.worker_responses import parse_number
from router.http.request import HttpRequest
from router.http.routes import Response
from router.http_client import FetchError, fetch, make_key_headers

log = logging.getLogger("router")

SEED_S_MAX = 3.0
SEED_BYTES_MAX = 65536
SNAPSHOT_BYTES_MAX = 1 << 30
MSGPACK = b"application/msgpack"


class _NoRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that the API key goes only to the address that the operator named."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirectHandler())


class _SeedBody(msgspec.Struct):
    version: int
    seed: int


SnapshotSource = Callable[[str, int], "PeerSnapshot | None"]
"""Makes the snapshot of a worker's rank; None if it could not be confirmed. May take seconds."""


class PeerRoutes:
    """HTTP routes, at the admin address, by which other routers copy what the index knows of a worker's cache."""

    def __init__(self, seed: int, dump: SnapshotSource, outcomes: Counter[str]) -> None:
        """`seed`: hash seed of the index. `outcomes` counts snapshot_served and snapshot_refused."""
        self._seed = seed
        self._dump = dump
        self._outcomes = outcomes
        self._lock = asyncio.Lock()

    def get_seed(self, request: HttpRequest, _: str) -> Response:
        """Answer `GET /peer` with the seed of this router's digests."""
        return Response(msgspec.json.encode(_SeedBody(SNAPSHOT_VERSION, self._seed)))

    async def get_snapshot(self, request: HttpRequest, argument: str) -> Response:
        """Answer `GET /peer/WORKER%23RANK` with a snapshot of that rank. Raises RequestError if there is none."""
        worker_id, _, rank_text = argument.rpartition("#")
        rank = parse_number(rank_text)
        if not worker_id or rank is None:
            raise RequestError(f"/peer/{argument}: expected WORKER#RANK, # as %23", param=None, status=400)
        async with self._lock:
            snapshot = await asyncio.get_running_loop().run_in_executor(None, self._dump, worker_id, rank)
        body = b"" if snapshot is None else msgspec.msgpack.encode(snapshot)
        if not body or len(body) > SNAPSHOT_BYTES_MAX:
            self._outcomes["snapshot_refused"] += 1
            reason = f"no snapshot of {argument}: unknown, or not in step with it"
            raise RequestError(reason, param=None, code="no_snapshot", status=404)
        self._outcomes["snapshot_served"] += 1
        return Response(body, content_type=MSGPACK)


def fetch_seed(urls: Iterable[str], key: str | None = None) -> tuple[int | None, list[str]]:
    """Return the hash seed of the first router of this version that answers, and the URLs of all with that seed.

    Snapshots can be used only between indexes that hash token ids with the same seed. Returns (None, []) if no router
    answers. Waits up to SEED_S_MAX for each. `key`: API key of their admin routes.
    """
    seed: int | None = None
    matching_urls: list[str] = []
    for url in urls:
        try:
            request = urllib.request.Request(f"{url.rstrip('/')}/peer", headers=make_key_headers(key))
            with _OPENER.open(request, timeout=SEED_S_MAX) as response:
                answer = msgspec.json.decode(response.read(SEED_BYTES_MAX), type=_SeedBody)
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            log.warning(
                "--snapshot-from %s: nothing is copied, no router answers there: %s. Name the admin address of another "
                "router that runs already",
                url,
                getattr(error, "reason", error),
            )
            continue
        if answer.version == SNAPSHOT_VERSION and seed in (None, answer.seed):
            seed = answer.seed
            matching_urls.append(url.rstrip("/"))
    return seed, matching_urls


class PeerClient:
    """HTTP client that copies from other routers what their indexes know of a worker's cache (snapshots)."""

    def __init__(self, session: aiohttp.ClientSession, urls: Iterable[str], key: str | None = None) -> None:
        self.outcomes: Counter[str] = Counter()
        """Counts snapshot_taken, snapshot_older, snapshot_malformed, snapshot_unanswered (also too large)."""
        self._headers = make_key_headers(key)
        self._session = session
        self._urls = list(urls)

    async def fetch_snapshots(
        self, worker_id: str, sources: Iterable[EventSource], only_before: Mapping[int, int] | None = None
    ) -> dict[int, PeerSnapshot]:
        """Return the snapshots that other routers have of a worker's cached blocks, by data-parallel rank.

        `sources`: the event stream of each rank. Ranks that cannot use another router's snapshot are left out.
        `only_before`: rank -> number of a batch of events; if given, only these ranks are asked for, and only snapshots
        that begin before the batch are returned.
        """
        snapshot_by_rank: dict[int, PeerSnapshot] = {}
        for rank, source in enumerate(sources):
            is_wanted = only_before is None or rank in only_before
            if not is_wanted or not can_use_peer_snapshot(source):
                continue
            before_batch = None if only_before is None else only_before[rank]
            for url in self._urls:
                snapshot = await self._fetch_snapshot(url, f"{worker_id}#{rank}", before_batch)
                if snapshot is not None:
                    snapshot_by_rank[rank] = snapshot
                    log.info("worker %s rank %d: starting from %s, batch %d", worker_id, rank, url, snapshot.seq)
                    break
        return snapshot_by_rank

    async def _fetch_snapshot(self, url: str, stream_name: str, before_batch: int | None) -> PeerSnapshot | None:
        """Return one router's snapshot of a stream, and count the outcome; None if the router has no usable one.

        `stream_name`: WORKER#RANK. `before_batch`: the snapshot must begin before this batch of events; None: anywhere.
        """
        path = f"/peer/{quote(stream_name, safe='')}"
        try:
            status, body = await fetch(
                self._session, url + path, headers=self._headers, seconds=SNAPSHOT_S_MAX, bytes_max=SNAPSHOT_BYTES_MAX
            )
        except FetchError as error:
            log.info("peer router: %s", error)
            status, body = 0, b""
        if status != 200:
            self.outcomes["snapshot_unanswered"] += 1
            return None
        try:
            snapshot = msgspec.msgpack.decode(body, type=PeerSnapshot)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("peer router %s: %s", url, error)
            self.outcomes["snapshot_malformed"] += 1
            return None
        begins_too_late = before_batch is not None and snapshot.complete_from >= before_batch
        if snapshot.version != SNAPSHOT_VERSION or begins_too_late:
            self.outcomes["snapshot_older"] += 1
            return None
        self.outcomes["snapshot_taken"] += 1
        return snapshot
