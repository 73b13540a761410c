"""The working sets against a naive model, and what their overflow does to a choice."""

from __future__ import annotations

from typing import Any

import pytest
from core_by_hand import used_tokens
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CoreConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.messages import Forward, RouteRequest
from router.decide.workers import ServedModel, WorkerSpec
from router.decide.working_set import WorkingSets
from router.index import make_index
from router.index.protocol import Scope

SCOPE = Scope("m")
CHUNK = 4
INDEX = make_index(seed=1)


def prompt(path: list[int], tail: int) -> list[int]:
    """Chunk j of the prompt is path[j], four times; `tail` more tokens."""
    return [token for token in path for _ in range(CHUNK)] + [9] * tail


class NaiveWorkingSet:
    """Prefix paths as tuples, each with its last target and time, and whether it was used before."""

    def __init__(self, capacity: dict[str, int], live_s: float) -> None:
        self.capacity, self.live_s = capacity, live_s
        self.last_uses: dict[tuple[int, ...], tuple[str, float, bool]] = {}
        self.running: list[tuple[str, list[int]]] = []
        """Target and token ids of each running prompt."""

    @staticmethod
    def paths(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[: CHUNK * (j + 1)]) for j in range((len(ids) - 1) // CHUNK)]

    def expire(self, now: float) -> None:
        self.last_uses = {path: use for path, use in self.last_uses.items() if use[1] >= now - self.live_s}

    def send(self, target: str, ids: list[int], now: float) -> None:
        self.last_uses.update({path: (target, now, path in self.last_uses) for path in self.paths(ids)})

    def running_paths(self, target: str) -> set[tuple[int, ...]]:
        return {path for home, ids in self.running if home == target for path in self.paths(ids)}

    def needed_tokens(self, target: str, without: list[int] | None = None) -> int:
        held_paths = {*self.paths(without or []), *self.running_paths(target)}
        return CHUNK * sum(
            1 for p, (home, _, is_used) in self.last_uses.items() if home == target and is_used and p not in held_paths
        )

    def overflow_share(self, target: str, ids: list[int], cached_share: float) -> float:
        held_tokens = CHUNK * len(self.running_paths(target).difference(self.paths(ids)))
        overflow_tokens = self.needed_tokens(target, without=ids) + held_tokens + len(ids) - self.capacity[target]
        return min(max(overflow_tokens, 0) / len(ids), 1.0 - cached_share)


steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "end", "end", "ask", "clear"]),
        st.sampled_from(["a", "b"]),
        st.lists(st.integers(0, 2), min_size=0, max_size=6),
        st.integers(1, 5),
        st.floats(0.0, 4.0),
    ),
    max_size=40,
)


@given(steps=steps)
def test_overflows_are_those_of_a_naive_model(steps: list[Any]) -> None:
    sets = WorkingSets(live_s=10.0, chunk_tokens=CHUNK)
    capacity = {"a": 24, "b": 12}
    for name, tokens in capacity.items():
        sets.set_capacity(name, tokens)
    naive = NaiveWorkingSet(capacity, 10.0)
    now = 0.0
    for operation, target, path, tail, elapsed_s in steps:
        now += elapsed_s
        ids = prompt(path, tail)
        keys = INDEX.chunk_keys(ids, SCOPE, CHUNK)
        naive.expire(now)
        assert used_tokens(sets, target, now) == naive.needed_tokens(target)
        if operation == "send":
            sets.add_prompt(target, keys, now)
            naive.send(target, ids, now)
            naive.running.append((target, ids))
        elif operation == "end" and naive.running:
            home, ended_ids = naive.running.pop(len(path) % len(naive.running))
            still_running = naive.running_paths(home)
            ended_keys = INDEX.chunk_keys(ended_ids, SCOPE, CHUNK)
            ended_paths = naive.paths(ended_ids)
            sets.end_prompt(home, [k for k, p in zip(ended_keys, ended_paths, strict=True) if p not in still_running])
        elif operation == "clear":
            sets.clear(target)
            naive.last_uses = {p: use for p, use in naive.last_uses.items() if use[0] != target}
        elif operation == "ask":
            share = tail / 5
            expected = [naive.overflow_share("a", ids, share), naive.overflow_share("b", ids, 0.0)]
            held = [CHUNK * len(naive.running_paths(name).difference(naive.paths(ids))) for name in ("a", "b")]
            shares = sets.compute_overflow_shares(["a", "b"], [share, 0.0], held, keys, len(ids))
            assert shares == pytest.approx(expected)
            if not sets.may_overflow(len(ids) + max(held), now):
                assert expected == [0.0, 0.0]
        sets.check_invariants()
    sets.set_capacity("a", None)
    sets.check_invariants()
    assert used_tokens(sets, "a", now) is None
    assert sets.compute_overflow_shares(["a"], [0.0], [0.0], [], 100) == [0.0]


def pool(*, capacity: int | None) -> RouterCore:
    config = CoreConfig(learn=LearnConfig(enabled=False))
    core = RouterCore(make_index(seed=1), config, working_sets=WorkingSets(chunk_tokens=64))
    for name in ("a", "b"):
        model = ServedModel("m", "m")
        core.add_worker(WorkerSpec(name, f"http://{name}", models=(model,), cache_tokens=capacity), 0.0)
    return core


def send(core: RouterCore, name: str, ids: list[int], now: float, worker: str | None = None) -> Forward:
    placement = core.route(RouteRequest(name, "m", SCOPE, ids, len(ids), worker=worker), now, explain=True)
    assert isinstance(placement, Forward)
    core.record_first_token(name, now + 0.5)
    core.finish_request(name, None, now + 1.0)
    return placement


def sessions(core: RouterCore) -> None:
    """One session of long prompts on a, ten turns, so that reuse is learned; a short one of two turns on b."""
    for turn in range(10):
        send(core, f"long{turn}", list(range(6000 + 100 * turn)), 2.0 * turn, worker="a")
    for turn in range(2):
        send(core, f"short{turn}", list(range(50_000, 58_000)), 21.0 + turn, worker="b")


def test_an_empty_prompt_is_routed_where_no_cache_has_room() -> None:
    core = pool(capacity=1000)
    sessions(core)
    assert core.cache_state.working_sets.may_overflow(1, 24.0)
    assert not core.cache_state.working_sets.may_overflow(0, 24.0)
    assert all(terms.pressure_s == 0.0 for terms in send(core, "empty", [], 24.0).decision.candidates)


def test_a_new_prompt_goes_where_there_is_room_for_it() -> None:
    """b is the dearer by a request that waits there; but on a live nearly 11k tokens that were used twice, which 6k
    more would push out of a cache of 15k. What was used once does not count."""
    for capacity, expected in ((None, "a"), (100_000, "a"), (15_000, "b")):
        core = pool(capacity=capacity)
        sessions(core)
        for turn in range(2):
            send(core, f"more{turn}", list(range(200_000, 204_000)), 24.0 + turn, worker="a")
        send(core, "once", list(range(300_000, 304_000)), 26.0, worker="a")
        core.route(RouteRequest("waits", "m", SCOPE, None, 1000, worker="b"), 60.0)
        decision = send(core, "new", list(range(100_000, 106_000)), 60.0).decision
        assert decision.worker == expected
        pressure_s = {t.worker: t.pressure_s for t in decision.candidates or []}
        assert pressure_s["b"] == 0.0
        over = max(0.0, 6784 + 3968 + 6000 - (capacity or 1e9)) / 6000
        prefill_s = core.tracker.targets["a"].estimate_prefill_s(6000, 0)
        assert pressure_s["a"] == pytest.approx(over * prefill_s)


def test_what_running_requests_hold_takes_room_until_they_end() -> None:
    core = pool(capacity=15_000)
    running_ids, ids = list(range(200_000, 212_000)), list(range(100_000, 106_000))
    core.route(RouteRequest("running", "m", SCOPE, running_ids, 12_000, worker="a"), 0.0)
    pressure_s = {t.worker: t.pressure_s for t in send(core, "new", ids, 1.0).decision.candidates or []}
    prefill_s = core.tracker.targets["a"].estimate_prefill_s(6000, 0)
    assert pressure_s["a"] == pytest.approx((12_000 + 6000 - 15_000) / 6000 * prefill_s)
    core.finish_request("running", None, 3.0)
    later_ids = list(range(400_000, 406_000))
    assert all(t.pressure_s == 0.0 for t in send(core, "later", later_ids, 4.0).decision.candidates or [])


def test_a_dead_session_takes_no_room() -> None:
    core = pool(capacity=8_000)
    sessions(core)
    fresh = list(range(100_000, 106_000))
    soon, late = (send(core, f"r{now}", fresh[: 6000 - int(now)], now).decision for now in (30.0, 1000.0))
    assert any(t.pressure_s > 0.0 for t in soon.candidates or [])
    assert all(t.pressure_s == 0.0 for t in late.candidates or [])


def test_a_removed_worker_leaves_nothing_behind() -> None:
    core = pool(capacity=8_000)
    sessions(core)
    core.remove_worker("a", 30.0)
    core.cache_state.working_sets.check_invariants()
    assert used_tokens(core.cache_state.working_sets, "a", 30.0) is None
    core.mark_worker_down("b", 31.0, "gone")
    assert used_tokens(core.cache_state.working_sets, "b", 31.0) == 0
