"""How workers are reached: their addresses, the key that they are sent, the engines that they say they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.decide.workers import Worker
from router.edge.upstream import Endpoint


class WorkerDirectory:
    """Addresses and credentials of the core's workers."""

    def __init__(self, workers: Mapping[str, Worker], authorization: bytes | None = None) -> None:
        self._workers = workers
        self.authorization = authorization
        """Sent to workers instead of the client's `Authorization`, or None to pass that one on."""
        self.may_send_key: Callable[[str], bool] = lambda worker_id: True
        """Whether a worker may be sent `authorization`; the others get none at all."""
        self._endpoint_by_worker: dict[str, tuple[str, Endpoint]] = {}
        """Worker id -> (URL, the same taken apart)."""

    def get_endpoint(self, worker_id: str) -> Endpoint | None:
        """Return where a worker listens; None where it is known no more."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.spec.url:
            return None
        entry = self._endpoint_by_worker.get(worker_id)
        if entry is None or entry[0] != worker.spec.url:
            entry = self._endpoint_by_worker[worker_id] = (worker.spec.url, Endpoint.parse(worker.spec.url))
        return entry[1]

    def get_authorization(self, worker_id: str) -> bytes | None:
        """Return what stands in for the client's `Authorization`: None keeps the client's, empty sends none."""
        if self.authorization is None or self.may_send_key(worker_id):
            return self.authorization
        return b""

    def get_engine(self, worker_id: str) -> str:
        """Return the engine that a worker says it is; empty where it does not say."""
        worker = self._workers.get(worker_id)
        return worker.spec.engine if worker is not None else ""

    def find_workers_by_engine(self, engine: str) -> frozenset[str]:
        """Return the workers that say they are this engine."""
        return frozenset(name for name, worker in self._workers.items() if worker.spec.engine == engine)

    def forget_removed(self) -> None:
        """Drop the addresses of workers that are known no more."""
        for worker_id in self._endpoint_by_worker.keys() - self._workers.keys():
            del self._endpoint_by_worker[worker_id]
