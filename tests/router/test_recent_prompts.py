"""The chunks of recent prompts against a naive model, and what a lack of room does to a choice."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CoreConfig, CostConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.load_tracker import LoadTracker
from router.decide.messages import Forward, RouteRequest
from router.decide.price import Candidate
from router.decide.recent_prompts import SHARED_RUNNING_MIN, RecentPrompts
from router.decide.target import Target
from router.decide.workers import ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import HolderId, Scope
from simulation.steps import StepTimes

SCOPE = Scope("m")
CHUNK = 4
INDEX = make_index(seed=1)


def prompt(path: list[int], tail: int) -> list[int]:
    """Chunk j of the prompt is path[j], four times; `tail` more tokens."""
    return [token for token in path for _ in range(CHUNK)] + [9] * tail


class NaivePrompts:
    """Prefix paths as tuples, each with its last target and time, and whether it was used before."""

    def __init__(self, recent_s: float) -> None:
        self.recent_s = recent_s
        self.last_uses: dict[tuple[int, ...], tuple[Target, float, bool]] = {}
        self.running: list[tuple[Target, list[int]]] = []
        """Target and token ids of each running prompt."""

    @staticmethod
    def paths(ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[: CHUNK * (j + 1)]) for j in range((len(ids) - 1) // CHUNK)]

    def forget(self, forgotten: set[tuple[int, ...]], now: float) -> None:
        """Running paths stay, as ones that were used once."""
        running = {path for _, ids in self.running for path in self.paths(ids)}
        for path in forgotten:
            target, used_at_s, _ = self.last_uses.pop(path)
            if path in running:
                self.last_uses[path] = (target, max(used_at_s, now), False)

    def expire(self, now: float) -> None:
        self.forget(
            {path for path, (_, used_at_s, _) in self.last_uses.items() if now - used_at_s > self.recent_s}, now
        )

    def clear(self, target: Target) -> None:
        self.forget({path for path, (home, _, _) in self.last_uses.items() if home is target}, -1.0)

    def start(self, target: Target, ids: list[int], now: float) -> None:
        self.last_uses.update({path: (target, now, path in self.last_uses) for path in self.paths(ids)})
        self.running.append((target, ids))

    def running_paths(self, target: Target) -> Counter[tuple[int, ...]]:
        return Counter(path for home, ids in self.running if home is target for path in self.paths(ids))

    def count_idle_tokens(self, target: Target, of: list[int] | None = None) -> int:
        running, own_paths = self.running_paths(target), None if of is None else self.paths(of)
        return CHUNK * sum(
            home is target and is_used and path not in running and (own_paths is None or path in own_paths)
            for path, (home, _, is_used) in self.last_uses.items()
        )

    def count_shared_tokens(self, ids: list[int]) -> int:
        running = Counter(path for _, running_ids in self.running for path in self.paths(running_ids))
        return CHUNK * sum(running[path] >= SHARED_RUNNING_MIN for path in self.paths(ids))


steps = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "start", "end", "end", "clear"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 2), min_size=0, max_size=6),
        st.integers(1, 5),
        st.floats(0.0, 4.0),
    ),
    max_size=40,
)


@given(steps=steps)
def test_chunks_are_counted_as_by_a_naive_model(steps: list[Any]) -> None:
    prompts, naive = RecentPrompts(recent_s=10.0, chunk_tokens=CHUNK), NaivePrompts(10.0)
    tracker = LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    targets = [tracker.add_target(name, None, HolderId(i)) for i, name in enumerate("ab")]

    def make_keys(ids: list[int]) -> list[int]:
        return INDEX.chunk_keys(ids, SCOPE, CHUNK)

    now = 0.0
    for operation, target_index, path, tail, elapsed_s in steps:
        now += elapsed_s
        ids, target = prompt(path, tail), targets[target_index]
        prompts.expire(now)
        naive.expire(now)
        if operation == "start":
            duplicate_count = sum(path in naive.running_paths(target) for path in naive.paths(ids))
            assert prompts.start_prompt(target, make_keys(ids), now) == duplicate_count
            naive.start(target, ids, now)
        elif operation == "end" and naive.running:
            home, ended_ids = naive.running.pop(len(path) % len(naive.running))
            duplicate_count = sum(path in naive.running_paths(home) for path in naive.paths(ended_ids))
            assert prompts.end_prompt(home, make_keys(ended_ids)) == duplicate_count
        elif operation == "clear":
            prompts.clear(target)
            naive.clear(target)
        shared_tokens, _ = prompts.find_shared_prefix(make_keys(ids))
        assert shared_tokens == naive.count_shared_tokens(ids)
        for target in targets:
            assert target.load.idle_prompt_tokens == naive.count_idle_tokens(target)
            assert prompts.count_idle_tokens(make_keys(ids))[target] == naive.count_idle_tokens(target, of=ids)
            running_paths = naive.running_paths(target)
            running_tokens = CHUNK * sum(path in running_paths for path in naive.paths(ids))
            assert prompts.count_running_tokens(target, make_keys(ids)) == running_tokens
        prompts.check_invariants(
            Counter((key, home) for home, running_ids in naive.running for key in make_keys(running_ids))
        )


def pool(*, capacity: int | None) -> RouterCore:
    config = CoreConfig(learn=LearnConfig(enabled=False))
    core = RouterCore(make_index(seed=1), config, recent_prompts=RecentPrompts(chunk_tokens=64))
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
    assert all(t.load.idle_prompt_tokens > t.free_kv_tokens for t in core.tracker.targets.values())
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
    a, b = core.tracker.targets.values()
    assert a.load.idle_prompt_tokens > 0 < b.load.idle_prompt_tokens
    core.remove_worker("a", 30.0)
    core.mark_worker_down("b", 31.0, "gone")
    assert a.load.idle_prompt_tokens == b.load.idle_prompt_tokens == 0
    core.cache_state.recent_prompts.check_invariants(Counter())


def test_a_chunk_that_runs_nowhere_keeps_no_room_for_counts() -> None:
    prompts, tracker = RecentPrompts(), LoadTracker(StepTimes(), CostConfig(), LearnConfig())
    target = tracker.add_target("a", None, HolderId(0))
    prompts.start_prompt(target, [1], 0.0)
    prompts.end_prompt(target, [1])
    assert sys.getsizeof(prompts._segments[1].running_counts) == sys.getsizeof({})


@pytest.mark.parametrize(
    ("host_tokens", "prompt_tokens", "cached_tokens", "present_tokens", "evicted_share"),
    [
        (0, 2000, 0, 0, 0.5), (500, 2000, 0, 0, 0.25), (0, 2000, 1500, 0, 0.25), (0, 2000, 0, 600, 0.2),
        (0, 1000, 0, 0, 0.0), (0, 0, 0, 0, 0.0),
    ],
)  # fmt: skip
def test_a_prompt_evicts_what_finds_no_room_beside_it(
    host_tokens: int, prompt_tokens: int, cached_tokens: int, present_tokens: int, evicted_share: float
) -> None:
    """Beside 3,000 idle tokens and 4,000 free ones."""
    core = pool(capacity=8_000)
    target = core.tracker.targets["a"]
    target.free_kv_tokens, target.load.idle_prompt_tokens = 4_000.0, 3_000
    target.capacity.host_tokens = host_tokens
    candidate = Candidate(target, cached_tokens)
    pressure_s = core.cache_state.estimate_pressure_s(candidate, prompt_tokens, present_tokens)
    assert pressure_s == pytest.approx(evicted_share * target.estimate_prefill_s(prompt_tokens, 0))


def test_what_runs_or_is_idle_at_a_target_needs_no_more_room_there(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pool(capacity=8_000)
    state, target = core.cache_state, core.tracker.targets["a"]
    query = state.prepare_query(RouteRequest("r", "m", SCOPE, list(range(641)), 641))
    assert query is not None
    keys = query.get_chunk_keys(64)
    for _ in range(2):  # four chunks are used twice; then two of them run
        state.recent_prompts.start_prompt(target, keys[:4], 0.0)
        state.recent_prompts.end_prompt(target, keys[:4])
    state.recent_prompts.start_prompt(target, keys[:2], 0.0)
    target.free_kv_tokens = 100.0
    waits: list[float] = []
    pressures: list[int] = []
    monkeypatch.setattr(target, "estimate_memory_wait_s", lambda tokens: waits.append(tokens) or 0.0)
    monkeypatch.setattr(state, "estimate_pressure_s", lambda *args: pressures.append(args[2]) or 0.0)
    state.add_memory_costs(query, 9.0, [Candidate(target)], 0.0)
    assert waits == [641 + 9 - 2 * 64]
    assert pressures == [4 * 64]
