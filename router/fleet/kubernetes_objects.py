"""Parsers of Kubernetes objects: which addresses EndpointSlices and pods name, and which take new requests. No I/O.

Conventions of discovery.k8s.io/v1: an endpoint without conditions is ready. An endpoint that terminates or is not ready
gets no new request and keeps those it has. An address that is in two slices while it moves counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from events.types import DecodeError
from options.addresses import bracket_host

LINE_BYTES_MAX = 16 << 20
"""Longest event of a watch; etcd stores no object of over 1.5 MiB."""
GONE = 410
"""Status of a watch whose version is too old to continue from."""


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
"""Whether an address, `host:port`, takes new requests."""
ObjectReader = Callable[[bytes], EndpointReadiness]


def read_slice(raw: bytes, port: str | None) -> EndpointReadiness:
    """Return the addresses of an EndpointSlice at the port with this number or name. Raises DecodeError.

    With `port` None, its first port is taken.
    """
    endpoint_slice = _decode(raw, _Slice)
    ports = [p.port for p in endpoint_slice.ports or () if p.port is not None and port in (None, p.name, str(p.port))]
    if not ports or endpoint_slice.address_type == "FQDN":
        return {}
    addresses: EndpointReadiness = {}
    for endpoint in endpoint_slice.endpoints or ():
        conditions = endpoint.conditions
        is_ready = conditions.ready is not False and not conditions.terminating
        for host in endpoint.addresses[:1]:  # the others are the same endpoint
            addresses[f"{bracket_host(host)}:{ports[0]}"] = is_ready
    return addresses


def read_pod(raw: bytes, ports: Iterable[int]) -> EndpointReadiness:
    """Return the addresses of a pod at each of the ports; empty before it has an IP address. Raises DecodeError."""
    pod = _decode(raw, _Pod)
    if pod.status.pod_ip is None:
        return {}
    is_pod_ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions)
    is_ready = is_pod_ready and pod.metadata.deletion_timestamp is None
    return {f"{bracket_host(pod.status.pod_ip)}:{port}": is_ready for port in ports}


class PoolSelection(NamedTuple):
    """Pods of an InferencePool: a label selector, and the ports at which each pod serves."""

    labels: str
    ports: tuple[int, ...]


def read_pool(raw: bytes) -> PoolSelection:
    """Return which pods an InferencePool selects. Raises DecodeError."""
    spec = _decode(raw, _Pool).spec
    labels = ",".join(f"{name}={value}" for name, value in sorted(spec.selector.match_labels.items()))
    return PoolSelection(labels, tuple(port.number for port in spec.target_ports))


class ObjectCache:
    """Objects of one Kubernetes list, kept up to date by its watch."""

    def __init__(self, read: ObjectReader) -> None:
        self._read = read
        self._objects: dict[str, EndpointReadiness] = {}
        self._pending_list: dict[str, EndpointReadiness] | None = None
        """Objects of a list whose last page has not come yet."""
        self.version = ""
        """Version from which a watch continues; empty: a new list is needed."""

    def add_page(self, raw: bytes) -> str:
        """Add a page of a list; return the token for the next page, empty after the last. Raises DecodeError."""
        page = _decode(raw, _List)
        pending_list = self._pending_list = self._pending_list or {}
        for item in page.items or ():
            pending_list[_object_key(item)] = self._read(bytes(item))
        if not page.metadata.next:
            self._objects, self._pending_list, self.version = pending_list, None, page.metadata.resource_version
        return str(page.metadata.next)

    @property
    def needs_list(self) -> bool:
        """Whether all objects have to be listed before changes can be watched."""
        return not self.version

    def require_list(self) -> None:
        """Have all objects listed again, as changes were lost. Until the list is complete, the known objects stand."""
        self.version, self._pending_list = "", None

    def apply_event(self, line: bytes) -> bool:
        """Apply one event of a watch; return whether addresses changed.

        After status 410 a new list is needed. Raises DecodeError if the event is malformed or another error of the
        server.
        """
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

    def merge_addresses(self) -> EndpointReadiness:
        """Return the addresses of all objects; one is ready if any object says so."""
        readiness: EndpointReadiness = {}
        for addresses in self._objects.values():
            for address, is_ready in addresses.items():
                readiness[address] = is_ready or readiness.get(address, False)
        return readiness


def _object_key(raw: msgspec.Raw) -> str:
    meta = _decode(bytes(raw), _ObjectWithMeta).metadata
    return str(meta.uid or meta.name)


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not what Kubernetes' API gives: {error}") from error
