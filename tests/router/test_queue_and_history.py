"""The queue against sorting, and the approximate cache against a naive one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.attempts import ActiveRequest
from router.decide.cache_state import ApproximateCache
from router.decide.config import QueueConfig
from router.decide.messages import RouteRequest
from router.decide.queue import RequestQueue
from router.index import make_index
from router.index.protocol import Scope


def make_active_request(name: str, priority: int, arrived_s: float, deadline_s: float | None = None) -> ActiveRequest:
    request = RouteRequest(name, "m", Scope("m"), None, 1, priority=priority, deadline_s=deadline_s)
    return ActiveRequest(request, arrived_s, wants_explanation=False, is_background=False)


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "drop", "due"]), st.integers(0, 3), st.integers(-1, 1), st.floats(0, 10)),
        max_size=60,
    )
)
def test_held_requests_are_tried_by_priority_then_arrival(
    steps: list[tuple[str, int, int, float]],
) -> None:
    queue = RequestQueue(QueueConfig(fair=True))
    entries: dict[str, tuple[int, float, float, float]] = {}
    before: dict[str, tuple[float, float, int]] = {}
    for i, (operation, number, priority, work) in enumerate(steps):
        name, now = str(number), i * 0.5
        if operation == "put":
            arrived_s, deadline, priority = before.setdefault(name, (now, now + 3.0, priority))  # also after a failure
            request = make_active_request(name, priority, arrived_s, deadline)
            target, prefill_s = f"w{number % 3}", work / 2
            if name in entries:
                queue.move(name, target=target, prefill_s=prefill_s, charge_s=work)
            else:
                queue.add(request, target=target, prefill_s=prefill_s, charge_s=work)
            entries[name] = (priority, work, arrived_s, deadline)
        elif operation == "drop":
            queue.remove(name)
            entries.pop(name, None)
        else:
            due = [active_request.request.request_id for active_request in queue.pop_expired(now)]
            assert sorted(due) == sorted(n for n, h in entries.items() if h[3] <= now)
            for expired_name in due:
                del entries[expired_name], before[expired_name]
        queue.check_invariants()
        assert len(queue.requests) == len(entries)
        assert queue.get_next_request_ids(100) == sorted(entries, key=lambda n: (entries[n][0], entries[n][2]))
        ahead_s: dict[str, float] = {}
        for n, (p, w, arrived_s, _) in entries.items():
            if (p, arrived_s) <= (0, now):
                ahead_s[f"w{int(n) % 3}"] = ahead_s.get(f"w{int(n) % 3}", 0.0) + w / 2
        assert queue.compute_prefill_ahead(make_active_request("new", 0, now)) == pytest.approx(ahead_s)
        assert queue.next_deadline_s() <= min((h[3] for h in entries.values()), default=math.inf)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30), st.integers(1, 12))
def test_history_is_an_lru_that_loses_the_deepest_chunks_first(prompts: list[list[int]], capacity: int) -> None:
    cache, index = ApproximateCache(capacity * 4, 4), make_index(seed=1)
    naive: list[tuple[int, ...]] = []
    for prompt in prompts:
        tokens = [part for part in prompt for _ in range(4)] + [99]
        keys = index.chunk_keys(tokens, Scope("m"), 4)
        prefixes = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        length = 0
        while length < len(prefixes) and prefixes[length] in naive:
            length += 1
        assert cache.count_cached_tokens(keys) == length * 4
        cache.insert(keys)
        for prefix in reversed(prefixes):
            if prefix in naive:
                naive.remove(prefix)
            naive.append(prefix)
        naive = naive[-capacity:]
        assert len(cache) == len(naive)
