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
    """Parse the body of `GET /workers`. Raises ValueError where it is none."""
    status_by_worker: dict[str, WorkerStatus] = {}
    try:
        for worker_row in page["workers"]:
            worker_id, earlier_rank_status = (
                str(worker_row["worker_id"]),
                status_by_worker.get(str(worker_row["worker_id"])),
            )
            state = str(worker_row["state"])
            worker_status = WorkerStatus(
                state == "up",
                state == "draining",
                int(worker_row.get("prefilling", 0)) + int(worker_row.get("decoding", 0)),
                float(worker_row.get("queue_s", 0.0)),
                float(worker_row.get("utilisation", 0.0)),
            )
            if earlier_rank_status is not None:  # its ranks share the requests: the router sends to the best of them
                in_flight = earlier_rank_status.in_flight + worker_status.in_flight
                worker_status = WorkerStatus(
                    worker_status.is_up,
                    worker_status.is_draining,
                    in_flight,
                    max(earlier_rank_status.queue_s, worker_status.queue_s),
                    max(earlier_rank_status.prefill_share, worker_status.prefill_share),
                )
            status_by_worker[worker_id] = worker_status
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of workers: {error!r} in {str(page)[:200]}") from error
    return status_by_worker


def plan_admin_calls(
    listed_workers: Sequence[ListedWorker], status_by_worker: Mapping[str, WorkerStatus]
) -> list[AdminCall]:
    """Return the calls that make a router's workers equal the list: remove others, add new ones, begin and end
    drains."""
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
