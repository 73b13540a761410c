"""`router shadow`: what it predicts of switching is what switching then gives; whose turn goes on from whose."""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.shadow.observed_request import ObservedRequest, RecordedPrompt, RecordedPrompts, find_predecessors
from router.shadow.replay import ObservedEngine, compare_placements, learn_step_times, make_workload
from router.shadow.report import ShadowReport, render_page


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    before, sys.path[:] = list(sys.path), [folder, *sys.path]
    yield importlib.import_module("shadow")
    sys.path[:] = before


@pytest.mark.long
def test_what_is_predicted_of_two_policies_is_what_switching_gives(benchmark: Any, tmp_path: Path) -> None:
    arguments = ["--limit", "1500", "--calibration", str(tmp_path / "c.json")]
    rows = benchmark.simulate_workloads(benchmark.parser().parse_args(arguments))
    assert len(rows) == 18  # three workloads, two policies, tokens and seconds
    for name, row in rows.items():
        assert row["share"] > 0.05, f"{name}: there is nothing to predict"
        assert abs(row["error"]) < 0.1, (name, row)


def observe(serial: int, at: float, ids: list[int], **fields: Any) -> ObservedRequest:
    return ObservedRequest(serial, at, array("Q", ids), 16 * len(ids), fields.pop("worker", "a"), **fields)


def test_a_turn_goes_on_from_the_longest_prompt_that_it_begins_with() -> None:
    earlier_prompts = RecordedPrompts(max_prompts=2)

    def follow(
        serial: int,
        block_ids: list[int],
        full_blocks: int,
        is_prefix: Callable[[RecordedPrompt], bool] = lambda _: True,
    ) -> int | None:
        continued_serial = earlier_prompts.find_continued(block_ids, is_prefix)
        earlier_prompts.add(RecordedPrompt(serial, 0, 0), block_ids, full_blocks)
        return continued_serial

    assert follow(1, [10, 11], 2) is None
    assert follow(2, [10, 11, 12], 3) == 1
    assert follow(3, [10, 11, 12, 13], 4) == 2
    assert follow(4, [10, 11, 12, 13, 14], 5, lambda earlier: earlier.serial != 3) == 2, "not what only looks alike"
    assert follow(5, [10, 11, 99], 3) is None, "the oldest is forgotten"
    assert follow(6, [7], 0) is None, "what fills no block ends nobody's prompt"


def test_who_waited_for_an_answer_waits_for_it_as_long() -> None:
    first = observe(5, 100.0, [1, 2], end_s=103.0, output_tokens=40)
    second = observe(6, 107.0, [1, 2, 3, 4, 5], continues=5, output_tokens=10)
    early = observe(7, 102.0, [1, 2, 9], continues=5)
    requests = make_workload([first, early, second], 16, waits=True).requests
    assert [(r.previous_index, r.arrival_s) for r in requests] == [(None, 0.0), (None, 2.0), (0, 4.0)]
    assert [r.arrival_s for r in make_workload([first, early, second], 16, waits=False).requests] == [0.0, 2.0, 7.0]
    assert requests[0].final_block_ids[:4] == requests[2].block_ids[:4], (
        "what the next turn shows of the answer is in the cache"
    )
    assert len(requests[0].final_block_ids) == 4
    assert requests[1].output_tokens == 25, "an answer whose length is not known is as long as the others"


def test_the_last_token_of_an_answer_fills_no_block() -> None:
    first = observe(1, 0.0, [1, 2], end_s=1.0, output_tokens=32)
    second = observe(2, 2.0, [1, 2, 3, 4, 5], continues=1)
    requests = make_workload([first, second], 16, waits=True).requests
    assert requests[0].final_block_ids == requests[1].block_ids[:3]


def test_a_name_under_which_one_thing_comes_after_the_other_is_a_users() -> None:
    first = observe(1, 0.0, [1], end_s=1.0, user="a")
    other = observe(2, 0.5, [2], end_s=9.0, user="b")
    second = observe(3, 1.5, [3], end_s=2.0, user="a")
    assert find_predecessors([first, other, second]) == [None, None, 0]
    busy = observe(4, 1.7, [4], end_s=3.0, user="a")
    assert find_predecessors([first, other, second, busy]) == [None] * 4, "a name that several share says nothing"
    sibling = observe(5, 2.5, [1, 5], end_s=4.0, continues=7)
    parent = observe(7, 1.2, [1, 7], end_s=3.0, continues=1)
    assert find_predecessors([first, parent, sibling]) == [None, 0, 0], "beside a turn: after what that one waited for"
    untold = observe(8, 5.0, [8], user="a")
    assert find_predecessors([first, untold, observe(9, 6.0, [9], user="a")]) == [None] * 3, "an end that nobody saw"


def test_a_slow_worker_is_found_out() -> None:
    rows, at = [], 0.0
    for i in range(240):
        rate = 2e-4 if i % 2 else 1e-4
        tokens = 800 + 16 * (i % 50)
        took = 0.012 * (1 + i % 2) + rate * tokens * (1 + tokens / 2 / 50_000)
        ids = [1000 * i + k for k in range(tokens // 16)]
        request = observe(
            i, at, ids, worker="ab"[i % 2], cached_tokens=0, first_token_s=at + took, end_s=at + took, output_tokens=1
        )
        rows.append(request)
        at += took
    step_times = learn_step_times(rows, [ObservedEngine("a"), ObservedEngine("b")])
    assert step_times["b"].compute_prefill_s(2000, 0) / step_times["a"].compute_prefill_s(2000, 0) == pytest.approx(
        2.0, rel=0.15
    )


@pytest.mark.parametrize(("first_token_s", "end_s"), [(0.501, 0.5), (-1.0, 0.5), (-1.0, -2.0)])
def test_a_log_whose_times_are_out_of_order_ends_no_comparison(first_token_s: float, end_s: float) -> None:
    request = observe(1, 0.0, [1], worker="a", first_token_s=first_token_s, end_s=end_s, output_tokens=1)
    assert learn_step_times([request], [ObservedEngine("a")]).keys() == {"a"}


def test_the_names_in_the_report_stay_as_they_are() -> None:
    comparison = compare_placements([observe(0, 0.0, [1], output_tokens=1)], [ObservedEngine("a")], 16)
    assert list(msgspec.to_builtins(comparison)) == [
        "requests", "warming", "waited", "prompt_tokens", "measured", "today", "ours", "saved", "steps", "quantiles"
    ]  # fmt: skip


@pytest.mark.parametrize("has_times", [True, False])
@pytest.mark.parametrize("dealt_count", [0, 3])
def test_the_page_says_where_speeds_or_placements_are_not_the_users(has_times: bool, dealt_count: int) -> None:
    times = {"first_token_s": 0.5, "end_s": 1.0} if has_times else {}
    comparison = compare_placements([observe(0, 0.0, [1], output_tokens=1, **times)], [ObservedEngine("a")], 16)
    report = ShadowReport(
        version="1", since=0.0, until=1.0, requests={"placed": 3, "dealt": dealt_count}, comparison=comparison,
        problem=None, tokens={}, turns={}, workers=[], seen=3, lost={},
    )  # fmt: skip
    page = render_page(report).decode()
    assert ("the engines have default speeds" in page) is not has_times
    assert ("3 requests name no worker" in page) is bool(dealt_count)


@pytest.mark.parametrize("unplaced_count", [0, 60])
def test_the_page_says_why_requests_are_left_out(unplaced_count: int) -> None:
    report = ShadowReport(
        version="1", since=0.0, until=1.0, requests={"unplaced": unplaced_count}, comparison=None,
        problem=None, tokens={}, turns={}, workers=[], seen=60, lost={},
    )  # fmt: skip
    page = render_page(report).decode()
    assert ("60 requests are left out: the log gives them a worker that is not" in page) is bool(unplaced_count)


def test_nothing_is_compared_where_all_only_fill_caches() -> None:
    with pytest.raises(ValueError, match="1 requests were seen, of which 1 only fill the caches"):
        compare_placements([observe(0, 0.0, [1])], [ObservedEngine("a")], 16, warming=1)
