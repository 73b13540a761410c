"""The list of workers, and changes of it: `/workers`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from prompts.errors import RequestError, bad_value
from router.admin.json_body import decode_object
from router.decide.workers import DECODE_ROLE, PREFILL_ROLE, Worker, WorkerState, find_unusable_reason
from router.edge.proxy import Proxy
from router.fleet.membership import Fleet
from router.http.request import HttpRequest
from router.http.routes import Response, Routes
from router.index.protocol import IndexStats
from router.prompting.prompt_reader import PromptReader

log = logging.getLogger("router")


class WorkerListRoutes:
    """Shows the workers of the fleet, and adds, removes and drains them."""

    def __init__(self, proxy: Proxy, fleet: Fleet, prompt_reader: PromptReader) -> None:
        self._core = proxy.core
        self._now = proxy.now
        self._transfers = proxy.metrics.transfers
        self._fleet = fleet
        self._prompt_reader = prompt_reader

    def register(self, routes: Routes) -> None:
        routes.add("GET", "/workers", self._list_workers, public=False)
        routes.add("POST", "/workers", self._add_worker, public=False)
        routes.add("DELETE", "/workers", self._remove_worker, public=False)
        routes.add("DELETE", "/workers/*", self._remove_worker, public=False)
        routes.add("POST", "/workers/*/drain", self._drain_worker, public=False)

    def describe_workers(self) -> dict[str, Any]:
        """Return the body of `GET /workers` as JSON values: rows of workers, and figures of the whole router.

        A worker has one row for each data-parallel rank. A worker that was never reached has one row, with the reason.
        """
        snapshot = self._core.snapshot(self._now())
        rows = [self._describe_worker(row) for row in snapshot.workers]
        for worker_id, reason in self._fleet.list_starting_reasons().items():
            rows.append({"worker_id": worker_id, "state": WorkerState.STARTING.value, "state_reason": reason})
        stats = self._core.index.stats()
        return {
            "workers": rows,
            "in_flight": snapshot.in_flight,
            "queued": snapshot.queued_requests,
            "counters": snapshot.counters,
            "index": {field.name: getattr(stats, field.name) for field in dataclasses.fields(IndexStats)},
            "kv_groups": describe_kv_groups(self._core.workers.values()),
            "kv_transfers": self._transfers.group_by_kind(),
        }

    def _describe_worker(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of one rank, with the state of its event streams and of its models' tokenizers."""
        worker = self._core.workers.get(row["worker_id"])
        base_models = sorted({model.base for model in worker.models.values()}) if worker is not None else []
        conversations, tokenizers = self._prompt_reader.conversations, self._prompt_reader.tokenizers
        tokenized_models = [model for model in base_models if tokenizers.get(model) is not None]
        return row | {
            "events": self._fleet.describe_events(row["worker_id"]),
            "conversation_cache": {model: conversations.problems.get(model, "used") for model in tokenized_models},
            "tokenizer": {
                model: "loaded" if model in tokenized_models else tokenizers.problems.get(model, "none")
                for model in base_models
            },
        }

    def _list_workers(self, request: HttpRequest, _: str) -> Response:
        return Response(msgspec.json.encode(self.describe_workers()))

    def _add_worker(self, request: HttpRequest, _: str) -> Response:
        try:
            worker_id = self._fleet.add(decode_object(request.body))
        except ValueError as error:
            raise RequestError(str(error), param="url") from None
        log.info("admin: worker %s added", worker_id)
        return Response(msgspec.json.encode({"worker_id": worker_id}), 201)

    def _remove_worker(self, request: HttpRequest, path_name: str) -> Response:
        """Remove the worker that the path names, or else the field `worker_id` or `url` of the body."""
        settings = {} if path_name else decode_object(request.body)
        name = path_name or str(settings.get("worker_id") or settings.get("url") or "")
        worker_id = self._find_worker(name)
        self._fleet.remove(worker_id)
        log.info("admin: worker %s removed", worker_id)
        return Response(msgspec.json.encode({"worker_id": worker_id, "removed": True}))

    def _drain_worker(self, request: HttpRequest, name: str) -> Response:
        """Stop sending new requests to a worker, or resume it if the body is `{"on": false}`. Answers with its id."""
        fields = decode_object(request.body) if request.body else {}
        is_draining = fields.pop("on", True)
        if fields:
            raise bad_value("on", fields, 'a body with this field alone, such as {"on": false}')
        if not isinstance(is_draining, bool):
            raise bad_value("on", is_draining, "true or false")
        worker_id = self._find_worker(name)
        if worker_id not in self._core.workers:
            raise RequestError(
                f"worker {worker_id!r}: was never reached, so it gets no requests; drain it once it is up, or remove "
                "it with DELETE /workers/ID", param="worker_id", code="unknown_worker", status=409,
            )  # fmt: skip
        self._fleet.drain(worker_id, is_draining=is_draining)
        log.info("admin: worker %s %s", worker_id, "drained" if is_draining else "taken back")
        return Response(msgspec.json.encode({"worker_id": worker_id, "draining": is_draining}))

    def _find_worker(self, name: str) -> str:
        """Return the id of the worker with this id or URL. Raises RequestError if there is none."""
        starting_ids = self._fleet.list_starting_reasons()  # of workers that were never reached: the core has none
        for worker_id, worker in self._core.workers.items():
            if name and name in (worker_id, worker.spec.url):
                return worker_id
        for worker_id in starting_ids:
            if name in (worker_id, f"http://{worker_id}"):
                return worker_id
        worker_names = ", ".join([*self._core.workers, *starting_ids])
        raise RequestError(
            f"worker {name!r}: not known, expected one of {worker_names or 'none at all'}",
            param="worker_id", code="unknown_worker", status=404,
        )  # fmt: skip


def describe_kv_groups(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """Return a row for each group of workers that can exchange KV: which give it, which take it, and why none moves."""
    workers_by_group: dict[str, list[Worker]] = {}
    for worker in workers:
        if worker.spec.transfer.group:
            workers_by_group.setdefault(worker.spec.transfer.group, []).append(worker)
    return [_describe_kv_group(group, members) for group, members in sorted(workers_by_group.items())]


def _describe_kv_group(group: str, members: list[Worker]) -> dict[str, Any]:
    """Return the row of one group. Its members run the same engine, so the first one speaks for all."""
    available = [worker for worker in members if find_unusable_reason(worker) is None]
    sources = [worker.worker_id for worker in available if worker.spec.transfer.can_give]
    destinations = [worker.worker_id for worker in available if worker.spec.transfer.can_take]
    dialect, needs_partner = members[0].spec.transfer.dialect, members[0].spec.transfer.needs_partner
    effect = "requests are refused" if needs_partner else "each computes its prompts"
    missing_role = PREFILL_ROLE if not sources else DECODE_ROLE if not destinations else ""
    problem = ""
    if missing_role:
        problem = f"no worker {'gives' if missing_role == PREFILL_ROLE else 'takes'} KV: {effect}"
    elif len({*sources, *destinations}) == 1:
        problem = "only one worker is available"
    return {
        "group": group, "dialect": dialect, "sources": sources, "destinations": destinations,
        "missing_role": missing_role, "problem": problem,
    }  # fmt: skip
