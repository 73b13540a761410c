"""What routers are told; the programs' command lines."""

from __future__ import annotations

import json

import pytest

from fleet.spec import (
    FleetSpec,
    SpecError,
    build_engine_command,
    parse_env,
    parse_rank_count,
    plan_router,
    plan_worker,
    split_flags,
)
from fleet.worker_list import ListedWorker, WorkerStatus, parse_workers_page, plan_admin_calls

A, B = ListedWorker({"url": "http://a:1", "id": "a:1"}), ListedWorker({"url": "http://b:1", "id": "b:1"})
UP = WorkerStatus(True, False, 0, 0.0, 0.0)


def test_a_router_is_brought_to_the_list() -> None:
    assert plan_admin_calls([A, B], {"a:1": UP, "c:1": UP}) == [
        ("DELETE", "/workers/c:1", None),
        ("POST", "/workers", {"url": "http://b:1", "id": "b:1"}),
    ]
    draining = ListedWorker(A.settings, is_draining=True)
    assert plan_admin_calls([draining], {"a:1": UP}) == [("POST", "/workers/a:1/drain", {"on": True})]
    assert plan_admin_calls([A], {"a:1": WorkerStatus(False, True, 2, 0.0, 0.0)}) == [
        ("POST", "/workers/a:1/drain", {"on": False})
    ]
    assert plan_admin_calls([draining], {}) == [], "who leaves need not come first"
    assert plan_admin_calls([A], {"a:1": UP}) == []
    assert plan_admin_calls([], {"a:1/base": UP}) == [("DELETE", "/workers/a:1%2Fbase", None)], (
        "one segment of the path"
    )


def test_rows_of_ranks_are_one_worker() -> None:
    row = {"worker_id": "a", "state": "up", "prefilling": 1, "decoding": 2, "queue_s": 0.5, "utilisation": 0.1}
    other = {**row, "decoding": 0, "queue_s": 0.25}
    starting = {"worker_id": "b", "state": "starting", "state_reason": "refused"}
    rows = parse_workers_page({"workers": [row, other, starting]})
    assert rows == {"a": WorkerStatus(True, False, 4, 0.5, 0.1), "b": WorkerStatus(False, False, 0, 0.0, 0.0)}


@pytest.mark.parametrize(
    "page", [{}, {"workers": [{}]}, {"workers": 3}, {"workers": [{"worker_id": "a", "state": "up", "queue_s": "x"}]}]
)
def test_what_is_no_list_of_workers(page: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"no list of workers|could not convert"):
        parse_workers_page(page)


def ports(count: int) -> int:
    return 40_000 + count


def test_a_worker_of_ours() -> None:
    command = build_engine_command("ours", "/m", ("--max-num-seqs", "4"))
    launch = plan_worker(FleetSpec(name="f", engine_command=command), "10.0.0.1", ports)
    assert launch.command[1:] == [
        "-m",
        "engine",
        "serve",
        "/m",
        "--max-num-seqs",
        "4",
        "--host",
        "10.0.0.1",
        "--port",
        "40001",
    ]
    assert launch.worker_settings == {"url": "http://10.0.0.1:40001", "id": "10.0.0.1:40001", "send_key": 1}


def test_a_vllm_worker_publishes_where_the_router_is_told() -> None:
    command = build_engine_command("vllm", "m", ("--data-parallel-size=2",))
    launch = plan_worker(FleetSpec(name="f", engine_command=command), "10.0.0.1", ports)
    assert launch.command[:3] == ["vllm", "serve", "m"]
    settings = json.loads(launch.command[-1])
    assert settings["enable_kv_cache_events"] is True
    assert settings["endpoint"] == "tcp://*:40002"
    assert launch.worker_settings["events"] == "tcp://10.0.0.1:40002;tcp://10.0.0.1:40003"


def test_routers_have_ports_in_a_row_and_addresses_of_their_own() -> None:
    spec = FleetSpec(name="f", engine_command=(), router_flags=("--fair",), router_port=8080)
    launch = plan_router(spec, 2, "fd00::1", ports, workers=())
    assert launch.url == "http://[fd00::1]:8082"
    assert launch.command[1:8] == ["-m", "router", "run", "--host", "fd00::1", "--port", "8082"]
    assert launch.peer_address == "tcp://[fd00::1]:40001"
    secure_spec = FleetSpec(name="f", engine_command=(), router_flags=("--tls-cert", "c", "--tls-key", "k"))
    secure = plan_router(secure_spec, 0, "h", ports, workers=())
    assert (secure.url, secure.admin_url) == ("https://h:8080", "https://127.0.0.1:40001")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: build_engine_command("ours", "m", ("--port", "1")), "--port is the fleet's"),
        (lambda: build_engine_command("vllm", "", ()), "MODEL is missing"),
        (lambda: build_engine_command("vllm", "m", ("-dp", "x")), "got 'x'"),
        (lambda: split_flags("--router-flags", "'"), "No closing quotation"),
        (lambda: split_flags("--router-flags", "--admin=x:1"), "is the fleet's"),
        (lambda: parse_env(("NOT_SET",), {}), "NOT_SET"),
        (lambda: parse_rank_count(("--data-parallel-size",)), "expected a number of ranks"),
    ],
)
def test_what_cannot_be_asked_for(wrong: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        wrong()  # type: ignore[operator]


def test_environment() -> None:
    assert parse_env(("A=1=2", "B"), {"B": "b", "C": "c"}) == {"A": "1=2", "B": "b"}
