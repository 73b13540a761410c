"""Plans in which KV moves: chosen as a model chooses that prices every pair of workers, and counted at both ends."""

from __future__ import annotations

import gc
import math
import random
from dataclasses import replace

import pytest
from core_by_hand import NaiveIndex, make_core, request, spec
from hypothesis import given
from hypothesis import strategies as st

from router.decide.config import CoreConfig, LearnConfig, QueueConfig, TransferConfig
from router.decide.core import RouterCore
from router.decide.messages import (
    Decision,
    Enqueue,
    FailureKind,
    Forward,
    Refuse,
    ReportedUsage,
    Transfer,
    TransferKind,
)
from router.decide.target import InFlightRequest
from router.decide.transfers.links import PAUSE_S, PAUSE_S_MAX, TransferLinks
from router.decide.workers import BLOCKCAST, TransferFacts
from simulation.steps import StepTimes

BYTES_PER_TOKEN = 1e6
PULLS = TransferFacts("g", frozenset({TransferKind.PULL}), bytes_per_token=BYTES_PER_TOKEN)
PREFILLS = TransferFacts("g", frozenset({TransferKind.PREFILL}), bytes_per_token=BYTES_PER_TOKEN)
CONFIG = CoreConfig(
    service=StepTimes(prefill_s_per_token=1e-3),
    learn=LearnConfig(enabled=False),
    transfer=TransferConfig(gb_s=10.0, floor_s=0.01),
)
PROMPT = list(range(400))


def make_fleet(names: str = "ab", **facts: TransferFacts) -> tuple[RouterCore, NaiveIndex]:
    core, index = make_core(names, CONFIG)
    for name in names:
        core.add_worker(spec(name, transfer=facts.get(name, PULLS)), 0.0)
    return core, index


def route(core: RouterCore, request_id: str, prompt: list[int], now: float, **changes: object) -> Decision:
    instruction = core.route(request(request_id, prompt, **changes), now)
    core.check_invariants()
    assert isinstance(instruction, Forward)
    return instruction.decision


def make_busy(core: RouterCore, worker: str, now: float, count: int = 3) -> None:
    for number in range(count):
        core.route(request(f"busy-{worker}{number}", None, prompt_tokens=1000, worker=worker), now)


def test_an_idle_worker_pulls_what_a_busy_one_has() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.worker == "b"
    transfer_s = 0.01 + 390 * BYTES_PER_TOKEN / 10e9
    assert decision.transfer == Transfer(TransferKind.PULL, "a", None, 390, pytest.approx(transfer_s))
    assert decision.predicted_cached_tokens == decision.terms.cached_tokens == 390
    assert decision.terms.resident_tokens == 0
    assert decision.predicted_ttft_s == pytest.approx(transfer_s + decision.terms.slowdown * decision.terms.prefill_s)
    assert decision.to_json_fields()["terms"]["transfer"]["source"] == "a"


def test_what_the_destination_has_does_not_move() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    index.store(core.workers["b"].holders[0], PROMPT[:200])
    make_busy(core, "a", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    assert (decision.worker, decision.transfer.tokens) == ("b", 190)


@pytest.mark.parametrize(
    "facts",
    [
        {"a": TransferFacts()},
        {"a": replace(PULLS, group="other")},
        {"a": replace(PULLS, kinds=frozenset({TransferKind.PREFILL}))},
        {"a": replace(PULLS, can_give=False)},
        {"b": replace(PULLS, can_take=False)},
    ],
    ids=["says nothing", "other group", "other kind", "does not give", "does not take"],
)
def test_no_kv_moves_between_workers_that_do_not_fit(facts: dict[str, TransferFacts]) -> None:
    core, index = make_fleet(**facts)
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is None
    assert "transfer" not in decision.to_json_fields()["terms"]


@pytest.mark.parametrize("policy", ["round_robin", "least_requests", "sticky"])
def test_other_policies_move_nothing(policy: str) -> None:
    core, index = make_core("ab", replace(CONFIG, policy=policy))
    for name in "ab":
        core.add_worker(spec(name, transfer=PULLS), 0.0)
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    for number in range(4):
        assert route(core, f"r{number}", PROMPT, 0.0).transfer is None


def test_the_explanation_has_the_plans_beside_the_workers() -> None:
    core, index = make_fleet("abc")
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    decision = core.explain(request("r", PROMPT), 0.0)
    assert isinstance(decision, Decision)
    plans = [(terms.worker, terms.transfer.source if terms.transfer else None) for terms in decision.candidates]
    assert sorted(plans, key=str) == [("a", None), ("b", "a"), ("b", None), ("c", "a"), ("c", None)]
    assert [terms.cost for terms in decision.candidates] == sorted(terms.cost for terms in decision.candidates)


def test_a_prefix_counts_as_cached_when_its_kv_has_come() -> None:
    """Before, another request there would compute it again; so that one pulls too."""
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    first = route(core, "r", PROMPT, 0.0)
    second = route(core, "s", PROMPT, 0.001, worker="b")
    assert first.transfer is not None is not second.transfer
    assert second.transfer.transfer_s == pytest.approx(0.01 + 2 * 0.039)
    core.tick(0.2)
    third = route(core, "t", PROMPT, 0.2, worker="b")
    assert (third.transfer, third.predicted_cached_tokens) == (None, 399)


def test_a_transfer_is_counted_at_both_ends_until_it_should_have_come() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    source, target = (core.registry.get_targets(name)[0] for name in "ab")
    assert (source.load.outgoing_transfers, target.load.incoming_transfers) == (1, 1)
    assert not target.prefill_queue.requests, "it is not computed while its KV moves"
    core.tick(decision.transfer.transfer_s + 0.001)
    core.check_invariants()
    assert (source.load.outgoing_transfers, target.load.incoming_transfers) == (0, 0)
    assert len(target.prefill_queue.requests) == 1


def test_a_prompt_whose_kv_is_on_its_way_is_overtaken_by_those_that_need_none() -> None:
    core, index = make_fleet("abc")
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    first = route(core, "r", PROMPT, 0.0)
    assert first.transfer is not None
    pulling = route(core, "s", PROMPT, 0.001, worker=first.worker)
    assert pulling.transfer is not None
    assert pulling.terms.queue_s == pytest.approx(first.terms.prefill_s), "the KV of the first request comes first"
    overtaking = route(core, "t", [7] * 400, 0.001, worker=first.worker)
    assert overtaking.terms.queue_s == 0.0
    assert overtaking.terms.congestion_s >= 2 * overtaking.terms.prefill_s, "both wait for it"
    assert route(core, "u", [8] * 400, 0.001).worker not in ("a", first.worker)
    core.tick(1.0)
    queue = core.registry.get_targets(first.worker)[0].prefill_queue
    assert (queue.arriving_prefill_s, len(queue.requests)) == (0.0, 3)


@pytest.mark.parametrize("tokens", [5, 200])
def test_the_shortest_prompt_goes_before_one_whose_kv_is_on_its_way(tokens: int) -> None:
    core, index = make_core("ab", CONFIG)
    for name in "ab":
        core.add_worker(replace(spec(name, transfer=PULLS), is_shortest_first=True), 0.0)
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    first = route(core, "r", PROMPT, 0.0)
    assert first.worker == "b"
    assert first.transfer is not None
    second = route(core, "s", [7] * tokens, 0.001, worker="b")
    assert second.terms.queue_s == pytest.approx(first.terms.prefill_s if tokens == 200 else 0.0)


def test_a_request_that_leaves_while_its_kv_is_on_its_way_leaves_no_trace() -> None:
    """Its prefill never began: neither the progress of the current prompt nor the utilisation shows that it came."""
    traces: list[tuple[float, float]] = []
    for has_left in (False, True):
        core, index = make_core("", CONFIG)
        for name in "ab":
            core.add_worker(replace(spec(name, transfer=PULLS), is_shortest_first=True), 0.0)
        index.store(core.workers["a"].holders[0], PROMPT[:390])
        make_busy(core, "a", 0.0)
        route(core, "current", [7] * 1000, 0.0, worker="b")
        if has_left:
            assert route(core, "r", PROMPT, 0.01, worker="b").transfer is not None
            core.abort_request("r", 0.04)
            core.check_invariants()
        target = core.registry.get_targets("b")[0]
        traces.append((target.estimate_queue_s(0.5), core.tracker.compute_utilisation(target, 0.5)))
    assert traces[1][0] == pytest.approx(traces[0][0], rel=1e-3)
    assert traces[1][1] == pytest.approx(traces[0][1], rel=1e-12)


def test_an_ended_request_with_a_transfer_is_freed_without_the_garbage_collector() -> None:
    """A busy router seldom makes a full collection."""
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    gc.collect()
    gc.disable()
    try:
        assert route(core, "r", PROMPT, 0.0).transfer is not None
        core.tick(1.0)
        core.record_first_token("r", 1.5)
        core.finish_request("r", None, 2.0)
        in_flight = [item for item in gc.get_objects() if type(item) is InFlightRequest]
        assert not [item for item in in_flight if item.source is core.registry.get_targets("a")[0]]
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["finish", "abort", "fail", "first token", "lost source", "lost target"])
@pytest.mark.parametrize("has_come", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_nothing_stays_counted(end: str, has_come: bool, has_failed: bool) -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0)
    decision = route(core, "r", PROMPT, 0.0, is_streaming=end != "finish")
    targets = [core.registry.get_targets(name)[0] for name in "ab"]
    if has_come:
        core.tick(1.0)
    if has_failed:
        core.fail_transfer("r", 1.0)
        core.check_invariants()
        if end != "finish":  # there, the first token was estimated before
            assert core.get_attempts()["r"].in_flight.cached_tokens == 0
        assert core.get_attempts()["r"].decision.predicted_cached_tokens == 0
    end_request(core, end, decision, cached_tokens=390)
    for number in range(3):
        core.abort_request(f"busy-a{number}", 3.0)
    core.tick(20.0)
    core.check_invariants()
    for target in targets:
        load = target.load
        assert (load.request_count, load.incoming_transfers, load.outgoing_transfers) == (0, 0, 0)
        assert (load.pending_prompt_tokens, target.prefill_queue.own_prefill_s) == (0, 0.0)
    assert not index.pins


def end_request(core: RouterCore, end: str, decision: Decision, *, cached_tokens: int) -> None:
    """End the request "r" in one of the ways that `end` names; its engine reports these cached tokens."""
    assert decision.transfer is not None
    if end == "finish":
        core.finish_request("r", ReportedUsage(400, cached_tokens, 1), 2.0)
    elif end == "abort":
        core.abort_request("r", 2.0)
    elif end == "fail":
        core.fail_attempt("r", FailureKind.SERVER_ERROR, 2.0)
        core.check_invariants()
        core.abort_request("r", 2.0)
    elif end == "first token":
        core.record_first_token("r", 2.0)
        core.check_invariants()
        core.finish_request("r", None, 3.0)
    else:
        core.remove_worker(decision.transfer.source if end == "lost source" else decision.worker, 1.5)
        core.check_invariants()
        core.abort_request("r", 2.0)


def make_split_fleet(config: CoreConfig = CONFIG) -> tuple[RouterCore, NaiveIndex]:
    """Workers "p" and "q" compute prompts, "d" and "e" answers."""
    core, index = make_core("", config)
    for name in "pqde":
        role = "prefill" if name in "pq" else "decode"
        core.add_worker(spec(name, transfer=PREFILLS, roles=frozenset({role})), 0.0)
    return core, index


def test_one_worker_computes_the_prompt_and_another_the_answer() -> None:
    core, index = make_split_fleet()
    index.store(core.workers["q"].holders[0], PROMPT[:100])
    index.store(core.workers["e"].holders[0], PROMPT[:50])
    make_busy(core, "d", 0.0)
    make_busy(core, "e", 0.0, count=1)
    decision = route(core, "r", PROMPT, 0.0)
    transfer_s = 0.01 + 350 * BYTES_PER_TOKEN / 10e9
    assert decision.worker == "e"
    assert decision.transfer == Transfer(TransferKind.PREFILL, "q", None, 350, pytest.approx(transfer_s))
    assert decision.predicted_cached_tokens == 100, "what nobody has to compute"
    source, target = (core.registry.get_targets(name)[0] for name in "qe")
    prefill_s = source.estimate_prefill_s(400, 100)
    busy_s = target.estimate_prefill_s(1000, 0)
    assert decision.terms.queue_s == pytest.approx(busy_s)
    rest_s = target.estimate_prefill_s(400, 399)
    ttft_s = max(source.slowdown * prefill_s + transfer_s, target.slowdown * busy_s) + target.slowdown * rest_s
    assert decision.predicted_ttft_s == pytest.approx(ttft_s)
    assert decision.terms.prefill_s == pytest.approx(source.slowdown * prefill_s + rest_s)
    # Both workers count it: the source its prefill, the other one a request that computes nothing yet.
    assert source.prefill_queue.own_prefill_s == pytest.approx(prefill_s)
    assert (target.load.request_count, len(target.prefill_queue.requests)) == (2, 1)
    assert (source.load.outgoing_transfers, target.load.incoming_transfers) == (0, 0)
    core.record_prefill_end("r", 0.4)
    core.check_invariants()
    assert (source.load.request_count, source.load.outgoing_transfers, target.load.incoming_transfers) == (0, 1, 1)
    core.tick(0.4 + transfer_s + 0.001)
    core.check_invariants()
    assert (source.load.outgoing_transfers, len(target.prefill_queue.requests)) == (0, 2)
    core.record_first_token("r", 1.5)
    core.finish_request("r", ReportedUsage(400, 100, 5), 2.0)
    core.check_invariants()
    assert core.counters["failed_transfers"] == 0


@pytest.mark.parametrize("kind", list(TransferKind))
def test_sources_that_failed_lately_do_not_hide_a_good_one(kind: TransferKind) -> None:
    """Two sources have more of the prompt cached than the third, and gave no KV to this worker."""
    core, index = make_core("", CONFIG)
    facts = replace(PULLS, kinds=frozenset({kind}))
    for name in "pqrd":
        roles = frozenset({"decode" if name == "d" else "prefill"}) if kind is TransferKind.PREFILL else frozenset()
        core.add_worker(spec(name, transfer=facts, roles=roles), 0.0)
    for name, tokens in zip("pqr", (390, 380, 300)):
        index.store(core.workers[name].holders[0], PROMPT[:tokens])
        make_busy(core, name, 0.0, count=8 if kind is TransferKind.PULL else 0)
    make_busy(core, "d", 0.0, count=0 if kind is TransferKind.PULL else 3)
    for name in "pq":
        core._links.record_failure(name, "d", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    assert (decision.worker, decision.transfer.source) == ("d", "r")


def test_a_large_pool_knows_what_its_prefill_workers_have() -> None:
    """Of the workers for decodes only a shortlist is priced."""
    core, index = make_core("", CONFIG)
    for number in range(40):
        core.add_worker(spec(f"d{number}", transfer=PREFILLS, roles=frozenset({"decode"})), 0.0)
        make_busy(core, f"d{number}", 0.0, count=1)
    for name in "pqr":
        core.add_worker(spec(name, transfer=PREFILLS, roles=frozenset({"prefill"})), 0.0)
    index.store(core.workers["q"].holders[0], PROMPT[:300])
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    assert (decision.transfer.source, decision.predicted_cached_tokens) == ("q", 300)


def test_a_large_pool_looks_a_prompt_up_once_where_workers_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{number}" for number in range(40)]
    core, index = make_core(names, CONFIG)
    for name in names:
        core.add_worker(spec(name, transfer=PULLS), 0.0)
        make_busy(core, name, 0.0, count=8 if name == "w7" else 1)
    index.store(core.workers["w7"].holders[0], PROMPT[:390])
    match, calls = index.match, []
    monkeypatch.setattr(index, "match", lambda *args: calls.append(args) or match(*args))
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    assert decision.transfer.source == "w7"
    assert len(calls) == 1


def test_both_workers_are_compared_with_what_was_predicted_of_them() -> None:
    """The cached tokens of the answer are those of the prefill, so they say nothing about the decoding worker."""
    core, index = make_split_fleet()
    index.store(core.workers["q"].holders[0], PROMPT[:300])
    make_busy(core, "d", 0.0)
    make_busy(core, "e", 0.0)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    core.record_prefill_end("r", 0.4, cached_tokens=296)
    core.finish_request("r", ReportedUsage(400, 296, 5), 1.0)
    rows = {row["worker_id"]: row for row in core.snapshot(1.0).workers}
    assert (rows["q"]["predicted_cached_tokens"], rows["q"]["reported_cached_tokens"]) == (300, 296)
    row = rows[decision.worker]
    assert (row["predicted_cached_tokens"], row["reported_cached_tokens"]) == (0, 0)


@pytest.mark.parametrize("crashing", ["prefills", "all"])
def test_a_prompt_that_crashes_its_workers_gets_two_of_them(crashing: str) -> None:
    core, _ = make_split_fleet()
    for name in "de":
        make_busy(core, name, 0.0, count=8)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    core.fail_transfer("r", 0.1, may_be_crash=True)
    core.check_invariants()
    if crashing == "prefills":
        core.fail_attempt("r", FailureKind.SERVER_ERROR, 0.2)
        again = core.get_attempts()["r"].decision
        assert again.transfer is not None
        assert again.transfer.source != decision.transfer.source
        instructions = core.fail_transfer("r", 0.3, may_be_crash=True)
    else:
        instructions = core.fail_attempt("r", FailureKind.RESET, 0.2)
    assert isinstance(instructions[0], Refuse)
    assert not core.has_request("r")
    core.check_invariants()


def test_after_a_failed_transfer_the_prefill_counts_where_it_is_computed() -> None:
    """As if the request had been sent there without a transfer."""
    utilisations = []
    for has_transfer in (True, False):
        core, index = make_fleet(**({} if has_transfer else {"b": TransferFacts()}))
        index.store(core.workers["a"].holders[0], PROMPT[:390])
        make_busy(core, "a", 0.0)
        decision = route(core, "r", PROMPT, 0.0, worker="b")
        assert (decision.transfer is not None) is has_transfer
        core.fail_transfer("r", 0.0)
        target = core.registry.get_targets("b")[0]
        utilisations.append(core.tracker.compute_utilisation(target, 1.0))
        core.fail_attempt("r", FailureKind.SERVER_ERROR, 1.0)
        assert core.tracker.compute_utilisation(target, 1.0) == pytest.approx(0.0)
    assert utilisations[0] == pytest.approx(utilisations[1])


def test_a_fair_queue_looks_at_the_worker_that_computes_the_prompt() -> None:
    core, _ = make_split_fleet(replace(CONFIG, queue=QueueConfig(fair=True)))
    for name in "de":
        make_busy(core, name, 0.0)
        for number in range(3):  # these decode for long, so their own prefills would be slow
            core.record_first_token(f"busy-{name}{number}", 0.1)
    instructions = [
        core.route(request(f"r{i}", [1000 * i + j for j in range(1000)], tenant="t"), 0.2) for i in range(30)
    ]
    core.check_invariants()
    assert sum(isinstance(instruction, Enqueue) for instruction in instructions) > 20
    prefill_queues = [core.registry.get_targets(name)[0].estimate_queue_s(0.2) for name in "pq"]
    assert max(prefill_queues) < 5.0


def test_the_hit_of_the_prefill_worker_is_no_wrong_prediction_of_the_other_one() -> None:
    """vLLM's decoding worker reports what the worker that computed the prompt had cached."""
    core, _ = make_split_fleet()
    for name in "de":
        make_busy(core, name, 0.0, count=8)
    for number in range(100):
        now = 10.0 * number
        decision = route(core, f"r{number}", [1000 * number + i for i in range(400)], now)
        assert decision.transfer is not None
        core.record_prefill_end(f"r{number}", now + 0.4)
        core.record_first_token(f"r{number}", now + 0.6)
        core.finish_request(f"r{number}", ReportedUsage(400, 399, 5), now + 1.0)
    alarms = [alarm for name in core.workers for alarm in core.watchdog.list_alarms(name)]
    assert not any("cached" in str(alarm) for alarm in alarms), alarms


def test_workers_for_prefills_get_other_requests_where_no_other_worker_is_left() -> None:
    core, _ = make_split_fleet()
    explained = core.explain(request("r", PROMPT), 0.0)
    assert isinstance(explained, Decision)
    assert {terms.worker for terms in explained.candidates} == {"d", "e"}
    assert explained.not_eligible == {"p": "computes prefills only", "q": "computes prefills only"}
    for name in "de":
        core.remove_worker(name, 1.0)
    assert route(core, "r", PROMPT, 2.0).worker in "pq"
    asked = core.explain(request("s", PROMPT, role="prefill"), 2.0)
    assert isinstance(asked, Decision)
    assert {terms.worker for terms in asked.candidates} == {"p", "q"}
    asked = core.explain(request("s", PROMPT), 2.0)
    assert isinstance(asked, Decision)
    assert asked.not_eligible == {}


def test_a_request_that_waits_for_kv_counts_as_one_without_a_first_token() -> None:
    core, _ = make_split_fleet()
    for name in "de":
        make_busy(core, name, 0.0, count=8)
    decision = route(core, "r", PROMPT, 0.0)
    assert decision.transfer is not None
    row = next(row for row in core.snapshot(0.0).workers if row["target"] == decision.worker)
    assert (row["prefilling"], row["decoding"]) == (9, 0)


@pytest.mark.parametrize("end", ["finish", "abort", "fail", "first token", "lost source", "lost target"])
@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("has_failed", [False, True])
def test_nothing_of_two_legs_stays_counted(end: str, is_computed: bool, has_failed: bool) -> None:
    core, index = make_split_fleet()
    for name in "de":
        make_busy(core, name, 0.0, count=8)
    decision = route(core, "r", PROMPT, 0.0, is_streaming=end != "finish")
    assert decision.transfer is not None
    assert decision.transfer.kind is TransferKind.PREFILL
    targets = list(core.tracker.targets.values())
    if is_computed:
        core.record_prefill_end("r", 0.5)
        core.check_invariants()
    if has_failed:
        core.fail_transfer("r", 0.6, is_pair_fault=False)
        core.check_invariants()
        assert core.get_attempts()["r"].in_flight.cached_tokens == 0
    end_request(core, end, decision, cached_tokens=0)
    for number in range(8):
        for name in "de":
            core.abort_request(f"busy-{name}{number}", 3.0)
    core.tick(20.0)
    core.check_invariants()
    assert not index.pins
    for target in targets:
        load = target.load
        assert (load.request_count, load.incoming_transfers, load.outgoing_transfers) == (0, 0, 0)
        assert (load.pending_prompt_tokens, target.prefill_queue.own_prefill_s) == (0, 0.0)


def test_a_prefill_goes_where_it_interrupts_no_answer() -> None:
    """At a worker with 12 answers, the prompt costs as much more than elsewhere as they stand still for it."""
    core, _ = make_core("", CONFIG)
    for name in "ab":
        core.add_worker(spec(name, transfer=PREFILLS), 0.0)
    for number in range(12):
        prompt = [1000 * (number + 1) + i for i in range(1000)]
        route(core, f"busy{number}", prompt, 0.1 * number, worker="a")
        core.record_first_token(f"busy{number}", 0.1 * number + 0.05)
    explained = core.explain(request("r", PROMPT), 2.0)
    assert isinstance(explained, Decision)
    by_plan = {
        (terms.worker, terms.transfer.source if terms.transfer else None): terms for terms in explained.candidates
    }
    here, moved = by_plan["a", None], by_plan["a", "b"]
    a = core.registry.get_targets("a")[0]
    interrupted_s = CONFIG.cost.decode_weight * 12 * a.estimate_prefill_s(400, 0)
    assert here.decode_s - moved.decode_s == pytest.approx(interrupted_s, rel=0.01)


def test_the_fault_of_a_request_pauses_no_pair() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0, count=20)
    assert route(core, "r", PROMPT, 0.0).transfer is not None
    core.fail_transfer("r", 0.1, is_pair_fault=False)
    core.abort_request("r", 0.1)
    assert route(core, "s", PROMPT, 0.2).transfer is not None


def test_a_pair_whose_transfer_failed_is_avoided_for_a_while() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    make_busy(core, "a", 0.0, count=200)
    assert route(core, "r", PROMPT, 0.0).transfer is not None
    core.fail_transfer("r", 0.1)
    core.abort_request("r", 0.1)
    assert route(core, "again", PROMPT, 0.2).transfer is None
    core.abort_request("again", 0.2)
    later = route(core, "later", PROMPT, 0.2 + PAUSE_S)
    assert later.transfer is not None
    core.finish_request("later", ReportedUsage(400, 0, 1), 0.3 + PAUSE_S)
    assert core.counters["failed_transfers"] == 2, "an engine that reports no cached tokens has pulled nothing"
    assert route(core, "last", PROMPT, 0.4 + 2 * PAUSE_S).transfer is None, "longer after the second failure"


def test_pauses_grow_and_end_with_a_good_transfer() -> None:
    links = TransferLinks(TransferConfig())
    for _ in range(20):
        links.record_failure("a", "b", 0.0)
    assert links.is_paused("a", "b", PAUSE_S - 0.1)
    assert not links.is_paused("a", "b", PAUSE_S), "transfers that fail at the same time count once"
    assert not links.is_paused("b", "a", 0.0)
    now = 0.0
    for _ in range(2000):
        now += PAUSE_S_MAX
        links.record_failure("a", "b", now)
    assert links.is_paused("a", "b", now + PAUSE_S_MAX - 0.1)
    assert not links.is_paused("a", "b", now + PAUSE_S_MAX)
    links.record_success("a", "b")
    links.record_failure("a", "b", now + PAUSE_S_MAX)
    assert not links.is_paused("a", "b", now + PAUSE_S_MAX + PAUSE_S)
    links.forget_target("b")
    assert not links.is_paused("a", "b", now + PAUSE_S_MAX)


def test_the_speed_of_a_pair_is_learned_and_that_of_all_pairs_stands_in() -> None:
    core, _ = make_fleet("abcd")
    a, b, c, d = (core.registry.get_targets(name)[0] for name in "abcd")
    links = TransferLinks(TransferConfig(gb_s=10.0, floor_s=0.01))
    assert links.estimate(a, b, 1000, 0.0).total_s == pytest.approx(0.11)
    a.load.outgoing_transfers = 2
    assert links.estimate(a, b, 1000, 0.0).total_s == pytest.approx(0.31), "three share the network"
    a.load.outgoing_transfers = 0
    for _ in range(20):
        links.learn_speed("a", "b", links.estimate(a, b, 1000, 1.0), 0.44, 1.0)
    assert links.estimate(a, b, 2000, 1.0).total_s == pytest.approx(0.84, rel=0.02)
    assert links.estimate(c, d, 1000, 1.0).total_s == pytest.approx(0.44, rel=0.1)
    for _ in range(20):
        links.learn_speed("c", "d", links.estimate(c, d, 1000, 1.0), 0.11, 1.0)
    assert links.estimate(a, b, 1000, 1.0).total_s == pytest.approx(0.44, rel=0.1), "its own speed"


def test_an_engine_says_how_fast_its_blocks_come() -> None:
    core, _ = make_fleet(a=replace(PULLS, gb_s=0.5))
    a, b = (core.registry.get_targets(name)[0] for name in "ab")
    links = TransferLinks(TransferConfig(gb_s=10.0, floor_s=0.01))
    assert links.estimate(a, b, 1000, 0.0).total_s == pytest.approx(2.01)
    assert links.estimate(b, a, 1000, 0.0).total_s == pytest.approx(0.11)


def test_a_pull_waits_for_the_running_step_of_our_engine() -> None:
    core, _ = make_fleet(a=replace(PULLS, dialect=BLOCKCAST))
    a, b = (core.registry.get_targets(name)[0] for name in "ab")
    links = TransferLinks(CONFIG.transfer)
    assert links.estimate(a, b, 10, 0.0).wait_s == 0.0, "an idle engine gives blocks at once"
    core.route(request("short", None, prompt_tokens=100, worker="a"), 0.0)
    assert links.estimate(a, b, 10, 0.0).wait_s == pytest.approx(a.slowdown * a.estimate_queue_s(0.0))
    core.route(request("long", None, prompt_tokens=100_000, worker="a"), 0.0)
    assert links.estimate(a, b, 10, 0.0).wait_s == pytest.approx(0.5 * a.speed.step_prefill_s)
    assert links.estimate(b, a, 10, 0.0).wait_s == 0.0, "other engines give blocks at any time"


def test_a_pull_waits_for_a_step_as_long_as_the_source_tells() -> None:
    """Short steps are told by the engine: the configured 2,048 tokens would be a step that never ends."""
    core, _ = make_fleet(a=replace(PULLS, dialect=BLOCKCAST))
    a, b = (core.registry.get_targets(name)[0] for name in "ab")
    core.route(request("long", None, prompt_tokens=100_000, worker="a"), 0.0)
    configured = (a.speed.step_prefill_s, a.slowdown, a.prefill_queue.fixed_step_share)
    for step_tokens in (256, 64):
        core.add_worker(spec("a", transfer=a.transfer_facts, step_tokens=step_tokens), 0.0)
        wait_s = TransferLinks(CONFIG.transfer).estimate(a, b, 10, 0.0).wait_s
        assert wait_s == pytest.approx(0.5 * step_tokens * 1e-3)
        assert a.slowdown == pytest.approx(1.0 + a.step_s / (step_tokens * 1e-3))
        assert b.speed.step_tokens == 2048, "the step of one worker says nothing of another"
    core.add_worker(spec("a", transfer=a.transfer_facts), 0.0)
    assert (a.speed.step_prefill_s, a.slowdown, a.prefill_queue.fixed_step_share) == configured


def test_a_told_step_stays_when_a_speed_is_learned() -> None:
    core, _ = make_core("", CoreConfig())
    core.add_worker(spec("a", step_tokens=256), 0.0)
    [target] = core.registry.get_targets("a")
    core.route(request("r", None, prompt_tokens=5000), 0.0)
    core.record_first_token("r", 4.0)
    core.tick(5.0)
    assert target.speed.prefill_rate > 2e-4
    assert target.speed.step_tokens == 256
    assert target.speed.step_prefill_s == pytest.approx(256 * target.speed.prefill_rate)


def test_a_router_learns_a_slow_network_from_first_tokens() -> None:
    core, index = make_fleet()
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    for number in range(8):
        now = 100.0 * number
        make_busy(core, "a", now, count=30)
        decision = route(core, "r", PROMPT, now)
        assert decision.transfer is not None
        compute_s = decision.terms.slowdown * decision.terms.prefill_s
        core.record_first_token("r", now + 0.01 + 5 * 0.039 + compute_s)
        core.finish_request("r", None, now + 2.0)
        for busy in range(30):
            core.abort_request(f"busy-a{busy}", now + 3.0)
        core.tick(now + 50.0)
    assert decision.transfer.transfer_s == pytest.approx(0.01 + 5 * 0.039, rel=0.1)


def test_a_router_learns_how_long_pulls_of_few_bytes_wait_for_the_engines() -> None:
    """Another prompt is computed first each time: its prefill is no part of the pull."""
    facts = replace(PULLS, bytes_per_token=1e3)
    core, index = make_fleet(a=facts, b=facts)
    index.store(core.workers["a"].holders[0], PROMPT[:390])
    before_s = core.registry.get_targets("b")[0].estimate_prefill_s(50, 0)
    for number in range(8):
        now = 60.0 * number
        make_busy(core, "a", now, count=30)
        core.route(request("before", None, prompt_tokens=50, worker="b"), now)
        decision = route(core, "r", PROMPT, now, worker="b")
        assert decision.transfer is not None
        core.record_first_token("before", now + before_s)
        compute_s = decision.terms.slowdown * decision.terms.prefill_s
        core.record_first_token("r", now + before_s + 0.18 + compute_s)
        for ended in ("before", "r"):
            core.finish_request(ended, None, now + 2.0)
        for busy in range(30):
            core.abort_request(f"busy-a{busy}", now + 3.0)
        core.tick(now + 50.0)
    assert decision.transfer.transfer_s == pytest.approx(0.18, rel=0.1)


@given(
    cached=st.lists(st.integers(0, 399), min_size=3, max_size=3),
    busy=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    moving=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    groups=st.lists(st.sampled_from(["g", "g", "h", ""]), min_size=3, max_size=3),
    failed=st.sets(st.sampled_from(["ab", "ba", "ac", "ca", "bc", "cb"])),
)
def test_the_cheapest_plan_of_all_is_chosen(
    cached: list[int], busy: list[int], moving: list[int], groups: list[str], failed: set[str]
) -> None:
    """Every pair of workers is priced by hand from the prices without transfers."""
    names = "abc"
    core, index = make_fleet(names, **{name: replace(PULLS, group=group) for name, group in zip(names, groups)})
    for name, tokens, count in zip(names, cached, busy):
        index.store(core.workers[name].holders[0], PROMPT[:tokens])
        make_busy(core, name, 0.0, count)
    targets = {name: core.registry.get_targets(name)[0] for name in names}
    for name, count in zip(names, moving):
        targets[name].load.outgoing_transfers += count
    for pair in failed:
        core._links.record_failure(pair[0], pair[1], 0.0)
    decision = core.explain(request("r", PROMPT), 0.0)
    assert isinstance(decision, Decision)
    own_terms = {terms.worker: terms for terms in decision.candidates if not terms.transfer}
    assert own_terms.keys() == set(names)
    costs = {(name, ""): terms.cost for name, terms in own_terms.items()}
    for name, source in [(name, source) for name in names for source in names]:
        own, source_tokens = own_terms[name], own_terms[source].resident_tokens
        group, source_group = (groups[names.index(worker)] for worker in (name, source))
        if not group or group != source_group or source_tokens <= own.cached_tokens or source + name in failed:
            continue
        active_count = max(targets[source].load.outgoing_transfers, targets[name].load.incoming_transfers)
        transfer_s = 0.01 + (1 + active_count) * (source_tokens - own.resident_tokens) * BYTES_PER_TOKEN / 10e9
        prefill_s = 1e-3 * ((400 - source_tokens) + (400**2 - source_tokens**2) / 100_000)
        ttft_s = max(transfer_s, own.slowdown * own.queue_s) + own.slowdown * prefill_s
        saved_s = own.prefill_s - prefill_s
        congestion_s = own.congestion_s * prefill_s / own.prefill_s
        assert saved_s > 0.0
        costs[name, source] = own.cost - own.ttft_s + ttft_s - own.congestion_s + congestion_s
    priced = {(t.worker, t.transfer.source if t.transfer else ""): t.cost for t in decision.candidates}
    assert priced == {plan: pytest.approx(cost, abs=1e-9) for plan, cost in costs.items()}
    assert math.isclose(decision.terms.cost, min(costs.values()), abs_tol=2e-6)


@given(
    cached=st.lists(st.integers(0, 399), min_size=3, max_size=3),
    busy=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    roles=st.lists(st.sampled_from(["", "", "prefill", "decode"]), min_size=3, max_size=3),
)
def test_every_pair_of_prefill_and_decode_is_priced(cached: list[int], busy: list[int], roles: list[str]) -> None:
    """As a model does that takes each worker's own price, and the prefill at each other worker."""
    names = "abc"
    core, index = make_core("", CONFIG)
    for name, role in zip(names, roles):
        core.add_worker(spec(name, transfer=PREFILLS, roles=frozenset({role} - {""})), 0.0)
    for name, tokens, count in zip(names, cached, busy):
        index.store(core.workers[name].holders[0], PROMPT[:tokens])
        make_busy(core, name, 0.0, count)
    decision = core.explain(request("r", PROMPT), 0.0)
    assert isinstance(decision, Decision)
    own_terms = {terms.worker: terms for terms in decision.candidates if not terms.transfer}
    decoders = [name for name, role in zip(names, roles) if role != "prefill"] or list(names)
    assert sorted(own_terms) == sorted(decoders)
    targets = {name: core.registry.get_targets(name)[0] for name in names}
    congestion = own_terms[decoders[0]].congestion_s / own_terms[decoders[0]].prefill_s
    congestion /= own_terms[decoders[0]].slowdown
    prefills: dict[str, tuple[float, float, int]] = {}
    for name, role, tokens in zip(names, roles, cached):
        target, source_tokens = targets[name], min(tokens, 399)
        prefill_s = target.slowdown * 1e-3 * ((400 - source_tokens) + (400**2 - source_tokens**2) / 100_000)
        if role != "decode":
            prefills[name] = (target.slowdown * target.estimate_queue_s(0.0) + prefill_s, prefill_s, source_tokens)
    costs = {(name, ""): terms.cost for name, terms in own_terms.items()}
    for name, source in [(name, source) for name in decoders for source in prefills if source != name]:
        own, rest_s = own_terms[name], 1e-3 * (1 + (400**2 - 399**2) / 100_000)
        arrival_s = prefills[source][0] + 0.01 + (400 - own.resident_tokens) * BYTES_PER_TOKEN / 10e9
        ttft_s = max(arrival_s, own.slowdown * own.queue_s) + own.slowdown * rest_s
        congestion_s = congestion * (own.slowdown * rest_s + prefills[source][1])
        costs[name, source] = own.cost - own.ttft_s + ttft_s - own.congestion_s + congestion_s
    priced = {(t.worker, t.transfer.source if t.transfer else ""): t.cost for t in decision.candidates}
    assert priced == {plan: pytest.approx(cost, abs=1e-9) for plan, cost in costs.items()}
    assert math.isclose(decision.terms.cost, min(costs.values()), abs_tol=2e-6)


FAILURES = (FailureKind.SERVER_ERROR, FailureKind.CONNECT, FailureKind.TIMEOUT, FailureKind.STREAM)
"""Of these only a server error lets the worker be avoided, and so leaves fewer pulls."""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", list(TransferKind))
def test_both_ends_are_counted_right_whatever_happens(seed: int, kind: TransferKind) -> None:
    """A random history; `check_invariants` compares all counts with the requests in flight."""
    rng, now, transfer_count = random.Random(seed), 0.0, 0
    specs = {name: spec(name, transfer=replace(PULLS, kinds=frozenset({kind}))) for name in "abcd"}
    if kind is TransferKind.PREFILL:
        for name in "ab":
            specs[name] = replace(specs[name], roles=frozenset({"prefill"}))
    core, index = make_core("", CONFIG)
    for worker_spec in specs.values():
        core.add_worker(worker_spec, 0.0)
    sent: list[str] = []
    for number in range(300):
        now += rng.choice([0.0, 0.001, 0.02, 0.2])
        core.tick(now)
        event = rng.random()
        if event < 0.45 or not sent:
            prompt = [rng.randrange(3)] * rng.randrange(2, 400)
            new_request = request(f"r{number}", prompt, is_streaming=rng.random() < 0.7)
            instruction = core.route(new_request, now)
            assert isinstance(instruction, Forward)
            transfer_count += instruction.decision.transfer is not None
            sent.append(f"r{number}")
        elif event < 0.55:
            worker_id = rng.choice("abcd")
            core.remove_worker(worker_id, now)
            core.add_worker(specs[worker_id], now)
        elif event < 0.65:
            index.store(core.workers[rng.choice("abcd")].holders[0], [rng.randrange(3)] * rng.randrange(1, 400))
        else:
            request_id = rng.choice(sent)
            stimulus = rng.choice(["first token", "transfer failed", "prefill ended", "finish", "abort", "fail"])
            if stimulus == "first token":
                core.record_first_token(request_id, now)
            elif stimulus == "transfer failed":
                core.fail_transfer(request_id, now)
            elif stimulus == "prefill ended":
                core.record_prefill_end(request_id, now)
            elif stimulus == "finish":
                core.finish_request(request_id, ReportedUsage(10, rng.randrange(400), 1), now)
            elif stimulus == "abort":
                core.abort_request(request_id, now)
            else:
                core.fail_attempt(request_id, rng.choice(FAILURES), now)
            sent = [name for name in sent if core.has_request(name)]
        core.check_invariants()
    assert transfer_count > 10
    for request_id in sent:
        core.abort_request(request_id, now)
    core.tick(now + 10.0)
    core.check_invariants()
    assert not index.pins
    for target in core.tracker.targets.values():
        assert (target.load.request_count, target.load.incoming_transfers, target.load.outgoing_transfers) == (0, 0, 0)


def make_mixed_fleet(policy: str = "kv") -> RouterCore:
    """Workers "s" and "d" answer only together; "p", "q" and "r" compute prompts for others, and "v" answers alone."""
    core, _ = make_core("", replace(CONFIG, policy=policy))
    pair = replace(PREFILLS, group="pair", needs_partner=True)
    for name in "pqr":
        core.add_worker(spec(name, transfer=replace(PREFILLS, can_take=False), roles=frozenset({"prefill"})), 0.0)
    core.add_worker(spec("s", transfer=replace(pair, can_take=False), roles=frozenset({"prefill"})), 0.0)
    core.add_worker(spec("d", transfer=replace(pair, can_give=False), roles=frozenset({"decode"})), 0.0)
    core.add_worker(spec("v"), 0.0)
    return core


@pytest.mark.parametrize("prompt", [PROMPT, None], ids=["known", "unknown"])
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_worker_gets_its_partner_however_idle_the_workers_of_other_engines_are(
    prompt: list[int] | None, has_failed: bool
) -> None:
    core = make_mixed_fleet()
    core.route(request("busy", None, prompt_tokens=1000, worker="d"), 0.0)
    forward = core.route(request("r", prompt, prompt_tokens=400, worker="d"), 0.0)
    assert isinstance(forward, Forward)
    if has_failed:  # there is no other pair
        core.fail_transfer("r", 0.1)
        forward = core.fail_attempt("r", FailureKind.SOURCE, 0.1)[0]
        assert isinstance(forward, Forward)
    transfer = forward.decision.transfer
    assert transfer is not None
    assert (forward.decision.worker, transfer.source) == ("d", "s")
    core.check_invariants()


@pytest.mark.parametrize("policy", ["kv", "round_robin"])
def test_a_partner_is_predicted_to_use_what_it_has_cached(policy: str) -> None:
    core = make_mixed_fleet(policy)
    core.index.store(core.workers["s"].holders[0], PROMPT[:300])
    forward = core.route(request("r", PROMPT, worker="d"), 0.0)
    assert isinstance(forward, Forward)
    transfer = forward.decision.transfer
    assert transfer is not None
    assert (transfer.source, forward.decision.predicted_cached_tokens) == ("s", 300)


def test_a_worker_that_answers_nothing_alone_is_not_the_earliest_one() -> None:
    """Its own prefill would begin at once, but nobody asked its partner for one."""
    core = make_mixed_fleet("least_requests")
    for number in range(3):
        core.route(request(f"decode{number}", None, prompt_tokens=10, worker="d", is_streaming=True), 0.0)
        core.record_prefill_end(f"decode{number}", 0.1, is_kv_transferred=True)
        core.record_first_token(f"decode{number}", 0.1)
    make_busy(core, "v", 0.1, count=2)
    decision = core.explain(request("r", None, prompt_tokens=100), 0.1)
    assert isinstance(decision, Decision)
    assert (decision.worker, decision.predicted_ttft_s > 1.0) == ("v", True)
    refusal = core.route(request("r", None, prompt_tokens=100, ttft_s_max=1.0), 0.1)
    assert isinstance(refusal, Refuse)
    assert refusal.code == "too_slow"


def test_an_unknown_prompt_avoids_a_pair_whose_transfer_failed() -> None:
    core = make_mixed_fleet()
    pair = core.workers["s"].spec.transfer
    core.add_worker(spec("t", transfer=pair, roles=frozenset({"prefill"})), 0.0)
    sources = []
    for number in range(6):
        forward = core.route(request(f"r{number}", None, prompt_tokens=400, worker="d"), 0.1 * number)
        assert isinstance(forward, Forward)
        assert forward.decision.transfer is not None
        sources.append(forward.decision.transfer.source)
        if number < 1:
            core.fail_transfer(f"r{number}", 0.1 * number)
        core.abort_request(f"r{number}", 0.1 * number)
    assert sources[0] not in sources[1:]


def test_a_role_that_is_down_lacks_no_pair() -> None:
    core, _ = make_core("", CONFIG)
    for name in ("fast", "slow"):
        core.add_worker(spec(name, roles=frozenset({name})), 0.0)
    core.mark_worker_down("fast", 0.0, "killed")
    refusal = core.route(request("r", PROMPT, role="fast"), 0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.message == "No worker of model 'm' is up: 1 down, 1 up."
