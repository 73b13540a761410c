"""The log of failed attempts."""

from __future__ import annotations

import pytest

from router.app.failure_log import FailureLog
from router.decide.messages import FailureKind


def test_a_worker_that_fails_at_every_request_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    failure_log = FailureLog()
    for i in range(101):
        failure_log.warn("w", FailureKind.INTERNAL, "500", i * 0.1)
    failure_log.warn("w", FailureKind.RESET, "closed", 0.0)
    failure_log.warn("v", FailureKind.INTERNAL, "500", 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "attempt on w failed (internal_error): 500",
        "attempt on w failed (internal_error): 500; 99 more since the last line",
        "attempt on w failed (reset): closed",
        "attempt on v failed (internal_error): 500",
    ]
