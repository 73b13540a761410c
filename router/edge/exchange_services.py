"""What an exchange needs of those who know all exchanges: the core, the pool, and a name for each worker's address."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable

from router.decide.core import RouterCore
from router.decide.messages import Decision, FailureKind, Instruction, Refuse
from router.edge.response_redactor import build_key_pattern
from router.edge.upstream import Endpoint, UpstreamPool
from router.metrics import Metrics

log = logging.getLogger("router")

RETRYABLE_STATUSES = {
    429: FailureKind.OVERLOADED,
    500: FailureKind.INTERNAL,
    502: FailureKind.SERVER_ERROR,
    503: FailureKind.SERVER_ERROR,
}
LOCAL_ERRNOS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Why a connection could not be made that says nothing about the worker."""


class ExchangeServices:
    """router/edge/proxy.py is it."""

    def __init__(
        self,
        core: RouterCore,
        pool: UpstreamPool,
        metrics: Metrics,
        now: Callable[[], float],
        worker_authorization: bytes | None,
    ) -> None:
        self.core = core
        self.pool = pool
        self.metrics = metrics
        self.now = now
        self.worker_authorization = worker_authorization
        """Sent to workers instead of the client's `Authorization`, or None to pass that one on."""
        self.may_send_key: Callable[[str], bool] = lambda worker_id: True
        """Whether a worker may be sent that; the others get no authorization at all."""
        self.sends_cache_headers = True
        """Answers say which worker gave them, and how much of the prompt was predicted to be cached there."""
        self.passed_fields: frozenset[str] = frozenset()
        """Fields and headers of workers that clients may set, and are answered."""
        self.redacted_keys = build_key_pattern(self.passed_fields)
        """The others, in answers."""
        self.continues_streams = True
        """Streams whose worker dies go on at another one."""

    def endpoint_of(self, worker_id: str) -> Endpoint | None:
        """Where a worker listens; None where it is known no more."""
        raise NotImplementedError

    def get_engine(self, worker_id: str) -> str:
        """What it says it is; empty where it does not say."""
        worker = self.core.workers.get(worker_id)
        return worker.spec.engine if worker is not None else ""

    def find_workers_by_engine(self, engine: str) -> frozenset[str]:
        """Workers that say they are this engine."""
        return frozenset(name for name, worker in self.core.workers.items() if worker.spec.engine == engine)

    def get_model_tokens_max(self, model: str) -> int | None:
        """How many tokens a model takes, where that is known."""
        model_entry = self.core.resolve_model(model)
        return model_entry.max_model_len if model_entry is not None else None

    def record_broken_stream(self, trace_id: bytes, event: str, reason: str) -> None:
        """An answer broke off in the middle, and was continued, completed or cut."""
        self.metrics.broken_streams[event] += 1
        log.info("the answer to %s broke off and was %s: %s", trace_id.decode("latin-1"), event, reason)

    def perform(self, instructions: Iterable[Instruction]) -> None:
        """Do what the core says."""
        raise NotImplementedError

    def withdraw(self, request_id: str, kind: FailureKind | None, silent_s: float = 0.0) -> None:
        """Tell the core of a request's last failure, or that it ended without one. `silent_s`: as in `fail_attempt`."""
        raise NotImplementedError

    def notify_first_byte(self, request_id: str) -> None:
        """The first byte of an answer was passed on."""
        raise NotImplementedError

    def notify_end(self, request_id: str) -> None:
        """An exchange ended, once."""
        raise NotImplementedError

    def record_failed_attempt(self, decision: Decision | None, kind: FailureKind, reason: str) -> None:
        """An attempt failed, whether or not it is repeated."""
        raise NotImplementedError


def is_final_refusal(instructions: list[Instruction], request_id: str) -> bool:
    """Whether the core has nobody else for this request."""
    first_instruction = instructions[0] if instructions else None
    return isinstance(first_instruction, Refuse) and first_instruction.request_id == request_id
