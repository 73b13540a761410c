"""`router top`: what its rows say, against answers of a real route."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from router.app.cli import cli
from router.commands.top import COLUMNS, WorkerRow, format_summary, format_transfers, make_table_rows

GET = b"GET /workers HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"


def told(*workers: dict[str, Any], routed: int = 0) -> dict[str, Any]:
    rest: dict[str, Any] = {"in_flight": 3, "queued": 1, "counters": {"routed": routed}}
    return {"workers": list(workers), **rest}


def worker(name: str, **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"worker_id": name, "target": name, "state": "up", "state_reason": "", "routed_requests": 0}
    row |= {"prefilling": 1, "decoding": 2, "queue_s": 0.5, "predicted_cached_tokens": 0, "reported_cached_tokens": 0}
    return {**row, "alarms": [], **values}


def test_rates_are_differences_and_nothing_measured_is_a_dash() -> None:
    before = told(worker("a", routed_requests=10), routed=10)
    now = told(worker("a", routed_requests=30, predicted_cached_tokens=4096), worker("b", routed_requests=7), routed=37)
    first, second = make_table_rows(now, before, 2.0)
    assert dict(zip(COLUMNS, first.cells))["req/s"] == "10.0"
    assert dict(zip(COLUMNS, first.cells))["predicted"] == "4,096"
    assert dict(zip(COLUMNS, first.cells))["reported"] == "-"
    assert dict(zip(COLUMNS, second.cells))["req/s"] == "-", "it was not there before"
    summary = "Healthy: 2 up; 13.5 requests/s, 3 in flight, 1 queued; 2,048 cached tokens/s"
    assert format_summary(now, before, 2.0) == summary
    assert format_summary(now, None, 0.0).endswith("- cached tokens/s")


def test_kv_that_moves_has_a_line_where_some_can_move() -> None:
    assert format_transfers(told(worker("a")), None, 0.0) == ""
    group = {"group": "g", "dialect": "nixl", "sources": ["a"], "destinations": [], "problem": "no worker takes KV"}
    before = told(worker("a")) | {"kv_groups": [], "kv_transfers": {"pull": {"started": 4}}}
    now = told(worker("a")) | {
        "kv_groups": [group],
        "kv_transfers": {"pull": {"started": 7}, "prefill": {"started": 1}},
    }
    now["counters"]["failed_transfers"] = 2
    expected = "KV that moves: 1.5 pulls/s, 0.5 prefills/s, 2 failed, none in nixl: no worker takes KV"
    assert format_transfers(now, before, 2.0) == expected
    assert format_transfers(now, None, 0.0).startswith("KV that moves: - pulls/s, - prefills/s, 2 failed")


def test_saved_tokens_are_the_reported_ones_where_some_are_reported() -> None:
    before = told(worker("a", predicted_cached_tokens=50, reported_cached_tokens=40), worker("b"))
    now = told(worker("a", predicted_cached_tokens=90, reported_cached_tokens=60), worker("b"))
    assert format_summary(now, before, 2.0).endswith("; 10 cached tokens/s")


def test_the_busiest_come_first_where_that_is_asked_for() -> None:
    now = told(
        worker("a", queue_s=0.1, routed_requests=9), worker("b", queue_s=2.0), {"worker_id": "c", "state": "starting"}
    )
    assert [row.cells[0] for row in make_table_rows(now, None, 0.0, "load")] == ["b", "a", "c"]
    assert make_table_rows(now, told(worker("a"), worker("b")), 1.0, "requests")[0].cells[0] == "a"


def test_workers_in_trouble_come_first() -> None:
    now = told(worker("a"), worker("b", alarms=["predictions drift"]), worker("c", state="down"))
    assert [(row.cells[0], row.problem) for row in make_table_rows(now, None, 0.0)] == [
        ("b", "predictions drift"),
        ("c", ""),
        ("a", ""),
    ]
    assert format_summary(now, None, 0.0).startswith("2 in trouble: 2 up, 1 down;")


def test_it_reads_what_the_route_says(edge: Any) -> None:
    answers: list[dict[str, Any]] = []

    async def scenario() -> None:
        await edge.start()
        await edge.worker(edge.reply())
        edge.fleet.waiting["never"] = "refused"
        answers.append(json.loads((await edge.exchange(GET)).partition(b"\r\n\r\n")[2]))

    edge.run(scenario())
    up, never = sorted(make_table_rows(answers[0], None, 0.0), key=lambda row: row.cells[1], reverse=True)
    assert up.cells[:2] == ["w0", "up"]
    assert never == WorkerRow(["never", "starting", *["-"] * 6], "refused")
    assert format_summary(answers[0], None, 0.0).startswith("1 in trouble: 1 up, 1 starting; - requests/s")


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 5}, {"workers": None}, {"workers": [1]}, {"workers": [{}]}, {"counters": None}, {"queued": None},
        {"kv_groups": [{}]}, {"kv_transfers": {"pull": {}}}, {"workers": [worker("a", queue_s="x")]},
        {"workers": [worker("a", alarms=None)]}, {"workers": [worker("a", routed_requests="7")]},
    ],
)  # fmt: skip
def test_another_program_s_page_is_one_line(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page = told(worker("a")) | fields
    if fields == {"queued": None}:
        del page["queued"]

    async def answer(*_: Any) -> tuple[int, bytes]:
        return 200, json.dumps(page).encode()

    monkeypatch.setattr("router.commands.top._fetch", answer)
    done = CliRunner().invoke(cli, ["top", "--once"])
    assert done.output == (
        "Error: http://127.0.0.1:8080/workers is not a router's (200): give the URL of a `router run`\n"
    )


def test_a_router_that_restarted_has_no_negative_rates() -> None:
    before, now = told(worker("a", routed_requests=10), routed=10), told(worker("a", routed_requests=2), routed=2)
    assert make_table_rows(now, before, 2.0)[0].cells[2] == "0.0"
    assert "; 0.0 requests/s" in format_summary(now, before, 2.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no-url"])
def test_nobody_there_is_one_line(url: str) -> None:
    done = CliRunner().invoke(cli, ["top", url, "--once"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert len(done.output.splitlines()) == 1
