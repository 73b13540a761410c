"""The routes that look at or change the router itself: health, models, metrics, workers, explanations.

`/health`, `/metrics`, `/v1/models` and the dashboard's empty page are for everybody who reaches the port. The others
tell what is cached where and change who gets work: router/app/guard.py says who may ask.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qs

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from prompts.errors import RequestError, bad_value
from prompts.routing import API_KIND_BY_PATH
from router.app.dashboard import Dashboard
from router.app.metrics_page import CacheCounts, MetricsReport, build_page_families, render_metrics
from router.app.request_reader import RequestReader
from router.decide.core import RouterCore
from router.decide.messages import Refuse
from router.decide.workers import CacheView, WorkerState
from router.edge.miss_reasons_recorder import MissReasonsRecorder, render_explanation
from router.edge.request_context import RequestContext
from router.fleet.members import Fleet
from router.http.request import HttpRequest
from router.http.routes import CachedPage, Handler, Response, Routes
from router.index.protocol import IndexStats
from router.metrics import Metrics
from router.prompting.reader import PromptReader

log = logging.getLogger("router")

TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_ANSWER = re.compile("^(?:chatcmpl-|cmpl-|msg_|resp_)")
"""What an answer's id has before the request's, here and in vLLM."""
BODY_BYTES_MAX: Final = 64 << 10
"""Of what changes workers: it is decoded on everybody's path."""


_Positive = Annotated[int, Meta(ge=1)]


class _NewWorker(Struct, forbid_unknown_fields=True):
    """Body of `POST /workers`: types of its fields. The keys of `--worker` are checked after that."""

    url: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    events: str | UnsetType = UNSET
    replay: str | UnsetType = UNSET
    topic: str | UnsetType = UNSET
    roles: str | UnsetType = UNSET
    cache_tokens: _Positive | UnsetType = UNSET
    max_num_seqs: _Positive | UnsetType = UNSET
    prefill_order: Literal["arrival", "shortest"] | UnsetType = UNSET
    reannounce: Literal[0, 1] | UnsetType = UNSET
    send_key: Literal[0, 1] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    root: str | UnsetType = UNSET
    block_size: _Positive | UnsetType = UNSET


class AdminRoutes:
    """Handlers of the router's own routes."""

    def __init__(
        self,
        core: RouterCore,
        fleet: Fleet,
        prompts: PromptReader,
        request_reader: RequestReader,
        metrics: Metrics,
        *,
        now: Callable[[], float],
        version: str,
        feed_totals: Callable[[], dict[str, dict[str, int]]] = dict,
        feed_fault: Callable[[], str | None] = lambda: None,
        event_faults: Callable[[], int] = lambda: 0,
        events_ignored: Callable[[], int] = lambda: 0,
        peer_messages: Callable[[], dict[str, int]] = dict,
        is_synced: Callable[[str], bool] = lambda worker_id: True,
        ready_s: float = 0.0,
        reasons: MissReasonsRecorder | None = None,
        aliases: Mapping[str, str] | None = None,
        forwarded_paths: Collection[str] = (),
    ) -> None:
        """`aliases`: other names of models. `forwarded_paths`: paths that are forwarded to workers."""
        self._core = core
        self._fleet = fleet
        self._prompts = prompts
        self._request_reader = request_reader
        self._metrics = metrics
        self._now = now
        self._feed_totals = feed_totals
        self._feed_fault = feed_fault
        self._event_faults = event_faults
        self._events_ignored = events_ignored
        self._peer_messages = peer_messages
        self._is_synced = is_synced
        """Whether a worker's event streams have caught up."""
        self._ready_s = ready_s
        self._reasons = reasons
        self._aliases = aliases or {}
        self._forwarded_paths = forwarded_paths
        self._version = version
        self._was_ready = False
        self._created_at = int(time.time())
        self._started_s = now()
        self.draining = False
        self.routes = Routes()
        handlers: list[tuple[str, str, Handler, bool]] = [
            ("GET", "/", self._describe, True),
            ("GET", "/health", self._report_health, True),
            ("GET", "/livez", lambda *_: Response(b'{"status":"ok"}'), True),
            ("GET", "/readyz", self._report_readiness, True),
            ("GET", "/v1/models", CachedPage(self._list_models, now), True),
            ("GET", "/v1/models/**", self._describe_model, True),
            ("GET", "/metrics", CachedPage(self._render_metrics, now), True),
            ("GET", "/version", lambda *_: Response(msgspec.json.encode({"version": version})), True),
            ("GET", "/workers", self._list_workers, False),
            ("POST", "/workers", self._add_worker, False),
            ("DELETE", "/workers", self._remove_worker, False),
            ("DELETE", "/workers/*", self._remove_worker, False),
            ("POST", "/workers/*/drain", self._drain_worker, False),
            ("POST", "/route", self._explain_route, False),
            ("GET", "/requests/*", self._explain_request, False),
            ("POST", "/requests/watch", self._watch_session, False),
        ]
        for method, path, handler, public in handlers:
            self.routes.add(method, path, handler, public=public)

    def add_dashboard(self, dashboard: Dashboard) -> None:
        """Serve the dashboard."""
        self.routes.add("GET", "/dashboard", lambda *_: dashboard.page, public=True)
        self.routes.add("GET", "/dashboard/events", lambda *_: dashboard.watch, public=False)

    # Handlers -----------------------------------------------------------------------------------------------------

    def _describe(self, request: HttpRequest, _: str) -> Response:
        """What answers at this address, for people and for clients that look whether anybody is there."""
        body = {
            "name": "blockcast router",
            "version": self._version,
            "forwarded_to_workers": [*self._forwarded_paths],
            "paths": self.routes.list_paths(public=True),
        }
        return Response(msgspec.json.encode(body))

    def _report_health(self, request: HttpRequest, _: str) -> Response:
        states = [worker.state for worker in self._core.workers.values()]
        up_count = sum(state is WorkerState.UP for state in states)
        status = "draining" if self.draining else "ok" if up_count else "no worker is up"
        worker_count = len(states) + len(self._fleet.starting_reasons())
        body: dict[str, Any] = {"status": status, "workers": worker_count, "workers_up": up_count}
        if (fault := self._feed_fault()) is not None:
            body["events"] = fault  # requests are still sent on, by what was known before
        return Response(msgspec.json.encode(body), 200 if status == "ok" else 503)

    def _report_readiness(self, request: HttpRequest, _: str) -> Response:
        """Whether requests had better be sent here than to another router."""
        reason = self.find_unready_reason()
        return Response(msgspec.json.encode({"status": reason or "ok"}), 503 if reason else 200)

    def find_unready_reason(self) -> str | None:
        """Return why the router is not ready: draining, no worker up, or caches not known yet (`ready_s` at most)."""
        if self.draining:
            return "draining"
        up_workers = [worker for worker in self._core.workers.values() if worker.state is WorkerState.UP]
        if not up_workers:
            return "no worker is up"
        if not self._was_ready:
            unsynced_ids = [
                w.worker_id
                for w in up_workers
                if w.spec.cache_view is CacheView.EVENTS and not self._is_synced(w.worker_id)
            ]
            unsynced_ids += self._fleet.starting_reasons()
            if unsynced_ids and self._now() - self._started_s < self._ready_s:
                return f"not known yet: {', '.join(unsynced_ids[:10])}"
            self._was_ready = True
        return None

    def _list_models(self) -> Response:
        return Response(msgspec.json.encode({"object": "list", "data": list(self._make_model_cards().values())}))

    def _describe_model(self, request: HttpRequest, name: str) -> Response:
        card = self._make_model_cards().get(name)
        if card is None:
            raise RequestError(
                f"model {name[:200]!r}: no worker serves it", param="model", code="model_not_found", status=404
            )
        return Response(msgspec.json.encode(card))

    def _make_model_cards(self) -> dict[str, dict[str, Any]]:
        """Every model that some worker takes requests for, with the longest context offered."""
        cards: dict[str, dict[str, Any]] = {}
        for worker in self._core.workers.values():
            if worker.state not in (WorkerState.UP, WorkerState.PROBING, WorkerState.DRAINING):
                continue
            for name, model in worker.models.items():
                card = cards.setdefault(
                    name,
                    {
                        "id": name,
                        "object": "model",
                        "created": self._created_at,
                        "owned_by": "blockcast",
                        "root": model.base,
                        "parent": model.base if model.lora else None,
                        "max_model_len": model.max_model_len,
                    },
                )
                if (model.max_model_len or 0) > (card["max_model_len"] or 0):
                    card["max_model_len"] = model.max_model_len
        for alias, model_name in self._aliases.items():
            if model_name in cards:
                cards[alias] = cards[model_name] | {"id": alias}
        return cards

    def make_metrics_report(self) -> MetricsReport:
        """What the parts of the router count for themselves. Brings the metrics up to date."""
        self._metrics.flush_ended()
        segments, conversations = self._prompts.cache_stats(), self._prompts.conversations
        return MetricsReport(
            tokenize_cpu_s=self._prompts.cpu_s + self._request_reader.worker_pool.cpu_s,
            conversation_cache=CacheCounts(
                conversations.cache.hits, conversations.cache.misses, conversations.cache.used_bytes
            ),
            conversation_checks=conversations.check_count,
            conversation_differences=conversations.difference_count,
            large_bodies=dict(self._request_reader.worker_pool.counts),
            waiting_bytes=self._request_reader.worker_pool.waiting_bytes,
            event_faults=self._event_faults(),
            events_ignored=self._events_ignored(),
            peer_messages=self._peer_messages(),
            segments={
                model: CacheCounts(stats.hit_tokens, stats.miss_tokens, stats.used_bytes)
                for model, stats in segments.items()
            },
        )

    def _render_metrics(self) -> Response:
        report, snapshot = self.make_metrics_report(), self._core.snapshot(self._now())
        starting, unusable, index = self._fleet.starting_reasons(), self._fleet.failed_checks, self._core.index.stats()
        page = build_page_families(self._metrics, report, snapshot, index, starting, unusable, self._feed_totals())
        return Response(render_metrics(page), content_type=TEXT)

    def describe_workers(self) -> dict[str, Any]:
        """The body of `GET /workers`."""
        snapshot = self._core.snapshot(self._now())
        rows = []
        for row in snapshot.workers:
            row_fields = dataclasses.asdict(row)
            row_fields["events"] = self._fleet.details(row.worker_id)
            worker = self._core.workers.get(row.worker_id)
            base_models = {model.base for model in worker.models.values()} if worker is not None else set()
            row_fields["conversation_cache"] = {
                base_model: self._prompts.conversations.problems.get(base_model, "used")
                for base_model in sorted(base_models)
                if self._prompts.tokenizer_of(base_model) is not None
            }
            row_fields["tokenizer"] = {
                base_model: "loaded"
                if self._prompts.tokenizer_of(base_model) is not None
                else self._prompts.problems.get(base_model, "none")
                for base_model in sorted(base_models)
            }
            rows.append(row_fields)
        for worker_id, problem in self._fleet.starting_reasons().items():
            rows.append({"worker_id": worker_id, "state": WorkerState.STARTING.value, "state_reason": problem})
        stats = self._core.index.stats()
        return {
            "workers": rows,
            "in_flight": snapshot.in_flight,
            "queued": snapshot.queued_requests,
            "counters": snapshot.counters,
            "index": {field.name: getattr(stats, field.name) for field in dataclasses.fields(IndexStats)},
        }

    def _list_workers(self, request: HttpRequest, argument: str) -> Response:
        return Response(msgspec.json.encode(self.describe_workers()))

    async def _add_worker(self, request: HttpRequest, _: str) -> Response:
        settings = {key: _convert_whole_float(value) for key, value in _decode_object(request.body).items()}
        try:
            msgspec.convert(settings, _NewWorker, strict=False)
            worker_id = await self._fleet.add(settings)
        except ValueError as error:
            raise RequestError(str(error), param="url") from None
        log.info("admin: worker %s added", worker_id)
        return Response(msgspec.json.encode({"worker_id": worker_id}), 201)

    async def _remove_worker(self, request: HttpRequest, argument: str) -> Response:
        settings = {} if argument else _decode_object(request.body)
        name = argument or str(settings.get("worker_id") or settings.get("url") or "")
        worker_id = self._find_worker(name, *self._fleet.starting_reasons())
        await self._fleet.remove(worker_id)
        log.info("admin: worker %s removed", worker_id)
        return Response(msgspec.json.encode({"worker_id": worker_id, "removed": True}))

    async def _drain_worker(self, request: HttpRequest, argument: str) -> Response:
        """Body, optional: `{"on": false}` to give the worker work again."""
        is_draining = _decode_object(request.body).get("on", True) if request.body else True
        if not isinstance(is_draining, bool):
            raise bad_value("on", is_draining, "true or false")
        worker_id = self._find_worker(argument)
        await self._fleet.drain(worker_id, on=is_draining)
        log.info("admin: worker %s %s", worker_id, "drained" if is_draining else "taken back")
        return Response(msgspec.json.encode({"worker_id": worker_id, "draining": is_draining}))

    def _find_worker(self, name: str, *starting_ids: str) -> str:
        """Return the id of the worker called `name`, an id or a URL. `starting`: ids of workers never reached yet."""
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

    async def _explain_route(self, request: HttpRequest, _: str) -> Response:
        """Explain where a request with these headers and this body, sent to `?path=`, would go now. Without a path the
        body tells whether it is a chat or a completion. Sends and changes nothing."""
        path = parse_qs(request.target.partition(b"?")[2].decode("latin-1")).get("path")
        if path and not path[0].startswith("/v1/"):
            message = f"path: got {path[0][:200]!r}, expected a route under /v1/, such as {', '.join(API_KIND_BY_PATH)}"
            raise RequestError(message, param="path")
        context = RequestContext(request, "", self._now(), "explained")
        await self._request_reader.read(context, path[0] if path else None)
        assert context.body is not None
        route, prompt = self._request_reader.build_route_request(context), context.body.prompt
        decision = self._core.explain(route, self._now())
        if isinstance(decision, Refuse):
            raise RequestError(decision.message, param=None, code=decision.code, status=decision.status)
        context.route, context.decision = route, decision
        body: dict[str, Any] = decision.to_json_fields()
        del body["request_id"], body["decided_s"]
        body |= {"tokenized": prompt.token_ids is not None, "tokenize_ms": round(prompt.seconds * 1e3, 3)}
        if self._reasons is not None:
            body["why"] = await self._reasons.explain(context)
        return Response(msgspec.json.encode(body))

    def _explain_request(self, request: HttpRequest, argument: str) -> Response:
        """Why a request's prompt was not cached, by its x-request-id or by its answer's id, which ends with that."""
        if self._reasons is not None:
            for request_id in (argument, _ANSWER.sub("", argument)):
                why = self._reasons.get_explanation(request_id)
                if why is not None:
                    return Response(msgspec.json.encode(render_explanation(why)))
        raise RequestError(
            f"request {argument[:200]!r}: {self._explain_unknown()}", param=None, code="unknown_request", status=404
        )

    def _explain_unknown(self) -> str:
        """Return why a request may not be known."""
        if self._reasons is None or not self._reasons.is_enabled:
            return "why prompts were not cached is not found out here (--reasons)"
        return "expected the x-request-id of one of the last that were answered with a prompt"

    def _watch_session(self, request: HttpRequest, _: str) -> Response:
        """Compare each prompt of a session with the one before, from its next request on."""
        session_name = _decode_object(request.body).get("session")
        if not isinstance(session_name, str) or not session_name:
            raise bad_value("session", session_name, "the name of a session, as GET /requests/ID tells it")
        if self._reasons is None or not self._reasons.is_enabled:
            raise RequestError(f"session: {self._explain_unknown()}", param=None, code="reasons_off", status=409)
        self._reasons.watch(session_name)
        return Response(msgspec.json.encode({"session": session_name, "watched": self._reasons.watched_session_count}))


def _convert_whole_float(value: Any) -> Any:
    """In JSON 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _decode_object(body: bytes) -> dict[str, Any]:
    if len(body) > BODY_BYTES_MAX:
        raise RequestError(f"the body has {len(body)} bytes: expected at most {BODY_BYTES_MAX}", param=None, status=413)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", param=None) from None
    if not isinstance(value, dict):
        raise RequestError("the body is not valid JSON: expected an object", param=None)
    return value
