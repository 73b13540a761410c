"""The price, computed by hand from docs/reference/price.md's symbols, and the other policies."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from options import ConfigError
from router.decide.config import CostConfig, LearnConfig
from router.decide.load import NO_PEER_LOAD, PeerLoad
from router.decide.load_tracker import LoadTracker
from router.decide.messages import RouteRequest, Terms
from router.decide.policy import (
    TIE_S,
    CustomPolicy,
    choose_cheapest,
    choose_least_requests,
    choose_sticky,
    choose_without_price,
    make_sticky_key,
)
from router.decide.price import (
    CONGESTION_MAX,
    CONGESTION_MIN,
    Candidate,
    PoolLoad,
    RequestFacts,
    compute_congestion,
    estimate_tier_load_s,
    price_worker,
    sum_loads,
)
from router.decide.target import Target
from router.index.protocol import HolderId, Match, Scope
from simulation.steps import StepTimes

ROOT = Path(__file__).resolve().parents[2]
CONFIG = CostConfig()


def tracker_of(count: int, service: StepTimes | None = None) -> tuple[LoadTracker, list[Target]]:
    tracker = LoadTracker(service or StepTimes(), CONFIG, LearnConfig(enabled=False))
    return tracker, [tracker.add_target(f"w{i}", None, HolderId(i)) for i in range(count)]


def describe(
    tracker: LoadTracker,
    targets: list[Target],
    tokens: int,
    now: float,
    *,
    queued_s: float = 0.0,
    expected: float = 0.0,
    shared: tuple[int, float] = (0, 0.0),
) -> RequestFacts:
    shortest_wait_s = min(target.slowdown * target.estimate_queue_s(now) for target in targets)
    decay = tracker.compute_utilisation_decay(now)
    congestion = compute_congestion(sum_loads(targets), shortest_wait_s, queued_s, decay, CONFIG)
    return RequestFacts(now, tokens, expected, decay, congestion, *shared)


def price(
    tracker: LoadTracker, targets: list[Target], cached_tokens: list[int], tokens: int, now: float, **changes: Any
) -> list[Terms]:
    request = describe(tracker, targets, tokens, now, **changes)
    return [price_worker(Candidate(target, cached), request, CONFIG) for target, cached in zip(targets, cached_tokens)]


def pick(prices: list[Terms], rotation: int) -> int:
    return choose_cheapest([terms.cost for terms in prices], rotation)


def test_every_term_by_hand() -> None:
    """Worker 0: a 6,000-token prompt routed at 10.0, half a second ago. Worker 1: one request decoding at 4,000 tokens,
    and 2,000 of the new prompt's 5,000 tokens cached."""
    tracker, targets = tracker_of(2)
    tracker.add_request(targets[0], prompt_tokens=6000, cached_tokens=0, is_streaming=True, now=10.0)
    b = tracker.add_request(targets[1], prompt_tokens=4000, cached_tokens=4000, is_streaming=True, now=10.0)
    tracker.record_first_token(b, 10.1)
    now = 10.5
    first, second = prices = price(tracker, targets, [0, 2000], 5000, now)
    p_a = 1e-4 * (6000 + 6000**2 / 1e5)
    slow0 = 1 + 0.012 / 0.2048
    slow1 = 1 + (0.012 + 50e-6 + 2.5e-8 * 4000) / 0.2048
    p0, p1 = 1e-4 * (5000 + 5000**2 / 1e5), 1e-4 * (3000 + (5000**2 - 2000**2) / 1e5)
    q0 = p_a - 0.5 / slow0
    from math import exp

    u0 = p_a / 60 * exp(-0.5 / 60)
    ubar = u0 / 2
    beta = max(ubar / (1 - ubar), CONGESTION_MIN)  # nothing waits on worker 1
    assert (first.slowdown, second.slowdown) == pytest.approx((slow0, slow1))
    assert (first.prefill_s, second.prefill_s) == pytest.approx((p0, p1))
    assert (first.queue_s, second.queue_s) == pytest.approx((q0, 0.0))
    assert (first.tie_break_s, second.tie_break_s) == pytest.approx((0.1 * u0, 0.0))
    assert (first.congestion_s, second.congestion_s) == pytest.approx((slow0 * beta * p0, slow1 * beta * p1))
    assert first.ttft_s == pytest.approx(slow0 * (q0 + p0))
    assert first.cost == pytest.approx(slow0 * (q0 + (1 + beta) * p0) + 0.1 * u0)
    assert second.cost == pytest.approx(slow1 * (1 + beta) * p1)
    assert pick(prices, 0) == 1


def test_the_price_that_a_page_adds_up_is_right() -> None:
    page = (ROOT / "docs" / "how-to" / "explain-a-decision.md").read_text()
    rows = re.findall(r"^(\w+) += (\S.*?) += ([\d.]+)\b.*$", page, re.MULTILINE)
    tracker, targets = tracker_of(2)
    cached, uncached = price(tracker, targets, [768, 0], 789, 0.0, expected=16)
    for name, terms, result in rows:
        arithmetic = re.sub(r"[a-z_]+ ", "", terms).replace("^", "**")
        assert eval(arithmetic) == pytest.approx(float(result), abs=6e-6), name
        tie_break_s = 0.00011 if name in ("tie_break_s", "cost") else 0.0
        assert getattr(cached, name) + tie_break_s == pytest.approx(float(result), abs=6e-6), name
    assert len(rows) == 7
    (prefill_s,), (cost,) = re.findall(r"`prefill_s` is ([\d.]+\d)", page), re.findall(r"`cost` ([\d.]+\d)", page)
    assert (uncached.prefill_s, uncached.cost) == pytest.approx((float(prefill_s), float(cost)), abs=6e-6)


def test_the_rest_of_the_answer_by_hand() -> None:
    """Three requests of 1,000 tokens of prompt run on worker 0, of which 200 tokens each are expected still; the new
    one has 500 tokens and will say 400."""
    tracker, targets = tracker_of(2)
    for _ in range(3):
        request = tracker.add_request(
            targets[0],
            prompt_tokens=1000,
            cached_tokens=999,
            is_streaming=True,
            now=0.0,
            expected_output_tokens=200,
        )
        tracker.record_first_token(request, 0.1)
    prices = price(tracker, targets, [499, 499], 500, 1000.0, expected=400)
    t0, c, d = 0.012, 50e-6, 2.5e-8
    single_s = 400 * (t0 + c + d * (500 + 200))
    assert prices[1].decode_s == pytest.approx(0.2 * single_s)
    its_steps, other_steps = 400 * (3 * c + d * 3000), 400 * 3 * (c + d * (500 + 200))
    assert prices[0].decode_s == pytest.approx(0.2 * (single_s + its_steps + other_steps))
    assert pick(prices, 0) == 1


def test_a_shared_prefix_is_laid_to_all_who_share_it_the_less_the_fuller_the_worker() -> None:
    """Three who run begin with the same 1,024 tokens, of which worker 0 has all and worker 1 has 500."""
    tracker, targets = tracker_of(2)
    congestion = describe(tracker, targets, 2000, 0.0).congestion
    first, terms = price(tracker, targets, [1024, 500], 2000, 0.0, shared=(1024, 3 / 4))
    part = 1e-4 * (524 + (1024**2 - 500**2) / 1e5)
    whole_prefill_s = 1e-4 * (1500 + (2000**2 - 500**2) / 1e5)
    weight = targets[1].slowdown * (1 + congestion)
    assert first.shared_s == 0.0
    assert terms.shared_s == pytest.approx(weight * 0.75 * part)
    assert terms.prefill_s == pytest.approx(whole_prefill_s)
    assert terms.cost == pytest.approx(weight * (whole_prefill_s - 0.75 * part)), "nobody is there to stand still"
    assert terms.ttft_s == pytest.approx(targets[1].slowdown * whole_prefill_s), "it takes its time all the same"
    for _ in range(3):
        tracker.add_request(targets[1], prompt_tokens=1, cached_tokens=0, is_streaming=True, now=0.0)
    terms_with_stall = price(tracker, targets, [1024, 500], 2000, 0.0, shared=(1024, 3 / 4))[1]
    share = 0.75 * (1 - 3 / 256)
    assert terms_with_stall.decode_s == pytest.approx(0.2 * (1 - share) * part * 3)
    congestion = describe(tracker, targets, 2000, 0.0).congestion
    assert terms_with_stall.shared_s == pytest.approx(targets[1].slowdown * (1 + congestion) * share * part)


def test_all_seats_taken_is_a_wait() -> None:
    """Two seats, both taken by answers of which 100 tokens are to come: a third waits for half of what runs to end."""
    tracker, targets = tracker_of(2)
    targets[0].capacity.max_num_seqs = 2
    for _ in range(2):
        request = tracker.add_request(
            targets[0], prompt_tokens=9, cached_tokens=8, is_streaming=True, now=0.0, expected_output_tokens=100
        )
        tracker.record_first_token(request, 0.1)
    first, second = prices = price(tracker, targets, [8, 0], 9, 100.0)
    slot_wait_s = 0.5 * 100 * (0.012 + 2 * 50e-6 + 2.5e-8 * 18)
    assert first.slot_wait_s == pytest.approx(slot_wait_s)
    assert first.ttft_s == pytest.approx(slot_wait_s + first.slowdown * first.prefill_s)
    assert second.slot_wait_s == 0.0
    assert pick(prices, 0) == 1
    tracker.end_request(request, 101.0)
    assert price(tracker, targets, [8, 0], 9, 200.0)[0].slot_wait_s == 0.0


def test_progress_starts_at_the_last_first_token_and_what_is_late_takes_longer() -> None:
    tracker, (target,) = tracker_of(1)
    p = target.estimate_prefill_s(1000, 0)
    a = tracker.add_request(target, prompt_tokens=1000, cached_tokens=0, is_streaming=True, now=0.0)
    tracker.add_request(target, prompt_tokens=1000, cached_tokens=0, is_streaming=True, now=0.01)
    lead = (1 - p / 0.2048) * 0.012  # of a step that is not full its fixed part comes first
    assert target.estimate_queue_s(0.01) == pytest.approx(2 * p - (0.01 - lead) / target.slowdown)
    assert target.estimate_queue_s(0.004) == pytest.approx(2 * p), "not begun"
    progress = (100.0 - 0.01 + 0.01 - lead) / target.slowdown
    assert target.estimate_queue_s(100.0) == pytest.approx(p + 0.2 * progress), (
        "not done after so long: it will take longer"
    )
    tracker.record_first_token(a, 50.0)
    assert target.estimate_queue_s(50.0) == pytest.approx(p), "b was begun when a was done"
    assert target.estimate_queue_s(50.05) == pytest.approx(
        p - (0.05 - (1 - p / 0.2048) * target.step_s) / target.slowdown
    )


def congestion_at(utilisation: float, backlogs: float) -> float:
    """Of one worker that gets two requests of half so many seconds a second, and has so many requests queued."""
    pool = PoolLoad(utilisation, 2.0, 0.0, 1)
    return compute_congestion(pool, backlogs * utilisation / 2.0, 0.0, 1.0, CONFIG)


def test_prefill_of_a_slow_worker_delays_fewer_later_requests() -> None:
    """A quarter of the speed: a prompt there occupies the worker four times as long, and a quarter as many others."""
    tracker, targets = tracker_of(2)
    targets[1].speed.factor = 4.0
    targets[1].speed.refresh()
    targets[1].recompute_decode_load()
    for _ in range(20):
        tracker.add_request(targets[0], prompt_tokens=8000, cached_tokens=0, is_streaming=True, now=0.0)
    request = describe(tracker, targets, 8000, 0.0, queued_s=10_000.0)
    assert request.congestion == CONGESTION_MAX
    fast, slow = (price_worker(Candidate(target), request, CONFIG) for target in targets)
    assert slow.prefill_s == pytest.approx(4 * fast.prefill_s)
    assert slow.congestion_s == pytest.approx(fast.congestion_s)
    assert slow.ttft_s < fast.ttft_s
    assert pick([fast, slow], 0) == 1


def test_beta_is_what_later_requests_will_wait() -> None:
    assert congestion_at(0.0, 0.0) == CONGESTION_MIN
    assert congestion_at(0.5, 0.0) == pytest.approx(1.0)
    assert congestion_at(0.5, 3.0) == pytest.approx(4.0)
    assert congestion_at(0.95, 1.0) == pytest.approx(0.95 * 2 / 0.1)
    assert congestion_at(3.0, 100.0) == CONGESTION_MAX


def test_beta_goes_by_the_shortest_queue_and_by_what_is_held() -> None:
    """A backlog on one of two workers is none of the pool's: prefill on the idle one stays cheap."""
    tracker, targets = tracker_of(2)
    p = targets[0].estimate_prefill_s(2000, 0)
    idle = describe(tracker, targets, 1000, 0.0)
    for _ in range(5):
        tracker.add_request(targets[0], prompt_tokens=2000, cached_tokens=0, is_streaming=True, now=0.0)
    one_sided = describe(tracker, targets, 1000, 0.0)
    utilisation = 5 * p / 60.0 / 2
    assert one_sided.congestion == pytest.approx(max(CONGESTION_MIN, utilisation / (1 - utilisation)), rel=1e-6)
    tracker.add_request(targets[1], prompt_tokens=2000, cached_tokens=0, is_streaming=True, now=0.0)
    both_busy = describe(tracker, targets, 1000, 0.0)
    utilisation = 6 * p / 60.0 / 2
    backlogs = p * targets[1].slowdown / p
    assert both_busy.congestion == pytest.approx(
        max(CONGESTION_MIN, utilisation * (1 + backlogs) / (1 - utilisation)), rel=1e-6
    )
    with_queue = describe(tracker, targets, 1000, 0.0, queued_s=80.0)
    backlogs += 80.0 / 2 / p
    assert with_queue.congestion == pytest.approx(
        min(CONGESTION_MAX, utilisation * (1 + backlogs) / (1 - utilisation)), rel=1e-6
    )
    assert idle.congestion == CONGESTION_MIN


def test_slower_tiers_cost_their_load() -> None:
    match = Match(HolderId(0), 300, 100, (100, 150, 0, 50), 300)
    assert estimate_tier_load_s(match, CONFIG) == pytest.approx(150 * 2e-6 + 50 * 4e-5)
    assert estimate_tier_load_s(Match(HolderId(0), 100, 100, (100, 0, 0, 0), 500), CONFIG) == 0.0


def test_another_routers_load_counts() -> None:
    tracker, targets = tracker_of(2)
    load = PeerLoad(3.0, oldest_prefill_s=1.0, oldest_sent_at_s=9.0, oldest_since_s=9.5, decode_requests=4)
    tracker.set_peer_loads("other", {"w0": load}, is_full=False)
    prices = price(tracker, targets, [0, 0], 1000, 10.0)
    assert prices[0].queue_s == pytest.approx(3.0 - 0.5 / targets[0].slowdown)
    assert targets[0].slowdown > targets[1].slowdown
    assert pick(prices, 0) == 1
    tracker.set_peer_loads("other", {})
    assert targets[0].peer_load is NO_PEER_LOAD
    assert price(tracker, targets, [0, 0], 1000, 10.0)[0].queue_s == 0.0


@given(
    costs=st.lists(st.sampled_from([1.0, 1.0 + TIE_S / 2, 1.0 + 2 * TIE_S, 3.0]), min_size=1, max_size=8),
    rotation=st.integers(0, 10),
)
def test_the_winner_has_the_least_cost_and_ties_rotate(costs: list[float], rotation: int) -> None:
    tracker, targets = tracker_of(1)
    (terms,) = price(tracker, targets, [0], 10, 0.0)
    prices = [msgspec.structs.replace(terms, cost=cost) for cost in costs]
    winners = {pick(prices, rotation + i) for i in range(len(costs))}
    assert winners == {i for i, cost in enumerate(costs) if cost <= min(costs) + TIE_S}


def test_ties_go_round() -> None:
    tracker, targets = tracker_of(3)
    prices = price(tracker, targets, [0, 0, 0], 100, 0.0)
    assert [pick(prices, r) for r in range(4)] == [0, 1, 2, 0]


def test_least_requests_counts_what_is_in_flight() -> None:
    tracker, targets = tracker_of(3)
    tracker.add_request(targets[0], prompt_tokens=1, cached_tokens=0, is_streaming=True, now=0.0)
    assert {choose_least_requests(targets, r) for r in range(4)} == {1, 2}
    tracker.set_peer_loads("other", {"w1": PeerLoad(1.0, 2)}, is_full=False)
    tracker.set_peer_loads("other", {"w2": PeerLoad(decode_requests=3)}, is_full=False)
    assert {choose_least_requests(targets, r) for r in range(4)} == {0}


def test_sticky_moves_only_what_it_must() -> None:
    _, targets = tracker_of(6)
    keys = [f"s{i}" for i in range(300)]
    before = {key: targets[choose_sticky(targets, key)].name for key in keys}
    fewer = targets[1:]
    after = {key: fewer[choose_sticky(fewer, key)].name for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "w0")
    shares = [list(before.values()).count(t.name) for t in targets]
    assert min(shares) > 20
    assert make_sticky_key(None, [1, 2, 3]) == make_sticky_key(None, [1, 2, 3])
    assert make_sticky_key("s", [1]) == "s"
    assert make_sticky_key(None, None) is None


def test_chance_is_an_argument() -> None:
    _, targets = tracker_of(4)
    request = RouteRequest("r", "m", Scope("m"), None, 0)
    first_choices = [choose_without_price("random", request, targets, i, random.Random(7)) for i in range(3)]
    assert first_choices == [first_choices[0]] * 3


@pytest.mark.parametrize("name", ["nowhere:f", "math", "math:", "math:pi", ":f", "math:nothing", "math:sqrt"])
def test_a_policy_function_that_is_not_there_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        CustomPolicy(name)


@pytest.mark.parametrize("answer", [2, -1, True, None, "0", ValueError("no"), RecursionError()])
def test_a_policy_function_that_fails_leaves_the_choice_to_the_price(monkeypatch: Any, answer: object) -> None:
    def choose(request: object, terms: list[object]) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(random, "own", choose, raising=False)
    custom_policy = CustomPolicy("random:own")
    route_request = RouteRequest("r", "m", Scope("m"), None, 10)
    tracker, targets = tracker_of(2)
    terms = price(tracker, targets, [0, 0], 10, 0.0)
    assert [custom_policy.choose(route_request, terms) for _ in range(3)] == [None] * 3
    assert custom_policy.failures == 3
    monkeypatch.setattr(random, "own", lambda request, terms: 1)
    assert CustomPolicy("random:own").choose(route_request, terms) == 1
