"""The exchange of a request that Envoy carries: it tells Envoy the worker, and reports the outcome to the core.

* The router cannot repeat such a request. If the worker fails, Envoy tries the fallbacks, and the request is moved in
  the core to the worker that answered.
* Without the answer's body, the head of the answer counts as its first token where the engine is ours, which sends both
  together. For other engines the first token is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence

from prompts.errors import RequestError
from prompts.worker_fields import WORKER_HEADERS
from router.decide.messages import Decision, FailureKind, RouteRequest
from router.edge.config import Timeouts
from router.edge.forwarded_heads import RANK_HEADER
from router.edge.proxy import CHUNKS_PER_PROGRESS_REPORT, RETRYABLE_STATUSES, Exchange, Proxy
from router.edge.request_context import RequestContext
from router.picker.ext_proc_stream import Choice
from router.picker.messages import FAIRNESS_HEADER, OBJECTIVE_HEADER, Header
from router.picker.picker_client import PickerClient

NAME_BYTES_MAX = 256
FAIRNESS_IDS_MAX = 10_000


class PickExchange(Exchange):
    """Answers one request of Envoy, which forwards requests itself and only asks the router for the worker.

    It asks the core for a worker, tells Envoy that worker's endpoint, and reports to the core what comes of the answer.
    It never moves a request (`migrate`), as Envoy tries the fallbacks itself.
    """

    __slots__ = ("_fairness_id", "_proxy", "_status", "client", "context", "picker")
    client: PickerClient

    def __init__(self, proxy: Proxy, client: PickerClient, context: RequestContext) -> None:
        self._proxy = proxy
        self.client = client
        self.context = context
        context.progress.last_byte_at_s = context.started_at_s  # the picker does not see when Envoy sends the request
        self.picker = client.picker
        client.stream.answer_reader = self
        self._status = 0
        """Status of the answer; 0 before it."""
        self._fairness_id: str | None = None
        """Fairness id under which the request is counted; None while it is not counted."""

    def request_worker(self, route: RouteRequest) -> None:
        """Have a worker chosen for the request, among the endpoints that the gateway allows.

        The gateway's objective sets the priority. Within one priority, a request comes after others if its fairness id
        has more requests in flight.
        """
        if self.context.is_done:
            return
        stream, request = self.client.stream, self.context.request
        objective = _decode_name(request.get_header(OBJECTIVE_HEADER))
        fairness_id = _decode_name(request.get_header(FAIRNESS_HEADER))
        route.priority = self.picker.priorities.get(objective, route.priority)
        route.queue_rank = self._count_in_flight(fairness_id)
        if stream.allowed_endpoints is not None:
            route.allowed_workers = self.picker.endpoints.find_worker_ids(stream.allowed_endpoints)
        if route.is_streaming and not stream.sees_response_body:
            # Then the head of the answer stands for the first token, which only our engine sends together with it.
            route.is_streaming = self._proxy.core.registry.is_blockcast(route.model)
        self._proxy.route(self.context, route)

    def _count_in_flight(self, fairness_id: str) -> int:
        """Count the request under a fairness id, and return how many others with that id are in flight."""
        in_flight_counts = self.picker.in_flight_counts
        has_room = fairness_id in in_flight_counts or len(in_flight_counts) < FAIRNESS_IDS_MAX
        self._fairness_id = fairness_id if has_room else ""  # counted as one
        in_flight_counts[self._fairness_id] += 1
        return in_flight_counts[self._fairness_id] - 1

    def forward(self, decision: Decision) -> None:
        """Tell Envoy the endpoints of the chosen worker and of fallbacks, which Envoy tries in that order.

        Envoy asks once, so a later decision for the request is only recorded.
        """
        proxy, context = self._proxy, self.context
        context.decision = decision
        if context.progress.sent_at_s is not None:
            return
        endpoint = self.picker.endpoints.get_endpoint(decision.worker)
        if endpoint is None:
            self._handle_unresolved_name()
            return
        context.progress.sent_at_s = proxy.now()
        authorization = proxy.workers.get_authorization(decision.worker)
        choice = Choice(
            endpoints=[endpoint, *self._list_fallbacks(decision, authorization)],
            set_headers=self._list_worker_headers(decision, authorization),
            removed_headers=self._list_removed_headers(decision, authorization),
        )
        self.client.send_choice(choice)

    def _list_worker_headers(self, decision: Decision, authorization: bytes | None) -> list[Header]:
        """Return the headers that Envoy sets on the request to the worker."""
        headers: list[Header] = []
        if authorization:
            headers.append((b"authorization", authorization))
        if decision.rank is not None:
            headers.append((RANK_HEADER.encode(), b"%d" % decision.rank))
        if self.context.span is not None:
            headers.append((b"traceparent", self.context.span.traceparent))
        return headers

    def _list_removed_headers(self, decision: Decision, authorization: bytes | None) -> list[str]:
        """Return the names of the client's headers that Envoy removes before it sends the request to the worker.

        `authorization`: the worker's own key; empty if it gets none, None if it gets the client's.
        """
        allowed_headers = set(self._proxy.passed_fields)
        if decision.rank is not None:  # this header is set by the router
            allowed_headers.add(RANK_HEADER)
        removed_headers = sorted(WORKER_HEADERS - allowed_headers)
        if authorization is not None:
            removed_headers.append("x-api-key")
        if authorization == b"":
            removed_headers.append("authorization")
        if self.context.request.is_decoded:
            removed_headers.append("content-encoding")
        if self.client.stream.sees_response_body:  # the answer is read, so it must not be compressed
            removed_headers.append("accept-encoding")
        return removed_headers

    def _handle_unresolved_name(self) -> None:
        """Try another worker, as the host name of the chosen one is not resolved."""
        proxy, context = self._proxy, self.context
        proxy.record_failed_attempt(context.decision, FailureKind.OVERLOADED, "its name is not resolved")
        proxy.perform(proxy.core.fail_attempt(context.request_id, FailureKind.OVERLOADED, proxy.now()))

    def _list_fallbacks(self, decision: Decision, authorization: bytes | None) -> Sequence[str]:
        """Return the endpoints that Envoy tries if the chosen one fails.

        Envoy sends them the same head, so only workers with the same rank and the same authorization are taken.
        """
        proxy = self._proxy
        endpoints: list[str] = []
        fallbacks_max = self.picker.config.fallbacks
        for worker_id in proxy.core.find_fallback_workers(self.context.request_id, fallbacks_max, decision.decided_s):
            endpoint = self.picker.endpoints.get_endpoint(worker_id)
            has_rank = decision.rank is None or proxy.core.workers[worker_id].spec.ranks > decision.rank
            if endpoint is not None and has_rank and proxy.workers.get_authorization(worker_id) == authorization:
                endpoints.append(endpoint)
        return endpoints

    def refuse(self, error: RequestError, outcome: str) -> None:
        """Have Envoy answer with an error."""
        if self._proxy.end(self.context, outcome):
            self.client.respond_error(error)

    def response_started(self, status: int, served_by: str | None) -> Sequence[Header]:
        """Record the head of the answer, and return headers for the client.

        `served_by`: endpoint that answers. If it is not the chosen worker's, the chosen one failed, and this is a
        fallback. With a status such as 503 the answering worker has failed, and the core ends the request. If the body
        is not seen, status 200 counts as the first token.
        """
        proxy, context = self._proxy, self.context
        if context.is_done or context.decision is None:
            return ()
        self._status = status
        now = proxy.now()
        context.progress.first_byte_at_s = now
        context.progress.last_byte_at_s = now
        answering_worker = None if served_by is None else self.picker.endpoints.get_worker_id(served_by)
        if answering_worker is not None and answering_worker != context.decision.worker:
            self._record_fallback(answering_worker)
        failure_kind = RETRYABLE_STATUSES.get(status)
        if failure_kind is not None:
            proxy.record_failed_attempt(context.decision, failure_kind, f"{status}, as Envoy says")
            proxy.withdraw(context, failure_kind)
        elif status == 200 and not self.client.stream.sees_response_body:
            self._record_first_token(now)
        return _build_decision_headers(context.decision) if proxy.config.cache_headers else ()

    def response_content(self, data: bytes) -> None:
        """Record bytes of the answer."""
        proxy, context, progress = self._proxy, self.context, self.context.progress
        if context.is_done:
            return
        now = proxy.now()
        if self._status == 200 and not progress.has_output and progress.is_output(data, context.request.path):
            self._record_first_token(now)
        progress.record(data, now)
        if progress.read_count % CHUNKS_PER_PROGRESS_REPORT == 0:
            proxy.core.record_progress(context.request_id, progress.read_count, now)

    def response_ended(self) -> None:
        """Record the end of the answer."""
        self._proxy.complete(self.context, self._status)

    def on_client_gone(self) -> None:
        """End the request with Envoy's stream. If the answer's body is not seen, this is the end of the answer too."""
        client, context = self.client, self.context
        if client.stream.sees_response_body:
            has_whole_answer = self._status == 200 and context.progress.has_final_event(context.request.path)
        else:
            has_whole_answer = self._status != 0
        if has_whole_answer and not client.is_aborted:
            self.response_ended()
        elif self._proxy.end(context, "client_gone"):
            self._proxy.abort(context)

    def _record_fallback(self, served_by_worker: str) -> None:
        """Move the request to the fallback that answered, as its worker did not."""
        proxy, context = self._proxy, self.context
        proxy.record_failed_attempt(
            context.decision, FailureKind.RESET, f"{served_by_worker} served instead, as Envoy says"
        )
        if not proxy.is_in_core(context) or context.route is None:
            return
        context.route = context.route.replace(worker=served_by_worker, allowed_workers=None)
        proxy.perform(proxy.core.fail_attempt(context.request_id, FailureKind.RESET, proxy.now(), context.route))
        if context.decision is None or context.decision.worker != served_by_worker:
            proxy.withdraw(context, None)  # the core refused that worker: the load is not counted

    def _record_first_token(self, now: float) -> None:
        self.context.progress.has_output = True
        if self.context.is_streaming:
            self._proxy.record_first_token(self.context, now)
        self._proxy.notify_first_output(self.context)

    @property
    def last_progress_at_s(self) -> float | None:
        """Time of the last chunk of a running stream; None if chunks are not seen."""
        context = self.context
        is_moving = self.client.stream.sees_response_body and context.progress.has_output and context.is_streaming
        return context.progress.last_byte_at_s if is_moving and not context.is_done else None

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """Stop following a request after the longest time that an answer may take. Envoy ends the request itself."""
        if now - self.context.started_at_s > timeouts.total_s and not self.context.is_done:
            self.context.outcome = "timeout"
            self.client.abort_response()

    def close(self) -> None:
        """Stop counting the request under its fairness id."""
        in_flight_counts, fairness_id = self.picker.in_flight_counts, self._fairness_id
        self._fairness_id = None
        if fairness_id is not None:
            in_flight_counts[fairness_id] -= 1
            if not in_flight_counts[fairness_id]:
                del in_flight_counts[fairness_id]


def _build_decision_headers(decision: Decision) -> Sequence[Header]:
    """Return headers for the client: the worker, and how many tokens of the prompt were expected in its cache."""
    return (
        (b"x-blockcast-worker", decision.worker.encode()),
        (b"x-blockcast-predicted-cached-tokens", b"%d" % decision.predicted_cached_tokens),
    )


def _decode_name(value: bytes | None) -> str:
    """Return the name in a gateway's header; empty without the header."""
    return (value or b"")[:NAME_BYTES_MAX].decode("utf-8", "replace")
