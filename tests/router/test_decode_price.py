"""What decoding costs, through the real core: traffic spreads where it must, and no number from outside breaks that."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CoreConfig, LearnConfig
from router.decide.core import RouterCore
from router.decide.learning.output_lengths import TOKENS_MAX, TOKENS_PRIOR, OutputLengths
from router.decide.messages import FailureKind, Forward, ReportedUsage, RouteRequest
from router.decide.workers import CacheView, ServedModel, WorkerSpec
from router.index import make_index
from router.index.protocol import Scope
from simulation.steps import StepTimes

SCOPE = Scope("m")
SYSTEM = list(range(1000))


def pool(workers: int = 8, learn: bool = True, **changes: object) -> RouterCore:
    core = RouterCore(make_index(seed=1), CoreConfig(learn=LearnConfig(enabled=learn)))
    for i in range(workers):
        spec = WorkerSpec(f"w{i}", f"http://w{i}", models=(ServedModel("m", "m"),), **changes)  # type: ignore[arg-type]
        core.add_worker(spec, 0.0)
    return core


def make_request(name: str, number: int, **changes: object) -> RouteRequest:
    ids = SYSTEM + [100_000 + number] * 50
    return RouteRequest(name, "m", SCOPE, ids, len(ids), **changes)  # type: ignore[arg-type]


def send(core: RouterCore, request: RouteRequest, now: float) -> str:
    placement = core.route(request, now, explain=True)
    assert isinstance(placement, Forward)
    return placement.decision.worker


def answer(core: RouterCore, name: str, at: float, tokens: int, usage: ReportedUsage | None) -> float:
    """Streamed at 15 ms a token; when it ended."""
    core.record_first_token(name, at + 0.03)
    end = at + 0.03 + 0.015 * tokens
    core.finish_request(name, usage, end)
    core.tick(end)
    core.check_invariants()
    return end


def burst(core: RouterCore, now: float, count: int = 64, **changes: object) -> Counter[str]:
    """Requests that come at once; how many each worker got."""
    return Counter(send(core, make_request(f"burst{i}", 1000 + i, **changes), now + i * 1e-3) for i in range(count))


def test_sequential_sessions_stay_together_and_a_burst_spreads_at_once() -> None:
    core, now, homes = pool(), 0.0, set()
    for i in range(20):
        homes.add(send(core, make_request(f"r{i}", i), now))
        now = answer(core, f"r{i}", now, 1000, ReportedUsage(1050, 0, 1000))
    assert len(homes) == 1, "one at a time, nothing is gained by computing the shared prompt twice"
    spread = burst(core, now + 1.0)
    assert len(spread) == 8
    assert max(spread.values()) <= 16, spread


def test_one_shared_prompt_uses_all_workers_evenly_while_answers_are_long() -> None:
    """20 requests a second, answers of 20 s: 400 run at the end."""
    core = pool()
    for i in range(400):
        now = i * 0.05
        send(core, make_request(f"r{i}", i), now)
        core.record_first_token(f"r{i}", now + 0.04)
    running = [target.load.request_count for target in core.tracker.targets.values()]
    assert max(running) <= 1.25 * 50, running


def test_a_hot_prompt_spreads_over_idle_workers_although_its_answers_are_short() -> None:
    """60 requests a second of 0.6 s each before 16 workers: 36 run. On six workers a step is 4 % longer than on all."""
    running: list[tuple[float, str]] = []
    core, sent_counts = pool(16, learn=False, cache_view=CacheView.APPROXIMATE), Counter[str]()
    for i in range(1200):
        now = i / 60
        while running and running[0][0] <= now:
            core.finish_request(heapq.heappop(running)[1], ReportedUsage(2050, 2000, 50), now)
        ids = [7] * 2000 + [100_000 + i] * 50
        home = send(core, RouteRequest(f"r{i}", "m", SCOPE, ids, len(ids)), now)
        core.record_first_token(f"r{i}", now + 0.012)
        heapq.heappush(running, (now + 0.6, f"r{i}"))
        sent_counts[home] += i >= 300
    assert len(sent_counts) >= 6, sent_counts
    assert max(sent_counts.values()) <= 0.2 * 900, sent_counts


def test_what_has_ended_is_not_hot() -> None:
    core = pool(2)
    prompt = core.cache_state.prepare_query(RouteRequest("r", "m", SCOPE, [7] * 3000, 3000))
    assert prompt is not None
    for name in "abc":
        assert core.cache_state.estimate_shared_prefix(prompt, 15.0) == ((0, 0.0) if name in "ab" else (2816, 1 / 2)), (
            "two on one: one on each of two"
        )
        send(core, RouteRequest(name, "m", SCOPE, [7] * 3000, 3000, worker="w0"), 0.0)
    send(core, RouteRequest("d", "m", SCOPE, [7] * 3000, 3000, worker="w1"), 0.0)
    assert core.cache_state.estimate_shared_prefix(prompt, 15.0) == (2816, (4 / 3) / (4 / 3 + 1))
    assert core.cache_state.estimate_shared_prefix(prompt, 7.5) == (2816, (8 / 3) / (8 / 3 + 1)), (
        "twice as many come while a copy is good"
    )
    core.check_invariants()
    core.abort_request("d", 0.5)
    core.fail_attempt("a", FailureKind.OVERLOADED, 1.0)
    core.abort_request("a", 1.0)
    core.finish_request("b", None, 1.0)
    assert core.cache_state.estimate_shared_prefix(prompt, 15.0) == (0, 0.0)
    core.check_invariants()


def test_engines_that_are_said_to_decode_in_no_time_are_priced_too() -> None:
    service = StepTimes(step_s=0.0, decode_request_s=0.0, decode_context_s=0.0)
    core = RouterCore(make_index(seed=1), CoreConfig(service=service, learn=LearnConfig(enabled=False)))
    for name in ("w0", "w1"):
        core.add_worker(WorkerSpec(name, f"http://{name}", models=(ServedModel("m", "m"),)), 0.0)
    for i in range(4):
        send(core, make_request(f"r{i}", i), 0.0)
        core.record_first_token(f"r{i}", 0.1)
    core.check_invariants()


@pytest.mark.parametrize("output_max", [-1, 0, 1, 10**12])
def test_what_a_client_allows_is_a_bound_and_no_expectation(output_max: int) -> None:
    core, now = pool(), 0.0
    for i in range(30):
        send(core, make_request(f"r{i}", i, output_tokens_max=output_max), now)
        now = answer(core, f"r{i}", now, 100, ReportedUsage(1050, 0, 100))
    placement = core.route(make_request("last", 99, output_tokens_max=output_max), now)
    assert isinstance(placement, Forward)
    expected = placement.decision.terms.output_tokens
    assert expected == (1.0 if output_max == 1 else pytest.approx(100, rel=0.1))
    core.abort_request("last", now)
    assert len(burst(core, now, output_tokens_max=output_max)) >= (1 if output_max == 1 else 4)


@pytest.mark.parametrize(
    ("output_min", "output_max", "expected"),
    [(400, 400, 400), (400, 0, 400), (400, 300, 300), (10, 900, 100), (10**12, 0, 131_072), (0, 0, 100)],
)
def test_an_answer_that_may_not_end_earlier_is_expected_so_long(
    output_min: int, output_max: int, expected: int
) -> None:
    core, now = pool(), 0.0
    for i in range(30):
        send(core, make_request(f"r{i}", i), now)
        now = answer(core, f"r{i}", now, 100, ReportedUsage(1050, 0, 100))
    placement = core.route(make_request("last", 99, output_tokens_min=output_min, output_tokens_max=output_max), now)
    assert isinstance(placement, Forward)
    assert placement.decision.terms.output_tokens == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("reported_tokens", [0, 10**9 - 1])
def test_a_worker_that_lies_of_what_it_said_is_not_believed(reported_tokens: int) -> None:
    """One worker of eight reports absurd answers. 1e9 tokens are more than any engine says in that time."""
    core, now = pool(), 0.0
    for i in range(200):
        worker = send(core, make_request(f"r{i}", i, worker=f"w{i % 8}"), now)
        core.record_first_token(f"r{i}", now + 0.03)
        core.record_progress(f"r{i}", 96)
        usage = ReportedUsage(1050, 0, reported_tokens if worker == "w0" else 100)
        now += 0.03 + 0.015 * 100
        core.finish_request(f"r{i}", usage, now)
    expected = core.explain(make_request("x", 7), now)
    assert not hasattr(expected, "status")
    assert 50 < expected.terms.output_tokens < 1000  # type: ignore[union-attr]
    spread = burst(core, now)
    assert len(spread) == 8
    assert max(spread.values()) <= 24, spread


def test_a_worker_that_reports_nothing_is_spread_over_all_the_same() -> None:
    """No usage, no stream, no capacity: what is in flight is known all the same."""
    core, now = pool(), 0.0
    for i in range(40):
        send(core, make_request(f"r{i}", i, is_streaming=False), now)
        now += 5.0
        core.finish_request(f"r{i}", None, now)
        core.check_invariants()
    spread = burst(core, now, is_streaming=False)
    assert len(spread) == 8
    assert max(spread.values()) <= 16, spread


def test_what_an_attempt_booked_is_taken_back() -> None:
    core = pool(cache_tokens=20_000)
    for i in range(40):
        send(core, make_request(f"r{i}", i), 0.0)
    for i in range(40):
        if i % 3 == 0:
            core.abort_request(f"r{i}", 1.0)
        elif i % 3 == 1:
            core.fail_attempt(f"r{i}", FailureKind.OVERLOADED, 1.0)
            core.abort_request(f"r{i}", 1.1)
        else:
            core.record_first_token(f"r{i}", 1.0)
            core.fail_attempt(f"r{i}", FailureKind.STREAM, 2.0)
        core.check_invariants()
    for target in core.tracker.targets.values():
        counters = (
            target.load.request_count,
            target.load.remaining_output_tokens,
            target.load.pending_prompt_tokens,
            target.load.decode_context_tokens,
            target.load.duplicate_prompt_tokens,
        )
        assert counters == (0, 0.0, 0, 0, 0)
        assert target.free_kv_tokens == 20_000


def test_a_copy_of_a_shared_prefix_is_worth_less_where_memory_is_full_and_what_is_shared_counts_once() -> None:
    """Workers of 16k tokens. Six long prompts that share nothing fill one; six that share all but a little do not."""
    free_shares = []
    for is_shared in (False, True):
        core = pool(2, cache_tokens=16_000)
        for i in range(6):
            ids = [0 if is_shared else i] * 2500 + [i] * 40
            core.route(RouteRequest(f"r{i}", "m", SCOPE, ids, len(ids), worker="w0"), 0.0)
            core.record_first_token(f"r{i}", 1.0)
        target = core.tracker.targets["w0"]
        free_shares.append(target.compute_free_share())
        shared_tokens = 5 * 2304 if is_shared else 0  # whole chunks of all but one
        assert free_shares[-1] == pytest.approx((1 - 6 / 256) * (1 - (6 * 2540 - shared_tokens) / 16_000))
        assert core.tracker.targets["w1"].compute_free_share() == 1.0
    assert free_shares[0] < 0.1 < 0.7 < free_shares[1]


def test_a_request_that_does_not_fit_into_the_memory_waits_for_whole_requests_to_end() -> None:
    """Two answers hold 8,000 of 10,000 tokens. What a running prompt holds already needs no more room."""
    core = pool(2, cache_tokens=10_000)
    for i in range(2):
        core.route(RouteRequest(f"r{i}", "m", SCOPE, [i] * 4000, 4000, worker="w0"), 0.0)
        core.record_first_token(f"r{i}", 1.0)

    def price_new_prompt(first_id: int, prompt_tokens: int) -> tuple[float, float]:
        ids = [first_id] * prompt_tokens
        placement = core.route(RouteRequest("new", "m", SCOPE, ids, prompt_tokens), 2.0, explain=True)
        core.abort_request("new", 2.0)
        assert isinstance(placement, Forward)
        assert placement.decision.candidates is not None
        terms = {terms.worker: terms for terms in placement.decision.candidates}
        assert terms["w0"].ttft_s > terms["w0"].slot_wait_s
        assert terms["w1"].slot_wait_s == 0.0
        return terms["w0"].slot_wait_s, terms["w0"].output_tokens

    target = core.tracker.targets["w0"]
    assert target.free_kv_tokens == 2000
    wait_s, output_tokens = price_new_prompt(9, 3000)
    assert wait_s == pytest.approx(output_tokens * target.step_s / 2), "one of two has to end, and frees 4,000 tokens"
    assert price_new_prompt(9, 7000)[0] == pytest.approx(output_tokens * target.step_s)
    assert price_new_prompt(9, 1000)[0] == 0.0
    assert price_new_prompt(1, 4100)[0] == 0.0
    core.tracker.targets["w1"].capacity.kv_tokens = 10
    assert price_new_prompt(9, 100)[0] == 0.0, "nobody is there to wait for, if larger than the whole cache of w1"


@given(st.lists(st.integers(-5, 10**12), max_size=100))
def test_expected_lengths_stay_within_reason(answer_lengths: list[int]) -> None:
    lengths = OutputLengths()
    route_request = make_request("r", 1, session="s")
    bounded_request = make_request("r", 1, session="s", output_tokens_max=7)
    assert lengths.estimate_length(route_request) == TOKENS_PRIOR
    for tokens in answer_lengths:
        lengths.record_length(route_request, tokens)
        assert 1.0 <= lengths.estimate_length(route_request) <= TOKENS_MAX
        assert lengths.estimate_length(bounded_request) <= 7.0


def test_lengths_are_learned_by_session_prompt_and_model() -> None:
    """Summaries of 20 tokens and stories of 2,000 under two system prompts; one session of the stories is terse."""
    lengths = OutputLengths()
    short = RouteRequest("a", "m", SCOPE, [1] * 300, 300)
    long = RouteRequest("b", "m", SCOPE, [2] * 300, 300)
    terse = RouteRequest("c", "m", SCOPE, [2] * 300, 300, session="s")
    for _ in range(60):
        lengths.record_length(short, 20)
        lengths.record_length(long, 2000)
    for _ in range(30):
        lengths.record_length(terse, 50)
    assert lengths.estimate_length(short) == pytest.approx(20, rel=3.0)
    assert lengths.estimate_length(long) > 1000
    assert lengths.estimate_length(terse) < 300
    unknown = lengths.estimate_length(RouteRequest("d", "m", SCOPE, [3] * 300, 300))
    assert 20 < unknown < 2000


def serve(core: RouterCore, seats: dict[str, int], count: int, gap_s: float, answer_s: float) -> dict[str, int]:
    """Engines with so many seats each, first come first served, before the real core; who waited a second or more for
    its first token, by worker, of the second half."""
    events: list[tuple[float, int, str, str]] = [(i * gap_s, i, "ask", f"r{i}") for i in range(count)]
    waiting: dict[str, list[tuple[str, float]]] = {name: [] for name in seats}
    running: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    home: dict[str, str] = {}
    while events:
        now, order, event, name = heapq.heappop(events)
        if event == "ask":
            home[name] = send(core, make_request(name, order), now)
            waiting[home[name]].append((name, now))
        else:
            core.finish_request(name, ReportedUsage(1050, 1000, int(answer_s / 0.012)), now)
            running[home[name]] -= 1
        worker = home[name]
        while waiting[worker] and running[worker] < seats[worker]:
            request_id, asked_s = waiting[worker].pop(0)
            running[worker] += 1
            core.record_first_token(request_id, now + 0.012)
            heapq.heappush(events, (now + 0.012 + answer_s, order, "end", request_id))
            if now - asked_s > 1.0 and int(request_id[1:]) > count // 2:
                waits[worker] += 1
    core.check_invariants()
    return waits


@pytest.mark.parametrize("is_limit_known", [True, False])
def test_nobody_waits_for_a_seat_while_another_worker_has_one(is_limit_known: bool) -> None:
    """One of four workers runs only 8 sequences at once. Untold, the router sees the prompts that wait there."""
    core, seats = pool(4), {"w0": 8, "w1": 64, "w2": 64, "w3": 64}
    if is_limit_known:
        model = (ServedModel("m", "m"),)
        core.add_worker(WorkerSpec("w0", "http://w0", models=model, max_num_seqs=8), 0.0)
    waits = serve(core, seats, count=1500, gap_s=0.1, answer_s=6.0)
    assert sum(waits.values()) <= 5, waits
