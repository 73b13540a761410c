"""`engine serve --simulate` as its users see it: real requests, prefix hits and events, and no tensor library."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from programs import call, wait_until

from events import BlockStored, Message, StreamSource, Subscriber, discover
from router.fleet.worker_responses import read_engine_sizes

pytestmark = pytest.mark.live

SPEC = {"prefill_s_per_token": 2e-5, "step_s": 0.004, "kv_tokens": 16384, "max_model_len": 8192, "answer_tokens": 12}
TEXT = "A cache keeps what was computed, so that nobody computes it again. " * 40


def complete_text(url: str, text: str, **extra_fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **extra_fields}
    status, _, answer = call(f"{url}/v1/chat/completions", body)
    assert status == 200, answer
    response: dict[str, Any] = answer
    return response


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever imports one of these, in any process that is started, fails."""
    for name in ("torch", "numpy", "safetensors", "transformers"):
        (tmp_path / "blocked").mkdir(exist_ok=True)
        (tmp_path / "blocked" / f"{name}.py").write_text(f"raise ImportError('{name} is not to be imported')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'blocked'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_an_endpoint_alone_starts_no_events_and_the_start_says_why(start_engine: Any) -> None:
    engine = start_engine("--simulate", json.dumps(SPEC), "--kv-events-config", '{"endpoint": "tcp://127.0.0.1:0"}')
    assert discover(engine.url) == []
    assert "events    off (--kv-events-config without enable_kv_cache_events: true)" in engine.log()


@pytest.mark.parametrize(("script", "process_count"), [({}, 1), ({"script": "tools"}, 2)])
def test_a_scripted_engine_starts_the_check_of_grammars_before_it_is_ready(
    start_engine: Any, script: dict[str, Any], process_count: int
) -> None:
    engine = start_engine("--simulate", json.dumps(SPEC | script))
    children = [path.read_text().split() for path in Path(f"/proc/{engine.process.pid}/task").glob("*/children")]
    assert sum(map(len, children)) == process_count


def test_requests_hits_and_events_without_torch(start_engine: Any, no_torch: None) -> None:
    engine = start_engine("--simulate", json.dumps(SPEC))
    sources = [StreamSource("w", s.endpoint, s.replay_endpoint) for s in discover(engine.url)]
    stored_hashes: set[Any] = set()
    with Subscriber(sources) as subscriber:
        first = complete_text(engine.url, TEXT)
        for item in subscriber:
            if isinstance(item, Message):
                for event in item.decoded_batch.batch.events:
                    if isinstance(event, BlockStored):
                        stored_hashes.update(event.block_hashes)
            if len(stored_hashes) >= first["usage"]["prompt_tokens"] // 16:
                break
    second_answer = complete_text(engine.url, TEXT)
    assert first["usage"]["completion_tokens"] == second_answer["usage"]["completion_tokens"] == 12
    assert first["choices"][0]["finish_reason"] == "stop"
    assert second_answer["choices"][0]["message"] == first["choices"][0]["message"]
    blocks = (first["usage"]["prompt_tokens"] - 1) // 16
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second_answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * blocks
    body = {"model": "simulated", "prompt": TEXT, "max_tokens": 5, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        *_, last, done_event = answer.read().split(b"\n\n")[:-1]
    assert json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"] == 5
    assert done_event == b"data: [DONE]"
    for pid in (engine.process.pid, engine.core_pid()):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        assert "numpy" not in Path(f"/proc/{pid}/maps").read_text()


def test_lateness_is_told_and_time_is_scaled(start_engine: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.txt"
    script.write_text("The answer is a line of the script.\n")
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({**SPEC, "step_s": 2.0, "script": str(script)}))
    engine = start_engine("--simulate", str(spec), "--time-scale", "0.01")
    begin_s = time.monotonic()
    answer = complete_text(engine.url, "Hello")
    assert answer["choices"][0]["message"]["content"] == "The answer is a line of the script."
    tokens = answer["usage"]["completion_tokens"]
    assert time.monotonic() - begin_s >= 0.02 * tokens  # never sooner; how late is for the metric to say

    def page() -> dict[str, float]:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in re.findall(r"^engine:simulated_(\w+) (\S+)$", text, re.M)}

    wait_until(lambda: page().get("steps_total", 0) >= tokens, page)
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as response:
        assert read_engine_sizes(response.read().decode()).is_shortest_first
    assert page()["step_seconds_total"] == pytest.approx(0.02 * tokens, rel=0.1)
    assert page()["lag_seconds_total"] >= page()["lag_seconds_max"] > 0
    engine.close()
    log = engine.log()
    assert re.search(rf"simulated steps in all: {tokens} of 20\.\d+ ms in the mean, late by \d+\.\d+ ms", log), log


def test_dry_run_shows_what_would_be_simulated(start_engine: Any) -> None:
    engine = start_engine("--simulate", "h100:llama-3.1-8b", "--dry-run", wait=False)
    wait_until(lambda: engine.process.poll() is not None, engine.log)
    assert json.loads(engine.log())["kv_tokens"] > 100_000


def test_an_agent_is_tried_by_a_script(start_engine: Any) -> None:
    """A call, its result, an answer: in each API's own words."""
    script = [{"call": "weather", "arguments": {"city": "Oslo"}}, {"text": "It is cold. " * 50}]
    engine = start_engine("--simulate", json.dumps({**SPEC, "script": script}))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    asks = {"role": "user", "content": "Oslo?"}

    chat: dict[str, Any] = {
        "messages": [asks],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
    }
    _, _, answer = call(f"{engine.url}/v1/chat/completions", chat)
    (choice,) = answer["choices"]
    (tool_call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (tool_call["function"]["name"], json.loads(tool_call["function"]["arguments"])) == (
        "weather",
        {"city": "Oslo"},
    )
    chat["messages"] += [choice["message"], {"role": "tool", "tool_call_id": tool_call["id"], "content": "-7"}]
    _, _, answer = call(f"{engine.url}/v1/chat/completions", chat)
    assert answer["choices"][0]["message"]["content"] == "It is cold. " * 50
    assert answer["choices"][0]["finish_reason"] == "stop"

    messages: dict[str, Any] = {
        "model": "simulated", "max_tokens": 500, "messages": [asks],
        "tools": [{"name": "weather", "input_schema": schema}],
    }  # fmt: skip
    _, _, answer = call(f"{engine.url}/v1/messages", messages)
    (tool_use,) = answer["content"]
    assert (answer["stop_reason"], tool_use["name"], tool_use["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": tool_use["id"], "content": "-7"}
    note = {"type": "text", "text": "A client's note."}
    messages["messages"] += [{"role": "assistant", "content": [tool_use]}, {"role": "user", "content": [result, note]}]
    _, _, answer = call(f"{engine.url}/v1/messages", messages)
    assert answer["content"][0]["text"].startswith("It is cold. ")

    tools = [{"type": "function", "name": "weather", "parameters": schema}]
    _, _, answer = call(f"{engine.url}/v1/responses", {"input": "Oslo?", "tools": tools})
    (item,) = answer["output"]
    assert (item["type"], json.loads(item["arguments"])) == ("function_call", {"city": "Oslo"})
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "-7"}
    _, _, answer = call(
        f"{engine.url}/v1/responses", {"input": [output], "tools": tools, "previous_response_id": answer["id"]}
    )
    assert answer["output"][0]["content"][0]["text"] == "It is cold. " * 50
