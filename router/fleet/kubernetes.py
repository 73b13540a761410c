"""Workers that Kubernetes lists: a Service's EndpointSlices, or the pods of an InferencePool.

Lists objects and then watches them from the version of the list on. A watch that ends or fails is resumed from its last
version; only if the API no longer has that version is everything listed again. While the API cannot be reached, the
workers stay as they are. router/fleet/kubernetes_objects.py parses the objects.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp

from events.types import DecodeError
from options import ConfigError
from router.fleet.kubernetes_objects import (
    LINE_BYTES_MAX,
    EndpointReadiness,
    ObjectCache,
    PoolSelection,
    VersionGoneError,
    read_pod,
    read_pool,
    read_slice,
)
from router.http_client import FetchError, iterate_body

log = logging.getLogger("router")

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIST_S_MAX = 30
WATCH_S = 300
"""Time after which the server ends a watch; the next one continues from its last version."""
POOL_S = 10.0
"""Time between two requests for what a pool selects."""
RETRY_S, RETRY_S_MAX = 1.0, 30.0
_SOURCE_PATTERN = re.compile(r"(?:(?:([a-z0-9-]+)/)?(service|pool)/)?([a-z0-9][a-z0-9.-]*)(?::([a-z0-9-]+))?")

AddressCallback = Callable[[EndpointReadiness], None]
ApiClient = Any
"""Client of the package kubernetes_asyncio, which is optional."""


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Service or InferencePool that has the workers as its endpoints."""

    kind: str
    """`service` or `pool`."""
    name: str
    namespace: str | None
    """None: the namespace of the router's pod, else `default`."""
    port: str | None
    """Number or name; None: the first port of each slice, or the port of the pool."""

    @classmethod
    def parse(cls, text: str) -> KubernetesSource:
        """Parse a value of `--kubernetes`. Raises ConfigError."""
        match = _SOURCE_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(f"--kubernetes: got {text!r}, expected [[NAMESPACE/](service|pool)/]NAME[:PORT]")
        if match[2] == "pool" and match[4] is not None and not match[4].isdigit():
            raise ConfigError(f"--kubernetes: got {text!r}, expected a port's number")
        return cls(match[2] or "service", match[3], match[1], match[4])

    def __str__(self) -> str:
        path = "/".join(filter(None, (self.namespace, self.kind, self.name)))
        return path if self.port is None else f"{path}:{self.port}"


async def watch_kubernetes(source: KubernetesSource, update: AddressCallback) -> None:
    """Call `update` with all addresses at the start and after each change, until cancelled.

    Raises ConfigError if the API is not configured.
    """
    from kubernetes_asyncio import client, config  # an optional package, which the configuration has checked

    configuration = client.Configuration()
    try:
        await config.load_config(client_configuration=configuration)
    except config.ConfigException as error:
        raise ConfigError(
            f"--kubernetes: the API cannot be reached: {error} Run the router in a pod with a service account, or set "
            "KUBECONFIG"
        ) from error
    namespace = source.namespace or _read_own_namespace()
    async with client.ApiClient(configuration) as api:
        follow = _follow_service if source.kind == "service" else _follow_pool
        await follow(api, source, namespace, update)


async def _follow_service(api: ApiClient, source: KubernetesSource, namespace: str, update: AddressCallback) -> None:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    cache = ObjectCache(partial(read_slice, port=source.port))
    await _ObjectWatch(api, path, f"kubernetes.io/service-name={source.name}", cache, update).run()


async def _follow_pool(api: ApiClient, source: KubernetesSource, namespace: str, update: AddressCallback) -> None:
    """Follow the pods that a pool selects, and start anew when its selection changes."""
    path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{source.name}"
    selection: PoolSelection | None = None
    task: asyncio.Task[None] | None = None
    try:
        while True:
            try:
                async with _request(api, path, {}, LIST_S_MAX) as response:
                    new_selection = read_pool(await response.read())
            except (FetchError, DecodeError) as error:
                log.warning("pool %s: %s; its workers stay as they are", source.name, error)
            else:
                if new_selection != selection:
                    selection = new_selection
                    if task is not None:
                        task.cancel()
                    ports = selection.ports if source.port is None else (int(source.port),)
                    cache = ObjectCache(partial(read_pod, ports=ports))
                    watch = _ObjectWatch(api, f"/api/v1/namespaces/{namespace}/pods", selection.labels, cache, update)
                    task = asyncio.get_running_loop().create_task(watch.run())
            await asyncio.sleep(POOL_S)
            if task is not None and task.done():
                task.result()
    finally:
        if task is not None:
            task.cancel()


@dataclass
class _ObjectWatch:
    """Keeps a cache of the objects with some labels equal to the API server's, and reports their addresses."""

    api: ApiClient
    path: str
    """Path of the objects' kind and namespace in the API."""
    labels: str
    cache: ObjectCache
    update: AddressCallback
    """Called with all addresses after each list, and after each change."""
    watched_since_s: float | None = None
    """Time when the answer of the present watch began; None before that."""

    async def run(self) -> None:
        """List the objects and watch their changes, until cancelled.

        A watch that ends or fails goes on from the last version that it brought. All objects are listed again if the
        API no longer has that version (410), after an unreadable event, and once failures in a row have doubled the
        pause to RETRY_S_MAX. The workers stay as they are until the API answers.
        """
        failure_pause_s = RETRY_S
        while True:
            self.watched_since_s = None
            try:
                if not self.cache.version:
                    await self._list()
                await self._watch()
                failure_pause_s = RETRY_S
                if self._get_watch_age_s() < RETRY_S:  # a server that ends each watch at once
                    await asyncio.sleep(RETRY_S)
            except (FetchError, DecodeError) as error:
                if self._get_watch_age_s() > RETRY_S_MAX:
                    failure_pause_s = RETRY_S  # the watch has worked until now
                if isinstance(error, DecodeError | VersionGoneError) or failure_pause_s >= RETRY_S_MAX:
                    self.cache.version = ""
                log.warning("%s: %s; the workers stay as they are; next try in %g s", self.path, error, failure_pause_s)
                await asyncio.sleep(failure_pause_s)
                failure_pause_s = min(2 * failure_pause_s, RETRY_S_MAX)

    def _get_watch_age_s(self) -> float:
        """Return the time since the answer of the present watch began; 0 before that."""
        return 0.0 if self.watched_since_s is None else time.monotonic() - self.watched_since_s

    async def _list(self) -> None:
        """Load all objects and report their addresses."""
        async with _request(self.api, self.path, {"labelSelector": self.labels}, LIST_S_MAX) as response:
            self.cache.apply_list(await response.read())
        self.update(self.cache.merge_addresses())

    async def _watch(self) -> None:
        """Apply the changes of one watch until the server ends it."""
        query = {
            "labelSelector": self.labels, "watch": "true", "allowWatchBookmarks": "true",
            "resourceVersion": self.cache.version, "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async with _request(self.api, self.path, query, WATCH_S + LIST_S_MAX) as response:
            self.watched_since_s, partial_line = time.monotonic(), b""
            async for chunk in iterate_body(response):
                *lines, partial_line = (partial_line + chunk).split(b"\n")
                if len(partial_line) > LINE_BYTES_MAX:
                    raise FetchError(f"an event of over {LINE_BYTES_MAX} bytes")
                self._apply_events(filter(bytes.strip, lines))

    def _apply_events(self, lines: Iterable[bytes]) -> None:
        """Apply events, and report the addresses once if they changed, also if a later event is an error."""
        has_changed = False
        try:
            for line in lines:
                has_changed |= self.cache.apply_event(line)
        finally:
            if has_changed:
                self.update(self.cache.merge_addresses())


@asynccontextmanager
async def _request(
    api: ApiClient, path: str, query: Mapping[str, str], seconds: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Ask the API, and close its answer at the end.

    Raises VersionGoneError for the status 410, and FetchError for any other but 200, and if no answer comes.
    """
    try:
        response = await api.call_api(
            path, "GET", query_params=list(query.items()), header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
            _request_timeout=seconds,
        )  # fmt: skip
        try:
            if response.status == HTTPStatus.GONE:
                raise VersionGoneError("the API answers 410")
            if response.status != 200:
                raise FetchError(f"the API answers {response.status}")
            yield response
        finally:
            response.close()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise FetchError(f"{type(error).__name__}: {error}") from error


def _read_own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"
