"""Fair turns between tenants, the background and answers in time: against naive models, and in a simulated fleet."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict

import pytest
from core_by_hand import chosen_worker, make_core, request
from hypothesis import given
from hypothesis import strategies as st

from router.decide.attempts import ActiveRequest
from router.decide.config import CoreConfig, LearnConfig, QueueConfig
from router.decide.messages import Enqueue, FailureKind, Forward, Refuse, RouteRequest
from router.decide.queue import RequestQueue
from router.index.protocol import Scope
from simulation.steps import StepTimes

FAIR = QueueConfig(fair=True, enqueue_above_s=0.0, wait_s_max=1e6)


def make_active_request(name: str, tenant: str, number: int) -> ActiveRequest:
    request = RouteRequest(name, "m", Scope("m"), None, 1, tenant=tenant, deadline_s=1e9)
    return ActiveRequest(request, float(number), wants_explanation=False, is_background=False)


def put_request(queue: RequestQueue, name: str, tenant: str, seconds: float, number: int) -> None:
    request = make_active_request(name, tenant, number)
    queue.add(request, target="w", prefill_s=seconds, charge_s=seconds)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.floats(0.01, 20), min_size=1, max_size=12), min_size=2),
    st.data(),
)
def test_lines_that_wait_are_given_the_same_but_for_a_request(
    lines: dict[str, list[float]], data: st.DataObject
) -> None:
    queue, given_s, late = RequestQueue(FAIR), defaultdict[str, float](float), data.draw(st.sampled_from(sorted(lines)))
    given_before_s: dict[str, float] = {}
    for tenant, sizes in lines.items():
        for number, seconds in enumerate(sizes):
            if tenant != late:
                put_request(queue, f"{tenant}{number}", tenant, seconds, number)
    comes = data.draw(st.integers(0, len(queue.requests)))
    served_count = 0
    while len(queue.requests) or late not in given_before_s:
        if (
            served_count >= comes and late not in given_before_s
        ):  # one comes later: it saves up nothing, and it waits for nobody's past
            given_before_s = dict(given_s)
            given_before_s[late] = given_s[late]
            for number, seconds in enumerate(lines[late]):
                put_request(queue, f"{late}{number}", late, seconds, number)
            given_s = defaultdict(float)
        (name,) = queue.get_next_request_ids(1)
        expected_order = queue.get_next_request_ids(1000)
        tenant, seconds = name[0], lines[name[0]][int(name[1:])]
        waiting_tenants = {queued_name[0] for queued_name in expected_order}
        queue.record_sent(queue.requests[name].active_request, seconds)
        queue.check_invariants()
        assert queue.get_next_request_ids(1000) == expected_order[1:], "what is tried next is known beforehand"
        given_s[tenant] += seconds
        served_count += 1
        for waiting_tenant in waiting_tenants & {queued_name[0] for queued_name in expected_order[1:]}:
            for other_tenant in waiting_tenants & {queued_name[0] for queued_name in expected_order[1:]}:
                if late in given_before_s or waiting_tenant != late != other_tenant:
                    assert (
                        given_s[waiting_tenant] - given_s[other_tenant]
                        <= 2 * (max(lines[waiting_tenant]) + max(lines[other_tenant])) + 1e-9
                    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 5), st.booleans()), max_size=40))
def test_what_goes_first_is_what_is_said_to(steps: list[tuple[str, float, bool]]) -> None:
    """`compute_prefill_ahead` of a request is the work that `get_next_request_ids` then lists before it."""
    queue, sizes = RequestQueue(FAIR), dict[str, float]()
    for number, (tenant, seconds, sends) in enumerate(steps):
        name = f"{tenant}{number}"
        ahead_s = queue.compute_prefill_ahead(make_active_request(name, tenant, number))
        put_request(queue, name, tenant, seconds, number)
        sizes[name] = seconds
        order = queue.get_next_request_ids(1000)
        before = sum(sizes[queued_name] for queued_name in order[: order.index(name)])
        ties = sum(sizes[queued_name] for queued_name in order if queued_name[0] != tenant)
        assert (
            ahead_s.get("w", 0.0) == pytest.approx(before)
            or ahead_s.get("w", 0.0) <= before <= ahead_s.get("w", 0) + ties
        )
        if sends:
            first = queue.get_next_request_ids(1)[0]
            queue.record_sent(queue.requests[first].active_request, sizes[first])


class Fleet:
    """Workers that prefill a prompt after the other at 1 ms a token, and a core before them; answers are one token."""

    def __init__(self, workers: int, queue: QueueConfig) -> None:
        service = StepTimes(prefill_s_per_token=1e-3, quadratic_tokens=1e12, step_s=0.0, step_tokens=10**6)
        config = CoreConfig(service=service, learn=LearnConfig(enabled=False), queue=queue)
        self.core, _ = make_core("abcdefgh"[:workers], config)
        self.free_s = dict.fromkeys("abcdefgh"[:workers], 0.0)
        self.ends: list[tuple[float, str]] = []
        self.latency: dict[str, list[float]] = defaultdict(list)
        self.arrivals_by_id: dict[str, tuple[float, str, int]] = {}
        self.done_tokens = 0

    def perform(self, instructions: list[object], now: float) -> None:
        for instruction in instructions:
            if isinstance(instruction, Forward):
                worker = instruction.decision.worker
                tokens = self.arrivals_by_id[instruction.request_id][2]
                self.free_s[worker] = max(self.free_s[worker], now) + tokens * 1e-3
                heapq.heappush(self.ends, (self.free_s[worker], instruction.request_id))
            else:
                assert isinstance(instruction, Enqueue), instruction

    def run(self, arrivals: list[tuple[float, str, int]], until_s: float) -> None:
        """(time, tenant, tokens) each, in order."""
        number = 0
        while number < len(arrivals) or self.ends:
            comes_s = arrivals[number][0] if number < len(arrivals) else float("inf")
            ends_s = self.ends[0][0] if self.ends else float("inf")
            now = min(comes_s, ends_s)
            if comes_s <= ends_s:
                at_s, tenant, tokens = arrivals[number]
                name = f"{tenant}-{number}"
                number += 1
                self.arrivals_by_id[name] = at_s, tenant, tokens
                route_request = request(name, None, prompt_tokens=tokens, tenant=tenant, output_tokens_max=1)
                self.perform([self.core.route(route_request, now)], now)
            else:
                _, name = heapq.heappop(self.ends)
                at_s, tenant, tokens = self.arrivals_by_id.pop(name)
                self.latency[tenant].append(now - at_s)
                if now <= until_s:
                    self.done_tokens += tokens
                self.perform(self.core.record_first_token(name, now), now)
                self.perform(self.core.finish_request(name, None, now), now)
            self.perform(self.core.tick(now), now)
            self.core.check_invariants()


def arrivals(seed: int, tenants: dict[str, tuple[float, int]], seconds: float) -> list[tuple[float, str, int]]:
    rng, schedule = random.Random(seed), []
    for tenant, (rate, tokens) in sorted(tenants.items()):
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            schedule.append((at_s, tenant, tokens))
            at_s += rng.expovariate(rate)
    return sorted(schedule)


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


SMALL = dict.fromkeys(("s1", "s2", "s3"), (1.6, 500))
"""0.8 workers of load each: four fifths of a share of four."""


def test_who_has_just_come_passes_by_nobody() -> None:
    """A worker that is nearly free is for those who wait for it: the tenant that asks most often would take it all."""
    service = StepTimes(prefill_s_per_token=1e-3, quadratic_tokens=1e12, step_s=0.0, step_tokens=10**6)
    queue = QueueConfig(fair=True, enqueue_above_s=0.5)
    core, _ = make_core("a", CoreConfig(service=service, learn=LearnConfig(enabled=False), queue=queue))
    asks = {"prompt_tokens": 2000, "output_tokens_max": 1}
    assert chosen_worker(core.route(request("big0", None, tenant="big", **asks), 0.0)) == "a"
    assert isinstance(core.route(request("big1", None, tenant="big", **asks), 0.1), Enqueue)
    small = request("small", None, prompt_tokens=500, tenant="small", output_tokens_max=1)
    assert isinstance(core.route(small, 0.2), Enqueue)
    assert core.tick(1.0) == []
    assert isinstance(core.route(request("big2", None, tenant="big", **asks), 1.6), Enqueue)
    forwarded_ids = [instruction.request_id for instruction in core.tick(1.6) if isinstance(instruction, Forward)]
    assert forwarded_ids in (["small"], ["big1"]), "whose turn it is"
    core.check_invariants()


def test_a_tenant_that_fills_the_queue_leaves_room_and_is_told_in_the_end() -> None:
    config = QueueConfig(fair=True, enqueue_above_s=0.0, requests_max=16, wait_s_max=5.0)
    core, _ = make_core("a", CoreConfig(learn=LearnConfig(enabled=False), queue=config))
    core.route(request("first", None, prompt_tokens=900_000), 0.0)
    kinds = [type(core.route(request(f"big{n}", None, prompt_tokens=900, tenant="big"), 0.0)) for n in range(20)]
    assert kinds == [Enqueue] * 8 + [Refuse] * 12
    other_placements = [core.route(request(f"o{n}", None, prompt_tokens=9, tenant=f"o{n % 2}"), 1.0) for n in range(20)]
    assert sum(isinstance(instruction, Enqueue) for instruction in other_placements) == 6, "never all of it"
    late = core.tick(5.5)
    assert {type(instruction) for instruction in late} == {Refuse}, (
        "what would be sent now would be paid for by all others"
    )
    assert {(instruction.status, instruction.code) for instruction in late if isinstance(instruction, Refuse)} == {
        (429, "queue_full")
    }
    assert sorted(instruction.request_id for instruction in late) == sorted(f"big{n}" for n in range(8))
    core.check_invariants()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_ten_times_the_load_beside_three_small_ones(seed: int) -> None:
    """On four workers; each small one alone has one of them, which is its share."""
    heavy = SMALL | {"heavy": (4.0, 2000)}  # ten times the work of a small one, in prompts of four times the length
    arriving = arrivals(seed, heavy, 200.0)
    fair, first_come = Fleet(4, FAIR), Fleet(4, QueueConfig())
    fair.run(arriving, 200.0)
    first_come.run(arriving, 200.0)
    for tenant in SMALL:
        single_tenant_fleet = Fleet(1, FAIR)
        single_tenant_fleet.run([arrival for arrival in arriving if arrival[1] == tenant], 200.0)
        assert p99(fair.latency[tenant]) <= 1.2 * p99(single_tenant_fleet.latency[tenant]), tenant
        assert p99(first_come.latency[tenant]) > 20 * p99(single_tenant_fleet.latency[tenant]), (
            "there is something to be fair about"
        )
    assert fair.done_tokens >= 0.97 * first_come.done_tokens


def test_without_pressure_nobody_is_held_and_nothing_is_kept() -> None:
    fleet = Fleet(4, QueueConfig(fair=True, enqueue_above_s=0.5))
    fleet.run(arrivals(1, {"a": (2.0, 300), "b": (2.0, 100)}, 30.0), 30.0)
    assert not fleet.core.counters["queued"]
    assert not vars(fleet.core._placer.queue._waiting.scheduler)["_served_s_by_queue"]


def test_a_share_of_two_is_given_twice_as_much() -> None:
    fleet = Fleet(1, FAIR)
    for number in range(40):
        for tenant, share in (("one", 1.0), ("two", 2.0)):
            name = f"{tenant}-{number}"
            fleet.arrivals_by_id[name] = 0.0, tenant, 100
            route_request = request(name, None, prompt_tokens=100, tenant=tenant, share=share, output_tokens_max=1)
            fleet.perform([fleet.core.route(route_request, 0.0)], 0.0)
    fleet.run([], 0.0)
    assert sum(latency < 3.0 for latency in fleet.latency["two"]) == pytest.approx(20, abs=2)
    assert sum(latency < 3.0 for latency in fleet.latency["one"]) == pytest.approx(10, abs=2)


def test_a_picker_s_rank_counts_after_priority_and_before_arrival() -> None:
    queue = RequestQueue(FAIR)
    for number, (name, priority, rank) in enumerate([("third", 0, 2), ("second", 0, 0), ("first", -1, 5)]):
        active_request = make_active_request(name, "t", number)
        active_request.request = active_request.request.replace(priority=priority, queue_rank=rank)
        queue.add(active_request, target="w", prefill_s=1.0, charge_s=1.0)
    assert queue.get_next_request_ids(3) == ["first", "second", "third"]


def test_the_background_waits_until_nothing_else_does() -> None:
    config = CoreConfig(queue=QueueConfig(background_priority=100, background_running=1, background_wait_s_max=50.0))
    core, _ = make_core("a", config)
    assert chosen_worker(core.route(request("b1", list(range(500)), priority=100), 0.0)) == "a"
    assert isinstance(core.route(request("b2", list(range(500, 900)), priority=100), 0.0), Enqueue), "one at a time"
    assert chosen_worker(core.route(request("f1", list(range(900, 2000))), 0.1)) == "a", (
        "what is not background never waits"
    )
    assert core.record_first_token("b1", 0.2) == []
    assert core.finish_request("b1", None, 0.3) == [], "there is a prompt to prefill"
    (forward,) = core.record_first_token("f1", 0.4)
    assert isinstance(forward, Forward)
    assert forward.request_id == "b2"
    assert isinstance(core.route(request("b3", [7] * 100, priority=100), 0.5), Enqueue)
    late = [instruction for instruction in core.tick(51.0) if isinstance(instruction, Forward)]
    assert [instruction.request_id for instruction in late] == ["b3"], "in the end it is sent all the same"
    core.check_invariants()


def test_the_background_goes_where_nothing_runs_though_another_has_its_prefix() -> None:
    core, index = make_core("ab", CoreConfig(queue=QueueConfig(background_priority=100)))
    prompt = list(range(500))
    index.store(core.workers["a"].holders[0], prompt)
    assert chosen_worker(core.route(request("f1", prompt + [1] * 900), 0.0)) == "a"
    assert chosen_worker(core.route(request("b1", prompt, priority=100), 0.0)) == "b"


@pytest.mark.parametrize("priorities", [(100, 0), (0, 100), (100, 100)])
def test_a_continued_answer_leaves_no_count_of_the_background_behind(priorities: tuple[int, int]) -> None:
    """A request is in the background or not from its first attempt on, whatever priority its continuation has."""
    core, _ = make_core("ab", CoreConfig(queue=QueueConfig(background_priority=100)))
    route = request("r", list(range(500)), is_streaming=True, priority=priorities[0])
    first = chosen_worker(core.route(route, 0.0))
    core.record_first_token("r", 0.5)
    continuation = route.replace(token_ids=list(range(510)), prompt_tokens=510, priority=priorities[1])
    second = chosen_worker(core.fail_attempt("r", FailureKind.STREAM, 1.0, continuation)[0])
    counts = [core.tracker.targets[name].load.background_request_count for name in (first, second)]
    assert counts == [0, int(priorities[0] == 100)]
    core.check_invariants()
    core.finish_request("r", None, 2.0)
    assert not any(target.load.background_request_count for target in core.tracker.targets.values())


@pytest.mark.parametrize("by", ["request", "configuration"])
def test_what_cannot_begin_in_time_is_told_when_it_could(by: str) -> None:
    queue = QueueConfig(ttft_s_max=0.5 if by == "configuration" else None)
    asks = {} if by == "configuration" else {"ttft_s_max": 0.5}
    service = StepTimes(prefill_s_per_token=1e-3, quadratic_tokens=1e12)
    core, _ = make_core("a", CoreConfig(service=service, learn=LearnConfig(enabled=False), queue=queue))
    core.route(request("r0", list(range(400)), output_tokens_max=1), 0.0)
    refusal = core.route(request("r1", list(range(500, 800)), output_tokens_max=1, **asks), 0.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.code) == (429, "too_slow")
    assert refusal.retry_after_s is not None
    again_s = refusal.retry_after_s
    early = core.route(request("r2", list(range(500, 800)), output_tokens_max=1, **asks), again_s - 0.05)
    assert isinstance(early, Refuse), "no sooner"
    assert (
        chosen_worker(core.route(request("r3", list(range(500, 800)), output_tokens_max=1, **asks), again_s + 0.05))
        == "a"
    )
    impossible = core.route(request("r4", list(range(1000, 2000)), output_tokens_max=1, **asks), again_s)
    assert isinstance(impossible, Refuse)
    assert impossible.retry_after_s is None
    assert "also where nothing else runs" in impossible.message
    core.check_invariants()


def test_a_worker_that_begins_in_time_is_taken_though_another_is_cheaper() -> None:
    core, index = make_core("ab", CoreConfig(service=StepTimes(prefill_s_per_token=1e-3), queue=QueueConfig()))
    prompt = list(range(3000))
    index.store(core.workers["a"].holders[0], prompt[:2900])
    core.route(request("busy", list(range(5000, 5800)), worker="a", output_tokens_max=1), 0.0)
    plain = core.explain(request("r", prompt, output_tokens_max=1), 0.0)
    assert not isinstance(plain, Refuse)
    assert plain.worker == "a"
    refusal = core.route(request("r", prompt, ttft_s_max=0.5, output_tokens_max=1), 0.0)
    assert isinstance(refusal, Refuse), "neither begins in time"
