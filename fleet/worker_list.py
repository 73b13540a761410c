"""Differences between a router's `/workers` and the directory's list, as admin calls. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ListedWorker:
    """A worker in the directory's list."""

    settings: Mapping[str, str | int]
    """Settings as `POST /workers` takes them, with the `id`."""
    is_draining: bool = False


@dataclass(frozen=True)
class WorkerStatus:
    """State of one worker as one router reports it, all ranks together."""

    is_up: bool
    is_draining: bool
    in_flight: int
    """Requests of this router alone."""
    queue_s: float
    prefill_share: float


AdminCall = tuple[str, str, dict[str, Any] | None]
"""HTTP method, path and body of a call."""


def parse_workers_page(page: Mapping[str, Any]) -> dict[str, WorkerStatus]:
    """Return worker id -> status from the body of `GET /workers`. Raises ValueError if the body is malformed."""
    status_by_worker: dict[str, WorkerStatus] = {}
    try:
        for rank_row in page["workers"]:
            worker_id, rank_status = str(rank_row["worker_id"]), _parse_rank_row(rank_row)
            earlier_status = status_by_worker.get(worker_id)
            if earlier_status is not None:
                rank_status = _merge_ranks(earlier_status, rank_status)
            status_by_worker[worker_id] = rank_status
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of workers: {error!r} in {str(page)[:200]}") from error
    return status_by_worker


def _parse_rank_row(rank_row: Mapping[str, Any]) -> WorkerStatus:
    """Return the status of one rank from its row. Raises KeyError or TypeError if the row is malformed."""
    state = str(rank_row["state"])
    return WorkerStatus(
        is_up=state == "up",
        is_draining=state == "draining",
        in_flight=int(rank_row.get("prefilling", 0)) + int(rank_row.get("decoding", 0)),
        queue_s=float(rank_row.get("queue_s", 0.0)),
        prefill_share=float(rank_row.get("utilisation", 0.0)),
    )


def _merge_ranks(first: WorkerStatus, second: WorkerStatus) -> WorkerStatus:
    """Return the status of two ranks of a worker together: as busy as the busier one. All ranks have one state."""
    return WorkerStatus(
        is_up=second.is_up,
        is_draining=second.is_draining,
        in_flight=first.in_flight + second.in_flight,
        queue_s=max(first.queue_s, second.queue_s),
        prefill_share=max(first.prefill_share, second.prefill_share),
    )


def plan_admin_calls(
    listed_workers: Sequence[ListedWorker], status_by_worker: Mapping[str, WorkerStatus]
) -> list[AdminCall]:
    """Return the admin calls that make a router's workers equal the list.

    They remove other workers, add new ones, and begin or end drains. A new worker that drains already is not added.
    """
    worker_by_id = {str(worker.settings["id"]): worker for worker in listed_workers}
    calls: list[AdminCall] = [
        ("DELETE", f"/workers/{worker_id}", None) for worker_id in status_by_worker if worker_id not in worker_by_id
    ]
    for worker_id, worker in worker_by_id.items():
        worker_status = status_by_worker.get(worker_id)
        if worker_status is None:
            if not worker.is_draining:
                calls.append(("POST", "/workers", dict(worker.settings)))
        elif worker_status.is_draining != worker.is_draining:
            calls.append(("POST", f"/workers/{worker_id}/drain", {"on": worker.is_draining}))
    return calls
