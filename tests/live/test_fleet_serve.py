"""The plug-in for Ray Serve inside a real application: `pytest -m slow tests/live/test_fleet_serve.py`.

Two replicas, each with an engine beside it or, without any HTTP, in it, and a router. Conversations through Serve's own
handle: each turn goes where the one before it is cached; a router that is gone is done without.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from harness.programs import ADMIN_KEY, Program, module_command, request_json, wait_until

from engine import LLM, SamplingParams
from engine.tiny.tokenizer import cached_tokenizer

os.environ["RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S"] = "1"
"""On a busy machine Serve leaves out replicas that take 0.1 s to say how many requests they have."""
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
OPENINGS = ("why", "when", "where", "who", "what", "how")
SPEC = '{"prefill_s_per_token": 0.0002, "kv_tokens": 40000}'


class Engine:
    """A replica: starts an engine and passes bodies on to it."""

    def __init__(self, folder: str) -> None:
        self._program = Program(
            module_command("engine", "serve", "--port", "0", "--simulate", SPEC), Path(folder) / f"{os.getpid()}.log"
        )
        self.url = self._program.await_line(seconds=300)

    def record_routing_stats(self) -> dict[str, Any]:
        return {"blockcast_worker": {"url": self.url}}

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = request_json(f"{self.url}/v1/chat/completions", body)
        assert status == 200, answer
        return {"engine": self.url, **answer}

    def __del__(self) -> None:
        self._program.stop()


class Within:
    """A replica that speaks through Serve's handle alone, with an engine in it: told of as by Ray's `LLMServer`."""

    def __init__(self) -> None:
        events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        self._llm = LLM(simulate=SPEC, kv_events_config=events)

    def record_routing_stats(self) -> dict[str, Any]:
        (source,) = self._llm.info.event_sources
        ends = {"endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint or ""}
        endpoints = {key: value.replace("*", "127.0.0.1") for key, value in ends.items()}
        return {"kv_event_metadata": {**endpoints, "block_size": self._llm.info.block_size, "dp_rank": 0}}

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self._llm.chat(body["messages"], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        usage = {"prompt_tokens": len(answer.prompt_token_ids),
                 "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens}}  # fmt: skip
        choice = {"message": {"role": "assistant", "content": answer.outputs[0].text}}
        return {"engine": os.getpid(), "usage": usage, "choices": [choice]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    root = Path(__file__).resolve().parents[2]
    os.environ["RAY_AUTH_MODE"] = "disabled"
    paths = os.pathsep.join([str(root), str(root / "scripts"), str(root / "tests" / "live")])
    ray.init(address="local", num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    try:
        serve.start(proxy_location="Disabled")  # its way in is the handle
        yield
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture(scope="module", params=["over HTTP", "through handles alone"])
def application(
    request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Program, str]]:
    """(a handle, the router, the model's name)."""
    from ray.serve.config import RequestRouterConfig

    folder = tmp_path_factory.mktemp("serve")
    http = request.param == "over HTTP"
    with Program(module_command("router", "run", "--port", "0"), folder / "log") as router:
        kwargs = {"router": router.await_line(), "admin_key": ADMIN_KEY, "timeout_s": 5.0}
        if not http:
            kwargs |= {"model": "within", "tokenizer": str(cached_tokenizer())}
        deployment = serve.deployment(Engine if http else Within).options(
            num_replicas=2,
            max_ongoing_requests=64,
            request_router_config=RequestRouterConfig(
                request_router_class="fleet.serve:BlockcastRouter",
                request_router_kwargs=kwargs,
                request_routing_stats_period_s=0.5,
            ),
        )
        bound = deployment.bind(str(folder)) if http else deployment.bind()
        yield serve.run(bound, route_prefix=None), router, "" if http else "within"
        serve.delete("default")


def chat(handle: Any, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer: dict[str, Any] = handle.remote(body).result(timeout_s=120)
    return answer


def rows(router: Program) -> list[dict[str, Any]]:
    page = request_json(f"{router.await_line()}/workers")[1]
    return [row for row in page["workers"] if row["state"] == "up"]


def predicted_tokens(router: Program, messages: list[dict[str, str]]) -> int:
    """Of the worker that the router would choose."""
    status, page = request_json(f"{router.await_line()}/route", {"messages": messages})
    assert status == 200, page
    return int(page["predicted_cached_tokens"])


def test_conversations_stay_where_they_are_cached(application: tuple[Any, Program, str]) -> None:
    handle, router, model = application

    def both_have_requests() -> bool:
        chat(handle, [{"role": "user", "content": "hello"}])
        return len(rows(router)) == 2

    assert wait_until(both_have_requests, 120, 0.5), request_json(f"{router.await_line()}/workers")
    engines = set()
    for talk in range(6):
        messages, own_workers, last = [], set(), 0
        for turn in range(4):
            messages.append(
                {"role": "user", "content": f"{talk} {OPENINGS[talk]}, turn {turn}: " + "and then what? " * 60}
            )
            if model:
                time.sleep(0.3)  # the events of the last turn have come
                foreseen = predicted_tokens(router, messages)
            answer = chat(handle, messages)
            usage = answer["usage"]
            cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached_tokens >= last // 16 * 16, (talk, turn, usage)
            assert not model or foreseen == cached_tokens, (talk, turn)
            last = usage["prompt_tokens"]
            own_workers.add(answer["engine"])
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        assert len(own_workers) == 1, f"talk {talk} moved"
        engines |= own_workers
    assert len(engines) == 2, "conversations that share nothing are spread"


def test_who_asks_the_router_for_a_replica_without_http_is_refused(application: tuple[Any, Program, str]) -> None:
    _, router, model = application
    if model:
        status, page = request_json(
            f"{router.await_line()}/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
        )
        assert status == 503, page


def test_it_goes_on_without_the_router(application: tuple[Any, Program, str]) -> None:
    handle, router, _ = application
    router.stop()
    for _ in range(3):
        assert chat(handle, [{"role": "user", "content": "still there?"}])["choices"]
