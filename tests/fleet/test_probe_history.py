"""When a program hangs, against a naive account of the time that was waited for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.program import ProbeHistory, compute_restart_pause

LOOK_S_MAX = 7.0
_looks = st.lists(st.tuples(st.booleans(), st.floats(0, 5000)), max_size=30)


@given(probes=_looks, patience_s=st.floats(0.1, 60))
def test_only_time_that_was_waited_since_the_last_answer_counts(
    probes: list[tuple[bool, float]], patience_s: float
) -> None:
    history = ProbeHistory()
    for number, (is_answered, took_s) in enumerate(probes, 1):
        history = history.add_probe(is_answered, took_s, LOOK_S_MAX)
        answered_numbers = [at for at, (was_answered, _) in enumerate(probes[:number], 1) if was_answered]
        silent_probes = probes[(answered_numbers[-1] if answered_numbers else 0) : number]
        waited_s = sum(min(seconds, LOOK_S_MAX) for _, seconds in silent_probes)
        assert history.silent_s == pytest.approx(waited_s)
        assert history.is_hung(patience_s) == (len(silent_probes) >= 2 and history.silent_s >= patience_s)
        assert not history.is_hung(0), "never, where that was asked for"


def test_an_hour_in_which_nobody_looked_is_not_the_programs() -> None:
    assert not ProbeHistory().add_probe(False, 3600.0, LOOK_S_MAX).add_probe(False, 2.0, LOOK_S_MAX).is_hung(30.0)


def test_pauses_grow_to_a_minute() -> None:
    assert [compute_restart_pause(count) for count in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert compute_restart_pause(10**6) == 60.0
