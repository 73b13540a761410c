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

LOOK_S = 1.0
"""Between two looks at who the workers are."""
NAMES_S = 10.0
"""Between two resolutions of a name."""


class Endpoints:
    """Of one process. `beat` it; needs a running event loop only where there are names."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self._known: dict[str, tuple[str, str | None]] = {}
        """worker -> (URL, endpoint)."""
        self._of_endpoint: dict[str, str] = {}
        self._names: dict[str, str] = {}
        """host -> IP."""
        self._due_s: dict[str, float] = {}
        self._looked_s = -LOOK_S
        self._asking: set[asyncio.Task[None]] = set()

    def of(self, worker_id: str) -> str | None:
        """None where the worker, or what its name stands for, is not known."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        known = self._known.get(worker_id)
        if known is None or known[0] != worker.spec.url or known[1] is None:
            known = self._known[worker_id] = (worker.spec.url, self._endpoint(worker.spec.url))
            if known[1] is not None:
                self._of_endpoint[known[1]] = worker_id
        return known[1]

    def worker(self, endpoint: str) -> str | None:
        """Who is there."""
        found = self._of_endpoint.get(endpoint)
        return found if found is not None and self.of(found) == endpoint else None

    def workers(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Who is at any of these; unknown ones are left out."""
        return frozenset(found for endpoint in endpoints if (found := self.worker(endpoint)) is not None)

    def beat(self, now: float) -> None:
        """Look names up. Call often."""
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        for worker_id in self._known.keys() - self._workers.keys():
            _, endpoint = self._known.pop(worker_id)
            if endpoint is not None and self._of_endpoint.get(endpoint) == worker_id:
                del self._of_endpoint[endpoint]
        for worker_id, worker in self._workers.items():
            parts = urlsplit(worker.spec.url)
            if worker_id not in self._known and parts.path:
                log.warning("worker %s: Envoy will not put %s before its paths", worker_id, parts.path)
            host = parts.hostname or ""
            if not _is_ip(host) and now >= self._due_s.get(host, now):
                self._due_s[host] = now + NAMES_S
                task = asyncio.get_running_loop().create_task(self._resolve(host))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            self.of(worker_id)

    async def _resolve(self, host: str) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers are not picked until it is found", host, error)
            self._due_s[host] = self._looked_s + LOOK_S
            return
        addresses = sorted({str(info[4][0]) for info in found}, key=lambda text: (":" in text, text))
        if self._names.get(host) not in addresses:
            self._names[host] = addresses[0]
            for worker_id, (url, _) in list(self._known.items()):
                if urlsplit(url).hostname == host:
                    del self._known[worker_id]
                    self.of(worker_id)

    def _endpoint(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        ip = host if _is_ip(host) else self._names.get(host)
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
