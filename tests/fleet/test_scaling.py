"""How many workers, by what the routers predict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.scaling import Scaler, ScalingBounds, WorkerLoad, count_needed_workers

BOUNDS = ScalingBounds(2, 10, queue_s=0.5, prefill_share=0.7, cool_down_s=60.0)


@pytest.mark.parametrize(
    ("loads", "queued_requests", "expected"),
    [
        ([], 0, 2),
        ([WorkerLoad(0.0, 0.0)] * 4, 0, 2),
        ([WorkerLoad(0.5, 0.1)] * 4, 0, 4),
        ([WorkerLoad(0.54, 0.1)] * 4, 0, 4),
        ([WorkerLoad(1.0, 0.1)] * 4, 0, 8),
        ([WorkerLoad(2.0, 0.0), WorkerLoad(0.0, 0.0)], 0, 4),
        ([WorkerLoad(0.0, 1.0)] * 4, 0, 6),
        ([WorkerLoad(9.0, 1.0)] * 4, 0, 10),
        ([WorkerLoad(0.1, 0.1)] * 4, 3, 5),
    ],
)
def test_needed(loads: list[WorkerLoad], queued_requests: int, expected: int) -> None:
    assert count_needed_workers(BOUNDS, loads, queued_requests)[0] == expected


def test_up_at_once_but_not_while_others_start() -> None:
    busy = [WorkerLoad(2.0, 1.0)] * 2
    scaler, target, why = Scaler().decide(BOUNDS, 2, busy, 0, 0.0)
    assert (target, why) == (8, "queue 2.00 s a worker, 100% busy")
    _, target, _ = scaler.decide(BOUNDS, 8, busy, 0, 1.0)
    assert target == 8, "six of them are not up yet"


def test_down_after_the_cool_down_to_what_its_busiest_moment_needed() -> None:
    scaler, count = Scaler(), 6
    for now in range(200):
        load = WorkerLoad(0.5, 0.1) if now == 50 else WorkerLoad(0.25, 0.1)
        scaler, target, _ = scaler.decide(BOUNDS, count, [load] * 6, 0, float(now))
        assert target == (6 if now <= 110 else 3), now


@pytest.mark.parametrize(
    "wrong", [(0, 3), (4, 3), (1, 2, 0.0), (1, 2, 0.5, 0.0), (1, 2, 0.5, 1.1), (1, 2, 0.5, 0.5, -1)]
)
def test_bounds_that_cannot_be(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="autoscaling: got"):
        ScalingBounds(*wrong)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0, 1e4), st.integers(0, 5)), min_size=1, max_size=60))
def test_it_never_leaves_its_bounds_and_waits_before_fewer(moments: list[tuple[float, float, int]]) -> None:
    scaler, count, now, least_s = Scaler(), 4, 0.0, 0.0
    needs: list[tuple[float, int]] = []
    for step_s, queue_s, queued_requests in moments:
        now += step_s
        loads = [WorkerLoad(queue_s, min(1.0, queue_s))] * count
        needs.append((now, count_needed_workers(BOUNDS, loads, queued_requests)[0]))
        scaler, target, _ = scaler.decide(BOUNDS, count, loads, queued_requests, now)
        assert BOUNDS.low <= target <= BOUNDS.high
        if target < count:
            assert now - moments[0][0] >= BOUNDS.cool_down_s
            assert target == max(need for at, need in needs if now - at <= BOUNDS.cool_down_s)
            least_s = now
        count = target
    assert least_s <= now
    assert len(scaler.recent_needs) <= BOUNDS.high
