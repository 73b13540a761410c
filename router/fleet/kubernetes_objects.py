"""Kubernetes' objects as workers: what EndpointSlices and pods say about who may get requests. Pure.

Conventions kept (discovery.k8s.io/v1): without a condition an endpoint is ready; one that terminates or is not ready
gets no new request and keeps those it has; an address that stands in two slices while it moves counts once. Refuses to
know how the objects are fetched (router/fleet/kubernetes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from events.types import DecodeError

LINE_BYTES_MAX = 16 << 20
"""Of one event of a watch: etcd keeps no object of over 1.5 MiB."""
GONE = 410


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Slice(msgspec.Struct, rename="camel"):
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, rename="camel"):
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[_Condition] = []


class _PodMeta(msgspec.Struct, rename="camel"):
    deletion_timestamp: str | None = None


class _Pod(msgspec.Struct):
    metadata: _PodMeta = msgspec.field(default_factory=_PodMeta)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    next: str = msgspec.field(name="continue", default="")


class _ObjectWithMeta(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)


class _List(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Failure(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Labels(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _TargetPort(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Labels
    target_ports: list[_TargetPort]


class _Pool(msgspec.Struct):
    spec: _PoolSpec


EndpointReadiness = dict[str, bool]
"""`host:port` -> whether it takes new requests."""
ObjectReader = Callable[[bytes], EndpointReadiness]


def read_slice(raw: bytes, port: str | None) -> EndpointReadiness:
    """Of an EndpointSlice, at the port of this number or name; None: at its first. Raises DecodeError."""
    endpoint_slice = _decode(raw, _Slice)
    ports = [p.port for p in endpoint_slice.ports or () if p.port is not None and port in (None, p.name, str(p.port))]
    if not ports or endpoint_slice.address_type == "FQDN":
        return {}
    addresses: EndpointReadiness = {}
    for endpoint in endpoint_slice.endpoints or ():
        conditions = endpoint.conditions
        is_ready = conditions.ready is not False and not conditions.terminating
        for host in endpoint.addresses[:1]:  # the others are the same endpoint
            addresses[_join_host_port(host, ports[0])] = is_ready
    return addresses


def read_pod(raw: bytes, ports: Iterable[int]) -> EndpointReadiness:
    """Of a pod, at each of the ports; none before it has an address. Raises DecodeError."""
    pod = _decode(raw, _Pod)
    if pod.status.pod_ip is None:
        return {}
    is_pod_ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions)
    is_ready = is_pod_ready and pod.metadata.deletion_timestamp is None
    return {_join_host_port(pod.status.pod_ip, port): is_ready for port in ports}


def read_pool(raw: bytes) -> tuple[str, tuple[int, ...]]:
    """(label selector, target ports) of an InferencePool. Raises DecodeError."""
    spec = _decode(raw, _Pool).spec
    labels = ",".join(f"{name}={value}" for name, value in sorted(spec.selector.match_labels.items()))
    return labels, tuple(port.number for port in spec.target_ports)


class ObjectCache:
    """Objects of one list, kept up to date by its watch."""

    def __init__(self, read: ObjectReader) -> None:
        self._read = read
        self._objects: dict[str, EndpointReadiness] = {}
        self._pending_list: dict[str, EndpointReadiness] | None = None
        """Of a list whose last page has not come."""
        self.version = ""
        """Where a watch goes on; empty: a list is needed."""

    def add_page(self, raw: bytes) -> str:
        """A page of a list; what to ask the next with, or empty behind the last. Raises DecodeError."""
        page = _decode(raw, _List)
        pending_list = self._pending_list = self._pending_list or {}
        for item in page.items or ():
            pending_list[_object_key(item)] = self._read(bytes(item))
        if not page.metadata.next:
            self._objects, self._pending_list, self.version = pending_list, None, page.metadata.resource_version
        return str(page.metadata.next)

    def require_list(self) -> None:
        """A list is needed; until it is there, what was known stands."""
        self.version, self._pending_list = "", None

    def apply_event(self, line: bytes) -> bool:
        """A line of the watch; whether anything changed. Raises DecodeError, also where the server ends the watch by an
        error; after 410 a list is needed."""
        event = _decode(line, _Event)
        if event.type == "ERROR":
            failure = _decode(bytes(event.object), _Failure)
            if failure.code == GONE:
                self.require_list()
                return False
            raise DecodeError(f"the watch ended with {failure.code} {failure.message[:200]}")
        metadata = _decode(bytes(event.object), _ObjectWithMeta).metadata
        previous = self._objects.get(_object_key(event.object))
        if event.type in ("ADDED", "MODIFIED"):
            self._objects[_object_key(event.object)] = self._read(bytes(event.object))
        elif event.type == "DELETED":
            self._objects.pop(_object_key(event.object), None)
        self.version = metadata.resource_version or self.version
        return previous != self._objects.get(_object_key(event.object))

    def addresses(self) -> EndpointReadiness:
        """All of them."""
        readiness: EndpointReadiness = {}
        for addresses in self._objects.values():
            for address, is_ready in addresses.items():
                readiness[address] = is_ready or readiness.get(address, False)
        return readiness


def _object_key(raw: msgspec.Raw) -> str:
    meta = _decode(bytes(raw), _ObjectWithMeta).metadata
    return str(meta.uid or meta.name)


def _join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not what Kubernetes' API gives: {error}") from error
