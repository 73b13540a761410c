"""What follows where the system gives too few file descriptors."""

from __future__ import annotations

from router.app.process_limits import compute_connections_max, compute_worker_requests_max, describe_missing_files


def test_connections_are_bounded_by_descriptors() -> None:
    assert compute_connections_max(1 << 20, 2000, 20_000) == 20_000
    assert compute_connections_max(48_200, 2000, 20_000) == 20_000
    assert compute_connections_max(48_198, 2000, 20_000) == 19_999
    assert compute_connections_max(1_024, 0, 20_000) == 412
    assert compute_connections_max(64, 2000, 20_000) == 1


def test_too_few_descriptors_are_named_with_what_is_needed() -> None:
    message = describe_missing_files(48_198, 2000, 20_000)
    assert "48198 file descriptors are too few for 2000 event streams" in message
    assert "at most 19999 connections are taken" in message
    assert "48200" in message


def test_requests_to_workers_take_a_share_of_the_descriptors() -> None:
    assert compute_worker_requests_max(1_024) == 128
    assert compute_worker_requests_max(64) == 100, "as many as aiohttp takes by itself"
