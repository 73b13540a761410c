"""A request whose bytes Envoy carries: an exchange that says where to, and learns from Envoy what became of it.

Owns what the core hears of such a request. Refuses to know Envoy's messages (router/picker/conversation.py). Rules:

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
from router.edge.carrier import RETRYABLE, Carrier
from router.edge.config import Timeouts
from router.edge.exchange import PROGRESS_EVERY, Exchange
from router.edge.rewrite import RANK_HEADER
from router.http.connection import Client
from router.http.request import HttpRequest
from router.picker.conversation import AnswerBegun, Choice

if TYPE_CHECKING:
    from router.picker.config import PickerConfig
    from router.picker.endpoints import Endpoints

PRIORITY_STEP = 1_000
"""Between two priorities there is room for so many requests in flight of one fairness id."""
FAIRNESS_IDS_MAX = 10_000
Header = tuple[bytes, bytes]


class Picking:
    """What all picks of a process share."""

    def __init__(self, config: PickerConfig, endpoints: Endpoints) -> None:
        self.config = config
        self.endpoints = endpoints
        self.priorities = config.priorities
        self.in_flight: Counter[str] = Counter()
        """Fairness id -> requests."""


class Asker(Client, Protocol):
    """Envoy, as far as one request goes: router/picker/caller.py."""

    picking: Picking
    objective: str | None
    fairness: str

    @property
    def hint(self) -> Sequence[str] | None:
        """Endpoints that may be chosen; None: all."""

    @property
    def sees_answer(self) -> bool:
        """Whether the answer's body comes by."""

    def opened(self, pick: Pick) -> None: ...

    def chosen(self, choice: Choice) -> None: ...

    def abandon(self) -> None: ...


class Pick(Exchange):
    """One request."""

    __slots__ = ("_caller", "_fairness", "_status", "picking")

    def __init__(self, proxy: Carrier, client: Asker, request: HttpRequest, request_id: str, trace_id: bytes) -> None:
        super().__init__(proxy, client, request, request_id, trace_id)
        self._caller = client
        self.picking = client.picking
        client.opened(self)
        self._status = 0
        """Of the answer; 0 before it."""
        self._fairness: str | None = None

    def asks(self, route: RouteRequest) -> None:
        """Priorities, the gateway's subset, and whether the first token will be seen."""
        caller, picking = self._caller, self.picking
        objective = caller.objective
        if objective is not None:
            route.priority = picking.priorities.get(objective, route.priority)
        fairness = caller.fairness
        known = fairness in picking.in_flight or len(picking.in_flight) < FAIRNESS_IDS_MAX
        self._fairness = fairness if known else ""
        ahead = picking.in_flight[self._fairness]
        picking.in_flight[self._fairness] = ahead + 1
        route.priority = route.priority * PRIORITY_STEP + min(ahead, PRIORITY_STEP - 1)
        if caller.hint is not None:
            route.allowed_workers = picking.endpoints.workers(caller.hint)
        if not caller.sees_answer:
            route.stream = route.stream and self._proxy.core.registry.is_blockcast(route.model)

    def forward(self, decision: Decision) -> None:
        """Tell Envoy where to; once."""
        self.decision = decision
        if self.sent_s is not None:
            return
        first = self.picking.endpoints.of(decision.worker)
        if first is None:
            self._attempt_failed(FailureKind.OVERLOADED, "its name is not resolved")
            return
        self.sent_s = self._proxy.now()
        headers: list[Header] = []
        removed: list[str] = []
        keyed = self._keyed(decision.worker)
        if keyed is not None:
            if keyed:
                headers.append((b"authorization", keyed))
            removed += ["x-api-key"] if keyed else ["authorization", "x-api-key"]
        if decision.rank is not None:
            headers.append((b"x-data-parallel-rank", b"%d" % decision.rank))
        kept = self._proxy.passed_fields | ({RANK_HEADER} if decision.rank is not None else set())
        removed += sorted(WORKER_HEADERS - kept)
        if self.request.is_decoded:
            removed.append("content-encoding")
        if self._caller.sees_answer:
            removed.append("accept-encoding")
        if self.span is not None:
            headers.append((b"traceparent", self.span[1]))
        self._caller.chosen(Choice([first, *self._fallbacks(decision, keyed)], headers, removed))

    def _keyed(self, worker_id: str) -> bytes | None:
        """What stands for the client's `Authorization`: None, it stays; empty, it goes."""
        authorization = self._proxy.worker_authorization
        return authorization if authorization is None or self._proxy.is_keyed(worker_id) else b""

    def _fallbacks(self, decision: Decision, keyed: bytes | None) -> Sequence[str]:
        workers, of = self._proxy.core.workers, self.picking.endpoints.of
        found: list[str] = []
        for other in self._proxy.core.fallback_workers(
            self.request_id, self.picking.config.fallbacks, decision.decided_s
        ):
            endpoint = of(other)
            fits = decision.rank is None or workers[other].spec.ranks > decision.rank
            if endpoint is not None and fits and self._keyed(other) == keyed:
                found.append(endpoint)
        return found

    # From Envoy -----------------------------------------------------------------------------------------------------

    def begun(self, answer: AnswerBegun) -> Sequence[Header]:
        """The head of the answer; headers for the client."""
        decision, proxy = self.decision, self._proxy
        if self.done or decision is None:
            return ()
        now = proxy.now()
        self._status = answer.status
        self.first_byte_s = self.progress.last_byte_s = now
        server = None if answer.served is None else self.picking.endpoints.worker(answer.served)
        if server is not None and server != decision.worker:
            self._moved(server)
        kind = RETRYABLE.get(answer.status)
        if kind is not None:
            proxy.attempt_failed(self.decision, kind, f"{answer.status}, as Envoy says")
            self._forget_in_core(kind)
        elif answer.status == 200 and not self._caller.sees_answer:
            self._speaks_now(now)
        told = self.decision
        if told is None or not proxy.tells_cache:
            return ()
        return (
            (b"x-blockcast-worker", told.worker.encode()),
            (b"x-blockcast-predicted-cached-tokens", b"%d" % told.predicted_cached_tokens),
        )

    def content(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self.done:
            return
        now = self._proxy.now()
        if self._status == 200 and not self.progress.began and self._speaks(data):
            self._speaks_now(now)
        self.progress.note(data, now)
        if self.in_core and self.progress.reads % PROGRESS_EVERY == 0:
            self._proxy.core.record_progress(self.request_id, self.progress.reads, now)

    def completed(self) -> None:
        """The whole answer has passed."""
        self.usage = self.progress.usage()
        if not self._end(f"status_{self._status}"):
            return
        if self.in_core:
            self.in_core = False
            core, now = self._proxy.core, self._proxy.now()
            if self.route is not None and self.route.stream and self._caller.sees_answer:
                core.record_progress(self.request_id, self.progress.reads)
            self._proxy.perform(core.finish_request(self.request_id, self.usage, now, is_error=self._status >= 400))

    def left(self) -> None:
        """Envoy asks no more. Where the answer's body does not come by, that is its end."""
        is_said = self._status == 200 and self.progress.is_final(self.request.path)
        if self._status and (is_said or not self._caller.sees_answer):
            self.completed()
        else:
            self.client_gone()

    def _moved(self, server: str) -> None:
        """The worker did not answer, and Envoy found another of the list: so do the books."""
        proxy, route = self._proxy, self.route
        proxy.attempt_failed(self.decision, FailureKind.RESET, f"{server} served instead, as Envoy says")
        if not self.in_core or route is None:
            return
        self.route = route.replace(worker=server, allowed_workers=None)
        proxy.perform(proxy.core.fail_attempt(self.request_id, FailureKind.RESET, proxy.now(), self.route))
        if self.decision is None or self.decision.worker != server:
            self._forget_in_core(None)  # the core would not have it there: its load is not counted

    def _speaks_now(self, now: float) -> None:
        self.progress.began = True
        if self.in_core and self.route is not None and self.route.stream:
            self._proxy.perform(self._proxy.core.record_first_token(self.request_id, now))
        self._proxy.first_byte(self.request_id)

    # From the process -----------------------------------------------------------------------------------------------

    @property
    def moved_s(self) -> float | None:
        """Nobody can tell where chunks do not come by."""
        streams = self._caller.sees_answer and self.progress.began and self.route is not None and self.route.stream
        return self.progress.last_byte_s if streams and not self.done else None

    def move(self, reason: str, *, stalled: bool = False) -> None:
        """Envoy has it, and goes down the list of fallbacks by itself."""

    def expire(self, now: float, timeouts: Timeouts) -> None:
        """What Envoy does not end is Envoy's; the books end with the longest time that an answer may take."""
        if now - self.started_s > timeouts.total_s and not self.done:
            self.outcome = "timeout"
            self._caller.abandon()

    def _end(self, outcome: str) -> bool:
        if self._fairness is not None:
            self.picking.in_flight[self._fairness] -= 1
            if not self.picking.in_flight[self._fairness]:
                del self.picking.in_flight[self._fairness]
            self._fairness = None
        return super()._end(outcome)
