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
from urllib.parse import urlsplit

from router.decide.workers import Worker

log = logging.getLogger("router")

REFRESH_S = 1.0
"""Time between two comparisons with the list of workers."""
RESOLVE_S = 10.0
"""Time between two resolutions of a host name."""


class EndpointMap:
    """Endpoints of the workers of a process. Call `refresh` often, on a running event loop."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._entries: dict[str, tuple[str, str | None]] = {}
        """Worker id -> (URL, endpoint; None while its host is not resolved)."""
        self._worker_ids: dict[str, str] = {}
        """Endpoint -> worker id."""
        self._addresses: dict[str, str] = {}
        """Host name -> IP address."""
        self._next_lookup_at_s: dict[str, float] = {}
        self._refreshed_at_s = -REFRESH_S
        self._lookups: set[asyncio.Task[None]] = set()

    def get_endpoint(self, worker_id: str) -> str | None:
        """Return the endpoint of a worker; None if the worker is unknown or its host is not resolved."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        entry = self._entries.get(worker_id)
        if entry is None or entry[0] != worker.spec.url or entry[1] is None:
            entry = self._entries[worker_id] = (worker.spec.url, self._resolve_endpoint(worker.spec.url))
            if entry[1] is not None:
                self._worker_ids[entry[1]] = worker_id
        return entry[1]

    def get_worker_id(self, endpoint: str) -> str | None:
        """Return the id of the worker at an endpoint; None if there is none."""
        worker_id = self._worker_ids.get(endpoint)
        return worker_id if worker_id is not None and self.get_endpoint(worker_id) == endpoint else None

    def find_worker_ids(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Return the ids of the workers at these endpoints. Unknown endpoints are left out."""
        return frozenset(worker_id for endpoint in endpoints if (worker_id := self.get_worker_id(endpoint)) is not None)

    def refresh(self, now: float) -> None:
        """Forget removed workers, add new ones, and resolve host names when it is time. Call often."""
        if now - self._refreshed_at_s < REFRESH_S:
            return
        self._refreshed_at_s = now
        for worker_id in self._entries.keys() - self._workers.keys():
            _, endpoint = self._entries.pop(worker_id)
            if endpoint is not None and self._worker_ids.get(endpoint) == worker_id:
                del self._worker_ids[endpoint]
        for worker_id, worker in self._workers.items():
            parts = urlsplit(worker.spec.url)
            if worker_id not in self._entries and parts.path:
                log.warning("worker %s: Envoy will not put %s before its paths", worker_id, parts.path)
            host = parts.hostname or ""
            if not _is_ip(host) and now >= self._next_lookup_at_s.get(host, now):
                self._next_lookup_at_s[host] = now + RESOLVE_S
                task = asyncio.get_running_loop().create_task(self._resolve(host))
                self._lookups.add(task)
                task.add_done_callback(self._lookups.discard)
            self.get_endpoint(worker_id)

    async def _resolve(self, host: str) -> None:
        try:
            address_infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers are not picked until it is found", host, error)
            self._next_lookup_at_s[host] = self._refreshed_at_s + REFRESH_S
            return
        addresses = sorted({str(info[4][0]) for info in address_infos}, key=lambda text: (":" in text, text))
        if self._addresses.get(host) not in addresses:
            self._addresses[host] = addresses[0]
            for worker_id, (url, _) in list(self._entries.items()):
                if urlsplit(url).hostname == host:
                    del self._entries[worker_id]
                    self.get_endpoint(worker_id)

    def _resolve_endpoint(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        ip = host if _is_ip(host) else self._addresses.get(host)
        if ip is None:
            return None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
