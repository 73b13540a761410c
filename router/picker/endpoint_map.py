"""Workers as Envoy names them: `ip:port`. Our workers are URLs, whose host may be a name that is looked up.

Owns what names resolved to. An https URL is taken like any other (TLS to workers is the cluster's to speak); a path in
one cannot be told to Envoy.
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
"""Between two looks at who the workers are."""
RESOLVE_S = 10.0
"""Between two resolutions of a name."""


class EndpointMap:
    """Of one process. `beat` it; needs a running event loop only where there are names."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._entries: dict[str, tuple[str, str | None]] = {}
        """worker -> (URL, endpoint)."""
        self._worker_ids: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        """host -> IP."""
        self._next_lookup_at_s: dict[str, float] = {}
        self._refreshed_at_s = -REFRESH_S
        self._lookups: set[asyncio.Task[None]] = set()

    def get_endpoint(self, worker_id: str) -> str | None:
        """None where the worker, or what its name stands for, is not known."""
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
        """Who is there."""
        worker_id = self._worker_ids.get(endpoint)
        return worker_id if worker_id is not None and self.get_endpoint(worker_id) == endpoint else None

    def find_worker_ids(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Who is at any of these; unknown ones are left out."""
        return frozenset(worker_id for endpoint in endpoints if (worker_id := self.get_worker_id(endpoint)) is not None)

    def refresh(self, now: float) -> None:
        """Look names up. Call often."""
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
