"""Endpoints of workers as Envoy names them, `ip:port`, for URLs with host names that have to be resolved.

An https URL is treated like any other, as TLS to workers is configured in the cluster. Envoy cannot be given the path
of a URL.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from options.addresses import bracket_host, get_default_port
from options.background_tasks import BackgroundTasks
from router.decide.workers import Worker
from router.host_names import HostNames

log = logging.getLogger("router")

RESOLVE_S, RETRY_S = 10.0, 1.0
"""Time between two resolutions of a host name, and after one that failed."""


class EndpointMap:
    """Translates between worker ids and the endpoints by which Envoy names workers.

    Call `refresh` often, on a running event loop, to resolve host names. Workers with an IP address are known at once.
    """

    def __init__(self, workers: Mapping[str, Worker], host_names: HostNames) -> None:
        self._workers = workers
        self._host_names = host_names
        self._ip_by_host_name: dict[str, str] = {}
        self._next_lookup_at_s: dict[str, float] = {}
        """Time of the next resolution of each host name."""
        self._lookups = BackgroundTasks()

    def get_endpoint(self, worker_id: str) -> str | None:
        """Return the endpoint of a worker; None if the worker is unknown or its host is not resolved."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        address = _parse_url(worker.spec.url)
        if address.endpoint is not None:
            return address.endpoint
        ip = self._ip_by_host_name.get(address.host)
        return None if ip is None else f"{bracket_host(ip)}:{address.port}"

    def get_worker_id(self, endpoint: str) -> str | None:
        """Return the id of the worker at an endpoint; None if there is none."""
        return next((worker_id for worker_id in self._workers if self.get_endpoint(worker_id) == endpoint), None)

    def find_worker_ids(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the ids of the workers at these endpoints. Unknown endpoints are left out."""
        listed_endpoints = set(endpoints)
        return frozenset(worker_id for worker_id in self._workers if self.get_endpoint(worker_id) in listed_endpoints)

    def refresh(self, now: float) -> None:
        """Resolve the host names of workers when it is time."""
        for worker in self._workers.values():
            address = _parse_url(worker.spec.url)
            if address.endpoint is None and now >= self._next_lookup_at_s.get(address.host, now):
                self._start_lookup(address.host, now)

    def _start_lookup(self, host: str, now: float) -> None:
        """Resolve a host name in a task, so that no request waits for DNS."""
        self._next_lookup_at_s[host] = now + RESOLVE_S
        self._lookups.start(self._resolve(host, now + RETRY_S))

    async def _resolve(self, host: str, retry_at_s: float) -> None:
        """Look up the address of a host; after a failure, again at `retry_at_s`.

        An address that is still among the host's addresses is not replaced by another.
        """
        try:
            address_infos = await self._host_names.look_up(host, 0)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers are not picked until it is found", host, error)
            self._next_lookup_at_s[host] = retry_at_s
            return
        ips = sorted({str(info[4][0]) for info in address_infos}, key=lambda ip: (":" in ip, ip))  # IPv4 first
        if self._ip_by_host_name.get(host) not in ips:
            self._ip_by_host_name[host] = ips[0]


class _Address(NamedTuple):
    """Address in the URL of a worker."""

    host: str
    port: int
    endpoint: str | None
    """The endpoint; None if the host is a name, which has to be resolved."""


@lru_cache(maxsize=4096)
def _parse_url(url: str) -> _Address:
    """Return the address in the URL of a worker. Log, once, a URL with a path, which an endpoint cannot have."""
    parts = urlsplit(url)
    if parts.path:
        log.warning("worker %s: its URL ends with %s, which Envoy will not send", url, parts.path)
    host, port = parts.hostname or "", parts.port or get_default_port(parts.scheme)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _Address(host, port, endpoint=None)
    return _Address(host, port, f"{bracket_host(host)}:{port}")
