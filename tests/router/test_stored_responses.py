"""The book of who holds which stored response, and what a router reads of the answers that make one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.edge.stored_responses import StoredResponses


def end_request(responses: StoredResponses, beginning: bytes, worker: str = "w", **changes: Any) -> None:
    request = SimpleNamespace(path=changes.get("path", "/v1/responses"))
    progress = SimpleNamespace(first_bytes=beginning)
    outcome, decision = changes.get("outcome", "status_200"), SimpleNamespace(worker=worker)
    responses.record_answer(SimpleNamespace(request=request, progress=progress, outcome=outcome, decision=decision))  # type: ignore


def holder(responses: StoredResponses, path: str, previous: str | None = None) -> str | None:
    return responses.find_worker(SimpleNamespace(path=path), previous)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "beginning",
    [
        b'{"id":"resp_1","created_at":3,"output":[{"id":"msg_2"}]}',
        b'53\r\nevent: response.created\ndata: {"response": {"id": "resp_1", "x": 1}, "type":"response.created"}\n\n',
    ],
)
def test_the_first_name_of_an_answer_is_the_responses(beginning: bytes) -> None:
    responses = StoredResponses()
    end_request(responses, beginning)
    assert holder(responses, "/v1/responses", "resp_1") == "w"
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        assert holder(responses, path) == "w"
    assert holder(responses, "/v1/responses/msg_2") is None
    assert holder(responses, "/v1/responses") is None
    assert holder(responses, "/v1/chat/completions") is None


def test_refused_cut_and_other_answers_are_not_noted() -> None:
    responses = StoredResponses()
    for changes in ({"outcome": "status_400"}, {"outcome": "broken"}, {"path": "/v1/messages"}):
        end_request(responses, b'{"id":"resp_1"}', **changes)
    end_request(responses, b'{"id":"' + b"x" * 300 + b'"}')
    assert len(responses) == 0


def test_the_book_is_bounded_and_keeps_the_newest() -> None:
    responses = StoredResponses(capacity=3)
    for i in (0, 1, 2, 0, 3):
        end_request(responses, b'{"id":"resp_%d"}' % i, worker=f"w{i}")
    assert len(responses) == 3
    assert [holder(responses, f"/v1/responses/resp_{i}") for i in range(4)] == ["w0", None, "w2", "w3"]
