"""What a fleet tells a router, told to a real one: the list of workers, drains, the other routers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import Program, free_port, module_command, request_json, wait_until

from fleet.worker_list import ListedWorker, parse_workers_page, plan_admin_calls

pytestmark = [pytest.mark.long, pytest.mark.live]
SPEC = '{"prefill_s_per_token": 0.0002, "kv_tokens": 40000}'


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(a router, a worker)."""
    folder = tmp_path_factory.mktemp("fleet")
    router = module_command("router", "run", "--port", "0", "--peer-bind", "tcp://127.0.0.1:*")
    with (
        Program(router, folder / "router.log") as router_program,
        Program(module_command("engine", "serve", "--port", "0", "--simulate", SPEC), folder / "engine.log") as other,
    ):
        yield router_program.await_line(), other.await_line()


def test_a_router_follows_the_list(urls: tuple[str, str]) -> None:
    router, worker = urls
    listed_workers = [
        ListedWorker({"url": worker, "id": "ours", "send_key": 1}),
        ListedWorker(
            {"url": "http://127.0.0.1:9", "id": "gone", "events": "tcp://127.0.0.1:9", "replay": "tcp://127.0.0.1:9"}
        ),
    ]

    def rows() -> dict[str, Any]:
        return {
            name: (row.is_up, row.is_draining)
            for name, row in parse_workers_page(request_json(f"{router}/workers")[1]).items()
        }

    def publish_workers(*workers: ListedWorker) -> list[int]:
        known_rows = parse_workers_page(request_json(f"{router}/workers")[1])
        return [
            request_json(f"{router}{path}", body, method)[0]
            for method, path, body in plan_admin_calls(workers, known_rows)
        ]

    assert publish_workers(*listed_workers) == [201, 201]
    assert wait_until(lambda: rows() == {"ours": (True, False), "gone": (False, False)}, 30), rows()
    assert publish_workers(*listed_workers) == [], "what is known is not said again"
    draining = ListedWorker(listed_workers[0].settings, is_draining=True)
    assert publish_workers(draining) == [200, 200], "one leaves, one drains"
    assert rows() == {"ours": (False, True)}
    assert publish_workers(listed_workers[0]) == [200]
    assert rows() == {"ours": (True, False)}
    assert publish_workers() == [200]
    assert rows() == {}


def test_a_router_is_told_of_the_others(urls: tuple[str, str]) -> None:
    router = urls[0]
    peers = ["tcp://127.0.0.1:9", "tcp://127.0.0.1:10"]
    assert request_json(f"{router}/peers", {"peers": peers}, "PUT") == (200, {"peers": sorted(peers)})
    assert request_json(f"{router}/peers", {"peers": []}, "PUT") == (200, {"peers": []})
    for wrong in ({"peers": "x"}, {"peers": ["x"]}, {}, {"peers": [], "more": 1}):
        assert request_json(f"{router}/peers", wrong, "PUT")[0] == 400, wrong


def test_a_router_knows_from_its_first_answer_on_who_was_named(tmp_path: Path) -> None:
    """A worker that takes its time to answer the first question, and one that refuses."""
    port, body = free_port(), {"messages": [{"role": "user", "content": "is anybody there?"}], "max_tokens": 1}
    with Program(
        module_command("engine", "serve", "--port", "0", "--simulate", SPEC), tmp_path / "engine.log"
    ) as engine:
        worker = engine.await_line()
        os.kill(engine.pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (engine.pid, signal.SIGCONT)).start()
        command = module_command("router", "run", worker, "http://127.0.0.1:9", "--port", str(port))
        with Program(command, tmp_path / "router.log"):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            assert wait_until(lambda: request_json(url, body)[0], 60) == 200


def test_an_engine_says_that_its_step_loop_stands_still(tmp_path: Path) -> None:
    def silent_s() -> float:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return float(answer.headers["x-core-silent-seconds"])

    slow = '{"prefill_s_per_token": 0.0002, "step_s": 0.7, "kv_tokens": 40000}'
    with Program(
        module_command("engine", "serve", "--port", "0", "--simulate", slow), tmp_path / "engine.log"
    ) as engine:
        url = engine.await_line()
        (core,) = map(int, Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split())
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        thread = threading.Thread(target=request_json, args=(f"{url}/v1/chat/completions", body))
        thread.start()
        statuses = []
        while thread.is_alive():
            statuses.append(silent_s())
            time.sleep(0.1)
        assert 0.3 < max(statuses) < 3, "a step is waited for, and no longer"
        os.kill(core, signal.SIGSTOP)
        assert wait_until(lambda: silent_s() > 3, 30)
        os.kill(core, signal.SIGCONT)
        assert wait_until(lambda: silent_s() == 0, 30)
