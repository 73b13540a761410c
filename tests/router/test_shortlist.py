"""The shortlist of a large pool: its order against sorting, its choice against the price of all, its work counted."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.codec import encode_batch
from events.types import BlockStored, EventBatch
from router.decide import chooser
from router.decide.config import CoreConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.load import PeerLoad
from router.decide.messages import Decision, Forward, RouteRequest, Terms, Transfer, TransferKind
from router.decide.price import Candidate, RequestFacts, TransferPlan, price_worker
from router.decide.shortlist import RIVALS_MIN, TYPICAL_ANSWER_TOKENS, TYPICAL_PROMPT_TOKENS
from router.decide.target import Target
from router.decide.workers import ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import Scope

SCOPE = Scope("m")
SYSTEM = list(range(2048))


def fleet(workers: int, *, cached_by: int, seed: int = 1) -> tuple[RouterCore, random.Random]:
    """The system prompt is cached on some workers, a session behind it on each of them; requests run everywhere."""
    rng = random.Random(seed)
    config = CoreConfig(learn=LearnConfig(enabled=False))  # first tokens come in no time here
    core = RouterCore(make_index(seed=1), config, seed=seed)
    for i in range(workers):
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), cache_tokens=200_000)
        (holder,) = core.add_worker(spec, 0.0).holders
        if i < cached_by:
            ids = session(i % 20)
            core.index.ingest(holder, encode_batch(EventBatch(0.0, [
                BlockStored(list(range(1 + 1000 * i, 1 + 1000 * i + len(ids) // 16)), None, ids, 16, None, "GPU", None)
            ])))  # fmt: skip
    for i in range(3 * workers):
        core.route(make_request(f"bg{i}", rng.randrange(20), rng), 0.001 * i / workers)
        if rng.random() < 0.8:
            core.record_first_token(f"bg{i}", 0.001 * i / workers)
    return core, rng


def session(number: int) -> list[int]:
    return SYSTEM + [10_000 + number] * 1024


def make_request(name: str, number: int, rng: random.Random, **changes: Any) -> RouteRequest:
    ids = session(number)[: rng.choice([600, 2048, 3072])] + [rng.randrange(20_000, 90_000) for _ in range(200)]
    return RouteRequest(name, "m", SCOPE, ids, len(ids), **changes)


def bound(core: RouterCore, decision: Decision) -> float:
    """By how much the price may exceed the least: router/decide/shortlist.py."""
    targets, config = list(core.tracker.targets.values()), core.config.cost
    terms = decision.terms
    length, expected = decision.prompt_tokens, terms.output_tokens
    slows = [target.slowdown for target in targets]
    prompt, answer = TYPICAL_PROMPT_TOKENS, TYPICAL_ANSWER_TOKENS
    typical_s = targets[0].estimate_prefill_s(prompt, 0)
    weighed_s = (1.0 + terms.congestion_s / (terms.slowdown * terms.prefill_s)) * targets[0].estimate_prefill_s(
        length, 0
    )

    def decode_s(target: Target, prompt_tokens: int, output_tokens: float) -> float:
        request = RequestFacts(0.0, prompt_tokens, output_tokens, 1.0)
        return price_worker(Candidate(target), request, config).decode_s

    differ = [decode_s(t, length, expected) - decode_s(t, prompt, answer) for t in targets]
    return (
        max(weighed_s, typical_s) * (max(slows) - min(slows))
        + max(differ)
        - min(differ)
        + max(target.slowdown * target.prefill_queue.oldest_prefill_s for target in targets)
        + max(target.step_s for target in targets)
        + 1e-6
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(40, 90), st.floats(0.0, 1.0))
def test_the_choice_is_within_its_bound_of_the_least_price(seed: int, workers: int, cached_share: float) -> None:
    core, rng = fleet(workers, cached_by=int(cached_share * workers), seed=seed)
    for i in range(4):
        decision = core.explain(make_request("x", rng.randrange(20), rng), 0.004)
        assert isinstance(decision, Decision)
        assert len(decision.candidates) == workers
        least, chosen_cost = decision.candidates[0].cost, decision.terms.cost
        assert chosen_cost <= least + bound(core, decision), i
        core.route(make_request(f"r{i}", rng.randrange(20), rng), 0.004)


@pytest.mark.parametrize("cached_by", [0, 20, 100])
def test_nearly_always_it_is_the_least_price_itself(cached_by: int) -> None:
    core, rng = fleet(100, cached_by=cached_by)
    costs: list[tuple[float, float]] = []
    for i in range(200):
        placement = core.route(make_request(f"r{i}", rng.randrange(20), rng), 0.01 + i * 1e-4, explain=True)
        assert isinstance(placement, Forward)
        costs.append((placement.decision.terms.cost, placement.decision.candidates[0].cost))
        core.record_first_token(f"r{i}", 0.0101 + i * 1e-4)
    step_s = core.config.service.step_s
    assert sum(chosen_cost <= least + step_s for chosen_cost, least in costs) >= 170
    assert math.fsum(chosen_cost - least for chosen_cost, least in costs) <= 0.01 * math.fsum(
        least for _, least in costs
    )


@pytest.mark.parametrize("cached_by", [0, 20, 500])
def test_a_decision_prices_few_of_500(monkeypatch: pytest.MonkeyPatch, cached_by: int) -> None:
    core, rng = fleet(500, cached_by=cached_by)
    priced_counts: list[int] = []

    def count_prices(*args: Any) -> Terms:
        priced_counts[-1] += 1
        return price_worker(*args)

    monkeypatch.setattr(chooser, "price_worker", count_prices)
    for i in range(50):
        priced_counts.append(0)
        core.route(make_request(f"r{i}", rng.randrange(20), rng), 0.01)
    assert min(priced_counts) > 0
    assert max(priced_counts) <= 12 * RIVALS_MIN, priced_counts


def work(core: RouterCore, requests: list[RouteRequest]) -> float:
    """Bytecode instructions that a decision and its books take, in the mean."""
    count = 0

    def route() -> None:
        for request in requests:
            core.route(request, 0.011)

    if sys.version_info >= (3, 12):  # 3.12 traces no opcodes of frames that a tracer has not seen before
        monitoring, tool = sys.monitoring, sys.monitoring.PROFILER_ID

        def count_instruction(*_: object) -> None:
            nonlocal count
            count += 1

        monitoring.use_tool_id(tool, "work")
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, count_instruction)
        try:
            monitoring.set_events(tool, monitoring.events.INSTRUCTION)
            route()
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
        return count / len(requests)

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        route()
    finally:
        sys.settrace(before)
    return count / len(requests)


@pytest.mark.parametrize("cached_by", [0, 20, 500])
def test_a_decision_before_500_takes_at_most_2_2_times_the_work_of_one_before_8(cached_by: int) -> None:
    """The index's part is native, and not counted."""
    counts = []
    for workers in (8, 500):
        core, rng = fleet(workers, cached_by=min(cached_by, workers))
        requests = [make_request(f"r{i}", rng.randrange(20), rng) for i in range(40)]
        for request in requests[:20]:  # the order of the pool is made, the first requests are placed
            core.route(request, 0.01)
        counts.append(work(core, requests[20:]))
    assert counts[0] > 1000
    assert counts[1] <= 2.2 * counts[0], counts


def test_the_order_follows_transfers() -> None:
    """A request delays the prompts whose KV is on its way."""
    core, rng = fleet(60, cached_by=0)
    core.route(make_request("first", 1, rng), 0.01)
    (order,) = core.tracker.load_orders.values()
    source, target = list(core.tracker.targets.values())[-2:]
    transfer = Transfer(TransferKind.PULL, source.name, None, 900, 0.5)
    candidate = Candidate(target, plan=TransferPlan(transfer, Candidate(source), 900))
    request = core.tracker.add_request(
        target, prompt_tokens=1000, cached_tokens=900, is_streaming=True, now=0.01, candidate=candidate
    )
    order.update(0.01, 1.0)
    core.tracker.start_transfer(request, 0.5, 0.01)
    order.update(0.01, 1.0)
    assert order._price_by_holder[target.holder] == order._compute_price(target, 0.01, 1.0)


def test_the_order_follows_loads_peers_and_time() -> None:
    core, rng = fleet(60, cached_by=30)
    core.route(make_request("first", 1, rng), 0.01)
    (order,) = core.tracker.load_orders.values()
    order.check_invariants()
    core.tracker.set_peer_loads("other", {"w7": PeerLoad(9.0, 1, utilisation=0.5)})
    core.abort_request("bg5", 0.02)
    core.route(make_request("second", 1, rng), 0.03)
    order.check_invariants()
    assert order.targets[order.holders[-1]].name == "w7"
    assert order.pool_load.peer_utilisation == pytest.approx(0.5)
    now = 0.03
    for i in range(60):  # past the change of scale: whatever was known is placed anew
        now += 30.0
        core.route(make_request(f"late{i}", 1, rng), now)
        order.check_invariants()
    order.update(now, core.tracker.compute_utilisation_decay(now))  # the last one's load too
    fresh = sorted(
        order._compute_price(target, now, core.tracker.compute_utilisation_decay(now))
        for target in order.targets.values()
    )
    sort_keys = [key for key, _ in order._sorted_holders]
    assert sort_keys == pytest.approx(fresh, abs=0.05)
    core.remove_worker("w3", now)
    assert core.tracker.load_orders == {}
    core.route(make_request("third", 1, rng), now)
    assert [len(order.targets) for order in core.tracker.load_orders.values()] == [59]


def test_workers_without_room_in_their_kv_memory_do_not_fill_the_shortlist() -> None:
    """They have one request each, and so the least load, but a new request waits there until that one has ended."""
    core = RouterCore(make_index(seed=1), CoreConfig(learn=LearnConfig(enabled=False)), seed=1)
    rng = random.Random(1)

    def make_new_request(name: str, tokens: int, **changes: Any) -> RouteRequest:
        return RouteRequest(name, "m", SCOPE, [rng.randrange(2**32) for _ in range(tokens)], tokens, **changes)

    for i in range(48):
        is_full = i < RIVALS_MIN
        cache_tokens, prompt_tokens, count = (10_000, 9_000, 1) if is_full else (1_000_000, 5_000, 6)
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), cache_tokens=cache_tokens)
        core.add_worker(spec, 0.0)
        for number in range(count):
            core.route(make_new_request(f"w{i} {number}", prompt_tokens, worker=f"w{i}"), 0.0)
            core.record_first_token(f"w{i} {number}", 0.0)
    placement = core.route(make_new_request("r", 2_000), 0.001, explain=True)
    assert isinstance(placement, Forward)
    decision = placement.decision
    assert max(terms.slot_wait_s for terms in decision.candidates) > 1.0
    assert decision.terms.slot_wait_s == 0.0
    assert decision.terms.cost == min(terms.cost for terms in decision.candidates)


def test_a_part_of_a_pool_is_priced_whole() -> None:
    core, rng = fleet(60, cached_by=60)
    placement = core.route(make_request("r", 1, rng, worker="w59"), 0.01)
    assert isinstance(placement, Forward)
    assert placement.decision.worker == "w59"
    assert core.tracker.load_orders == {} or placement.decision.worker == "w59"
