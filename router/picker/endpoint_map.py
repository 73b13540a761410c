"""Endpoints of workers as Envoy names them, `ip:port`, for URLs with host names that have to be resolved.

An https URL is treated like any other, as TLS to workers is configured in the cluster. Envoy cannot be given the path
of a URL.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from options.addresses import bracket_host, get_default_port
from router.decide.workers import Worker

log = logging.getLogger("router")

REFRESH_S = 1.0
"""Time between two searches for host names to resolve, and for workers with another URL."""
RESOLVE_S = 10.0
"""Time between two resolutions of a host name."""


class EndpointMap:
    """Translates between worker ids and the endpoints by which Envoy names workers.

    Call `refresh` often, on a running event loop, to resolve host names. Workers with an IP address are known at once.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._worker_id_by_endpoint: dict[str, str] = {}
        self._indexed_worker_ids: set[str] = set()
        """Workers that were looked at for `_worker_id_by_endpoint`."""
        self._ip_by_host_name: dict[str, str] = {}
        self._next_lookup_at_s: dict[str, float] = {}
        """Time of the next resolution of each host name."""
        self._refreshed_at_s = -REFRESH_S
        self._lookups: set[asyncio.Task[None]] = set()

    def get_endpoint(self, worker_id: str) -> str | None:
        """Return the endpoint of a worker; None if the worker is unknown or its host is not resolved."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        address = _parse_url(worker.spec.url)
        ip = address.host if address.is_ip else self._ip_by_host_name.get(address.host)
        if ip is None:
            return None
        return f"{bracket_host(ip)}:{address.port}"

    def get_worker_id(self, endpoint: str) -> str | None:
        """Return the id of the worker at an endpoint; None if there is none."""
        return next(iter(self.find_worker_ids([endpoint])), None)

    def find_worker_ids(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the ids of the workers at these endpoints. Unknown endpoints are left out."""
        if self._workers.keys() != self._indexed_worker_ids:  # once for all endpoints: it looks at every worker
            self._index_endpoints()
        worker_ids = set()
        for endpoint in endpoints:
            worker_id = self._worker_id_by_endpoint.get(endpoint)
            if worker_id is not None and self.get_endpoint(worker_id) == endpoint:  # its URL may have changed since
                worker_ids.add(worker_id)
        return frozenset(worker_ids)

    def refresh(self, now: float) -> None:
        """Resolve the host names of workers when it is time, and notice changed URLs."""
        if now - self._refreshed_at_s < REFRESH_S:
            return
        self._refreshed_at_s = now
        for worker in self._workers.values():
            address = _parse_url(worker.spec.url)
            if not address.is_ip and now >= self._next_lookup_at_s.get(address.host, now):
                self._start_lookup(address.host, now)
        self._index_endpoints()

    def _start_lookup(self, host: str, now: float) -> None:
        """Resolve a host name in a task, so that no request waits for DNS."""
        self._next_lookup_at_s[host] = now + RESOLVE_S
        task = asyncio.get_running_loop().create_task(self._resolve(host))
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    def _index_endpoints(self) -> None:
        """Note the worker of each endpoint, as far as the workers' host names are resolved."""
        self._worker_id_by_endpoint.clear()
        for worker_id, worker in self._workers.items():
            if worker_id not in self._indexed_worker_ids:
                _warn_of_path(worker)
            endpoint = self.get_endpoint(worker_id)
            if endpoint is not None:
                self._worker_id_by_endpoint[endpoint] = worker_id
        self._indexed_worker_ids = set(self._workers)

    async def _resolve(self, host: str) -> None:
        """Look up the address of a host. An address that is still among its addresses is not replaced by another."""
        try:
            address_infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers are not picked until it is found", host, error)
            self._next_lookup_at_s[host] = self._refreshed_at_s + REFRESH_S
            return
        ips = sorted({str(info[4][0]) for info in address_infos}, key=lambda ip: (":" in ip, ip))  # IPv4 first
        if self._ip_by_host_name.get(host) not in ips:
            self._ip_by_host_name[host] = ips[0]
            self._index_endpoints()


def _warn_of_path(worker: Worker) -> None:
    """Log that requests will miss the path in a worker's URL: Envoy is told an endpoint, which has no path."""
    path = urlsplit(worker.spec.url).path
    if path:
        log.warning("worker %s: its URL ends with %s, which Envoy will not send", worker.worker_id, path)


class _Address(NamedTuple):
    """Address in the URL of a worker."""

    host: str
    port: int
    is_ip: bool
    """Whether the host is an IP address, so that it need not be resolved."""


@lru_cache(maxsize=4096)
def _parse_url(url: str) -> _Address:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        ipaddress.ip_address(host)
        is_ip = True
    except ValueError:
        is_ip = False
    return _Address(host, parts.port or get_default_port(parts.scheme), is_ip)
