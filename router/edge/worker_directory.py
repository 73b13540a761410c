"""Addresses, API keys and engines of workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from uuid import uuid4

from router.decide.messages import Transfer
from router.decide.workers import Worker
from router.edge.transfers.dialects import DIALECTS, Handover
from router.edge.upstream import Endpoint


class WorkerDirectory:
    """Looks up how a request reaches a worker: its address, its API key, and the body fields that have it move KV."""

    def __init__(self, workers: Mapping[str, Worker], authorization: bytes | None = None) -> None:
        """`workers`: the known workers by id, which may change at any time."""
        self._workers = workers
        self.authorization = authorization
        """Value of `Authorization` for workers; None forwards the client's."""
        self.may_send_key: Callable[[str], bool] = lambda worker_id: True
        """Returns whether a worker may get `authorization`. Other workers get no key."""
        self.fleet_key: bytes | None = None
        """Secret key with which fetches of cached prefixes are signed; None: the router has none."""

    def get_endpoint(self, worker_id: str) -> Endpoint | None:
        """Return the address of a worker; None for one that was removed or has no URL."""
        worker = self._workers.get(worker_id)
        return None if worker is None or not worker.spec.url else Endpoint.parse(worker.spec.url)

    def get_authorization(self, worker_id: str) -> bytes | None:
        """Return the value of `Authorization` for a worker: None forwards the client's, empty sends none."""
        if self.authorization is None or self.may_send_key(worker_id):
            return self.authorization
        return b""

    def make_handover(self, transfer: Transfer) -> Handover | None:
        """Describe a new transfer of KV for the requests to its workers; None if its source no longer sends KV."""
        worker = self._workers.get(transfer.source)
        if worker is None or not worker.spec.transfer.dialect:
            return None
        return DIALECTS[worker.spec.transfer.dialect](uuid4().hex, worker.spec, transfer.rank, self.fleet_key)

    def get_engine(self, worker_id: str) -> str:
        """Return the engine that a worker reports; empty if it reports none."""
        worker = self._workers.get(worker_id)
        return worker.spec.engine if worker is not None else ""

    def find_workers_of_engine(self, engine: str) -> frozenset[str]:
        """Return the ids of the workers that report this engine."""
        return frozenset(name for name, worker in self._workers.items() if worker.spec.engine == engine)
