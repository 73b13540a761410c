"""The router core against a naive index: decisions by hand, and books that never leak whatever the stimuli' order."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from budget import examples
from core_by_hand import MODEL, chosen_worker, make_core, request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.decide.attempts import TENANTS_MAX, RetryBudget
from router.decide.config import CoreConfig, HealthConfig, LearnConfig, QueueConfig, RetryConfig, TransferConfig
from router.decide.core import RouterCore
from router.decide.load import MAX_NUM_SEQS_PRIOR
from router.decide.messages import (
    Decision,
    Enqueue,
    FailureKind,
    Forward,
    Refuse,
    ReportedUsage,
    TransferKind,
    WorkerLost,
)
from router.decide.recent_prompts import RecentPrompts
from router.decide.target import RequestPhase
from router.decide.workers import CacheView, ServedModel, TransferFacts, WorkerState
from router.index import make_index
from router.index.protocol import Scope
from simulation.steps import StepTimes


def test_goes_where_the_prefix_is_cached() -> None:
    core, index = make_core(config=CoreConfig(learn=LearnConfig(enabled=False)))
    prompt = list(range(1000))
    index.store(core.workers["b"].holders[0], prompt[:800])
    result = core.route(request("r", prompt), 1.0)
    assert chosen_worker(result) == "b"
    assert isinstance(result, Forward)
    assert result.decision.predicted_cached_tokens == 800
    # P = a * ((L - h) + (L^2 - h^2) / (2 Lq)), by hand
    assert result.decision.terms.prefill_s == pytest.approx(1e-4 * (200 + (1000**2 - 800**2) / 100_000))
    assert result.decision.terms.slowdown == pytest.approx(1 + 0.012 / (1e-4 * 2048))


@pytest.mark.parametrize(("block_size", "predicted"), [(None, 192), (64, 192), (256, 0), (128, 128)])
def test_prompts_in_flight_count_in_whole_blocks_of_the_worker(block_size: int | None, predicted: int) -> None:
    """Also before the first event: hybrid models of vLLM announce nothing of a prompt below 256 tokens."""
    core = RouterCore(make_index(), CoreConfig())
    core.add_worker(spec("a", block_size=block_size), 0.0)
    prompt = list(range(200))
    core.route(request("r1", prompt), 1.0)
    forward = core.route(request("r2", [*prompt, *range(500)]), 1.1)
    assert isinstance(forward, Forward)
    assert forward.decision.predicted_cached_tokens == predicted


def test_a_burst_with_one_prefix_stays_together_until_the_queue_costs_more() -> None:
    model = StepTimes(prefill_s_per_token=1e-3, step_tokens=200)
    core, _ = make_core("abcd", CoreConfig(service=model, learn=LearnConfig(enabled=False)))
    prompt = list(range(200))
    requests = [request(f"r{i}", prompt + [5000 + i] * 4, output_tokens_max=4) for i in range(40)]
    workers = [chosen_worker(core.route(route_request, 1.0)) for route_request in requests]
    assert workers[0] == workers[1] == workers[2]
    assert len(set(workers)) > 1, "a hot prefix spreads when waiting costs more than prefilling it again"


def test_ties_rotate() -> None:
    core, _ = make_core("abc")
    first = {chosen_worker(core.route(request(f"r{i}", [i] * 5), float(i * 100_000))) for i in range(1)}
    for i in range(1, 3):
        core.finish_request(f"r{i - 1}", None, i * 1e5 - 1)
        first.add(chosen_worker(core.route(request(f"r{i}", [i] * 5), i * 1e5)))
    assert first == {"a", "b", "c"}


def test_pins_outlive_a_finish_by_the_grace_and_an_early_abort_by_nothing() -> None:
    core, index = make_core("a", CoreConfig(pin_grace_s=1.0))
    core.route(request("r1", [1, 2, 3]), 0.0)
    core.record_first_token("r1", 0.1)
    core.finish_request("r1", None, 0.2)
    assert len(index.pins) == 1
    wake = core.next_tick()
    assert wake == pytest.approx(1.2)
    core.tick(1.2)
    assert not index.pins
    core.route(request("r2", [1, 2, 3]), 2.0)
    core.abort_request("r2", 2.1)
    assert not index.pins


def test_an_ended_request_whose_first_token_is_still_estimated_holds_no_prompt() -> None:
    core, _ = make_core("a")
    core.route(request("r", [1, 2, 3], is_streaming=False), 0.0)
    (attempt,) = core.get_attempts().values()
    assert attempt.in_flight.prompt is not None
    core.abort_request("r", 0.001)
    assert attempt.in_flight.prompt is None


def test_what_a_worker_refused_does_not_count_as_cached_there() -> None:
    core, index = make_core("a", CoreConfig(pin_grace_s=1.0))
    core.route(request("r1", [1, 2, 3]), 0.0)
    core.finish_request("r1", None, 0.2, is_error=True)
    assert not index.pins


def test_retry_goes_elsewhere_then_gives_up() -> None:
    core, _ = make_core("abc", CoreConfig(health=HealthConfig(failures_to_open=5)))
    workers = [chosen_worker(core.route(request("r", [1, 2, 3]), 0.0))]
    for _ in range(2):
        (retry,) = core.fail_attempt("r", FailureKind.SERVER_ERROR, 0.1)
        workers.append(chosen_worker(retry))
    assert sorted(workers) == ["a", "b", "c"]
    (refusal,) = core.fail_attempt("r", FailureKind.SERVER_ERROR, 0.2)
    assert isinstance(refusal, Refuse)
    assert refusal.status == 502
    assert not core.get_attempts()


def test_a_retry_is_not_taken_to_be_as_far_as_the_attempt_that_failed() -> None:
    """Answers that do not stream: the first token of each attempt is estimated from when that attempt began."""
    core, _ = make_core()
    core.route(request("r", list(range(10_000)), is_streaming=False), 0.0)
    prefill_s = core.get_attempts()["r"].decision.predicted_ttft_s
    core.fail_attempt("r", FailureKind.SERVER_ERROR, 0.9 * prefill_s)
    core.tick(1.1 * prefill_s)
    assert core.get_attempts()["r"].in_flight.phase is RequestPhase.PREFILL
    core.tick(2.0 * prefill_s)
    assert core.get_attempts()["r"].in_flight.phase is RequestPhase.DECODE
    core.check_invariants()


def test_nothing_is_retried_after_the_first_byte() -> None:
    core, _ = make_core()
    core.route(request("r", [1, 2, 3]), 0.0)
    core.record_first_token("r", 0.1)
    assert core.fail_attempt("r", FailureKind.STREAM, 0.2) == []
    assert not core.get_attempts()


def test_a_refused_connection_takes_the_worker_out_and_says_so() -> None:
    core, _ = make_core()
    dead = chosen_worker(core.route(request("r", [1, 2, 3]), 0.0))
    instructions = core.fail_attempt("r", FailureKind.CONNECT, 0.1)
    other = chosen_worker(instructions[0])
    assert other != dead
    assert WorkerLost(dead) in instructions
    for i in range(10):
        assert chosen_worker(core.route(request(f"x{i}", [i]), 0.2)) == other
    core.tick(1.2)
    assert core.workers[dead].state is WorkerState.PROBING
    assert core.mark_worker_up(dead, 1.3) == []
    assert core.workers[dead].state is WorkerState.UP


def test_no_request_tries_a_machine_between_two_checks_that_take_long() -> None:
    """Each check of a machine that is cut off takes 5 s, and so did each request that tried it between two checks."""
    core, _ = make_core("ab")
    for second in range(90):
        if second % 6 == 0:
            core.mark_worker_down("a", second, "no answer", pause_s=11.0)
        core.tick(second)
        assert chosen_worker(core.route(request(f"r{second}", [second]), second)) == "b"
        core.finish_request(f"r{second}", None, second)
    core.mark_worker_down("b", 90.0, "no answer", pause_s=11.0)
    refusal = core.route(request("refused", [1]), 91.0)
    assert isinstance(refusal, Refuse)
    assert refusal.retry_after_s == 1.0, "a check may succeed sooner"
    core.mark_worker_up("a", 92.0)
    assert chosen_worker(core.route(request("up", [1]), 92.0)) == "a"
    core.tick(101.0)
    assert core.workers["b"].state is WorkerState.PROBING, "no check has ended"


def test_a_broken_worker_gets_one_probe_at_a_time() -> None:
    core, _ = make_core("a")
    core.mark_worker_down("a", 0.0, "test")
    refusal = core.route(request("r0", [1]), 0.5)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (503, "no_worker", 1.0)
    core.tick(1.0)
    assert chosen_worker(core.route(request("r1", [1]), 1.0)) == "a"
    assert isinstance(core.route(request("r2", [1]), 1.0), Refuse), "the probe has not come back"
    core.fail_attempt("r1", FailureKind.SERVER_ERROR, 1.1)
    assert core.workers["a"].state is WorkerState.DOWN
    assert core.next_tick() == pytest.approx(3.1), "the pause has doubled"
    core.tick(3.1)
    core.route(request("r3", [1]), 3.1)
    core.finish_request("r3", None, 3.2)
    assert core.workers["a"].state is WorkerState.UP


def test_a_worker_that_goes_down_is_lost_once() -> None:
    core, _ = make_core("ab")
    assert core.mark_worker_down("a", 0.0, "no answer") == [WorkerLost("a")]
    assert core.mark_worker_down("a", 1.0, "no answer") == []
    assert core.mark_worker_down("zz", 1.0, "unknown") == []
    assert all(chosen_worker(core.route(request(f"r{i}", [i]), 1.0)) == "b" for i in range(6))


@pytest.mark.parametrize("is_seen_by_traffic", [True, False])
def test_a_worker_that_failed_requests_is_lost_once_nothing_answers_there(is_seen_by_traffic: bool) -> None:
    """A process that dies resets its requests first: these alone do not show that its cache is gone."""
    core, _ = make_core("a")
    for number in range(4):
        core.route(request(f"r{number}", [number]), 0.0)
    for number in range(3):
        assert core.fail_attempt(f"r{number}", FailureKind.STREAM, 0.1) == []
    assert core.workers["a"].state is WorkerState.DOWN
    if is_seen_by_traffic:
        assert WorkerLost("a") in core.fail_attempt("r3", FailureKind.CONNECT, 0.2)
    else:
        assert core.mark_worker_down("a", 0.2, "no answer") == [WorkerLost("a")]
    assert core.mark_worker_down("a", 1.0, "no answer") == []
    core.mark_worker_up("a", 2.0)
    assert core.mark_worker_down("a", 3.0, "no answer") == [WorkerLost("a")]


@pytest.mark.parametrize("is_seen_by_traffic", [True, False])
def test_nothing_that_was_sent_to_a_lost_worker_counts_as_cached(is_seen_by_traffic: bool) -> None:
    core, _ = make_core("ab")
    prompt = list(range(200))
    lost = chosen_worker(core.route(request("r0", prompt), 0.0))
    assert chosen_worker(core.route(request("r1", prompt, worker=lost), 0.0)) == lost
    assert core.explain(request("q", prompt, worker=lost), 0.1).terms.cached_tokens > 0  # type: ignore[union-attr]
    if is_seen_by_traffic:
        core.fail_attempt("r0", FailureKind.CONNECT, 1.0)
    else:
        core.mark_worker_down(lost, 1.0, "no answer")
    core.mark_worker_up(lost, 2.0)
    assert core.explain(request("q", prompt, worker=lost), 2.0).terms.cached_tokens == 0  # type: ignore[union-attr]
    assert core.cache_state.cleared_at_s == {lost: 1.0}
    for name in ("r0", "r1"):
        core.abort_request(name, 3.0)
    core.check_invariants()


def test_a_cleared_rank_keeps_what_was_sent_later_and_what_the_other_ranks_hold() -> None:
    core, _ = make_core("a", ranks=2)
    prompts = {rank: [rank + 1] * 200 for rank in (0, 1)}
    for rank, prompt in prompts.items():
        assert isinstance(core.route(request(f"old{rank}", prompt, worker=f"a#{rank}"), 1.0), Forward)
    core.route(request("new0", [9] * 200, worker="a#0"), 3.0)
    core.clear_worker_cache("a", 2.0, rank=0)

    def count_cached(prompt: list[int], rank: int) -> int:
        return core.explain(request("q", prompt, worker=f"a#{rank}"), 3.0).terms.cached_tokens  # type: ignore[union-attr]

    assert count_cached(prompts[0], 0) == 0
    assert count_cached(prompts[1], 1) > 0
    assert count_cached([9] * 200, 0) > 0
    core.remove_worker("a", 4.0)
    assert core.cache_state.cleared_at_s == {"a": 4.0}, "it is remembered of a worker that left"


def test_what_moves_is_a_retry_and_no_failure_of_the_worker() -> None:
    core, _ = make_core("abc", CoreConfig(retry=RetryConfig(budget_min=1, budget_ratio=0.0)))
    first = chosen_worker(core.route(request("r", [1]), 0.0))
    other = chosen_worker(core.route(request("s", [2]), 0.0))
    (retry,) = core.move_request("r", 1.0)
    assert chosen_worker(retry) != first
    assert core.workers[first].failures == 0
    assert core.move_request("s", 1.0) == [], "the budget is used up"
    assert core.get_attempts()["s"].in_flight.target.worker_id == other
    core.record_first_token("r", 2.0)
    assert core.move_request("r", 2.0) == []
    assert core.move_request("unknown", 2.0) == []


def test_a_request_of_a_lost_worker_moves_to_one_that_refused_another_request() -> None:
    core, index = make_core("ab")
    prompt = list(range(100))
    index.store(core.workers["b"].holders[0], prompt)
    assert chosen_worker(core.route(request("r", prompt), 0.0)) == "b"
    core.fail_attempt("r", FailureKind.OVERLOADED, 0.0)
    core.record_first_token("r", 0.1)
    assert core.registry.avoided_workers == {"b"}
    assert chosen_worker(core.route(request("s", prompt), 0.2)) == "a"
    core.mark_worker_down("a", 0.3, "its probes fail")
    (retry,) = core.move_request("s", 0.3)
    assert chosen_worker(retry) == "b"


def test_a_worker_that_is_avoided_for_its_refusals_is_shown_with_the_reason() -> None:
    core, index = make_core("ab")
    prompt = list(range(100))
    index.store(core.workers["a"].holders[0], prompt)
    assert chosen_worker(core.route(request("r", prompt), 0.0)) == "a"
    core.fail_attempt("r", FailureKind.OVERLOADED, 0.0)
    assert [row["state_reason"] for row in core.snapshot(0.0).workers] == ["", ""]
    core.record_first_token("r", 0.0)
    reason = "avoided for another 1 s: refuses (429, 5xx) what others serve"
    assert [(row["state"], row["state_reason"]) for row in core.snapshot(0.1).workers] == [("up", reason), ("up", "")]
    explanation = core.explain(request("s", prompt), 0.1)
    assert isinstance(explanation, Decision)
    assert explanation.not_eligible == {"a": reason}
    assert [terms.worker for terms in explanation.candidates] == ["b"]
    assert core.snapshot(0.8).workers[0]["state_reason"] == reason, "0.2 s are not shown as 0 s"
    assert [row["state_reason"] for row in core.snapshot(1.0).workers] == ["", ""]
    core.set_draining("a", 0.1)
    assert core.snapshot(0.1).workers[0]["state_reason"] == "drained by an operator"


def test_an_explanation_names_workers_that_stand_still_unless_all_do() -> None:
    core, _ = make_core("ab")
    core.stall_detector.stalled_workers = {"a": 0.0}
    core.registry.update_avoided_workers(core.stall_detector.stalled_workers, 20.0)
    explanation = core.explain(request("r", [1, 2]), 20.0)
    assert isinstance(explanation, Decision)
    assert explanation.not_eligible == {"a": "avoided: none of its streams moves"}
    core.registry.update_avoided_workers(["a", "b"], 20.0)
    explanation = core.explain(request("r", [1, 2]), 20.0)
    assert isinstance(explanation, Decision)
    assert explanation.not_eligible == {}
    assert len(explanation.candidates) == 2


def test_a_refusal_counts_at_the_next_first_token_alone() -> None:
    core, index = make_core("abc")
    prompt = list(range(100))
    index.store(core.workers["a"].holders[0], prompt)
    assert chosen_worker(core.route(request("r", prompt), 0.0)) == "a"
    core.fail_attempt("r", FailureKind.OVERLOADED, 0.0)
    core.record_first_token("r", 0.1)
    core.update_stalled_workers({}, 60.0)
    assert not core.registry.avoided_workers
    (continuation,) = core.fail_attempt("r", FailureKind.STREAM, 60.0, request("r", prompt))
    assert chosen_worker(continuation) == "a"
    core.record_first_token("r", 60.1)
    assert not core.registry.avoided_workers


def test_an_answer_that_breaks_continues_at_a_worker_that_was_overloaded_before() -> None:
    core, index = make_core("ab")
    prompt = list(range(100))
    index.store(core.workers["a"].holders[0], prompt)
    assert chosen_worker(core.route(request("r", prompt), 0.0)) == "a"
    (retry,) = core.fail_attempt("r", FailureKind.OVERLOADED, 0.0)
    assert chosen_worker(retry) == "b"
    core.record_first_token("r", 0.1)
    (continuation,) = core.fail_attempt("r", FailureKind.STREAM, 60.0, request("r", prompt))
    assert chosen_worker(continuation) == "a"


@pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.STALLED])
@pytest.mark.parametrize(
    ("stream", "others_heard", "goes_down"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_timeout_counts_where_nobody_was_answered_meanwhile(
    kind: FailureKind, stream: bool, others_heard: bool, goes_down: bool
) -> None:
    """How long a whole answer takes is its client's choice, and so is a silent stream beside others that move."""
    core, _ = make_core("a")
    for number in range(5):
        core.route(request(f"r{number}", [number], is_streaming=stream), 0.0)
    if others_heard:
        core.route(request("other", [9]), 0.0)
        core.record_first_token("other", 3.0)
    for number in range(5):
        core.fail_attempt(f"r{number}", kind, 10.0, silent_s=9.0)
    assert (core.workers["a"].state is WorkerState.DOWN) is goes_down
    core.check_invariants()


def test_a_stream_that_moves_shows_that_its_worker_is_well() -> None:
    core, _ = make_core("a")
    core.route(request("moves", [9]), 0.0)
    core.record_first_token("moves", 0.5)
    for number in range(5):
        core.route(request(f"r{number}", [number]), 1.0)
    core.record_progress("moves", 32, 6.0)
    for number in range(5):
        core.fail_attempt(f"r{number}", FailureKind.TIMEOUT, 10.0, silent_s=9.0)
    assert core.workers["a"].state is WorkerState.UP


@pytest.mark.parametrize("first", [FailureKind.RESET, FailureKind.INTERNAL, FailureKind.CONNECT])
@pytest.mark.parametrize("second", [FailureKind.RESET, FailureKind.INTERNAL, FailureKind.CONNECT])
def test_a_request_that_may_end_workers_is_retried_once(first: FailureKind, second: FailureKind) -> None:
    core, _ = make_core("abcd")
    core.route(request("r", [1]), 0.0)
    for kind, now in ((first, 0.1), (second, 0.2)):
        # a worker that takes the request on a kept connection, and cannot be reached then, may have been ended by it
        instruction, *_ = core.fail_attempt("r", kind, now, was_sent=kind is FailureKind.CONNECT)
        assert isinstance(instruction, Forward if now < 0.2 else Refuse)
    core.check_invariants()


def test_a_stream_that_ends_workers_before_its_first_token_goes_on_once() -> None:
    core, _ = make_core("abcd")
    route_request = request("r", [1])
    core.route(route_request, 0.0)
    assert isinstance(core.fail_attempt("r", FailureKind.STREAM, 0.1, route_request)[0], Forward)
    assert isinstance(core.fail_attempt("r", FailureKind.RESET, 0.2)[0], Refuse)
    core.check_invariants()


def test_workers_that_cannot_be_reached_are_no_request_s_doing() -> None:
    core, _ = make_core("abcd")
    core.route(request("r", [1]), 0.0)
    assert isinstance(core.fail_attempt("r", FailureKind.CONNECT, 0.1)[0], Forward)
    assert isinstance(core.fail_attempt("r", FailureKind.CONNECT, 0.2)[0], Forward)


def test_no_tenant_uses_up_the_retries_of_others() -> None:
    config = CoreConfig(retry=RetryConfig(budget_min=3, budget_ratio=0.0), health=HealthConfig(failures_to_open=10_000))
    core, _ = make_core("abcd", config)
    outcomes: Counter[tuple[str, str]] = Counter()
    for i in range(20):
        for tenant in ("loud", "quiet") if i == 10 else ("loud",):
            core.route(request(f"{tenant}{i}", [i], tenant=tenant), 0.0)
            instruction = core.fail_attempt(f"{tenant}{i}", FailureKind.SERVER_ERROR, 0.1)[0]
            outcomes[tenant, type(instruction).__name__] += 1
    assert outcomes == {("loud", "Forward"): 3, ("loud", "Refuse"): 17, ("quiet", "Forward"): 1}


def test_the_tenants_whose_retries_are_counted_are_bounded() -> None:
    budget = RetryBudget(RetryConfig(budget_min=1, budget_ratio=0.0))
    for number in range(2 * TENANTS_MAX):
        budget.add_request(str(number))
        assert budget.spend_retry(str(number), 1)
        assert not budget.spend_retry(str(number), 1)
    assert len(budget) == TENANTS_MAX


def test_the_retry_budget_ends_a_storm() -> None:
    config = CoreConfig(retry=RetryConfig(budget_min=3, budget_ratio=0.0), health=HealthConfig(failures_to_open=10_000))
    core, _ = make_core("abcd", config)
    outcomes: Counter[str] = Counter()
    for i in range(20):
        core.route(request(f"r{i}", [i]), 0.0)
        for instruction in core.fail_attempt(f"r{i}", FailureKind.SERVER_ERROR, 0.1):
            outcomes[type(instruction).__name__] += 1
    assert outcomes == {"Forward": 3, "Refuse": 17}


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.INTERNAL, FailureKind.RESET])
def test_a_worker_that_refuses_what_another_serves_is_avoided_for_growing_pauses(kind: FailureKind) -> None:
    core, index = make_core("ab", CoreConfig(health=HealthConfig(failures_to_open=9)))
    prompt = list(range(100))
    index.store(core.workers["a"].holders[0], prompt)

    def try_at_a(request_id: str, now: float, *, is_served_by_b: bool) -> None:
        assert chosen_worker(core.route(request(request_id, prompt), now)) == "a"
        core.fail_attempt(request_id, kind, now)
        core.finish_request(request_id, None, now, is_error=not is_served_by_b)

    try_at_a("r1", 0.0, is_served_by_b=False)
    try_at_a("r2", 1.0, is_served_by_b=True)
    assert chosen_worker(core.route(request("r3", prompt), 1.5)) == "b"
    core.abort_request("r3", 1.5)
    core.update_stalled_workers({}, 2.0)
    try_at_a("r4", 2.0, is_served_by_b=True)
    core.update_stalled_workers({}, 3.5)
    assert chosen_worker(core.route(request("r5", prompt), 3.5)) == "b"
    core.abort_request("r5", 3.5)
    core.update_stalled_workers({}, 4.0)
    assert chosen_worker(core.route(request("r6", prompt), 4.0)) == "a"
    core.set_draining("b", 4.0)
    core.finish_request("r6", None, 4.0)
    try_at_a("r7", 5.0, is_served_by_b=False)


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"model": "other"}, 404, "unknown_model"),
        ({"worker": "zz"}, 404, "unknown_worker"),
        ({"role": "prefill"}, 404, "unknown_role"),
        ({"prompt_tokens": 200_000, "token_ids": range(200_000)}, 400, "context_length_exceeded"),
    ],
)
def test_refusals_name_what_is_wrong(changes: dict[str, object], status: int, code: str) -> None:
    core, _ = make_core()
    refusal = core.route(request("r", [1, 2], **changes), 0.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.code) == (status, code)
    core.check_invariants()


def test_eligibility_comes_before_cost() -> None:
    core, index = make_core("ab")
    core.add_worker(spec("c", roles=frozenset({"big"})), 0.0)
    prompt = list(range(100))
    index.store(core.workers["a"].holders[0], prompt)
    assert chosen_worker(core.route(request("r1", prompt, worker="b"), 0.0)) == "b"
    assert chosen_worker(core.route(request("r2", prompt, role="big"), 0.0)) == "c"
    core.set_draining("a", 0.0)
    assert chosen_worker(core.route(request("r3", prompt), 0.0)) != "a"
    core.set_draining("a", 0.0, is_draining=False)
    core.add_worker(spec("a", models=(ServedModel(MODEL, MODEL, max_model_len=50),)), 0.0)
    assert chosen_worker(core.route(request("r4", prompt), 0.0)) != "a"


def test_models_merge_and_loras_resolve() -> None:
    core, _ = make_core("a")
    core.add_worker(spec("b", models=(ServedModel("n", "n"), ServedModel("tuned", "n", lora="tuned"))), 0.0)
    assert set(core.registry.get_served_models()) == {"m", "n", "tuned"}
    assert core.resolve_model("tuned") == ServedModel("tuned", "n", lora="tuned")
    lora_request = request("r", [1, 2]).replace(model="tuned", scope=Scope("n", lora="tuned"))
    assert chosen_worker(core.route(lora_request, 0.0)) == "b"


def test_session_affinity_keeps_a_session_while_its_worker_lives() -> None:
    core, _ = make_core("abcd", CoreConfig(session_affinity=True))
    first = chosen_worker(core.route(request("r0", [1], session="s"), 0.0))
    for i in range(1, 8):
        assert chosen_worker(core.route(request(f"r{i}", [i] * 50, session="s"), 0.0)) == first
    core.mark_worker_down(first, 0.1, "test")
    assert chosen_worker(core.route(request("r9", [1], session="s"), 0.2)) != first


def test_session_affinity_holds_beside_a_queue() -> None:
    core, _ = make_core("ab", CoreConfig(session_affinity=True, queue=QueueConfig(fair=True)))
    core.route(request("first", [1], session="s", worker="a"), 0.0)
    for i in range(2):
        core.route(request(f"long{i}", None, prompt_tokens=50_000, worker="a"), 0.0)
    assert isinstance(core.route(request("next", [1] * 50, session="s"), 0.0), Enqueue), "a is busy, and b is idle"


def test_sticky_moves_only_the_lost_workers_sessions() -> None:
    core, _ = make_core("abcd", CoreConfig(policy="sticky"))
    before = {f"s{i}": chosen_worker(core.route(request(f"r{i}", [1], session=f"s{i}"), 0.0)) for i in range(40)}
    assert set(before.values()) == set("abcd")
    core.mark_worker_down("a", 1.0, "test")
    for i, (session, worker) in enumerate(before.items()):
        now = chosen_worker(core.route(request(f"x{i}", [1], session=session), 1.0))
        assert now == worker or worker == "a"


def test_a_worker_without_events_is_known_by_what_was_sent_there() -> None:
    core, _ = make_core("ab", cache_view=CacheView.APPROXIMATE, cache_tokens=64 * 40)
    prompt = list(range(64 * 30 + 1))
    first = core.route(request("r0", prompt), 0.0)
    core.finish_request("r0", None, 1.0)
    second = core.route(request("r1", prompt), 100.0)
    assert chosen_worker(second) == chosen_worker(first)
    assert isinstance(second, Forward)
    assert second.decision.predicted_cached_tokens == 64 * 30
    core.finish_request("r1", None, 101.0)
    other = [10_000 + i for i in range(64 * 30)]
    core.route(request("r2", other, worker=chosen_worker(first)), 200.0)
    explanation = core.explain(request("r3", prompt), 201.0)
    assert not isinstance(explanation, Refuse)
    by_worker = {t.worker: t.cached_tokens for t in explanation.candidates}
    assert by_worker[chosen_worker(first)] < 64 * 30, "the older prompt was evicted in part"


def test_sizes_that_a_worker_tells_later_replace_the_earlier_ones() -> None:
    """An engine that came back smaller, or told nothing at first: its caches and slots are of the new size."""
    core, _ = make_core("a", cache_view=CacheView.APPROXIMATE, cache_tokens=64 * 40, max_num_seqs=8)
    capacity = core.registry.get_targets("a")[0].capacity
    assert capacity.max_num_seqs == 8
    spec = dataclasses.replace(core.workers["a"].spec, cache_tokens=64 * 10, max_num_seqs=None)
    core.add_worker(spec, 0.0)
    assert capacity.max_num_seqs == MAX_NUM_SEQS_PRIOR
    prompt = list(range(64 * 30 + 1))
    core.route(request("r0", prompt), 0.0)
    core.finish_request("r0", None, 1.0)
    later = core.route(request("r2", prompt), 200.0)
    assert isinstance(later, Forward)
    assert later.decision.predicted_cached_tokens == 64 * 10


def test_data_parallel_ranks_are_candidates_of_their_own() -> None:
    core, index = make_core("a", ranks=2)
    prompt = list(range(500))
    index.store(core.workers["a"].holders[1], prompt)
    result = core.route(request("r", prompt), 0.0)
    assert isinstance(result, Forward)
    assert (result.decision.worker, result.decision.rank, result.decision.terms.worker) == ("a", 1, "a#1")


def test_a_rank_that_a_client_names_is_its_worker_s() -> None:
    core, _ = make_core("ab", ranks=2)
    served = next(iter(core.workers["a"].models))
    assert core.registry.is_model_served(served, "a#1")
    assert not core.registry.is_model_served(served, "a#2")
    core.set_draining("a", 0.0)
    explanation = core.explain(request("r", [1, 2], worker="b#1"), 0.0)
    assert isinstance(explanation, Decision)
    assert explanation.not_eligible == {"a": "draining"}
    for worker, status in (("a#1", 503), ("a", 503), ("a#2", 404)):
        refused = core.route(request(f"r {worker}", list(range(9)), worker=worker), 0.0)
        assert isinstance(refused, Refuse)
        assert refused.status == status


def test_explain_changes_nothing_and_agrees_with_route() -> None:
    core, index = make_core("abc")
    prompt = list(range(300))
    index.store(core.workers["c"].holders[0], prompt[:200])
    core.set_draining("b", 0.0)
    explanation = core.explain(request("r", prompt), 0.0)
    assert not isinstance(explanation, Refuse)
    assert [t.worker for t in explanation.candidates] == ["c", "a"]
    assert explanation.not_eligible == {"b": "draining"}
    assert not core.get_attempts()
    assert not index.pins
    result = core.route(request("r", prompt), 0.0, explain=True)
    assert isinstance(result, Forward)
    assert result.decision.candidates == explanation.candidates


HOLDING = CoreConfig(queue=QueueConfig(fair=True, enqueue_above_s=0.5, requests_max=5, wait_s_max=5.0))
"""One tenant alone may hold three requests of five."""


def test_held_requests_go_at_a_first_token_as_they_came() -> None:
    core, _ = make_core("a", HOLDING)
    assert isinstance(core.route(request("big", None, prompt_tokens=8000), 0.0), Forward)
    assert isinstance(core.route(request("long", None, prompt_tokens=4000), 0.0), Enqueue)
    assert isinstance(core.route(request("short", None, prompt_tokens=100), 0.0), Enqueue)
    assert core.tick(0.1) == []
    core.check_invariants()
    instructions = core.record_first_token("big", 1.0)
    assert [i.request_id for i in instructions if isinstance(i, Forward)] == ["long", "short"]
    assert all(isinstance(i, Forward) and i.decision.queued_s == 1.0 for i in instructions)


def test_priority_beats_arrival_in_the_held_queue() -> None:
    core, _ = make_core("a", HOLDING)
    core.route(request("big", None, prompt_tokens=20_000), 0.0)
    core.route(request("short", None, prompt_tokens=6000), 0.0)
    core.route(request("urgent", None, prompt_tokens=8000, priority=-1), 0.0)
    instructions = core.record_first_token("big", 3.0)
    assert [i.request_id for i in instructions if isinstance(i, Forward)] == ["urgent"]


def test_a_hot_prefix_spreads_though_requests_are_held_for_it() -> None:
    """What is held for a worker counts as waiting there. Counting only what was sent, every request with the hot prefix
    would be held for its one worker while the other is idle: in the simulation, mean TTFT 16 times the bound."""
    config = CoreConfig(
        service=StepTimes(prefill_s_per_token=1e-3, step_tokens=200),
        learn=LearnConfig(enabled=False),
        queue=QueueConfig(fair=True, enqueue_above_s=0.05),
    )
    core, index = make_core("ab", config)
    hot = list(range(300))
    index.store(core.workers["a"].holders[0], hot)
    placements = [core.route(request(f"r{i}", [*hot, *([1000 + i] * 60)]), 0.0) for i in range(20)]
    workers = {chosen_worker(p) for p in placements if isinstance(p, Forward)}
    queued_for = {core._placer.queue.requests[p.request_id].target for p in placements if isinstance(p, Enqueue)}
    assert "b" in workers | queued_for
    instructions = core.tick(0.05)
    assert all(isinstance(i, Forward) for i in instructions)


def test_the_held_queue_is_bounded_and_keeps_its_deadlines() -> None:
    core, _ = make_core("a", HOLDING)
    core.route(request("big", None, prompt_tokens=90_000), 0.0)
    placements = [core.route(request(f"h{i}", None, prompt_tokens=50), 0.0) for i in range(2)]
    with_deadline = core.route(request("dated", None, prompt_tokens=50, deadline_s=2.0), 0.0)
    assert all(isinstance(h, Enqueue) for h in [*placements, with_deadline])
    refusal = core.route(request("h3", None), 0.0)
    assert isinstance(refusal, Refuse)
    assert (refusal.status, refusal.code) == (429, "queue_full")
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s > 1.0
    (late,) = core.tick(2.0)
    assert isinstance(late, Refuse)
    assert (late.request_id, late.code) == ("dated", "deadline")
    instructions = core.tick(5.0)
    assert all(isinstance(i, Refuse) and i.code == "queue_full" for i in instructions), "nobody else pays for its wait"
    assert [getattr(i, "request_id", None) for i in instructions] == ["h0", "h1"]


def test_usage_feeds_the_watchdog() -> None:
    core, _ = make_core("a")
    for i in range(50):
        core.route(request(f"r{i}", list(range(i, i + 30))), float(i))
        core.record_first_token(f"r{i}", i + 0.1)
        core.finish_request(f"r{i}", ReportedUsage(prompt_tokens=37, cached_tokens=0), i + 0.2)
    alarms = core.snapshot(60.0).workers[0]["alarms"]
    assert any(alarm.startswith("prompt_tokens:") for alarm in alarms)


HUGE = 4_000_000


def test_an_estimate_never_refuses_and_a_count_does() -> None:
    core, _ = make_core("ab")
    estimate_result = core.route(request("guess", prompt_tokens=HUGE), 0.0)
    assert isinstance(estimate_result, Forward)
    assert not isinstance(core.explain(request("asked", prompt_tokens=HUGE), 0.0), Refuse)
    exact_result = core.route(request("counted", range(100_001)), 0.0)
    assert isinstance(exact_result, Refuse)
    assert exact_result.code == "context_length_exceeded"


@pytest.mark.parametrize("end", ["refused", "aborted", "reset", "overloaded"])
def test_what_was_not_computed_is_taken_back(end: str) -> None:
    """A prompt that nobody computes must not make its worker dear for the minute that utilisation is averaged over."""
    core, _ = make_core("ab", models=(ServedModel(MODEL, MODEL),))
    rng = random.Random(3)
    utilisation = 0.0
    now = 0.0
    huge = list(range(HUGE))
    for number in range(10):
        now += rng.random() * 100
        for name, ids in (("small", huge[:100]), ("huge", huge)):
            core.route(request(f"{name}{number}", ids, worker="a"), now)
        core.record_first_token(f"small{number}", now)
        core.finish_request(f"small{number}", None, now)
        if end == "refused":
            core.finish_request(f"huge{number}", None, now + 1, is_error=True)
        elif end == "aborted":
            core.abort_request(f"huge{number}", now + 1)
        else:
            core.fail_attempt(f"huge{number}", FailureKind.RESET if end == "reset" else FailureKind.OVERLOADED, now + 1)
        core.mark_worker_up("a", now + 1)
        (row,) = [row for row in core.snapshot(now + 1).workers if row["target"] == "a"]
        utilisation = max(utilisation, row["utilisation"])
        core.check_invariants()
    assert utilisation < 0.01
    assert {chosen_worker(core.route(request(f"then{n}", [n] * 9), now + 2)) for n in range(2)} == {"a", "b"}


def test_one_incident_is_one_pause() -> None:
    """Ten requests that time out together say one thing, not ten."""
    core, _ = make_core("a", CoreConfig(health=HealthConfig(open_s=1.0), retry=RetryConfig(attempts_max=1)))
    for number in range(10):
        core.route(request(f"r{number}", [number]), 0.0)
    for number in range(10):
        core.fail_attempt(f"r{number}", FailureKind.TIMEOUT, 5.0 + number / 100)
    assert core.workers["a"].state is WorkerState.DOWN
    assert core.workers["a"].open_until_s == pytest.approx(6.02)
    core.route(request("held up", [1]), 6.0)
    core.tick(6.1)
    core.route(request("probe", [1]), 6.1)
    core.fail_attempt("probe", FailureKind.TIMEOUT, 7.0)
    assert core.workers["a"].open_until_s == pytest.approx(9.0), "a probe that fails doubles the pause"


def test_a_probe_that_its_client_gives_up_is_followed_by_another() -> None:
    core, _ = make_core("a", CoreConfig(health=HealthConfig(open_s=1.0)))
    core.mark_worker_down("a", 0.0, "gone")
    core.tick(1.5)
    core.route(request("first", [1]), 1.5)
    core.abort_request("first", 1.6)
    assert chosen_worker(core.route(request("second", [1]), 1.7)) == "a"


def test_a_drained_worker_that_dies_is_lost_and_not_taken_back_as_well() -> None:
    core, _ = make_core("ab")
    changes: list[tuple[str, str]] = []
    core.registry.on_state_change = lambda worker, before: changes.append((worker.worker_id, worker.state.value))
    core.set_draining("a", 0.0)
    assert core.workers["a"].state_reason == "drained by an operator"
    assert core.mark_worker_down("a", 1.0, "refused") == [WorkerLost("a")]
    assert core.workers["a"].state_reason == "drained by an operator; down: refused"
    assert core.mark_worker_down("a", 1.5, "refused") == []
    core.set_draining("a", 2.0, is_draining=False)
    assert core.workers["a"].state is WorkerState.DOWN
    assert chosen_worker(core.route(request("r", [1]), 2.0)) == "b"
    core.mark_worker_up("a", 3.0)
    core.set_draining("a", 4.0)
    core.mark_worker_down("a", 5.0, "refused")
    core.mark_worker_up("a", 6.0)
    core.set_draining("a", 7.0, is_draining=False)
    assert core.workers["a"].state is WorkerState.UP
    states = ["draining", "down", "up", "draining", "up"]
    assert changes == [("a", state) for state in states]


class Books(RuleBasedStateMachine):
    """Any order of stimuli: books agree after each, a dead worker is never chosen, all is zero at the end."""

    NAMES = "abc"

    @initialize(
        fair=st.booleans(),
        policy=st.sampled_from(["kv", "kv", "round_robin", "least_requests", "sticky"]),
        can_move_kv=st.booleans(),
    )
    def start(self, fair: bool, policy: str, can_move_kv: bool) -> None:
        config = CoreConfig(
            policy=policy,
            transfer=TransferConfig(floor_s=0.0),
            queue=QueueConfig(
                fair=fair,
                enqueue_above_s=0.05,
                requests_max=5,
                wait_s_max=3.0,
                background_priority=2,
                background_running=1,
                background_wait_s_max=3.0,
            ),
        )
        recent_prompts = RecentPrompts(chunk_tokens=4, recent_s=5.0)
        facts = TransferFacts("g", frozenset(TransferKind)) if can_move_kv else TransferFacts()
        self.core, self.index = make_core(self.NAMES, config, recent_prompts, cache_tokens=20, transfer=facts)
        self.now = 0.0
        self.count = 0
        self.open: dict[str, str] = {}
        """request -> "held" or "sent", as the edge knows it."""
        self.streaming_ids: set[str] = set()
        self.queued_since: dict[str, float] = {}

    def apply(self, instructions: Sequence[object]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Forward):
                state = self.core.workers[instruction.decision.worker].state
                assert state in (WorkerState.UP, WorkerState.PROBING), f"sent to a worker that is {state}"
                self.open[instruction.request_id] = "sent"
                self.queued_since.pop(instruction.request_id, None)
            elif isinstance(instruction, Enqueue):
                self.open[instruction.request_id] = "held"
                self.queued_since.setdefault(instruction.request_id, self.now)
            elif isinstance(instruction, Refuse):
                self.open.pop(instruction.request_id, None)
                self.streaming_ids.discard(instruction.request_id)
                self.queued_since.pop(instruction.request_id, None)

    def pick(self, data: st.DataObject, kinds: Sequence[str] = ("sent",)) -> str:
        return data.draw(st.sampled_from(sorted(r for r, state in self.open.items() if state in kinds)))

    @rule(
        tokens=st.integers(1, 3000),
        family=st.integers(0, 2),
        stream=st.booleans(),
        blind=st.booleans(),
        priority=st.integers(0, 2),
        ttft_s=st.sampled_from([None, None, None, 0.01, 1.0]),
    )
    def route(self, tokens: int, family: int, stream: bool, blind: bool, priority: int, ttft_s: float | None) -> None:
        self.count += 1
        prompt = None if blind else [family] * min(tokens, 12)
        changes = {"prompt_tokens": tokens} if blind else {}
        changes |= {"tenant": str(tokens % 3), "ttft_s_max": ttft_s}
        new = request(f"r{self.count}", prompt, is_streaming=stream, priority=priority, **changes)
        self.apply([self.core.route(new, self.now)])

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        self.streaming_ids.add(request_id)
        self.apply(self.core.record_first_token(request_id, self.now))

    @rule(name=st.sampled_from(NAMES), family=st.integers(0, 2), tokens=st.integers(1, 12))
    def store(self, name: str, family: int, tokens: int) -> None:
        if name in self.core.workers:
            self.index.store(self.core.workers[name].holders[0], [family] * tokens)

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data(), has_failed=st.booleans())
    def transfer(self, data: st.DataObject, has_failed: bool) -> None:
        """The edge says what it heard, also of requests whose KV does not move."""
        end_transfer = self.core.fail_transfer if has_failed else self.core.record_prefill_end
        self.apply(end_transfer(self.pick(data), self.now))

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data(), tokens=st.integers(1, 500))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        self.core.record_progress(self.pick(data), tokens)

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request_id = self.pick(data)
        del self.open[request_id]
        self.apply(self.core.finish_request(request_id, ReportedUsage(10, 5, 3), self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = self.pick(data, ("sent", "held"))
        del self.open[request_id]
        self.queued_since.pop(request_id, None)
        self.apply(self.core.abort_request(request_id, self.now))

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data(), kind=st.sampled_from(list(FailureKind)))
    def fail(self, data: st.DataObject, kind: FailureKind) -> None:
        request_id = self.pick(data)
        is_forgotten = kind in (FailureKind.STALLED, FailureKind.STREAM) or request_id in self.streaming_ids
        instructions = self.core.fail_attempt(request_id, kind, self.now)
        if is_forgotten:
            del self.open[request_id]
        else:
            mine = [i for i in instructions if getattr(i, "request_id", None) == request_id]
            assert mine, "a request that failed before its first byte is answered"
        self.apply(instructions)

    @precondition(lambda self: "sent" in self.open.values())
    @rule(data=st.data(), is_stalled=st.booleans())
    def move(self, data: st.DataObject, is_stalled: bool) -> None:
        request_id = self.pick(data)
        before = self.core.get_attempts()[request_id]
        instructions = self.core.move_request(request_id, self.now, is_stalled=is_stalled)
        if instructions:
            assert request_id not in self.streaming_ids
            assert not isinstance(instructions[0], Refuse), "it could have stayed where it was"
        else:
            assert self.core.get_attempts()[request_id] is before
        self.apply(instructions)

    @rule(name=st.sampled_from(NAMES), change=st.sampled_from(["up", "down", "drain", "undrain", "remove", "add"]))
    def worker(self, name: str, change: str) -> None:
        core = self.core
        if change == "add":
            core.add_worker(spec(name), self.now)
        elif name not in core.workers:
            return
        elif change == "up":
            self.apply(core.mark_worker_up(name, self.now))
        elif change == "down":
            self.apply(core.mark_worker_down(name, self.now, "test"))
        elif change in ("drain", "undrain"):
            self.apply(core.set_draining(name, self.now, is_draining=change == "drain"))
        else:
            self.apply(core.remove_worker(name, self.now))

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.4, 2.0]))
    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (wake := self.core.next_tick()) is not None and wake <= end:
            self.now = max(self.now, wake)
            self.apply(self.core.tick(self.now))
            if self.core.next_tick() == wake:
                break
        self.now = end
        self.apply(self.core.tick(self.now))

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_invariants()
        assert set(self.core.get_attempts()) == {r for r, state in self.open.items() if state == "sent"}
        for request_id, queued_s in self.queued_since.items():
            assert self.now - queued_s <= 3.0 + 0.05, f"{request_id} has been held for too long"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.open:
            request_id = next(iter(self.open))
            del self.open[request_id]
            self.queued_since.pop(request_id, None)
            end = self.core.abort_request(request_id, self.now)
            self.apply(end)
        self.core.tick(self.now + 10.0)
        self.core.check_invariants()
        assert not self.core.get_attempts()
        assert not self.index.pins
        for target in self.core.tracker.targets.values():
            assert (target.load.request_count, target.load.decode_request_count, target.load.decode_context_tokens) == (
                0,
                0,
                0,
            )
            assert target.prefill_queue.own_prefill_s == 0.0
            assert (target.load.incoming_transfers, target.load.outgoing_transfers) == (0, 0)
        snapshot = self.core.snapshot(self.now + 10.0)
        assert (snapshot.queued_requests, snapshot.in_flight) == (0, 0)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


def test_a_worker_whose_events_cannot_be_read_has_an_alarm_while_it_is_up() -> None:
    core, _ = make_core("ab")
    core.watchdog.list_unreachable_endpoints = {"a": ["tcp://gpu1:5999"], "b": []}.__getitem__

    def alarms_of(worker_id: str) -> list[str]:
        (row,) = [row for row in core.snapshot(1.0).workers if row["worker_id"] == worker_id]
        return row["alarms"]

    (alarm,) = alarms_of("a")
    assert alarm.startswith("unreachable: no events can be read from tcp://gpu1:5999")
    assert alarms_of("b") == []
    core.mark_worker_down("a", 1.0, "test")
    assert alarms_of("a") == []
