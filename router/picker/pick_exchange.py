"""A request whose bytes Envoy carries: an exchange that says where to, and learns from Envoy what became of it.

Owns what the core hears of such a request. Refuses to know Envoy's messages (router/picker/ext_proc_stream.py). Rules:

* Nothing can be sent a second time from here: where the worker fails, Envoy goes down the list of fallbacks, and the
  books follow to whoever served.
* Without the answer's body, its first token is its head where the engines are ours, which send it then; else it is
  estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from prompts.worker_fields import WORKER_HEADERS
from router.decide.messages import Decision, FailureKind, RouteRequest
from router.edge.config import Timeouts
from router.edge.exchange import CHUNKS_PER_PROGRESS_REPORT, Exchange
from router.edge.exchange_services import RETRYABLE_STATUSES, ExchangeServices
from router.edge.rewrite import RANK_HEADER
from router.http.connection import Client
from router.http.request import HttpRequest
from router.picker.ext_proc_stream import Choice, ResponseStart

if TYPE_CHECKING:
    from router.picker.config import PickerConfig
    from router.picker.endpoint_map import EndpointMap

PRIORITY_STEP = 1_000
"""Between two priorities there is room for so many requests in flight of one fairness id."""
FAIRNESS_IDS_MAX = 10_000
Header = tuple[bytes, bytes]


class PickerState:
    """What all picks of a process share."""

    def __init__(self, config: PickerConfig, endpoints: EndpointMap) -> None:
        self.config = config
        self.endpoints = endpoints
        self.priorities = config.priorities
        self.in_flight_counts: Counter[str] = Counter()
        """Fairness id -> requests."""


class EnvoyClient(Client, Protocol):
    """Envoy, as far as one request goes: router/picker/picker_client.py."""

    picker_state: PickerState
    objective: str | None
    fairness_id: str

    @property
    def allowed_endpoints(self) -> Sequence[str] | None:
        """Endpoints that may be chosen; None: all."""

    @property
    def sees_response_body(self) -> bool:
        """Whether the answer's body comes by."""

    def attach_pick(self, pick: PickExchange) -> None: ...

    def send_choice(self, choice: Choice) -> None: ...

    def abandon(self) -> None: ...


class PickExchange(Exchange):
    """One request."""

    __slots__ = ("_envoy", "_fairness_id", "_status", "picker_state")

    def __init__(
        self, proxy: ExchangeServices, client: EnvoyClient, request: HttpRequest, request_id: str, trace_id: bytes
    ) -> None:
        super().__init__(proxy, client, request, request_id, trace_id)
        self._envoy = client
        self.picker_state = client.picker_state
        client.attach_pick(self)
        self._status = 0
        """Of the answer; 0 before it."""
        self._fairness_id: str | None = None

    def add_routing_hints(self, route: RouteRequest) -> None:
        """Priorities, the gateway's subset, and whether the first token will be seen."""
        envoy, picker_state = self._envoy, self.picker_state
        objective = envoy.objective
        if objective is not None:
            route.priority = picker_state.priorities.get(objective, route.priority)
        fairness_id = envoy.fairness_id
        is_tracked = (
            fairness_id in picker_state.in_flight_counts or len(picker_state.in_flight_counts) < FAIRNESS_IDS_MAX
        )
        self._fairness_id = fairness_id if is_tracked else ""
        in_flight_count = picker_state.in_flight_counts[self._fairness_id]
        picker_state.in_flight_counts[self._fairness_id] = in_flight_count + 1
        route.priority = route.priority * PRIORITY_STEP + min(in_flight_count, PRIORITY_STEP - 1)
        if envoy.allowed_endpoints is not None:
            route.allowed_workers = picker_state.endpoints.find_worker_ids(envoy.allowed_endpoints)
        if not envoy.sees_response_body:
            route.is_streaming = route.is_streaming and self._services.core.registry.is_blockcast(route.model)

    def forward(self, decision: Decision) -> None:
        """Tell Envoy where to; once."""
        self.decision = decision
        if self.sent_at_s is not None:
            return
        endpoint = self.picker_state.endpoints.get_endpoint(decision.worker)
        if endpoint is None:
            self._handle_failed_attempt(FailureKind.OVERLOADED, "its name is not resolved")
            return
        self.sent_at_s = self._services.now()
        headers: list[Header] = []
        removed_headers: list[str] = []
        authorization = self._authorization_for(decision.worker)
        if authorization is not None:
            if authorization:
                headers.append((b"authorization", authorization))
            removed_headers += ["x-api-key"] if authorization else ["authorization", "x-api-key"]
        if decision.rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % decision.rank))
        allowed_headers = self._services.passed_fields | ({RANK_HEADER} if decision.rank is not None else set())
        removed_headers += sorted(WORKER_HEADERS - allowed_headers)
        if self.request.is_decoded:
            removed_headers.append("content-encoding")
        if self._envoy.sees_response_body:
            removed_headers.append("accept-encoding")
        if self.span is not None:
            headers.append((b"traceparent", self.span[1]))
        self._envoy.send_choice(Choice([endpoint, *self._fallbacks(decision, authorization)], headers, removed_headers))

    def _authorization_for(self, worker_id: str) -> bytes | None:
        """What stands for the client's `Authorization`: None, it stays; empty, it goes."""
        authorization = self._services.worker_authorization
        return authorization if authorization is None or self._services.may_send_key(worker_id) else b""

    def _fallbacks(self, decision: Decision, authorization: bytes | None) -> Sequence[str]:
        workers, of = self._services.core.workers, self.picker_state.endpoints.get_endpoint
        endpoints: list[str] = []
        for worker_id in self._services.core.find_fallback_workers(
            self.request_id, self.picker_state.config.fallbacks, decision.decided_s
        ):
            endpoint = of(worker_id)
            fits = decision.rank is None or workers[worker_id].spec.ranks > decision.rank
            if endpoint is not None and fits and self._authorization_for(worker_id) == authorization:
                endpoints.append(endpoint)
        return endpoints

    # From Envoy -----------------------------------------------------------------------------------------------------

    def response_started(self, answer: ResponseStart) -> Sequence[Header]:
        """The head of the answer; headers for the client."""
        decision, services = self.decision, self._services
        if self.is_done or decision is None:
            return ()
        now = services.now()
        self._status = answer.status
        self.first_byte_at_s = self.progress.last_byte_at_s = now
        served_by_worker = (
            None if answer.served_by is None else self.picker_state.endpoints.get_worker_id(answer.served_by)
        )
        if served_by_worker is not None and served_by_worker != decision.worker:
            self._record_fallback(served_by_worker)
        kind = RETRYABLE_STATUSES.get(answer.status)
        if kind is not None:
            services.record_failed_attempt(self.decision, kind, f"{answer.status}, as Envoy says")
            self._withdraw_from_core(kind)
        elif answer.status == 200 and not self._envoy.sees_response_body:
            self._record_first_token(now)
        served_decision = self.decision
        if served_decision is None or not services.sends_cache_headers:
            return ()
        return (
            (b"x-blockcast-worker", served_decision.worker.encode()),
            (b"x-blockcast-predicted-cached-tokens", b"%d" % served_decision.predicted_cached_tokens),
        )

    def response_content(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self.is_done:
            return
        now = self._services.now()
        if self._status == 200 and not self.progress.has_started and self._has_output(data):
            self._record_first_token(now)
        self.progress.record(data, now)
        if self.is_in_core and self.progress.read_count % CHUNKS_PER_PROGRESS_REPORT == 0:
            self._services.core.record_progress(self.request_id, self.progress.read_count, now)

    def complete_response(self) -> None:
        """The whole answer has passed."""
        self.usage = self.progress.find_reported_usage()
        if not self._end(f"status_{self._status}"):
            return
        if self.is_in_core:
            self.is_in_core = False
            core, now = self._services.core, self._services.now()
            if self.route is not None and self.route.is_streaming and self._envoy.sees_response_body:
                core.record_progress(self.request_id, self.progress.read_count)
            self._services.perform(core.finish_request(self.request_id, self.usage, now, is_error=self._status >= 400))

    def stream_closed(self) -> None:
        """Envoy asks no more. Where the answer's body does not come by, that is its end."""
        is_complete = self._status == 200 and self.progress.has_final_event(self.request.path)
        if self._status and (is_complete or not self._envoy.sees_response_body):
            self.complete_response()
        else:
            self.client_gone()

    def _record_fallback(self, served_by_worker: str) -> None:
        """The worker did not answer, and Envoy found another of the list: so do the books."""
        services, route = self._services, self.route
        services.record_failed_attempt(
            self.decision, FailureKind.RESET, f"{served_by_worker} served instead, as Envoy says"
        )
        if not self.is_in_core or route is None:
            return
        self.route = route.replace(worker=served_by_worker, allowed_workers=None)
        services.perform(services.core.fail_attempt(self.request_id, FailureKind.RESET, services.now(), self.route))
        if self.decision is None or self.decision.worker != served_by_worker:
            self._withdraw_from_core(None)  # the core would not have it there: its load is not counted

    def _record_first_token(self, now: float) -> None:
        self.progress.has_started = True
        if self.is_in_core and self.route is not None and self.route.is_streaming:
            self._services.perform(self._services.core.record_first_token(self.request_id, now))
        self._services.notify_first_byte(self.request_id)

    # From the process -----------------------------------------------------------------------------------------------

    @property
    def last_progress_at_s(self) -> float | None:
        """Nobody can tell where chunks do not come by."""
        is_streaming = (
            self._envoy.sees_response_body
            and self.progress.has_started
            and self.route is not None
            and self.route.is_streaming
        )
        return self.progress.last_byte_at_s if is_streaming and not self.is_done else None

    def migrate(self, reason: str, *, is_stalled: bool = False) -> None:
        """Envoy has it, and goes down the list of fallbacks by itself."""

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """What Envoy does not end is Envoy's; the books end with the longest time that an answer may take."""
        if now - self.started_at_s > timeouts.total_s and not self.is_done:
            self.outcome = "timeout"
            self._envoy.abandon()

    def _end(self, outcome: str) -> bool:
        if self._fairness_id is not None:
            self.picker_state.in_flight_counts[self._fairness_id] -= 1
            if not self.picker_state.in_flight_counts[self._fairness_id]:
                del self.picker_state.in_flight_counts[self._fairness_id]
            self._fairness_id = None
        return super()._end(outcome)
