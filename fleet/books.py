"""What a router is to be told, and what it says: rows of its `/workers` against the directory's list. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Listed:
    """One worker of the directory's list."""

    settings: Mapping[str, str | int]
    """As `POST /workers` takes them, `id` among them."""
    draining: bool = False


@dataclass(frozen=True)
class Row:
    """What one router says of one worker; of all ranks together."""

    up: bool
    draining: bool
    in_flight: int
    """Of this router alone."""
    queue_s: float
    busy: float


Call = tuple[str, str, dict[str, Any] | None]
"""Method, path, body."""


def read_rows(page: Mapping[str, Any]) -> dict[str, Row]:
    """`GET /workers`. Raises ValueError where it is none."""
    rows: dict[str, Row] = {}
    try:
        for row in page["workers"]:
            name, before = str(row["worker_id"]), rows.get(str(row["worker_id"]))
            state = str(row["state"])
            new = Row(
                state == "up",
                state == "draining",
                int(row.get("prefilling", 0)) + int(row.get("decoding", 0)),
                float(row.get("queue_s", 0.0)),
                float(row.get("utilisation", 0.0)),
            )
            if before is not None:  # its ranks share the requests: the router sends to the best of them
                total = before.in_flight + new.in_flight
                new = Row(new.up, new.draining, total, max(before.queue_s, new.queue_s), max(before.busy, new.busy))
            rows[name] = new
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of workers: {error!r} in {str(page)[:200]}") from error
    return rows


def changes(listed: Sequence[Listed], rows: Mapping[str, Row]) -> list[Call]:
    """What brings a router to the list: all others leave it, new ones come, drains begin and end."""
    wanted = {str(one.settings["id"]): one for one in listed}
    calls: list[Call] = [("DELETE", f"/workers/{name}", None) for name in rows if name not in wanted]
    for name, one in wanted.items():
        row = rows.get(name)
        if row is None:
            if not one.draining:
                calls.append(("POST", "/workers", dict(one.settings)))
        elif row.draining != one.draining:
            calls.append(("POST", f"/workers/{name}/drain", {"on": one.draining}))
    return calls
