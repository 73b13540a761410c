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
    """Remembers which worker stores each response of the Responses API, as only that worker can continue it."""

    def __init__(self, capacity: int = STORED_RESPONSES_MAX) -> None:
        """`capacity`: number of the newest responses that are remembered."""
        self._worker_by_response_id: BoundedDict[str, str] = BoundedDict(capacity)

    def __len__(self) -> int:
        return len(self._worker_by_response_id)

    def record_answer(self, context: RequestContext) -> None:
        """Record the worker of an answer of the Responses API, when the answer begins and when it has ended well.

        A client may cancel a running response by its id, or leave and fetch it later.
        """
        request, decision = context.request, context.decision
        has_failed = context.outcome not in ("", "status_200")
        if request.path != RESPONSES_PATH or decision is None or has_failed:
            return
        match = _RESPONSE_ID_PATTERN.search(context.progress.first_bytes)
        if match is not None:
            self.record(match[1].decode(), decision.worker)

    def record(self, response_id: str, worker_id: str) -> None:
        self._worker_by_response_id[response_id] = worker_id

    def find_worker(self, request: HttpRequest, previous_response_id: str | None) -> str | None:
        """Return the worker that stores the response that a request is about; None if there is none or it is unknown.

        The path names the response, as in `GET /v1/responses/ID`, or the body does (`previous_response_id`).
        """
        response_id = previous_response_id
        if request.path.startswith(RESPONSES_PATH + "/"):
            response_id = request.path.removeprefix(RESPONSES_PATH + "/").partition("/")[0]
        return None if response_id is None else self._worker_by_response_id.get(response_id)
