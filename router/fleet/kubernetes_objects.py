"""Parsers of Kubernetes objects: which addresses EndpointSlices and pods name, and which take new requests. No I/O.

Conventions of discovery.k8s.io/v1: an endpoint without conditions is ready. An endpoint that terminates or is not ready
gets no new request and keeps those it has. An address that is in two slices while it moves counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from events.types import DecodeError
from options.addresses import bracket_host
from router.http_client import FetchError

LINE_BYTES_MAX = 16 << 20
"""Longest event of a watch; etcd stores no object of over 1.5 MiB."""

EndpointReadiness = dict[str, bool]
"""Whether an address, `host:port`, takes new requests."""
ObjectReader = Callable[["_Object"], EndpointReadiness]


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, rename="camel"):
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: list[_Condition] = []


class _Object(msgspec.Struct, rename="camel"):
    """EndpointSlice or pod; the fields of the other one have their defaults."""

    metadata: _Meta = msgspec.field(default_factory=_Meta)
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def key(self) -> str:
        return self.metadata.uid or self.metadata.name


class _List(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    items: list[_Object] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    """Error of the API server, as an event of a watch."""

    code: int = 0


class _Labels(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str]


class _TargetPort(msgspec.Struct):
    number: int


class _PoolSpec(msgspec.Struct, rename="camel"):
    selector: _Labels
    target_ports: list[_TargetPort]


class _Pool(msgspec.Struct):
    spec: _PoolSpec


def read_slice(endpoint_slice: _Object, port: str | None) -> EndpointReadiness:
    """Return the addresses of an EndpointSlice at the port with this number or name; None: its first port."""
    numbers = [
        slice_port.port
        for slice_port in endpoint_slice.ports or ()
        if slice_port.port is not None and port in (None, slice_port.name, str(slice_port.port))
    ]
    if not numbers or endpoint_slice.address_type == "FQDN":
        return {}
    addresses: EndpointReadiness = {}
    for endpoint in endpoint_slice.endpoints or ():
        conditions = endpoint.conditions
        is_ready = conditions.ready is not False and not conditions.terminating
        for host in endpoint.addresses[:1]:  # the others are the same endpoint
            addresses[f"{bracket_host(host)}:{numbers[0]}"] = is_ready
    return addresses


def read_pod(pod: _Object, ports: Iterable[int]) -> EndpointReadiness:
    """Return the addresses of a pod at each of the ports; empty before it has an IP address."""
    if pod.status.pod_ip is None:
        return {}
    is_pod_ready = any(condition.type == "Ready" and condition.status == "True" for condition in pod.status.conditions)
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


class VersionGoneError(FetchError):
    """The API server no longer has the version from which a watch was to continue (410)."""


class ObjectCache:
    """Objects of one Kubernetes list, kept up to date by its watch."""

    def __init__(self, read: ObjectReader) -> None:
        self._read = read
        self._readiness_by_object: dict[str, EndpointReadiness] = {}
        self.version = ""
        """Version from which a watch continues; empty: all objects have to be listed."""

    def apply_list(self, raw: bytes) -> None:
        """Replace all objects by those of a list. Raises DecodeError."""
        object_list = _decode(raw, _List)
        self._readiness_by_object = {item.key: self._read(item) for item in object_list.items or ()}
        self.version = object_list.metadata.resource_version

    def apply_event(self, line: bytes) -> bool:
        """Apply one event of a watch; return whether addresses changed.

        Raises DecodeError if the event is malformed. Raises VersionGoneError or FetchError if it is an error of the
        server.
        """
        event = _decode(line, _Event)
        if event.type == "ERROR":
            is_version_gone = _decode(bytes(event.object), _Status).code == HTTPStatus.GONE
            error_class = VersionGoneError if is_version_gone else FetchError
            raise error_class(f"the watch ended: {bytes(event.object)[:200]!r}")
        changed_object = _decode(bytes(event.object), _Object)
        key = changed_object.key
        previous_readiness = self._readiness_by_object.get(key)
        if event.type in ("ADDED", "MODIFIED"):
            self._readiness_by_object[key] = self._read(changed_object)
        elif event.type == "DELETED":
            self._readiness_by_object.pop(key, None)
        self.version = changed_object.metadata.resource_version or self.version
        return previous_readiness != self._readiness_by_object.get(key)

    def merge_addresses(self) -> EndpointReadiness:
        """Return the addresses of all objects; one is ready if any object says so."""
        is_ready_by_address: EndpointReadiness = {}
        for readiness in self._readiness_by_object.values():
            for address, is_ready in readiness.items():
                is_ready_by_address[address] = is_ready or is_ready_by_address.get(address, False)
        return is_ready_by_address


def _decode(raw: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not what Kubernetes' API gives: {error}") from error
