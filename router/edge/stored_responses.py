"""Workers that store responses: only the worker that stores a response can continue, show or cancel it. No I/O."""

from __future__ import annotations

import re
from typing import Final

from options.bounded_dict import BoundedDict
from router.edge.request_context import RequestContext
from router.edge.response_progress import RESPONSES_PATH
from router.http.request import HttpRequest

STORED_RESPONSES_MAX: Final = 100_000
RESPONSE_ID_CHARS_MAX: Final = 256
_RESPONSE_ID_PATTERN = re.compile(rb'"id"\s*:\s*"([!-~]{1,%d}?)"' % RESPONSE_ID_CHARS_MAX)


class StoredResponses:
    """Workers of the newest stored responses, by response id."""

    def __init__(self, capacity: int = STORED_RESPONSES_MAX) -> None:
        self._worker_by_response_id: BoundedDict[str, str] = BoundedDict(capacity)

    def __len__(self) -> int:
        return len(self._worker_by_response_id)

    def record_answer(self, context: RequestContext) -> None:
        """Record the worker of a request to the Responses API, once its answer has begun or has ended well.

        Clients cancel a running response by its id, or leave and come back for it.
        """
        request, decision = context.request, context.decision
        if request.path != RESPONSES_PATH or decision is None or context.outcome not in ("", "status_200"):
            return
        match = _RESPONSE_ID_PATTERN.search(context.progress.first_bytes)
        if match is not None:
            self.record(match[1].decode(), decision.worker)

    def record(self, response_id: str, worker_id: str) -> None:
        self._worker_by_response_id[response_id] = worker_id

    def find_worker(self, request: HttpRequest, previous_response_id: str | None) -> str | None:
        """Return the only worker that can answer this request; None if any can, or that worker is unknown.

        `previous_response_id`: the response that the request continues.
        """
        if request.path.startswith(RESPONSES_PATH + "/"):
            previous_response_id = request.path[len(RESPONSES_PATH) + 1 :].partition("/")[0]
        return None if previous_response_id is None else self._worker_by_response_id.get(previous_response_id)
