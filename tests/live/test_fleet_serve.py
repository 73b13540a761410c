"""The plug-in for Ray Serve inside a real application: `pytest -m slow tests/live/test_fleet_serve.py`.

Two replicas, each with an engine beside it, and a router. Conversations through Serve's own handle: each turn goes
where the one before it is cached; a router that is gone is done without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import ADMIN_KEY, Program, await_true, call, ours

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
SPEC = '{"prefill_s_per_token": 0.0002, "kv_tokens": 40000}'


class Engine:
    """A replica: starts an engine and passes bodies on to it."""

    def __init__(self, folder: str) -> None:
        self._program = Program(
            ours("engine", "serve", "--port", "0", "--simulate", SPEC), Path(folder) / f"{os.getpid()}.log"
        )
        self.url = self._program.await_line(seconds=300)

    def record_routing_stats(self) -> dict[str, Any]:
        return {"blockcast_worker": {"url": self.url}}

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = call(f"{self.url}/v1/chat/completions", body)
        assert status == 200, answer
        return {"engine": self.url, **answer}

    def __del__(self) -> None:
        self._program.stop()


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with Program(ours("router", "run", "--port", "0"), tmp_path_factory.mktemp("router") / "log") as program:
        program.await_line()
        yield program


@pytest.fixture(scope="module")
def handle(router: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray.serve.config import RequestRouterConfig

    root = Path(__file__).resolve().parents[2]
    os.environ["RAY_AUTH_MODE"] = "disabled"
    paths = os.pathsep.join([str(root), str(root / "scripts")])
    ray.init(address="local", num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        kwargs = {"router": router.await_line(), "admin_key": ADMIN_KEY, "timeout_s": 5.0}
        deployment = serve.deployment(Engine).options(
            num_replicas=2,
            max_ongoing_requests=64,
            request_router_config=RequestRouterConfig(
                request_router_class="fleet.serve:BlockcastRouter",
                request_router_kwargs=kwargs,
                request_routing_stats_period_s=0.5,
            ),
        )
        serve.start(proxy_location="Disabled")  # its way in is the handle
        yield serve.run(deployment.bind(str(tmp_path_factory.mktemp("engines"))), route_prefix=None)
        serve.shutdown()
    finally:
        ray.shutdown()


def chat(handle: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer: dict[str, Any] = handle.remote(body).result(timeout_s=120)
    return answer


def rows(router: Program) -> list[dict[str, Any]]:
    page = call(f"{router.await_line()}/workers")[1]
    return [row for row in page["workers"] if row["state"] == "up"]


def test_conversations_stay_where_they_are_cached(handle: Any, router: Program) -> None:
    def both() -> bool:
        chat(handle, [{"role": "user", "content": "hello"}])
        return len(rows(router)) == 2

    assert await_true(both, 120, 0.5), call(f"{router.await_line()}/workers")
    engines = set()
    for talk in range(6):
        messages, own, last = [], set(), 0
        for turn in range(4):
            messages.append({"role": "user", "content": f"talk {talk} turn {turn}: " + "and then what? " * 60})
            answer = chat(handle, messages)
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= last // 16 * 16, (talk, turn, usage)
            last = usage["prompt_tokens"]
            own.add(answer["engine"])
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert len(own) == 1, f"talk {talk} moved"
        engines |= own
    assert len(engines) == 2, "all went to one engine"


def test_it_goes_on_without_the_router(handle: Any, router: Program) -> None:
    router.stop()
    for _ in range(3):
        assert chat(handle, [{"role": "user", "content": "still there?"}])["choices"]
