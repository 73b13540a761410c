"""Differences between a router's `/workers` and the directory's list, as admin calls. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


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
    """Predicted seconds of prefill that the busiest rank still has to do."""
    prefill_share: float
    """Seconds of prefill that the busiest rank was sent, per second."""


class AdminCall(NamedTuple):
    """Call of a route of a router's admin API."""

    method: str
    path: str
    body: dict[str, Any] | None = None


def parse_workers_page(page: Mapping[str, Any]) -> dict[str, WorkerStatus]:
    """Return worker id -> status from the body of `GET /workers`. Raises ValueError if the body is malformed."""
    try:
        rows_by_worker = defaultdict[str, list[Mapping[str, Any]]](list)
        for rank_row in page["workers"]:
            rows_by_worker[str(rank_row["worker_id"])].append(rank_row)
        return {worker_id: _merge_ranks(rank_rows) for worker_id, rank_rows in rows_by_worker.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of workers: {error!r} in {str(page)[:200]}") from error


def _merge_ranks(rank_rows: Sequence[Mapping[str, Any]]) -> WorkerStatus:
    """Return a worker's status: as busy as its busiest rank. Raises KeyError, TypeError for malformed rows."""
    states = {str(row["state"]) for row in rank_rows}
    return WorkerStatus(
        is_up="up" in states,
        is_draining="draining" in states,
        in_flight=sum(int(row.get("prefilling", 0)) + int(row.get("decoding", 0)) for row in rank_rows),
        queue_s=max(float(row.get("queue_s", 0.0)) for row in rank_rows),
        prefill_share=max(float(row.get("utilisation", 0.0)) for row in rank_rows),
    )


def plan_admin_calls(
    listed_workers: Sequence[ListedWorker], status_by_worker: Mapping[str, WorkerStatus]
) -> list[AdminCall]:
    """Return the admin API calls that make a router know exactly the listed workers.

    `status_by_worker`: workers that the router knows now, by id. The calls remove other workers, add new ones, and
    begin or end drains. A new worker that drains already is not added.
    """
    worker_by_id = {str(worker.settings["id"]): worker for worker in listed_workers}
    calls = [
        AdminCall("DELETE", _make_path(worker_id)) for worker_id in status_by_worker if worker_id not in worker_by_id
    ]
    for worker_id, worker in worker_by_id.items():
        worker_status = status_by_worker.get(worker_id)
        if worker_status is None and not worker.is_draining:
            calls.append(AdminCall("POST", "/workers", dict(worker.settings)))
        elif worker_status is not None and worker_status.is_draining != worker.is_draining:
            calls.append(AdminCall("POST", f"{_make_path(worker_id)}/drain", {"on": worker.is_draining}))
    return calls


def _make_path(worker_id: str) -> str:
    """Return the path of a worker's admin routes. The id of one with a path in its URL has slashes."""
    return "/workers/" + worker_id.translate({ord(character): f"%{ord(character):02X}" for character in "%/?#"})
