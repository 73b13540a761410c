"""When a program hangs, against a naive account of the time that was waited for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.health import ProbeHistory

LOOK_S_MAX = 7.0
_looks = st.lists(st.tuples(st.booleans(), st.floats(0, 5000)), max_size=30)


@given(looks=_looks, patience_s=st.floats(0.1, 60))
def test_only_time_that_was_waited_since_the_last_answer_counts(
    looks: list[tuple[bool, float]], patience_s: float
) -> None:
    pulse = ProbeHistory()
    for number, (answered, took_s) in enumerate(looks, 1):
        pulse = pulse.with_probe(answered, took_s, LOOK_S_MAX)
        heard = [at for at, (one, _) in enumerate(looks[:number], 1) if one]
        since = looks[(heard[-1] if heard else 0) : number]
        waited_s = sum(min(seconds, LOOK_S_MAX) for _, seconds in since)
        assert pulse.silent_s == pytest.approx(waited_s)
        assert pulse.is_hung(patience_s) == (len(since) >= 2 and pulse.silent_s >= patience_s)
        assert not pulse.is_hung(0), "never, where that was asked for"


def test_an_hour_in_which_nobody_looked_is_not_the_programs() -> None:
    assert not ProbeHistory().with_probe(False, 3600.0, LOOK_S_MAX).with_probe(False, 2.0, LOOK_S_MAX).is_hung(30.0)
