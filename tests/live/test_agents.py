"""The official client's tool loop against a scripted model: an engine alone, and two of them behind a router."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from programs import Program, call, two_engines_and_a_router, wait_until

pytestmark = pytest.mark.live

SPEC = {"prefill_s_per_token": 1e-5, "step_s": 0.001, "kv_tokens": 65536, "max_model_len": 8192}
SAYS = [  # what the model says to a prompt is one of these; which one is the prompt's to decide, and always the same
    '<think>I must look.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>',
    'Both at once. <tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call> '
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "<think>I know it all.</think>It is sunny.",
    "It rains <tool_call> nowhere.",
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Program], Program]]:
    folder: Path = tmp_path_factory.mktemp("agents")
    (folder / "script.txt").write_text("\n".join(SAYS))
    spec = json.dumps({**SPEC, "script": str(folder / "script.txt")})
    flags = ("engine", "serve", "--port", "0", "--served-model-name", "m", "--simulate", spec, "--log-level", "warning")
    with two_engines_and_a_router(folder, *flags, "--reasoning-parser", "qwen3") as programs:
        yield programs


def run_tool(name: str, arguments: str) -> str:
    parsed_arguments = json.loads(arguments)
    return {"get_weather": lambda: f"sunny in {parsed_arguments['city']}", "now": lambda: "noon"}[name]()


def loop(client: openai.OpenAI, question: str, *, stream: bool, turns_max: int = 6) -> list[Any]:
    """Ask, call what is to be called, tell the results, until the model calls no more; the messages."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns_max):
        if stream:
            with client.chat.completions.stream(model="m", messages=messages, tools=TOOLS, max_tokens=200) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model="m", messages=messages, tools=TOOLS, max_tokens=200).choices[
                0
            ]
        message = choice.message
        assert (choice.finish_reason == "tool_calls") == bool(message.tool_calls)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for tool_call in message.tool_calls:
            result = run_tool(tool_call.function.name, tool_call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})
    return messages


def rendered_messages(messages: list[Any]) -> list[Any]:
    """Without what is chance's, a call's id, and what only one of the two ways gives."""
    return [
        (m["role"], m.get("content") or None, m.get("reasoning"), m.get("reasoning_content"),
         [(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls", ())])
        for m in messages
    ]  # fmt: skip


def test_the_official_clients_tool_loop(agents: tuple[list[Program], Program]) -> None:
    engines, router = agents
    clients = [
        openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=60)
        for program in (engines[0], router)
    ]
    assistant_turns: set[Any] = set()
    for number in range(12):
        talks = [
            rendered_messages(loop(client, f"Question {number}?", stream=stream))
            for client in clients
            for stream in (False, True)
        ]
        assert all(talk == talks[0] for talk in talks), talks
        assistant_turns |= {
            (content, reasoning, tuple(calls)) for role, content, _, reasoning, calls in talks[0] if role == "assistant"
        }
    weather, now = ("get_weather", '{"city": "Rome"}'), ("now", "{}")
    assert {
        (None, "I must look.", (weather,)),
        ("Both at once.", None, (("get_weather", '{"city": "Bonn"}'), now)),
        ("It is sunny.", "I know it all.", ()),
        ("It rains <tool_call> nowhere.", None, ()),
    } == assistant_turns
    for client in clients:
        client.close()


def test_turns_with_calls_are_routed_to_the_token(agents: tuple[list[Program], Program]) -> None:
    """What the router predicts of each turn's hits is what the engine reports."""
    engines, router = agents

    def has_settled() -> bool:
        """The router has applied what the engines have published."""
        workers = call(f"{router.url}/workers")[2]["workers"]
        seqs = {w["worker_id"]: s["last_seq"] for w in workers for s in w["events"]["streams"]}
        for engine in engines:
            published_batches = metric(engine, "engine:kv_event_batches_total")
            seq = seqs[engine.url.removeprefix("http://")]
            if (0 if seq is None else seq + 1) != published_batches:
                return False
        return True

    turns = call_count = 0
    for number in range(6):
        messages: list[Any] = [{"role": "user", "content": f"A long question {number}? " * 12}]
        for _ in range(5):
            wait_until(has_settled, "the router has applied what was published")
            body = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": 200, "reasoning_effort": "low"}
            status, headers, answer = call(f"{router.url}/v1/chat/completions", body)
            assert status == 200, answer
            cached_tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-blockcast-predicted-cached-tokens"]) == cached_tokens
            assert cached_tokens > 0 or len(messages) == 1
            turns += 1
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            call_count += 1
            for tool_call in message["tool_calls"]:
                result = run_tool(tool_call["function"]["name"], tool_call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": tool_call["id"], "content": result})
    assert turns > call_count > 3


def stream_of(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    data = json.dumps({"model": "m", "tools": TOOLS, "stream": True, "return_token_ids": True, **body}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = answer.read().decode().split("\n\n")
    return [json.loads(event[6:]) for event in events if event.startswith("data: {")]


def join_stream(chunks: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What the events say together, however the tokens came in them: ids of calls are chance's."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if "role" not in choice["delta"]]
    calls: dict[int, list[str]] = {}
    for piece in (piece for choice in choices for piece in choice["delta"].get("tool_calls", ())):
        call_parts = calls.setdefault(piece["index"], ["", ""])
        call_parts[0] += piece["function"].get("name", "")
        call_parts[1] += piece["function"]["arguments"]
    return (
        "".join(choice["delta"].get("content", "") for choice in choices),
        "".join(choice["delta"].get("reasoning", "") for choice in choices),
        calls,
        [token for choice in choices for token in choice["token_ids"]],
        [choice["finish_reason"] for choice in choices][-1],
    )


def test_a_stream_goes_on_elsewhere_from_any_token(agents: tuple[list[Program], Program]) -> None:
    (first, second), _ = agents
    for number in range(6):
        body = {"messages": [{"role": "user", "content": f"Question {number}?"}], "max_tokens": 200}
        full_stream = stream_of(first.url, body)
        prompt, sent_ids = full_stream[0]["prompt_token_ids"], list[int]()
        for at, chunk in enumerate(full_stream):
            sent_ids += chunk["choices"][0].get("token_ids", [])
            if chunk["choices"][0]["finish_reason"] is not None or not sent_ids or at % 4:
                continue
            continuation = {"prompt_token_ids": prompt + sent_ids, "answered_tokens": len(sent_ids)}
            continued_stream = stream_of(second.url, {**body, "messages": body["messages"][-1:], **continuation})
            assert join_stream(continued_stream) == join_stream(full_stream[at + 1 :]), (number, sent_ids)


def metric(engine: Program, name: str) -> float:
    with urllib.request.urlopen(engine.url + "/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
