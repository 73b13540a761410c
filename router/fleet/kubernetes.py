"""Workers that Kubernetes lists: a Service's EndpointSlices, or the pods of an InferencePool.

Objects are listed, and then watched from the version of the list on. A watch that ends goes on from its last version.
A failure of the API raises FetchError, and the caller begins anew. Meanwhile the workers stay as they are.

Conventions of discovery.k8s.io/v1: an endpoint without conditions is ready. An endpoint that terminates or is not ready
gets no new request and keeps those it has. An address that is in two slices while it moves counts once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from options import ConfigError
from options.addresses import bracket_host
from router.http_client import FetchError

log = logging.getLogger("router")

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
LIST_S_MAX = 30
WATCH_S = 300
"""Time after which the server ends a watch; the next one continues from its last version."""
POOL_S = 10.0
"""Time between two requests for what a pool selects."""
SHORT_WATCH_S = 1.0
"""A watch that the server ends sooner is followed by a pause as long as this."""
_SOURCE_PATTERN = re.compile(r"(?:(?:([a-z0-9-]+)/)?(service|pool)/)?([a-z0-9][a-z0-9.-]*)(?::([a-z0-9-]+))?")

EndpointReadiness = dict[str, bool]
"""Whether an address, `host:port`, takes new requests."""
AddressCallback = Callable[[EndpointReadiness], None]
ApiObject = Any
"""Object of Kubernetes as decoded JSON."""
ApiClient = Any
"""Client of the package kubernetes_asyncio, which is optional."""
_UNREADABLE = (
    msgspec.DecodeError, ValueError, RecursionError, LookupError, TypeError, AttributeError, HttpProcessingError
)  # fmt: skip
"""Errors from an answer that is not what Kubernetes' API gives. The last one: an event of several megabytes."""


@dataclass(frozen=True, slots=True)
class KubernetesSource:
    """Service or InferencePool in Kubernetes that lists the workers, as `--kubernetes` names it."""

    kind: str
    """`service` or `pool`."""
    name: str
    namespace: str | None
    """None: the namespace of the router's pod, else `default`."""
    port: str | None
    """Number or name; None: the first port of each slice, or the port of the pool."""

    @classmethod
    def parse(cls, text: str) -> KubernetesSource:
        """Parse `[[NAMESPACE/](service|pool)/]NAME[:PORT]`. Raises ConfigError."""
        match = _SOURCE_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(f"--kubernetes: got {text!r}, expected [[NAMESPACE/](service|pool)/]NAME[:PORT]")
        namespace, kind, name, port = match.groups()
        if kind == "pool" and port is not None and not port.isdigit():
            raise ConfigError(f"--kubernetes: got {text!r}, expected a port's number")
        return cls(kind or "service", name, namespace, port)

    def __str__(self) -> str:
        path = "/".join(filter(None, (self.namespace, self.kind, self.name)))
        return path if self.port is None else f"{path}:{self.port}"


async def watch_kubernetes(source: KubernetesSource, update: AddressCallback) -> None:
    """Call `update` with all addresses at first and after each change.

    Raises FetchError when the API fails, and ConfigError if there is none.
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
        if source.kind == "pool":
            await _follow_pool(api, source, namespace, update)
            return
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        labels = f"kubernetes.io/service-name={source.name}"
        await _follow_objects(api, path, labels, partial(read_slice, port=source.port), update)


async def _follow_pool(api: ApiClient, source: KubernetesSource, namespace: str, update: AddressCallback) -> None:
    """Report the addresses of the pods that an InferencePool selects, which is read every POOL_S, until the API fails.

    While the pool cannot be read, as before it is made, the pods that it selected last are followed. Raises FetchError.
    """
    pool_path = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{source.name}"
    pods_path = f"/api/v1/namespaces/{namespace}/pods"
    selection: PoolSelection | None = None
    pods_watch: asyncio.Task[None] | None = None
    try:
        while True:
            old_selection = selection
            try:
                async with _get_response(api, pool_path, {}, LIST_S_MAX) as response:
                    selection = read_pool(msgspec.json.decode(await response.read()))
            except FetchError as error:
                log.warning("%s; the workers of the pool are followed as before", error)
            if selection is not None and selection != old_selection:
                if pods_watch is not None:
                    pods_watch.cancel()
                ports = selection.ports if source.port is None else (int(source.port),)
                read = partial(read_pod, ports=ports)
                pods_watch = asyncio.create_task(_follow_objects(api, pods_path, selection.labels, read, update))
            await (asyncio.sleep(POOL_S) if pods_watch is None else asyncio.wait({pods_watch}, timeout=POOL_S))
            if pods_watch is not None and pods_watch.done():
                pods_watch.result()  # raises the error that ended the watch
    finally:
        if pods_watch is not None:
            pods_watch.cancel()


async def _follow_objects(
    api: ApiClient, path: str, labels: str, read: Callable[[ApiObject], EndpointReadiness], update: AddressCallback
) -> None:
    """Call `update` with the addresses of all objects that match `labels` after each change, until the API fails.

    `path`: kind and namespace of the objects, as a path in the API. `labels`: label selector. `read`: returns the
    addresses of one object. Raises FetchError.
    """
    async with aclosing(_watch_objects(api, path, labels, read)) as changes:
        async for addresses in changes:
            update(addresses)


async def _watch_objects(
    api: ApiClient, path: str, labels: str, read: Callable[[ApiObject], EndpointReadiness]
) -> AsyncGenerator[EndpointReadiness, None]:
    """List the objects that match `labels`, then watch them; yield the addresses of all at first and after changes.

    Raises FetchError when the Kubernetes API fails. `read`: returns the addresses of one object.
    """
    async with _get_response(api, path, {"labelSelector": labels}, LIST_S_MAX) as response:
        object_list = msgspec.json.decode(await response.read())
        version = object_list["metadata"]["resourceVersion"]
        readiness_by_uid = {item["metadata"]["uid"]: read(item) for item in object_list.get("items") or ()}
    yield merge_addresses(readiness_by_uid.values())
    while True:
        watch_start_s = time.monotonic()
        query = {
            "labelSelector": labels, "watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async with _get_response(api, path, query, WATCH_S + LIST_S_MAX) as response:
            while line := await response.content.readline():
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    raise FetchError(f"{path}: the watch ended: {str(event['object'])[:200]}")
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK" and _apply_event(event, readiness_by_uid, read):
                    yield merge_addresses(readiness_by_uid.values())
                await asyncio.sleep(0)  # many events may come at once, so let other tasks run
        if time.monotonic() - watch_start_s < SHORT_WATCH_S:  # a server that ends each watch at once
            await asyncio.sleep(SHORT_WATCH_S)


def _apply_event(
    event: ApiObject, readiness_by_uid: dict[str, EndpointReadiness], read: Callable[[ApiObject], EndpointReadiness]
) -> bool:
    """Apply a watch event (ADDED, MODIFIED or DELETED), and return whether the object's addresses changed."""
    uid = event["object"]["metadata"]["uid"]
    old_readiness = readiness_by_uid.pop(uid, None)
    if event["type"] != "DELETED":
        readiness_by_uid[uid] = read(event["object"])
    return readiness_by_uid.get(uid) != old_readiness


def read_slice(endpoint_slice: ApiObject, port: str | None) -> EndpointReadiness:
    """Return the addresses (HOST:PORT) of an EndpointSlice, each with whether it takes new requests.

    `port`: number or name of the port to use; None: the first one. The result is empty if the slice has no such port,
    or lists host names in place of addresses.
    """
    matching_ports = []
    for slice_port in endpoint_slice.get("ports") or ():
        number = slice_port.get("port")
        if number is not None and port in (None, slice_port.get("name"), str(number)):
            matching_ports.append(number)
    if not matching_ports or endpoint_slice.get("addressType") == "FQDN":
        return {}
    return {
        f"{bracket_host(host)}:{matching_ports[0]}": _is_endpoint_ready(endpoint)
        for endpoint in endpoint_slice.get("endpoints") or ()
        for host in endpoint["addresses"][:1]  # more addresses of one endpoint lead to the same worker
    }


def _is_endpoint_ready(endpoint: ApiObject) -> bool:
    """Return whether an endpoint takes new requests. One whose readiness is unknown does, as Kubernetes prescribes."""
    conditions = endpoint.get("conditions") or {}
    return conditions.get("ready") is not False and not conditions.get("terminating")


def read_pod(pod: ApiObject, ports: Iterable[int]) -> EndpointReadiness:
    """Return the addresses of a pod at each of the ports; empty before it has an IP address."""
    status = pod.get("status") or {}
    host = status.get("podIP")
    if host is None:
        return {}
    conditions = status.get("conditions") or ()
    is_pod_ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    is_ready = is_pod_ready and pod["metadata"].get("deletionTimestamp") is None
    return {f"{bracket_host(host)}:{port}": is_ready for port in ports}


class PoolSelection(NamedTuple):
    """Pods of an InferencePool: a label selector, and the ports at which each pod serves."""

    labels: str
    ports: tuple[int, ...]


def read_pool(pool: ApiObject) -> PoolSelection:
    """Return which pods an InferencePool selects."""
    labels = pool["spec"]["selector"]["matchLabels"]
    ports = pool["spec"]["targetPorts"]
    return PoolSelection(
        ",".join(f"{name}={value}" for name, value in sorted(labels.items())), tuple(port["number"] for port in ports)
    )


def merge_addresses(readiness_of_objects: Iterable[EndpointReadiness]) -> EndpointReadiness:
    """Return the addresses of all objects; one is ready if any object says so."""
    is_ready_by_address: EndpointReadiness = {}
    for readiness in readiness_of_objects:
        for address, is_ready in readiness.items():
            is_ready_by_address[address] = is_ready or is_ready_by_address.get(address, False)
    return is_ready_by_address


@asynccontextmanager
async def _get_response(
    api: ApiClient, path: str, query: Mapping[str, str], timeout_s: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a GET request to the Kubernetes API. The response is closed when the `async with` block ends.

    Raises FetchError for any status but 200, if no response comes, and if the block fails to read the response.
    """
    try:
        response = await api.call_api(
            path, "GET", query_params=list(query.items()), header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"], _preload_content=False, _return_http_data_only=True,
            _request_timeout=timeout_s,
        )  # fmt: skip
        try:
            if response.status != 200:
                raise FetchError(f"{path}: the API answers {response.status}")
            yield response
        finally:
            response.close()
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, *_UNREADABLE) as error:
        raise FetchError(f"{path}: {type(error).__name__}: {error}") from error


def _read_own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"
