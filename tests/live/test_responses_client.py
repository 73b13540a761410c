"""`engine serve`, and `router run` in front of two of them, as the official `openai` client sees Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from programs import Program, call, wait_until

pytestmark = pytest.mark.live

RULES = "You are a helpful assistant that reads files. " * 12
TOOLS: Any = [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"path": {}}}}]
ITEMS: Any = [
    {"role": "user", "content": "What is in a.txt?"},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a.txt"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "A poem."},
]


@pytest.fixture(scope="module")
def router(engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("router") / "router.log"
    program = Program(log, "router", "run", *(engine.url for engine in engines), "--port", "0")
    try:
        program.await_ready()

        def ready() -> bool:
            workers = call(f"{program.url}/workers")[2]["workers"]
            return len(workers) == 2 and all(worker.get("tokenizer") == {"m": "loaded"} for worker in workers)

        wait_until(ready, "tokenizers")
        wait_until(lambda: call(f"{program.url}/readyz")[0] == 200, "the caches' view")
        yield program
    finally:
        program.close()


@pytest.fixture(scope="module", params=["engine", "router"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    url = (
        request.getfixturevalue("router").url
        if request.param == "router"
        else request.getfixturevalue("engines")[0].url
    )
    with openai.OpenAI(base_url=url + "/v1", api_key="EMPTY", max_retries=0, timeout=60) as client:
        yield client


def create_response(client: openai.OpenAI, input_items: Any = ITEMS, **extra_fields: Any) -> Any:
    fields = {"instructions": RULES, "tools": TOOLS, "max_output_tokens": 12, "temperature": 0, **extra_fields}
    return client.responses.create(model="m", input=input_items, **fields)


def test_a_response(client: openai.OpenAI) -> None:
    answer = create_response(client)
    assert answer.object == "response"
    assert answer.status in ("completed", "incomplete")
    assert (answer.status == "incomplete") == (answer.incomplete_details is not None)
    assert answer.output[0].type in ("message", "reasoning", "function_call")
    assert answer.instructions == RULES
    assert answer.tools[0].name == "read"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    second_response = create_response(client)
    assert second_response.usage.input_tokens_details.cached_tokens > 0.8 * second_response.usage.input_tokens


def test_a_stream_has_its_events_in_their_order(client: openai.OpenAI) -> None:
    events = list(create_response(client, max_output_tokens=30, stream=True))
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-2:] == ["response.output_item.done", f"response.{events[-1].response.status}"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == last.output_text
    assert 0 < last.usage.output_tokens <= 30
    with client.responses.stream(model="m", input="Hello", max_output_tokens=5) as stream:
        last_event = list(stream)[-1]
    assert (last_event.type, last_event.response.status) == ("response.incomplete", "incomplete")
    assert last_event.response.usage.output_tokens == 5


def test_logprobs(client: openai.OpenAI) -> None:
    answer = create_response(
        client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=8, temperature=0.0
    )
    text_part = answer.output[0].content[0]
    text_bytes = b"".join(bytes(entry.bytes) for entry in text_part.logprobs)
    assert text_bytes.decode("utf-8", "replace") == text_part.text
    assert all(len(entry.top_logprobs) == 2 for entry in text_part.logprobs)
    assert create_response(client, top_logprobs=2).output[0].content[0].logprobs is None


def test_a_stored_response_goes_on_where_it_is_held(client: openai.OpenAI) -> None:
    texts = [f"Tell me of {thing}." for thing in ("rivers", "stones", "birds", "rain")]
    firsts = [create_response(client, f"{text} {RULES}") for text in texts]
    for first in firsts:
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = create_response(client, "And then?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 - 16
    with pytest.raises(openai.BadRequestError, match="stream: a stored response is not streamed"):
        client.responses.retrieve(firsts[0].id, stream=True)
    named_items = [{"role": "user", "content": texts[1]}, {"type": "item_reference", "id": firsts[1].output[0].id}]
    third = create_response(client, [*named_items, {"role": "user", "content": "And then?"}])
    assert (
        third.usage.input_tokens
        > create_response(client, [named_items[0], {"role": "user", "content": "And then?"}]).usage.input_tokens
    )
    with pytest.raises(openai.NotFoundError, match=r"input\[0\]\.id: no item"):
        create_response(client, [{"type": "item_reference", "id": "msg_unknown"}])
    client.responses.delete(firsts[0].id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.retrieve(firsts[0].id)
    with pytest.raises(openai.NotFoundError, match="no response"):
        create_response(client, "?", previous_response_id=firsts[0].id)
    unstored_response = create_response(client, store=False)
    with pytest.raises(openai.NotFoundError, match="store: false"):
        client.responses.retrieve(unstored_response.id)


def test_a_tool_of_the_input_is_called(client: openai.OpenAI) -> None:
    namespace = {"type": "namespace", "name": "fs", "description": "", "tools": TOOLS}
    items = [{"type": "additional_tools", "role": "developer", "tools": [namespace]}, *ITEMS]
    answer = create_response(client, items, tools=[], tool_choice="required", max_output_tokens=60)
    (call_item,) = [item for item in answer.output if item.type == "function_call"]
    assert (call_item.name, call_item.namespace, answer.tools) == ("read", "fs", [])


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    for fields, param in (
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, None),
    ):
        with pytest.raises(openai.APIStatusError) as error_info:
            create_response(client, **fields)  # type: ignore[arg-type]
        assert error_info.value.status_code in (400, 404)
        assert param is None or error_info.value.param == param


def test_the_router_predicts_what_the_engine_reports(router: Program) -> None:
    items: list[Any] = [{"role": "user", "content": "First " + RULES}]
    with openai.OpenAI(base_url=router.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        for turn in range(4):
            raw = client.responses.with_raw_response.create(
                model="m", input=items, tools=TOOLS, max_output_tokens=6, instructions=RULES
            )
            answer = raw.parse()
            assert answer.usage is not None
            cached_tokens = answer.usage.input_tokens_details.cached_tokens
            assert int(raw.headers["x-blockcast-predicted-cached-tokens"]) == cached_tokens
            assert turn == 0 or cached_tokens > 0
            assistant_message = {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well."}],
            }
            items += [assistant_message, {"role": "user", "content": "And then?"}]
            wait_until(lambda: idle(router), "it ended")
    _, _, explanation = call(f"{router.url}/route?path=%2Fv1%2Fresponses", {"model": "m", "input": items})
    assert explanation["tokenized"] is True


def idle(router: Program) -> bool:
    """Every answer was read to its end, and its events are in."""
    workers = call(f"{router.url}/workers")[2]["workers"]
    is_idle = all(worker["prefilling"] == worker["decoding"] == 0 for worker in workers)
    batches = [sum(stream["batches"] for stream in worker["events"]["streams"]) for worker in workers]
    time.sleep(0.1)
    later_workers = call(f"{router.url}/workers")[2]["workers"]
    return is_idle and batches == [
        sum(stream["batches"] for stream in worker["events"]["streams"]) for worker in later_workers
    ]
